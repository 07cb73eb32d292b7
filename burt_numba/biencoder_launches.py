"""Launch choices of attention to retrieved contexts, and how its kernels lay out shared memory."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from burt_numba.host.compiling import KernelSpec, kernel_in
from burt_numba.host.plans import MOST_BLOCKS
from burt_numba.target import FIRST_TENSOR_CORES, MAX_CLUSTER_BLOCKS, has_clusters, most_shared_bytes

MOST_DIMS = 256
"""Elements of a vector."""
ROWS_BLOCK = 256
"""Threads of a block that works on one query, at most."""
ROWS_LANES = 8
"""Lanes that share a key, and keys that each of them has in flight: of 32 contexts a lane ends with one score."""
ROWS_VALUES = 4
"""Values that a lane has in flight."""
PARTIALS_CELL = MOST_DIMS
PARTS_CELL = PARTIALS_CELL + ROWS_BLOCK // 32 * MOST_DIMS
SCORES_CELL = PARTS_CELL + MAX_CLUSTER_BLOCKS * MOST_DIMS
"""Floats of shared memory before what the warps have added up, before what the blocks of a cluster have, and before
the scores; the query comes first. Of a query of one block, the scores begin where the parts of blocks would."""
EXACT, ROUNDED, HALF = range(3)
"""Products of float32 numbers as sums of three, of numbers rounded to 11 bits, of float16 numbers."""
TILE_ROWS = 16
"""Queries of a tile, as a tensor core takes them."""
ROW_TILES = 2
"""Tiles of a warp, which with them has as many queries as lanes."""
KEY_TILES = 4
"""Tiles of 8 keys that a warp multiplies at a time."""
STRETCH = 8 * KEY_TILES
"""Keys that a warp multiplies at a time. A block has one or two stretches in shared memory, twice."""
FEW = 2 * STRETCH
"""Scores of a query that a lane has at once: those from which a search starts, or all of so few contexts."""
MOST_FEW = FEW
"""Contexts of the kernel that has all of them at once."""
FEW_TILES = FEW // 8
"""Tiles of 8 keys that it multiplies at a time."""
FRAGMENT = 256
"""Cells of shared memory of a tile of queries and 16 words of each."""
VALUE_DIMS = 64
"""Elements of the result that a warp adds up at a time."""
MOST_TILES_WARPS = 4
TILES_RESIDENT = 256
"""Threads that a multiprocessor holds at least: 255 registers each."""
FEW_RESIDENT = {EXACT: 256, ROUNDED: 256, HALF: 384}
"""The same of the kernel of few contexts. Exact products have twice as many operands: 168 registers are too few."""
_TILES_CHUNKS: dict[int, tuple[int, ...]] = {EXACT: (), ROUNDED: (4,), HALF: (2,)}
_STATIC_BYTES = 5120
_SYSTEM_BYTES = 1024
"""Shared memory of each block that is not its own."""
_FEW_CONTEXTS = 1024
"""Up to this many, blocks of a cluster take longer to meet than one of them for all."""
LARGEST_TILES_SCALE = 2.0**60
"""Of scores: times 1 / T and 2 / ln 2 it is a float32 number at every temperature that resolves scores."""
ROWS_ONLY = "rows"
"""The precision of a call whose scale is larger."""
_FEW_QUERIES = 4
"""Below this many a head, most of a tile would be empty."""
_FEW_ROWS = 256
"""Up to this many queries, one block each leaves much of the device idle."""


class Sizes(NamedTuple):
    """Of a call: B, H, Hk, Q, K, D."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    contexts: int
    dims: int

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.queries


class Choice(NamedTuple):
    """A kernel, and how it is launched over some rows."""

    kernel: KernelSpec
    grid: int
    threads: int
    shared_bytes: int
    cluster: int = 1
    takes_all: bool = False
    """Whether one launch takes all rows, whatever their number."""


def rows_kernel_spec(vector: int, dtype: str, blocks: int, resident: bool) -> KernelSpec:
    """``dtype``: as arguments have it; ``resident``: the scores lie in shared memory."""
    return KernelSpec(
        "biencoder_rows",
        kernel_in("biencoder_rows", "rows_kernel"),
        (vector, int(dtype == "f2"), blocks, int(resident)),
        (ROWS_BLOCK, 2 if resident else 1),
        blocks > 1,
    )


def choose(sizes: Sizes, rows: int, vector: int, dtype: str, precision: str, capability: tuple[int, int]) -> Choice:
    """The launch for so many of the rows; ``vector``: elements of an access."""
    fits_tiles = sizes.queries >= _FEW_QUERIES and sizes.contexts > 0 and precision != ROWS_ONLY
    if capability >= FIRST_TENSOR_CORES and fits_tiles:
        choice = _choose_tiles(sizes, vector, dtype, precision, capability)
        if choice is not None:
            return choice
    return _choose_rows(sizes.contexts, rows, vector, dtype, capability)


def stretches_of(kind: int, chunks: int) -> int:
    """Stretches that a block works on between two barriers, by a kernel for so many chunks of a vector (0: any)."""
    return 2 if kind == HALF and chunks > 0 else 1


def tiles_chunks(kind: int, vector: int) -> tuple[int, ...]:
    """Chunks of a vector that there are kernels for; there is one for any number beside them."""
    # Element by element, what is made for a size is no faster; but the order of sums is to be the same.
    return tuple(chunks for chunks in _TILES_CHUNKS[kind] if vector > 1 or stretches_of(kind, chunks) > 1)


def few_kernel_spec(kind: int, vector: int) -> KernelSpec:
    """For at most FEW contexts."""
    return _on_tensor_cores("few", (kind, vector), FEW_RESIDENT[kind])


