"""Where in the source of a kernel something happened."""

from __future__ import annotations

import linecache
import re
from typing import Any

_PACKAGE = __name__.rpartition(".")[0]


def call_chain(frame: Any) -> tuple[tuple[Any, int], ...]:
    """(code, line) of each call in a kernel that led to a frame of the simulator, the kernel's own last."""
    while frame is not None and is_simulator(frame):
        frame = frame.f_back
    chain = []
    while frame is not None and not is_simulator(frame):
        chain.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(chain)


def is_simulator(frame: Any) -> bool:
    """Whether a frame runs code of this package."""
    name = frame.f_globals.get("__name__", "")
    return name == _PACKAGE or name.startswith(_PACKAGE + ".")


def describe_chain(chain: tuple[tuple[Any, int], ...]) -> str:
    """The innermost line with its text, then the lines it was called from."""
    if not chain:
        return "unknown"
    code, line = chain[0]
    text = linecache.getline(code.co_filename, line).strip()
    callers = "".join(f", called from {code.co_filename}:{line}" for code, line in chain[1:])
    return f"{chain[0][0].co_filename}:{line}: {text}{callers}"


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
