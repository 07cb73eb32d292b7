"""How attention_softmax is called: outputs, layouts, events, refusals, and the documented launch by hand."""

import numpy as np
import pytest
from support import (
    LIMITS,
    NO_EVENT,
    ON_GPU,
    Guarded,
    Outcome,
    assert_attention,
    cases,
    check_attention,
    normal,
    one_warning,
    poisoned,
    relative_error,
    run_attention,
    to_host,
    to_target,
)

import burt_numba
from burt_numba import kernels, reference
from burt_numba.backend import cuda

# Outputs -------------------------------------------------------------------------------------------------------------


def test_plain_call_allocates_the_result():
    scores = normal((1, 2, 3, 40))
    out = burt_numba.attention_softmax(to_target(scores))
    assert type(out) is type(to_target(scores))
    assert to_host(out).tobytes() == run_attention(scores).out.tobytes()


def test_host_arrays_in_and_out():
    scores, mask = normal((2, 1, 3, 9)), normal((2, 1, 1, 9), spread=1.0)
    before = scores.copy()
    out = burt_numba.attention_softmax(scores, mask)
    assert isinstance(out, np.ndarray) and out.tobytes() == run_attention(scores, mask).out.tobytes()
    assert scores.tobytes() == before.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("keys", cases([7, 300], [1100, 5000, 50_001]))
@pytest.mark.parametrize("causal", [False, True])
def test_in_place(dtype, keys, causal):
    scores, mask = normal((1, 1, 3, keys), dtype=dtype), normal((1, 1, 1, keys), spread=1.0, dtype=dtype)
    offset = keys // 2 if causal else None
    expected = run_attention(scores, mask, causal, causal_offset=offset).out
    array = to_target(scores.copy())
    assert burt_numba.attention_softmax(array, to_target(mask), causal, causal_offset=offset, out=array) is array
    assert to_host(array).tobytes() == expected.tobytes()


