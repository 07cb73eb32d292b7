"""The threads of a launch, and where they meet: blocks, warps, clusters, barriers, rounds of warp operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, getcurrent, greenlet

from burt_numba.simulator import checking, memory
from burt_numba.simulator.errors import SimulatorError

if TYPE_CHECKING:
    from burt_numba.simulator.scheduler import Launch

__tracebackhide__ = True  # pytest shows the kernel and the message

WARP_SIZE = 32
FULL_MASK = 0xFFFFFFFF


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

    __slots__ = (
        "arrived",
        "broken",
        "code",
        "instruction",
        "kind",
        "need",
        "result",
        "threads",
        "trues",
    )

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
        if kind != self.kind or not self._on_first_line(frame):
            self.break_up()

    def break_up(self) -> None:
        """Nobody passes any more."""
        self.broken = True
        self.need = -1

    def _on_first_line(self, frame: Any) -> bool:
        # One source line may be compiled to several instructions (a `finally` suite is copied).
        return self.code is frame.f_code and (self.instruction == frame.f_lasti or self._first_line() == frame.f_lineno)

    def _first_line(self) -> int | None:
        for start, end, line in self.code.co_lines():
            if start <= self.instruction < end:
                return line
        return None


class CheckedBarrier(Barrier):
    """A barrier that tells the monitor who arrives, and when it is full.

    Those who arrive touch ``arrived`` and ``kind`` alone, in code that is the hottest of the simulator. As properties
    of this class they cost nothing where no launch is checked.
    """

    __slots__ = ("_arrived", "_kind", "_monitor", "completed", "first", "place")

    def __init__(self, threads: list[Thread], monitor: checking.Monitor):
        self._monitor = monitor
        self.completed: Callable[[], None] | None = None
        self.first: Any = None
        self.place: Any = None
        super().__init__(threads)

    @property
    def arrived(self) -> int:
        return self._arrived

    @arrived.setter
    def arrived(self, count: int) -> None:
        self._arrived = count
        if count == 0 and self.completed is not None:
            self.completed()

    @property
    def kind(self) -> str:
        # No kind that anyone compares with, so that whoever comes later is shown to `check_place`.
        return ""

    @kind.setter
    def kind(self, kind: str) -> None:
        self._kind = kind
        if kind:
            self.first = getcurrent()
            self.place = self._monitor.place()

    def check_place(self, kind: str, frame: Any) -> None:
        if kind != self._kind or not self._on_first_line(frame):
            self.break_up()
        else:
            self._monitor.arrive(self, kind)


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


class CheckedGroup(Group):
    """A round that tells the monitor who joins it: each lane lowers ``missing``."""

    __slots__ = ("_missing", "_monitor", "first", "place")

    def __init__(self, kind: str, mask: int, threads: list[Thread], monitor: checking.Monitor):
        self._monitor: checking.Monitor | None = None
        self.first: Any = None
        self.place: Any = None
        super().__init__(kind, mask, threads)
        self._monitor = monitor

    @property
    def missing(self) -> int:
        return self._missing

    @missing.setter
    def missing(self, count: int) -> None:
        self._missing = count
        if self._monitor is not None:
            self._monitor.join(self)


class Warp:
    __slots__ = ("gathering", "groups", "members", "monitor", "present", "threads")

    def __init__(self, threads: list[Thread]):
        self.threads = threads
        self.monitor = threads[0].launch.monitor
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
        group = Group(kind, mask, threads) if self.monitor is None else CheckedGroup(kind, mask, threads, self.monitor)
        self.groups.append(group)
        return group


class Block:
    """The threads that run one block after another; only the position and the shared memory change between blocks."""

    __slots__ = ("barrier", "cluster", "epoch", "index", "rank", "shared", "threads", "warps")

    def __init__(self, launch: Launch):
        self.index = Dim3(0, 0, 0)
        self.cluster: Cluster | None = None
        self.rank = 0
        self.threads = [Thread(launch, self, i, position) for i, position in enumerate(launch.positions)]
        self.barrier = launch.new_barrier(self.threads)
        self.warps = []
        for start in range(0, len(self.threads), WARP_SIZE):
            warp = Warp(self.threads[start : start + WARP_SIZE])
            self.warps.append(warp)
            for thread in warp.threads:
                thread.warp = warp
                thread.barrier = self.barrier
        self.shared = memory.SharedMemory(launch.shared_bytes)
        self.epoch: Any = None


class Cluster:
    """Consecutive blocks along x that run at the same time."""

    __slots__ = ("barrier", "blocks")

    def __init__(self, launch: Launch):
        self.blocks = [Block(launch) for _ in range(launch.cluster_size)]
        for rank, block in enumerate(self.blocks):
            block.cluster = self
            block.rank = rank
        self.barrier = launch.new_barrier([thread for block in self.blocks for thread in block.threads])
        for thread in self.barrier.threads:
            thread.switch()


class Thread(greenlet):
    """One CUDA thread; it stays alive from block to block, since starting a greenlet costs more than a short kernel."""

    __slots__ = (
        "active_mask",
        "barrier",
        "block",
        "clock",
        "fenced",
        "fenced_in_block",
        "index",
        "known",
        "lane",
        "launch",
        "naps",
        "running",
        "seen",
        "threadIdx",
        "warp",
    )

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
        # What a checked launch knows of it.
        self.clock = 0
        self.seen: Any = None
        self.known: Any = None
        self.fenced: Any = None
        self.fenced_in_block: Any = None

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
