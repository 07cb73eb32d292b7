"""Answers to "what would be launched, and what does it take" without launching."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from burt_numba.host.checks import FLOATING, require_count
from burt_numba.host.errors import BurtDimensionError


@dataclass(frozen=True)
class LaunchPlan:
    """The geometry of one launch."""

    kernel: str
    grid: tuple[int, ...]
    block: int
    shared_bytes: int
    cluster: int = 1
    group: int = 1
    """Blocks that wait for one another outside a cluster: all of the grid are resident at once."""

    def __str__(self) -> str:
        together = f", clusters of {self.cluster}" if self.cluster > 1 else ""
        together += f", groups of {self.group}" if self.group > 1 else ""
        return f"{self.kernel}: grid {self.grid}, block {self.block}, {self.shared_bytes:,} shared bytes{together}"


@dataclass(frozen=True)
class Plan:
    """The documented launch of a function, the launches that it really makes, and the memory it touches (bytes).

    ``temporary_bytes`` is what the documented layout counts beside input and output; no launch allocates anything. Of
    memories it holds as well what the workspace of a stream takes, which is allocated once and kept.
    """

    name: str
    documented: LaunchPlan | None
    """None where no launch is documented."""
    input_bytes: int
    output_bytes: int
    temporary_bytes: int
    launches: list[LaunchPlan] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [self.name]
        if self.documented is not None:
            lines.append(f"  documented  {self.documented}")
        lines += [f"  launched    {launch}" for launch in self.launches]
        sizes = (("input", self.input_bytes), ("output", self.output_bytes), ("temporary", self.temporary_bytes))
        lines.append("  bytes       " + ", ".join(f"{name} {size:,}" for name, size in sizes))
        return "\n".join(lines)


MOST_BLOCKS = 2**31 - 1
"""Of a grid, along x; the documented kernels stride over the rest."""

_MOST_ROWS = 2**40


def refuse_too_many(name: str, rows: int) -> None:
    """Raise for more rows than any memory holds."""
    if rows > _MOST_ROWS:
        raise BurtDimensionError(f"plan: {name}: expected at most 2**40 rows, got {rows}")


def whole_warps(threads: int) -> int:
    """Threads rounded up to whole warps."""
    return -(-threads // 32) * 32


def dimension(name: str, dims: dict[str, Any], key: str, lowest: int = 0, default: int | None = None) -> int:
    """Take a size out of ``dims``."""
    value = dims.pop(key, default)
    if value is None:
        raise BurtDimensionError(f"plan: {name}: {key} is missing")
    return require_count(f"plan: {name}", key, value, lowest)


def dtype_itemsize(name: str, dims: dict[str, Any]) -> int:
    """Take ``dtype`` out of ``dims``: its bytes."""
    given = dims.pop("dtype", "float32")
    dtype = given.__name__ if isinstance(given, type) else str(given)
    if dtype not in FLOATING:
        raise BurtDimensionError(f"plan: {name}: dtype: expected {' or '.join(FLOATING)}, got {dtype}")
    return 2 if dtype == "float16" else 4


def refuse_unknown(name: str, dims: dict[str, Any]) -> None:
    """Raise for what no plan of this function takes."""
    if dims:
        raise BurtDimensionError(f"plan: {name}: unexpected {', '.join(sorted(dims))}")