@pytest.mark.parametrize("keys", cases([1, 5, 33, 130, 132, 300, 1030], [4097, 4100, 40_001, 40_004]))
@pytest.mark.parametrize("skew", [0, 1, 2, 3])
def test_nothing_outside_the_arrays_is_read_or_written(keys, skew):
    """Rounded-up threads wrote past the array: numba/numba#7284. A NaN that was read would be recorded."""
    scores, mask = normal((1, 1, 2, keys)), normal((1, 1, 1, keys), spread=1.0)
    check_attention(scores, mask, skew=skew)
    check_attention(scores, mask > 0, True, causal_offset=keys // 2, skew=skew)


@pytest.mark.parametrize("skew", range(8))
def test_nothing_outside_float16_arrays_is_read_or_written(skew):
    for keys in (131, 136):
        scores, mask = normal((1, 1, 2, keys), dtype=np.float16), normal((1, 1, 1, keys), dtype=np.float16)
        check_attention(scores, mask, skew=skew)
        check_attention(scores, mask.astype(np.float32), skew=skew)
        check_attention(scores, mask > 0, skew=skew)


def test_validate_output_changes_nothing_that_is_right():
    scores = normal((1, 1, 4, 50))
    scores[..., 2, :] = -np.inf
    plain, validated = run_attention(scores), run_attention(scores, validate_output=True)
    assert plain.out.tobytes() == validated.out.tobytes()
    assert plain.counts == validated.counts == {}


def test_on_a_stream():
    scores, stream = normal((1, 1, 3, 40)), cuda.stream()
    array = to_target(scores)
    cuda.synchronize()
    out = burt_numba.attention_softmax(array, stream=stream)
    stream.synchronize()
    assert to_host(out).tobytes() == run_attention(scores).out.tobytes()


# Layouts -------------------------------------------------------------------------------------------------------------

as_strided = np.lib.stride_tricks.as_strided

LAYOUTS = {
    "keys and queries swapped": lambda: normal((2, 3, 17, 17)).transpose(0, 1, 3, 2),
    "heads and queries swapped": lambda: normal((2, 5, 3, 40)).transpose(0, 2, 1, 3),
    "reversed axes": lambda: normal((40, 3, 2, 2)).T,
    "padded rows": lambda: normal((2, 2, 3, 48))[..., :40],
    "padded by one": lambda: normal((2, 2, 3, 41))[..., :40],
    "first key dropped": lambda: normal((2, 2, 3, 41))[..., 1:],
    "every axis cut": lambda: normal((3, 4, 5, 80))[::2, 1:3, ::2, ::2],
    "queries backwards": lambda: normal((1, 2, 3, 40))[:, :, ::-1],
    "keys backwards": lambda: normal((1, 2, 3, 40))[..., ::-1],
    "one head for all": lambda: np.broadcast_to(normal((2, 1, 3, 40)), (2, 2, 3, 40)),
    "one row for all": lambda: np.broadcast_to(normal((40,)), (2, 2, 3, 40)),
    "odd offset": lambda: normal((241,))[1:].reshape(1, 2, 3, 40),
    "float16, odd offset": lambda: normal((241,), dtype=np.float16)[1:].reshape(1, 2, 3, 40),
    "float16, swapped": lambda: normal((1, 2, 17, 17), dtype=np.float16).transpose(0, 1, 3, 2),
    "size-1 axes with odd strides": lambda: as_strided(normal((40,)), (1, 1, 1, 40), (5237, 51, 13, 4)),
    "one key with an odd stride": lambda: as_strided(normal((6,)), (1, 2, 3, 1), (445, 12, 4, 51)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_scores(layout):
    """Strided inputs gave garbage once a fast path stopped looking at strides: pytorch/pytorch#112577.

    Axes of size 1 carry any stride: numba/numba#8708.
    """
    scores = LAYOUTS[layout]()
    before = scores.copy()
    out, packed = check_attention(scores).out, run_attention(before).out
    assert relative_error(out, packed) <= LIMITS[out.dtype.name]
    check_attention(scores, None, True, causal_offset=1)
    assert (scores == before).all()


MASK_LAYOUTS = {
    "padded": lambda: normal((2, 1, 1, 12))[..., :9],
    "every other key": lambda: normal((2, 1, 1, 18))[..., ::2],
    "odd offset": lambda: normal((19,))[1:].reshape(2, 1, 1, 9),
    "keys and queries swapped": lambda: normal((2, 1, 9, 4)).transpose(0, 1, 3, 2),
    "batch expanded": lambda: np.broadcast_to(normal((1, 1, 4, 9)), (2, 3, 4, 9)),
    "keys backwards": lambda: normal((2, 1, 1, 9))[..., ::-1],
    "bool, every other key": lambda: (normal((2, 1, 1, 18)) > -2)[..., ::2],
    "bool, swapped": lambda: (normal((2, 3, 9, 4)) > -2).transpose(0, 1, 3, 2),
    "size-1 axes with odd strides": lambda: as_strided(normal((9,)), (1, 1, 1, 9), (51, 13, 445, 4)),
}


@pytest.mark.parametrize("layout", MASK_LAYOUTS)
def test_layouts_of_the_mask(layout):
    check_attention(normal((2, 3, 4, 9)), MASK_LAYOUTS[layout]())


def test_read_only_inputs():
    """An array that is only read was refused for being read-only: numba/numba#2521."""
    scores, mask = normal((1, 2, 3, 9)), normal((1, 1, 1, 9))
    expected = run_attention(scores, mask).out
    scores.flags.writeable = mask.flags.writeable = False
    assert burt_numba.attention_softmax(scores, mask).tobytes() == expected.tobytes()


# Events on the default path ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "code"), [(np.nan, 1), (np.inf, 2)])
def test_events_become_one_warning(value, code):
    scores = normal((2, 2, 3, 10))
    scores[1, 0, 2, 4:6] = value
    with one_warning("attention_softmax", {code: 2}, (84, code)):
        out = burt_numba.attention_softmax(to_target(scores))
    assert np.isfinite(to_host(out)).all()


def test_events_of_the_mask_become_one_warning():
    mask = np.zeros((2, 1, 1, 10), np.float32)
    mask[1, ..., 3] = np.nan
    with one_warning("attention_softmax", {1: 3}, (33, 1)):
        burt_numba.attention_softmax(to_target(normal((2, 1, 3, 10))), to_target(mask))


def test_error_buffer_collects_instead_of_warning():
    scores = normal((1, 1, 3, 10))
    scores[..., 2, 1] = np.inf
    errors = burt_numba.ErrorBuffer()
    for calls in (1, 2):
        to_host(burt_numba.attention_softmax(to_target(scores), errors=errors))
        assert (errors.counts, errors.first_index, errors.code) == ({2: calls}, 21, 2)
    burt_numba.check()


def test_masks_are_not_events():
    scores = normal((1, 1, 4, 4))
    scores[..., 0] = -np.inf
    burt_numba.attention_softmax(to_target(scores), to_target(np.float32([-np.inf, 0, -1e9, 0])), True)
    burt_numba.check()


# Refusals ------------------------------------------------------------------------------------------------------------

SCORES = normal((2, 3, 4, 5))


def refused(exception, argument, *args, contains=(), **kwargs):
    """The call raises before anything runs, and says which argument, what it was and what it should have been."""
    with pytest.raises(exception, match=f"^attention_softmax: {argument}: ") as caught:
        burt_numba.attention_softmax(*args, **kwargs)
    for text in contains:
        assert text in str(caught.value)
    if isinstance(caught.value, burt_numba.BurtDimensionError):
        assert caught.value.code == 6


@pytest.mark.parametrize("scores", [[[[[1.0]]]], None, "scores"])
def test_refuses_what_is_no_array(scores):
    refused(TypeError, "scores", scores, contains=[type(scores).__name__])


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64])
def test_refuses_types(dtype):
    refused(TypeError, "scores", np.zeros((1, 1, 2, 2), dtype), contains=[np.dtype(dtype).name, "float32", "float16"])


def test_refuses_float64_and_shows_the_conversion():
    refused(TypeError, "scores", np.zeros((1, 1, 2, 2)), contains=["float64", ".astype(np.float32)"])


@pytest.mark.parametrize("shape", [(), (5,), (4, 5), (3, 4, 5), (1, 2, 3, 4, 5)])
def test_refuses_other_ranks(shape):
    refused(burt_numba.BurtDimensionError, "scores", np.zeros(shape, np.float32), contains=["4", str(shape)])


@pytest.mark.parametrize("shape", [(4,), (2, 1, 1, 4), (3, 1, 1, 5), (2, 3, 4, 5, 1), (1, 2, 3, 4, 5), (0,), (2, 1, 4)])
def test_refuses_masks_that_do_not_broadcast(shape):
    mask = np.zeros(shape, np.float32)
    refused(burt_numba.BurtDimensionError, "mask", SCORES, mask, contains=[str(shape), "(2, 3, 4, 5)"])


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.uint8])
def test_refuses_masks_of_another_type(dtype):
    refused(TypeError, "mask", SCORES, np.zeros(5, dtype), contains=[np.dtype(dtype).name, "bool"])


