"""What sparse_moe_dispatch and sparse_moe_combine refuse before anything runs, and what they say."""

from types import SimpleNamespace

import numpy as np
import pytest
from moe_support import OUTPUTS, Routing, expected_dispatch, output_contents, random_routing

import burt_numba
from burt_numba import BurtDimensionError

pytestmark = pytest.mark.simulator_only("the same checks on the host for either target, here of host arrays")

ROUTING = random_routing(6, 5, 4, 2)
CAPACITY = 6
DISPATCHED = expected_dispatch(ROUTING, CAPACITY)
EXPERT_OUTPUTS = np.zeros((4, CAPACITY, 5), np.float32)


def expect(exception, function, argument, contains, call):
    with pytest.raises(exception, match=f"^{function}: {argument}: ") as caught:
        call()
    for text in contains:
        assert text in str(caught.value)
    if isinstance(caught.value, BurtDimensionError):
        assert caught.value.code == 6


def refused(exception, argument, *, contains=(), capacity=CAPACITY, options=None, **changes):
    """The call raises before anything runs, and says which argument, what it was and what it should have been."""
    inputs = ROUTING._asdict() | changes
    outputs = output_contents(ROUTING, CAPACITY) | (options or {})
    arrays = [value for value in (*inputs.values(), *outputs.values()) if isinstance(value, np.ndarray)]
    before = [array.tobytes() for array in arrays]
    expect(
        exception,
        "sparse_moe_dispatch",
        argument,
        contains,
        lambda: burt_numba.sparse_moe_dispatch(*inputs.values(), capacity, **outputs),
    )
    assert [array.tobytes() for array in arrays] == before


def combine_refused(exception, argument, *, contains=(), outputs=EXPERT_OUTPUTS, dispatch=DISPATCHED, **options):
    out = options.setdefault("out", np.full((6, 5), np.nan, np.float32))
    before = out.tobytes() if isinstance(out, np.ndarray) else None
    expect(
        exception,
        "sparse_moe_combine",
        argument,
        contains,
        lambda: burt_numba.sparse_moe_combine(outputs, dispatch, **options),
    )
    assert before is None or out.tobytes() == before


# Inputs of dispatch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", Routing._fields)
@pytest.mark.parametrize("value", [[[1.0]], None, "tokens", 3.5])
def test_refuses_what_is_no_array(name, value):
    refused(TypeError, name, contains=[type(value).__name__], **{name: value})


@pytest.mark.parametrize("name", ["input", "routing_weights"])
@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8, np.bool_, np.complex64])
def test_refuses_types(name, dtype):
    wrong = getattr(ROUTING, name).astype(dtype)
    hint = [".astype(np.float32)"] if dtype is np.float64 else []
    refused(TypeError, name, contains=["float32 or float16", np.dtype(dtype).name, *hint], **{name: wrong})


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16, np.uint8, np.uint32, np.uint64, np.bool_])
def test_refuses_types_of_indices(dtype):
    """Never read as another type: ROCm/aiter#5255, vllm-project/vllm#55147."""
    wrong = ROUTING.top_k_indices.astype(dtype)
    hint = [] if dtype is np.bool_ else ["(convert with array.astype(np.int32)"]
    refused(TypeError, "top_k_indices", contains=["int32 or int64", np.dtype(dtype).name, *hint], top_k_indices=wrong)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("input", (5,), "[T, d]"),
        ("input", (6, 5, 1), "[T, d]"),
        ("input", (), "[T, d]"),
        ("routing_weights", (4,), "[T, E]"),
        ("routing_weights", (5, 4), "(6, 4)"),
        ("routing_weights", (6, 4, 1), "[T, E]"),
        ("routing_weights", (6, 0), "expert"),
        ("top_k_indices", (6,), "[T, k]"),
        ("top_k_indices", (5, 2), "(6, 2)"),
        ("top_k_indices", (6, 2, 1), "[T, k]"),
    ],
)
def test_refuses_shapes(name, shape, expected):
    wrong = np.zeros(shape, getattr(ROUTING, name).dtype)
    refused(BurtDimensionError, name, contains=[expected, str(shape)], **{name: wrong})


@pytest.mark.parametrize(
    ("T", "d", "experts", "k", "name", "what"),
    [
        (2**29 + 1, 1, 1, 2, "top_k_indices", "T and T k"),
        (2**30 + 1, 1, 1, 0, "top_k_indices", "T and T k"),
        (0, 1, 2**31, 1, "routing_weights", "E"),
        (0, 2**31, 1, 1, "input", "d"),
        (2**26, 128 * 32 + 1, 1, 1, "input", r"T ceil\(d / 128\)"),
    ],
)
def test_refuses_sizes_beyond_32_bits(T, d, experts, k, name, what):
    """Of memory that is never touched: one element for all."""
    arrays = [
        np.broadcast_to(np.zeros((1, 1), dtype), shape)
        for dtype, shape in ((np.float32, (T, d)), (np.float32, (T, experts)), (np.int32, (T, k)))
    ]
    with pytest.raises(BurtDimensionError, match=f"^sparse_moe_dispatch: {name}: expected {what} of at most "):
        burt_numba.sparse_moe_dispatch(*arrays, 1)


