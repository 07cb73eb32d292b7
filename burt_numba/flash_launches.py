"""Launch choices of flash decoding, and how its kernels lay out chunks, warps and shared memory."""

from __future__ import annotations

from typing import NamedTuple

from burt_numba.host.compiling import KernelSpec, kernel_in
from burt_numba.target import most_shared_bytes

FLASH_DECODE_CHUNK_SIZE = 32
"""Keys of a chunk, where nothing else is said."""
MOST_DIMS = 256
"""Elements of a vector."""
MOST_SIZE = 1 << 30
"""Of heads of all samples, keys and chunks: kernels count them with 32 bits."""

DEAD_MAX = -1e30
"""A partial whose maximum is not above this does not count, whatever else is in it."""

STRANDS = 8
"""Sums of a row, each of some of its states, that are put together at the end. This decides the order of a row."""
MERGE_DEPTH = 4
"""States that are added up at a time: states i MERGE_DEPTH + j are of strand i % STRANDS."""
PART = 256
"""States that a block merges; of more, it leaves one state for each so many."""
MERGE_BLOCK = 32 * STRANDS
"""Threads of a block that merges, at most: a warp for each strand of a row."""
MERGE_SLOTS = 3
"""Times MERGE_DEPTH states that a warp has on their way to shared memory, where they lie one after another."""
_LEAST_MERGE_WARPS = 4
"""Warps of a block that merges, where shared memory holds as many."""
_MERGING_WARPS = 8192
"""Warps that keep a device busy: of more, some take several strands of a row."""
_FEW_ON_THEIR_WAY = 4
"""Times as many are wanted where each has only MERGE_DEPTH states on their way, in registers."""
_MERGE_SHARED_BYTES = 64 * 1024
"""Of shared memory, for a block that merges; every device has as much."""
_MERGE_WARPS = 24
"""Warps that merge on a multiprocessor, at least; 16 or 8 where a lane has more, in more registers."""

TILE_KEYS = 32
"""Keys that a warp has in shared memory at a time, and as many values."""
LANES_A_KEY = 8
"""Lanes that share a key, and keys that each of them works on at a time."""
LEAST_VALUE_LANES = 4
"""Lanes that share a value, at least: a weight of 4 values in a row is read at a time."""
MOST_GROUP = 4
"""Query heads of a key head that a block has; of more, others read the cache once more."""
CHUNK_WARPS = 4
"""Warps of a block that makes partials, at most."""
_RESERVED_BYTES = 1024
"""Of shared memory, for each block."""
_BLOCKS_A_PROCESSOR = 3
"""Blocks that make partials, on a multiprocessor, where shared memory holds as many of a warp."""
_WAVES = 4
"""Blocks that come after one another, about, where sequences of a batch may differ in length; of one, none does."""
_LEAST_TILES = 2
"""Tiles of a warp, at least, of a chunk that the function chooses."""
_MOST_CHUNKS = PART
"""Chunks that the function chooses at most."""


