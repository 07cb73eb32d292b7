"""Run the threads of blocks as greenlets, in a fixed order, one host thread for all of them.

A thread runs until it waits or ends, then hands over directly to the next thread in ``Launch.ready``; the host's own
greenlet (the hub) is reached only when nobody is ready or a thread has failed. Blocks run one after another, except for
the blocks of a cluster, and for the blocks of a grid once one of its threads waits for the whole grid.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from burt_numba.simulator import limits, memory, report
from burt_numba.simulator.errors import DivergenceError, SimulatorError, annotate

WARP_SIZE = 32
FULL_MASK = 0xFFFFFFFF

_MAX_INTERRUPTIONS = 100

# Numba's simulator allowed one launch at a time in a process and went wrong silently on the second.
_launch_lock = threading.RLock()


class Dim3:
    """A position or an extent in a grid or a block."""

    __slots__ = ("x", "y", "z")

    def __init__(self, x: int, y: int = 1, z: int = 1):
        self.x = x
        self.y = y
        self.z = z

    def __iter__(self) -> Iterator[int]:
        return iter((self.x, self.y, self.z))

    def __repr__(self) -> str:
        return f"({self.x}, {self.y}, {self.z})"


class Barrier:
    """Where all of a fixed set of threads meet, any number of times."""

    __slots__ = ("arrived", "broken", "code", "instruction", "kind", "need", "result", "threads", "trues")

    def __init__(self, threads: list[Thread]):
        self.threads = threads
        self.need = len(threads)
        self.arrived = 0
        self.trues = 0
        self.result = 0
        self.code: Any = None
        self.instruction = -1
        self.kind = ""
        self.broken = False

    def open(self, kind: str, frame: Any) -> None:
        """Note where the first thread of this round stands."""
        self.kind = kind
        self.code = frame.f_code
        self.instruction = frame.f_lasti

    def check_place(self, kind: str, frame: Any) -> None:
        """Make the barrier impassable if ``frame`` stands on another source line, or calls another kind of barrier.

        The threads still to come are let run, so that the error can say where each of them went.
        """
        # One source line may be compiled to several instructions (a `finally` suite is copied).
        same_line = self.code is frame.f_code and self._first_line() == frame.f_lineno
        if not same_line or kind != self.kind:
            self.broken = True
            self.need = -1

    def _first_line(self) -> int | None:
        for start, end, line in self.code.co_lines():
            if start <= self.instruction < end:
                return line
        return None


class Group:
    """One round of a warp operation among the lanes that a mask names."""

    __slots__ = ("kind", "mask", "missing", "result", "threads", "values")

    def __init__(self, kind: str, mask: int, threads: list[Thread]):
        self.kind = kind
        self.mask = mask
        self.threads = threads
        self.missing = len(threads)
        self.values: list[Any] = [None] * WARP_SIZE
        self.result: Any = None


class Warp:
    __slots__ = ("gathering", "groups", "members", "present", "threads")

    def __init__(self, threads: list[Thread]):
        self.threads = threads
        self.present = (1 << len(threads)) - 1
        self.members: dict[int, list[Thread]] = {FULL_MASK: threads}
        self.groups: list[Group] = []
        # Lanes inside activemask(), by source position: see Launch._release_active_lanes.
        self.gathering: dict[Any, list[Thread]] = {}

    def group_for(self, kind: str, mask: int, lane: int) -> Group:
        """The open group for this operation and mask, a new one if nobody waits in it yet."""
        for group in self.groups:
            if group.mask == mask and group.kind == kind:
                return group
        if not mask >> lane & 1:
            raise SimulatorError(f"cuda.{kind}: lane {lane} is not in its own mask 0x{mask:08x}")
        threads = self.members.get(mask)
        if threads is None:
            threads = self.members[mask] = [thread for thread in self.threads if mask >> thread.lane & 1]
        group = Group(kind, mask, threads)
        self.groups.append(group)
        return group


class Block:
    """The threads that run one block after another; only the position and the shared memory change between blocks."""

    __slots__ = ("barrier", "cluster", "index", "rank", "shared", "threads", "warps")

    def __init__(self, launch: Launch):
        self.index = Dim3(0, 0, 0)
        self.cluster: Cluster | None = None
        self.rank = 0
        self.threads = [Thread(launch, self, i, position) for i, position in enumerate(launch.positions)]
        self.barrier = Barrier(self.threads)
        self.warps = []
        for start in range(0, len(self.threads), WARP_SIZE):
            warp = Warp(self.threads[start : start + WARP_SIZE])
            self.warps.append(warp)
            for thread in warp.threads:
                thread.warp = warp
                thread.barrier = self.barrier
        self.shared = memory.SharedMemory(launch.shared_bytes)


class Cluster:
    """Consecutive blocks along x that run at the same time."""

    __slots__ = ("barrier", "blocks")

    def __init__(self, launch: Launch):
        self.blocks = [Block(launch) for _ in range(launch.cluster_size)]
        for rank, block in enumerate(self.blocks):
            block.cluster = self
            block.rank = rank
        self.barrier = Barrier([thread for block in self.blocks for thread in block.threads])
        for thread in self.barrier.threads:
            thread.switch()


class Thread(greenlet):
    """One CUDA thread; it stays alive from block to block, since starting a greenlet costs more than a short kernel."""

    __slots__ = ("active_mask", "barrier", "block", "index", "lane", "launch", "naps", "running", "threadIdx", "warp")

    barrier: Barrier
    warp: Warp

    def __init__(self, launch: Launch, block: Block, index: int, position: Dim3):
        super().__init__(parent=launch.hub)
        self.gr_context = launch.context  # type: ignore[misc]
        self.launch = launch
        self.block = block
        self.index = index
        self.lane = index % WARP_SIZE
        self.threadIdx = position
        self.running = False
        self.naps = 0
        self.active_mask = 0

    def run(self) -> None:
        launch = self.launch
        function, args, ready, hub = launch.function, launch.args, launch.ready, launch.hub
        try:
            # Started from the hub: a greenlet inherits the recursion depth of the one that starts it, so that threads
            # that start each other would reach Python's limit.
            hub.switch()
            while not launch.over:
                if function(*args) is not None:
                    raise TypeError(f"kernel {launch.name} returned a value; a kernel must return None")
                self.running = False
                launch.running -= 1
                (ready.popleft() if ready else hub).switch()
        except GreenletExit:
            return
        except BaseException as error:
            launch.failure = (self, error)


class Launch:
    """One kernel launch: the grid, the threads that are alive, and the queue of those that can run."""

    __slots__ = (
        "args",
        "block_dim",
        "blocks",
        "cluster_size",
        "clusters",
        "context",
        "failure",
        "function",
        "grid_barrier",
        "grid_dim",
        "hub",
        "name",
        "over",
        "positions",
        "ready",
        "running",
        "shared_bytes",
    )

    def __init__(self, function: Callable[..., None], grid: Dim3, block: Dim3, args: tuple[Any, ...], name: str):
        self.function = function
        self.args = args
        self.grid_dim = grid
        self.blocks = grid.x * grid.y * grid.z
        self.block_dim = block
        self.name = name
        self.shared_bytes = 0
        self.cluster_size = 1
        self.hub = getcurrent()
        self.context: contextvars.Context | None = None
        self.ready: deque[Thread] = deque()
        self.running = 0
        self.over = False
        self.failure: tuple[Thread, BaseException] | None = None
        self.positions = [
            Dim3(x, y, z) for z, y, x in itertools.product(range(block.z), range(block.y), range(block.x))
        ]
        self.clusters: list[Cluster] = []
        self.grid_barrier: Barrier | None = None

    def run(self) -> None:
        """Run every block, then end the greenlets, whatever happened."""
        # A greenlet starts with an empty context, which is where NumPy keeps its error state.
        self.context = contextvars.copy_context()
        try:
            cluster = None
            for place in self._places():
                # A cluster whose threads still wait for the whole grid cannot take another set of blocks.
                if cluster is None or self.running:
                    cluster = Cluster(self)
                    self.clusters.append(cluster)
                self._start(cluster, place)
                self._run_until_stuck()
            while self.running:
                self._complete_grid_barrier()
                self._run_until_stuck()
        finally:
            self._end_threads()

    def _places(self) -> Iterator[Dim3]:
        """Where each cluster starts, x fastest. (A product() would first make a tuple of two thousand million.)"""
        grid = self.grid_dim
        for z in range(grid.z):
            for y in range(grid.y):
                for x in range(0, grid.x, self.cluster_size):
                    yield Dim3(x, y, z)

    def _start(self, cluster: Cluster, place: Dim3) -> None:
        for rank, block in enumerate(cluster.blocks):
            block.index = Dim3(place.x + rank, place.y, place.z)
            block.shared = memory.SharedMemory(self.shared_bytes)
        threads = cluster.barrier.threads
        for thread in threads:
            thread.running = True
            thread.naps = 0
        self.running += len(threads)
        self.ready.extend(threads)

    def _run_until_stuck(self) -> None:
        """Run threads until all have ended or wait for the whole grid."""
        ready = self.ready
        while True:
            while ready:
                ready.popleft().switch()
                if self.failure is not None:
                    thread, error = self.failure
                    raise self._explained(thread, error)
            if not self.running:
                return
            if self._release_active_lanes():
                continue
            if self.grid_barrier is not None and self.grid_barrier.arrived == self.running:
                return
            raise DivergenceError(report.divergence(self))

    def _release_active_lanes(self) -> bool:
        """Let lanes go that wait in activemask() at one source position.

        The hardware may answer with any set of lanes that run together; the largest one is what a compiler aims at. It
        is known only once every other lane of the block waits or has ended.
        """
        for cluster in self.clusters:
            for block in cluster.blocks:
                for warp in block.warps:
                    if warp.gathering:
                        threads = warp.gathering.pop(next(iter(warp.gathering)))
                        mask = sum(1 << thread.lane for thread in threads)
                        for thread in threads:
                            thread.naps = 0
                            thread.active_mask = mask
                        self.ready.extend(threads)
                        return True
        return False

    def _complete_grid_barrier(self) -> None:
        barrier = self.grid_barrier
        if barrier is None or barrier.broken or barrier.arrived != self.blocks * len(self.positions):
            raise DivergenceError(report.divergence(self))
        barrier.arrived = 0
        for cluster in self.clusters:
            self.ready.extend(cluster.barrier.threads)

    def waiting_for_grid(self) -> Barrier:
        """The barrier of the whole grid. It is never full by its own count: most blocks may not have started."""
        if self.grid_barrier is None:
            self.grid_barrier = Barrier([])
            self.grid_barrier.need = -1
        return self.grid_barrier

    def _explained(self, thread: Thread, error: BaseException) -> BaseException:
        place = f"kernel {self.name}, block {thread.block.index}, thread {thread.threadIdx}"
        annotate(error, f"in {place}")
        return error

    def _end_threads(self) -> None:
        self.over = True
        for cluster in self.clusters:
            for thread in cluster.barrier.threads:
                # A `finally` suite in the kernel may wait once more, and is interrupted again.
                for _ in range(_MAX_INTERRUPTIONS):
                    if not thread:
                        break
                    self.ready.clear()
                    if thread.running:
                        thread.throw(GreenletExit)
                    else:
                        thread.switch()
        # Breaks the cycle launch -> cluster -> thread -> launch, so that memory does not wait for the collector.
        self.clusters.clear()
        self.failure = None


def launch(
    function: Callable[..., None],
    grid: Any,
    block: Any,
    args: tuple[Any, ...],
    *,
    shared_bytes: int = 0,
    cluster: int = 1,
    name: str | None = None,
) -> None:
    """Run ``function`` once for every thread of ``grid`` blocks of ``block`` threads.

    Parameters
    ----------
    function : callable
        The Python function of a kernel. It uses ``numba.cuda`` (after `install`) as it does on a GPU.
    grid, block : int or tuple of 1 to 3 ints
        Blocks in the grid, and threads in a block.
    args : tuple
        Arguments of the kernel. Arrays are NumPy arrays and are used in place.
    shared_bytes : int
        Dynamic shared memory of a block, in bytes.
    cluster : int
        Blocks of a thread-block cluster, along x. They run concurrently.
    name : str, optional
        The name of the kernel in error messages.

    Raises
    ------
    ValueError
        For a launch that a GPU would refuse.
    DivergenceError
        When threads wait at a barrier or collective that others cannot reach.
    SimulatorError
        When called from inside a kernel, and for what is undefined on a GPU.
    """
    grid_extents, block_extents = limits.extents(grid, "grid"), limits.extents(block, "block")
    limits.check_launch(grid_extents, block_extents, shared_bytes, cluster)
    kernel_name = str(name or getattr(function, "__qualname__", repr(function)))
    if isinstance(getcurrent(), Thread):
        raise SimulatorError(f"launch: kernel {kernel_name} is launched from inside a kernel")
    with _launch_lock, np.errstate(all="ignore"):
        state = Launch(function, Dim3(*grid_extents), Dim3(*block_extents), tuple(args), kernel_name)
        state.shared_bytes = int(shared_bytes)
        state.cluster_size = cluster
        state.run()
