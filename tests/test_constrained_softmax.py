"""constrained_softmax against its reference, its contract and public fault reports about similar functions."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support import (
    LIMITS,
    ON_GPU,
    assert_constrained,
    cases,
    check_constrained,
    normal,
    relative_error,
    run_constrained,
    to_host,
    to_target,
)

import burt_numba
from burt_numba import reference
from burt_numba.softmax_launches import row_shapes

# Sizes ---------------------------------------------------------------------------------------------------------------

# Every capacity is an edge: of the lanes of a warp that share a row, of one warp, of a block, of a cluster of blocks.
# Each is approached by single columns, and by the 4 columns that a vector load takes. Longer rows are streamed.
CAPACITIES = sorted({shape.columns for shape in row_shapes(1)})
SIZES = sorted({capacity + step for capacity in CAPACITIES for step in (-4, -1, 0, 1, 4)})
SMALL_SIZES = [1, 2, 3, 33, 63, 300, 500, *(size for size in SIZES if size <= 2052)]
LARGE_SIZES = [*(size for size in SIZES if size > 2052), 50_257, 200_003]


@pytest.mark.parametrize("num_classes", cases(SMALL_SIZES, LARGE_SIZES))
def test_sizes(num_classes):
    """Both sides of every edge between launches: a searched row, a hardly searched one and one within its bound."""
    rows = 37 if ON_GPU else 3
    logits = normal((rows, num_classes), seed=num_classes)
    check_constrained(logits, np.resize(np.float32([0.2, 1.0, 20.0]), rows))


@pytest.mark.gpu_only("short rows share a warp where there are a thousand or more, too slow in the simulator")
@pytest.mark.parametrize("num_classes", [size for size in SMALL_SIZES if size <= 1028])
def test_sizes_of_many_rows(num_classes):
    rows = 1100
    check_constrained(normal((rows, num_classes), seed=num_classes), np.resize(np.float32([0.2, 1.0, 20.0]), rows))


@pytest.mark.parametrize("num_classes", cases([1, 33, 129, 136, 1025], [2049, 4097, 32769, 65537]))
def test_sizes_in_float16(num_classes):
    check_constrained(normal((2, num_classes), dtype=np.float16, seed=num_classes))


@pytest.mark.parametrize("num_classes", [5, 31, 255, 257, 1000])
@pytest.mark.parametrize("bound", [0.2, 20.0])
def test_rows_narrower_than_a_pass(num_classes, bound):
    """Idle threads kept a running maximum of -inf and turned the row into NaN.

    gabrieldemarmiesse/torch-mojo-backend#319
    """
    check_constrained(normal((3, num_classes)), bound)


@pytest.mark.parametrize("num_classes", [1, 2, 3, 31, 32, 33])
def test_more_rows_than_a_block_takes(num_classes):
    """Threads past the row's end left early, so later rows of the same block were never written.

    karpathy/llm.c#776
    """
    rows = 257 if ON_GPU else 17
    logits = np.tile(np.arange(num_classes, dtype=np.float32), (rows, 1))
    outcome = check_constrained(logits)
    if num_classes == 1:
        assert (outcome.out == 1).all() and (outcome.entropy == 0).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (0, 1)])
def test_no_rows(shape):
    """A grid of 0 blocks is refused by the driver, so there must be no launch: numba/numba#5017."""
    outcome = run_constrained(np.zeros(shape, np.float32))
    assert outcome.out.shape == shape
    assert outcome.counts == {}
    assert to_host(burt_numba.constrained_softmax(to_target(np.zeros(shape, np.float16)))).dtype == np.float16


def test_one_size_after_another():
    """A kernel specialised for one size was reused for the next: numba/numba#3265."""
    logits = {size: normal((2, size), seed=size) for size in (40, 200, 130)}
    first = {size: run_constrained(logits[size]).out for size in logits}
    for size in itertools.islice(itertools.cycle(logits), 6):
        assert run_constrained(logits[size]).out.tobytes() == first[size].tobytes()


@pytest.mark.gpu_only("too slow in the simulator")
def test_random_row_matches_over_many_rows():
    check_constrained(normal((4096, 777), spread=5.0))


# Known values --------------------------------------------------------------------------------------------------------


