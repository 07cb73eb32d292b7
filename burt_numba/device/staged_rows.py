"""Rows of keys or values on their way to shared memory, in pieces of 16 bytes; 0 beyond the last element."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.async_copies import start_copy
from burt_numba.device.numeric import opaque
from burt_numba.device.tensor_cores import pair_of_halves
from burt_numba.device.vector import element_at, load_vector, set_element, unpack_vectors

_ZERO = np.float32(0.0)

PIECES = 4
"""Of 16 bytes, that a thread may load at a time."""
TURNS = 4
"""Rows that a thread starts to copy one after another without a look at what is there, where all are."""


class StagedRows(NamedTuple):
    """Device functions for one type and one way to access memory."""

    start_piece: Any
    """``start_piece(array, offset, stride, dim, dims, words, values, piece)``: starts to load 16 bytes as one of some
    pieces, 0 beyond the last element."""
    finish_pieces: Any
    """``finish_pieces(array, words, values)``: the pieces are there, as numbers."""
    stage: Any
    """``stage(array, place, rows, dims, pieces, lanes_shift, member, members, shared, cell, pitch, buffers)``: some
    threads, each of them a ``member``, start to copy rows; ``place``: where the rows start, their strides, the first
    and the last row, and the first element. ``shared`` is an array of words of 32 bits: uint32 for float16 rows.
    ``buffers``: arrays for the words and the numbers of a piece, and the address of ``shared``."""


@cache
def staged_rows(half: int, vector: int, makes_anew: bool = False) -> StagedRows:
    """For float16 or float32, and accesses of ``vector`` elements (1: any strides).

    ``makes_anew``: each call of ``stage`` makes what depends on its threads alone, which would else stay in registers,
    and copies rows that are all there without a look at each.
    """
    width = 8 if half else 4
    load, unpack_pieces = load_vector(width), unpack_vectors(width, PIECES)

    if vector > 1:

        @cuda.jit(device=True)
        def start_piece(array, offset, stride, dim, dims, words, values, piece):
            if dim < dims:
                load(array, offset + dim, words, piece * width)
            else:
                for word in range(width):
                    words[piece * width + word] = np.uint32(0)

        @cuda.jit(device=True)
        def finish_pieces(array, words, values):
            unpack_pieces(array, words, values)

        @cuda.jit(device=True)
        def start_there(shared, buffers, at, array, offset):
            start_copy(shared, buffers[2], at, array, offset)

        @cuda.jit(device=True)
        def stage_piece(array, offset, stride, dim, dims, shared, at, buffers):
            if dim < dims:
                start_copy(shared, buffers[2], at, array, offset + dim)
            else:
                for cell in range(4):
                    set_element(shared, at + cell, 0)

    else:

        @cuda.jit(device=True)
        def start_piece(array, offset, stride, dim, dims, words, values, piece):
            for element in range(width):
                value = _ZERO
                if dim + element < dims:
                    value = np.float32(element_at(array, offset + (dim + element) * stride))
                values[piece * width + element] = value

        @cuda.jit(device=True)
        def finish_pieces(array, words, values):
            pass

        @cuda.jit(device=True)
        def start_there(shared, buffers, at, array, offset):
            """Never called: elements are taken one by one."""

        @cuda.jit(device=True)
        def stage_piece(array, offset, stride, dim, dims, shared, at, buffers):
            words, values, _address = buffers
            start_piece(array, offset, stride, dim, dims, words, values, 0)
            for cell in range(4):
                if half:
                    set_element(shared, at + cell, pair_of_halves(values[2 * cell], values[2 * cell + 1]))
                else:
                    set_element(shared, at + cell, values[cell])

    @cuda.jit(device=True)
    def stage(array, place, rows, dims, pieces, lanes_shift, member, members, shared, cell, pitch, buffers):
        start, stride, dim_stride, first_row, last_row, first_dim = place
        if makes_anew:
            member, members = opaque(np.int32(member)), opaque(np.int32(members))
        own = np.int32(member >> lanes_shift)
        step = np.int32(members >> lanes_shift)
        step_stride = np.int64(step) * stride
        are_all_there = makes_anew and vector > 1 and np.int32(first_row + rows - 1) <= last_row
        first_row = min(np.int32(first_row + own), last_row)
        start += np.int64(first_dim) * dim_stride + np.int64(first_row) * stride
        dims = np.int32(dims - first_dim)
        piece = np.int32(member & ((1 << lanes_shift) - 1))
        if are_all_there and pieces * width <= dims and step * TURNS <= rows:
            while piece < pieces:
                at = np.int32(cell + own * pitch + piece * 4)
                offset = start + piece * width
                row = own
                while row < rows:
                    for _turn in range(TURNS):
                        start_there(shared, buffers, at, array, offset)
                        offset += step_stride
                        at = np.int32(at + step * pitch)
                    row = opaque(np.int32(row + step * TURNS))
                piece = opaque(np.int32(piece + (1 << lanes_shift)))
        while piece < pieces:
            at = np.int32(cell + own * pitch + piece * 4)
            offset = start
            source_row = first_row
            row = own
            while row < rows:
                stage_piece(array, offset, dim_stride, np.int32(piece * width), dims, shared, at, buffers)
                # Beyond the last row, an earlier one again.
                if np.int32(source_row + step) <= last_row:
                    offset += step_stride
                source_row = np.int32(source_row + step)
                at = np.int32(at + step * pitch)
                row = opaque(np.int32(row + step))
            piece = opaque(np.int32(piece + (1 << lanes_shift)))

    return StagedRows(start_piece, finish_pieces, stage)


TILE_ROWS = 32
"""Rows of a tile that a warp stages."""


@cache
def staged_tile(half: int, vector: int, pieces: int):
    """A device function ``(array, place, dims, row_pieces, lanes_shift, shared, cell, pitch, buffers)``.

    By it a warp starts to copy TILE_ROWS rows, of up to 32 ``pieces`` pieces; arguments are those of a block's
    ``stage``. At least 4 lanes have a row.
    """
    width = 8 if half else 4
    stage = staged_rows(half, vector).stage
    rows_together = 4

    if vector > 1:

        @cuda.jit(device=True)
        def stage_tile(array, place, dims, row_pieces, lanes_shift, shared, cell, pitch, buffers):
            start, stride, dim_stride, first_row, last_row = place
            lane = np.int32(cuda.laneid)
            if first_row + TILE_ROWS - 1 <= last_row:
                row = np.int32(lane >> lanes_shift)
                first_piece = np.int32(lane & ((1 << lanes_shift) - 1))
                rows = np.int32(32 >> lanes_shift)
                offset = start + np.int64(first_row + row) * stride + first_piece * width
                at = np.int32(cell + row * pitch + first_piece * 4)
                while row < TILE_ROWS:
                    for _turn in range(rows_together):
                        for piece in range(pieces):
                            if first_piece + piece * 32 < row_pieces:
                                target = np.int32(at + piece * 128)
                                start_copy(shared, buffers[2], target, array, offset + piece * 32 * width)
                        offset += rows * stride
                        at = np.int32(at + rows * pitch)
                    row = opaque(np.int32(row + rows_together * rows))
            else:
                stage(
                    array, (start, stride, dim_stride, first_row, last_row, np.int32(0)), TILE_ROWS, dims, row_pieces,
                    lanes_shift, lane, np.int32(32), shared, cell, pitch, buffers,
                )  # fmt: skip

    else:

        @cuda.jit(device=True)
        def stage_tile(array, place, dims, row_pieces, lanes_shift, shared, cell, pitch, buffers):
            start, stride, dim_stride, first_row, last_row = place
            stage(
                array, (start, stride, dim_stride, first_row, last_row, np.int32(0)), TILE_ROWS, dims, row_pieces,
                lanes_shift, np.int32(cuda.laneid), np.int32(32), shared, cell, pitch, buffers,
            )  # fmt: skip

    return stage_tile
