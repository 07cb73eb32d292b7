"""How the functions of flash decoding are called: outputs, layouts, events, threads, graphs."""

import warnings

import numpy as np
import pytest
from flash_support import (
    Inputs,
    check_chunk,
    check_flash,
    check_merge,
    check_reduce,
    each_type,
    inputs_of,
    partials_of,
    run_chunk,
    run_flash,
    run_merge,
    run_reduce,
    same_results,
)
from support import ON_GPU, cases, normal, one_warning, poisoned, run_threads, to_host, to_target

import burt_numba
from burt_numba import reference
from burt_numba.backend import cuda

INPUTS = inputs_of(3, 2, 40, 8, key_heads=1, seq_lens=[40, 17, 0])
PARTIALS = (partials_of(3, 2, 3, 8), np.int32([70, 33, 0]))
STATES = (normal((3, 2, 3, 8)), normal((3, 2, 3), seed=1))
CALLS = {
    "flash_decoding_reduce": (PARTIALS, run_reduce),
    "flash_decoding_chunk": (INPUTS, run_chunk),
    "flash_decoding": (INPUTS, run_flash),
    "merge_attention_states": (STATES, run_merge),
}
each_function = pytest.mark.parametrize("name", CALLS)
WITH_SUMS = [name for name in CALLS if name != "flash_decoding_chunk"]


def call(name, arrays=None, *args, convert=to_target, **options):
    arrays = CALLS[name][0] if arrays is None else arrays
    return getattr(burt_numba, name)(*map(convert, arrays), *args, **options)


def expected_of(name, arrays=None, *args, **options):
    """The outcome of a guarded call."""
    return CALLS[name][1](*_packed(name, CALLS[name][0] if arrays is None else arrays), *args, **options)


def _packed(name, arrays):
    return (Inputs(*arrays),) if arrays_are_inputs(name) else tuple(arrays)


def arrays_are_inputs(name):
    return CALLS[name][0] is INPUTS


# Outputs -------------------------------------------------------------------------------------------------------------


@each_function
def test_a_plain_call_allocates_the_result(name):
    out, expected = call(name), expected_of(name)[0]
    assert type(out) is type(to_target(INPUTS.query))
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    assert to_host(out).tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["flash_decoding", "flash_decoding_chunk", "merge_attention_states"])
def test_results_of_float16(name):
    halves = [array.astype(np.float16) for array in CALLS[name][0][:3]]
    arrays = (*halves, INPUTS.seq_lens) if arrays_are_inputs(name) else (halves[0], STATES[1])
    out = call(name, arrays)
    assert out.dtype == (np.float32 if name == "flash_decoding_chunk" else np.float16)
    assert to_host(out).tobytes() == expected_of(name, arrays)[0].tobytes()


@each_function
def test_host_arrays_in_and_out(name):
    before = [array.copy() for array in CALLS[name][0]]
    out = call(name, convert=lambda array: array)
    assert isinstance(out, np.ndarray) and out.tobytes() == expected_of(name)[0].tobytes()
    assert all(array.tobytes() == old.tobytes() for array, old in zip(CALLS[name][0], before, strict=True))


@pytest.mark.parametrize("name", WITH_SUMS)
def test_sums_change_no_bit_of_the_result(name):
    expected, without = expected_of(name), expected_of(name, lse=False)
    assert without.out.tobytes() == expected.out.tobytes()
    sums = poisoned(expected.lse.shape)
    assert to_host(call(name, lse_out=sums)).tobytes() == expected.out.tobytes()
    assert to_host(sums).tobytes() == expected.lse.tobytes()


@pytest.mark.parametrize("chunk_size", [None, 16])
@each_type
def test_in_place_of_the_query(chunk_size, dtype):
    inputs = inputs_of(2, 3, 40, 8, key_heads=1, seq_lens=[40, 17], dtype=dtype)
    inputs.query[1, 2, 5] = np.nan
    query, *others = map(to_target, inputs._replace(query=inputs.query.copy()))
    errors = burt_numba.ErrorBuffer()
    assert burt_numba.flash_decoding(query, *others, chunk_size=chunk_size, out=query, errors=errors) is query
    expected = run_flash(inputs, chunk_size=chunk_size)
    assert to_host(query).tobytes() == expected.out.tobytes()
    assert (errors.check(), errors.counts, errors.first_index) == (1, {1: 1}, (3 + 2) * 8 + 5)


@each_function
def test_validate_output_changes_nothing_that_is_right(name):
    plain, validated = (expected_of(name, None, validate_output=again) for again in (False, True))
    assert same_results(plain, validated)


