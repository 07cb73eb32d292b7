"""Softmax of attention scores, with an additive or boolean mask and causality.

docs/attention_softmax.md describes the launches, kernels/attention_softmax.py holds the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from burt_numba.host.arrays import Description
from burt_numba.host.checks import FLOATING, require_count, require_dtype, require_flag, require_output
from burt_numba.host.compiling import KernelSpec, compute_capability, kernel_in
from burt_numba.host.errors import BurtDimensionError, ErrorBuffer
from burt_numba.host.launching import Array, Errors, Launch, Number
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
from burt_numba.host.rows import MOST_ROWS, Divisor, RowSegment, row_segments
from burt_numba.softmax_launches import (
    RowShape,
    StridedRows,
    choose_row_shape,
    row_shapes,
    vector_columns,
)
from burt_numba.target import DOCUMENTED_THREADS, has_clusters
from burt_numba.validation import validation_launch

_NAME = "attention_softmax"
_SCORES, _MASK, _OUT = range(3)
_NO_MASK, _ADDITIVE_MASK, _BOOLEAN_MASK = range(3)
_LARGEST_OFFSET = 1 << 40


def attention_softmax(
    scores: Any,
    mask: Any = None,
    causal: bool = False,
    *,
    causal_offset: int | None = None,
    out: Any = None,
    stream: Any = None,
    errors: ErrorBuffer | None = None,
    validate_output: bool = False,
) -> Any:
    """Attention weights: softmax of ``scores + mask`` over the keys that are visible.

    Parameters
    ----------
    scores : array [B, H, Q, K], float32 or float16
        Of any family and any strides. -inf masks a score.
    mask : array, optional
        Of any shape that broadcasts to the scores ([B, 1, 1, K], say): bool (True: attend), or float32 or the type of
        the scores, added in float32. -inf hides a score, whatever it is.
    causal : bool
        Hide key j from query i when ``j > i + causal_offset``. Hidden scores never influence the result.
    causal_offset : int, optional
        0 by default; must be given when Q differs from K (``K - Q`` lines up the last query with the last key), and not
        without ``causal``.
    out : array [B, H, Q, K] of the type of ``scores``, optional
        C-contiguous; may be ``scores`` itself.
    stream : optional
        A stream of any library, or its handle. Default: the current stream of the array library.
    errors : ErrorBuffer, optional
        Collects events instead of the warnings of a later call.
    validate_output : bool
        Check in a second pass that the result is finite.

    Returns
    -------
    array [B, H, Q, K]
        ``out``, or a new array of the family of ``scores``. Hidden scores give exactly 0, and a query that sees no key
        a row of zeros. An empty axis gives an empty result.

    Raises
    ------
    TypeError
        An argument of the wrong type.
    BurtDimensionError
        A shape or layout that does not fit.

    Warns
    -----
    BurtWarning
        By a later call or ``check()``: code 1 or 2 (visible elements that are NaN or +inf in the scores, the mask, or
        their sum; they count as hidden).

    Notes
    -----
    ``attention_softmax`` of the BURT-IMMA kernel API.

    Examples
    --------
    >>> import numpy as np, burt_numba
    >>> burt_numba.attention_softmax(np.zeros((1, 1, 3, 3), np.float32), causal=True)[0, 0].round(3)
    array([[1.   , 0.   , 0.   ],
           [0.5  , 0.5  , 0.   ],
           [0.333, 0.333, 0.333]], dtype=float32)
    """
    if causal is not False and causal is not True:
        causal = require_flag(_NAME, "causal", causal)
    if causal_offset is not None:
        causal_offset = require_count(_NAME, "causal_offset", causal_offset, -_LARGEST_OFFSET)
        if causal_offset > _LARGEST_OFFSET:
            raise BurtDimensionError(f"{_NAME}: causal_offset: expected at most 2**40, got {causal_offset}")
        if not causal:
            raise BurtDimensionError(
                f"{_NAME}: causal_offset: expected None without causal=True (it has no effect), got {causal_offset}"
            )
    return _OPERATION((scores, mask, out), (), (causal, causal_offset), stream, errors, validate_output)


# --- launch choices -----------------------------------------------------------------------------------------------


def _resident_threads(shape: RowShape, vector: int, mask_kind: int) -> int:
    """Threads a multiprocessor holds at least: the most that leave each the registers its kernel needs (96 to 48)."""
    if vector == 1:
        return 640 if shape.threads <= 32 else 768
    if mask_kind == _NO_MASK:
        return 1280
    return 1152 if vector == _HALF_VECTOR else 1024


_HALF_VECTOR = 8
"""float16 elements of a 16-byte access."""


def _kernel(shape: RowShape, vector: int, mask_kind: int) -> KernelSpec:
    return KernelSpec(
        "attention_softmax_rows",
        kernel_in("attention_softmax", "rows_kernel"),
        (shape.threads, shape.per_thread, vector, shape.blocks, mask_kind),
        shape.launch_bounds(_resident_threads(shape, vector, mask_kind)),
        shape.blocks > 1,
    )


def _streamed(mask_kind: int) -> KernelSpec:
    return KernelSpec(
        "attention_softmax_streamed", kernel_in("attention_softmax", "streamed_kernel"), (mask_kind,), (1024, 1)
    )


def _choose(
    columns: int, rows: int, vector: int, mask_kind: int, capability: tuple[int, int]
) -> tuple[KernelSpec, int, int, int]:
    """(kernel, blocks a row, grid, threads a block)."""
    shape = choose_row_shape(columns, rows, vector, has_clusters(capability))
    if shape is not None:
        return _kernel(shape, vector, mask_kind), shape.blocks, shape.grid(rows), shape.block
    return _streamed(mask_kind), 1, rows, 1024


def _launch(
    segment: RowSegment,
    scores: StridedRows,
    mask: StridedRows,
    request: Request,
    shape: tuple[int, ...],
    mask_kind: int,
    vector: int,
) -> Launch:
    columns = shape[-1]
    causal, causal_offset = request.options
    capability = compute_capability(request.device)
    kernel, blocks, grid, threads = _choose(columns, segment.rows, vector, mask_kind, capability)
    size_type = "i8" if kernel.name.endswith("streamed") else "i4"
    scores_strides, mask_strides = segment.strides
    arguments = (
        scores.argument,
        Array(_OUT, scores.argument.dtype, (scores.rows * columns,)),
        mask.argument,
        Number(segment.first_row, "i8"),
        Number(segment.rows, "i4"),
        Number(columns, size_type),
        Number(-(-columns // (blocks * vector)) * vector, size_type),
        *Divisor.of(shape[-2]).numbers(),
        Number(segment.first_row % shape[-2], "i4"),
        Number(scores.origin + segment.origins[0], "i8"),
        *segment.sizes(),
        *(Number(stride, "i8") for stride in scores_strides),
        Number(scores.column_stride, "i8"),
        Number(mask.origin + segment.origins[1], "i8"),
        *(Number(stride, "i8") for stride in mask_strides),
        Number(mask.column_stride, "i8"),
        Number(causal, "i4"),
        Number(min(max(causal_offset or 0, -shape[-2]), columns), size_type),
        Errors(),
    )
    return Launch(kernel, (grid, 1), threads, arguments, cluster=blocks)


def _broadcast(mask: Description, shape: tuple[int, ...]) -> Description:
    """The mask as an array of the scores' shape, with strides of 0 where it is repeated."""
    missing = len(shape) - len(mask.shape)
    sizes = (1,) * missing + mask.shape
    if missing < 0 or any(size not in (1, wanted) for size, wanted in zip(sizes, shape, strict=True)):
        raise BurtDimensionError(f"{_NAME}: mask: expected a shape that broadcasts to {shape}, got {mask}")
    strides = (0,) * missing + mask.strides
    return mask._replace(
        shape=shape,
        strides=tuple(0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True)),
    )


