"""What cifg_update and batched_cifg_update refuse before anything runs, and what they say."""

import numpy as np
import pytest
from cifg_support import INPUTS, LAYOUTS, MODES, SHARED, Inputs, call

import burt_numba
from burt_numba import BurtDimensionError

pytestmark = pytest.mark.simulator_only("the same checks on the host for either target, here of host arrays")


def refused(exception, argument, *, contains=(), shared=None, args=(), options=None, **changes):
    """The call raises before anything runs, and says which argument, what it was and what it should have been."""
    name = "cifg_update" if shared is None else "batched_cifg_update"
    inputs = MODES[shared]._asdict() | changes
    before = {key: value.tobytes() for key, value in inputs.items() if isinstance(value, np.ndarray)}
    with pytest.raises(exception, match=f"^{name}: {argument}: ") as caught:
        call(tuple(inputs.values()), *args, shared=shared, **(options or {}))
    for text in contains:
        assert text in str(caught.value)
    if isinstance(caught.value, BurtDimensionError):
        assert caught.value.code == 6
    assert all(inputs[key].tobytes() == value for key, value in before.items())


@pytest.mark.parametrize("name", Inputs._fields)
def test_refuses_what_is_no_array(name):
    for value in ([[1.0]], None, "C", 3.5):
        refused(TypeError, name, contains=[type(value).__name__], **{name: value})
    label = name.upper() if name in "hx" else name
    refused(TypeError, label, shared=False, contains=["list"], **{name: [0.0]})


@pytest.mark.parametrize("name", Inputs._fields)
@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.complex64])
def test_refuses_types(name, dtype):
    wrong = getattr(INPUTS, name).astype(dtype)
    hint = [".astype(np.float32)"] if dtype is np.float64 else []
    refused(TypeError, name, contains=["float32", np.dtype(dtype).name, *hint], **{name: wrong})


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("C", (4, 5), "(5, 5)"),
        ("C", (5, 4), "(5, 5)"),
        ("C", (25,), "(5, 5)"),
        ("C", (1, 5, 5), "(5, 5)"),
        ("h", (), "1 dimension"),
        ("h", (1, 5), "[d]"),
        ("x", (1, 3), "[n]"),
        ("W_f", (5, 5), "(5, 8)"),
        ("W_f", (8, 5), "(5, 8)"),
        ("W_f", (40,), "(5, 8)"),
        ("b_f", (4,), "(5,)"),
        ("b_f", (1,), "(5,)"),
        ("b_f", (5, 1), "(5,)"),
    ],
)
def test_refuses_shapes(name, shape, expected):
    wrong = np.zeros(shape, np.float32)
    refused(BurtDimensionError, name, contains=[expected, str(shape)], **{name: wrong})


@pytest.mark.parametrize(
    ("name", "shape", "shared", "expected"),
    [
        ("C", (4, 4), False, "(3, 4, 4)"),
        ("C", (2, 4, 4), False, "(3, 4, 4)"),
        ("C", (3, 4, 4), True, "(4, 4)"),
        ("h", (4,), False, "[B, d]"),
        ("h", (1, 3, 4), True, "[B, d]"),
        ("x", (3,), False, "[B, n]"),
        ("x", (2, 3), False, "(3, 3)"),
        ("x", (2, 3), True, "(3, 3)"),
        ("W_f", (3, 4, 7), False, "(4, 7)"),
        ("b_f", (3, 4), True, "(4,)"),
    ],
)
def test_refuses_shapes_of_batches(name, shape, shared, expected):
    label = name.upper() if name in "hx" else name
    wrong = np.zeros(shape, np.float32)
    refused(BurtDimensionError, label, shared=shared, contains=[expected, str(shape)], **{name: wrong})


@pytest.mark.parametrize(
    ("name", "value", "exception"),
    [
        *(("spectral_bound", value, BurtDimensionError) for value in (0.0, -1.0, float("nan"), 10**400)),
        *(("spectral_bound", value, TypeError) for value in ("0.95", None, [0.95])),
        *(("power_iterations", value, BurtDimensionError) for value in (-1, -(2**40))),
        *(("power_iterations", value, TypeError) for value in (1.5, "3", None, [3])),
        *(("projection", value, BurtDimensionError) for value in ("fold", "", None, 3, ["clip"])),
        *(("validate_output", value, TypeError) for value in ("no", None, [])),
        *(("errors", value, TypeError) for value in ("abc", {})),
    ],
)
def test_refuses_parameters(name, value, exception):
    got = [repr(value)] if exception is BurtDimensionError else [type(value).__name__]
    for shared in (None, True):
        refused(exception, name, shared=shared, contains=got, options={name: value})


