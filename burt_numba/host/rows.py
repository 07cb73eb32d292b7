"""The leading axes of strided arrays as rows that a kernel can walk with two divisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from burt_numba.host.launching import Number

MOST_ROWS = 1 << 27
"""Rows of one launch: twice as many numbers are divided exactly, and blocks of clusters of 8 stay within 31 bits."""


class Divisor(NamedTuple):
    """A divisor as device code takes it: ``number // divisor == (number * magic) >> shift`` for numbers below 2**28.

    magic = floor(2**shift / divisor) + 1 errs by less than 2**shift / 2**28 in ``number * magic``, and fits 30 bits
    (Granlund and Montgomery, "Division by invariant integers using multiplication", 1994).
    """

    divisor: int
    magic: int
    shift: int

    @classmethod
    def of(cls, divisor: int) -> Divisor:
        shift = 28 + (divisor - 1).bit_length()
        return cls(divisor, (1 << shift) // divisor + 1, shift)

    def numbers(self) -> tuple[Number, Number, Number]:
        """The three arguments of a launch."""
        return Number(self.divisor, "i4"), Number(self.magic, "i4"), Number(self.shift, "i4")


class RowSegment(NamedTuple):
    """Rows of one launch, as an array [rows / (size1 * size2), size1, size2]."""

    first_row: int
    rows: int
    size1: int
    size2: int
    strides: tuple[tuple[int, int, int], ...]
    """For each operand, of the three axes, in elements."""
    origins: tuple[int, ...]
    """For each operand, the offset of the segment's first row, in elements."""

    def sizes(self) -> tuple[Number, ...]:
        """The arguments from which device code finds a row's place."""
        return (*Divisor.of(self.size1).numbers(), *Divisor.of(self.size2).numbers())


def row_segments(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> Iterator[RowSegment]:
    """Split the rows of axes of this ``shape`` (with the strides of each operand) into launches.

    Axes that all operands walk with one stride become one; almost always a single segment is left.
    """
    axes: list[tuple[int, tuple[int, ...]]] = []
    for axis, size in enumerate(shape):
        steps = tuple(s[axis] for s in strides)
        if size == 1:
            continue
        if axes and all(outer == inner * size for outer, inner in zip(axes[-1][1], steps, strict=True)):
            axes[-1] = (axes[-1][0] * size, steps)
        else:
            axes.append((size, steps))
    yield from _segments(axes, 0, (0,) * len(strides))


def _segments(axes: list[tuple[int, tuple[int, ...]]], first: int, origins: tuple[int, ...]) -> Iterator[RowSegment]:
    none = (0,) * len(origins)
    if not axes:
        axes = [(1, none)]
    inner_rows = 1
    for size, _ in axes[1:]:
        inner_rows *= size
    size, steps = axes[0]
    if len(axes) > 3 or inner_rows > MOST_ROWS:
        for index in range(size):
            moved = tuple(o + index * s for o, s in zip(origins, steps, strict=True))
            yield from _segments(axes[1:], first + index * inner_rows, moved)
        return
    padded = [(1, none)] * (3 - len(axes)) + axes
    if len(axes) == 1:
        padded = [axes[0], (1, none), (1, none)]
    elif len(axes) == 2:
        padded = [axes[0], (1, none), axes[1]]
    (_, steps0), (size1, steps1), (size2, steps2) = padded
    most = max(MOST_ROWS // inner_rows, 1)
    for start in range(0, size, most):
        count = min(most, size - start)
        yield RowSegment(
            first + start * inner_rows,
            count * inner_rows,
            size1,
            size2,
            tuple(zip(steps0, steps1, steps2, strict=True)),
            tuple(o + start * s for o, s in zip(origins, steps, strict=True)),
        )
