"""How sparse_moe_dispatch and sparse_moe_combine are called: outputs, layouts, events, threads, graphs."""

import copy
import pickle
import warnings

import numpy as np
import pytest
from moe_support import (
    OUTPUTS,
    Routing,
    assert_conserved,
    assert_dispatched,
    call_dispatch,
    check_combine,
    check_dispatch,
    distinct_routing,
    on_host,
    on_target,
    output_contents,
    random_routing,
    routing_of,
    run_combine,
    run_dispatch,
    same_results,
)
from support import (
    LIMITS,
    ON_GPU,
    Guarded,
    cases,
    normal,
    one_warning,
    poisoned,
    relative_error,
    run_threads,
    to_host,
    to_target,
)

import burt_numba
from burt_numba import reference
from burt_numba.backend import cuda

each_order = pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "atomic"])

ROUTING = random_routing(20, 5, 4, 2, lowest=-1)


def dispatch(routing, *args, **options):
    return burt_numba.sparse_moe_dispatch(*map(to_target, routing), *args, **options)


# Outputs -------------------------------------------------------------------------------------------------------------


@each_order
@pytest.mark.parametrize("capacity", [None, 0, 3, 50])
def test_what_a_call_allocates(capacity, deterministic):
    """Rows beyond the count were returned as they were allocated: AMD-AGI/Primus-Turbo#345."""
    outcome = call_dispatch(ROUTING, capacity, deterministic=deterministic)
    assert_conserved(outcome, ROUTING, capacity, unused=0)
    for name, content in output_contents(ROUTING, capacity).items():
        assert (getattr(outcome, name).shape, getattr(outcome, name).dtype) == (content.shape, content.dtype), name


def test_a_call_that_allocates_gives_the_bits_of_one_that_does_not():
    allocated, given = call_dispatch(ROUTING, 6), run_dispatch(ROUTING, 6)
    zeroed = np.nan_to_num(given.expert_inputs, nan=0.0)
    assert same_results(allocated, given._replace(expert_inputs=zeroed))


@each_order
@pytest.mark.parametrize("name", OUTPUTS)
def test_each_output_alone(name, deterministic):
    content = output_contents(ROUTING, 4)[name]
    output = Guarded(content, 777)
    result = dispatch(ROUTING, 4, deterministic=deterministic, errors=burt_numba.ErrorBuffer(), **{name: output.array})
    assert getattr(result, name) is output.array
    if deterministic:
        assert output.result().tobytes() == getattr(run_dispatch(ROUTING, 4), name).tobytes()
    if name != "expert_inputs":
        # What was not given is allocated, and its unused rows are zeroed.
        assert np.isfinite(to_host(result.expert_inputs)).all()


@each_order
@pytest.mark.parametrize("fill", [np.nan, 0.0, 7.0])
def test_unused_rows_of_a_given_buffer_stay_as_they_are(fill, deterministic):
    """Rows beyond the count were uninitialised memory: AMD-AGI/Primus-Turbo#345."""
    buffer = to_target(np.full((4, 8, 5), fill, np.float32))
    routing = random_routing(5, 5, 4, 2)
    result = dispatch(routing, 8, expert_inputs=buffer, deterministic=deterministic)
    counts = to_host(result.expert_counts)
    assert counts.sum() < 4 * 8
    for expert, count in enumerate(counts):
        unused = to_host(buffer)[expert, count:]
        assert unused.tobytes() == np.full_like(unused, fill).tobytes()


@each_order
def test_calls_with_the_same_buffers(deterministic):
    """Counters in a reused buffer had to be zero at entry: flashinfer-ai/flashinfer#3474."""
    outputs = {name: to_target(content) for name, content in output_contents(ROUTING, 3).items()}
    full, light = ROUTING, routing_of([[3, -1]] * 20, 4, d=5)
    for routing in (full, full, light, full, light, light):
        outputs["expert_inputs"][:] = np.nan
        outcome = call_dispatch(routing, 3, deterministic=deterministic, **outputs)
        assert_conserved(outcome, routing, 3)
        if deterministic:
            assert_dispatched(outcome, routing, 3)


