"""What the tests of flash decoding share: inputs, guarded calls, and what every result must keep."""

from typing import NamedTuple

import numpy as np
import pytest
from support import LIMITS, Guarded, events_of, normal, to_target

import burt_numba
from burt_numba import reference

each_type = pytest.mark.parametrize("dtype", [np.float32, np.float16])
each_index = pytest.mark.parametrize("index", [np.int32, np.int64])


class Inputs(NamedTuple):
    """The first four arguments of flash_decoding."""

    query: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    seq_lens: np.ndarray


class Reduced(NamedTuple):
    """What a call gave, on the host."""

    out: np.ndarray
    lse: np.ndarray | None
    counts: dict
    first: tuple | None


class Chunked(NamedTuple):
    """What a call of flash_decoding_chunk gave, on the host."""

    partials: np.ndarray
    counts: dict
    first: tuple | None


# Data ----------------------------------------------------------------------------------------------------------------


def inputs_of(M, H, S, D, *, key_heads=None, seq_lens=None, index=np.int32, dtype=np.float32, spread=3.0, seed=0):
    """Normal vectors whose scores, at the default scale, have this spread; all keys count unless lengths say less."""
    key_heads = H if key_heads is None else key_heads
    size = np.sqrt(spread)
    return Inputs(
        normal((M, H, D), size, dtype, seed),
        normal((M, key_heads, S, D), size, dtype, seed + 1000),
        normal((M, key_heads, S, D), 1.0, dtype, seed + 2000),
        np.full(M, S, index) if seq_lens is None else np.asarray(seq_lens, index),
    )


def inputs_with_scores(scores, values, dtype=np.float32):
    """One query whose scores, at scale=1, are these numbers, over values of so many rows."""
    values = np.asarray(values, dtype)
    query, keys = np.zeros((1, 1, values.shape[1]), dtype), np.zeros((1, 1, *values.shape), dtype)
    query[..., 0], keys[0, 0, :, 0] = 1, scores
    return Inputs(query, keys, values[None, None], np.int32([len(scores)]))


def partials_of(M, H, N, D, *, spread=3.0, seed=0):
    """Partials as of chunks with some 30 keys, of which the maximum varies with this spread."""
    random = np.random.default_rng(seed)
    partials = np.empty((M, H, N, D + 2), np.float32)
    total = random.uniform(1, 30, (M, H, N, 1))
    partials[..., :D] = random.standard_normal((M, H, N, D)) * total
    partials[..., D:] = np.concatenate([random.standard_normal((M, H, N, 1)) * spread, total], axis=3)
    return partials


def chunks_of(*chunks):
    """[1, 1, N, D + 2] float32 of (elements, maximum, sum)."""
    return np.float32([[[[*elements, top, total] for elements, top, total in chunks]]])


# Running -------------------------------------------------------------------------------------------------------------


def _given(arrays, skew):
    """The arrays on the target; with `skew` between guard cells of NaN, off alignment."""
    return [
        to_target(array) if skew is None or array.dtype.kind != "f" else Guarded(array, np.nan, skew).array
        for array in arrays
    ]


def _outputs(shape, dtype, rows, lse, skew):
    out = Guarded(np.full(shape, np.nan, dtype), 777, skew or 0)
    sums = Guarded(np.full(rows, np.nan, np.float32), 777, skew or 0) if lse else None
    return out, sums, {"out": out.array, "errors": burt_numba.ErrorBuffer()} | ({"lse_out": sums.array} if lse else {})


def _reduced(returned, out, sums, options):
    assert returned is options["out"]
    return Reduced(out.result(), None if sums is None else sums.result(), *events_of(options["errors"]))


def run_reduce(partials, seq_lens, *args, skew=None, lse=True, **kwargs):
    """Call flash_decoding_reduce with guarded outputs of NaN and an error buffer of its own."""
    M, H, _, width = partials.shape
    out, sums, options = _outputs((M, H, width - 2), np.float32, (M, H), lse, skew)
    arrays = _given((partials, np.asarray(seq_lens)), skew)
    return _reduced(burt_numba.flash_decoding_reduce(*arrays, *args, **options, **kwargs), out, sums, options)


