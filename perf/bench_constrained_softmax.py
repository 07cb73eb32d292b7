"""Cases of constrained_softmax: the documented sizes, vocabularies, routers and single long rows.

Logits are normal with a standard deviation of 2, entropy_bound is 0.20. "active": the bound binds on every row;
"inactive": on none, because one logit a row leads by about 40. On plain normals of a few thousand classes the two
largest logits of some rows (about one in fifteen) lie so close that no temperature down to temperature_min reaches
the bound: those rows record an event, as they would for a user. "active, clear lead" has none of them.
"""

from __future__ import annotations

import numpy as np

import burt_numba
from burt_numba import reference
from perf.case import ITEM_BYTES, Case, Inputs, Limit
from perf.checks import Wrong, normal, require_close, require_distributions, require_events, sample
from perf.timing import torch

BOUND = 0.20
TEMPERATURE_MIN = 0.01
ENTROPY_OVERFLOW = 3


def entropy_at_one(logits: torch.Tensor) -> torch.Tensor:
    log_p = torch.log_softmax(logits.float(), dim=-1)
    return -(log_p.exp() * log_p).sum(-1)


def make_logits(rows: int, classes: int, dtype: str, variant: str, seed: int) -> Inputs:
    logits = normal((rows, classes), 2.0, seed)
    if variant == "active, clear lead":
        leader = logits.argmax(-1, keepdim=True)
        logits.scatter_add_(-1, leader, torch.full_like(leader, 0.5, dtype=torch.float32))
    if variant == "inactive":
        generator = torch.Generator(device=logits.device).manual_seed(seed)
        leader = torch.randint(0, classes, (rows, 1), generator=generator, device=logits.device)
        logits.scatter_add_(-1, leader, torch.full_like(leader, 40.0, dtype=torch.float32))
    else:
        # Short rows can be peaked by chance: flatten those until the bound binds on them too.
        for _ in range(6):
            peaked = entropy_at_one(logits) < 1.25 * BOUND
            logits = torch.where(peaked[:, None], 0.5 * logits, logits)
    return {"logits": logits.to(getattr(torch, dtype))}


def call(inputs: Inputs, out: torch.Tensor, errors: object) -> object:
    return burt_numba.constrained_softmax(inputs["logits"], BOUND, out=out, errors=errors)


def check(inputs: Inputs, out: torch.Tensor, variant: str) -> str:
    logits = inputs["logits"]
    rows = logits.shape[0]
    active = entropy_at_one(logits) > BOUND
    expected_active = 0 if variant == "inactive" else rows
    if int(active.sum()) != expected_active:
        raise Wrong(f"the case's own inputs: the bound binds on {int(active.sum())} of {rows} rows")

    out.fill_(float("nan"))
    temperature = torch.full((rows,), float("nan"), dtype=torch.float32, device=logits.device)
    entropy = torch.full_like(temperature, float("nan"))
    errors = burt_numba.ErrorBuffer()
    burt_numba.constrained_softmax(
        logits, BOUND, TEMPERATURE_MIN, temperature_out=temperature, entropy_out=entropy, out=out, errors=errors
    )
    torch.cuda.synchronize()
    require_distributions(out)
    if not bool(((temperature >= TEMPERATURE_MIN * (1 - 1e-6)) & (temperature <= 1) & torch.isfinite(entropy)).all()):
        raise Wrong("temperature_out or entropy_out: not written, or out of range")
    require_events(errors.counts, () if variant == "inactive" else (ENTROPY_OVERFLOW,))
    unreachable = sum(errors.counts.values())
    if variant == "inactive" and not bool((temperature == 1).all()):
        raise Wrong("a temperature was lowered where the bound does not bind")
    if variant == "active, clear lead" and unreachable:
        raise Wrong(f"{unreachable} rows recorded as out of reach that are within it")

    chosen = sample(rows, logits.shape[1])
    index = torch.from_numpy(chosen).to(logits.device)
    returned = temperature[index].cpu().numpy().astype(np.float64)
    ours = out[index].cpu().numpy()
    truth = reference.constrained_softmax(
        logits[index].cpu().numpy(), BOUND, TEMPERATURE_MIN, temperature=returned
    ).probabilities
    error = require_close("constrained_softmax", ours, truth)
    if variant != "inactive":
        # Entropy is promised for the float32 values, before a float16 output rounds them.
        require_band(reference.entropy(ours if ours.dtype == np.float32 else truth), returned)
    return f"error {error:.1e}, {unreachable} of {rows} rows out of reach"