def _answer(request: Request) -> Answer:
    scores, mask, out = request.operands
    causal, causal_offset = request.options
    assert scores is not None
    require_dtype(_NAME, "scores", scores, FLOATING)
    if len(scores.shape) != 4:
        raise BurtDimensionError(f"{_NAME}: scores: expected 4 dimensions [B, H, Q, K], got {scores}")
    shape = scores.shape
    mask_kind = _NO_MASK
    if mask is not None:
        require_dtype(_NAME, "mask", mask, tuple(dict.fromkeys(("float32", scores.dtype, "bool"))))
        mask = _broadcast(mask, shape)
        mask_kind = _BOOLEAN_MASK if mask.dtype == "bool" else _ADDITIVE_MASK
    if causal and causal_offset is None and shape[2] != shape[3]:
        raise BurtDimensionError(
            f"{_NAME}: causal_offset: expected a number, as {shape[2]} queries and {shape[3]} keys differ "
            f"({shape[3] - shape[2]} lines up their ends)"
        )
    if causal and shape[2] > MOST_ROWS:
        raise BurtDimensionError(f"{_NAME}: scores: expected at most 2**27 queries where causal, got {scores}")
    if out is not None:
        require_output(_NAME, "out", out, shape, scores.dtype)
    if 0 in shape:
        return Answer((), [Result(shape, scores.dtype)])
    score_rows = StridedRows.of(_NAME, "scores", _SCORES, scores, shape)
    mask_rows = StridedRows.of(_NAME, "mask", _MASK, mask, shape)
    operands = (score_rows,) if mask is None else (score_rows, mask_rows)
    vector = vector_columns(request.aligned, shape[-1], scores.dtype, operands)
    segments = list(row_segments(shape[:-1], (score_rows.leading_strides, mask_rows.leading_strides)))
    launches = [_launch(segment, score_rows, mask_rows, request, shape, mask_kind, vector) for segment in segments]
    if request.validate:
        dtype = score_rows.argument.dtype
        launches += [validation_launch(_OUT, dtype, shape[-1], segment, score_rows.rows) for segment in segments]
    return Answer(launches, [Result(shape, scores.dtype)])


