"""How biencoder_attention is called: outputs, layouts, events, memory, threads, graphs."""

import warnings

import numpy as np
import pytest
from biencoder_support import (
    Inputs,
    check_biencoder,
    each_kernel,
    each_type,
    inputs_of,
    inputs_with_scores,
    kernels_of_many_contexts,  # noqa: F401 (a fixture)
    queries_together,
    run_biencoder,
    same_results,
)
from support import LIMITS, ON_GPU, one_warning, poisoned, run_threads, to_host, to_target

import burt_numba
from burt_numba import reference
from burt_numba.backend import cuda

INPUTS = inputs_of(2, 2, 3, 17, 8)


def attend(inputs, *args, **options):
    return burt_numba.biencoder_attention(*map(to_target, inputs), *args, **options)


# Outputs -------------------------------------------------------------------------------------------------------------


@each_type
@each_kernel
def test_a_plain_call_allocates_the_result(dtype, queries):
    inputs = inputs_of(1, 2, queries, 17, 8, dtype=dtype, seed=1)
    out = attend(inputs)
    assert type(out) is type(to_target(inputs.query))
    assert (out.shape, out.dtype) == ((1, 2, queries, 8), dtype)
    assert to_host(out).tobytes() == run_biencoder(inputs).out.tobytes()


def test_host_arrays_in_and_out():
    before = Inputs(*(array.copy() for array in INPUTS))
    temperature, entropy = np.full((2, 2, 3), np.nan, np.float32), np.full((2, 2, 3), np.nan, np.float32)
    bounds, lengths = np.float32([0.2, 0.5]), np.int64([17, 5])
    out = burt_numba.biencoder_attention(
        *INPUTS, None, bounds, context_lengths=lengths, temperature_out=temperature, entropy_out=entropy
    )
    expected = run_biencoder(INPUTS, None, bounds, context_lengths=lengths)
    assert isinstance(out, np.ndarray) and out.tobytes() == expected.out.tobytes()
    assert temperature.tobytes() == expected.temperature.tobytes()
    assert entropy.tobytes() == expected.entropy.tobytes()
    assert all(array.tobytes() == old.tobytes() for array, old in zip(INPUTS, before, strict=True))


@each_type
@each_kernel
def test_in_place_of_the_query(dtype, queries):
    inputs = inputs_of(1, 2, queries, 17, 8, dtype=dtype, seed=1)
    query, *others = map(to_target, Inputs(inputs.query.copy(), *inputs[1:]))
    assert burt_numba.biencoder_attention(query, *others, out=query) is query
    assert to_host(query).tobytes() == run_biencoder(inputs).out.tobytes()


@pytest.mark.parametrize("number", [np.float64(0.3), np.float32(0.3), np.array(0.3, np.float32), 1])
def test_bounds_are_numbers_of_any_kind(number):
    expected = run_biencoder(INPUTS, None, float(number))
    # An array, even of no axes, lies where the others do.
    bound = to_target(number) if isinstance(number, np.ndarray) else number
    assert to_host(attend(INPUTS, None, bound)).tobytes() == expected.out.tobytes()
    scaled = run_biencoder(INPUTS, float(number), 9.0)
    assert to_host(attend(INPUTS, number, 9.0)).tobytes() == scaled.out.tobytes()


@pytest.mark.parametrize("name", ["temperature_out", "entropy_out", "lse_out"])
@each_kernel
def test_each_output_alone(name, queries):
    bound = None if name == "lse_out" else 0.2
    inputs, output = inputs_of(1, 2, queries, 17, 8, seed=1), poisoned((1, 2, queries))
    out = attend(inputs, None, bound, **{name: output})
    expected = run_biencoder(inputs, None, bound)
    assert to_host(out).tobytes() == expected.out.tobytes()
    assert to_host(output).tobytes() == getattr(expected, name.removesuffix("_out")).tobytes()


def test_arguments_by_name():
    named = burt_numba.biencoder_attention(
        query=to_target(INPUTS.query),
        context_keys=to_target(INPUTS.context_keys),
        context_values=to_target(INPUTS.context_values),
        scale=0.5,
        entropy_bound=0.3,
        temperature_min=0.02,
        temperature_max=0.9,
        max_iterations=15,
    )
    assert to_host(named).tobytes() == run_biencoder(INPUTS, 0.5, 0.3, 0.02, 0.9, 15).out.tobytes()


