"""Arrays of every family as inputs and outputs, and what is refused by name."""

import numpy as np
import pytest
from support import ON_GPU, normal, relative_error, run_attention, run_constrained, to_host, to_target

import burt_numba
from burt_numba import BurtDimensionError
from burt_numba.backend import cuda
from burt_numba.host.arrays import stream_handle

DEVICE_ONLY = "interfaces and libraries of devices have no meaning in the simulator"
LOGITS = normal((4, 3, 40))
SCORES = normal((2, 3, 4, 9))
MASK = normal((2, 1, 1, 9), spread=1.0)


class Interface:
    """The least that the protocol of device arrays asks for, around memory of Numba's."""

    def __init__(self, array, **changes):
        self.array = cuda.to_device(array) if isinstance(array, np.ndarray) else array
        interface = self.array.__cuda_array_interface__
        self.__cuda_array_interface__ = {key: interface[key] for key in ("shape", "typestr", "data")}
        self.__cuda_array_interface__ |= {"version": 3, **changes}


def host_tensor(array):
    return pytest.importorskip("torch").from_numpy(np.array(array, order="C"))


def torch_tensor(array):
    tensor = host_tensor(array)
    return tensor.cuda() if ON_GPU else tensor


def cupy_array(array):
    return pytest.importorskip("cupy").asarray(array)


# How each family makes an array.
FAMILIES = {
    "NumPy": np.array,
    "Numba": cuda.to_device,
    "PyTorch": torch_tensor,
    "PyTorch, on the host": host_tensor,
    "CuPy": cupy_array,
    "interface": Interface,
}


def family_parameters():
    gpu = pytest.mark.gpu_only(DEVICE_ONLY)
    return [pytest.param(name, marks=gpu if name in ("CuPy", "interface") else []) for name in FAMILIES]


each_family = pytest.mark.parametrize("family", family_parameters())


def host(array):
    if isinstance(array, Interface):
        array = array.array
    return array.get() if type(array).__module__.startswith("cupy") else to_host(array)


def refused(exception, function, argument, *args, contains=(), **kwargs):
    """The call raises and names the function, the argument, and what it was."""
    with pytest.raises(exception, match=f"^{function}: {argument}: ") as caught:
        getattr(burt_numba, function)(*args, **kwargs)
    for text in contains:
        assert text in str(caught.value)


# Families ------------------------------------------------------------------------------------------------------------


@each_family
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_results_are_of_the_family_of_the_input(family, dtype):
    logits, scores, mask = (array.astype(dtype) for array in (LOGITS, SCORES, MASK))
    make = FAMILIES[family]
    array = make(logits)
    out = burt_numba.constrained_softmax(array)
    assert type(out) is type(cuda.to_device(logits) if family == "interface" else array)
    assert host(out).tobytes() == run_constrained(logits).out.tobytes()
    assert host(array).tobytes() == logits.tobytes()
    array = make(scores)
    out = burt_numba.attention_softmax(array, make(mask))
    assert type(out) is type(cuda.to_device(logits) if family == "interface" else array)
    assert host(out).tobytes() == run_attention(scores, mask).out.tobytes()
    if hasattr(array, "device"):
        assert out.device == array.device


@each_family
def test_outputs_of_every_family(family):
    make = FAMILIES[family]
    outputs = [make(np.full(shape, np.nan, np.float32)) for shape in (LOGITS.shape, (4, 3), (4, 3))]
    out, temperature, entropy = outputs
    bounds = np.full((4, 3), 0.3, np.float32)
    returned = burt_numba.constrained_softmax(
        make(LOGITS), make(bounds), out=out, temperature_out=temperature, entropy_out=entropy
    )
    assert returned is out
    expected = run_constrained(LOGITS, bounds)
    for output, wanted in zip(outputs, expected, strict=False):
        assert host(output).tobytes() == wanted.tobytes()


