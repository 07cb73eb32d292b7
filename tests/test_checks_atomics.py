"""Races that a checked launch finds around atomics, fences, locks and flags.

What a thread did before a fence, and its atomics after it, come before whatever follows a later atomic on the same
element.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

if os.environ.get("BURT_NUMBA_TEST_TARGET") == "gpu":
    pytest.skip("tests the simulator, which a GPU run does not use", allow_module_level=True)

from checked_pairs import Pairs, ramp, run
from support import poisoned

from burt_numba import simulator
from burt_numba.backend import cuda
from burt_numba.simulator import RaceError, UninitializedReadError

pairs = Pairs()
race = partial(pairs.wrong, RaceError)


# One element --------------------------------------------------------------------------------------------------------


@race("total[0]", (("a", 0), ("a", 1)), arguments=lambda: (ramp(32), np.zeros(1)), expected=[528])
def sum_by_plain_updates(values, total):
    total[0] += values[cuda.threadIdx.x]  # [a]


@pairs.right
def sum_by_atomics(values, total):
    cuda.atomic.add(total, 0, values[cuda.threadIdx.x])


def _counts():
    return (poisoned(32, np.int32),)


@race("counter[0]", (("a", 0), ("b", 1)), arguments=_counts, expected=[32] * 32)
def counter_set_without_a_barrier(out):
    counter = cuda.shared.array(1, np.int32)
    i = cuda.threadIdx.x
    if i == 0:
        counter[0] = 0  # [a]
    cuda.atomic.add(counter, 0, 1)  # [b]
    cuda.syncthreads()
    out[i] = counter[0]


@pairs.right
def counter_between_barriers(out):
    counter = cuda.shared.array(1, np.int32)
    i = cuda.threadIdx.x
    if i == 0:
        counter[0] = 0
    cuda.syncthreads()
    cuda.atomic.add(counter, 0, 1)
    cuda.syncthreads()
    out[i] = counter[0]


@race("counter[0]", (("b", 0), ("a", 1)), arguments=_counts, expected=[32] * 32, right=counter_between_barriers)
def counter_read_without_a_barrier(out):
    counter = cuda.shared.array(1, np.int32)
    i = cuda.threadIdx.x
    if i == 0:
        counter[0] = 0
    cuda.syncthreads()
    cuda.atomic.add(counter, 0, 1)  # [a]
    out[i] = counter[0]  # [b]


@race(
    "counter[0]",
    (("a", 0), ("b", 1)),
    block=2,
    arguments=lambda: (np.zeros(1, np.int32), poisoned(1, np.int32)),
    expected=[2],
)
def counter_read_by_the_last_thread(counter, out):
    cuda.atomic.add(counter, 0, 1)  # [a]
    # The last by its index, which is the last to count in the usual order alone.
    if cuda.threadIdx.x == cuda.blockDim.x - 1:
        out[0] = counter[0]  # [b]


@pairs.right
def counter_read_by_the_last_to_count(counter, out):
    cuda.threadfence()
    if cuda.atomic.add(counter, 0, 1) == cuda.blockDim.x - 1:
        out[0] = counter[0]


@race(
    "counter[0]",
    (("a", 1), ("b", 0)),
    block=2,
    arguments=lambda: (np.zeros(1, np.int32), poisoned(1, np.int32)),
    expected=[2],
    right=counter_read_by_the_last_to_count,
)
def counter_read_by_the_first_to_count(counter, out):
    cuda.threadfence()
    if cuda.atomic.add(counter, 0, 1) == 0:  # [a]
        # The other thread counts meanwhile, after this one, and nothing orders that before the read.
        cuda.nanosleep(100)
        out[0] = counter[0]  # [b]


@race(
    "finished[0]", (("a", 0, 0), ("b", 1, 3)), grid=4, block=2, arguments=lambda: (np.zeros(1, np.int32),), expected=[0]
)
def counter_reset_after_a_fence_of_the_block(finished):
    before = cuda.shared.array(1, np.int32)
    if cuda.threadIdx.x == 0:
        cuda.threadfence_block()
        before[0] = cuda.atomic.add(finished, 0, 1)  # [a]
    cuda.syncthreads()
    if cuda.threadIdx.x == 1 and before[0] == cuda.gridDim.x - 1:
        finished[0] = 0  # [b]


# By another thread than the one that counted, and fenced by another than that: barriers order them.
@pairs.right
def counter_reset_by_the_last_block(finished):
    before = cuda.shared.array(1, np.int32)
    if cuda.threadIdx.x == 1:
        cuda.threadfence()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        before[0] = cuda.atomic.add(finished, 0, 1)
    cuda.syncthreads()
    if cuda.threadIdx.x == 1 and before[0] == cuda.gridDim.x - 1:
        finished[0] = 0


# What an atomic passes on -------------------------------------------------------------------------------------------


@race(
    "partials[0]",
    (("a", 0, 0), ("b", 0, 3)),
    grid=4,
    block=4,
    arguments=lambda: (ramp(4), poisoned(4), np.zeros(1, np.int32), poisoned(4)),
    expected=ramp(4) + 1,
)
def last_block_with_a_fence_of_the_block(values, partials, finished, out):
    is_last = cuda.shared.array(1, np.int32)
    i, b = cuda.threadIdx.x, cuda.blockIdx.x
    if i == 0:
        partials[b] = values[b] + np.float32(1.0)  # [a]
        # Orders nothing for other blocks.
        cuda.threadfence_block()
        is_last[0] = cuda.atomic.add(finished, 0, 1) == cuda.gridDim.x - 1
    cuda.syncthreads()
    if is_last[0]:
        out[i] = partials[i]  # [b]


@pairs.right
def last_block_with_a_fence_for_all_its_threads(values, partials, finished, out):
    is_last = cuda.shared.array(1, np.int32)
    i, b = cuda.threadIdx.x, cuda.blockIdx.x
    # Written by the last thread, published by the first one, whose fence counts for what a barrier let it see.
    if i == cuda.blockDim.x - 1:
        partials[b] = values[b] + np.float32(1.0)
    cuda.syncthreads()
    if i == 0:
        cuda.threadfence()
        is_last[0] = cuda.atomic.add(finished, 0, 1) == cuda.gridDim.x - 1
    cuda.syncthreads()
    if is_last[0]:
        out[i] = partials[i]


@race(
    "total[0]",
    (("a", 0, 0), ("a", 0, 1)),
    grid=4,
    block=1,
    arguments=lambda: (ramp(4), np.zeros(1, np.int32), np.zeros(1, np.float32)),
    expected=[10],
)
def lock_released_without_a_fence(values, lock, total):
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        cuda.nanosleep(100)
    total[0] += values[cuda.blockIdx.x]  # [a]
    cuda.atomic.exch(lock, 0, 0)


@pairs.right
def lock_released_after_a_fence(values, lock, total):
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        cuda.nanosleep(100)
    cuda.threadfence()
    total[0] += values[cuda.blockIdx.x]
    cuda.threadfence()
    cuda.atomic.exch(lock, 0, 0)


FLAG = {
    "block": 96,
    "arguments": lambda: (np.zeros(1, np.float32), np.zeros(2, np.int32), poisoned(1)),
    "expected": [42],
}


@race("flag[0]", (("a", 0), ("b", 32)), **FLAG)
def flag_polled_by_plain_reads(data, flag, out):
    i = cuda.threadIdx.x
    if i == 0:
        while flag[0] == 0:  # [a]
            cuda.nanosleep(100)
        out[0] = data[0]
    elif i == 32:
        data[0] = np.float32(42.0)
        cuda.threadfence()
        cuda.atomic.exch(flag, 0, 1)  # [b]


@pairs.right
def flag_polled_by_atomics(data, flag, out):
    i = cuda.threadIdx.x
    if i == 0:
        while cuda.atomic.add(flag, 0, 0) == 0:
            cuda.nanosleep(100)
        cuda.threadfence()
        out[0] = data[0]
    elif i == 32:
        data[0] = np.float32(42.0)
        cuda.threadfence()
        cuda.atomic.exch(flag, 0, 1)


@race("data[0]", (("a", 32), ("b", 0)), **FLAG)
def flag_before_the_fence(data, flag, out):
    i = cuda.threadIdx.x
    if i == 0:
        while cuda.atomic.add(flag, 0, 0) == 0:
            cuda.nanosleep(100)
        cuda.threadfence_block()
        out[0] = data[0]  # [b]
    elif i == 32:
        data[0] = np.float32(42.0)  # [a]
        cuda.atomic.exch(flag, 0, 1)
        cuda.threadfence_block()


@pairs.right
def flag_after_a_fence_of_the_block(data, flag, out):
    i = cuda.threadIdx.x
    if i == 0:
        while cuda.atomic.add(flag, 0, 0) == 0:
            cuda.nanosleep(100)
        cuda.threadfence_block()
        out[0] = data[0]
    elif i == 32:
        data[0] = np.float32(42.0)
        cuda.threadfence_block()
        cuda.atomic.exch(flag, 0, 1)


@race("data[0]", (("a", 32), ("b", 0)), **FLAG)
def another_flag(data, flags, out):
    i = cuda.threadIdx.x
    if i == 0:
        while cuda.atomic.add(flags, 1, 0) == 0:
            cuda.nanosleep(100)
        cuda.threadfence()
        out[0] = data[0]  # [b]
    elif i == 32:
        data[0] = np.float32(42.0)  # [a]
        cuda.threadfence()
        cuda.atomic.exch(flags, 0, 1)
    elif i == 64:
        # Passes nothing on: it never looks at the first flag.
        cuda.threadfence()
        cuda.atomic.exch(flags, 1, 1)


@pairs.right
def flag_passed_on(data, flags, out):
    i = cuda.threadIdx.x
    if i == 0:
        while cuda.atomic.add(flags, 1, 0) == 0:
            cuda.nanosleep(100)
        cuda.threadfence()
        out[0] = data[0]
    elif i == 32:
        data[0] = np.float32(42.0)
        cuda.threadfence()
        cuda.atomic.exch(flags, 0, 1)
    elif i == 64:
        while cuda.atomic.add(flags, 0, 0) == 0:
            cuda.nanosleep(100)
        cuda.threadfence()
        cuda.atomic.exch(flags, 1, 1)


# Lane 1 writes, lane 0 publishes; lane 32 waits, lane 33 reads.
@race("data[0]", (("a", 1), ("b", 33)), **FLAG)
def flag_set_for_a_lane_without_syncwarp(data, flag, out):
    i = cuda.threadIdx.x
    if i == 1:
        data[0] = np.float32(42.0)  # [a]
    elif i == 0:
        cuda.threadfence()
        cuda.atomic.exch(flag, 0, 1)
    elif i == 32:
        while cuda.atomic.add(flag, 0, 0) == 0:
            cuda.nanosleep(100)
        cuda.threadfence()
    if i in (32, 33):
        cuda.syncwarp(0x00000003)
    if i == 33:
        out[0] = data[0]  # [b]


@pairs.right
def flag_set_for_a_lane_after_syncwarp(data, flag, out):
    i = cuda.threadIdx.x
    if i == 1:
        data[0] = np.float32(42.0)
    if i in (0, 1):
        cuda.syncwarp(0x00000003)
    if i == 0:
        cuda.threadfence()
        cuda.atomic.exch(flag, 0, 1)
    elif i == 32:
        while cuda.atomic.add(flag, 0, 0) == 0:
            cuda.nanosleep(100)
        cuda.threadfence()
    if i in (32, 33):
        cuda.syncwarp(0x00000003)
    if i == 33:
        out[0] = data[0]


# Every pair ---------------------------------------------------------------------------------------------------------


test_wrong_kernel, test_right_kernel = pairs.tests()


@pairs.each()
def test_races_switched_off(pair):
    with simulator.checks(races=False), suppress(UninitializedReadError):
        run(pair, pair.wrong)
