"""How cifg_update and batched_cifg_update are called: outputs, layouts, events, threads, graphs."""

import warnings

import numpy as np
import pytest
from cifg_support import (
    BATCH,
    INPUTS,
    KEEPS,
    LAYOUTS,
    MODES,
    REPLACES,
    SHARED,
    Inputs,
    assert_cifg,
    at_odd_offset,
    call,
    check_cifg,
    kept,
    random_inputs,
    run_cifg,
    same_results,
    sigma_of,
    with_spectrum,
)
from support import LIMITS, ON_GPU, Guarded, one_warning, poisoned, relative_error, run_threads, to_host, to_target

import burt_numba
from burt_numba import BurtDimensionError, cifg, reference
from burt_numba.backend import cuda
from burt_numba.kernels import cifg_spectrum
from burt_numba.target import COUNTER_STRIDE

WITHIN = 1e4

each_mode = pytest.mark.parametrize("shared", MODES, ids=["single", "batched", "shared"])


def copies(inputs):
    return [to_target(array.copy()) for array in inputs]


# Outputs -----------------------------------------------------------------------------------------------------------


@each_mode
def test_in_place_by_default(shared):
    arrays = copies(MODES[shared])
    assert call(arrays, shared=shared) is arrays[0]
    assert to_host(arrays[0]).tobytes() == run_cifg(MODES[shared], shared=shared).memory.tobytes()
    for array, before in zip(arrays[1:], MODES[shared][1:], strict=True):
        assert to_host(array).tobytes() == before.tobytes()


@each_mode
def test_out_leaves_the_memory_alone(shared):
    arrays, out = copies(MODES[shared]), poisoned(MODES[shared].C.shape)
    assert call(arrays, shared=shared, out=out) is out
    assert to_host(out).tobytes() == run_cifg(MODES[shared], shared=shared, in_place=True).memory.tobytes()
    assert to_host(arrays[0]).tobytes() == MODES[shared].C.tobytes()


def test_out_may_be_the_memory():
    arrays = copies(INPUTS)
    assert call(arrays, out=arrays[0]) is arrays[0]
    assert to_host(arrays[0]).tobytes() == run_cifg(INPUTS).memory.tobytes()


@each_mode
def test_plain_calls_and_calls_with_every_output_have_the_same_bits(shared):
    plain, inputs = copies(MODES[shared]), MODES[shared]
    call(plain, shared=shared)
    matrices, d = inputs.C.shape[:-2], inputs.C.shape[-1]
    full = run_cifg(inputs, shared=shared, power_vector=np.zeros((*matrices, d)))
    assert to_host(plain[0]).tobytes() == full.memory.tobytes()
    assert full.power_vector.shape == (*matrices, d) and np.isfinite(full.power_vector).all()


@each_mode
@pytest.mark.parametrize("skew", [0, 1, 2, 3])
def test_nothing_outside_the_arrays_is_read_or_written(shared, skew):
    """Rounded-up threads wrote past the array: numba/numba#7284. A NaN that was read would be recorded."""
    inputs = MODES[shared]
    matrices, d = inputs.C.shape[:-2] or (1,), inputs.C.shape[-1]
    vector = np.zeros(inputs.C.shape[:-1] if shared is not True else d)
    outcome = run_cifg(
        inputs,
        shared=shared,
        skew=skew,
        in_place=skew % 2 == 0,
        power_vector=vector,
        sigma_bound=np.full(matrices, np.inf),
    )
    assert outcome.counts == {}
    assert all(np.isfinite(output).all() for output in outcome[:5])
    # The certificate takes a hundred-thousandth more off.
    assert relative_error(outcome.memory, run_cifg(inputs, shared=shared).memory) <= 1e-4


@pytest.mark.parametrize("d", [4, 8, 33])
def test_alignment_is_no_matter(d):
    for n in (0, 4):
        check_cifg(random_inputs(d, n), skew=1)


@each_mode
def test_each_output_alone(shared):
    inputs = MODES[shared]
    full = run_cifg(inputs, shared=shared)
    shapes = {"sigma_out": full.sigma.shape, "forget_gate_out": inputs.h.shape}
    for name, wanted in (("sigma_out", full.sigma), ("forget_gate_out", full.forget_gate)):
        output = Guarded(np.full(shapes[name], np.nan, np.float32), 777)
        call(copies(inputs), shared=shared, **{name: output.array})
        assert output.result().tobytes() == wanted.tobytes()


