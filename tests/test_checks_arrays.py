"""Arrays of the caller in a checked launch: every type and index, views that share memory, odd shapes."""

from __future__ import annotations

import os

import numpy as np
import pytest

if os.environ.get("BURT_NUMBA_TEST_TARGET") == "gpu":
    pytest.skip("tests the simulator, which a GPU run does not use", allow_module_level=True)

from checked_pairs import facts, ramp
from support import poisoned

from burt_numba import simulator
from burt_numba.backend import cuda
from burt_numba.simulator import OutOfBoundsError, RaceError


@cuda.jit
def copy(source, target):
    i = cuda.grid(1)
    if i < target.size:
        target[i] = source[i]


@cuda.jit
def copy_matrix(source, target):
    y, x = cuda.grid(2)
    target[y, x] = source[y, x]


# Elements and indices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i2", "i4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"])
def test_elements_of_every_type(dtype):
    dtype = np.dtype(dtype)

    def through_memory(source, target):
        tile = cuda.shared.array(8, dtype)
        own = cuda.local.array(1, dtype)
        i = cuda.threadIdx.x
        tile[i] = source[i]
        cuda.syncthreads()
        own[0] = tile[7 - i]
        target[i] = own[0]

    def race(target):
        target[cuda.threadIdx.x // 2] = 1

    source, target = ramp(8, dtype=dtype), np.zeros(8, dtype)
    with simulator.checks():
        simulator.launch(through_memory, 1, 8, (source, target))
        np.testing.assert_array_equal(target, source[::-1])
        with pytest.raises(RaceError, match=r"target\[0\]"):
            simulator.launch(race, 1, 8, (target,))


@pytest.mark.parametrize("kind", [int, np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.intp])
def test_indices_of_every_type(kind):
    def kernel(values, matrix, out):
        i = kind(cuda.threadIdx.x)
        value = values[i] + matrix[i, kind(1)]
        out[i] = value
        out[i] += kind(1)
        cuda.atomic.add(out, i, 1)

    def store(values, index):
        values[kind(index)] = 0

    values, matrix, out = ramp(4), ramp(4, 2), np.zeros(4, np.float32)
    with simulator.checks():
        simulator.launch(kernel, 1, 4, (values, matrix, out))
        np.testing.assert_array_equal(out, values + matrix[:, 1] + 2)
        for index in (4, -1) if kind is int or np.iinfo(kind).min < 0 else (4,):
            with pytest.raises(OutOfBoundsError, match=rf"index {index}\b"):
                simulator.launch(store, 1, 1, (values, index))


def test_an_index_that_is_no_integer():
    def kernel(values):
        values[1.0] = 0

    with pytest.raises((IndexError, TypeError)), simulator.checks():
        simulator.launch(kernel, 1, 1, (ramp(4),))


def test_what_was_stored_before_an_error_stays():
    buffer = poisoned(40)
    with pytest.raises(OutOfBoundsError), simulator.checks():
        copy[1, 32](ramp(20), buffer[4:36])
    np.testing.assert_array_equal(buffer[4:24], ramp(20))
    assert np.isnan(buffer[:4]).all() and np.isnan(buffer[24:]).all()


# Views and memory that is shared ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base[::-1],
        lambda base: base[::2],
        lambda base: base[1:-1:3],
        lambda base: base[-2:3:-4],
        lambda base: base.reshape(8, 8).T[3],
        lambda base: base.reshape(8, 8)[::-1, 2],
        lambda base: base.reshape(4, 4, 4).transpose(2, 0, 1)[1, 2, ::-1],
    ],
)
def test_strided_arguments(view):
    def load(values, index):
        _ = values[index]

    base = ramp(64)
    source, expected = view(ramp(64)), base.copy()
    target = view(base)
    target[:] = -1
    view(expected)[:] = source
    with simulator.checks():
        copy[5, 13](source, target)
        # Every cell of the caller's buffer, those between the elements too.
        np.testing.assert_array_equal(base, expected)
        for index in (source.size, -1):
            with pytest.raises(OutOfBoundsError, match=rf"index {index}\b"):
                simulator.launch(load, 1, 1, (source, index))


@pytest.mark.parametrize(
    ("views", "race"),
    [
        (lambda base: (base, base), False),
        (lambda base: (base[::2], base[1::2]), False),
        (lambda base: (base[:32], base[32:]), False),
        (lambda base: (base[:-1], base[1:]), True),
        (lambda base: (base, base[::-1]), True),
        (lambda base: (base[:32], base[16:48]), True),
        # Words, and a half of the next one each.
        (lambda base: (base[:-1], base.view(np.int16)[3::2]), True),
        # Words, and halves of words after them.
        (lambda base: (base[:32], base.view(np.int16)[64:96]), False),
    ],
)
def test_arguments_that_share_memory(views, race):
    base = ramp(64, dtype=np.int32)
    source, target = views(base)
    expected = base.copy()
    views(expected)[1][:] = source.copy()
    with simulator.checks():
        if race:
            with pytest.raises(RaceError) as caught:
                copy[2, 32](source, target)
            message = facts(caught.value)
            assert "source[" in message and "target[" in message
        else:
            copy[2, 32](source, target)
            np.testing.assert_array_equal(base, expected)


