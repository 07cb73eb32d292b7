"""How constrained_softmax is called: outputs, layouts, events, refusals, and the documented launch by hand."""

import numpy as np
import pytest
from support import (
    LIMITS,
    NO_EVENT,
    ON_GPU,
    Guarded,
    assert_constrained,
    cases,
    check_constrained,
    normal,
    one_warning,
    poisoned,
    relative_error,
    run_constrained,
    to_host,
    to_target,
)

import burt_numba
from burt_numba import kernels, reference
from burt_numba.backend import cuda

# Outputs -------------------------------------------------------------------------------------------------------------


def test_plain_call_allocates_the_result():
    logits = normal((3, 40))
    out = burt_numba.constrained_softmax(to_target(logits))
    assert type(out) is type(to_target(logits))
    assert to_host(out).tobytes() == run_constrained(logits).out.tobytes()


def test_host_arrays_in_and_out():
    logits = normal((3, 40))
    before = logits.copy()
    temperature, entropy = np.full(3, np.nan, np.float32), np.full(3, np.nan, np.float32)
    out = burt_numba.constrained_softmax(logits, temperature_out=temperature, entropy_out=entropy)
    expected = run_constrained(logits)
    assert isinstance(out, np.ndarray) and out.tobytes() == expected.out.tobytes()
    assert temperature.tobytes() == expected.temperature.tobytes()
    assert entropy.tobytes() == expected.entropy.tobytes()
    assert logits.tobytes() == before.tobytes()


def test_one_dimension():
    logits = normal((40,))
    out = to_host(burt_numba.constrained_softmax(to_target(logits)))
    assert out.shape == (40,) and out.tobytes() == run_constrained(logits[np.newaxis]).out.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("num_classes", cases([7, 300, 1100], [5000, 50_001]))
def test_in_place(dtype, num_classes):
    logits = normal((3, num_classes), dtype=dtype)
    expected = run_constrained(logits).out
    array = to_target(logits.copy())
    assert burt_numba.constrained_softmax(array, out=array) is array
    assert to_host(array).tobytes() == expected.tobytes()


@pytest.mark.parametrize("num_classes", cases([1, 5, 33, 130, 132, 300, 1030], [4097, 4100, 40_001, 40_004]))
@pytest.mark.parametrize("skew", [0, 1, 2, 3])
def test_nothing_outside_the_arrays_is_read_or_written(num_classes, skew):
    """Rounded-up threads wrote past the array: numba/numba#7284. A NaN that was read would be recorded."""
    check_constrained(normal((3, num_classes)), skew=skew)


@pytest.mark.parametrize("skew", range(8))
def test_nothing_outside_float16_arrays_is_read_or_written(skew):
    for num_classes in (131, 136):
        check_constrained(normal((3, num_classes), dtype=np.float16), skew=skew)


def test_validate_output_counts_again_what_is_over_the_bound():
    """The second pass changes no result, and finds for itself a row that could not reach its bound."""
    logits = normal((4, 50))
    logits[1] = 2.0
    logits[2] = -np.inf
    for bounds in (0.2, np.full(4, 0.2, np.float32)):
        plain, validated = run_constrained(logits, bounds), run_constrained(logits, bounds, validate_output=True)
        assert plain.out.tobytes() == validated.out.tobytes()
        assert (plain.counts, validated.counts) == ({3: 1}, {3: 2})
        assert plain.first == validated.first == (1, 3)


def test_on_a_stream():
    logits, stream = normal((3, 40)), cuda.stream()
    array = to_target(logits)
    cuda.synchronize()
    out = burt_numba.constrained_softmax(array, stream=stream)
    stream.synchronize()
    assert to_host(out).tobytes() == run_constrained(logits).out.tobytes()


