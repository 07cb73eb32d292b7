"""What each compiled kernel takes of a multiprocessor, for every compute capability, with no GPU.

Every kernel specialisation that the package can launch is compiled to PTX and assembled with ``ptxas -v``. A register
spill, or any other local memory, fails the check unless resources_allowed.json allows it, by kernel, or by compute
capability, kernel and constants::

    {"constrained_softmax_kernel": {"spill_bytes": 0, "stack_bytes": 32, "reason": "..."}}
    {"7.0 attention_softmax_rows[1024x16x1x1x1]": {"spill_bytes": 16, "stack_bytes": 8, "reason": "..."}}

Run from the root of a checkout, with the extra ``cu13`` or, for compute capability 7.0, ``cu12``::

    python -m perf.resources
    python -m perf.resources --capability 9.0

With ``--lowered FOLDER`` a second run, in another environment or for another capability, starts from what the first one
lowered.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from perf.lowered import canonical, load, save

ALLOWED = Path(__file__).with_name("resources_allowed.json")

Capability = tuple[int, int]

# What CUDA 13 compiles for. CUDA 12 alone still knows 7.0.
CAPABILITIES: tuple[Capability, ...] = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))

# libNVVM, a third of the time, writes the same PTX for these but for the line with the target. It is asked once, and
# for a sample each time: the first specialisation of each kernel, and every thirty-second.
SAME_PTX: dict[Capability, Capability] = {(8, 6): (8, 0), (8, 9): (8, 0), (12, 0): (10, 0)}

# The same for code that does not ask for the capability; from 10.0 on, another compiler inside libNVVM writes it.
SAME_PTX_UNASKED: dict[Capability, Capability] = {**SAME_PTX, (7, 5): (8, 0), (9, 0): (8, 0)}


@dataclass(frozen=True)
class Resources:
    capability: Capability
    kernel: str
    """Its name, as in the list of what is allowed."""
    key: str
    """Name, constants and argument types."""
    registers: int
    spill_bytes: int
    """Stores and loads together."""
    stack_bytes: int
    """Local memory of one thread, spills included."""
    shared_bytes: int
    """Static shared memory of one block."""

    def excess(self, allowed: dict[str, dict[str, Any]]) -> str | None:
        """Return what is beyond the allowed, in words, or None."""
        one = f"{self.capability[0]}.{self.capability[1]} {self.key.partition('(')[0]}"
        limits = allowed.get(one) or allowed.get(self.kernel, {})
        beyond = [
            f"{used} bytes of {what}, {limits.get(name, 0)} allowed"
            for name, what, used in (
                ("spill_bytes", "spills", self.spill_bytes),
                ("stack_bytes", "local memory", self.stack_bytes),
            )
            if used > limits.get(name, 0)
        ]
        return "; ".join(beyond) or None


def parse_ptxas(report: str) -> tuple[int, int, int, int]:
    """Return registers, spill bytes, stack bytes and static shared bytes from what ``ptxas -v`` prints.

    A function that was not inlined has its own lines: spills and stacks add up, of registers the most counts.
    """

    def numbers(pattern: str) -> list[int]:
        return [int(number) for number in re.findall(pattern, report)]

    registers = numbers(r"Used (\d+) registers")
    if not registers:
        raise ValueError(f"ptxas reported no registers: {report.strip() or 'it printed nothing'}")
    spills = numbers(r"(\d+) bytes spill stores") + numbers(r"(\d+) bytes spill loads")
    return max(registers), sum(spills), sum(numbers(r"(\d+) bytes stack frame")), sum(numbers(r"(\d+) bytes smem"))


def find_ptxas() -> str:
    from cuda.pathfinder import find_nvidia_binary_utility

    found = find_nvidia_binary_utility("ptxas")
    if found is None:
        raise SystemExit("perf.resources: no ptxas found: install the extra ptxas13, or cu12")
    return found


_TARGET = re.compile(r"^\.target\s+(sm_(\d+)\w*)", re.MULTILINE)


def retarget(ptx: str, capability: Capability) -> str:
    """Return the PTX with the target of another capability."""
    return _TARGET.sub(f".target sm_{capability[0]}{capability[1]}", ptx, count=1)


def assemble(ptxas: str, ptx: str, capability: Capability) -> str:
    """Return what ``ptxas -v`` says about the PTX."""
    target = _TARGET.search(ptx)
    wanted = capability[0] * 10 + capability[1]
    if target is None or int(target[2]) != wanted:
        raise ValueError(f"the PTX is for {target[1] if target else 'no target'}, expected sm_{wanted}")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [ptxas, "-v", "--gpu-name", target[1], "-o", str(Path(folder) / "kernel.cubin"), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        older = " (older than the compiler: install the extra ptxas13)" if "Unsupported .version" in done.stderr else ""
        raise ValueError(f"{ptxas} failed{older}: {' '.join(done.stderr.split())}")
    return done.stdout + done.stderr


@lru_cache
def _specialisations(capabilities: tuple[Capability, ...]) -> list[Any]:
    """Of every capability, each once."""
    from burt_numba.host.compiling import all_specialisations

    found = {s.key: s for capability in capabilities for s in all_specialisations(capability)}
    return list(found.values())


def _start_worker() -> None:
    # Hundreds of compilations make few cycles: to look for them at every turn takes a fifth of Numba's time.
    gc.disable()


def _collect() -> None:
    """Free the cycles of some ten compilations; what is left, Numba's tables, is not looked at again."""
    if gc.get_count()[0] > 1_000_000:
        gc.collect()
        gc.freeze()


