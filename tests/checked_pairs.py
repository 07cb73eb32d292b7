"""Pairs of kernels for the tests of checked launches: a wrong one, then a right one of the same arguments.

What must be reported of the wrong one stands in its decorator: the error, the array with the index, the threads and
the source lines, which are those that end in `# [a]`, `# [b]`, ... The right one must pass under all checks.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support import poisoned

from burt_numba import simulator
from burt_numba.backend import cuda
from burt_numba.simulator import DivergenceError, OutOfBoundsError, RaceError, UninitializedReadError

SWITCHES = {
    RaceError: "races",
    UninitializedReadError: "uninitialized",
    OutOfBoundsError: "bounds",
    DivergenceError: "barriers",
}


def ramp(*shape, dtype=np.float32):
    """1, 2, 3, ..."""
    return np.arange(1, np.prod(shape, dtype=int) + 1).astype(dtype).reshape(shape)


RAMP = ramp(32)


@dataclass
class Pair:
    """A wrong kernel, what is reported of it, and a right one."""

    wrong: Any
    error: type[BaseException]
    found: str = ""
    """The variable or parameter, with the index where it is an element; several names with | between them."""
    at: tuple = ()
    """(marker of the line, thread, block) of every access that is named; block 0 where it is left out."""
    says: tuple[str, ...] = ()
    """Patterns that the message contains."""
    lines: str = ""
    """Markers of the lines that are named, where `at` does not say."""
    callers: str = ""
    """Markers of the lines that may be named too, as those from which a device function was called."""
    functions: tuple = ()
    """Other functions that have markers."""
    expected: Any = None
    """Of the right kernel, in the last argument."""
    shapes: tuple = (32, 32)
    """Of the arguments: a ramp, and what is to be filled."""
    arguments: Callable[[], tuple] | None = None
    """Where they are others than these two."""
    grid: Any = 1
    block: Any = 32
    shared_bytes: int = 0
    cluster: int = 1
    right: Any = None


class Pairs(list[Pair]):
    """The pairs of a file: `wrong` decorates the first kernel of each, `right` the second one, which follows."""

    def wrong(self, error: type[BaseException], *facts: Any, **more: Any) -> Callable:
        def decorate(function):
            self.append(Pair(self._new(function), error, *facts, **more))
            return self[-1].wrong

        return decorate

    def right(self, function):
        self[-1].right = self._new(function)
        return self[-1].right

    def _new(self, function):
        """A name that is pasted by mistake would hide the first kernel that has it."""
        names = [kernel.__name__ for pair in self for kernel in (pair.wrong, pair.right) if kernel is not None]
        assert function.__name__ not in names, function.__name__
        return cuda.jit(function)

    def each(self, *errors: type[BaseException]):
        """The pairs, or those with one of these errors, as a parameter."""
        chosen = [pair for pair in self if not errors or pair.error in errors]
        return pytest.mark.parametrize("pair", chosen, ids=[pair.wrong.__name__ for pair in chosen])

    def tests(self):
        """The two tests of every pair of a file, for its end: of the wrong kernels, and of the right ones."""

        @self.each()
        @pytest.mark.parametrize("alone", [False, True], ids=["all checks", "one check"])
        def test_wrong_kernel(pair, alone):
            assert_wrong(pair, alone)

        @self.each()
        def test_right_kernel(pair):
            assert_right(pair)

        return test_wrong_kernel, test_right_kernel


def run(pair: Pair, kernel: Any) -> np.ndarray:
    """Launch one of the two kernels; the last argument."""
    if pair.arguments is not None:
        arguments = pair.arguments()
    else:
        arguments = (ramp(*np.atleast_1d(pair.shapes[0])), poisoned(pair.shapes[1]))
    if pair.cluster > 1:
        simulator.launch(kernel.py_func, pair.grid, pair.block, arguments, cluster=pair.cluster)
    else:
        kernel[pair.grid, pair.block, 0, pair.shared_bytes](*arguments)
    return arguments[-1]


def assert_wrong(pair: Pair, alone: bool) -> None:
    """The wrong kernel is reported, by one check alone too, and leaves nothing behind that the right one meets."""
    switches = {switch: error is pair.error for error, switch in SWITCHES.items()} if alone else {}
    with simulator.checks(**switches):
        with pytest.raises(pair.error) as caught:
            run(pair, pair.wrong)
        result = run(pair, pair.right)
    assert_reported(pair, caught.value)
    np.testing.assert_array_equal(result, np.asarray(pair.expected, result.dtype))


def assert_right(pair: Pair) -> None:
    """The right kernel passes under all checks, with the result that it has without them."""
    unchecked = run(pair, pair.right)
    with simulator.checks():
        checked = run(pair, pair.right)
    np.testing.assert_array_equal(checked, np.asarray(pair.expected, checked.dtype))
    assert checked.tobytes() == unchecked.tobytes()


# What a message says ------------------------------------------------------------------------------------------------

PLACE = rf"({re.escape(os.path.dirname(__file__))}/\w+\.py):(\d+)"


def facts(error: BaseException) -> str:
    """The message without the text of the source lines in it, which repeats names and indices.

    Python 3.10 has no notes, so that the place of the thread that raised stands in front.
    """
    message = re.sub(r"^in kernel .*?, block \([^)]*\), thread \([^)]*\): ", "", str(error))
    return re.sub(rf"{PLACE}: .*?(?=, called from|$)", r"\1:\2", message, flags=re.MULTILINE)


def accesses(message: str) -> set[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(line, thread, block) of every access that a message names."""
    return {
        (int(line), tuple(map(int, thread.split(","))), tuple(map(int, block.split(","))))
        for block, thread, _, line in re.findall(rf"block \(([^)]*)\), thread \(([^)]*)\).*?{PLACE}", message)
    }


def markers(*kernels) -> dict[str, int]:
    """The line of every marker in the source of kernels and device functions."""
    found: dict[str, int] = {}
    for kernel in kernels:
        lines, first = inspect.getsourcelines(kernel.py_func)
        for line, text in enumerate(lines, first):
            match = re.search(r"# \[(\w)\]$", text.rstrip())
            if match:
                assert match[1] not in found, f"line {line}: the marker {match[1]} is there twice"
                found[match[1]] = line
    return found


def three(position: Any = 0) -> tuple[int, ...]:
    given = position if isinstance(position, tuple) else (position,)
    return (*given, 0, 0)[:3]


def assert_reported(pair: Pair, error: BaseException) -> None:
    """The message names what it should, and no other line."""
    assert type(error) is pair.error, error
    message = facts(error)
    line_of = markers(pair.wrong, *pair.functions)
    names = "|".join(map(re.escape, pair.found.split("|")))
    assert re.search(rf"(?<!\w)(?:{names})(?!\w)", message), f"no {pair.found} in: {message}"
    for pattern in pair.says:
        assert re.search(pattern, message), f"no {pattern} in: {message}"
    if pair.at:
        expected = {(line_of[marker], three(thread), three(*block)) for marker, thread, *block in pair.at}
        assert accesses(message) == expected, message
    required = {line_of[marker] for marker in pair.lines} | {line_of[access[0]] for access in pair.at}
    allowed = required | {line_of[marker] for marker in pair.callers}
    named = {(path, int(line)) for path, line in re.findall(PLACE, message)}
    assert {path for path, _ in named} <= {pair.wrong.py_func.__code__.co_filename}, message
    assert required <= {line for _, line in named} <= allowed, message
