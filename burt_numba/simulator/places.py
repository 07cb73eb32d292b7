"""Where in the source of a kernel something happened."""

from __future__ import annotations

import linecache
import re
from typing import Any

_PACKAGE = __name__.rpartition(".")[0]


class _Names(dict[str, bool]):
    """Of names of modules, whether they are of this package."""

    def __missing__(self, name: str) -> bool:
        self[name] = found = name == _PACKAGE or name.startswith(_PACKAGE + ".")
        return found


_of_simulator = _Names()


Chain = tuple[tuple[Any, int], ...]
"""(code, instruction) of calls: of an operation of the simulator, the innermost first."""


def call_chain(frame: Any) -> Chain:
    """The calls in a kernel that led to a frame of the simulator, the kernel's own last."""
    frame = _in_kernel(frame)
    chain = []
    while frame is not None and not is_simulator(frame):
        chain.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(chain)


def is_at_chain(frame: Any, chain: Chain) -> bool:
    """Whether calls on the same lines as those of a chain led to a frame of the simulator."""
    # Most often by the same instructions, which is quick to see.
    caller = _in_kernel(frame)
    for code, instruction in chain:
        if caller is None or caller.f_code is not code or caller.f_lasti != instruction:
            return _lines(call_chain(frame)) == _lines(chain)
        caller = caller.f_back
    return caller is None or is_simulator(caller)


def _in_kernel(frame: Any) -> Any:
    """The first caller of a frame of the simulator that is none."""
    known = _of_simulator
    while frame is not None and known[frame.f_globals.get("__name__", "")]:
        frame = frame.f_back
    return frame


def _lines(chain: Chain) -> list[tuple[Any, int]]:
    return [(code, line_of(code, instruction)) for code, instruction in chain]


def is_simulator(frame: Any) -> bool:
    """Whether a frame runs code of this package."""
    return _of_simulator[frame.f_globals.get("__name__", "")]


def describe_chain(chain: Chain) -> str:
    """The innermost line with its text, then the lines it was called from."""
    if not chain:
        return "unknown"
    (code, line), *calls = _lines(chain)
    text = linecache.getline(code.co_filename, line).strip()
    callers = "".join(f", called from {code.co_filename}:{line}" for code, line in calls)
    return f"{code.co_filename}:{line}: {text}{callers}"


def line_of(code: Any, instruction: int) -> int:
    """The source line of an instruction."""
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno


def describe_place(code: Any, instruction: int) -> str:
    line = line_of(code, instruction)
    return f"{code.co_filename}:{line}: {linecache.getline(code.co_filename, line).strip()}"


def assigned_name(filename: str, line: int) -> str | None:
    """The variable that a line of source assigns to."""
    match = re.match(r"\s*(\w+)\s*=[^=]", linecache.getline(filename, line))
    return None if match is None else match[1]


def index_text(index: Any) -> str:
    """An index as it stands between brackets."""
    return ", ".join(map(str, index)) if isinstance(index, tuple) else str(index)
