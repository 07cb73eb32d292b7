"""One line of CSV a case, with everything needed to read it later, and the same lines as a table."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import burt_numba
from burt_numba.cli import driver

ROOT = Path(__file__).resolve().parents[1]
TABLE_WIDTH = 150


@dataclass
class Record:
    """A line of the CSV; the columns are these fields and those of `Environment`."""

    kind: str
    """"gpu" (graph replays), "host" (host time a call) or "first_call"."""
    op: str
    case: str
    dtype: str
    variant: str
    data: str = ""
    """"rotated" (no input in the cache), "cached", or "fresh" (in place, inputs restored before each replay)."""
    median_us: float | None = None
    p10: float | None = None
    p90: float | None = None
    gb_s: float | None = None
    tflop_s: float | None = None
    copy_share: float | None = None
    """Of the copy ceiling measured in the same run."""
    copy_us: float | None = None
    """A copy of the same bytes."""
    eager_us: float | None = None
    compiled_us: float | None = None
    plain_us: float | None = None
    limit_us: float | None = None
    limit: str = ""
    within: str = ""
    """PASS, OVER, WRONG (no speed is reported) or FAILED; empty where no limit is asked."""
    note: str = ""
    first_call_s: float | None = None
    """Compiling or loading, and the first launch; no part of the times above."""
    compile_s: float | None = None
    """torch.compile's own, of the comparison."""
    ceiling_gb_s: float | None = None
    calls: int | None = None
    repeats: int | None = None


@dataclass(frozen=True)
class Environment:
    """What the figures were measured with."""

    gpu: str
    driver: str
    python: str
    numba: str
    numba_cuda: str
    numpy: str
    torch: str
    cupy: str
    burt_numba: str
    commit: str
    date: str

    @classmethod
    def here(cls) -> Environment:
        devices = driver.devices()
        return cls(
            gpu=devices[0].name if devices else "",
            driver=driver.driver_version() or "",
            python=platform.python_version(),
            numba=_version("numba"),
            numba_cuda=_version("numba-cuda"),
            numpy=_version("numpy"),
            torch=_version("torch"),
            cupy=_version("cupy-cuda13x", "cupy-cuda12x", "cupy"),
            burt_numba=burt_numba.__version__,
            commit=_commit(),
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    def __str__(self) -> str:
        parts = [self.gpu or "no GPU", f"driver {self.driver or '-'}"]
        for name in ("python", "numba", "numba_cuda", "numpy", "torch", "cupy", "burt_numba", "commit"):
            parts.append(f"{name.replace('_', '-')} {getattr(self, name) or '-'}")
        return ", ".join(parts)


def _version(*names: str) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _commit() -> str:
    """Return BURT_NUMBA_COMMIT, else what git says (with + for uncommitted changes), else nothing."""
    named = os.environ.get("BURT_NUMBA_COMMIT")
    if named:
        return named
    commit = _git("rev-parse", "HEAD")
    return commit + "+" if commit and _git("status", "--porcelain") else commit


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


COLUMNS = [field.name for field in (*fields(Record), *fields(Environment))]


class CsvFile:
    """Appends to a file of results, one line as soon as a case is done."""

    def __init__(self, path: Path | None, environment: Environment) -> None:
        self.path = path
        self.environment = environment
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            with path.open(newline="") as file:
                header = next(csv.reader(file))
            if header != COLUMNS:
                raise SystemExit(f"perf: --csv: {path}: expected the columns of this version, got {','.join(header)}")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(COLUMNS)

    def append(self, record: Record) -> None:
        if self.path is None:
            return
        values = {**vars(record), **vars(self.environment)}
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([_plain_text(values[name]) for name in COLUMNS])


def _plain_text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def make_console() -> Console:
    """A terminal as wide as it is; a pipe or a log wide enough for the tables."""
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH, highlight=False)


def microseconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _verdict(record: Record) -> str:
    color = {"PASS": "green", "OVER": "yellow", "WRONG": "bold red", "FAILED": "bold red"}.get(record.within)
    return f"[{color}]{record.within}[/]" if color else record.within


def _limit(record: Record) -> str:
    if not record.limit or record.limit_us is None:
        return escape(record.limit)
    if record.limit.endswith(" us"):
        return microseconds(record.limit_us)
    return f"{microseconds(record.limit_us)} ({record.limit})"


def gpu_table(records: Sequence[Record], op: str) -> Table:
    table = Table(title=f"{op}: GPU time a call in µs, median over graph replays", title_justify="left")
    table.add_column("case")
    table.add_column("variant")
    for name in ("µs", "p10–p90", "GB/s", "of copy", "copy", "plain", "eager", "compiled"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("limit", justify="right")
    table.add_column("", no_wrap=True)
    for record in records:
        spread = "–" if record.p10 is None else f"{microseconds(record.p10)}–{microseconds(record.p90)}"
        table.add_row(
            f"{record.case} {'f16' if record.dtype == 'float16' else 'f32'}",
            record.variant if record.data == "rotated" else f"{record.variant} ({record.data})",
            microseconds(record.median_us),
            spread,
            "–" if record.gb_s is None else f"{record.gb_s:,.0f}",
            "–" if record.copy_share is None else f"{record.copy_share:.0%}",
            *(microseconds(v) for v in (record.copy_us, record.plain_us, record.eager_us, record.compiled_us)),
            _limit(record),
            _verdict(record),
        )
    return table


def host_table(records: Sequence[Record], title: str) -> Table:
    """Figures that have a time, a spread and perhaps a limit, and nothing else."""
    table = Table(title=title, title_justify="left")
    for name in ("operation", "case", "variant"):
        table.add_column(name)
    for name in ("µs", "p10", "p90", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for record in records:
        table.add_row(
            *(escape(text) for text in (record.op, record.case, record.variant)),
            *(microseconds(v) for v in (record.median_us, record.p10, record.p90)),
            _limit(record),
            _verdict(record),
        )
    return table


def show(records: Sequence[Record], console: Console) -> None:
    """Print a table for each kind, then what went wrong."""
    by_kind = {kind: [r for r in records if r.kind == kind] for kind in ("gpu", "host", "first_call")}
    for op in dict.fromkeys(record.op for record in by_kind["gpu"]):
        console.print(gpu_table([record for record in by_kind["gpu"] if record.op == op], op))
    if by_kind["gpu"]:
        console.print("of copy: GB/s over the copy ceiling. copy: torch's copy_ of as many bytes.", end=" ")
        console.print("plain: torch.softmax or SDPA, with no constraint or mask. limit: what is asked.")
    if by_kind["host"]:
        console.print(host_table(by_kind["host"], "Host time a call in µs: issued back to back, the device idle"))
    if by_kind["first_call"]:
        console.print(host_table(by_kind["first_call"], "First call in a fresh process, in µs"))
    for record in records:
        if record.within in ("WRONG", "FAILED"):
            name = f"{record.op} {record.case} {record.dtype} {record.variant}"
            console.print(f"[bold red]{record.within}[/] {escape(name)}: {escape(record.note)}")
    judged = [record.within for record in records if record.within]
    console.print(", ".join(f"{word} {judged.count(word)}" for word in ("PASS", "OVER", "WRONG", "FAILED")))
