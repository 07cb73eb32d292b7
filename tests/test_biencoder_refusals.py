"""What biencoder_attention refuses before anything runs, and what it says."""

import numpy as np
import pytest
from biencoder_support import Inputs, inputs_of

import burt_numba
from burt_numba import BurtDimensionError

pytestmark = pytest.mark.simulator_only("the same checks on the host for either target, here of host arrays")

INPUTS = inputs_of(2, 4, 3, 5, 8, key_heads=2)
SHAPES = {"out": (2, 4, 3, 8), "temperature_out": (2, 4, 3), "entropy_out": (2, 4, 3), "lse_out": (2, 4, 3)}


def refused(exception, argument, *, contains=(), options=None, **changes):
    """The call raises before anything runs, and says which argument, what it was and what it should have been."""
    inputs, options = INPUTS._asdict() | changes, {"out": np.full((2, 4, 3, 8), np.nan, np.float32)} | (options or {})
    arrays = [value for value in (*inputs.values(), *options.values()) if isinstance(value, np.ndarray)]
    before = [array.tobytes() for array in arrays]
    with pytest.raises(exception, match=f"^biencoder_attention: {argument}: ") as caught:
        burt_numba.biencoder_attention(**inputs, **options)
    for text in contains:
        assert text in str(caught.value)
    if isinstance(caught.value, BurtDimensionError):
        assert caught.value.code == 6
    assert [array.tobytes() for array in arrays] == before


# Inputs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", Inputs._fields)
@pytest.mark.parametrize("value", [[[1.0]], None, "vectors", 3.5])
def test_refuses_what_is_no_array(name, value):
    refused(TypeError, name, contains=[type(value).__name__], **{name: value})


@pytest.mark.parametrize("name", Inputs._fields)
@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8, np.bool_, np.complex64])
def test_refuses_types(name, dtype):
    wrong = getattr(INPUTS, name).astype(dtype)
    hint = [".astype(np.float32)"] if dtype is np.float64 else []
    refused(TypeError, name, contains=["float32", np.dtype(dtype).name, *hint], **{name: wrong})


