"""Launch choices that both softmaxes share: how many warps, blocks and registers a row of some length takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from burt_numba.host.arrays import Description
from burt_numba.host.errors import BurtDimensionError
from burt_numba.host.launching import Array
from burt_numba.target import CLUSTER_CAPABILITY, MAX_CLUSTER_BLOCKS

_WARP_ROWS_A_BLOCK = 4
_FEW_ROWS = 1024
"""Below this many rows, one warp a row leaves most of the device idle, and its own length is what a row costs."""


class RowShape(NamedTuple):
    """How a row is spread: ``row_warps`` warps in each of ``blocks`` blocks, ``per_thread`` columns a thread."""

    row_warps: int
    per_thread: int
    blocks: int = 1

    @property
    def columns(self) -> int:
        return self.row_warps * 32 * self.per_thread * self.blocks

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (_WARP_ROWS_A_BLOCK if self.row_warps == 1 else self.row_warps)

    @property
    def resident_blocks(self) -> int:
        """Blocks that a multiprocessor should hold at least: the compiler's register limit follows from it."""
        return max(1024 // self.threads, 1)

    def grid(self, rows: int) -> int:
        return -(-rows // _WARP_ROWS_A_BLOCK) if self.row_warps == 1 else rows * self.blocks


# Rows that fit one warp, then rows for a block; each entry is the shortest way to hold the columns up to the next.
_WARP_SHAPES = (RowShape(1, 4), RowShape(1, 8), RowShape(1, 16), RowShape(1, 32))
_BLOCK_SHAPES = (RowShape(4, 8), RowShape(4, 16), RowShape(8, 16), RowShape(16, 16), RowShape(32, 16))
_CLUSTER_SHAPES = (RowShape(32, 16, 2), RowShape(32, 16, 4), RowShape(32, 16, 8))


def row_shapes(vector: int, clusters: bool) -> Iterator[RowShape]:
    """All shapes, for the compile matrix."""
    for shape in _WARP_SHAPES + _BLOCK_SHAPES + (_CLUSTER_SHAPES if clusters else ()):
        if shape.per_thread % vector == 0:
            yield shape


def choose_row_shape(columns: int, rows: int, vector: int, clusters: bool) -> RowShape | None:
    """The shape for a row of this many columns; None when registers cannot hold it."""
    if rows >= _FEW_ROWS or columns <= 256:
        for shape in _WARP_SHAPES:
            if columns <= shape.columns and shape.per_thread % vector == 0:
                return shape
    for shape in _BLOCK_SHAPES:
        if columns <= shape.columns:
            return shape
    if clusters:
        for shape in _CLUSTER_SHAPES:
            if columns <= shape.columns:
                return shape
    return None


def streamed_blocks(columns: int, rows: int, clusters: bool) -> int:
    """Blocks a row for a row that is read from memory at each pass."""
    return MAX_CLUSTER_BLOCKS if clusters and rows <= 128 and columns >= MAX_CLUSTER_BLOCKS * 4096 else 1


def has_clusters(capability: tuple[int, int]) -> bool:
    """True for the data-centre parts from Hopper on. Consumer parts of 12.x place no clusters of this size."""
    return CLUSTER_CAPABILITY <= capability < (12, 0)


class StridedRows(NamedTuple):
    """An operand seen as rows: one flat array argument, and where in it the rows lie (in elements)."""

    argument: Array
    origin: int
    leading_strides: tuple[int, ...]
    column_stride: int
    rows: int

    @classmethod
    def of(
        cls, function: str, name: str, operand: int, array: Description | None, shape: tuple[int, ...]
    ) -> StridedRows:
        """``shape`` is that of the operand's rows and columns; an operand with fewer axes has one column a row.

        An operand that was not given is an array of size 0 whose strides are all 0.
        """
        rows = math.prod(shape[:-1])
        if array is None:
            return cls(Array(None, "f4"), 0, (0,) * (len(shape) - 1), 0, rows)
        itemsize = array.itemsize
        if any(stride % itemsize for stride in array.strides):
            raise BurtDimensionError(
                f"{function}: {name}: expected strides of whole elements, got {array.strides} bytes for {array}"
            )
        first, end = array.extent
        strides = [stride // itemsize for stride in array.strides]
        if len(strides) < len(shape):
            strides.append(0)
        code = {"float32": "f4", "float16": "f2", "bool": "u1", "uint8": "u1"}[array.dtype]
        argument = Array(operand, code, ((end - first) // itemsize,), offset=first)
        return cls(argument, -first // itemsize, tuple(strides[:-1]), strides[-1], rows)


def vector_columns(aligned: bool, columns: int, dtype: str, operands: Sequence[StridedRows]) -> int:
    """Columns of a 16-byte access of the first operand's type, where all operands allow that; else 1."""
    vector = 16 // (2 if dtype == "float16" else 4)
    if not aligned or columns % vector:
        return 1
    for rows in operands:
        if rows.column_stride != 1 or rows.origin % vector or any(stride % vector for stride in rows.leading_strides):
            return 1
    return vector
