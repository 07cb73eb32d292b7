"""Other orders than the usual one, and the search for results that depend on the order.

A thread runs until it waits, in every order. What changes is which block comes first, which warp goes on first once
several can, and which lane of it.
"""

from __future__ import annotations

import contextvars
import heapq
import itertools
import math
import numbers
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burt_numba.simulator import atomics, installation
from burt_numba.simulator.allocations import restore_written, written_so_far
from burt_numba.simulator.errors import OrderError, annotate
from burt_numba.simulator.order_report import Array, Recorder, as_bytes, describe_difference, order_name

if TYPE_CHECKING:
    from burt_numba.simulator.threads import Thread

_MOST_SHUFFLED = 65_536
_MOST_OVERTAKING = 64
_warp_of = operator.attrgetter("warp")


class Order:
    """One order of one launch; the same seed gives the same order.

    The order of an odd seed is that of the even seed before it reversed, as far as the kernel lets it: of two blocks,
    or two threads of a block before it waits, one comes first in the one and the other in the other.
    """

    def __init__(self, seed: int):
        self._pair, self._reversed = divmod(seed, 2)
        self._random = random.Random()

    def places(self, count: int) -> Iterator[int]:
        """The numbers below ``count``, each once, for the clusters of blocks; what follows one is its alone."""
        for place in self._permuted(count):
            # So that a block has the same order of threads wherever it comes.
            self._seed(f"place {place}")
            yield place

    def _permuted(self, count: int) -> Iterator[int]:
        self._seed("grid")
        steps = range(count - 1, -1, -1) if self._reversed else range(count)
        if count <= _MOST_SHUFFLED:
            shuffled = list(range(count))
            self._random.shuffle(shuffled)
            return (shuffled[step] for step in steps)
        # Without a list of two thousand million.
        stride = self._random.randrange(count)
        while math.gcd(stride, count) != 1:
            stride = self._random.randrange(count)
        start = self._random.randrange(count)
        return ((start + stride * step) % count for step in steps)

    def _seed(self, what: str) -> None:
        # A text, since a number would lose its sign.
        self._random.seed(f"{self._pair} {what}")

    def queue(self) -> ShuffledQueue:
        """What takes the place of the launch's queue of threads that can run."""
        return ShuffledQueue(self._random, bool(self._reversed))


class ShuffledQueue:
    """Threads that can run: one warp of them after another, warps and the lanes of each in random order.

    The part of a deque that the scheduler uses. No warp is overtaken for ever by others that wait and can run again.
    """

    __slots__ = ("_added", "_lanes", "_random", "_reversed", "_warps")

    def __init__(self, source: random.Random, is_reversed: bool):
        self._random = source.random
        self._reversed = is_reversed
        self._added = 0
        self._warps: list[tuple[float, int, list[Thread]]] = []
        """A heap of (key, tie breaker, lanes, the first to run last)."""
        self._lanes: list[Thread] = []
        """What is left of the warp that runs now."""

    def extend(self, threads: Iterable[Thread]) -> None:
        random = self._random
        added = self._added
        for _, lanes in itertools.groupby(threads, _warp_of):
            self._push(added, sorted(lanes, key=lambda _: random(), reverse=self._reversed))

    def append(self, thread: Thread) -> None:
        self._push(self._added, [thread])

    def _push(self, time: int, lanes: list[Thread]) -> None:
        drawn = self._random()
        self._added += 1
        delay = 1.0 - drawn if self._reversed else drawn
        heapq.heappush(self._warps, (time + _MOST_OVERTAKING * delay, self._added, lanes))

    def popleft(self) -> Thread:
        if not self._lanes:
            self._lanes = heapq.heappop(self._warps)[2]
        return self._lanes.pop()

    def clear(self) -> None:
        self._warps.clear()
        self._lanes = []

    def __len__(self) -> int:
        return len(self._lanes) + sum(len(lanes) for _, _, lanes in self._warps)

    def __bool__(self) -> bool:
        return bool(self._lanes or self._warps)


class _Schedule(NamedTuple):
    """The setting of `schedule`."""

    seed: int

    def run(self, run_once: Callable[[Order | None], None], *_description: Any) -> None:
        run_once(Order(self.seed))


class Exploration:
    """The setting of `explore`, and its report."""

    def __init__(self, orders: int, seed: int):
        self.orders = orders
        """Orders that each launch is run in."""
        self.launches = 0
        """Launches explored so far; one that ended with an error counts too."""
        self._seeds = range(seed, seed + orders - 1)

    def run(
        self, run_once: Callable[[Order | None], None], kernel: str, function: Callable[..., None], args: Sequence[Any]
    ) -> None:
        """Run a launch in each order, and compare what it leaves in its arguments."""
        self.launches += 1
        arguments = _Arguments(function, args)
        before = arguments.contents()
        usual = self._run(run_once, None)
        after = arguments.contents()
        try:
            for seed in self._seeds:
                arguments.restore(before)
                recorded = self._run(run_once, seed)
                difference = describe_difference(arguments.arrays, after.values, seed, usual, recorded)
                if difference is not None:
                    raise OrderError(f"kernel {kernel}: {difference}")
        finally:
            arguments.restore(after)

    def _run(self, run_once: Callable[[Order | None], None], seed: int | None) -> Recorder:
        recorder = Recorder()
        try:
            with atomics.recorded(recorder):
                run_once(None if seed is None else Order(seed))
        except BaseException as error:
            annotate(error, f"in {order_name(seed)}, one of {self.orders} explored")
            raise
        return recorder


