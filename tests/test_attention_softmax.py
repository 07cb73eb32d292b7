"""attention_softmax against its reference, its contract and public fault reports about similar functions."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support import ON_GPU, assert_attention, cases, check_attention, normal, run_attention

from burt_numba.softmax_launches import row_shapes

# Sizes ---------------------------------------------------------------------------------------------------------------

# Every capacity is an edge: of the lanes of a warp that share a row, of one warp, of a block, of a cluster of blocks.
# Each is approached by single columns, and by the 4 columns that a vector load takes. Longer rows are streamed.
CAPACITIES = sorted({shape.columns for shape in row_shapes(1)})
SIZES = sorted({capacity + step for capacity in CAPACITIES for step in (-4, -1, 0, 1, 4)})
SMALL_SIZES = [1, 2, 3, 33, 63, 300, 500, *(size for size in SIZES if size <= 2052)]
LARGE_SIZES = [*(size for size in SIZES if size > 2052), 50_257, 200_003]


@pytest.mark.parametrize("keys", cases(SMALL_SIZES, LARGE_SIZES))
def test_sizes(keys):
    shape = (2, 3, 5, keys) if ON_GPU else (1, 1, 2, keys)
    check_attention(normal(shape, seed=keys))


@pytest.mark.gpu_only("short rows share a warp where there are a thousand or more, too slow in the simulator")
@pytest.mark.parametrize("keys", [size for size in SMALL_SIZES if size <= 1028])
def test_sizes_of_many_rows(keys):
    check_attention(normal((2, 10, 55, keys), seed=keys))


@pytest.mark.parametrize("keys", cases([1, 33, 128, 129, 513, 1024, 1025], [2047, 2048, 2049, *LARGE_SIZES]))
def test_sizes_with_a_mask(keys):
    """The policy for a fully masked row changed with the launch: ml-explore/mlx#2608, robertknight/rten#1321."""
    scores = normal((3, 1, 2, keys), seed=keys)
    mask = np.zeros((3, 1, 1, keys), np.float32)
    mask[1] = -np.inf
    mask[2, ..., ::3] = -np.inf
    mask[2, ..., 1::3] = 0.5
    outcome = check_attention(scores, mask)
    assert (outcome.out[1] == 0).all()


@pytest.mark.parametrize("keys", cases([1, 33, 129, 513], [1025, 2049, *LARGE_SIZES]))
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sizes_causal(keys, dtype):
    """The last rows of a causal square, up to and past the last key."""
    scores = normal((1, 1, 4, keys), dtype=dtype, seed=keys)
    check_attention(scores, causal=True, causal_offset=keys - 3)
    check_attention(scores, np.float32([[0.25]] * 3 + [[-np.inf]]), True, causal_offset=keys // 2)


@pytest.mark.parametrize("size", cases([1, 2, 5, 17, 33], [64, 127, 128, 129, 500, 512, 1023, 1024, 1025, 2048]))
def test_squares_causal(size):
    check_attention(normal((2, 2, size, size) if size < 9 or ON_GPU else (1, 1, size, size)), causal=True)


@pytest.mark.parametrize("keys", cases([1, 33, 300], [1025, 4097, 40_001]))
def test_float16(keys):
    check_attention(normal((1, 2, 2, keys), dtype=np.float16))


@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (1, 0, 3, 3), (1, 2, 0, 3), (1, 2, 3, 0), (0, 0, 0, 0)])
def test_nothing(shape):
    """A grid of 0 blocks is refused by the driver, so there must be no launch: numba/numba#5017."""
    outcome = run_attention(np.zeros(shape, np.float32))
    assert outcome.out.shape == shape and outcome.counts == {}


def test_one_size_after_another():
    """A kernel specialised for one size was reused for the next: numba/numba#3265."""
    scores = {size: normal((1, 1, 2, size), seed=size) for size in (40, 200, 130)}
    first = {size: run_attention(scores[size]).out for size in scores}
    for size in itertools.islice(itertools.cycle(scores), 6):
        assert run_attention(scores[size]).out.tobytes() == first[size].tobytes()


# Masks ---------------------------------------------------------------------------------------------------------------