@each_family
def test_in_place_in_every_family(family):
    array = FAMILIES[family](SCORES)
    assert burt_numba.attention_softmax(array, FAMILIES[family](MASK), out=array) is array
    assert host(array).tobytes() == run_attention(SCORES, MASK).out.tobytes()


@each_family
def test_empty_arrays_of_every_family(family):
    for shape in ((0, 7), (3, 0, 7)):
        array = FAMILIES[family](np.empty(shape, np.float32))
        out = burt_numba.constrained_softmax(array)
        assert tuple(out.shape) == shape
        assert burt_numba.constrained_softmax(array, out=out) is out


@pytest.mark.parametrize("family", ["PyTorch", pytest.param("CuPy", marks=pytest.mark.gpu_only(DEVICE_ONLY))])
def test_views_of_libraries(family):
    """Strides of a library's own views: transposed, cut, at an odd offset, broadcast."""
    array = FAMILIES[family](normal((7, 6, 11)))
    views = {
        "transposed": lambda a: a.transpose(0, 2) if family == "PyTorch" else a.T,
        "cut": lambda a: a[1::2, :4, 1:],
        "odd offset": lambda a: a.reshape(-1)[1:441].reshape(4, 10, 11),
        "broadcast": lambda a: a[:1].expand(5, 6, 11) if family == "PyTorch" else a[[0] * 5],
    }
    for view in views.values():
        packed = np.array(host(view(array)))
        out = host(burt_numba.constrained_softmax(view(array), 20.0))
        assert relative_error(out, run_constrained(packed, 20.0).out) <= 1e-6


def test_numpy_inputs_that_only_reading_allows():
    """Read-only memory, reversed axes, and no memory of its own."""
    logits = normal((5, 12))
    expected = {step: run_constrained(np.array(logits[::step, ::step]), 20.0).out for step in (1, -1, -2)}
    logits.flags.writeable = False
    for step, wanted in expected.items():
        out = burt_numba.constrained_softmax(logits[::step, ::step], 20.0)
        assert relative_error(out, wanted) <= 1e-6 and out.flags.writeable
    row = np.frombuffer(logits.tobytes(), np.float32).reshape(5, 12)
    assert relative_error(burt_numba.constrained_softmax(row, 20.0), expected[1]) <= 1e-6


def test_numpy_subclasses_are_arrays():
    class Subclass(np.ndarray):
        pass

    out = burt_numba.constrained_softmax(LOGITS.view(Subclass))
    assert isinstance(out, np.ndarray) and out.tobytes() == run_constrained(LOGITS).out.tobytes()


def test_one_call_takes_several_families_in_one_place():
    """What lies in one memory can be read together, whoever allocated it; the first input decides the result."""
    torch = pytest.importorskip("torch")
    expected = run_attention(SCORES, MASK).out
    numba_mask, torch_mask = to_target(MASK), torch_tensor(MASK)
    assert isinstance(burt_numba.attention_softmax(torch_tensor(SCORES), numba_mask), torch.Tensor)
    out = burt_numba.attention_softmax(to_target(SCORES), torch_mask)
    assert type(out) is type(to_target(SCORES)) and to_host(out).tobytes() == expected.tobytes()


# The interface of device arrays --------------------------------------------------------------------------------------

PACKED = LOGITS.reshape(12, 40)
INTERFACES = {
    "version 2": {"version": 2},
    "version 3": {"version": 3},
    "strides None": {"strides": None},
    "explicit strides": {"strides": (160, 4)},
    "version 2, explicit strides": {"version": 2, "strides": (160, 4)},
    "lists": {"shape": [12, 40], "strides": [160, 4]},
    "stream None": {"stream": None},
    "the default stream": {"stream": 1},
    "the thread's default stream": {"stream": 2},
    "mask None": {"mask": None},
    "read-only": {},
}