_OPERATION = Operation(_NAME, ("scores", "mask", "out"), ("out",), ("scores", "mask", "out"), _answer)


def _documented() -> KernelSpec:
    return KernelSpec(
        "attention_softmax", kernel_in("attention_softmax", "attention_softmax_kernel"), (), (DOCUMENTED_THREADS, 1)
    )


def specialisations() -> Iterator[tuple[KernelSpec, tuple[str, ...]]]:
    """Every kernel that the function can launch, and the documented one, with their argument types."""
    for dtype, widest in (("f4", 4), ("f2", 8)):
        yield _documented(), (f"{dtype}:4C", f"{dtype}:4C", "f4:4C", "i8", "i8", "i8", "i4", "i8", "i8:1C")
        masks = [(_NO_MASK, "f4"), (_ADDITIVE_MASK, "f4"), (_BOOLEAN_MASK, "u1")]
        if dtype == "f2":
            masks.append((_ADDITIVE_MASK, "f2"))
        for mask_kind, mask_dtype in masks:
            yield _streamed(mask_kind), _types(dtype, mask_dtype, "i8")
            for vector in (widest, 1):
                for shape in row_shapes(vector):
                    yield _kernel(shape, vector, mask_kind), _types(dtype, mask_dtype, "i4")


def _types(dtype: str, mask_dtype: str, size_type: str) -> tuple[str, ...]:
    array = f"{dtype}:1C"
    sizes = ("i8", "i4", size_type, size_type, *("i4",) * 4, "i8", *("i4",) * 6)
    return (array, array, f"{mask_dtype}:1C", *sizes, *("i8",) * 4, *("i8",) * 5, "i4", size_type, "i8:1C")


# --- bytes, flops, plan -------------------------------------------------------------------------------------------


def bytes_moved(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    itemsize: int,
    mask_bytes: int = 0,
    causal: bool = False,
    causal_offset: int = 0,
) -> int:
    """The fewest bytes a call moves: each visible score and the mask read once, each weight written once."""
    rows = batch * heads * queries
    read = rows * keys
    if causal:
        # Query i sees i + 1 + offset keys, as far as there are any.
        up_to_last, before_first = queries + causal_offset, causal_offset
        read = batch * heads * (_staircase(up_to_last, keys) - _staircase(before_first, keys))
    return (read + rows * keys) * itemsize + mask_bytes


def _staircase(steps: int, highest: int) -> int:
    """1 + 2 + ... over this many steps, none above ``highest``."""
    rising = min(max(steps, 0), highest)
    return rising * (rising + 1) // 2 + max(steps - highest, 0) * highest


def flops(rows: int, columns: int) -> int:
    """Arithmetic of a call: mask, maximum, difference, scaling, exponential, sum, product."""
    return 7 * rows * columns


def plan(*, compute_capability: tuple[int, int], **dims: Any) -> Plan:
    """The launches for contiguous, aligned scores [batch_size, num_heads, seq_len, key_len]."""
    batch = dimension(_NAME, dims, "batch_size")
    heads = dimension(_NAME, dims, "num_heads")
    queries = dimension(_NAME, dims, "seq_len")
    keys = dimension(_NAME, dims, "key_len", default=queries)
    causal = require_flag(f"plan: {_NAME}", "causal", dims.pop("causal", False))
    masked = require_flag(f"plan: {_NAME}", "masked", dims.pop("masked", False))
    if not causal and "causal_offset" in dims:
        raise BurtDimensionError(f"plan: {_NAME}: causal_offset: has no effect without causal")
    causal_offset = dimension(_NAME, dims, "causal_offset", lowest=-_LARGEST_OFFSET, default=0)
    itemsize = dtype_itemsize(_NAME, dims)
    refuse_unknown(_NAME, dims)
    rows = batch * heads * queries
    refuse_too_many(_NAME, rows)
    documented = LaunchPlan(
        "attention_softmax_kernel",
        (min(batch * heads, MOST_BLOCKS), min(queries, 65535)),
        whole_warps(min(max(keys, 1), 1024)),
        8,
    )
    launches = []
    if rows and keys:
        vector = 16 // itemsize if keys % (16 // itemsize) == 0 else 1
        mask_kind = _ADDITIVE_MASK if masked else _NO_MASK
        for segment in row_segments((rows,), ((keys,),)):
            kernel, blocks, grid, threads = _choose(keys, segment.rows, vector, mask_kind, compute_capability)
            launches.append(LaunchPlan(kernel.name + "_kernel", (grid,), threads, 0, blocks))
    mask_bytes = batch * keys * 4 if masked else 0
    size = rows * keys * itemsize
    moved = bytes_moved(batch, heads, queries, keys, itemsize, mask_bytes, causal, causal_offset)
    return Plan(_NAME, documented, moved - size, size, documented.shared_bytes, launches)


__all__ = ["attention_softmax", "bytes_moved", "flops", "plan", "specialisations"]
