"""Cases of sparse_moe_dispatch and sparse_moe_combine: the documented size, training batches, a decoding step.

Each token names the k experts with the largest of E normal numbers, so the load is nearly even, and with the default
capacity of twice the mean load no token is lost.

    given         all buffers passed in: the rows that hold no token are left as they are
    allocating    the call allocates them, and zeroes those rows
    atomic        buffers passed in, deterministic=False: the documented kernel
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

import burt_numba
from burt_numba import reference
from burt_numba.moe import bytes_combined, bytes_moved, flops_combined
from perf.case import ITEM_BYTES, Case, Inputs, Limit
from perf.checks import Wrong, all_finite, normal, require_close, require_events, sample
from perf.timing import DEVICE, torch

SMALL_OUTPUTS = ("dispatch_indices", "expert_counts", "combine_weights", "num_dropped", "num_overflowed")
VARIANTS = ("given", "allocating", "atomic")
COMBINED_SHARE = 0.85
"""Of the copy ceiling, asked of a combine that moves more than LARGE_BYTES."""
LARGE_BYTES = 100e6


@dataclass(frozen=True)
class Size:
    """T tokens of d elements, k of E experts for each, and the default capacity."""

    T: int
    d: int
    E: int
    k: int
    dtype: str

    @property
    def capacity(self) -> int:
        return default_capacity(self.T, self.k, self.E)

    def __str__(self) -> str:
        return f"{self.T}x{self.d} E{self.E} k{self.k}"


def default_capacity(T: int, k: int, E: int) -> int:
    return -(-2 * T * k // E)


# Inputs --------------------------------------------------------------------------------------------------------------


def make_routing(size: Size, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, E], and the experts [T, k] that weigh most."""
    weights = torch.softmax(normal((size.T, size.E), 1.0, seed), dim=-1)
    return weights, weights.topk(size.k, dim=-1).indices.int()


def make_small_outputs(size: Size) -> dict[str, torch.Tensor]:
    shapes = ((size.T, size.k, 2), (size.E,), (size.T, size.k), (1,), (1,))
    return {
        name: torch.zeros(shape, dtype=torch.float32 if name == "combine_weights" else torch.int32, device=DEVICE)
        for name, shape in zip(SMALL_OUTPUTS, shapes, strict=True)
    }


def make_dispatch_inputs(size: Size, seed: int) -> Inputs:
    tokens = normal((size.T, size.d), 1.0, seed).to(getattr(torch, size.dtype))
    weights, indices = make_routing(size, seed + 10_000)
    # The last result, which is where an allocating call puts everything.
    return {
        "input": tokens,
        "routing_weights": weights,
        "top_k_indices": indices,
        **make_small_outputs(size),
        "results": [],
    }


def make_combine_inputs(size: Size, seed: int) -> Inputs:
    weights, indices = make_routing(size, seed + 10_000)
    no_tokens = torch.zeros((size.T, 0), device=DEVICE)
    dispatch = burt_numba.sparse_moe_dispatch(no_tokens, weights, indices)
    outputs = normal((size.E, size.capacity, size.d), 1.0, seed).to(getattr(torch, size.dtype))
    return {
        "expert_outputs": outputs,
        "dispatch_indices": dispatch.dispatch_indices,
        "combine_weights": dispatch.combine_weights,
    }


# Dispatch ------------------------------------------------------------------------------------------------------------


def dispatch(inputs: Inputs, out: torch.Tensor, errors: object, variant: str) -> object:
    arguments = (inputs[name] for name in ("input", "routing_weights", "top_k_indices"))
    given = {} if variant == "allocating" else {"expert_inputs": out, **{name: inputs[name] for name in SMALL_OUTPUTS}}
    result = burt_numba.sparse_moe_dispatch(*arguments, deterministic=variant != "atomic", errors=errors, **given)
    inputs["results"][:] = [result]
    return result