def test_an_array_and_its_transpose():
    matrix = ramp(4, 4)
    with simulator.checks():
        copy_matrix[1, (4, 4)](matrix, ramp(4, 4).T)
        with pytest.raises(RaceError, match=r"(source|target)\["):
            copy_matrix[1, (4, 4)](matrix, matrix.T)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_view_of_smaller_elements_that_is_made_later(kind):
    def kernel(words):
        if cuda.threadIdx.x == 0:
            if kind == "read":
                _ = words[0]
            else:
                words[0] = 1
        halves = words.view(np.int16)
        if cuda.threadIdx.x == 1:
            halves[1] = 1

    with pytest.raises(RaceError, match=r"words\[1\]"), simulator.checks():
        simulator.launch(kernel, 1, 2, (np.zeros(1, np.int32),))


def test_broadcast_arguments():
    out = poisoned((4, 8))
    with simulator.checks():
        copy_matrix[(2, 2), (2, 4)](np.broadcast_to(ramp(8), (4, 8)), out)
        np.testing.assert_array_equal(out, np.tile(ramp(8), (4, 1)))
        # Every element of one cell: four threads write each of them.
        shared_rows = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (4, 8), (0, 4))
        with pytest.raises(RaceError, match=r"target\["):
            copy_matrix[(2, 2), (2, 4)](ramp(4, 8), shared_rows)


# Other arguments ----------------------------------------------------------------------------------------------------


def test_arguments_are_not_copied():
    """Four terabytes of one number."""

    @cuda.jit
    def kernel(values, out, past):
        out[cuda.threadIdx.x] = values[values.size - 1 - cuda.threadIdx.x + past]

    huge, out = np.broadcast_to(np.float32(7.0), (1 << 40,)), poisoned(4)
    with simulator.checks():
        kernel[1, 4](huge, out, 0)
        np.testing.assert_array_equal(out, 7)
        with pytest.raises(OutOfBoundsError, match=rf"index {1 << 40}\b"):
            kernel[1, 4](huge, out, 1)


def test_read_only_arguments():
    values = ramp(4)
    values.flags.writeable = False
    out = poisoned(4)
    with simulator.checks():
        copy[1, 4](values, out)
        np.testing.assert_array_equal(out, values)
        with pytest.raises(ValueError, match="read-only"):
            copy[1, 4](out, values)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_arguments(shape):
    empty = np.zeros(shape, np.float32)
    seen = []

    def sizes(values):
        seen.append((values.size, values.shape, len(values)))

    def load(values):
        _ = values[(0,) * len(shape)]

    def store(values):
        values[(-1,) * len(shape)] = 0

    with simulator.checks():
        simulator.launch(sizes, 1, 1, (empty,))
        assert seen == [(0, shape, shape[0])]
        copy[1, 4](empty.ravel(), empty.ravel())
        for kernel, index in ((load, 0), (store, -1)):
            with pytest.raises(OutOfBoundsError, match=rf"index {index}\b"):
                simulator.launch(kernel, 1, 1, (empty,))


def test_arguments_of_no_dimension():
    def double(cell, out):
        if cuda.threadIdx.x == 0:
            cell[()] = 2 * cell[()]
        cuda.syncthreads()
        out[cuda.threadIdx.x] = cell[()]

    def race(cell):
        cell[()] = cuda.threadIdx.x

    cell, out = np.array(21.0), poisoned(4)
    with simulator.checks():
        simulator.launch(double, 1, 4, (cell, out))
        assert cell == 42
        np.testing.assert_array_equal(out, 42)
        with pytest.raises(RaceError, match=r"\bcell\b"):
            simulator.launch(race, 1, 4, (cell,))


def test_records_and_scalars_are_handed_on():
    @cuda.jit
    def kernel(records, factor, out):
        i = cuda.threadIdx.x
        records[i].weight *= factor
        out[i] = records[i]["count"]

    records = np.array([(1, 2.0), (3, 4.0)], [("count", "i4"), ("weight", "f4")])
    out = poisoned(2)
    with simulator.checks():
        kernel[1, 2](records, 10, out)
    assert list(records["weight"]) == [20, 40]
    assert list(out) == [1, 3]


def test_what_a_kernel_may_ask_of_an_array():
    base = ramp(4, 6)
    seen = []

    def ask(values):
        views = (values, values.T, values[1:, ::2], values[2], values.reshape(3, 8), values.ravel(), values[..., 1])
        seen.append([(a.shape, a.size, a.ndim, a.dtype, a.strides, a.itemsize, a.nbytes, len(a)) for a in views])
        seen.append([float(value) for value in values[1]])
        seen.append(float(values.view(np.int32)[0, 1]))
        seen.append(values[-1 + 2, 3] is not None)

    simulator.launch(ask, 1, 1, (base,))
    with simulator.checks():
        simulator.launch(ask, 1, 1, (base,))
    assert seen[:4] == seen[4:]
