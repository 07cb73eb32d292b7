"""What kernels call in the block simulator: warp operations, memory, atomics and arithmetic."""

from __future__ import annotations

import math
import os
from fractions import Fraction

import numpy as np
import pytest

if os.environ.get("BURT_NUMBA_TEST_TARGET") == "gpu":
    pytest.skip("tests the simulator, which a GPU run does not use", allow_module_level=True)

from hypothesis import given, settings
from hypothesis import strategies as st

from burt_numba.backend import cuda
from burt_numba.simulator import SimulatorError, launch

pytestmark = pytest.mark.no_cuda_checks("kernels are wrong on purpose, and show what is seen without the checks")

FULL = 0xFFFFFFFF


def lanes_of(mask: int, threads: int = 32) -> list[int]:
    return [lane for lane in range(threads) if mask >> lane & 1]


def per_lane(function, threads: int = 32) -> list:
    """What ``function(lane)`` returns in each thread of one block."""
    results: list = [None] * threads

    def kernel():
        results[cuda.threadIdx.x] = function(cuda.threadIdx.x)

    launch(kernel, 1, threads, ())
    return results


masks = st.integers(1, FULL)
values = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=32, max_size=32)


@settings(max_examples=40, deadline=None)
@given(masks, values, st.integers(0, 40))
def test_broadcast_from_any_lane_of_any_mask(mask, values, n):
    inside = lanes_of(mask)
    source = inside[n % len(inside)]

    def broadcast(lane):
        # The source lane is taken modulo 32.
        return cuda.shfl_sync(mask, values[lane], source + 32) if lane in inside else None

    assert per_lane(broadcast) == [values[source] if lane in inside else None for lane in range(32)]


@pytest.mark.parametrize("n", [0, 1, 2, 5, 16, 31])
@pytest.mark.parametrize("kind", [np.int32, np.int64, np.float32, np.float64, int, float])
def test_shuffles_of_a_whole_warp(n, kind):
    data = [kind(lane * 3 - 7) for lane in range(32)]

    def shuffle(lane):
        return (
            cuda.shfl_sync(FULL, data[lane], n),
            cuda.shfl_up_sync(FULL, data[lane], n),
            cuda.shfl_down_sync(FULL, data[lane], n),
            cuda.shfl_xor_sync(FULL, data[lane], n),
        )

    for lane, got in enumerate(per_lane(shuffle)):
        up = data[lane - n] if lane >= n else data[lane]
        down = data[lane + n] if lane + n < 32 else data[lane]
        assert got == (data[n], up, down, data[lane ^ n])
        assert {type(value) for value in got} == {kind}


def test_shuffles_keep_nan_and_signed_zero():
    data = [np.float32(value) for value in (float("nan"), -0.0, float("inf"), 1.0)] * 8
    got = per_lane(lambda lane: cuda.shfl_xor_sync(FULL, data[lane], 1))
    assert [value.tobytes() for value in got] == [data[lane ^ 1].tobytes() for lane in range(32)]


@pytest.mark.parametrize("value", [True, np.bool_(False), "x", np.zeros(2), None])
def test_shuffle_refuses_what_numba_refuses(value):
    with pytest.raises(TypeError, match=r"cuda\.shfl_sync: expected a 32- or 64-bit integer or float"):
        per_lane(lambda lane: cuda.shfl_sync(FULL, value, 0))


def test_reading_a_lane_outside_the_mask_is_an_error():
    def kernel():
        if cuda.laneid < 4:
            cuda.shfl_down_sync(0xF, 1, 2)

    with pytest.raises(SimulatorError, match="lane 2 reads from lane 4, which is not in the mask 0x0000000f"):
        launch(kernel, 1, 32, ())


def test_calling_with_a_mask_without_oneself_is_an_error():
    with pytest.raises(SimulatorError, match=r"cuda\.syncwarp: lane 1 is not in its own mask 0x00000001"):
        per_lane(lambda lane: cuda.syncwarp(1))


