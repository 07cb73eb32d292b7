"""``burt-numba plan``: sizes on the command line become the keywords of ``burt_numba.plan``."""

from __future__ import annotations

from collections.abc import Sequence

from burt_numba.cli import driver
from burt_numba.cli.errors import UsageError


def _value(text: str) -> int | float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise UsageError(f"--compute-capability: expected MAJOR.MINOR as in 9.0, got {text}")
    return int(major), int(minor)


def parse_dims(words: Sequence[str]) -> dict[str, object]:
    """Return the keywords for ``--name value``, ``--name=value`` and, for a switch, ``--name`` alone."""
    dims: dict[str, object] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--") or word == "--":
            raise UsageError(f"expected --name value pairs, got {word!r}")
        option, equals, text = word.partition("=")
        name = option[2:].replace("-", "_")
        if name in dims:
            raise UsageError(f"{option}: given twice")
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                dims[name] = True
                continue
            text = remaining.pop(0)
        dims[name] = _capability(text) if name == "compute_capability" else _value(text)
    return dims


def plan(operation: str, words: Sequence[str]) -> int:
    dims = parse_dims(words)
    driver.choose_target()
    import burt_numba

    try:
        planned = burt_numba.plan(operation, **dims)  # type: ignore[arg-type]
    except (TypeError, ValueError, MemoryError) as error:
        # Nothing runs here: whatever is refused are the user's sizes, by name or by value.
        raise UsageError(str(error).removeprefix("plan: ")) from None
    print(planned)
    return 0
