"""What a benchmark case is: the operation's own count of bytes, how inputs are made, what it is held against."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Inputs = Mapping[str, Any]
"""The torch tensors of one call, by argument name."""

ITEM_BYTES = {"float32": 4, "float16": 2}


@dataclass(frozen=True)
class Limit:
    """The time asked of a case: microseconds, or a multiple of something measured in the same run."""

    factor: float
    of: str = "us"
    """"us", "ceiling" (the same bytes at the copy ceiling), "copy" (of the same bytes), "whole copy" (every element
    read and written) or "plain"."""

    def __post_init__(self) -> None:
        if self.of not in ("us", "ceiling", "copy", "whole copy", "plain"):
            raise ValueError(f"Limit: of: expected us, ceiling, copy, whole copy or plain, got {self.of!r}")

    def microseconds(self, measured: Mapping[str, float | None]) -> float | None:
        """Return the limit, or None where what it is a multiple of was not measured."""
        if self.of == "us":
            return self.factor
        base = measured.get(self.of)
        return None if base is None else self.factor * base

    def __str__(self) -> str:
        return f"{self.factor:g} us" if self.of == "us" else f"{self.factor:g} x {self.of}"


@dataclass(frozen=True)
class Case:
    """One line of the table. The runner does the rest."""

    op: str
    name: str
    stands_for: str
    dtype: str
    variant: str
    shape: tuple[int, ...]
    """Of the output."""
    bytes_moved: int
    """What the operation has to move: each input element it needs read once, each output element written once."""
    flops: int
    make: Callable[[int], Inputs]
    """Inputs on the device, from a seed."""
    first: str
    """Name of the first input, which has the output's dtype."""
    call: Callable[[Inputs, Any, Any], object]
    """(inputs, out, errors): one call of the operation."""
    check: Callable[[Inputs, Any], str]
    """(inputs, out): hold one call against the reference; a note on success, `checks.Wrong` otherwise."""
    eager: Callable[..., Any]
    """The same in eager PyTorch, as a user would write it; also what torch.compile gets."""
    eager_inputs: tuple[str, ...]
    limit: Limit | None = None
    cached: bool = False
    """Time calls over one set of buffers, so that small inputs come from the L2 cache."""
    in_place: bool = False
    steady: bool = False
    """In place, and a call leaves the values that it found: calls may follow one another over the same buffers."""
    has_plain: bool = True
    """There is an operation without the constraint."""
    plain: Callable[..., Any] | None = None
    """That operation, of `eager_inputs`; torch.softmax of the first input where it is not given."""
    set_bytes: int = 0
    """Of inputs and output together, where the output is the lesser part."""
    offset: int = 0
    """Elements by which the buffers start past an aligned address."""
    verify: Callable[[Sequence[Inputs], Sequence[Any], Callable[[], None]], None] | None = None
    """(sets of inputs, their outputs, replay): show that a replay does the work, where a call need not write every
    element of its output, or need not write the same ones."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def whole_bytes(self) -> int:
        """Every element of the output, and as much read."""
        return 2 * self.elements * ITEM_BYTES[self.dtype]

    @property
    def data(self) -> str:
        """Where the timed calls find their inputs."""
        if self.in_place and not self.steady:
            return "fresh"
        return "cached" if self.cached else "rotated"

    @property
    def title(self) -> str:
        return f"{self.op} {self.name} {self.dtype} {self.variant} {self.data}"

    def matches(self, text: str) -> bool:
        """True when every word of `text` begins a word of the title ("active" is not found in "inactive")."""
        title = self.title.lower().split()
        return all(any(word.startswith(wanted) for word in title) for wanted in text.lower().split())

    def arguments(self, inputs: Inputs) -> tuple[Any, ...]:
        """Return what `eager` takes."""
        return tuple(inputs.get(name) for name in self.eager_inputs)


BASE_NAMES = {
    "cifg": ("cifg_update", "batched_cifg_update"),
    "moe": ("sparse_moe_dispatch", "sparse_moe_combine"),
    "flash": ("flash_decoding_reduce", "flash_decoding_chunk", "flash_decoding", "merge_attention_states"),
}
"""Functions that share a name in package, tests and perf."""


def is_of(operation: str, asked: str | None) -> bool:
    """Whether a function is the one asked for, or of the base name asked for; all are where nothing is."""
    return asked is None or operation == asked or operation in BASE_NAMES.get(asked, ())


def sets_to_rotate(set_bytes: int, cache_bytes: int, most: int = 1024) -> int:
    """How many sets of buffers a timing turns through so that none is found in the cache: three caches full."""
    return max(1, min(most, math.ceil(3 * cache_bytes / max(set_bytes, 1))))
