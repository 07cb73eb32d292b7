"""biencoder_attention against its reference, its contract and public fault reports about similar functions."""

import numpy as np
import pytest
from biencoder_support import (
    ON_TENSOR_CORES,
    Inputs,
    assert_attended,
    check_biencoder,
    each_kernel,
    each_type,
    error_in_norm,
    inputs_of,
    inputs_with_scores,
    kernel_of,
    kernels_of_many_contexts,  # noqa: F401 (a fixture)
    queries_together,
    run_biencoder,
    same_results,
)
from hypothesis import given
from hypothesis import strategies as st
from support import LIMITS, cases, normal, relative_error, run_constrained, to_host, to_target

import burt_numba
from burt_numba import reference

# Sizes ---------------------------------------------------------------------------------------------------------------

# Edges: of a vector of 4 or 8 elements, of a warp, of tiles of 64 and 128 contexts, of a block's threads.
CONTEXTS = [1, 2, 3, 31, 32, 33, 64, 65, 127, 128, 129, 300]
LARGE_CONTEXTS = [255, 256, 257, 1000, 1024, 1025, 2048, 4097, 16_384]


@pytest.mark.parametrize("K", cases(CONTEXTS, LARGE_CONTEXTS))
@each_type
@pytest.mark.parametrize("queries", [2, 5])
def test_contexts(K, dtype, queries):
    """One bound that acts and one that does not, on both sides of every edge."""
    check_biencoder(inputs_of(1, 2, queries, K, 8, dtype=dtype, seed=K), None, np.float32([0.2, 20.0]))


@pytest.mark.parametrize("D", cases([1, 2, 3, 4, 7, 8, 16, 46, 63, 64, 65, 100, 256], [31, 32, 33, 127, 128, 129, 255]))
@each_type
@each_kernel
def test_dimensions(D, dtype, queries):
    """Head sizes that are no whole vector, warp or tile."""
    check_biencoder(inputs_of(1, 1, queries, 33, D, dtype=dtype, seed=D))


@pytest.mark.parametrize("Q", cases([1, 2, 3, 4, 15, 16, 17, 33], [31, 32, 63, 64, 65, 127, 128, 129, 257]))
@each_type
def test_queries(Q, dtype):
    """Both sides of every tile of queries, which is 16 of them or a multiple, and of the least that has one."""
    check_biencoder(inputs_of(1, 1, Q, 9, 4, dtype=dtype, seed=Q))


@pytest.mark.parametrize(
    ("B", "H", "Q", "K", "D"),
    cases(
        [(3, 2, 2, 17, 5), (1, 5, 1, 40, 16), (2, 2, 5, 40, 16)],
        [
            (32, 8, 512, 64, 64),
            (4, 8, 33, 1024, 64),
            (2, 3, 130, 300, 100),
            (2, 2, 64, 2048, 128),
            (1, 4, 3, 65_536, 128),
        ],
    ),
)
@each_type
def test_batches_and_heads(B, H, Q, K, D, dtype):
    inputs = inputs_of(B, H, Q, K, D, dtype=dtype)
    outcome = check_biencoder(inputs)
    expected = reference.biencoder_attention(*inputs, temperature=outcome.temperature).output
    assert error_in_norm(outcome, expected) <= LIMITS[f"attention_{np.dtype(dtype).name}"]


@pytest.mark.parametrize(
    ("B", "H", "Q", "K", "D"),
    cases([(2, 1, 3, 40, 16), (1, 1, 17, 9, 46)], [(4, 8, 129, 1024, 64), (2, 2, 40, 300, 100), (1, 2, 33, 2048, 256)]),
)
@pytest.mark.parametrize("bound", [0.2, None])
def test_tf32(B, H, Q, K, D, bound):
    inputs = inputs_of(B, H, Q, K, D)
    outcome = check_biencoder(inputs, None, bound, precision="tf32")
    expected = reference.biencoder_attention(*inputs, None, bound, temperature=outcome.temperature).output
    assert error_in_norm(outcome, expected) <= LIMITS["attention_tf32"]


@each_kernel
def test_precision_of_float16_changes_nothing(queries):
    """Products of float16 are exact either way."""
    inputs = inputs_of(1, 2, queries, 33, 16, dtype=np.float16)
    assert same_results(run_biencoder(inputs, precision="tf32"), run_biencoder(inputs, precision="fp32"))


@pytest.mark.parametrize("D", cases([], [256, 128, 255]))
@pytest.mark.parametrize("K", [8, 64, 128, 129, 16_384])
@each_type
@each_kernel
def test_large_heads_over_long_contexts(K, D, dtype, queries):
    """A 128 that was built in made D = 256 garbage on the long path alone: gittensor-ai-lab/sparkinfer#330."""
    check_biencoder(inputs_of(1, 2, queries, K, D, dtype=dtype))


