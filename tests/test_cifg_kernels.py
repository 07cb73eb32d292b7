"""The documented kernels of cifg_update and batched_cifg_update, launched by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
from support import LIMITS, NO_EVENT, Guarded, normal, poisoned, relative_error, to_host, to_target

from burt_numba import kernels, reference

ABSENT = np.empty(0, np.float32)
ABSENT_2D = np.empty((0, 0), np.float32)
OPEN = 1e30
"""A bound that nothing reaches: the reference does not project."""


def whole_warps(threads):
    return -(-threads // 32) * 32


def error_buffer():
    return to_target(np.array([NO_EVENT] + [0] * 7, np.int64))


def events(errors):
    words = to_host(errors)
    first = None if words[0] == NO_EVENT else divmod(int(words[0]), 8)
    return {code: int(words[code]) for code in range(1, 8) if words[code]}, first


def inputs_of(d, n, *, batch=None, matrices=None, seed=0):
    """C, h, x, W_f, b_f; with a batch C of so many matrices."""
    samples = () if batch is None else (batch,)
    lead = () if batch is None else (batch if matrices is None else matrices,)
    return [
        normal((*lead, d, d), 1.0, seed=seed),
        normal((*samples, d), 1.0, seed=seed + 1),
        normal((*samples, n), 1.0, seed=seed + 2),
        normal((d, d + n), 2.0 / np.sqrt(d + n), seed=seed + 3),
        normal((d,), 1.0, seed=seed + 4),
    ]


def update_by_hand(arrays, *, block=None, shared_bytes=None, grid=None, bound=OPEN, extras=True, with_lost=True):
    """Launch cifg_update_kernel between guard cells of NaN."""
    C, h, x, W, b = arrays
    d, width = W.shape
    memory, errors = Guarded(C, np.nan), error_buffer()
    vector = normal((d,), 1.0, seed=99)
    product, gate = (poisoned(d) if extras else to_target(ABSENT) for _ in range(2))
    lost = Guarded(np.zeros(2 * d if with_lost else 0, np.int32), -777)
    kernels.cifg_update_kernel[
        d if grid is None else grid,
        whole_warps(min(d, 256)) if block is None else block,
        0,
        4 * width if shared_bytes is None else shared_bytes,
    ](
        memory.array,
        *(Guarded(array, np.nan).array for array in (h, x, W, b)),
        d,
        width,
        bound,
        to_target(vector if extras else ABSENT),
        product,
        gate,
        lost.array,
        errors,
    )
    return SimpleNamespace(
        memory=memory.result(),
        vector=vector,
        product=to_host(product),
        gate=to_host(gate),
        lost=lost.result(),
        events=events(errors),
    )


def batch_by_hand(arrays, shared, *, block=None, shared_bytes=None, grid=None, extras=True):
    C, H, X, W, b = arrays
    batch, d = H.shape
    matrices = C.shape[0]
    memory, errors = Guarded(C, np.nan), error_buffer()
    vector = normal((matrices, d), 1.0, seed=99)
    product = poisoned((matrices, d)) if extras else to_target(ABSENT_2D)
    gate = poisoned((batch, d)) if extras else to_target(ABSENT_2D)
    lost = Guarded(np.zeros((matrices, 2 * d), np.int32), -777)
    documented = d if shared else (batch, d)
    kernels.batched_cifg_update_kernel[
        documented if grid is None else grid,
        whole_warps(min(d, 256)) if block is None else block,
        0,
        4 * W.shape[1] if shared_bytes is None else shared_bytes,
    ](
        memory.array,
        *(Guarded(array, np.nan).array for array in (H, X, W, b)),
        batch,
        d,
        W.shape[1],
        OPEN,
        shared,
        to_target(vector if extras else ABSENT_2D),
        product,
        gate,
        lost.array,
        errors,
    )
    return SimpleNamespace(
        memory=memory.result(),
        vector=vector,
        product=to_host(product),
        gate=to_host(gate),
        lost=lost.result(),
        events=events(errors),
    )


def project_by_hand(
    C, H=None, gate=None, lost=None, *, bound=0.95, iterations=10, clip=True, vector=None, block=64, grid=None
):
    """Launch cifg_projection_kernel; C [M, d, d]."""
    matrices, d = C.shape[:2]
    memory, errors = Guarded(C, np.nan), error_buffer()
    vectors = to_target(ABSENT_2D) if vector is None else Guarded(vector, np.nan).array
    marks = Guarded(np.empty((0, 0), np.int32) if lost is None else lost, -777)
    sigma = poisoned(matrices)
    nothing = np.zeros((matrices, d), np.float32)
    kernels.cifg_projection_kernel[matrices if grid is None else grid, block](
        memory.array,
        to_target(nothing if H is None else H),
        to_target(nothing if gate is None else gate),
        bound,
        iterations,
        clip,
        vectors,
        sigma,
        marks.array,
        poisoned((matrices, 4, d)),
        errors,
    )
    return SimpleNamespace(
        memory=memory.result(),
        vector=to_host(vectors),
        sigma=to_host(sigma),
        lost=marks.result(),
        events=events(errors),
    )


def assert_close(out, expected):
    assert np.isfinite(out).all()
    assert relative_error(out, expected) <= LIMITS["float32"]


def assert_updated(outcome, expected):
    """What an update without lost rows gives."""
    assert_close(outcome.memory, expected.memory)
    assert_close(outcome.gate, expected.forget_gate)
    product = np.einsum("...ij,...j->...i", expected.memory.reshape(*outcome.product.shape, -1), outcome.vector)
    # The product cancels where the memory does not.
    scale = np.linalg.norm(expected.memory) * np.linalg.norm(outcome.vector)
    assert np.linalg.norm(outcome.product - product) <= LIMITS["float32"] * scale
    assert not outcome.lost.any()
    assert outcome.events == (expected.counts, expected.first)


# One update ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 5, 33, 70])
@pytest.mark.parametrize("n", [0, 7])
def test_update(d, n):
    arrays = inputs_of(d, n, seed=d)
    assert_updated(update_by_hand(arrays), reference.cifg_update(*arrays, OPEN))


@pytest.mark.parametrize("block", [32, 64, 256])
@pytest.mark.parametrize("shared_bytes", [0, 4, 4 * 20, 4 * 40, 4 * 300])
def test_update_with_any_block_and_shared_memory(block, shared_bytes):
    """Nothing of [h; x] in shared memory, one element, a part of h, all of h and a part of x, and room to spare."""
    arrays = inputs_of(33, 9)
    outcome = update_by_hand(arrays, block=block, shared_bytes=shared_bytes)
    assert_updated(outcome, reference.cifg_update(*arrays, OPEN))


@pytest.mark.parametrize("grid", [1, 4, 50])
@pytest.mark.parametrize("shared_bytes", [4 * 10, 4 * 38])
def test_update_with_another_grid(grid, shared_bytes):
    arrays = inputs_of(33, 5)
    outcome = update_by_hand(arrays, grid=grid, shared_bytes=shared_bytes)
    assert_updated(outcome, reference.cifg_update(*arrays, OPEN))


def test_update_without_further_outputs():
    arrays = inputs_of(33, 5)
    with_all = update_by_hand(arrays)
    without = update_by_hand(arrays, extras=False, with_lost=False)
    assert without.memory.tobytes() == with_all.memory.tobytes()
    assert without.product.size == without.gate.size == without.lost.size == 0


def test_update_gives_the_same_bits_on_every_run():
    arrays = inputs_of(33, 5)
    first, second = update_by_hand(arrays), update_by_hand(arrays)
    assert first.memory.tobytes() == second.memory.tobytes()
    assert first.product.tobytes() == second.product.tobytes()


@pytest.mark.parametrize("bound", [0.0, -1.0, np.nan])
def test_update_records_a_bound_that_is_none(bound):
    arrays = inputs_of(5, 2)
    outcome = update_by_hand(arrays, bound=bound)
    assert outcome.events == ({6: 1}, (0, 6))
    assert_close(outcome.memory, reference.cifg_update(*arrays, OPEN).memory)


BAD = {
    "h": (1, [(3, np.nan), (32, -np.inf)]),
    "x": (2, [(0, np.inf), (4, np.nan), (6, np.nan)]),
    "W_f": (3, [((2, 1), np.nan), ((2, 36), np.inf), ((31, 39), -np.inf)]),
    "b_f": (4, [(7, np.nan), (9, -np.inf)]),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("grid", [33, 3])
def test_update_records_what_is_not_finite(name, grid):
    arrays = inputs_of(33, 7)
    place, cells = BAD[name]
    for cell, value in cells:
        arrays[place][cell] = value
    expected = reference.cifg_update(*arrays, OPEN)
    assert sum(expected.counts.values()) == len(cells)
    assert_updated(update_by_hand(arrays, grid=grid, shared_bytes=4 * 20), expected)


def test_update_records_entries_beyond_float32():
    arrays = inputs_of(33, 0)
    arrays[1][[2, 5]] = 3e19, -2e19
    arrays[3][:], arrays[4][:] = 0.0, -1.0
    expected = reference.cifg_update(*arrays, 1e40)
    assert expected.counts == {2: 3} and expected.first == (68, 2)
    outcome = update_by_hand(arrays)
    assert_close(outcome.memory, expected.memory)
    # Row 5 of C' v is beyond float32, too.
    assert outcome.events == ({2: 4}, (5, 2)) and outcome.product[5] == 0 and np.isfinite(outcome.product).all()
    assert update_by_hand(arrays, extras=False).events == (expected.counts, expected.first)


def test_update_survives_gate_sums_beyond_float32():
    arrays = inputs_of(33, 0)
    arrays[1][:2], arrays[3][4, :2] = 1e20, (3e38, -3e38)
    arrays[0][:] = 0.0
    outcome = update_by_hand(arrays, block=64)
    assert np.isfinite(outcome.memory).all()
    assert outcome.events[0][2] >= 1


LOST = [((2, 1), np.nan), ((2, 30), np.inf), ((20, 1), -np.inf), ((20, 20), np.nan)]


def with_lost(memory):
    for cell, value in LOST:
        memory[cell] = value
    return memory


@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("grid", [33, 2])
def test_update_marks_lost_rows_and_columns_and_the_projection_repairs_them(block, grid):
    arrays = inputs_of(33, 7)
    with_lost(arrays[0])
    expected = reference.cifg_update(*arrays, OPEN)
    outcome = update_by_hand(arrays, block=block, grid=grid)
    assert outcome.events == (expected.counts, expected.first) == ({1: 2, 2: 2}, (2 * 33 + 1, 1))
    marks = np.flatnonzero(outcome.lost)
    assert marks.tolist() == [2, 20, 33 + 1, 33 + 20, 33 + 30] and set(outcome.lost) == {0, 1}
    assert np.isfinite(outcome.memory).all()
    kept = [column for column in range(33) if column not in (1, 20, 30)]
    assert_close(outcome.memory[:, kept], expected.memory[:, kept])
    assert relative_error(outcome.memory, expected.memory) > 1e-3
    repaired = project_by_hand(
        outcome.memory[None], arrays[1][None], outcome.gate[None], outcome.lost[None], bound=OPEN, block=block
    )
    assert_close(repaired.memory[0], expected.memory)
    assert not repaired.lost.any() and repaired.events == ({}, None)


def test_update_without_marks_loses_rows_alone():
    arrays = inputs_of(33, 7)
    with_lost(arrays[0])
    outcome = update_by_hand(arrays, with_lost=False)
    assert outcome.memory.tobytes() == update_by_hand(arrays).memory.tobytes()


# A batch -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 5, 33])
@pytest.mark.parametrize("n", [0, 7])
@pytest.mark.parametrize("shared", [False, True])
def test_batch(d, n, shared):
    arrays = inputs_of(d, n, batch=3, matrices=1 if shared else None, seed=d)
    memory = arrays[0][0] if shared else arrays[0]
    expected = reference.batched_cifg_update(memory, *arrays[1:], OPEN, shared)
    assert_updated(batch_by_hand(arrays, shared), expected)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("block", "shared_bytes", "grid"), [(32, 0, (1, 1)), (64, 4 * 20, (2, 3)), (256, 4 * 300, (5, 1)), (96, 80, (1, 7))]
)
def test_batch_with_another_launch(shared, block, shared_bytes, grid):
    arrays = inputs_of(22, 5, batch=3, matrices=1 if shared else None)
    memory = arrays[0][0] if shared else arrays[0]
    expected = reference.batched_cifg_update(memory, *arrays[1:], OPEN, shared)
    outcome = batch_by_hand(arrays, shared, block=block, shared_bytes=shared_bytes, grid=grid)
    assert_updated(outcome, expected)


@pytest.mark.parametrize("shared", [False, True])
def test_batch_gives_the_same_bits_on_every_run(shared):
    arrays = inputs_of(22, 5, batch=3, matrices=1 if shared else None)
    first, second = (batch_by_hand(arrays, shared, extras=extras) for extras in (True, False))
    assert first.memory.tobytes() == second.memory.tobytes()


@pytest.mark.parametrize("shared", [False, True])
def test_batch_of_one_is_an_update(shared):
    arrays = inputs_of(22, 5, batch=1)
    single = [arrays[0][0], arrays[1][0], arrays[2][0], *arrays[3:]]
    assert_close(batch_by_hand(arrays, shared).memory[0], update_by_hand(single).memory)


@pytest.mark.parametrize("shared", [False, True])
def test_batch_records_and_repairs(shared):
    arrays = inputs_of(33, 7, batch=2, matrices=1 if shared else None)
    with_lost(arrays[0][-1])
    arrays[1][1, 4], arrays[2][1, 6], arrays[2][0, 2] = np.nan, np.inf, np.nan
    arrays[3][2, 36], arrays[4][7] = np.inf, -np.inf
    memory = arrays[0][0] if shared else arrays[0]
    expected = reference.batched_cifg_update(memory, *arrays[1:], OPEN, shared)
    outcome = batch_by_hand(arrays, shared)
    assert outcome.events == (expected.counts, expected.first)
    assert expected.counts == {1: 4, 2: 5}
    assert np.flatnonzero(outcome.lost[-1]).tolist() == [2, 20, 33 + 1, 33 + 20, 33 + 30]
    assert not outcome.lost[:-1].any()
    repaired = project_by_hand(outcome.memory, arrays[1], outcome.gate, outcome.lost, bound=OPEN)
    assert_close(repaired.memory[0] if shared else repaired.memory, expected.memory)
    assert not repaired.lost.any() and repaired.events == ({}, None)


# Projection ----------------------------------------------------------------------------------------------------------


def spectrum(values, seed=0):
    """A float32 matrix with these singular values."""
    d = len(values)
    left, _ = np.linalg.qr(normal((d, d), 1.0, np.float64, seed))
    right, _ = np.linalg.qr(normal((d, d), 1.0, np.float64, seed + 1))
    return (left * values @ right.T).astype(np.float32)


def sigma_of(matrix):
    return np.linalg.svd(matrix.astype(np.float64), compute_uv=False)


@pytest.mark.parametrize("d", [1, 5, 33])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("block", [32, 64, 256])
def test_projection_of_one_singular_value(d, clip, block):
    matrix = spectrum([1.4] + [0.5] * (d - 1))
    outcome = project_by_hand(matrix[None], clip=clip, block=block)
    expected = reference.cifg_update(
        matrix, np.zeros(d), np.zeros(0), np.zeros((d, d)), np.full(d, 100.0), projection="clip" if clip else "scale"
    )
    assert_close(outcome.memory[0], expected.memory)
    assert abs(outcome.sigma[0] - expected.sigma) <= LIMITS["float32"] * expected.sigma
    assert outcome.events == ({}, None)


def test_projection_of_rank_one():
    """What is left beside the singular value is rounding: clipped or scaled, the result is the same."""
    h = normal((33,), 1.0)
    matrix = np.outer(h, h)
    outcome = project_by_hand(matrix[None])
    assert_close(outcome.memory[0], matrix * (0.95 / sigma_of(matrix)[0]))
    assert outcome.events == ({}, None)


def test_projection_scales_where_two_values_exceed():
    matrix = spectrum([2.0, 1.2] + [0.3] * 31)
    outcome = project_by_hand(matrix[None], iterations=20)
    assert_close(outcome.memory[0], matrix * (0.95 / 2.0))
    assert outcome.events == ({}, None)


@pytest.mark.parametrize("clip", [True, False])
def test_projection_leaves_what_is_within_the_bound(clip):
    matrices = np.stack([spectrum([0.94] + [0.3] * 4), np.zeros((5, 5), np.float32)])
    outcome = project_by_hand(matrices, clip=clip)
    assert outcome.memory.tobytes() == matrices.tobytes()
    assert np.abs(outcome.sigma - [0.94, 0.0]).max() <= 1e-5 and outcome.events == ({}, None)


def test_projection_of_several_matrices_by_fewer_blocks():
    matrices = np.stack([spectrum([top] + [0.2] * 8, seed) for seed, top in enumerate((1.1, 0.5, 3.0))])
    outcome = project_by_hand(matrices, grid=2)
    assert outcome.memory.tobytes() == project_by_hand(matrices).memory.tobytes()
    tops = [sigma_of(matrix)[0] for matrix in outcome.memory]
    assert np.abs(np.array(tops) - [0.95, 0.5, 0.95]).max() <= 1e-5


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e15, 1e30])
@pytest.mark.parametrize("clip", [True, False])
def test_projection_of_any_magnitude(scale, clip):
    """Fourth powers of these leave float32."""
    matrix = spectrum([1.4] + [0.5] * 6) * np.float32(scale)
    outcome = project_by_hand(matrix[None], bound=0.95 * scale, clip=clip)
    assert abs(sigma_of(outcome.memory[0])[0] / scale - 0.95) <= 1e-5
    assert abs(outcome.sigma[0] / scale - 1.4) <= 1e-5 and outcome.events == ({}, None)


def test_projection_carries_the_vector():
    """From the right vector, the first step settles it; a start that misses it is caught up with."""
    matrix = spectrum([1.0, 0.97] + [0.3] * 31)
    right = np.linalg.svd(matrix.astype(np.float64))[2]
    warm = project_by_hand(matrix[None], iterations=0, vector=right[:1].astype(np.float32), bound=OPEN)
    cold = project_by_hand(matrix[None], iterations=0, bound=OPEN)
    assert abs(warm.sigma[0] - 1.0) < 1e-5 < 1e-2 < 1.0 - cold.sigma[0]
    assert abs(warm.vector[0] @ right[0]) > 1 - 1e-4 and abs(np.linalg.norm(warm.vector) - 1) < 1e-5
    lower = np.diag(np.float32([0.3] * 32 + [1.4]))
    wrong = np.zeros((1, 33), np.float32)
    wrong[0, 3] = 1
    hidden = project_by_hand(lower[None], vector=wrong)
    assert abs(sigma_of(hidden.memory[0])[0] - 0.95) <= 1e-5
    for bad in (np.full((1, 33), np.nan, np.float32), np.zeros((1, 33), np.float32)):
        assert project_by_hand(matrix[None], iterations=0, vector=bad, bound=OPEN).sigma[0] == cold.sigma[0]


def test_projection_says_where_it_fails():
    """One step from a cold start, of singular values close together."""
    matrix = spectrum(np.linspace(2.0, 1.0, 33))
    outcome = project_by_hand(matrix[None], iterations=0, clip=False)
    assert sigma_of(outcome.memory[0])[0] > 0.95 * (1 + 1e-3)
    assert outcome.events == ({4: 1}, (0, 4))


def test_projection_of_what_is_not_finite():
    matrix = spectrum([1.4] + [0.5] * 32)
    matrix[2, 3], matrix[7, 32] = np.nan, -np.inf
    outcome = project_by_hand(matrix[None], bound=OPEN)
    assert outcome.events == ({1: 1, 2: 1}, (2 * 33 + 3, 1))
    assert outcome.memory[0].tobytes() == np.where(np.isfinite(matrix), matrix, np.float32(0)).tobytes()


@pytest.mark.parametrize("bound", [0.0, np.nan])
def test_projection_without_a_bound(bound):
    matrix = spectrum([1.4] + [0.5] * 4)
    outcome = project_by_hand(matrix[None], bound=bound)
    assert outcome.events == ({6: 1}, (0, 6)) and outcome.memory[0].tobytes() == matrix.tobytes()


# The limits tell right from wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["no write", "coupled by column", "gate without x", "clip for scale"])
def test_a_wrong_variant_fails(wrong):
    arrays = inputs_of(33, 7)
    outcome = update_by_hand(arrays)
    expected = reference.cifg_update(*arrays, OPEN)
    if wrong == "no write":
        outcome.memory -= (1 - outcome.gate[:, None]) * np.outer(arrays[1], arrays[1])
    elif wrong == "coupled by column":
        outcome.memory = outcome.gate * arrays[0] + (1 - outcome.gate) * np.outer(arrays[1], arrays[1])
    elif wrong == "gate without x":
        expected = reference.cifg_update(*arrays[:2], 0 * arrays[2], *arrays[3:], OPEN)
    else:
        matrix = spectrum([1.4] + [0.5] * 32)
        outcome.memory = project_by_hand(matrix[None], clip=True).memory[0]
        expected = expected._replace(memory=matrix * (0.95 / 1.4))
    with pytest.raises(AssertionError):
        assert_updated(outcome, expected)
