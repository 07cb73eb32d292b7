"""Step through one thread of a kernel with pdb.

``sys.settrace`` holds for a thread of the host, and all threads of a launch run in one. So the debugger's trace
function is put aside whenever the stepped thread switches to another, and put back when it goes on.
"""

from __future__ import annotations

import contextvars
import numbers
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import greenlet

from burt_numba.simulator import installation
from burt_numba.simulator.checking import Monitor
from burt_numba.simulator.errors import SimulatorError
from burt_numba.simulator.places import is_simulator

if TYPE_CHECKING:
    import pdb

    from burt_numba.simulator.scheduler import Launch

Position = tuple[int, int, int]


@contextmanager
def break_at(
    block: int | tuple[int, ...] = 0,
    thread: int | tuple[int, ...] = 0,
    *,
    kernel: Any = None,
    debugger: pdb.Pdb | None = None,
) -> Iterator[None]:
    """Stop in the debugger at the first line of a kernel, in one thread of one block.

    The debugger sees that thread alone. The others wait, and run unseen when it waits for them: at a barrier, a warp
    operation, a ``nanosleep``. Code of the simulator is not stepped into. Looking at an array at the prompt is no
    access of the thread: `checks` do not see it.

    Parameters
    ----------
    block, thread : int or tuple of 1 to 3 ints
        The position of the block in the grid, and of the thread in the block.
    kernel : str or kernel, optional
        The launches to stop in, by the name of the kernel or the kernel itself. Default: every launch of the calling
        thread.
    debugger : pdb.Pdb, optional
        Default: a new one, on standard input and output.

    Raises
    ------
    ValueError
        Before a launch that has no such block or thread.
    SimulatorError
        At the end of the block when none of its launches was the one to stop in.
    bdb.BdbQuit
        From the launch, when the user quits: as after ``breakpoint()``. The threads of the launch are ended.

    Examples
    --------
    >>> import io, pdb
    >>> import numpy as np
    >>> from burt_numba import simulator
    >>> from burt_numba.backend import cuda
    >>> @cuda.jit
    ... def double(values):
    ...     i = cuda.grid(1)
    ...     values[i] *= 2
    >>> output = io.StringIO()
    >>> debugger = pdb.Pdb(stdin=io.StringIO("next\\np i\\ncontinue\\n"), stdout=output)
    >>> with simulator.break_at(block=1, thread=3, debugger=debugger):
    ...     double[2, 32](np.ones(64))
    >>> output.getvalue().split("(Pdb) ")[2].strip()
    '35'
    """
    if not (kernel is None or isinstance(kernel, str) or callable(kernel)):
        raise TypeError(f"break_at: kernel: expected a kernel or its name, got {kernel!r}")
    if _current.get() is not None:
        raise SimulatorError("break_at: one thread at a time: this is inside another break_at")
    installation.require("break_at")
    if debugger is None:
        import pdb

        # Otherwise `continue` leaves pdb's handler of Ctrl-C behind.
        debugger = pdb.Pdb(nosigint=True)
    stop = Stop(_position(block, "block"), _position(thread, "thread"), kernel, debugger)
    token = _current.set(stop)
    try:
        yield
    finally:
        _current.reset(token)
    if not stop.matched:
        raise SimulatorError(f"break_at: {stop.missed()}")


class Stop:
    """Where to stop, and in which launches."""

    def __init__(self, block: Position, thread: Position, kernel: Any, debugger: pdb.Pdb):
        self.block = block
        self.thread = thread
        self.kernel = kernel
        self.debugger = debugger
        self.matched = False
        self._others: list[str] = []

    def stepped(self, launch: Launch) -> Callable[..., None]:
        """The function of a launch, which stops where it should if this is a launch to stop in."""
        function = launch.function
        if not self._is_wanted(function, launch.name):
            self._others.append(launch.name)
            return function
        for what, wanted, extent in (("block", self.block, launch.grid_dim), ("thread", self.thread, launch.block_dim)):
            if not all(place < size for place, size in zip(wanted, extent, strict=True)):
                holder = "grid" if what == "block" else "block"
                raise ValueError(
                    f"break_at: {what}: {wanted} is outside the {holder} of {extent} that kernel {launch.name} runs in"
                )
        self.matched = True
        block, position, debugger = self.block, self.thread, self.debugger

        def stepped(*args: Any) -> Any:
            thread: Any = greenlet.getcurrent()
            if tuple(thread.threadIdx) == position and tuple(thread.block.index) == block:
                return _step_through(function, args, debugger, launch.monitor)
            return function(*args)

        return stepped

    def _is_wanted(self, function: Any, name: str) -> bool:
        kernel = self.kernel
        if isinstance(kernel, str):
            return kernel in (name, getattr(function, "__name__", None))
        # A kernel made before the simulator was installed has its function under another name.
        return kernel is None or getattr(kernel, "py_func", getattr(kernel, "fn", kernel)) is function

    def missed(self) -> str:
        """Why nothing stopped."""
        launched = f"launched: {', '.join(dict.fromkeys(self._others))}" if self._others else "nothing was launched"
        if self.kernel is None:
            return f"no launch to stop in; {launched}"
        return f"kernel {getattr(self.kernel, '__name__', self.kernel)} was not launched; {launched}"


