"""Stepping through one thread of a kernel with pdb."""

from __future__ import annotations

import bdb
import gc
import io
import os
import pdb
import re
import subprocess
import sys
import weakref
from pathlib import Path
from textwrap import dedent

import greenlet
import numpy as np
import pytest

if os.environ.get("BURT_NUMBA_TEST_TARGET") == "gpu":
    pytest.skip("tests the simulator, which a GPU run does not use", allow_module_level=True)

from burt_numba import simulator
from burt_numba.backend import cuda
from burt_numba.simulator import DivergenceError, RaceError, SimulatorError, break_at, checks, launch

FULL = 0xFFFFFFFF
ROOT = Path(__file__).resolve().parents[1]


@cuda.jit(device=True)
def twice(value):
    doubled = value + value
    return doubled


@cuda.jit
def total(values, result):
    partial = cuda.shared.array(64, np.float32)
    thread = cuda.threadIdx.x
    partial[thread] = twice(values[thread])
    cuda.syncthreads()
    if thread == 0:
        for i in range(64):
            result[0] += partial[i]


@cuda.jit
def scale(values):
    i = cuda.grid(1)
    values[i] *= 2


def run_total() -> float:
    result = np.zeros(1, np.float32)
    total[1, 64](np.arange(64, dtype=np.float32), result)
    return float(result[0])


def line(function, offset: int) -> int:
    return getattr(function, "py_func", function).__code__.co_firstlineno + offset


class Script:
    """A debugger that is given its commands, and what it wrote."""

    def __init__(self, *commands: str):
        self._output = io.StringIO()
        commands_in = io.StringIO("".join(f"{command}\n" for command in commands))
        self.debugger = pdb.Pdb(stdin=commands_in, stdout=self._output, nosigint=True, readrc=False)

    @property
    def output(self) -> str:
        return self._output.getvalue()

    def answers(self) -> list[str]:
        """What was written for each command, and at first."""
        return [text.strip() for text in self.output.split("(Pdb) ")]


class Walker(pdb.Pdb):
    """Steps to the end, or follows a plan, and notes each stop: thread, function, line within it."""

    def __init__(self, command: str = "set_step"):
        super().__init__(stdin=io.StringIO(), stdout=io.StringIO(), nosigint=True, readrc=False)
        self.command = command
        self.stops: list[tuple[object, str, int]] = []
        self.exceptions: list[type] = []

    def go_on(self, frame) -> None:
        getattr(self, self.command)(*(() if self.command == "set_step" else (frame,)))

    def user_call(self, frame, arguments) -> None:
        self.go_on(frame)

    def user_return(self, frame, value) -> None:
        self.go_on(frame)

    def user_line(self, frame) -> None:
        thread = greenlet.getcurrent()
        code = frame.f_code
        self.stops.append(
            ((*thread.block.index, *thread.threadIdx), code.co_name, frame.f_lineno - code.co_firstlineno)
        )
        self.go_on(frame)

    def user_exception(self, frame, exc_info) -> None:
        self.exceptions.append(exc_info[0])
        self.go_on(frame)


@pytest.fixture(autouse=True)
def tracing_is_as_before():
    """Whatever happened, nothing is left behind."""
    before = sys.gettrace(), greenlet.gettrace()
    yield
    assert (sys.gettrace(), greenlet.gettrace()) == before
    bdb.Breakpoint.clearBreakpoints()


# Where it stops ------------------------------------------------------------------------------------------------------


def test_stops_at_the_first_line_and_steps():
    script = Script("n", "n", "p thread", "p partial[:5]", "n", "p partial[:5]", "c")
    with break_at(block=0, thread=3, debugger=script.debugger):
        assert run_total() == 64 * 63
    first, second, third, thread, before, fourth, after, rest = script.answers()
    assert first.splitlines() == [
        f"> {__file__}({line(total, 2)})total()",
        "-> partial = cuda.shared.array(64, np.float32)",
    ]
    assert second.endswith("-> thread = cuda.threadIdx.x")
    assert third.endswith("-> partial[thread] = twice(values[thread])")
    assert thread == "3"
    assert before == "array([ 0.,  2.,  4., nan, nan], dtype=float32)"
    assert fourth.endswith("-> cuda.syncthreads()")
    assert after == "array([ 0.,  2.,  4.,  6., nan], dtype=float32)"
    assert rest == ""