def tiles_kernel_spec(kind: int, vector: int, chunks: int = 0) -> KernelSpec:
    """``chunks``: of a vector, where the kernel is made for as many; 0: for any number."""
    return _on_tensor_cores("tiles", (kind, vector, chunks), TILES_RESIDENT)


def _on_tensor_cores(name: str, constants: tuple[int, ...], resident: int) -> KernelSpec:
    threads = 32 * MOST_TILES_WARPS
    return KernelSpec(
        f"biencoder_{name}",
        kernel_in(f"biencoder_{name}", f"{name}_kernel"),
        constants,
        (threads, resident // threads),
        lowest_capability=FIRST_TENSOR_CORES,
    )


def chunks_of(kind: int, dims: int) -> int:
    """Of a vector: 16 words each."""
    return -(-dims // (32 if kind == HALF else 16))


def few_shared_bytes(kind: int, warps: int, dims: int) -> int:
    """Of a block, whatever its warps: FEW keys and values."""
    return _tiles_bytes(kind, 0, dims, FEW)


def tiles_shared_bytes(kind: int, warps: int, dims: int, stretches: int = 1) -> int:
    """Of a block: the queries of each warp, those that all warps work on, keys and values twice."""
    return _tiles_bytes(kind, warps + int(warps > 1), dims, 2 * stretches * STRETCH)


def _tiles_bytes(kind: int, warps: int, dims: int, keys: int) -> int:
    chunks = chunks_of(kind, dims)
    value_words = VALUE_DIMS // (2 if kind == HALF else 1)
    return 4 * (warps * ROW_TILES * chunks * FRAGMENT + keys * (16 * (chunks | 1) + value_words + 4))


def chunks_made_for(kind: int, vector: int, dims: int, capability: tuple[int, int]) -> int:
    """Of the kernel for vectors of this size: 0 where it is the one for any."""
    chunks = chunks_of(kind, dims)
    if chunks not in tiles_chunks(kind, vector):
        return 0
    shared_bytes = tiles_shared_bytes(kind, MOST_TILES_WARPS, dims, stretches_of(kind, chunks))
    resident = TILES_RESIDENT // (32 * MOST_TILES_WARPS)
    # Of each block the system takes a part, which a block may not have of what a multiprocessor has.
    taken = resident * (shared_bytes + _STATIC_BYTES + _SYSTEM_BYTES)
    return chunks if taken <= most_shared_bytes(capability) + _SYSTEM_BYTES else 0


def _choose_tiles(sizes: Sizes, vector: int, dtype: str, precision: str, capability: tuple[int, int]) -> Choice | None:
    kind = HALF if dtype == "f2" else ROUNDED if precision == "tf32" else EXACT
    warp_queries = ROW_TILES * TILE_ROWS
    most = most_shared_bytes(capability) - _STATIC_BYTES
    warps = 1
    while warps < MOST_TILES_WARPS and warps * warp_queries < sizes.queries:
        warps *= 2
    if sizes.contexts <= MOST_FEW:
        spec = few_kernel_spec(kind, vector)
        shared_bytes_of = partial(few_shared_bytes, kind, dims=sizes.dims)
    else:
        chunks = chunks_made_for(kind, vector, sizes.dims, capability)
        spec = tiles_kernel_spec(kind, vector, chunks)
        shared_bytes_of = partial(tiles_shared_bytes, kind, dims=sizes.dims, stretches=stretches_of(kind, chunks))
    while warps > 1 and shared_bytes_of(warps) > most:
        warps //= 2
    shared_bytes = shared_bytes_of(warps)
    if shared_bytes > most:
        return None
    blocks = sizes.batch * sizes.heads * -(-sizes.queries // (warp_queries * warps))
    if blocks > MOST_BLOCKS:
        return None
    return Choice(spec, blocks, 32 * warps, shared_bytes, takes_all=True)


def _choose_rows(contexts: int, rows: int, vector: int, dtype: str, capability: tuple[int, int]) -> Choice:
    most = most_shared_bytes(capability) - _STATIC_BYTES
    chunks = max(-(-contexts // 32), 1)
    blocks, first_score = 1, PARTS_CELL
    if has_clusters(capability) and (
        4 * (PARTS_CELL + 32 * chunks) > most or (contexts > _FEW_CONTEXTS and rows <= _FEW_ROWS)
    ):
        blocks, first_score = MAX_CLUSTER_BLOCKS, SCORES_CELL
    shared_bytes = 4 * (first_score + 32 * -(-chunks // blocks))
    resident = shared_bytes <= most
    if not resident:
        shared_bytes = 4 * first_score
    threads = min(32 * chunks, ROWS_BLOCK) if blocks == 1 else ROWS_BLOCK
    return Choice(rows_kernel_spec(vector, dtype, blocks, resident), rows * blocks, threads, shared_bytes, blocks)


class DocumentedTiles(NamedTuple):
    """The documented launch: a block has ``queries`` queries of a head at a time, and ``contexts`` threads."""

    queries: int
    contexts: int

    @classmethod
    def of(cls, dims: int) -> DocumentedTiles:
        return cls(DOCUMENTED_QUERIES, 128 if dims <= _SHORT_DIMS else 64)

    def shared_bytes(self, dims: int) -> int:
        return 4 * (self.queries * dims + self.contexts * dims + self.queries * self.contexts)


DOCUMENTED_QUERIES = 16
_SHORT_DIMS = 64
"""Up to this many, a tile of twice as many keys takes no more shared memory than the usual 48 KB."""
