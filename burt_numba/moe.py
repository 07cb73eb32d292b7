"""Mixture of experts: tokens copied to the buffers of their experts, and the experts' answers added up again.

docs/moe.md draws the buffers and has the rules of capacity; the kernels are in kernels/moe_positions.py,
moe_copy.py, moe_combine.py and, for launching by hand, moe.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from burt_numba.host.arrays import Description
from burt_numba.host.checks import (
    FLOATING,
    describe,
    require_count,
    require_dtype,
    require_flag,
    require_output,
    require_shape,
)
from burt_numba.host.compiling import KernelSpec, compute_capability, kernel_in, multiprocessors
from burt_numba.host.errors import BurtDimensionError, BurtSharedMemoryError, ErrorBuffer
from burt_numba.host.launching import TYPE_CODES, Array, Errors, Launch, Number, bare
from burt_numba.host.operation import Answer, Operation, Request, Result
from burt_numba.host.plans import (
    MOST_BLOCKS,
    LaunchPlan,
    Plan,
    dimension,
    dtype_itemsize,
    refuse_unknown,
    whole_warps,
)
from burt_numba.moe_launches import (
    COMBINE_BLOCK,
    COMBINE_DEPTH,
    COPY_BLOCK,
    COPY_DEPTH,
    POSITIONS_BLOCK,
    ClearedParts,
    PositionsShape,
    RowPieces,
    positions_shape,
)
from burt_numba.softmax_launches import StridedRows, vector_columns
from burt_numba.target import COUNTER_STRIDE, DOCUMENTED_MOE_THREADS, most_shared_bytes
from burt_numba.validation import finite_check_launch

_DISPATCH, _COMBINE = "sparse_moe_dispatch", "sparse_moe_combine"
_RESULTS = (
    "expert_inputs",
    "dispatch_indices",
    "expert_counts",
    "combine_weights",
    "num_dropped",
    "num_overflowed",
)
_NAMES = ("input", "routing_weights", "top_k_indices", *_RESULTS)
_INPUT, _ROUTING, _TOP_K, _INPUTS, _INDICES, _COUNTS, _WEIGHTS, _DROPPED, _OVERFLOWED = range(len(_NAMES))
_WORK, _COUNTERS, _BARRIERS = len(_NAMES), len(_NAMES) + 2, len(_NAMES) + 3
_COMBINE_NAMES = ("expert_outputs", "dispatch_indices", "combine_weights", "out")
_OUTPUTS, _PLACES, _SHARES, _OUT = range(len(_COMBINE_NAMES))
_INTEGERS = ("int32", "int64")
_MOST_CHOICES = (1 << 30) - 1
_DOCUMENTED_STATIC_BYTES = 16
_MOST_SIZE = (1 << 31) - (1 << 16)
"""Of E and d: a few more are 32-bit numbers in the kernels too."""


_LEAST_PIECE, _MOST_PIECES = 32 * COPY_DEPTH, (1 << 31) - 1
"""Elements that a warp copies at least, and groups of lanes of a launch."""
_MOST_ELEMENTS = 1 << 60


class _Buffers(NamedTuple):
    expert_inputs: Any
    """[E, capacity, d]: the tokens of each expert."""
    dispatch_indices: Any
    """[T, k, 2], int32: (expert, position) of a choice that was placed, (-1, -1) of one that was not."""
    expert_counts: Any
    """[E], int32: rows of expert_inputs that hold a token."""
    combine_weights: Any
    """[T, k], of the type of routing_weights: the weight of a choice that was placed, 0 of one that was not."""


class MoeDispatch(_Buffers):
    """What `sparse_moe_dispatch` returns and `sparse_moe_combine` takes: a named tuple of four arrays.

    Two more are attributes of it, on the device as well; None in a tuple made by hand.
    """

    num_dropped: Any = None
    """[1], int32: tokens that found room nowhere."""
    num_overflowed: Any = None
    """[1], int32: tokens that went to expert 0 because none of their choices had room."""

    def _replace(self, **changes: Any) -> MoeDispatch:
        replaced = super()._replace(**changes)
        replaced.num_dropped, replaced.num_overflowed = self.num_dropped, self.num_overflowed
        return replaced


def sparse_moe_dispatch(
    input: Any,
    routing_weights: Any,
    top_k_indices: Any,
    expert_capacity: int | None = None,
    *,
    deterministic: bool = True,
    expert_inputs: Any = None,
    dispatch_indices: Any = None,
    expert_counts: Any = None,
    combine_weights: Any = None,
    num_dropped: Any = None,
    num_overflowed: Any = None,
    stream: Any = None,
    errors: ErrorBuffer | None = None,
    validate_output: bool = False,
) -> MoeDispatch:
    """Copy each token to those of its k experts that have room.

    Rows are given out to the first choices of all tokens in token order, then to the second choices, and so on. A token
    that none of its choices had room for goes to expert 0, after all others, in the place of its first choice and with
    that choice's weight. Where expert 0 is full as well it is dropped.

    Parameters
    ----------
    input : array [T, d], float32 or float16
        Of any family and any strides.
    routing_weights : array [T, E], float32 or float16
    top_k_indices : array [T, k], int32 or int64
        Experts of each token. -1 is padding. An expert that a token names more than once takes it once, for the first
        of these choices.
    expert_capacity : int, optional
        Rows of each expert. Default: ceil(2 T k / E).
    deterministic : bool
        False: rows are taken by atomic counters, in an order of its own on every run. Where an expert is full, which
        tokens it holds, and so which overflow or are dropped, may change too.
    expert_inputs : array [E, capacity, d] of the type of ``input``, optional
        C-contiguous, as all arrays that are passed in to be written. Rows that hold no token are left as they are; in a
        new array they are zero.
    dispatch_indices, expert_counts : arrays [T, k, 2], [E], int32, optional
    combine_weights : array [T, k] of the type of ``routing_weights``, optional
    num_dropped, num_overflowed : arrays [1], int32, optional
    stream : optional
        A stream of any library, or its handle. Default: the current stream of the array library.
    errors : ErrorBuffer, optional
        Collects events instead of the warnings of a later call.
    validate_output : bool
        Check in a second pass that the rows that hold tokens, and the weights, are finite.

    Returns
    -------
    MoeDispatch
        What was given, and new arrays of the family of ``input``, ``num_dropped`` and ``num_overflowed`` too: with
        arrays on the device nothing waits for it.

    Raises
    ------
    TypeError
        An argument of the wrong type.
    BurtDimensionError
        A shape, layout or value that does not fit; no expert.
    BurtSharedMemoryError
        More choices a token than shared memory holds, where ``deterministic=False``.

    Warns
    -----
    BurtWarning
        By a later call or ``check()``: code 1 or 2 (elements that are NaN or infinite, of tokens that got a row, once
        however many experts take them, and of the weights of placed choices; they are stored as 0), 5 (tokens that were
        dropped), 6 (choices out of range other than -1; they are skipped).

    Notes
    -----
    ``sparse_moe_dispatch`` of the BURT-IMMA kernel API.

    Examples
    --------
    >>> import numpy as np, burt_numba
    >>> tokens = np.array([[1.0], [2.0], [3.0]], np.float32)
    >>> weights = np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]], np.float32)
    >>> first_choices = np.array([[1], [1], [0]])
    >>> dispatch = burt_numba.sparse_moe_dispatch(tokens, weights, first_choices, expert_capacity=2)
    >>> dispatch.expert_inputs[:, :, 0]
    array([[3., 0.],
           [1., 2.]], dtype=float32)
    """
    if expert_capacity is not None and (type(expert_capacity) is not int or expert_capacity < 0):
        expert_capacity = require_count(_DISPATCH, "expert_capacity", expert_capacity, 0)
    if deterministic is not False and deterministic is not True:
        deterministic = require_flag(_DISPATCH, "deterministic", deterministic)
    results = (expert_inputs, dispatch_indices, expert_counts, combine_weights, num_dropped, num_overflowed)
    *buffers, dropped, overflowed = _DISPATCH_OPERATION(
        (input, routing_weights, top_k_indices, *results),
        (),
        (expert_capacity, deterministic),
        stream,
        errors,
        validate_output,
    )
    dispatch = MoeDispatch(*buffers)
    dispatch.num_dropped, dispatch.num_overflowed = dropped, overflowed
    return dispatch


def sparse_moe_combine(
    expert_outputs: Any,
    dispatch: Any,
    renormalize: bool = False,
    *,
    out: Any = None,
    stream: Any = None,
    errors: ErrorBuffer | None = None,
    validate_output: bool = False,
) -> Any:
    """Add up what the experts made of each token: out_t = sum over its placed choices j of w_tj y_tj.

    Parameters
    ----------
    expert_outputs : array [E, capacity, d], float32 or float16
        Row [e, p] is what expert e made of the token in its row p. Of any strides. Rows of no token are not read.
    dispatch : MoeDispatch
        Or anything with its ``dispatch_indices`` (int32 or int64) and ``combine_weights`` (float32 or float16).
    renormalize : bool
        Divide by the sum of the token's weights; where that is 0, the result is 0.
    out : array [T, d] of the type of ``expert_outputs``, optional
        C-contiguous.
    stream, errors, validate_output
        As for `sparse_moe_dispatch`.

    Returns
    -------
    array [T, d]
        ``out``, or a new array of the family of ``expert_outputs``; added up in float32, the same bits on every run.
        Zeros for a token of which no choice was placed.

    Raises
    ------
    TypeError, BurtDimensionError
        As for `sparse_moe_dispatch`.

    Warns
    -----
    BurtWarning
        By a later call or ``check()``: code 1 or 2 (elements that are NaN or infinite, of rows that hold a token and of
        their weights: they count as 0; sums beyond the type of the result become 0), 6 (entries of ``dispatch_indices``
        outside of ``expert_outputs``; they are skipped).

    Examples
    --------
    >>> import numpy as np, burt_numba
    >>> tokens = np.array([[1.0], [2.0]], np.float32)
    >>> weights = np.array([[0.75, 0.25], [0.5, 0.0]], np.float32)
    >>> dispatch = burt_numba.sparse_moe_dispatch(tokens, weights, np.array([[0, 1], [0, -1]]))
    >>> burt_numba.sparse_moe_combine(10 * dispatch.expert_inputs, dispatch)
    array([[10.],
           [10.]], dtype=float32)
    """
    if renormalize is not False and renormalize is not True:
        renormalize = require_flag(_COMBINE, "renormalize", renormalize)
    try:
        indices, weights = dispatch.dispatch_indices, dispatch.combine_weights
    except AttributeError:
        raise TypeError(
            f"{_COMBINE}: dispatch: expected a MoeDispatch, or anything with dispatch_indices and combine_weights, got "
            f"{type(dispatch).__name__}"
        ) from None
    operands = (expert_outputs, indices, weights, out)
    return _COMBINE_OPERATION(operands, (), (renormalize,), stream, errors, validate_output)


# --- launch choices -----------------------------------------------------------------------------------------------


def _positions_kernel(staged: bool) -> KernelSpec:
    return KernelSpec(
        "moe_positions", kernel_in("moe_positions", "positions_kernel"), (int(staged),), (POSITIONS_BLOCK, 1)
    )


def _copy_kernel(vector: int, dtype: str) -> KernelSpec:
    return KernelSpec("moe_copy", kernel_in("moe_copy", "copy_kernel"), (vector, int(dtype == "f2")), (COPY_BLOCK, 4))


def _combine_kernel(vector: int, dtype: str) -> KernelSpec:
    return KernelSpec(
        "moe_combine", kernel_in("moe_combine", "combine_kernel"), (vector, int(dtype == "f2")), (COMBINE_BLOCK, 2)
    )


def _documented() -> KernelSpec:
    return KernelSpec(_DISPATCH, kernel_in("moe", "sparse_moe_dispatch_kernel"), (), (DOCUMENTED_MOE_THREADS, 1))


class _Sizes(NamedTuple):
    tokens: int
    choices: int
    experts: int
    capacity: int
    columns: int

    @classmethod
    def of(cls, tokens: int, choices: int, experts: int, columns: int, capacity: int | None) -> _Sizes:
        default = -(-2 * tokens * choices // experts)
        return cls(tokens, choices, experts, default if capacity is None else capacity, columns)

    def copies(self, vector: int, multiprocessors: int) -> tuple[RowPieces, int, int]:
        """How tokens lie in the lanes that copy them, the blocks that this takes, and their threads."""
        pieces = RowPieces.of(self.columns, vector, COPY_DEPTH)
        return pieces, *pieces.blocks(self.tokens if self.choices else 0, COPY_BLOCK, multiprocessors)

    def cleared_parts(self, vector: int) -> ClearedParts:
        """How unused rows lie in the blocks that clear them."""
        return ClearedParts.of(self.experts, self.capacity * self.columns, vector)


def _positions_launch(sizes: _Sizes, shape: PositionsShape, index: StridedRows) -> Launch:
    cells = shape.counts
    total = sizes.tokens * sizes.choices
    numbers = (
        sizes.tokens,
        sizes.choices,
        sizes.experts,
        min(sizes.capacity, total),
        shape.warp_choices,
        shape.warp_tokens,
    )
    arguments = (
        *(index.argument, *index.place),
        *(Number(number, "i4") for number in numbers),
        Array(_INDICES, "i4", (2 * total,)),
        Array(_COUNTS, "i4", (sizes.experts,)),
        Array(_DROPPED, "i4", (1,)),
        Array(_OVERFLOWED, "i4", (1,)),
        *(Array(_WORK, "i4", (size,), offset=4 * sum(cells[:place])) for place, size in enumerate(cells)),
        Array(_BARRIERS, "i8", (COUNTER_STRIDE,)),
        Errors(),
    )
    return Launch(
        _positions_kernel(shape.staged),
        (shape.blocks, 1),
        shape.threads,
        bare(arguments),
        shape.shared_bytes,
        group=shape.blocks,
    )


def _copy_launch(
    sizes: _Sizes,
    operands: Sequence[StridedRows],
    vector: int,
    copies: tuple[RowPieces, int, int],
    cleared: ClearedParts,
) -> Launch:
    pieces, blocks, threads = copies
    source, weight, index = operands
    dtype = source.argument.dtype
    total = sizes.tokens * sizes.choices
    arguments = (
        *(source.argument, *source.place, index.argument, *index.place, weight.argument, *weight.place),
        Array(_INDICES, "i4", (2 * total,)),
        Array(_COUNTS, "i4", (sizes.experts,)),
        Array(_WEIGHTS, weight.argument.dtype, (total,)),
        Array(_INPUTS, dtype, (sizes.experts * sizes.capacity * sizes.columns,)),
        *(Number(number, "i4") for number in sizes[:3]),
        Number(sizes.capacity, "i8"),
        *(Number(number, "i4") for number in (sizes.columns, *pieces, blocks, cleared.parts)),
        Number(cleared.elements, "i8"),
        Errors(),
    )
    grid = (blocks + sizes.experts * cleared.parts, 1)
    # What earlier calls of the stream have written, its first launch has waited for.
    return Launch(_copy_kernel(vector, dtype), grid, threads, bare(arguments), follows=True)


def _documented_launch(sizes: _Sizes, request: Request) -> Launch:
    def given(operand: int) -> Array:
        array = request.operands[operand]
        assert array is not None
        return Array(operand, TYPE_CODES[array.dtype], array.shape, array.strides)

    source, routing, index = given(_INPUT), given(_ROUTING), given(_TOP_K)
    tokens, choices, experts, capacity, columns = sizes
    arguments = (
        source,
        Array(_INPUTS, source.dtype, (experts, capacity, columns)),
        Array(_INDICES, "i4", (tokens, choices, 2)),
        Array(_COUNTS, "i4", (experts,)),
        *(routing, index),
        *(Number(number, "i8") for number in (tokens, columns, experts, choices, capacity)),
        Array(_WEIGHTS, routing.dtype, (tokens, choices)),
        Array(_DROPPED, "i4", (1,)),
        Array(_OVERFLOWED, "i4", (1,)),
        Array(_WORK, "i4", (tokens,)),
        Array(_COUNTERS, "i8", (2,)),
        Errors(),
    )
    grid, threads, shared_bytes = _documented_geometry(tokens, choices, columns)
    most = most_shared_bytes(compute_capability(request.device)) - _DOCUMENTED_STATIC_BYTES
    if shared_bytes > most:
        raise BurtSharedMemoryError(
            f"{_DISPATCH}: top_k_indices: expected k of at most {most // 8} where deterministic=False, got {choices}"
        )
    return Launch(_documented(), grid, threads, arguments, shared_bytes)


def _documented_geometry(tokens: int, choices: int, columns: int) -> tuple[tuple[int, int], int, int]:
    return (min(tokens, MOST_BLOCKS), 1), whole_warps(max(min(columns, 256), 1)), 8 * choices


def _answer_dispatch(request: Request) -> Answer:
    given_capacity, deterministic = request.options
    sizes = _check_dispatch(request, given_capacity)
    source, routing, index = request.operands[:_INPUTS]
    assert source is not None and routing is not None and index is not None
    tokens, choices, experts, capacity, columns = sizes
    rows = [
        StridedRows.of(_DISPATCH, _NAMES[place], place, array, array.shape)
        for place, array in ((_INPUT, source), (_ROUTING, routing), (_TOP_K, index))
    ]
    vector = vector_columns(request.aligned, columns, source.dtype, rows[:1])
    capability, processors = compute_capability(request.device), multiprocessors(request.device)
    shape = positions_shape(tokens if deterministic else 0, choices, experts, capability, processors)
    workspace = shape.workspace
    counted = sizes if deterministic else sizes._replace(tokens=0)
    launches = [_positions_launch(counted, shape, rows[2])]
    copies = counted.copies(vector, processors)
    if not deterministic and tokens and choices:
        # The launch before, over no tokens, has set the counts to zero.
        launches.append(_documented_launch(sizes, request))
        workspace = (max(workspace[0], 4 * tokens), 0, 16, workspace[3])
    cleared = sizes.cleared_parts(vector) if request.operands[_INPUTS] is None else ClearedParts(0, 0)
    _pieces, blocks, _threads = copies
    if blocks or cleared.parts:
        launches.append(_copy_launch(counted, rows, vector, copies, cleared))
    if request.validate:
        codes = TYPE_CODES[source.dtype], TYPE_CODES[routing.dtype]
        launches.append(finite_check_launch(_INPUTS, codes[0], experts, capacity, columns, _COUNTS))
        launches.append(finite_check_launch(_WEIGHTS, codes[1], 1, tokens, choices))
    return Answer(launches, _results(sizes, source.dtype, routing.dtype), workspace)


def _results(sizes: _Sizes, dtype: str, weight_dtype: str) -> list[Result]:
    tokens, choices, experts, capacity, columns = sizes
    return [
        Result((experts, capacity, columns), dtype),
        Result((tokens, choices, 2), "int32"),
        Result((experts,), "int32"),
        Result((tokens, choices), weight_dtype),
        Result((1,), "int32"),
        Result((1,), "int32"),
    ]


def _require_axes(name: str, label: str, array: Description, axes: str) -> None:
    wanted = axes.count(",") + 1
    if len(array.shape) != wanted:
        raise BurtDimensionError(f"{name}: {label}: expected {wanted} dimensions {axes}, got {array}")


def _check_sizes(name: str, labels: tuple[str, str, str], sizes: _Sizes) -> None:
    """``labels``: the arguments that T and k, E, and d come from."""
    wanted = (
        ("T and T k", sizes.tokens * max(sizes.choices, 1), _MOST_CHOICES),
        ("E", sizes.experts, _MOST_SIZE),
        ("d", sizes.columns, _MOST_SIZE),
    )
    for label, (what, size, most) in zip(labels, wanted, strict=True):
        if size > most:
            raise BurtDimensionError(f"{name}: {label}: expected {what} of at most {most}, got {size}")
    pieces = sizes.tokens * -(-sizes.columns // _LEAST_PIECE)
    if pieces > _MOST_PIECES:
        raise BurtDimensionError(
            f"{name}: {labels[2]}: expected T ceil(d / {_LEAST_PIECE}) of at most {_MOST_PIECES}, got {pieces}"
        )


def _check_dispatch(request: Request, given_capacity: int | None) -> _Sizes:
    for place, label, types, axes in (
        (_INPUT, "input", FLOATING, "[T, d]"),
        (_ROUTING, "routing_weights", FLOATING, "[T, E]"),
        (_TOP_K, "top_k_indices", _INTEGERS, "[T, k]"),
    ):
        array = request.operands[place]
        if array is None:
            describe(_DISPATCH, label, None)
        assert array is not None
        require_dtype(_DISPATCH, label, array, types)
        _require_axes(_DISPATCH, label, array, axes)
    source, routing, index = request.operands[:_INPUTS]
    assert source is not None and routing is not None and index is not None
    tokens, columns = source.shape
    require_shape(_DISPATCH, "routing_weights", routing, (tokens, routing.shape[1]))
    require_shape(_DISPATCH, "top_k_indices", index, (tokens, index.shape[1]))
    if routing.shape[1] == 0:
        raise BurtDimensionError(f"{_DISPATCH}: routing_weights: expected at least 1 expert, got {routing}")
    sizes = _Sizes.of(tokens, index.shape[1], routing.shape[1], columns, given_capacity)
    _check_sizes(_DISPATCH, ("top_k_indices", "routing_weights", "input"), sizes)
    if sizes.experts * sizes.capacity * max(sizes.columns, 1) > _MOST_ELEMENTS:
        raise BurtDimensionError(
            f"{_DISPATCH}: expert_capacity: expected E capacity d of at most {_MOST_ELEMENTS}, got {sizes.capacity} "
            f"rows of {sizes.columns} for each of {sizes.experts}"
        )
    results = _results(sizes, source.dtype, routing.dtype)
    for label, array, result in zip(_RESULTS, request.operands[_INPUTS:], results, strict=True):
        if array is not None:
            require_output(_DISPATCH, label, array, *result)
    return sizes


_DISPATCH_OPERATION = Operation(
    _DISPATCH,
    _NAMES,
    _RESULTS,
    ("input", "expert_inputs"),
    _answer_dispatch,
    # Rows that hold no token are left alone.
    ("expert_inputs",),
    results=len(_RESULTS),
)


def _answer_combine(request: Request) -> Answer:
    (renormalize,) = request.options
    outputs, indices, weights, out = request.operands
    for label, array, types, axes in (
        ("expert_outputs", outputs, FLOATING, "[E, capacity, d]"),
        ("dispatch_indices", indices, _INTEGERS, "[T, k, 2]"),
        ("combine_weights", weights, FLOATING, "[T, k]"),
    ):
        if array is None:
            describe(_COMBINE, label, None)
        assert array is not None
        require_dtype(_COMBINE, label, array, types)
        _require_axes(_COMBINE, label, array, axes)
    assert outputs is not None and indices is not None and weights is not None
    experts, capacity, columns = outputs.shape
    tokens, choices = indices.shape[:2]
    require_shape(_COMBINE, "dispatch_indices", indices, (tokens, choices, 2))
    require_shape(_COMBINE, "combine_weights", weights, (tokens, choices))
    labels = ("dispatch_indices", "expert_outputs", "expert_outputs")
    _check_sizes(_COMBINE, labels, _Sizes(tokens, choices, experts, capacity, columns))
    result = Result((tokens, columns), outputs.dtype)
    if out is not None:
        require_output(_COMBINE, "out", out, *result)
    if tokens == 0:
        return Answer((), [result])
    source, places, shares = (
        StridedRows.of(_COMBINE, _COMBINE_NAMES[place], place, array, array.shape)
        for place, array in ((_OUTPUTS, outputs), (_PLACES, indices), (_SHARES, weights))
    )
    dtype = source.argument.dtype
    vector = vector_columns(request.aligned, columns, outputs.dtype, (source,))
    pieces = RowPieces.of(columns, vector, COMBINE_DEPTH)
    arguments = (
        *(source.argument, *source.place, places.argument, *places.place, shares.argument, *shares.place),
        Array(_OUT, dtype, (tokens * columns,)),
        *(Number(number, "i4") for number in (tokens, choices)),
        *(Number(number, "i8") for number in (experts, capacity)),
        *(Number(number, "i4") for number in (columns, renormalize, *pieces)),
        Errors(),
    )
    blocks, threads = pieces.blocks(tokens, COMBINE_BLOCK, multiprocessors(request.device))
    launches = [Launch(_combine_kernel(vector, dtype), (blocks, 1), threads, bare(arguments))]
    if request.validate and columns:
        launches.append(finite_check_launch(_OUT, dtype, 1, tokens, columns))
    return Answer(launches, [result])


_COMBINE_OPERATION = Operation(
    _COMBINE,
    _COMBINE_NAMES,
    ("out",),
    ("expert_outputs", "out"),
    _answer_combine,
)


def specialisations() -> Iterator[tuple[KernelSpec, tuple[str, ...]]]:
    """Every kernel that the functions can launch, with their argument types."""
    floats, integers = ("f4", "f2"), ("i4", "i8")
    place = ("i8", "i8", "i8")
    for index in integers:
        for staged in (True, False):
            outputs = ("i4*", "i4*", "i4*", "i4*")
            workspace = ("i4*", "i4*", "i4*", "i8*")
            yield _positions_kernel(staged), (f"{index}*", *place, *("i4",) * 6, *outputs, *workspace, "i8:1C")
    for (dtype, widest), index, weight in itertools.product((("f4", 4), ("f2", 8)), integers, floats):
        for vector in (widest, 1):
            operands = (f"{dtype}*", *place, f"{index}*", *place, f"{weight}*", *place)
            outputs = ("i4*", "i4*", f"{weight}*", f"{dtype}*")
            sizes = ("i4", "i4", "i4", "i8", *("i4",) * 5, "i8")
            yield _copy_kernel(vector, dtype), (*operands, *outputs, *sizes, "i8:1C")
            operands = (f"{dtype}*", "i8", *place, f"{index}*", "i8", *place, f"{weight}*", *place)
            sizes = ("i4", "i4", "i8", "i8", *("i4",) * 4)
            yield _combine_kernel(vector, dtype), (*operands, f"{dtype}*", *sizes, "i8:1C")
        arrays = (f"{dtype}:2A", f"{dtype}:3C", "i4:3C", "i4:1C", f"{weight}:2A", f"{index}:2A")
        more = (f"{weight}:2C", "i4:1C", "i4:1C", "i4:1C", "i8:1C", "i8:1C")
        yield _documented(), (*arrays, *("i8",) * 5, *more)


# --- bytes, flops, plan -------------------------------------------------------------------------------------------


def bytes_moved(tokens: int, columns: int, choices: int, experts: int, itemsize: int) -> int:
    """The fewest bytes a dispatch moves where every choice is placed: tokens read once and written ``choices`` times.

    With the indices (int32) and weights (float32) of the choices. Rows that are cleared are not counted.
    """
    return tokens * columns * (1 + choices) * itemsize + tokens * choices * (4 + 4 + 8 + 4) + 4 * experts


def bytes_combined(tokens: int, columns: int, choices: int, itemsize: int) -> int:
    """The fewest bytes that combining moves where every choice was placed."""
    return tokens * columns * (choices + 1) * itemsize + tokens * choices * (8 + 4)


def flops_combined(tokens: int, columns: int, choices: int) -> int:
    """Arithmetic of combining. (A dispatch has none.)"""
    return 2 * tokens * choices * columns


_MULTIPROCESSORS = 132
"""Of the device that a plan is for, where nothing else is said: an H100 or H200."""


def _planned_sizes(name: str, dims: dict[str, Any]) -> tuple[_Sizes, int, int]:
    """(sizes, bytes of an element, multiprocessors)."""
    tokens = dimension(name, dims, "batch_size")
    columns = dimension(name, dims, "d_model")
    experts = dimension(name, dims, "num_experts", lowest=1)
    choices = dimension(name, dims, "top_k", default=2)
    default = _Sizes.of(tokens, choices, experts, columns, None).capacity
    capacity = dimension(name, dims, "expert_capacity", default=default)
    processors = dimension(name, dims, "multiprocessors", lowest=1, default=_MULTIPROCESSORS)
    itemsize = dtype_itemsize(name, dims)
    refuse_unknown(name, dims)
    sizes = _Sizes(tokens, choices, experts, capacity, columns)
    _check_sizes(f"plan: {name}", ("batch_size", "num_experts", "d_model"), sizes)
    return sizes, itemsize, processors


def _vector(columns: int, itemsize: int) -> int:
    return 16 // itemsize if columns % (16 // itemsize) == 0 else 1


def plan(*, compute_capability: tuple[int, int], **dims: Any) -> Plan:
    """The launches of `sparse_moe_dispatch` for contiguous, aligned arrays, with new ones for all results."""
    sizes, itemsize, processors = _planned_sizes(_DISPATCH, dims)
    tokens, choices, experts, capacity, columns = sizes
    shape = positions_shape(tokens, choices, experts, compute_capability, processors)
    launches = [
        LaunchPlan("moe_positions_kernel", (shape.blocks,), shape.threads, shape.shared_bytes, group=shape.blocks)
    ]
    vector = _vector(columns, itemsize)
    _pieces, blocks, threads = sizes.copies(vector, processors)
    blocks += experts * sizes.cleared_parts(vector).parts
    if blocks:
        launches.append(LaunchPlan("moe_copy_kernel", (blocks,), threads, 0))
    grid, threads, shared_bytes = _documented_geometry(tokens, choices, columns)
    documented = LaunchPlan(f"{_DISPATCH}_kernel", grid[:1], threads, shared_bytes)
    return Plan(
        _DISPATCH,
        documented,
        tokens * columns * itemsize,
        experts * capacity * columns * itemsize,
        8 * tokens * choices + sum(shape.workspace),
        launches,
    )


def plan_combine(*, compute_capability: tuple[int, int], **dims: Any) -> Plan:
    """The launch of `sparse_moe_combine` for contiguous, aligned arrays."""
    sizes, itemsize, processors = _planned_sizes(_COMBINE, dims)
    tokens, choices, _experts, _capacity, columns = sizes
    launches = []
    if tokens:
        pieces = RowPieces.of(columns, _vector(columns, itemsize), COMBINE_DEPTH)
        blocks, threads = pieces.blocks(tokens, COMBINE_BLOCK, processors)
        launches.append(LaunchPlan("moe_combine_kernel", (blocks,), threads, 0))
    output = tokens * columns * itemsize
    moved = bytes_combined(tokens, columns, choices, itemsize)
    return Plan(_COMBINE, None, moved - output, output, 0, launches)


__all__ = [
    "MoeDispatch",
    "bytes_combined",
    "bytes_moved",
    "flops_combined",
    "plan",
    "plan_combine",
    "sparse_moe_combine",
    "sparse_moe_dispatch",
    "specialisations",
]
