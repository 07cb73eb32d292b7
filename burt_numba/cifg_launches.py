"""Launch choices of the matrix memory: how many blocks have a matrix, and how its rows lie in them."""

from __future__ import annotations

from typing import NamedTuple

from burt_numba.target import (
    COUNTER_STRIDE,
    GATE_COLUMNS,
    GATE_SAMPLES,
    MAX_CLUSTER_BLOCKS,
    has_clusters,
    most_shared_bytes,
)

LANE_COLUMNS = 16
"""Columns of a row that a lane keeps in registers."""
TILE_ROWS = 8
"""Rows that a block updates together, at most: one for each of its warps."""
CELLS_SHIFT = 3
CELLS = 1 << CELLS_SHIFT
"""Sums and maxima that a block leaves for its matrix."""
TOTALS = 16
"""Floats of what the last block of an update leaves for its matrix, of which some are used."""
_SET_SHIFT, _LARGE_SET_SHIFT = 4, 6
"""Powers of 2: blocks of an update whose parts one of them adds up, before one adds up those of a matrix."""
_MOST_GROUPS_SHIFT = 2
"""Power of 2: groups of threads that add up parts side by side, at most."""
START_CELLS = 4
"""Floats behind the vectors v, w and h of a matrix."""
VECTORS = 6
"""Vectors over the columns that a group keeps: v, residual, p, A v, A p, and the first v."""
ROW_PRODUCTS = 4
"""Products that a group keeps for each row: C'v, C'w, C'p, and C' times the first v."""
UPDATE_BLOCK, SPECTRUM_BLOCK = 256, 256
UPDATE_RESIDENT = 2
"""Blocks of updates that a multiprocessor holds: 128 registers a thread."""
_SMALL, _SMALL_BLOCK = 64, 128
_START_ROWS = 3
"""What a block of an update does before and after its rows takes as long as so many steps over them."""
_MOST_WAVES = 8
_BLOCK_ROWS, _BLOCK_ELEMENTS = 64, 1 << 15
"""A block with more rows and elements than that gains nothing: the starts and ends of others go on beside it."""
_GATES_RESIDENT = 2
"""Blocks of gates that a multiprocessor holds."""
_LEAST_DEPTH = 128
"""Of the part of W_f [h; x] that a block of gates adds up: 16 for each of its warps."""
_MOST_PARTS = 1 << 24
"""Floats of z that updates leave, where more rows a block can avoid more."""
_STATIC_BYTES = 4 * (192 + 144 + 128 + 4)


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
    tiles: int
    """Of the gates of a batch; 0 for one sample."""
    split: int
    """Blocks that share a tile."""
    columns: int
    shared: bool

    @property
    def group_shift(self) -> int:
        """Power of 2: groups of threads of an update that add up parts, each for all columns, 4 a thread."""
        shift = 0
        while (
            shift < _MOST_GROUPS_SHIFT
            and self.update.pitch << (shift + 1) <= 4 * self.update.threads
            and 2 << shift <= self.update.tile_rows
        ):
            shift += 1
        return shift

    @property
    def set_shift(self) -> int:
        """Power of 2: blocks of a set. Large sets take fewer meetings, small ones fewer columns a thread."""
        return _LARGE_SET_SHIFT if self.group_shift else _SET_SHIFT

    @property
    def group_floats(self) -> int:
        """Of the workspace."""
        shape = self.spectrum
        columns_part = (2 * shape.blocks + shape.blocks * VECTORS + ROW_PRODUCTS) * shape.pitch
        areas = 0 if shape.staged else shape.blocks * shape.area
        return _whole(columns_part + 2 * shape.blocks * CELLS + areas, 4)

    def floats(self, matrices: int, activations: int) -> tuple[int, ...]:
        """Floats of the parts of the workspace.

        Groups, z and sums of the update, activations, areas of the update, totals, starts, parts of tiles of gates,
        mean writes and mean gates of a shared memory.
        """
        blocks = matrices * self.update.blocks
        areas = 0 if self.update.staged else blocks * self.update.area
        parts = (
            self.groups * self.group_floats,
            blocks * self.update.pitch,
            blocks * CELLS,
            activations,
            areas,
            matrices * TOTALS,
            matrices * (3 * self.update.pitch + START_CELLS),
            self.tiles * self.split * GATE_SAMPLES * GATE_COLUMNS if self.split > 1 else 0,
            self.columns * self.columns if self.shared else 0,
            self.columns if self.shared else 0,
        )
        return tuple(_whole(part, 4) for part in parts)

    def counters(self, matrices: int) -> tuple[int, int]:
        """Counters of the blocks of the update, and of the tiles of gates."""
        # Sets of blocks, sets of sets, and so on: fewer than twice as many, for sets of 4 and more.
        update = matrices * 2 * -(-self.update.blocks // (1 << self.set_shift))
        return update, self.tiles if self.split > 1 else 0

    def workspace(self, columns: int, matrices: int, activations: int) -> tuple[int, ...]:
        """Bytes of each kind of a workspace."""
        floats = sum(self.floats(matrices, activations))
        return 4 * floats, 8 * columns * matrices, 8 * sum(self.counters(matrices)), 8 * COUNTER_STRIDE * self.groups


def _whole(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _row_shape(columns: int, threads: int, tile: int, capability: tuple[int, int]):
    """(staged, rows at a time, warps a row, floats of the area)."""
    pitch = _whole(columns, 4)
    warps = threads // 32
    warps_a_row = 1
    while warps_a_row < warps and warps_a_row * 32 * LANE_COLUMNS < columns:
        warps_a_row *= 2
    area = tile + warps // warps_a_row * pitch
    fits = 4 * area + _STATIC_BYTES <= most_shared_bytes(capability)
    if fits and warps_a_row * 32 * LANE_COLUMNS >= columns:
        return True, warps // warps_a_row, warps_a_row, area
    return False, 1, warps, tile + pitch


def _rows_a_block(columns: int, matrices: int, tile_rows: int, slots: int) -> int:
    """Rows of a matrix for a block, where ``slots`` blocks run at once: few waves of them, and evenly full.

    A wave takes as long as its rows and what a block does besides.
    """
    most = _whole(columns, tile_rows)
    best = (-(-matrices // slots) * (most // tile_rows + _START_ROWS), most)
    for waves in range(1, _MOST_WAVES + 1):
        blocks = waves * slots // matrices
        if blocks:
            rows = _whole(-(-columns // blocks), tile_rows)
            best = min(best, (waves * (rows // tile_rows + _START_ROWS), rows))
    return best[1]


def memory_launches(
    columns: int,
    matrices: int,
    samples: int | None,
    width: int,
    shared: bool,
    capability: tuple[int, int],
    multiprocessors: int,
) -> MemoryLaunches:
    """The launches for ``matrices`` of ``columns`` rows and columns.

    ``samples``: of the batch, or None for one sample. ``width``: of a row of W_f.
    """
    pitch = _whole(columns, 4)
    # The update: blocks that fill the device once, or a few times.
    threads = _SMALL_BLOCK if columns <= _SMALL else UPDATE_BLOCK
    tile = 3 * pitch
    staged, tile_rows, warps_a_row, area = _row_shape(columns, threads, tile, capability)
    resident = UPDATE_RESIDENT
    if staged:
        resident = max(min(resident, most_shared_bytes(capability) // (4 * area + _STATIC_BYTES + 1024)), 1)
    rows = _rows_a_block(columns, matrices, tile_rows, multiprocessors * resident)
    rows = min(rows, _whole(max(_BLOCK_ROWS, _BLOCK_ELEMENTS // columns), tile_rows))
    least = -(-columns // max(_MOST_PARTS // (matrices * pitch), 1))
    rows = min(max(rows, _whole(least, tile_rows)), _whole(columns, tile_rows))
    update = RowShape(threads, -(-columns // rows), staged, tile_rows, warps_a_row, rows, pitch, tile, area)
    # The rest: groups that are resident at once.
    threads = _SMALL_BLOCK if columns <= _SMALL else SPECTRUM_BLOCK
    staged, tile_rows, warps_a_row, area = _row_shape(columns, threads, tile, capability)
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
    tiles = split = 0
    if samples is not None:
        tiles = -(-samples // GATE_SAMPLES) * -(-columns // GATE_COLUMNS)
        split = max(min(_GATES_RESIDENT * multiprocessors // tiles, -(-width // _LEAST_DEPTH)), 1)
    return MemoryLaunches(
        update, spectrum, max(min(matrices, multiprocessors // blocks), 1), clustered, tiles, split, columns, shared
    )