def test_arguments_by_name():
    query, k_cache, v_cache, seq_lens = map(to_target, INPUTS)
    caches = {"query": query, "k_cache": k_cache, "v_cache": v_cache, "seq_lens": seq_lens}
    out = burt_numba.flash_decoding(**caches, scale=0.5, chunk_size=16)
    assert to_host(out).tobytes() == run_flash(INPUTS, 0.5, chunk_size=16).out.tobytes()
    partials = burt_numba.flash_decoding_chunk(**caches, chunk_size=16, scale=0.5)
    assert to_host(partials).tobytes() == run_chunk(INPUTS, 16, 0.5).partials.tobytes()
    out = burt_numba.flash_decoding_reduce(partials=partials, seq_lens=seq_lens, chunk_size=16)
    assert to_host(out).tobytes() == run_reduce(to_host(partials), INPUTS.seq_lens, 16).out.tobytes()
    outs, lses = map(to_target, STATES)
    merged = burt_numba.merge_attention_states(outs=outs, lses=lses)
    assert to_host(merged).tobytes() == run_merge(*STATES).out.tobytes()


@pytest.mark.parametrize("number", [np.float64(0.5), np.float32(0.5), np.array(0.5)])
def test_numbers_are_of_any_kind(number):
    expected = run_flash(INPUTS, 0.5, chunk_size=16).out
    assert to_host(call("flash_decoding", None, number, chunk_size=np.int64(16))).tobytes() == expected.tobytes()
    parts = run_chunk(INPUTS, 16, 0.5).partials
    assert to_host(call("flash_decoding_chunk", None, np.int32(16), number)).tobytes() == parts.tobytes()


def test_one_size_after_another():
    """A kernel specialised for one size was reused for the next: numba/numba#3265."""
    sizes = [(1, 1, 9, 4), (2, 1, 40, 5), (1, 2, 9, 5), (1, 1, 100, 4)]
    for M, H, S, D in sizes * 2:
        check_flash(inputs_of(M, H, S, D))
        check_reduce(partials_of(M, H, S, D), np.full(M, S, np.int32), 1)


def test_a_workspace_of_a_larger_call_is_used_by_a_smaller_one():
    """Scratch kept from other work inherited its NaN: fla-org/flash-linear-attention#892."""
    larger = inputs_of(4, 2, 70, 8)
    run_flash(Inputs(*(np.full_like(array, np.nan) for array in larger[:3]), larger.seq_lens), chunk_size=16)
    check_flash(INPUTS, chunk_size=16)


@each_function
def test_on_a_stream(name):
    stream, arrays = cuda.stream(), [to_target(array) for array in CALLS[name][0]]
    cuda.synchronize()
    out = getattr(burt_numba, name)(*arrays, stream=stream)
    stream.synchronize()
    assert to_host(out).tobytes() == expected_of(name)[0].tobytes()


@each_function
def test_outputs_of_a_refused_call_are_not_touched(name):
    out, sums = poisoned(expected_of(name)[0].shape), poisoned((2, 2))
    wrong = {"chunk_size": 0} if name != "merge_attention_states" else {"lse_out": sums}
    with pytest.raises(ValueError):
        call(name, out=out, **wrong)
    assert np.isnan(to_host(out)).all()


# Layouts -------------------------------------------------------------------------------------------------------------


def within(array, axis, step=1, fill=99):
    """The array as a part of a larger one that is longer by one along an axis, or as every other of its entries."""
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


def transposed(array):
    """Axes in another order in memory."""
    order = (*range(1, array.ndim), 0)
    return array.transpose(np.argsort(order)).copy().transpose(order)


LAYOUTS = {
    "padded vectors": lambda array: within(array, -1),
    "every other element": lambda array: within(array, -1, 2),
    "padded sequence": lambda array: within(array, -2),
    "every other vector": lambda array: within(array, -2, 2),
    "every other head": lambda array: within(array, 1, 2),
    "padded batch": lambda array: within(array, 0),
    "odd offset": at_odd_offset,
    "elements backwards": lambda array: array[..., ::-1].copy()[..., ::-1],
    "everything backwards": lambda array: np.flip(np.flip(array).copy()),
    "heads after the sequence": lambda array: array.swapaxes(1, -2).copy().swapaxes(1, -2),
    "axes in another order": transposed,
    "other order": np.asfortranarray,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("D", "dtype"), [(5, np.float32), (8, np.float32), (8, np.float16)])