def test_refuses_a_stream_that_is_none():
    with pytest.raises(TypeError, match="stream: expected a stream of Numba, CuPy, PyTorch"):
        call(INPUTS, stream="abc", out=np.zeros_like(INPUTS.C))


@pytest.mark.parametrize("value", ["yes", None, 1.0, np.array([True, False])])
def test_shared_memory_mode_is_true_or_false(value):
    with pytest.raises(TypeError, match=r"^batched_cifg_update: shared_memory_mode: expected True or False"):
        burt_numba.batched_cifg_update(*SHARED, shared_memory_mode=value)


def test_refuses_memories_that_cannot_be_updated_in_place():
    read_only = INPUTS.C.copy()
    read_only.flags.writeable = False
    refused(BurtDimensionError, "C", C=read_only, contains=["writable", "(5, 5)"])
    for layout in ("every other row", "every other column", "other order", "padded by one"):
        strided = LAYOUTS[layout](INPUTS.C)
        refused(BurtDimensionError, "C", C=strided, contains=["contiguous"])
        refused(BurtDimensionError, "C", C=strided, contains=["contiguous"], options={"out": np.zeros_like(INPUTS.C)})


OUTPUTS = {"out": (5, 5), "power_vector": (5,), "sigma_bound": (1,), "sigma_out": (1,), "forget_gate_out": (5,)}
BATCHED_OUTPUTS = {"out": (3, 4, 4), "power_vector": (3, 4), "sigma_bound": (3,), "sigma_out": (3,)}
SHARED_OUTPUTS = {"out": (4, 4), "power_vector": (4,), "sigma_bound": (1,), "sigma_out": (1,)}


@pytest.mark.parametrize(
    ("shared", "name", "shape"),
    [
        (shared, name, shape)
        for shared, outputs in ((None, OUTPUTS), (False, BATCHED_OUTPUTS), (True, SHARED_OUTPUTS))
        for name, shape in (outputs | ({} if shared is None else {"forget_gate_out": (3, 4)})).items()
    ],
)
def test_refuses_outputs(shared, name, shape):
    def refuses(exception, value, *texts):
        refused(exception, name, shared=shared, contains=texts, options={name: value})

    refuses(BurtDimensionError, np.zeros((*shape[:-1], shape[-1] + 1), np.float32), str(shape))
    refuses(BurtDimensionError, np.zeros((1, *shape), np.float32), str(shape))
    refuses(TypeError, np.zeros(shape), "float64", "float32")
    refuses(TypeError, [0.0], "list")
    if shape != (1,):
        refuses(BurtDimensionError, np.zeros((*shape[:-1], 2 * shape[-1]), np.float32)[..., ::2], "contiguous")
    read_only = np.zeros(shape, np.float32)
    read_only.flags.writeable = False
    refuses(BurtDimensionError, read_only, "writable")


def test_refuses_outputs_over_inputs_and_each_other():
    memory = np.zeros(200, np.float32)
    C, shifted = memory[:25].reshape(5, 5), memory[5:30].reshape(5, 5)
    refused(BurtDimensionError, "out", C=C, contains=["overlap", "C"], options={"out": shifted})
    refused(BurtDimensionError, "out", h=memory[20:25], contains=["overlap"], options={"out": C})
    for name in ("power_vector", "forget_gate_out"):
        refused(BurtDimensionError, name, h=memory[:5], contains=["overlap", "h"], options={name: memory[4:9]})
        refused(BurtDimensionError, name, b_f=memory[:5], contains=["overlap", "b_f"], options={name: memory[:5]})
    refused(
        BurtDimensionError,
        "sigma_(out|bound)",
        contains=["overlap"],
        options={"sigma_out": memory[:1], "sigma_bound": memory[:1]},
    )


def test_a_memory_over_another_argument_is_refused_by_its_own_name():
    """In place the caller has given no `out` that a message could name."""
    memory = np.zeros(25, np.float32)
    refused(BurtDimensionError, "(C|h)", C=memory.reshape(5, 5), h=memory[5:10], contains=["overlap", "C", "h"])
