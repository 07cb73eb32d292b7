"""Cases of cifg_update and batched_cifg_update: one memory, a batch of memories, and one memory shared by a batch.

n = d, the bound is 0.95, and C is normal. Its largest singular value is about 0.9 of the bound ("warm" and "cold"), and
b_f = 40 makes f = 1 to the last bit, so that a call in place leaves C as it found it and calls can follow one another.

    warm          power_vector carried: one sweep, in which one step settles that sigma is within the bound
    certificate   sigma_bound carried as well, C at 0.2 of the bound: a proof without any step. (It grows by 1e-5 a
                  call, for the rounding; it holds for 138,000 calls.)
    cold          nothing carried: all steps are made, since C may hide a larger singular value
    write above   into out=, power_vector carried: each call writes along the top direction of a memory just within the
                  bound, and cuts what exceeds it
    projection    into out=, nothing carried: C at 3 times the bound in one direction, at 0.6 in the others, so that the
                  second singular value has to be known before the first is cut (a shared memory is scaled)

A memory that the L2 cache holds stays there from call to call, as it does in use.
"""

from __future__ import annotations

import numpy as np

import burt_numba
from burt_numba import reference
from burt_numba.cifg import bytes_moved, flops
from perf.case import Case, Inputs, Limit
from perf.checks import Wrong, all_finite, normal, relative_error, require_close, require_events
from perf.timing import torch

BOUND = 0.95
OPEN = 40.0
"""A bias at which the forget gate is 1 in float32 and the write vanishes."""
WRITING = 2.2
"""A bias at which it is 0.9."""
CACHED_BYTES = 48 * 1024**2
REFERENCE_SIZE = 1_024
"""The largest d whose SVD the reference makes in a second; beyond it float64 on the device takes its place."""
PROJECTED_LIMIT = 1e-4
"""On the error of a projected memory: its direction is known to 5e-6 of sigma², over the gap to the next one."""
VARIANTS = ("warm", "certificate", "cold", "write above", "projection")
IN_PLACE = ("warm", "certificate", "cold")


