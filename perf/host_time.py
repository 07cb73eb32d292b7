"""Host time of a call: what the caller's thread pays before it can go on.

Arrays are tiny, so that the device is idle and the launch queue never fills; calls are issued back to back and each
is timed by itself, with a synchronisation (not timed) every 50 calls. Ten rounds go over all functions, since the speed
of a host drifts: what one line is held against ran under the same conditions.

    python -m perf --host [--profile]
"""

from __future__ import annotations

import cProfile
import functools
import io
import pstats
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console

import burt_numba
from burt_numba import kernels
from burt_numba.backend import cuda
from perf.case import BASE_NAMES, is_of
from perf.record import CsvFile, Record, microseconds
from perf.timing import torch

try:
    import cupy
except ImportError:
    cupy = None

CALLS, QUICK_CALLS, WARM_UP_CALLS, PROFILED_CALLS = 5_000, 1_000, 200, 20_000
CALLS_PER_SYNC = 50
ROUNDS = 10

LIMIT_US = {
    ("torch", "out="): 15.0,
    ("numba", "out="): 15.0,
    ("torch", "new output"): 20.0,
    ("cupy", "new output"): 20.0,
}
"""Asked of our functions, by array family; an output of Numba's own allocation (about 30 µs) has no limit."""
MEMORY_LIMIT_US = 25.0
"""Asked of an update of a memory, in any family: ten arrays, and two launches for a batch."""
MOE_LIMIT_US = 25.0
"""Asked of the mixture of experts where all buffers are given: nine arrays and two launches for a dispatch."""

CONTEXTS_LIMIT_US = 20.0
"""Asked of attention to contexts where the output is given."""
FLASH_LIMIT_US = 20.0
"""Asked of flash decoding where the outputs are given."""

ROWS, CLASSES = 32, 64
HEADS_SHAPE = (2, 4, 16, 16)
SAMPLES, MEMORY_SIZE = 4, 32
TOKENS, EXPERTS, CHOICES = 16, 4, 2
NO_EVENT = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Timed:
    """One function to time, with the line it gets."""

    op: str
    family: str
    variant: str
    call: Callable[[], object]
    ours: bool = True

    def limit(self) -> float | None:
        if not self.ours:
            return None
        if is_of(self.op, "cifg"):
            return MEMORY_LIMIT_US
        if self.op == "biencoder_attention":
            return CONTEXTS_LIMIT_US if self.variant == "out=" else None
        if is_of(self.op, "flash"):
            return FLASH_LIMIT_US if self.variant.startswith("out=") else None
        if is_of(self.op, "moe"):
            return MOE_LIMIT_US if self.variant == "out=" else None
        return LIMIT_US.get((self.family, self.variant))


def host_arrays() -> dict[str, np.ndarray]:
    """Inputs that record no event: every row has a clear leader."""
    random = np.random.default_rng(0)
    logits = random.normal(0, 2, (ROWS, CLASSES)).astype(np.float32)
    logits[np.arange(ROWS), random.integers(0, CLASSES, ROWS)] += 40
    scores = random.normal(0, 3, HEADS_SHAPE).astype(np.float32)
    mask = random.normal(0, 1, (HEADS_SHAPE[0], 1, 1, HEADS_SHAPE[3])).astype(np.float32)
    return {"logits": logits, "scores": scores, "mask": mask}


def families() -> dict[str, Callable[[np.ndarray], object]]:
    """How each family of arrays that is installed is made from a NumPy array."""
    found: dict[str, Callable[[np.ndarray], object]] = {}
    if torch is not None:
        found["torch"] = lambda a: torch.from_numpy(a).to("cuda")
    if cupy is not None:
        found["cupy"] = cupy.asarray
    found["numba"] = cuda.to_device
    return found