def test_temperature_is_divided_by_once():
    """The temperature was applied twice, which no test at T = 1 could see: RL-Align/RL-Kernel#86."""
    outcome = check_constrained(np.float32([[3, 2, 1, 0]]), 0.2)
    assert outcome.temperature[0] == pytest.approx(0.327817, rel=1e-3)
    assert outcome.out[0] == pytest.approx([0.952669, 0.045096, 0.002135, 0.000101], abs=5e-5)


@pytest.mark.parametrize("columns", [[4095, 7, 4000], [2049, 7, 2000]])
def test_threads_whose_whole_slice_is_masked(columns):
    """(-inf) - (-inf) in one thread's partial result made the row NaN: flashinfer-ai/flashinfer#1178."""
    last, low, high = columns
    logits = np.full((2, last + 1), -np.inf, np.float32)
    logits[0, last] = 1
    logits[1, [low, high]] = 2
    outcome = check_constrained(logits, 0.2)
    assert outcome.out[0, last] == 1 and np.count_nonzero(outcome.out[0]) == 1
    assert outcome.out[1, [low, high]].tolist() == [0.5, 0.5] and np.count_nonzero(outcome.out[1]) == 2
    assert (outcome.counts, outcome.first) == ({3: 1}, (1, 3))


@pytest.mark.parametrize(
    ("num_classes", "places"),
    cases([(2050, (0, 1, 1023, 1024, 2049))], [(100_000, (0, 1, 1023, 1024, 50_000, 99_999))]),
)
def test_single_finite_logit_anywhere(num_classes, places):
    """NaN or not depended on where the one finite logit lay: Dao-AILab/flash-attention#1930."""
    logits = np.full((len(places), num_classes), -np.inf, np.float32)
    logits[range(len(places)), places] = 10.0
    outcome = check_constrained(logits)
    assert (outcome.out[range(len(places)), places] == 1).all()
    assert np.count_nonzero(outcome.out) == len(places)
    assert (outcome.entropy == 0).all() and (outcome.temperature == 1).all()


def test_probability_that_vanishes():
    """The entropy was NaN as soon as one probability was exactly 0: pytorch/pytorch#40553."""
    outcome = check_constrained(np.float32([[100, 0, 0]]), 0.2)
    assert outcome.out[0, 0] == 1 and (outcome.out[0, 1:] < 1e-43).all()
    assert outcome.temperature[0] == 1 and 0 <= outcome.entropy[0] < 1e-40


@pytest.mark.parametrize(
    ("logits", "temperature_min"),
    [
        (np.float16([[660, 660, 0]]), 0.01),
        (np.float32([[3e38, 3e38, -3e38]]), 0.01),
        (np.float32([[2.5e9, 2.5e9, 0]]), 0.3),
        (np.float32([[2.5e9, 2.5e9, 0]]), 0.7),
    ],
)
def test_division_by_a_small_temperature_does_not_overflow(logits, temperature_min):
    """Logits over T overflowed before the maximum was taken off.

    vllm-project/vllm#890, vllm-project/vllm#2937, SlopDotCash/asi#2886
    """
    outcome = check_constrained(logits, 0.2, temperature_min, 1.0)
    assert outcome.out.tolist() == [[0.5, 0.5, 0.0]]
    assert (outcome.counts, outcome.first) == ({3: 1}, (0, 3))


def test_maximum_is_taken_off_before_the_product_with_one_over_t():
    """A fused multiply and subtract in one pass only gave a probability of 1.00134: flashinfer-ai/flashinfer#5088."""
    logits = np.tile(np.float32([42, 41.99] + [-20] * 30), (4, 1))
    outcome = check_constrained(logits, 0.2, 1e-4)
    assert outcome.temperature == pytest.approx([0.0034079] * 4, rel=1e-3)
    assert outcome.out[:, :2] == pytest.approx(np.tile([0.949495, 0.050505], (4, 1)), abs=1e-4)
    assert (outcome.out <= 1).all()
    assert np.abs(outcome.out.sum(axis=1, dtype=np.float64) - 1).max() <= LIMITS["row_sum"]

    logits[:, 1] = 42
    outcome = check_constrained(logits, 0.2, 0.001, 0.001)
    assert outcome.out[:, :2].tolist() == [[0.5, 0.5]] * 4
    assert (outcome.out[:, 2:] == 0).all()


