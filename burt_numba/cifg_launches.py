"""Launch choices of the matrix memory: how many blocks have a matrix, and how its rows lie in them."""

from __future__ import annotations

from typing import NamedTuple

from burt_numba.target import COUNTER_STRIDE, MAX_CLUSTER_BLOCKS, has_clusters, most_shared_bytes

LANE_COLUMNS = 16
"""Columns of a row that a lane keeps in registers."""
TILE_ROWS = 8
"""Rows that a block updates together, at most: one for each of its warps."""
CELLS = 8
"""Sums and maxima that a block leaves for its matrix."""
VECTORS = 6
"""Vectors over the columns that a group keeps: v, residual, p, A v, A p, and the first v."""
ROW_PRODUCTS = 4
"""Products that a group keeps for each row: C'v, C'w, C'p, and C' times the first v."""
SHARED_SAMPLES = 32
"""Samples of a shared memory whose weights a block holds at a time."""

UPDATE_BLOCK, SPECTRUM_BLOCK = 256, 256
UPDATE_RESIDENT = 2
"""Blocks of updates that a multiprocessor holds: 128 registers a thread."""
_SMALL, _SMALL_BLOCK = 64, 128
_MOST_ROWS_A_BLOCK = 32
_MOST_PARTS = 1 << 24
"""Floats of z that updates leave, where more rows a block can avoid more."""
_STATIC_BYTES = 4 * (192 + 144 + 128 + 4)
_BATCH_BYTES = 4 * 2 * SHARED_SAMPLES * TILE_ROWS


class RowShape(NamedTuple):
    """How the rows of matrices lie in the blocks of a launch."""

    threads: int
    blocks: int
    """Of a matrix."""
    staged: bool
    """The area of a block fits in shared memory, and a lane's part of a row in its registers."""
    tile_rows: int
    """Rows at a time."""
    warps_a_row: int
    block_rows: int
    pitch: int
    """Floats from a vector of the area to the next: a multiple of 4."""
    tile: int
    """Where in the area the tile is."""
    area: int
    """Floats."""

    @property
    def shared_bytes(self) -> int:
        return 4 * self.area if self.staged else 0


class MemoryLaunches(NamedTuple):
    """The launches over matrices [d, d]: of the update, and of what keeps them within their bound."""

    update: RowShape
    spectrum: RowShape
    groups: int
    """Groups of blocks of the second launch, each with a matrix at a time."""
    clustered: bool

    @property
    def group_floats(self) -> int:
        """Of the workspace."""
        shape = self.spectrum
        columns_part = (2 * shape.blocks + shape.blocks * VECTORS + ROW_PRODUCTS) * shape.pitch
        areas = 0 if shape.staged else shape.blocks * shape.area
        return _whole(columns_part + 2 * shape.blocks * CELLS + areas, 4)

    def floats(self, matrices: int, activations: int) -> tuple[int, ...]:
        """Floats of the parts of the workspace: groups, z and sums of the update, activations, areas of the update."""
        blocks = matrices * self.update.blocks
        areas = 0 if self.update.staged else blocks * self.update.area
        parts = (self.groups * self.group_floats, blocks * self.update.pitch, blocks * CELLS, activations, areas)
        return tuple(_whole(part, 4) for part in parts)

    def workspace(self, columns: int, matrices: int, activations: int) -> tuple[int, int, int]:
        """Bytes of each kind of a workspace."""
        floats = sum(self.floats(matrices, activations))
        return 4 * floats, 8 * columns * matrices, 8 * COUNTER_STRIDE * self.groups


def _whole(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _row_shape(columns: int, threads: int, tile: int, least_warps: int, static: int, capability: tuple[int, int]):
    """(staged, rows at a time, warps a row, floats of the area)."""
    pitch = _whole(columns, 4)
    warps = threads // 32
    warps_a_row = least_warps
    while warps_a_row < warps and warps_a_row * 32 * LANE_COLUMNS < columns:
        warps_a_row *= 2
    area = tile + warps // warps_a_row * pitch
    fits = 4 * area + static <= most_shared_bytes(capability)
    if fits and warps_a_row * 32 * LANE_COLUMNS >= columns:
        return True, warps // warps_a_row, warps_a_row, area
    return False, 1, warps, tile + pitch


def memory_launches(
    columns: int, matrices: int, shared: bool, capability: tuple[int, int], multiprocessors: int
) -> MemoryLaunches:
    """The launches for ``matrices`` of ``columns`` rows and columns."""
    pitch = _whole(columns, 4)
    # The update: as many blocks as are resident at once, or more where matrices are many.
    threads = _SMALL_BLOCK if columns <= _SMALL else UPDATE_BLOCK
    tile = 3 * pitch
    static = _STATIC_BYTES + (_BATCH_BYTES if shared else 0)
    staged, tile_rows, warps_a_row, area = _row_shape(columns, threads, tile, 1, static, capability)
    resident = UPDATE_RESIDENT
    if staged:
        resident = max(min(resident, most_shared_bytes(capability) // (4 * area + static + 1024)), 1)
    rows = -(-matrices * columns // (multiprocessors * resident))
    rows = max(min(rows, _MOST_ROWS_A_BLOCK), -(-columns // max(_MOST_PARTS // (matrices * pitch), 1)))
    rows = _whole(min(rows, columns), tile_rows)
    update = RowShape(threads, -(-columns // rows), staged, tile_rows, warps_a_row, rows, pitch, tile, area)
    # The rest: groups that are resident at once.
    threads = _SMALL_BLOCK if columns <= _SMALL else SPECTRUM_BLOCK
    staged, tile_rows, warps_a_row, area = _row_shape(columns, threads, tile, 1, _STATIC_BYTES, capability)
    blocks = max(min(multiprocessors // matrices, -(-columns // tile_rows)), 1)
    clustered = has_clusters(capability) and blocks > 1 and (blocks <= MAX_CLUSTER_BLOCKS or matrices > 1)
    if clustered:
        blocks = min(1 << (blocks.bit_length() - 1), MAX_CLUSTER_BLOCKS)
    spectrum = RowShape(
        threads,
        blocks,
        staged,
        tile_rows,
        warps_a_row,
        _whole(-(-columns // blocks), tile_rows),
        pitch,
        tile,
        area,
    )
    return MemoryLaunches(update, spectrum, max(min(matrices, multiprocessors // blocks), 1), clustered)