@pytest.mark.parametrize("shape", [(0, 2, 3, 4, 8), (2, 0, 3, 4, 8), (2, 2, 0, 4, 8), (0, 0, 0, 0, 8)])
@each_type
def test_no_rows(shape, dtype):
    """The launch was sized by a division by the number of queries: Dao-AILab/flash-attention#2503."""
    inputs = inputs_of(*shape, dtype=dtype)
    for lengths in (None, np.full(shape[0], 2, np.int32)):
        outcome = check_biencoder(inputs, context_lengths=lengths)
        assert outcome.out.shape == inputs.query.shape and outcome.counts == {}
    out = to_host(burt_numba.biencoder_attention(*map(to_target, inputs)))
    assert (out.shape, out.dtype) == (inputs.query.shape, dtype)


@pytest.mark.parametrize("bound", [0.2, None])
@each_type
@each_kernel
def test_no_contexts(bound, dtype, queries):
    outcome = run_biencoder(inputs_of(2, 4, queries, 0, 8, key_heads=2, dtype=dtype), None, bound, 0.01, 0.5)
    assert (outcome.out == 0).all() and (outcome.temperature == 0.5).all() and (outcome.entropy == 0).all()
    assert outcome.counts == {}
    if bound is None:
        assert np.isneginf(outcome.lse).all()


@each_kernel
def test_one_context_takes_all_weight(queries):
    inputs = inputs_of(1, 2, queries, 1, 8)
    outcome = check_biencoder(inputs, None, 0.0)
    values = np.broadcast_to(inputs.context_values, outcome.out.shape)
    assert outcome.out == pytest.approx(values, rel=LIMITS["score_rounding_tiles"])
    assert (outcome.entropy == 0).all() and (outcome.temperature == 1).all()