def test_absent_lanes_of_a_partial_warp_give_poison():
    got = per_lane(lambda lane: cuda.shfl_down_sync(FULL, np.float32(lane), 4), 40)
    np.testing.assert_array_equal(got[32:36], [36, 37, 38, 39])
    assert np.isnan(got[36:]).all()
    ints = per_lane(lambda lane: cuda.shfl_down_sync(FULL, np.int32(1), 1), 3)
    assert ints == [1, 1, np.int32(-0x54545455)]
    assert per_lane(lambda lane: cuda.shfl_down_sync(FULL, 1, 1), 1) == [-0x54545455]


@settings(max_examples=40, deadline=None)
@given(masks, st.integers(0, FULL), st.sampled_from([32, 20, 1, 45]))
def test_votes(mask, predicates, threads):
    mask |= 1

    def vote(thread):
        lane = thread % 32
        if not mask >> lane & 1:
            return None
        vote = predicates >> lane & 1
        return (
            cuda.all_sync(mask, vote),
            cuda.any_sync(mask, vote == 1),
            cuda.eq_sync(mask, vote),
            int(cuda.ballot_sync(mask, vote)) & FULL,
        )

    got = per_lane(vote, threads)
    for start in range(0, threads, 32):
        inside = lanes_of(mask, min(32, threads - start))
        votes = [predicates >> lane & 1 for lane in inside]
        ballot = sum(1 << lane for lane in inside if predicates >> lane & 1)
        expected = (all(votes), any(votes), len(set(votes)) == 1, ballot)
        assert [got[start + lane] for lane in inside] == [expected] * len(inside)


@settings(max_examples=30, deadline=None)
@given(masks, st.lists(st.sampled_from([0, 1, -1, 0.0, -0.0, 1.5, math.nan]), min_size=32, max_size=32))
def test_matches(mask, values):
    inside = lanes_of(mask)

    def match(lane):
        if lane in inside:
            return int(cuda.match_any_sync(mask, values[lane])) & FULL, cuda.match_all_sync(mask, values[lane])
        return None

    def same(a, b):
        return type(a) is type(b) and np.array(a).tobytes() == np.array(b).tobytes()

    got = per_lane(match)
    for lane in inside:
        equal = [other for other in inside if same(values[other], values[lane])]
        assert got[lane][0] == sum(1 << other for other in equal)
        agreed = len(equal) == len(inside)
        assert (int(got[lane][1][0]) & FULL, got[lane][1][1]) == (mask if agreed else 0, agreed)


def test_votes_are_int32_as_in_numba():
    got = per_lane(lambda lane: cuda.ballot_sync(FULL, True))
    assert got == [-1] * 32
    assert cuda.popc(got[0]) == 32
    assert cuda.clz(got[0]) == 0
    assert cuda.popc(got[0] & FULL) == 32


def test_disjoint_masks_of_one_warp_are_apart():
    def kernel(result):
        lane = cuda.laneid
        mask = 0x0000FFFF if lane < 16 else 0xFFFF0000
        rounds = 1 if lane < 16 else 3
        value = lane
        for _ in range(rounds):
            value = cuda.shfl_xor_sync(mask, value, 1) + 100
        cuda.syncwarp()
        result[lane] = value

    result = np.zeros(32, np.int64)
    launch(kernel, 1, 32, (result,))
    np.testing.assert_array_equal(result, [(lane ^ 1) + (100 if lane < 16 else 300) for lane in range(32)])


def test_negative_and_numpy_masks_are_the_full_mask():
    assert (
        per_lane(lambda lane: cuda.shfl_sync((-1, np.uint32(FULL), FULL, np.int64(-1))[lane % 4], lane, 3)) == [3] * 32
    )


def test_activemask_and_lanemask():
    def kernel(masks):
        lane = cuda.laneid
        if lane % 3 == 0:
            masks[lane, 0] = cuda.activemask()
        elif lane == 4:
            return
        else:
            masks[lane, 0] = cuda.activemask()
        masks[lane, 1] = cuda.activemask()
        masks[lane, 2] = cuda.lanemask_lt()

    masks = np.zeros((32, 3), np.int64)
    launch(kernel, 1, 32, (masks,))
    threes = sum(1 << lane for lane in range(0, 32, 3))
    for lane in range(32):
        if lane != 4:
            # The others of the last round go together or in two parts; a lane is always in its own mask.
            assert masks[lane, 0] == (threes if lane % 3 == 0 else FULL & ~threes & ~(1 << 4))
            assert masks[lane, 1] >> lane & 1
            assert masks[lane, 2] == (1 << lane) - 1


