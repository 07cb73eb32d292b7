"""The kernel of biencoder_attention that has one query a block, or a cluster of blocks.

It takes everything: few queries and many contexts, where the keys are what is read, and whatever no kernel with tiles
of queries does. A warp takes 32 contexts at a time:

    keys      lanes 0 .. 7 share those of contexts 0 .. 7, lanes 8 .. 15 of 8 .. 15, ...; lane t ends with score t
    values    of the contexts that carry weight, each by as many lanes as have a vector of it
"""

from __future__ import annotations

from functools import cache

import numpy as np

from burt_numba.backend import cuda
from burt_numba.biencoder_launches import (
    MOST_DIMS,
    PARTIALS_CELL,
    PARTS_CELL,
    ROWS_BLOCK,
    ROWS_LANES,
    ROWS_VALUES,
    SCORES_CELL,
)
from burt_numba.device.attention import (
    HALF_MAX,
    context_count,
    finite_result,
    load_query,
    mended_score,
    report_sum,
    smallest_weight,
)
from burt_numba.device.block import SCRATCH_SIZE
from burt_numba.device.cluster import SCRATCH_SIZE as EXCHANGE_SIZE
from burt_numba.device.cluster import cluster_barrier, cluster_store
from burt_numba.device.entropy import (
    GAP_RANGE,
    beta_of_two,
    column_sums,
    entropy_search,
    first_beta,
    gap_of,
    last_beta,
)
from burt_numba.device.numeric import (
    FLOAT32_MAX,
    NEGATIVE_INFINITY,
    choose,
    exp2,
    maximum,
    minimum,
    opaque,
    whole_quotient,
)
from burt_numba.device.row_bounds import report_row, row_bound
from burt_numba.device.row_reductions import ANY_THREADS, row_reductions
from burt_numba.device.rows import finite_or_zero, not_finite, report_not_finite
from burt_numba.device.vector import element_at, load_vector, prefetch_line, store_vector, unpack_vectors
from burt_numba.device.warp import (
    FULL_MASK,
    any_lane,
    count_lanes,
    count_lanes_before,
    fold_sums,
    lanes_where,
    shuffle,
    shuffle_xor,
    sync_warp,
)

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@cache
def rows_kernel(vector: int, half: int, blocks: int, resident: int):
    """The kernel for accesses of ``vector`` elements (1: any strides), of float16 or of float32, ``blocks`` a query.

    ``resident``: shared memory holds a block's scores; else each evaluation of the entropy computes them again.

    Whatever the access, a lane takes the same elements at a time, and adds in the same order.
    """
    width = 8 if half else 4
    key_cells = ROWS_LANES * width
    pieces = MOST_DIMS // (32 * width)
    piece_cells = pieces * width
    # Element by element, more values in flight would only take more registers.
    values_together = ROWS_VALUES if vector > 1 else 1
    value_cells = values_together * piece_cells
    first_score = PARTS_CELL if blocks == 1 else SCORES_CELL
    limit = HALF_MAX if half else FLOAT32_MAX
    reductions = row_reductions(ANY_THREADS if blocks == 1 else ROWS_BLOCK, blocks)
    begin_row, block_rank, reduce_max = reductions.begin, reductions.rank, reductions.maximum
    load, store = load_vector(width), store_vector(width)
    unpack_one, unpack_keys = unpack_vectors(width, 1), unpack_vectors(width, ROWS_LANES)
    unpack_values = unpack_vectors(width, values_together * pieces)

    if vector > 1:

        @cuda.jit(device=True)
        def add_products(keys, offset, place, first, last_context, query, dim, dims, buffers):
            key_stride, _dim_stride = place
            words, values, sums, query_words, query_values = buffers
            for key in range(ROWS_LANES):
                # Beyond the last context, that one again.
                context = np.int64(min(np.int32(first + key), last_context))
                load(keys, offset + context * key_stride + dim, words, key * width)
            load(query, np.int64(dim), query_words, 0)
            unpack_one(query, query_words, query_values)
            unpack_keys(keys, words, values)
            for key in range(ROWS_LANES):
                for element in range(width):
                    sums[key] += query_values[element] * values[key * width + element]

        @cuda.jit(device=True)
        def load_value(values, offset, dim_stride, dim, dims, words, cells, cell):
            load(values, offset + dim, words, cell)

        @cuda.jit(device=True)
        def finish_values(values, words, cells):
            unpack_values(values, words, cells)

    else:

        @cuda.jit(device=True)
        def add_products(keys, offset, place, first, last_context, query, dim, dims, buffers):
            key_stride, dim_stride = place
            _words, values, sums, _query_words, _query_values = buffers
            last = np.int32(min(dim + width, dims))
            each = np.int32(dim)
            while each < last:
                for key in range(ROWS_LANES):
                    context = np.int64(min(np.int32(first + key), last_context))
                    element = element_at(keys, offset + context * key_stride + each * dim_stride)
                    values[key] = np.float32(element)
                for key in range(ROWS_LANES):
                    sums[key] += query[each] * values[key]
                each = opaque(np.int32(each + 1))

        @cuda.jit(device=True)
        def load_value(values, offset, dim_stride, dim, dims, words, cells, cell):
            for element in range(width):
                cells[cell + element] = _ZERO
                if dim + element < dims:
                    cells[cell + element] = np.float32(element_at(values, offset + (dim + element) * dim_stride))

        @cuda.jit(device=True)
        def finish_values(values, words, cells):
            pass

    # Both add what a lane has in the order of its elements: the same bits, however the elements lie.

    @cuda.jit(device=True)
    def own_row(first_row):
        """The row of this block among all, made anew wherever it is wanted: kept, it would take registers."""
        return first_row + np.int64(opaque(np.int32(cuda.blockIdx.x // blocks)))

    @cuda.jit(device=True)
    def chunk_score(source, context, reports):
        """The score of a lane's context, -inf where there is none; the lanes of a warp call it with 32 in a row."""
        keys, place, shared, buffers, length, dims, scale, errors = source
        key_start, key_stride, dim_stride, flat_head, contexts, first_row, reports_keys = place
        sums = buffers[2]
        lane = np.int32(cuda.laneid & (ROWS_LANES - 1))
        first = np.int32(context - lane)
        for key in range(ROWS_LANES):
            sums[key] = _ZERO
        dim = np.int32(lane * width)
        while dim < dims:
            if vector > 1:
                # Each lane asks for a line of its own key that comes next, or of the next chunk's.
                line = np.int32(dim - lane * width + ROWS_LANES * width)
                is_last = line >= dims
                ahead = min(np.int32(context + cuda.blockDim.x) if is_last else np.int32(context), np.int32(length - 1))
                prefetch_line(keys, key_start + np.int64(ahead) * key_stride + (np.int32(0) if is_last else line))
            add_products(
                keys,
                key_start,
                (key_stride, dim_stride),
                first,
                np.int32(length - 1),
                shared,
                np.int64(dim),
                np.int64(dims),
                buffers,
            )
            # Unrolled, the loop would keep more keys in flight than there are registers for.
            dim = opaque(np.int32(dim + ROWS_LANES * width))
        fold_sums(sums, 0, lane)
        score = sums[0] * scale
        is_present = context < length
        if any_lane(is_present and not_finite(score), FULL_MASK):
            own = np.int64(context)
            score = mended_score(
                score,
                is_present,
                shared,
                0,
                keys,
                key_start + own * key_stride,
                dim_stride,
                dims,
                scale,
                (np.int64(opaque(flat_head)) * contexts + own) * dims,
                own_row(first_row) * contexts + own,
                reports and reports_keys,
                reports,
                errors,
            )
        return score if is_present else NEGATIVE_INFINITY

    if resident:

        @cuda.jit(device=True)
        def read_gap(source, context):
            """The gap of a lane's context."""
            _scores, shared, part_start, _row_max, _gap_limit = source
            return shared[first_score + context - part_start]

    else:

        @cuda.jit(device=True)
        def read_gap(source, context):
            scores, _shared, _part_start, row_max, gap_limit = source
            return gap_of(row_max, chunk_score(scores, context, False), gap_limit)

    search = entropy_search(column_sums(read_gap, reductions.sum3))

    @cuda.jit(device=True)
    def add_values(source, values, place, kept, buffers, part, beta, factor, dims, errors):
        """A warp adds up the weighted values of its contexts, and says how many lanes have one: each some columns.

        Sums that are not finite are made once more, of finite elements alone, after a report of the others.
        """
        value_start, value_stride, dim_stride, flat_head, contexts = place
        words, cells, sums, shares, chosen_contexts = buffers
        part_start, part_padded, smallest = part
        lane = np.int32(cuda.laneid)
        lanes = np.int32(1)
        while lanes < 32 and lanes * width < dims:
            lanes = np.int32(lanes << 1)
        member = np.int32(lane & (lanes - 1))
        groups = np.int32(32 // lanes)
        group = np.int32(lane // lanes)
        list_start = np.int32(cuda.threadIdx.x - lane)
        mends = False
        adding = True
        while adding:
            bad = False
            for cell in range(piece_cells):
                sums[cell] = _ZERO
            for context in range(part_start + cuda.threadIdx.x, part_padded, cuda.blockDim.x):
                weight = exp2(-beta * read_gap(source, context)) * factor
                is_kept = weight > smallest
                found = lanes_where(is_kept, FULL_MASK)
                count = count_lanes(found)
                if is_kept:
                    kept[list_start + count_lanes_before(found)] = lane
                sync_warp()  # the list of the warp is complete
                start = np.int32(0)
                while start < count:
                    for row in range(values_together):
                        rank = np.int32(start + row * groups + group)
                        # Beyond the last value, that one again, without weight.
                        chosen = kept[list_start + min(rank, np.int32(count - 1))]
                        share = shuffle(weight, chosen, FULL_MASK)
                        shares[row] = choose(rank < count, share, _ZERO)
                        chosen_contexts[row] = np.int32(context - lane + chosen)
                    for row in range(values_together):
                        offset = value_start + np.int64(chosen_contexts[row]) * value_stride
                        for piece in range(pieces):
                            dim = np.int32((piece * lanes + member) * width)
                            cell = (row * pieces + piece) * width
                            if dim < dims:
                                load_value(
                                    values, offset, dim_stride, np.int64(dim), np.int64(dims), words, cells, cell
                                )
                            else:
                                for element in range(width):
                                    words[cell + element] = np.uint32(0)
                                    cells[cell + element] = _ZERO
                    finish_values(values, words, cells)
                    for row in range(values_together):
                        for cell in range(piece_cells):
                            value = cells[row * piece_cells + cell]
                            sums[cell] += shares[row] * (finite_or_zero(value) if mends else value)
                    start = opaque(np.int32(start + groups * values_together))
                sync_warp()  # the list has been read
            for cell in range(piece_cells):
                bad |= not_finite(sums[cell])
            adding = any_lane(bad, FULL_MASK) and not mends
            mends = True
            if adding:
                for context in range(part_start + cuda.threadIdx.x, part_padded, cuda.blockDim.x):
                    is_kept = exp2(-beta * read_gap(source, context)) * factor > smallest
                    own = np.int64(opaque(np.int32(context)))
                    report_not_finite(
                        values,
                        value_start + own * value_stride,
                        dim_stride,
                        np.int64(0),
                        1,
                        np.int64(dims) if is_kept else np.int64(0),
                        np.int64(1),
                        (np.int64(opaque(flat_head)) * contexts + own) * dims,
                        errors,
                        32,
                        FULL_MASK,
                    )
        step = lanes
        while step < 32:
            for cell in range(piece_cells):
                sums[cell] += shuffle_xor(sums[cell], step, FULL_MASK)
            step = np.int32(step << 1)
        return lanes

    @cuda.jit
    def biencoder_rows_kernel(
        query,
        keys,
        values,
        output,
        first_row,
        rows,
        heads,
        group,
        queries,
        contexts,
        dims,
        query_origin,
        query_sample_stride,
        query_head_stride,
        query_stride,
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
        entropy_bound,
        temperature_min,
        temperature_max,
        max_iterations,
        head_bounds,
        bounds_origin,
        bound_stride,
        context_lengths,
        lengths_origin,
        length_stride,
        length_words,
        temperature_out,
        entropy_out,
        lse_out,
        errors,
    ):
        scratch = cuda.shared.array(SCRATCH_SIZE, np.float32)
        exchange = cuda.shared.array(EXCHANGE_SIZE, np.float32)
        kept = cuda.shared.array(ROWS_BLOCK, np.int32)
        shared = cuda.shared.array(0, np.float32)
        key_words = cuda.local.array(key_cells, np.uint32)
        key_values = cuda.local.array(key_cells, np.float32)
        key_sums = cuda.local.array(ROWS_LANES, np.float32)
        query_words = cuda.local.array(width, np.uint32)
        query_values = cuda.local.array(width, np.float32)
        value_words = cuda.local.array(value_cells, np.uint32)
        value_values = cuda.local.array(value_cells, np.float32)
        value_sums = cuda.local.array(piece_cells, np.float32)
        shares = cuda.local.array(values_together, np.float32)
        chosen_contexts = cuda.local.array(values_together, np.int32)
        begin_row()
        thread = np.int32(cuda.threadIdx.x)
        threads = np.int32(cuda.blockDim.x)
        row = first_row + np.int64(cuda.blockIdx.x // blocks)
        sample_head = np.int32(row // queries)
        index = np.int32(row - np.int64(sample_head) * queries)
        sample = whole_quotient(sample_head, heads)
        head = np.int32(sample_head - sample * heads)
        key_head = whole_quotient(head, group)
        flat_head = np.int32(sample * whole_quotient(heads, group) + key_head)
        rank = np.int32(block_rank())
        leads = rank == 0
        reports_length = leads and thread == 0 and head == 0 and index == 0
        length_place = lengths_origin + np.int64(sample) * length_stride
        length = context_count(context_lengths, length_place, length_words, contexts, sample, reports_length, errors)
        # Parts are whole chunks of warps.
        part_size = np.int32(((length + 32 * blocks - 1) // (32 * blocks)) * 32)
        part_start = np.int32(min(rank * part_size, length))
        part_end = np.int32(min(part_start + part_size, length))
        part_padded = np.int32(part_start + ((part_end - part_start + 31) & ~31))

        query_start = query_origin
        query_start += np.int64(sample) * query_sample_stride + np.int64(head) * query_head_stride
        query_start += np.int64(index) * query_stride
        for dim in range(thread, MOST_DIMS, threads):
            shared[dim] = _ZERO
        cuda.syncthreads()  # what lies beyond the last element is zero
        load_query(query, query_start, query_dim_stride, dims, shared, 0, row * dims, leads, errors)
        cuda.syncthreads()  # the query is there

        key_place = (
            keys_origin + np.int64(sample) * keys_sample_stride + np.int64(key_head) * keys_head_stride,
            key_stride,
            key_dim_stride,
            flat_head,
            contexts,
            first_row,
            index == 0 and head == key_head * group,
        )
        key_buffers = (key_words, key_values, key_sums, query_words, query_values)
        scores = (keys, key_place, shared, key_buffers, length, dims, scale, errors)
        row_max = NEGATIVE_INFINITY
        runner_up = NEGATIVE_INFINITY
        for context in range(part_start + thread, part_padded, threads):
            score = chunk_score(scores, np.int32(context), True)
            runner_up = maximum(runner_up, minimum(row_max, score))
            row_max = maximum(row_max, score)
            if resident:
                shared[first_score + context - part_start] = score
        own_max = row_max
        row_max = reduce_max(row_max, scratch, exchange, 0)
        # Any other score than the greatest will do to start from; of a tie of threads, a lower one.
        runner_up = reduce_max(runner_up if own_max == row_max else own_max, scratch, exchange, 1)
        if row_max == NEGATIVE_INFINITY:
            row_max = _ZERO
        reports = leads and thread == 0
        bound_place = bounds_origin + np.int64(head) * bound_stride
        reports_bound = reports and sample == 0 and index == 0
        bound = row_bound(head_bounds, bound_place, entropy_bound, head, reports_bound, errors)
        lowest_beta = first_beta(temperature_min, temperature_max)
        highest_beta = last_beta(temperature_min, lowest_beta)
        gap_limit = GAP_RANGE / lowest_beta
        if resident:
            # No barrier before: a thread reads back only the scores it wrote.
            for context in range(part_start + thread, part_padded, threads):
                cell = first_score + context - part_start
                shared[cell] = gap_of(row_max, shared[cell], gap_limit)
        source = (scores, shared, part_start, row_max, gap_limit)
        data = (source, part_start + thread, part_padded, threads, scratch, exchange)
        start_beta = beta_of_two(gap_of(row_max, runner_up, gap_limit), bound, lowest_beta, highest_beta)
        beta, total, entropy, _phase = search(data, bound, start_beta, highest_beta, max_iterations, 0)
        row = own_row(first_row)
        if reports:
            report_row(
                row, beta, entropy, bound, temperature_min, temperature_max, temperature_out, entropy_out, errors
            )
            report_sum(row, row_max, total, temperature_min, temperature_max, lse_out, errors)

        value_place = (
            values_origin + np.int64(sample) * values_sample_stride + np.int64(key_head) * values_head_stride,
            value_stride,
            value_dim_stride,
            flat_head,
            contexts,
        )
        buffers = (value_words, value_values, value_sums, shares, chosen_contexts)
        part = (part_start, part_padded, smallest_weight(length))
        factor = _ONE / total if total > _ZERO else _ZERO
        lanes = add_values(source, values, value_place, kept, buffers, part, beta, factor, dims, errors)
        lane = np.int32(cuda.laneid)
        warp_cell = np.int32(PARTIALS_CELL + (thread >> 5) * MOST_DIMS)
        for piece in range(pieces):
            dim = np.int32((piece * lanes + lane) * width)
            if lane < lanes and dim < dims:
                store(shared, np.int64(warp_cell + dim), value_sums, piece * width)
        cuda.syncthreads()  # the sums of all warps are there
        row = own_row(first_row)
        for dim in range(thread, dims, threads):
            result = _ZERO
            for warp in range(threads >> 5):
                result += shared[PARTIALS_CELL + warp * MOST_DIMS + dim]
            if blocks > 1:
                cluster_store(shared, np.int64(PARTS_CELL + rank * MOST_DIMS + dim), 0, result)
            else:
                place = row * dims + dim
                output[place] = finite_result(result, limit, place, errors)
        if blocks > 1:
            cluster_barrier()  # the sums of all blocks are with the first
            if leads:
                for dim in range(thread, dims, threads):
                    result = _ZERO
                    for block in range(blocks):
                        result += shared[PARTS_CELL + block * MOST_DIMS + dim]
                    place = row * dims + dim
                    output[place] = finite_result(result, limit, place, errors)

    return biencoder_rows_kernel
