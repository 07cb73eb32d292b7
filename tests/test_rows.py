"""host/rows.py: exact division by multiplication, and the rows of any strided array in a few launches."""

from importlib import import_module

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import check_attention, check_constrained, normal, run_attention, run_constrained

from burt_numba import simulator
from burt_numba.host import rows as rows_module
from burt_numba.host.rows import MOST_ROWS, Divisor, row_segments

LARGEST = 2**28 - 1

# Before a test puts another number in place of MOST_ROWS: they take it when they are imported, for good.
for operation in ("constrained_softmax", "attention_softmax"):
    import_module(f"burt_numba.{operation}")


# Division ------------------------------------------------------------------------------------------------------------


def quotient(number, divisor):
    """As device code does it: 64-bit arithmetic on arguments of 32 bits."""
    _, magic, shift = Divisor.of(divisor)
    assert 0 < magic < 2**31 and number * magic < 2**63
    return number * magic >> shift


@given(st.integers(0, LARGEST), st.integers(1, MOST_ROWS))
@example(0, 1)
@example(LARGEST, 1)
@example(LARGEST, MOST_ROWS)
@example(LARGEST, MOST_ROWS - 1)
def test_division_is_exact(number, divisor):
    assert quotient(number, divisor) == number // divisor


@given(st.integers(1, MOST_ROWS), st.integers(0, LARGEST), st.sampled_from([-1, 0, 1]))
def test_division_is_exact_around_multiples(divisor, number, step):
    number = min(max(number // divisor * divisor + step, 0), LARGEST)
    assert quotient(number, divisor) == number // divisor


def test_division_by_the_neighbours_of_powers_of_two():
    divisors = {2**power + step for power in range(28) for step in (-1, 0, 1)} - {0, MOST_ROWS + 1}
    for divisor in divisors:
        last = LARGEST // divisor * divisor
        for number in (0, divisor - 1, divisor, last - 1, last, LARGEST, LARGEST // 2, MOST_ROWS, MOST_ROWS - 1):
            assert quotient(number, divisor) == number // divisor


def test_division_by_small_divisors_of_many_numbers():
    numbers = np.random.default_rng(0).integers(0, LARGEST + 1, 20_000)
    for divisor in range(1, 300):
        _, magic, shift = Divisor.of(divisor)
        assert (numbers * magic >> shift == numbers // divisor).all()


def test_a_divisor_one_off_is_found():
    """The same test with a magic number of one less fails: the limits of this file see an error of one."""
    _, magic, shift = Divisor.of(7)
    assert any(number * (magic - 1) >> shift != number // 7 for number in (7, 14, LARGEST // 7 * 7))


def test_arguments_of_a_launch():
    assert [(number.value, number.type) for number in Divisor.of(3).numbers()] == [
        (3, "i4"),
        (2**30 // 3 + 1, "i4"),
        (30, "i4"),
    ]


# Segments ------------------------------------------------------------------------------------------------------------


def offsets_of(shape, strides):
    """The offset of every row, by NumPy: rows in C order."""
    offsets = np.zeros(shape, np.int64)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        steps = np.arange(size) * stride
        offsets += steps.reshape([-1 if other == axis else 1 for other in range(len(shape))])
    return offsets.ravel().tolist()


def walk(segments, operand):
    """The offset of every row, as device code finds it."""
    offsets = []
    for segment in segments:
        stride0, stride1, stride2 = segment.strides[operand]
        for row in range(segment.rows):
            outer, index2 = divmod(row, segment.size2)
            index0, index1 = divmod(outer, segment.size1)
            offsets.append(segment.origins[operand] + index0 * stride0 + index1 * stride1 + index2 * stride2)
    return offsets


def check_segments(shape, strides):
    segments = list(row_segments(shape, strides))
    total = int(np.prod(shape, dtype=np.int64))
    assert [segment.first_row for segment in segments] == [
        sum(earlier.rows for earlier in segments[:number]) for number in range(len(segments))
    ]
    assert sum(segment.rows for segment in segments) == total
    for segment in segments:
        assert segment.rows % (segment.size1 * segment.size2) == 0
        assert 0 < segment.rows <= rows_module.MOST_ROWS
    for operand, steps in enumerate(strides):
        assert walk(segments, operand) == offsets_of(shape, steps)
    return segments


@st.composite
def arrays(draw):
    """A shape, and for one to three operands the strides of packed, broadcast, swapped, reversed or any arrays."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=5)))
    strides = []
    for _ in range(draw(st.integers(1, 3))):
        order = draw(st.permutations(range(len(shape))))
        packed, step = [0] * len(shape), draw(st.integers(1, 9))
        for axis in order:
            packed[axis], step = step, step * (shape[axis] + draw(st.integers(0, 1)))
        change = st.sampled_from(["keep", "keep", "keep", "broadcast", "reverse", "any"])
        changed = {"keep": lambda s: s, "broadcast": lambda s: 0, "reverse": lambda s: -s}
        for axis in range(len(shape)):
            chosen = draw(change)
            any_stride = st.integers(-(2**40), 2**40)
            packed[axis] = draw(any_stride) if chosen == "any" else changed[chosen](packed[axis])
        strides.append(tuple(packed))
    return shape, tuple(strides)


@given(arrays())
def test_every_row_has_its_offset(array):
    check_segments(*array)


@given(arrays(), st.integers(1, 40))
def test_every_row_has_its_offset_when_launches_are_small(array, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "MOST_ROWS", most)
        check_segments(*array)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((), ((),)),
        ((1, 1, 1), ((17, 5, 3),)),
        ((70_000,), ((8,),)),
        ((2, 3, 4, 5, 6), ((360, 120, 30, 6, 1),)),
        ((2, 3, 4, 5, 6), ((0, 0, 0, 0, 0),)),
        ((4, 3, 2), ((1, 4, 12),)),
        ((2, 1, 3), ((3, -999, 1), (3, 77, 1))),
    ],
)
def test_one_launch_is_enough(shape, strides):
    assert len(check_segments(shape, strides)) == 1


def test_packed_rows_are_one_axis():
    (segment,) = row_segments((6, 5, 4), ((200, 40, 10), (20, 4, 1)))
    assert (segment.rows, segment.size1, segment.size2) == (120, 1, 1)


def test_the_axes_of_all_operands_decide():
    """The first operand is packed; the second repeats its outer axis, so that the two cannot be walked as one."""
    (segment,) = row_segments((6, 5), ((5, 1), (0, 1)))
    assert (segment.size1, segment.size2) == (1, 5)


def test_more_rows_than_one_launch_takes():
    segments = list(row_segments((3 * MOST_ROWS + 5,), ((8,),)))
    assert [segment.rows for segment in segments] == [MOST_ROWS, MOST_ROWS, MOST_ROWS, 5]
    assert [segment.origins for segment in segments] == [(8 * MOST_ROWS * launch,) for launch in range(4)]
    segments = list(row_segments((2, MOST_ROWS + 1), ((0, 8),)))
    assert [(segment.first_row, segment.rows, segment.origins) for segment in segments] == [
        (0, MOST_ROWS, (0,)),
        (MOST_ROWS, 1, (8 * MOST_ROWS,)),
        (MOST_ROWS + 1, MOST_ROWS, (0,)),
        (2 * MOST_ROWS + 1, 1, (8 * MOST_ROWS,)),
    ]


# Through the functions -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_launches(monkeypatch):
    """Launches of 4 rows at most, and no call prepared before."""
    monkeypatch.setattr(rows_module, "MOST_ROWS", 4)
    for function in ("constrained_softmax", "attention_softmax"):
        monkeypatch.setattr(import_module(f"burt_numba.{function}")._OPERATION, "_calls", {})


LAYOUTS = {
    "packed": lambda: normal((3, 3, 2, 12)),
    "padded": lambda: normal((3, 3, 4, 13))[:, :, 1:3, :12],
    "swapped": lambda: normal((12, 2, 3, 3)).T,
    "repeated": lambda: np.broadcast_to(normal((3, 1, 2, 12)), (3, 3, 2, 12)),
    "backwards": lambda: normal((3, 3, 2, 12))[::-1, :, ::-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("small_launches")
def test_constrained_softmax_in_small_launches(layout):
    logits = np.array(LAYOUTS[layout]())
    logits[1, 2, 0, 5], logits[2, 2, 1] = np.nan, 0.5
    bounds = np.full((3, 3, 2), 0.2, np.float32)
    bounds[0, 1, 1], bounds[2, 0, 0] = 1.5, -1
    check_constrained(logits, bounds)
    check_constrained(LAYOUTS[layout]())
    # One event a row that missed its bound; the second pass finds the same rows.
    outcome = run_constrained(logits, np.abs(bounds), validate_output=True)
    assert outcome.counts == {1: 1, 3: 2}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", [(3, 1, 1, 12), (3, 2, 12), (12,), None])
@pytest.mark.usefixtures("small_launches")
def test_attention_softmax_in_small_launches(layout, mask):
    scores = LAYOUTS[layout]()
    check_attention(scores, None if mask is None else normal(mask, spread=1.0), True, causal_offset=4)
    bad = np.array(scores)
    bad[2, 1, 1, 3] = np.inf
    outcome = run_attention(bad, None, True, causal_offset=4)
    assert (outcome.counts, outcome.first) == ({2: 1}, (np.ravel_multi_index((2, 1, 1, 3), bad.shape), 2))


@pytest.mark.simulator_only("launches are recorded in the simulator")
@pytest.mark.usefixtures("small_launches")
def test_as_many_launches_as_needed(monkeypatch):
    grids, launch = [], simulator.launch

    def record(kernel, grid, *args, **kwargs):
        grids.append(kwargs["name"])
        return launch(kernel, grid, *args, **kwargs)

    monkeypatch.setattr(simulator, "launch", record)
    run_constrained(normal((9, 12)), validate_output=True)
    assert grids == ["constrained_softmax_rows"] * 3 + ["distribution_check"] * 3
