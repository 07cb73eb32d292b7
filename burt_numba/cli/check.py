"""``burt-numba check``: every function against its float64 reference, on this machine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from burt_numba.cli import driver
from burt_numba.cli.output import progress, table

# Relative error in norm, for each type of the inputs.
_ERROR_LIMITS = {"float32": 5e-6, "float16": 2e-3}

# In nats. An entropy may exceed its bound by the tolerance, and stay below it by the band.
_ENTROPY_BOUND = 0.20
_ENTROPY_TOLERANCE = 1e-6
_ENTROPY_BAND = max(1e-4 * _ENTROPY_BOUND, 1e-6)
_TEMPERATURE_MIN = 0.01

# One element, around a warp, around a block, odd; on a GPU also sizes of real use.
_SOFTMAX_SIZES: tuple[tuple[int, ...], ...] = ((3, 1), (4, 33), (5, 129), (3, 1000), (2, 1025))
_SOFTMAX_SIZES_GPU = ((32, 1000), (32, 50_000), (4096, 4096), (64, 128_256))
_ATTENTION_SIZES: tuple[tuple[int, ...], ...] = ((1, 1, 1, 1), (2, 2, 5, 5), (1, 2, 7, 33), (1, 1, 3, 129))
_ATTENTION_SIZES_GPU = ((8, 8, 512, 512), (1, 8, 2048, 2048), (2, 3, 500, 1025))
_ATTENTION_VARIANTS = ("plain", "mask", "causal")

# B, H, Hk, Q, K and D: one context, around a warp and past two; one query and a tile. The last variant is plain
# attention too: a low temperature would magnify what tf32 rounds.
_CONTEXT_SIZES: tuple[tuple[int, ...], ...] = (
    (1, 1, 1, 1, 1, 1),
    (2, 4, 2, 1, 33, 16),
    # On tensor cores: of few contexts, and of more.
    (1, 2, 1, 5, 20, 6),
    (1, 1, 1, 4, 65, 6),
)
_CONTEXT_SIZES_GPU = (
    (32, 8, 8, 512, 64, 64),
    (2, 8, 8, 512, 1024, 64),
    (1, 8, 2, 65, 2048, 256),
    (1, 8, 8, 1, 65_536, 128),
)
_CONTEXT_VARIANTS = ("bound", "lengths", "plain", "tf32")
# Relative; of float32 twice that of a softmax, since there are two products.
_CONTEXT_LIMITS = {"float32": 1e-5, "float16": 2e-3, "tf32": 1e-2}
# The rounding of a score counts 1 / T times: below this temperature a query's error is taken T over it times.
_COLD = 0.1
# In nats: of the entropy that is reported, and of that at the exact scores, which differ from those of the kernel.
_ENTROPY_ROUNDING = 5e-6
_ENTROPY_OF_EXACT_SCORES = 2e-4

# M, H, Hk, S, D and the size of a chunk, 0 where it is chosen: one key, grouped heads, several chunks.
_CACHE_SIZES: tuple[tuple[int, ...], ...] = ((1, 1, 1, 1, 1, 1), (3, 4, 2, 40, 8, 0), (1, 3, 1, 33, 33, 16))
_CACHE_SIZES_GPU = (
    (4, 32, 32, 4096, 128, 0),
    (1, 32, 32, 4096, 128, 0),
    (2, 32, 8, 8192, 128, 0),
    (3, 6, 2, 1001, 256, 32),
    (5, 2, 1, 500, 100, 100),
)
# M, H, N and D; chunks of 32.
_PARTIALS_SIZES: tuple[tuple[int, ...], ...] = ((1, 1, 1, 1), (3, 2, 5, 33), (2, 2, 40, 8))
_PARTIALS_SIZES_GPU = ((64, 32, 128, 128), (1, 32, 32, 128), (7, 5, 1000, 255))
# N, rows and D.
_STATES_SIZES: tuple[tuple[int, ...], ...] = ((1, 1, 1), (3, 4, 33), (9, 2, 128))
_STATES_SIZES_GPU = ((2, 2048, 128), (8, 100_000, 100))
# Relative; of float32 twice that of a softmax, since there are two products.
_CACHE_LIMITS = {"float32": 1e-5, "float16": 2e-3}
# Of partials: elements, maxima and sums, each in a norm of its own.
_PARTS = (slice(None, -2), -2, -1)
# Of a log-sum-exp: in nats, and relative to it.
_LSE_LIMIT, _LSE_LIMIT_RELATIVE = 1e-5, 1e-5

# d and n; B before them.
_SPECTRAL_BOUND = 0.95
# Relative, over the bound: what is promised where the iteration converges.
_SPECTRAL_TOLERANCE = 1e-3
_MEMORY_VARIANTS: tuple[str, ...] = ("within", "clip", "scale")
_BATCHED_VARIANTS: tuple[str, ...] = ("independent", "shared")
_MEMORY_SIZES: tuple[tuple[int, ...], ...] = ((1, 0), (5, 3), (17, 15))
_MEMORY_SIZES_GPU = ((256, 256), (512, 512), (1000, 24))
_BATCHED_SIZES: tuple[tuple[int, ...], ...] = ((3, 5, 2), (2, 17, 15))
_BATCHED_SIZES_GPU = ((32, 256, 256), (5, 500, 12))
# Another launch, and more samples than a block holds at a time; all variants of these would take the simulator minutes.
_ONE_MEMORY = ((65, 2), "within")
_ONE_BATCH = ((35, 8, 0), "shared")

# T, d, E and k.
_ROUTING_SIZES: tuple[tuple[int, ...], ...] = ((1, 1, 1, 1), (33, 5, 4, 2), (40, 64, 3, 3))
_ROUTING_SIZES_GPU = ((1024, 512, 4, 2), (5000, 1000, 64, 6), (4096, 7168, 128, 8))
# The usual capacity, and one at which tokens overflow and are dropped.
_CAPACITY_VARIANTS: tuple[str, ...] = ("roomy", "tight")


_ALSO = {
    "constrained_softmax": "entropy bound",
    "biencoder_attention": "entropy bound",
    "flash_decoding": "log-sum-exp",
    "flash_decoding_chunk": "empty chunks",
    "flash_decoding_reduce": "log-sum-exp",
    "merge_attention_states": "log-sum-exp",
    "cifg_update": "spectral bound",
    "batched_cifg_update": "spectral bound",
    "sparse_moe_dispatch": "places",
}
"""What is held against the reference, or its bound, beside the result. Places: of each choice, within the capacity."""

_SIZES = {
    "constrained_softmax": "rows × C",
    "attention_softmax": "B × H × Q × K",
    "biencoder_attention": "B × H × Hk × Q × K × D",
    "flash_decoding": "M × H × Hk × S × D",
    "flash_decoding_chunk": "M × H × Hk × S × D",
    "flash_decoding_reduce": "M × H × N × D",
    "merge_attention_states": "N × rows × D",
    "cifg_update": "d × n",
    "batched_cifg_update": "B × d × n",
    "sparse_moe_dispatch": "T × d × E × k",
    "sparse_moe_combine": "T × d × E × k",
}
"""What the numbers of a size are, in the letters of docs/notation.md."""


@dataclass(frozen=True)
class Outcome:
    error: float
    """Relative error in norm."""
    also_held: bool | None
    """What ``_ALSO`` says of the function; None where that is nothing."""
    events: int
    """What the function recorded."""
    events_expected: bool
    """Whether the reference recorded the same."""
    seconds: float


@dataclass(frozen=True)
class Case:
    operation: str
    size: str
    dtype: str
    compute: Callable[[], Outcome]
    limit: float | None = None
    """Of the relative error; None: that of the type."""


def relative_error(result: np.ndarray, expected: np.ndarray) -> float:
    """‖result − expected‖ / ‖expected‖; a value that is not finite gives infinity."""
    if not np.isfinite(result).all():
        return float("inf")
    distance, size = (float(np.linalg.norm(array.ravel())) for array in (result - expected, expected))
    if not distance:
        return 0.0
    return distance / size if size else float("inf")


def _timed(function: Callable[..., Any], simulated: bool, *arguments: Any, **options: Any) -> tuple[Any, Any, float]:
    """Call the function with an error buffer of its own: returns its result, the buffer and the seconds.

    On a GPU it is called once before, so that the time holds no compilation.
    """
    import burt_numba

    if not simulated:
        function(*arguments, errors=burt_numba.ErrorBuffer(), **options)
    errors = burt_numba.ErrorBuffer()
    start = time.perf_counter()
    result = function(*arguments, errors=errors, **options)
    return result, errors, time.perf_counter() - start


def _same_events(errors: Any, expected: Mapping[int, int]) -> bool:
    return {int(code): count for code, count in errors.counts.items()} == expected


def _constrained_softmax(shape: tuple[int, ...], dtype: str, simulated: bool) -> Outcome:
    import burt_numba
    from burt_numba import reference

    rng = np.random.default_rng(shape[-1])
    logits = (4 * rng.standard_normal(shape)).astype(dtype)
    # NaN, so that a row nobody wrote fails.
    temperature = np.full(shape[:-1], np.nan, dtype=np.float32)
    entropy = np.full(shape[:-1], np.nan, dtype=np.float32)
    result, errors, seconds = _timed(
        burt_numba.constrained_softmax,
        simulated,
        logits,
        _ENTROPY_BOUND,
        _TEMPERATURE_MIN,
        temperature_out=temperature,
        entropy_out=entropy,
    )
    # The band leaves the temperature a little freedom, so the reference is taken at the one that was returned.
    expected = reference.constrained_softmax(logits, _ENTROPY_BOUND, _TEMPERATURE_MIN, temperature=temperature)

    # The bound is promised before the rounding to float16.
    reached = entropy if dtype == "float16" else reference.entropy(result)
    held = reached <= _ENTROPY_BOUND + _ENTROPY_TOLERANCE
    # At the lowest temperature ties may keep the entropy above the bound: the events tell whether they do.
    held |= temperature == np.float32(_TEMPERATURE_MIN)
    near = (temperature == 1) | (reached >= _ENTROPY_BOUND - _ENTROPY_BAND)
    return Outcome(
        error=relative_error(result, expected.probabilities),
        also_held=bool((held & near).all()),
        events=sum(errors.counts.values()),
        events_expected=_same_events(errors, expected.counts),
        seconds=seconds,
    )


def _attention_softmax(shape: tuple[int, ...], dtype: str, variant: str, simulated: bool) -> Outcome:
    import burt_numba
    from burt_numba import reference

    rng = np.random.default_rng(shape[-1])
    scores = (4 * rng.standard_normal(shape)).astype(dtype)
    mask = None
    if variant == "mask":
        mask = np.where(rng.random((shape[0], 1, 1, shape[-1])) < 0.25, -np.inf, 0.0).astype(np.float32)
    causal = variant == "causal"
    offset = shape[3] - shape[2] if causal else None
    result, errors, seconds = _timed(
        burt_numba.attention_softmax, simulated, scores, mask, causal, causal_offset=offset
    )
    expected = reference.attention_softmax(scores, mask, causal, causal_offset=offset)
    return Outcome(
        error=relative_error(result, expected.probabilities),
        also_held=None,
        events=sum(errors.counts.values()),
        events_expected=_same_events(errors, expected.counts),
        seconds=seconds,
    )


def _biencoder_attention(sizes: tuple[int, ...], dtype: str, variant: str, simulated: bool) -> Outcome:
    import burt_numba
    from burt_numba import reference
    from burt_numba.reference.common import ENTROPY_OVERFLOW

    B, H, Hk, Q, K, D = sizes
    rng = np.random.default_rng(K)
    query = (2 * rng.standard_normal((B, H, Q, D))).astype(dtype)
    keys, values = ((size * rng.standard_normal((B, Hk, K, D))).astype(dtype) for size in (2, 1))
    lengths = None
    if variant == "lengths":
        lengths = rng.integers(K // 2, K, B, np.int32, endpoint=True)
        # Of several samples one has a length that is clamped.
        lengths[1:2] = K + 1
    bound = None if variant in ("plain", "tf32") else _ENTROPY_BOUND
    temperature = np.full((B, H, Q), np.nan, dtype=np.float32)
    entropy = np.full((B, H, Q), np.nan, dtype=np.float32)
    result, errors, seconds = _timed(
        burt_numba.biencoder_attention,
        simulated,
        query,
        keys,
        values,
        None,
        bound,
        _TEMPERATURE_MIN,
        context_lengths=lengths,
        precision="tf32" if variant == "tf32" else "fp32",
        temperature_out=temperature,
        entropy_out=entropy,
    )
    expected = reference.biencoder_attention(
        query, keys, values, None, bound, _TEMPERATURE_MIN, context_lengths=lengths, temperature=temperature
    )
    counts = np.minimum(1.0, temperature / _COLD)
    held, events = None, dict(expected.counts)
    if bound is not None:
        coldest = temperature == np.float32(_TEMPERATURE_MIN)
        low, high = bound - _ENTROPY_BAND - _ENTROPY_ROUNDING, bound + _ENTROPY_TOLERANCE + _ENTROPY_ROUNDING
        in_band = ((temperature == 1) | coldest | (entropy >= low)) & (coldest | (entropy <= high))
        exact = np.abs(entropy - expected.entropy) * counts <= _ENTROPY_OF_EXACT_SCORES
        held = bool((in_band & exact).all())
        # Whether two best contexts are too close for the lowest temperature depends on the rounding of their scores.
        events.pop(ENTROPY_OVERFLOW, None)
        out_of_reach = int((coldest & (entropy > np.float32(bound) + np.float32(_ENTROPY_TOLERANCE))).sum())
        if out_of_reach:
            events[ENTROPY_OVERFLOW] = out_of_reach
    return Outcome(
        error=relative_error(expected.output + (result - expected.output) * counts[..., np.newaxis], expected.output),
        also_held=held,
        events=sum(errors.counts.values()),
        events_expected=_same_events(errors, events),
        seconds=seconds,
    )


def _some_lengths(sequences: int, most: int) -> np.ndarray:
    """[M] any lengths; of several, one is 0 and one past the end, which is clamped."""
    lengths = np.random.default_rng(most).integers(-(-most // 2), most, sequences, np.int32, endpoint=True)
    lengths[1:2] = 0
    lengths[2:3] = most + 1
    return lengths


def _same_sums(lse: np.ndarray, expected: np.ndarray) -> bool:
    """-inf in the same places, and close elsewhere."""
    there = np.isfinite(expected)
    distance = np.abs(lse[there] - expected[there])
    close = distance <= _LSE_LIMIT + _LSE_LIMIT_RELATIVE * np.abs(expected[there])
    return bool(close.all() and (np.isneginf(lse) == ~there).all())


def _attention_states(
    function: str, arrays: Sequence[np.ndarray], simulated: bool, rows: tuple[int, ...], **options: Any
) -> Outcome:
    """A function that gives a result and its log-sum-exp."""
    import burt_numba
    from burt_numba import reference

    lse = np.full(rows, np.nan, dtype=np.float32)
    result, errors, seconds = _timed(getattr(burt_numba, function), simulated, *arrays, lse_out=lse, **options)
    expected = getattr(reference, function)(*arrays, **options)
    return Outcome(
        error=relative_error(result, expected.output),
        also_held=_same_sums(lse, expected.lse),
        events=sum(errors.counts.values()),
        events_expected=_same_events(errors, expected.counts),
        seconds=seconds,
    )


def _caches(sizes: tuple[int, ...], dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    M, H, Hk, S, D, _ = sizes
    rng = np.random.default_rng(S)
    query = (2 * rng.standard_normal((M, H, D), np.float32)).astype(dtype)
    keys, values = ((size * rng.standard_normal((M, Hk, S, D), np.float32)).astype(dtype) for size in (2, 1))
    return query, keys, values, _some_lengths(M, S)


def _flash_decoding(sizes: tuple[int, ...], dtype: str, simulated: bool) -> Outcome:
    arrays = _caches(sizes, dtype)
    return _attention_states("flash_decoding", arrays, simulated, sizes[:2], chunk_size=sizes[5] or None)


def _flash_decoding_chunk(sizes: tuple[int, ...], dtype: str, simulated: bool) -> Outcome:
    import burt_numba
    from burt_numba import reference

    arrays, chunk_size = _caches(sizes, dtype), sizes[5] or burt_numba.FLASH_DECODE_CHUNK_SIZE
    result, errors, seconds = _timed(burt_numba.flash_decoding_chunk, simulated, *arrays, chunk_size)
    expected = reference.flash_decoding_chunk(*arrays, chunk_size)
    empty = np.isneginf(expected.partials[..., -2])
    # No number says that there is no key but a sum of 0 and a maximum this low.
    marked = bool(((result[empty][:, -2] <= reference.DEAD_MAX) & (result[empty][:, -1] == 0)).all())
    return Outcome(
        error=max(relative_error(result[~empty][:, part], expected.partials[~empty][:, part]) for part in _PARTS),
        also_held=marked,
        events=sum(errors.counts.values()),
        events_expected=_same_events(errors, expected.counts),
        seconds=seconds,
    )


def _flash_decoding_reduce(sizes: tuple[int, ...], dtype: str, simulated: bool) -> Outcome:
    M, H, N, D = sizes
    rng = np.random.default_rng(N)
    partials = rng.standard_normal((M, H, N, D + 2), np.float32)
    partials[..., -2] *= 3
    partials[..., -1] = rng.uniform(1, 32, (M, H, N))
    # A chunk without keys, whatever it holds, where there are others.
    partials[:, :, 3:4] = np.nan
    partials[:, :, 3:4, -2] = -np.inf
    arrays = partials, _some_lengths(M, 32 * N)
    return _attention_states("flash_decoding_reduce", arrays, simulated, (M, H))


def _merge_attention_states(sizes: tuple[int, ...], dtype: str, simulated: bool) -> Outcome:
    N, rows, D = sizes
    rng = np.random.default_rng(N)
    outs, lses = rng.standard_normal((N, rows, D), np.float32).astype(dtype), rng.standard_normal((N, rows), np.float32)
    lses[1:2, :1] = -np.inf
    return _attention_states("merge_attention_states", (outs, 3 * lses), simulated, (rows,))


def _memory_inputs(sizes: tuple[int, ...], batch: tuple[int, ...], written: float, shared: bool) -> tuple[Any, ...]:
    """(C, h, x, W_f, b_f) with sigma(C) at 0.9 of the bound and ‖h‖ about ``written``."""
    *_, d, n = sizes
    rng = np.random.default_rng(d)
    C = rng.standard_normal((d, d) if shared else (*batch, d, d))
    C *= 0.9 * _SPECTRAL_BOUND / np.linalg.norm(C, 2, axis=(-2, -1), keepdims=True)
    h = rng.standard_normal((*batch, d)) * written / np.sqrt(d)
    x = rng.standard_normal((*batch, n))
    weights = rng.standard_normal((d, d + n)) / np.sqrt(d + n)
    return tuple(array.astype(np.float32) for array in (C, h, x, weights, rng.standard_normal(d)))


def _memory(function: str, inputs: tuple[Any, ...], simulated: bool, **options: Any) -> Outcome:
    import burt_numba
    from burt_numba import reference

    # Enough steps that the iteration converges: then the result is held against an SVD.
    result, errors, seconds = _timed(
        getattr(burt_numba, function),
        simulated,
        *inputs,
        _SPECTRAL_BOUND,
        power_iterations=100,
        # Its own output, so that a call before the timed one leaves C as it was; NaN, so that no cell is missed.
        out=np.full_like(inputs[0], np.nan),
        **options,
    )
    expected = getattr(reference, function)(*inputs, _SPECTRAL_BOUND, **options)
    sigma = np.linalg.norm(result.astype(np.float64), 2, axis=(-2, -1))
    return Outcome(
        error=relative_error(result, expected.memory),
        also_held=bool((sigma <= _SPECTRAL_BOUND * (1 + _SPECTRAL_TOLERANCE)).all()),
        events=sum(errors.counts.values()),
        events_expected=_same_events(errors, expected.counts),
        seconds=seconds,
    )


def _cifg_update(sizes: tuple[int, ...], variant: str, simulated: bool) -> Outcome:
    inputs = _memory_inputs(sizes, (), 0.3 if variant == "within" else 1.5, False)
    return _memory("cifg_update", inputs, simulated, projection="scale" if variant == "scale" else "clip")


def _batched_cifg_update(sizes: tuple[int, ...], variant: str, simulated: bool) -> Outcome:
    shared = variant == "shared"
    # The mean of many writes is smaller than one.
    inputs = _memory_inputs(sizes, sizes[:1], 4.0 if shared else 1.5, shared)
    return _memory("batched_cifg_update", inputs, simulated, shared_memory_mode=shared)


def _routing(
    sizes: tuple[int, ...], dtype: str, variant: str
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], int | None]:
    """(input, routing_weights, top_k_indices) with some padding, and the capacity."""
    T, d, E, k = sizes
    rng = np.random.default_rng(d)
    weights = rng.random((T, E), np.float32)
    choices = np.argsort(-weights, axis=1)[:, :k].astype(np.int32)
    choices[rng.random((T, k)) < 0.05] = -1
    capacity = None if variant == "roomy" else max(T * k // (2 * E), 1)
    return (rng.standard_normal((T, d)).astype(dtype), weights, choices), capacity


def _sparse_moe_dispatch(sizes: tuple[int, ...], dtype: str, variant: str, simulated: bool) -> Outcome:
    import burt_numba
    from burt_numba import reference

    arguments, capacity = _routing(sizes, dtype, variant)
    result, errors, seconds = _timed(burt_numba.sparse_moe_dispatch, simulated, *arguments, capacity)
    expected = reference.sparse_moe_dispatch(*arguments, capacity)
    places = (
        (result.dispatch_indices, expected.dispatch_indices),
        (result.expert_counts, expected.expert_counts),
        (result.num_dropped, [expected.num_dropped]),
        (result.num_overflowed, [expected.num_overflowed]),
    )
    return Outcome(
        error=max(
            relative_error(result.expert_inputs, expected.expert_inputs),
            relative_error(result.combine_weights, expected.combine_weights),
        ),
        also_held=all(np.array_equal(found, wanted) for found, wanted in places),
        events=sum(errors.counts.values()),
        events_expected=_same_events(errors, expected.counts),
        seconds=seconds,
    )


def _sparse_moe_combine(sizes: tuple[int, ...], dtype: str, variant: str, simulated: bool) -> Outcome:
    import burt_numba
    from burt_numba import reference

    arguments, capacity = _routing(sizes, dtype, variant)
    dispatch = reference.sparse_moe_dispatch(*arguments, capacity)
    dispatch = dispatch._replace(combine_weights=dispatch.combine_weights.astype(np.float32))
    outputs = np.random.default_rng(1).standard_normal(dispatch.expert_inputs.shape).astype(dtype)
    result, errors, seconds = _timed(burt_numba.sparse_moe_combine, simulated, outputs, dispatch)
    expected = reference.sparse_moe_combine(outputs, dispatch)
    return Outcome(
        error=relative_error(result, expected.output),
        also_held=None,
        events=sum(errors.counts.values()),
        events_expected=_same_events(errors, expected.counts),
        seconds=seconds,
    )


def _size(shape: Sequence[int]) -> str:
    return " × ".join(str(length) for length in shape)


def _chunks(operation: str, chunk_size: int) -> str:
    import burt_numba

    if not chunk_size and operation == "flash_decoding":
        return "chunks chosen"
    return f"chunks of {chunk_size or burt_numba.FLASH_DECODE_CHUNK_SIZE}"


def _constrained_softmax_cases(simulated: bool) -> Iterator[Case]:
    for shape in _SOFTMAX_SIZES + (() if simulated else _SOFTMAX_SIZES_GPU):
        for dtype in _ERROR_LIMITS:
            compute = partial(_constrained_softmax, shape, dtype, simulated)
            yield Case("constrained_softmax", _size(shape), dtype, compute)


def _attention_softmax_cases(simulated: bool) -> Iterator[Case]:
    for shape in _ATTENTION_SIZES + (() if simulated else _ATTENTION_SIZES_GPU):
        for dtype in _ERROR_LIMITS:
            for variant in _ATTENTION_VARIANTS:
                compute = partial(_attention_softmax, shape, dtype, variant, simulated)
                yield Case("attention_softmax", f"{_size(shape)} {variant}", dtype, compute)


def _biencoder_attention_cases(simulated: bool) -> Iterator[Case]:
    sizes = _CONTEXT_SIZES + (() if simulated else _CONTEXT_SIZES_GPU)
    for size, dtype, variant in itertools.product(sizes, _ERROR_LIMITS, _CONTEXT_VARIANTS):
        # float16 has one arithmetic.
        if dtype == "float16" and variant == "tf32":
            continue
        limit = _CONTEXT_LIMITS["tf32" if variant == "tf32" else dtype]
        compute = partial(_biencoder_attention, size, dtype, variant, simulated)
        yield Case("biencoder_attention", f"{_size(size)} {variant}", dtype, compute, limit)


def _flash_cases(
    operation: str,
    check: Callable[..., Outcome],
    sizes: tuple[tuple[int, ...], ...],
    on_gpu: tuple[tuple[int, ...], ...],
    limits: Mapping[str, float],
    simulated: bool,
) -> Iterator[Case]:
    for size, dtype in itertools.product(sizes + (() if simulated else on_gpu), limits):
        # The last number of caches is no size of theirs.
        named = f"{_size(size[:5])}, {_chunks(operation, size[5])}" if len(size) == 6 else _size(size)
        yield Case(operation, named, dtype, partial(check, size, dtype, simulated), limits[dtype])


def _cifg_update_cases(simulated: bool) -> Iterator[Case]:
    sizes = _MEMORY_SIZES + (() if simulated else _MEMORY_SIZES_GPU)
    for size, variant in (*itertools.product(sizes, _MEMORY_VARIANTS), _ONE_MEMORY):
        compute = partial(_cifg_update, size, variant, simulated)
        yield Case("cifg_update", f"{_size(size)} {variant}", "float32", compute)


def _batched_cifg_update_cases(simulated: bool) -> Iterator[Case]:
    sizes = _BATCHED_SIZES + (() if simulated else _BATCHED_SIZES_GPU)
    for size, variant in (*itertools.product(sizes, _BATCHED_VARIANTS), _ONE_BATCH):
        compute = partial(_batched_cifg_update, size, variant, simulated)
        yield Case("batched_cifg_update", f"{_size(size)} {variant}", "float32", compute)


def _routing_cases(operation: str, check: Callable[..., Outcome], simulated: bool) -> Iterator[Case]:
    sizes = _ROUTING_SIZES + (() if simulated else _ROUTING_SIZES_GPU)
    for size, dtype, variant in itertools.product(sizes, _ERROR_LIMITS, _CAPACITY_VARIANTS):
        yield Case(operation, f"{_size(size)} {variant}", dtype, partial(check, size, dtype, variant, simulated))


_CASES: dict[str, Callable[[bool], Iterator[Case]]] = {
    "constrained_softmax": _constrained_softmax_cases,
    "attention_softmax": _attention_softmax_cases,
    "biencoder_attention": _biencoder_attention_cases,
    "flash_decoding": partial(
        _flash_cases, "flash_decoding", _flash_decoding, _CACHE_SIZES, _CACHE_SIZES_GPU, _CACHE_LIMITS
    ),
    "flash_decoding_chunk": partial(
        _flash_cases,
        "flash_decoding_chunk",
        _flash_decoding_chunk,
        _CACHE_SIZES,
        _CACHE_SIZES_GPU,
        # Partials are of float32, whatever the caches are of.
        dict.fromkeys(_CACHE_LIMITS, _CACHE_LIMITS["float32"]),
    ),
    "flash_decoding_reduce": partial(
        _flash_cases,
        "flash_decoding_reduce",
        _flash_decoding_reduce,
        _PARTIALS_SIZES,
        _PARTIALS_SIZES_GPU,
        {"float32": _ERROR_LIMITS["float32"]},
    ),
    "merge_attention_states": partial(
        _flash_cases, "merge_attention_states", _merge_attention_states, _STATES_SIZES, _STATES_SIZES_GPU, _ERROR_LIMITS
    ),
    "cifg_update": _cifg_update_cases,
    "batched_cifg_update": _batched_cifg_update_cases,
    "sparse_moe_dispatch": partial(_routing_cases, "sparse_moe_dispatch", _sparse_moe_dispatch),
    "sparse_moe_combine": partial(_routing_cases, "sparse_moe_combine", _sparse_moe_combine),
}


def _row(case: Case, outcome: Outcome) -> tuple[bool, list[str]]:
    limit = case.limit or _ERROR_LIMITS[case.dtype]
    passed = outcome.error <= limit and outcome.also_held is not False and outcome.events_expected
    also = _ALSO.get(case.operation, "–")
    return passed, [
        case.operation,
        case.size,
        case.dtype,
        f"{outcome.error:.1e}",
        f"{limit:.0e}",
        "–" if outcome.also_held is None else also if outcome.also_held else f"not the {also}",
        f"{outcome.events}" if outcome.events_expected else f"{outcome.events}, not as expected",
        f"{outcome.seconds * 1e3:.1f} ms",
        "pass" if passed else "FAIL",
    ]


def _failed_row(case: Case, finding: str) -> list[str]:
    return [case.operation, case.size, case.dtype, *["–"] * 5, f"FAIL: {finding}"]


def _legend(operations: Sequence[str]) -> str:
    """How to read the columns."""
    return "\n".join(
        [
            *(f"size of {operation}: {_SIZES[operation]}" for operation in operations),
            "    in the letters of docs/notation.md",
            "relative error: of the result, in norm, against the float64 reference; also held: what else was checked",
            "events: what the function recorded, on purpose in some inputs (ties, lengths out of range, full experts);",
            "    a row passes only where the reference records the same",
        ]
    )


def check(operations: Sequence[str], *, sanitize: bool = False) -> int:
    simulated = driver.choose_target("--sanitize" if sanitize else None)
    from burt_numba.simulator import SimulatorError, checks

    cases = [case for operation in operations for case in _CASES[operation](simulated)]
    rows, findings, failures = [], [], 0
    with progress() as display, checks() if sanitize else nullcontext():
        task = display.add_task("check", total=len(cases))
        for case in cases:
            display.update(task, description=f"{case.operation} {case.size} {case.dtype}")
            try:
                passed, row = _row(case, case.compute())
            except SimulatorError as error:
                passed, row = False, _failed_row(case, type(error).__name__)
                findings.append(f"{case.operation} {case.size} {case.dtype}: {error}")
            failures += not passed
            rows.append(row)
            display.advance(task)
    title = "Simulator" if simulated else "GPU"
    table(
        f"{title}, checked for races, reads of unwritten memory, bounds and barriers" if sanitize else title,
        ["function", "size", "type", "relative error", "limit", "also held", "events", "time", "result"],
        rows,
    )
    print(f"\n{_legend(operations)}")
    for finding in findings:
        print(f"\n{finding}")
    print(f"{len(rows) - failures} passed, {failures} failed")
    return 1 if failures else 0