# Layouts -------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "padded rows": lambda: normal((6, 48))[:, :40],
    "padded by one": lambda: normal((6, 41))[:, :40],
    "odd offset": lambda: normal((6 * 40 + 1,))[1:].reshape(6, 40),
    "odd offset, one row": lambda: normal((301,))[1:].reshape(1, 300),
    "first column dropped": lambda: normal((6, 41))[:, 1:],
    "every other row": lambda: normal((12, 40))[::2],
    "every other class": lambda: normal((6, 80))[:, ::2],
    "transposed": lambda: normal((40, 6)).T,
    "rows backwards": lambda: normal((6, 40))[::-1],
    "classes backwards": lambda: normal((6, 40))[:, ::-1],
    "one row for all": lambda: np.broadcast_to(normal((40,)), (6, 40)),
    "3-D, leading axes collapse": lambda: normal((2, 3, 40)),
    "3-D, leading axes do not": lambda: normal((2, 5, 40))[:, :3],
    "3-D, leading axes swapped": lambda: normal((3, 2, 40)).transpose(1, 0, 2),
    "3-D, classes first": lambda: normal((40, 2, 3)).transpose(1, 2, 0),
    "4-D, every axis cut": lambda: normal((4, 3, 4, 41))[::2, 1:, ::3, :40],
    "4-D, reversed axes": lambda: normal((40, 2, 1, 3)).T,
    "float16, padded by one": lambda: normal((6, 41), dtype=np.float16)[:, :40],
    "float16, odd offset": lambda: normal((241,), dtype=np.float16)[1:].reshape(6, 40),
    "float16, transposed": lambda: normal((40, 6), dtype=np.float16).T,
    "size-1 axes with odd strides": lambda: np.lib.stride_tricks.as_strided(normal((40,)), (1, 1, 40), (5237, 51, 4)),
    "one class with an odd stride": lambda: np.lib.stride_tricks.as_strided(normal((6,)), (6, 1), (4, 51)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    """Only the shape was looked at, and a padded view was read as if packed: ROCm/rocm-libraries#5240.

    Axes of size 1 carry any stride: numba/numba#8708.
    """
    logits = LAYOUTS[layout]()
    before = logits.copy()
    check_constrained(logits)
    # No search, so no freedom in T: the same numbers as from packed rows.
    plain, packed = run_constrained(logits, 20.0).out, run_constrained(before, 20.0).out
    assert relative_error(plain, packed) <= LIMITS[plain.dtype.name]
    assert (logits == before).all()


def test_read_only_input():
    """An array that is only read was refused for being read-only: numba/numba#2521."""
    logits = normal((3, 40))
    logits.flags.writeable = False
    out = burt_numba.constrained_softmax(logits)
    assert out.tobytes() == run_constrained(logits.copy()).out.tobytes()


# Events on the default path ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "value", "code"), [((1, 3), np.nan, 1), ((2, 0), np.inf, 2), ((1, slice(None)), 1.5, 3)]
)
def test_events_become_one_warning(place, value, code):
    logits = normal((3, 10))
    logits[place] = value
    index = {1: 13, 2: 20, 3: 1}[code]
    with one_warning("constrained_softmax", {code: 1}, (index, code)):
        out = burt_numba.constrained_softmax(to_target(logits))
    assert np.isfinite(to_host(out)).all()


def test_bad_row_bounds_become_one_warning():
    bounds = to_target(np.float32([0.2, -1, np.nan]))
    with one_warning("constrained_softmax", {6: 2}, (1, 6)):
        burt_numba.constrained_softmax(to_target(normal((3, 10))), bounds)


def test_several_events_become_one_warning_of_the_first():
    logits = normal((4, 10))
    logits[1] = 0.0
    logits[2, 3:5] = np.inf
    logits[3, 9] = np.nan
    with one_warning("constrained_softmax", {1: 1, 2: 2, 3: 1}, (1, 3)):
        burt_numba.constrained_softmax(to_target(logits))


def test_error_buffer_collects_instead_of_warning():
    logits = normal((3, 10))
    logits[2, 1] = np.nan
    errors = burt_numba.ErrorBuffer()
    for calls in (1, 2):
        to_host(burt_numba.constrained_softmax(to_target(logits), errors=errors))
        assert (errors.counts, errors.first_index, errors.code) == ({1: calls}, 21, 1)
    errors.reset()
    assert (errors.counts, errors.first_index, errors.code) == ({}, None, 0)
    burt_numba.check()


def test_no_event_no_warning():
    burt_numba.constrained_softmax(to_target(normal((3, 10))))
    burt_numba.check()


# Refusals ------------------------------------------------------------------------------------------------------------

LOGITS = normal((3, 9))


