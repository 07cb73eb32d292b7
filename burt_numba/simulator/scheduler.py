"""Run the threads of blocks as greenlets, in a fixed order, one host thread for all of them.

A thread runs until it waits or ends, then hands over directly to the next thread in ``Launch.ready``; the host's own
greenlet (the hub) is reached only when nobody is ready or a thread has failed. Blocks run one after another, except for
the blocks of a cluster, and for the blocks of a grid once one of its threads waits for the whole grid.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from greenlet import GreenletExit, getcurrent

from burt_numba.simulator import checking, limits, memory, report, schedules, stepping
from burt_numba.simulator.allocations import forget_allocation
from burt_numba.simulator.checked_array import global_arrays
from burt_numba.simulator.errors import DivergenceError, SimulatorError, annotate
from burt_numba.simulator.threads import Barrier, CheckedBarrier, Cluster, Dim3, Thread

__tracebackhide__ = True  # pytest shows the kernel and the message

_MAX_INTERRUPTIONS = 100

# Numba's simulator allowed one launch at a time in a process and went wrong silently on the second.
_launch_lock = threading.RLock()


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
        "monitor",
        "name",
        "order",
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
        self.monitor: checking.Monitor | None = None
        self.cluster_size = 1
        self.hub = getcurrent()
        self.context: contextvars.Context | None = None
        self.order: schedules.Order | None = None
        self.ready: deque[Thread] | schedules.ShuffledQueue = deque()
        self.running = 0
        self.over = False
        self.failure: tuple[Thread, BaseException] | None = None
        self.positions = [
            Dim3(x, y, z) for z, y, x in itertools.product(range(block.z), range(block.y), range(block.x))
        ]
        self.clusters: list[Cluster] = []
        self.grid_barrier: Barrier | None = None

    def new_barrier(self, threads: list[Thread]) -> Barrier:
        return Barrier(threads) if self.monitor is None else CheckedBarrier(threads, self.monitor)

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
        grid, order = self.grid_dim, self.order
        if order is not None:
            columns = grid.x // self.cluster_size
            for place in order.places(columns * grid.y * grid.z):
                row, column = divmod(place, columns)
                yield Dim3(column * self.cluster_size, row % grid.y, row // grid.y)
            return
        for z in range(grid.z):
            for y in range(grid.y):
                for x in range(0, grid.x, self.cluster_size):
                    yield Dim3(x, y, z)

    def _start(self, cluster: Cluster, place: Dim3) -> None:
        for rank, block in enumerate(cluster.blocks):
            block.index = Dim3(place.x + rank, place.y, place.z)
            block.shared = memory.SharedMemory(self.shared_bytes, self.monitor)
        if self.monitor is not None:
            self.monitor.start_cluster(cluster)
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
                    if self.monitor is not None:
                        error = self.monitor.explain(error)
                    raise self._explained(thread, error)
            if not self.running:
                if self.monitor is not None:
                    self.monitor.finish()
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
        if self.monitor is not None:
            self.monitor.complete_grid_barrier()
        for cluster in self.clusters:
            self.ready.extend(cluster.barrier.threads)

    def waiting_for_grid(self) -> Barrier:
        """The barrier of the whole grid. It is never full by its own count: most blocks may not have started."""
        if self.grid_barrier is None:
            self.grid_barrier = self.new_barrier([])
            self.grid_barrier.need = -1
        return self.grid_barrier

    def _explained(self, thread: Thread, error: BaseException) -> BaseException:
        if not getattr(error, "names_its_place", False):
            annotate(error, f"in kernel {self.name}, block {thread.block.index}, thread {thread.threadIdx}")
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
    group: int = 1,
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
    group : int
        Blocks along x that run concurrently in a cooperative launch and meet at `group_barrier`; without clusters.
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
    limits.check_launch(grid_extents, block_extents, shared_bytes, cluster, group)
    kernel_name = str(name or getattr(function, "__qualname__", repr(function)))
    if isinstance(getcurrent(), Thread):
        raise SimulatorError(f"launch: kernel {kernel_name} is launched from inside a kernel")
    run_once = functools.partial(
        _run_once,
        function,
        grid_extents,
        block_extents,
        tuple(args),
        int(shared_bytes),
        max(cluster, group),
        kernel_name,
    )
    setting = schedules.current()
    with _launch_lock, np.errstate(all="ignore"):
        if setting is None:
            run_once(None)
        else:
            setting.run(run_once, kernel_name, function, args)


def _run_once(
    function: Callable[..., None],
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    args: tuple[Any, ...],
    shared_bytes: int,
    cluster: int,
    name: str,
    order: schedules.Order | None,
) -> None:
    """Run a launch in one order, the usual one for None."""
    state = Launch(function, Dim3(*grid), Dim3(*block), args, name)
    state.shared_bytes = shared_bytes
    state.cluster_size = cluster
    if order is not None:
        state.order = order
        state.ready = order.queue()
    chosen = checking.current()
    if chosen is not None:
        state.monitor = checking.Monitor(chosen, state)
        code = getattr(function, "__code__", None)
        state.args = global_arrays(
            state.args, code.co_varnames[: code.co_argcount] if code is not None else (), state.monitor
        )
    if chosen is None or not chosen.uninitialized:
        for argument in args:
            forget_allocation(argument)
    stop = stepping.current()
    if stop is not None:
        state.function = stop.stepped(state)
    state.run()
