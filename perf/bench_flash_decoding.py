"""Cases of flash decoding: putting partials together, decode attention over long caches, its two steps, merging.

Scores are normal with a standard deviation of 3 and partials are as of chunks with 32 such keys. Every sequence is as
long as its cache but in the "ragged" cases, where lengths lie evenly between none and all.

    rotated    partials and caches come from device memory
    cached     partials that the step before has just written, as far as the L2 cache holds them
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

import burt_numba
from burt_numba import reference
from perf.case import ITEM_BYTES, Case, Inputs, Limit
from perf.checks import Wrong, all_finite, normal, require_close, require_events, sample
from perf.timing import DEVICE, torch

SPREAD = 3.0
"""Standard deviation of the scores."""
CHUNK_SIZE = 32
"""Of partials, as the seed has it."""
SPREAD_OF_MAXIMA, TYPICAL_SUM = 1.0, 6.0
"""Of chunks of 32 keys with such scores."""


@dataclass(frozen=True)
class Size:
    """M sequences, H heads over Hk of the caches, S keys of D elements."""

    M: int
    H: int
    Hk: int
    S: int
    D: int
    ragged: bool = False

    def __str__(self) -> str:
        heads = f"{self.H}" if self.Hk == self.H else f"{self.H}/{self.Hk}"
        return f"{self.M}x{heads} S{self.S} D{self.D}"

    @property
    def lengths(self) -> np.ndarray:
        """[M] int32, the same for every seed: the count of bytes leans on them."""
        if not self.ragged:
            return np.full(self.M, self.S, np.int32)
        return np.random.default_rng(0).permutation(np.linspace(0, self.S, self.M)).astype(np.int32)

    @property
    def keys(self) -> int:
        return int(self.lengths.sum())

    def bytes_of_caches(self, itemsize: int) -> int:
        return 2 * self.keys * self.Hk * self.D * itemsize

    @property
    def flops(self) -> int:
        """Both products."""
        return 4 * self.keys * self.H * self.D


# Partials, put together ----------------------------------------------------------------------------------------------


def make_partials(shape: tuple[int, int, int, int], seed: int) -> Inputs:
    M, _, N, width = shape
    partials = normal(shape, 1.0, seed)
    total = partials[..., width - 1 :].abs_().add_(TYPICAL_SUM)
    partials[..., : width - 2] *= total
    partials[..., width - 2] *= SPREAD_OF_MAXIMA
    return {"partials": partials, "seq_lens": torch.full((M,), N * CHUNK_SIZE, dtype=torch.int32, device=DEVICE)}


def call_reduce(inputs: Inputs, out: torch.Tensor, errors: object) -> object:
    return burt_numba.flash_decoding_reduce(inputs["partials"], inputs["seq_lens"], out=out, errors=errors)


def check_reduce(inputs: Inputs, out: torch.Tensor) -> str:
    partials, lengths = inputs["partials"], inputs["seq_lens"]
    M, H, N, width = partials.shape
    out.fill_(float("nan"))
    sums = torch.full((M, H), float("nan"), device=out.device)
    errors = burt_numba.ErrorBuffer()
    burt_numba.flash_decoding_reduce(partials, lengths, out=out, lse_out=sums, errors=errors)
    rows = sample(M * H, N * width)
    chosen = partials.view(M * H, 1, N, width)[rows].cpu().numpy()
    expected = reference.flash_decoding_reduce(chosen, np.repeat(lengths.cpu().numpy(), H)[rows])
    return require_states("flash_decoding_reduce", out, sums, errors, rows, expected)


Expected = reference.FlashDecodingResult | reference.MergeResult


def require_states(
    op: str, out: torch.Tensor, sums: torch.Tensor, errors: burt_numba.ErrorBuffer, rows: np.ndarray, expected: Expected
) -> str:
    """Every element is there, no event was recorded, and the sample of rows and sums is right."""
    torch.cuda.synchronize()
    if not all_finite(out):
        raise Wrong("NaN or Inf in the output: elements not written, or wrong")
    require_events(errors.counts)
    ours = out.view(-1, out.shape[-1])[rows].cpu().numpy()
    error = require_close(op, ours, expected.output.reshape(ours.shape))
    lse, found = expected.lse.reshape(len(rows)), sums.view(-1)[rows].cpu().numpy()
    there = np.isfinite(lse)
    distance, size = np.abs(found[there] - lse[there]), np.abs(lse[there])
    if not (np.isneginf(found) == ~there).all() or distance.max(initial=0) > 1e-5 * size.max(initial=1):
        raise Wrong("lse_out: not the logarithm of the sum of exponentials")
    return f"error {error:.1e}"


def eager_reduce(partials: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """As it is written in PyTorch: the chunks past the length masked, all weights, one sum over the chunks."""
    chunks = (seq_lens + CHUNK_SIZE - 1) // CHUNK_SIZE
    present = torch.arange(partials.shape[2], device=partials.device) < chunks[:, None, None]
    top = partials[..., -2].masked_fill(~present, -torch.inf)
    weight = torch.exp(top - top.amax(-1, keepdim=True))
    elements = (partials[..., :-2] * weight[..., None]).sum(2)
    return elements / (partials[..., -1] * weight).sum(-1, keepdim=True)


def reduce_case(M: int, H: int, N: int, D: int, stands_for: str, limit: float | None, cached: bool = False) -> Case:
    shape = (M, H, N, D + 2)
    return Case(
        op="flash_decoding_reduce",
        name=f"{M}x{H} {N} chunks D{D}",
        stands_for=stands_for,
        dtype="float32",
        variant="full",
        shape=(M, H, D),
        bytes_moved=4 * (math.prod(shape) + M * H * D),
        flops=2 * math.prod(shape),
        make=partial(make_partials, shape),
        first="partials",
        call=call_reduce,
        check=check_reduce,
        eager=eager_reduce,
        eager_inputs=("partials", "seq_lens"),
        limit=None if limit is None else Limit(limit),
        cached=cached,
        has_plain=False,
        set_bytes=4 * math.prod(shape),
    )


# Attention -----------------------------------------------------------------------------------------------------------


def make_caches(size: Size, dtype: str, seed: int) -> Inputs:
    torch.set_float32_matmul_precision("highest")
    storage = getattr(torch, dtype)
    cache, spread = (size.M, size.Hk, size.S, size.D), math.sqrt(SPREAD)
    return {
        "query": normal((size.M, size.H, size.D), spread, seed).to(storage),
        "k_cache": normal(cache, spread, seed + 10_000).to(storage),
        "v_cache": normal(cache, 1.0, seed + 20_000).to(storage),
        "seq_lens": torch.from_numpy(size.lengths).to(DEVICE),
    }


NAMES = ("query", "k_cache", "v_cache", "seq_lens")


def call_decoding(inputs: Inputs, out: torch.Tensor, errors: object, chunk_size: int | None) -> object:
    arrays = (inputs[name] for name in NAMES)
    return burt_numba.flash_decoding(*arrays, chunk_size=chunk_size, out=out, errors=errors)


def check_decoding(inputs: Inputs, out: torch.Tensor, chunk_size: int | None) -> str:
    query, keys, values, lengths = (inputs[name] for name in NAMES)
    (M, H, D), (_, Hk, S, _) = query.shape, keys.shape
    out.fill_(float("nan"))
    sums, errors = torch.full((M, H), float("nan"), device=out.device), burt_numba.ErrorBuffer()
    burt_numba.flash_decoding(*inputs_in_order(inputs), chunk_size=chunk_size, out=out, lse_out=sums, errors=errors)
    rows = sample(M * H, S * D)
    results = [row_of_reference(query, keys, values, lengths, int(row), H // Hk) for row in rows]
    expected = reference.FlashDecodingResult(
        np.stack([result.output[0, 0] for result in results]),
        np.stack([result.lse[0, 0] for result in results]),
        {},
        None,
    )
    return require_states("flash_decoding", out, sums, errors, rows, expected)


def inputs_in_order(inputs: Inputs) -> list[torch.Tensor]:
    return [inputs[name] for name in NAMES]


def row_of_reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, row: int, group: int
) -> reference.FlashDecodingResult:
    """One head of one sequence."""
    m, h = divmod(row, query.shape[1])
    g = h // group
    caches = (array[m : m + 1, g : g + 1].cpu().numpy() for array in (keys, values))
    return reference.flash_decoding(
        query[m : m + 1, h : h + 1].cpu().numpy(), *caches, lengths[m : m + 1].cpu().numpy()
    )


def eager_decoding(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """As it is written in PyTorch, neighbouring heads together: all scores, masked past the length, all weights."""
    M, H, D = query.shape
    Hk, S = keys.shape[1:3]
    grouped = query.view(M, Hk, H // Hk, D)
    scores = (grouped @ keys.transpose(-1, -2)).float() * D**-0.5
    present = torch.arange(S, device=query.device) < seq_lens[:, None, None, None]
    # Of a sequence without a key all weights are NaN, and its result zeros.
    weights = torch.softmax(scores.masked_fill(~present, -torch.inf), dim=-1).nan_to_num(0)
    return (weights.to(values.dtype) @ values).view(M, H, D)


def fused(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """The library's attention, over whole caches whatever the lengths."""
    grouped = {"enable_gqa": True} if query.shape[1] != keys.shape[1] else {}
    return torch.nn.functional.scaled_dot_product_attention(query[:, :, None], keys, values, **grouped)[:, :, 0]


