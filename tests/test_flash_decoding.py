"""Flash decoding against its reference, its contract and public fault reports about similar functions."""

import numpy as np
import pytest
from flash_support import (
    Inputs,
    assert_chunked,
    assert_decoded,
    assert_merged,
    assert_reduced,
    check_chunk,
    check_flash,
    check_merge,
    check_reduce,
    chunks_of,
    each_index,
    each_type,
    inputs_of,
    inputs_with_scores,
    partials_of,
    run_chunk,
    run_flash,
    run_merge,
    run_reduce,
    same_results,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from support import LIMITS, ON_GPU, cases, normal, relative_error

import burt_numba
from burt_numba import reference

# Sizes ---------------------------------------------------------------------------------------------------------------

# Elements of a value: one, around a vector, around a warp and its multiples, odd, the most.
DIMS = cases([1, 2, 3, 4, 5, 31, 33, 64, 96, 128, 129, 192, 255, 256], [8, 16, 32, 46, 63, 65, 100, 127])


@pytest.mark.parametrize("D", DIMS)
def test_dimensions_of_partials(D):
    """Head sizes outside a fixed list were refused, or their tails left unwritten: flashinfer-ai/flashinfer#761."""
    check_reduce(partials_of(2, 2, 5, D, seed=D), np.int32([160, 70]))


@pytest.mark.parametrize("D", DIMS)
@each_type
def test_dimensions(D, dtype):
    inputs = inputs_of(1, 1, 21, D, dtype=dtype, seed=D)
    check_flash(inputs)
    check_chunk(inputs, 16)


# Chunks: of one warp, two, .. eight; as many as these have in flight, and more; of one block, two and three.
CHUNKS = cases([1, 2, 3, 5, 8, 9, 31, 32, 33, 65, 255, 256, 257, 513], [4, 7, 128, 512, 1025, 5000, 65_536, 70_000])


@pytest.mark.parametrize("N", CHUNKS)
def test_chunks_of_partials(N):
    check_reduce(partials_of(1, 1, N, 8, seed=N), np.int32([N]), 1)


@pytest.mark.parametrize("S", cases([1, 2, 31, 32, 33, 65, 129, 300], [16, 64, 127, 128, 1000, 4096, 4097, 50_000]))
@each_type
def test_keys(S, dtype):
    inputs = inputs_of(2, 1, S, 8, seq_lens=[S, max(1, S - 3)], dtype=dtype, seed=S)
    check_flash(inputs)
    if dtype == np.float32 or ON_GPU:
        check_chunk(inputs)


@pytest.mark.parametrize(
    ("chunk_size", "S", "dtype"),
    cases(
        [
            (1, 5, np.float32),
            (2, 5, np.float16),
            (7, 40, np.float32),
            (16, 40, np.float16),
            (31, 70, np.float32),
            (32, 70, np.float32),
            (33, 70, np.float16),
            (64, 140, np.float32),
            (1000, 140, np.float32),
        ],
        [(1, 300, np.float16), (100, 1001, np.float32), (512, 5000, np.float16), (4097, 10_000, np.float32)],
    ),
)
def test_chunk_sizes(chunk_size, S, dtype):
    """Also that the result of the two steps is that of both at once."""
    inputs = inputs_of(2, 1, S, 8, seq_lens=[S, S // 2], dtype=dtype)
    check_flash(inputs, chunk_size=chunk_size)
    parts = check_chunk(inputs, chunk_size)
    outcome = check_reduce(parts.partials, inputs.seq_lens, chunk_size)
    assert_decoded(outcome._replace(out=outcome.out.astype(dtype)), inputs)


@pytest.mark.parametrize(
    ("M", "H", "S", "D"),
    cases(
        [(3, 5, 40, 16), (9, 1, 20, 5)],
        [(3, 32, 4096, 128), (1, 32, 4096, 128), (8, 32, 1000, 100), (2, 3, 20_000, 256), (70_000, 1, 3, 4)],
    ),
)
@each_type
def test_batches_and_heads(M, H, S, D, dtype):
    inputs = inputs_of(M, H, S, D, dtype=dtype)
    outcome = check_flash(inputs)
    expected = reference.flash_decoding(*inputs).output
    assert relative_error(outcome.out, expected) <= LIMITS[f"attention_{np.dtype(dtype).name}"]


@pytest.mark.parametrize(
    ("M", "H", "N", "D"), cases([(5, 3, 9, 20)], [(64, 32, 128, 128), (70_000, 1, 2, 3), (1, 70_000, 2, 3)])
)
def test_batches_and_heads_of_partials(M, H, N, D):
    partials = partials_of(M, H, N, D)
    seq_lens = np.random.default_rng(0).integers(0, 32 * N, M, np.int32, endpoint=True)
    outcome = check_reduce(partials, seq_lens)
    assert relative_error(outcome.out, reference.flash_decoding_reduce(partials, seq_lens).output) <= LIMITS["float32"]


@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
@each_type
def test_grouped_heads(key_heads, dtype):
    """Head h attends to head h // (H / Hk) of the caches, as if these were repeated."""
    inputs = inputs_of(2, 6, 37, 8, key_heads=key_heads, seq_lens=[37, 18], dtype=dtype)
    check_flash(inputs)
    check_chunk(inputs, 32)


@pytest.mark.parametrize("group", cases([5, 8, 9, 16, 17, 33], [32, 64, 71]))
def test_groups_of_many_heads(group):
    inputs = inputs_of(1, group, 40, 8, key_heads=1)
    check_flash(inputs)
    inputs.k_cache[0, 0, 3, 2], inputs.v_cache[0, 0, 39, 1], inputs.query[0, -1, 0] = np.nan, np.inf, np.nan
    assert check_chunk(inputs, 16).counts == {1: 2, 2: 1}


def test_chunks_of_several_blocks():
    """Bad elements in the second and third part of the chunks, and lengths at their edges."""
    partials, lengths = partials_of(5, 1, 513, 4), np.int32([513, 257, 256, 3, 0])
    for sequence, length in enumerate(lengths):
        partials[sequence, :, length:] = np.nan
    partials[0, 0, 300, 2], partials[0, 0, 512, 4], partials[1, 0, 256, 5] = np.inf, np.nan, np.nan
    outcome = check_reduce(partials, lengths, 1)
    assert (outcome.counts, outcome.first) == ({1: 2, 2: 1}, (300 * 6 + 2, 2))


# Nothing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (0, 0, 0), (2, 0, 0)])
@each_type
def test_no_rows(shape, dtype):
    """A launch was sized by a division by the number of rows: Dao-AILab/flash-attention#2503."""
    M, H, N = shape
    lengths = np.full(M, -1, np.int32)
    reduced = run_reduce(np.full((M, H, N, 10), np.nan, np.float32), lengths)
    arrays = [np.full((M, H, *size, 8), np.nan, dtype) for size in ((), (N,), (N,))]
    decoded, parts = run_flash(Inputs(*arrays, lengths)), run_chunk(Inputs(*arrays, lengths), 2)
    assert reduced.out.shape == decoded.out.shape == (M, H, 8)
    assert parts.partials.shape == (M, H, -(-N // 2), 10)
    assert reduced.counts == decoded.counts == parts.counts == {}


@each_type
def test_no_keys(dtype):
    inputs = inputs_of(2, 4, 0, 8, key_heads=2, dtype=dtype)
    outcome = check_flash(inputs)
    assert (outcome.out == 0).all() and np.isneginf(outcome.lse).all() and outcome.counts == {}
    assert check_chunk(inputs).partials.shape == (2, 4, 0, 10)


def test_no_chunks():
    outcome = check_reduce(np.zeros((2, 3, 0, 10), np.float32), np.int32([0, 5]))
    assert (outcome.out == 0).all() and np.isneginf(outcome.lse).all() and outcome.counts == {6: 1}


def test_no_states():
    outcome = check_merge(np.zeros((0, 2, 3, 5), np.float32), np.zeros((0, 2, 3), np.float32))
    assert (outcome.out == 0).all() and np.isneginf(outcome.lse).all()
    empty = check_merge(np.zeros((3, 0, 5), np.float32), np.zeros((3, 0), np.float32))
    assert empty.out.shape == (0, 5) and empty.counts == {}


@pytest.mark.parametrize("empty", [-np.inf, -1e30, -3e38])
def test_empty_chunks_alone(empty):
    """Two empty states merged to NaN: flashinfer-ai/flashinfer#4051, #5262."""
    outcome = check_reduce(chunks_of(*[([0.0] * 64, empty, 0.0)] * 2), np.int32([64]))
    assert (outcome.out == 0).all() and np.isneginf(outcome.lse).all() and outcome.counts == {}


def test_empty_states_alone():
    outs, lses = np.full((2, 1, 64), np.nan, np.float32), np.full((2, 1), -np.inf, np.float32)
    outcome = check_merge(outs, lses)
    assert (outcome.out == 0).all() and np.isneginf(outcome.lse).all() and outcome.counts == {}


# Lengths -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 16, 32, 33])
@each_index
def test_exactly_the_chunks_of_a_length_count(chunk_size, index):
    """The size of a chunk went from 32 to 16, and both sides had to agree: paiml/trueno#246."""
    lengths = np.array([0, 1, 15, 16, 17, 32, 33, 64], index)
    partials = partials_of(len(lengths), 1, 64 // chunk_size + 1, 8)
    for sequence, length in enumerate(lengths):
        partials[sequence, :, -(-length // chunk_size) :] = np.nan
    outcome = check_reduce(partials, lengths, chunk_size)
    assert outcome.counts == {} and (outcome.out[0] == 0).all()


def test_more_chunks_than_a_sequence_has():
    """An automatic number of splits was above that of the valid chunks: pytorch/torchtitan#3235."""
    lengths = np.int32([0, 1, 33, 1024])
    partials = partials_of(4, 1, 64, 8)
    for sequence, length in enumerate(lengths):
        partials[sequence, :, -(-length // 16) :] = np.nan
    outcome = check_reduce(partials, lengths, 16)
    assert outcome.counts == {} and (outcome.out[0] == 0).all() and (outcome.out[1] != 0).all()


@pytest.mark.parametrize(
    ("chunk_size", "dtype", "index"),
    [
        (None, np.float32, np.int32),
        (16, np.float16, np.int64),
        (16, np.float32, np.int32),
        (None, np.float16, np.int64),
    ],
)
def test_ragged_lengths(chunk_size, dtype, index):
    """Keys past the length are absent, and so is what they hold."""
    lengths = [0, 1, 15, 16, 17, 39, 40]
    inputs = inputs_of(len(lengths), 1, 40, 8, seq_lens=lengths, dtype=dtype, index=index)
    clean = check_flash(inputs, chunk_size=chunk_size)
    for sequence, length in enumerate(lengths):
        inputs.k_cache[sequence, :, length:], inputs.v_cache[sequence, :, length:] = np.inf, np.nan
    assert same_results(run_flash(inputs, chunk_size=chunk_size), clean) and clean.counts == {}
    assert check_chunk(inputs, 16).counts == {}


@each_index
def test_lengths_out_of_range_are_clamped_and_counted_once_a_sequence(index):
    huge = 2**31 - 1 if index is np.int32 else 2**62
    lengths = np.array([40, -1, 41, huge, -huge], index)
    inputs = inputs_of(5, 2, 40, 8, seq_lens=lengths, index=index)
    clamped = inputs._replace(seq_lens=np.clip(lengths, 0, 40))
    outcome = check_flash(inputs, chunk_size=16)
    assert outcome.out.tobytes() == run_flash(clamped, chunk_size=16).out.tobytes()
    assert (outcome.counts, outcome.first) == ({6: 4}, (1, 6))
    parts = check_chunk(inputs, 16)
    assert parts.partials.tobytes() == run_chunk(clamped, 16).partials.tobytes()
    assert (parts.counts, parts.first) == ({6: 4}, (1, 6))
    # 41 keys are as many chunks of 16 as 40 are.
    reduced = check_reduce(parts.partials, lengths, 16)
    assert relative_error(reduced.out, outcome.out) <= LIMITS["float32"]
    assert (reduced.counts, reduced.first) == ({6: 3}, (1, 6))


def test_a_chunk_size_beyond_every_length():
    partials = partials_of(2, 1, 3, 8)
    check_reduce(partials, np.int64([5, 2**40]), 2**31 - 1)
    check_flash(inputs_of(1, 2, 20, 8), chunk_size=2**31 - 1)


def test_an_empty_sequence_is_written():
    """A sequence without keys left its output unwritten: sgl-project/sglang#22688, flashinfer-ai/flashinfer#3047."""
    inputs = inputs_of(3, 2, 40, 8, seq_lens=[0, 40, 0])
    for chunk_size in (None, 16):
        outcome = check_flash(inputs, chunk_size=chunk_size)
        assert (outcome.out[[0, 2]] == 0).all() and np.isneginf(outcome.lse[[0, 2]]).all()


# Known values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tops", "second"), [((5.0, 5.0), 64.0), ((5.0, 3.0), 64 * np.exp(-2)), ((0.0, 0.0), 64.0)])
def test_two_chunks_by_hand(tops, second):
    """Sums to base 2 were added to sums to base e: sgl-project/sglang#40903, #35045, vllm-project/vllm#52796."""
    partials = chunks_of(([3072.0], tops[0], 3072), ([0.0], tops[1], 64))
    outcome = check_reduce(partials, np.int32([64]))
    assert outcome.out.item() == pytest.approx(3072 / (3072 + second), rel=2e-7)
    assert outcome.lse.item() == pytest.approx(tops[0] + np.log(3072 + second), rel=2e-7)
    merged = check_merge(np.float32([[[1.0]], [[0.0]]]), np.log(np.float32([[3072], [64]])))
    assert merged.out.item() == pytest.approx(3072 / 3136, rel=2e-6)


def test_a_chunk_whose_sum_is_0_sets_no_maximum():
    """Empty rows were marked by a finite number, here the largest: flashinfer-ai/flashinfer#4452."""
    partials = chunks_of(([0.0, 0.0], -49993.9765625, 0.0), ([2.0, 3.0], -60000.0, 1.0))
    outcome = check_reduce(partials, np.int32([64]))
    assert outcome.out.ravel().tolist() == [2, 3] and outcome.lse.item() == -60000 and outcome.counts == {}


@pytest.mark.parametrize("far", [0.0, 300.0, -300.0, 1e4, -49_999.0, 1e29, -9e29])
def test_maxima_of_any_size(far):
    """Only their differences count; scores that were all below a stand-in for -inf gave zeros: flashinfer#4267."""
    outcome = check_reduce(chunks_of(([1.0, 0.0], far, 2.0), ([0.0, 3.0], far, 1.0)), np.int32([64]))
    assert outcome.out.ravel() == pytest.approx([1 / 3, 1.0], rel=1e-6)


@pytest.mark.parametrize("scores", [[-245000, -245001], [3e4, 3e4 + 1], [-1e29, -1e29], [0, 200], [-9e29, 0]])
def test_scores_far_from_0(scores):
    inputs = inputs_with_scores(scores, np.eye(2))
    expected = np.exp(np.array(scores, np.float64) - max(scores))
    for chunk_size in (None, 1, 2):
        outcome = check_flash(inputs, 1.0, chunk_size=chunk_size)
        assert outcome.out.ravel() == pytest.approx(expected / expected.sum(), rel=1e-6)


def test_scores_at_the_mark_of_an_empty_chunk_do_not_count():
    """-1e30 and below is no score: not so in attention_softmax, where -inf alone is a mask."""
    outcome = check_flash(inputs_with_scores([-2e30, -2e30], np.eye(2)), 1.0, chunk_size=1)
    assert (outcome.out == 0).all() and np.isneginf(outcome.lse).all()


def test_a_small_sum_is_divided_by():
    """Its reciprocal is beyond float32."""
    partials = chunks_of(([3e-39, 1.5e-39], 7.0, 3e-39), ([0.0, 0.0], -500.0, 1.0))
    outcome = run_reduce(partials, np.int32([64]))
    assert outcome.out.ravel() == pytest.approx([1, 0.5], rel=1e-5) and outcome.counts == {}


def test_against_attention_without_a_bound():
    inputs = inputs_of(3, 2, 40, 8, seq_lens=[40, 17, 0])
    outcome = check_flash(inputs, chunk_size=16)
    expected = reference.biencoder_attention(
        inputs.query[:, :, None], *inputs[1:3], None, None, context_lengths=inputs.seq_lens
    )
    assert relative_error(outcome.out, expected.output[:, :, 0]) <= LIMITS["attention_float32"]
    assert outcome.lse[:2] == pytest.approx(expected.lse[:2, :, 0], rel=1e-6)


@pytest.mark.parametrize("scale", [None, 1.0, 0.125, -0.5, 0.0, 1e-30])
@each_type
def test_scales(scale, dtype):
    inputs = inputs_of(1, 2, 37, 4, dtype=dtype)
    check_flash(inputs, scale, chunk_size=16)
    check_chunk(inputs, 16, scale)


@pytest.mark.parametrize(
    ("scale", "query", "keys"),
    [
        (3.4e38, 1e-19, [1e-19, 2e-19]),
        (-3.4e38, 1e-19, [1e-19, 2e-19]),
        (3e38, 1.0, [0.0, 0.5]),
        (1e-38, 1.5e19, [1.5e19, -1.5e19]),
        (0.0, 3e38, [2.0, 0.1]),
    ],
)
def test_scales_near_the_ends_of_float32(scale, query, keys):
    """The scale times log2 e would be beyond it; so would the scores before the scale."""
    inputs = inputs_with_scores(keys, np.eye(2))
    inputs.query[...] = query
    for chunk_size in (None, 1):
        check_flash(inputs, scale, chunk_size=chunk_size)


def test_defaults_are_the_documented_ones():
    assert burt_numba.FLASH_DECODE_CHUNK_SIZE == 32
    inputs, partials = inputs_of(2, 2, 70, 7), partials_of(2, 2, 5, 7)
    assert same_results(run_chunk(inputs), run_chunk(inputs, 32, 7**-0.5))
    assert same_results(run_reduce(partials, inputs.seq_lens), run_reduce(partials, inputs.seq_lens, 32))
    assert same_results(run_flash(inputs), run_flash(inputs, 7**-0.5, chunk_size=None))


# The same bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "chunk_size", "key_heads"),
    cases(
        [(np.float32, 16, 1), (np.float16, 32, 2)],
        [(np.float32, 64, 2), (np.float16, 7, 1), (np.float32, 1, 1), (np.float32, 300, 2)],
    ),
)
def test_a_row_has_the_same_bits_in_any_batch(dtype, chunk_size, key_heads):
    """Alone, among others, elsewhere in the batch, in a longer cache: with chunk_size given nothing else decides."""
    batch = inputs_of(5, 2, 70, 8, key_heads=key_heads, seq_lens=[70, 3, 33, 0, 64], dtype=dtype)
    whole = check_flash(batch, chunk_size=chunk_size)
    parts = run_chunk(batch, chunk_size).partials
    for place in ([2], [4, 2]):
        some = Inputs(*(np.ascontiguousarray(array[place]) for array in batch))
        longer = some._replace(
            **{name: np.pad(getattr(some, name), [(0, 0), (0, 0), (0, 130), (0, 0)]) for name in ("k_cache", "v_cache")}
        )
        for inputs in (some, longer):
            outcome = run_flash(inputs, chunk_size=chunk_size)
            assert outcome.out.tobytes() == whole.out[place].tobytes()
            assert outcome.lse.tobytes() == whole.lse[place].tobytes()
        made = run_chunk(longer, chunk_size).partials
        # The last chunk of the shorter cache may have fewer keys than it has room for, but they are the same ones.
        assert made[:, :, : parts.shape[2]].tobytes() == parts[place].tobytes()


def test_a_row_of_partials_has_the_same_bits_in_any_batch():
    partials, lengths = partials_of(5, 1, 40, 8), np.int32([40, 7, 33, 0, 39])
    whole = check_reduce(partials, lengths, 1)
    for place in ([2], [4, 2]):
        some = np.ascontiguousarray(partials[place])
        longer = np.pad(some, [(0, 0), (0, 0), (0, 300), (0, 0)], constant_values=np.nan)
        for one in (some, longer):
            outcome = run_reduce(one, lengths[place], 1)
            assert outcome.out.tobytes() == whole.out[place].tobytes()
            assert outcome.lse.tobytes() == whole.lse[place].tobytes()


def test_the_same_bits_on_every_run():
    inputs = inputs_of(3, 2, 70, 8, seq_lens=[70, 3, 33])
    first = run_flash(inputs)
    assert all(same_results(run_flash(inputs), first) for _ in range(50 if ON_GPU else 1))


def test_a_chunk_size_alone_changes_no_more_than_rounding():
    inputs = inputs_of(2, 2, 70, 8, seq_lens=[70, 33])
    results = [run_flash(inputs, chunk_size=size).out for size in (None, 16, 70)]
    for result in results[1:]:
        assert relative_error(result, results[0]) <= 2 * LIMITS["attention_float32"]


# Merging is associative ----------------------------------------------------------------------------------------------


# An example is several launches.
few = settings(max_examples=100 if ON_GPU else 6)


@few
@given(st.data(), st.integers(1, 12), st.integers(0, 10**6))
def test_reducing_partials_of_partials(data, N, seed):
    """Groups of chunks first, in whatever order, and then these: as all at once."""
    partials = partials_of(1, 1, N, 5, seed=seed)
    random = np.random.default_rng(seed)
    partials[..., -2][random.random((1, 1, N)) < 0.3] = -np.inf
    group = np.array(data.draw(st.lists(st.integers(0, 2), min_size=N, max_size=N)))
    whole = check_reduce(partials, np.int32([N]), 1)
    states = []
    for number in range(3):
        some = np.ascontiguousarray(partials[:, :, group == number])
        states.append(run_reduce(some, np.int32([some.shape[2]]), 1))
    outs, lses = np.stack([state.out for state in states]), np.stack([state.lse for state in states])
    again = np.concatenate([outs, lses[..., None], np.ones_like(lses)[..., None]], axis=3)
    reduced = run_reduce(np.ascontiguousarray(again.transpose(1, 2, 0, 3)), np.int32([3]), 1)
    merged = check_merge(outs, lses)
    finite = np.isfinite(whole.lse)
    sizes = np.abs(whole.out).max(initial=1e-30)
    for result in (reduced, merged):
        assert np.abs(result.out - whole.out).max() <= 1e-5 * max(sizes, 1)
        assert (np.isfinite(result.lse) == finite).all() and result.counts == {}
        assert result.lse[finite] == pytest.approx(whole.lse[finite], rel=1e-6, abs=4e-6)


@few
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 10**6))
def test_two_parts_of_the_keys_merge_to_all(cut, length, seed):
    """Attention over the keys before a place and over those from it on."""
    inputs = inputs_of(1, 1, 40, 4, seq_lens=[length], seed=seed % 1000)
    parts = []
    for place, size in ((slice(0, cut), min(cut, length)), (slice(cut, 40), max(length - cut, 0))):
        caches = (np.ascontiguousarray(array[:, :, place]) for array in inputs[1:3])
        parts.append(run_flash(Inputs(inputs.query, *caches, np.int32([size])), chunk_size=16))
    merged = check_merge(np.stack([part.out for part in parts]), np.stack([part.lse for part in parts]))
    assert_decoded(merged, inputs)


@pytest.mark.parametrize(
    ("N", "D"),
    cases(
        [(1, 1), (2, 5), (3, 8), (5, 64), (9, 128), (33, 129), (100, 256), (257, 4)],
        [(31, 31), (32, 33), (300, 127), (1000, 255), (70_000, 8)],
    ),
)
@each_type
def test_states(N, D, dtype):
    """Outputs beside their log-sum-exp, some of them empty."""
    lses = normal((N, 2), 3.0, seed=N)
    lses[np.random.default_rng(D).random(lses.shape) < 0.3] = -np.inf
    check_merge(normal((N, 2, D), dtype=dtype, seed=D), lses)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 1, 3, 2), (2, 1, 2, 1, 2)])
def test_states_of_any_axes(shape):
    check_merge(normal((3, *shape, 8)), normal((3, *shape), seed=1))


@pytest.mark.parametrize("lse", [0.0, 300.0, -300.0, 1e30, -2e30, 3.4028235e38, -3.4028235e38])
@pytest.mark.parametrize("states", [2, 258])
def test_states_of_any_size(lse, states):
    """Only differences count; that -1e30 is an empty chunk holds for partials alone."""
    outs = np.tile(np.float32([[[1.0, 5.0]], [[3.0, 5.0]]]), (states // 2, 1, 1))
    assert check_merge(outs, np.full((states, 1), lse, np.float32)).out.ravel().tolist() == [2, 5]


def test_bad_states_among_many():
    """More than a block takes: places of events and of parts without a state."""
    outs, lses = normal((600, 2, 4)), normal((600, 2), seed=1)
    outs[500, 1, 3], lses[300, 0], lses[:256, 1] = np.nan, np.inf, -np.inf
    check_merge(outs, lses)


# Bad numbers ---------------------------------------------------------------------------------------------------------

DEAD_CHUNKS = {
    "maximum of -inf": ([np.nan, 1.0], -np.inf, np.nan),
    "maximum of -1e30": ([np.inf, 1.0], -1e30, np.inf),
    "maximum below -1e30": ([np.nan, np.nan], -3e38, 1.0),
    "sum of 0": ([5.0, 1.0], 900.0, 0.0),
}


@pytest.mark.parametrize("chunk", DEAD_CHUNKS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_chunks_that_do_not_count(chunk, place):
    """Whatever else they hold, NaN included, and wherever they lie."""
    live = [([2.0, 0.0], 1.0, 1.0), ([0.0, 3.0], 1.0, 3.0)]
    expected = check_reduce(chunks_of(*live), np.int32([2]), 1)
    outcome = check_reduce(chunks_of(*live[:place], DEAD_CHUNKS[chunk], *live[place:]), np.int32([3]), 1)
    assert outcome.out == pytest.approx(expected.out, rel=1e-6)
    assert outcome.lse == pytest.approx(expected.lse, rel=1e-6) and outcome.counts == {}


@pytest.mark.parametrize(
    ("top", "total", "counts"),
    [
        (np.nan, 1.0, {1: 1}),
        (np.inf, 1.0, {2: 1}),
        (np.inf, 0.0, {2: 1}),
        (1.0, np.nan, {1: 1}),
        (1.0, np.inf, {2: 1}),
        (1.0, -np.inf, {2: 1}),
        (np.nan, np.inf, {1: 1, 2: 1}),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_a_bad_maximum_or_sum_is_recorded_and_its_chunk_absent(top, total, counts, alone):
    """Producers mark empty chunks by -inf or by +inf: vllm-project/vllm#15492, Dao-AILab/flash-attention#978."""
    chunks = [([4.0, 6.0], -3.0, 2.0)] * 2
    chunks[1] = ([7.0, 7.0], top, total)
    outcome = check_reduce(chunks_of(*chunks[alone:]), np.int32([2 - alone]), 1)
    assert outcome.out.ravel().tolist() == ([0, 0] if alone else [2, 3]) and outcome.counts == counts


def test_rows_beside_a_bad_one_keep_their_bits():
    partials = partials_of(3, 2, 5, 8)
    clean = check_reduce(partials, np.int32([160] * 3))
    partials[1, 0, 2, -2], partials[1, 0, 3, 4], partials[1, 0, 4, -1] = np.inf, np.nan, np.nan
    outcome = check_reduce(partials, np.int32([160] * 3))
    others = np.arange(6) != 2
    assert outcome.out.reshape(6, 8)[others].tobytes() == clean.out.reshape(6, 8)[others].tobytes()
    assert outcome.lse.ravel()[others].tobytes() == clean.lse.ravel()[others].tobytes()
    assert (outcome.counts, outcome.first) == ({1: 2, 2: 1}, ((1 * 2 * 5 + 2) * 10 + 8, 2))


@pytest.mark.parametrize("D", [5, 8])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_element_of_a_live_chunk_counts_as_0(D, value):
    partials = partials_of(2, 2, 5, D)
    clean = partials.copy()
    partials[1, 0, 3, D - 1] = value
    clean[1, 0, 3, D - 1] = 0
    outcome = check_reduce(partials, np.int32([160, 160]))
    assert outcome.out.tobytes() == run_reduce(clean, np.int32([160, 160])).out.tobytes()
    assert outcome.counts == ({1: 1} if np.isnan(value) else {2: 1})
    assert outcome.first[0] == ((2 * 5) + 3) * (D + 2) + D - 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", Inputs._fields[:3])
@each_type
def test_a_bad_element_of_an_input_counts_as_0(name, value, dtype):
    inputs = inputs_of(2, 2, 24, 8, key_heads=1, seq_lens=[20, 20], dtype=dtype)
    bad, clean = ({field: getattr(inputs, field).copy() for field in inputs._fields} for _ in range(2))
    place = (1, 1, 5) if name == "query" else (1, 0, 17, 5)
    bad[name][place], clean[name][place] = value, 0
    outcome, parts = check_flash(Inputs(**bad)), check_chunk(Inputs(**bad), 16)
    zeroed_parts = run_chunk(Inputs(**clean), 16)
    # Its score may be added up in another order; other rows keep their bits.
    assert parts.partials[0].tobytes() == zeroed_parts.partials[0].tobytes()
    assert parts.counts.keys() == outcome.counts.keys() == {1 if np.isnan(value) else 2}
    assert parts.first == outcome.first == (np.ravel_multi_index(place, bad[name].shape), *parts.counts)


def test_events_are_counted_once_over_many_chunks():
    """More chunks than a block has: those of the query, of lengths and of the caches."""
    inputs = inputs_of(2, 2, 100, 4, seq_lens=[101, 100])
    inputs.query[:, 1, 2], inputs.k_cache[1, 0, 70, 1], inputs.v_cache[0, 1, [5, 99], 3] = np.nan, np.inf, np.nan
    for outcome in (check_flash(inputs, chunk_size=8), check_chunk(inputs, 8)):
        assert outcome.counts == {1: 4, 2: 1, 6: 1}


def test_everything_bad_is_zeros():
    inputs = Inputs(*(np.full(array.shape, np.nan, np.float32) for array in inputs_of(1, 2, 20, 5)[:3]), np.int32([20]))
    outcome = check_flash(inputs)
    assert (outcome.out == 0).all() and outcome.lse == pytest.approx(np.full((1, 2), np.log(20)), rel=1e-6)
    outcome = check_reduce(np.full((1, 2, 3, 6), np.nan, np.float32), np.int32([96]))
    assert (outcome.out == 0).all() and outcome.counts[1] >= 6


def test_scores_that_overflow_are_0():
    inputs = inputs_with_scores([2.0, 1.0, 0.0], np.eye(3))
    inputs.query[:] = 3e38
    for chunk_size in (None, 2):
        outcome = check_flash(inputs, 1.0, chunk_size=chunk_size)
        assert outcome.counts == {2: 1} and outcome.first == (0, 2)
    check_chunk(inputs, 2, 1.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bad_states(value):
    outs, lses = normal((3, 2, 2, 5)), normal((3, 2, 2), seed=1)
    lses[1, 0, 1] = value
    outs[2, 1, 1, 4] = value
    outcome = check_merge(outs, lses)
    wanted = {1: 2} if np.isnan(value) else {2: 2} if value > 0 else {2: 1}
    assert outcome.counts == wanted


def huge_partials(chunks, D):
    """The sum of two of these overflows."""
    partials = np.full((1, 2, chunks, D + 2), 3e38, np.float32)
    partials[..., D:] = 0, 1
    return partials


@pytest.mark.parametrize("D", [4, 5])
@pytest.mark.parametrize(("chunks", "heavy"), [(8, 4), (40, 16), (40, 32), (200, 196)])
def test_sums_that_overflow_without_weight_do_not_count(D, chunks, heavy):
    partials = huge_partials(chunks, D)
    partials[:, :, heavy : heavy + 4] = 1
    partials[:, :, heavy : heavy + 4, D] = 300
    outcome = run_reduce(partials, np.int32([32 * chunks]))
    assert (outcome.out == 1).all() and outcome.counts == {}


@pytest.mark.parametrize("D", [4, 5])
def test_sums_that_overflow_to_either_side_are_0_and_recorded(D):
    """No NaN was given, and none is reported."""
    partials = huge_partials(40, D)
    partials[:, :, :20, :D] *= -1
    outcome = run_reduce(partials, np.int32([32 * 40]))
    assert (outcome.out == 0).all() and outcome.counts == {2: 2 * D}


def test_a_result_beyond_its_type_is_0_and_recorded():
    outcome = check_reduce(chunks_of(([3e38, 1e-3], 0.0, 1e-2)), np.int32([32]))
    assert outcome.out.ravel() == pytest.approx([0, 0.1]) and (outcome.counts, outcome.first) == ({2: 1}, (0, 2))


# Wrong variants ------------------------------------------------------------------------------------------------------

LENGTHS = np.int32([70, 33, 1])


def without_first_chunk(partials):
    """Takes the first chunk for an empty one."""
    partials = partials.copy()
    partials[:, :, 0, -2] = -np.inf
    return partials


WRONG_PARTIALS = {
    "of the chunk after": lambda partials: np.roll(partials, 1, axis=2),
    "of another head": lambda partials: partials[:, ::-1],
    "without the first chunk": without_first_chunk,
    "maxima to base 2": lambda partials: partials * np.r_[np.ones(8), np.log(2), 1].astype(np.float32),
    "maxima not applied": lambda partials: partials * np.r_[np.ones(8), 0, 1].astype(np.float32),
    "sums a little off": lambda partials: partials * np.r_[np.ones(9), 1 + 1e-4].astype(np.float32),
    "one element too many": lambda partials: np.roll(partials, 1, axis=3) * np.r_[0, np.ones(9)].astype(np.float32),
}


@pytest.mark.parametrize("wrong", WRONG_PARTIALS)
def test_a_wrong_reduction_fails(wrong):
    partials = partials_of(3, 2, 3, 8)
    check_reduce(partials, LENGTHS)
    other = run_reduce(np.ascontiguousarray(WRONG_PARTIALS[wrong](partials)), LENGTHS)
    with pytest.raises(AssertionError):
        assert_reduced(other._replace(counts={}, first=None), partials, LENGTHS)


@pytest.mark.parametrize("change", [1, -1])
def test_a_chunk_too_many_or_too_few_fails(change):
    partials = partials_of(3, 2, 4, 8)
    other = run_reduce(partials, LENGTHS + 32 * change)
    with pytest.raises(AssertionError):
        assert_reduced(other._replace(counts={}, first=None), partials, LENGTHS)


WRONG_INPUTS = {
    "a key too many": lambda inputs: inputs._replace(seq_lens=inputs.seq_lens + 1),
    "a key too few": lambda inputs: inputs._replace(seq_lens=inputs.seq_lens - 1),
    "lengths ignored": lambda inputs: inputs._replace(seq_lens=np.full(3, 41, np.int32)),
    "heads in another order": lambda inputs: inputs._replace(k_cache=inputs.k_cache[:, ::-1]),
    "values of the next key": lambda inputs: inputs._replace(v_cache=np.roll(inputs.v_cache, 1, axis=2)),
    "scale not applied": lambda inputs: inputs._replace(query=inputs.query * np.float32(8**0.5)),
    "scale a little off": lambda inputs: inputs._replace(query=inputs.query * np.float32(1 + 1e-4)),
}


def wrong_inputs():
    return inputs_of(3, 2, 41, 8, seq_lens=[40, 17, 1], spread=6.0)


def test_right_attention_does_not_fail():
    check_flash(wrong_inputs(), chunk_size=16)
    check_chunk(wrong_inputs(), 16)


@pytest.mark.parametrize("wrong", WRONG_INPUTS)
def test_wrong_attention_fails(wrong):
    inputs = wrong_inputs()
    other = Inputs(*map(np.ascontiguousarray, WRONG_INPUTS[wrong](inputs)))
    decoded, parts = run_flash(other, chunk_size=16), run_chunk(other, 16)
    with pytest.raises(AssertionError):
        assert_decoded(decoded, inputs)
    with pytest.raises(AssertionError):
        assert_chunked(parts, inputs, 16)


@pytest.mark.parametrize("wrong", ["order", "base", "lse ignored", "largest alone"])
def test_a_wrong_merge_fails(wrong):
    outs, lses = normal((3, 4, 8)), normal((3, 4), seed=1)
    given = {
        "order": (outs[::-1], lses),
        "base": (outs, lses * np.log(2)),
        "lse ignored": (outs, np.zeros_like(lses)),
        "largest alone": (outs, np.where(lses == lses.max(axis=0), lses, -np.inf)),
    }[wrong]
    other = run_merge(*(np.ascontiguousarray(array, np.float32) for array in given))
    for part in (other, other._replace(lse=run_merge(outs, lses).lse)):
        with pytest.raises(AssertionError):
            assert_merged(part, outs, lses)


@pytest.mark.parametrize("part", ["counts", "first", "lse"])
def test_wrong_side_outputs_fail(part):
    inputs = wrong_inputs()
    outcome = check_flash(inputs)
    wrong = {"counts": {2: 1}, "first": (10**6, 2), "lse": outcome.lse + np.float32(1e-4)}
    with pytest.raises(AssertionError):
        assert_decoded(outcome._replace(**{part: wrong[part]}), inputs)
