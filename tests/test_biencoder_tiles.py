"""The kernel of biencoder_attention on tensor cores where the warps of a block search for queries of each other."""

from importlib import import_module

import numpy as np
import pytest
from biencoder_support import (
    ENTROPY_OVERFLOW,
    FEW,
    ROWS,
    TILES,
    Inputs,
    assert_attended,
    check_biencoder,
    inputs_of,
    inputs_with_scores,
    kernel_of,
    run_biencoder,
    same_results,
)
from support import LIMITS, relative_error, to_host, to_target

from burt_numba import biencoder_launches, reference
from burt_numba.backend import cuda
from burt_numba.biencoder_launches import (
    Choice,
    chunks_made_for,
    few_kernel_spec,
    few_shared_bytes,
    stretches_of,
    tiles_kernel_spec,
    tiles_shared_bytes,
)
from burt_numba.device.entropy import bend_of, beta_of_two
from burt_numba.host.compiling import compute_capability

# The module, which has the name of its function.
MODULE = import_module("burt_numba.biencoder_attention")
pytestmark = pytest.mark.skipif(compute_capability(0) < biencoder_launches.FIRST_TENSOR_CORES, reason="no tensor cores")

# Up to 64 contexts have a kernel of their own, in which each lane searches without the others.
each_length = pytest.mark.parametrize("K", [40, 65])
each_block = pytest.mark.parametrize("warps", [2, 4])