@each_mode
def test_empty_batches_and_no_columns(shared):
    if shared is not None:
        inputs = random_inputs(4, 3, (0,), shared=shared)
        arrays, sigma = copies(inputs), poisoned(1 if shared else 0)
        assert call(arrays, shared=shared, sigma_out=sigma) is arrays[0]
        assert to_host(arrays[0]).tobytes() == inputs.C.tobytes()
    nothing = random_inputs(0, 3, () if shared is None else (2,), shared=bool(shared))
    arrays = copies(nothing)
    assert call(arrays, shared=shared) is arrays[0]
    burt_numba.check()


def test_empty_batch_of_a_shared_memory_with_out():
    """Nothing is launched that could copy the memory."""
    inputs = random_inputs(4, 3, (0,), shared=True)
    with pytest.raises(BurtDimensionError, match=r"^batched_cifg_update: H: expected at least 1 sample"):
        call(copies(inputs), shared=True, out=poisoned((4, 4)))


@pytest.mark.simulator_only("a launch that fails on a GPU takes its context with it")
def test_a_call_that_broke_off_leaves_nothing_for_the_next_one(monkeypatch):
    """The update has marked a row and a column when the launch after it fails."""
    from burt_numba import simulator

    launch = simulator.launch

    def failing(function, *args, name, **options):
        if name == "cifg_spectrum":
            raise RuntimeError("broken off")
        launch(function, *args, name=name, **options)

    broken, other = (INPUTS._replace(C=INPUTS.C.copy()) for _ in range(2))
    broken.C[0, 1] = other.C[2, 2] = np.nan
    expected = run_cifg(other).memory
    with monkeypatch.context() as patched:
        patched.setattr(simulator, "launch", failing)
        with pytest.raises(RuntimeError, match="broken off"):
            call(copies(broken), errors=burt_numba.ErrorBuffer())
    assert run_cifg(other).memory.tobytes() == expected.tobytes()


def test_on_a_stream():
    stream, arrays = cuda.stream(), copies(INPUTS)
    cuda.synchronize()
    call(arrays, stream=stream)
    stream.synchronize()
    assert to_host(arrays[0]).tobytes() == run_cifg(INPUTS).memory.tobytes()


def test_numbers_of_any_kind():
    inputs = random_inputs(2, 1)
    expected = run_cifg(inputs, 0.5, power_iterations=3)
    for bound, iterations in ((np.float32(0.5), np.int64(3)), (np.array(0.5), np.int8(3))):
        assert same_results(run_cifg(inputs, bound, power_iterations=iterations), expected)
    assert same_results(run_cifg(inputs, 1), run_cifg(inputs, 1.0))
    run_cifg(inputs, power_iterations=2**40)
    assert same_results(run_cifg(SHARED, shared=np.True_), run_cifg(SHARED, shared=1))


# Layouts -----------------------------------------------------------------------------------------------------------


@each_mode
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(shared, layout):
    """Only the shape was looked at, and a padded view was read as if packed: ROCm/rocm-libraries#5240."""
    inputs = MODES[shared]
    arranged = Inputs(inputs.C, *(LAYOUTS[layout](array) for array in inputs[1:]))
    arrays = [to_target(inputs.C.copy()), *(to_target(array) for array in arranged[1:])]
    errors = burt_numba.ErrorBuffer()
    out = to_host(call(arrays, WITHIN, shared=shared, errors=errors))
    assert errors.check() == 0
    assert relative_error(out, run_cifg(inputs, WITHIN, shared=shared).memory) <= LIMITS["float32"]


def test_one_row_for_all_samples():
    same = BATCH._replace(h=np.tile(BATCH.h[:1], (3, 1)), x=np.tile(BATCH.x[:1], (3, 1)))
    expanded = same._replace(h=np.broadcast_to(BATCH.h[0], (3, 4)), x=np.broadcast_to(BATCH.x[0], (3, 3)))
    out = burt_numba.batched_cifg_update(to_target(BATCH.C.copy()), *map(to_target, expanded[1:]))
    assert relative_error(to_host(out), run_cifg(same, shared=False).memory) <= LIMITS["float32"]