def list_functions(op: str | None = None) -> Iterator[Timed]:
    """Ours for each family, with and without out=, then what they are held against."""
    hosts = host_arrays()
    for family, convert in families().items():
        logits, scores, mask = (convert(hosts[name]) for name in ("logits", "scores", "mask"))
        logits_out, scores_out = convert(np.zeros_like(hosts["logits"])), convert(np.zeros_like(hosts["scores"]))
        constrained = functools.partial(burt_numba.constrained_softmax, logits)
        plain = functools.partial(burt_numba.attention_softmax, scores)
        masked = functools.partial(burt_numba.attention_softmax, scores, mask)
        for name, function, out in (
            ("constrained_softmax", constrained, logits_out),
            ("attention_softmax", plain, scores_out),
            ("attention_softmax with a mask", masked, scores_out),
        ):
            if is_of(name.split()[0], op):
                yield Timed(name, family, "out=", functools.partial(function, out=out))
                yield Timed(name, family, "new output", function)
        yield from context_functions(family, convert, op)
        yield from flash_functions(family, convert, op)
        yield from memory_functions(family, convert, op)
        yield from expert_functions(family, convert, op)
    if torch is not None:
        x = torch.from_numpy(hosts["logits"]).to("cuda")
        out = torch.empty_like(x)
        yield Timed("torch.softmax", "torch", "out=", lambda: torch.softmax(x, -1, out=out), ours=False)
        yield Timed("torch.softmax", "torch", "new output", lambda: torch.softmax(x, -1), ours=False)
    yield from raw_launches(op)


def context_functions(family: str, convert: Callable[[np.ndarray], object], op: str | None) -> Iterator[Timed]:
    """Attention to contexts. Each query is one of the keys, so that none is near two of them and records an event."""
    if not is_of("biencoder_attention", op):
        return
    batch, heads, queries, contexts = HEADS_SHAPE
    random = np.random.default_rng(0)
    keys, values = (random.normal(0, 2, (batch, heads, contexts, CLASSES)).astype(np.float32) for _ in range(2))
    rows = (batch, heads, queries)
    query, out = keys[:, :, :queries].copy(), np.zeros((*rows, CLASSES), np.float32)
    call = functools.partial(burt_numba.biencoder_attention, *(convert(array) for array in (query, keys, values)))
    given = {
        "context_lengths": convert(np.full(batch, contexts, np.int32)),
        "temperature_out": convert(np.zeros(rows, np.float32)),
        "entropy_out": convert(np.zeros(rows, np.float32)),
    }
    yield Timed("biencoder_attention", family, "out=", functools.partial(call, out=convert(out)))
    yield Timed(
        "biencoder_attention", family, "out=, lengths, two more", functools.partial(call, out=convert(out), **given)
    )
    yield Timed("biencoder_attention", family, "new output", call)


def flash_functions(family: str, convert: Callable[[np.ndarray], object], op: str | None) -> Iterator[Timed]:
    """Decode attention, its two steps and a merge."""
    if not any(is_of(name, op) for name in BASE_NAMES["flash"]):
        return
    batch, heads, keys, _ = HEADS_SHAPE
    random = np.random.default_rng(0)
    shapes = ((batch, heads, CLASSES), *[(batch, heads, keys, CLASSES)] * 2)
    caches = [convert(random.normal(0, 2, shape).astype(np.float32)) for shape in shapes]
    lengths = convert(np.full(batch, keys, np.int32))
    partials = np.ones((batch, heads, keys, CLASSES + 2), np.float32)
    arguments = {
        "flash_decoding_reduce": (convert(partials), lengths, 1),
        "flash_decoding_chunk": (*caches, lengths, 1),
        "flash_decoding": (*caches, lengths),
        "merge_attention_states": tuple(
            convert(np.ones((3, *shape), np.float32)) for shape in (shapes[0], shapes[0][:2])
        ),
    }
    for name, given in arguments.items():
        if not is_of(name, op):
            continue
        out = np.zeros(partials.shape if name == "flash_decoding_chunk" else shapes[0], np.float32)
        function = functools.partial(getattr(burt_numba, name), *given)
        yield Timed(name, family, "out=", functools.partial(function, out=convert(out)))
        if name == "flash_decoding":
            sums = convert(np.zeros((batch, heads), np.float32))
            yield Timed(name, family, "out=, lse_out=", functools.partial(function, out=convert(out), lse_out=sums))
        yield Timed(name, family, "new output", function)