def run_chunk(inputs, *args, skew=None, **kwargs):
    """Call flash_decoding_chunk likewise."""
    (M, H, D), S = inputs.query.shape, inputs.k_cache.shape[2]
    chunk_size = args[0] if args else kwargs.get("chunk_size", burt_numba.FLASH_DECODE_CHUNK_SIZE)
    out = Guarded(np.full((M, H, -(-S // chunk_size), D + 2), np.nan, np.float32), 777, skew or 0)
    errors = burt_numba.ErrorBuffer()
    returned = burt_numba.flash_decoding_chunk(*_given(inputs, skew), *args, out=out.array, errors=errors, **kwargs)
    assert returned is out.array
    return Chunked(out.result(), *events_of(errors))


def run_flash(inputs, *args, skew=None, lse=True, **kwargs):
    """Call flash_decoding likewise."""
    shape = inputs.query.shape
    out, sums, options = _outputs(shape, inputs.query.dtype, shape[:2], lse, skew)
    arrays = _given(inputs, skew)
    return _reduced(burt_numba.flash_decoding(*arrays, *args, **options, **kwargs), out, sums, options)


def run_merge(outs, lses, *, skew=None, lse=True, **kwargs):
    """Call merge_attention_states likewise."""
    out, sums, options = _outputs(outs.shape[1:], outs.dtype, outs.shape[1:-1], lse, skew)
    arrays = _given((outs, lses), skew)
    return _reduced(burt_numba.merge_attention_states(*arrays, **options, **kwargs), out, sums, options)


# Comparing -----------------------------------------------------------------------------------------------------------


def finite(array):
    """In float64, with 0 in place of NaN and infinities."""
    return np.where(np.isfinite(array), array, 0).astype(np.float64)


def assert_close(out, expected, sizes, limit):
    """Each row within its limit of the reference, by the size of what was added up: terms of both signs cancel."""
    assert out.shape == expected.shape
    assert np.isfinite(out).all(), f"{np.count_nonzero(~np.isfinite(out))} entries are not finite"
    if out.size == 0:
        return
    error = np.linalg.norm(out.astype(np.float64) - expected, axis=-1)
    scale = np.linalg.norm(sizes, axis=-1)
    assert (error[scale == 0] == 0).all(), "a row that should be exactly 0 is not"
    smallest = 6e-8 * np.sqrt(out.shape[-1]) if out.dtype == np.float16 else 1e-37
    excess = error - limit * scale - smallest
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess[worst] <= 0, f"row {worst}: error {error[worst]:.3g} of {scale[worst]:.3g}"


def assert_sums(lse, expected, rounding=0.0):
    """ln sum exp, -inf where the reference has it."""
    assert lse.shape == expected.shape and lse.dtype == np.float32
    empty = np.isneginf(expected)
    assert (np.isneginf(lse) == empty).all() and not np.isnan(lse).any()
    sums = np.where(empty, 0.0, expected)
    error = np.abs(np.where(empty, 0.0, lse) - sums)
    limit = LIMITS["lse"] + LIMITS["lse_relative"] * np.abs(sums) + rounding
    assert (error <= limit).all(), f"lse off by {error.max()}"


def assert_events(outcome, expected):
    """Those of the reference: each element once, however many heads and chunks read it."""
    assert (outcome.counts, outcome.first) == (expected.counts, expected.first)


def assert_reduced(outcome, partials, seq_lens, chunk_size=32):
    """Everything that flash_decoding_reduce promises about its outputs and events."""
    expected = reference.flash_decoding_reduce(partials, seq_lens, chunk_size)
    sizes = np.concatenate([np.abs(finite(partials[..., :-2])), partials[..., -2:]], axis=3)
    sizes = reference.flash_decoding_reduce(sizes, seq_lens, chunk_size).output
    assert outcome.out.dtype == np.float32
    assert_close(outcome.out, expected.output, sizes, LIMITS["float32"])
    if outcome.lse is not None:
        assert_sums(outcome.lse, expected.lse)
    assert_events(outcome, expected)


def check_reduce(partials, seq_lens, *args, **kwargs):
    """Run flash_decoding_reduce and hold it to everything it promises. Returns the outcome."""
    outcome = run_reduce(partials, seq_lens, *args, **kwargs)
    assert_reduced(outcome, partials, seq_lens, *args)
    return outcome


def score_rounding(inputs, scale):
    """[M, H]: how far a score may be off, from the sizes of the terms of its sum."""
    query, keys, _ = (np.abs(finite(array)) for array in inputs[:3])
    if keys.size == 0 or query.size == 0:
        return np.zeros(query.shape[:2])
    keys = np.repeat(keys, query.shape[1] // keys.shape[1], axis=1)
    terms = np.einsum("mhd,mhsd->mhs", query, keys).max(axis=2)
    return LIMITS["score_rounding"] * terms * abs(query.shape[2] ** -0.5 if scale is None else scale)


def assert_chunked(outcome, inputs, chunk_size=32, scale=None):
    """Everything that flash_decoding_chunk promises about the partials and its events."""
    expected = reference.flash_decoding_chunk(*inputs, chunk_size, scale)
    sizes = inputs._replace(v_cache=np.abs(finite(inputs.v_cache)))
    sizes = reference.flash_decoding_chunk(*sizes, chunk_size, scale).partials[..., :-2]
    partials, wanted = outcome.partials, expected.partials
    assert partials.dtype == np.float32 and partials.shape == wanted.shape
    rounding = score_rounding(inputs, scale)[..., None]
    limit = LIMITS["attention_float32"] + 2 * rounding
    assert_close(partials[..., :-2], wanted[..., :-2], sizes, limit)
    empty = np.isneginf(wanted[..., -2])
    # Not looked at by what adds them up, and nothing but a sum of 0 and such a maximum says that there is no key.
    assert (partials[empty][:, -2] <= -1e30).all() and (partials[empty][:, -1] == 0).all()
    top, total = np.where(empty, 0, partials[..., -2]), np.where(empty, 0, wanted[..., -2])
    assert (np.abs(top - total) <= rounding + 1e-6 * np.abs(total)).all(), f"maximum off by {np.abs(top - total).max()}"
    assert (np.abs(partials[..., -1] - wanted[..., -1]) <= limit * wanted[..., -1]).all(), "sum of exponentials"
    assert_events(outcome, expected)


def check_chunk(inputs, *args, skew=None, **kwargs):
    """Run flash_decoding_chunk and hold it to everything it promises. Returns the outcome."""
    outcome = run_chunk(inputs, *args, skew=skew, **kwargs)
    assert_chunked(outcome, inputs, *args, **kwargs)
    return outcome


def assert_decoded(outcome, inputs, scale=None, *, chunk_size=None):
    """Everything that flash_decoding promises about its outputs and events."""
    expected = reference.flash_decoding(*inputs, scale, chunk_size=chunk_size)
    sizes = inputs._replace(v_cache=np.abs(finite(inputs.v_cache)))
    sizes = reference.flash_decoding(*sizes, scale, chunk_size=chunk_size).output
    rounding = score_rounding(inputs, scale)
    assert outcome.out.dtype == inputs.query.dtype
    limit = LIMITS[f"attention_{inputs.query.dtype.name}"] + 2 * rounding
    assert_close(outcome.out, expected.output, sizes, limit)
    if outcome.lse is not None:
        assert_sums(outcome.lse, expected.lse, rounding)
    assert_events(outcome, expected)


def check_flash(inputs, *args, skew=None, chunk_size=None, **kwargs):
    """Run flash_decoding and hold it to everything it promises. Returns the outcome."""
    outcome = run_flash(inputs, *args, skew=skew, chunk_size=chunk_size, **kwargs)
    assert_decoded(outcome, inputs, *args, chunk_size=chunk_size)
    return outcome


def assert_merged(outcome, outs, lses):
    """Everything that merge_attention_states promises about its outputs and events."""
    expected = reference.merge_attention_states(outs, lses)
    sizes = reference.merge_attention_states(np.abs(finite(outs)), lses).output
    assert outcome.out.dtype == outs.dtype
    assert_close(outcome.out, expected.output, sizes, LIMITS[outs.dtype.name])
    if outcome.lse is not None:
        assert_sums(outcome.lse, expected.lse)
    assert_events(outcome, expected)


def check_merge(outs, lses, **kwargs):
    """Run merge_attention_states and hold it to everything it promises. Returns the outcome."""
    outcome = run_merge(outs, lses, **kwargs)
    assert_merged(outcome, outs, lses)
    return outcome


def same_results(one, other):
    """Every output has the same bits, and the events are the same."""
    for a, b in zip(one, other, strict=True):
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            if a.tobytes() != b.tobytes():
                return False
        elif a != b:
            return False
    return True