def test_a_bound_without_axes_holds_for_all_heads():
    one = attend(INPUTS, None, to_target(np.float32(0.3).reshape(())))
    assert to_host(one).tobytes() == run_biencoder(INPUTS, None, 0.3).out.tobytes()


def test_numbers_are_read_anew_from_what_can_change():
    scale, errors = np.full((), 0.5), burt_numba.ErrorBuffer()
    first = to_host(attend(INPUTS, scale, None, errors=errors)).copy()
    scale[()] = 1.0
    second = to_host(attend(INPUTS, scale, None, errors=errors))
    assert first.tobytes() == run_biencoder(INPUTS, 0.5, None).out.tobytes()
    assert second.tobytes() == run_biencoder(INPUTS, 1.0, None).out.tobytes()


SIZES = ((1, 1, 2, 9, 4), (1, 2, 1, 40, 5), (1, 1, 5, 9, 4), (2, 1, 1, 9, 4), (1, 1, 4, 40, 5))


def test_one_size_after_another():
    """A kernel specialised for one size was reused for the next: numba/numba#3265."""
    all_inputs = [inputs_of(B, H, Q, K, D) for B, H, Q, K, D in SIZES]
    for inputs in all_inputs * 2:
        check_biencoder(inputs)


@each_kernel
def test_validate_output_changes_nothing_that_is_right(queries):
    inputs = inputs_of(1, 2, queries, 17, 8, seed=1)
    for bound in (0.2, None):
        plain, validated = (run_biencoder(inputs, None, bound, validate_output=again) for again in (False, True))
        assert same_results(plain, validated)


def test_outputs_of_a_refused_call_are_not_touched():
    out = poisoned((2, 2, 3, 8))
    with pytest.raises(ValueError):
        attend(INPUTS, None, -1.0, out=out)
    assert np.isnan(to_host(out)).all()


def test_on_a_stream():
    stream, arrays = cuda.stream(), [to_target(array) for array in INPUTS]
    cuda.synchronize()
    out = burt_numba.biencoder_attention(*arrays, stream=stream)
    stream.synchronize()
    assert to_host(out).tobytes() == run_biencoder(INPUTS).out.tobytes()


# Layouts -------------------------------------------------------------------------------------------------------------


def within(array, cut, fill=99):
    """The array as a part of a larger one: `cut` names the axis that is longer by one, or doubled."""
    axis, step = cut
    shape = list(array.shape)
    shape[axis] = shape[axis] * step if step > 1 else shape[axis] + 1
    larger = np.full(shape, fill, array.dtype)
    place = [slice(None)] * array.ndim
    place[axis] = slice(None, None, step) if step > 1 else slice(array.shape[axis])
    larger[tuple(place)] = array
    return larger[tuple(place)]


def at_odd_offset(array):
    memory = np.full(array.size + 2, 99, array.dtype)
    memory[1:-1] = array.ravel()
    return memory[1:-1].reshape(array.shape)


LAYOUTS = {
    "padded vectors": lambda array: within(array, (3, 1)),
    "every other element": lambda array: within(array, (3, 2)),
    "padded sequence": lambda array: within(array, (2, 1)),
    "every other vector": lambda array: within(array, (2, 2)),
    "every other head": lambda array: within(array, (1, 2)),
    "padded batch": lambda array: within(array, (0, 1)),
    "odd offset": at_odd_offset,
    "elements backwards": lambda array: array[..., ::-1].copy()[..., ::-1],
    "vectors backwards": lambda array: array[:, :, ::-1].copy()[:, :, ::-1],
    "everything backwards": lambda array: array[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1],
    "heads after the sequence": lambda array: array.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3),
    "vectors first": lambda array: array.transpose(3, 0, 1, 2).copy().transpose(1, 2, 3, 0),
    "other order": np.asfortranarray,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("D", [5, 8])
@each_type
@each_kernel
def test_layouts(layout, D, dtype, queries):
    """Only the shape was looked at, and a padded view was read as if packed: ROCm/rocm-libraries#5240."""
    inputs = inputs_of(2, 2, queries, 9, D, dtype=dtype)
    arranged = Inputs(*map(LAYOUTS[layout], inputs))
    assert all((a == b).all() for a, b in zip(arranged, inputs, strict=True))
    outcome, packed = run_biencoder(arranged, None, 20.0), check_biencoder(inputs, None, 20.0)
    limit = 2e-3 if dtype == np.float16 else 2e-6 if queries < 4 else LIMITS["attention_float32"]
    assert np.abs(outcome.out.astype(np.float64) - packed.out).max() <= limit