def memory_functions(family: str, convert: Callable[[np.ndarray], object], op: str | None) -> Iterator[Timed]:
    """Updates of a memory. A gate of 1 leaves it as it is, so that any number of calls records no event."""
    random = np.random.default_rng(0)
    d = MEMORY_SIZE
    for name, batch in (("cifg_update", ()), ("batched_cifg_update", (SAMPLES,))):
        if not is_of(name, op):
            continue
        shapes = ((*batch, d, d), (*batch, d), (*batch, d), (d, 2 * d))
        arrays = [convert(random.normal(0, 0.02, shape).astype(np.float32)) for shape in shapes]
        arrays.append(convert(np.full(d, 40, np.float32)))
        update = functools.partial(getattr(burt_numba, name), *arrays)
        vector = convert(np.zeros((*batch, d), np.float32))
        certificate = convert(np.full(batch or (1,), 0.9, np.float32))
        yield Timed(name, family, "in place", update)
        yield Timed(name, family, "out=", functools.partial(update, out=convert(np.zeros(shapes[0], np.float32))))
        carried = functools.partial(update, power_vector=vector, sigma_bound=certificate)
        yield Timed(name, family, "in place, carried", carried)


def expert_functions(family: str, convert: Callable[[np.ndarray], object], op: str | None) -> Iterator[Timed]:
    """A dispatch and a combine of a mixture of experts. No token is lost, so any number of calls records no event."""
    random = np.random.default_rng(0)
    tokens, weights, indices = (
        random.normal(size=(TOKENS, CLASSES)).astype(np.float32),
        random.uniform(0.1, 1, (TOKENS, EXPERTS)).astype(np.float32),
        np.argsort(random.random((TOKENS, EXPERTS)), axis=1)[:, :CHOICES].astype(np.int32),
    )
    arrays = [convert(array) for array in (tokens, weights, indices)]
    made = burt_numba.sparse_moe_dispatch(*arrays, TOKENS)
    given = {**made._asdict(), "num_dropped": made.num_dropped, "num_overflowed": made.num_overflowed}
    if is_of("sparse_moe_dispatch", op):
        call = functools.partial(burt_numba.sparse_moe_dispatch, *arrays, TOKENS)
        yield Timed("sparse_moe_dispatch", family, "out=", functools.partial(call, **given))
        yield Timed(
            "sparse_moe_dispatch", family, "out=, atomic", functools.partial(call, deterministic=False, **given)
        )
        yield Timed("sparse_moe_dispatch", family, "new output", call)
    if is_of("sparse_moe_combine", op):
        call = functools.partial(burt_numba.sparse_moe_combine, made.expert_inputs, made)
        yield Timed("sparse_moe_combine", family, "out=", functools.partial(call, out=convert(np.zeros_like(tokens))))
        yield Timed("sparse_moe_combine", family, "new output", call)


def raw_launches(op: str | None) -> Iterator[Timed]:
    """The documented kernels through Numba's own launch, every argument prepared."""
    hosts = host_arrays()
    events = np.zeros(8, dtype=np.int64)
    events[0] = NO_EVENT
    errors = cuda.to_device(events)
    nothing = cuda.device_array(0, np.float32)
    if op in (None, "constrained_softmax"):
        logits = cuda.to_device(hosts["logits"])
        out = cuda.to_device(np.zeros_like(hosts["logits"]))
        constrained = kernels.constrained_softmax_kernel
        shared_bytes = CLASSES * 4
        yield Timed(
            "constrained_softmax_kernel",
            "numba",
            "kernel[grid, block]",
            lambda: constrained[(ROWS,), (CLASSES,), 0, shared_bytes](
                logits, out, ROWS, CLASSES, 0.20, 0.01, 10.0, 20, nothing, nothing, nothing, errors
            ),
            ours=False,
        )
    if op in (None, "attention_softmax"):
        scores = cuda.to_device(hosts["scores"])
        weights = cuda.to_device(np.zeros_like(hosts["scores"]))
        no_mask = cuda.device_array((0, 0, 0, 0), np.float32)
        batch, heads, queries, _ = HEADS_SHAPE
        attention = kernels.attention_softmax_kernel
        yield Timed(
            "attention_softmax_kernel",
            "numba",
            "kernel[grid, block]",
            lambda: attention[(batch * heads, queries), (32,), 0, 8](
                scores, weights, no_mask, batch, heads, queries, False, 0, errors
            ),
            ours=False,
        )