def test_layouts(layout, D, dtype):
    """Only the shape was looked at, and a padded view was read as if packed: ROCm/rocm-libraries#5240."""
    packed = inputs_of(2, 2, 12, D, key_heads=2 if D == 5 else 1, seq_lens=[12, 5], dtype=dtype)
    arranged = Inputs(*map(LAYOUTS[layout], packed[:3]), within(packed.seq_lens, 0, 2))
    assert all((a == b).all() for a, b in zip(arranged, packed, strict=True))
    check_flash(arranged)
    if D == 5 or ON_GPU:
        check_chunk(arranged, 16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("D", "dtype"), [(5, np.float32), (8, np.float32), (8, np.float16)])
def test_layouts_of_states(layout, D, dtype):
    outs, lses = normal((3, 2, 2, D), dtype=dtype), normal((3, 2, 2), seed=1)
    arranged = [LAYOUTS[layout](array) for array in (outs, lses)]
    assert all((a == b).all() for a, b in zip(arranged, (outs, lses), strict=True))
    check_merge(*arranged)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("D", [5, 8])
def test_layouts_of_partials(layout, D):
    arranged = LAYOUTS[layout](partials_of(2, 2, 4, D))
    assert (arranged == partials_of(2, 2, 4, D)).all()
    check_reduce(arranged, within(np.int64([128, 70]), 0, 2))


@pytest.mark.parametrize("layout", ["every other element", "odd offset", "heads after the sequence"])
@pytest.mark.parametrize("name", Inputs._fields[:3])
def test_one_array_of_another_layout(name, layout):
    check_flash(INPUTS._replace(**{name: LAYOUTS[layout](getattr(INPUTS, name))}))


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_repeated_axes(axis):
    """A stride of 0 in any axis, also in the last: one cache for all, one head expanded."""
    inputs = inputs_of(2, 2, 20, 8)
    caches = (np.broadcast_to(array.take([0], axis), array.shape) for array in inputs[1:3])
    check_flash(Inputs(inputs.query, *caches, np.broadcast_to(np.int32(17), (2,))), chunk_size=16)
    partials = partials_of(2, 2, 3, 8)
    check_reduce(np.broadcast_to(partials.take([0], axis), partials.shape), np.broadcast_to(np.int32(70), (2,)))


def test_a_cache_that_is_both():
    """Keys and values interleaved in one array [M, S, 2, Hk, D], as serving code keeps them."""
    cache = normal((3, 40, 2, 2, 8))
    keys, values = (cache[:, :, part].transpose(0, 2, 1, 3) for part in (0, 1))
    check_flash(Inputs(INPUTS.query, keys, values, INPUTS.seq_lens))
    query, both = to_target(INPUTS.query), to_target(INPUTS.k_cache)
    burt_numba.flash_decoding(query, both, both, to_target(INPUTS.seq_lens))


@pytest.mark.parametrize("skew", cases([1, 2], [3, 5]))
@pytest.mark.parametrize("D", [8, 46])
@each_type
def test_misaligned_arrays_between_guards(skew, D, dtype):
    """Vector stores at odd addresses, where the alignment of the input alone was checked: vllm-project/vllm#45466."""
    inputs = inputs_of(1, 2, 20, D, dtype=dtype)
    check_flash(inputs, skew=skew, chunk_size=16)
    check_chunk(inputs, 16, skew=skew)
    check_reduce(partials_of(1, 2, 3, D), np.int32([96]), skew=skew)
    check_merge(normal((3, 2, D), dtype=dtype), normal((3, 2), seed=1), skew=skew)


def test_axes_of_size_1_with_odd_strides():
    """Axes of size 1 carry any stride: numba/numba#6824, cupy/cupy#5897."""
    packed = inputs_of(1, 1, 1, 8)
    strided = [
        np.lib.stride_tricks.as_strided(array, array.shape, (5237, 77, 33, 4)[4 - array.ndim :]) for array in packed[:3]
    ]
    assert same_results(run_flash(Inputs(*strided, packed.seq_lens)), run_flash(packed))


@each_function
def test_read_only_inputs(name):
    """An array that is only read was refused for being read-only: numba/numba#2521."""
    arrays = [array.copy() for array in CALLS[name][0]]
    for array in arrays:
        array.flags.writeable = False
    assert call(name, arrays, convert=lambda array: array).tobytes() == expected_of(name)[0].tobytes()


@pytest.mark.parametrize("family", [np.array, cuda.to_device], ids=["NumPy", "Numba"])
@each_function
def test_array_families(name, family):
    out = call(name, convert=family)
    assert type(out) is type(family(INPUTS.query))
    assert to_host(out).tobytes() == expected_of(name)[0].tobytes()