@pytest.mark.parametrize("skewed", range(5))
def test_one_array_off_alignment(skewed):
    inputs = random_inputs(8, 4)
    arrays = [at_odd_offset(array) if place == skewed else array.copy() for place, array in enumerate(inputs)]
    out = to_host(burt_numba.cifg_update(*map(to_target, arrays), WITHIN))
    assert relative_error(out, run_cifg(inputs, WITHIN).memory) <= LIMITS["float32"]


def test_read_only_inputs():
    """An array that is only read was refused for being read-only: numba/numba#2521."""
    inputs = [array.copy() for array in INPUTS]
    for array in inputs:
        array.flags.writeable = False
    out = np.full((5, 5), np.nan, np.float32)
    burt_numba.cifg_update(*inputs, out=out)
    assert out.tobytes() == run_cifg(INPUTS).memory.tobytes()


@each_mode
@pytest.mark.parametrize("family", [np.array, cuda.to_device], ids=["NumPy", "Numba"])
def test_array_families(shared, family):
    inputs = MODES[shared]
    arrays = [family(array) for array in inputs]
    gate = family(np.full(inputs.h.shape, np.nan, np.float32))
    vector = family(np.zeros(inputs.C.shape[:-1] if shared is not True else 4, np.float32))
    out = call(arrays, shared=shared, forget_gate_out=gate, power_vector=vector)
    assert out is arrays[0]
    expected = run_cifg(inputs, shared=shared, power_vector=np.zeros(to_host(vector).shape))
    assert to_host(out).tobytes() == expected.memory.tobytes()
    assert to_host(gate).tobytes() == expected.forget_gate.tobytes()
    assert to_host(vector).tobytes() == expected.power_vector.tobytes()


# Events ------------------------------------------------------------------------------------------------------------

BAD = [np.nan, np.inf, -np.inf]


def spoiled(inputs, name, place, value):
    array = getattr(inputs, name).copy()
    array[place] = value
    return inputs._replace(**{name: array})


@each_mode
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", ["C", "h", "x", "W_f", "b_f"])
def test_bad_elements_in_every_argument(shared, name, value):
    """Each is recorded once, with its flat index in its own array, and counts as 0; in C with its row and column."""
    inputs = MODES[shared]
    place = tuple(size - 1 - axis % 2 for axis, size in enumerate(getattr(inputs, name).shape))
    bad = spoiled(inputs, name, place, value)
    outcome = run_cifg(bad, WITHIN, shared=shared)
    assert_cifg(outcome, bad, WITHIN, shared=shared)
    code = 1 if np.isnan(value) else 2
    flat = int(np.ravel_multi_index(place, getattr(inputs, name).shape))
    assert (outcome.counts, outcome.first) == ({code: 1}, (flat, code))


@each_mode
@pytest.mark.parametrize("projected", [False, True])
def test_bad_elements_everywhere_at_once(shared, projected):
    bad = MODES[shared]
    d = bad.C.shape[-1]
    for name, place, value in (
        ("C", (..., d - 1, 0), np.nan),
        ("C", (..., d - 1, 1), -np.inf),
        ("h", (..., 1), np.inf),
        ("x", (..., slice(0, 2)), np.nan),
        ("W_f", (2, slice(None, None, 3)), np.nan),
        ("W_f", (d - 1, d), np.inf),
        ("b_f", 0, -np.inf),
    ):
        bad = spoiled(bad, name, place, value)
    check_cifg(bad, 0.1 if projected else WITHIN, shared=shared, projection="scale")


def test_nothing_but_bad_elements():
    inputs = Inputs(*(np.full_like(array, np.nan) for array in INPUTS))
    outcome = check_cifg(inputs)
    assert (outcome.memory == 0).all() and (outcome.forget_gate == 0.5).all()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_bad_element_takes_its_row_and_column(in_place):
    """Row and column are those of the memory before the update: what is written to them stays."""
    C = np.ones((6, 6)) / 8
    C[1, 2], C[3, 0], C[3, 5] = np.nan, -np.inf, np.inf
    outcome = run_cifg(kept(C), WITHIN, in_place=in_place)
    expected = np.ones((6, 6)) / 8
    expected[[1, 3], :] = expected[:, [0, 2, 5]] = 0
    assert np.array_equal(outcome.memory, expected)
    assert (outcome.counts, outcome.first) == ({1: 1, 2: 2}, (8, 1))
    written = run_cifg(kept(C, np.arange(1, 7))._replace(b_f=np.full(6, REPLACES)), WITHIN, in_place=in_place)
    assert np.array_equal(written.memory, np.outer(np.arange(1, 7), np.arange(1, 7)))


