"""What the tests of biencoder_attention share: inputs, guarded calls, and what every result must keep."""

from importlib import import_module
from typing import NamedTuple

import numpy as np
import pytest
from support import LIMITS, Guarded, events_of, normal, relative_error, to_target

import burt_numba
from burt_numba import biencoder_launches, reference
from burt_numba.biencoder_launches import LARGEST_TILES_SCALE
from burt_numba.host.compiling import compute_capability

# The module, which has the name of its function.
MODULE = import_module("burt_numba.biencoder_attention")
NAN_INPUT, INF_INPUT, ENTROPY_OVERFLOW = 1, 2, 3
each_type = pytest.mark.parametrize("dtype", [np.float32, np.float16])
AS_OF_MANY = 6
# Few queries of a head have a block or a cluster each; where there are tensor cores, more share a warp, 32 at a time.
# AS_OF_MANY stand for the kernel of more contexts, whatever their number (`kernels_of_many_contexts`).
each_kernel = pytest.mark.parametrize("queries", [2, 5, AS_OF_MANY])
ROWS, DOCUMENTED = "biencoder_rows_kernel", "biencoder_attention_kernel"
FEW, TILES = "biencoder_few_kernel", "biencoder_tiles_kernel"
ON_TENSOR_CORES = (FEW, TILES)
TOGETHER = {ROWS: 1, FEW: 32, TILES: 32, DOCUMENTED: 16}
"""Queries of a head that read a value together, and report it once."""
PARAMETERS = ("scale", "entropy_bound", "temperature_min", "temperature_max", "max_iterations")


