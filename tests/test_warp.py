"""Warp operations of the device layer, in a whole warp and in groups of its lanes."""

import numpy as np
import pytest
from support import to_host, to_target

from burt_numba.backend import cuda
from burt_numba.device.warp import any_lane, group_mask, shuffle, shuffle_xor, sync_warp, warp_max, warp_min, warp_sum


@cuda.jit
def warp_kernel(values, lanes, sums, highest, lowest, first, swapped, found):
    lane = cuda.threadIdx.x
    mask = group_mask(lanes)
    value = values[lane]
    sums[lane] = warp_sum(value, lanes, mask)
    highest[lane] = warp_max(value, lanes, mask)
    lowest[lane] = warp_min(value, lanes, mask)
    first[lane] = shuffle(value, lane & (32 - lanes), mask)
    swapped[lane] = shuffle_xor(value, lanes >> 1, mask)
    found[lane] = 1 if any_lane(value > np.float32(30.0), mask) else 0
    sync_warp()


@pytest.mark.parametrize("lanes", [2, 4, 8, 16, 32])
def test_warp_operations(lanes):
    values = np.random.default_rng(lanes).permutation(32).astype(np.float32)
    outputs = [to_target(np.full(32, np.nan, np.float32)) for _ in range(5)]
    found = to_target(np.full(32, -1, np.int32))
    warp_kernel[1, 32](to_target(values), lanes, *outputs, found)
    sums, highest, lowest, first, swapped = map(to_host, outputs)
    groups = values.reshape(-1, lanes)
    # Whole numbers: their sums are exact in any order.
    assert np.array_equal(sums, np.repeat(groups.sum(1), lanes))
    assert np.array_equal(highest, np.repeat(groups.max(1), lanes))
    assert np.array_equal(lowest, np.repeat(groups.min(1), lanes))
    assert np.array_equal(first, np.repeat(groups[:, 0], lanes))
    assert np.array_equal(swapped, values[np.arange(32) ^ (lanes >> 1)])
    assert np.array_equal(to_host(found), np.repeat(groups.max(1) > 30, lanes))