def decoding_case(
    size: Size, stands_for: str, dtype: str, limit: Limit | None = None, chunk_size: int | None = None
) -> Case:
    item = ITEM_BYTES[dtype]
    caches = size.bytes_of_caches(item)
    words = ["ragged" if size.ragged else "full"] + ([] if chunk_size is None else [f"chunk_size={chunk_size}"])
    # Beside the caches the rest is nothing; where a limit is a multiple of their reading, it is theirs alone.
    moved = caches if limit is not None and limit.of == "ceiling" else caches + 2 * size.M * size.H * size.D * item
    return Case(
        op="flash_decoding",
        name=str(size),
        stands_for=stands_for,
        dtype=dtype,
        variant=", ".join(words),
        shape=(size.M, size.H, size.D),
        bytes_moved=moved,
        flops=size.flops,
        make=partial(make_caches, size, dtype),
        first="query",
        call=lambda inputs, out, errors: call_decoding(inputs, out, errors, chunk_size),
        check=lambda inputs, out: check_decoding(inputs, out, chunk_size),
        eager=eager_decoding,
        eager_inputs=NAMES,
        limit=limit,
        plain=fused,
        set_bytes=2 * size.M * size.Hk * size.S * size.D * item,
    )


# The first step alone ------------------------------------------------------------------------------------------------


