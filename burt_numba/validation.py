"""The second pass behind ``validate_output=True``: is a result finite, and a distribution within its entropy bound?"""

from __future__ import annotations

from collections.abc import Iterator

from burt_numba.host.compiling import KernelSpec, kernel_in
from burt_numba.host.launching import Array, CallNumber, Errors, Launch, Number
from burt_numba.host.rows import RowSegment
from burt_numba.softmax_launches import StridedRows

_THREADS = 256
_MOST_BLOCKS = 1 << 20

_ROUNDING = {"f4": (2.0**-23, 0.0), "f2": (2.0**-11, 2.0**-25)}
"""How far rounding to the output's type moves a probability: in proportion to it, and at least."""


def _kernel() -> KernelSpec:
    return KernelSpec("distribution_check", kernel_in("validation", "distribution_check_kernel"), (), (_THREADS, 4))


def validation_launch(
    operand: int,
    dtype: str,
    columns: int,
    segment: RowSegment,
    total_rows: int,
    bounds: StridedRows | None = None,
    bound_number: int | None = None,
) -> Launch:
    """Check the rows of a segment of the C-contiguous operand [total_rows, columns].

    ``bounds`` is the segment's second operand, one bound a row (or of size 0); ``bound_number`` the call's number that
    holds for all rows. Without either there is no bound.
    """
    bound = Number(float("inf"), "f4") if bound_number is None else CallNumber(bound_number, "f4")
    strides = segment.strides[1] if bounds is not None else (0, 0, 0)
    origin = bounds.origin + segment.origins[1] if bounds is not None else 0
    arguments = (
        Array(operand, dtype, (total_rows * columns,)),
        Number(segment.first_row, "i8"),
        Number(segment.rows, "i4"),
        Number(columns, "i8"),
        bound,
        *(Number(rounding, "f4") for rounding in _ROUNDING[dtype]),
        bounds.argument if bounds is not None else Array(None, "f4"),
        *segment.sizes(),
        Number(origin, "i8"),
        *(Number(stride, "i8") for stride in strides),
        Errors(),
    )
    return Launch(_kernel(), (min(segment.rows, _MOST_BLOCKS), 1), _THREADS, arguments)


def _finite_kernel() -> KernelSpec:
    return KernelSpec("finite_check", kernel_in("validation", "finite_check_kernel"), (), (_THREADS, 4))


def finite_check_launch(
    operand: int, dtype: str, groups: int, rows: int, columns: int, counts: int | None = None
) -> Launch:
    """Check the C-contiguous operand [groups, rows, columns]; of a group the rows that the operand ``counts`` says."""
    arguments = (
        Array(operand, dtype, (groups * rows * columns,)),
        Number(groups, "i8"),
        Number(rows, "i8"),
        Number(columns, "i8"),
        Array(counts, "i4", (0 if counts is None else groups,)),
        Errors(),
    )
    return Launch(_finite_kernel(), (max(min(groups * rows, _MOST_BLOCKS), 1), 1), _THREADS, arguments)


def validation_specialisations() -> Iterator[tuple[KernelSpec, tuple[str, ...]]]:
    """For the compile matrix."""
    for dtype in ("f4", "f2"):
        numbers = ("i8", "i4", "i8", "f4", "f4", "f4")
        yield _kernel(), (f"{dtype}:1C", *numbers, "f4:1C", *("i4",) * 6, *("i8",) * 4, "i8:1C")
        yield _finite_kernel(), (f"{dtype}:1C", "i8", "i8", "i8", "i4:1C", "i8:1C")
