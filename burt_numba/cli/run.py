"""``burt-numba run``: an operation on the user's arrays, and a summary of what it did to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from burt_numba.cli import driver
from burt_numba.cli.arrays import check_output, load, save, without_float64
from burt_numba.cli.errors import UsageError, refusals_of
from burt_numba.cli.output import pairs, progress

# Elements that a summary holds in float64 at a time: 32 MB.
_CHUNK_ELEMENTS = 1 << 22


def _row_chunks(rows: int, row_length: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, row_length))
    return (slice(start, start + step) for start in range(0, rows, step))


def _by_rows(statistic: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
    """Apply a statistic of rows to [N, C] arrays, a few rows at a time; returns [N]."""
    chunks = [statistic(*(array[rows] for array in arrays)) for rows in _row_chunks(*arrays[0].shape)]
    return np.concatenate(chunks) if chunks else np.zeros(0)


def _plain_entropy(logits: np.ndarray) -> np.ndarray:
    from burt_numba import reference

    return reference.constrained_softmax(logits, temperature=1.0).entropy


def _top(logits: np.ndarray) -> np.ndarray:
    """The class with the largest logit; NaN and +inf are absent."""
    return np.where(np.isfinite(logits), logits, -np.inf).argmax(axis=-1)


def _top_is_kept(logits: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Whether the class with the largest logit still has the largest probability (others may have come equal)."""
    at_top = np.take_along_axis(probabilities, _top(logits)[:, np.newaxis], axis=-1)[:, 0]
    return at_top == probabilities.max(axis=-1)


def _mean(values: np.ndarray, unit: str = "") -> str:
    return f"{values.mean():.4f}{unit}" if values.size else "no rows"


def _share(count: int, rows: int) -> str:
    return f"{count} of {rows}" + (f" ({count / rows:.1%})" if rows else "")


def _event_rows(errors: Any) -> list[tuple[str, str]]:
    """What the operation recorded, most frequent code first."""
    errors.check()
    if not errors.counts:
        return [("recorded events", "none")]
    by_count = sorted(errors.counts.items(), key=lambda item: (-item[1], int(item[0])))
    return [
        ("recorded events", ", ".join(f"{count} × {code.name} (code {int(code)})" for code, count in by_count)),
        ("first event", f"{errors.code.name} at index {errors.first_index}"),
    ]


def run_constrained_softmax(
    source: Path,
    output: Path,
    *,
    entropy_bound: float,
    temperature_min: float,
    temperature_max: float,
    max_iterations: int,
) -> int:
    check_output(output, source)
    arrays = load(source, "constrained_softmax")
    logits = without_float64("logits", arrays["logits"])
    labels = arrays.get("labels")
    rows_shape = logits.shape[:-1]
    if labels is not None and labels.shape != rows_shape:
        raise UsageError(f"labels: expected shape {rows_shape}, one for each row of the logits, got {labels.shape}")

    driver.choose_target()
    import burt_numba

    temperature = np.empty(rows_shape, dtype=np.float32)
    entropy = np.empty(rows_shape, dtype=np.float32)
    errors = burt_numba.ErrorBuffer()
    with refusals_of("constrained_softmax"), progress() as display:
        display.add_task("constrained_softmax", total=None)
        probabilities = burt_numba.constrained_softmax(
            logits,
            entropy_bound,
            temperature_min,
            temperature_max,
            max_iterations,
            temperature_out=temperature,
            entropy_out=entropy,
            errors=errors,
        )
    save(output, "constrained_softmax", probabilities, temperature, entropy)

    # An operation on no rows leaves nothing to reshape by -1.
    flat_shape = (entropy.size, logits.shape[-1])
    flat_logits, flat_probabilities = logits.reshape(flat_shape), probabilities.reshape(flat_shape)
    start = np.float32(min(max(1.0, temperature_min), temperature_max))
    acted = int(np.count_nonzero(temperature < start))
    kept = _by_rows(_top_is_kept, flat_logits, flat_probabilities)
    summary = [
        ("logits", f"{logits.shape} {logits.dtype}"),
        ("mean entropy before", _mean(_by_rows(_plain_entropy, flat_logits), " nats")),
        ("mean entropy after", _mean(entropy.astype(np.float64), " nats")),
        ("rows where the bound acted", _share(acted, entropy.size)),
        ("most likely class", "unchanged in every row" if kept.all() else f"changed in {np.sum(~kept)} rows"),
        *_event_rows(errors),
    ]
    if labels is not None:
        right = labels.reshape(-1)
        before = _by_rows(_top, flat_logits) == right
        after = flat_probabilities.argmax(axis=-1) == right
        summary.append(("accuracy before, after", f"{_mean(before)}, {_mean(after)}"))
    pairs(f"constrained_softmax, entropy bound {entropy_bound:g} nats → {output}", summary)
    return 0


