"""Arrays past 2^31 elements, made, checked and thrown away on the device. Each test says what it allocates."""

import math

import numpy as np
import pytest

import burt_numba
from burt_numba import reference

pytestmark = [pytest.mark.gpu_only("gigabytes of device memory"), pytest.mark.large]
torch = pytest.importorskip("torch")
GIB = 2**30


@pytest.fixture(autouse=True)
def memory_given_back():
    yield
    torch.cuda.empty_cache()


def needs(gibibytes):
    free, _ = torch.cuda.mem_get_info()
    if free < gibibytes * GIB:
        pytest.skip(f"needs {gibibytes} GiB of free device memory, found {free / GIB:.1f}")


def relative_error(out, expected):
    return np.linalg.norm(out.double().cpu().numpy() - expected) / np.linalg.norm(expected)


def test_more_than_2_to_the_32_elements():
    """Beyond 4 * 1024^3 elements the last rows came back as zeros: pytorch/pytorch#84144. 16 GiB in, 16 GiB out."""
    needs(40)
    rows, num_classes = 85_632, 50_259
    logits = torch.randn(rows, num_classes, device="cuda")
    logits *= 3
    # A clear lead: two near-equal leaders would put a row out of reach of the bound.
    logits.scatter_add_(-1, logits.argmax(-1, keepdim=True), torch.ones(rows, 1, device="cuda"))
    out = torch.full_like(logits, torch.nan)
    temperature = torch.empty(rows, device="cuda")
    errors = burt_numba.ErrorBuffer()
    burt_numba.constrained_softmax(logits, out=out, temperature_out=temperature, errors=errors)
    checked = {0, rows - 5, rows - 4, rows - 3, rows - 2, rows - 1}
    for element in (2**31, 2**32):
        checked |= {element // num_classes + step for step in (-1, 0, 1)}
    for row in sorted(checked):
        z, warmth = logits[row].cpu().numpy(), temperature[row].item()
        expected = reference.constrained_softmax(z, temperature=warmth)
        assert relative_error(out[row], expected.probabilities) <= 5e-6, f"row {row}"
        assert 0.2 - 2e-5 <= reference.entropy(out[row].cpu().numpy()) <= 0.2 + 1e-6, f"row {row}"
    for part in out.split(4096):
        assert (part.sum(-1, dtype=torch.float64) - 1).abs().max() <= 1e-5
    assert errors.counts == {}


@pytest.mark.parametrize("num_classes", [2**31 - 1, 2**31 + 8])
def test_one_row_of_2_to_the_31_classes(num_classes):
    """The row length was a 32-bit number, and the inner index wrapped: pytorch/pytorch#191565. 8 GiB in, 8 GiB out."""
    needs(20)
    logits = torch.full((1, num_classes), -torch.inf, device="cuda")
    places = torch.tensor([0, 1, num_classes - 2, num_classes - 1], device="cuda")
    logits[0, places] = torch.tensor([3.0, 2.0, 1.0, 0.0], device="cuda")
    out, temperature = torch.full_like(logits, torch.nan), torch.empty(1, device="cuda")
    burt_numba.constrained_softmax(logits, out=out, temperature_out=temperature)
    assert temperature.item() == pytest.approx(0.327817, rel=1e-3)
    assert out[0, places].cpu().numpy() == pytest.approx([0.952669, 0.045096, 0.002135, 0.000101], abs=5e-5)
    assert sum(torch.count_nonzero(part).item() for part in out[0].split(2**28)) == 4

    logits[0, num_classes - 3] = torch.nan
    errors = burt_numba.ErrorBuffer()
    burt_numba.constrained_softmax(logits, out=out, errors=errors)
    torch.cuda.synchronize()
    assert (errors.counts, errors.first_index) == ({1: 1}, num_classes - 3)


def test_2_to_the_28_rows():
    """2^28 rows of 9 classes: an invalid launch, or a thread index that wrapped past 2^31. 9 GiB in, 9 GiB out.

    tensorflow/tensorflow#61639, numba/numba#9229
    """
    needs(24)
    rows, num_classes, period = 2**28, 9, 7
    random = np.random.default_rng(0)
    pattern = torch.tensor(random.standard_normal((period, num_classes)) * 3, dtype=torch.float32, device="cuda")
    logits = pattern.repeat(math.ceil(rows / period), 1)[:rows]
    answer = burt_numba.constrained_softmax(pattern)
    out = torch.full_like(logits, torch.nan)
    burt_numba.constrained_softmax(logits, out=out)
    whole = rows // period * period
    for part in out[:whole].view(-1, period * num_classes).split(2**22):
        assert (part == answer.view(1, -1)).all()
    assert (out[whole:] == answer[: rows - whole]).all()

    scores = logits.view(1, 1, rows, num_classes)
    answer = burt_numba.attention_softmax(pattern.view(1, 1, period, -1))
    burt_numba.attention_softmax(scores, out=out.view(scores.shape))
    for part in out[:whole].view(-1, period * num_classes).split(2**22):
        assert (part == answer.view(1, -1)).all()
    assert (out[whole:] == answer[0, 0, : rows - whole]).all()


def test_more_queries_than_a_grid_axis_takes():
    """A row count over 65,535 on grid.y was an invalid launch: ml-explore/mlx#2267. 16 GiB in, 16 GiB out."""
    needs(40)
    size = 65_537
    scores = torch.zeros(1, 1, size, size, device="cuda")
    out = torch.full_like(scores, torch.nan)
    burt_numba.attention_softmax(scores, None, True, out=out)
    for query in (0, 1, 32_768, 65_534, 65_535, 65_536):
        row = out[0, 0, query]
        assert (row[: query + 1] == row[0]).all() and (row[query + 1 :] == 0).all()
        assert row[0].item() == pytest.approx(1 / (query + 1), rel=1e-6)
    for part in out[0, 0].split(4096):
        assert (part.sum(-1, dtype=torch.float64) - 1).abs().max() <= 1e-5


def test_long_context_in_place_between_guard_cells():
    """Out-of-bounds reads at a context of about 40,000: ggml-org/llama.cpp#6948. 6.3 GiB in place."""
    needs(10)
    size, guard = 40_961, 1024
    memory = torch.full((size * size + 2 * guard,), torch.nan, device="cuda")
    scores = memory[guard:-guard].view(1, 1, size, size)
    scores.normal_(0, 3, generator=torch.Generator("cuda").manual_seed(0))
    mask = torch.randn(1, 1, 1, size, device="cuda")
    mask[..., ::5] = -torch.inf
    checked = [0, 20_480, 40_960]
    expected = reference.attention_softmax(scores[:, :, checked].cpu().numpy(), mask.cpu().numpy()).probabilities
    errors = burt_numba.ErrorBuffer()
    burt_numba.attention_softmax(scores, mask, out=scores, errors=errors)
    for place, row in enumerate(checked):
        assert relative_error(scores[0, 0, row], expected[0, 0, place]) <= 5e-6
    assert memory[:guard].isnan().all() and memory[-guard:].isnan().all()
    for part in scores[0, 0].split(4096):
        assert (part.sum(-1, dtype=torch.float64) - 1).abs().max() <= 1e-5
    torch.cuda.synchronize()
    assert errors.counts == {}


@pytest.mark.parametrize(("contexts", "dims"), [(9_000_000, 256), (2**26 + 5, 33)])
@pytest.mark.parametrize("bound", [0.2, None])
def test_keys_and_values_past_2_to_the_31_elements(contexts, dims, bound):
    """An offset of 32 bits wraps within one head: pytorch/pytorch#191565. 4.3 GiB of keys, 4.3 GiB of values."""
    needs(12)
    keys = torch.zeros((1, 1, contexts, dims), dtype=torch.float16, device="cuda")
    values = torch.zeros_like(keys)
    places = torch.tensor([0, 2**31 // dims - 1, 2**31 // dims, 2**31 // dims + 1, contexts - 1], device="cuda")
    scores = torch.tensor([60.0, 59.0, 58.5, 61.0, 60.5], device="cuda")
    keys[0, 0, places, 0], keys[0, 0, places, -1] = scores.half(), 0
    values[0, 0, places] = torch.randn((5, dims), device="cuda").half()
    query = torch.zeros((1, 1, 3, dims), dtype=torch.float16, device="cuda")
    query[..., 0] = torch.tensor([1.0, 0.9, 0.8])
    out, temperature = torch.full_like(query, torch.nan), torch.empty((1, 1, 3), device="cuda")
    errors = burt_numba.ErrorBuffer()
    burt_numba.biencoder_attention(query, keys, values, 1.0, bound, temperature_out=temperature, out=out, errors=errors)
    torch.cuda.synchronize()
    # The others are 45 below the best: all of them together carry less than 1e-11 of the weight.
    expected = reference.biencoder_attention(
        *(array.cpu().numpy() for array in (query, keys[:, :, places], values[:, :, places])),
        1.0,
        bound,
        temperature=temperature.cpu().numpy(),
    )
    assert relative_error(out, expected.output) <= 2e-3
    assert errors.counts == {}
    keys[0, 0, contexts - 1, 1] = torch.nan
    burt_numba.biencoder_attention(query, keys, values, 1.0, bound, out=out, errors=errors)
    torch.cuda.synchronize()
    assert (errors.counts, errors.first_index) == ({1: 1}, (contexts - 1) * dims + 1)


def test_2_to_the_28_queries():
    """More rows than a launch takes, and more elements than 2^31. 4 GiB of queries, 4 GiB of results."""
    needs(12)
    rows, dims, period = 2**28 + 3, 8, 7
    pattern = torch.tensor(np.random.default_rng(0).standard_normal((period, dims)) * 2, device="cuda").half()
    contexts = [torch.randn((1, 1, 3, dims), device="cuda").half() for _ in range(2)]
    query = pattern.repeat(math.ceil(rows / period), 1)[:rows].view(1, 1, rows, dims)
    errors = burt_numba.ErrorBuffer()
    answer = burt_numba.biencoder_attention(pattern.view(1, 1, period, dims), *contexts, errors=errors).view(period, -1)
    out = torch.full_like(query, torch.nan)
    burt_numba.biencoder_attention(query, *contexts, out=out, errors=errors)
    whole = rows // period * period
    flat = out.view(rows, dims)
    for part in flat[:whole].view(-1, period * dims).split(2**22):
        assert torch.allclose(part, answer.view(1, -1).expand_as(part), rtol=2e-3, atol=1e-4)
    assert torch.allclose(flat[whole:], answer[: rows - whole], rtol=2e-3, atol=1e-4)


def test_partials_and_results_past_2_to_the_31_elements():
    """tokens * heads * dims overflowed 32 bits in a merge: vllm-project/vllm#45500. 16.3 GiB in, 16 GiB out."""
    needs(36)
    M, H, D, period = 1_048_580, 32, 128, 251
    partials = torch.empty((M, H, 1, D + 2), device="cuda")
    numbers = (torch.arange(M, device="cuda") % period).float()
    partials[..., :D] = 2 * numbers.view(M, 1, 1, 1)
    partials[..., D], partials[..., D + 1] = 3, 2
    out = torch.full((M, H, D), torch.nan, device="cuda")
    lengths, errors = torch.ones(M, dtype=torch.int32, device="cuda"), burt_numba.ErrorBuffer()
    burt_numba.flash_decoding_reduce(partials, lengths, out=out, errors=errors)
    for part, expected in zip(out.split(65_536), numbers.split(65_536), strict=True):
        assert torch.equal(part, expected.view(-1, 1, 1).expand_as(part))
    partials[M - 2, H - 1, 0, 5] = torch.nan
    burt_numba.flash_decoding_reduce(partials, lengths, out=out, errors=errors)
    torch.cuda.synchronize()
    assert (errors.counts, errors.first_index) == ({1: 1}, ((M - 2) * H + H - 1) * (D + 2) + 5)
    assert out[M - 2, H - 1, 5].item() == 0


@pytest.mark.parametrize(("keys", "dims"), [(2**23 + 5, 256), (2**26 + 5, 33)])
def test_caches_past_2_to_the_31_elements(keys, dims):
    """An offset of 32 bits wraps within one head. 4.3 GiB of keys, 4.3 GiB of values, or more."""
    needs(14)
    cache, values = (torch.zeros((1, 1, keys, dims), dtype=torch.float16, device="cuda") for _ in range(2))
    places = torch.tensor([0, 2**31 // dims - 1, 2**31 // dims, 2**31 // dims + 1, keys - 1], device="cuda")
    cache[0, 0, places, 0] = torch.tensor([60.0, 59.0, 58.5, 61.0, 60.5], device="cuda").half()
    values[0, 0, places] = torch.randn((5, dims), device="cuda").half()
    query = torch.zeros((1, 2, dims), dtype=torch.float16, device="cuda")
    query[0, :, 0] = torch.tensor([1.0, 0.9])
    lengths, errors = torch.tensor([keys], device="cuda"), burt_numba.ErrorBuffer()
    # The others are 45 below the best: all of them together carry less than 1e-11 of the weight.
    expected = reference.flash_decoding(
        *(array.cpu().numpy() for array in (query, cache[:, :, places], values[:, :, places])), np.array([5]), 1.0
    )
    for chunk_size in (None, 1000):
        out = burt_numba.flash_decoding(query, cache, values, lengths, 1.0, chunk_size=chunk_size, errors=errors)
        torch.cuda.synchronize()
        assert relative_error(out, expected.output) <= 2e-3
        assert errors.counts == {}
    cache[0, 0, keys - 1, 1] = torch.nan
    burt_numba.flash_decoding(query, cache, values, lengths, 1.0, errors=errors)
    torch.cuda.synchronize()
    assert (errors.counts, errors.first_index) == ({1: 1}, (keys - 1) * dims + 1)


def test_partials_past_2_to_the_31_elements_of_one_call():
    """flash_decoding_chunk writes 2^31 and more: 8.6 GiB of partials, of keys that lie on one another."""
    needs(12)
    keys, dims = 2**26 + 3, 32
    cache = torch.randn((1, 1, 64, dims), device="cuda")
    one = cache[:, :, :1].expand(1, 1, keys, dims)
    query, lengths = torch.ones((1, 1, dims), device="cuda"), torch.tensor([keys], device="cuda")
    errors = burt_numba.ErrorBuffer()
    partials = burt_numba.flash_decoding_chunk(query, one, one, lengths, 1, errors=errors)
    torch.cuda.synchronize()
    row = partials[0, 0, 0]
    assert torch.allclose(row[:dims], cache[0, 0, 0], rtol=1e-6) and row[dims + 1].item() == 1
    for part in partials[0, 0].split(2**22):
        assert torch.equal(part, row.expand_as(part))
    assert errors.counts == {}