@pytest.mark.gpu_only("tensors on the device")
@pytest.mark.parametrize("library", ["torch", "cupy"])
@each_function
def test_tensors(name, library):
    module = pytest.importorskip(library)
    out = call(name, convert=lambda array: torch_or_cupy(module, array))
    assert type(out) is type(torch_or_cupy(module, INPUTS.query))
    on_host = out.get() if library == "cupy" else out.cpu().numpy()
    assert on_host.tobytes() == expected_of(name)[0].tobytes()


def torch_or_cupy(module, array):
    return module.asarray(array) if module.__name__ == "cupy" else module.from_numpy(array).cuda()


@pytest.mark.gpu_only("in the simulator all arrays are in host memory")
@each_function
def test_refuses_arrays_in_several_places(name):
    arrays = [array if number == 1 else cuda.to_device(array) for number, array in enumerate(CALLS[name][0])]
    with pytest.raises(burt_numba.BurtDimensionError, match=f"^{name}: .*: expected all arrays in one"):
        getattr(burt_numba, name)(*arrays)


# Events --------------------------------------------------------------------------------------------------------------


def spoiled(name, number, place, value):
    """The arrays of a call, one of them with other elements at a place."""
    arrays = [array.copy() for array in CALLS[name][0]]
    arrays[number][place] = value
    return arrays


@pytest.mark.parametrize(
    ("name", "number", "place", "value", "counts", "first"),
    [
        ("flash_decoding_reduce", 0, (0, 1, 1, 3), np.nan, {1: 1}, (3 + 1) * 10 + 3),
        ("flash_decoding_reduce", 0, (1, 0, 1, slice(2, 5)), -np.inf, {2: 3}, (2 * 3 + 1) * 10 + 2),
        ("flash_decoding_reduce", 0, (0, 1, slice(3), 8), np.nan, {1: 3}, 3 * 10 + 8),
        ("flash_decoding_reduce", 0, (0, 1, 2, 9), np.inf, {2: 1}, (3 + 2) * 10 + 9),
        ("flash_decoding_reduce", 1, 1, -5, {6: 1}, 1),
        ("flash_decoding_reduce", 1, slice(1, 3), 97, {6: 2}, 1),
        ("flash_decoding", 0, (0, 1, 3), np.nan, {1: 1}, 8 + 3),
        ("flash_decoding", 3, 2, 41, {6: 1}, 2),
        ("flash_decoding", 3, 1, -1, {6: 1}, 1),
        ("flash_decoding_chunk", 0, (0, 1, 3), -np.inf, {2: 1}, 8 + 3),
        ("flash_decoding_chunk", 3, 2, 41, {6: 1}, 2),
        ("merge_attention_states", 0, (1, 1, 2, 4), np.nan, {1: 1}, ((1 * 2 + 1) * 3 + 2) * 8 + 4),
        ("merge_attention_states", 1, (2, 0, slice(1, 3)), np.inf, {2: 2}, 2 * 2 * 3 + 1),
    ],
)
def test_each_event_with_its_count_and_first_index(name, number, place, value, counts, first):
    arrays = spoiled(name, number, place, value)
    outcome = expected_of(name, arrays)
    (code,) = counts
    assert (outcome.counts, outcome.first) == (counts, (first, code))
    with one_warning(name, counts, (first, code)):
        call(name, arrays)


@pytest.mark.parametrize("name", ["flash_decoding", "flash_decoding_chunk"])
def test_events_of_the_caches(name):
    """Each bad element is found once, though two heads read it."""
    arrays = spoiled(name, 1, (0, 0, 17, 3), np.nan)
    arrays[2][1, 0, 16, 2:4] = np.inf
    outcome, expected = expected_of(name, arrays), getattr(reference, name)(*arrays)
    assert outcome.counts == {1: 1, 2: 2} and outcome.first == expected.first
    with one_warning(name, outcome.counts, outcome.first):
        call(name, arrays)


@each_function
def test_error_buffer_collects_instead_of_warning(name):
    arrays, errors = spoiled(name, 0, (0, 1), np.nan), burt_numba.ErrorBuffer()
    (code,) = expected_of(name, arrays).counts
    seen = expected_of(name, arrays).counts[code]
    for calls in (1, 2):
        call(name, arrays, errors=errors)
        assert (errors.check(), errors.counts) == (code, {code: calls * seen})
    errors.reset()
    assert (errors.counts, errors.first_index, errors.code) == ({}, None, 0)
    burt_numba.check()


@each_function
def test_policies(name):
    arrays = spoiled(name, 0, (0, 1), np.nan)
    burt_numba.set_error_policy("ignore")
    call(name, arrays)
    burt_numba.check()
    burt_numba.set_error_policy("raise")
    with pytest.raises(burt_numba.BurtRuntimeError, match=name):
        call(name, arrays)
        burt_numba.check()


