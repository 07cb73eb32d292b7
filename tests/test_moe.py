"""sparse_moe_dispatch against its reference and its contract: sizes, orders, capacity, overflow, degradations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_support import (
    Routing,
    assert_conserved,
    assert_dispatched,
    assert_rows,
    call_dispatch,
    check_dispatch,
    distinct_routing,
    random_routing,
    routing_of,
    run_dispatch,
    same_results,
    small_blocks,
)
from support import ON_GPU, cases

import burt_numba
from burt_numba import moe_launches
from burt_numba.target import SIMULATED_CAPABILITY

each_order = pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "atomic"])

# Sizes ---------------------------------------------------------------------------------------------------------------

# Edges: of a vector of 4 or 8 elements, of a warp, of the 256 threads of a documented block and of two of them.
# 516 and 1032 are more vectors than one warp takes at a time.
COLUMNS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 31, 32, 33, 127, 128, 129, 255, 256, 257, 516, 1032]
LARGE_COLUMNS = [511, 512, 513, 1000, 1024, 1025, 2047, 2048, 2049, 4096, 7168]


@pytest.mark.parametrize("d", cases(COLUMNS, LARGE_COLUMNS))
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@each_order
def test_columns(d, dtype, deterministic):
    check_dispatch(random_routing(5, d, 3, 2, dtype=dtype, seed=d), 3, deterministic=deterministic)


TOKENS = [1, 2, 3, 31, 32, 33, 127, 128, 129, 255, 256, 257]
LARGE_TOKENS = [511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 10_000]


@pytest.mark.parametrize("T", cases(TOKENS, LARGE_TOKENS))
@pytest.mark.parametrize("k", [1, 2, 3])
def test_tokens(T, k):
    """Both sides of every edge between the blocks that count, with experts that overflow."""
    check_dispatch(random_routing(T, 2, 5, k, lowest=-1, more=1, seed=T), max(1, T * k // 6))


@pytest.mark.parametrize("experts", cases([1, 2, 3, 31, 32, 33, 128, 255, 256, 257, 512], [511, 513, 1023, 1024, 1025]))
@each_order
def test_experts(experts, deterministic):
    check_dispatch(random_routing(40, 3, experts, 3, seed=experts), 3, deterministic=deterministic)


@pytest.mark.parametrize("k", [1, 3, 4, 5, 7, 8, 9, 16, 17, 33])
@each_order
def test_choices(k, deterministic):
    """As many choices as experts and more, powers of two and others."""
    check_dispatch(random_routing(9, 4, 16, k, lowest=-1, seed=k), 4, deterministic=deterministic)


@pytest.mark.parametrize("experts", cases([1, 2, 5, 16], [64, 100]))
@each_order
def test_every_expert_is_chosen(experts, deterministic):
    """k = E: each expert is asked for by every token."""
    for capacity in (None, 7, 3):
        check_dispatch(distinct_routing(7, 3, experts, experts), capacity, deterministic=deterministic)


@pytest.mark.parametrize(
    ("T", "d", "experts", "k"),
    cases([(1024, 4, 4, 2)], [(1024, 512, 4, 2), (4096, 1024, 128, 8), (32, 7168, 128, 8), (20_000, 64, 64, 6)]),
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@each_order
def test_documented_sizes(T, d, experts, k, dtype, deterministic):
    """With the default capacity nothing is lost of an even load; of a skewed one a part is."""
    for routing in (distinct_routing(T, d, experts, k, dtype=dtype), random_routing(T, d, experts, k, dtype=dtype)):
        check_dispatch(routing, deterministic=deterministic)
        if not ON_GPU:
            break


@each_order
def test_no_tokens(deterministic):
    """Nothing is launched for the tokens, but the counts and the rows are those of a call."""
    routing = random_routing(0, 4, 3, 2)
    check_dispatch(routing, deterministic=deterministic)
    check_dispatch(routing, 5, deterministic=deterministic)
    allocated = call_dispatch(routing, 5, deterministic=deterministic)
    assert_dispatched(allocated, routing, 5, unused=0)
    assert allocated.expert_inputs.shape == (3, 5, 4)


@each_order
@pytest.mark.parametrize(("T", "d", "k"), [(3, 0, 2), (3, 4, 0), (0, 0, 0)])
def test_other_axes_of_size_0(T, d, k, deterministic):
    check_dispatch(random_routing(T, d, 3, k), 2, deterministic=deterministic)


@each_order
def test_one_expert(deterministic):
    for capacity, dropped in ((None, 0), (9, 0), (4, 5), (0, 9)):
        outcome = check_dispatch(routing_of([[0]] * 9, 1), capacity, deterministic=deterministic)
        assert (outcome.num_dropped[0], outcome.num_overflowed[0]) == (dropped, 0)


# Capacity ------------------------------------------------------------------------------------------------------------


@each_order
@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 5, 100])
def test_capacities(capacity, deterministic):
    """Also above the number of tokens, which crashed deepspeedai/DeepSpeed#8155."""
    routing = random_routing(20, 4, 6, 2, lowest=-1)
    outcome = check_dispatch(routing, capacity, deterministic=deterministic)
    assert outcome.expert_inputs.shape == (6, capacity, 4)
    if capacity == 0:
        assert outcome.num_dropped[0] == np.count_nonzero((routing.top_k_indices >= 0).any(axis=1))
    if capacity == 100:
        assert outcome.num_dropped[0] == outcome.num_overflowed[0] == 0


