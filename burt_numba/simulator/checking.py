"""What a checked launch looks for: races, reads of memory that nobody wrote, indices outside an array, divergence."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from sys import _getframe
from typing import TYPE_CHECKING, Any, NamedTuple

from greenlet import getcurrent

from burt_numba.simulator import installation, limits
from burt_numba.simulator.errors import DivergenceError, RaceError, UninitializedReadError
from burt_numba.simulator.ordering import (
    MOST_READS,
    THREAD_BITS,
    Access,
    AtomicAccess,
    Cell,
    Epoch,
    Knowledge,
    is_ordered,
    prune,
    share_knowledge,
    synchronise_lanes,
    unordered_atomic,
)
from burt_numba.simulator.places import Chain, call_chain, describe_chain, describe_place, index_text, is_at_chain

if TYPE_CHECKING:
    from burt_numba.simulator.scheduler import Launch
    from burt_numba.simulator.threads import Block, CheckedBarrier, CheckedGroup, Thread

__tracebackhide__ = True  # pytest shows the kernel and the message


class Checks(NamedTuple):
    """What is looked for."""

    races: bool = True
    uninitialized: bool = True
    bounds: bool = True
    barriers: bool = True
    allow_same_value_writes: bool = False


_current: contextvars.ContextVar[Checks | None] = contextvars.ContextVar("burt_numba_checks", default=None)


_everywhere: Checks | None = None
"""Of the whole process: for threads that the tests of a checked suite start."""


def current() -> Checks | None:
    """The checks of the calling context."""
    return _current.get() or _everywhere


@contextmanager
def checks_everywhere(chosen: Checks) -> Iterator[None]:
    """`checks` for every thread of the process."""
    global _everywhere
    before, _everywhere = _everywhere, chosen
    try:
        yield
    finally:
        _everywhere = before


@contextmanager
def checks(
    races: bool = True,
    uninitialized: bool = True,
    bounds: bool = True,
    barriers: bool = True,
    *,
    allow_same_value_writes: bool = False,
    compute_capability: tuple[int, int] | None = None,
) -> Iterator[None]:
    """Check every launch of this thread within the block; the first fault ends the launch with an error that names it.

    Parameters
    ----------
    races : bool
        Two threads touch one element of shared or global memory, at least one of them writes, and nothing orders them:
        `RaceError`.
    uninitialized : bool
        A read of an element of a shared or local array, or of a ``cuda.device_array``, that nobody wrote; also by
        ``copy_to_host``: `UninitializedReadError`.
    bounds : bool
        An index below 0 or past the end, in any dimension, also of a view: `OutOfBoundsError`.
    barriers : bool
        Threads meet at a barrier or a warp operation that they reached by different source lines: `DivergenceError`.
        (One that some threads cannot reach is always an error.)
    allow_same_value_writes : bool
        A write of the value that the element has already is no race with the write that put it there.
    compute_capability : (int, int), optional
        The device whose limit of shared memory holds. Default: (9, 0).

    Raises
    ------
    TypeError
        A parameter that is no bool, or a compute capability that is no pair of integers.

    Examples
    --------
    >>> import numpy as np
    >>> from burt_numba import simulator
    >>> from burt_numba.backend import cuda
    >>> @cuda.jit
    ... def shift(values):
    ...     values[cuda.threadIdx.x] = values[cuda.threadIdx.x + 1]
    >>> with simulator.checks():
    ...     shift[1, 4](np.arange(5.0))
    Traceback (most recent call last):
    ...
    burt_numba.simulator.errors.RaceError: ...
    """
    chosen = Checks(races, uninitialized, bounds, barriers, allow_same_value_writes)
    for name, value in chosen._asdict().items():
        if value is not True and value is not False:
            raise TypeError(f"checks: {name}: expected True or False, got {value!r}")
    installation.require("checks")
    token = _current.set(chosen)
    try:
        with limits.device(compute_capability):
            yield
    finally:
        _current.reset(token)


class Monitor:
    """The checks of one launch."""

    def __init__(self, checks: Checks, launch: Launch):
        self.checks = checks
        self.launch = launch
        self._serials = 0
        self._reach: _Reach | None = None
        """The last access to the shared memory of another block."""
        self._unwritten: UninitializedReadError | None = None
        """Of the first read of what nobody had written. It is a race if a write follows before the next barrier."""

    # --- what the scheduler tells ---------------------------------------------------------------------------------

    def start_cluster(self, cluster: Any) -> None:
        """A cluster of blocks begins."""
        # Every block of a grid has begun before the whole grid meets.
        for rank, block in enumerate(cluster.blocks):
            block.epoch = Epoch(block.index, self._serials + rank, 0, self._serials, 0, 0)
            block.barrier.completed = _BlockRound(self, block)
            for thread in block.threads:
                thread.seen = thread.known = thread.fenced = thread.fenced_in_block = None
        self._serials += len(cluster.blocks)
        cluster.barrier.completed = _ClusterRound(self, cluster)

    def complete_grid_barrier(self) -> None:
        """Every thread of the grid has met every other."""
        self.settle()
        for cluster in self.launch.clusters:
            for block in cluster.blocks:
                block.epoch = block.epoch.after(grid_rounds=1)

    def place(self) -> Chain | None:
        """How the current thread came to where it is; None where that does not matter."""
        return call_chain(_getframe(2)) if self.checks.barriers else None

    def join(self, group: CheckedGroup) -> None:
        """The current lane joins a warp operation; the last one to join completes it."""
        if self.checks.barriers:
            thread: Any = getcurrent()
            frame = _getframe(1)
            if group.place is None:
                group.place, group.first = call_chain(frame), thread
            elif not is_at_chain(frame, group.place):
                raise DivergenceError(
                    f"kernel {self.launch.name}, block {thread.block.index}: lanes of one warp meet in {group.kind} "
                    f"with mask 0x{group.mask:08x} from different source lines\n"
                    f"  thread {group.first.threadIdx}: {describe_chain(group.place)}\n"
                    f"  thread {thread.threadIdx}: {describe_chain(call_chain(frame))}"
                )
        if group.missing == 0 and group.kind == "syncwarp":
            synchronise_lanes(group.threads)

    def arrive(self, barrier: CheckedBarrier, kind: str) -> None:
        """The current thread arrives at a barrier where others wait, on the same line as they."""
        frame = _getframe(1)
        if barrier.place is not None and not is_at_chain(frame, barrier.place):
            thread: Any = getcurrent()
            raise DivergenceError(
                f"kernel {self.launch.name}: threads meet in {kind} from different source lines\n"
                f"  block {barrier.first.block.index}, thread {barrier.first.threadIdx}: "
                f"{describe_chain(barrier.place)}\n"
                f"  block {thread.block.index}, thread {thread.threadIdx}: {describe_chain(call_chain(frame))}"
            )

    def fence(self, thread: Thread, in_block: bool) -> None:
        """What the thread knows so far is visible to whoever follows its next atomic (``in_block``: of its block)."""
        epoch = thread.block.epoch
        knowledge = Knowledge()
        knowledge.rounds[epoch.serial] = epoch.round
        if thread.seen is not None:
            for lane, clock in enumerate(thread.seen):
                if clock:
                    knowledge.threads[thread.warp.threads[lane], epoch.serial] = clock
        thread.clock += 1
        knowledge.threads[thread, epoch.serial] = thread.clock
        knowledge = knowledge.joined(thread.known)
        if in_block:
            thread.fenced_in_block = knowledge
        else:
            thread.fenced = knowledge

    # --- accesses -------------------------------------------------------------------------------------------------

    def read(self, name: str, cell: Cell, thread: Thread, frame: Any, index: Any) -> None:
        epoch: Epoch = thread.block.epoch
        write = cell.write
        # Most writes were made before the last barrier of the block.
        if (
            write is not None
            and ((then := write.epoch) is epoch or then.serial != epoch.serial)
            and not is_ordered(write, thread, epoch)
        ):
            raise self._race(write, _access(name, thread, epoch, frame, index, "reads"))
        if cell.atomics is not None:
            atomic = unordered_atomic(cell, thread, epoch)
            if atomic is not None:
                raise self._race(atomic, _access(name, thread, epoch, frame, index, "reads"))
        reads = cell.reads
        if reads is None:
            reads = cell.reads = {}
        elif cell.reads_epoch is not epoch:
            prune(reads, epoch)
        elif len(reads) >= MOST_READS:
            if cell.atomics is None and (
                write is None or (write.epoch.serial == epoch.serial and write.epoch is not epoch)
            ):
                cell.quiet = epoch
            return
        cell.reads_epoch = epoch
        key = epoch.serial << THREAD_BITS | thread.index
        known = reads.get(key)
        if known is None or known[3] != thread.clock:
            reads[key] = _access(name, thread, epoch, frame, index, "reads")

    def write(self, name: str, cell: Cell, thread: Thread, frame: Any, index: Any, same_value: bool) -> None:
        epoch = thread.block.epoch
        access = _access(name, thread, epoch, frame, index, "writes")
        write = cell.write
        if write is not None and not same_value and not is_ordered(write, thread, epoch):
            raise self._race(write, access)
        if cell.atomics is not None:
            atomic = unordered_atomic(cell, thread, epoch)
            if atomic is not None:
                raise self._race(atomic, access)
        if cell.reads is not None:
            self._require_reads_before(cell.reads, access)
        cell.write = access
        cell.reads = cell.atomics = cell.quiet = None

    def atomic(self, name: str, cell: Cell, thread: Thread, frame: Any, index: Any, operation: str) -> None:
        epoch = thread.block.epoch
        access = _access(name, thread, epoch, frame, index, f"atomic.{operation}")
        write = cell.write
        if cell.releases is not None:
            for scope in (None, epoch.serial):
                if scope in cell.releases:
                    thread.known = cell.releases[scope].joined(thread.known)
        if write is not None and not is_ordered(write, thread, epoch):
            raise self._race(write, access)
        if cell.reads is not None:
            self._require_reads_before(cell.reads, access)
        cell.quiet = None
        if cell.atomics is None:
            cell.atomics = {}
        elif len(cell.atomics) >= MOST_READS:
            prune(cell.atomics, epoch)
        cell.atomics_made += 1
        cell.atomics[epoch.serial << THREAD_BITS | thread.index] = AtomicAccess(
            access, cell.atomics_made, thread.fenced is not None, thread.fenced_in_block is not None
        )
        for scope, fenced in ((None, thread.fenced), (epoch.serial, thread.fenced_in_block)):
            if fenced is not None:
                if cell.releases is None:
                    cell.releases = {}
                cell.releases[scope] = fenced.joined(cell.releases.get(scope))

    def _require_reads_before(self, reads: dict[int, Access], access: Access) -> None:
        for read in reads.values():
            if not is_ordered(read, access.thread, access.epoch):
                raise self._race(read, access)

    def _race(self, earlier: Access, later: Access) -> RaceError:
        where = "thread" if earlier.epoch.serial == later.epoch.serial else "block"
        message = [
            f"kernel {self.launch.name}: race on {later.name}[{index_text(later.index)}]: "
            f"nothing orders two accesses by different {where}s"
        ]
        for access in (earlier, later):
            # Two arguments may lie on the same memory.
            element = f"{'' if earlier.name == later.name else access.name}[{index_text(access.index)}]"
            message.append(
                f"  block {access.epoch.block}, thread {access.thread.threadIdx} {access.kind} {element} at "
                f"{describe_place(access.code, access.instruction)}"
            )
        return RaceError("\n".join(message))

    def report_unwritten(self, name: str, private: bool, thread: Thread, frame: Any, index: Any) -> None:
        """A thread reads what nobody has written so far. Private: memory that no other thread writes either."""
        if self._unwritten is not None and not private:
            return
        found = UninitializedReadError(
            f"kernel {self.launch.name}, block {thread.block.index}, thread {thread.threadIdx}: "
            f"reads {name}[{index_text(index)}], which nobody wrote, at "
            f"{describe_place(frame.f_code, frame.f_lasti)}"
        )
        if private:
            raise found
        self._unwritten = found

    def reach(self, operation: str, block: Block, thread: Thread, frame: Any) -> None:
        """A thread touches the shared memory of another block of its cluster, which must be there."""
        if not self.checks.races:
            return
        reach = _Reach(operation, block.epoch, block.index, frame.f_code, frame.f_lasti, thread)
        if block.epoch.cluster_round == 0:
            raise self._out_of_reach(reach, "may not have begun: no cluster barrier comes before")
        self._reach = reach

    def _out_of_reach(self, reach: _Reach, why: str) -> RaceError:
        return RaceError(
            f"kernel {self.launch.name}, block {reach.thread.block.index}, thread {reach.thread.threadIdx}: "
            f"{reach.operation} reaches into block {reach.block}, which {why}, at "
            f"{describe_place(reach.code, reach.instruction)}"
        )

    def finish(self) -> None:
        """The blocks that ran have ended."""
        self.settle()
        if self._reach is not None:
            reach, self._reach = self._reach, None
            if any(
                block.epoch.cluster == reach.epoch.cluster and block.epoch.cluster_round == reach.epoch.cluster_round
                for cluster in self.launch.clusters
                for block in cluster.blocks
            ):
                raise self._out_of_reach(reach, "may have ended: no cluster barrier comes after")

    def settle(self) -> None:
        """Raise what was put off: what comes now comes after a barrier, or the end of the block."""
        if self._unwritten is not None:
            raise self._unwritten

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for an error of a kernel: it may come of a value that nobody wrote."""
        if self._unwritten is None or isinstance(error, RaceError):
            return error
        self._unwritten.__cause__ = error
        return self._unwritten