@pytest.mark.parametrize("name", Inputs._fields[1:])
def test_refuses_types_that_differ(name):
    """Products of two types were computed in one of them: all three are of the query's type."""
    wrong = getattr(INPUTS, name).astype(np.float16)
    refused(TypeError, name, contains=["expected float32, got float16"], **{name: wrong})


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("query", (3, 8), "4 dimensions"),
        ("query", (2, 4, 3, 8, 1), "4 dimensions"),
        ("query", (), "4 dimensions"),
        ("context_keys", (4, 5, 8), "4 dimensions"),
        ("context_keys", (3, 2, 5, 8), "(2, "),
        ("context_keys", (2, 2, 5, 9), "8"),
        ("context_values", (2, 2, 6, 8), "(2, 2, 5, 8)"),
        ("context_values", (2, 4, 5, 8), "(2, 2, 5, 8)"),
        ("context_values", (2, 2, 5, 4), "(2, 2, 5, 8)"),
        ("context_values", (2, 2, 40), "4 dimensions"),
    ],
)
def test_refuses_shapes(name, shape, expected):
    refused(BurtDimensionError, name, contains=[expected, str(shape)], **{name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize("key_heads", [0, 3, 8])
def test_refuses_heads_that_are_no_multiple(key_heads):
    keys = np.zeros((2, key_heads, 5, 8), np.float32)
    refused(BurtDimensionError, "context_keys", contains=["4", str(keys.shape)], context_keys=keys, context_values=keys)


@pytest.mark.parametrize("D", [0, 257, 1000])
def test_refuses_dimensions(D):
    """D = 0 has no scale, and 256 is the most that a tile holds."""
    wrong = {name: np.zeros((*array.shape[:3], D), np.float32) for name, array in INPUTS._asdict().items()}
    refused(BurtDimensionError, "query", contains=["256", str((2, 4, 3, D))], **wrong)


@pytest.mark.parametrize("size", [2**31, 2**40])
def test_refuses_sizes_beyond_32_bits(size):
    """Of memory that is never touched: one element for all."""
    one = np.zeros((1, 1, 1, 1), np.float32)
    many = np.broadcast_to(one, (1, 1, size, 1))
    with pytest.raises(BurtDimensionError, match=r"^biencoder_attention: context_keys: expected"):
        burt_numba.biencoder_attention(one, many, many)
    with pytest.raises(BurtDimensionError, match=r"^biencoder_attention: query: expected"):
        burt_numba.biencoder_attention(many, one, one)


@pytest.mark.parametrize(("B", "H"), [(2**16, 2**15), (2**31, 1), (1, 2**31), (2**20, 2**12), (2**30 + 1, 1)])
def test_refuses_heads_beyond_32_bits(B, H):
    """The number of a sample's head wrapped where all samples together had 2**31 of them."""
    one = np.zeros((1, 1, 1, 1), np.float32)
    query, contexts = np.broadcast_to(one, (B, H, 1, 1)), np.broadcast_to(one, (B, 1, 1, 1))
    with pytest.raises(
        BurtDimensionError, match=rf"^biencoder_attention: query: expected B H of .* 2\*\*30, got {B * H}"
    ):
        burt_numba.biencoder_attention(query, contexts, contexts)


# Parameters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("scale", float("nan")),
        ("scale", float("inf")),
        ("scale", -float("inf")),
        ("scale", 1e39),
        ("entropy_bound", -0.1),
        ("entropy_bound", float("nan")),
        ("temperature_min", 0.0),
        ("temperature_min", -1.0),
        ("temperature_min", float("nan")),
        ("temperature_max", float("nan")),
        ("max_iterations", 0),
        ("max_iterations", -3),
    ],
)
def test_refuses_parameters(argument, value):
    refused(BurtDimensionError, argument, contains=[str(value)], options={argument: value})


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("scale", "1", "a number"),
        ("scale", [1.0], "a number"),
        ("entropy_bound", "0.2", "a number"),
        ("temperature_min", b"1", "a number"),
        ("temperature_max", None, "a number"),
        ("max_iterations", 1.5, "an integer"),
        ("max_iterations", int, "an integer"),
        ("validate_output", "no", "True or False"),
        ("errors", "abc", "ErrorBuffer"),
    ],
)
def test_refuses_parameters_of_the_wrong_kind(argument, value, expected):
    refused(TypeError, argument, contains=[expected, type(value).__name__], options={argument: value})


def test_refuses_a_stream_that_is_none():
    with pytest.raises(TypeError, match="stream: expected a stream of Numba, CuPy, PyTorch"):
        burt_numba.biencoder_attention(*INPUTS, stream="abc")


def test_refuses_crossed_temperatures():
    crossed = {"temperature_min": 2.0, "temperature_max": 1.0}
    refused(BurtDimensionError, "temperature_m(in|ax)", contains=["2", "1"], options=crossed)


@pytest.mark.parametrize("precision", ["bf16", "float32", "FP32", "", None, 32, True])
def test_refuses_precisions(precision):
    refused(ValueError, "precision", contains=["fp32", "tf32", repr(precision)], options={"precision": precision})


@pytest.mark.parametrize("shape", [(2,), (4, 1), (2, 4), (1,), (2, 4, 3)])
def test_refuses_bounds_of_another_shape(shape):
    wrong = {"entropy_bound": np.zeros(shape, np.float32)}
    refused(BurtDimensionError, "entropy_bound", contains=["(4,)", str(shape)], options=wrong)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