@pytest.mark.parametrize(
    ("T", "k", "experts", "capacity"),
    [(4, 2, 4, 4), (5, 2, 4, 5), (5, 1, 4, 3), (3, 3, 7, 3), (1, 1, 8, 1), (7, 3, 1, 42)],
)
def test_default_capacity(T, k, experts, capacity):
    routing = random_routing(T, 2, experts, k)
    allocated = call_dispatch(routing)
    assert allocated.expert_inputs.shape == (experts, capacity, 2)
    assert_dispatched(allocated, routing, capacity, unused=0)


@each_order
@pytest.mark.parametrize("capacity", [2**31 - 1, 2**31, 2**32 + 1])
def test_capacities_beyond_32_bits(capacity, deterministic):
    """Of rows without elements, which take no memory."""
    outcome = check_dispatch(routing_of([[0, 1], [1, -1]], 2, d=0), capacity, deterministic=deterministic)
    assert outcome.expert_counts.tolist() == [1, 2]


@each_order
def test_choices_that_fit_exactly(deterministic):
    routing = routing_of([[0, 1], [1, 2], [2, 0]] * 4, 3)
    outcome = check_dispatch(routing, 8, deterministic=deterministic)
    assert outcome.expert_counts.tolist() == [8, 8, 8] and outcome.counts == {}


@each_order
def test_every_token_to_one_expert(deterministic):
    """48 rows were written past the allocation: NVIDIA/TransformerEngine#3346."""
    outcome = check_dispatch(routing_of([[1]] * 10, 2), 3, deterministic=deterministic)
    assert outcome.expert_counts.tolist() == [3, 3]
    assert (outcome.num_dropped[0], outcome.num_overflowed[0], outcome.counts) == (4, 3, {5: 4})
    if deterministic:
        assert outcome.dispatch_indices[:, 0].tolist() == (
            [[1, 0], [1, 1], [1, 2], [0, 0], [0, 1], [0, 2]] + [[-1, -1]] * 4
        )
        assert outcome.first == (6, 5)


@each_order
def test_the_overflow_expert_may_be_the_full_one(deterministic):
    """Capacity was enforced in one of two modes alone: deepspeedai/DeepSpeed#1658."""
    outcome = check_dispatch(routing_of([[0]] * 5, 4), 2, deterministic=deterministic)
    assert (outcome.expert_counts.tolist(), outcome.counts) == ([2, 0, 0, 0], {5: 3})
    outcome = check_dispatch(routing_of([[0, 1]] * 5, 4), 2, deterministic=deterministic)
    assert outcome.expert_counts.tolist() == [2, 2, 0, 0]
    assert np.count_nonzero(outcome.dispatch_indices[..., 0] == -1) == 6


@each_order
def test_more_capacity_than_tokens(deterministic):
    """Capacity above the number of tokens crashed: deepspeedai/DeepSpeed#8155."""
    outcome = check_dispatch(routing_of([[0, 1]] * 3, 2), 100, deterministic=deterministic)
    assert outcome.expert_counts.tolist() == [3, 3]
    assert sorted(outcome.dispatch_indices[:, 0, 1]) == sorted(outcome.dispatch_indices[:, 1, 1]) == [0, 1, 2]


