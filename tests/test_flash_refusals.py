"""What the functions of flash decoding refuse before anything runs, and what they say."""

import numpy as np
import pytest
from flash_support import inputs_of, partials_of
from support import normal

import burt_numba
from burt_numba import BurtDimensionError

pytestmark = pytest.mark.simulator_only("the same checks on the host for either target, here of host arrays")

CACHES = inputs_of(2, 4, 20, 8, key_heads=2)._asdict()
ARGUMENTS = {
    "flash_decoding_reduce": {"partials": partials_of(2, 4, 3, 8), "seq_lens": np.int32([70, 33])},
    "flash_decoding_chunk": CACHES,
    "flash_decoding": CACHES,
    "merge_attention_states": {"outs": normal((3, 2, 4, 8)), "lses": normal((3, 2, 4))},
}
OUT = {name: (2, 4, 1, 10) if name == "flash_decoding_chunk" else (2, 4, 8) for name in ARGUMENTS}
SHAPES = {
    (name, output): OUT[name] if output == "out" else (2, 4)
    for name in ARGUMENTS
    for output in ("out", "lse_out")
    if (name, output) != ("flash_decoding_chunk", "lse_out")
}
each_function = pytest.mark.parametrize("name", ARGUMENTS)
of_caches = pytest.mark.parametrize("name", ["flash_decoding", "flash_decoding_chunk"])
with_chunks = pytest.mark.parametrize("name", [name for name in ARGUMENTS if name != "merge_attention_states"])
FLOATING = [(name, argument) for name in ARGUMENTS for argument in ARGUMENTS[name] if argument != "seq_lens"]


def refused(name, exception, argument, *, contains=(), **changes):
    """The call raises before anything runs, and says which argument, what it was and what it should have been."""
    arguments = ARGUMENTS[name] | {"out": np.full(OUT[name], np.nan, np.float32)} | changes
    arrays = [value for value in arguments.values() if isinstance(value, np.ndarray)]
    before = [array.tobytes() for array in arrays]
    with pytest.raises(exception, match=f"^{name}: {argument}: ") as caught:
        getattr(burt_numba, name)(**arguments)
    for text in contains:
        assert text in str(caught.value)
    if isinstance(caught.value, BurtDimensionError):
        assert caught.value.code == 6
    assert [array.tobytes() for array in arrays] == before


# Inputs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "argument"), [*FLOATING, *((name, "seq_lens") for name in list(ARGUMENTS)[:3])])
@pytest.mark.parametrize("value", [[[1.0]], None, "vectors", 3])
def test_refuses_what_is_no_array(name, argument, value):
    refused(name, TypeError, argument, contains=[type(value).__name__], **{argument: value})


@pytest.mark.parametrize(("name", "argument"), FLOATING)
@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.bool_, np.complex64])
def test_refuses_types(name, argument, dtype):
    wrong = ARGUMENTS[name][argument].astype(dtype)
    hint = [".astype(np.float32)"] if dtype is np.float64 else []
    refused(name, TypeError, argument, contains=["float32", np.dtype(dtype).name, *hint], **{argument: wrong})


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("flash_decoding_reduce", "partials"),
        ("flash_decoding_chunk", "k_cache"),
        ("flash_decoding", "v_cache"),
        ("merge_attention_states", "lses"),
    ],
)
def test_refuses_float16_where_it_is_not_the_type(name, argument):
    """Partials and sums are float32 alone, and a cache is of the type of the queries."""
    wrong = ARGUMENTS[name][argument].astype(np.float16)
    refused(name, TypeError, argument, contains=["float32", "float16"], **{argument: wrong})


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.uint32, np.uint64, np.bool_])
@with_chunks
def test_refuses_lengths_of_another_type(name, dtype):
    refused(name, TypeError, "seq_lens", contains=["int32", "int64", np.dtype(dtype).name], seq_lens=np.zeros(2, dtype))


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 1), ()])
@with_chunks
def test_refuses_lengths_of_another_shape(name, shape):
    wrong = np.zeros(shape, np.int32)
    refused(name, BurtDimensionError, "seq_lens", contains=["(2,)", str(shape)], seq_lens=wrong)


@pytest.mark.parametrize(
    ("argument", "shape", "expected"),
    [
        ("query", (4, 8), "3 dimensions"),
        ("query", (2, 4, 1, 8), "3 dimensions"),
        ("query", (), "3 dimensions"),
        ("k_cache", (4, 20, 8), "4 dimensions"),
        ("k_cache", (3, 2, 20, 8), "(2, "),
        ("k_cache", (2, 2, 20, 9), "8"),
        ("v_cache", (2, 2, 21, 8), "(2, 2, 20, 8)"),
        ("v_cache", (2, 4, 20, 8), "(2, 2, 20, 8)"),
        ("v_cache", (2, 2, 160), "4 dimensions"),
    ],
)
@of_caches
def test_refuses_shapes_of_caches(name, argument, shape, expected):
    wrong = {argument: np.zeros(shape, np.float32)}
    refused(name, BurtDimensionError, argument, contains=[expected, str(shape)], **wrong)


@pytest.mark.parametrize("key_heads", [0, 3, 8])
@of_caches
def test_refuses_heads_that_are_no_multiple(name, key_heads):
    cache = np.zeros((2, key_heads, 20, 8), np.float32)
    refused(name, BurtDimensionError, "k_cache", contains=["4", str(cache.shape)], k_cache=cache, v_cache=cache)


@pytest.mark.parametrize("D", [0, 257, 576])
@of_caches
def test_refuses_dimensions(name, D):
    wrong = {
        argument: np.zeros((*CACHES[argument].shape[:-1], D), np.float32)
        for argument in ("query", "k_cache", "v_cache")
    }
    refused(name, BurtDimensionError, "query", contains=["256", str((2, 4, D))], **wrong)


