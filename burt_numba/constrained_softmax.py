"""Softmax under an upper bound on its entropy.

For each row z of logits, p = softmax(z / T) with the largest T up to 1 at which H(p) = -sum p ln p <= entropy_bound.
docs/constrained_softmax.md has the derivation and the search, kernels/constrained_softmax.py the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from burt_numba.host.arrays import family_of
from burt_numba.host.checks import (
    FLOATING,
    require_dtype,
    require_output,
    require_shape,
)
from burt_numba.host.compiling import KernelSpec, compute_capability, kernel_in
from burt_numba.host.errors import BurtDimensionError, ErrorBuffer
from burt_numba.host.launching import Array, CallNumber, Errors, Launch, Number
from burt_numba.host.operation import Answer, Operation, Request, Result
from burt_numba.host.plans import (
    MOST_BLOCKS,
    LaunchPlan,
    Plan,
    dimension,
    dtype_itemsize,
    refuse_too_many,
    refuse_unknown,
    whole_warps,
)
from burt_numba.host.rows import RowSegment, row_segments
from burt_numba.softmax_launches import (
    RowShape,
    StridedRows,
    choose_row_shape,
    long_row_shape,
    row_shapes,
    vector_columns,
)
from burt_numba.target import DOCUMENTED_THREADS, has_clusters
from burt_numba.temperatures import require_search_parameters
from burt_numba.validation import validation_launch

_NAME = "constrained_softmax"
_LOGITS, _BOUNDS, _TEMPERATURE, _ENTROPY, _OUT = range(5)
_ENTROPY_BOUND, _TEMPERATURE_MIN, _TEMPERATURE_MAX, _MAX_ITERATIONS = range(4)


def constrained_softmax(
    logits: Any,
    entropy_bound: Any = 0.20,
    temperature_min: float = 0.01,
    temperature_max: float = 10.0,
    max_iterations: int = 20,
    *,
    temperature_out: Any = None,
    entropy_out: Any = None,
    out: Any = None,
    stream: Any = None,
    errors: ErrorBuffer | None = None,
    validate_output: bool = False,
) -> Any:
    """Softmax over the last axis with an entropy of at most ``entropy_bound`` nats.

    A row whose plain softmax is within the bound is returned unchanged. Any other row becomes ``softmax(row / T)`` with
    T such that its entropy is at most 1e-6 above the bound and at most ``max(1e-4 * bound, 1e-6)`` below it. That is
    the nearest distribution within the bound in KL(p || softmax(row)).

    Parameters
    ----------
    logits : array [..., C], float32 or float16
        Of any family and any strides (of whole elements). -inf masks an element. NaN and +inf count as masked and are
        recorded.
    entropy_bound : float or array [...], float32
        Nats; one for all rows (a number, or an array of no axes), or one a row.
    temperature_min, temperature_max : float
        T starts at 1 clipped between them and is lowered to ``temperature_min`` at most. The start must lie within
        [1e-35, 1e35].
    max_iterations : int
        Evaluations of the entropy after the first. Where they do not suffice, the result is within the bound, but
        further below it.
    temperature_out, entropy_out : array [...], float32, optional
        Receive T and the entropy of each row.
    out : array [..., C] of the type of ``logits``, optional
        C-contiguous; may be ``logits`` itself.
    stream : optional
        A stream of any library, or its handle. Default: the current stream of the array library.
    errors : ErrorBuffer, optional
        Collects events instead of the warnings of a later call.
    validate_output : bool
        Check the result in a second pass: finite, and within the bound. A row that the search has reported is counted
        again.

    Returns
    -------
    array [..., C]
        ``out``, or a new array of the family of ``logits``. Rows with nothing finite are zeros (T as at the start,
        entropy 0). An empty leading axis gives an empty result.

    Raises
    ------
    TypeError
        An argument of the wrong type.
    BurtDimensionError
        A shape, layout or value out of range.

    Warns
    -----
    BurtWarning
        By a later call or ``check()``: code 1 or 2 (elements that are NaN or +inf), 3 (rows above the bound even at
        ``temperature_min``: ties at the top), 6 (bounds of rows that are NaN or negative, taken as 0).

    Notes
    -----
    ``constrained_softmax`` of the BURT-IMMA kernel API, which searches T by bisection.

    Examples
    --------
    >>> import numpy as np, burt_numba
    >>> burt_numba.constrained_softmax(np.array([[3, 2, 1, 0]], np.float32)).round(3)
    array([[0.953, 0.045, 0.002, 0.   ]], dtype=float32)
    """
    bounds = None
    if not isinstance(entropy_bound, (float, int)) and family_of(entropy_bound) is not None:
        bounds, entropy_bound = entropy_bound, 0.0
    try:
        numbers = _known_numbers.get((entropy_bound, temperature_min, temperature_max, max_iterations))
    except TypeError:  # not hashable: not a number either
        numbers = None
    if numbers is None:
        numbers = _check_numbers(entropy_bound, temperature_min, temperature_max, max_iterations)
    return _OPERATION((logits, bounds, temperature_out, entropy_out, out), numbers, (), stream, errors, validate_output)


_known_numbers: dict[Any, tuple[float, float, float, int]] = {}
"""Parameters that were checked before, by their values; a training run that lowers its bound fills it slowly."""
_MOST_KNOWN_NUMBERS = 1024


def _check_numbers(
    entropy_bound: Any, temperature_min: Any, temperature_max: Any, max_iterations: Any
) -> tuple[float, float, float, int]:
    numbers = require_search_parameters(_NAME, entropy_bound, temperature_min, temperature_max, max_iterations)
    given = entropy_bound, temperature_min, temperature_max, max_iterations
    # A tensor of one element is a number too, but may hold another one the next time.
    if all(isinstance(value, (float, int, np.generic)) for value in given):
        if len(_known_numbers) >= _MOST_KNOWN_NUMBERS:
            _known_numbers.clear()
        _known_numbers[given] = numbers
    return numbers


# --- launch choices -----------------------------------------------------------------------------------------------

_RESIDENT_THREADS = 1024
_RESIDENT_THREADS_IN_GROUPS = {True: 896, False: 640}
"""Threads a multiprocessor holds at least: 64 registers each; where lanes share a warp 72 with vectors, 96 without."""


def _kernel(shape: RowShape, vector: int) -> KernelSpec:
    resident = _RESIDENT_THREADS_IN_GROUPS[vector > 1] if shape.threads <= 32 else _RESIDENT_THREADS
    return KernelSpec(
        "constrained_softmax_rows",
        kernel_in("constrained_softmax", "rows_kernel"),
        (shape.threads, shape.per_thread, vector, shape.blocks),
        shape.launch_bounds(resident),
        shape.blocks > 1,
    )


def _streamed(blocks: int) -> KernelSpec:
    return KernelSpec(
        "constrained_softmax_streamed",
        kernel_in("constrained_softmax", "streamed_kernel"),
        (blocks,),
        (1024, 1),
        blocks > 1,
    )


def _choose(columns: int, rows: int, vector: int, capability: tuple[int, int]) -> tuple[KernelSpec, int, int, int, int]:
    """(kernel, blocks a row, grid, threads a block, shared bytes)."""
    shape = choose_row_shape(columns, rows, vector, has_clusters(capability))
    if shape is not None:
        return _kernel(shape, vector), shape.blocks, shape.grid(rows), shape.block, 0
    blocks, shared_bytes = long_row_shape(columns, rows, capability)
    return _streamed(blocks), blocks, rows * blocks, 1024, shared_bytes


def _launch(
    segment: RowSegment, logits: StridedRows, bounds: StridedRows, request: Request, vector: int, dtype: str
) -> Launch:
    columns = request.operands[_LOGITS].shape[-1]  # type: ignore[union-attr]
    total_rows = logits.rows
    capability = compute_capability(request.device)
    kernel, blocks, grid, threads, shared_bytes = _choose(columns, segment.rows, vector, capability)
    streamed = kernel.name.endswith("streamed")
    size_type = "i8" if streamed else "i4"
    granule = 1 if streamed else vector
    part = -(-columns // (blocks * granule)) * granule
    logits_strides, bounds_strides = segment.strides
    rows_out = (total_rows,)
    arguments = (
        logits.argument,
        Array(_OUT, dtype, (total_rows * columns,)),
        Number(segment.first_row, "i8"),
        Number(segment.rows, "i4"),
        Number(columns, size_type),
        Number(part, size_type),
        Number(logits.origin + segment.origins[0], "i8"),
        *segment.sizes(),
        *(Number(stride, "i8") for stride in logits_strides),
        Number(logits.column_stride, "i8"),
        CallNumber(_ENTROPY_BOUND, "f4"),
        CallNumber(_TEMPERATURE_MIN, "f4"),
        CallNumber(_TEMPERATURE_MAX, "f4"),
        CallNumber(_MAX_ITERATIONS, "i4"),
        bounds.argument,
        Number(bounds.origin + segment.origins[1], "i8"),
        *(Number(stride, "i8") for stride in bounds_strides),
        Array(_TEMPERATURE, "f4", rows_out) if request.operands[_TEMPERATURE] else Array(None, "f4"),
        Array(_ENTROPY, "f4", rows_out) if request.operands[_ENTROPY] else Array(None, "f4"),
        Errors(),
    )
    return Launch(kernel, (grid, 1), threads, arguments, shared_bytes, blocks)


def _answer(request: Request) -> Answer:
    logits, bounds, temperature, entropy, out = request.operands
    assert logits is not None
    require_dtype(_NAME, "logits", logits, FLOATING)
    if not logits.shape:
        raise BurtDimensionError(f"{_NAME}: logits: expected at least 1 dimension, got {logits}")
    if logits.shape[-1] == 0:
        raise BurtDimensionError(f"{_NAME}: logits: expected at least 1 class (last axis), got {logits}")
    leading = logits.shape[:-1]
    if bounds is not None:
        require_dtype(_NAME, "entropy_bound", bounds, ("float32",))
        if not bounds.shape:  # one bound for all rows that lies where they do
            bounds = bounds._replace(shape=leading, strides=(0,) * len(leading))
        require_shape(_NAME, "entropy_bound", bounds, leading)
    for name, extra in (("temperature_out", temperature), ("entropy_out", entropy)):
        if extra is not None:
            require_output(_NAME, name, extra, leading, "float32")
    if out is not None:
        require_output(_NAME, "out", out, logits.shape, logits.dtype)
    if 0 in leading:
        return Answer((), [Result(logits.shape, logits.dtype)])
    rows = StridedRows.of(_NAME, "logits", _LOGITS, logits, logits.shape)
    bound_rows = StridedRows.of(_NAME, "entropy_bound", _BOUNDS, bounds, (*leading, 1))
    vector = vector_columns(request.aligned, logits.shape[-1], logits.dtype, (rows,))
    segments = list(row_segments(leading, (rows.leading_strides, bound_rows.leading_strides)))
    dtype = rows.argument.dtype
    launches = [_launch(segment, rows, bound_rows, request, vector, dtype) for segment in segments]
    if request.validate:
        for segment in segments:
            launches.append(
                validation_launch(_OUT, dtype, logits.shape[-1], segment, rows.rows, bound_rows, _ENTROPY_BOUND)
            )
    return Answer(launches, [Result(logits.shape, logits.dtype)])


_OPERATION = Operation(
    _NAME,
    ("logits", "entropy_bound", "temperature_out", "entropy_out", "out"),
    ("temperature_out", "entropy_out", "out"),
    ("logits", "out"),
    _answer,
)


def _documented() -> KernelSpec:
    return KernelSpec(
        "constrained_softmax",
        kernel_in("constrained_softmax", "constrained_softmax_kernel"),
        (),
        (DOCUMENTED_THREADS, 1),
    )


def specialisations() -> Iterator[tuple[KernelSpec, tuple[str, ...]]]:
    """Every kernel that the function can launch, and the documented one, with their argument types."""
    for dtype, widest in (("f4", 4), ("f2", 8)):
        arrays = (f"{dtype}:2C", f"{dtype}:2C")
        yield _documented(), (*arrays, "i8", "i8", "f4", "f4", "f4", "i8", *("f4:1C",) * 3, "i8:1C")
        for streamed in (_streamed(1), _streamed(8)):
            yield streamed, _types(dtype, "i8")
        for vector in (widest, 1):
            for shape in row_shapes(vector):
                yield _kernel(shape, vector), _types(dtype, "i4")


def _types(dtype: str, size_type: str) -> tuple[str, ...]:
    array = f"{dtype}:1C"
    sizes = ("i8", "i4", size_type, size_type, "i8", *("i4",) * 6, "i8", "i8", "i8", "i8")
    bounds = ("f4:1C", "i8", "i8", "i8", "i8")
    return (array, array, *sizes, "f4", "f4", "f4", "i4", *bounds, "f4:1C", "f4:1C", "i8:1C")


# --- bytes, flops, plan -------------------------------------------------------------------------------------------


def bytes_moved(rows: int, columns: int, itemsize: int) -> int:
    """The fewest bytes a call moves: each logit read once, each probability written once."""
    return 2 * rows * columns * itemsize


def flops(rows: int, columns: int, evaluations: int) -> int:
    """Arithmetic of a call: 7 operations a column and evaluation, 6 more for maximum, gap and result."""
    return rows * columns * (7 * evaluations + 6)


def plan(*, compute_capability: tuple[int, int], **dims: Any) -> Plan:
    """The launches for ``batch_size`` rows of ``num_classes`` logits, contiguous and aligned."""
    rows = dimension(_NAME, dims, "batch_size")
    columns = dimension(_NAME, dims, "num_classes", lowest=1)
    itemsize = dtype_itemsize(_NAME, dims)
    refuse_unknown(_NAME, dims)
    refuse_too_many(_NAME, rows)
    documented = LaunchPlan(
        "constrained_softmax_kernel", (min(rows, MOST_BLOCKS),), whole_warps(min(columns, 1024)), 4 * columns
    )
    launches = []
    for segment in row_segments((rows,), ((columns,),)) if rows else ():
        vector = 16 // itemsize if columns % (16 // itemsize) == 0 else 1
        kernel, blocks, grid, threads, shared_bytes = _choose(columns, segment.rows, vector, compute_capability)
        launches.append(LaunchPlan(kernel.name + "_kernel", (grid,), threads, shared_bytes, blocks))
    size = rows * columns * itemsize
    return Plan(_NAME, documented, size, size, 0, launches)


__all__ = ["bytes_moved", "constrained_softmax", "flops", "plan", "specialisations"]