def _access(name: str, thread: Thread, epoch: Epoch, frame: Any, index: Any, kind: str) -> Access:
    # As `Access(...)`, in a third of the time.
    return tuple.__new__(Access, (name, thread, epoch, thread.clock, frame.f_code, frame.f_lasti, index, kind))


class _Reach(NamedTuple):
    """An access to the shared memory of another block."""

    operation: str
    epoch: Epoch
    block: Any
    code: Any
    instruction: int
    thread: Thread


class _BlockRound:
    """Called when all threads of a block have met."""

    __slots__ = ("block", "monitor")

    def __init__(self, monitor: Monitor, block: Block):
        self.monitor = monitor
        self.block = block

    def __call__(self) -> None:
        self.monitor.settle()
        block = self.block
        block.epoch = block.epoch.after()
        share_knowledge(block.threads)


class _ClusterRound:
    """Called when all threads of a cluster have met."""

    __slots__ = ("cluster", "monitor")

    def __init__(self, monitor: Monitor, cluster: Any):
        self.monitor = monitor
        self.cluster = cluster

    def __call__(self) -> None:
        self.monitor.settle()
        for block in self.cluster.blocks:
            block.epoch = block.epoch.after(cluster_rounds=1)
        share_knowledge(self.cluster.barrier.threads)
