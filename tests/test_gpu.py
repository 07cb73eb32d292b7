"""What only a GPU can show: races, streams, threads, graphs, memory pools, limits of a launch, and 100,000 random rows.

Data is made and compared on the device, through PyTorch.
"""

import threading
from importlib import import_module

import numpy as np
import pytest

import burt_numba
from burt_numba import reference, softmax_launches
from burt_numba.backend import cuda
from burt_numba.host import compiling

pytestmark = pytest.mark.gpu_only("the simulator runs one block after another and has no hardware limits")
torch = pytest.importorskip("torch")


def normal(*shape, spread=3.0, dtype=torch.float32, seed=0):
    """Normal values with a clear lead in each row: two near-equal leaders would put a row out of reach of its bound."""
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(shape, generator=generator, device="cuda") * spread
    return values.scatter_add(-1, values.argmax(-1, keepdim=True), torch.ones_like(values[..., :1])).to(dtype)


def entropy(p):
    """Of each row, in nats, in float64."""
    return torch.special.entr(p.double()).sum(-1)


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def relative_errors(out, expected):
    return (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)


# Races ---------------------------------------------------------------------------------------------------------------


def test_same_bits_in_200_runs():
    """A missing barrier gave one row in a thousand other numbers on every run.

    NervanaSystems/neon#171, ggml-org/llama.cpp#4742
    """
    logits, out = normal(4096, 50_000), torch.full((4096, 50_000), torch.nan, device="cuda")
    first = burt_numba.constrained_softmax(logits)
    assert (first.sum(-1, dtype=torch.float64) - 1).abs().max() <= 1e-5
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(200):
        burt_numba.constrained_softmax(logits, out=out)
        different |= (out != first).any()
    assert not different


@pytest.mark.parametrize("num_classes", [33, 65, 129, 1000, 1025, 3000, 9000, 33_000, 70_000])
def test_same_bits_in_1000_runs_of_every_launch(num_classes):
    """Warp reductions without a barrier raced: numba/numba#6127."""
    logits, temperature = normal(50, num_classes), torch.empty(50, device="cuda")
    scores, mask = logits.reshape(1, 1, 50, -1), normal(1, 1, 1, num_classes, spread=1.0)
    first = burt_numba.constrained_softmax(logits, temperature_out=temperature)
    first_temperature, first_weights = temperature.clone(), burt_numba.attention_softmax(scores, mask)
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        different |= (burt_numba.constrained_softmax(logits, temperature_out=temperature) != first).any()
        different |= (temperature != first_temperature).any()
        different |= (burt_numba.attention_softmax(scores, mask) != first_weights).any()
    assert not different


def test_equal_logits_give_one_weight():
    """After a reduction each lane divided by its own sum, with another last bit: triton-lang/triton#7264."""
    equal = torch.full((64, 1000), 0.7, device="cuda")
    for out in (burt_numba.constrained_softmax(equal, 20.0), burt_numba.attention_softmax(equal.view(1, 1, 64, -1))):
        assert (out == out.flatten()[0]).all()
    # Lane sums that differ in the last bit: all weights of a row are multiples of one broadcast reciprocal, so equal
    # logits far apart in the row have equal bits.
    logits = normal(256, 1000)
    logits[:, 999] = logits[:, 0]
    for bound in (0.2, 20.0):
        # Where the first logit leads, the last ties with it, and the lower bound is out of reach.
        out = burt_numba.constrained_softmax(logits, bound, errors=burt_numba.ErrorBuffer())
        assert same_bits(out[:, 0].clone(), out[:, 999].clone())


# Limits of a launch --------------------------------------------------------------------------------------------------


def shared_memory_limit():
    return torch.cuda.get_device_properties(0).shared_memory_per_block_optin