def refused(exception, argument, *args, contains=(), **kwargs):
    """The call raises before anything runs, and says which argument, what it was and what it should have been."""
    with pytest.raises(exception, match=f"^constrained_softmax: {argument}: ") as caught:
        burt_numba.constrained_softmax(*args, **kwargs)
    for text in contains:
        assert text in str(caught.value)
    if isinstance(caught.value, burt_numba.BurtDimensionError):
        assert caught.value.code == 6


@pytest.mark.parametrize("logits", [[[1.0, 2.0]], None, "logits", 3.5])
def test_refuses_what_is_no_array(logits):
    refused(TypeError, "logits", logits, contains=[type(logits).__name__])


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.bool_, np.complex64, np.uint8])
def test_refuses_types(dtype):
    refused(TypeError, "logits", np.zeros((3, 9), dtype), contains=[np.dtype(dtype).name, "float32", "float16"])


def test_refuses_float64_and_shows_the_conversion():
    refused(TypeError, "logits", np.zeros((3, 9)), contains=["float64", ".astype(np.float32)"])


def test_refuses_shapes():
    refused(burt_numba.BurtDimensionError, "logits", np.array(1, np.float32), contains=["1 dimension"])
    refused(burt_numba.BurtDimensionError, "logits", np.zeros((3, 0), np.float32), contains=["(3, 0)"])


@pytest.mark.parametrize(
    ("argument", "value"),
    [
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
    refused(ValueError, argument, LOGITS, contains=[str(value)], **{argument: value})


def test_refuses_crossed_temperatures():
    refused(ValueError, "temperature_m(in|ax)", LOGITS, temperature_min=2.0, temperature_max=1.0, contains=["2", "1"])


@pytest.mark.parametrize("shape", [(9,), (3, 1), (4,), (1,)])
def test_refuses_row_bounds_of_another_shape(shape):
    bounds = np.zeros(shape, np.float32)
    refused(burt_numba.BurtDimensionError, "entropy_bound", LOGITS, bounds, contains=["(3,)", str(shape)])


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.complex64])
def test_refuses_row_bounds_of_another_type(dtype):
    refused(TypeError, "entropy_bound", LOGITS, np.zeros(3, dtype), contains=[np.dtype(dtype).name])


def test_refuses_outputs():
    refused(burt_numba.BurtDimensionError, "out", LOGITS, out=np.zeros((3, 8), np.float32), contains=["(3, 8)"])
    refused(TypeError, "out", LOGITS, out=np.zeros((3, 9), np.int32), contains=["int32"])
    refused(TypeError, "out", LOGITS, out=[0.0] * 27)
    refused(ValueError, "out", LOGITS, out=np.zeros((9, 3), np.float32).T, contains=["contiguous"])
    refused(ValueError, "out", LOGITS, out=np.zeros((3, 10), np.float32)[:, :9], contains=["contiguous"])
    read_only = np.zeros((3, 9), np.float32)
    read_only.flags.writeable = False
    refused(ValueError, "out", LOGITS, out=read_only)


@pytest.mark.parametrize("argument", ["temperature_out", "entropy_out"])
def test_refuses_row_outputs(argument):
    dimension = burt_numba.BurtDimensionError
    refused(dimension, argument, LOGITS, contains=["(3,)", "(4,)"], **{argument: np.zeros(4, np.float32)})
    refused(TypeError, argument, LOGITS, contains=["float16"], **{argument: np.zeros(3, np.float16)})
    refused(TypeError, argument, LOGITS, **{argument: [0.0] * 3})
    refused(ValueError, argument, LOGITS, **{argument: np.zeros(6, np.float32)[::2]})


def test_refuses_an_output_that_partly_overlaps_the_input():
    memory = to_target(normal((100,)))
    before = to_host(memory).copy()
    refused(ValueError, "out", memory[:27].reshape(3, 9), out=memory[9:36].reshape(3, 9), contains=["overlap"])
    assert to_host(memory).tobytes() == before.tobytes()
    refused(ValueError, "temperature_out", memory[:27].reshape(3, 9), temperature_out=memory[5:8])


def test_refuses_outputs_that_overlap_each_other():
    memory = to_target(normal((100,)))
    refused(
        ValueError, "(temperature|entropy)_out", to_target(LOGITS), temperature_out=memory[:3], entropy_out=memory[2:5]
    )


def test_refusals_leave_the_outputs_alone():
    out = poisoned((3, 9))
    with pytest.raises(ValueError):
        burt_numba.constrained_softmax(to_target(LOGITS), -1.0, out=out)
    assert np.isnan(to_host(out)).all()