@pytest.mark.gpu_only(DEVICE_ONLY)
@pytest.mark.parametrize("case", INTERFACES)
def test_interfaces(case):
    """Packed arrays export strides=None, and a consumer misread it: cupy/cupy#2589, pytorch/pytorch#24947, #31443."""
    array = Interface(PACKED, **INTERFACES[case])
    if case == "read-only":
        array.__cuda_array_interface__["data"] = (array.__cuda_array_interface__["data"][0], True)
    cuda.synchronize()
    out = burt_numba.constrained_softmax(array)
    cuda.synchronize()
    assert to_host(out).tobytes() == run_constrained(PACKED).out.tobytes()


@pytest.mark.gpu_only(DEVICE_ONLY)
def test_interface_with_a_stream_of_its_own():
    stream = cuda.stream()
    array = Interface(PACKED, stream=stream_handle(stream))
    cuda.synchronize()
    out = burt_numba.constrained_softmax(array)
    stream.synchronize()
    assert to_host(out).tobytes() == run_constrained(PACKED).out.tobytes()


@pytest.mark.gpu_only(DEVICE_ONLY)
def test_refuses_interfaces():
    mask = Interface(np.zeros(PACKED.shape, np.bool_))
    refused(TypeError, "constrained_softmax", "logits", Interface(PACKED, mask=mask), contains=["mask"])
    refused(ValueError, "constrained_softmax", "logits", Interface(PACKED, stream=0), contains=["stream 0"])
    # bfloat16 has no type string of its own.
    brain = Interface(PACKED.astype(np.float16), typestr="<V2")
    refused(TypeError, "constrained_softmax", "logits", brain, contains=["bfloat16", "float32 or float16"])
    out = Interface(PACKED.copy())
    out.__cuda_array_interface__["data"] = (out.__cuda_array_interface__["data"][0], True)
    refused(BurtDimensionError, "constrained_softmax", "out", Interface(PACKED), out=out, contains=["read-only"])
    refused(TypeError, "attention_softmax", "mask", to_target(SCORES), Interface(MASK, mask=mask), contains=["mask"])


# Refusals of every family --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["logits", "entropy_bound", "temperature_out", "entropy_out", "out"])
def test_refuses_bfloat16_by_name(argument):
    """bfloat16 and float16 export the same type string, so one can be read as the other: pytorch/pytorch#129621."""
    torch = pytest.importorskip("torch")
    arrays = {"logits": torch_tensor(LOGITS)}
    arrays[argument] = torch_tensor(LOGITS if argument in ("logits", "out") else LOGITS[..., 0]).to(torch.bfloat16)
    contains = ["bfloat16", str(tuple(arrays[argument].shape)), "float32"]
    refused(TypeError, "constrained_softmax", argument, **arrays, contains=contains)


@pytest.mark.parametrize("argument", ["scores", "mask", "out"])
def test_attention_softmax_refuses_bfloat16_by_name(argument):
    torch = pytest.importorskip("torch")
    arrays = {"scores": torch_tensor(SCORES)}
    arrays[argument] = torch_tensor(SCORES).to(torch.bfloat16)
    refused(TypeError, "attention_softmax", argument, **arrays, contains=["bfloat16", "float32"])


def test_refuses_tensors_that_want_a_gradient():
    torch = pytest.importorskip("torch")
    tensor = torch_tensor(LOGITS).requires_grad_()
    refused(TypeError, "constrained_softmax", "logits", tensor, contains=["requires grad", ".detach()"])
    bounds = torch_tensor(LOGITS[..., 0] ** 2).requires_grad_()
    refused(TypeError, "constrained_softmax", "entropy_bound", torch_tensor(LOGITS), bounds, contains=["requires grad"])
    with torch.no_grad():
        without = burt_numba.constrained_softmax(tensor)
    assert host(without).tobytes() == host(burt_numba.constrained_softmax(tensor.detach())).tobytes()
    # Known from the call without gradients, and still refused.
    refused(TypeError, "constrained_softmax", "logits", tensor, contains=["requires grad"])


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_refuses_tensors_that_are_no_plain_memory(kind):
    torch = pytest.importorskip("torch")
    tensor = torch_tensor(PACKED).to_sparse() if kind == "sparse" else torch.empty((3, 9), device="meta")
    for name in ("logits", "out"):
        arrays = {"logits": torch_tensor(PACKED), name: tensor}
        refused(TypeError, "constrained_softmax", name, **arrays, contains=[kind])