MASK_SHAPES = [
    (2, 1, 1, 7),
    (1, 1, 1, 7),
    (7,),
    (3, 7),
    (2, 2, 3, 7),
    (2, 1, 3, 7),
    (2, 1, 1),
    (2, 1, 3, 1),
    (1, 2, 1, 7),
    (1,),
    (),
]


@pytest.mark.parametrize("shape", MASK_SHAPES)
@pytest.mark.parametrize("kind", ["float32", "float16 scores and mask", "float32 mask on float16", "bool"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_every_shape(shape, kind, causal):
    random = np.random.default_rng(len(shape))
    scores = normal((2, 2, 3, 7), dtype=np.float16 if "float16" in kind else np.float32)
    hidden = random.random(shape) < 0.3
    if kind == "bool":
        mask = np.asarray(~hidden)
    else:
        mask = np.where(hidden, -np.inf, random.standard_normal(shape))
        mask = mask.astype(np.float16 if kind == "float16 scores and mask" else np.float32)
    check_attention(scores, mask, causal, causal_offset=2 if causal else None)


def test_mask_row_belongs_to_its_batch():
    """The index of a per-head term ran over batch times heads: ggml-org/llama.cpp#10683."""
    mask = np.zeros((3, 1, 1, 5), np.float32)
    for batch in range(3):
        mask[batch, ..., batch] = -np.inf
    out = check_attention(np.zeros((3, 2, 5, 5), np.float32), mask).out
    for batch in range(3):
        assert (out[batch][..., batch] == 0).all()
        assert (np.delete(out[batch], batch, axis=-1) == 0.25).all()


def test_mask_broadcast_with_stride_zero():
    scores = normal((3, 2, 4, 9))
    row = normal((1, 1, 1, 9), spread=1.0)
    expected = check_attention(scores, row).out
    assert check_attention(scores, np.broadcast_to(row, (3, 1, 1, 9))).out.tobytes() == expected.tobytes()
    assert check_attention(scores, np.broadcast_to(row, scores.shape)).out.tobytes() == expected.tobytes()


def test_smallest_float_as_a_mask():
    """The smallest float32 plus a negative score overflowed to -inf and the row became NaN: pytorch/pytorch#109517."""
    scores = np.ones((1, 1, 8, 8), np.float32)
    scores[..., 0, :] = -1e38
    out = check_attention(scores, np.full((1, 1, 1, 8), np.finfo(np.float32).min)).out
    assert (out[..., 0, :] == 0).all() and (out[..., 1:, :] == 0.125).all()


def test_finite_mask_is_added_in_float32():
    """At -1e9 float32 numbers lie 64 apart, so scores of a few units no longer count."""
    out = check_attention(normal((1, 2, 2, 8), spread=2.0), np.full((1, 1, 1, 8), np.float32(-1e9))).out
    assert (out == 0.125).all()
    # In float16 scores too: the sum is float32, so -1e9 hides nothing and 6e4 + 6e4 overflows nothing.
    scores = np.float16([[[[6e4, 6e4, 0]]]])
    assert check_attention(scores, np.float32([6e4, 6e4, 0])).out.ravel().tolist() == [0.5, 0.5, 0.0]


def test_scores_below_any_stand_in_for_minus_infinity():
    """A finite stand-in for -inf made rows of low scores silently zero: flashinfer-ai/flashinfer#4267."""
    scores = np.float32([[-245000, -245001], [-1e30, -1e30], [-3e38, -3e38]]).reshape(1, 1, 3, 2)
    out = check_attention(scores).out.reshape(3, 2)
    assert out[0] == pytest.approx([0.731059, 0.268941], abs=1e-6)
    assert out[1:].tolist() == [[0.5, 0.5]] * 2


def test_masked_score_has_no_influence():
    """NaN in a position that was masked out still poisoned the output: pytorch/pytorch#101967."""
    clean = normal((2, 2, 5, 5))
    mask = np.float32([0, 0, 0, -np.inf, 0])
    for bad in (np.nan, np.inf, -np.inf, 1e38):
        scores = clean.copy()
        scores[..., 3] = bad
        for hiding in (mask, np.isfinite(mask)):
            outcome, undisturbed = check_attention(scores, hiding), run_attention(clean, hiding)
            assert outcome.out.tobytes() == undisturbed.out.tobytes() and outcome.counts == {}


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("size", [5, 70])
def test_future_has_no_influence(bad, size):
    clean = normal((1, 2, size, size) if size < 9 else (1, 1, size, size))
    scores = np.where(np.tri(size, dtype=bool), clean, np.float32(bad))
    outcome, undisturbed = check_attention(scores, causal=True), run_attention(clean, causal=True)
    assert outcome.out.tobytes() == undisturbed.out.tobytes() and outcome.counts == {}
    mask = np.where(np.tri(size, dtype=bool), np.float32(0), np.float32(bad))
    outcome = check_attention(clean, mask, True)
    assert outcome.out.tobytes() == undisturbed.out.tobytes() and outcome.counts == {}


@pytest.mark.parametrize("offset", [-7, -2, -1, 0, 1, 2, 5, 100])
def test_causal_offset(offset):
    out = check_attention(normal((1, 2, 4, 6)), causal=True, causal_offset=offset).out
    for query in range(4):
        assert (out[:, :, query, max(query + offset + 1, 0) :] == 0).all()


def test_causal_offset_defaults_to_zero_for_a_square():
    scores = normal((1, 1, 6, 6))
    default, given_zero = run_attention(scores, causal=True), run_attention(scores, causal=True, causal_offset=0)
    assert default.out.tobytes() == given_zero.out.tobytes()
    assert run_attention(scores, causal=True, causal_offset=1).out.tobytes() != default.out.tobytes()


def test_causal_zeros_are_exact_and_equal_scores_are_equal():
    out = check_attention(np.full((1, 1, 9, 9), 2.5, np.float32), causal=True).out[0, 0]
    for query in range(9):
        assert out[query].tolist() == [np.float32(1) / np.float32(query + 1)] * (query + 1) + [0] * (8 - query)


# Degradations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_bad_scores_are_absent(dtype):
    clean = normal((2, 2, 3, 40), dtype=dtype)
    scores = clean.copy()
    scores[0, 1, 2, 7] = np.nan
    scores[1, 0, 0, 39] = np.inf
    outcome, undisturbed = check_attention(scores), run_attention(clean)
    untouched = np.ones((2, 2, 3), bool)
    untouched[0, 1, 2] = untouched[1, 0, 0] = False
    assert outcome.out[untouched].tobytes() == undisturbed.out[untouched].tobytes()
    assert outcome.out[0, 1, 2, 7] == outcome.out[1, 0, 0, 39] == 0
    assert (outcome.counts, outcome.first) == ({1: 1, 2: 1}, (207, 1))


@pytest.mark.parametrize("keys", cases([5, 70, 260, 300, 301], [1100, 4100, 5000, 40_000, 100_001]))
@pytest.mark.parametrize("causal", [False, True])
def test_bad_scores_in_every_launch(keys, causal):
    scores = normal((1, 1, 3, keys), seed=keys)
    scores[..., 0, ::3], scores[..., 1, 1::2], scores[..., 1, 0] = np.nan, np.inf, np.nan
    scores[..., 2, -1] = -np.inf
    check_attention(scores, None, causal, causal_offset=keys // 2 if causal else None)


def test_bad_masks_are_absent():
    """A NaN or +inf in the mask counts once for each visible score that it meets."""
    mask = np.zeros((2, 1, 1, 6), np.float32)
    mask[0, ..., 4], mask[1, ..., 1] = np.nan, np.inf
    outcome = check_attention(normal((2, 2, 3, 6)), mask)
    assert outcome.counts == {1: 6, 2: 6} and outcome.first == (4, 1)
    assert check_attention(normal((2, 1, 6, 6)), mask, True).counts == {1: 2, 2: 5}


def test_sum_that_overflows():
    scores = np.float32([[3e38, -3e38, 1, 0], [3e38, 3e38, 3e38, 3e38]]).reshape(1, 1, 2, 4)
    outcome = check_attention(scores, np.float32([3e38, -3e38, 0, 0]))
    assert outcome.out[0, 0, 1].tolist() == [0, 0.5 - 0.5, 0.5, 0.5]
    assert outcome.counts == {2: 2} and outcome.first == (0, 2)


def test_rows_with_nothing_finite():
    scores = np.full((1, 1, 4, 6), -np.inf, np.float32)
    scores[..., 1, :], scores[..., 2, :], scores[..., 3, :3] = np.nan, np.inf, np.nan
    outcome = check_attention(scores)
    assert (outcome.out == 0).all()
    assert outcome.counts == {1: 9, 2: 6} and outcome.first == (6, 1)


@pytest.mark.parametrize("spread", [1e-6, 30.0, 1e4, 1e20, 1e37])
def test_spreads(spread):
    check_attention(normal((1, 1, 3, 70), spread=spread))


# Properties ----------------------------------------------------------------------------------------------------------

# Multiples of 1/64 up to 8: sums of two such are exact in float32.
exact_scores = hnp.arrays(
    np.float32,
    st.tuples(st.just(1), st.integers(1, 2), st.integers(1, 3), st.integers(1, 40)),
    elements=st.integers(-512, 512).map(lambda n: n / 64),
)
anything = st.one_of(
    st.floats(-30, 30, width=32), st.floats(width=32), st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -3e38, 3e38])
)


@given(st.data(), st.booleans())
def test_contract_holds_for_anything(data, causal):
    shape = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.integers(1, 40)))
    scores = data.draw(hnp.arrays(np.float32, shape, elements=anything))
    mask_shape = tuple(data.draw(st.sampled_from([1, length])) for length in shape)
    kind = data.draw(st.sampled_from([None, np.float32, np.bool_]))
    elements = anything if kind is np.float32 else None
    mask = None if kind is None else data.draw(hnp.arrays(kind, mask_shape, elements=elements))
    offset = data.draw(st.integers(-3, 40)) if causal else None
    check_attention(scores, mask, causal, causal_offset=offset)