def test_one_bad_memory_of_a_batch_leaves_the_others_alone():
    clean = run_cifg(BATCH, shared=False)
    outcome = run_cifg(spoiled(BATCH, "C", (1, 2, 3), np.nan), shared=False)
    assert outcome.memory[[0, 2]].tobytes() == clean.memory[[0, 2]].tobytes()
    assert (outcome.counts, outcome.first) == ({1: 1}, (16 + 11, 1))
    again = run_cifg(BATCH, shared=False)
    assert same_results(again, clean), "a flag of the call before was left up"


def test_what_float32_cannot_hold_is_lost_and_recorded():
    inputs = kept(np.zeros((2, 2)), [1e20, 1.0])._replace(b_f=np.full(2, REPLACES))
    outcome = check_cifg(inputs, 1e38)
    assert outcome.memory.tolist() == [[0, np.float32(1e20)], [np.float32(1e20), 1]]
    assert (outcome.counts, outcome.first) == ({2: 1}, (0, 2))


def test_bad_carried_values_are_no_events():
    """A vector or a certificate that is not finite carries nothing: both start anew."""
    plain = run_cifg(INPUTS, power_vector=np.zeros(5), sigma_bound=[np.inf])
    outcome = run_cifg(INPUTS, power_vector=np.full(5, np.nan), sigma_bound=[np.nan])
    assert outcome.counts == {} and same_results(outcome, plain)


@each_mode
def test_events_become_one_warning(shared):
    bad = spoiled(MODES[shared], "h", (..., 1), np.inf)
    name, count = ("cifg_update", 1) if shared is None else ("batched_cifg_update", 3)
    with one_warning(name, {2: count}, (1, 2)):
        call(copies(bad), shared=shared)


def hard():
    return kept(2 * with_spectrum(np.linspace(1, 0.01, 12)))


def test_code_4_becomes_a_warning():
    with one_warning("cifg_update", {4: 1}, (0, 4)):
        out = burt_numba.cifg_update(*copies(hard()), power_iterations=0)
    assert sigma_of(to_host(out)) > 0.95 * (1 + LIMITS["spectral"])


def test_error_buffer_collects_instead_of_warning():
    bad, errors = spoiled(INPUTS, "x", 2, np.nan), burt_numba.ErrorBuffer()
    for calls in (1, 2):
        to_host(burt_numba.cifg_update(*copies(bad), errors=errors))
        assert (errors.check(), errors.counts, errors.first_index) == (1, {1: calls}, 2)
    errors.reset()
    assert (errors.counts, errors.first_index, errors.code) == ({}, None, 0)
    burt_numba.check()


@each_mode
def test_validate_output_changes_nothing_that_is_right(shared):
    inputs = MODES[shared]
    vector, certificate = (
        np.zeros(inputs.C.shape[:-1] if shared is not True else 4),
        np.full(inputs.C.shape[:-2] or 1, 9),
    )
    for given in ({}, {"power_vector": vector, "sigma_bound": certificate}):
        plain = run_cifg(inputs, shared=shared, **given)
        validated = run_cifg(inputs, shared=shared, validate_output=True, **given)
        assert same_results(plain, validated)
        assert plain.counts == validated.counts == {}


def test_validate_output_finds_a_memory_over_its_bound():
    """Beside what the call itself knows: the second pass counts the matrix once more."""
    plain, validated = (run_cifg(hard(), power_iterations=0, validate_output=again) for again in (False, True))
    assert same_results(plain, validated)
    assert sigma_of(plain.memory) > 0.95 * (1 + LIMITS["spectral"])
    assert (plain.counts, validated.counts) == ({4: 1}, {4: 2})


def test_validate_output_finds_what_the_call_did_not_see():
    """The first look, of no step, missed the top of 1.2 among others of 0.94."""
    inputs = kept(with_spectrum([1.2] + [0.94] * 9))
    outcome = run_cifg(inputs, power_iterations=0, validate_output=True)
    assert sigma_of(outcome.memory) > 0.95 * (1 + LIMITS["spectral"])
    assert outcome.first == (0, 4)


