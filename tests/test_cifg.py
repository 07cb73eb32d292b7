"""cifg_update and batched_cifg_update against their reference and their contract: gates, updates, sizes, batches."""

import itertools

import numpy as np
import pytest
from cifg_support import (
    KEEPS,
    REPLACES,
    Inputs,
    assert_cifg,
    check_cifg,
    expected_of,
    forget_calls,
    kept,
    random_inputs,
    run_cifg,
    same_results,
    sigma_of,
    with_spectrum,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support import LIMITS, ON_GPU, cases, normal, relative_error, to_host, to_target

import burt_numba
from burt_numba import cifg, cifg_launches, reference
from burt_numba.target import SIMULATED_CAPABILITY

WITHIN = 1e4
"""A bound that no matrix of these tests comes to: there is no projection, so the update itself is seen."""
UNBOUNDED = 1e30

# Sizes ---------------------------------------------------------------------------------------------------------------

# Edges: of a vector load (4), a warp (32), a matrix of one small block or one large (64), and what a cluster shares.
SMALL_SIZES = [(1, 0), (1, 3), (2, 1), (3, 0), (4, 4), (5, 2), (8, 8), (31, 2), (32, 32), (33, 5), (64, 0), (65, 7)]
LARGE_SIZES = [(127, 1), (128, 128), (129, 3), (255, 0), (512, 512), (513, 1), (1000, 24), (1024, 1024), (2049, 7)]


@pytest.mark.parametrize(("d", "n"), cases(SMALL_SIZES, LARGE_SIZES))
@pytest.mark.parametrize("bound", [0.95, WITHIN])
def test_sizes(d, n, bound):
    """Both sides of every edge between launches, with a projection and without one."""
    check_cifg(random_inputs(d, n, seed=d), bound)


@pytest.mark.parametrize(("d", "n"), cases([(1, 0), (2, 3), (5, 0), (12, 4)], [(33, 1), (64, 64), (255, 1), (1000, 8)]))
def test_sizes_scaled(d, n):
    """C is not within the bound before, so that several singular values exceed it after."""
    check_cifg(random_inputs(d, n, sigma=3.0, seed=d), projection="scale")
    check_cifg(random_inputs(d, n, sigma=30.0, hidden=0.1, seed=d), 0.1, projection="scale", power_iterations=1000)


@pytest.mark.parametrize("d", cases([1, 2, 9], [31, 64, 65, 256, 1000]))
@pytest.mark.parametrize("hidden", [0.01, 0.5, 30.0])
def test_spreads_of_h(d, hidden):
    """What float32 leaves of a memory that was a thousand times larger is known to that many roundings less."""
    inputs = random_inputs(d, 2, hidden=hidden, seed=d)
    check_cifg(inputs, projection="scale")
    if hidden < 1:
        check_cifg(inputs)
        return
    outcome, before = run_cifg(inputs, power_iterations=100), expected_of(inputs, UNBOUNDED).memory
    expected = expected_of(inputs)
    difference = np.linalg.norm(outcome.memory - expected.memory)
    assert difference <= LIMITS["float32"] * np.linalg.norm(before)
    assert outcome.counts == expected.counts
    assert sigma_of(outcome.memory) <= 0.95 * (1 + LIMITS["spectral"])


@pytest.mark.parametrize(("d", "batch"), cases([(1, 1), (5, 3), (2, 33), (33, 1)], [(255, 3), (1000, 1), (64, 257)]))
@pytest.mark.parametrize("shared", [False, True])
def test_batches(d, batch, shared):
    for n in (0, 3) if batch < 33 or ON_GPU else (3,):
        check_cifg(random_inputs(d, n, (batch,), shared=shared, seed=d), shared=shared)


@pytest.mark.gpu_only("thousands of matrices and samples are too slow in the simulator")
@pytest.mark.parametrize("d", [1, 8, 31, 32, 64, 65, 128])
@pytest.mark.parametrize("batch", [1000, 4096])
@pytest.mark.parametrize("shared", [False, True])
def test_many_samples(d, batch, shared):
    inputs = random_inputs(d, 5, (batch,), shared=shared, seed=d)
    for bound in (0.95, WITHIN):
        check_cifg(inputs, bound, shared=shared, together=True)


@pytest.mark.parametrize(("shared", "set_shift", "groups_shift"), [(None, 2, 0), (False, 2, 1), (True, 2, 2)])
def test_blocks_add_up_in_sets(shared, set_shift, groups_shift, monkeypatch):
    """Sets of sets of blocks, by one group of threads or by several; tiles of gates that several blocks share."""
    monkeypatch.setattr(cifg, "multiprocessors", lambda device: 64)
    forget_calls(monkeypatch)
    for name in ("_SET_SHIFT", "_LARGE_SET_SHIFT"):
        monkeypatch.setattr(cifg_launches, name, set_shift)
    monkeypatch.setattr(cifg_launches, "_MOST_GROUPS_SHIFT", groups_shift)
    width, batch = 137 + 127, None if shared is None else 1
    plan = cifg_launches.memory_launches(137, 1, batch, width, bool(shared), SIMULATED_CAPABILITY, 64)
    assert plan.update.blocks > 4 << plan.set_shift and plan.group_shift == groups_shift
    inputs = random_inputs(137, 127, () if shared is None else (1,), shared=bool(shared), hidden=0.05, seed=137)
    memory = check_cifg(inputs, WITHIN, shared=shared).memory
    # Below this bound, but not by the sum of squares: what the blocks have added up is needed to tell.
    bound = 1.3 * float(np.max(sigma_of(memory)))
    right = np.linalg.svd(memory.reshape(137, 137))[2][0]
    vector = right if inputs.C.ndim == 2 else right[np.newaxis]
    outcome = run_cifg(inputs, bound, shared=shared, power_vector=vector)
    assert outcome.memory.tobytes() == memory.tobytes() and outcome.counts == {}
    assert outcome.sigma == pytest.approx(bound / 1.3, rel=1e-4)
    assert abs(outcome.power_vector.ravel() @ right) >= 1 - 1e-3


@pytest.mark.parametrize("shared", [None, False, True])
def test_no_columns(shared):
    batch = () if shared is None else (3,)
    outcome = run_cifg(random_inputs(0, 2, batch, shared=bool(shared)), shared=shared)
    assert outcome.memory.size == 0 and outcome.counts == {}


@pytest.mark.parametrize("in_place", [False, True])
def test_no_samples(in_place):
    """A grid of 0 blocks is refused by the driver, so there must be no launch: numba/numba#5017."""
    independent = run_cifg(random_inputs(4, 2, (0,)), shared=False, in_place=in_place)
    assert independent.memory.shape == (0, 4, 4) and independent.counts == {}
    inputs = random_inputs(4, 2, (0,), shared=True)
    shared = run_cifg(inputs, shared=True, in_place=True)
    assert shared.memory.tobytes() == inputs.C.tobytes()
    # NumPy arrays are copied to a GPU and back: what is not written must come back as it was.
    C = inputs.C.copy()
    assert burt_numba.batched_cifg_update(C, *inputs[1:], shared_memory_mode=True) is C
    assert C.tobytes() == inputs.C.tobytes()


def test_one_size_after_another():
    """A kernel specialised for one size was reused for the next: numba/numba#3265."""
    inputs = {size: random_inputs(*size, seed=size[0]) for size in ((3, 2), (5, 4), (4, 0))}
    first = {size: run_cifg(inputs[size]) for size in inputs}
    for size in itertools.islice(itertools.cycle(inputs), 6):
        assert same_results(run_cifg(inputs[size]), first[size])


# Known values --------------------------------------------------------------------------------------------------------


def test_gate_open_keeps_every_bit():
    inputs = kept(normal((9, 9)), normal((9,)))
    outcome = run_cifg(inputs, WITHIN)
    assert (outcome.forget_gate == 1).all()
    assert outcome.memory.tobytes() == inputs.C.tobytes()


def test_gate_shut_writes_the_outer_product():
    """One product of two float32 numbers has one rounding, so these bits are known."""
    inputs = kept(normal((9, 9)), normal((9,)))._replace(b_f=np.full(9, REPLACES))
    outcome = run_cifg(inputs, WITHIN)
    assert (outcome.forget_gate == 0).all()
    assert np.array_equal(outcome.memory, np.outer(inputs.h, inputs.h))


@pytest.mark.parametrize("bias", [1e4, -1e4, 88.8, -88.8, 104.0, -104.0])
@pytest.mark.parametrize("shared", [None, False, True])
def test_gate_far_from_zero(bias, shared):
    """Outside [-40, 40] a sigmoid gave NaN: ARM-software/ComputeLibrary#779, ocropus-archive/DUP-ocropy#79."""
    inputs = kept(np.eye(3) / 4, [1, 2, 3])._replace(b_f=np.full(3, bias, np.float32))
    if shared is not None:
        inputs = inputs._replace(h=np.tile(inputs.h, (2, 1)), x=np.zeros((2, 0), np.float32))
        inputs = inputs if shared else inputs._replace(C=np.tile(inputs.C, (2, 1, 1)))
    outcome = check_cifg(inputs, shared=shared)
    if bias > 0:
        assert (outcome.forget_gate == 1).all()
    else:
        assert (outcome.forget_gate < 1e-38).all()
        outer = np.outer([1, 2, 3], [1, 2, 3])
        assert relative_error(outcome.memory, np.broadcast_to(outer * (0.95 / 14), inputs.C.shape)) <= LIMITS["float32"]


@pytest.mark.parametrize("activation", [-80.0, -41.7, -28.0, -9.3, 9.3, 28.0, 41.7, 80.0])
def test_small_parts_of_a_gate_are_as_accurate_as_large_ones(activation):
    """1 - f of a nearly open gate, from f, has few digits; so has e^x, from a rounded x log2(e) (5e-6 at 80)."""
    inputs = kept(np.zeros((1, 1)), [-4])._replace(b_f=np.array([activation], np.float32))
    outcome = run_cifg(inputs, UNBOUNDED)
    written = 16 / (1 + np.exp(np.float64(inputs.b_f[0])))
    assert outcome.memory.item() == pytest.approx(written, rel=1e-6)
    assert reference.cifg_update(*inputs, UNBOUNDED).memory.item() == pytest.approx(written, rel=1e-12)
    assert outcome.forget_gate.item() == pytest.approx(1 / (1 + np.exp(-np.float64(inputs.b_f[0]))), rel=1e-6)


def test_gate_of_weights_of_one_column_at_a_time():
    """The columns of W_f belong to h first, then to x."""
    d, n = 4, 3
    h, x = normal((d,), seed=1), normal((n,), seed=2)
    for column, value in enumerate([*h, *x]):
        W_f = np.zeros((d, d + n), np.float32)
        W_f[:, column] = [1, 0, -1, 0.5]
        inputs = Inputs(np.eye(d, dtype=np.float32), h, x, W_f, np.zeros(d, np.float32))
        wanted = 1 / (1 + np.exp(-W_f[:, column].astype(np.float64) * value))
        assert check_cifg(inputs, WITHIN).forget_gate == pytest.approx(wanted, rel=1e-6)


def test_rows_have_the_gate_and_columns_do_not():
    inputs = kept(np.ones((2, 2)), [1, 3])._replace(b_f=np.float32([KEEPS, REPLACES]))
    assert run_cifg(inputs, WITHIN).memory.tolist() == [[1, 1], [3, 9]]


@pytest.mark.parametrize("bound", [9.5e-6, 1.1e-5])
def test_tiny_memory(bound):
    """An eps added to the norm deflated the estimate of tiny weights: klasleino/gloro#8."""
    inputs = kept([[1e-5]])
    outcome = check_cifg(inputs, bound)
    assert abs(float(outcome.memory[0, 0])) <= bound * (1 + 1e-5)
    if bound > 1e-5:
        assert outcome.memory.tobytes() == inputs.C.tobytes()


@pytest.mark.parametrize("shared", [None, False])
def test_zero_memory_stays_zero(shared):
    """All zeros gave NaN in spite of an eps: pytorch/pytorch#20192."""
    if shared is None:
        outcome = check_cifg(kept(np.zeros((4, 4)))._replace(x=np.float32([]), b_f=np.zeros(4, np.float32)))
        assert (outcome.memory == 0).all() and outcome.sigma.tolist() == [0]
        return
    inputs = random_inputs(4, 3, (3,))
    inputs.C[1], inputs.h[1] = 0, 0
    outcome = check_cifg(inputs, shared=False)
    assert (outcome.memory[1] == 0).all() and outcome.sigma[1] == 0


def test_within_the_bound_the_bound_does_not_show():
    inputs = random_inputs(9, 3)
    outcomes = [check_cifg(inputs, bound) for bound in (WITHIN, 1e9, 3e38, float("inf"))]
    assert len({outcome.memory.tobytes() for outcome in outcomes}) == 1


def test_defaults_are_the_documented_ones():
    inputs = random_inputs(4, 3)
    given = run_cifg(inputs, 0.95, projection="clip", power_iterations=10)
    out = to_host(burt_numba.cifg_update(*(to_target(array.copy()) for array in inputs)))
    assert out.tobytes() == given.memory.tobytes()
    batch = random_inputs(3, 3, (2,))
    given = run_cifg(batch, 0.95, shared=False, projection="clip", power_iterations=10)
    out = to_host(burt_numba.batched_cifg_update(*(to_target(array.copy()) for array in batch)))
    assert out.tobytes() == given.memory.tobytes()


# Batches -------------------------------------------------------------------------------------------------------------


def test_each_sample_is_an_update_of_its_own():
    inputs = random_inputs(5, 3, (3,))
    batch = check_cifg(inputs, shared=False)
    for sample in range(3):
        single = check_cifg(Inputs(*(array[sample] for array in inputs[:3]), *inputs[3:]))
        assert relative_error(batch.memory[sample], single.memory) <= LIMITS["float32"]
        assert relative_error(batch.forget_gate[sample], single.forget_gate) <= LIMITS["float32"]


def test_permutation_of_the_samples_permutes_the_bits():
    inputs, order = random_inputs(3, 2, (6,)), [3, 0, 5, 1, 4, 2]
    permuted = inputs._replace(C=inputs.C[order], h=inputs.h[order], x=inputs.x[order])
    one, other = run_cifg(inputs, shared=False), run_cifg(permuted, shared=False)
    assert one.memory[order].tobytes() == other.memory.tobytes()
    assert one.forget_gate[order].tobytes() == other.forget_gate.tobytes()
    assert one.sigma[order].tobytes() == other.sigma.tobytes()


def test_shared_memory_is_the_mean_of_the_updates():
    inputs = random_inputs(9, 3, (7,), shared=True)
    outcome = check_cifg(inputs, WITHIN, shared=True)
    singles = [run_cifg(inputs._replace(h=inputs.h[b], x=inputs.x[b]), WITHIN) for b in range(7)]
    mean = np.mean([single.memory for single in singles], axis=0, dtype=np.float64)
    assert relative_error(outcome.memory, mean) <= LIMITS["float32"]


@pytest.mark.parametrize(("d", "batch", "runs"), cases([(3, 9, 3), (9, 33, 2)], [(64, 64, 100), (200, 1000, 20)]))
def test_shared_memory_has_the_same_bits_on_every_run(d, batch, runs):
    """Float atomics add in the order of arrival: huggingface/transformers#43362, pytorch/pytorch#12217."""
    inputs = random_inputs(d, 3, (batch,), shared=True)
    first = check_cifg(inputs, shared=True)
    for _ in range(runs):
        assert same_results(run_cifg(inputs, shared=True, power_iterations=100), first)


@pytest.mark.parametrize(("d", "batch"), cases([(3, 9), (8, 33)], [(64, 64), (65, 4096)]))
@pytest.mark.parametrize("bound", [0.95, WITHIN])
def test_shared_memory_hardly_depends_on_the_order(d, batch, bound):
    inputs = random_inputs(d, 3, (batch,), shared=True)
    order = np.random.default_rng(1).permutation(batch)
    permuted = inputs._replace(h=inputs.h[order], x=inputs.x[order])
    one = run_cifg(inputs, bound, shared=True, power_iterations=100)
    other = run_cifg(permuted, bound, shared=True, power_iterations=100)
    assert relative_error(other.memory, one.memory.astype(np.float64)) <= 1e-5
    assert one.forget_gate[order].tobytes() == other.forget_gate.tobytes()


def test_shared_memory_is_always_scaled():
    inputs = random_inputs(9, 3, (2,), shared=True)
    clipped, scaled = (run_cifg(inputs, shared=True, projection=projection) for projection in ("clip", "scale"))
    assert same_results(clipped, scaled)
    whole = run_cifg(inputs, WITHIN, shared=True)
    assert relative_error(clipped.memory * (whole.sigma / 1), whole.memory * whole.sigma) > LIMITS["float32"]
    factor = 0.95 / sigma_of(whole.memory)
    assert relative_error(clipped.memory, whole.memory.astype(np.float64) * factor) <= LIMITS["float32"]


# Properties ----------------------------------------------------------------------------------------------------------


@st.composite
def any_inputs(draw, elements):
    d, n = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    shapes = ((d, d), (d,), (n,), (d, d + n), (d,))
    return Inputs(*(draw(hnp.arrays(np.float32, shape, elements=elements)) for shape in shapes))


moderate = st.floats(-8, 8, width=32)
with_bad_ones = st.one_of(moderate, st.sampled_from([np.nan, np.inf, -np.inf, 0.0, 1.0]))


few = settings(max_examples=100 if ON_GPU else 12)


@few
@given(any_inputs(with_bad_ones), st.floats(0.125, 4, width=32), st.sampled_from(["clip", "scale"]))
def test_contract_holds_for_anything(inputs, bound, projection):
    outcome = run_cifg(inputs, bound, projection=projection, power_iterations=100)
    expected = reference.cifg_update(*inputs, bound, projection=projection)
    assert np.isfinite(outcome.memory).all()
    assert {code: outcome.counts[code] for code in outcome.counts if code != 4} == expected.counts
    assert sigma_of(outcome.memory) <= bound * (1 + LIMITS["spectral"])
    if expected.sigma <= bound * (1 - LIMITS["float32"]):
        assert relative_error(outcome.memory, expected.memory) <= LIMITS["float32"]
    elif projection == "scale":
        # The direction is known whatever the spectrum; the length as well as sigma is.
        direction = expected.memory / np.linalg.norm(expected.memory)
        assert relative_error(outcome.memory / np.linalg.norm(outcome.memory), direction) <= LIMITS["float32"]


def test_a_second_value_that_a_start_vector_hardly_sees_is_found():
    """Both values are above the bound: nothing may be cut, and the memory is scaled."""
    weights = np.full((4, 6), -0.29862428, np.float32)
    weights[0, 5] = 0
    C = np.float32([[4.870818, 0, 4.0573187, 0], [0, 5.0122843, 0, 2.5827148], [0, 0, 2.2045314, -2.8938885]])
    C = np.concatenate([C, np.float32([[0, 1.442695, 0, 0]])])
    h, x = np.float32([-2.8844128, 0.9, 8, 0]), np.float32([-0.7698363, -6.9493628])
    inputs = Inputs(C, h, x, weights, np.float32([-2.4053996, 1.8334926, 0, -2.56139]))
    bound = 3.78466
    outcome = run_cifg(inputs, bound, power_iterations=100)
    assert outcome.counts == {} and sigma_of(outcome.memory) <= bound * (1 + LIMITS["spectral"])
    expected = reference.cifg_update(*inputs, bound)
    assert relative_error(outcome.memory, expected.memory) <= LIMITS["spectral"]


@pytest.mark.parametrize("power_iterations", [10, 100])
def test_a_first_value_that_a_start_vector_hardly_sees_is_found(power_iterations):
    """The pseudo-random vector is nearly the second singular vector, whose value is within the bound."""
    C = [[0.06369383633136749, 0.16961558163166046], [-0.6355718970298767, 0.8446864485740662]]
    outcome = run_cifg(kept(C), 0.7898489759734233, power_iterations=power_iterations)
    assert outcome.counts == {} and sigma_of(outcome.memory) <= 0.7898489759734233 * (1 + LIMITS["spectral"])


@pytest.mark.parametrize("rest", [0.1, 0.03, 0.01])
@pytest.mark.parametrize("validated", [False, True])
def test_a_memory_just_within_the_bound_is_not_reported(rest, validated):
    """However soon the iteration has found its value: 0.9499 of 0.95, and the others far below."""
    for seed in range(12):
        C = with_spectrum([0.9499, rest, rest / 2, rest / 10], seed)
        outcome = run_cifg(kept(C), 0.95, validate_output=validated)
        assert outcome.counts == {} and (outcome.memory == C.astype(np.float32)).all(), seed


@few
@given(any_inputs(moderate), st.floats(0.125, 4, width=32))
def test_projection_of_a_projected_memory_is_that_memory(inputs, bound):
    """Once within the bound, an update that keeps everything changes nothing by more than the promise."""
    once = run_cifg(inputs, bound, power_iterations=100).memory
    again = run_cifg(kept(once), bound, power_iterations=100).memory
    assert np.linalg.norm(again - once, 2) <= bound * LIMITS["spectral"]


# A deliberately wrong operation must fail at the same limits ---------------------------------------------------------


def wrong_update(inputs, write=None, gate=None, bound=0.95, projection="clip"):
    """The float64 model with a gate or a written part of its own."""
    C, h, x, W_f, b_f = (array.astype(np.float64) for array in inputs)
    f = 1 / (1 + np.exp(-(W_f @ np.concatenate([h, x]) + b_f))) if gate is None else gate
    new = f[:, None] * C + ((1 - f)[:, None] * np.outer(h, h) if write is None else write(f, h))
    open_gate = np.full(len(h), 1e3)
    return reference.cifg_update(new, h * 0, x[:0], W_f[:, : len(h)] * 0, open_gate, bound, projection=projection)


def replaced(outcome, result):
    return outcome._replace(memory=result.memory.astype(np.float32))


WRONG = {
    "gate not complemented": lambda i, o: replaced(o, wrong_update(i, lambda f, h: f[:, None] * np.outer(h, h))),
    "gate on the columns": lambda i, o: replaced(o, wrong_update(i, lambda f, h: (1 - f) * np.outer(h, h))),
    "nothing forgotten": lambda i, o: replaced(
        o, wrong_update(i, gate=np.ones(9), write=lambda f, h: (1 - o.forget_gate)[:, None] * np.outer(h, h))
    ),
    "bias left out": lambda i, o: replaced(o, wrong_update(i._replace(b_f=i.b_f * 0))),
    "x left out": lambda i, o: replaced(o, wrong_update(i._replace(x=i.x * 0))),
    "no projection": lambda i, o: replaced(o, wrong_update(i, bound=1e9)),
    "scaled in place of clipped": lambda i, o: replaced(o, wrong_update(i, projection="scale")),
    "a bound a hundred-thousandth too low": lambda i, o: replaced(o, wrong_update(i, bound=0.95 * (1 - 1e-5))),
    "transposed": lambda i, o: o._replace(memory=o.memory.T.copy()),
    "one element off by a ten-thousandth": lambda i, o: o._replace(
        memory=o.memory * np.where(o.memory == o.memory.max(), np.float32(1 + 1e-4), np.float32(1))
    ),
    "sigma of the projected memory": lambda i, o: o._replace(sigma=np.float32([0.95])),
    "gate off by a hundred-thousandth": lambda i, o: o._replace(forget_gate=o.forget_gate * np.float32(1 - 1e-5)),
    "an event too many": lambda i, o: o._replace(counts={4: 1}),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_results_are_noticed(fault):
    inputs = random_inputs(9, 3, hidden=0.7)
    outcome = check_cifg(inputs)
    assert_cifg(replaced(outcome, wrong_update(inputs)), inputs)
    with pytest.raises(AssertionError):
        assert_cifg(WRONG[fault](inputs, outcome), inputs)


def test_wrong_batches_are_noticed():
    inputs = random_inputs(5, 3, (3,))
    outcome = check_cifg(inputs, shared=False)
    with pytest.raises(AssertionError):
        assert_cifg(outcome._replace(memory=np.roll(outcome.memory, 1, axis=0)), inputs, shared=False)
    shared = random_inputs(5, 3, (3,), shared=True)
    outcome = check_cifg(shared, WITHIN, shared=True)
    with pytest.raises(AssertionError):
        assert_cifg(outcome._replace(memory=outcome.memory * np.float32(3)), shared, WITHIN, shared=True)


@pytest.mark.gpu_only("8 GiB of memory")
@pytest.mark.large
def test_more_elements_than_32_bits_count():
    """An index overflowed 32 bits in a loop over the grid: NVIDIA/cudf#10368."""
    torch = pytest.importorskip("torch")
    batch, d, filled = 8193, 512, [0, 8191, 8192]
    C = torch.zeros(batch, d, d, device="cuda")
    C[filled] = 2 * torch.eye(d, device="cuda")
    H, X = torch.zeros(batch, d, device="cuda"), torch.zeros(batch, 0, device="cuda")
    W_f, b_f = torch.zeros(d, d, device="cuda"), torch.full((d,), float(KEEPS), device="cuda")
    errors = burt_numba.ErrorBuffer()
    burt_numba.batched_cifg_update(C, H, X, W_f, b_f, errors=errors)
    assert errors.check() == 0
    for matrix in C[filled]:
        assert (matrix - 0.95 * torch.eye(d, device="cuda")).norm() <= LIMITS["float32"] * 0.95 * d**0.5
    C[filled] = 0
    assert not C.any() and ON_GPU