def test_refuses_bfloat16_by_name():
    """bfloat16 and float16 export the same type string, so one can be read as the other: pytorch/pytorch#129621."""
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([[1, 2, 3]], dtype=torch.bfloat16, device="cuda" if ON_GPU else "cpu")
    refused(TypeError, "logits", tensor, contains=["bfloat16"])


# The documented launch, by hand --------------------------------------------------------------------------------------


def launch_by_hand(
    logits, block, shared_bytes, *, bound=0.2, row_bounds=(), with_rows=True, parameters=(0.01, 10.0, 20)
):
    rows, num_classes = logits.shape
    errors = np.zeros(8, np.int64)
    errors[0] = NO_EVENT
    out = Guarded(np.full(logits.shape, np.nan, logits.dtype), 777)
    temperature, entropy, errors = poisoned(rows * with_rows), poisoned(rows * with_rows), to_target(errors)
    kernels.constrained_softmax_kernel[rows, block, 0, shared_bytes](
        Guarded(logits, np.nan).array,
        out.array,
        rows,
        num_classes,
        bound,
        *parameters,
        to_target(np.asarray(row_bounds, np.float32)),
        temperature,
        entropy,
        errors,
    )
    out.check()
    return to_host(out.array), to_host(temperature), to_host(entropy), to_host(errors)


def whole_warps(threads):
    return -(-threads // 32) * 32


@pytest.mark.parametrize("num_classes", cases([1, 33, 100, 257], [1024, 1025, 5000]))
@pytest.mark.parametrize("staged", [True, False])
def test_documented_launch(num_classes, staged):
    logits = normal((3, num_classes), seed=num_classes)
    block, shared_bytes = whole_warps(min(num_classes, 1024)), num_classes * 4 * staged
    out, temperature, entropy, errors = launch_by_hand(logits, block, shared_bytes)
    assert_constrained(run_constrained(logits)._replace(out=out, temperature=temperature, entropy=entropy), logits)
    first, counts = NO_EVENT, reference.constrained_softmax(logits).counts
    if counts:
        first = min(8 * row + 3 for row in range(3) if temperature[row] == np.float32(0.01))
    assert errors.tolist() == [first, *(counts.get(code, 0) for code in range(1, 8))]


@pytest.mark.parametrize("block", [32, 64, 96, 128, 160, 256])
@pytest.mark.parametrize("shared_bytes", [0, 200 * 4, 1024])
def test_documented_kernel_with_any_block(block, shared_bytes):
    """Any whole number of warps, with the row staged, with more room than that, and with none."""
    logits = normal((2, 200))
    out, temperature, entropy, _ = launch_by_hand(logits, block, shared_bytes)
    assert_constrained(run_constrained(logits)._replace(out=out, temperature=temperature, entropy=entropy), logits)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_documented_kernel_events_and_row_bounds(dtype):
    logits = normal((5, 50), dtype=dtype)
    logits[1, 7:9], logits[2, 0], logits[3] = np.nan, np.inf, 0.25
    bounds = np.float32([0.2, 1.0, 20.0, 0.5, -1.0])
    out, temperature, entropy, errors = launch_by_hand(logits, 64, 200, row_bounds=bounds)
    expected = reference.constrained_softmax(logits, bounds)
    assert errors.tolist() == [3 * 8 + 3, *(expected.counts.get(code, 0) for code in range(1, 8))]
    outcome = run_constrained(logits, bounds)
    assert_constrained(outcome._replace(out=out, temperature=temperature, entropy=entropy), logits, bounds)


def test_documented_kernel_without_row_outputs():
    logits = normal((2, 40))
    out, temperature, entropy, _ = launch_by_hand(logits, 64, 160, with_rows=False)
    assert temperature.size == entropy.size == 0
    assert out.tobytes() == launch_by_hand(logits, 64, 160)[0].tobytes()


def test_documented_kernel_parameters():
    logits = normal((3, 40))
    out, temperature, entropy, _ = launch_by_hand(logits, 64, 160, bound=0.5, parameters=(0.3, 0.5, 20))
    outcome = run_constrained(logits, 0.5, 0.3, 0.5)
    assert_constrained(outcome._replace(out=out, temperature=temperature, entropy=entropy), logits, 0.5, 0.3, 0.5)
