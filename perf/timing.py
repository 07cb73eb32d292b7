"""GPU time by CUDA-graph replay, captured by hand on one side stream.

    capture   | call 0 | call 1 | ... | call n-1 |     n calls in a row, buffer set i % sets
    replay    [event][ n calls ][event]  [event][ n calls ][event]  ...   one time a replay: the interval over n

Host time is out of the figures. Every function, ours or one it is compared with, goes through the same steps on the
same stream: a launch on any other stream would be missing from the graph, and the time would be nonsense.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

try:
    import torch
except ImportError:  # listing cases and the host parts need no torch
    torch = None

DEVICE = "cuda"

REPLAY_US = 1_200
"""Least GPU time of a replay: the launch of a graph (a few µs between the events) stays under a percent."""
WHOLE_TURN_US = 20_000
"""A replay may grow to this so that it turns through every buffer set."""
LEAST_CALLS, MOST_CALLS = 10, 4_000
LONG_US = 10_000
"""Calls that reach this together are enough, be they only two: slow comparisons must not take minutes."""
LEAST_REPLAYS, MOST_REPLAYS = 20, 100
REPLAYS_US = 200_000
"""Replays beyond the least are added until they fill this."""
CEILING_BYTES = 256 * 1024**2
"""Size of the copied buffer that the copy ceiling is taken from."""

Calls = Sequence[Callable[[], object]]
"""The same call, once for each buffer set."""


@dataclass(frozen=True)
class Timing:
    """Microseconds a call over the replays of a graph."""

    median: float
    p10: float
    p90: float
    calls: int
    replays: int


def choose_calls(call_us: float, sets: int) -> int:
    """Calls in one graph: `REPLAY_US` of work, ten calls unless they are long, all buffer sets where that is short."""
    call_us = max(call_us, 1e-3)
    calls = max(min(LEAST_CALLS, max(2, math.ceil(LONG_US / call_us))), math.ceil(REPLAY_US / call_us))
    turns = math.ceil(calls / sets) * sets
    if turns * call_us <= WHOLE_TURN_US:
        calls = turns
    return min(calls, MOST_CALLS)


def choose_replays(replay_us: float) -> int:
    return max(LEAST_REPLAYS, min(MOST_REPLAYS, math.ceil(REPLAYS_US / max(replay_us, 1e-3))))


@functools.cache
def side_stream() -> torch.cuda.Stream:
    """The one stream that everything is captured and replayed on."""
    return torch.cuda.Stream()


def cache_bytes() -> int:
    """Size of the L2 cache, 60 MB where torch does not say."""
    return getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or 60 * 1024**2


def warm_up(calls: Calls) -> None:
    """Compilation, module loading and allocation happen here, on the stream that is captured later."""
    with torch.cuda.stream(side_stream()):
        for i in range(3):
            calls[i % len(calls)]()
    torch.cuda.synchronize()


def capture(calls: Calls, count: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    torch.cuda.synchronize()
    # A finaliser that frees device memory would spoil the capture, as would another thread's call in global mode.
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=side_stream(), capture_error_mode="thread_local"):
            for i in range(count):
                calls[i % len(calls)]()
    finally:
        gc.enable()
    torch.cuda.synchronize()
    return graph


def replay(graph: torch.cuda.CUDAGraph, times: int, before: Callable[[], None] | None = None) -> np.ndarray:
    """Microseconds of each of `times` replays. `before` is enqueued ahead of each one, outside its interval."""
    stream = side_stream()
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(times)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(times)]
    with torch.cuda.stream(stream):
        for start, end in zip(starts, ends, strict=True):
            if before is not None:
                before()
            start.record(stream)
            graph.replay()
            end.record(stream)
    torch.cuda.synchronize()
    return np.array([1e3 * start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)])


def measure(
    calls: Calls,
    *,
    before: Callable[[], None] | None = None,
    count: int | None = None,
    verify: Callable[[Callable[[], None], int], None] | None = None,
) -> Timing:
    """Time a call.

    Parameters
    ----------
    calls : the call for each buffer set
    before : enqueued before each replay and not timed (fresh inputs for an operation in place)
    count : calls in a graph, where that is not free
    verify : gets a function that replays the final graph once, and the number of calls in it, before any timing
    """
    warm_up(calls)
    if count is None:
        probe = capture(calls, LEAST_CALLS)
        count = choose_calls(float(replay(probe, 3, before)[1:].min()) / LEAST_CALLS, len(calls))
        del probe
    graph = capture(calls, count)
    if verify is not None:
        verify(lambda: replay_once(graph), count)
    replay_us = float(replay(graph, 3, before).min())
    # Clocks rise under load: as much again as is measured, up to a tenth of a second.
    replay(graph, max(3, min(50, math.ceil(100_000 / replay_us))), before)
    times = replay(graph, choose_replays(replay_us), before) / count
    p10, median, p90 = np.percentile(times, [10, 50, 90])
    return Timing(float(median), float(p10), float(p90), count, len(times))


def replay_once(graph: torch.cuda.CUDAGraph) -> None:
    torch.cuda.synchronize()
    with torch.cuda.stream(side_stream()):
        graph.replay()
    torch.cuda.synchronize()


def measure_copy(moved_bytes: int, sets: int = 1) -> Timing:
    """Time `copy_` of device memory that moves `moved_bytes`, half of them read and half written."""
    # In elements of 4 bytes: torch splits copies of more than 2^31 elements.
    size = max(1, moved_bytes // 8)
    pairs = []
    for _ in range(sets):
        source = torch.randint(-(2**31), 2**31 - 1, (size,), dtype=torch.int32, device=DEVICE)
        pairs.append((source, torch.empty_like(source)))
    return measure([functools.partial(target.copy_, source) for source, target in pairs])


def measure_copy_ceiling() -> float:
    """GB/s, read and written, of a copy far larger than any cache."""
    return 2 * CEILING_BYTES / measure_copy(2 * CEILING_BYTES).median / 1e3
