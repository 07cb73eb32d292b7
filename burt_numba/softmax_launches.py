"""Launch choices that both softmaxes share: how many warps, blocks and registers a row of some length takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from burt_numba.host.arrays import Description
from burt_numba.host.errors import BurtDimensionError
from burt_numba.host.launching import TYPE_CODES, Array, Number
from burt_numba.target import GROUP_BLOCK, MAX_CLUSTER_BLOCKS, has_clusters, most_shared_bytes

_FEW_ROWS = 1024
"""Below this many rows, one warp a row leaves most of the device idle, and more threads shorten a row."""


class RowShape(NamedTuple):
    """How a row is spread: ``threads`` threads in each of ``blocks`` blocks, ``per_thread`` columns each.

    Up to 32 threads (lanes of one warp) share a block with other rows; more are a block of their own.
    """

    threads: int
    per_thread: int
    blocks: int = 1

    @property
    def columns(self) -> int:
        """The longest row."""
        return self.threads * self.per_thread * self.blocks

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads if self.threads > 32 else GROUP_BLOCK

    def launch_bounds(self, resident_threads: int) -> tuple[int, int]:
        """(threads a block, blocks a multiprocessor holds at least), from which the register limit follows."""
        return self.block, max(resident_threads // self.block, 1)

    def grid(self, rows: int) -> int:
        """Blocks for this many rows."""
        return -(-rows * self.threads // self.block) if self.blocks == 1 else rows * self.blocks


# From the shortest row to the longest; each is the least that holds the columns up to the next.
_GROUP_SHAPES = tuple(RowShape(*s) for s in ((2, 4), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8), (32, 16)))
_FEW_ROW_SHAPES = (RowShape(128, 8),)
_BLOCK_SHAPES = tuple(RowShape(*s) for s in ((64, 16), (128, 16), (256, 16), (512, 16), (1024, 16)))
# Half-size blocks: a multiprocessor holds two, and one computes while the other waits for its cluster.
_CLUSTER_SHAPES = tuple(RowShape(*s) for s in ((512, 16, 4), (512, 16, 8), (1024, 16, 8)))


def row_shapes(vector: int) -> Iterator[RowShape]:
    """All shapes, for the compile matrix."""
    for shape in _GROUP_SHAPES + _FEW_ROW_SHAPES + _BLOCK_SHAPES + _CLUSTER_SHAPES:
        if shape.per_thread % vector == 0:
            yield shape


def choose_row_shape(columns: int, rows: int, vector: int, clusters: bool) -> RowShape | None:
    """The shape for a row of this many columns; None when registers cannot hold it."""
    shapes = _BLOCK_SHAPES + (_CLUSTER_SHAPES if clusters else ())
    shapes = (_GROUP_SHAPES if rows >= _FEW_ROWS or columns <= 256 else _FEW_ROW_SHAPES) + shapes
    for shape in shapes:
        if columns <= shape.columns and shape.per_thread % vector == 0:
            return shape
    return None


_STATIC_SHARED_BYTES = 1024
"""Of the kernels for long rows, at most; what is left of a block's shared memory holds a part of a row."""


def long_row_shape(columns: int, rows: int, capability: tuple[int, int]) -> tuple[int, int]:
    """(blocks a row, bytes of shared memory for a block's part of it) for a row that registers cannot hold.

    0 bytes: shared memory cannot hold it either, and each pass reads it from memory.
    """
    blocks = MAX_CLUSTER_BLOCKS if has_clusters(capability) else 1
    part_bytes = 4 * -(-columns // blocks)
    if part_bytes <= most_shared_bytes(capability) - _STATIC_SHARED_BYTES:
        return blocks, part_bytes
    return (blocks if rows <= _FEW_LONG_ROWS else 1), 0


_FEW_LONG_ROWS = 128
"""Up to this many, one block a row leaves multiprocessors idle."""


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
        # The stride of an axis of size 1 may be anything.
        steps = [itemsize if size == 1 else stride for size, stride in zip(array.shape, array.strides, strict=True)]
        if any(step % itemsize for step in steps):
            raise BurtDimensionError(
                f"{function}: {name}: expected strides of whole elements, got {array.strides} bytes for {array}"
            )
        first, end = array.extent
        strides = [0 if size == 1 else step // itemsize for size, step in zip(array.shape, steps, strict=True)]
        if len(strides) < len(shape):
            strides.append(0)
        argument = Array(operand, TYPE_CODES[array.dtype], ((end - first) // itemsize,), offset=first)
        return cls(argument, -first // itemsize, tuple(strides[:-1]), strides[-1], rows)

    @property
    def place(self) -> tuple[Number, ...]:
        """Origin and strides, as a kernel is given them."""
        return tuple(Number(number, "i8") for number in (self.origin, *self.leading_strides, self.column_stride))


def column_arguments(
    function: str, name: str, operand: int, array: Description | None, size: int, dtype: str
) -> tuple[Any, ...]:
    """An operand of one axis as a kernel is given it: the array, origin and stride. One without an axis is for all."""
    if array is None:
        return Array(None, dtype), Number(0, "i8"), Number(0, "i8")
    if not array.shape:
        array = array._replace(shape=(size,), strides=(0,))
    column = StridedRows.of(function, name, operand, array, (size, 1))
    return column.argument, Number(column.origin, "i8"), Number(column.leading_strides[0], "i8")


def length_arguments(function: str, name: str, operand: int, array: Description | None, size: int) -> tuple[Any, ...]:
    """As `column_arguments`, int64 numbers as two words of 32 bits each; then how many words a number has."""
    argument, origin, stride = column_arguments(function, name, operand, array, size, "i4")
    words = 2 if argument.dtype == "i8" else 1
    argument = replace(argument, dtype="i4", shape=(words * argument.shape[0],))
    numbers = (Number(words * number.value, "i8") for number in (origin, stride))
    return (argument, *numbers, Number(words, "i4"))


def vector_columns(aligned: bool, columns: int, dtype: str, operands: Sequence[StridedRows]) -> int:
    """Columns of a 16-byte access of the first operand's type, where all operands allow that; else 1."""
    vector = 16 // (2 if dtype == "float16" else 4)
    if not aligned or columns % vector:
        return 1
    for rows in operands:
        if rows.column_stride != 1 or rows.origin % vector or any(stride % vector for stride in rows.leading_strides):
            return 1
    return vector