def test_refuses_a_mask_that_is_no_array():
    refused(TypeError, "mask", SCORES, [0.0] * 5, contains=["list"])


def test_refuses_causal_without_an_offset_where_it_is_unclear():
    refused(burt_numba.BurtDimensionError, "causal_offset", SCORES, None, True, contains=["4", "5"])


@pytest.mark.parametrize("offset", [0, 1, -1])
def test_refuses_an_offset_without_causal(offset):
    words = ["causal=True", "no effect", str(offset)]
    refused(burt_numba.BurtDimensionError, "causal_offset", SCORES, causal_offset=offset, contains=words)
    with pytest.raises(ValueError, match="causal_offset: has no effect without causal"):
        burt_numba.reference.attention_softmax(SCORES, causal_offset=offset)


def test_refuses_outputs():
    dimension = burt_numba.BurtDimensionError
    refused(dimension, "out", SCORES, out=np.zeros((2, 3, 5, 4), np.float32), contains=["(2, 3, 5, 4)"])
    refused(TypeError, "out", SCORES, out=np.zeros((2, 3, 4, 5), np.int32), contains=["int32"])
    refused(TypeError, "out", SCORES, out=[0.0])
    swapped = np.zeros((2, 3, 5, 4), np.float32).transpose(0, 1, 3, 2)
    refused(ValueError, "out", SCORES, out=swapped, contains=["contiguous"])
    padded = np.zeros((2, 3, 4, 6), np.float32)[..., :5]
    refused(ValueError, "out", SCORES, out=padded, contains=["contiguous"])
    read_only = np.zeros((2, 3, 4, 5), np.float32)
    read_only.flags.writeable = False
    refused(ValueError, "out", SCORES, out=read_only)