def choose_tiles(monkeypatch, warps, of_any_size=False):
    """Until the test is over, blocks have so many warps of 32 queries; the kernel for vectors of any size, if asked."""

    def choose(sizes, rows, vector, dtype, precision, capability):
        kind = biencoder_launches.HALF if dtype == "f2" else biencoder_launches.EXACT
        chunks = 0 if of_any_size else chunks_made_for(kind, vector, sizes.dims, capability)
        blocks = sizes.batch * sizes.heads * -(-sizes.queries // (32 * warps))
        shared_bytes = tiles_shared_bytes(kind, warps, sizes.dims, stretches_of(kind, chunks))
        spec = tiles_kernel_spec(kind, vector, chunks)
        if sizes.contexts <= biencoder_launches.FEW:
            shared_bytes, spec = few_shared_bytes(kind, warps, sizes.dims), few_kernel_spec(kind, vector)
        return Choice(spec, blocks, 32 * warps, shared_bytes, takes_all=True)

    monkeypatch.setattr(MODULE, "choose", choose)
    monkeypatch.setattr(MODULE._OPERATION, "_calls", {})


def mixed_inputs(Q, K, wanted, D=8, dtype=np.float32):
    """Queries of which those at the places `wanted` need a search, of several passes; the others attend to key 0."""
    inputs = inputs_of(1, 1, Q, K, D, dtype=dtype, seed=K)
    settled = np.ones(Q, bool)
    settled[list(wanted)] = False
    inputs.context_keys[..., 0] = 0
    inputs.context_keys[:, :, 0] = 0
    inputs.context_keys[:, :, 0, 0] = 100
    inputs.query[:, :, :, 0] = np.where(settled, 100, 0)
    return inputs


@each_length
@each_block
@pytest.mark.parametrize(("dtype", "of_any_size"), [(np.float32, False), (np.float16, False), (np.float16, True)])
def test_queries_of_all_warps_that_are_searched_together(monkeypatch, warps, K, dtype, of_any_size):
    """A few of each warp, at places that the others have too and at such that they have not."""
    choose_tiles(monkeypatch, warps, of_any_size)
    Q = 32 * warps
    wanted = [place for place in (0, 7, 8, 31, 37, 63, 64, 90, 95, 96, 127) if place < Q]
    inputs = mixed_inputs(Q, K, wanted, dtype=dtype)
    outcome = check_biencoder(inputs)
    found = np.flatnonzero(outcome.temperature[0, 0] < 1)
    assert len(found) >= len(wanted) - 2 and set(found) <= set(wanted)


@each_block
def test_one_query_of_one_warp(monkeypatch, warps):
    choose_tiles(monkeypatch, warps)
    for place in (0, 32 * warps - 1):
        outcome = check_biencoder(mixed_inputs(32 * warps, 70, [place]))
        assert np.flatnonzero(outcome.temperature[0, 0] < 1).tolist() == [place]


@pytest.mark.parametrize("many", [31, 32, 33])
def test_about_as_many_as_are_gathered(monkeypatch, many):
    """Each side of the number of queries from which on they are searched together."""
    choose_tiles(monkeypatch, 4)
    wanted = np.random.default_rng(many).permutation(128)[:many]
    check_biencoder(mixed_inputs(128, 70, wanted))


@pytest.mark.parametrize(("K", "D"), [(60, 33), (70, 3)])
def test_blocks_that_are_not_full(monkeypatch, K, D):
    """Warps with few queries or none work for the others; chunks of a query, and elements that are no vector."""
    choose_tiles(monkeypatch, 4)
    check_biencoder(inputs_of(1, 1, 133, K, D))


def test_a_query_is_searched_alike_in_any_company(monkeypatch):
    """Alone in its block, or among others, or with blocks of fewer warps: but for the order of sums."""
    inputs = mixed_inputs(128, 70, range(0, 128, 9))
    outcomes = []
    for warps in (1, 2, 4):
        choose_tiles(monkeypatch, warps)
        outcomes.append(check_biencoder(inputs))
        assert same_results(run_biencoder(inputs), outcomes[-1])
    for other in outcomes[1:]:
        np.testing.assert_allclose(other.temperature, outcomes[0].temperature, rtol=1e-3)


@each_block
@pytest.mark.parametrize("max_iterations", [1, 2, 3])
def test_few_iterations_together(monkeypatch, warps, max_iterations):
    choose_tiles(monkeypatch, warps)
    inputs = mixed_inputs(32 * warps, 70, range(3, 32 * warps, 7))
    outcome = run_biencoder(inputs, None, 0.2, 1e-4, 10.0, max_iterations)
    assert_attended(outcome, inputs, None, 0.2, 1e-4, 10.0, max_iterations, may_run_out=True)
    assert outcome.counts == {}


@pytest.mark.parametrize("K", [64, 66])
def test_lengths_on_both_sides_of_few(monkeypatch, K):
    """The kernel follows from the number of contexts, whatever there is of them in a sample."""
    choose_tiles(monkeypatch, 2)
    lengths = np.int32([0, 1, 2, 31, 32, 33, 63, 64, K])
    outcome = check_biencoder(inputs_of(len(lengths), 1, 40, K, 5), context_lengths=lengths)
    assert not outcome.out[0].any()


@pytest.mark.parametrize(("warps", "bound", "apart"), [(2, 1.5, 4), (4, 1.0, 4), (4, 2.0, 0)])
def test_steps_that_the_pass_for_the_values_makes(monkeypatch, warps, bound, apart):
    """One or two of these queries miss their band by such a step, and are searched for on."""
    choose_tiles(monkeypatch, warps)
    random = np.random.default_rng(1)
    query, keys = (random.standard_normal((1, 1, n, 4)).astype(np.float32) for n in (128, 300))
    if apart:
        keys[:, :, :8, 0] += apart
        query[..., 0] = np.abs(query[..., 0]) + 1
    check_biencoder(Inputs(query, keys, random.standard_normal(keys.shape).astype(np.float32)), None, bound)


@pytest.mark.parametrize(
    "scores",
    [[0, 0], [1, 1, 0], [2, 0], [3, 2.9] + 70 * [-1], 100 * [1] + [0]],
    ids=["tie", "tie of three", "two", "two of many", "tie of many"],
)
def test_rows_that_two_contexts_nearly_decide(monkeypatch, scores):
    """The search starts where these prove the entropy to be over the bound: at once at the end, of a tie."""
    choose_tiles(monkeypatch, 2)
    inputs = inputs_of(1, 1, 64, len(scores), 4)
    inputs.query[...] = 0
    inputs.query[..., 0] = np.linspace(-3, 3, 64)
    inputs.context_keys[..., 0] = scores
    check_biencoder(inputs)
    check_biencoder(inputs, None, 0.8)


@pytest.mark.parametrize(("dtype", "D"), [(np.float32, 8), (np.float32, 113), (np.float16, 8), (np.float16, 97)])
def test_each_warp_copies_its_keys_by_itself(monkeypatch, dtype, D):
    """So few queries are searched together at once: parts of keys in two places (of long vectors) or three, in turn."""
    choose_tiles(monkeypatch, 2)
    outcome = check_biencoder(inputs_of(1, 1, 20, 140, D, dtype=dtype))
    assert (outcome.temperature < 1).sum() > 10


@pytest.mark.parametrize("offset", [2**13, 2**17, 2**20])
def test_scores_that_a_rough_start_takes_for_equal(monkeypatch, offset):
    """Numbers of 11 bits are this one for all of them: its maximum is far off, and sums by it may overflow."""
    choose_tiles(monkeypatch, 2)
    scores = offset + np.random.default_rng(offset).permutation(96)
    outcome = check_biencoder(inputs_with_scores(scores, queries=40), 1.0)
    assert 0.1 < outcome.temperature.min() < 1


def test_sums_that_overflow_by_the_maximum_of_a_rough_start(monkeypatch):
    """A start that is too warm, and a maximum 200 too low: sums that overflow say nothing of the entropy."""
    choose_tiles(monkeypatch, 2)
    random = np.random.default_rng(0)
    inputs = inputs_with_scores(np.zeros(96), queries=40)
    lost = 200 + 7 * random.integers(0, 8, 96)
    inputs.query[..., 1] = 1
    inputs.context_keys[0, 0, :, 0] = 2**18 + lost
    inputs.context_keys[0, 0, :, 1] = random.permutation(96) / 4 - lost
    check_biencoder(inputs, 1.0)


@pytest.mark.parametrize("size", [2.0**28, 2.0**33, 2.0**100])
def test_vectors_too_large_for_a_rough_start(monkeypatch, size):
    """Scores as usual, of keys or queries that might overflow: products are exact from the beginning."""
    choose_tiles(monkeypatch, 2)
    inputs = inputs_of(1, 2, 40, 70, 4)
    for head, (large, small) in enumerate([inputs[:2], inputs[1::-1]]):
        large[0, head, :, 1] *= size
        small[0, head, :, 1] /= size
    assert check_biencoder(inputs).counts.keys() <= {ENTROPY_OVERFLOW}


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_bad_key_where_queries_are_good(monkeypatch, bad):
    choose_tiles(monkeypatch, 2)
    inputs = inputs_of(1, 1, 40, 96, 4)
    inputs.query[0, 0, 7] = 2
    inputs.context_keys[0, 0, 50, 1] = bad
    check_biencoder(inputs)


def test_bounds_that_hold_by_little_at_the_start(monkeypatch):
    """A rough start may be beyond the highest temperature's entropy, and the search has to go back to it."""
    choose_tiles(monkeypatch, 2)
    inputs = inputs_of(1, 6, 33, 66, 4)
    inputs.query[...] = inputs.query[:, :, :1]
    entropy = reference.biencoder_attention(*inputs, temperature=np.ones((1, 6, 33))).entropy
    outcome = check_biencoder(inputs, None, np.float32(entropy[0, :, 0] * 1.001), max_iterations=6)
    assert (outcome.temperature == 1).all()


@pytest.mark.parametrize("part", [0.9, 0.999, 1.001, 1.05])
def test_bounds_near_what_is_in_reach(monkeypatch, part):
    """Most of the entropy at the lowest temperature is of contexts that the start does not see."""
    choose_tiles(monkeypatch, 2)
    inputs = inputs_with_scores([0] + 150 * [-3], queries=33)
    entropy = reference.biencoder_attention(*inputs, 1.0, temperature=np.full((1, 1, 33), 0.5)).entropy.max()
    outcome = check_biencoder(inputs, 1.0, part * entropy, 0.5)
    assert outcome.counts == ({ENTROPY_OVERFLOW: 33} if part < 1 else {})


@pytest.mark.parametrize("K", [50, 100])
@pytest.mark.parametrize(
    ("large_query", "large_key", "others"), [(1e30, 1e9, True), (1e30, 1e9, False), (1e32, 1e7, False)]
)
def test_scores_that_overflow_count_as_zero_in_each_pass(monkeypatch, K, large_query, large_key, others):
    """One warp alone meets them in the first pass; all do when they search for its queries."""
    choose_tiles(monkeypatch, 4)
    inputs = inputs_of(1, 1, 128, K, 8)
    inputs.query[0, 0, 40], inputs.context_keys[0, 0, 3] = large_query, large_key
    if others:
        inputs.query[0, 0, 70, 2], inputs.context_keys[0, 0, 20, 1] = np.nan, np.inf
    check_biencoder(inputs)


@each_block
@pytest.mark.parametrize("places", [[5], [31, 33, 64, 127], [96], range(128), range(70, 128)], ids=str)
def test_bounds_out_of_reach_of_several_warps(monkeypatch, warps, places):
    """Counted for the block at once, with the place of the first: of the second head here, behind one in reach."""
    choose_tiles(monkeypatch, warps)
    K, D = 40, 8
    query, keys = np.zeros((1, 2, 128, D), np.float32), np.zeros((1, 2, K, D), np.float32)
    keys[:, :, 0, 0], keys[:, :, 1:3, 1] = 100, 100
    query[..., 0] = 1
    for place in places:
        query[0, 1, place] = 0
        query[0, 1, place, 1] = 1
    values = np.random.default_rng(0).normal(size=keys.shape).astype(np.float32)
    outcome = check_biencoder(Inputs(query, keys, values), 1.0)
    assert (outcome.counts, outcome.first) == ({3: len(places)}, (128 + min(places), 3))


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize(("K", "D"), [(64, 8), (128, 40), (129, 16), (160, 64), (200, 32)])
def test_rounds_of_64_contexts(monkeypatch, warps, K, D):
    """Short vectors of float16: rounds that are full, and a last one of one stretch, or of a part of one or of two."""
    choose_tiles(monkeypatch, warps)
    check_biencoder(inputs_of(1, 1, 32 * warps, K, D, dtype=np.float16), None, 1.0)


@pytest.mark.parametrize("bound", [0.2, 1.0, None])
@pytest.mark.parametrize("gap", [0.0, 0.25, 8.0])
def test_the_greatest_two_of_a_round_in_one_pair(monkeypatch, gap, bound):
    """Of keys 32 places apart the first pass keeps the greater: the search starts without the runner-up."""
    choose_tiles(monkeypatch, 1)
    inputs = inputs_of(1, 1, 32, 128, 8, dtype=np.float16)
    inputs.query[..., 0] = 4
    inputs.context_keys[0, 0, [5, 37], 0] = 12, 12 - gap
    check_biencoder(inputs, None, bound)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("K", [65, 130, 192])
def test_heads_without_a_bound_beside_others(monkeypatch, K, dtype):
    """No search, and no evaluation before the pass for the values: the same results as those of a bound too high."""
    choose_tiles(monkeypatch, 2)
    inputs = inputs_of(1, 3, 64, K, 8, dtype=dtype)
    outcome = check_biencoder(inputs, None, np.float32([np.inf, 0.3, 100.0]))
    assert (outcome.temperature[:, [0, 2]] == 1).all() and (outcome.temperature[:, 1] < 1).any()


@pytest.mark.parametrize("places", [[3], [40], [100, 129], [140]], ids=str)
def test_rounds_of_64_contexts_with_bad_elements(monkeypatch, places):
    """In the first stretch of a round, in the second, in several; each is met by every warp, and counted once."""
    choose_tiles(monkeypatch, 2)
    inputs = inputs_of(1, 1, 64, 141, 8, dtype=np.float16)
    inputs.context_keys[0, 0, places, 2], inputs.context_values[0, 0, places, 5] = np.inf, np.nan
    check_biencoder(inputs, None, 3.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("first", [16, 100, 177, 300, 512, 2048])
def test_gaps_far_below_the_scores(monkeypatch, dtype, first):
    """Exact scores of up to 2**22 and gaps of a half: t is a line of the products for those that are not as large.

    Of the last keys, fewer than 64, it is not, but moved by as much.
    """
    choose_tiles(monkeypatch, 4)
    inputs = inputs_of(1, 1, 128, 150, 8, dtype=dtype)
    random = np.random.default_rng(first)
    for array in inputs[:2]:
        array[...] = 0
        array[..., 0] = first
    inputs.query[..., 1] = 1
    inputs.context_keys[..., 1] = random.permutation(150) * 0.5
    outcome = run_biencoder(inputs, 1.0, 0.2)
    expected = reference.biencoder_attention(*inputs, 1.0, 0.2, temperature=outcome.temperature)
    np.testing.assert_allclose(outcome.entropy, expected.entropy, atol=2e-6)
    assert ((outcome.entropy <= 0.2 + 1e-6) & (outcome.entropy >= 0.2 * (1 - 1e-4) - 1e-6)).all()
    assert relative_error(outcome.out, expected.output) <= LIMITS[f"attention_{np.dtype(dtype).name}"]


@pytest.mark.parametrize(("capability", "chunks"), [((7, 5), 0), ((8, 0), 2), ((8, 6), 0), ((9, 0), 2)])
def test_rounds_of_64_contexts_where_two_blocks_fit(capability, chunks):
    half = biencoder_launches.HALF
    assert chunks_made_for(half, 8, 64, capability) == chunks
    assert chunks_made_for(half, 1, 64, capability) == chunks
    assert chunks_made_for(half, 8, 32, capability) == chunks_made_for(half, 8, 72, capability) == 0


@pytest.mark.parametrize("K", [64, 65, 130])
def test_a_mean_of_the_largest_float16_numbers(K):
    """Most weights are rounded up as float16 numbers, and their sum is over the largest."""
    scores = np.full(K, np.log(0.5 * (1 + 2**-11 * 1.1)))
    scores[0] = 0
    high = scores.astype(np.float16)
    query, keys = np.zeros((1, 1, 4, 8), np.float16), np.zeros((1, 1, K, 8), np.float16)
    query[..., :2] = 1
    keys[0, 0, :, 0], keys[0, 0, :, 1] = high, scores - high.astype(float)
    values = np.full((1, 1, K, 8), 65504, np.float16)
    values[..., 4:] *= -1
    outcome = run_biencoder(Inputs(query, keys, values), 1.0, None)
    assert outcome.counts == {} and (np.abs(outcome.out) == 65504).all()


def test_arrays_read_element_by_element_give_the_same_bits():
    inputs = inputs_of(1, 1, 70, 130, 64, dtype=np.float16, seed=200)
    assert same_results(run_biencoder(inputs), run_biencoder(inputs, skew=1))


def test_the_choice_that_the_tests_replace():
    """Blocks of four warps where there are as many queries; two stretches of keys are few."""
    assert kernel_of(inputs_of(1, 1, 128, 64, 4)) == FEW
    assert kernel_of(inputs_of(1, 1, 128, 65, 4)) == TILES
    assert kernel_of(inputs_of(1, 1, 128, 65, 4), scale=-(2.0**61)) == ROWS


# The step of the search ----------------------------------------------------------------------------------------------


@cuda.jit
def bend_kernel(sums, results):
    place = cuda.threadIdx.x
    total, first, second, third = sums[place, 0], sums[place, 1], sums[place, 2], sums[place, 3]
    results[place] = bend_of(total, first, second, third, sums[place, 4], sums[place, 5], sums[place, 6])


def moments(gaps, beta):
    """The four sums at beta, the variance in nats squared, the entropy and its third central moment, in float64."""
    t = beta * gaps
    weights = 2.0**-t
    sums = [float((weights * t**power).sum()) for power in range(4)]
    p, nats = weights / sums[0], t * np.log(2)
    mean = (p * nats).sum()
    variance, third = (p * (nats - mean) ** 2).sum(), (p * (nats - mean) ** 3).sum()
    return sums, variance, np.log(sums[0]) + mean, third


def test_bend_against_float64():
    """Halley's divisor 1 - f f'' / (2 f'^2) of f = ln H - ln aim against beta, kept between a half and two."""
    random = np.random.default_rng(0)
    rows, expected = [], []
    for case in range(64):
        gaps = np.concatenate([[0.0], np.abs(random.normal(0, 4, 40))])
        beta = float(random.uniform(0.3, 3.0))
        sums, variance, entropy, third = moments(gaps, beta)
        aim = entropy * float(random.uniform(0.5, 1.5))
        rows.append([*sums, variance, entropy, aim])
        # H' = -V / beta, and V' = (2 V - M3) / beta.
        slope = -variance / beta / entropy
        curvature = (third - variance) / beta**2 / entropy - slope**2
        expected.append(np.clip(1 - np.log(entropy / aim) * curvature / (2 * slope**2), 0.5, 2.0))
        step = 1e-4 * beta
        high, low = moments(gaps, beta + step)[2], moments(gaps, beta - step)[2]
        assert (np.log(high) - np.log(low)) / (2 * step) == pytest.approx(slope, rel=1e-5), case
        second = (np.log(high) - 2 * np.log(entropy) + np.log(low)) / step**2
        assert second == pytest.approx(curvature, rel=1e-3, abs=1e-4), case
    results = to_target(np.full(len(rows), np.nan, np.float32))
    bend_kernel[1, len(rows)](to_target(np.float32(rows)), results)
    np.testing.assert_allclose(to_host(results), expected, rtol=1e-3)
    assert len(set(np.float32(expected))) > len(rows) // 2


def test_bend_of_sums_without_variance_is_a_finite_number():
    tiny = [1e-20] * 4
    rows = np.float32([[1, 0, 0, 0, 0, 0, 0.2], [2, 0, 0, 0, 0, 0.69, 0.2], [1, *tiny, 1e-19, 0.2]])
    results = to_target(np.full(3, np.nan, np.float32))
    with np.errstate(all="ignore"):
        bend_kernel[1, 3](to_target(rows), results)
    assert ((to_host(results) >= 0.5) & (to_host(results) <= 2)).all()


@cuda.jit
def two_kernel(gaps, bounds, lowest, highest, results):
    place = cuda.threadIdx.x
    results[place] = beta_of_two(gaps[place], bounds[place], lowest, highest)


def test_two_elements_prove_a_beta_too_low():
    """Never above the beta at which they have the bound, and close to it."""
    random = np.random.default_rng(0)
    gaps = np.float32(10.0 ** random.uniform(-3, 1, 200))
    bounds = np.float32(random.uniform(1e-3, 0.68, 200))
    betas = to_target(np.full(200, np.nan, np.float32))
    two_kernel[1, 200](to_target(gaps), to_target(bounds), np.float32(1e-6), np.float32(1e9), betas)
    t = to_host(betas).astype(np.float64) * gaps
    weight = 2.0**-t
    entropy = np.log1p(weight) + np.log(2) * t * weight / (1 + weight)
    assert (entropy > bounds).all()
    # Where the bound is low the step from below has nearly arrived.
    assert (entropy < 1.25 * bounds)[bounds < 0.3].all()


@pytest.mark.parametrize(
    ("gap", "bound", "expected"),
    [(0.0, 0.2, 100.0), (0.0, 0.7, 0.5), (1e-9, 0.2, 100.0), (9.0, 5.0, 0.5), (1e30, 0.0, 0.5)],
)
def test_two_elements_that_prove_nothing_or_all(gap, bound, expected):
    """A tie has ln 2 at any beta; over a higher bound two elements say nothing."""
    results = to_target(np.full(1, np.nan, np.float32))
    with np.errstate(all="ignore"):
        two_kernel[1, 1](
            to_target(np.float32([gap])), to_target(np.float32([bound])), np.float32(0.5), np.float32(100.0), results
        )
    assert to_host(results) == np.float32(expected)