@given(exact_scores, st.integers(-64, 64))
def test_shift_of_a_row_changes_no_bit(scores, shift):
    outcome, shifted = run_attention(scores), run_attention(scores + np.float32(shift))
    assert outcome.out.tobytes() == shifted.out.tobytes()
    assert_attention(run_attention(scores, np.float32([shift])), scores)


@given(exact_scores, st.randoms(use_true_random=False))
def test_permutation_of_the_keys_permutes_the_result(scores, random):
    order = list(range(scores.shape[-1]))
    random.shuffle(order)
    outcome, permuted = run_attention(scores), run_attention(scores[..., order])
    assert_attention(permuted._replace(out=permuted.out[..., np.argsort(order)]), scores)
    assert_attention(outcome, scores)


@given(exact_scores)
def test_permutation_of_the_rows_permutes_the_bits(scores):
    backwards = run_attention(scores[:, ::-1, ::-1].copy()).out[:, ::-1, ::-1]
    assert backwards.tobytes() == run_attention(scores).out.tobytes()


@given(exact_scores)
def test_causal_equals_its_mask(scores):
    triangle = np.tri(*scores.shape[-2:], k=3, dtype=bool)
    outcome, masked = run_attention(scores, None, True, causal_offset=3), run_attention(scores, triangle)
    assert_attention(outcome, scores, triangle)
    assert_attention(masked, scores, triangle)