def test_equal_logits_stay_uniform_and_an_empty_row_stays_empty():
    """All -inf gave NaN that only surfaced in a loss: deep-spin/entmax#16."""
    outcome = check_constrained(np.float32([[-np.inf] * 4, [0] * 4, [1, 0, 0, 0]]), 0.2)
    assert outcome.out[0].tolist() == [0] * 4 and (outcome.temperature[0], outcome.entropy[0]) == (1, 0)
    assert outcome.out[1].tolist() == [0.25] * 4
    assert outcome.temperature[2] == pytest.approx(0.229836, rel=1e-3)
    assert outcome.out[2] == pytest.approx([0.962756, 0.012415, 0.012415, 0.012415], abs=5e-5)
    assert (outcome.counts, outcome.first) == ({3: 1}, (1, 3))


@pytest.mark.parametrize("num_classes", cases([65, 1000], [50_000]))
def test_equal_logits_give_equal_bits(num_classes):
    """Lanes that end a reduction with sums of different last bits each divided by their own.

    triton-lang/triton#7264
    """
    out = run_constrained(np.full((2, num_classes), 0.3, np.float32), 20.0).out
    assert len(np.unique(out)) == 1


# Degradations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_bad_elements_are_absent(dtype):
    """One NaN or +inf turned every probability NaN, without an error: JustVugg/colibri#369."""
    clean = normal((4, 64), dtype=dtype)
    logits = clean.copy()
    logits[1, 63], logits[2, 5] = np.nan, np.inf
    outcome, undisturbed = check_constrained(logits), run_constrained(clean)
    assert outcome.out[[0, 3]].tobytes() == undisturbed.out[[0, 3]].tobytes()
    assert outcome.out[1, 63] == 0 and outcome.out[2, 5] == 0
    assert (outcome.counts, outcome.first) == ({1: 1, 2: 1}, (127, 1))


@pytest.mark.parametrize("num_classes", cases([5, 70, 260, 300, 301, 1100], [4100, 5000, 40_000, 100_001, 140_000]))
def test_bad_elements_in_every_launch(num_classes):
    logits = normal((3, num_classes), seed=num_classes)
    logits[0, ::3] = np.nan
    logits[1, 1::2] = np.inf
    logits[1, 0] = np.nan
    logits[2, -1] = -np.inf
    check_constrained(logits)


def test_rows_with_nothing_finite():
    logits = np.full((4, 6), -np.inf, np.float32)
    logits[1], logits[2], logits[3, :3] = np.nan, np.inf, np.nan
    outcome = check_constrained(logits, 0.2, 0.01, 0.5)
    assert (outcome.out == 0).all()
    assert (outcome.temperature == 0.5).all() and (outcome.entropy == 0).all()
    assert (outcome.counts, outcome.first) == ({1: 9, 2: 6}, (6, 1))


def test_ties_at_the_top():
    logits = normal((5, 50))
    for row in range(5):
        logits[row, np.argsort(logits[row])[-1 - row :]] = 9.0
    outcome = check_constrained(logits, 0.2)
    assert outcome.counts == {3: 4}
    for row in range(1, 5):
        assert (outcome.out[row] == np.float32(1) / np.float32(row + 1)).sum() == row + 1


@pytest.mark.parametrize("spread", [1e-6, 0.01, 30.0, 1e4, 1e20, 1e37])
def test_spreads(spread):
    check_constrained(normal((3, 70), spread=spread), 0.2, 1e-4)


def test_spikes_in_a_flat_row():
    """A few classes far above many equal ones: entropy falls in steps as T falls."""
    logits = normal((4, 200), spread=0.01)
    logits[0, 3] += 5
    logits[1, [3, 9]] += [8, 7.9]
    logits[2, [3, 9, 11]] += [12, 6, 3]
    logits[3] -= np.float32(100)
    logits[3, 7] = 0
    check_constrained(logits, 0.1, 1e-3)


@pytest.mark.parametrize("bound", [0.0, 1e-7, 1e-4, 0.01, 0.69, 2.0])
def test_bounds(bound):
    check_constrained(normal((3, 60)), bound, 1e-3)


# Parameters ----------------------------------------------------------------------------------------------------------


def test_defaults_are_the_documented_ones():
    logits = normal((3, 40))
    assert run_constrained(logits).out.tobytes() == run_constrained(logits, 0.20, 0.01, 10.0, 20).out.tobytes()


