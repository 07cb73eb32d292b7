"""Runs benchmark cases: correctness, then GPU time, then what it is held against.

For each case, in this order: inputs; the first call, timed apart; the check against the reference; the time by graph
replay, after one replay over poisoned outputs has shown that the graph does the work; a copy of the same bytes; the
plain softmax; eager PyTorch; torch.compile. A result that fails its check has no speed.
"""

from __future__ import annotations

import gc
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

import burt_numba
from perf.case import Case, Inputs, sets_to_rotate
from perf.checks import Wrong, all_finite, allocate
from perf.record import CsvFile, Record, microseconds
from perf.timing import Timing, cache_bytes, measure, measure_copy, measure_copy_ceiling, torch

IN_PLACE_CALLS = 10
"""Calls in a graph of an operation in place: each has its own buffer, filled anew before the replay."""


@dataclass
class Settings:
    compare: bool = True
    """Time eager PyTorch and torch.compile; the plain softmax is always timed where a limit leans on it."""
    compile: bool = True
    budget_s: float = 60.0
    """Seconds for one case; comparisons that would start later are left out, a compilation is broken off."""


class OutOfTime(BaseException):
    """The budget ended within a compilation. No Exception, so that the compiler does not wrap it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the main thread after so many seconds."""

    def stop(*_: object) -> None:
        raise OutOfTime

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@dataclass
class Runner:
    console: Console
    csv: CsvFile
    settings: Settings
    ceiling_gb_s: float = 0.0
    compiled: dict[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)
    given_up: set[tuple[Any, ...]] = field(default_factory=set)
    """Shapes that did not compile within a budget, so that no other case waits for them again."""

    def run(self, cases: Sequence[Case]) -> list[Record]:
        _compile_every_shape()
        self.ceiling_gb_s = measure_copy_ceiling()
        self.console.print(f"copy ceiling: {self.ceiling_gb_s:,.0f} GB/s, read and written")
        records = []
        for number, case in enumerate(cases, 1):
            started = time.perf_counter()
            record = self.run_guarded(case)
            record.ceiling_gb_s = self.ceiling_gb_s
            self.csv.append(record)
            records.append(record)
            gc.collect()
            torch.cuda.empty_cache()
            self.console.print(
                f"{number}/{len(cases)} {case.title}: {microseconds(record.median_us)} µs {record.within} "
                f"[{record.note}] {time.perf_counter() - started:.1f} s",
                markup=False,
            )
        return records

    def run_guarded(self, case: Case) -> Record:
        """One case; what it raises ends that case alone."""
        record = Record("gpu", case.op, case.name, case.dtype, case.variant, case.data)
        record.limit = "" if case.limit is None else str(case.limit)
        try:
            self.run_case(case, record)
        except Wrong as wrong:
            record.within, record.note = "WRONG", str(wrong)
        except Exception as error:
            record.within, record.note = "FAILED", f"{type(error).__name__}: {error}".splitlines()[0]
            self.console.print(traceback.format_exc(), markup=False)
        return record

    def run_case(self, case: Case, record: Record) -> None:
        deadline = time.perf_counter() + self.settings.budget_s
        bench = Bench(case)

        record.first_call_s = bench.first_call()
        record.note = case.check(bench.fresh, bench.outs[0])
        timing = bench.measure()
        record.median_us, record.p10, record.p90 = timing.median, timing.p10, timing.p90
        record.calls, record.repeats = timing.calls, timing.replays
        record.gb_s = case.bytes_moved / timing.median / 1e3
        record.tflop_s = case.flops / timing.median / 1e6
        record.copy_share = record.gb_s / self.ceiling_gb_s
        bench.release_outputs()

        record.copy_us = measure_copy(case.bytes_moved, bench.copy_sets(case.bytes_moved)).median
        wants = None if case.limit is None else case.limit.of
        whole_us = None
        if wants == "whole copy":
            whole_us = measure_copy(case.whole_bytes, bench.copy_sets(case.whole_bytes)).median
        if (self.settings.compare and case.has_plain) or wants == "plain":
            record.plain_us = bench.measure_plain().median
        if case.limit is not None:
            ceiling_us = case.bytes_moved / self.ceiling_gb_s / 1e3
            measured = {
                "ceiling": ceiling_us,
                "copy": record.copy_us,
                "whole copy": whole_us,
                "plain": record.plain_us,
            }
            record.limit_us = case.limit.microseconds(measured)
            if record.limit_us is not None:
                record.within = "PASS" if record.median_us <= record.limit_us else "OVER"

        if self.settings.compare:
            self.compare(case, bench, record, deadline)

    def compare(self, case: Case, bench: Bench, record: Record, deadline: float) -> None:
        """Eager PyTorch and torch.compile; a comparison that fails is named in the note and costs nothing else."""
        try:
            if time.perf_counter() >= deadline:
                record.note += "; no time left for comparisons"
                return
            record.eager_us = bench.measure_comparison(case.eager).median
            if self.settings.compile:
                self.compare_compiled(case, bench, record, deadline)
        except Exception as error:
            record.note += f"; comparison failed: {type(error).__name__}: {error}".splitlines()[0]
            self.console.print(traceback.format_exc(), markup=False)

    def compare_compiled(self, case: Case, bench: Bench, record: Record, deadline: float) -> None:
        # What torch.compile specialises on.
        key = (case.op, case.shape, case.dtype, tuple(None if a is None else a.dtype for a in bench.arguments(0)))
        left = deadline - time.perf_counter()
        if left <= 0 or key in self.given_up:
            record.note += "; not compiled in time"
            return
        if case.eager not in self.compiled:
            self.compiled[case.eager] = torch.compile(case.eager, dynamic=False)
        compiled = self.compiled[case.eager]
        started = time.perf_counter()
        try:
            with time_limit(left):
                compiled(*bench.arguments(0))
                torch.cuda.synchronize()
        except OutOfTime:
            self.given_up.add(key)
            torch._dynamo.reset()
            record.note += f"; torch.compile broken off after {time.perf_counter() - started:.0f} s"
            return
        record.compile_s = time.perf_counter() - started
        record.compiled_us = bench.measure_comparison(compiled).median