# Heads ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key_heads", "queries"), [(1, 2), (2, 2), (3, 2), (6, 2), (2, 5)])
@each_type
def test_grouped_heads(key_heads, queries, dtype):
    """Query head h attends to head h // (H / Hk), as if the keys and values of it were repeated."""
    inputs = inputs_of(1 if queries > 2 else 2, 6, queries, 20, 8, key_heads=key_heads, dtype=dtype)
    outcome = check_biencoder(inputs)
    repeated = [np.repeat(array, 6 // key_heads, axis=1) for array in inputs[1:]]
    assert same_results(run_biencoder(Inputs(inputs.query, *repeated)), outcome)


@pytest.mark.parametrize("bounds", [[0.05, 0.2, 1.0, 30.0], [0.0, 0.5, 0.1, 2.0]])
@each_kernel
def test_one_bound_a_head(bounds, queries):
    inputs = inputs_of(2, 4, queries, 20, 8)
    bounds = np.float32(bounds)
    outcome = check_biencoder(inputs, None, bounds)
    for head, bound in enumerate(bounds):
        alone = run_biencoder(Inputs(*(np.ascontiguousarray(a[:, [head]]) for a in inputs)), None, float(bound))
        assert alone.out.tobytes() == outcome.out[:, [head]].tobytes()


@each_kernel
def test_bad_bounds_are_zero_and_counted_once_a_head(queries):
    outcome = check_biencoder(
        inputs_of(2, 4, queries, 20, 8, spread=10.0), None, np.float32([0.2, np.nan, -1.0, 0.0]), 1e-5
    )
    assert outcome.counts[6] == 2 and (outcome.entropy[:, 1:] <= 1e-6).all()
    assert min(outcome.first, (1, 6)) == outcome.first


@each_kernel
def test_bounds_with_strides(queries):
    inputs, bounds = inputs_of(1, 3, queries, 20, 8), np.float32([0.1, 9.0, 0.5, 9.0, 1.0, 9.0])[::2]
    assert same_results(check_biencoder(inputs, None, bounds), run_biencoder(inputs, None, bounds.copy()))


# Lengths -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("bound", [0.2, None])
@each_type
@each_kernel
def test_lengths(index_dtype, bound, dtype, queries):
    """Contexts at and past the length are absent: as if there were only the others."""
    inputs = inputs_of(5, 1, queries, 33, 8, dtype=dtype)
    lengths = np.array([0, 1, 17, 32, 33], index_dtype)
    outcome = check_biencoder(inputs, None, bound, context_lengths=lengths)
    for sample, length in enumerate(lengths):
        fewer = Inputs(inputs.query[[sample]], *(array[[sample], :, :length] for array in inputs[1:]))
        alone = run_biencoder(Inputs(*map(np.ascontiguousarray, fewer)), None, bound)
        assert relative_error(outcome.out[sample], alone.out[0]) <= LIMITS[f"attention_{np.dtype(dtype).name}"]


@each_kernel
def test_what_lies_past_the_length_is_not_looked_at(queries):
    inputs = inputs_of(3, 2, queries, 40, 8)
    lengths = np.int32([39, 7, 0])
    clean = check_biencoder(inputs, context_lengths=lengths)
    for sample, length in enumerate(lengths):
        inputs.context_keys[sample, :, length:], inputs.context_values[sample, :, length:] = np.inf, np.nan
    assert same_results(check_biencoder(inputs, context_lengths=lengths), clean) and 1 not in clean.counts


@each_kernel
def test_lengths_out_of_range_are_clamped_and_counted_once_a_sample(queries):
    inputs = inputs_of(5, 2, queries, 20, 8)
    outcome = check_biencoder(inputs, context_lengths=np.int64([20, -1, 21, 2**40, -(2**33) + 5]))
    assert outcome.counts[6] == 4 and outcome.first == (1, 6)
    clamped = run_biencoder(inputs, context_lengths=np.int64([20, 0, 20, 20, 0]))
    assert outcome.out.tobytes() == clamped.out.tobytes()


@each_kernel
def test_an_empty_sample_is_written(queries):
    """A sequence without keys left its output as it was: sgl-project/sglang#22688, flashinfer-ai/flashinfer#3047."""
    inputs = inputs_of(2, 2, queries, 5, 8)
    out = to_target(np.full((2, 2, queries, 8), 777, np.float32))
    burt_numba.biencoder_attention(*map(to_target, inputs), context_lengths=to_target(np.int32([0, 0])), out=out)
    assert (to_host(out) == 0).all()


@each_kernel
def test_lengths_with_strides(queries):
    inputs, lengths = inputs_of(3, 1, queries, 20, 8), np.int32([3, 99, 0, 99, 20, 99])[::2]
    assert same_results(
        check_biencoder(inputs, context_lengths=lengths), run_biencoder(inputs, context_lengths=lengths.copy())
    )


# Known values --------------------------------------------------------------------------------------------------------


@each_kernel
def test_two_contexts_against_the_closed_form(queries):
    """Two contexts at a gap g have p = 1 / (1 + exp(-g / T)), so a wanted p gives T = g / log(p / (1 - p))."""
    p = 0.9
    bound = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    inputs = inputs_with_scores([0.5, 0.0], queries=queries)
    outcome = check_biencoder(inputs, 1.0, bound)
    temperature = 0.5 / np.log(p / (1 - p))
    assert outcome.temperature == pytest.approx(np.full((1, 1, queries), temperature), rel=1e-3)
    expected = p * inputs.context_values[0, 0, 0] + (1 - p) * inputs.context_values[0, 0, 1]
    assert outcome.out[0, 0] == pytest.approx(np.tile(expected, (queries, 1)), abs=1e-4)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("scores", [[-245000, -245000.75], [3, 2, 1, 0], [7, 7 - 2**-7, 0, -9], [-60, -60.5, -61]])
def test_weights_are_those_of_constrained_softmax(scores, queries):
    """Very negative scores gave a result of zeros without a sign: flashinfer-ai/flashinfer#4267."""
    K = len(scores)
    inputs = inputs_with_scores(scores, D=K, queries=queries)
    inputs.context_values[0, 0] = np.eye(K)
    outcome = check_biencoder(inputs, 1.0)
    weights = run_constrained(inputs.context_keys[0, 0, :, 0][None])
    assert outcome.out[0, 0] == pytest.approx(np.tile(weights.out, (queries, 1)), rel=5e-4, abs=1e-6)
    assert outcome.temperature[0, 0] == pytest.approx(np.tile(weights.temperature, queries), rel=1e-3)
    assert outcome.out.sum(axis=3) == pytest.approx(np.ones((1, 1, queries)), abs=1e-6)


def test_a_large_product_of_two_elements():
    """448 · -546.875 and 448 · -546.877 round to two float32 scores 0.875 apart."""
    inputs = Inputs(*(np.zeros((1, 1, n, 128), np.float32) for n in (1, 2, 2)))
    inputs.query[..., 0], inputs.context_keys[0, 0, :, 0] = 448, [-546.875, -546.877]
    inputs.context_values[0, 0, [0, 1], [0, 1]] = 1
    outcome = run_biencoder(inputs, 1.0)
    scores = np.float32(448) * inputs.context_keys[:, 0, :, 0]
    weights = run_constrained(scores)
    assert outcome.out[0, 0, 0, :2] == pytest.approx(weights.out[0], rel=1e-3)
    assert outcome.out[0, 0, 0, 0] > 0.9 and outcome.counts == {}


@each_kernel
def test_without_a_bound_it_is_plain_attention(queries):
    inputs = inputs_of(2, 2, queries, 40, 8)
    outcome = check_biencoder(inputs, None, None)
    scores = inputs.query.astype(np.float64) @ inputs.context_keys.swapaxes(2, 3) * 8**-0.5
    weights = reference.attention_softmax(scores.astype(np.float32)).probabilities
    assert relative_error(outcome.out, weights @ inputs.context_values) <= LIMITS["attention_float32"]
    assert (outcome.temperature == 1).all()
    # A bound that no row reaches changes nothing.
    assert run_biencoder(inputs, None, 50.0).out.tobytes() == outcome.out.tobytes()


@pytest.mark.parametrize(("lowest", "highest", "start"), [(0.01, 0.5, 0.5), (2.0, 3.0, 2.0)])
@each_kernel
def test_without_a_bound_there_is_a_start_too(lowest, highest, start, queries):
    outcome = check_biencoder(inputs_of(1, 2, queries, 20, 8), None, None, lowest, highest)
    assert (outcome.temperature == start).all()


@pytest.mark.parametrize("K", [1, 3, 40])
@each_kernel
def test_sums_of_exponentials(K, queries):
    inputs = inputs_with_scores(300 - np.arange(K) * 2.0**-5, queries=queries)
    outcome = check_biencoder(inputs, 1.0, None)
    expected = np.logaddexp.reduce(300 - np.arange(K) * 2.0**-5)
    assert outcome.lse == pytest.approx(np.full((1, 1, queries), expected), rel=2e-7)
    two = Inputs(*(np.concatenate([array, array]) for array in inputs))
    outcome = check_biencoder(two, 1.0, None, context_lengths=np.int32([0, 1]))
    assert outcome.lse.ravel().tolist() == [-np.inf] * queries + [300.0] * queries


# Scale ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 1.0, 0.125, -0.5, 0.0, 1e-30])
@each_type
@each_kernel
def test_scales(scale, dtype, queries):
    inputs = inputs_of(1, 2, queries, 17, 4, dtype=dtype)
    bound = 0.2 if scale is None or abs(scale) > 0.1 else 5.0
    outcome = check_biencoder(inputs, scale, bound)
    if scale == 0:
        assert outcome.entropy == pytest.approx(np.full((1, 2, queries), np.log(17)), rel=1e-6)


@each_kernel
def test_default_scale(queries):
    inputs = inputs_of(1, 2, queries, 20, 7)
    assert same_results(run_biencoder(inputs), run_biencoder(inputs, 7**-0.5))


@each_kernel
def test_defaults_are_the_documented_ones(queries):
    inputs = inputs_of(1, 2, queries, 20, 8, seed=1)
    spelled = run_biencoder(inputs, None, 0.20, 0.01, 10.0, 20, precision="fp32", validate_output=False)
    assert same_results(run_biencoder(inputs), spelled)
    out = burt_numba.biencoder_attention(*map(to_target, inputs))
    assert to_host(out).tobytes() == spelled.out.tobytes()


# Temperatures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lowest", "highest", "start"), [(0.01, 0.5, 0.5), (0.25, 10.0, 1.0), (2.0, 3.0, 2.0)])
@each_kernel
def test_search_starts_at_one_clipped_and_never_heats(lowest, highest, start, queries):
    inputs = inputs_of(1, 2, queries, 30, 8)
    assert (check_biencoder(inputs, None, 20.0, lowest, highest).temperature == start).all()
    assert (check_biencoder(inputs, None, 0.2, lowest, highest).temperature <= start).all()


@pytest.mark.parametrize("bound", [0.0, 1e-4, 0.01, 0.69, 2.0])
@each_kernel
def test_bounds(bound, queries):
    check_biencoder(inputs_of(1, 2, queries, 40, 8), None, bound, 1e-3)


@pytest.mark.parametrize("max_iterations", [1, 2, 3])
@each_kernel
def test_few_iterations_stay_feasible(max_iterations, queries):
    inputs = inputs_of(1, 2, queries, 40, 8)
    outcome = run_biencoder(inputs, None, 0.2, 1e-4, 10.0, max_iterations)
    assert_attended(outcome, inputs, None, 0.2, 1e-4, 10.0, max_iterations, may_run_out=True)
    assert outcome.counts == {}


@each_kernel
def test_ties_at_the_top(queries):
    """The same context twice cannot be told apart by any temperature."""
    inputs = inputs_of(1, 2, queries, 20, 8)
    best = np.argmax(inputs.query @ inputs.context_keys.swapaxes(2, 3), axis=3)
    inputs.context_keys[0, 1, (best[0, 1, 0] + 1) % 20] = inputs.context_keys[0, 1, best[0, 1, 0]]
    outcome = check_biencoder(inputs)
    assert outcome.temperature[0, 1, 0] == np.float32(0.01) and outcome.counts[3] >= 1
    assert outcome.entropy[0, 1, 0] == pytest.approx(np.log(2), abs=1e-5)
    assert outcome.first[1] == 3 and outcome.first[0] <= queries


@each_kernel
def test_all_contexts_alike(queries):
    inputs = Inputs(normal((1, 1, queries, 8)), np.ones((1, 1, 33, 8), np.float32), normal((1, 1, 33, 8)))
    outcome = check_biencoder(inputs)
    assert (outcome.counts, outcome.first) == ({3: queries}, (0, 3))
    assert outcome.entropy == pytest.approx(np.full((1, 1, queries), np.log(33)), rel=1e-6)
    check_biencoder(inputs, None, 20.0)


@pytest.mark.parametrize("spread", [1e-6, 0.01, 30.0, 1e4])
@each_kernel
def test_spreads(spread, queries):
    check_biencoder(inputs_of(1, 1, queries, 40, 8, spread=spread), None, 0.2, 1e-4)


@each_kernel
def test_a_spike_over_a_plateau(queries):
    """One context far above many equal ones, whose weights add up: entropy falls in a step as T falls."""
    for gap in (3.0, 6.0, 9.0):
        check_biencoder(inputs_with_scores([gap] + [0.0] * 128, queries=queries), 1.0, 0.1)


# Bad elements --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", Inputs._fields)
@each_type
@each_kernel
def test_a_bad_element_counts_as_zero(name, value, dtype, queries):
    """One element of a vector, not the vector and not the row. Its sum may be made anew, in another order."""
    inputs = inputs_of(1, 4, queries, 17, 8, key_heads=2, dtype=dtype, spread=0.1)
    array = getattr(inputs, name)
    array[0, 1, 1, 5] = 0
    clean = run_biencoder(inputs, None, 5.0)
    array[0, 1, 1, 5] = value
    outcome = check_biencoder(inputs, None, 5.0)
    code = 1 if np.isnan(value) else 2
    assert np.abs(outcome.out.astype(np.float64) - clean.out).max() <= (2e-6 if dtype == np.float32 else 1e-3)
    assert outcome.entropy == pytest.approx(clean.entropy, rel=1e-6)
    assert set(outcome.counts) == {code}
    assert outcome.first == (np.ravel_multi_index((0, 1, 1, 5), array.shape), code)
    # Two heads share a value, each with all its queries.
    groups = 2 * -(-queries // queries_together(inputs))
    assert outcome.counts[code] == (groups if name == "context_values" else 1)


@pytest.mark.parametrize("K", cases([33, 70], [130, 1000, 5000]))
@pytest.mark.parametrize("D", cases([5, 20], [64]))
@each_type
@each_kernel
def test_bad_elements_everywhere(K, D, dtype, queries):
    """In every place of a vector load, with every query of a tile and every head of a group reading the same keys."""
    inputs = inputs_of(1, 2, queries, K, D, key_heads=1, dtype=dtype)
    for array in inputs:
        array.ravel()[3::7], array.ravel()[5::11], array.ravel()[8::13] = np.nan, np.inf, -np.inf
    check_biencoder(inputs)


@pytest.mark.parametrize("Q", cases([3, 5], [16, 17, 33, 130]))
def test_elements_of_queries_and_keys_are_counted_once(Q):
    inputs = inputs_of(2, 4, Q, 20, 8, key_heads=2)
    inputs.query[:, :, :, 2], inputs.context_keys[:, :, :, 6] = np.nan, np.inf
    outcome = check_biencoder(inputs)
    assert (outcome.counts[1], outcome.counts[2]) == (2 * 4 * Q, 2 * 2 * 20)


@pytest.mark.parametrize("queries", [2, 5, 33])
def test_values_are_counted_once_for_the_queries_that_read_them_together(queries):
    """And where none of them gave their context weight, not at all."""
    inputs = inputs_of(1, 2, queries, 9, 4, key_heads=1, spread=0.1)
    inputs.context_values[:, :, 3, 1:3] = np.nan
    outcome = check_biencoder(inputs, None, None)
    groups = -(-queries // queries_together(inputs))
    assert outcome.counts == {1: 2 * 2 * groups}
    # Of each head the last query alone attends to context 3, and alone does not attend to context 0.
    inputs.query[:] = inputs.context_keys[:] = 0
    inputs.query[..., 0], inputs.query[:, :, -1, 0] = 1, -1
    inputs.context_keys[:, :, 0, 0], inputs.context_keys[:, :, 3, 0] = 1, -1
    inputs.context_values[:, :, 0, 0] = np.inf
    outcome = check_biencoder(inputs, 100.0, None)
    assert outcome.counts == {1: 2 * 2, 2: 2 * -(-(queries - 1) // queries_together(inputs))}


@each_kernel
def test_nothing_but_bad_elements(queries):
    inputs = Inputs(*(np.full(shape, np.nan, np.float32) for shape in ((1, 1, queries, 8), (1, 1, 9, 8), (1, 1, 9, 8))))
    outcome = check_biencoder(inputs, None, 5.0)
    assert (outcome.out == 0).all() and outcome.entropy == pytest.approx(np.full((1, 1, queries), np.log(9)), rel=1e-6)


@each_kernel
def test_values_of_no_weight_have_no_influence(queries):
    """They need not be read, so whether they are recorded is left open."""
    inputs = inputs_with_scores([100.0] + [0.0] * 40, queries=queries)
    clean = run_biencoder(inputs, 1.0)
    inputs.context_values[0, 0, 1:] = np.nan
    outcome = run_biencoder(inputs, 1.0)
    assert outcome.out.tobytes() == clean.out.tobytes()
    value = np.broadcast_to(inputs.context_values[0, 0, 0], outcome.out.shape)
    assert outcome.out == pytest.approx(value, rel=LIMITS["score_rounding_tiles"])


@pytest.mark.parametrize("K", cases([40], [3000]))
@each_kernel
def test_small_weights_are_not_left_out(K, queries):
    """Each context but one has a weight of 1e-5 or less, and its value is 1e4: together they are the result."""
    inputs = inputs_with_scores([11.625] + [0.0] * (K - 1), D=2, queries=queries)
    inputs.context_values[0, 0, 0], inputs.context_values[0, 0, 1:] = 0, 1e4
    outcome = check_biencoder(inputs, 1.0, 5.0)
    p = 1 / (np.exp(11.625) + K - 1)
    assert outcome.out == pytest.approx(np.full((1, 1, queries, 2), (K - 1) * p * 1e4), rel=2e-5)


# Overflow ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "keys", "scale", "code"),
    [
        ([1e30, 0], [[1e9, 0], [1e-30, 0], [2e-30, 0]], 1.0, 2),
        ([1e30, 0], [[-1e9, 0], [1e-30, 0], [2e-30, 0]], 1.0, 2),
        ([1e30, 1e30], [[3e8, 3e8], [1e-30, 0], [2e-30, 0]], 1.0, 2),
        ([1e20, 0], [[1e15, 0], [1e-30, 0], [2e-30, 0]], 1e10, 2),
        ([1e30, 1e30], [[1e9, -1e9], [1e-30, 0], [2e-30, 0]], 1.0, 1),
    ],
)
@each_kernel
def test_a_score_that_overflows_is_zero(query, keys, scale, code, queries):
    """In a product, in the sum, by the scale; NaN where products of both signs do."""
    query, keys = np.float32(query), np.float32(keys)
    inputs = Inputs(np.tile(query, (1, 1, queries, 1)), keys.reshape(1, 1, 3, 2), normal((1, 1, 3, 2), 1.0))
    outcome = run_biencoder(inputs, scale, 5.0)
    assert np.isfinite(outcome.out).all() and np.isfinite(outcome.entropy).all()
    events = sum(outcome.counts.values())
    if code == 1 and events == 0:
        # Tensor cores add up products before these are rounded: there the sum is 0.
        assert kernel_of(inputs) in ON_TENSOR_CORES
    else:
        assert events == queries and outcome.first[0] == 0
    if code == 2:
        # In which order two infinities meet a sum is the operation's own.
        assert outcome.first == (0, 2)
    scores = np.array([0, *(query.astype(np.float64) @ keys[1:].astype(np.float64).T * scale)])
    weights = np.exp(scores) / np.exp(scores).sum()
    expected = weights @ inputs.context_values[0, 0]
    assert outcome.out[0, 0] == pytest.approx(np.tile(expected, (queries, 1)), abs=1e-5)


@each_kernel
def test_a_product_at_the_edge_of_float32(queries):
    """Products of 3e38 and less are no overflow, nor is what a scale brings back from there."""
    inputs = Inputs(*(np.zeros((1, 1, n, 4), np.float32) for n in (queries, 3, 3)))
    inputs.query[..., 0], inputs.context_keys[0, 0, :, 0] = 1e30, [3e8, 2.9e8, 0]
    inputs.context_values[0, 0] = normal((3, 4), 1.0)
    outcome = check_biencoder(inputs, 1e-38, 5.0)
    assert outcome.counts == {} and (outcome.entropy > 0.5).all()


@each_kernel
def test_overflow_is_counted_once_a_score(queries):
    shapes = ((1, 2, queries, 4), (1, 1, 5, 4))
    inputs = Inputs(*(np.full(shape, 1e20, np.float32) for shape in shapes), normal((1, 1, 5, 4), 1.0))
    outcome = check_biencoder(inputs, None, 5.0)
    assert (outcome.counts, outcome.first) == ({2: 2 * queries * 5}, (0, 2))
    outcome = check_biencoder(inputs, None, 5.0, context_lengths=np.int32([3]))
    assert outcome.counts == {2: 2 * queries * 3}
    inputs.query[0, 0] = inputs.query[0, 1, 0] = 0
    outcome = check_biencoder(inputs, None, 5.0, context_lengths=np.int32([3]))
    assert (outcome.counts, outcome.first) == ({2: (queries - 1) * 3}, ((queries + 1) * 5, 2))


@each_type
@each_kernel
def test_large_values_stay_in_range(dtype, queries):
    """Weights add up to 1, so the largest number of the type is the largest result."""
    most = np.finfo(dtype).max
    inputs = Inputs(*(np.zeros((1, 1, n, 4), dtype) for n in (queries, 33, 33)))
    inputs.context_values[:] = most / 2
    outcome = run_biencoder(inputs, None, 5.0)
    assert outcome.out.astype(np.float64) == pytest.approx(np.full((1, 1, queries, 4), float(most) / 2), rel=2e-3)
    assert outcome.counts == {}


# Layouts that faults were reported of --------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [1, 32, 33, 34, 65])
@each_kernel
def test_keys_and_values_of_one_head_for_all(K, queries):
    """Keys with a stride of 0 gave wrong results for K of 1 modulo 32: pytorch/pytorch#191937."""
    inputs = inputs_of(1, 2, queries, K, 16)
    one = Inputs(inputs.query, *(np.broadcast_to(array[:, :1], array.shape) for array in inputs[1:]))
    outcome = check_biencoder(one)
    assert same_results(outcome, run_biencoder(Inputs(*map(np.array, one))))
    assert same_results(outcome, run_biencoder(Inputs(inputs.query, *(array[:, :1].copy() for array in inputs[1:]))))


@pytest.mark.parametrize("L", [64, 65])
@each_type
@each_kernel
def test_heads_after_the_sequence(L, dtype, queries):
    """Transposed views were read in the wrong order where no padding copied them: torch-spyre/torch-spyre#4331."""
    inputs = inputs_of(1, L, 3, 3, 16, dtype=dtype)
    inputs = inputs._replace(query=normal((1, queries, 3, 16), dtype=dtype))
    views = Inputs(inputs.query.transpose(0, 2, 1, 3), *(array.transpose(0, 2, 1, 3) for array in inputs[1:]))
    outcome = check_biencoder(views)
    assert same_results(outcome, run_biencoder(Inputs(*map(np.ascontiguousarray, views))))


@pytest.mark.parametrize("skew", [0, 1, 2, 3])
@pytest.mark.parametrize("D", [46, 64])
@each_type
@each_kernel
def test_nothing_outside_the_arrays_is_read_or_written(D, skew, dtype, queries):
    """A head size of 46 misaligned vector stores: vllm-project/vllm#45466. A NaN that was read would be recorded."""
    outcome = check_biencoder(inputs_of(1, 2, queries, 9, D, dtype=dtype), skew=skew)
    assert 1 not in outcome.counts


# Properties ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("B", "H", "Q", "K", "D"),
    cases([(1, 2, 3, 70, 12), (1, 2, 5, 70, 12)], [(2, 8, 130, 3000, 64), (1, 1, 1, 70_000, 128)]),
)
@each_type
def test_the_same_bits_on_every_run(B, H, Q, K, D, dtype):
    inputs = inputs_of(B, H, Q, K, D, dtype=dtype)
    assert same_results(run_biencoder(inputs), run_biencoder(inputs))


@each_kernel
def test_a_permutation_of_the_contexts_changes_nothing_but_rounding(queries):
    inputs = inputs_of(1, 2, queries, 50, 8)
    order = np.random.default_rng(0).permutation(50)
    outcome = check_biencoder(inputs, None, 20.0)
    other = check_biencoder(Inputs(inputs.query, *(array[:, :, order] for array in inputs[1:])), None, 20.0)
    assert relative_error(other.out, outcome.out) <= 2 * LIMITS["attention_float32"]


@each_kernel
def test_a_sample_does_not_depend_on_the_others(queries):
    inputs = inputs_of(3, 2, queries, 20, 8)
    outcome = run_biencoder(inputs)
    for sample in range(3):
        alone = run_biencoder(Inputs(*(array[[sample]] for array in inputs)))
        assert alone.out.tobytes() == outcome.out[[sample]].tobytes()


elements = st.one_of(st.floats(-3, 3, width=16), st.sampled_from([np.nan, np.inf, -np.inf, 0.0, 1.0, 2.0]))


@given(
    st.tuples(
        *(st.integers(1, n) for n in (2, 2, 2)), st.sampled_from([1, 3, 4, 9]), *map(st.integers, (1, 1), (12, 9))
    ),
    st.sampled_from([np.float32, np.float16]),
    st.one_of(st.none(), st.floats(0.0009765625, 3, width=32)),
    st.data(),
)
def test_contract_holds_for_anything(shape, dtype, bound, data):
    B, Hk, group, Q, K, D = shape
    arrays = inputs_of(B, Hk * group, Q, K, D, key_heads=Hk, dtype=dtype, seed=data.draw(st.integers(0, 1000)))
    for array in arrays:
        for place in data.draw(st.lists(st.integers(0, array.size - 1), max_size=2)):
            array.ravel()[place] = data.draw(elements)
    lengths = None
    if data.draw(st.booleans()):
        lengths = np.array(data.draw(st.lists(st.integers(-1, K + 1), min_size=B, max_size=B)), np.int32)
    check_biencoder(arrays, None, bound, context_lengths=lengths)


# Wrong variants ------------------------------------------------------------------------------------------------------

WRONG_LENGTHS = np.int32([20, 11])


def wrong_inputs(queries):
    return inputs_of(2, 4, queries, 20, 8, key_heads=2)


def without_searching(outcome, inputs, **changes):
    """The outcome with the result of a reference that was called in another way, at the temperatures returned."""
    options = {"context_lengths": WRONG_LENGTHS, "temperature": outcome.temperature} | changes
    result = reference.biencoder_attention(*inputs, **options)
    return outcome._replace(out=result.output.astype(np.float32), entropy=result.entropy.astype(np.float32))


def heads_in_another_order(inputs):
    """Query head h taken to attend to head h % Hk."""
    return Inputs(inputs.query, *(np.tile(array, (1, 2, 1, 1)) for array in inputs[1:]))


WRONG = {
    "no scale": {"scale": 1.0},
    "a scale a little off": {},
    "temperature not applied": {"temperature": 1.0},
    "temperature applied twice": {"temperature": None},
    "one context too many": {"context_lengths": WRONG_LENGTHS + np.int32([0, 1])},
    "one context too few": {"context_lengths": WRONG_LENGTHS - 1},
    "lengths ignored": {"context_lengths": None},
    "another head": {},
}


@pytest.mark.parametrize("wrong", WRONG)
@each_kernel
def test_a_wrong_variant_fails(wrong, queries):
    inputs = wrong_inputs(queries)
    outcome = check_biencoder(inputs, context_lengths=WRONG_LENGTHS)
    assert_attended(without_searching(outcome, inputs), inputs, context_lengths=WRONG_LENGTHS)
    changes = dict(WRONG[wrong])
    if wrong == "temperature applied twice":
        changes["temperature"] = outcome.temperature**2
    elif wrong == "a scale a little off":
        changes["scale"] = 8**-0.5 * (1 + (1e-3 if kernel_of(inputs) in ON_TENSOR_CORES else 1e-4))
    given = heads_in_another_order(inputs) if wrong == "another head" else inputs
    other = without_searching(outcome, given, **changes)
    for part in ({"out": other.out}, {"out": other.out, "entropy": other.entropy}):
        with pytest.raises(AssertionError):
            assert_attended(outcome._replace(**part), inputs, context_lengths=WRONG_LENGTHS)


@each_kernel
def test_a_bound_that_is_ignored_fails(queries):
    inputs = wrong_inputs(queries)
    outcome = run_biencoder(inputs, None, None)
    assert_attended(outcome, inputs, None, None)
    with pytest.raises(AssertionError, match=r"over the bound|gave up"):
        assert_attended(outcome._replace(lse=None), inputs)
    loose = run_biencoder(inputs, None, 0.2004)
    with pytest.raises(AssertionError, match="over the bound"):
        assert_attended(loose, inputs)
    tight = run_biencoder(inputs, None, 0.1996)
    with pytest.raises(AssertionError, match="under the band"):
        assert_attended(tight, inputs)


@pytest.mark.parametrize("part", ["counts", "first", "temperature", "entropy"])
@each_kernel
def test_wrong_side_outputs_fail(part, queries):
    inputs = wrong_inputs(queries)
    outcome = check_biencoder(inputs)
    wrong = {
        "counts": {**outcome.counts, 2: 1},
        "first": (10**6, 2),
        "temperature": outcome.temperature * np.float32(0.999),
        "entropy": outcome.entropy + np.float32(1e-4),
    }
    with pytest.raises(AssertionError):
        assert_attended(outcome._replace(**{part: wrong[part]}), inputs)


# Ranges --------------------------------------------------------------------------------------------------------------


def single_inputs(queries, keys, values, count, dtype=np.float32):
    """One head: ``count`` times the same query over keys and values of as many elements as it has."""
    query = np.tile(np.array(queries, dtype), (1, 1, count, 1))
    return Inputs(query, np.array(keys, dtype)[None, None], np.array(values, dtype)[None, None])


@each_kernel
def test_many_small_weights_of_float16_add_up(queries):
    """Each is below the smallest normal float16 number, beside a weight of 1: they were rounded away."""
    keys, values = np.zeros((2000, 1)), np.ones((2000, 1))
    keys[0], values[0] = 1, 0
    inputs = single_inputs([16.25], keys, values, queries, np.float16)
    outcome = run_biencoder(inputs, 1.0, None)
    expected = 1999 * np.exp(-16.25) / (1 + 1999 * np.exp(-16.25))
    assert outcome.out.astype(np.float64) == pytest.approx(np.full((1, 1, queries, 1), expected), rel=2e-3)


@each_kernel
@pytest.mark.parametrize(("scale", "weight"), [(0.0, 0.5), (1e-38, 1 / (1 + np.exp(4.5)))])
def test_scores_further_apart_than_float32_reaches(queries, scale, weight):
    """Before the scale, one is -2.25e38 and the other 2.25e38."""
    inputs = single_inputs([1.5e19], [[1.5e19], [-1.5e19]], [[1], [2]], queries)
    outcome = run_biencoder(inputs, scale, None)
    assert outcome.counts == {}
    assert outcome.out == pytest.approx(np.full((1, 1, queries, 1), 1 + weight), rel=1e-5)


@each_kernel
@pytest.mark.parametrize("bound", [None, 0.1])
def test_scales_near_the_largest_number(queries, bound):
    inputs = single_inputs([1e-19], [[1e-19], [2e-19]], [[1], [2]], queries)
    check_biencoder(inputs, 3.4e38, bound)


@each_kernel
def test_numbers_near_the_largest_keep_their_place_in_tf32(queries):
    """Rounded up, they would be infinite."""
    inputs = single_inputs([0.0], [[1], [2]], [[3.4028e38], [3.4028e38]], queries)
    outcome = run_biencoder(inputs, 1.0, None, precision="tf32")
    assert outcome.counts == {} and outcome.out == pytest.approx(np.full((1, 1, queries, 1), 3.4028e38), rel=1e-3)
    inputs = single_inputs([3.4027e38, 1], [[0, 1], [0, 2]], [[1, 1], [2, 2]], queries)
    outcome = run_biencoder(inputs, 1.0, None, precision="tf32")
    assert outcome.counts == {} and outcome.out == pytest.approx(np.full((1, 1, queries, 2), 1.731059), rel=2e-3)