def test_refuses_lazily_negated_tensors_after_plain_ones_of_the_same_kind():
    """A view that negates when it is read has the shape, strides and type of a plain one, but not its numbers."""
    torch = pytest.importorskip("torch")
    numbers = torch.complex(torch_tensor(PACKED), torch_tensor(PACKED))
    plain, negated = numbers.imag, numbers.conj().imag
    assert negated.is_neg() and negated.stride() == plain.stride()
    for _ in range(2):
        refused(TypeError, "constrained_softmax", "logits", negated, contains=["negative"])
        burt_numba.constrained_softmax(plain)


@pytest.mark.parametrize("argument", ["logits", "entropy_bound", "out"])
def test_refuses_other_byte_orders(argument):
    """Bytes of the other order are other numbers; NumPy calls both types float32."""
    arrays = {"logits": LOGITS, "entropy_bound": np.ones((4, 3), np.float32), "out": np.zeros_like(LOGITS)}
    arrays[argument] = arrays[argument].astype(np.dtype(np.float32).newbyteorder())
    with pytest.raises(TypeError, match=f"^constrained_softmax: {argument}: .*float32"):
        burt_numba.constrained_softmax(**arrays, errors=burt_numba.ErrorBuffer())


def test_packed_fields_are_read_or_refused():
    """A float32 field beside a byte lies at strides of 5 bytes, which no kernel can step by."""
    table = np.zeros((4, 6), [("byte", "u1"), ("value", "f4")])
    table["value"] = normal((4, 6))
    refused(BurtDimensionError, "constrained_softmax", "logits", table["value"], contains=["strides of whole elements"])


@pytest.mark.parametrize("stride", [-160, 0, 1, 7 * 4])
def test_strides_of_an_axis_of_one_do_not_matter(stride):
    """A row taken backwards, ``array[:1][::-1]``, counts as contiguous with a stride that leads nowhere."""
    odd = np.lib.stride_tricks.as_strided(LOGITS[0, 0], (1, LOGITS.shape[-1]), (stride, 4))
    out = np.lib.stride_tricks.as_strided(np.full_like(odd[0], np.nan), odd.shape, odd.strides)
    expected = burt_numba.constrained_softmax(LOGITS[0, :1].copy())
    np.testing.assert_array_equal(burt_numba.constrained_softmax(odd), expected)
    assert burt_numba.constrained_softmax(odd, out=out) is out
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("value", [[[1.0]], (1.0,), {"a": 1}, "text", b"bytes", 1.0, np.float32(1), range(3), object])
def test_refuses_what_is_no_array(value):
    name = type(value).__name__
    refused(TypeError, "constrained_softmax", "logits", value, contains=["expected an array", name])
    refused(TypeError, "attention_softmax", "mask", SCORES, value, contains=["expected an array", name])
    refused(TypeError, "constrained_softmax", "out", LOGITS, out=value, contains=["expected an array", name])
    refused(TypeError, "constrained_softmax", "entropy_out", LOGITS, entropy_out=value, contains=[name])


