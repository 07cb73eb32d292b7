"""The documented kernel of sparse_moe_dispatch, for launching by hand, which `deterministic=False` launches as well.

The rows of an expert are given out by an atomic counter. The last block to finish has the tokens that found no room.
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.coherence import last_arrival
from burt_numba.device.events import CAPACITY_FULL, DIM_MISMATCH, record_event
from burt_numba.device.experts import OUT_OF_RANGE, choice_rules, finite_weight
from burt_numba.device.rows import not_finite, report_not_finite
from burt_numba.device.warp import FULL_MASK, any_lane, warp_min
from burt_numba.target import DOCUMENTED_MOE_THREADS

_NONE = np.int32(-1)
_ZERO = np.float32(0.0)
_NO_TOKEN = np.int64(1 << 59)
_ARRIVED, _WAITING = 0, 1


@cuda.jit(device=True)
def _element(indices, place):
    return indices[place]


_chosen_expert, _first_choice = choice_rules(_element)


@cuda.jit(device=True)
def _copy_token(source, token, expert_inputs, rows, choices, d_model, errors):
    """Copy a token to the rows (expert, position) of its choices, as far as they have one."""
    is_placed = False
    for choice in range(choices):
        if rows[2 * choice] >= 0:
            is_placed = True
    if is_placed:
        bad = False
        for column in range(cuda.threadIdx.x, d_model, cuda.blockDim.x):
            value = np.float32(source[column])
            if not_finite(value):
                bad = True
                value = _ZERO
            for choice in range(choices):
                if rows[2 * choice] >= 0:
                    expert_inputs[rows[2 * choice], rows[2 * choice + 1], column] = value
        if any_lane(bad, FULL_MASK):
            first = np.int64(cuda.threadIdx.x)
            step = np.int64(cuda.blockDim.x)
            report_not_finite(
                source, 0, 1, first, 1, np.int64(d_model), step, np.int64(token) * d_model, errors, 32, FULL_MASK
            )


@cuda.jit(launch_bounds=DOCUMENTED_MOE_THREADS)
def sparse_moe_dispatch_kernel(
    input,
    expert_inputs,
    dispatch_indices,
    expert_counts,
    routing_weights,
    top_k_indices,
    batch_size,
    d_model,
    num_experts,
    top_k,
    expert_capacity,
    combine_weights,
    num_dropped,
    num_overflowed,
    waiting,
    counters,
    errors,
):
    """The documented layout: block b takes the tokens b, b + gridDim.x, ..., thread t the elements t, t + blockDim.x.

    Grid (batch_size), block min(d_model, 256) rounded up to whole warps, shared top_k * 8 bytes.
    input [T, d], expert_inputs [E, capacity, d], dispatch_indices int32 [T, k, 2], routing_weights [T, E],
    top_k_indices [T, k], combine_weights [T, k], num_dropped and num_overflowed int32 [1], waiting int32 [T]; zero
    before: expert_counts int32 [E]; zero before and after: counters int64 [2]; errors int64 [8].
    """
    rows = cuda.shared.array(0, np.int32)
    last_flag = cuda.shared.array(1, np.int32)
    thread = np.int32(cuda.threadIdx.x)
    threads = np.int32(cuda.blockDim.x)
    for token in range(cuda.blockIdx.x, batch_size, cuda.gridDim.x):
        found = np.int32(0)
        placed = np.int32(0)
        for choice in range(thread, top_k, threads):
            index = np.int64(top_k_indices[token, choice])
            expert = _chosen_expert(index, top_k_indices[token], 0, 1, choice, num_experts)
            position = _NONE
            if expert == OUT_OF_RANGE:
                record_event(errors, DIM_MISMATCH, 1, np.int64(token) * top_k + choice)
            if expert >= 0:
                found = np.int32(1)
                position = np.int32(cuda.atomic.add(expert_counts, expert, np.int32(1)))
            weight = _ZERO
            if expert >= 0 and position < expert_capacity:
                placed = np.int32(1)
                flat = np.int64(token) * num_experts + expert
                weight = finite_weight(routing_weights[token], expert, flat, errors)
            else:
                expert = _NONE
                position = _NONE
            rows[2 * choice] = expert
            rows[2 * choice + 1] = position
            dispatch_indices[token, choice, 0] = expert
            dispatch_indices[token, choice, 1] = position
            combine_weights[token, choice] = weight
        found = cuda.syncthreads_or(found)
        placed = cuda.syncthreads_or(placed)
        if found != 0 and placed == 0 and thread == 0:
            waiting[cuda.atomic.add(counters, _WAITING, np.int64(1))] = token
        _copy_token(input[token], token, expert_inputs, rows, top_k, d_model, errors)
        cuda.syncthreads()  # the rows have been read
    if last_arrival(counters, _ARRIVED, cuda.gridDim.x, last_flag):
        for expert in range(thread, num_experts, threads):
            expert_counts[expert] = np.int32(min(np.int64(expert_counts[expert]), np.int64(expert_capacity)))
        cuda.syncthreads()  # no count is above the capacity
        used = expert_counts[0]
        found_tokens = np.int32(counters[_WAITING])
        overflowed = np.int32(min(np.int64(found_tokens), np.int64(expert_capacity) - used))
        cuda.syncthreads()  # the counts have been read
        for number in range(overflowed):
            token = waiting[number]
            if thread == 0:
                choice = _first_choice(top_k_indices[token], 0, 1, top_k, num_experts)
                expert = np.int32(top_k_indices[token, choice])
                rows[0] = 0
                rows[1] = used + number
                dispatch_indices[token, choice, 0] = 0
                dispatch_indices[token, choice, 1] = used + number
                flat = np.int64(token) * num_experts + expert
                combine_weights[token, choice] = finite_weight(routing_weights[token], expert, flat, errors)
            cuda.syncthreads()  # the row is known
            _copy_token(input[token], token, expert_inputs, rows, 1, d_model, errors)
            cuda.syncthreads()  # the row has been read
        if thread < 32:
            first = _NO_TOKEN
            for number in range(overflowed + thread, found_tokens, 32):
                first = min(first, np.int64(waiting[number]))
            first = warp_min(first, 32, FULL_MASK)
        if thread == 0:
            if found_tokens > overflowed:
                record_event(errors, CAPACITY_FULL, found_tokens - overflowed, first)
            expert_counts[0] = used + overflowed
            num_overflowed[0] = overflowed
            num_dropped[0] = found_tokens - overflowed
            counters[_WAITING] = 0