@each_order
def test_experts_without_tokens(deterministic):
    """Experts that nobody asks for hung the product that followed: pytorch/torchtitan#1166."""
    outcome = check_dispatch(routing_of([[5]] * 100, 8), 128, deterministic=deterministic)
    assert outcome.expert_counts.tolist() == [0, 0, 0, 0, 0, 100, 0, 0]


@pytest.mark.parametrize(("T", "d"), cases([(750, 1)], [(3000, 8)]))
@each_order
def test_more_experts_than_threads_of_a_block(T, d, deterministic):
    """Experts beyond 1,023 (or 255) were never counted: vllm-project/vllm#21079, kekzl/imp#2056."""
    routing = distinct_routing(T, d, 1500, 2)
    routing.top_k_indices[:3, 0] = 256, 1024, 1499
    outcome = check_dispatch(routing, 16, deterministic=deterministic)
    asked = np.zeros(1500, int)
    np.add.at(asked, np.unique(np.stack([np.repeat(range(T), 2), routing.top_k_indices.ravel()]), axis=1)[1], 1)
    assert outcome.expert_counts.tolist() == np.minimum(asked, 16).tolist()
    assert (outcome.expert_counts[[256, 1024, 1499]] > 0).all()


# Overflow ------------------------------------------------------------------------------------------------------------


def test_overflow_takes_the_slot_and_the_weight_of_the_first_choice_in_range():
    routing = routing_of([[-1, 1, 2], [9, 1, 2], [-1, 2, 1]], 4)
    outcome = check_dispatch(routing, 1)
    assert outcome.dispatch_indices.tolist() == [
        [[-1, -1], [1, 0], [-1, -1]],
        [[-1, -1], [0, 0], [-1, -1]],
        [[-1, -1], [2, 0], [-1, -1]],
    ]
    assert outcome.combine_weights[1].tolist() == [0, routing.routing_weights[1, 1], 0]
    assert (outcome.num_dropped[0], outcome.num_overflowed[0], outcome.counts) == (0, 1, {6: 1})


@each_order
def test_overflow_comes_after_all_ordinary_placements(deterministic):
    """The tokens that choose expert 0 come last, and lose no row to those without room."""
    outcome = check_dispatch(routing_of([[1]] * 20 + [[0]] * 6, 3), 8, deterministic=deterministic)
    assert outcome.expert_counts.tolist() == [8, 8, 0]
    assert (outcome.dispatch_indices[20:, 0, 0] == 0).all()
    assert (outcome.num_dropped[0], outcome.num_overflowed[0]) == (10, 2)


def test_a_token_with_room_for_one_choice_does_not_overflow():
    outcome = check_dispatch(routing_of([[1, 2], [1, 2], [1, 3]], 4), 2)
    assert outcome.dispatch_indices[2].tolist() == [[-1, -1], [3, 0]]
    assert outcome.expert_counts[0] == outcome.num_overflowed[0] == 0


@pytest.mark.parametrize("T", cases([70, 300], [5000, 100_000]))
@pytest.mark.parametrize("room", [0, 1, 37, 10_000])
def test_many_tokens_overflow_in_token_order(T, room):
    """Expert 1 is full from the start; expert 0 has a little room, exactly enough, and more."""
    indices = np.full((T, 2), 1)
    indices[::3] = -1
    capacity = min(T, room)
    outcome = run_dispatch(routing_of(indices, 3, d=1), capacity)
    asking = np.flatnonzero(indices[:, 0] == 1)
    placed, moved, dropped = np.split(asking, [capacity, 2 * capacity])
    assert outcome.dispatch_indices[placed, 0].tolist() == [[1, p] for p in range(len(placed))]
    assert outcome.dispatch_indices[moved, 0].tolist() == [[0, p] for p in range(len(moved))]
    assert (outcome.dispatch_indices[dropped] == -1).all() and (outcome.dispatch_indices[::3] == -1).all()
    assert (outcome.num_dropped[0], outcome.num_overflowed[0]) == (len(dropped), len(moved))
    assert outcome.first == ((dropped[0], 5) if len(dropped) else None)


# Indices -------------------------------------------------------------------------------------------------------------