@pytest.mark.parametrize("width", [0, 1, 2, 259, 578])
def test_refuses_dimensions_of_partials(width):
    """Elements 128 and on were silently left out: of D = 576, refused or right."""
    shape = (2, 4, 3, width)
    wrong = np.zeros(shape, np.float32)
    refused("flash_decoding_reduce", BurtDimensionError, "partials", contains=["3 to 258", str(shape)], partials=wrong)


@pytest.mark.parametrize("shape", [(4, 3, 10), (1, 2, 4, 3, 10), (), (10,)])
def test_refuses_shapes_of_partials(shape):
    wrong = np.zeros(shape, np.float32)
    refused(
        "flash_decoding_reduce", BurtDimensionError, "partials", contains=["4 dimensions", str(shape)], partials=wrong
    )


@pytest.mark.parametrize(
    ("argument", "shape"), [("outs", ()), ("outs", (8,)), ("lses", (3, 2)), ("lses", (2, 4)), ("lses", (3, 2, 4, 8))]
)
def test_refuses_shapes_of_states(argument, shape):
    wrong = {argument: np.zeros(shape, np.float32)}
    refused("merge_attention_states", BurtDimensionError, argument, contains=[str(shape)], **wrong)


# Parameters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, -(2**40), 2**31])
@with_chunks
def test_refuses_chunk_sizes(name, value):
    refused(name, BurtDimensionError, "chunk_size", contains=[str(value)], chunk_size=value)


@pytest.mark.parametrize("value", [1.5, "32", [32], int])
@with_chunks
def test_refuses_chunk_sizes_of_the_wrong_kind(name, value):
    refused(name, TypeError, "chunk_size", contains=["an integer", type(value).__name__], chunk_size=value)


@pytest.mark.parametrize("name", ["flash_decoding_reduce", "flash_decoding_chunk"])
def test_refuses_to_choose_the_size_of_chunks_that_are_there(name):
    refused(name, TypeError, "chunk_size", contains=["an integer", "NoneType"], chunk_size=None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39])
@of_caches
def test_refuses_scales(name, value):
    refused(name, BurtDimensionError, "scale", contains=[str(value)], scale=value)


@pytest.mark.parametrize("value", ["1", [1.0]])
@of_caches
def test_refuses_scales_of_the_wrong_kind(name, value):
    refused(name, TypeError, "scale", contains=["a number", type(value).__name__], scale=value)


@each_function
def test_refuses_errors_and_streams_that_are_none(name):
    refused(name, TypeError, "errors", contains=["ErrorBuffer", "str"], errors="abc")
    with pytest.raises(TypeError, match="stream: expected a stream of Numba, CuPy, PyTorch"):
        getattr(burt_numba, name)(**ARGUMENTS[name], stream="abc")


# Outputs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "output"), SHAPES)
def test_refuses_outputs(name, output):
    shape = SHAPES[name, output]

    def refuses(exception, value, *texts):
        refused(name, exception, output, contains=texts, **{output: value})

    refuses(BurtDimensionError, np.zeros((*shape[:-1], shape[-1] + 1), np.float32), str(shape))
    refuses(BurtDimensionError, np.zeros((1, *shape), np.float32), str(shape))
    for other in (np.float64, np.float16, np.int32):
        refuses(TypeError, np.zeros(shape, other), "float32", np.dtype(other).name)
    refuses(TypeError, [0.0], "list")
    refuses(BurtDimensionError, np.zeros((*shape[:-1], 2 * shape[-1]), np.float32)[..., ::2], "contiguous")
    read_only = np.zeros(shape, np.float32)
    read_only.flags.writeable = False
    refuses(BurtDimensionError, read_only, "writable")


MEMORY = np.zeros(2000, np.float32)


def in_memory(array, start):
    """An array like this one in the memory of all others, from an element on."""
    return MEMORY.view(array.dtype)[start : start + array.size].reshape(array.shape)


@pytest.mark.parametrize(("name", "output"), SHAPES)
def test_refuses_outputs_over_inputs_and_each_other(name, output):
    """One block wrote what another had yet to read, where D did not divide the block: local-inference-lab/vllm#468."""
    result = in_memory(np.zeros(SHAPES[name, output], np.float32), 5)
    for other, array in ARGUMENTS[name].items():
        refused(
            name,
            BurtDimensionError,
            f"({output}|{other})",
            contains=["apart", output, other],
            **{output: result, other: in_memory(array, 4)},
        )
    if (name, "lse_out") in SHAPES and output == "out":
        sums = in_memory(np.zeros((2, 4), np.float32), 4)
        refused(name, BurtDimensionError, "(out|lse_out)", contains=["apart"], out=result, lse_out=sums)


@pytest.mark.parametrize("D", [64, 96, 192, 256])
def test_refuses_an_output_that_is_a_part_of_the_partials(D):
    partials = np.zeros((1, 1, 4, D + 2), np.float32)
    arguments = {"partials": partials, "seq_lens": np.int32([128]), "out": partials.reshape(-1)[:D].reshape(1, 1, D)}
    refused("flash_decoding_reduce", BurtDimensionError, "(out|partials)", contains=["apart"], **arguments)


@each_function
def test_refuses_bfloat16_by_name(name):
    """bfloat16 and float16 export the same type string, so one can be read as the other: pytorch/pytorch#129621."""
    torch = pytest.importorskip("torch")
    argument = next(iter(ARGUMENTS[name]))
    wrong = torch.zeros(ARGUMENTS[name][argument].shape, dtype=torch.bfloat16)
    refused(name, TypeError, argument, contains=["bfloat16"], **{argument: wrong})