@pytest.mark.parametrize("capacity", [2**60, 2**63, 2**70])
@pytest.mark.parametrize("d", [0, 3])
def test_refuses_capacities_beyond_any_memory(capacity, d):
    tokens = np.ones((6, d), np.float32)
    refused(BurtDimensionError, "expert_capacity", contains=[str(capacity)], capacity=capacity, input=tokens)


@pytest.mark.parametrize("capacity", [-1, -(2**40)])
def test_refuses_negative_capacities(capacity):
    """expert_capacity < 0: deepspeedai/DeepSpeed#8155."""
    refused(BurtDimensionError, "expert_capacity", capacity=capacity, contains=[str(capacity)])


@pytest.mark.parametrize("capacity", [1.5, "3", [3], np.float32(2), np.array([1, 2])])
def test_refuses_capacities_that_are_no_integers(capacity):
    refused(TypeError, "expert_capacity", capacity=capacity, contains=["integer", type(capacity).__name__])


@pytest.mark.parametrize("name", ["deterministic", "validate_output"])
@pytest.mark.parametrize("value", ["no", None, 1.0, np.array([True, False])])
def test_refuses_what_is_neither_true_nor_false(name, value):
    refused(TypeError, name, contains=["True or False"], options={name: value})


@pytest.mark.parametrize("value", ["abc", {}, 3])
def test_refuses_other_error_buffers(value):
    refused(TypeError, "errors", contains=[type(value).__name__], options={"errors": value})
    combine_refused(TypeError, "errors", contains=[type(value).__name__], errors=value)


def test_refuses_a_stream_that_is_none():
    with pytest.raises(TypeError, match="stream: expected a stream of Numba, CuPy, PyTorch"):
        burt_numba.sparse_moe_dispatch(*ROUTING, CAPACITY, stream="abc")


# Outputs of dispatch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OUTPUTS)
def test_refuses_outputs(name):
    right = output_contents(ROUTING, CAPACITY)[name]
    shape, dtype = right.shape, right.dtype

    def refuses(exception, value, *texts):
        refused(exception, name, contains=texts, options={name: value})

    refuses(BurtDimensionError, np.zeros((*shape[:-1], shape[-1] + 1), dtype), str(shape))
    refuses(BurtDimensionError, np.zeros((1, *shape), dtype), str(shape))
    for other in (np.float64, np.float16, np.int64):
        refuses(TypeError, np.zeros(shape, other), dtype.name, np.dtype(other).name)
    refuses(TypeError, [0.0], "list")
    if shape != (1,):
        refuses(BurtDimensionError, np.zeros((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2], "contiguous")
    read_only = right.copy()
    read_only.flags.writeable = False
    refuses(BurtDimensionError, read_only, "writable")


def test_refuses_buffers_of_another_capacity():
    outputs = {"expert_inputs": np.zeros((4, CAPACITY - 1, 5), np.float32)}
    refused(BurtDimensionError, "expert_inputs", options=outputs, contains=["(4, 6, 5)", "(4, 5, 5)"])
    outputs = {"expert_inputs": np.zeros((4, CAPACITY + 1, 5), np.float32)}
    # The default: 2 · 6 · 2 / 4.
    refused(BurtDimensionError, "expert_inputs", capacity=None, options=outputs, contains=["(4, 6, 5)", "(4, 7, 5)"])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_outputs_have_the_types_of_their_inputs(dtype):
    other = np.float32 if dtype == np.float16 else np.float16
    for name, source in (("expert_inputs", "input"), ("combine_weights", "routing_weights")):
        wrong = output_contents(ROUTING, CAPACITY)[name].astype(other)
        given = getattr(ROUTING, source).astype(dtype)
        refused(TypeError, name, contains=[np.dtype(dtype).name], options={name: wrong}, **{source: given})


def overlapping(shape, dtype, start):
    """An array in the same memory as every other of its kind, from an element on."""
    size = int(np.prod(shape))
    return MEMORY.view(dtype)[start : start + size].reshape(shape)


MEMORY = np.zeros(1000, np.float32)


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("other", [*Routing._fields, *OUTPUTS])
def test_refuses_outputs_over_inputs_and_each_other(name, other):
    if name == other:
        return
    contents = output_contents(ROUTING, CAPACITY)
    written = overlapping(contents[name].shape, contents[name].dtype, 3)
    array = getattr(ROUTING, other) if other in Routing._fields else contents[other]
    shared = overlapping(array.shape, array.dtype, 3)
    changes, options = ({other: shared}, {}) if other in Routing._fields else ({}, {other: shared})
    both = f"({name}|{other})"
    refused(BurtDimensionError, both, contains=["overlap", name, other], options=options | {name: written}, **changes)


# Combine -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [[[1.0]], None, "rows", 3.5])
def test_combine_refuses_what_is_no_array(value):
    kind = type(value).__name__
    combine_refused(TypeError, "expert_outputs", outputs=value, contains=[kind])
    for name in ("dispatch_indices", "combine_weights"):
        combine_refused(TypeError, name, dispatch=DISPATCHED._replace(**{name: value}), contains=[kind])


@pytest.mark.parametrize("value", [None, 3, (1, 2), np.zeros((6, 2, 2), np.int32), SimpleNamespace(combine_weights=1)])
def test_combine_refuses_what_is_no_dispatch(value):
    combine_refused(TypeError, "dispatch", dispatch=value, contains=[type(value).__name__])


def test_combine_takes_anything_with_places_and_weights():
    given = SimpleNamespace(dispatch_indices=DISPATCHED.dispatch_indices, combine_weights=DISPATCHED.combine_weights)
    out = burt_numba.sparse_moe_combine(EXPERT_OUTPUTS + np.float32(1), given)
    assert out == pytest.approx(np.repeat(DISPATCHED.combine_weights.sum(axis=1, keepdims=True), 5, axis=1), rel=1e-6)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.complex64])