@each_order
def test_padding_alone(deterministic):
    outcome = check_dispatch(routing_of(np.full((40, 3), -1), 4), deterministic=deterministic)
    assert (outcome.expert_counts == 0).all() and outcome.counts == {} and outcome.num_dropped[0] == 0


@each_order
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_indices_out_of_range(index_dtype, deterministic):
    """One side of the range alone was checked: vllm-project/vllm-xpu-kernels#571, vllm-project/vllm#50845.

    -1 wraps around to the last expert where nobody looks.
    """
    indices = [[-1, 4], [11, 1], [2**31 - 1, -(2**31)], [2, -2], [3, 0]]
    routing = routing_of(indices, 4, index_dtype=index_dtype)
    outcome = check_dispatch(routing, 2, deterministic=deterministic)
    assert outcome.expert_counts.tolist() == [1, 1, 1, 1]
    assert (outcome.counts, outcome.first) == ({6: 5}, (1, 6))


@each_order
def test_indices_beyond_32_bits(deterministic):
    """A 64-bit index that is cut to 32 bits names another expert: ROCm/aiter#5255."""
    routing = routing_of([[2**32, 1], [2**32 - 1, 2**63 - 1], [-(2**32), -(2**63)]], 4, index_dtype=np.int64)
    outcome = check_dispatch(routing, 2, deterministic=deterministic)
    assert outcome.expert_counts.tolist() == [0, 1, 0, 0] and outcome.counts == {6: 5}


@each_order
@pytest.mark.parametrize("T", cases([40], [300]))
def test_repeated_indices(T, deterministic):
    """The second slot was left unwritten, and followed as a row number: flashinfer-ai/flashinfer#3011."""
    outcome = check_dispatch(routing_of([[5, 8, 8, 6]] * T, 16), 2 * T, deterministic=deterministic)
    assert (outcome.dispatch_indices[:, 2] == -1).all()
    assert outcome.expert_counts.sum() == 3 * T


@each_order
def test_a_repeated_choice_without_room_overflows_once(deterministic):
    outcome = check_dispatch(routing_of([[1, 1]] * 4, 2), 2, deterministic=deterministic)
    assert outcome.expert_counts.tolist() == [2, 2] and (outcome.dispatch_indices[:, 1] == -1).all()


def test_index_types_give_the_same_bits():
    """A 64-bit index buffer was read as one of 32 bits: ROCm/aiter#5255, vllm-project/vllm#55147."""
    narrow, wide = (random_routing(50, 4, 6, 3, lowest=-2, index_dtype=dtype) for dtype in (np.int32, np.int64))
    assert same_results(check_dispatch(narrow, 9), check_dispatch(wide, 9))


@each_order
@pytest.mark.parametrize("weight_dtype", [np.float32, np.float16])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_types(dtype, weight_dtype, deterministic):
    """Weights have a type of their own."""
    routing = random_routing(20, 6, 4, 2, lowest=-1, dtype=dtype, weight_dtype=weight_dtype)
    for run in (routing, with_bad_elements(routing)):
        check_dispatch(run, 5, deterministic=deterministic)


