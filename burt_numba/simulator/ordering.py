"""Which accesses to one element are ordered, and which race.

Two accesses to one element are ordered when one happens before the other by program order, a barrier of the block,
the cluster or the grid, ``syncwarp``, or a ``threadfence`` before an atomic that the other thread's atomic follows.
Shuffles and votes order nothing (CUDA C++ Programming Guide, "Warp Shuffle Functions": they "do not imply a memory
barrier"). Atomics on one element come one after the other, which orders those whose threads had fenced; see
`unordered_atomic`. Every element keeps its last write, and of the reads and atomics since a few, of different threads:
enough to find a race, though not every pair that is in one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from burt_numba.simulator.threads import Thread


class Epoch:
    """The stretch of one block between two barriers."""

    __slots__ = ("block", "cluster", "cluster_round", "grid_round", "round", "serial")

    def __init__(self, block: Any, serial: int, round: int, cluster: int, cluster_round: int, grid_round: int):
        self.block = block
        """Where in the grid."""
        self.serial = serial
        self.round = round
        self.cluster = cluster
        self.cluster_round = cluster_round
        self.grid_round = grid_round

    def after(self, cluster_rounds: int = 0, grid_rounds: int = 0) -> Epoch:
        """What begins with a barrier of the block, or of its cluster or the grid."""
        return Epoch(
            self.block,
            self.serial,
            self.round + 1,
            self.cluster,
            self.cluster_round + cluster_rounds,
            self.grid_round + grid_rounds,
        )


class Access(NamedTuple):
    """One access of a thread to an element, and where in the source it stands."""

    name: str
    thread: Thread
    epoch: Epoch
    clock: int
    code: Any
    instruction: int
    index: Any
    kind: str


class AtomicAccess(NamedTuple):
    """An atomic, with what the memory order of the element says of it."""

    access: Access
    sequence: int
    """Of the atomics on the element."""
    fenced: bool
    fenced_in_block: bool
    """Whether a fence of the thread came before, so that what follows an atomic that follows this one is ordered."""


class Knowledge:
    """What happened before a point, beyond what barriers say: by other blocks, or by threads of other warps."""

    __slots__ = ("rounds", "threads")

    def __init__(self) -> None:
        self.rounds: dict[int, int] = {}
        """Of a block's serial number: every access of the block in earlier rounds."""
        self.threads: dict[tuple[Thread, int], int] = {}
        """Of a thread and its block's serial number: its accesses at earlier clocks."""

    def joined(self, other: Knowledge | None) -> Knowledge:
        """A new one that knows what either knows."""
        if other is None or other is self:
            return self
        result = Knowledge()
        for name in self.__slots__:
            mine, theirs, both = getattr(self, name), getattr(other, name), getattr(result, name)
            both.update(mine)
            for key, value in theirs.items():
                both[key] = max(both.get(key, 0), value)
        return result


class Cell:
    """The accesses to one element that later ones are held against."""

    __slots__ = ("atomics", "atomics_made", "quiet", "reads", "reads_epoch", "releases", "write")

    def __init__(self) -> None:
        self.write: Access | None = None
        self.reads: dict[int, Access] | None = None
        """Since the last write, by block and thread."""
        self.reads_epoch: Epoch | None = None
        self.quiet: Epoch | None = None
        """In which a read adds nothing: enough are kept, and the last write came before a barrier of the block."""
        self.atomics: dict[int, AtomicAccess] | None = None
        """Since the last write, by block and thread."""
        self.atomics_made = 0
        self.releases: dict[int | None, Knowledge] | None = None
        """What threads had fenced before their atomics on the element: for every block, or (by its serial number) for
        their own."""

    def copied(self) -> Cell:
        copy = Cell()
        copy.write, copy.atomics_made = self.write, self.atomics_made
        copy.reads = None if self.reads is None else dict(self.reads)
        copy.atomics = None if self.atomics is None else dict(self.atomics)
        copy.releases = None if self.releases is None else dict(self.releases)
        return copy


def share_knowledge(threads: list[Thread]) -> None:
    """Whoever met knows what each of them knew, and has fenced what each of them had."""
    for name in ("known", "fenced", "fenced_in_block"):
        shared: Knowledge | None = None
        for thread in threads:
            knowledge = getattr(thread, name)
            if knowledge is not None and knowledge is not shared:
                shared = knowledge.joined(shared)
        if shared is not None:
            for thread in threads:
                setattr(thread, name, shared)


def synchronise_lanes(threads: list[Thread]) -> None:
    """``syncwarp``: each lane knows what all of them have done."""
    seen = [0] * 32
    for earlier in {id(thread.seen): thread.seen for thread in threads if thread.seen is not None}.values():
        seen = [max(pair) for pair in zip(seen, earlier, strict=True)]
    for thread in threads:
        thread.clock += 1
        seen[thread.lane] = thread.clock
    for thread in threads:
        thread.seen = seen
    share_knowledge(threads)


def is_ordered(access: Access, thread: Thread, epoch: Epoch) -> bool:
    """Whether an earlier access happens before what the thread does now."""
    then = access.epoch
    if then.serial == epoch.serial:
        if access.thread is thread or then is not epoch:
            return True
        if (
            thread.seen is not None
            and access.thread.warp is thread.warp
            and thread.seen[access.thread.lane] > access.clock
        ):
            return True
    elif _meet_before(then, epoch):
        return True
    known = thread.known
    if known is None:
        return False
    return (
        known.rounds.get(then.serial, 0) > then.round
        or known.threads.get((access.thread, then.serial), 0) > access.clock
    )


def _meet_before(then: Epoch, now: Epoch) -> bool:
    """Whether the blocks met at a barrier of the grid or of their cluster in between."""
    if then.grid_round < now.grid_round:
        return True
    return then.cluster == now.cluster and then.cluster_round < now.cluster_round


def unordered_atomic(cell: Cell, thread: Thread, epoch: Epoch) -> Access | None:
    """An atomic that a plain access of the thread races with.

    Atomics on one element come one after the other. Those before one that the thread knows of (its own, say) are
    ordered too, as far as their threads had fenced: the pattern of the block that finds itself to be the last.
    """
    assert cell.atomics is not None
    last = -1
    unordered = []
    for atomic in cell.atomics.values():
        if is_ordered(atomic.access, thread, epoch):
            last = max(last, atomic.sequence)
        else:
            unordered.append(atomic)
    for atomic in unordered:
        fenced = atomic.fenced or (atomic.fenced_in_block and atomic.access.epoch.serial == epoch.serial)
        if not fenced or atomic.sequence > last:
            return atomic.access
    return None


THREAD_BITS = 10
"""A block has at most 1,024 threads."""
MOST_READS = 33
"""Of an element: more than a warp has lanes, so that they are of two warps or blocks, one of which no writer is of."""
_MOST_OF_OTHERS = 4


def prune(accesses: dict[int, Any], epoch: Epoch) -> None:
    """Before an access by a block in a new epoch: drop those that cannot be part of a race which no other one shows.

    Those of the block before its last barrier are ordered before all it does, and for other blocks its new one stands.
    """
    others = 0
    for key, entry in list(accesses.items()):
        then = entry[0].epoch if type(entry) is AtomicAccess else entry.epoch
        if then is epoch:
            continue
        others += 1
        if then.serial == epoch.serial or then.grid_round < epoch.grid_round or others > _MOST_OF_OTHERS:
            del accesses[key]