@pytest.mark.parametrize(("lowest", "highest", "start"), [(0.01, 0.5, 0.5), (0.25, 10.0, 1.0), (2.0, 3.0, 2.0)])
def test_search_starts_at_one_clipped_and_never_heats(lowest, highest, start):
    outcome = check_constrained(normal((4, 40)), 20.0, lowest, highest)
    assert (outcome.temperature == start).all()
    outcome = check_constrained(normal((4, 40)), 0.2, lowest, highest)
    assert (outcome.temperature <= start).all()


def test_within_the_bound_the_bound_does_not_show():
    logits = normal((4, 40))
    outcomes = [check_constrained(logits, bound) for bound in (4.0, 20.0, 3e38)]
    assert len({outcome.out.tobytes() for outcome in outcomes}) == 1
    assert (outcomes[0].temperature == 1).all()


@pytest.mark.parametrize("max_iterations", [1, 2, 3, 5])
def test_few_iterations_stay_feasible(max_iterations):
    logits = normal((6, 80), spread=np.float32([[0.1], [0.5], [1], [3], [10], [50]]))
    outcome = run_constrained(logits, 0.2, 1e-4, 10.0, max_iterations)
    assert_constrained(outcome, logits, 0.2, 1e-4, may_run_out=True)
    assert outcome.counts == {}


def test_more_iterations_come_closer():
    logits = normal((4, 80), spread=np.float32([[0.1], [0.5], [1], [3]]))
    gap = [0.2 - run_constrained(logits, 0.2, 1e-4, 10.0, iterations).entropy.min() for iterations in (1, 20)]
    assert gap[0] > gap[1]


def test_one_bound_a_row():
    logits = normal((2, 3, 30))
    bounds = np.float32([[0.1, 0.5, 1.0], [20.0, 0.2, 0.01]])
    outcome = check_constrained(logits, bounds)
    for index in np.ndindex(2, 3):
        alike = run_constrained(logits, float(bounds[index]))
        assert outcome.out[index].tobytes() == alike.out[index].tobytes()


def test_bad_row_bounds():
    logits = normal((5, 30))
    outcome = check_constrained(logits, np.float32([0.2, np.nan, -1.0, 0.0, -np.inf]))
    assert outcome.counts[6] == 3
    assert outcome.first == (1, 6)
    assert (outcome.entropy[1:] <= LIMITS["entropy_over"]).all()


def test_row_bounds_with_strides():
    logits = normal((4, 30))
    bounds = np.float32([0.1, 9.0, 0.5, 9.0, 1.0, 9.0, 20.0, 9.0])[::2]
    outcome = check_constrained(logits, bounds)
    assert outcome.out.tobytes() == check_constrained(logits, bounds.copy()).out.tobytes()


# Properties ----------------------------------------------------------------------------------------------------------

# Multiples of 1/64 up to 8: sums of two such are exact in float32, and ties are frequent.
exact_rows = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 3), st.integers(1, 40)), elements=st.integers(-512, 512).map(lambda n: n / 64)
)
rows_with_anything = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 40)),
    elements=st.one_of(
        st.floats(-30, 30, width=32),
        st.floats(width=32),
        st.sampled_from([np.nan, np.inf, -np.inf, 0.0, 1.0]),
    ),
)
bounds = st.floats(0.0009765625, 3, width=32)


@given(rows_with_anything, bounds)
def test_contract_holds_for_anything(logits, bound):
    check_constrained(logits, bound)


@given(exact_rows, bounds, st.integers(-64, 64))
def test_shift_of_a_row_changes_no_bit(logits, bound, shift):
    shifted = run_constrained(logits + np.float32(shift), bound)
    outcome = run_constrained(logits, bound)
    assert outcome.out.tobytes() == shifted.out.tobytes()
    assert outcome.temperature.tobytes() == shifted.temperature.tobytes()


@given(exact_rows, bounds, st.randoms(use_true_random=False))
def test_permutation_of_the_classes_permutes_the_result(logits, bound, random):
    order = list(range(logits.shape[1]))
    random.shuffle(order)
    outcome, permuted = check_constrained(logits, bound), check_constrained(logits[:, order], bound)
    # The same sums in another order: T may end elsewhere in its band, so both are read at one temperature.
    there = reference.constrained_softmax(logits, bound, temperature=permuted.temperature).probabilities
    assert relative_error(permuted.out, there[:, order]) <= LIMITS["float32"]
    for row, values in zip(outcome.out, logits, strict=True):
        assert (np.diff(row[np.argsort(values, kind="stable")]) >= 0).all(), "a larger logit has the smaller weight"