# Blocks that meet ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 31, 32, 33, 63, 64, 65, 159, 160, 161, 400])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("threads", [32, 64])
def test_blocks_that_meet(T, k, threads, monkeypatch):
    """What many choices take on a GPU: several blocks that count, meet, and give out rows."""
    small_blocks(monkeypatch, threads)
    routing = random_routing(T, 2, 6, k, lowest=-1, more=1, seed=T)
    for capacity in (max(1, T * k // 8), T * k, 0):
        check_dispatch(routing, capacity)
    shape = moe_launches.positions_shape(T, k, 6, SIMULATED_CAPABILITY, 5)
    assert shape.blocks == min(5, -(-T * k // threads))


@pytest.mark.parametrize("experts", [1, 5, 31, 32, 33, 64, 65, 300])
@pytest.mark.parametrize("shared_bytes", [None, 256])
def test_blocks_that_meet_over_any_number_of_experts(experts, shared_bytes, monkeypatch):
    """More experts than threads, and fewer; counts in shared memory, and in the workspace."""
    small_blocks(monkeypatch, 64, shared_bytes=shared_bytes)
    check_dispatch(random_routing(200, 2, experts, 2, lowest=-1), 9)
    shape = moe_launches.positions_shape(200, 2, experts, SIMULATED_CAPABILITY, 5)
    assert shape.blocks == 5 and shape.staged == (shared_bytes is None)


@pytest.mark.parametrize("room", [0, 1, 40, 41, 1000])
def test_overflow_over_blocks_that_meet(room, monkeypatch):
    small_blocks(monkeypatch)
    indices = np.full((400, 2), 1)
    indices[::3] = -1
    check_dispatch(routing_of(indices, 3, d=1), room)


@pytest.mark.parametrize("shared_bytes", [None, 256])
def test_calls_of_several_sizes_share_a_workspace(shared_bytes, monkeypatch):
    small_blocks(monkeypatch, shared_bytes=shared_bytes)
    for T, experts in ((300, 5), (20, 40), (300, 5), (90, 1)):
        for capacity in (3, T):
            check_dispatch(random_routing(T, 2, experts, 2), capacity)


# Bad elements --------------------------------------------------------------------------------------------------------


def with_bad_elements(routing, every=5):
    """NaN, infinity and -infinity in every so many elements of tokens and weights."""
    arrays = [array.copy() for array in routing[:2]]
    for array in arrays:
        for start, value in enumerate((np.nan, np.inf, -np.inf)):
            array.ravel()[start :: 3 * every] = value
    return Routing(*arrays, routing.top_k_indices)


@each_order
@pytest.mark.parametrize("d", [1, 4, 8, 33, 40, 256, 257, 516, 1032])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("every", [1, 5])
def test_bad_elements(d, dtype, every, deterministic):
    """In either half of a word, alone and beside one another."""
    routing = with_bad_elements(random_routing(9, d, 4, 2, dtype=dtype), every)
    check_dispatch(routing, 3, deterministic=deterministic)


@each_order
def test_bad_elements_are_counted_once_however_many_experts_take_them(deterministic):
    routing = distinct_routing(6, 8, 5, 4)
    routing.input[3, 5], routing.input[4, :3] = np.inf, np.nan
    outcome = check_dispatch(routing, deterministic=deterministic)
    assert (outcome.counts, outcome.first) == ({1: 3, 2: 1}, (29, 2))


@each_order
def test_bad_elements_that_nobody_reads(deterministic):
    """A token that is padding or dropped, and a weight that no choice takes."""
    routing = routing_of([[-1, -1], [1, 0], [1, 0]], 2)
    routing.input[0], routing.routing_weights[0] = np.nan, np.inf
    routing.input[2 if deterministic else 0], routing.routing_weights[2 if deterministic else 0] = np.nan, np.nan
    outcome = check_dispatch(routing, 1, deterministic=deterministic)
    assert outcome.counts == {5: 1}


def test_a_whole_token_of_nan():
    routing = routing_of([[0], [1], [0]], 2, d=40)
    routing.input[1] = np.nan
    outcome = check_dispatch(routing)
    assert (outcome.expert_inputs[1, 0] == 0).all() and outcome.expert_counts[1] == 1
    assert (outcome.counts, outcome.first) == ({1: 40}, (40, 1))


# Order ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("T", "k", "experts", "runs"), cases([(130, 3, 7, 3)], [(4097, 16, 128, 100)]))
def test_the_same_bits_on_every_run(T, k, experts, runs):
    """Rows given out by an atomic counter: 1 of 100 runs agreed. sgl-project/sglang#33511, ggml-org/llama.cpp#26464"""
    routing = random_routing(T, 2, experts, k)
    first = check_dispatch(routing, 10)
    for _ in range(runs):
        assert same_results(run_dispatch(routing, 10), first)


def test_a_position_is_the_rank_among_the_choices_of_an_expert():
    routing = distinct_routing(60, 1, 8, 3)
    outcome = check_dispatch(routing, 60)
    for expert in range(8):
        asked = [(choice, token) for token, choice in np.argwhere(routing.top_k_indices == expert)]
        for rank, (choice, token) in enumerate(sorted(asked)):
            assert outcome.dispatch_indices[token, choice].tolist() == [expert, rank]


def test_orders_agree_on_all_that_no_order_changes():
    routing = random_routing(90, 3, 8, 3, lowest=-1)
    one, other = (check_dispatch(routing, 12, deterministic=order) for order in (True, False))
    # How many overflow to expert 0 depends on which choices were refused.
    assert one.expert_counts[1:].tolist() == other.expert_counts[1:].tolist()
    # Where nothing is full, no token's fate depends on the order.
    one, other = (check_dispatch(routing, 90, deterministic=order) for order in (True, False))
    assert np.array_equal(one.dispatch_indices[..., 0], other.dispatch_indices[..., 0])
    assert one.combine_weights.tobytes() == other.combine_weights.tobytes()


# Properties ----------------------------------------------------------------------------------------------------------


@st.composite
def routings(draw):
    T, d, experts, k = (draw(st.integers(low, high)) for low, high in ((0, 12), (1, 9), (1, 6), (1, 5)))
    index = st.one_of(st.integers(-1, experts - 1), st.sampled_from([-2, experts, 2**31 - 1, -(2**31)]))
    indices = np.array(draw(st.lists(index, min_size=T * k, max_size=T * k)), np.int64).reshape(T, k)
    routing = routing_of(
        indices,
        experts,
        d,
        dtype=draw(st.sampled_from([np.float32, np.float16])),
        index_dtype=draw(st.sampled_from([np.int32, np.int64])),
        weight_dtype=draw(st.sampled_from([np.float32, np.float16])),
        seed=draw(st.integers(0, 99)),
    )
    return with_bad_elements(routing, 7) if draw(st.booleans()) else routing


@given(routings(), st.one_of(st.none(), st.integers(0, 13)), st.booleans(), st.booleans())
def test_conservation(routing, capacity, deterministic, allocates):
    """Every choice is placed once, or dropped and counted, or padding; no row is given out twice; counts are of rows;
    dispatch, then combine gives back every token that has a row.
    """
    run, unused = (call_dispatch, 0) if allocates else (run_dispatch, np.nan)
    outcome = run(routing, capacity, deterministic=deterministic)
    if deterministic:
        assert_dispatched(outcome, routing, capacity, unused=unused)
    assert_conserved(outcome, routing, capacity, unused=unused)


@given(routings(), st.integers(0, 13), st.randoms(use_true_random=False))
def test_names_of_the_experts_do_not_matter(routing, capacity, random):
    """Expert 0 apart, which takes what overflows."""
    experts = routing.routing_weights.shape[1]
    new = list(range(1, experts))
    random.shuffle(new)
    new = np.array([0, *new])
    indices, weights = routing.top_k_indices.copy(), np.empty_like(routing.routing_weights)
    in_range = (indices >= 0) & (indices < experts)
    indices[in_range] = new[indices[in_range]]
    weights[:, new] = routing.routing_weights
    one, other = run_dispatch(routing, capacity), run_dispatch(Routing(routing.input, weights, indices), capacity)
    assert one.expert_counts.tolist() == other.expert_counts[new].tolist()
    assert np.array_equal(one.dispatch_indices[..., 1], other.dispatch_indices[..., 1])
    assert np.array_equal(one.combine_weights, other.combine_weights)


# A deliberately wrong operation must fail at the same limits ---------------------------------------------------------


def wrong_rows(outcome, change):
    rows = outcome.expert_inputs.copy()
    change(rows)
    return outcome._replace(expert_inputs=rows)


def token_major(routing, outcome):
    """Positions in the order of tokens, all choices of one before the next token."""
    places = outcome.dispatch_indices.copy()
    rows = outcome.expert_inputs.copy()
    for expert in range(len(outcome.expert_counts)):
        chosen = np.argwhere(places[..., 0] == expert)
        for position, (token, choice) in enumerate(chosen):
            places[token, choice, 1] = position
            rows[expert, position] = routing.input[token]
    return outcome._replace(dispatch_indices=places, expert_inputs=rows)


def shifted(rows):
    rows[1] = np.roll(rows[1], 1, axis=0)


def one_ulp(rows):
    rows[1, 0, 0] = np.nextafter(rows[1, 0, 0], np.float32(np.inf))


def one_row_more(rows):
    rows[4, -1] = rows[3, 0]


WRONG = {
    "tokens before choices": token_major,
    "a row off by one": lambda r, o: wrong_rows(o, shifted),
    "an element off by one unit": lambda r, o: wrong_rows(o, one_ulp),
    "a row written that nobody was given": lambda r, o: wrong_rows(o, one_row_more),
    "unused rows zeroed": lambda r, o: o._replace(expert_inputs=np.nan_to_num(o.expert_inputs)),
    "counts of what was asked": lambda r, o: o._replace(
        expert_counts=np.bincount(r.top_k_indices.ravel(), minlength=5).astype(o.expert_counts.dtype)
    ),
    "the weight of another choice": lambda r, o: o._replace(combine_weights=o.combine_weights[:, ::-1].copy()),
    "weights of choices that were not placed": lambda r, o: o._replace(
        combine_weights=np.take_along_axis(r.routing_weights, r.top_k_indices, 1)
    ),
    "a drop that was not counted": lambda r, o: o._replace(num_dropped=o.num_dropped - 1),
    "an overflow that was not counted": lambda r, o: o._replace(num_overflowed=o.num_overflowed - 1),
    "an event too many": lambda r, o: o._replace(counts={**o.counts, 1: 1}),
    "dropped tokens without an event": lambda r, o: o._replace(counts={}, first=None),
    "the last index of an event": lambda r, o: o._replace(first=(o.first[0] + 1, 5)),
}

FAULTY_CHOICES = [[1, 2], [2, 1], [1, 0], [1, 2], [2, 1], [2, 1], [1, 3], [3, 1]]


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_results_are_noticed(fault):
    routing = routing_of(FAULTY_CHOICES, 5)
    outcome = check_dispatch(routing, 2)
    assert (outcome.num_dropped[0], outcome.num_overflowed[0]) == (1, 1)
    with pytest.raises(AssertionError):
        assert_dispatched(WRONG[fault](routing, outcome), routing, 2)


OF_THE_ORDER = {"tokens before choices", "the last index of an event"}


@pytest.mark.parametrize("fault", sorted(WRONG.keys() - OF_THE_ORDER))
def test_wrong_results_in_any_order_are_noticed(fault):
    routing = routing_of(FAULTY_CHOICES, 5)
    outcome = run_dispatch(routing, 2)
    assert_conserved(outcome, routing, 2)
    assert_conserved(token_major(routing, outcome), routing, 2)
    with pytest.raises(AssertionError):
        assert_conserved(WRONG[fault](routing, outcome), routing, 2)


# Large ---------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu_only("8 GiB of memory")
@pytest.mark.large
def test_more_elements_than_32_bits_count():
    """token * stride in 32 bits: vllm-project/vllm#45884, sgl-project/sglang#4727, linkedin/Liger-Kernel#1248"""
    torch = pytest.importorskip("torch")
    T, d, experts = 150_000, 7168, 4
    number = torch.arange(T, device="cuda")
    tokens = number.float()[:, None].expand(T, d)
    indices = torch.stack([number % experts, (number + 1) % experts], dim=1)
    weights = torch.full((T, experts), 0.5, device="cuda")
    errors = burt_numba.ErrorBuffer()
    result = burt_numba.sparse_moe_dispatch(tokens, weights, indices, 75_000, errors=errors)
    assert errors.check() == 0 and result.expert_counts.tolist() == [75_000] * experts
    for expert in range(experts):
        first = number[number % experts == expert]
        second = number[(number + 1) % experts == expert]
        wanted = torch.cat([first, second])
        for rows in (slice(0, 5), slice(-5, None)):
            assert torch.equal(result.expert_inputs[expert, rows], wanted[rows].float()[:, None].expand(5, d))
    out = burt_numba.sparse_moe_combine(result.expert_inputs, result, errors=errors)
    assert errors.check() == 0 and torch.equal(out[-5:], tokens[-5:])


@pytest.mark.gpu_only("70,000 blocks are too many for the simulator")
@pytest.mark.parametrize(("T", "experts"), [(70_000, 4), (10, 70_000)])
@each_order
def test_more_than_grids_hold_along_y(T, experts, deterministic):
    """More than 65,535 columns on grid.y: ggml-org/llama.cpp#13384"""
    routing = distinct_routing(T, 8, experts, 2)
    outcome = run_dispatch(routing, deterministic=deterministic)
    assert (outcome.dispatch_indices >= 0).all()
    assert_rows(outcome, routing, np.nan)