@each_function
def test_no_event_no_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(name)
        burt_numba.check()


# Threads and graphs --------------------------------------------------------------------------------------------------


def test_two_host_threads_at_once():
    """Threads share kernels, prepared calls and workspaces; neither may see the other's."""
    sizes = [inputs_of(1, 2, S, 5, seed=S) for S in (9, 70)]
    wanted = [run_flash(inputs, chunk_size=16) for inputs in sizes]

    def work(number):
        for _ in range(50 if ON_GPU else 2):
            for turn in (number, 1 - number):
                assert same_results(run_flash(sizes[turn], chunk_size=16), wanted[turn])

    run_threads(work, 2)


@pytest.mark.gpu_only("streams run one after another in the simulator")
def test_two_streams_at_once():
    """A workspace that both use would mix them up."""
    torch = pytest.importorskip("torch")
    sizes = [inputs_of(4, 8, 4096, 64, seed=seed) for seed in range(4)]
    tensors = [[torch.from_numpy(array).cuda() for array in inputs] for inputs in sizes]
    wanted = [run_flash(inputs) for inputs in sizes]
    streams = [torch.cuda.Stream() for _ in sizes]
    torch.cuda.synchronize()
    outs = [[] for _ in sizes]
    for _ in range(50):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[number].append(burt_numba.flash_decoding(*tensors[number]))
    torch.cuda.synchronize()
    for results, expected in zip(outs, wanted, strict=True):
        assert all(out.cpu().numpy().tobytes() == expected.out.tobytes() for out in results)


@pytest.mark.gpu_only("graphs are of the device")
@pytest.mark.parametrize("shape", [(3, 4, 70, 8), (1, 8, 5000, 128), (16, 4, 300, 64)])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("chunk_size", [None, 32])
@each_type
def test_cuda_graph(shape, given, chunk_size, dtype):
    """Lengths are read on the device, so that one graph serves every step; a hidden synchronisation breaks capture."""
    torch = pytest.importorskip("torch")
    M, _, S, _ = shape
    tensors = [torch.from_numpy(array).cuda() for array in inputs_of(*shape, dtype=dtype)]
    given_out, errors = torch.full_like(tensors[0], torch.nan), burt_numba.ErrorBuffer()

    def work():
        return burt_numba.flash_decoding(
            *tensors, chunk_size=chunk_size, errors=errors, **({"out": given_out} if given else {})
        )

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        out = work()
    # Other work may want the memory that a captured workspace lies in.
    run_flash(inputs_of(5, 6, 2000, 128))
    for seed in range(4):
        lengths = np.random.default_rng(seed).integers(-1, S + 1, M, endpoint=True)
        fresh = inputs_of(*shape, dtype=dtype, seed=seed, seq_lens=lengths)
        for tensor, array in zip(tensors, fresh, strict=True):
            tensor.copy_(torch.from_numpy(array))
        out.fill_(torch.nan)
        errors.reset()
        graph.replay()
        torch.cuda.synchronize()
        outcome = check_flash(fresh, chunk_size=chunk_size)
        assert out.cpu().numpy().tobytes() == outcome.out.tobytes()
        assert {int(code): count for code, count in errors.counts.items()} == outcome.counts


@pytest.mark.gpu_only("graphs are of the device")
def test_cuda_graph_of_both_steps_and_a_merge():
    torch = pytest.importorskip("torch")
    inputs = inputs_of(4, 8, 500, 64)
    query, keys, values, lengths = (torch.from_numpy(array).cuda() for array in inputs)
    errors = burt_numba.ErrorBuffer()

    def work():
        partials = burt_numba.flash_decoding_chunk(query, keys, values, lengths, errors=errors)
        sums = torch.empty((2, 4, 8), device="cuda")
        outs = torch.empty((2, 4, 8, 64), device="cuda")
        for part, chunks in enumerate((partials[:, :, :5], partials[:, :, 5:])):
            size = torch.clamp(lengths - 160 * part, 0, 32 * chunks.shape[2])
            burt_numba.flash_decoding_reduce(chunks, size, out=outs[part], lse_out=sums[part], errors=errors)
        return burt_numba.merge_attention_states(outs, sums, errors=errors)

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        out = work()
    lengths.copy_(torch.tensor([500, 3, 0, 161], dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    expected = run_flash(inputs._replace(seq_lens=np.int32([500, 3, 0, 161])))
    assert np.abs(out.cpu().numpy() - expected.out).max() <= 1e-5 and errors.counts == {}
