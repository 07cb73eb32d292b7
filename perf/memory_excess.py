"""How far over its bound cifg_update leaves a memory: hard spectra, random memories, and streams of updates.

    python -m perf.memory_excess
    python -m perf.memory_excess --size 64 --random 20

For 0, 1, 10 and 100 power iterations it prints the largest singular value (float64) over the bound, less 1, the worst
of each row of the table, and how often code 4 was there. Needs no GPU; with NUMBA_ENABLE_CUDASIM=1 it takes minutes.

    cold      a call on a memory never seen before
    carried   the fourth of calls in a row on that memory with one power_vector, with random h: as a stream has it
    stream    the worst of all updates from a memory of zeros, with one power_vector
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

import burt_numba

BOUND = 0.95
ITERATIONS = (0, 1, 10, 100)
CALLS = 4
KEEPING, LEARNING = 40.0, 2.0
"""Biases of the gate: it keeps all of a memory, or about 0.9."""


def spectrum(values: Sequence[float], random: np.random.Generator) -> np.ndarray:
    """A matrix with these singular values."""
    size = len(values)
    left, right = (np.linalg.qr(random.normal(size=(size, size)))[0] for _ in range(2))
    return (left * np.asarray(values)) @ right


def hard_memories(size: int, random: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    falling = np.linspace(0.9, 0.1, size)
    yield "zero", np.zeros((size, size))
    yield "5 I", 5 * np.eye(size)
    yield "orthogonal x 0.96", spectrum([0.96] * size, random)
    yield "two equal top values", spectrum([2, 2, *falling[2:]], random)
    yield "two top values 1 % apart", spectrum([2, 1.98, *falling[2:]], random)
    yield "rank-1 spike of 100", spectrum([100, *falling[1:]], random)
    yield "ill-conditioned, 10 to 1e-6", spectrum(np.geomspace(10, 1e-6, size), random)
    yield "evenly spaced, 2 to 0.1", spectrum(np.linspace(2, 0.1, size), random)


class Memory:
    """A memory and what its calls take."""

    def __init__(self, C: np.ndarray, bias: float, iterations: int, carried: bool):
        size = len(C)
        self.C = C.astype(np.float32)
        self._vector = np.zeros(size, np.float32) if carried else None
        self._weights = np.zeros((size, size), np.float32), np.full(size, bias, np.float32)
        self._iterations = iterations

    def update(self, h: np.ndarray) -> tuple[float, bool]:
        """(sigma over the bound, less 1; whether code 4 was there)."""
        errors = burt_numba.ErrorBuffer()
        burt_numba.cifg_update(
            self.C, h.astype(np.float32), np.zeros(0, np.float32), *self._weights, BOUND,
            power_iterations=self._iterations, power_vector=self._vector, errors=errors,
        )  # fmt: skip
        errors.check()
        sigma = np.linalg.norm(self.C.astype(np.float64), 2)
        return sigma / BOUND - 1, burt_numba.BurtError.SPECTRAL_OVERFLOW in errors.counts


def cold(C: np.ndarray, iterations: int, random: np.random.Generator) -> list[tuple[float, bool]]:
    return [Memory(C, KEEPING, iterations, carried=False).update(np.zeros(len(C)))]


def carried(C: np.ndarray, iterations: int, random: np.random.Generator) -> list[tuple[float, bool]]:
    memory = Memory(C, LEARNING, iterations, carried=True)
    return [memory.update(random.normal(size=len(C))) for _ in range(CALLS)][-1:]


def stream(updates: int, size: int, iterations: int, random: np.random.Generator) -> list[tuple[float, bool]]:
    memory = Memory(np.zeros((size, size)), LEARNING, iterations, carried=True)
    # One update in ten is large.
    return [memory.update(random.normal(size=size) * (10 if k % 10 == 9 else 1)) for k in range(updates)]


def row(title: str, columns: Iterable[list[tuple[float, bool]]]) -> str:
    cells = [title]
    for seen in columns:
        worst, told = max(excess for excess, _ in seen), sum(code for _, code in seen)
        cells.append(f"{max(worst, 0):.1e}" + (f" (code 4: {told} of {len(seen)})" if told else ""))
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.memory_excess", description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=16, metavar="D", help="rows and columns (default 16)")
    parser.add_argument("--random", type=int, default=200, metavar="N", help="random memories, and updates of a stream")
    options = parser.parse_args(arguments)
    size = options.size

    def randoms() -> Iterator[np.ndarray]:
        random = np.random.default_rng(1)
        return (random.normal(size=(size, size)) * (2 / size**0.5) for _ in range(options.random))

    print("| memory | " + " | ".join(f"{steps} iterations" for steps in ITERATIONS) + " |")
    print("| --- |" + " --- |" * len(ITERATIONS), flush=True)
    for kind in (cold, carried):
        for name, C in hard_memories(size, np.random.default_rng(0)):
            print(
                row(f"{name}, {kind.__name__}", (kind(C, steps, np.random.default_rng(2)) for steps in ITERATIONS)),
                flush=True,
            )
        columns = (
            [seen for C in randoms() for seen in kind(C, steps, np.random.default_rng(2))] for steps in ITERATIONS
        )
        print(row(f"{options.random} random, {kind.__name__}", columns), flush=True)
    streams = (stream(options.random, size, steps, np.random.default_rng(3)) for steps in ITERATIONS)
    print(row(f"stream of {options.random} updates", streams), flush=True)


if __name__ == "__main__":
    main()
