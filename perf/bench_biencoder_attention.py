"""Cases of biencoder_attention: the documented size, more contexts, long sequences, one query over many contexts.

Scores are normal with a standard deviation of 3, entropy_bound is 0.20; it acts on nearly every query. On such scores
the two best contexts of some queries lie so close that no temperature down to temperature_min reaches the bound: those
record an event, as they would for a user.

    fp32, tf32    float32 arrays at either precision; the comparisons run in the same
    no bound      plain attention, what the bound costs
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import burt_numba
from burt_numba import reference
from perf import bench_constrained_softmax
from perf.bench_constrained_softmax import BOUND, ENTROPY_OVERFLOW, TEMPERATURE_MIN
from perf.case import ITEM_BYTES, Case, Inputs, Limit
from perf.checks import Wrong, all_finite, normal, require_close, require_events, sample
from perf.timing import torch

SPREAD = 3.0
"""Standard deviation of the scores."""
CARRYING = 0.045
"""The share of 65,536 contexts with such scores that carry weight, whose values have to be read (20 rows)."""
COLD = 0.1
"""Below this temperature the rounding of a score, which counts 1 / T times, is most of a row's error: it is taken
times T / COLD."""
ENTROPY_ROUNDING = 5e-6
"""Of the entropy that is reported, in nats."""


@dataclass(frozen=True)
class Size:
    """B samples of H heads, Q queries and K contexts of D elements."""

    B: int
    H: int
    Q: int
    K: int
    D: int

    def __str__(self) -> str:
        return f"{self.B}x{self.H}x{self.Q} K{self.K} D{self.D}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.B, self.H, self.Q, self.D)

    @property
    def elements(self) -> int:
        """Of the queries, the result, keys and values."""
        return 2 * self.B * self.H * (self.Q + self.K) * self.D

    @property
    def flops(self) -> int:
        """Both products."""
        return 2 * self.D * self.B * self.H * self.Q * self.K * 2


def make_inputs(size: Size, dtype: str, precision: str, seed: int) -> Inputs:
    # Eager PyTorch and SDPA multiply by this, from here to the end of the case.
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    storage = getattr(torch, dtype)
    contexts = (size.B, size.H, size.K, size.D)
    return {
        "query": normal(size.shape, math.sqrt(SPREAD), seed).to(storage),
        "context_keys": normal(contexts, math.sqrt(SPREAD), seed + 10_000).to(storage),
        "context_values": normal(contexts, 1.0, seed + 20_000).to(storage),
    }


def call(inputs: Inputs, out: torch.Tensor, errors: object, precision: str, bound: float | None) -> object:
    arrays = (inputs[name] for name in ("query", "context_keys", "context_values"))
    return burt_numba.biencoder_attention(*arrays, None, bound, precision=precision, out=out, errors=errors)


def check(inputs: Inputs, out: torch.Tensor, precision: str, bound: float | None) -> str:
    query, keys, values = (inputs[name] for name in ("query", "context_keys", "context_values"))
    batch, heads, queries, dims = query.shape
    out.fill_(float("nan"))
    temperature = torch.full((batch, heads, queries), float("nan"), dtype=torch.float32, device=query.device)
    entropy = torch.full_like(temperature, float("nan"))
    errors = burt_numba.ErrorBuffer()
    burt_numba.biencoder_attention(
        query, keys, values, None, bound, TEMPERATURE_MIN,
        precision=precision, temperature_out=temperature, entropy_out=entropy, out=out, errors=errors,
    )  # fmt: skip
    torch.cuda.synchronize()
    if not all_finite(out):
        raise Wrong("NaN or Inf in the output: elements not written, or wrong")
    require_events(errors.counts, () if bound is None else (ENTROPY_OVERFLOW,))
    searched = require_band(temperature, entropy, bound)

    ours, truth, warmth = [], [], []
    for row in sample(batch * heads * queries, keys.shape[2] * dims):
        b, h, i = int(row) // (heads * queries), int(row) // queries % heads, int(row) % queries
        contexts = (array[b : b + 1, h : h + 1].cpu().numpy() for array in (keys, values))
        warmth.append(temperature[b, h, i].item())
        ours.append(out[b, h, i].cpu().numpy())
        expected = reference.biencoder_attention(
            query[b : b + 1, h : h + 1, i : i + 1].cpu().numpy(), *contexts, None, bound, temperature=warmth[-1]
        )
        truth.append(expected.output[0, 0, 0])
    expected_rows, counts = np.stack(truth), np.minimum(1.0, np.asarray(warmth) / COLD)[:, None]
    rows = (expected_rows + (np.stack(ours) - expected_rows) * counts).astype(np.float64)
    kind = "tf32" if precision == "tf32" else str(query.dtype).removeprefix("torch.")
    error = require_close("biencoder_attention", rows, expected_rows, kind)
    unreachable = sum(errors.counts.values())
    return f"error {error:.1e}, {searched} of {temperature.numel()} queries searched, {unreachable} out of reach"


def require_band(temperature: torch.Tensor, entropy: torch.Tensor, bound: float | None) -> int:
    """How many queries were searched; the entropy of each of them is in its band."""
    if not bool(((temperature >= TEMPERATURE_MIN * (1 - 1e-6)) & (temperature <= 1) & torch.isfinite(entropy)).all()):
        raise Wrong("temperature_out or entropy_out: not written, or out of range")
    if bound is None:
        if not bool((temperature == 1).all()):
            raise Wrong("a temperature was lowered where there is no bound")
        return 0
    searched = (temperature < 1) & (temperature > TEMPERATURE_MIN * (1 + 1e-6))
    if bool((entropy[temperature == 1] > bound + ENTROPY_ROUNDING).any()):
        raise Wrong("the bound is exceeded on queries that were not searched")
    low, high = bound - max(1e-4 * bound, 1e-6) - ENTROPY_ROUNDING, bound + 1e-6 + ENTROPY_ROUNDING
    found = entropy[searched]
    if bool((found > high).any()):
        raise Wrong(f"entropy {found.max().item():.7f} over the bound")
    # A query whose iterations ran out may lie lower, but that is rare.
    below = int((found < low).sum())
    if below > max(1, found.numel() // 50):
        raise Wrong(f"entropy down to {found.min().item():.5f}, under the band on {below} of {found.numel()} queries")
    return int(searched.sum())


# Comparisons ---------------------------------------------------------------------------------------------------------


def eager(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As it is written in PyTorch: all scores, the bound by 20 bisections of T, all weights."""
    scores = (query @ keys.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    weights = bench_constrained_softmax.eager(scores.flatten(0, 2)).view(scores.shape)
    return weights.to(values.dtype) @ values


def eager_tf32(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The same, to be compiled by itself."""
    return eager(query, keys, values)


def eager_unbounded(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    scores = (query @ keys.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    return torch.softmax(scores, dim=-1).to(values.dtype) @ values


def fused(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention without a bound, as the library has it."""
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values)


# Cases ---------------------------------------------------------------------------------------------------------------


def make_case(
    size: Size,
    stands_for: str,
    dtype: str,
    precision: str,
    bound: float | None = BOUND,
    limit: Limit | None = None,
    moved: int | None = None,
) -> Case:
    written: Callable[..., torch.Tensor] = eager_tf32 if precision == "tf32" else eager
    return Case(
        op="biencoder_attention",
        name=str(size),
        stands_for=stands_for,
        dtype=dtype,
        variant=precision if bound is not None else f"{precision}, no bound",
        shape=size.shape,
        bytes_moved=size.elements * ITEM_BYTES[dtype] if moved is None else moved,
        flops=size.flops,
        make=lambda seed: make_inputs(size, dtype, precision, seed),
        first="query",
        call=lambda inputs, out, errors: call(inputs, out, errors, precision, bound),
        check=lambda inputs, out: check(inputs, out, precision, bound),
        eager=eager_unbounded if bound is None else written,
        eager_inputs=("query", "context_keys", "context_values"),
        limit=limit,
        plain=fused,
        set_bytes=size.elements * ITEM_BYTES[dtype],
    )


def list_cases() -> list[Case]:
    sizes = [
        (Size(32, 8, 512, 64, 64), "the documented size", (80, 45, 35)),
        (Size(32, 8, 512, 1024, 64), "more contexts", (1400, 450, 300)),
        (Size(8, 16, 2048, 2048, 64), "a long sequence", (5500, 1700, 1200)),
    ]
    cases = []
    for size, stands_for, limits in sizes:
        for (dtype, precision), limit in zip(
            (("float32", "fp32"), ("float32", "tf32"), ("float16", "fp32")), limits, strict=True
        ):
            cases.append(make_case(size, stands_for, dtype, precision, limit=Limit(limit)))
            cases.append(make_case(size, f"{stands_for}, without a bound", dtype, precision, None))
    one = Size(4, 8, 1, 65_536, 128)
    # Keys are read once, of the values only those that carry weight.
    read = int(4 * one.B * one.H * one.D * (one.K * (1 + CARRYING) + 2 * one.Q))
    cases.append(
        make_case(one, "one query over a large store", "float32", "fp32", limit=Limit(1.2, "ceiling"), moved=read)
    )
    cases.append(make_case(one, "one query over a large store, without a bound", "float32", "fp32", None))
    return cases