def test_nanosleep_lets_the_others_run():
    def kernel(flag):
        if cuda.threadIdx.x == 0:
            while flag[0] == 0:
                cuda.nanosleep(100)
        else:
            cuda.threadfence()
            flag[0] = 1

    launch(kernel, 1, 2, (np.zeros(1, np.int32),))


def test_sleeping_for_ever_is_an_error():
    def kernel():
        while True:
            cuda.nanosleep(1)

    with pytest.raises(SimulatorError, match="slept 100000 times"):
        launch(kernel, 1, 1, ())


def test_shared_arrays_are_per_block_and_line_and_start_poisoned():
    def kernel(seen):
        floats = cuda.shared.array((2, 4), np.float32)
        ints = cuda.shared.array(8, cuda.int32)
        halves = cuda.shared.array(8, dtype="float16")
        if cuda.threadIdx.x == 0:
            seen.append((floats.copy(), ints.copy(), halves.copy()))
        cuda.syncthreads()
        floats[0, cuda.threadIdx.x] = cuda.threadIdx.x
        cuda.syncthreads()
        assert list(floats[0]) == [0, 1, 2, 3]

    seen: list = []
    launch(kernel, 3, 4, (seen,))
    for floats, ints, halves in seen:
        assert floats.shape == (2, 4) and floats.dtype == np.float32 and np.isnan(floats).all()
        assert ints.dtype == np.int32 and (ints.view(np.uint8) == 0xAB).all()
        assert halves.dtype == np.float16 and np.isnan(halves).all()


def test_shared_array_in_a_device_function_is_one_array():
    def scratch():
        return cuda.shared.array(4, np.int64)

    def kernel():
        scratch()[cuda.threadIdx.x] = cuda.threadIdx.x
        cuda.syncthreads()
        assert scratch()[3 - cuda.threadIdx.x] == 3 - cuda.threadIdx.x

    launch(kernel, 2, 4, ())


def test_closures_of_one_factory_have_their_own_shared_arrays():
    def make(size):
        def scratch():
            return cuda.shared.array(size, np.int64)

        return scratch

    small, large = make(2), make(5)

    def kernel():
        assert small().size == 2
        assert large().size == 5
        assert small() is small()

    launch(kernel, 1, 2, ())


def test_two_shared_arrays_on_one_line_are_an_error():
    def kernel():
        return cuda.shared.array(2, np.int64), cuda.shared.array(2, np.int64)

    with pytest.raises(SimulatorError, match=r"two arrays of one shape and dtype on one source line, .*\.py:\d+"):
        launch(kernel, 1, 1, ())


def test_dynamic_shared_memory_is_one_piece():
    def kernel(sizes):
        words = cuda.shared.array(0, np.int32)
        floats = cuda.shared.array(shape=0, dtype=cuda.float32)
        doubles = cuda.shared.array((0,), np.float64)
        if cuda.threadIdx.x == 0:
            assert np.isnan(floats).all() and np.isnan(doubles).all()
            sizes[:] = words.size, floats.size, doubles.size
        cuda.syncthreads()
        floats[cuda.threadIdx.x] = 1.0
        cuda.syncthreads()
        assert words[cuda.threadIdx.x] == 0x3F800000

    sizes = np.zeros(3, np.int64)
    launch(kernel, 2, 3, (sizes,), shared_bytes=15)
    assert list(sizes) == [3, 3, 1]


def test_shared_memory_limits():
    def static():
        cuda.shared.array(12 * 1024 + 1, np.float32)

    def both():
        cuda.shared.array(1024, np.float32)

    with pytest.raises(SimulatorError, match="49156 bytes in arrays of fixed size, the limit of a block is 49152"):
        launch(static, 1, 1, ())
    with pytest.raises(SimulatorError, match=r"4096 \+ 232448 dynamic bytes"):
        launch(both, 1, 1, (), shared_bytes=232448)


