"""Cases of attention_softmax: the documented size, long contexts, causal, in place, odd lengths.

A float mask is normal on the keys that are there and −inf on the last eighth (padding); a bool mask is False there.
Scores are normal with a standard deviation of 3.
"""

from __future__ import annotations

import math

import numpy as np

import burt_numba
from burt_numba import reference
from perf.case import ITEM_BYTES, Case, Inputs, Limit
from perf.checks import Wrong, allocate, normal, require_close, require_distributions, require_events, sample
from perf.timing import DEVICE, torch

Shape = tuple[int, int, int, int]


def make_inputs(shape: Shape, dtype: str, mask: str, causal: bool, offset: int, seed: int) -> Inputs:
    batch, _, queries, keys = shape
    storage = getattr(torch, dtype)
    scores = allocate(shape, dtype, offset)
    scores.copy_(normal(shape, 3.0, seed))
    inputs = {"scores": scores}
    present = torch.arange(keys, device=DEVICE) < keys - keys // 8
    if mask == "float":
        added = normal((batch, 1, 1, keys), 1.0, seed + 10_000)
        inputs["mask"] = torch.where(present, added, -math.inf).to(storage)
    elif mask == "bool":
        inputs["mask"] = present.expand(batch, 1, 1, keys).contiguous()
    if causal:
        # For the comparisons alone; ours takes causal=True.
        inputs["future"] = torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).triu(1)
    return inputs


def call(inputs: Inputs, out: torch.Tensor, errors: object, causal: bool) -> object:
    return burt_numba.attention_softmax(inputs["scores"], inputs.get("mask"), causal, out=out, errors=errors)


def check(inputs: Inputs, out: torch.Tensor, causal: bool, in_place: bool) -> str:
    scores, mask = inputs["scores"], inputs.get("mask")
    _, heads, queries, keys = scores.shape
    given = scores
    if in_place:
        given = out.copy_(scores)
    else:
        out.fill_(float("nan"))
    errors = burt_numba.ErrorBuffer()
    burt_numba.attention_softmax(given, mask, causal, out=out, errors=errors)
    torch.cuda.synchronize()
    require_distributions(out)
    require_events(errors.counts)
    if causal:
        for b in range(scores.shape[0]):
            if int(out[b].triu(1).count_nonzero()):
                raise Wrong(f"weights above the diagonal in batch {b}")

    ours, truth = [], []
    for row in sample(scores.shape[0] * heads * queries, keys):
        b, h, i = int(row) // (heads * queries), int(row) // queries % heads, int(row) % queries
        ours.append(out[b, h, i].cpu().numpy())
        truth.append(
            reference.attention_softmax(
                scores[b : b + 1, h : h + 1, i : i + 1].cpu().numpy(),
                None if mask is None else mask[b : b + 1].cpu().numpy(),
                causal,
                causal_offset=i if causal else None,
            ).probabilities[0, 0, 0]
        )
    return f"error {require_close('attention_softmax', np.stack(ours), np.stack(truth)):.1e}"


def eager(scores: torch.Tensor, mask: torch.Tensor | None, future: torch.Tensor | None) -> torch.Tensor:
    """Mask, causal limit and softmax as they are written in PyTorch."""
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if future is not None:
        scores = scores.masked_fill(future, -math.inf)
    return torch.softmax(scores, dim=-1)


def count_bytes(shape: Shape, dtype: str, mask: str, causal: bool) -> int:
    """Scores read (causal: the diagonal and what is left of it), the mask read once, every weight written."""
    batch, heads, queries, keys = shape
    item = ITEM_BYTES[dtype]
    written = batch * heads * queries * keys
    read = batch * heads * queries * (queries + 1) // 2 if causal else written
    mask_item = {"none": 0, "float": item, "bool": 1}[mask]
    return (read + written) * item + batch * keys * mask_item


def count_flops(shape: Shape, mask: str, causal: bool) -> int:
    """Subtract, scale, exponential, sum, divide, and the added mask, on every score that counts."""
    batch, heads, queries, keys = shape
    scores = batch * heads * queries * ((queries + 1) / 2 if causal else keys)
    return int(scores * (6 if mask != "none" else 5))


def make_case(
    shape: Shape,
    stands_for: str,
    mask: str = "none",
    causal: bool = False,
    limit: Limit | None = None,
    dtype: str = "float32",
    in_place: bool = False,
    offset: int = 0,
) -> Case:
    batch, heads, queries, keys = shape
    if queries != keys:
        raise ValueError(f"attention_softmax: shape: expected as many queries as keys, got {shape}")
    words = [{"none": "no mask", "float": "mask", "bool": "bool mask"}[mask]] if mask != "none" or not causal else []
    words += ["causal"] * causal + ["in place"] * in_place + [f"base + {offset}"] * bool(offset)
    return Case(
        op="attention_softmax",
        name=f"B{batch} H{heads} S{keys}",
        stands_for=stands_for,
        dtype=dtype,
        variant=", ".join(words),
        shape=shape,
        bytes_moved=count_bytes(shape, dtype, mask, causal),
        flops=count_flops(shape, mask, causal),
        make=lambda seed: make_inputs(shape, dtype, mask, causal, offset, seed),
        first="scores",
        call=lambda inputs, out, errors: call(inputs, out, errors, causal),
        check=lambda inputs, out: check(inputs, out, causal, in_place),
        eager=eager,
        eager_inputs=("scores", "mask", "future"),
        limit=limit,
        in_place=in_place,
        offset=offset,
    )


def list_cases() -> list[Case]:
    documented = (32, 8, 512, 512)
    long = (4, 8, 4_096, 4_096)
    half = {"dtype": "float16", "limit": Limit(1.10, "copy")}
    return [
        make_case(documented, "the documented size", "float", limit=Limit(1.08, "copy")),
        make_case(documented, "the documented size, causal", causal=True, limit=Limit(110)),
        make_case(documented, "the documented size without a mask"),
        make_case(documented, "the documented size, bool mask", "bool"),
        make_case(documented, "padding and causal together", "float", causal=True),
        make_case(documented, "a view that starts at an odd element", "float", offset=1),
        make_case(long, "a long context", "float", limit=Limit(1_080)),
        make_case(long, "a long context, causal", causal=True, limit=Limit(860)),
        make_case(
            (8, 16, 2_048, 2_048),
            "causal weights over the scores themselves",
            causal=True,
            in_place=True,
            limit=Limit(0.85, "whole copy"),
        ),
        make_case(documented, "half precision", **half),
        make_case(documented, "half precision, mask", "float", **half),
        make_case((32, 8, 500, 500), "a length off the powers of two", "float"),
        make_case((32, 8, 500, 500), "a length off the powers of two, causal", causal=True),
        make_case((8, 8, 1_001, 1_001), "rows that start at unaligned addresses", "float"),
        make_case((8, 8, 1_001, 1_001), "rows that start at unaligned addresses, causal", causal=True),
        make_case((8, 8, 1_001, 1_001), "unaligned rows in half precision", "float", dtype="float16"),
        make_case((1, 4, 16_384, 16_384), "a very long context, small batch", "float"),
        make_case((1, 4, 16_384, 16_384), "a very long context, small batch, causal", causal=True),
    ]