_current: contextvars.ContextVar[Stop | None] = contextvars.ContextVar("burt_numba_stop", default=None)


def current() -> Stop | None:
    """Where launches of the calling context stop."""
    return _current.get()


def _position(value: Any, what: str) -> Position:
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(given) <= 3:
        raise ValueError(f"break_at: {what}: expected 1 to 3 coordinates, got {value!r}")
    for place in given:
        if not isinstance(place, numbers.Integral) or isinstance(place, bool):
            raise TypeError(f"break_at: {what}: expected integers, got {value!r}")
        if place < 0:
            raise ValueError(f"break_at: {what}: expected coordinates of at least 0, got {value!r}")
    x, y, z = (*(int(place) for place in given), 0, 0)[:3]
    return x, y, z


def _step_through(function: Callable[..., None], args: tuple[Any, ...], debugger: Any, monitor: Monitor | None) -> Any:
    """Run a kernel's function in this greenlet under the debugger, and every other greenlet without it."""
    me = greenlet.getcurrent()
    frame = sys._getframe()
    outside, outside_here = sys.gettrace(), frame.f_trace
    aside: Any = None

    def switched(event: str, greenlets: tuple[Any, Any]) -> None:
        nonlocal aside
        origin, target = greenlets
        if origin is me:
            aside = sys.gettrace()
            sys.settrace(outside)
        elif target is me and event == "switch":
            # After a "throw" this thread only unwinds: the launch is over.
            sys.settrace(aside)
        if others is not None:
            others(event, greenlets)

    others = greenlet.gettrace()
    plain = type(debugger)
    debugger.__class__ = type(plain.__name__, (_SteppedThread, plain), {"monitor": monitor, "outside": outside})
    debugger.reset()
    greenlet.settrace(switched)
    try:
        sys.settrace(debugger.trace_dispatch)
        return function(*args)
    finally:
        # The debugger traces the caller of a function that it steps out of.
        frame.f_trace = outside_here
        sys.settrace(outside)
        greenlet.settrace(others)
        debugger.__class__ = plain
        # Lets go of the frames.
        debugger.reset()


class _SteppedThread:
    """What a debugger does differently in a kernel; in front of the class that it has."""

    monitor: Monitor | None
    outside: Any

    def trace_dispatch(self, frame: Any, event: str, arg: Any) -> Any:
        if self.monitor is None:
            return super().trace_dispatch(frame, event, arg)  # type: ignore[misc]
        # What the user looks at, or a condition of a breakpoint, is no access of the thread.
        self.monitor.__class__ = _BlindMonitor
        try:
            return super().trace_dispatch(frame, event, arg)  # type: ignore[misc]
        finally:
            self.monitor.__class__ = Monitor

    def set_continue(self) -> None:
        super().set_continue()  # type: ignore[misc]
        if self.outside is not None and sys.gettrace() is None:
            # From Python 3.12 on, tracing that is turned off and on again sees no more lines of frames that were
            # suspended: those of the other threads, for the trace function from outside.
            sys.settrace(_trace_nothing)

    def stop_here(self, frame: Any) -> bool:
        return super().stop_here(frame) and not _is_simulator_at_work(frame)  # type: ignore[misc]

    def get_stack(self, frame: Any, traceback: Any) -> Any:
        stack, place = super().get_stack(frame, traceback)  # type: ignore[misc]
        hidden = sum(is_simulator(frame) for frame, _ in stack[:1])
        return stack[hidden:], place - hidden


def _trace_nothing(frame: Any, event: str, arg: Any) -> None:
    return None


class _BlindMonitor(Monitor):
    """The monitor of a checked launch while the user looks around."""

    def read(self, *access: Any) -> None:
        pass

    def write(self, *access: Any) -> None:
        pass

    def atomic(self, *access: Any) -> None:
        pass

    def report_unwritten(self, *access: Any) -> None:
        pass


_PACKAGE = __name__.rpartition(".")[0]
# Hands calls of kernels from kernels on to the kernel's function, which is stepped into.
_BRIDGE = f"{_PACKAGE}.numba_bridge"


def _is_simulator_at_work(frame: Any) -> bool:
    """Whether a frame is the simulator's, or of something that the simulator called (as NumPy) below the kernel."""
    if is_simulator(frame):
        return True
    caller = frame.f_back
    while caller is not None and caller.f_code is not _step_through.__code__:
        if is_simulator(caller) and caller.f_globals.get("__name__") != _BRIDGE:
            return True
        caller = caller.f_back
    return False
