"""Launches that merge states of attention: those of a row in one, or of many in parts first.

Up to PART states of a row are merged at once. Of more, a state for each part is left in the workspace, and a further
launch merges these: the order depends on the number of states alone, never on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from burt_numba.flash_launches import DEAD_MAX, PART, MergeShape, is_staged, merge_elements, merge_kernel_spec
from burt_numba.host.compiling import KernelSpec
from burt_numba.host.launching import Array, Errors, Launch, Number, bare
from burt_numba.host.rows import row_segments


class Beside(NamedTuple):
    """What a merging kernel reads beside the states: of partials lengths of sequences, of results logarithms of sums.

    Partials without lengths all count.
    """

    argument: Array
    origin: int
    strides: tuple[int, ...]
    """From a row to the next, one for each axis of rows."""
    step: int
    """From a state to the next; words of a length."""


class States(NamedTuple):
    """An operand as states: where they lie, in elements."""

    argument: Array
    origin: int
    strides: tuple[int, ...]
    """From a row to the next, one for each axis of rows."""
    state_stride: int
    column_stride: int
    beside: Beside
    count: int
    """Of a row."""
    are_results: bool
    dead_max: float = DEAD_MAX
    """States whose maximum is not above this do not count."""

    def vector(self, dims: int) -> int:
        """Elements of an access, where all rows allow that; else 1. Of results: 8 bytes; of partials: 16 or 8.

        A row of partials is read as a whole.
        """
        strides = (self.origin, *self.strides)
        if not self.are_results:
            is_dense = self.column_stride == 1 and (self.count <= 1 or self.state_stride == dims + 2)
            if not is_dense or not are_whole(dims, self.count):
                return 1
            places = (*strides, self.count * (dims + 2), self.argument.offset // 4)
            return next((each for each in (4, 2) if not any(place % each for place in places)), 1)
        vector = 4 if self.argument.dtype == "f2" else 2
        strides = (*strides, self.state_stride, dims)
        return vector if self.column_stride == 1 and not any(each % vector for each in strides) else 1


def are_whole(dims: int, count: int) -> bool:
    """Whether rows of ``count`` partials that lie one after another are copied as wholes: all begin at 8 bytes."""
    return count > 0 and dims % 2 == 0


class Merge(NamedTuple):
    """What is merged: the shape of the rows, D, heads of a sample, chunks of a sequence, keys of a chunk."""

    shape: tuple[int, ...]
    dims: int
    heads: int = 1
    chunks: int = 1
    chunk_size: int = 1
    reports_lengths: bool = True

    @property
    def rows(self) -> int:
        rows = 1
        for size in self.shape:
            rows *= size
        return rows


def part_counts(states: int) -> list[int]:
    """Parts of a row that each launch leaves, from the first on; of the last, 1."""
    counts = [max(-(-states // PART), 1)]
    while counts[-1] > 1:
        counts.append(-(-counts[-1] // PART))
    return counts


def merge_workspace(merge: Merge, states: int) -> int:
    """Bytes for the states that all launches but the last leave."""
    return 4 * merge.rows * sum(part_counts(states)[:-1]) * (merge.dims + 2)


def merge_launches(
    merge: Merge,
    states: States,
    aligned: bool,
    output: Array,
    lse: Array,
    work: int,
    work_offset: int = 0,
    follows: bool = False,
) -> Iterator[Launch]:
    """``work``: the operand that is the workspace; ``follows``: states are what the launch before leaves."""
    row_cells = merge.dims + 2
    chunks_a_state = 1
    for parts in part_counts(states.count):
        left = Array(None, "f4")
        if parts > 1:
            left = Array(work, "f4", (merge.rows * parts * row_cells,), offset=work_offset)
        yield from _level(merge, states, aligned, (output, lse, left), chunks_a_state, parts, follows)
        beside = states.beside
        if states.are_results:
            beside = Beside(Array(None, "i4"), 0, (0,) * len(merge.shape), 1)
        states = States(
            left, 0, _row_strides(merge, parts * row_cells), row_cells, 1, beside, parts, False, states.dead_max
        )
        work_offset += 4 * merge.rows * parts * row_cells
        chunks_a_state *= PART
        aligned, follows = True, True


def _level(
    merge: Merge,
    states: States,
    aligned: bool,
    outputs: tuple[Array, Array, Array],
    chunks_a_state: int,
    parts: int,
    follows: bool,
) -> Iterator[Launch]:
    vector = states.vector(merge.dims) if aligned else 1
    kernel = merge_kernel_spec(vector, merge_elements(merge.dims), states.are_results)
    shape = MergeShape.of(merge.rows, states.count, parts, merge.dims, is_staged(vector, states.are_results))
    beside = states.beside
    for segment in row_segments(merge.shape, (states.strides, beside.strides)):
        blocks = -(-segment.rows // shape.rows) * parts
        arguments = (
            states.argument,
            Number(states.origin + segment.origins[0], "i8"),
            *(Number(stride, "i8") for stride in segment.strides[0]),
            Number(states.state_stride, "i8"),
            Number(states.column_stride, "i8"),
            beside.argument,
            Number(beside.origin + segment.origins[1], "i8"),
            *(Number(stride, "i8") for stride in segment.strides[1]),
            Number(beside.step, "i8"),
            *outputs,
            Number(segment.first_row, "i8"),
            Number(segment.rows, "i4"),
            Number(merge.rows, "i8"),
            *segment.sizes(),
            Number(merge.heads, "i4"),
            Number(states.count, "i4"),
            Number(chunks_a_state, "i4"),
            Number(merge.chunks, "i4"),
            Number(merge.chunk_size, "i8"),
            Number(merge.reports_lengths and chunks_a_state == 1, "i4"),
            Number(merge.dims, "i4"),
            Number(states.dead_max, "f4"),
            Number(shape.row_warps.bit_length() - 1, "i4"),
            Number(shape.slots, "i4"),
            Number(parts, "i4"),
            Errors(),
        )
        yield Launch(kernel, (blocks, 1), 32 * shape.warps, bare(arguments), shape.shared_bytes, follows=follows)


def merge_types(source: str, output: str, are_results: bool) -> tuple[str, ...]:
    """Argument types of the kernel."""
    place = ("i8",) * 6
    beside = ("f4*" if are_results else "i4*", *("i8",) * 5)
    sizes = ("i8", "i4", "i8", *("i4",) * 6, *("i4",) * 4, "i8", "i4", "i4", "f4", *("i4",) * 3)
    return (f"{source}*", *place, *beside, f"{output}*", "f4*", "f4*", *sizes, "i8:1C")


def merge_specialisations() -> Iterator[tuple[KernelSpec, tuple[str, ...]]]:
    """Every kernel that merging can launch, with its argument types."""
    for elements in (4, 8):
        for vector in (4, 2, 1):
            for output in ("f4", "f2"):
                yield merge_kernel_spec(vector, elements, False), merge_types("f4", output, False)
        for source, widest in (("f4", 2), ("f2", 4)):
            for vector in (widest, 1):
                yield merge_kernel_spec(vector, elements, True), merge_types(source, source, True)


def launch_sizes(merge: Merge, states: int, are_results: bool) -> Iterator[tuple[int, int, int]]:
    """(blocks, threads, shared bytes) of each launch, for rows that lie one after another."""
    beside = (1, *(0 for _ in merge.shape[1:]))
    for parts in part_counts(states):
        shape = MergeShape.of(merge.rows, states, parts, merge.dims, not are_results and are_whole(merge.dims, states))
        for segment in row_segments(merge.shape, (_row_strides(merge, 1), beside)):
            yield -(-segment.rows // shape.rows) * parts, 32 * shape.warps, shape.shared_bytes
        states, are_results = parts, False


def _row_strides(merge: Merge, row_cells: int) -> tuple[int, ...]:
    """Of rows that lie one after another."""
    strides = []
    for size in reversed(merge.shape):
        strides.append(row_cells)
        row_cells *= size
    return tuple(reversed(strides))


def lse_argument(operand: int, given: Any, rows: int) -> Array:
    """Where logarithms of sums go."""
    return Array(operand, "f4", (rows,)) if given is not None else Array(None, "f4")