def run_attention_softmax(source: Path, output: Path, *, causal: bool, causal_offset: int | None) -> int:
    if causal_offset is not None and not causal:
        raise UsageError("--causal-offset: has no effect without --causal")
    check_output(output, source)
    arrays = load(source, "attention_softmax")
    scores = without_float64("scores", arrays["scores"])
    mask = arrays.get("mask")
    if mask is not None:
        mask = without_float64("mask", mask)

    driver.choose_target()
    import burt_numba
    from burt_numba import reference

    errors = burt_numba.ErrorBuffer()
    with refusals_of("attention_softmax"), progress() as display:
        display.add_task("attention_softmax", total=None)
        probabilities = burt_numba.attention_softmax(scores, mask, causal, causal_offset=causal_offset, errors=errors)
    entropy_rows = probabilities.reshape(int(np.prod(scores.shape[:-1])), scores.shape[-1])
    entropy = _by_rows(reference.entropy, entropy_rows)
    sums = _by_rows(lambda rows: rows.sum(axis=-1, dtype=np.float64), entropy_rows)
    save(output, "attention_softmax", probabilities, entropy.astype(np.float32).reshape(scores.shape[:-1]))

    attending = sums > 0
    deviation = np.abs(sums[attending] - 1).max(initial=0.0)
    pairs(
        f"attention_softmax → {output}",
        [
            ("scores", f"{scores.shape} {scores.dtype}"),
            ("mask", "none" if mask is None else f"{mask.shape} {mask.dtype}"),
            ("causal", f"offset {causal_offset or 0}" if causal else "no"),
            ("mean entropy of the weights", _mean(entropy[attending], " nats")),
            ("rows with no key to attend to", _share(int(np.sum(~attending)), sums.size)),
            ("largest |sum of a row - 1|", f"{deviation:.1e}"),
            *_event_rows(errors),
        ],
    )
    return 0


def run_biencoder_attention(
    source: Path,
    output: Path,
    *,
    scale: float | None,
    entropy_bound: float | None,
    temperature_min: float,
    temperature_max: float,
    max_iterations: int,
    precision: str,
) -> int:
    """``entropy_bound``: None for plain attention."""
    check_output(output, source)
    arrays = load(source, "biencoder_attention")
    lengths = arrays.pop("context_lengths", None)
    inputs = [without_float64(name, array) for name, array in arrays.items()]

    driver.choose_target()
    import burt_numba

    rows_shape = inputs[0].shape[:-1]
    temperature, entropy, plain_entropy = (np.empty(rows_shape, dtype=np.float32) for _ in range(3))

    def attend(bound: float | None, **options: Any) -> np.ndarray:
        query, keys, values = inputs
        return burt_numba.biencoder_attention(
            query,
            keys,
            values,
            scale,
            bound,
            temperature_min,
            temperature_max,
            max_iterations,
            context_lengths=lengths,
            precision=precision,
            **options,
        )

    errors = burt_numba.ErrorBuffer()
    with refusals_of("biencoder_attention"), progress() as display:
        display.add_task("biencoder_attention", total=None)
        attended = attend(entropy_bound, temperature_out=temperature, entropy_out=entropy, errors=errors)
        # What it records, the call before has recorded.
        attend(None, entropy_out=plain_entropy, errors=burt_numba.ErrorBuffer())
    save(output, "biencoder_attention", attended, temperature, entropy)

    start = np.float32(min(max(1.0, temperature_min), temperature_max))
    contexts = inputs[1].shape[2]
    present = np.full(rows_shape[0], contexts) if lengths is None else np.clip(lengths, 0, contexts)
    without = int(np.count_nonzero(present == 0)) * int(np.prod(rows_shape[1:]))
    bound_of = "no entropy bound" if entropy_bound is None else f"entropy bound {entropy_bound:g} nats"
    pairs(
        f"biencoder_attention, {bound_of} → {output}",
        [
            ("query", f"{inputs[0].shape} {inputs[0].dtype}"),
            ("contexts", f"{inputs[1].shape} {inputs[1].dtype}"),
            ("mean entropy without a bound", _mean(plain_entropy.astype(np.float64), " nats")),
            ("mean entropy", _mean(entropy.astype(np.float64), " nats")),
            ("queries where the bound acted", _share(int(np.count_nonzero(temperature < start)), entropy.size)),
            ("queries without a context", _share(without, entropy.size)),
            *_event_rows(errors),
        ],
    )
    return 0