def require_rows(inputs: Inputs, variant: str) -> None:
    """The last result holds every token in each of its rows, and in no other what it should not."""
    (result,) = inputs["results"]
    buffers, places = result.expert_inputs, result.dispatch_indices.long()
    capacity = buffers.shape[1]
    is_placed = places[..., 0] >= 0
    if not torch.equal(is_placed.sum(), result.expert_counts.sum()):
        raise Wrong("counts of rows that are not those of the places")
    if not torch.equal(places[..., 0][is_placed], inputs["top_k_indices"][is_placed].long()):
        raise Wrong("a row of an expert that the choice does not name")
    rows = (places[..., 0] * capacity + places[..., 1])[is_placed]
    if len(rows.unique()) != len(rows):
        raise Wrong("a row was given out twice")
    flat = buffers.flatten(0, 1)
    tokens = torch.arange(len(places), device=DEVICE)[:, None].expand(is_placed.shape)[is_placed]
    for some_rows, some_tokens in zip(rows.split(1 << 16), tokens.split(1 << 16), strict=True):
        if not torch.equal(flat[some_rows], inputs["input"][some_tokens]):
            raise Wrong("a row that is not its token")
    unused = torch.arange(capacity, device=DEVICE) >= result.expert_counts[:, None]
    for expert_rows, expert_unused in zip(buffers, unused, strict=True):
        left = expert_rows[expert_unused]
        if bool(left.any()) if variant == "allocating" else not bool(left.isnan().all()):
            raise Wrong("rows that hold no token are not as they should be")


def check_dispatch(inputs: Inputs, out: torch.Tensor, variant: str) -> str:
    out.fill_(float("nan"))
    errors = burt_numba.ErrorBuffer()
    result = dispatch(inputs, out, errors, variant)
    torch.cuda.synchronize()
    require_events(errors.counts)
    require_rows(inputs, variant)
    # Of no columns: the reference would copy gigabytes in float64, and the rows are known to be right.
    weights, indices = (inputs[name].cpu().numpy() for name in ("routing_weights", "top_k_indices"))
    expected = reference.sparse_moe_dispatch(np.zeros((len(indices), 0)), weights, indices)
    # The atomic order is another one on every run.
    known = ("expert_counts",) if variant == "atomic" else ("expert_counts", "dispatch_indices", "combine_weights")
    for name in known:
        if not np.array_equal(getattr(result, name).cpu().numpy(), getattr(expected, name)):
            raise Wrong(f"{name}: not those of the reference")
    lost = np.count_nonzero(expected.dispatch_indices[..., 0] < 0)
    return f"every row right, {lost} of {indices.size} choices without one"


def verify_dispatch(
    sets: Sequence[Inputs], outs: Sequence[torch.Tensor], replay: Callable[[], None], variant: str
) -> None:
    for inputs, out in zip(sets, outs, strict=True):
        out.fill_(float("nan"))
        inputs["results"][0].expert_inputs.fill_(float("nan"))
        inputs["results"][0].dispatch_indices.fill_(-1)
    torch.cuda.synchronize()
    replay()
    for inputs in sets:
        require_rows(inputs, variant)