@pytest.mark.parametrize("shape", [-1, (2, 0), 1.5])
def test_array_shapes_are_checked(shape):
    for space in (cuda.shared, cuda.local):
        with pytest.raises(ValueError, match="array: shape: expected positive integers"):
            launch(lambda space=space: space.array(shape, np.float32), 1, 1, ())


def test_array_alignment():
    def kernel(alignment):
        assert cuda.shared.array(4, np.float32, alignment=alignment).size == 4
        assert cuda.local.array(4, np.float32, alignment=alignment).size == 4

    launch(kernel, 1, 1, (16,))
    with pytest.raises(ValueError, match="alignment: expected a power of two of at least 8, got 12"):
        launch(kernel, 1, 1, (12,))


def test_local_and_const_arrays():
    table = np.arange(3.0)

    def kernel():
        mine = cuda.local.array((2, 2), np.float32)
        assert np.isnan(mine).all()
        mine[:] = cuda.threadIdx.x
        count = cuda.local.array(2, cuda.uint8)
        assert (count == 0xAB).all()
        cuda.syncthreads()
        assert (mine == cuda.threadIdx.x).all()
        fixed = cuda.const.array_like(table)
        assert fixed[2] == 2.0
        fixed[0] = 1

    with pytest.raises(ValueError, match="read-only"):
        launch(kernel, 1, 4, ())
    table[0] = 1


@pytest.mark.parametrize(
    ("dtype", "operation", "start", "value", "old", "new"),
    [
        (np.int32, "add", 2**31 - 1, 1, 2**31 - 1, -(2**31)),
        (np.uint32, "add", 2**32 - 1, 2, 2**32 - 1, 1),
        (np.uint32, "add", 5, -1, 5, 4),
        (np.int64, "add", 2**63 - 1, 1, 2**63 - 1, -(2**63)),
        (np.uint64, "sub", 0, 1, 0, 2**64 - 1),
        (np.int32, "sub", -(2**31), 1, -(2**31), 2**31 - 1),
        (np.float32, "add", 1.0, 1e-9, 1.0, 1.0),
        (np.float64, "sub", 1.0, 0.5, 1.0, 0.5),
        (np.int32, "and_", 0b1100, 0b1010, 12, 8),
        (np.uint64, "or_", 0b1100, 0b1010, 12, 14),
        (np.int64, "xor", 0b1100, 0b1010, 12, 6),
        (np.int32, "exch", 3, -7, 3, -7),
        (np.uint32, "inc", 3, 4, 3, 4),
        (np.uint32, "inc", 4, 4, 4, 0),
        (np.uint64, "dec", 3, 7, 3, 2),
        (np.uint64, "dec", 0, 7, 0, 7),
        (np.uint32, "dec", 9, 7, 9, 7),
        (np.int32, "max", 3, -4, 3, 3),
        (np.uint32, "max", 3, -4, 3, 2**32 - 4),
        (np.float32, "min", 3, -4, 3, -4),
        (np.float32, "max", 3, math.nan, 3, 3),
        (np.float64, "max", math.nan, 3, math.nan, math.nan),
        (np.float64, "min", math.nan, 3, math.nan, math.nan),
        (np.float32, "nanmax", math.nan, 3, math.nan, 3),
        (np.float32, "nanmin", 3, math.nan, 3, 3),
        (np.float64, "nanmin", math.nan, 3, math.nan, 3),
        (np.int64, "nanmax", 1, 3, 1, 3),
    ],
)
def test_atomics(dtype, operation, start, value, old, new):
    def kernel(array, result):
        result[0] = getattr(cuda.atomic, operation)(array, (1, 0), value)

    array, result = np.full((2, 1), start, dtype), np.zeros(1, dtype)
    launch(kernel, 1, 1, (array, result))
    np.testing.assert_array_equal(array[1, 0], np.array(new, dtype))
    np.testing.assert_array_equal(result[0], np.array(old, dtype))
    np.testing.assert_array_equal(array[0, 0], np.array(start, dtype))