_current: contextvars.ContextVar[_Schedule | Exploration | None] = contextvars.ContextVar(
    "burt_numba_schedule", default=None
)


def current() -> _Schedule | Exploration | None:
    """The setting of the calling context. Its ``run`` gets how to run a launch once, and what the launch is."""
    return _current.get()


def _integer(where: str, value: Any) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{where}: expected an integer, got {value!r}")
    return int(value)


@contextmanager
def schedule(seed: int) -> Iterator[None]:
    """Run every launch within the block in another order of its blocks, warps and lanes.

    The innermost of the blocks of `schedule` and `explore` around a launch holds.

    Parameters
    ----------
    seed : int
        Names the order, the same in every launch of the same grid and blocks. An odd number gives the reverse of the
        order of the even number before it, as far as the kernel lets it.

    Raises
    ------
    TypeError
        When ``seed`` is no integer.

    Examples
    --------
    >>> import numpy as np
    >>> from burt_numba import simulator
    >>> from burt_numba.backend import cuda
    >>> @cuda.jit
    ... def last(result):
    ...     result[0] = cuda.blockIdx.x
    >>> result = np.zeros(1, np.int32)
    >>> with simulator.schedule(seed=1):
    ...     last[4, 1](result)
    >>> result
    array([2], dtype=int32)
    """
    chosen = _Schedule(_integer("schedule: seed", seed))
    installation.require("schedule")
    token = _current.set(chosen)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def explore(n: int, seed: int = 0) -> Iterator[Exploration]:
    """Run every launch within the block in several orders, which must all leave the same bits in its arguments.

    Each order starts from the same memory, and the memory after the launch is that of the usual order. Only arrays
    among the arguments are compared and restored, not what a kernel reaches in other ways.

    Parameters
    ----------
    n : int
        Orders: the usual one, and those of ``schedule(seed)`` to ``schedule(seed + n - 2)``.
    seed : int
        The first seed. With an even one and ``n`` of 3 or more, every two blocks run in either order.

    Yields
    ------
    Exploration
        With ``launches``, the number explored so far, and ``orders``, which is ``n``.

    Raises
    ------
    TypeError
        When ``n`` or ``seed`` is no integer.
    ValueError
        When ``n`` is below 2.
    OrderError
        By a launch whose result differs: where, and which atomics the order has to do with.

    Examples
    --------
    >>> import numpy as np
    >>> from burt_numba import simulator
    >>> from burt_numba.backend import cuda
    >>> @cuda.jit
    ... def count(values, positive):
    ...     if values[cuda.grid(1)] > 0:
    ...         cuda.atomic.add(positive, 0, 1)
    >>> positive = np.zeros(1, np.int32)
    >>> with simulator.explore(4) as report:
    ...     count[2, 32](np.arange(-10, 54), positive)
    >>> positive, report.launches, report.orders
    (array([53], dtype=int32), 1, 4)
    """
    orders = _integer("explore: n", n)
    first_seed = _integer("explore: seed", seed)
    if orders < 2:
        raise ValueError(f"explore: n: expected at least 2 orders, got {orders}")
    exploration = Exploration(orders, first_seed)
    installation.require("explore")
    token = _current.set(exploration)
    try:
        yield exploration
    finally:
        _current.reset(token)


# --- the memory of a launch -----------------------------------------------------------------------------------------


class _Contents(NamedTuple):
    values: list[Array]
    written: Any


class _Arguments:
    """The arrays among the arguments that a kernel can write to.

    Each is saved and restored element by element: those that share memory agree about it, and memory between the
    elements, which may be somebody else's, is left alone.
    """

    def __init__(self, function: Callable[..., None], args: Sequence[Any]):
        code = getattr(function, "__code__", None)
        names = () if code is None else code.co_varnames[: code.co_argcount]
        self.arrays: list[tuple[str, Array]] = []
        for place, argument in enumerate(args):
            self._add(names[place] if place < len(names) else f"argument {place}", argument)

    def _add(self, name: str, argument: Any) -> None:
        if isinstance(argument, np.ndarray):
            if argument.flags.writeable and not argument.dtype.hasobject:
                self.arrays.append((name, argument))
        elif isinstance(argument, (tuple, list)):
            for place, part in enumerate(argument):
                self._add(f"{name}[{place}]", part)

    def contents(self) -> _Contents:
        return _Contents(
            [as_bytes(array).copy() for _, array in self.arrays], written_so_far(array for _, array in self.arrays)
        )

    def restore(self, contents: _Contents) -> None:
        for (_, array), values in zip(self.arrays, contents.values, strict=True):
            as_bytes(array)[...] = values
        restore_written(contents.written)