# Threads and graphs ------------------------------------------------------------------------------------------------


def test_two_host_threads_at_once():
    """Threads share kernels, prepared calls and workspaces; neither may see the other's."""
    inputs = [random_inputs(d, 2, seed=d) for d in (2, 3)]
    wanted = [run_cifg(each) for each in inputs]

    def work(number):
        for _ in range(50 if ON_GPU else 2):
            for turn in (number, 1 - number):
                assert same_results(run_cifg(inputs[turn]), wanted[turn])

    run_threads(work, 2)


@pytest.mark.gpu_only("graphs are of the device")
@pytest.mark.parametrize(("d", "shared"), [(64, None), (255, None), (1000, None), (64, False), (64, True)])
def test_cuda_graph(d, shared):
    """A hidden synchronisation or host copy breaks capture: NVIDIA/numba-cuda#832, JuliaGPU/CUDA.jl#1229."""
    torch = pytest.importorskip("torch")
    inputs = random_inputs(d, 8, () if shared is None else (5,), shared=bool(shared))
    tensors = [torch.from_numpy(array).cuda() for array in inputs]
    vector = torch.zeros(tensors[0].shape[:-1] if shared is not True else (d,), device="cuda")
    errors = burt_numba.ErrorBuffer()

    def work(memory, carried):
        call([memory, *tensors[1:]], shared=shared, power_vector=carried, errors=errors)

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    expected, expected_vector = tensors[0].clone(), vector.clone()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work(tensors[0].clone(), vector.clone())
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        work(tensors[0], vector)
    for seed in range(20):
        fresh = random_inputs(d, 8, () if shared is None else (5,), shared=bool(shared), seed=seed)
        tensors[1].copy_(torch.from_numpy(fresh.h))
        tensors[2].copy_(torch.from_numpy(fresh.x))
        graph.replay()
        work(expected, expected_vector)
        assert torch.equal(tensors[0], expected) and torch.equal(vector, expected_vector)
    assert errors.check() == 0
    tensors[1].view(-1)[3] = torch.nan
    graph.replay()
    torch.cuda.synchronize()
    assert (errors.counts, errors.first_index) == ({1: 1}, 3)


def test_the_reference_agrees_on_the_gates_that_these_tests_take_as_exact():
    gate = reference.cifg_update(*kept(np.eye(2))[:4], np.full(2, KEEPS)).forget_gate
    assert (gate.astype(np.float32) == 1).all()


# Between calls -----------------------------------------------------------------------------------------------------


@pytest.mark.simulator_only("barriers of the simulator leave nothing behind: those of a GPU are put in their place")
def test_turns_of_barriers_are_no_counters(monkeypatch):
    """On devices without clusters a barrier counts its turns in device memory, and never begins again."""
    simulated = cifg_spectrum.group_barrier

    def counting_barrier(counters, group, blocks):
        if cuda.threadIdx.x == 0:
            cuda.atomic.add(counters, group * COUNTER_STRIDE + 1, 1)
        simulated(counters, group, blocks)

    monkeypatch.setattr(cifg_spectrum, "group_barrier", counting_barrier)
    monkeypatch.setattr(cifg, "multiprocessors", lambda device: 27)
    monkeypatch.setattr(cifg, "compute_capability", lambda device: (8, 0))
    one, several = (random_inputs(43, 2, (batch,), seed=batch) for batch in (1, 3))
    first = check_cifg(one, shared=False)
    check_cifg(several, shared=False)
    assert same_results(check_cifg(one, shared=False), first)


def test_the_lowest_entry_that_overflows_is_told():
    inputs = kept(np.zeros((8, 8)), np.full(8, 2e19))._replace(b_f=np.full(8, REPLACES))
    outcome = run_cifg(inputs, 1e30)
    assert (outcome.counts, outcome.first) == ({2: 64}, (0, 2))


def test_an_empty_array_overlaps_nothing():
    C = to_target(INPUTS.C.copy())
    zeros = to_target(np.zeros(5, np.float32))
    W_f = to_target(np.zeros((5, 5), np.float32))
    burt_numba.cifg_update(C, zeros, C[1, :0], W_f, zeros)


def test_a_bound_beyond_float32_is_none():
    inputs = kept(np.eye(3) * 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome = run_cifg(inputs, 1e39)
    assert outcome.memory.tobytes() == inputs.C.tobytes()