def test_the_others_run_up_to_the_barrier():
    script = Script("n", "n", "n", "n", "p partial[62:]", "c")
    with break_at(thread=3, debugger=script.debugger):
        run_total()
    assert script.answers()[4].endswith("-> if thread == 0:")
    assert script.answers()[5] == "array([124., 126.], dtype=float32)"


def test_steps_into_device_functions_and_not_into_the_simulator():
    walker = Walker()
    with break_at(thread=63, debugger=walker):
        run_total()
    thread = (0, 0, 0, 63, 0, 0)
    assert walker.stops == [
        *((thread, "total", offset) for offset in (2, 3, 4)),
        *((thread, "twice", offset) for offset in (2, 3)),
        *((thread, "total", offset) for offset in (5, 6)),
    ]


def test_where_ends_at_the_kernel():
    script = Script("n", "n", "s", "w", "up", "up", "c")
    with break_at(thread=3, debugger=script.debugger):
        run_total()
    shown = [text for text in script.answers()[4].splitlines() if not text.startswith("->")]
    assert [text.rpartition("/")[2] for text in shown] == [
        f"test_simulator_stepping.py({line(total, 4)})total()",
        f"test_simulator_stepping.py({line(twice, 0)})twice()",
    ]
    assert script.answers()[6] == "*** Oldest frame"


def test_breakpoints_hold_for_the_one_thread():
    at = line(total, 6)
    script = Script(f"b {at}, partial[40] > 0", "c", "p thread, partial[5]", "c")
    with checks(), break_at(thread=3, debugger=script.debugger):
        run_total()
    assert script.output.count(f"({at})total()") == 1
    assert script.answers()[3] == "(3, np.float32(10.0))" if np.__version__ > "2" else "(3, 10.0)"


@pytest.mark.parametrize(
    ("block", "thread", "stopped"),
    [
        (1, 2, (1, 0, 0, 2, 0, 0)),
        ((1,), [2], (1, 0, 0, 2, 0, 0)),
        ((1, 1), (2, 1), (1, 1, 0, 2, 1, 0)),
        ((0, 1, 2), (3, 2, 1), (0, 1, 2, 3, 2, 1)),
        (np.int64(1), (np.int32(3), 2, 1), (1, 0, 0, 3, 2, 1)),
    ],
)
def test_positions(block, thread, stopped):
    def kernel():
        cuda.syncthreads()

    walker = Walker()
    with break_at(block, thread, debugger=walker):
        launch(kernel, (2, 2, 3), (4, 3, 2), ())
    assert [where for where, _, _ in walker.stops] == [stopped]


def test_the_first_thread_is_the_default():
    walker = Walker()
    with break_at(debugger=walker):
        scale[3, 5](np.ones(15))
    assert {where for where, _, _ in walker.stops} == {(0, 0, 0, 0, 0, 0)}


# What it waits for ---------------------------------------------------------------------------------------------------


def by_barrier():
    cuda.syncthreads()


def by_vote():
    cuda.syncthreads_or(1)


def by_warp():
    cuda.syncwarp()


def by_shuffle():
    cuda.shfl_xor_sync(FULL, 1, 1)


def by_activemask():
    cuda.activemask()


def by_nanosleep():
    cuda.nanosleep(100)


def by_grid():
    cuda.cg.this_grid().sync()


def by_cluster():
    simulator.cluster_barrier()


@pytest.mark.parametrize("command", ["set_step", "set_next"])
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(
    "wait",
    [by_barrier, by_vote, by_warp, by_shuffle, by_activemask, by_nanosleep, by_grid, by_cluster],
    ids=lambda wait: wait.__name__,
)
def test_control_comes_back_at_the_next_line(wait, checked, command):
    order = []

    def kernel():
        me = cuda.grid(1)
        order.append(me)
        wait()
        order.append(me)
        wait()
        order.append(me)

    def run():
        launch(kernel, 2, 32, (), cluster=2)

    run()
    expected = list(order)
    order.clear()
    walker = Walker(command)
    with break_at(block=1, thread=5, debugger=walker):
        if checked:
            with checks():
                run()
        else:
            run()
    assert order == expected
    lines = [offset for _, name, offset in walker.stops if name == "kernel"]
    assert lines == [1, 2, 3, 4, 5, 6]
    assert {where for where, _, _ in walker.stops} == {(1, 0, 0, 5, 0, 0)}
    waits = [name for _, name, _ in walker.stops if name != "kernel"]
    assert waits == ([wait.__name__] * 2 if command == "set_step" else [])