def test_refuses_bounds_of_another_type(dtype):
    wrong = {"entropy_bound": np.zeros(4, dtype)}
    refused(TypeError, "entropy_bound", contains=["float32", np.dtype(dtype).name], options=wrong)


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 1), ()])
def test_refuses_lengths_of_another_shape(shape):
    wrong = {"context_lengths": np.zeros(shape, np.int32)}
    refused(BurtDimensionError, "context_lengths", contains=["(2,)", str(shape)], options=wrong)


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.uint32, np.uint64, np.bool_])
def test_refuses_lengths_of_another_type(dtype):
    wrong = {"context_lengths": np.zeros(2, dtype)}
    refused(TypeError, "context_lengths", contains=["int32 or int64", np.dtype(dtype).name], options=wrong)


@pytest.mark.parametrize("value", [5, [5, 5], "5"])
def test_refuses_lengths_that_are_no_array(value):
    refused(TypeError, "context_lengths", contains=[type(value).__name__], options={"context_lengths": value})


@pytest.mark.parametrize("bound", [0.2, np.full(4, 0.2, np.float32)])
def test_refuses_sums_of_exponentials_with_a_bound(bound):
    """They are those at T0, which is not the temperature of a row that was sharpened."""
    given = {"lse_out": np.zeros((2, 4, 3), np.float32), "entropy_bound": bound}
    refused(ValueError, "lse_out", contains=["entropy_bound"], options=given)


# Outputs -------------------------------------------------------------------------------------------------------------


def for_output(name, value):
    return {name: value} | ({"entropy_bound": None} if name == "lse_out" else {})


@pytest.mark.parametrize("name", SHAPES)
def test_refuses_outputs(name):
    shape = SHAPES[name]

    def refuses(exception, value, *texts):
        refused(exception, name, contains=texts, options=for_output(name, value))

    refuses(BurtDimensionError, np.zeros((*shape[:-1], shape[-1] + 1), np.float32), str(shape))
    refuses(BurtDimensionError, np.zeros((1, *shape), np.float32), str(shape))
    for other in (np.float64, np.float16, np.int32):
        refuses(TypeError, np.zeros(shape, other), "float32", np.dtype(other).name)
    refuses(TypeError, [0.0], "list")
    refuses(BurtDimensionError, np.zeros((*shape[:-1], 2 * shape[-1]), np.float32)[..., ::2], "contiguous")
    read_only = np.zeros(shape, np.float32)
    read_only.flags.writeable = False
    refuses(BurtDimensionError, read_only, "writable")


MEMORY = np.zeros(1000, np.float32)


def overlapping(shape, dtype, start=3):
    """An array in the same memory as every other of its kind, from an element on."""
    size = int(np.prod(shape))
    return MEMORY.view(dtype)[start : start + size].reshape(shape)


OTHERS = {
    **{name: (array.shape, np.float32) for name, array in INPUTS._asdict().items()},
    "entropy_bound": ((4,), np.float32),
    "context_lengths": ((2,), np.int32),
    **{name: (shape, np.float32) for name, shape in SHAPES.items()},
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("other", OTHERS)
def test_refuses_outputs_over_inputs_and_each_other(name, other):
    if name == other or {name, other} == {"lse_out", "entropy_bound"}:
        return
    given = {} if other in Inputs._fields else {other: overlapping(*OTHERS[other])}
    changes = {other: overlapping(*OTHERS[other])} if other in Inputs._fields else {}
    # One element further, for in place is another matter.
    given |= for_output(name, overlapping(SHAPES[name], np.float32, 4))
    if "lse_out" in (name, other):
        given["entropy_bound"] = None
    both = f"({name}|{other})"
    refused(BurtDimensionError, both, contains=["apart", name, other], options=given, **changes)


def test_refuses_bfloat16_by_name():
    """bfloat16 and float16 export the same type string, so one can be read as the other: pytorch/pytorch#129621."""
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((2, 4, 3, 8), dtype=torch.bfloat16)
    refused(TypeError, "query", contains=["bfloat16"], query=tensor)