@pytest.fixture(autouse=True)
def kernels_of_many_contexts(request, monkeypatch):
    """With AS_OF_MANY queries of `each_kernel`, no number of contexts is few."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("queries") == AS_OF_MANY:
        monkeypatch.setattr(biencoder_launches, "MOST_FEW", -1)
        monkeypatch.setattr(MODULE._OPERATION, "_calls", {})


class Inputs(NamedTuple):
    """The first three arguments of biencoder_attention."""

    query: np.ndarray
    context_keys: np.ndarray
    context_values: np.ndarray


def inputs_of(B, H, Q, K, D, *, key_heads=None, dtype=np.float32, spread=3.0, seed=0):
    """Normal vectors whose scores, at the default scale, have this spread."""
    key_heads = H if key_heads is None else key_heads
    size = np.sqrt(spread)
    return Inputs(
        normal((B, H, Q, D), size, dtype, seed),
        normal((B, key_heads, K, D), size, dtype, seed + 1000),
        normal((B, key_heads, K, D), 1.0, dtype, seed + 2000),
    )


def inputs_with_scores(scores, D=4, *, queries=1, dtype=np.float32, seed=0):
    """Equal queries and contexts whose scores, at scale=1, are these numbers: the first element of the keys.

    Exactly so for one query, and for any number of them where the scores have 22 bits or fewer.
    """
    query, keys = np.zeros((1, 1, queries, D), dtype), np.zeros((1, 1, len(scores), D), dtype)
    query[..., 0], keys[0, 0, :, 0] = 1, scores
    return Inputs(query, keys, normal(keys.shape, 1.0, dtype, seed))


class Attended(NamedTuple):
    """What a call gave, on the host."""

    out: np.ndarray
    temperature: np.ndarray
    entropy: np.ndarray
    lse: np.ndarray | None
    counts: dict
    first: tuple | None


def run_biencoder(inputs, scale=None, entropy_bound=0.2, *args, skew=None, context_lengths=None, lse=None, **options):
    """Call biencoder_attention with guarded outputs of NaN and an error buffer of its own.

    With `skew`, the inputs lie between guard cells of NaN as well, and every array so many elements off alignment.
    The sums of exponentials are asked for where there are any (without a bound), unless `lse` says otherwise.
    """
    arrays = [to_target(array) if skew is None else Guarded(array, np.nan, skew).array for array in inputs]
    bound = to_target(entropy_bound) if isinstance(entropy_bound, np.ndarray) else entropy_bound
    if context_lengths is not None:
        is_array = isinstance(context_lengths, np.ndarray)
        options["context_lengths"] = to_target(context_lengths) if is_array else context_lengths
    shape, dtype = inputs.query.shape, inputs.query.dtype
    out = Guarded(np.full(shape, np.nan, dtype), 777, skew or 0)
    names = ["temperature_out", "entropy_out"]
    if entropy_bound is None if lse is None else lse:
        names.append("lse_out")
    rows = {name: Guarded(np.full(shape[:3], np.nan, np.float32), 777, skew or 0) for name in names}
    errors = burt_numba.ErrorBuffer()
    returned = burt_numba.biencoder_attention(
        *arrays,
        scale,
        bound,
        *args,
        out=out.array,
        errors=errors,
        **{name: output.array for name, output in rows.items()},
        **options,
    )
    assert returned is out.array
    results = [rows[name].result() if name in rows else None for name in ("temperature_out", "entropy_out", "lse_out")]
    return Attended(out.result(), *results, *events_of(errors))


def kind_of(inputs, precision="fp32"):
    """The name of the arithmetic, as the limits have it."""
    return "tf32" if precision == "tf32" and inputs.query.dtype == np.float32 else inputs.query.dtype.name


def kernel_of(inputs, precision="fp32", scale=None):
    """The name of the kernel that a call with these inputs launches; of no rows, that of few."""
    if scale is not None and abs(scale) > LARGEST_TILES_SCALE:
        return ROWS
    (B, H, Q, D), (_, key_heads, K, _) = inputs.query.shape, inputs.context_keys.shape
    planned = burt_numba.plan(
        "biencoder_attention",
        batch_size=B,
        num_heads=H,
        key_heads=key_heads,
        query_len=Q,
        context_len=K,
        d_head=D,
        dtype=inputs.query.dtype.name,
        precision=precision,
        compute_capability=compute_capability(0),
    )
    return planned.launches[0].kernel if planned.launches else ROWS


def queries_together(inputs):
    """Queries of a head that read a value together."""
    return TOGETHER[kernel_of(inputs)]


def score_rounding(inputs, scale, precision, kernel):
    """[B, H, Q]: how far a score may be off, from the sizes of the terms of its sum."""
    query, keys, _ = (np.abs(np.where(np.isfinite(a), a, 0).astype(np.float64)) for a in inputs)
    if keys.shape[2] == 0 or query.size == 0:
        return np.zeros(query.shape[:3])
    keys = np.repeat(keys, query.shape[1] // keys.shape[1], axis=1)
    terms = (query @ keys.swapaxes(2, 3)).max(axis=3)
    name = "score_rounding"
    if kind_of(inputs, precision) == "tf32":
        name = "score_rounding_tf32"
    elif kernel in ON_TENSOR_CORES:
        name = "score_rounding_tiles"
    return LIMITS[name] * terms * abs(query.shape[3] ** -0.5 if scale is None else scale)


def assert_attended(
    outcome,
    inputs,
    scale=None,
    entropy_bound=0.2,
    temperature_min=0.01,
    temperature_max=10.0,
    max_iterations=20,
    *,
    context_lengths=None,
    precision="fp32",
    may_run_out=False,
    kernel=None,
):
    """Everything that biencoder_attention promises about its outputs and its events.

    `may_run_out`: max_iterations is small, so the entropy may be lower than the band. `kernel`: which one it was, if
    not the one that a call launches.
    """
    kernel = kernel_of(inputs, precision, scale) if kernel is None else kernel
    temperature_min = float(np.float32(temperature_min))
    start = float(np.clip(np.float32(1.0), temperature_min, np.float32(temperature_max)))

    def at(temperature, inputs=inputs):
        return reference.biencoder_attention(
            *inputs,
            scale,
            entropy_bound,
            temperature_min,
            max(start, temperature_max),
            context_lengths=context_lengths,
            temperature=np.broadcast_to(temperature, inputs.query.shape[:3]),
        )

    out, temperature, entropy = outcome.out, outcome.temperature, outcome.entropy
    assert out.shape == inputs.query.shape and out.dtype == inputs.query.dtype
    for name, array in (("out", out), ("temperature", temperature), ("entropy", entropy)):
        assert np.isfinite(array).all(), f"{name}: {np.count_nonzero(~np.isfinite(array))} entries are not finite"
    assert ((temperature >= np.float32(temperature_min)) & (temperature <= np.float32(start))).all()

    expected = at(temperature)
    rounding = score_rounding(inputs, scale, precision, kernel)
    spread = rounding / temperature
    limit = LIMITS[f"attention_{kind_of(inputs, precision)}"] + 2 * spread
    assert_rows_of_values(out, expected, inputs, limit)

    # A score that is off by r moves an entropy by at most 2 H r / T: dH/dz_j = -p_j (ln p_j + H) / T.
    moved = 2 * spread * expected.entropy
    reported = LIMITS["entropy_reported"] + LIMITS["entropy_reported_relative"] * expected.entropy + moved
    assert (np.abs(entropy - expected.entropy) <= reported).all(), f"{np.max(np.abs(entropy - expected.entropy))}"

    bound = np.asarray(np.inf if entropy_bound is None else entropy_bound, np.float64)
    bound = np.where(bound >= 0, bound, 0.0)
    bound = np.broadcast_to(bound[:, None] if bound.ndim else bound, temperature.shape)
    hot, cold, over = at(start).entropy, at(temperature_min).entropy, LIMITS["entropy_over"]
    hot_moved, cold_moved = 2 * rounding / start * hot, 2 * rounding / temperature_min * cold
    within = hot <= bound - over - hot_moved
    assert (temperature[within] == np.float32(start)).all(), "searched where the bound held already"
    # The entropy at temperature_min is itself rounded, by as much as it may be over the bound.
    out_of_reach, perhaps = cold > bound + 2 * over + cold_moved, cold > bound - cold_moved
    assert (temperature[out_of_reach] == np.float32(temperature_min)).all(), "gave up above temperature_min"
    excess = expected.entropy - bound - over - moved
    assert (excess[~perhaps] <= 0).all(), f"over the bound by {np.max(excess[~perhaps])}"
    if not may_run_out:
        under = np.maximum(LIMITS["entropy_under_relative"] * bound, LIMITS["entropy_under"]) + moved
        active = (hot > bound + over + hot_moved) & (cold <= bound - cold_moved)
        lack = bound[active] - under[active] - expected.entropy[active]
        assert (lack <= 0).all(), f"under the band by {np.max(lack)}"

    if outcome.lse is not None:
        assert_sums(outcome.lse, expected.lse, rounding / start)
    found = value_events(inputs, expected.weights, spread, TOGETHER[kernel], context_lengths)
    others = at(temperature, inputs._replace(context_values=np.zeros_like(inputs.context_values))).counts
    assert_events(outcome, expected, others, found, int(out_of_reach.sum()), int(perhaps.sum()))


def assert_rows_of_values(out, expected, inputs, limit):
    """Each row within its limit of the reference, by the size of what was added up: values of both signs cancel."""
    if out.size == 0:
        return
    sizes = np.abs(np.where(np.isfinite(inputs.context_values), inputs.context_values, 0).astype(np.float64))
    sizes = np.repeat(sizes, out.shape[1] // sizes.shape[1], axis=1)
    scale = np.linalg.norm(expected.weights @ sizes, axis=3)
    error = np.linalg.norm(out.astype(np.float64) - expected.output, axis=3)
    assert (error[scale == 0] == 0).all(), "a row that should be exactly 0 is not"
    # Contexts of almost no weight are left out, and below the smallest normal float16 numbers are 6e-8 apart.
    smallest = LIMITS["weight_left_out"] * np.linalg.norm(sizes.max(axis=2, initial=0), axis=-1)[..., None]
    smallest = smallest + (6e-8 * np.sqrt(out.shape[3]) if out.dtype == np.float16 else 0.0)
    excess = error - limit * scale - smallest
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess[worst] <= 0, (
        f"row {worst}: error {error[worst] / scale[worst]:.3g} over {limit[worst]:.3g} of the size of its values"
    )


def error_in_norm(outcome, expected):
    """||out - expected|| / ||expected|| over all rows; of cold ones, as far as their temperature lets it count."""
    counts = np.minimum(1.0, outcome.temperature / LIMITS["attention_cold"])[..., None]
    return relative_error(expected + (outcome.out - expected) * counts, expected)


def assert_sums(lse, expected, rounding):
    """ln sum exp, -inf where the reference has it."""
    empty = np.isneginf(expected)
    assert (np.isneginf(lse) == empty).all() and not np.isnan(lse).any()
    sums = np.where(empty, 0.0, expected)
    error = np.abs(np.where(empty, 0.0, lse) - sums)
    assert (error <= LIMITS["lse"] + LIMITS["lse_relative"] * np.abs(sums) + rounding).all(), f"{error.max()}"


def value_events(inputs, weights, spread, together, context_lengths=None):
    """{code: (fewest, most)} events of the values: of each bad element, one for each group of so many queries of a head
    that gave its context weight. Between the two lies what the rounding of the scores may decide.
    """
    (_, H, Q, _), (_, key_heads, K, _) = inputs.query.shape, inputs.context_values.shape
    bad = {NAN_INPUT: np.isnan(inputs.context_values), INF_INPUT: np.isinf(inputs.context_values)}
    if weights.size == 0 or not any(where.any() for where in bad.values()):
        return {code: (0, 0) for code in bad}
    lengths = np.full(len(weights), K) if context_lengths is None else np.clip(context_lengths, 0, K)
    threshold = np.minimum(2.0**-40, 2.0**-24 / np.maximum(lengths, 1))[:, None, None, None]
    groups = []
    for side in (-1, 1):
        moved = weights * np.exp(np.minimum(2 * side * spread, 700.0))[..., None]
        carries = moved * (1 + 1e-4 * side) > threshold
        firsts = range(0, Q, together)
        groups.append(np.stack([carries[:, :, first : first + together].any(axis=2) for first in firsts]).sum(axis=0))
    # [B, H, K] groups of queries; of all heads that share a value.
    shared = [each.reshape(len(weights), key_heads, H // key_heads, K).sum(axis=2) for each in groups]
    counts = {code: where.sum(axis=3) for code, where in bad.items()}
    return {code: tuple(int((each * count).sum()) for each in shared) for code, count in counts.items()}


def assert_events(outcome, expected, others, found, surely_out_of_reach, perhaps_out_of_reach):
    """The first index of the reference, and its counts: those of `others`, and of the values, as `found`.

    A row whose entropy at temperature_min is its bound, but for the rounding of its scores, may be recorded or not.
    """
    counts, wanted = dict(outcome.counts), dict(others)
    rows = counts.pop(ENTROPY_OVERFLOW, 0)
    wanted.pop(ENTROPY_OVERFLOW, 0)
    assert surely_out_of_reach <= rows <= perhaps_out_of_reach
    for code, (fewest, most) in found.items():
        recorded, elsewhere = counts.pop(code, 0), wanted.pop(code, 0)
        assert elsewhere + fewest <= recorded <= elsewhere + most, (
            f"code {code}: {recorded} events, expected {elsewhere}, and {fewest} to {most} of values"
        )
    assert counts == wanted
    if surely_out_of_reach == perhaps_out_of_reach and all(fewest == most for fewest, most in found.values()):
        assert outcome.first == expected.first


def check_biencoder(inputs, *args, skew=None, context_lengths=None, precision="fp32", **options):
    """Run biencoder_attention and hold it to everything it promises. Returns the outcome."""
    given = {"context_lengths": context_lengths, "precision": precision}
    given |= {name: options.pop(name) for name in PARAMETERS if name in options}
    outcome = run_biencoder(inputs, *args, skew=skew, **given, **options)
    assert_attended(outcome, inputs, *args, **given)
    return outcome


def same_results(one, other):
    """Every output has the same bits, and the events are the same."""
    alike = all(
        (a is None and b is None) or a.tobytes() == b.tobytes() for a, b in zip(one[:4], other[:4], strict=True)
    )
    return alike and one[4:] == other[4:]