def test_the_others_are_not_traced():
    seen = []

    def kernel():
        seen.append(sys.gettrace() is not None)
        cuda.syncthreads()
        seen.append(sys.gettrace() is not None)

    with break_at(thread=2, debugger=Walker()):
        launch(kernel, 2, 5, ())
    stepped = [thread == 2 for thread in range(5)]
    assert seen == stepped * 2 + [False] * 10


def test_a_kernel_called_from_a_kernel_is_stepped_into():
    @cuda.jit
    def outer(values):
        scale(values)

    walker = Walker()
    with break_at(debugger=walker):
        outer[1, 1](np.ones(1))
    assert [name for _, name, _ in walker.stops] == ["outer", "scale", "scale"]


def test_code_that_the_simulator_calls_is_not_stepped_into():
    """An access of several elements of a checked array goes through functions of NumPy's that are Python."""

    def kernel(values):
        values[1:3] = 5.0
        values[0] = 1.0

    walker, values = Walker(), np.zeros(4)
    with checks(), break_at(debugger=walker):
        launch(kernel, 1, 1, (values,))
    assert walker.stops == [((0,) * 6, "kernel", 1), ((0,) * 6, "kernel", 2)]
    assert values.tolist() == [1.0, 5.0, 5.0, 0.0]


# Checked launches ----------------------------------------------------------------------------------------------------


@cuda.jit
def neighbours(values, result):
    partial = cuda.shared.array(32, np.float32)
    i = cuda.threadIdx.x
    partial[i] = values[i]
    cuda.syncthreads()
    result[i] = partial[i ^ 1]


def test_what_the_user_looks_at_is_no_access():
    looks = ["p partial", "p partial[31]", "p values[5]", "p result[7]", "!partial[4:].view('int32')[3]"]
    script = Script("n", "n", *looks, "n", *looks, "n", *looks, "c")
    result = np.zeros(32, np.float32)
    with checks(), break_at(thread=1, debugger=script.debugger):
        neighbours[1, 32](np.arange(32, dtype=np.float32), result)
    assert "***" not in script.output
    assert script.answers()[3].startswith("array([ 0., nan, nan")
    assert result.tolist() == [i ^ 1 for i in range(32)]


def test_a_value_set_at_the_prompt_counts_as_written():
    script = Script("n", "n", "!partial[2] = 7", "c")
    result = np.zeros(32, np.float32)

    def kernel(result):
        partial = cuda.shared.array(4, np.float32)
        i = cuda.threadIdx.x
        result[i] = partial[2]

    with checks(), break_at(debugger=script.debugger):
        launch(kernel, 1, 1, (result,))
    assert result[0] == 7


def test_a_fault_is_still_found():
    @cuda.jit
    def shifted(values):
        i = cuda.threadIdx.x
        values[i] = values[i + 1]

    script = Script("n", "n", "c")
    raises = pytest.raises(RaceError, match="race on array values")
    with raises, checks(), break_at(thread=3, debugger=script.debugger):
        shifted[1, 8](np.arange(9.0))


# Which launch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["scale", scale, scale[1, 1], scale.py_func])
def test_the_kernel_is_chosen(kernel):
    walker = Walker()
    with break_at(thread=3, kernel=kernel, debugger=walker):
        run_total()
        scale[1, 8](np.ones(8))
        run_total()
        scale[1, 4](np.ones(4))
    assert [name for _, name, _ in walker.stops] == ["scale"] * 4


def test_every_launch_is_the_default():
    walker = Walker("set_next")
    with break_at(thread=3, debugger=walker):
        run_total()
        scale[1, 8](np.ones(8))
    assert dict.fromkeys(name for _, name, _ in walker.stops) == {"total": None, "scale": None}


def test_a_function_of_launch_by_its_short_name():
    def kernel():
        pass

    walker = Walker()
    with break_at(kernel="kernel", debugger=walker):
        launch(kernel, 1, 1, ())
    assert len(walker.stops) == 1


def test_a_kernel_of_numbas_simulator():
    """One that was made before the simulator was installed."""
    from numba.cuda.simulator.kernel import FakeCUDAKernel

    kernel = FakeCUDAKernel(scale.py_func, device=False)
    walker = Walker()
    with break_at(kernel=kernel, debugger=walker):
        kernel[1, 1](np.ones(1))
    assert len(walker.stops) == 2


