"""Correctness before speed: what the benchmark cases check with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perf.timing import DEVICE, torch

NORM_LIMIT = {
    ("constrained_softmax", "float32"): 5e-6,
    ("attention_softmax", "float32"): 1e-5,
    ("constrained_softmax", "float16"): 2e-3,
    ("attention_softmax", "float16"): 2e-3,
    ("cifg_update", "float32"): 5e-6,
    ("batched_cifg_update", "float32"): 5e-6,
    ("sparse_moe_combine", "float32"): 5e-6,
    ("sparse_moe_combine", "float16"): 2e-3,
    ("biencoder_attention", "float32"): 1e-5,
    ("biencoder_attention", "float16"): 2e-3,
    ("biencoder_attention", "tf32"): 1e-2,
    ("flash_decoding_reduce", "float32"): 5e-6,
    ("flash_decoding_chunk", "float32"): 1e-5,
    ("flash_decoding", "float32"): 1e-5,
    ("flash_decoding", "float16"): 2e-3,
    ("merge_attention_states", "float32"): 5e-6,
    ("merge_attention_states", "float16"): 2e-3,
}
"""Limits on ‖out − ref‖ / ‖ref‖, the ones that the operations promise."""

SUM_TOLERANCE = {"float32": 1e-4, "float16": 2e-2}
"""How far a row's sum may be from 1: float32 sums of up to a million terms; float16 storage rounds each term."""

MOST_ROWS, MOST_ELEMENTS = 64, 4_000_000
"""The sample that goes to the float64 reference."""


class Wrong(Exception):
    """A result that fails its check; no speed is reported."""


def sample(rows: int, row_length: int, seed: int = 0) -> NDArray[np.int64]:
    """Rows to hold against the reference: the first, the last and random ones between them, in order."""
    count = max(1, min(rows, MOST_ROWS, MOST_ELEMENTS // row_length))
    if count == rows:
        return np.arange(rows)
    inner = np.random.default_rng(seed).choice(np.arange(1, rows - 1), size=max(0, count - 2), replace=False)
    return np.unique(np.concatenate(([0, rows - 1], inner)).astype(np.int64))


def relative_error(out: NDArray[Any], reference: NDArray[np.float64]) -> float:
    """‖out − ref‖ / ‖ref‖ in float64; NaN in `out` gives NaN."""
    difference = np.linalg.norm((out.astype(np.float64) - reference).ravel())
    size = np.linalg.norm(reference.ravel())
    return float(difference / size) if size > 0 else float(difference)


def require_close(op: str, out: NDArray[Any], reference: NDArray[np.float64], kind: str | None = None) -> float:
    """The error; `kind` of arithmetic is the output's type where it is not given."""
    error = relative_error(out, reference)
    limit = NORM_LIMIT[op, str(out.dtype) if kind is None else kind]
    if not error <= limit:
        raise Wrong(f"relative error {error:.2e} over {limit:.0e} on {len(out)} rows")
    return error


def all_finite(tensor: torch.Tensor) -> bool:
    """One reduction: a NaN or an Inf anywhere reaches the sum."""
    return math.isfinite(tensor.sum(dtype=torch.float32).item())


def require_distributions(out: torch.Tensor) -> None:
    """Every element was written, and every row sums to 1."""
    if not all_finite(out):
        raise Wrong("NaN or Inf in the output: elements not written, or wrong")
    tolerance = SUM_TOLERANCE[str(out.dtype).removeprefix("torch.")]
    worst = (out.sum(-1, dtype=torch.float32) - 1).abs().max().item()
    if not worst <= tolerance:
        raise Wrong(f"a row's sum is {worst:.2e} away from 1")


def require_events(counts: Mapping[Any, int], allowed: tuple[int, ...] = ()) -> None:
    """No event but of the codes that the inputs provoke."""
    unexpected = {int(code): count for code, count in counts.items() if count and int(code) not in allowed}
    if unexpected:
        raise Wrong(f"events recorded on valid inputs, code: count {unexpected}")


def allocate(shape: tuple[int, ...], dtype: str, offset: int = 0) -> torch.Tensor:
    """A C-contiguous tensor whose data starts `offset` elements past an aligned address, filled with NaN."""
    flat = torch.full((math.prod(shape) + offset,), float("nan"), dtype=getattr(torch, dtype), device=DEVICE)
    return flat[offset:].view(shape)


def normal(shape: tuple[int, ...], spread: float, seed: int) -> torch.Tensor:
    """float32 normals: peaked when put through a softmax, and never zeros, which would be timed too fast."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).mul_(spread)
