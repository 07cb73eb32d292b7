"""Launch choices of the mixture of experts: how choices lie in the blocks of a launch, and elements in its lanes."""

from __future__ import annotations

from typing import NamedTuple

from burt_numba.target import COUNTER_STRIDE, most_shared_bytes

POSITIONS_BLOCK = 512
"""Threads of a block that gives out rows, at most, and the choices for which there is one."""
_ONE_BLOCK = 1024
"""Choices up to which one block is as fast as several that meet."""
_EXPERTS_A_WARP = 256
"""Experts whose counts a warp adds up, where there are few choices."""
_MOST_AREA = 1 << 24
"""Counts in the workspace, where they do not fit in shared memory: fewer blocks take longer, and less of it."""
_STATIC_BYTES = 256
COPY_BLOCK = 256
COPY_DEPTH = 4
"""Vectors of a token that a lane has in flight."""
COMBINE_BLOCK = 256
COMBINE_DEPTH = 4
COMBINE_ROWS = 2
"""Rows of a token, and vectors of each, that a lane has in flight."""
CLEAR_VECTORS = 16
"""Vectors that a thread sets to zero in the part of an expert's unused rows that its block has."""
_MOST_CLEARING = 1 << 20
"""Blocks that clear, where no expert needs one of its own: beyond, their parts are larger."""


class PositionsShape(NamedTuple):
    """How choices lie in the blocks that give out rows: in the order in which they get them, whole warps after another.

    ``area``: counts of each warp and expert, then of the blocks before and of all blocks, for each expert; in shared
    memory, the choices as well, an expert and a place for each.
    """

    blocks: int
    threads: int
    warp_choices: int
    """Choices of a warp: a multiple of 32."""
    warp_tokens: int
    """Tokens of a warp that looks for those without room: a multiple of 32."""
    experts: int
    staged: bool
    """The area of a block fits in shared memory."""

    @property
    def area(self) -> int:
        return (self.threads // 32 + 2) * self.experts

    @property
    def shared_bytes(self) -> int:
        return 4 * (self.area + 2 * self.threads // 32 * self.warp_choices) if self.staged else 0

    @property
    def counts(self) -> tuple[int, int, int]:
        """int32 cells of the workspace: counts of each block and expert, of each block, and areas."""
        return self.blocks * self.experts, self.blocks, 0 if self.staged else self.blocks * self.area

    @property
    def workspace(self) -> tuple[int, ...]:
        """Bytes of each kind of a workspace."""
        return 4 * sum(self.counts), 0, 0, 8 * COUNTER_STRIDE


def positions_shape(
    tokens: int, choices: int, experts: int, capability: tuple[int, int], multiprocessors: int
) -> PositionsShape:
    """For ``choices`` choices a token."""
    total = tokens * choices
    blocks = 1 if total <= _ONE_BLOCK else min(multiprocessors, -(-total // POSITIONS_BLOCK))
    warps = min(max(-(-total // (32 * blocks)), -(-experts // _EXPERTS_A_WARP)), POSITIONS_BLOCK // 32)

    def shape(staged: bool) -> PositionsShape:
        groups, tokens_left = 32 * warps * blocks, -(-tokens // (32 * warps * blocks))
        return PositionsShape(blocks, 32 * warps, 32 * -(-total // groups), 32 * tokens_left, experts, staged)

    staged = shape(True)
    if staged.shared_bytes + _STATIC_BYTES <= most_shared_bytes(capability):
        return staged
    warps = min(warps, max(_MOST_AREA // experts - 2, 1))
    blocks = min(blocks, max(_MOST_AREA // ((warps + 2) * experts), 1))
    return shape(False)


class RowPieces(NamedTuple):
    """How the elements of rows lie in lanes: a group of lanes has a piece of a row, ``depth`` vectors in each lane.

    columns   0 .. 3   4 .. 7   8 .. 11   12 .. 15   16 .. 19   20 .. 23       (lanes 2, depth 2, vectors of 4)
    piece 0   lane 0   lane 1   lane 0    lane 1     piece 1 ...
    """

    lanes_shift: int
    """Power of 2: lanes of a group, up to a warp."""
    pieces: int
    """Of a row."""

    @classmethod
    def of(cls, columns: int, vector: int, depth: int) -> RowPieces:
        vectors = -(-columns // vector)
        shift = min(max(-(-vectors // depth) - 1, 0).bit_length(), 5)
        return cls(shift, max(-(-vectors // (depth << shift)), 1))

    def blocks(self, rows: int, most_threads: int, multiprocessors: int) -> tuple[int, int]:
        """(blocks for the groups of all rows, their threads): smaller blocks where large ones leave the device idle."""
        lanes = (rows * self.pieces) << self.lanes_shift
        threads = most_threads
        while threads > 32 and 0 < lanes < threads * multiprocessors:
            threads //= 2
        return -(-lanes // threads), threads


class ClearedParts(NamedTuple):
    """How the unused rows of experts lie in the blocks that clear them: ``parts`` blocks an expert."""

    parts: int
    elements: int
    """Of a part: whole vectors."""

    @classmethod
    def of(cls, experts: int, expert_elements: int, vector: int) -> ClearedParts:
        least = COPY_BLOCK * CLEAR_VECTORS * vector
        parts = min(-(-expert_elements // least), max(_MOST_CLEARING // experts, 1))
        return cls(parts, vector * -(-expert_elements // (parts * vector)) if parts else 0)