def test_nothing_stops_after_the_block():
    walker = Walker()
    with break_at(debugger=walker):
        scale[1, 1](np.ones(1))
    stops = len(walker.stops)
    scale[1, 1](np.ones(1))
    assert len(walker.stops) == stops
    assert type(walker) is Walker
    assert walker.botframe is None, "holds the frames of the launch"


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"thread": 64}, r"break_at: thread: \(64, 0, 0\) is outside the block of \(64, 1, 1\) that kernel total runs"),
        ({"thread": (0, 1)}, r"break_at: thread: \(0, 1, 0\) is outside the block of \(64, 1, 1\)"),
        ({"block": 1}, r"break_at: block: \(1, 0, 0\) is outside the grid of \(1, 1, 1\) that kernel total runs in"),
    ],
)
def test_a_place_outside_the_launch(where, message):
    values, result = np.ones(64, np.float32), np.zeros(1, np.float32)
    with pytest.raises(ValueError, match=message), break_at(**where, debugger=Walker()):
        total[1, 64](values, result)
    assert result[0] == 0, "ran"


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ({"thread": -1}, ValueError, "break_at: thread: expected coordinates of at least 0, got -1"),
        ({"block": ()}, ValueError, r"break_at: block: expected 1 to 3 coordinates, got \(\)"),
        ({"block": (1, 2, 3, 4)}, ValueError, "break_at: block: expected 1 to 3 coordinates"),
        ({"thread": 1.5}, TypeError, r"break_at: thread: expected integers, got 1\.5"),
        ({"thread": (0, True)}, TypeError, r"break_at: thread: expected integers, got \(0, True\)"),
        ({"kernel": 3}, TypeError, "break_at: kernel: expected a kernel or its name, got 3"),
    ],
)
def test_mistakes(where, error, message):
    with pytest.raises(error, match=message), break_at(**where):
        pass


def test_no_launch():
    with pytest.raises(SimulatorError, match=r"^break_at: no launch to stop in; nothing was launched$"), break_at():
        pass


@pytest.mark.parametrize("kernel", [total, "total"])
def test_another_launch(kernel):
    message = r"^break_at: kernel total was not launched; launched: scale$"
    with pytest.raises(SimulatorError, match=message), break_at(kernel=kernel):
        scale[1, 1](np.ones(1))
        scale[1, 1](np.ones(1))


def test_an_error_comes_before_the_missing_launch():
    with pytest.raises(ZeroDivisionError), break_at():
        _ = 1 / 0


def test_one_at_a_time():
    with break_at(debugger=Walker()):
        with pytest.raises(SimulatorError, match="break_at: one thread at a time"), break_at():
            pass
        run_total()


# How it ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commands", [("q",), ("n", "n", "n", "n", "q"), ()], ids=["at once", "later", "end of input"])
def test_quitting_ends_the_launch(commands):
    ended = []

    def kernel():
        try:
            cuda.syncthreads()
            cuda.syncthreads()
        finally:
            ended.append(cuda.threadIdx.x)

    with pytest.raises(bdb.BdbQuit), break_at(thread=2, debugger=Script(*commands).debugger):
        launch(kernel, 1, 4, ())
    assert sorted(ended) == ([0, 1] if commands == ("q",) or not commands else [0, 1, 2, 3])
    assert run_total() == 64 * 63


@pytest.mark.no_cuda_checks("an index past the end on purpose")
def test_an_error_of_the_stepped_thread():
    def kernel(values):
        i = cuda.threadIdx.x
        values[i + 2] = 1

    walker = Walker()
    with pytest.raises(IndexError), break_at(thread=1, debugger=walker):
        launch(kernel, 1, 2, (np.zeros(3),))
    assert walker.exceptions == [IndexError]


def test_an_error_of_another_thread_does_not_stop_in_this_one():
    def kernel():
        if cuda.threadIdx.x == 3:
            raise KeyError("three")
        try:
            cuda.syncthreads()
        finally:
            cuda.syncthreads()

    walker = Walker()
    with pytest.raises(KeyError, match="three"), break_at(thread=1, debugger=walker):
        launch(kernel, 1, 4, ())
    assert walker.exceptions == []
    assert [offset for _, _, offset in walker.stops] == [1, 3, 4]


def test_threads_that_cannot_meet():
    def kernel():
        if cuda.threadIdx.x:
            cuda.syncthreads()

    walker = Walker()
    message = "threads 1-3: waiting in syncthreads"
    with pytest.raises(DivergenceError, match=message), break_at(thread=1, debugger=walker):
        launch(kernel, 1, 4, ())
    assert [offset for _, _, offset in walker.stops] == [1, 2]