@given(exact_rows, bounds)
def test_permutation_of_the_rows_permutes_the_bits(logits, bound):
    assert (
        run_constrained(logits[::-1].copy(), bound).out[::-1].tobytes() == run_constrained(logits, bound).out.tobytes()
    )


@given(exact_rows, st.floats(0.05, 3), st.integers(0, 2**32 - 1))
def test_no_distribution_within_the_bound_is_nearer(logits, bound, seed):
    """Scaling the temperature is the projection of q = softmax(z) on {H <= bound} in KL(p || q).

    The band lets H end below the bound by a ten-thousandth. The multiplier of the bound is 1 - T <= 1, so that costs
    no more than as much in KL.
    """
    outcome = check_constrained(logits, bound, 1e-4)
    if outcome.counts:
        return  # temperature_min binds: no temperature reaches the bound
    q = reference.constrained_softmax(logits, temperature=1.0).probabilities
    freedom = max(LIMITS["entropy_under_relative"] * bound, LIMITS["entropy_under"]) + LIMITS["entropy_over"]
    nearest = divergence(outcome.out, q)
    random = np.random.default_rng(seed)
    for spread in (0.1, 1.0, 5.0):
        # Near the answer, and anywhere.
        for direction in (np.log(q), 0.0):
            other = reference.constrained_softmax(
                direction + random.standard_normal(logits.shape) * spread, bound, 1e-6
            )
            assert (nearest <= divergence(other.probabilities, q) + freedom)[other.entropy <= bound].all()


def divergence(p, q):
    """KL(p || q) of each row, in nats."""
    p = np.asarray(p, dtype=np.float64)
    return np.sum(p * (np.log(p, out=np.zeros_like(p), where=p > 0) - np.log(q)), axis=-1)


def test_random_rows():
    """Sizes 1 to 300, spreads 0.1 to 50, bounds 0.01 to 2. The GPU takes 100,000 rows in test_gpu.py."""
    random = np.random.default_rng(7)
    for size in np.unique(np.geomspace(1, 300, 30).astype(int)):
        rows = 12
        spread = 10 ** random.uniform(-1, np.log10(50), (rows, 1))
        logits = (random.standard_normal((rows, size)) * spread).astype(np.float32)
        check_constrained(logits, (10 ** random.uniform(-2, np.log10(2), rows)).astype(np.float32))


# A deliberately wrong operation must fail at the same limits ---------------------------------------------------------


def at_temperature(logits, temperature):
    return reference.constrained_softmax(logits, temperature=temperature).probabilities.astype(np.float32)


def temperature_off(logits, outcome):
    temperature = outcome.temperature * np.float32(1.001)
    out = at_temperature(logits, temperature)
    return outcome._replace(out=out, temperature=temperature, entropy=reference.entropy(out))


WRONG = {
    "temperature applied twice": lambda z, o: o._replace(out=at_temperature(z, o.temperature**2)),
    "search skipped": lambda z, o: o._replace(
        out=at_temperature(z, np.ones(len(z))), temperature=np.ones(len(z), np.float32)
    ),
    "a temperature one per mille too high": temperature_off,
    "one probability missing": lambda z, o: o._replace(out=np.where(z == z.max(axis=1, keepdims=True), 0, o.out)),
    "one probability off by a hundred-thousandth": lambda z, o: o._replace(
        out=o.out * np.where(o.out == o.out.max(), np.float32(1 + 2e-5), np.float32(1))
    ),
    "neighbouring row": lambda z, o: o._replace(out=np.roll(o.out, 1, axis=0)),
    "entropy in bits": lambda z, o: o._replace(entropy=o.entropy / np.float32(np.log(2))),
    "an event too many": lambda z, o: o._replace(counts={3: 1}),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_results_are_noticed(fault):
    logits = normal((3, 40))
    outcome = check_constrained(logits)
    with pytest.raises(AssertionError):
        assert_constrained(WRONG[fault](logits, outcome), logits)