@pytest.mark.parametrize("layout", ["padded vectors", "every other element", "odd offset", "heads after the sequence"])
@pytest.mark.parametrize("name", Inputs._fields)
@each_kernel
def test_one_array_of_another_layout(name, layout, queries):
    inputs = inputs_of(1, 2, queries, 17, 8, seed=1)
    arranged = inputs._replace(**{name: LAYOUTS[layout](getattr(inputs, name))})
    outcome, packed = check_biencoder(arranged, None, 20.0), run_biencoder(inputs, None, 20.0)
    assert np.abs(outcome.out - packed.out).max() <= (2e-6 if queries < 4 else LIMITS["attention_float32"])


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@each_kernel
def test_repeated_axes(axis, queries):
    """A stride of 0 in any axis, also in the last."""
    inputs = Inputs(*(np.broadcast_to(array.take([0], axis), array.shape) for array in inputs_of(2, 2, queries, 9, 8)))
    outcome = check_biencoder(inputs, None, 20.0)
    packed = run_biencoder(Inputs(*map(np.array, inputs)), None, 20.0)
    assert np.abs(outcome.out - packed.out).max() <= (2e-6 if queries < 4 else LIMITS["attention_float32"])


def test_axes_of_size_1_with_odd_strides():
    """Axes of size 1 carry any stride: numba/numba#6824, cupy/cupy#5897."""
    packed = inputs_of(1, 1, 1, 1, 8)
    inputs = Inputs(*(np.lib.stride_tricks.as_strided(a, (1, 1, 1, 8), (5237, 77, 33, 4)) for a in packed))
    assert same_results(run_biencoder(inputs), run_biencoder(packed))


def test_read_only_inputs():
    """An array that is only read was refused for being read-only: numba/numba#2521."""
    arrays = [array.copy() for array in (*INPUTS, np.float32([0.2, 0.3]), np.int32([3, 17]))]
    for array in arrays:
        array.flags.writeable = False
    out = burt_numba.biencoder_attention(*arrays[:3], None, arrays[3], context_lengths=arrays[4])
    assert out.tobytes() == run_biencoder(INPUTS, None, arrays[3], context_lengths=arrays[4]).out.tobytes()


@each_type
@each_kernel
def test_keys_that_are_the_values(dtype, queries):
    """The same memory may be read as both."""
    inputs = inputs_of(1, 2, queries, 9, 8, dtype=dtype)
    keys = to_target(inputs.context_keys)
    out = burt_numba.biencoder_attention(to_target(inputs.query), keys, keys)
    both = Inputs(inputs.query, inputs.context_keys, inputs.context_keys)
    assert to_host(out).tobytes() == check_biencoder(both).out.tobytes()


@pytest.mark.parametrize("family", [np.array, cuda.to_device], ids=["NumPy", "Numba"])
def test_array_families(family):
    out = burt_numba.biencoder_attention(*map(family, INPUTS))
    assert type(out) is type(family(INPUTS.query))
    assert to_host(out).tobytes() == run_biencoder(INPUTS).out.tobytes()


@pytest.mark.gpu_only("tensors on the device")
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_tensors(library):
    module = pytest.importorskip(library)
    arrays = [torch_or_cupy(module, array) for array in INPUTS]
    out = burt_numba.biencoder_attention(*arrays)
    assert type(out) is type(arrays[0])
    on_host = out.get() if library == "cupy" else out.cpu().numpy()
    assert on_host.tobytes() == run_biencoder(INPUTS).out.tobytes()


def torch_or_cupy(module, array):
    return module.asarray(array) if module.__name__ == "cupy" else module.from_numpy(array).cuda()


@pytest.mark.gpu_only("in the simulator all arrays are in host memory")
@pytest.mark.parametrize("place", [1, 2])
def test_refuses_arrays_in_several_places(place):
    arrays = [array if number == place else cuda.to_device(array) for number, array in enumerate(INPUTS)]
    name = Inputs._fields[place]
    with pytest.raises(
        burt_numba.BurtDimensionError, match=f"^biencoder_attention: {name}: expected all arrays in one"
    ):
        burt_numba.biencoder_attention(*arrays)