@pytest.mark.gpu_only("a simulated device reads host memory")
def test_refuses_host_and_device_memory_in_one_call():
    device, memory = to_target(LOGITS), [r"host memory", r"device 0"]
    bounds = np.ones((4, 3), np.float32)
    refused(BurtDimensionError, "constrained_softmax", "entropy_bound", device, bounds, contains=memory)
    refused(BurtDimensionError, "constrained_softmax", "out", device, out=LOGITS.copy(), contains=memory)
    refused(BurtDimensionError, "constrained_softmax", "out", LOGITS, out=device, contains=memory)
    refused(BurtDimensionError, "attention_softmax", "mask", SCORES, to_target(MASK), contains=memory)
    torch = pytest.importorskip("torch")
    refused(BurtDimensionError, "attention_softmax", "mask", to_target(SCORES), torch.zeros(9), contains=memory)


# Overlaps ------------------------------------------------------------------------------------------------------------


def parts(memory, *starts, shape=(3, 10)):
    """Packed arrays at these offsets of one memory."""
    size = int(np.prod(shape))
    return [memory[start : start + size].reshape(shape) for start in starts]


@pytest.mark.parametrize("start", [1, 10, 29, -1, -29])
def test_refuses_outputs_that_partly_overlap_an_input(start):
    logits, out = parts(to_target(normal((100,))), 32, 32 + start)
    refused(BurtDimensionError, "constrained_softmax", "out", logits, out=out, contains=["logits", "overlap"])
    scores = logits.reshape(1, 1, 3, 10)
    refused(BurtDimensionError, "attention_softmax", "out", scores, out=out.reshape(1, 1, 3, 10), contains=["scores"])


@pytest.mark.parametrize("start", [30, -30, 31])
def test_neighbours_do_not_overlap(start):
    content = normal((100,))
    logits, out = parts(to_target(content), 32, 32 + start)
    burt_numba.constrained_softmax(logits, out=out)
    assert to_host(out).tobytes() == run_constrained(content[32:62].reshape(3, 10)).out.tobytes()


def test_refuses_an_output_over_another_layout_of_the_same_memory():
    """The same first byte is not enough: rows written in one order are still to be read in another."""
    memory = to_target(normal((36,)))
    square = memory.reshape(6, 6)
    if not ON_GPU:  # where Numba transposes into a new array
        refused(BurtDimensionError, "constrained_softmax", "out", square.T, out=square, contains=["logits", "overlap"])
    halves = memory.reshape(3, 12)[:, :6]
    refused(
        BurtDimensionError, "constrained_softmax", "out", halves, out=memory[:18].reshape(3, 6), contains=["overlap"]
    )


def test_refuses_row_outputs_over_other_arguments():
    memory = to_target(normal((200,)))
    logits, out = parts(memory, 0, 60)
    function, error = "constrained_softmax", BurtDimensionError
    refused(error, function, "temperature_out", logits, temperature_out=memory[28:31], contains=["logits", "overlap"])
    refused(error, function, "entropy_out", logits, entropy_out=memory[:3], contains=["logits", "overlap"])
    # The two write to one place; either may be the one that is named.
    for name in ("temperature_out", "entropy_out"):
        both = {name: memory[70:73], "out": out}
        refused(error, function, f"({name}|out)", logits, **both, contains=[name, "out", "overlap"])
    both = {"temperature_out": memory[90:93], "entropy_out": memory[92:95]}
    refused(error, function, "(temperature|entropy)_out", logits, **both, contains=["overlap"])
    bounds = memory[100:103]
    refused(error, function, "temperature_out", logits, bounds, temperature_out=bounds, contains=["entropy_bound"])
    refused(error, function, "out", logits, memory[88:91], out=out, contains=["entropy_bound", "overlap"])


def test_refuses_an_output_over_the_mask():
    memory = to_target(normal((400,)))
    scores, mask, out = parts(memory, 0, 200, 200, shape=(1, 2, 3, 10))
    refused(BurtDimensionError, "attention_softmax", "out", scores, mask, out=out, contains=["mask", "overlap"])
    row = memory[229:239]
    refused(BurtDimensionError, "attention_softmax", "out", scores, row, out=out, contains=["mask", "overlap"])