class DecodeSizes(NamedTuple):
    """Of a call: M, H, Hk, S, D."""

    batch: int
    heads: int
    key_heads: int
    keys: int
    dims: int

    @property
    def rows(self) -> int:
        return self.batch * self.heads

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.key_heads if self.key_heads else 1

    @property
    def block_heads(self) -> int:
        """Of them, those that a block has: what its kernel is made for."""
        heads = 1
        while heads < min(self.group, MOST_GROUP):
            heads *= 2
        return heads

    @property
    def block_rows(self) -> int:
        """Blocks for each chunk."""
        return self.batch * self.key_heads * -(-self.group // self.block_heads)


class ChunkShape(NamedTuple):
    """How a block makes partials: ``team`` warps share a chunk, and there are ``warps``."""

    warps: int
    team: int
    alternates: bool
    """Keys and values take turns in one place: there is no room for both."""
    shared_bytes: int

    @classmethod
    def of(cls, sizes: DecodeSizes, itemsize: int, chunk_size: int, capability: tuple[int, int]) -> ChunkShape:
        """The same for every batch: a chunk is added up in one order."""
        most = most_shared_bytes(capability)
        warps = CHUNK_WARPS
        while warps > 1 and _chunk_bytes(sizes, itemsize, warps, 2) > most // _BLOCKS_A_PROCESSOR - _RESERVED_BYTES:
            warps //= 2
        alternates = _chunk_bytes(sizes, itemsize, warps, 2) > most
        team = 1
        while team < warps and team * TILE_KEYS < chunk_size:
            team *= 2
        return cls(warps, team, alternates, _chunk_bytes(sizes, itemsize, warps, 1 if alternates else 2))

    @property
    def teams(self) -> int:
        """Chunks of a block."""
        return self.warps // self.team


def _chunk_bytes(sizes: DecodeSizes, itemsize: int, warps: int, tiles: int) -> int:
    """The tiles of each warp, the queries, and weights of each warp."""
    pieces = -(-sizes.dims * itemsize // 16)
    queries = sizes.block_heads * pieces * 16 // itemsize
    weights = warps * sizes.block_heads * TILE_KEYS
    return warps * tiles * TILE_KEYS * pieces * 16 + 4 * (queries + weights)


def choose_chunk_size(sizes: DecodeSizes, itemsize: int, capability: tuple[int, int], processors: int) -> int:
    """Keys of a chunk, so that there are blocks for the whole device.

    Long chunks: what limits a call is memory, which a few blocks on each multiprocessor keep busy to the end.
    """
    blocks = processors * _BLOCKS_A_PROCESSOR * (_WAVES if sizes.batch > 1 else 1)
    chunks = max(min(blocks // max(sizes.block_rows, 1), _MOST_CHUNKS), 1)
    step = ChunkShape.of(sizes, itemsize, MOST_SIZE, capability).team * TILE_KEYS
    return max(-(-sizes.keys // (chunks * step)), _LEAST_TILES) * step


def chunk_kernel_spec(vector: int, dtype: str, heads: int, pieces: int) -> KernelSpec:
    """``pieces``: of 16 bytes that a lane has of a value."""
    return KernelSpec(
        "flash_chunk",
        kernel_in("flash_chunk", "chunk_kernel"),
        (vector, int(dtype == "f2"), heads, pieces),
        (32 * CHUNK_WARPS, _BLOCKS_A_PROCESSOR if heads < MOST_GROUP else 2),
    )


def value_pieces(dims: int, itemsize: int) -> int:
    """Of 16 bytes, that a lane has of a value which 32 lanes share."""
    return -(-dims * itemsize // 512)


class MergeShape(NamedTuple):
    """How blocks merge states: so many ``warps``, of which ``row_warps`` share a row. No sum depends on it."""

    warps: int
    row_warps: int
    slots: int
    shared_bytes: int

    @classmethod
    def of(cls, rows: int, states: int, parts: int, dims: int, is_staged: bool) -> MergeShape:
        """For rows of so many ``states`` in ``parts``; ``is_staged``: they are copied to shared memory."""
        rounds = max(-(-min(states, PART) // MERGE_DEPTH), 1)
        strands = min(rounds, STRANDS)
        wanted = _MERGING_WARPS * (1 if is_staged else _FEW_ON_THEIR_WAY)
        row_warps = 1 << (strands - 1).bit_length()
        while row_warps > 1 and rows * parts * row_warps > wanted:
            row_warps //= 2
        warps = max(row_warps, _LEAST_MERGE_WARPS)
        while True:
            slots = min(MERGE_SLOTS, -(-rounds // row_warps)) if is_staged else 0
            row_states = warps * slots * MERGE_DEPTH + warps // row_warps * strands
            shared_bytes = 4 * row_states * (dims + 2)
            if shared_bytes <= _MERGE_SHARED_BYTES or warps == 1:
                return cls(warps, row_warps, slots, shared_bytes)
            warps //= 2
            row_warps = min(row_warps, warps)

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.warps // self.row_warps


def is_staged(vector: int, are_results: bool) -> bool:
    """Whether a kernel that merges has a warp's states copied to shared memory: partials one after another, aligned."""
    return vector > 1 and not are_results


def merge_kernel_spec(vector: int, elements: int, are_results: bool) -> KernelSpec:
    """``elements``: of a row that a lane has; ``are_results``: with logarithms of sums, not partials."""
    warps = 8
    if elements <= 4:
        warps = _MERGE_WARPS if is_staged(vector, are_results) else 16
    return KernelSpec(
        "flash_merge",
        kernel_in("flash_merge", "merge_kernel"),
        (vector, elements, int(are_results)),
        (MERGE_BLOCK, 32 * warps // MERGE_BLOCK),
    )


def merge_elements(dims: int) -> int:
    """Of a row that a lane has."""
    return 4 if dims <= 128 else 8
