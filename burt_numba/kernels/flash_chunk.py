"""The kernel of flash decoding that reads the cache: it leaves partials of chunks of keys, or of one chunk the result.

A block has some query heads of a key head, which share what is read, and a chunk or several. A team of warps shares a
chunk, tile by tile; a warp has a tile of 32 keys and one of as many values in shared memory, and while it works on the
one the other is on its way (where there is no room for both, one after the other):

    keys      lanes 0 .. 7 share keys 0 .. 7, lanes 8 .. 15 keys 8 .. 15, ...; lane t ends with score t of each head
    values    as many lanes as have a piece of 16 bytes share one; the others have other values

Each warp keeps a state (device.attention_states) of each head; those of a team are merged in the order of its warps.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.arguments import array_at
from burt_numba.device.async_copies import close_group, shared_address, wait_for_copies, wait_for_older_groups
from burt_numba.device.attention import HALF_MAX, context_count, finite_result, load_query, mended_score, write_log_sum
from burt_numba.device.attention_states import (
    DEAD_MAX,
    EMPTY_MAX,
    merged_column,
    rescaling,
)
from burt_numba.device.launch_order import let_next_begin
from burt_numba.device.numeric import FLOAT32_MAX, LOG2_E, NEGATIVE_INFINITY, exp2, maximum, opaque, whole_quotient
from burt_numba.device.rows import not_finite, report_not_finite
from burt_numba.device.staged_rows import staged_tile
from burt_numba.device.vector import (
    add_weighted,
    element_at,
    load_vector,
    rotate_elements,
    set_element,
    unpack_vectors,
)
from burt_numba.device.warp import FULL_MASK, any_lane, fold_sums, shuffle_xor, sync_warp, warp_max, warp_sum
from burt_numba.flash_launches import CHUNK_WARPS, LANES_A_KEY, TILE_KEYS

_ZERO = np.float32(0.0)
_load_four = load_vector(4)


@cache
def chunk_kernel(vector: int, half: int, heads: int, pieces: int):
    """The kernel for accesses of ``vector`` elements (1: any strides), of float16 or float32, ``heads`` a block.

    ``pieces``: of 16 bytes that a lane has of a value.
    """
    width = 8 if half else 4
    # More sums at a time, and more keys, would take more registers than there are.
    heads_together = min(heads, 16 // width)
    keys_together = LANES_A_KEY if heads_together * width <= 8 else LANES_A_KEY // 2
    key_cells = 4 * keys_together
    score_cells = LANES_A_KEY * heads_together
    parts = width // 4
    """Of a piece: 4 elements each, which are numbers at a time."""
    piece_cells = pieces * width
    result_cells = heads * piece_cells
    values_together = 4 if heads * piece_cells <= 16 else 2
    value_cells = 4 * values_together * pieces
    share_cells = values_together * heads
    word_type = np.uint32 if half else np.float32
    stage_tile = staged_tile(half, vector, pieces)
    merge_column = merged_column(CHUNK_WARPS)
    rotate_scores = rotate_elements(heads, 1)
    rotate_some = rotate_elements(heads, heads_together)
    unpack_query, unpack_keys = unpack_vectors(4, 1), unpack_vectors(4, keys_together)
    unpack_values, unpack_shares = unpack_vectors(4, values_together * pieces), unpack_vectors(values_together, heads)
    rotate_keys = rotate_elements(4, 4 // parts, keys_together)
    rotate_values = rotate_elements(4, 4 // parts, values_together * pieces)
    load_shares = load_vector(values_together)
    add_first_part = add_weighted(values_together, heads, pieces, width, 0)
    add_last_part = add_weighted(values_together, heads, pieces, width, parts - 1)

    if half:

        @cuda.jit(device=True)
        def make_finite(tiles, cell):
            word = element_at(tiles, cell)
            if word & np.uint32(0x7C00) == np.uint32(0x7C00):
                word = np.uint32(word & np.uint32(0xFFFF0000))
            if word & np.uint32(0x7C000000) == np.uint32(0x7C000000):
                word = np.uint32(word & np.uint32(0x0000FFFF))
            set_element(tiles, cell, word)

    else:

        @cuda.jit(device=True)
        def make_finite(tiles, cell):
            if not_finite(element_at(tiles, cell)):
                set_element(tiles, cell, _ZERO)

    @cuda.jit(device=True)
    def add_products(source, tiles, cell, pitch, floats, query_cell, query_pitch, buffers):
        """Products of some queries with 8 keys, of which 8 lanes have a part each."""
        words, values, sums, query_words, query_values = buffers
        lane = np.int32(cuda.laneid & (LANES_A_KEY - 1))
        for place in range(score_cells):
            sums[place] = _ZERO
        piece = lane
        key_cell = np.int32(cell + (cuda.laneid - lane) * pitch + lane * 4)
        while piece * 4 < pitch:
            for first in range(0, LANES_A_KEY, keys_together):
                for key in range(keys_together):
                    _load_four(tiles, np.int64(key_cell + (first + key) * pitch), words, key * 4)
                for part in range(parts):
                    unpack_keys(source, words, values)
                    rotate_keys(words)
                    for head in range(heads_together):
                        place = np.int64(query_cell + head * query_pitch + piece * width + part * 4)
                        _load_four(floats, place, query_words, 0)
                        unpack_query(floats, query_words, query_values)
                        for key in range(keys_together):
                            for element in range(4):
                                product = query_values[element] * values[key * 4 + element]
                                sums[head * LANES_A_KEY + first + key] += product
            key_cell = np.int32(key_cell + LANES_A_KEY * 4)
            # Unrolled, the loop would keep more keys in flight than there are registers for.
            piece = opaque(np.int32(piece + LANES_A_KEY))

    @cuda.jit(device=True)
    def add_values(source, tiles, cell, pitch, floats, weights_cell, lanes_shift, buffers, results):
        """Add the weighted values of a tile to a lane's elements of the results."""
        words, values, share_words, shares = buffers
        lanes = np.int32(np.int32(1) << lanes_shift)
        member = np.int32(cuda.laneid & (lanes - 1))
        last_piece = np.int32((pitch >> 2) - 1)
        # Of 32 values, 32 / lanes groups of lanes have as many as there are lanes.
        key = np.int32(cuda.laneid - member)
        end = np.int32(key + lanes)
        while key < end:
            for head in range(heads):
                place = np.int64(weights_cell + head * TILE_KEYS + key)
                load_shares(floats, place, share_words, head * values_together)
            for each in range(values_together):
                for piece in range(pieces):
                    # What is beyond the last piece goes into sums that nobody reads.
                    chosen = min(np.int32(piece * 32 + member), last_piece)
                    place = np.int64(cell + (key + each) * pitch + chosen * 4)
                    _load_four(tiles, place, words, (each * pieces + piece) * 4)
            unpack_shares(floats, share_words, shares)
            unpack_values(source, words, values)
            add_first_part(values, shares, results)
            if parts > 1:
                rotate_values(words)
                unpack_values(source, words, values)
                add_last_part(values, shares, results)
            key = opaque(np.int32(key + values_together))

    @cuda.jit(device=True)
    def mend_values(source, place, own, last_key, dims, flat, reports, tiles, cell, pitch, errors):
        """Each lane makes the value finite that is its own of the tile; the warp reports those that are there."""
        start, stride, dim_stride = place
        is_reported = reports and own <= last_key
        report_not_finite(
            source,
            start + np.int64(own) * stride,
            dim_stride,
            np.int64(0),
            1,
            np.int64(dims) if is_reported else np.int64(0),
            np.int64(1),
            flat + np.int64(own) * dims,
            errors,
            32,
            FULL_MASK,
        )
        word = np.int32(0)
        while word < pitch:
            make_finite(tiles, np.int64(cell + cuda.laneid * pitch + word))
            word = opaque(np.int32(word + 1))
        sync_warp()  # the values are finite

    @cuda.jit(device=True)
    def own_place(first_row, head_blocks, key_heads, chunk_blocks):
        """Sample, key head, part of its query heads and first chunk of this block, chunks in as many as it has.

        Made anew wherever it is wanted: kept, it would take registers.
        """
        index = opaque(np.int32(cuda.blockIdx.x))
        block = whole_quotient(index, chunk_blocks)
        row = np.int32(first_row + block)
        sample_key_head = whole_quotient(row, head_blocks)
        sample = whole_quotient(sample_key_head, key_heads)
        return (
            sample,
            np.int32(sample_key_head - sample * key_heads),
            np.int32(row - sample_key_head * head_blocks),
            np.int32(index - block * chunk_blocks),
        )

    @cuda.jit(device=True)
    def first_result(sample, key_head, head_block, key_heads, group):
        """The first of a block's heads, among those of all samples."""
        return np.int32((sample * key_heads + key_head) * group + head_block * heads)

    @cuda.jit
    def flash_chunk_kernel(
        query_pointer,
        keys_pointer,
        values_pointer,
        partials_pointer,
        output_pointer,
        lse_pointer,
        first_row,
        key_heads,
        group,
        head_blocks,
        keys_a_sample,
        dims,
        chunk_size,
        chunks,
        chunk_blocks,
        team_shift,
        lanes_shift,
        alternates,
        fills,
        query_origin,
        query_sample_stride,
        query_head_stride,
        query_dim_stride,
        keys_origin,
        keys_sample_stride,
        keys_head_stride,
        key_stride,
        key_dim_stride,
        values_origin,
        values_sample_stride,
        values_head_stride,
        value_stride,
        value_dim_stride,
        scale,
        lengths_pointer,
        lengths_origin,
        length_stride,
        length_words,
        errors,
    ):
        tiles = cuda.shared.array(0, word_type, 16)
        floats = cuda.shared.array(0, np.float32, 16)
        key_words = cuda.local.array(key_cells, np.uint32)
        key_values = cuda.local.array(key_cells, np.float32)
        sums = cuda.local.array(score_cells, np.float32)
        query_words = cuda.local.array(4, np.uint32)
        query_values = cuda.local.array(4, np.float32)
        value_words = cuda.local.array(value_cells, np.uint32)
        value_values = cuda.local.array(value_cells, np.float32)
        share_words = cuda.local.array(share_cells, np.uint32)
        shares = cuda.local.array(share_cells, np.float32)
        scores = cuda.local.array(heads, np.float32)
        row_max = cuda.local.array(heads, np.float32)
        totals = cuda.local.array(heads, np.float32)
        results = cuda.local.array(result_cells, np.float32)
        stage_words = cuda.local.array(width, np.uint32)
        stage_values = cuda.local.array(width, np.float32)
        query = array_at(query_pointer)
        keys = array_at(keys_pointer)
        values = array_at(values_pointer)
        partials = array_at(partials_pointer)
        output = array_at(output_pointer)
        lse_out = array_at(lse_pointer)
        seq_lens = array_at(lengths_pointer)
        let_next_begin()
        thread = np.int32(cuda.threadIdx.x)
        warp = np.int32(thread >> 5)
        warps = np.int32(cuda.blockDim.x >> 5)
        team_warps = np.int32(np.int32(1) << team_shift)
        own_warp = np.int32(warp & (team_warps - 1))
        sample, key_head, head_block, chunk_block = own_place(first_row, head_blocks, key_heads, chunk_blocks)
        length_place = lengths_origin + np.int64(sample) * length_stride
        reports_length = thread == 0 and key_head == 0 and head_block == 0 and chunk_block == 0
        length = context_count(seq_lens, length_place, length_words, keys_a_sample, sample, reports_length, errors)
        first_chunk = np.int32(chunk_block * (warps >> team_shift))
        chunk = np.int32(first_chunk + (warp >> team_shift))
        # No chunk begins beyond 2**31: it holds a key, or is one of the first block.
        if fills or first_chunk * np.int64(chunk_size) < length:
            pitch = np.int32((dims + width - 1) // width * 4)
            query_pitch = np.int32(pitch // 4 * width)
            tile_cells = np.int32(TILE_KEYS * pitch)
            warp_cells = tile_cells if alternates else np.int32(2 * tile_cells)
            keys_cell = np.int32(warp * warp_cells)
            values_cell = np.int32(keys_cell + warp_cells - tile_cells)
            query_cell = np.int32(warps * warp_cells)
            weights_cell = np.int32(query_cell + heads * query_pitch + warp * heads * TILE_KEYS)
            start = np.int32(min(np.int64(chunk) * chunk_size, np.int64(length)))
            end = np.int32(min(np.int64(start) + chunk_size, np.int64(length)))
            key_start = keys_origin + np.int64(sample) * keys_sample_stride + np.int64(key_head) * keys_head_stride
            value_start = (
                values_origin + np.int64(sample) * values_sample_stride + np.int64(key_head) * values_head_stride
            )
            staging = (stage_words, stage_values, shared_address(tiles))
            lane = np.int32(cuda.laneid)
            tile_step = np.int32(team_warps * TILE_KEYS)
            first_key = np.int32(start + own_warp * TILE_KEYS)
            pieces_a_row = np.int32(pitch >> 2)
            is_first_turn = True
            adding = True
            while adding:
                tile = first_key
                last_key = np.int32(opaque(end) - 1)
                if tile < end:
                    stage_tile(
                        keys, (key_start, key_stride, key_dim_stride, tile, last_key), dims, pieces_a_row, lanes_shift,
                        tiles, keys_cell, pitch, staging,
                    )  # fmt: skip
                close_group()
                if not alternates and tile < end:
                    stage_tile(
                        values, (value_start, value_stride, value_dim_stride, tile, last_key), dims, pieces_a_row,
                        lanes_shift, tiles, values_cell, pitch, staging,
                    )  # fmt: skip
                close_group()
                if is_first_turn:
                    for cell in range(thread, heads * query_pitch, cuda.blockDim.x):
                        floats[query_cell + cell] = _ZERO
                    cuda.syncthreads()  # what lies beyond the last element, or the last head, is zero
                    head = np.int32(0)
                    first = first_result(sample, key_head, head_block, key_heads, group)
                    while head < min(np.int32(group - head_block * heads), np.int32(heads)):
                        offset = query_origin + np.int64(sample) * query_sample_stride
                        offset += np.int64(key_head * group + head_block * heads + head) * query_head_stride
                        load_query(
                            query, offset, query_dim_stride, dims, floats, query_cell + head * query_pitch,
                            np.int64(first + head) * dims, chunk_block == 0 and length > 0, errors,
                        )  # fmt: skip
                        head = opaque(np.int32(head + 1))
                    cuda.syncthreads()  # the queries are there
                for head in range(heads):
                    row_max[head] = EMPTY_MAX
                    totals[head] = _ZERO
                for element in range(result_cells):
                    results[element] = _ZERO
                while tile < end:
                    # Made anew in each turn, as is last_key: kept, each takes a register that there may not be.
                    pieces_a_row = np.int32(opaque(pitch) >> 2)
                    wait_for_older_groups()
                    sync_warp()  # the keys are there
                    own = np.int32(tile + lane)
                    is_present = own < end
                    is_flawed = False
                    for head in range(heads):
                        scores[head] = _ZERO
                    some = np.int32(0)
                    while some < heads:
                        add_products(
                            keys, tiles, keys_cell, pitch, floats, np.int32(query_cell + some * query_pitch),
                            query_pitch, (key_words, key_values, sums, query_words, query_values),
                        )  # fmt: skip
                        for head in range(heads_together):
                            fold_sums(sums, head * LANES_A_KEY, lane)
                            scores[head] = sums[head * LANES_A_KEY] * scale
                            is_flawed |= is_present and not_finite(scores[head])
                        rotate_some(scores)
                        some = opaque(np.int32(some + heads_together))
                    sync_warp()  # the keys have been read
                    next_tile = np.int32(tile + tile_step)
                    # Values take the place of the keys, or the next keys do.
                    takes_turns = opaque(np.int32(alternates)) != 0
                    staged = tile if takes_turns else next_tile
                    if staged < end:
                        stage_tile(
                            values if takes_turns else keys,
                            (
                                value_start if takes_turns else key_start,
                                value_stride if takes_turns else key_stride,
                                value_dim_stride if takes_turns else key_dim_stride,
                                staged, last_key,
                            ),
                            dims, pieces_a_row, lanes_shift, tiles, keys_cell, pitch, staging,
                        )  # fmt: skip
                    close_group()
                    if takes_turns:
                        close_group()
                    if any_lane(is_flawed, FULL_MASK):
                        sample, key_head, head_block, _ = own_place(first_row, head_blocks, key_heads, chunk_blocks)
                        first = first_result(sample, key_head, head_block, key_heads, group)
                        head = np.int32(0)
                        while head < heads:
                            is_there = head_block * heads + head < group
                            is_reported = is_first_turn and is_there
                            scores[0] = mended_score(
                                scores[0], is_present and is_there, floats, query_cell + head * query_pitch,
                                keys, key_start + np.int64(own) * key_stride, key_dim_stride, dims, scale,
                                (np.int64(sample * key_heads + key_head) * keys_a_sample + own) * dims,
                                np.int64(first + head) * keys_a_sample + own,
                                is_reported and head_block == 0 and head == 0, is_reported, errors,
                            )  # fmt: skip
                            rotate_scores(scores)
                            head = opaque(np.int32(head + 1))
                    for head in range(heads):
                        score = scores[head] if is_present else NEGATIVE_INFINITY
                        common_max = maximum(row_max[head], warp_max(score, 32, FULL_MASK))
                        factor = rescaling(row_max[head], common_max)
                        row_max[head] = common_max
                        weight = exp2((score - common_max) * LOG2_E)
                        totals[head] = totals[head] * factor + weight
                        for element in range(piece_cells):
                            results[head * piece_cells + element] *= factor
                        set_element(floats, np.int64(weights_cell + head * TILE_KEYS + lane), weight)
                    wait_for_older_groups()
                    sync_warp()  # the values and weights are there
                    if not is_first_turn:
                        sample, key_head, head_block, _ = own_place(first_row, head_blocks, key_heads, chunk_blocks)
                        mend_values(
                            values, (value_start, value_stride, value_dim_stride), own, last_key, dims,
                            np.int64(sample * key_heads + key_head) * keys_a_sample * dims, head_block == 0, tiles,
                            values_cell, pitch, errors,
                        )  # fmt: skip
                    add_values(
                        values, tiles, values_cell, pitch, floats, weights_cell, lanes_shift,
                        (value_words, value_values, share_words, shares), results,
                    )  # fmt: skip
                    sync_warp()  # the values have been read
                    if next_tile < end:
                        stage_tile(
                            keys if takes_turns else values,
                            (
                                key_start if takes_turns else value_start,
                                key_stride if takes_turns else value_stride,
                                key_dim_stride if takes_turns else value_dim_stride,
                                next_tile, last_key,
                            ),
                            dims, pieces_a_row, lanes_shift, tiles, values_cell, pitch, staging,
                        )  # fmt: skip
                    close_group()
                    if takes_turns:
                        close_group()
                    tile = next_tile
                bad = False
                for element in range(result_cells):
                    bad |= not_finite(results[element])
                adding = any_lane(bad, FULL_MASK) and is_first_turn
                is_first_turn = False
            wait_for_copies()

            value_lanes = np.int32(np.int32(1) << lanes_shift)
            step = value_lanes
            while step < 32:
                for element in range(result_cells):
                    results[element] += shuffle_xor(results[element], step, FULL_MASK)
                step = np.int32(step << 1)
            for head in range(heads):
                totals[head] = warp_sum(totals[head], 32, FULL_MASK)
            cuda.syncthreads()  # all warps have used their tiles, where states take their place
            state_pitch = np.int32(dims + 2)
            for head in range(heads):
                cell = np.int32((warp * heads + head) * state_pitch)
                for element in range(piece_cells):
                    column = np.int32((element // width * 32 + lane) * width + element % width)
                    if lane < value_lanes and column < dims:
                        set_element(floats, np.int64(cell + column), results[head * piece_cells + element])
                if lane == 0:
                    set_element(floats, np.int64(cell + dims), row_max[head])
                    set_element(floats, np.int64(cell + dims + 1), totals[head])
            cuda.syncthreads()  # the states of all warps are there
            sample, key_head, head_block, chunk_block = own_place(first_row, head_blocks, key_heads, chunk_blocks)
            present_heads = min(np.int32(group - head_block * heads), np.int32(heads))
            first_head = first_result(sample, key_head, head_block, key_heads, group)
            warp = np.int32(opaque(np.int32(cuda.threadIdx.x)) >> 5)
            own_warp = np.int32(warp & (team_warps - 1))
            chunk = np.int32(chunk_block * (warps >> team_shift) + (warp >> team_shift))
            if chunk < chunks and (fills or np.int64(chunk) * chunk_size < length):
                limit = HALF_MAX if output.itemsize == 2 else FLOAT32_MAX
                apart = np.int32(heads * state_pitch)
                cell = np.int32(own_warp * 32 + lane)
                while cell < present_heads * dims:
                    head = whole_quotient(cell, dims)
                    column = np.int32(cell - head * dims)
                    first = np.int32(((warp - own_warp) * heads + head) * state_pitch)
                    common_max, total, value = merge_column(floats, first, apart, team_warps, dims, column)
                    if partials.size > 0:
                        place = (np.int64(first_head + head) * chunks + chunk) * state_pitch
                        partials[place + column] = finite_result(value, FLOAT32_MAX, place + column, errors)
                        if column == 0:
                            partials[place + dims] = common_max
                            partials[place + dims + 1] = total
                    else:
                        if common_max <= DEAD_MAX:
                            total = _ZERO
                        place = np.int64(first_head + head) * dims + column
                        result = value / total if total > _ZERO else _ZERO
                        output[place] = finite_result(result, limit, place, errors)
                        if column == 0:
                            write_log_sum(first_head + head, common_max, total, lse_out, errors)
                    cell = opaque(np.int32(cell + team_warps * 32))

    return flash_chunk_kernel
