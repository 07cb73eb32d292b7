"""The documented kernel of sparse_moe_dispatch, launched by hand."""

import numpy as np
import pytest
from moe_support import (
    Dispatched,
    Routing,
    assert_conserved,
    assert_dispatched,
    capacity_of,
    output_contents,
    random_routing,
    routing_of,
)
from support import NO_EVENT, Guarded, to_host, to_target

from burt_numba import kernels


def whole_warps(threads):
    return -(-threads // 32) * 32


def dispatch_by_hand(routing, capacity=None, *, grid=None, block=None, shared_bytes=None, calls=1):
    """Launch sparse_moe_dispatch_kernel between guard cells: of NaN and of indices around what is read."""
    (T, d), (_, experts), (_, k) = (array.shape for array in routing)
    inputs = [Guarded(array, np.nan if array.dtype.kind == "f" else 10_000).array for array in routing]
    contents = output_contents(routing, capacity)
    contents["expert_counts"] = np.zeros_like(contents["expert_counts"])
    outputs = {name: Guarded(content, 777) for name, content in contents.items()}
    waiting, counters = Guarded(np.full(T, -777_777, np.int32), 777), Guarded(np.zeros(2, np.int64), 777)
    for _ in range(calls):
        outputs["expert_counts"].array[:] = 0
        errors = to_target(np.array([NO_EVENT] + [0] * 7))
        kernels.sparse_moe_dispatch_kernel[
            T if grid is None else grid,
            whole_warps(min(d, 256)) if block is None else block,
            0,
            8 * k if shared_bytes is None else shared_bytes,
        ](
            inputs[0],
            *(outputs[name].array for name in ("expert_inputs", "dispatch_indices", "expert_counts")),
            *inputs[1:],
            *(T, d, experts, k, capacity_of(routing, capacity)),
            *(outputs[name].array for name in ("combine_weights", "num_dropped", "num_overflowed")),
            *(waiting.array, counters.array, errors),
        )
        assert counters.result().tolist() == [0, 0], "the counters are not ready for the next launch"
    waiting.check()
    words = to_host(errors)
    first = None if words[0] == NO_EVENT else divmod(int(words[0]), 8)
    counts = {code: int(words[code]) for code in range(1, 8) if words[code]}
    return Dispatched(*(output.result() for output in outputs.values()), counts, first)


def check_by_hand(routing, capacity=None, **options):
    outcome = dispatch_by_hand(routing, capacity, **options)
    assert_conserved(outcome, routing, capacity)
    return outcome


@pytest.mark.parametrize("d", [1, 5, 33, 100, 257])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_documented_launch(d, k):
    """Grid (T), block min(d, 256) in whole warps, k · 8 bytes of shared memory."""
    check_by_hand(random_routing(9, d, 4, k, lowest=-1, more=1, seed=d), 4)


@pytest.mark.parametrize("block", [32, 64, 96, 256, 512])
@pytest.mark.parametrize("grid", [9, 1, 4, 20])
def test_another_grid_and_block(grid, block):
    check_by_hand(random_routing(9, 70, 4, 3, lowest=-1), 4, grid=grid, block=block)


@pytest.mark.parametrize("shared_bytes", [24, 32, 1024])
def test_more_shared_memory_than_it_takes(shared_bytes):
    check_by_hand(random_routing(9, 40, 4, 3), 4, shared_bytes=shared_bytes)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("weight_dtype", [np.float32, np.float16])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_types(dtype, weight_dtype, index_dtype):
    options = {"dtype": dtype, "weight_dtype": weight_dtype, "index_dtype": index_dtype}
    check_by_hand(random_routing(9, 12, 4, 2, lowest=-2, more=1, **options), 3)


@pytest.mark.parametrize("capacity", [0, 1, 3, 20])
@pytest.mark.parametrize("grid", [10, 3])
def test_capacity_and_overflow(capacity, grid):
    outcome = check_by_hand(routing_of([[1, 1]] * 10, 2, d=40), capacity, grid=grid)
    dropped, overflowed = max(0, 10 - 2 * capacity), min(capacity, max(0, 10 - capacity))
    assert (outcome.num_dropped[0], outcome.num_overflowed[0]) == (dropped, overflowed)
    assert outcome.counts == ({5: dropped} if dropped else {})


@pytest.mark.parametrize("grid", [12, 5])
def test_overflow_waits_for_all_ordinary_placements(grid):
    outcome = check_by_hand(routing_of([[1]] * 8 + [[0]] * 4, 2, d=33), 5, grid=grid)
    assert outcome.expert_counts.tolist() == [5, 5]
    assert (outcome.dispatch_indices[8:, 0, 0] == 0).all()
    assert (outcome.num_dropped[0], outcome.num_overflowed[0]) == (2, 1)


def test_one_block_gives_out_rows_in_token_order():
    """With one choice, and one block to place it, no order is left open."""
    routing = random_routing(12, 6, 4, 1)
    assert_dispatched(dispatch_by_hand(routing, 3, grid=1), routing, 3)


@pytest.mark.parametrize("grid", [9, 2])
def test_events(grid):
    routing = random_routing(9, 40, 4, 3, lowest=-2, more=2)
    tokens, weights = routing.input.copy(), routing.routing_weights.copy()
    tokens[3, [0, 39]], tokens[8, 7], weights[2, 1], weights[5] = np.nan, np.inf, -np.inf, np.nan
    outcome = check_by_hand(Routing(tokens, weights, routing.top_k_indices), 9, grid=grid)
    assert {1, 2, 6} <= set(outcome.counts)
    one_event = routing_of([[0, 1], [1, 4], [-1, -1]], 4, d=33)
    assert dispatch_by_hand(one_event, grid=grid).first == (3, 6)


def test_launches_follow_one_another_over_the_same_buffers():
    check_by_hand(random_routing(9, 33, 3, 2, lowest=-1), 3, calls=3)


def test_a_wrong_variant_fails():
    routing = random_routing(9, 33, 3, 2)
    outcome = check_by_hand(routing, 3)
    for wrong in (
        outcome._replace(expert_counts=outcome.expert_counts + 1),
        outcome._replace(expert_inputs=outcome.expert_inputs * np.float32(1 + 1e-6)),
        outcome._replace(combine_weights=np.roll(outcome.combine_weights, 1, axis=0)),
        outcome._replace(num_dropped=outcome.num_dropped + 1),
    ):
        with pytest.raises(AssertionError):
            assert_conserved(wrong, routing, 3)
