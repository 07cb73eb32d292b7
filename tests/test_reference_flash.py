"""The reference of flash decoding against values worked out elsewhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp, softmax
from support import normal

from burt_numba import reference

CLOSE = {"rel": 1e-12, "abs": 1e-12}


def vectors(M=3, H=4, S=10, D=5, key_heads=2):
    shapes = ((M, H, D), (M, key_heads, S, D), (M, key_heads, S, D))
    return [normal(shape, 1.5, seed=seed).astype(np.float64) for seed, shape in enumerate(shapes)]


def scores_of(query, keys):
    keys = np.repeat(keys, query.shape[1] // keys.shape[1], axis=1)
    return np.einsum("mhd,mhsd->mhs", query, keys) * float(np.float32(query.shape[2] ** -0.5))


def plain(query, keys, values, length):
    """softmax(q · kᵀ) · v over the first keys, and its log-sum-exp."""
    scores = scores_of(query, keys)[:, :, :length]
    values = np.repeat(values, query.shape[1] // values.shape[1], axis=1)[:, :, :length]
    return np.einsum("mhs,mhsd->mhd", softmax(scores, axis=2), values), logsumexp(scores, axis=2)


def partials_of(chunks):
    """[1, 1, N, D + 2] of (elements, maximum, sum)."""
    return np.array([[[[*elements, top, total] for elements, top, total in chunks]]])


def reduce(chunks, seq_lens=None, chunk_size=1):
    return reference.flash_decoding_reduce(
        partials_of(chunks), [len(chunks)] if seq_lens is None else seq_lens, chunk_size
    )


# Whole attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 10, 32])
def test_it_is_plain_attention_whatever_the_chunks(chunk_size):
    arrays = vectors()
    result = reference.flash_decoding(*arrays, [10, 7, 1], chunk_size=chunk_size)
    for m, length in enumerate((10, 7, 1)):
        output, lse = plain(*(array[[m]] for array in arrays), length)
        assert result.output[[m]] == pytest.approx(output, **CLOSE)
        assert result.lse[[m]] == pytest.approx(lse, **CLOSE)
    assert result.counts == {} and result.first is None


def test_it_is_biencoder_attention_without_a_bound():
    query, keys, values = vectors()
    result = reference.flash_decoding(query, keys, values, [10, 7, 0], 0.7)
    expected = reference.biencoder_attention(
        query[:, :, None], keys, values, 0.7, None, context_lengths=np.array([10, 7, 0])
    )
    assert result.output == pytest.approx(expected.output[:, :, 0], **CLOSE)
    assert result.lse == pytest.approx(expected.lse[:, :, 0], **CLOSE)


def test_partials_are_sums_of_each_chunk():
    query, keys, values = vectors(M=1)
    parts = reference.flash_decoding_chunk(query, keys, values, [8], 3).partials
    assert parts.shape == (1, 4, 4, 7)
    scores, values = scores_of(query, keys), np.repeat(values, 2, axis=1)
    for number, place in enumerate((slice(0, 3), slice(3, 6), slice(6, 8))):
        top = scores[:, :, place].max(axis=2)
        weights = np.exp(scores[:, :, place] - top[..., None])
        assert parts[:, :, number, :5] == pytest.approx(
            np.einsum("mhs,mhsd->mhd", weights, values[:, :, place]), **CLOSE
        )
        assert parts[:, :, number, 5] == pytest.approx(top, **CLOSE)
        assert parts[:, :, number, 6] == pytest.approx(weights.sum(axis=2), **CLOSE)
    assert (parts[:, :, 3] == [0, 0, 0, 0, 0, -np.inf, 0]).all()


@pytest.mark.parametrize("seq_len", [0, -3])
def test_a_sequence_without_keys(seq_len):
    query, keys, values = vectors(M=1)
    keys[:], values[:], query[:] = np.nan, np.inf, np.nan
    result = reference.flash_decoding(query, keys, values, [seq_len])
    assert (result.output == 0).all() and np.isneginf(result.lse).all()
    assert result.counts == ({6: 1} if seq_len < 0 else {})


def test_lengths_are_clamped_and_counted_once():
    arrays = vectors()
    result = reference.flash_decoding(*arrays, [10, 11, -1], chunk_size=4)
    clamped = reference.flash_decoding(*arrays, [10, 10, 0], chunk_size=4)
    assert (result.output == clamped.output).all() and (result.counts, result.first) == ({6: 2}, (1, 6))


def test_bad_elements_of_the_caches_count_as_zero():
    query, keys, values = vectors()
    clean = [array.copy() for array in (query, keys, values)]
    query[1, 2, 3], keys[0, 1, 4, 0], values[1, 0, 6, 4] = np.nan, np.inf, -np.inf
    clean[0][1, 2, 3] = clean[1][0, 1, 4, 0] = clean[2][1, 0, 6, 4] = 0
    keys[1, :, 7:], values[2, :, 1:] = np.nan, np.nan
    result = reference.flash_decoding(query, keys, values, [10, 7, 1], chunk_size=4)
    assert (result.output == reference.flash_decoding(*clean, [10, 7, 1], chunk_size=4).output).all()
    assert (result.counts, result.first) == ({1: 1, 2: 2}, ((1 * 4 + 2) * 5 + 3, 1))


def test_scores_that_overflow_are_zero():
    result = reference.flash_decoding_chunk([[[3e38, 3e38]]], [[[[2, 0], [1, -1]]]], [[[[1, 0], [0, 1]]]], [2], 2, 1.0)
    assert result.partials.tolist() == [[[[1, 1, 0, 2]]]] and (result.counts, result.first) == ({2: 1}, (0, 2))


def test_sums_of_values_that_overflow_are_zero():
    result = reference.flash_decoding_chunk([[[0.0, 0]]], [[[[0, 0]] * 2]], [[[[1, 3e38]] * 2]], [2], 2)
    assert result.partials.tolist() == [[[[2, 0, 0, 2]]]] and (result.counts, result.first) == ({2: 1}, (1, 2))


# Reducing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tops", "weight"), [((5.0, 5.0), 64 / 3136), ((5.0, 3.0), 64 * np.exp(-2) / (3072 + 64 * np.exp(-2)))]
)
def test_two_chunks_by_hand(tops, weight):
    result = reduce([([3072.0], tops[0], 3072), ([0.0], tops[1], 64)])
    assert result.output.item() == pytest.approx(1 - weight, **CLOSE)
    assert result.lse.item() == pytest.approx(5 + np.log(3072 + 64 * np.exp(tops[1] - 5)), **CLOSE)


@pytest.mark.parametrize("far", [0.0, 1e4, -1e4, 1e29, -9e29])
def test_maxima_of_any_size(far):
    result = reduce([([1.0, 0.0], far, 2), ([0.0, 3.0], far, 1)])
    assert result.output.ravel() == pytest.approx([1 / 3, 1.0], **CLOSE)
    assert result.lse.item() == pytest.approx(far + np.log(3), **CLOSE)


@pytest.mark.parametrize(
    ("chunk", "counts"),
    [
        (([np.nan], -np.inf, np.nan), {}),
        (([7.0], -1e30, 1.0), {}),
        (([np.inf], -1e31, np.inf), {}),
        (([7.0], 900.0, 0.0), {}),
        (([np.nan], 900.0, 0.0), {}),
        (([7.0], 900.0, -1.0), {}),
        (([np.nan], np.nan, 1.0), {1: 1}),
        (([7.0], np.inf, 0.0), {2: 1}),
        (([7.0], 1.0, np.nan), {1: 1}),
        (([7.0], np.inf, np.nan), {1: 1, 2: 1}),
        (([7.0], 1.0, np.inf), {2: 1}),
    ],
)
def test_chunks_that_do_not_count(chunk, counts):
    """Those with a sum or a maximum of no use, and what is recorded of them; the other chunk stays alone."""
    result = reduce([chunk, ([4.0], -60000.0, 2.0)])
    assert result.output.item() == 2 and result.lse.item() == pytest.approx(-60000 + np.log(2), **CLOSE)
    events = {code: count for code, count in result.counts.items() if not np.isnan(chunk[0][0])}
    expected = {code: count for code, count in counts.items() if not np.isnan(chunk[0][0])}
    assert events == expected
    nothing = reduce([chunk])
    assert (nothing.output == 0).all() and np.isneginf(nothing.lse).all()


def test_elements_of_live_chunks_alone_are_recorded():
    partials = np.zeros((2, 1, 3, 4))
    partials[..., 3] = 1
    partials[0, 0, 1, 0], partials[1, 0, 2, 1] = np.nan, np.inf
    result = reference.flash_decoding_reduce(partials, [3, 2], 1)
    assert (result.output == 0).all() and (result.counts, result.first) == ({1: 1}, (4, 1))


def test_results_beyond_float32_are_zero():
    result = reduce([([3e38, 1e-3], 0.0, 1e-2)])
    assert result.output.ravel().tolist() == [0, 0.1] and (result.counts, result.first) == ({2: 1}, (0, 2))


@pytest.mark.parametrize(
    ("seq_len", "chunk_size", "count"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (12, 4, 3), (1, 100, 1), (3, 1, 3)]
)
def test_chunks_of_a_length(seq_len, chunk_size, count):
    partials = np.full((1, 1, 3, 3), np.nan)
    partials[..., :count, :] = [1.0, 0.0, 1.0]
    result = reference.flash_decoding_reduce(partials, [seq_len], chunk_size)
    assert result.output.item() == (count > 0) and result.counts == {}


@pytest.mark.parametrize("seq_len", [13, 2**31 - 1, 2**62, -1, -(2**40)])
def test_lengths_of_more_chunks_than_there_are(seq_len):
    partials = np.broadcast_to([1.0, 0.0, 1.0], (3, 2, 3, 3))
    result = reference.flash_decoding_reduce(partials, [12, seq_len, 0], 4)
    assert (result.output[1] == (seq_len > 0)).all() and (result.counts, result.first) == ({6: 1}, (1, 6))


# Merging -------------------------------------------------------------------------------------------------------------


def test_merging_parts_of_the_keys_gives_all():
    query, keys, values = vectors()
    parts = [
        reference.flash_decoding(query, keys[:, :, place], values[:, :, place], [size] * 3)
        for place, size in ((slice(0, 4), 4), (slice(4, 5), 1), (slice(5, 5), 0), (slice(5, 10), 5))
    ]
    merged = reference.merge_attention_states([each.output for each in parts], [each.lse for each in parts])
    whole = reference.flash_decoding(query, keys, values, [10] * 3)
    assert merged.output == pytest.approx(whole.output, **CLOSE) and merged.lse == pytest.approx(whole.lse, **CLOSE)
    assert merged.counts == {}


def test_parts_without_a_key_do_not_count_whatever_they_hold():
    outs = np.array([[[np.nan, 1.0], [2.0, 3.0]], [[4.0, 5.0], [np.inf, np.nan]]])
    merged = reference.merge_attention_states(outs, [[-np.inf, 0.0], [-3.0, -np.inf]])
    assert merged.output.tolist() == [[4, 5], [2, 3]] and merged.lse.tolist() == [-3, 0] and merged.counts == {}


def test_bad_states_are_recorded():
    outs = np.ones((3, 2, 2))
    outs[0, 0, 1] = np.nan
    merged = reference.merge_attention_states(outs, [[0.0, np.nan], [0.0, np.inf], [0.0, 2.0]])
    assert merged.output == pytest.approx(np.array([[1, 2 / 3], [1, 1]]), **CLOSE)
    assert (merged.counts, merged.first) == ({1: 2, 2: 1}, (1, 1))


def test_merging_nothing():
    merged = reference.merge_attention_states(np.zeros((0, 3, 2)), np.zeros((0, 3)))
    assert merged.output.tolist() == [[0, 0]] * 3 and np.isneginf(merged.lse).all()


@given(st.data(), st.integers(1, 12))
def test_partials_of_partials(data, N):
    """Reducing groups of chunks first, or one after the other, gives what reducing all at once gives."""
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    partials = random.normal(0, 3, (1, 2, N, 4))
    partials[..., 3] = random.exponential(size=(1, 2, N))
    partials[..., 2][random.random((1, 2, N)) < 0.3] = -np.inf
    group = np.array(data.draw(st.lists(st.integers(0, 3), min_size=N, max_size=N)))
    whole = reference.flash_decoding_reduce(partials, [N], 1)
    states = [reference.flash_decoding_reduce(partials[:, :, group == g], [np.sum(group == g)], 1) for g in range(4)]
    again = np.stack([np.concatenate([s.output, s.lse[..., None], np.ones((1, 2, 1))], axis=2) for s in states], axis=2)
    reduced = reference.flash_decoding_reduce(again, [4], 1)
    merged = reference.merge_attention_states([s.output for s in states], [s.lse for s in states])
    for result in (reduced, merged):
        assert result.output == pytest.approx(whole.output, **CLOSE) and result.lse == pytest.approx(whole.lse, **CLOSE)


# Sizes and refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_empty_sizes(shape):
    M, H, N = shape
    reduced = reference.flash_decoding_reduce(np.full((M, H, N, 5), np.nan), np.full(M, -1 if 0 in shape[:2] else 0))
    assert reduced.output.shape == (M, H, 3) and (reduced.output == 0).all() and reduced.counts == {}
    arrays = [np.full((M, H, 4), np.nan), *[np.full((M, H, N, 4), np.nan)] * 2]
    parts = reference.flash_decoding_chunk(*arrays, np.zeros(M, int), 2)
    assert parts.partials.shape == (M, H, -(-N // 2), 6) and parts.counts == {}
    assert (reference.flash_decoding(*arrays, np.zeros(M, int)).output == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": np.zeros((3, 4))}, "query: expected shape"),
        ({"query": np.zeros((3, 4, 0))}, "query: expected shape"),
        ({"k_cache": np.zeros((3, 2, 10, 4))}, "k_cache: expected shape"),
        ({"k_cache": np.zeros((2, 2, 10, 5))}, "k_cache: expected shape"),
        ({"k_cache": np.zeros((3, 3, 10, 5))}, "k_cache: expected shape"),
        ({"k_cache": np.zeros((3, 0, 10, 5))}, "k_cache: expected shape"),
        ({"v_cache": np.zeros((3, 2, 9, 5))}, "v_cache: expected shape"),
        ({"seq_lens": [1, 2]}, "seq_lens: expected shape"),
        ({"chunk_size": 0}, "chunk_size: expected at least 1"),
        ({"scale": np.nan}, "scale: expected a finite number"),
    ],
)
def test_refusals(change, message):
    arguments = dict(zip(("query", "k_cache", "v_cache"), vectors(), strict=True)) | {"seq_lens": [1, 2, 3]}
    with pytest.raises(ValueError, match=f"^flash_decoding_chunk: {message}"):
        reference.flash_decoding_chunk(**(arguments | change))


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("flash_decoding_reduce", (np.zeros((1, 1, 1, 2)), [1]), "partials: expected shape"),
        ("flash_decoding_reduce", (np.zeros((1, 1, 4)), [1]), "partials: expected shape"),
        ("flash_decoding_reduce", (np.zeros((1, 1, 1, 4)), [1, 1]), "seq_lens: expected shape"),
        ("flash_decoding_reduce", (np.zeros((1, 1, 1, 4)), [1], 0), "chunk_size: expected at least 1"),
        ("merge_attention_states", (np.zeros(3), np.zeros(())), "outs: expected shape"),
        ("merge_attention_states", (np.zeros((3, 0)), np.zeros(3)), "outs: expected shape"),
        ("merge_attention_states", (np.zeros((3, 2, 1)), np.zeros(3)), "lses: expected shape"),
    ],
)
def test_refusals_of_the_others(function, arguments, message):
    with pytest.raises(ValueError, match=f"^{function}: {message}"):
        getattr(reference, function)(*arguments)


def test_refuses_lengths_that_are_no_integers():
    with pytest.raises(TypeError):
        reference.flash_decoding(*vectors(), [1.0, 2.0, 3.0])