def test_compare_and_swap():
    def kernel(array, seen):
        seen[0] = cuda.atomic.cas(array, 1, 5, 6)
        seen[1] = cuda.atomic.cas(array, 1, 5, 7)
        seen[2] = cuda.atomic.compare_and_swap(array, 0, -1)

    array, seen = np.array([0, 5], np.int32), np.zeros(3, np.int32)
    launch(kernel, 1, 1, (array, seen))
    assert list(array) == [-1, 6]
    assert list(seen) == [5, 6, 0]


@pytest.mark.parametrize(
    ("dtype", "operation"), [(np.float16, "add"), (np.int8, "max"), (np.float32, "and_"), (np.int32, "inc")]
)
def test_atomics_refuse_what_numba_refuses(dtype, operation):
    def kernel(array):
        getattr(cuda.atomic, operation)(array, 0, 1)

    with pytest.raises(TypeError, match=rf"cuda\.atomic\.{operation}: dtype {np.dtype(dtype)} is not supported"):
        launch(kernel, 1, 1, (np.zeros(1, dtype),))


def test_atomics_need_one_element():
    with pytest.raises(TypeError, match=r"does not name one element of \(2, 2\)"):
        launch(lambda a: cuda.atomic.add(a, 0, 1), 1, 1, (np.zeros((2, 2)),))


def test_atomics_count_all_threads():
    count = np.zeros(1, np.int32)

    def kernel(count):
        cuda.atomic.add(count, 0, 1)

    launch(kernel, 5, 33, (count,))
    assert count[0] == 165


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_bit_functions(bits):
    word = np.uint32(bits)
    text = f"{bits:032b}"
    assert cuda.popc(word) == text.count("1")
    assert cuda.clz(word) == 32 - len(text.lstrip("0"))
    assert cuda.brev(word) == int(text[::-1], 2)
    assert cuda.ffs(word) == (32 - text.rindex("1") if bits else 0)
    # Numba types a Python int as an int64.
    assert cuda.clz(bits) == 32 + cuda.clz(word)
    assert cuda.popc(np.int8(-1)) == 8
    assert cuda.popc(-1) == 64


floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None)
@given(floats32, floats32, floats32)
def test_fma_rounds_once(a, b, c):
    with np.errstate(all="ignore"):
        got = cuda.fma(np.float32(a), np.float32(b), np.float32(c))
    assert type(got) is np.float32
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if np.isfinite(got):
        error = abs(Fraction(float(got)) - exact)
        with np.errstate(all="ignore"):
            for side in (np.inf, -np.inf):
                other = np.nextafter(got, np.float32(side))
                assert not np.isfinite(other) or error <= abs(Fraction(float(other)) - exact)
    assert cuda.fma(a, b, c) == float(exact)


def test_other_arithmetic():
    assert cuda.fma(1 + 2.0**-52, 1 + 2.0**-52, -1 - 2.0**-51) == 2.0**-104
    assert math.isnan(cuda.fma(math.inf, 0.0, 1.0))
    assert cuda.fma(1e308, 10.0, 0.0) == math.inf
    assert cuda.cbrt(np.float32(-27)) == np.float32(-3) and cuda.cbrt(np.float32(8)).dtype == np.float32
    assert cuda.cbrt(27) == pytest.approx(3.0, rel=1e-15)
    assert cuda.selp(True, 1, 2) == 1 and cuda.selp(0, 1, 2) == 2


def test_half_precision():
    half = np.float16
    fp16 = cuda.fp16
    assert fp16.hadd(half(1), half(2)) == 3 and type(fp16.hadd(half(1), half(2))) is half
    assert fp16.hfma(half(2), half(3), half(1)) == 7
    assert (fp16.hfloor(half(-1.5)), fp16.hceil(half(-1.5)), fp16.htrunc(half(-1.5))) == (-2, -1, -1)
    assert fp16.hexp10(half(2)) == 100 and fp16.hrsqrt(half(4)) == half(0.5) and fp16.hrcp(half(4)) == half(0.25)
    assert fp16.hmax(half(np.nan), half(1)) == 1
    assert fp16.hlt(half(1), half(2)) is True and fp16.hge(half(1), half(2)) is False