@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize("limit", ["default", "device"])
def test_rows_around_the_shared_memory_limits(limit, step):
    """Exactly 48 KiB of dynamic shared memory failed to launch: NVIDIA/numba-cuda-mlir#143."""
    num_classes = (49_152 if limit == "default" else shared_memory_limit()) // 4 + step
    logits = normal(40, num_classes)
    temperature = torch.empty(40, device="cuda")
    out = burt_numba.constrained_softmax(logits, temperature_out=temperature)
    expected = torch.softmax(logits.double() / temperature.double()[:, None], -1)
    assert relative_errors(out, expected).max() <= 5e-6
    assert (entropy(out) - 0.2).abs().max() <= 2e-5 + 1e-6


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("bound", [0.2, 20.0])
def test_rows_that_shared_memory_just_holds(monkeypatch, clusters, bound):
    """Up to the last column that fits, and one more; without clusters too, as on other devices."""
    for module in (softmax_launches, import_module("burt_numba.constrained_softmax")):
        monkeypatch.setattr(module, "has_clusters", lambda capability: clusters)
    monkeypatch.setattr(import_module("burt_numba.constrained_softmax")._OPERATION, "_calls", {})
    blocks = 8 if clusters else 1
    longest = blocks * ((shared_memory_limit() - softmax_launches._STATIC_SHARED_BYTES) // 4)
    for num_classes, is_staged in ((longest, True), (longest + 1, False), (longest // 2 + 3, True)):
        assert softmax_launches.long_row_shape(num_classes, 9, (9, 0)) == (
            blocks,
            4 * -(-num_classes // blocks) if is_staged else 0,
        )
        logits = normal(9, num_classes)
        logits[3, ::5] = -torch.inf
        temperature = torch.empty(9, device="cuda")
        out = burt_numba.constrained_softmax(logits, bound, temperature_out=temperature)
        expected = torch.softmax(logits.double() / temperature.double()[:, None], -1)
        assert relative_errors(out, expected).max() <= 5e-6
        assert (entropy(out) <= bound + 1e-6).all()


@pytest.mark.parametrize("rows", [65_535, 65_536, 70_000, 700_000])
def test_more_rows_than_a_grid_axis_takes(rows):
    """Grids past 65,535 in y or z failed with an invalid configuration.

    ml-explore/mlx#2267, triton-lang/triton#580, ggml-org/llama.cpp#3921, ggml-org/llama.cpp#16744
    """
    logits = normal(rows, 4)
    expected = torch.softmax(logits.double(), -1)
    assert relative_errors(burt_numba.constrained_softmax(logits, 20.0), expected).max() <= 5e-6
    for shape in ((rows, 1, 1, 4), (1, rows, 1, 4), (1, 1, rows, 4)):
        weights = burt_numba.attention_softmax(logits.view(shape))
        assert relative_errors(weights.view(rows, 4), expected).max() <= 5e-6


def test_more_heads_than_a_grid_axis_takes_causal():
    scores = normal(35_000, 2, 4, 4)
    out = burt_numba.attention_softmax(scores, None, True)
    future = torch.ones(4, 4, dtype=torch.bool, device="cuda").triu(1)
    expected = torch.softmax(scores.double().masked_fill(future, -torch.inf), -1)
    assert relative_errors(out, expected).max() <= 5e-6


# attention_softmax where its launch changes -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1024, 1025, 2048, 2049])
def test_fully_masked_row_on_both_sides_of_a_switch(size):
    """The fused path gave zeros for a fully masked row and the other one NaN: ml-explore/mlx#2608."""
    scores, mask = normal(1, 1, 3, size), torch.zeros(1, 1, 3, size, device="cuda")
    mask[..., 1, :] = -torch.inf
    out = burt_numba.attention_softmax(scores, mask)
    assert (out[..., 1, :] == 0).all()
    assert relative_errors(out[..., ::2, :], torch.softmax(scores[..., ::2, :].double(), -1)).max() <= 5e-6


def test_long_causal_rows_of_equal_float16_scores():
    """float16 sums overflowed at large row counts, and a sum of 0 was divided by: ggml-org/llama.cpp#19098."""
    size = 4096
    scores = torch.full((1, 1, size, size), 1.5, dtype=torch.float16, device="cuda")
    out = burt_numba.attention_softmax(scores, None, True)[0, 0]
    count = torch.arange(1, size + 1, device="cuda", dtype=torch.float64)[:, None]
    expected = (1 / count).expand(size, size).tril()
    assert out[0, 0] == 1
    assert (out[expected == 0] == 0).all()
    assert relative_errors(out, expected).max() <= 2e-3
    assert (out.sum(-1, dtype=torch.float64) - 1).abs().max() <= 1e-3


# Streams, threads, graphs --------------------------------------------------------------------------------------------


def test_inputs_that_are_freed_at_once():
    """Memory that Python freed was given to another stream while a kernel still read it: cupy/cupy#8068."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    source = normal(64, 20_000)
    expected = burt_numba.constrained_softmax(source)
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    torch.cuda.synchronize()
    for _ in range(1000):
        with torch.cuda.stream(first):
            logits = source.clone()
            out = burt_numba.constrained_softmax(logits)
            del logits
        with torch.cuda.stream(second):
            torch.full_like(source, torch.nan)
        with torch.cuda.stream(first):
            different |= (out != expected).any()
            del out
    torch.cuda.synchronize()
    assert not different


def test_freed_nan_does_not_come_back():
    """Scratch memory that nobody had set held NaN of earlier work: fla-org/flash-linear-attention#892."""
    logits = normal(64, 70_000)
    scores = logits.view(2, 2, 16, -1)
    before = burt_numba.constrained_softmax(logits), burt_numba.attention_softmax(scores)
    for size in (8, 64, 256, 4096, 64 * 70_000):
        blocks = [torch.full((size,), torch.nan, device="cuda") for _ in range(8)]
        blocks += [cuda.to_device(np.full(size, np.nan, np.float32)) for _ in range(8)]
        del blocks
    cupy = pytest.importorskip("cupy")
    for size in (8, 64, 256, 4096, 64 * 70_000):
        blocks = [cupy.full(size, np.nan, np.float32) for _ in range(8)]
        del blocks
    after = burt_numba.constrained_softmax(logits), burt_numba.attention_softmax(scores)
    from_cupy = burt_numba.constrained_softmax(cupy.asarray(logits)), burt_numba.attention_softmax(cupy.asarray(scores))
    for old, new, other in zip(before, after, from_cupy, strict=True):
        assert same_bits(old, new)
        assert same_bits(old, torch.as_tensor(other, device="cuda"))


def test_two_threads_with_different_shared_memory():
    """One thread lowered a kernel's shared memory between another's setting and launch: NVIDIA/cuvs#1771."""
    inputs = {size: normal(16, size) for size in (12_289, 30_000)}
    expected = {size: burt_numba.constrained_softmax(logits) for size, logits in inputs.items()}
    torch.cuda.synchronize()
    failures = []

    def work(sizes):
        try:
            different = torch.zeros((), dtype=torch.bool, device="cuda")
            for _ in range(500):
                for size in sizes:
                    different |= (burt_numba.constrained_softmax(inputs[size]) != expected[size]).any()
            assert not different
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(sizes,)) for sizes in ((12_289, 30_000), (30_000, 12_289))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("num_classes", [40, 1000, 9000, 70_000])
def test_cuda_graph(num_classes):
    """A hidden synchronisation or host copy breaks capture: NVIDIA/numba-cuda#832, JuliaGPU/CUDA.jl#1229."""
    logits, mask = torch.empty(8, num_classes, device="cuda"), normal(1, 1, 1, num_classes, spread=1.0)
    logits.copy_(normal(8, num_classes))
    out, weights = torch.empty_like(logits), torch.empty(1, 1, 8, num_classes, device="cuda")
    errors = burt_numba.ErrorBuffer()

    def work():
        burt_numba.constrained_softmax(logits, out=out, errors=errors)
        burt_numba.attention_softmax(logits.view(1, 1, 8, -1), mask, out=weights, errors=errors)

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        work()
    for seed in range(100):
        logits.copy_(normal(8, num_classes, seed=seed))
        graph.replay()
        assert same_bits(out, burt_numba.constrained_softmax(logits))
        assert same_bits(weights, burt_numba.attention_softmax(logits.view(1, 1, 8, -1), mask))
    torch.cuda.synchronize()
    assert errors.counts == {}
    # An event inside a replay reaches the buffer too.
    logits[3, 5] = torch.nan
    graph.replay()
    torch.cuda.synchronize()
    assert (errors.counts, errors.first_index) == ({1: 2}, 3 * num_classes + 5)


def test_capture_on_the_default_path():
    """Without a buffer of the caller's, events of a replay are reported by a later call."""
    logits, graph = normal(8, 1000), torch.cuda.CUDAGraph()
    out = torch.empty_like(logits)
    burt_numba.constrained_softmax(logits, out=out)
    with torch.cuda.graph(graph):
        burt_numba.constrained_softmax(logits, out=out)
    logits[2, 2] = torch.inf
    graph.replay()
    with pytest.warns(burt_numba.BurtWarning, match="constrained_softmax"):
        burt_numba.check()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("num_classes", [1000, 300_000])
def test_first_call_inside_a_capture(monkeypatch, num_classes):
    """Loading a kernel allocates, which a capture forbids unless it is told otherwise."""
    monkeypatch.setattr(compiling, "_loaded", {})
    monkeypatch.setattr(import_module("burt_numba.constrained_softmax")._OPERATION, "_calls", {})
    logits, graph = normal(8, num_classes), torch.cuda.CUDAGraph()
    out = torch.full_like(logits, torch.nan)
    with torch.cuda.graph(graph):
        burt_numba.constrained_softmax(logits, out=out, errors=burt_numba.ErrorBuffer())
    graph.replay()
    assert same_bits(out, burt_numba.constrained_softmax(logits))


def test_second_device():
    """An array on the second GPU failed because the first one was current: numba/numba#8612."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    logits = normal(4, 1000)
    expected = burt_numba.constrained_softmax(logits)
    there = logits.to("cuda:1")
    out = burt_numba.constrained_softmax(there)
    assert out.device == there.device and torch.cuda.current_device() == 0
    assert same_bits(out.to("cuda:0"), expected)
    with pytest.raises(ValueError, match=r"^constrained_softmax: out: "):
        burt_numba.constrained_softmax(there, out=logits)
    with pytest.raises(ValueError, match=r"^attention_softmax: mask: "):
        burt_numba.attention_softmax(there.view(1, 1, 4, -1), logits[:1].view(1, 1, 1, -1))


def test_read_only_interface():
    """A read-only input is only read; a read-only output is refused: numba/numba#2521."""

    class ReadOnly:
        def __init__(self, tensor):
            self.tensor = tensor
            interface = dict(tensor.__cuda_array_interface__)
            interface["data"] = (interface["data"][0], True)
            self.__cuda_array_interface__ = interface

    logits = normal(4, 100)
    expected = burt_numba.constrained_softmax(logits)
    out = torch.empty_like(logits)
    burt_numba.constrained_softmax(ReadOnly(logits), out=out)
    assert same_bits(out, expected)
    with pytest.raises(ValueError, match=r"^constrained_softmax: out: "):
        burt_numba.constrained_softmax(logits, out=ReadOnly(out))


# Random rows ---------------------------------------------------------------------------------------------------------


def test_100_000_random_rows():
    """Every size from 1 to 5000, 20 rows each: spreads 0.1 to 50, bounds 0.01 to 2, against float64."""
    rows, temperature_min = 20, float(np.float32(0.01))
    generator = torch.Generator("cuda").manual_seed(1)

    def log_uniform(low, high):
        exponents = torch.empty(rows, 5000, device="cuda").uniform_(np.log(low), np.log(high), generator=generator)
        return exponents.exp()

    bound_of_size, spread_of_size = log_uniform(0.01, 2.0), log_uniform(0.1, 50.0)
    errors = burt_numba.ErrorBuffer()
    worst = {"over": [], "under": [], "error": [], "reported": []}
    unreachable, nearly_unreachable = [], []

    for size in range(1, 5001):
        spread, bound = spread_of_size[:, size - 1], bound_of_size[:, size - 1].contiguous()
        logits = torch.randn(rows, size, generator=generator, device="cuda") * spread[:, None]
        temperature, reported = torch.empty(2, rows, device="cuda").unbind()
        out = burt_numba.constrained_softmax(
            logits, bound, temperature_out=temperature, entropy_out=reported, errors=errors
        )
        z, wanted = logits.double(), bound.double()
        measured = entropy(out)
        hot, cold = entropy(torch.softmax(z, -1)), entropy(torch.softmax(z / temperature_min, -1))
        reachable = cold <= wanted
        active = reachable & (hot > wanted + 1e-6)
        # Where even temperature_min is over the bound, the result must be the one at temperature_min.
        over = torch.where(cold <= wanted + 1e-6, measured - wanted, (temperature - temperature_min).abs().double())
        under = torch.where(active, wanted - measured - (1e-4 * wanted).clamp_min(1e-6), -torch.inf)
        worst["over"].append(over.max())
        worst["under"].append(under.max())
        worst["error"].append(relative_errors(out, torch.softmax(z / temperature.double()[:, None], -1)).max())
        worst["reported"].append(((reported - measured).abs() - 1e-5 * measured).max())
        unreachable.append((cold > wanted + 2e-6).sum())
        nearly_unreachable.append((cold > wanted).sum())

    assert torch.stack(worst["over"]).max() <= 1e-6
    assert torch.stack(worst["under"]).max() <= 0
    assert torch.stack(worst["error"]).max() <= 5e-6
    assert torch.stack(worst["reported"]).max() <= 2e-6
    counts = {int(code): count for code, count in errors.counts.items()}
    assert set(counts) <= {3}
    assert sum(unreachable) <= counts.get(3, 0) <= sum(nearly_unreachable)


def test_torch_comparison_agrees_with_the_reference():
    """The comparisons of this file rest on PyTorch in float64; the reference is what they stand for."""
    logits = normal(5, 300)
    expected = reference.constrained_softmax(logits.cpu().numpy(), 20.0)
    assert torch.softmax(logits.double(), -1).cpu().numpy() == pytest.approx(expected.probabilities, rel=1e-12)
    assert entropy(torch.softmax(logits.double(), -1)).cpu().numpy() == pytest.approx(expected.entropy, rel=1e-12)