@each_order
@pytest.mark.parametrize("skew", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("d", cases([5, 8, 32], [33, 1000, 1024]))
def test_nothing_outside_the_arrays_is_read_or_written(d, dtype, skew, deterministic):
    """Rounded-up threads wrote past the array: numba/numba#7284. What lies around the inputs would be recorded."""
    routing = random_routing(9, d, 3, 2, lowest=-1, dtype=dtype)
    check_dispatch(routing, 4, skew=skew, deterministic=deterministic)


@pytest.mark.parametrize("skew", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("d", cases([5, 8, 32], [33, 1000, 1024]))
def test_nothing_outside_the_arrays_of_a_combine(d, dtype, skew):
    dispatched = run_dispatch(random_routing(9, d, 3, 2, lowest=-1, dtype=dtype), 4)
    outputs = np.nan_to_num(dispatched.expert_inputs)
    plain = check_combine(outputs, dispatched)
    assert check_combine(outputs, dispatched, skew=skew).out.tobytes() == plain.out.tobytes()


@each_order
def test_inputs_stay_as_they_are(deterministic):
    arrays = [to_target(array.copy()) for array in ROUTING]
    burt_numba.sparse_moe_dispatch(*arrays, 3, deterministic=deterministic, errors=burt_numba.ErrorBuffer())
    for array, before in zip(arrays, ROUTING, strict=True):
        assert to_host(array).tobytes() == before.tobytes()


def test_defaults_are_the_documented_ones():
    assert same_results(call_dispatch(ROUTING), call_dispatch(ROUTING, 20, deterministic=True))
    dispatched = run_dispatch(ROUTING)
    outputs = np.nan_to_num(dispatched.expert_inputs)
    out = to_host(burt_numba.sparse_moe_combine(to_target(outputs), on_target(dispatched)))
    assert out.tobytes() == run_combine(outputs, dispatched, False).out.tobytes()


def test_numbers_of_any_kind():
    expected = run_dispatch(ROUTING, 3)
    for capacity in (np.int64(3), np.int8(3), np.array(3)):
        assert same_results(call_dispatch(ROUTING, capacity), call_dispatch(ROUTING, 3))
    assert same_results(run_dispatch(ROUTING, 3, deterministic=np.True_), expected)


@each_order
def test_one_size_after_another(deterministic):
    """A kernel specialised for one size was reused for the next: numba/numba#3265."""
    routings = [random_routing(T, d, experts, k) for T, d, experts, k in ((9, 4, 3, 2), (40, 7, 5, 1), (3, 4, 3, 2))]
    for routing in routings * 2:
        check_dispatch(routing, 4, deterministic=deterministic)


def test_a_result_is_a_named_tuple_that_combine_takes():
    result = dispatch(ROUTING)
    expert_inputs, *others = result
    assert isinstance(result, burt_numba.MoeDispatch) and result._fields == OUTPUTS[:4]
    expected = run_combine(to_host(expert_inputs), call_dispatch(ROUTING)).out
    # Of a tuple that somebody builds the counts of lost tokens are not known, and not needed.
    for given in (result, burt_numba.MoeDispatch(expert_inputs, *others)):
        out = burt_numba.sparse_moe_combine(expert_inputs, given)
        assert to_host(out).tobytes() == expected.tobytes()
    assert burt_numba.MoeDispatch(expert_inputs, *others).num_dropped is None


def test_copies_of_a_result_keep_the_counts():
    result = dispatch(ROUTING, 2, errors=burt_numba.ErrorBuffer())
    for other in (result._replace(combine_weights=result.combine_weights), copy.copy(result)):
        assert other.num_dropped is result.num_dropped and other.num_overflowed is result.num_overflowed
    if not ON_GPU:
        other = pickle.loads(pickle.dumps(result))
        assert isinstance(other, burt_numba.MoeDispatch)
        assert all((getattr(other, name) == getattr(result, name)).all() for name in OUTPUTS)


# Layouts -------------------------------------------------------------------------------------------------------------


def between(array):
    larger = np.full((*array.shape[:-1], 2 * array.shape[-1]), 99, array.dtype)
    larger[..., ::2] = array
    return larger[..., ::2]


def every_other_row(array):
    larger = np.full((2 * len(array), *array.shape[1:]), 99, array.dtype)
    larger[::2] = array
    return larger[::2]


def padded(array):
    larger = np.full((*array.shape[:-1], array.shape[-1] + 1), 99, array.dtype)
    larger[..., :-1] = array
    return larger[..., :-1]


def at_odd_offset(array):
    memory = np.full(array.size + 2, 99, array.dtype)
    memory[1:-1] = array.ravel()
    return memory[1:-1].reshape(array.shape)


LAYOUTS = {
    "every other column": between,
    "every other row": every_other_row,
    "odd offset": at_odd_offset,
    "padded by one": padded,
    "columns backwards": lambda array: array[..., ::-1].copy()[..., ::-1],
    "rows backwards": lambda array: array[::-1].copy()[::-1],
    "other order": np.asfortranarray,
}


@each_order
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("d", [5, 8])
def test_layouts(d, layout, deterministic):
    """Only the shape was looked at, and a padded view was read as if packed: ROCm/rocm-libraries#5240."""
    routing = random_routing(9, d, 4, 2, lowest=-1)
    arranged = Routing(*map(LAYOUTS[layout], routing))
    outcome = check_dispatch(arranged, 3, deterministic=deterministic)
    if deterministic:
        assert same_results(outcome, run_dispatch(routing, 3))


@pytest.mark.parametrize("name", Routing._fields)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_array_of_another_layout(name, layout):
    arranged = ROUTING._replace(**{name: LAYOUTS[layout](getattr(ROUTING, name))})
    assert same_results(run_dispatch(arranged, 3), run_dispatch(ROUTING, 3))


def test_one_row_for_all_tokens():
    routing = Routing(*(np.broadcast_to(array[3], array.shape) for array in ROUTING))
    assert same_results(run_dispatch(routing, 7), run_dispatch(Routing(*map(np.array, routing)), 7))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_layouts_of_expert_outputs(layout, dtype):
    dispatched = run_dispatch(random_routing(9, 8, 4, 2, dtype=dtype), 3)
    outputs = np.nan_to_num(dispatched.expert_inputs)
    packed = run_combine(outputs, dispatched)
    assert run_combine(LAYOUTS[layout](outputs), dispatched).out.tobytes() == packed.out.tobytes()


def test_axes_of_size_1_with_odd_strides():
    """Axes of size 1 carry any stride: numba/numba#6824, cupy/cupy#5897."""
    routing = Routing(
        np.lib.stride_tricks.as_strided(normal((8,)), (1, 8), (5237, 4)),
        np.lib.stride_tricks.as_strided(np.ones(3, np.float32), (1, 3), (51, 4)),
        np.lib.stride_tricks.as_strided(np.int32([2]), (1, 1), (77, 33)),
    )
    assert same_results(run_dispatch(routing), run_dispatch(Routing(*map(np.array, routing))))


def test_read_only_inputs():
    """An array that is only read was refused for being read-only: numba/numba#2521."""
    arrays = [array.copy() for array in ROUTING]
    for array in arrays:
        array.flags.writeable = False
    result = burt_numba.sparse_moe_dispatch(*arrays)
    assert to_host(result.expert_inputs).tobytes() == call_dispatch(ROUTING).expert_inputs.tobytes()
    result.expert_inputs.flags.writeable = False
    burt_numba.sparse_moe_combine(result.expert_inputs, result)


@each_order
@pytest.mark.parametrize("family", [np.array, cuda.to_device], ids=["NumPy", "Numba"])
def test_array_families(family, deterministic):
    arrays = [family(array) for array in ROUTING]
    result = burt_numba.sparse_moe_dispatch(*arrays, deterministic=deterministic)
    assert all(type(array) is type(arrays[0]) for array in result)
    outcome = call_dispatch(ROUTING)
    assert to_host(result.expert_counts).tolist() == outcome.expert_counts.tolist()
    out = burt_numba.sparse_moe_combine(result.expert_inputs, result, renormalize=True)
    assert type(out) is type(arrays[0])
    has_row = (outcome.dispatch_indices[..., 0] >= 0).any(axis=1)
    assert relative_error(to_host(out)[has_row], ROUTING.input[has_row]) <= LIMITS["float32"]


@pytest.mark.gpu_only("tensors on the device")
@each_order
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_tensors(library, deterministic):
    module = pytest.importorskip(library)
    arrays = [torch_or_cupy(module, array) for array in ROUTING]
    result = burt_numba.sparse_moe_dispatch(*arrays, deterministic=deterministic)
    out = burt_numba.sparse_moe_combine(result.expert_inputs, result, renormalize=True)
    made = (*result, result.num_dropped, result.num_overflowed, out)
    assert all(type(array) is type(arrays[0]) for array in made)
    on_host = [array.get() if library == "cupy" else array.cpu().numpy() for array in made]
    assert on_host[2].tolist() == call_dispatch(ROUTING).expert_counts.tolist()
    has_row = (on_host[1][..., 0] >= 0).any(axis=1)
    assert relative_error(on_host[-1][has_row], ROUTING.input[has_row]) <= LIMITS["float32"]


def torch_or_cupy(module, array):
    return module.asarray(array) if module.__name__ == "cupy" else module.from_numpy(array).cuda()


@pytest.mark.gpu_only("in the simulator all arrays are in host memory")
@pytest.mark.parametrize("name", Routing._fields[1:])
def test_refuses_arrays_in_several_places(name):
    arrays = [
        getattr(ROUTING, field) if field == name else cuda.to_device(getattr(ROUTING, field))
        for field in Routing._fields
    ]
    with pytest.raises(
        burt_numba.BurtDimensionError, match=f"^sparse_moe_dispatch: {name}: expected all arrays in one"
    ):
        burt_numba.sparse_moe_dispatch(*arrays)


def test_given_host_buffers_are_written():
    """NumPy arrays are copied to a GPU and back: what is not written must come back as it was."""
    outputs = output_contents(ROUTING, 6)
    result = burt_numba.sparse_moe_dispatch(*ROUTING, 6, errors=burt_numba.ErrorBuffer(), **outputs)
    assert all(getattr(result, name) is outputs[name] for name in OUTPUTS)
    assert result.expert_inputs.tobytes() == run_dispatch(ROUTING, 6).expert_inputs.tobytes()


@each_order
def test_on_a_stream(deterministic):
    stream, arrays = cuda.stream(), [to_target(array) for array in ROUTING]
    cuda.synchronize()
    result = burt_numba.sparse_moe_dispatch(*arrays, stream=stream, deterministic=deterministic)
    out = burt_numba.sparse_moe_combine(result.expert_inputs, result, stream=stream)
    stream.synchronize()
    dispatched = call_dispatch(ROUTING)
    assert to_host(result.expert_counts).tolist() == dispatched.expert_counts.tolist()
    assert to_host(out).tobytes() == run_combine(dispatched.expert_inputs, dispatched).out.tobytes()


# Events --------------------------------------------------------------------------------------------------------------


def spoiled(name, place, value, routing=ROUTING):
    array = getattr(routing, name).copy()
    array[place] = value
    return routing._replace(**{name: array})


CLEAN = distinct_routing(9, 5, 4, 2)


@each_order
@pytest.mark.parametrize(
    ("routing", "counts", "first"),
    [
        (spoiled("input", (3, 4), np.nan, CLEAN), {1: 1}, (19, 1)),
        (spoiled("input", (8, slice(1, 3)), -np.inf, CLEAN), {2: 2}, (41, 2)),
        (spoiled("top_k_indices", (5, 1), 4, CLEAN), {6: 1}, (11, 6)),
        (spoiled("top_k_indices", (slice(2, 5), slice(None)), -7, CLEAN), {6: 6}, (4, 6)),
    ],
)
def test_each_code_with_its_count_and_first_index(routing, counts, first, deterministic):
    outcome = check_dispatch(routing, 9, deterministic=deterministic)
    assert (outcome.counts, outcome.first) == (counts, first)
    with one_warning("sparse_moe_dispatch", counts, first):
        dispatch(routing, 9, deterministic=deterministic)


@pytest.mark.parametrize(("value", "code"), [(np.nan, 1), (np.inf, 2), (-np.inf, 2)])
def test_a_bad_routing_weight(value, code):
    routing = spoiled("routing_weights", (6, CLEAN.top_k_indices[6, 1]), value, CLEAN)
    outcome = check_dispatch(routing)
    assert outcome.combine_weights[6, 1] == 0 and outcome.dispatch_indices[6, 1, 0] == CLEAN.top_k_indices[6, 1]
    assert outcome.counts == {code: 1}


@each_order
def test_code_5_counts_tokens(deterministic):
    routing = routing_of([[1, 1, 1]] * 9, 3)
    with one_warning("sparse_moe_dispatch", {5: 5}, (4, 5)) if deterministic else pytest.warns(burt_numba.BurtWarning):
        result = dispatch(routing, 2, deterministic=deterministic)
        burt_numba.check()
    assert (to_host(result.num_dropped)[0], to_host(result.num_overflowed)[0]) == (5, 2)


def test_all_codes_at_once():
    routing = distinct_routing(12, 5, 2, 2)
    routing.input[0, 1], routing.input[1, 0], routing.top_k_indices[3, 0] = np.nan, np.inf, 2
    outcome = check_dispatch(routing, 4)
    assert set(outcome.counts) == {1, 2, 5, 6}
    with one_warning("sparse_moe_dispatch", outcome.counts, outcome.first):
        dispatch(routing, 4)


def test_events_of_combine_become_one_warning():
    dispatched = run_dispatch(CLEAN)
    outputs = np.nan_to_num(dispatched.expert_inputs)
    expert, position = dispatched.dispatch_indices[2, 0]
    outputs[expert, position, 3] = np.nan
    first = int(np.ravel_multi_index((expert, position, 3), outputs.shape))
    with one_warning("sparse_moe_combine", {1: 1}, (first, 1)):
        burt_numba.sparse_moe_combine(to_target(outputs), on_target(dispatched))


def test_error_buffer_collects_instead_of_warning():
    errors, routing = burt_numba.ErrorBuffer(), routing_of([[1]] * 9, 2)
    for calls in (1, 2):
        dispatch(routing, 2, errors=errors)
        assert (errors.check(), errors.counts, errors.first_index) == (5, {5: 5 * calls}, 4)
    errors.reset()
    assert (errors.counts, errors.first_index, errors.code) == ({}, None, 0)
    burt_numba.check()


def test_no_event_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = dispatch(CLEAN)
        burt_numba.sparse_moe_combine(result.expert_inputs, result)
        burt_numba.check()


@each_order
def test_validate_output_changes_nothing_that_is_right(deterministic):
    plain, validated = (
        call_dispatch(ROUTING, 4, deterministic=deterministic, validate_output=again) for again in (False, True)
    )
    if deterministic:
        # Else a token may be dropped in one run and not in another.
        assert plain.counts == validated.counts
        assert same_results(plain, validated)
    outputs = np.nan_to_num(plain.expert_inputs)
    plain, validated = (run_combine(outputs, validated, validate_output=again) for again in (False, True))
    assert plain.out.tobytes() == validated.out.tobytes() and plain.counts == validated.counts == {}


# Counts on the device ------------------------------------------------------------------------------------------------


@each_order
@pytest.mark.parametrize(
    ("capacity", "dropped", "overflowed"), [(0, 10, 0), (1, 8, 1), (3, 4, 3), (5, 0, 5), (9, 0, 1), (10, 0, 0)]
)
def test_num_dropped_and_num_overflowed(capacity, dropped, overflowed, deterministic):
    outcome = check_dispatch(routing_of([[1]] * 10, 2), capacity, deterministic=deterministic)
    assert (outcome.num_dropped.tolist(), outcome.num_overflowed.tolist()) == ([dropped], [overflowed])
    assert outcome.counts.get(5, 0) == dropped


# Threads and graphs --------------------------------------------------------------------------------------------------


def test_two_host_threads_at_once():
    """Threads share kernels, prepared calls and workspaces; neither may see the other's."""
    routings = [random_routing(T, 5, 4, 2) for T in (9, 14)]
    wanted = [run_dispatch(routing, 4) for routing in routings]

    def work(number):
        for _ in range(50 if ON_GPU else 3):
            for turn in (number, 1 - number):
                assert same_results(run_dispatch(routings[turn], 4), wanted[turn])

    run_threads(work, 2)


@pytest.mark.gpu_only("graphs are of the device")
@each_order
@pytest.mark.parametrize(
    ("T", "d", "experts", "k", "capacity"), [(1024, 512, 4, 2, None), (32, 257, 128, 8, 2), (5000, 64, 7, 3, 1000)]
)
@pytest.mark.parametrize("given", [True, False])
def test_cuda_graph(T, d, experts, k, capacity, given, deterministic):
    """A hidden synchronisation or host copy breaks capture: NVIDIA/numba-cuda#832, JuliaGPU/CUDA.jl#1229."""
    torch = pytest.importorskip("torch")
    routing = random_routing(T, d, experts, k, lowest=-1)
    tensors = [torch.from_numpy(array).cuda() for array in routing]
    outputs = {name: torch.from_numpy(array).cuda() for name, array in output_contents(routing, capacity).items()}
    errors = burt_numba.ErrorBuffer()

    def work():
        options = outputs if given else {}
        result = burt_numba.sparse_moe_dispatch(
            *tensors, capacity, deterministic=deterministic, errors=errors, **options
        )
        return result, burt_numba.sparse_moe_combine(result.expert_inputs, result, True, errors=errors)

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        result, out = work()
    for seed in range(20):
        fresh = random_routing(T, d, experts, k, lowest=-1, more=seed % 2, seed=seed)
        for tensor, array in zip(tensors, fresh, strict=True):
            tensor.copy_(torch.from_numpy(array))
        outputs["expert_inputs"].fill_(torch.nan)
        errors.reset()
        graph.replay()
        torch.cuda.synchronize()
        outcome, unused = on_host(result, errors), np.nan if given else 0
        assert_conserved(outcome, fresh, capacity, unused=unused)
        if deterministic:
            assert_dispatched(outcome, fresh, capacity, unused=unused)
        has_row = (outcome.dispatch_indices[..., 0] >= 0).any(axis=1)
        assert relative_error(to_host(out)[has_row], fresh.input[has_row]) <= LIMITS["float32"]
        assert (to_host(out)[~has_row] == 0).all()


@pytest.mark.gpu_only("allocators that hand memory out again are of the device")
@each_order
def test_memory_that_others_have_used(deterministic):
    """Scratch inherited NaN through the caching allocator: fla-org/flash-linear-attention#892."""
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(array).cuda() for array in ROUTING]
    for _ in range(3):
        spoilt = [
            torch.full((size,), torch.nan, device="cuda") for size in (4 * 20 * 5, 80, 40, 4, 1) for _ in range(4)
        ]
        torch.cuda.synchronize()
        del spoilt
        result = burt_numba.sparse_moe_dispatch(*tensors, 20, deterministic=deterministic)
        assert to_host(result.expert_counts).tolist() == run_dispatch(ROUTING, 20).expert_counts.tolist()
        assert torch.isfinite(result.expert_inputs).all() and torch.isfinite(result.combine_weights).all()


def test_outputs_of_a_failed_call_are_not_touched():
    buffer = poisoned((4, 3, 5))
    with pytest.raises(ValueError):
        dispatch(ROUTING, -1, expert_inputs=buffer)
    assert np.isnan(to_host(buffer)).all()


def test_the_reference_takes_what_the_function_returns():
    outcome = call_dispatch(ROUTING)
    assert_dispatched(outcome, ROUTING, unused=0)
    assert reference.sparse_moe_combine(outcome.expert_inputs, outcome).counts == {}