def _largest_weights(lse: np.ndarray, lses: np.ndarray) -> np.ndarray:
    """Of each row the weight e^(lse_n - lse) of the part that has most; rows of no part left out."""
    rows = np.isfinite(lse)
    top = np.where(np.isfinite(lses), lses, -np.inf).max(axis=0, initial=-np.inf)
    return np.exp(top[rows].astype(np.float64) - lse[rows])


def _decoding_rows(attended: np.ndarray, lse: np.ndarray) -> list[tuple[str, str]]:
    """What decode attention gave, of each head of a sequence."""
    rows = np.isfinite(lse)
    return [
        ("mean log-sum-exp", _mean(lse[rows].astype(np.float64), " nats")),
        ("mean length of a result", _mean(np.linalg.norm(attended[rows].astype(np.float64), axis=-1))),
        ("heads without a key", _share(int(np.count_nonzero(~rows)), lse.size)),
    ]


def _mean_length(seq_lens: np.ndarray, most: int) -> str:
    """Of the keys of a sequence, as clamped; the range of a sequence is what is recorded otherwise."""
    lengths = np.clip(seq_lens, 0, most)
    return f"{lengths.mean():.1f} of {most}" if lengths.size else "no sequences"


def _load_caches(source: Path, operation: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    arrays = load(source, operation)
    lengths = arrays.pop("seq_lens")
    query, keys, values = (without_float64(name, array) for name, array in arrays.items())
    return query, keys, values, lengths


def run_flash_decoding(source: Path, output: Path, *, scale: float | None, chunk_size: int | None) -> int:
    check_output(output, source)
    inputs = _load_caches(source, "flash_decoding")

    driver.choose_target()
    import burt_numba

    lse = np.empty(inputs[0].shape[:2], dtype=np.float32)
    errors = burt_numba.ErrorBuffer()
    with refusals_of("flash_decoding"), progress() as display:
        display.add_task("flash_decoding", total=None)
        attended = burt_numba.flash_decoding(*inputs, scale, chunk_size=chunk_size, lse_out=lse, errors=errors)
    # Without a sequence or a head nothing is written.
    save(output, "flash_decoding", attended, lse)
    chunks = "" if chunk_size is None else f", chunks of {chunk_size}"
    pairs(
        f"flash_decoding{chunks} → {output}",
        [
            ("query", f"{inputs[0].shape} {inputs[0].dtype}"),
            ("caches", f"{inputs[1].shape} {inputs[1].dtype}"),
            ("mean length of a sequence", _mean_length(inputs[3], inputs[1].shape[2])),
            *_decoding_rows(attended, lse),
            *_event_rows(errors),
        ],
    )
    return 0


def run_flash_decoding_chunk(source: Path, output: Path, *, scale: float | None, chunk_size: int) -> int:
    check_output(output, source)
    inputs = _load_caches(source, "flash_decoding_chunk")

    driver.choose_target()
    import burt_numba

    errors = burt_numba.ErrorBuffer()
    with refusals_of("flash_decoding_chunk"), progress() as display:
        display.add_task("flash_decoding_chunk", total=None)
        partials = burt_numba.flash_decoding_chunk(*inputs, chunk_size, scale, errors=errors)
    # The second step needs all three.
    save(output, "flash_decoding_chunk", partials, inputs[3], chunk_size)
    empty = int(np.count_nonzero(partials[..., -1] == 0))
    pairs(
        f"flash_decoding_chunk, chunks of {chunk_size} → {output}",
        [
            ("query", f"{inputs[0].shape} {inputs[0].dtype}"),
            ("caches", f"{inputs[1].shape} {inputs[1].dtype}"),
            ("mean length of a sequence", _mean_length(inputs[3], inputs[1].shape[2])),
            ("partials", f"{partials.shape} {partials.dtype}"),
            ("chunks without a key", _share(empty, int(np.prod(partials.shape[:-1])))),
            *_event_rows(errors),
        ],
    )
    return 0


def _chunk_size_of(source: Path, held: np.ndarray | None, given: int | None) -> int | None:
    """The size of the chunks in a file of partials: the one it holds, else the one that was given."""
    if held is None:
        return given
    if held.size != 1 or held.dtype.kind not in "iu":
        raise UsageError(f"{source}: chunk_size: expected one integer, got {held.dtype} {held.shape}")
    if given not in (None, held.item()):
        raise UsageError(f"--chunk-size: {source} holds partials of chunks of {held.item()} keys, got {given}")
    return held.item()


def run_flash_decoding_reduce(source: Path, output: Path, *, chunk_size: int | None) -> int:
    check_output(output, source)
    arrays = load(source, "flash_decoding_reduce")
    partials, lengths = without_float64("partials", arrays["partials"]), arrays["seq_lens"]
    chunk_size = _chunk_size_of(source, arrays.get("chunk_size"), chunk_size)

    driver.choose_target()
    import burt_numba

    if chunk_size is None:
        chunk_size = burt_numba.FLASH_DECODE_CHUNK_SIZE
    lse = np.empty(partials.shape[:2], dtype=np.float32)
    errors = burt_numba.ErrorBuffer()
    with refusals_of("flash_decoding_reduce"), progress() as display:
        display.add_task("flash_decoding_reduce", total=None)
        reduced = burt_numba.flash_decoding_reduce(partials, lengths, chunk_size, lse_out=lse, errors=errors)
    save(output, "flash_decoding_reduce", reduced, lse)
    pairs(
        f"flash_decoding_reduce, chunks of {chunk_size} → {output}",
        [
            ("partials", f"{partials.shape} {partials.dtype}"),
            ("mean length of a sequence", _mean_length(lengths, partials.shape[2] * chunk_size)),
            *_decoding_rows(reduced, lse),
            *_event_rows(errors),
        ],
    )
    return 0


def run_merge(source: Path, output: Path) -> int:
    check_output(output, source)
    arrays = load(source, "merge_attention_states")
    outs, lses = (without_float64(name, arrays[name]) for name in ("outs", "lses"))

    driver.choose_target()
    import burt_numba

    lse = np.empty(lses.shape[1:], dtype=np.float32)
    errors = burt_numba.ErrorBuffer()
    with refusals_of("merge_attention_states"), progress() as display:
        display.add_task("merge_attention_states", total=None)
        merged = burt_numba.merge_attention_states(outs, lses, lse_out=lse, errors=errors)
    save(output, "merge_attention_states", merged, lse)
    pairs(
        f"merge_attention_states → {output}",
        [
            ("outs", f"{outs.shape} {outs.dtype}"),
            ("mean log-sum-exp", _mean(lse[np.isfinite(lse)].astype(np.float64), " nats")),
            ("mean weight of the largest state", _mean(_largest_weights(lse, lses))),
            ("rows of no state", _share(int(np.count_nonzero(~np.isfinite(lse))), lse.size)),
            *_event_rows(errors),
        ],
    )
    return 0


def run_memory(
    operation: str,
    source: Path,
    output: Path,
    *,
    spectral_bound: float,
    projection: str,
    power_iterations: int,
    shared_memory_mode: bool | None,
) -> int:
    """``cifg_update``, where ``shared_memory_mode`` is None, and ``batched_cifg_update``."""
    check_output(output, source)
    batched = shared_memory_mode is not None
    inputs = [without_float64(name, array) for name, array in load(source, operation).items()]
    # Of any order in the file; a memory has to be C-contiguous.
    memory = inputs[0] = np.ascontiguousarray(inputs[0])

    driver.choose_target()
    import burt_numba

    matrices = 1 if not batched or shared_memory_mode else len(memory)
    sigma = np.empty(matrices, dtype=np.float32)
    gate = np.empty(inputs[1].shape, dtype=np.float32)
    errors = burt_numba.ErrorBuffer()
    mode = {"shared_memory_mode": shared_memory_mode} if batched else {}
    with refusals_of(operation), progress() as display:
        display.add_task(operation, total=None)
        updated = getattr(burt_numba, operation)(
            *inputs,
            spectral_bound,
            **mode,
            projection=projection,
            power_iterations=power_iterations,
            sigma_out=sigma,
            forget_gate_out=gate,
            # Without a sample nothing is launched that could write a shared memory.
            out=None if shared_memory_mode and len(gate) == 0 else np.empty_like(memory),
            errors=errors,
        )
    if 0 in (*memory.shape, *gate.shape):
        updated, sigma = memory, np.zeros_like(sigma)
    save(output, operation, updated, sigma, gate)

    # What is not finite in C is no part of its norm.
    before = np.where(np.isfinite(memory), memory, 0).astype(np.float64)
    norm = np.linalg.norm(before.ravel())
    change = np.linalg.norm((updated - before).ravel())
    above = int(np.count_nonzero(sigma > np.float32(spectral_bound)))
    pairs(
        f"{operation}, spectral bound {spectral_bound:g} → {output}",
        [
            ("C", f"{memory.shape} {memory.dtype}"),
            ("mean forget gate", _mean(gate.astype(np.float64))),
            ("largest sigma before the projection", f"{sigma.max(initial=0.0):.4f}"),
            ("memories projected", _share(above, matrices)),
            ("change of C, relative", f"{change / norm:.4f}" if norm else "from zero"),
            *_event_rows(errors),
        ],
    )
    return 0


def run_dispatch(source: Path, output: Path, *, expert_capacity: int | None, deterministic: bool) -> int:
    check_output(output, source)
    arrays = load(source, "sparse_moe_dispatch")
    tokens, weights = (without_float64(name, arrays[name]) for name in ("input", "routing_weights"))

    driver.choose_target()
    import burt_numba

    errors = burt_numba.ErrorBuffer()
    with refusals_of("sparse_moe_dispatch"), progress() as display:
        display.add_task("sparse_moe_dispatch", total=None)
        dispatch = burt_numba.sparse_moe_dispatch(
            tokens, weights, arrays["top_k_indices"], expert_capacity, deterministic=deterministic, errors=errors
        )
    save(output, "sparse_moe_dispatch", *dispatch)

    experts, capacity = dispatch.expert_inputs.shape[:2]
    counts = dispatch.expert_counts
    placed = int(np.count_nonzero(dispatch.dispatch_indices[..., 0] >= 0))
    pairs(
        f"sparse_moe_dispatch, {experts} experts of {capacity} rows → {output}",
        [
            ("input", f"{tokens.shape} {tokens.dtype}"),
            ("choices placed", _share(placed, dispatch.combine_weights.size)),
            ("tokens sent to expert 0 for want of room", _share(int(dispatch.num_overflowed[0]), len(tokens))),
            ("tokens dropped", _share(int(dispatch.num_dropped[0]), len(tokens))),
            ("rows of an expert: least, mean, most", f"{counts.min()}, {counts.mean():.1f}, {counts.max()}"),
            *_event_rows(errors),
        ],
    )
    return 0


def run_combine(source: Path, output: Path, *, renormalize: bool) -> int:
    check_output(output, source)
    arrays = load(source, "sparse_moe_combine")
    outputs, weights = (without_float64(name, arrays[name]) for name in ("expert_outputs", "combine_weights"))

    driver.choose_target()
    import burt_numba

    dispatch = burt_numba.MoeDispatch(None, arrays["dispatch_indices"], None, weights)
    errors = burt_numba.ErrorBuffer()
    with refusals_of("sparse_moe_combine"), progress() as display:
        display.add_task("sparse_moe_combine", total=None)
        combined = burt_numba.sparse_moe_combine(outputs, dispatch, renormalize, errors=errors)
    save(output, "sparse_moe_combine", combined)

    without = int(np.count_nonzero((dispatch.dispatch_indices[..., 0] < 0).all(axis=1)))
    pairs(
        f"sparse_moe_combine{', weights renormalised' if renormalize else ''} → {output}",
        [
            ("expert_outputs", f"{outputs.shape} {outputs.dtype}"),
            ("tokens of no row", _share(without, len(combined))),
            ("mean sum of weights", _mean(weights.astype(np.float64).sum(axis=1))),
            *_event_rows(errors),
        ],
    )
    return 0