def test_nothing_is_kept_alive():
    values = np.ones(4)
    alive = weakref.ref(values)
    script = Script("n", "p values", "c")
    with break_at(debugger=script.debugger):
        scale[1, 4](values)
    # A Pdb keeps the variables that it showed last.
    del values, script
    gc.collect()
    assert alive() is None


# Tracing from outside ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commands", [["n"] * 9, ["n", "n", "c"], ["n", "n", "n", "n", "c"]], ids=len)
def test_an_outer_trace_function_sees_the_other_threads(commands):
    """A coverage tool or a debugger of the whole program goes on where the debugger of the thread does not look."""
    lines = []

    def outer(frame, event, arg):
        if frame.f_code.co_name != "kernel":
            return None
        if event == "line":
            lines.append((cuda.threadIdx.x, frame.f_lineno - frame.f_code.co_firstlineno))
        return outer

    def kernel():
        cuda.syncthreads()
        cuda.syncwarp()
        cuda.syncwarp()
        pass

    script = Script(*commands)
    before = sys.gettrace()
    sys.settrace(outer)
    try:
        with break_at(thread=1, debugger=script.debugger):
            launch(kernel, 1, 3, ())
        assert sys.gettrace() is outer
        seen = sorted(lines)
        lines.clear()
        launch(kernel, 1, 1, ())
    finally:
        sys.settrace(before)
    assert seen == [(thread, offset) for thread in (0, 2) for offset in (1, 2, 3, 4)]
    assert lines == [(0, offset) for offset in (1, 2, 3, 4)]


def test_a_switch_callback_from_outside_is_called_and_restored():
    calls = []

    def outer(event, greenlets):
        calls.append(event)

    before = greenlet.settrace(outer)
    try:
        with break_at(thread=1, debugger=Walker()):
            launch(by_barrier, 1, 3, ())
        assert greenlet.gettrace() is outer
        stepped = len(calls)
        calls.clear()
        launch(by_barrier, 1, 3, ())
        assert stepped == len(calls) > 0
    finally:
        greenlet.settrace(before)


def test_nothing_is_traced_without_it():
    before = sys.gettrace(), greenlet.gettrace()
    seen = []

    def kernel():
        seen.append((sys.gettrace(), greenlet.gettrace()) == before)
        seen.append(greenlet.getcurrent().launch.function is kernel)

    launch(kernel, 1, 2, ())
    assert seen == [True] * 4


# A terminal ----------------------------------------------------------------------------------------------------------

PROGRAM = """\
import numpy as np
from burt_numba import simulator
from burt_numba.backend import cuda


@cuda.jit
def double(values):
    i = cuda.grid(1)
    values[i] *= 2


values = np.ones(64)
with simulator.break_at(block=1, thread=(3, 0, 0)):
    double[2, 32](values)
print("sum", values.sum())
"""


def run_program(folder, name: str, source: str, commands: str):
    (folder / name).write_text(source)
    return subprocess.run(
        [sys.executable, name],
        input=commands,
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "HOME": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_default_debugger_reads_standard_input(tmp_path):
    done = run_program(tmp_path, "program.py", PROGRAM, "n\np i\nc\n")
    assert done.returncode == 0, done.stderr
    assert "(Pdb) 35" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("sum 128.0")


def test_quitting_the_default_debugger_ends_the_program(tmp_path):
    done = run_program(tmp_path, "program.py", PROGRAM, "n\nq\n")
    assert done.returncode == 1
    assert "bdb.BdbQuit" in done.stderr
    assert "sum" not in done.stdout


@pytest.mark.skipif(np.__version__ < "2", reason="NumPy 1 shows a float32 without its type")
def test_the_session_in_the_documents(tmp_path):
    page = (ROOT / "docs" / "debugging.md").read_text()
    (program,) = re.findall(r"`sums\.py`:\n\n```python\n(.*?)```", page, re.DOTALL)
    (session,) = re.findall(r"^    > sums\.py\(9\).*?\n\n", page, re.DOTALL | re.MULTILINE)
    session = dedent(session).rstrip()
    commands = re.findall(r"^\(Pdb\) (.*)$", session, re.MULTILINE)
    done = run_program(tmp_path, "sums.py", program, "".join(f"{command}\n" for command in commands))
    assert done.returncode == 0, done.stderr
    first, *answers = done.stdout.replace(f"{tmp_path}{os.sep}", "").split("(Pdb) ")
    shown = first + "".join(f"(Pdb) {command}\n{answer}" for command, answer in zip(commands, answers, strict=True))
    assert shown.rstrip() == session