def require_band(entropy: np.ndarray, temperature: np.ndarray) -> None:
    """bound − max(1e-4·bound, 1e-6) ≤ H ≤ bound + 1e-6, except above it at temperature_min."""
    at_minimum = temperature <= TEMPERATURE_MIN * (1 + 1e-6)
    over = (entropy > BOUND + 1e-6) & ~at_minimum
    if over.any():
        raise Wrong(f"entropy {entropy[over].max():.7f} over the bound on {over.sum()} of {len(entropy)} rows")
    # A row whose iterations ran out may lie lower, but that is rare: many of them are a search that does not work.
    low = entropy < BOUND - max(1e-4 * BOUND, 1e-6)
    if low.sum() > max(1, len(entropy) // 50):
        raise Wrong(f"entropy down to {entropy.min():.5f}, under the band on {low.sum()} of {len(entropy)} rows")


def eager(logits: torch.Tensor) -> torch.Tensor:
    """The bound by 20 bisections of T, as it is written in PyTorch: batched, with no transfer to the host."""
    z = logits.float()
    low = torch.full_like(z[:, :1], TEMPERATURE_MIN)
    high = torch.ones_like(low)
    plain = torch.softmax(z, dim=-1)
    fits = -(plain * torch.log(plain + 1e-20)).sum(-1, keepdim=True) <= BOUND
    for _ in range(20):
        middle = 0.5 * (low + high)
        p = torch.softmax(z / middle, dim=-1)
        within = -(p * torch.log(p + 1e-20)).sum(-1, keepdim=True) <= BOUND
        low = torch.where(within, middle, low)
        high = torch.where(within, high, middle)
    temperature = torch.where(fits, torch.ones_like(low), low)
    return torch.softmax(z / temperature, dim=-1).to(logits.dtype)


def count_flops(rows: int, classes: int, variant: str) -> int:
    """Subtract, scale, exponential, sum, divide; where the bound is active, the entropy once more at the least."""
    return rows * classes * (5 if variant == "inactive" else 5 + 6)


def make_case(
    rows: int,
    classes: int,
    stands_for: str,
    variant: str,
    limit: Limit | None = None,
    dtype: str = "float32",
    cached: bool = False,
) -> Case:
    return Case(
        op="constrained_softmax",
        name=f"{rows}x{classes}",
        stands_for=stands_for,
        dtype=dtype,
        variant=variant,
        shape=(rows, classes),
        bytes_moved=2 * rows * classes * ITEM_BYTES[dtype],
        flops=count_flops(rows, classes, variant),
        make=lambda seed: make_logits(rows, classes, dtype, variant, seed),
        first="logits",
        call=call,
        check=lambda inputs, out: check(inputs, out, variant),
        eager=eager,
        eager_inputs=("logits",),
        limit=Limit(1.15, "plain") if variant == "inactive" else limit,
        cached=cached,
    )


def list_cases() -> list[Case]:
    sizes = [
        (32, 50_000, "a vocabulary of 50,000, one step of 32 sequences (latency)", Limit(28)),
        (32, 1_000, "a classifier's head, 32 rows (latency)", Limit(7)),
        (4_096, 4_096, "a large batch of medium rows (throughput)", Limit(110)),
        (64, 128_256, "a vocabulary of 128,256, one step of 64 sequences", Limit(110)),
        (1_048_576, 8, "a router over 8 experts, a million tokens", None),
        (16_384, 64, "a router over 64 experts", None),
        (8, 262_144, "fewer rows than multiprocessors, rows past shared memory", None),
        (1, 1_000_000, "one long row", None),
    ]
    cases = []
    for rows, classes, stands_for, limit in sizes:
        # Small enough to stay in the cache between calls; both are timed, as a model may find its logits there.
        where = (False, True) if rows == 32 else (False,)
        for variant in ("active", "inactive"):
            for cached in where:
                cases.append(make_case(rows, classes, stands_for, variant, limit, cached=cached))
        if (rows, classes) == (4_096, 4_096):
            stands_for_lead = "the same with no row that records an event: the price of reporting"
            cases.append(make_case(rows, classes, stands_for_lead, "active, clear lead"))
    for rows, classes, stands_for, _ in sizes[:5]:
        for variant in ("active", "inactive"):
            cases.append(make_case(rows, classes, f"{stands_for}, float16", variant, dtype="float16"))
    return cases