def unit(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    vectors = normal(shape, 1.0, seed)
    return vectors / vectors.norm(dim=-1, keepdim=True)


def make_inputs(batch: tuple[int, ...], d: int, shared: bool, variant: str, seed: int) -> Inputs:
    """C as the variant has it; `batch` is () for one memory, else (B,)."""
    memories = () if shared else batch
    h, x = unit((*batch, d), seed + 1), normal((*batch, d), 1.0, seed + 2)
    # The largest singular value of a normal matrix is about 2 √d.
    share = {"warm": 0.9, "cold": 0.9, "certificate": 0.2, "write above": 0.3, "projection": 0.6}[variant]
    C = normal((*memories, d, d), share * BOUND / (2 * d**0.5), seed)
    W_f, bias = normal((d, 2 * d), 1 / (2 * d) ** 0.5, seed + 3), OPEN
    if variant == "write above":
        # One direction, in which C is near the bound: 0.9 of that and 0.1 · 3 of the bound. One gate for all rows.
        C += 0.95 * BOUND * h[..., :, None] * h[..., None, :]
        h = (3 * BOUND) ** 0.5 * h
        W_f, bias = torch.zeros_like(W_f), WRITING
    if variant == "projection":
        left, right = unit((*memories, d), seed + 4), unit((*memories, d), seed + 5)
        C += 3 * BOUND * left[..., :, None] * right[..., None, :]
    inputs = {"C": C, "h": h, "x": x, "W_f": W_f, "b_f": torch.full_like(W_f[:, 0], bias)}
    if variant not in ("cold", "projection"):
        inputs["power_vector"] = torch.zeros_like(C[..., 0])
    if variant == "certificate":
        inputs["sigma_bound"] = torch.full_like(C[..., 0, :1].reshape(-1), 0.25 * BOUND)
    # For the comparisons alone.
    inputs["start"] = unit((*memories, d), seed + 6)
    return inputs


def call(inputs: Inputs, out: torch.Tensor | None, errors: object, shared: bool | None, **more: object) -> object:
    """`shared`: None for one memory. Without `out`, in place."""
    arguments = tuple(inputs[name] for name in ("C", "h", "x", "W_f", "b_f"))
    carried = {name: inputs.get(name) for name in ("power_vector", "sigma_bound")}
    if shared is None:
        return burt_numba.cifg_update(*arguments, BOUND, out=out, errors=errors, **carried, **more)
    return burt_numba.batched_cifg_update(*arguments, BOUND, shared, out=out, errors=errors, **carried, **more)


def check(inputs: Inputs, out: torch.Tensor, shared: bool | None, variant: str) -> str:
    C = inputs["C"]
    in_place = variant in IN_PLACE
    matrices = 1 if C.dim() == 2 else len(C)
    sigma = torch.full((matrices,), float("nan"), dtype=torch.float32, device=C.device)
    gate = torch.full_like(inputs["h"], float("nan"))
    errors = burt_numba.ErrorBuffer()
    # More than once, so that the carried vector has come to rest.
    for _ in range(4):
        if in_place:
            out.copy_(C)
        else:
            out.fill_(float("nan"))
        given = {**inputs, "C": out} if in_place else inputs
        call(given, None if in_place else out, errors, shared, sigma_out=sigma, forget_gate_out=gate)
    torch.cuda.synchronize()
    if not (all_finite(out) and all_finite(sigma) and all_finite(gate)):
        raise Wrong("NaN or Inf in an output: elements not written, or wrong")
    require_events(errors.counts)
    largest = sigma.max().item()
    if in_place:
        # f = 1: every element, not a sample.
        if not torch.allclose(out, C, rtol=1e-6, atol=1e-9):
            raise Wrong("C changed in a call that forgets and writes nothing")
        if not largest <= BOUND:
            raise Wrong(f"sigma {largest:.4f} of a memory within the bound")
    elif not sigma.min().item() > BOUND:
        raise Wrong("the case's own inputs: a memory that needs no projection")

    name = "cifg_update" if shared is None else "batched_cifg_update"
    chosen = [None] if C.dim() == 2 else sorted({0, matrices // 2, matrices - 1})
    ours = np.stack([(out if k is None else out[k]).cpu().numpy() for k in chosen])
    truth = np.stack([compute_truth(inputs, k, shared) for k in chosen])
    after = max(float(np.linalg.norm(memory.astype(np.float64), 2)) for memory in ours) if not in_place else largest
    if not after <= BOUND * (1 + 1e-3):
        raise Wrong(f"sigma {after:.5f} after the projection, {BOUND} allowed")
    if in_place:
        error = require_close(name, ours, truth)
    else:
        error = relative_error(ours, truth)
        if not error <= PROJECTED_LIMIT:
            raise Wrong(f"relative error {error:.2e} over {PROJECTED_LIMIT:.0e} on {len(ours)} memories")
    return f"error {error:.1e}, sigma {largest:.3f}"


def compute_truth(inputs: Inputs, k: int | None, shared: bool | None) -> np.ndarray:
    """The k-th memory after the update, from the reference; k is None for the only one."""
    C, h, x, W_f, b_f = (inputs[name] for name in ("C", "h", "x", "W_f", "b_f"))
    if k is not None:
        C, h, x = C[k], h[k], x[k]
    if len(W_f) > REFERENCE_SIZE and not shared:
        return project_on_device(*(array.double() for array in (C, h, x, W_f, b_f))).cpu().numpy()
    arrays = [array.cpu().numpy() for array in (C, h, x, W_f, b_f)]
    if shared:
        return reference.batched_cifg_update(*arrays, BOUND, True).memory
    return reference.cifg_update(*arrays, BOUND).memory


def project_on_device(
    C: torch.Tensor, h: torch.Tensor, x: torch.Tensor, W: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """The reference in float64 on the GPU, for one large memory: the singular values from C'ᵀC'."""
    f = torch.sigmoid(W @ torch.cat([h, x]) + b)
    C = f[:, None] * C + torch.outer((1 - f) * h, h)
    squares, vectors = torch.linalg.eigh(C.mT @ C)
    largest, second, v = squares[-1].sqrt(), squares[-2].sqrt(), vectors[:, -1]
    if largest <= BOUND:
        return C
    return C - (1 - BOUND / largest) * torch.outer(C @ v, v) if second <= BOUND else C * (BOUND / largest)


def scale_to_bound(C: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One power step from v, the estimate of sigma, and the scale where it is above the bound."""
    v = (C.mT @ (C @ v[..., None]))[..., 0]
    v = v / v.norm(dim=-1, keepdim=True)
    sigma = (C @ v[..., None])[..., 0].norm(dim=-1)
    return C * torch.where(sigma > BOUND, BOUND / sigma, torch.ones_like(sigma))[..., None, None]


def eager(
    C: torch.Tensor, h: torch.Tensor, x: torch.Tensor, W_f: torch.Tensor, b_f: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """One memory, or one for each sample, as it is written in PyTorch; no transfer to the host."""
    f = torch.sigmoid(torch.cat([h, x], dim=-1) @ W_f.T + b_f)
    C = f[..., :, None] * C + ((1 - f) * h)[..., :, None] * h[..., None, :]
    return scale_to_bound(C, v)


def eager_shared(
    C: torch.Tensor, h: torch.Tensor, x: torch.Tensor, W_f: torch.Tensor, b_f: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """One memory, updated by the mean over the samples."""
    f = torch.sigmoid(torch.cat([h, x], dim=-1) @ W_f.T + b_f)
    C = f.mean(dim=0)[:, None] * C + ((1 - f) * h).T @ h / len(h)
    return scale_to_bound(C, v)


def make_case(
    batch: tuple[int, ...], d: int, shared: bool | None, stands_for: str, variant: str, limit: Limit | None
) -> Case:
    samples = batch[0] if batch else 1
    memories = () if shared else batch
    in_place = variant in IN_PLACE
    name = f"d{d}" if shared is None else f"{samples}x{d}{' shared' if shared else ''}"
    return Case(
        op="cifg_update" if shared is None else "batched_cifg_update",
        name=name,
        stands_for=stands_for,
        dtype="float32",
        variant=variant,
        shape=(*memories, d, d),
        bytes_moved=bytes_moved(d, 2 * d, samples, bool(shared)),
        flops=flops(d, 2 * d, samples, bool(shared), steps=0 if variant == "certificate" else 1),
        make=lambda seed: make_inputs(batch, d, bool(shared), variant, seed),
        first="C",
        call=lambda inputs, out, errors: call(inputs, None if in_place else out, errors, shared),
        check=lambda inputs, out: check(inputs, out, shared, variant),
        eager=eager_shared if shared else eager,
        eager_inputs=("C", "h", "x", "W_f", "b_f", "start"),
        limit=limit if variant == "warm" else None,
        cached=4 * d * d * (samples if memories else 1) <= CACHED_BYTES,
        in_place=in_place,
        steady=in_place,
        has_plain=False,
    )


def list_cases() -> list[Case]:
    sizes: list[tuple[tuple[int, ...], int, bool | None, str, float]] = [
        ((), 256, None, "one step of a small memory (latency)", 6),
        ((), 512, None, "one step of a memory (latency)", 8),
        ((), 1_024, None, "one step of a large memory", 12),
        ((), 4_096, None, "a memory beyond the cache (throughput)", 100),
        ((32,), 512, False, "a memory for each of 32 sequences", 30),
        ((256,), 512, False, "a memory for each of 256 sequences (throughput)", 190),
        ((32,), 1_024, False, "large memories for 32 sequences", 95),
        ((32,), 512, True, "one memory for 32 sequences", 13),
        ((256,), 512, True, "one memory for 256 sequences", 18),
    ]
    return [
        make_case(batch, d, shared, stands_for, variant, Limit(limit))
        for batch, d, shared, stands_for, limit in sizes
        for variant in VARIANTS
        # A shared memory is scaled whatever it was before the write.
        if not (shared and variant == "write above")
    ]
