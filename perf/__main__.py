"""The command: python -m perf, from the root of a checkout."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# The raw launches of host_time are small on purpose; Numba would warn about each. Read when Numba is imported.
os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")

OPERATIONS = (
    *("constrained_softmax", "attention_softmax", "biencoder_attention"),
    *("cifg_update", "batched_cifg_update", "cifg"),
    *("sparse_moe_dispatch", "sparse_moe_combine", "moe"),
    *("flash_decoding_reduce", "flash_decoding_chunk", "flash_decoding", "merge_attention_states", "flash"),
)
"""What --op takes; "cifg" is both functions of the memory, "moe" both of the mixture of experts, "flash" all four of
flash decoding."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf",
        description="GPU time of every case by CUDA-graph replay, after a check of its result. "
        "--host and --first-call measure those instead; together with --gpu, as well.",
    )
    parser.add_argument("--op", choices=OPERATIONS, help="one operation; all otherwise")
    parser.add_argument(
        "--filter",
        default="",
        metavar="TEXT",
        help="cases whose title has every word of TEXT (or a word that begins so)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append one line a case")
    parser.add_argument("--gpu", action="store_true", help="GPU time (what is done when nothing else is asked for)")
    parser.add_argument("--host", action="store_true", help="host time a call")
    parser.add_argument("--first-call", action="store_true", help="first call: empty cache, and from the disk cache")
    parser.add_argument("--profile", action="store_true", help="with --host: cProfile of 20,000 calls with out=")
    parser.add_argument("--quick", action="store_true", help="cases with a limit, no comparisons, fewer rounds")
    parser.add_argument("--limits", action="store_true", help="cases with a limit")
    parser.add_argument("--no-compare", action="store_true", help="without eager PyTorch and torch.compile")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="for one case (default 60)")
    parser.add_argument("--list", action="store_true", help="list the cases and what they stand for")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, 1 when a result was wrong or a case failed, 2 when nothing could be measured."""
    options = parse(arguments)

    # After the environment is set: these import Numba and, where it is installed, torch.
    from perf import (
        bench_attention_softmax,
        bench_biencoder_attention,
        bench_cifg,
        bench_constrained_softmax,
        bench_flash_decoding,
        bench_moe,
    )
    from perf.case import is_of
    from perf.record import CsvFile, Environment, make_console, show

    console = make_console()
    cases = [
        case
        for bench in (
            bench_attention_softmax,
            bench_biencoder_attention,
            bench_cifg,
            bench_constrained_softmax,
            bench_flash_decoding,
            bench_moe,
        )
        for case in bench.list_cases()
        if is_of(case.op, options.op)
        and case.matches(options.filter)
        and (case.limit is not None or not (options.quick or options.limits))
    ]
    if options.list:
        for case in cases:
            console.print(
                f"{case.title}: {case.stands_for}; {case.bytes_moved / 1e6:,.1f} MB; limit {case.limit or '-'}"
            )
        return 0

    gpu = options.gpu or not (options.host or options.first_call)
    problem = _missing(gpu)
    if problem:
        print(f"perf: {problem}", file=sys.stderr)
        return 2
    if gpu and not cases and not (options.host or options.first_call):
        print(f"perf: --filter: no case's title has the words {options.filter!r}; --list shows them", file=sys.stderr)
        return 2

    environment = Environment.here()
    csv = CsvFile(options.csv, environment)
    console.print(str(environment), markup=False)
    records = []
    if gpu and cases:
        from perf.runner import Runner, Settings

        settings = Settings(
            compare=not (options.no_compare or options.quick), compile=not options.no_compile, budget_s=options.budget
        )
        records += Runner(console, csv, settings).run(cases)
    if options.host:
        from perf import host_time

        records += host_time.run(console, csv, options.op, options.filter, options.quick)
        if options.profile:
            host_time.profile(console, options.op, options.filter or "torch out=")
    if options.first_call:
        from perf import first_call

        records += first_call.run(console, csv, options.op, options.quick)
    show(records, console)
    return 1 if any(record.within in ("WRONG", "FAILED") for record in records) else 0


def _missing(gpu: bool) -> str | None:
    """What keeps us from measuring, or None."""
    from burt_numba.cli import driver
    from perf.timing import torch

    if driver.device_count() == 0:
        return "no CUDA device found: times in the simulator say nothing about a GPU"
    if gpu and torch is None:
        return "GPU times are taken with torch's CUDA graphs: install torch"
    return None


if __name__ == "__main__":
    sys.exit(main())