def time_calls(call: Callable[[], object], calls: int, synchronize: Callable[[], object]) -> np.ndarray:
    """Microseconds of each call."""
    for _ in range(WARM_UP_CALLS):
        call()
    synchronize()
    clock = time.perf_counter_ns
    times = np.empty(calls, dtype=np.int64)
    for i in range(calls):
        if i % CALLS_PER_SYNC == 0:
            synchronize()
        started = clock()
        call()
        times[i] = clock() - started
    synchronize()
    return times / 1e3


def run(console: Console, csv: CsvFile, op: str | None = None, text: str = "", quick: bool = False) -> list[Record]:
    """Time every function whose line has all words of `text`."""
    calls = QUICK_CALLS if quick else CALLS
    chosen = [
        timed
        for timed in list_functions(op)
        if all(word in f"{timed.op} {timed.family} {timed.variant}".lower() for word in text.lower().split())
    ]
    times: list[list[np.ndarray]] = [[] for _ in chosen]
    failures: dict[int, str] = {}
    for _ in range(ROUNDS):
        for place, timed in enumerate(chosen):
            if place not in failures:
                try:
                    times[place].append(time_calls(timed.call, calls // ROUNDS, cuda.synchronize))
                except Exception as error:
                    failures[place] = f"{type(error).__name__}: {error}".splitlines()[0]
    records = []
    for place, timed in enumerate(chosen):
        record = Record("host", timed.op, timed.family, "float32", timed.variant)
        limit = timed.limit()
        record.limit_us, record.limit = limit, "" if limit is None else f"{limit:g} us"
        if place in failures:
            record.within, record.note = "FAILED", failures[place]
        else:
            percentiles = np.percentile(np.concatenate(times[place]), [10, 50, 90])
            record.p10, record.median_us, record.p90 = map(float, percentiles)
            record.repeats = calls
            if limit is not None:
                record.within = "PASS" if record.median_us <= limit else "OVER"
        csv.append(record)
        records.append(record)
        time_us = microseconds(record.median_us)
        console.print(f"host: {timed.op} {timed.family} {timed.variant}: {time_us} µs {record.within}", markup=False)
    return records


def profile(console: Console, op: str | None = None, text: str = "out=") -> None:
    """Print where the host time of 20,000 calls goes, for our functions with out= (or whose line has `text`)."""
    for timed in list_functions(op):
        title = f"{timed.op} {timed.family} {timed.variant}"
        if not timed.ours or not all(word in title.lower() for word in text.lower().split()):
            continue
        for _ in range(WARM_UP_CALLS):
            timed.call()
        cuda.synchronize()
        profiler = cProfile.Profile()
        for _ in range(PROFILED_CALLS // CALLS_PER_SYNC):
            profiler.enable()
            for _ in range(CALLS_PER_SYNC):
                timed.call()
            profiler.disable()
            cuda.synchronize()
        text_out = io.StringIO()
        pstats.Stats(profiler, stream=text_out).strip_dirs().sort_stats("tottime").print_stats(25)
        console.print(f"{title}: {PROFILED_CALLS:,} calls", markup=False)
        console.print(text_out.getvalue(), markup=False)