def _lowered(specialisation: Any, capability: Capability, folder: Path | None, sampled: bool) -> Any:
    """Return Numba's code library, where there is one from the folder; of a sample, one made here that is the same."""
    from burt_numba.host.compiling import lower_specialisation

    kept = None if folder is None else load(folder, specialisation)
    if kept is not None and not sampled:
        return kept
    library = lower_specialisation(specialisation.kernel, specialisation.types, capability)
    if kept is not None:
        if canonical(kept.llvm_strs) != canonical(library.llvm_strs):
            raise ValueError(f"{folder} holds other LLVM IR than comes of lowering it here")
    elif folder is not None:
        save(folder, specialisation, library)
    return library


def _sources(library: Any, capabilities: Sequence[Capability], sampled: bool) -> dict[Capability, str]:
    """Return the PTX for each capability; of a sample, what SAME_PTX says is compared."""
    from burt_numba.backend import to_ptx

    asks = any("__nvvm_reflect" in module for module in library.llvm_strs)
    same = SAME_PTX if asks else SAME_PTX_UNASKED
    asked = [c for c in capabilities if sampled or same.get(c) not in capabilities]
    sources = dict(zip(asked, to_ptx(library, asked), strict=True))
    for capability in capabilities:
        other = same.get(capability)
        if other is None or other not in sources:
            continue
        expected = retarget(sources[other], capability)
        if sources.setdefault(capability, expected) != expected:
            one, another = (".".join(map(str, c)) for c in (capability, other))
            raise ValueError(f"the PTX for {one} is not that for {another}, as SAME_PTX has it")
    return sources


def _measure(ptxas: str, capabilities: Sequence[Capability], folder: Path | None, index: int) -> list[Resources | str]:
    """Compile one specialisation and assemble it for each capability that has it.

    It is named by its place, since kernels do not travel between processes.
    """
    _collect()
    specialisations = _specialisations(tuple(capabilities))
    specialisation = specialisations[index]
    kernel, key = specialisation.kernel, str(specialisation.key)
    wanted = [capability for capability in capabilities if kernel.runs_on(capability)]
    sampled = index % 32 == 0 or kernel.name not in {s.name for s in specialisations[:index]}
    outcomes: list[Resources | str] = []
    # Every kernel is looked at before the check fails.
    try:
        library = _lowered(specialisation, min(wanted), folder, sampled)
        sources = _sources(library, wanted, sampled)
    except Exception as error:
        return [f"{key}: {type(error).__name__}: {error}"]
    for capability, ptx in sorted(sources.items()):
        try:
            outcomes.append(Resources(capability, kernel.name, key, *parse_ptxas(assemble(ptxas, ptx, capability))))
        except Exception as error:
            outcomes.append(f"{capability[0]}.{capability[1]} {key}: {type(error).__name__}: {error}")
    return outcomes


def measure(
    capabilities: Sequence[Capability], ptxas: str, folder: Path | None = None
) -> tuple[list[Resources], list[str]]:
    """Return the resources of every specialisation, and one line for each that failed to compile or assemble."""
    count = len(_specialisations(tuple(capabilities)))
    # Numba lowers in the order of sets of names, which would be another one in each process.
    os.environ["PYTHONHASHSEED"] = "0"
    # Spawned, not forked: a fork would share the state of the compiler library.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context, initializer=_start_worker) as pool:
        # Neighbours share device functions, which a process lowers once.
        outcomes = pool.map(partial(_measure, ptxas, capabilities, folder), range(count), chunksize=4)
        results = [result for outcome in outcomes for result in outcome]
    return (
        [result for result in results if isinstance(result, Resources)],
        [result for result in results if isinstance(result, str)],
    )


def _print_table(measured: Sequence[Resources]) -> None:
    heads = ("capability", "kernel", "registers", "spills", "local", "shared")
    rows = [
        (
            f"{r.capability[0]}.{r.capability[1]}",
            r.key,
            *map(str, (r.registers, r.spill_bytes, r.stack_bytes, r.shared_bytes)),
        )
        for r in measured
    ]
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    for row in (heads, *rows):
        names = [word.ljust(width) for word, width in zip(row[:2], widths[:2], strict=True)]
        figures = [word.rjust(width) for word, width in zip(row[2:], widths[2:], strict=True)]
        print("  ".join(names + figures))


def _capability(text: str) -> Capability:
    match = re.fullmatch(r"(\d+)\.(\d)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected MAJOR.MINOR as in 9.0, got {text}")
    return int(match[1]), int(match[2])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf.resources", description="Registers and memory of each kernel."
    )
    parser.add_argument(
        "--capability",
        type=_capability,
        action="append",
        metavar="9.0",
        help="compute capability, may be repeated; default: all that CUDA 13 compiles for",
    )
    parser.add_argument(
        "--lowered",
        type=Path,
        metavar="FOLDER",
        help="take kernels from here as Numba lowered them, and leave here those that are not there yet; a sample is "
        "lowered all the same and compared",
    )
    arguments = parser.parse_args(argv)
    # The simulator has nothing to compile.
    os.environ.pop("NUMBA_ENABLE_CUDASIM", None)

    start = time.monotonic()
    ptxas = find_ptxas()
    allowed = json.loads(ALLOWED.read_text())
    measured, failures = measure(arguments.capability or CAPABILITIES, ptxas, arguments.lowered)
    _print_table(measured)
    failures += [
        f"{r.capability[0]}.{r.capability[1]} {r.key}: {excess}"
        for r in measured
        if (excess := r.excess(allowed)) is not None
    ]
    if not measured and not failures:
        failures.append("no kernels to compile")
    for failure in failures:
        print(f"FAIL {failure}")
    print(
        f"{len(measured)} kernels with numba-cuda {version('numba-cuda')} and {ptxas} "
        f"in {time.monotonic() - start:.0f} s; failures: {len(failures)}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