def eager_dispatch(tokens: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As it is written in PyTorch: positions by a running sum of one-hot rows, then a copy by index; no overflow."""
    (T, k), E = indices.shape, weights.shape[1]
    capacity = default_capacity(T, k, E)
    experts = indices.T.flatten().long()
    chosen = experts[:, None] == torch.arange(E, device=experts.device)
    positions = (chosen.cumsum(dim=0) * chosen).sum(dim=1) - 1
    has_room = positions < capacity
    rows = torch.where(has_room, experts * capacity + positions, E * capacity)
    buffers = tokens.new_zeros((E * capacity + 1, tokens.shape[1]))
    buffers.index_copy_(0, rows, tokens.repeat(k, 1))
    places = torch.where(has_room[:, None], torch.stack([experts, positions], dim=1), -1)
    kept = weights.gather(1, indices.long()) * has_room.view(k, T).T
    return buffers[:-1], places.view(k, T, 2).transpose(0, 1), chosen.sum(dim=0).clamp(max=capacity), kept


# Combine -------------------------------------------------------------------------------------------------------------


def combine(inputs: Inputs, out: torch.Tensor, errors: object) -> object:
    places = SimpleNamespace(**{name: inputs[name] for name in ("dispatch_indices", "combine_weights")})
    return burt_numba.sparse_moe_combine(inputs["expert_outputs"], places, out=out, errors=errors)


def check_combine(inputs: Inputs, out: torch.Tensor) -> str:
    out.fill_(float("nan"))
    errors = burt_numba.ErrorBuffer()
    combine(inputs, out, errors)
    torch.cuda.synchronize()
    require_events(errors.counts)
    if not all_finite(out):
        raise Wrong("NaN or Inf in the output: elements not written, or wrong")
    places, weights, outputs = inputs["dispatch_indices"].long(), inputs["combine_weights"], inputs["expert_outputs"]
    (T, k), d = weights.shape, outputs.shape[2]
    chosen = torch.as_tensor(sample(T, k * d), device=DEVICE)
    places, weights = places[chosen], weights[chosen].cpu().numpy()
    rows = outputs[places[..., 0].clamp(min=0), places[..., 1].clamp(min=0)].cpu().numpy()
    # The rows of the sample alone, one after the other in one expert.
    own = np.stack([np.zeros(weights.size, int), np.arange(weights.size)], axis=1).reshape(*weights.shape, 2)
    own[(places[..., 0] < 0).cpu().numpy()] = -1
    given = SimpleNamespace(dispatch_indices=own, combine_weights=weights)
    truth = reference.sparse_moe_combine(rows.reshape(1, -1, d), given).output
    return f"error {require_close('sparse_moe_combine', out[chosen].cpu().numpy(), truth):.1e}"


def eager_combine(outputs: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As it is written in PyTorch: the rows of each token side by side, then a weighted sum."""
    rows = (places[..., 0] * outputs.shape[1] + places[..., 1]).clamp(min=0)
    taken = outputs.flatten(0, 1)[rows.long()]
    return (taken * weights[..., None].to(outputs.dtype)).sum(dim=1)


# Cases ---------------------------------------------------------------------------------------------------------------


def count_dispatch_bytes(size: Size, variant: str) -> int:
    """Of an even load, in which every choice has a row; a call that allocates writes the other rows as well."""
    item = ITEM_BYTES[size.dtype]
    unused = size.E * size.capacity - size.T * size.k if variant == "allocating" else 0
    return bytes_moved(size.T, size.d, size.k, size.E, item) + unused * size.d * item


def make_dispatch_case(size: Size, stands_for: str, variant: str, limit: float) -> Case:
    return Case(
        op="sparse_moe_dispatch",
        name=str(size),
        stands_for=stands_for,
        dtype=size.dtype,
        variant=variant,
        shape=(size.E, size.capacity, size.d),
        bytes_moved=count_dispatch_bytes(size, variant),
        flops=0,
        make=lambda seed: make_dispatch_inputs(size, seed),
        first="input",
        call=lambda inputs, out, errors: dispatch(inputs, out, errors, variant),
        check=lambda inputs, out: check_dispatch(inputs, out, variant),
        eager=eager_dispatch,
        eager_inputs=("input", "routing_weights", "top_k_indices"),
        limit=Limit(limit) if variant == "given" else None,
        has_plain=False,
        verify=lambda sets, outs, replay: verify_dispatch(sets, outs, replay, variant),
    )


def make_combine_case(size: Size, stands_for: str) -> Case:
    moved = bytes_combined(size.T, size.d, size.k, ITEM_BYTES[size.dtype])
    return Case(
        op="sparse_moe_combine",
        name=str(size),
        stands_for=stands_for,
        dtype=size.dtype,
        variant="weighted sum",
        shape=(size.T, size.d),
        bytes_moved=moved,
        flops=flops_combined(size.T, size.d, size.k),
        make=lambda seed: make_combine_inputs(size, seed),
        first="expert_outputs",
        call=combine,
        check=check_combine,
        eager=eager_combine,
        eager_inputs=("expert_outputs", "dispatch_indices", "combine_weights"),
        limit=Limit(1 / COMBINED_SHARE, "copy") if moved > LARGE_BYTES else None,
        has_plain=False,
    )


def list_cases() -> list[Case]:
    sizes: list[tuple[Size, str, float]] = [
        (Size(1_024, 512, 4, 2, "float32"), "the documented size (latency)", 7),
        (Size(16_384, 4_096, 8, 2, "float32"), "few large experts (throughput)", 215),
        (Size(65_536, 2_048, 64, 6, "float32"), "many small experts (throughput)", 1_000),
        (Size(4_096, 7_168, 128, 8, "float16"), "a prompt, in half precision", 200),
        (Size(32, 7_168, 128, 8, "float16"), "a decoding step, in half precision (latency)", 9),
    ]
    return [
        case
        for size, stands_for, limit in sizes
        for case in (
            *(make_dispatch_case(size, stands_for, variant, limit) for variant in VARIANTS),
            make_combine_case(size, stands_for),
        )
    ]