def test_refuses_an_output_that_partly_overlaps_the_input():
    memory = to_target(normal((200,)))
    before = to_host(memory).copy()
    scores, shifted = memory[:120].reshape(2, 3, 4, 5), memory[5:125].reshape(2, 3, 4, 5)
    refused(ValueError, "out", scores, out=shifted, contains=["overlap"])
    mask = memory[120:130].reshape(2, 1, 1, 5)
    refused(ValueError, "out", to_target(SCORES), mask, out=memory[10:130].reshape(2, 3, 4, 5), contains=["overlap"])
    assert to_host(memory).tobytes() == before.tobytes()


def test_refusals_leave_the_output_alone():
    out = poisoned((2, 3, 4, 5))
    with pytest.raises(ValueError):
        burt_numba.attention_softmax(to_target(SCORES), None, True, out=out)
    assert np.isnan(to_host(out)).all()


def test_refuses_bfloat16_by_name():
    """bfloat16 and float16 export the same type string, so one can be read as the other: pytorch/pytorch#129621."""
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((1, 1, 2, 2), dtype=torch.bfloat16, device="cuda" if ON_GPU else "cpu")
    refused(TypeError, "scores", tensor, contains=["bfloat16"])


# The documented launch, by hand --------------------------------------------------------------------------------------


def launch_by_hand(scores, mask, causal, offset, block, shared_bytes):
    batch_size, num_heads, queries, _ = scores.shape
    errors = np.zeros(8, np.int64)
    errors[0] = NO_EVENT
    out, errors = Guarded(np.full(scores.shape, np.nan, scores.dtype), 777), to_target(errors)
    kernels.attention_softmax_kernel[(batch_size * num_heads, queries), block, 0, shared_bytes](
        Guarded(scores, np.nan).array,
        out.array,
        to_target(np.empty((0, 0, 0, 0), np.float32) if mask is None else mask),
        batch_size,
        num_heads,
        queries,
        causal,
        offset,
        errors,
    )
    words = to_host(errors)
    first = None if words[0] == NO_EVENT else divmod(int(words[0]), 8)
    return Outcome(out.result(), None, None, {code: int(words[code]) for code in range(1, 8) if words[code]}, first)


def whole_warps(threads):
    return -(-threads // 32) * 32


@pytest.mark.parametrize("keys", cases([1, 33, 100, 257], [1024, 1025, 2048, 2049, 5000]))
def test_documented_launch(keys):
    scores, mask = normal((2, 1, 2, keys), seed=keys), normal((2, 1, 1, keys), spread=1.0)
    block = whole_warps(min(keys, 1024))
    assert_attention(launch_by_hand(scores, mask, False, 0, block, 8), scores, mask)


@pytest.mark.parametrize("size", cases([1, 5, 33], [128, 500]))
def test_documented_launch_causal(size):
    scores = normal((1, 1, size, size), seed=size)
    outcome = launch_by_hand(scores, None, True, 0, whole_warps(min(size, 1024)), 8)
    assert_attention(outcome, scores, None, True)


@pytest.mark.parametrize("block", [32, 64, 96, 128, 160, 256])
@pytest.mark.parametrize("shared_bytes", [0, 8])
def test_documented_kernel_with_any_block(block, shared_bytes):
    scores, mask = normal((1, 2, 2, 200)), normal((1, 2, 1, 200), spread=1.0)
    outcome = launch_by_hand(scores, mask, True, 150, block, shared_bytes)
    assert_attention(outcome, scores, mask, True, causal_offset=150)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("mask_dtype", [np.float32, np.bool_])
def test_documented_kernel_events(dtype, mask_dtype):
    scores, mask = normal((2, 1, 3, 50), dtype=dtype), normal((2, 1, 3, 1)).astype(mask_dtype)
    scores[0, 0, 1, 7:9], scores[1, 0, 0, 3], scores[1, 0, 2] = np.nan, np.inf, -np.inf
    outcome = launch_by_hand(scores, mask, False, 0, 64, 8)
    expected = reference.attention_softmax(scores, mask)
    assert expected.counts == {1: 2, 2: 1} and expected.first == (57, 1)
    assert_attention(outcome, scores, mask)