# A deliberately wrong operation must fail at the same limits ---------------------------------------------------------

WRONG = {
    "mask of the next batch": lambda scores, mask: run_attention(scores, np.roll(mask, 1, axis=0), True),
    "mask off by one key": lambda scores, mask: run_attention(scores, np.roll(mask, 1, axis=-1), True),
    "mask left out": lambda scores, mask: run_attention(scores, None, True),
    "causal limit off by one": lambda scores, mask: run_attention(scores, mask, True, causal_offset=1),
    "causal limit left out": lambda scores, mask: run_attention(scores, mask),
    "scores scaled": lambda scores, mask: run_attention(scores * np.float32(1.0001), mask, True),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_results_are_noticed(fault):
    scores, mask = normal((2, 2, 6, 6)), normal((2, 1, 1, 6), spread=1.0)
    check_attention(scores, mask, True)
    with pytest.raises(AssertionError):
        assert_attention(WRONG[fault](scores, mask), scores, mask, True)


def test_one_wrong_weight_is_noticed():
    scores = normal((2, 2, 6, 6))
    outcome = run_attention(scores)
    outcome.out[1, 0, 3, np.argmax(outcome.out[1, 0, 3])] *= np.float32(1 + 2e-5)
    with pytest.raises(AssertionError):
        assert_attention(outcome, scores)
