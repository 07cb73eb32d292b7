"""Tables on stdout and progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

# Columns of a table that is not written to a terminal: wide enough that no figure is cut.
_PIPED_WIDTH = 140


def _show(title: str, drawn: Table) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)
    with console.capture() as captured:
        console.print(title, style="bold", soft_wrap=True, markup=False)
        console.print(drawn)
    # rich fills every line up to the width of its table.
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        drawn.add_column(column)
    for row in rows:
        drawn.add_row(*row)
    _show(title, drawn)


def pairs(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one pair a line."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    drawn.add_column(no_wrap=True)
    drawn.add_column()
    for name, value in rows:
        drawn.add_row(name, value)
    _show(title, drawn)


def progress() -> Progress:
    """Return a progress display for a ``with`` statement; it shows nothing when stderr is no terminal."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