def test_combine_refuses_types(dtype):
    name = np.dtype(dtype).name
    wrong = EXPERT_OUTPUTS.astype(dtype)
    combine_refused(TypeError, "expert_outputs", outputs=wrong, contains=["float32 or float16", name])
    wrong = DISPATCHED._replace(combine_weights=DISPATCHED.combine_weights.astype(dtype))
    combine_refused(TypeError, "combine_weights", dispatch=wrong, contains=["float32 or float16", name])


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.uint64])
def test_combine_refuses_types_of_indices(dtype):
    wrong = DISPATCHED._replace(dispatch_indices=DISPATCHED.dispatch_indices.astype(dtype))
    combine_refused(TypeError, "dispatch_indices", dispatch=wrong, contains=["int32 or int64", np.dtype(dtype).name])


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("expert_outputs", (4, 5), "[E, capacity, d]"),
        ("expert_outputs", (4, 6, 5, 1), "[E, capacity, d]"),
        ("dispatch_indices", (6, 2), "[T, k, 2]"),
        ("dispatch_indices", (6, 2, 3), "(6, 2, 2)"),
        ("dispatch_indices", (6, 2, 2, 1), "[T, k, 2]"),
        ("combine_weights", (6, 3), "(6, 2)"),
        ("combine_weights", (5, 2), "(6, 2)"),
        ("combine_weights", (12,), "[T, k]"),
    ],
)
def test_combine_refuses_shapes(name, shape, expected):
    if name == "expert_outputs":
        combine_refused(BurtDimensionError, name, outputs=np.zeros(shape, np.float32), contains=[expected, str(shape)])
        return
    wrong = DISPATCHED._replace(**{name: np.zeros(shape, getattr(DISPATCHED, name).dtype)})
    combine_refused(BurtDimensionError, name, dispatch=wrong, contains=[expected, str(shape)])


@pytest.mark.parametrize("name", ["renormalize", "validate_output"])
@pytest.mark.parametrize("value", ["no", None, 1.0])
def test_combine_refuses_what_is_neither_true_nor_false(name, value):
    combine_refused(TypeError, name, contains=["True or False"], **{name: value})


def test_combine_refuses_outputs():
    def refuses(exception, value, *texts):
        combine_refused(exception, "out", contains=texts, out=value)

    refuses(BurtDimensionError, np.zeros((6, 6), np.float32), "(6, 5)")
    refuses(BurtDimensionError, np.zeros((5, 5), np.float32), "(6, 5)")
    refuses(TypeError, np.zeros((6, 5), np.float16), "float32", "float16")
    refuses(TypeError, np.zeros((6, 5)), "float32", "float64")
    refuses(TypeError, [0.0], "list")
    refuses(BurtDimensionError, np.zeros((6, 10), np.float32)[:, ::2], "contiguous")
    read_only = np.zeros((6, 5), np.float32)
    read_only.flags.writeable = False
    refuses(BurtDimensionError, read_only, "writable")


@pytest.mark.parametrize("name", ["expert_outputs", "dispatch_indices", "combine_weights"])
def test_combine_refuses_an_output_over_an_input(name):
    out = overlapping((6, 5), np.float32, 3)
    if name == "expert_outputs":
        given = {"outputs": overlapping(EXPERT_OUTPUTS.shape, np.float32, 0)}
    else:
        array = getattr(DISPATCHED, name)
        given = {"dispatch": DISPATCHED._replace(**{name: overlapping(array.shape, array.dtype, 3)})}
    combine_refused(BurtDimensionError, "out", out=out, contains=["overlap", name], **given)


def test_refuses_bfloat16_by_name():
    """bfloat16 and float16 export the same type string, so one can be read as the other: pytorch/pytorch#129621."""
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((6, 5), dtype=torch.bfloat16)
    refused(TypeError, "input", contains=["bfloat16"], input=tensor)