# Events --------------------------------------------------------------------------------------------------------------

CLEAN = inputs_of(2, 2, 2, 6, 8, spread=1.0)


def spoiled(clean, name, place, value):
    array = getattr(clean, name).copy()
    array[place] = value
    return clean._replace(**{name: array})


@pytest.mark.parametrize(
    ("name", "place", "value", "count", "first"),
    [
        ("query", (1, 0, 1, 2), np.nan, {1: 1}, (1, 0, 1, 2)),
        ("query", (0, 1, 1, slice(3, 6)), -np.inf, {2: 3}, (0, 1, 1, 3)),
        ("context_keys", (1, 1, 5, 7), np.inf, {2: 1}, (1, 1, 5, 7)),
        ("context_keys", (0, 0, slice(2, 4), 0), np.nan, {1: 2}, (0, 0, 2, 0)),
    ],
)
@each_kernel
def test_each_bad_element_with_its_count_and_first_index(name, place, value, count, first, queries):
    inputs = spoiled(inputs_of(2, 2, queries, 6, 8, spread=1.0), name, place, value)
    first = (int(np.ravel_multi_index(first, getattr(inputs, name).shape)), *count)
    check_events(inputs, {"entropy_bound": 9.0}, count, first)


@each_kernel
def test_each_other_code_with_its_count_and_first_index(queries):
    clean = inputs_of(2, 2, queries, 6, 8, spread=1.0)
    ties = spoiled(clean, "context_keys", (slice(None), 1), 0.25)
    check_events(ties, {"entropy_bound": np.float32([9, 0.2])}, {3: 2 * queries}, (queries, 3))
    check_events(clean, {"entropy_bound": 9.0, "context_lengths": np.int32([6, 7])}, {6: 1}, (1, 6))
    bounds = {"entropy_bound": np.float32([9.0, np.nan]), "temperature_min": 1e-5}
    check_events(clean, bounds, {6: 1}, (1, 6))
    value = spoiled(clean, "context_values", (1, 0, 4, 2), np.nan)
    groups = -(-queries // queries_together(clean))
    check_events(value, {"entropy_bound": 9.0}, {1: groups}, (((1 * 2 + 0) * 6 + 4) * 8 + 2, 1))
    large = Inputs(*(np.full(array.shape, 1e20, np.float32) for array in clean))
    check_events(large, {"entropy_bound": 9.0}, {2: 4 * queries * 6}, (0, 2))


def check_events(inputs, options, counts, first):
    outcome = check_biencoder(inputs, **options)
    assert (outcome.counts, outcome.first) == (counts, first)
    options = {name: to_target(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    with one_warning("biencoder_attention", counts, first):
        attend(inputs, **options)


def test_several_events_become_one_warning_of_the_first():
    inputs = Inputs(*(array.copy() for array in CLEAN))
    inputs.context_keys[1, 1, 2, 3], inputs.query[0, 0, 1, 4] = np.nan, np.inf
    with one_warning("biencoder_attention", {1: 1, 2: 1}, (12, 2)):
        attend(inputs, None, 9.0)


def test_error_buffer_collects_instead_of_warning():
    errors, inputs = burt_numba.ErrorBuffer(), spoiled(CLEAN, "query", (1, 0, 1, 2), np.nan)
    for calls in (1, 2):
        attend(inputs, None, 9.0, errors=errors)
        assert (errors.check(), errors.counts, errors.first_index) == (1, {1: calls}, 42)
    errors.reset()
    assert (errors.counts, errors.first_index, errors.code) == ({}, None, 0)
    burt_numba.check()


def test_no_event_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(CLEAN, None, 9.0)
        burt_numba.check()


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_memory_grows_with_queries_times_contexts(dtype, precision):
    """The weights are [B, H, Q, K]: 16 GiB for the largest of these, of which none is ever in device memory."""
    temporary = set()
    for queries, contexts in ((512, 64), (2048, 2048), (3, 65_536), (65_536, 65_536), (100, 10**7)):
        planned = burt_numba.plan(
            "biencoder_attention",
            batch_size=1,
            num_heads=1,
            query_len=queries,
            context_len=contexts,
            d_head=64,
            dtype=dtype,
            precision=precision,
            compute_capability=(9, 0),
        )
        temporary.add(planned.temporary_bytes)
        assert planned.output_bytes == queries * 64 * np.dtype(dtype).itemsize
    # The shared memory of a documented block; a launch allocates nothing.
    assert len(temporary) == 1 and max(temporary) < 2**17


@pytest.mark.gpu_only("memory of the device")
@pytest.mark.parametrize(("Q", "K"), [(2048, 2048), (16_384, 16_384), (3, 2**20)])
def test_no_memory_of_the_device_grows_with_queries_times_contexts(Q, K):
    torch = pytest.importorskip("torch")
    arrays = [torch.randn((1, 2, n, 64), device="cuda") for n in (Q, K, K)]
    out = torch.empty_like(arrays[0])

    def call():
        burt_numba.biencoder_attention(*arrays, out=out, errors=errors)
        torch.cuda.synchronize()

    errors = burt_numba.ErrorBuffer()
    # Loading the kernels takes memory, once.
    call()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    taken = []
    for _ in range(20):
        before = torch.cuda.mem_get_info()[0]
        call()
        taken.append(before - torch.cuda.mem_get_info()[0])
    # Other processes use the device as well; a call that takes memory would show each time.
    assert 0 in taken
    assert torch.cuda.max_memory_allocated() == allocated
    assert torch.isfinite(out).all()


# Threads and graphs --------------------------------------------------------------------------------------------------


def test_two_host_threads_at_once():
    """Threads share kernels and prepared calls; neither may see the other's."""
    all_inputs = [inputs_of(1, 1, Q, 9, 5) for Q in (1, 5)]
    wanted = [run_biencoder(inputs) for inputs in all_inputs]

    def work(number):
        for _ in range(50 if ON_GPU else 2):
            for turn in (number, 1 - number):
                assert same_results(run_biencoder(all_inputs[turn]), wanted[turn])

    run_threads(work, 2)


@pytest.mark.gpu_only("graphs are of the device")
@pytest.mark.parametrize("shape", [(2, 4, 64, 64, 64), (1, 8, 33, 1000, 128), (1, 4, 1, 20_000, 128)])
@pytest.mark.parametrize("given", [True, False])
@each_type
def test_cuda_graph(shape, given, dtype):
    """A hidden synchronisation or host copy breaks capture: NVIDIA/numba-cuda#832, JuliaGPU/CUDA.jl#1229."""
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(array).cuda() for array in inputs_of(*shape, dtype=dtype)]
    given_out = torch.full_like(tensors[0], torch.nan)
    errors = burt_numba.ErrorBuffer()

    def work():
        return burt_numba.biencoder_attention(*tensors, errors=errors, **({"out": given_out} if given else {}))

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        out = work()
    for seed in range(5):
        fresh = inputs_of(*shape, dtype=dtype, seed=seed)
        for tensor, array in zip(tensors, fresh, strict=True):
            tensor.copy_(torch.from_numpy(array))
        out.fill_(torch.nan)
        errors.reset()
        graph.replay()
        torch.cuda.synchronize()
        outcome = check_biencoder(fresh)
        assert out.cpu().numpy().tobytes() == outcome.out.tobytes()
        assert {int(code): count for code, count in errors.counts.items()} == outcome.counts


# Rows beyond the others ----------------------------------------------------------------------------------------------


@each_kernel
def test_a_row_of_no_contexts_beside_others(queries):
    inputs = inputs_of(3, 1, queries, 9, 8)
    outcome = check_biencoder(inputs, context_lengths=np.int32([9, 0, 1]))
    assert (outcome.out[1] == 0).all() and (outcome.temperature[1] == 1).all() and (outcome.entropy[1] == 0).all()
    assert outcome.out[2] == pytest.approx(np.broadcast_to(inputs.context_values[2, :, :1], (1, queries, 8)), abs=1e-5)


@each_kernel
def test_the_reference_takes_what_the_function_takes(queries):
    inputs = inputs_with_scores([3.0, 2.0, 1.0, 0.0], queries=queries)
    numbers, lengths = (1.0, 0.3, 0.02, 5.0, 30), np.int32([3])
    out = attend(inputs, *numbers, context_lengths=to_target(lengths))
    expected = reference.biencoder_attention(*inputs, *numbers, context_lengths=lengths, precision="tf32")
    assert to_host(out) == pytest.approx(expected.output, rel=1e-3, abs=1e-4)