def call_chunk(inputs: Inputs, out: torch.Tensor, errors: object) -> object:
    return burt_numba.flash_decoding_chunk(*inputs_in_order(inputs), CHUNK_SIZE, out=out, errors=errors)


def check_chunk(inputs: Inputs, out: torch.Tensor) -> str:
    query, keys, values, lengths = inputs_in_order(inputs)
    (M, H, D), (_, Hk, S, _) = query.shape, keys.shape
    out.fill_(float("nan"))
    errors = burt_numba.ErrorBuffer()
    call_chunk(inputs, out, errors)
    torch.cuda.synchronize()
    if not all_finite(out):
        raise Wrong("NaN or Inf in the partials: elements not written, or wrong")
    require_events(errors.counts)
    ours, truth = [], []
    for row in sample(M * H, S * D):
        m, h = divmod(int(row), H)
        g = h // (H // Hk)
        arrays = (query[m : m + 1, h : h + 1], keys[m : m + 1, g : g + 1], values[m : m + 1, g : g + 1])
        given = (array.cpu().numpy() for array in (*arrays, lengths[m : m + 1]))
        truth.append(reference.flash_decoding_chunk(*given, CHUNK_SIZE).partials[0, 0])
        ours.append(out[m, h].cpu().numpy())
    return f"error {require_close('flash_decoding_chunk', np.stack(ours), np.stack(truth), 'float32'):.1e}"


