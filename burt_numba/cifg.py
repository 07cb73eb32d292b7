"""Matrix memory with a coupled input and forget gate, kept within a spectral bound.

docs/cifg.md derives the projections and certificates; the kernels are in kernels/cifg_gates.py, cifg_update_rows.py and
cifg_spectrum.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from burt_numba.cifg_launches import (
    SPECTRUM_BLOCK,
    UPDATE_BLOCK,
    UPDATE_RESIDENT,
    memory_launches,
)
from burt_numba.host.arrays import Description
from burt_numba.host.checks import describe, require_count, require_dtype, require_flag, require_number, require_output
from burt_numba.host.compiling import KernelSpec, compute_capability, kernel_in, multiprocessors
from burt_numba.host.errors import BurtDimensionError, ErrorBuffer
from burt_numba.host.launching import Array, CallNumber, Errors, Launch, Number, bare
from burt_numba.host.operation import Answer, Operation, Request, Result
from burt_numba.host.plans import LaunchPlan, Plan, dimension, refuse_unknown, whole_warps
from burt_numba.softmax_launches import StridedRows
from burt_numba.target import COUNTER_STRIDE, GATE_COLUMNS, GATE_THREADS

_NAMES = ("C", "h", "x", "W_f", "b_f", "power_vector", "sigma_bound", "sigma_out", "forget_gate_out", "out")
_BATCHED_NAMES = ("C", "H", "X", "W_f", "b_f", *_NAMES[5:])
_C, _H, _X, _W, _B, _POWER, _SIGMA_BOUND, _SIGMA, _GATE, _OUT = range(len(_NAMES))
_WORK, _FLAGS, _COUNTERS, _BARRIERS = range(len(_NAMES), len(_NAMES) + 4)
_GATE_BLOCK = 256
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
_PROJECTIONS = ("clip", "scale")
_MOST_COLUMNS = 46_340
"""d * d below 2**31: rows and columns of a matrix are 32-bit numbers in the kernel. (Such a matrix takes 8 GiB.)"""
_MOST_SIZE = 2**31 - 1


def cifg_update(
    C: Any,
    h: Any,
    x: Any,
    W_f: Any,
    b_f: Any,
    spectral_bound: float = 0.95,
    *,
    projection: str = "clip",
    power_iterations: int = 10,
    power_vector: Any = None,
    sigma_bound: Any = None,
    sigma_out: Any = None,
    forget_gate_out: Any = None,
    out: Any = None,
    stream: Any = None,
    errors: ErrorBuffer | None = None,
    validate_output: bool = False,
) -> Any:
    """One update of a matrix memory: forget, write h hᵀ, and keep the largest singular value within a bound.

    f = sigmoid(W_f [h; x] + b_f),   C_ij <- f_i C_ij + (1 - f_i) h_i h_j,   then sigma_max(C) <= spectral_bound.

    Parameters
    ----------
    C : array [d, d], float32
        C-contiguous and writable: updated in place, unless ``out`` is given.
    h, x, W_f, b_f : arrays [d], [n], [d, d + n], [d], float32
        Of any strides; n may be 0.
    spectral_bound : float
        The largest singular value allowed, above 0.
    projection : "clip" or "scale"
        "clip": the nearest matrix within the bound, the one singular value above it lowered to it; scaled where a
        second one exceeds it too. "scale": C times bound / sigma.
    power_iterations : int
        Steps after the first towards the largest singular value, as long as it moves (and as many for the second,
        where "clip" has to know it).
    power_vector : array [d], float32, optional
        In and out: the right singular vector, carried from call to call. Zeros at first. A vector that is not zero
        says that the call before left this memory.
    sigma_bound : array [1], float32, optional
        In and out: a proven upper bound of sigma_max(C), carried from call to call (infinity at first). Where it
        proves the new memory within the bound, nothing else is computed.
    sigma_out : array [1], float32, optional
        Sigma before the projection, as estimated; where a certificate made that needless, the bound it proved.
    forget_gate_out : array [d], float32, optional
        f.
    out : array [d, d], float32, optional
        C-contiguous; C is then left as it was.
    stream : optional
        A stream of any library, or its handle. Default: the current stream of the array library.
    errors : ErrorBuffer, optional
        Collects events instead of the warnings of a later call.
    validate_output : bool
        Check in a second pass that sigma_max is within the bound.

    Returns
    -------
    array [d, d]
        C, or ``out``.

    Raises
    ------
    TypeError
        An argument of the wrong type.
    BurtDimensionError
        A shape, layout or value that does not fit.

    Warns
    -----
    BurtWarning
        By a later call or ``check()``: code 1 or 2 (elements that are NaN or infinite: in C they set their row and
        column to zero before the update, elsewhere they count as 0), 4 (sigma may exceed the bound by more than a part
        in 1,000 after the projection, as far as ``power_iterations`` steps can tell).

    Notes
    -----
    ``cifg_update`` of the BURT-IMMA kernel API. A power estimate is a lower bound of sigma: with ``power_vector``
    carried, sigma_max <= spectral_bound (1 + 1e-3); for a memory never seen before, 1 + 2e-2 with the default
    ``power_iterations``, 1 + 1e-3 with 100.

    Examples
    --------
    >>> import numpy as np, burt_numba
    >>> C = np.full((2, 2), 0.5, np.float32)
    >>> zeros = np.zeros(2, np.float32)
    >>> burt_numba.cifg_update(C, zeros, zeros, np.zeros((2, 4), np.float32), zeros, 0.25)
    array([[0.125, 0.125],
           [0.125, 0.125]], dtype=float32)
    """
    return _call(
        _SINGLE,
        (C, h, x, W_f, b_f, power_vector, sigma_bound, sigma_out, forget_gate_out, out),
        (spectral_bound, power_iterations, projection),
        None,
        (stream, errors, validate_output),
    )


def batched_cifg_update(
    C: Any,
    H: Any,
    X: Any,
    W_f: Any,
    b_f: Any,
    spectral_bound: float = 0.95,
    shared_memory_mode: bool = False,
    *,
    projection: str = "clip",
    power_iterations: int = 10,
    power_vector: Any = None,
    sigma_bound: Any = None,
    sigma_out: Any = None,
    forget_gate_out: Any = None,
    out: Any = None,
    stream: Any = None,
    errors: ErrorBuffer | None = None,
    validate_output: bool = False,
) -> Any:
    """Updates of a batch: of a memory for each sample, or the mean of them in one shared memory.

    Parameters
    ----------
    C : array [B, d, d], float32; [d, d] in shared mode
        C-contiguous and writable: updated in place, unless ``out`` is given.
    H, X, W_f, b_f : arrays [B, d], [B, n], [d, d + n], [d], float32
    spectral_bound, projection, power_iterations
        As for `cifg_update`. The shared memory is always scaled.
    shared_memory_mode : bool
        C_ij <- mean_b(f_bi) C_ij + mean_b((1 - f_bi) h_bi h_bj), then the projection. The same bits on every run.
    power_vector, sigma_bound, sigma_out : arrays, float32, optional
        As for `cifg_update`: [B, d], [B], [B]; in shared mode [d], [1], [1].
    forget_gate_out : array [B, d], float32, optional
    out, stream, errors, validate_output
        As for `cifg_update`.

    Returns
    -------
    array [B, d, d], or [d, d] in shared mode
        C, or ``out``. An empty batch changes nothing; in shared mode it is refused where ``out`` is given.

    Raises
    ------
    TypeError, BurtDimensionError
        As for `cifg_update`.

    Warns
    -----
    BurtWarning
        As for `cifg_update`; code 4 counts matrices.

    Notes
    -----
    ``batched_cifg_update`` of the BURT-IMMA kernel API, which adds the samples of the shared memory with atomics.

    Examples
    --------
    >>> import numpy as np, burt_numba
    >>> C, H = np.zeros((3, 2, 2), np.float32), np.full((3, 2), 0.5, np.float32)
    >>> W_f, b_f = np.zeros((2, 4), np.float32), np.zeros(2, np.float32)
    >>> burt_numba.batched_cifg_update(C, H, H, W_f, b_f)[2]
    array([[0.125, 0.125],
           [0.125, 0.125]], dtype=float32)
    """
    if shared_memory_mode is not False and shared_memory_mode is not True:
        shared_memory_mode = require_flag(_BATCHED.name, "shared_memory_mode", shared_memory_mode)
    return _call(
        _BATCHED,
        (C, H, X, W_f, b_f, power_vector, sigma_bound, sigma_out, forget_gate_out, out),
        (spectral_bound, power_iterations, projection),
        shared_memory_mode,
        (stream, errors, validate_output),
    )


_known_numbers: dict[Any, tuple[float, int, str]] = {}
_MOST_KNOWN_NUMBERS = 1024


def _call(
    operation: Operation, operands: tuple[Any, ...], given: tuple[Any, ...], shared: bool | None, rest: tuple[Any, ...]
) -> Any:
    try:
        checked = _known_numbers.get(given)
    except TypeError:  # not hashable: not a number either
        checked = None
    if checked is None:
        checked = _check_numbers(operation.name, *given)
        if all(isinstance(value, (float, int, str)) for value in given):
            if len(_known_numbers) >= _MOST_KNOWN_NUMBERS:
                _known_numbers.clear()
            _known_numbers[given] = checked
    bound, iterations, projection = checked
    in_place = operands[_OUT] is None
    if in_place:
        operands = (*operands[:_OUT], operands[_C])
    options = (projection == "clip", shared, in_place)
    return operation(operands, (bound, iterations), options, *rest, stacklevel=4)


def _check_numbers(name: str, bound: Any, iterations: Any, projection: Any) -> tuple[float, int, str]:
    if not isinstance(projection, str) or projection not in _PROJECTIONS:
        raise BurtDimensionError(f"{name}: projection: expected one of {', '.join(_PROJECTIONS)}, got {projection!r}")
    number = require_number(name, "spectral_bound", bound, 0.0, strict=True)
    return (
        number if number <= _FLOAT32_MAX else math.inf,
        min(require_count(name, "power_iterations", iterations, 0), 2**31 - 1),
        projection,
    )


# --- launch choices -----------------------------------------------------------------------------------------------


def _update_kernel(shared: bool, vector: int, staged: bool) -> KernelSpec:
    return KernelSpec(
        "cifg_update_rows",
        kernel_in("cifg_update_rows", "update_kernel"),
        (int(shared), vector, int(staged)),
        (UPDATE_BLOCK, UPDATE_RESIDENT if staged else 1),
    )


def _spectrum_kernel(vector: int, staged: bool, clustered: bool) -> KernelSpec:
    return KernelSpec(
        "cifg_spectrum",
        kernel_in("cifg_spectrum", "spectrum_kernel"),
        (vector, int(staged), int(clustered)),
        (SPECTRUM_BLOCK, 1),
        clustered,
    )


def _gate_kernel(vector: int) -> KernelSpec:
    return KernelSpec("cifg_gate", kernel_in("cifg_gates", "gate_kernel"), (vector,), (_GATE_BLOCK, 2))


def _gates_kernel(vector: int, shared: bool) -> KernelSpec:
    return KernelSpec(
        "cifg_gates",
        kernel_in("cifg_gates", "gates_kernel"),
        (vector, int(shared)),
        (GATE_THREADS, 2 if vector > 1 else 1),
    )


def _writes_kernel(vector: int) -> KernelSpec:
    return KernelSpec("cifg_writes", kernel_in("cifg_writes", "writes_kernel"), (vector,), (GATE_THREADS, 2))


def _rows(name: str, label: str, operand: int, array: Description) -> StridedRows:
    return StridedRows.of(name, label, operand, array, array.shape)


def _can_load_vectors(*operands: StridedRows) -> bool:
    return all(
        rows.column_stride == 1 and rows.origin % 4 == 0 and all(stride % 4 == 0 for stride in rows.leading_strides)
        for rows in operands
    )


def _optional(operand: int, array: Description | None, size: int) -> Array:
    return Array(None, "f4") if array is None else Array(operand, "f4", (size,))


def _answer(name: str, labels: tuple[str, ...], request: Request) -> Answer:
    clips, shared, _in_place = request.options
    _check_operands(name, labels, request)
    C, h, x, W, b, power, sigma_bound, sigma, gate_out, _out = request.operands
    assert C is not None and h is not None and x is not None and W is not None and b is not None
    columns = h.shape[-1]
    samples = 1 if shared is None else h.shape[0]
    if 0 in (columns, samples):
        return Answer((), [Result(C.shape, C.dtype)])
    matrices = 1 if shared else samples
    width = W.shape[1]
    hidden, inputs, weights = (_rows(name, labels[i], i, d) for i, d in ((_H, h), (_X, x), (_W, W)))
    bias = _rows(name, labels[_B], _B, b)
    capability = compute_capability(request.device)
    batch = None if shared is None else samples
    processors = multiprocessors(request.device)
    plan = memory_launches(columns, matrices, batch, width, bool(shared), capability, processors)
    update, spectrum = plan.update, plan.spectrum
    whole = request.aligned and columns % 4 == 0 and width % 4 == 0
    places = []
    floats = plan.floats(matrices, samples * columns)
    for part, size in enumerate(floats):
        places.append(Array(_WORK, "f4", (size,), offset=4 * sum(floats[:part])))
    work, update_z, update_sums, activations, areas, totals, starts, tile_parts, writes, mean_gates = places
    flags = Array(_FLAGS, "i4", (matrices * 2 * columns,))
    counts = plan.counters(matrices)
    update_counters, tile_counters = (
        Array(_COUNTERS, "i8", (count,), offset=8 * sum(counts[:place])) for place, count in enumerate(counts)
    )
    launches = []
    vector = 4 if whole and _can_load_vectors(hidden, inputs, weights) else 1
    operands = (
        *(hidden.argument, *hidden.place, inputs.argument, *inputs.place),
        *(weights.argument, *weights.place, bias.argument, *bias.place),
    )
    power_argument = _optional(_POWER, power, matrices * columns)
    gate_outputs = (activations, _optional(_GATE, gate_out, samples * columns), power_argument, starts)
    if shared is None:
        sizes = (Number(columns, "i4"), Number(width, "i4"))
        grid = (1 + -(-columns // (_GATE_BLOCK // 32)), 1)
        launches.append(Launch(_gate_kernel(vector), grid, _GATE_BLOCK, (*operands, *sizes, *gate_outputs, Errors())))
    else:
        launches.append(
            Launch(
                _gates_kernel(vector, bool(shared)),
                (matrices + plan.tiles * plan.split, 1),
                GATE_THREADS,
                (
                    *operands,
                    *(Number(size, "i4") for size in (samples, columns, width, plan.split)),
                    *(*gate_outputs, tile_parts, tile_counters, Errors()),
                ),
            )
        )
    hidden_place = hidden.place
    if shared is None:
        hidden_place = (hidden_place[0], Number(0, "i8"), hidden_place[1])
    if shared:
        vector = 4 if request.aligned and columns % 4 == 0 and _can_load_vectors(hidden) else 1
        tiles = -(-columns // GATE_COLUMNS)
        launches.append(
            Launch(
                _writes_kernel(vector),
                (tiles, tiles),
                GATE_THREADS,
                (
                    *(hidden.argument, *hidden_place, Number(samples, "i4"), Number(columns, "i4")),
                    *(activations, writes, mean_gates),
                ),
                follows=True,
            )
        )
    vector = 4 if request.aligned and columns % 4 == 0 and update.staged else 1
    size = matrices * columns * columns
    launches.append(
        Launch(
            _update_kernel(bool(shared), vector, update.staged),
            (matrices * update.blocks, 1),
            update.threads,
            (
                Array(_C, "f4", (size,)),
                Array(_OUT, "f4", (size,)),
                *(
                    Number(value, "i4")
                    for value in (
                        columns,
                        update.pitch,
                        update.tile,
                        update.blocks,
                        update.block_rows,
                        update.tile_rows,
                        update.warps_a_row,
                    )
                ),
                Number(update.area, "i8"),
                Number(plan.set_shift, "i4"),
                Number(plan.group_shift, "i4"),
                writes,
                mean_gates if shared else activations,
                starts,
                power_argument,
                _optional(_SIGMA_BOUND, sigma_bound, matrices),
                _optional(_SIGMA, sigma, matrices),
                update_z,
                update_sums,
                totals,
                areas,
                flags,
                update_counters,
                CallNumber(0, "f4"),
                Errors(),
            ),
            update.shared_bytes,
            follows=True,
        )
    )
    vector = 4 if request.aligned and columns % 4 == 0 and spectrum.staged else 1

    def spectrum_launch(only_checks: bool) -> Launch:
        return Launch(
            _spectrum_kernel(vector, spectrum.staged, plan.clustered),
            (plan.groups * spectrum.blocks, 1),
            spectrum.threads,
            (
                Array(_OUT, "f4", (size,)),
                *(
                    Number(value, "i4")
                    for value in (
                        matrices,
                        columns,
                        spectrum.pitch,
                        spectrum.tile,
                        spectrum.blocks,
                        spectrum.block_rows,
                        spectrum.tile_rows,
                        spectrum.warps_a_row,
                    )
                ),
                Number(plan.group_floats, "i8"),
                Number(spectrum.area, "i8"),
                hidden.argument,
                *hidden_place,
                Number(samples if shared else 0, "i4"),
                activations,
                _optional(_POWER, power, matrices * columns),
                _optional(_SIGMA_BOUND, sigma_bound, matrices),
                _optional(_SIGMA, sigma, matrices),
                totals,
                work,
                flags,
                Array(_BARRIERS, "i8", (COUNTER_STRIDE * plan.groups,)),
                CallNumber(0, "f4"),
                CallNumber(1, "i4"),
                Number(clips and not shared, "i4"),
                Number(only_checks, "i4"),
                Errors(),
            ),
            spectrum.shared_bytes,
            spectrum.blocks if plan.clustered else 1,
            1 if plan.clustered else spectrum.blocks,
            # A check reads what the projection has written.
            follows=not only_checks,
        )

    launches.append(spectrum_launch(False))
    if request.validate:
        launches.append(spectrum_launch(True))
    launches = [replace(launch, arguments=bare(launch.arguments)) for launch in launches]
    return Answer(launches, [Result(C.shape, C.dtype)], plan.workspace(columns, matrices, samples * columns))


def _check_operands(name: str, labels: tuple[str, ...], request: Request) -> None:
    _clips, shared, in_place = request.options
    C, h, x, W, b, power, sigma_bound, sigma, gate_out, out = request.operands
    for place in (_H, _X, _W, _B):
        if request.operands[place] is None:
            describe(name, labels[place], None)
    assert C is not None and h is not None and x is not None and W is not None and b is not None
    for place in (_C, _H, _X, _W, _B):
        require_dtype(name, labels[place], request.operands[place], ("float32",))  # type: ignore[arg-type]
    batched = shared is not None
    axes = ("[B, d]", "[B, n]") if batched else ("[d]", "[n]")
    for label, array, wanted in ((labels[_H], h, axes[0]), (labels[_X], x, axes[1])):
        if len(array.shape) != 1 + batched:
            raise BurtDimensionError(f"{name}: {label}: expected {1 + batched} dimensions {wanted}, got {array}")
    d = h.shape[-1]
    if d > _MOST_COLUMNS:
        raise BurtDimensionError(f"{name}: {labels[_H]}: expected d of at most {_MOST_COLUMNS}, got {h}")
    width = d + x.shape[-1]
    leading = (h.shape[0],) if batched and not shared else ()
    wanted_shapes = [(labels[_C], C, (*leading, d, d)), (labels[_W], W, (d, width)), (labels[_B], b, (d,))]
    if batched:
        wanted_shapes.insert(1, (labels[_X], x, (h.shape[0], x.shape[1])))
    for label, array, wanted in wanted_shapes:
        if array.shape != wanted:
            raise BurtDimensionError(f"{name}: {label}: expected shape {wanted}, got {array}")
    if max(width, h.shape[0]) > _MOST_SIZE // 64:
        raise BurtDimensionError(f"{name}: {labels[_X]}: expected d + n and B of at most {_MOST_SIZE // 64}, got {x}")
    require_output(name, "C" if in_place else "out", out, C.shape, "float32")  # type: ignore[arg-type]
    if shared and h.shape[0] == 0 and not in_place:
        raise BurtDimensionError(f"{name}: {labels[_H]}: expected at least 1 sample where out is given, got {h}")
    if not C.is_contiguous:
        raise BurtDimensionError(f"{name}: C: expected a C-contiguous array, got {C} with strides of {C.strides} bytes")
    one = leading or (1,)
    extras = (
        (_POWER, power, (*leading, d)),
        (_SIGMA_BOUND, sigma_bound, one),
        (_SIGMA, sigma, one),
        (_GATE, gate_out, h.shape),
    )
    for place, extra, wanted in extras:
        if extra is not None:
            require_output(name, labels[place], extra, wanted, "float32")


def _operation(name: str, labels: tuple[str, ...]) -> Operation:
    written = ("power_vector", "sigma_bound", "sigma_out", "forget_gate_out", "out")
    vectors = (*labels[:4], "out")
    return Operation(
        name, labels, written, vectors, lambda request: _answer(name, labels, request), ("power_vector", "sigma_bound")
    )


_SINGLE = _operation("cifg_update", _NAMES)
_BATCHED = _operation("batched_cifg_update", _BATCHED_NAMES)


def specialisations() -> Iterator[tuple[KernelSpec, tuple[str, ...]]]:
    """Every kernel that the functions can launch, with their argument types."""
    array = "f4*"
    place, row_place = ("i8", "i8"), ("i8", "i8", "i8")
    operands = (array, *row_place, array, *row_place, array, *row_place, array, *place)
    types = (*operands, *("i4",) * 4, *(array,) * 5, "i8*", "i8:1C")
    for vector in (4, 1):
        for shared in (False, True):
            yield _gates_kernel(vector, shared), types
    types = (array, *place, array, *place, array, *row_place, array, *place, "i4", "i4", *(array,) * 4, "i8:1C")
    for vector in (4, 1):
        yield _gate_kernel(vector), types
    for vector in (4, 1):
        yield _writes_kernel(vector), (array, *row_place, "i4", "i4", array, array, array)
    types = (array, array, *("i4",) * 7, "i8", "i4", "i4", *(array,) * 10, "i4*", "i8*", "f4", "i8:1C")
    for shared in (False, True):
        for vector, staged in ((4, True), (1, True), (1, False)):
            yield _update_kernel(shared, vector, staged), types
    types = (array, *("i4",) * 8, "i8", "i8", array, *row_place, "i4", *(array,) * 6)
    types = (*types, "i4*", "i8*", "f4", "i4", "i4", "i4", "i8:1C")
    for vector, staged in ((4, True), (1, True), (1, False)):
        for clustered in (True, False):
            yield _spectrum_kernel(vector, staged, clustered), types


# --- bytes, flops, plan -------------------------------------------------------------------------------------------


def bytes_moved(columns: int, width: int, samples: int = 1, shared: bool = False) -> int:
    """The fewest bytes a call moves: each memory read and written once, h, x, W_f and b_f read once.

    ``width`` is d + n. More sweeps over a memory, for its largest singular value or a projection, are not counted.
    """
    matrices = 1 if shared else samples
    return 4 * (2 * matrices * columns * columns + samples * width + columns * width + columns)


def flops(columns: int, width: int, samples: int = 1, shared: bool = False, steps: int = 1) -> int:
    """Arithmetic of a call: 2 a weight and sample, 3 an element and write, 4 an element and power step (C'v, C'ᵀy)."""
    matrices = 1 if shared else samples
    gates = 2 * samples * columns * width
    return gates + columns * columns * (2 * samples + matrices * (1 + 4 * steps))


_MULTIPROCESSORS = 132
"""Of the device that a plan is for, where nothing else is said: an H100 or H200."""


def plan(*, compute_capability: tuple[int, int], **dims: Any) -> Plan:
    """The launches of `cifg_update` for a memory of ``d_model`` and [h; x] of ``input_dim``, contiguous and aligned."""
    return _plan(_SINGLE.name, compute_capability, dims)


def plan_batched(*, compute_capability: tuple[int, int], **dims: Any) -> Plan:
    """The launches of `batched_cifg_update` for ``batch_size`` samples."""
    return _plan(_BATCHED.name, compute_capability, dims)


def _plan(name: str, capability: tuple[int, int], dims: dict[str, Any]) -> Plan:
    """Input bytes are those that the documented table counts: it leaves out W_f, and of a batch all but C."""
    samples = dimension(name, dims, "batch_size") if name == _BATCHED.name else 1
    columns = dimension(name, dims, "d_model")
    width = dimension(name, dims, "input_dim", lowest=columns)
    processors = dimension(name, dims, "multiprocessors", lowest=1, default=_MULTIPROCESSORS)
    shared: bool | None = None
    if name == _BATCHED.name:
        shared = require_flag(f"plan: {name}", "shared_memory_mode", dims.pop("shared_memory_mode", False))
    refuse_unknown(name, dims)
    for key, value, most in (
        ("d_model", columns, _MOST_COLUMNS),
        ("input_dim", width, _MOST_SIZE // 64),
        ("batch_size", samples, _MOST_SIZE // 64),
    ):
        if value > most:
            raise BurtDimensionError(f"plan: {name}: {key}: expected at most {most}, got {value}")
    grid = (columns,) if shared is not False else (samples, columns)
    documented = LaunchPlan(f"{name}_kernel", grid, whole_warps(max(min(columns, 256), 1)), 4 * width)
    matrices = 1 if shared else samples
    input_bytes = 4 * matrices * columns * columns
    if shared is None:
        input_bytes += 4 * (2 * columns + width - columns)
    temporary = 4 * columns
    launches = []
    if columns and samples:
        batch = None if shared is None else samples
        choice = memory_launches(columns, matrices, batch, width, bool(shared), capability, processors)
        update, spectrum = choice.update, choice.spectrum
        temporary += sum(choice.workspace(columns, matrices, samples * columns))
        if shared is None:
            gate_grid = (1 + -(-columns // (_GATE_BLOCK // 32)),)
            launches.append(LaunchPlan("cifg_gate_kernel", gate_grid, _GATE_BLOCK, 0))
        else:
            gate_grid = (matrices + choice.tiles * choice.split,)
            launches.append(LaunchPlan("cifg_gates_kernel", gate_grid, GATE_THREADS, 0))
        if shared:
            tiles = -(-columns // GATE_COLUMNS)
            launches.append(LaunchPlan("cifg_writes_kernel", (tiles, tiles), GATE_THREADS, 0))
        grid = (matrices * update.blocks,)
        launches.append(LaunchPlan("cifg_update_rows_kernel", grid, update.threads, update.shared_bytes))
        grid = (choice.groups * spectrum.blocks,)
        together = (spectrum.blocks, 1) if choice.clustered else (1, spectrum.blocks)
        launches.append(LaunchPlan("cifg_spectrum_kernel", grid, spectrum.threads, spectrum.shared_bytes, *together))
    return Plan(name, documented, input_bytes, 0, temporary, launches)


__all__ = ["batched_cifg_update", "bytes_moved", "cifg_update", "flops", "plan", "plan_batched", "specialisations"]