class Bench:
    """The buffers of one case, and the timed calls over them."""

    def __init__(self, case: Case, seed: int = 1) -> None:
        self.case = case
        self.fresh = case.make(seed)
        """Inputs that nothing is written to."""
        first = self.fresh[case.first]
        set_bytes = max(case.whole_bytes, case.set_bytes)
        self.sets = 1 if case.cached else sets_to_rotate(set_bytes, cache_bytes())
        self.inputs: list[Inputs]
        if case.in_place:
            if not case.steady:
                self.sets = IN_PLACE_CALLS
            self.outs = [first.clone() for _ in range(self.sets)]
            self.inputs = [{**self.fresh, case.first: out} for out in self.outs]
        else:
            self.inputs = [self.fresh, *(case.make(seed + i) for i in range(1, self.sets))]
            self.outs = [self._allocate() for _ in range(self.sets)]
        self.errors = burt_numba.ErrorBuffer()

    def _allocate(self) -> torch.Tensor:
        return allocate(self.case.shape, self.case.dtype, self.case.offset)

    def copy_sets(self, moved_bytes: int) -> int:
        return 1 if self.case.cached else sets_to_rotate(moved_bytes, cache_bytes())

    def arguments(self, i: int) -> tuple[Any, ...]:
        return self.case.arguments(self.inputs[i])

    def poison(self) -> None:
        """Before a call: NaN in every output; the inputs again where the output lies on them."""
        if self.case.in_place:
            for out in self.outs:
                out.copy_(self.fresh[self.case.first])
        else:
            for out in self.outs:
                out.fill_(float("nan"))

    def first_call(self) -> float:
        """Seconds of the first call: a compilation, or loading from the disk cache."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.case.call(self.inputs[0], self.outs[0], self.errors)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def measure(self) -> Timing:
        case = self.case

        def timed(i: int) -> Callable[[], object]:
            inputs, out = self.inputs[i], self.outs[i]
            return lambda: case.call(inputs, out, self.errors)

        expected = self.outs[0].clone() if case.verify is None else None
        # The calls go to another stream, and in place they write where this reads.
        torch.cuda.synchronize()

        def verify(replay: Callable[[], None], count: int) -> None:
            if case.verify is not None:
                case.verify(self.inputs[:count], self.outs[:count], replay)
                return
            self.poison()
            replay()
            if not all(all_finite(out) for out in self.outs[:count]):
                raise Wrong("a replayed graph left outputs unwritten: was a launch on another stream?")
            rtol, atol = (1e-5, 1e-7) if case.dtype == "float32" else (2e-3, 1e-6)
            if not torch.allclose(self.outs[0], expected, rtol=rtol, atol=atol):
                raise Wrong("a replayed graph gives another result than the checked call")

        if case.in_place and not case.steady:
            return measure([timed(i) for i in range(self.sets)], before=self.poison, count=self.sets, verify=verify)
        return measure([timed(i) for i in range(self.sets)], verify=verify)

    def release_outputs(self) -> None:
        """Room for the comparisons, which see the inputs alone."""
        if self.case.in_place:
            self.outs, self.inputs, self.sets = [], [self.fresh], 1
        gc.collect()
        torch.cuda.empty_cache()

    def measure_plain(self) -> Timing:
        """The operation without its constraint, over the same buffers; torch.softmax into given outputs."""
        if self.case.plain is not None:
            return self.measure_comparison(self.case.plain)
        outs = self.outs or [self._allocate()]

        def timed(i: int) -> Callable[[], object]:
            scores, out = self.inputs[i][self.case.first], outs[i]
            return lambda: torch.softmax(scores, dim=-1, out=out)

        return measure([timed(i) for i in range(self.sets)])

    def measure_comparison(self, function: Callable[..., Any]) -> Timing:
        def timed(i: int) -> Callable[[], object]:
            arguments = self.arguments(i)
            return lambda: function(*arguments)

        return measure([timed(i) for i in range(self.sets)])


def _compile_every_shape() -> None:
    """Let torch.compile specialise on each case; past its usual limit it would fall back to eager without a word."""
    import torch._dynamo

    for name in ("recompile_limit", "accumulated_recompile_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 1024)