def eager_chunk(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """As it is written in PyTorch, of whole chunks and heads that are not grouped."""
    M, H, S, D = keys.shape
    scores = (query[:, :, None] @ keys.transpose(-1, -2)).view(M, H, S) * D**-0.5
    present = torch.arange(S, device=query.device) < seq_lens[:, None, None]
    scores = scores.masked_fill(~present, -torch.inf).view(M, H, -1, 1, CHUNK_SIZE)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    elements = weights @ values.view(M, H, -1, CHUNK_SIZE, D)
    return torch.cat([elements, top, weights.sum(-1, keepdim=True)], dim=-1)[:, :, :, 0]


def chunk_case(size: Size, stands_for: str) -> Case:
    partials = (size.M, size.H, size.S // CHUNK_SIZE, size.D + 2)
    return Case(
        op="flash_decoding_chunk",
        name=str(size),
        stands_for=stands_for,
        dtype="float32",
        variant=f"chunk_size={CHUNK_SIZE}",
        shape=partials,
        bytes_moved=size.bytes_of_caches(4) + 4 * math.prod(partials),
        flops=size.flops,
        make=partial(make_caches, size, "float32"),
        first="query",
        call=call_chunk,
        check=check_chunk,
        eager=eager_chunk,
        eager_inputs=NAMES,
        has_plain=False,
        set_bytes=2 * size.M * size.Hk * size.S * size.D * 4,
    )


# Merging -------------------------------------------------------------------------------------------------------------


def make_states(shape: tuple[int, ...], dtype: str, seed: int) -> Inputs:
    return {
        "outs": normal(shape, 1.0, seed).to(getattr(torch, dtype)),
        "lses": normal(shape[:-1], 2.0, seed + 10_000),
    }


def call_merge(inputs: Inputs, out: torch.Tensor, errors: object) -> object:
    return burt_numba.merge_attention_states(inputs["outs"], inputs["lses"], out=out, errors=errors)


def check_merge(inputs: Inputs, out: torch.Tensor) -> str:
    outs, lses = inputs["outs"], inputs["lses"]
    out.fill_(float("nan"))
    sums, errors = torch.full(lses.shape[1:], float("nan"), device=out.device), burt_numba.ErrorBuffer()
    burt_numba.merge_attention_states(outs, lses, out=out, lse_out=sums, errors=errors)
    N, D = outs.shape[0], outs.shape[-1]
    rows = sample(out.numel() // D, N * D)
    expected = reference.merge_attention_states(
        outs.view(N, -1, D)[:, rows].cpu().numpy(), lses.view(N, -1)[:, rows].cpu().numpy()
    )
    return require_states("merge_attention_states", out, sums, errors, rows, expected)


def eager_merge(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    weights = torch.softmax(lses, dim=0)
    return (outs * weights[..., None]).sum(0).to(outs.dtype)


def merge_case(shape: tuple[int, ...], stands_for: str, dtype: str) -> Case:
    states = math.prod(shape[:-1])
    item = ITEM_BYTES[dtype]
    return Case(
        op="merge_attention_states",
        name="x".join(map(str, shape[:-1])) + f" D{shape[-1]}",
        stands_for=stands_for,
        dtype=dtype,
        variant="full",
        shape=shape[1:],
        bytes_moved=item * math.prod(shape) + 4 * states + item * math.prod(shape[1:]),
        flops=2 * math.prod(shape),
        make=partial(make_states, shape, dtype),
        first="outs",
        call=call_merge,
        check=check_merge,
        eager=eager_merge,
        eager_inputs=("outs", "lses"),
        has_plain=False,
        set_bytes=item * math.prod(shape),
    )


# Cases ---------------------------------------------------------------------------------------------------------------


def list_cases() -> list[Case]:
    batch, one = Size(64, 32, 32, 4096, 128), Size(1, 32, 32, 4096, 128)
    ragged = Size(64, 32, 32, 4096, 128, ragged=True)
    grouped = Size(8, 32, 8, 32_768, 128)
    cases = [
        reduce_case(64, 32, 128, 128, "a batch, 4,096 keys in chunks of 32", 36),
        reduce_case(64, 32, 256, 128, "a batch, 8,192 keys in chunks of 32", 70),
        reduce_case(1, 32, 32, 128, "one sequence, 1,024 keys in chunks of 32", 3.5, cached=True),
        reduce_case(1, 32, 32, 128, "the same, from device memory", 3.5),
        reduce_case(1, 32, 4096, 128, "one sequence of 131,072 keys", None),
    ]
    sizes: list[tuple[Size, str, Callable[[str], Limit | None]]] = [
        (batch, "a batch over caches of 4,096", lambda dtype: Limit({"float32": 2150, "float16": 1080}[dtype])),
        (one, "one sequence", lambda dtype: Limit(45) if dtype == "float32" else None),
        (ragged, "a batch of many lengths", lambda dtype: None),
        (
            grouped,
            "grouped heads over long caches",
            lambda dtype: Limit(1.2, "ceiling") if dtype == "float16" else None,
        ),
        (Size(1, 32, 8, 131_072, 128), "one long sequence, grouped heads", lambda dtype: None),
    ]
    for size, stands_for, limit in sizes:
        for dtype in ("float32", "float16"):
            cases.append(decoding_case(size, stands_for, dtype, limit(dtype)))
    cases.append(decoding_case(batch, "the same bits in any batch", "float32", None, 64))
    cases.append(chunk_case(batch, "the first step alone"))
    cases.append(chunk_case(one, "the first step alone, of one sequence"))
    cases.append(merge_case((2, 64, 32, 128), "a prefix that sequences share, and the rest", "float32"))
    cases.append(merge_case((2, 64, 32, 128), "the same", "float16"))
    cases.append(merge_case((8, 4096, 32, 128), "results of 8 devices", "float32"))
    return cases
