"""plan(): the documented launch, the launches that are made, and the bytes, for both softmaxes."""

from importlib import import_module

import numpy as np
import pytest

import burt_numba
from burt_numba import BurtDimensionError, plan, simulator
from burt_numba.host import rows as rows_module
from burt_numba.host.plans import LaunchPlan, Plan

SIZES = {
    "constrained_softmax": ("batch_size", "num_classes"),
    "attention_softmax": ("batch_size", "num_heads", "seq_len", "key_len"),
}


def dims_of(function, shape, **more):
    return {**dict(zip(SIZES[function], shape, strict=True)), **more}


# What is documented --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [0, 1, 32, 70_000])
@pytest.mark.parametrize(
    ("num_classes", "block"),
    [(1, 32), (31, 32), (32, 32), (33, 64), (1000, 1024), (1024, 1024), (1025, 1024), (50_000, 1024)],
)
def test_documented_constrained_softmax(batch_size, num_classes, block):
    """Grid (batch_size), block min(num_classes, 1024) in whole warps, 4 bytes a class."""
    documented = plan("constrained_softmax", batch_size=batch_size, num_classes=num_classes).documented
    assert documented.kernel == "constrained_softmax_kernel"
    assert (documented.grid, documented.block) == ((batch_size,), block)
    assert (documented.shared_bytes, documented.cluster) == (4 * num_classes, 1)


@pytest.mark.parametrize(
    ("seq_len", "block"), [(1, 32), (33, 64), (512, 512), (1024, 1024), (1025, 1024), (4096, 1024)]
)
def test_documented_attention_softmax(seq_len, block):
    """Grid (batch * heads, seq_len), block min(seq_len, 1024) in whole warps, 8 bytes for maximum and sum."""
    documented = plan("attention_softmax", batch_size=3, num_heads=8, seq_len=seq_len).documented
    assert documented.kernel == "attention_softmax_kernel"
    assert (documented.grid, documented.block, documented.shared_bytes) == ((24, seq_len), block, 8)


def test_documented_attention_softmax_of_other_keys():
    """The threads of the documented block lie across the keys."""
    documented = plan("attention_softmax", batch_size=2, num_heads=4, seq_len=1, key_len=600).documented
    assert (documented.grid, documented.block) == ((8, 1), 608)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("function", SIZES)
def test_documented_kernels_can_be_launched_by_name(function, dtype):
    shape = (4, 40) if function == "constrained_softmax" else (2, 2, 5, 40)
    documented = plan(function, **dims_of(function, shape, dtype=dtype)).documented
    assert hasattr(burt_numba.kernels, documented.kernel)
    # Rows are staged in float32, whatever they are stored as.
    assert documented.shared_bytes == (160 if function == "constrained_softmax" else 8)


# Bytes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("float16", 2), (np.dtype("float16"), 2)])
def test_bytes(dtype, itemsize):
    planned = plan("constrained_softmax", batch_size=32, num_classes=1001, dtype=dtype)
    size = 32 * 1001 * itemsize
    assert (planned.input_bytes, planned.output_bytes, planned.temporary_bytes) == (size, size, 0)
    planned = plan("attention_softmax", batch_size=2, num_heads=3, seq_len=5, key_len=7, dtype=dtype)
    size = 2 * 3 * 5 * 7 * itemsize
    assert (planned.input_bytes, planned.output_bytes) == (size, size)


def test_temporary_bytes_of_attention_softmax():
    """The documented table gives 8 bytes: the maximum and the sum of a row."""
    assert plan("attention_softmax", batch_size=32, num_heads=8, seq_len=512).temporary_bytes == 8


def test_bytes_of_a_mask():
    dims = {"batch_size": 2, "num_heads": 3, "seq_len": 5, "key_len": 7}
    plain, masked = plan("attention_softmax", **dims), plan("attention_softmax", **dims, masked=True)
    assert masked.input_bytes - plain.input_bytes == 2 * 7 * 4
    assert masked.output_bytes == plain.output_bytes


def test_bytes_of_causal_scores():
    """Of a causal matrix the upper half is not read; all of it is written."""
    planned = plan("attention_softmax", batch_size=2, num_heads=3, seq_len=4, causal=True)
    assert (planned.input_bytes, planned.output_bytes) == (2 * 3 * (1 + 2 + 3 + 4) * 4, 2 * 3 * 16 * 4)


def test_large_sizes_take_no_time():
    planned = plan("attention_softmax", batch_size=64, num_heads=64, seq_len=1 << 20, causal=True)
    assert planned.output_bytes == 64 * 64 * 4 << 40


# What is launched ----------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """The launches of a call on packed arrays, recorded and not run."""
    for function in SIZES:
        monkeypatch.setattr(import_module(f"burt_numba.{function}")._OPERATION, "_calls", {})

    def call(function, shape, dtype="float32", masked=False, causal=False):
        record = []

        def launch(kernel, grid, block, arguments, *, shared_bytes=0, cluster=1, name=None):
            # A launch by the driver has no more than 31 bits of blocks along x; y is not used.
            assert len(grid) == 2 and grid[1] == 1 and grid[0] < 2**31
            record.append((kernel.__name__, grid[:1], block, shared_bytes, cluster))

        monkeypatch.setattr(simulator, "launch", launch)
        # Never touched, so that a large array is a range of addresses and no more.
        array = np.empty(shape, dtype)
        if function == "constrained_softmax":
            burt_numba.constrained_softmax(array)
        else:
            mask = np.zeros((shape[0], 1, 1, shape[3]), np.float32) if masked else None
            burt_numba.attention_softmax(array, mask, causal, causal_offset=0 if causal else None)
        return record

    return call


def planned_launches(*args, **kwargs):
    launches = plan(*args, **kwargs).launches
    return [(entry.kernel, entry.grid, entry.block, entry.shared_bytes, entry.cluster) for entry in launches]


ROWS = [0, 1, 3, 100, 128, 129, 1023, 1024, 5000]
COLUMNS = [1, 2, 7, 8, 9, 16, 32, 33, 64, 100, 128, 200, 256, 257, 500, 511, 512, 513, 1000, 1024, 1025, 2048, 2049]
COLUMNS += [4096, 4100, 8192, 16_384, 16_385, 32_768, 65_536, 131_072, 131_073, 131_076, 200_000]


@pytest.mark.simulator_only("launches are recorded in the simulator, which stands for compute capability 9.0")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("rows", ROWS)
def test_planned_launches_of_constrained_softmax_are_made(launched, rows, dtype):
    for columns in COLUMNS:
        planned = planned_launches("constrained_softmax", batch_size=rows, num_classes=columns, dtype=dtype)
        assert planned == launched("constrained_softmax", (rows, columns), dtype), columns
        assert len(planned) == (rows > 0)


@pytest.mark.simulator_only("launches are recorded in the simulator, which stands for compute capability 9.0")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 4), (2, 1, 600), (7, 8, 100), (0, 2, 3), (2, 0, 3), (2, 2, 0)])
@pytest.mark.parametrize("masked", [False, True])
def test_planned_launches_of_attention_softmax_are_made(launched, shape, dtype, masked):
    for keys in [0, *COLUMNS]:
        for causal in (False, True):
            dims = dims_of("attention_softmax", (*shape, keys), dtype=dtype, masked=masked, causal=causal)
            assert planned_launches("attention_softmax", **dims) == launched(
                "attention_softmax", (*shape, keys), dtype, masked, causal
            ), keys


@pytest.mark.simulator_only("launches are recorded in the simulator, which stands for compute capability 9.0")
@pytest.mark.parametrize("function", SIZES)
@pytest.mark.parametrize("extra", [0, 1])
def test_planned_launches_of_more_rows_than_one_takes(launched, function, extra):
    rows = rows_module.MOST_ROWS + extra
    shape = (rows, 1) if function == "constrained_softmax" else (rows, 1, 1, 1)
    planned = planned_launches(function, **dims_of(function, shape, dtype="float16"))
    assert planned == launched(function, shape, "float16")
    assert len(planned) == 1 + extra


@pytest.mark.parametrize("function", SIZES)
@pytest.mark.parametrize(
    ("capability", "clusters"), [((7, 5), False), ((8, 6), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)]
)
def test_clusters_are_planned_where_devices_have_them(function, capability, clusters):
    shape = (4, 40_000) if function == "constrained_softmax" else (1, 1, 4, 40_000)
    (launch,) = plan(function, **dims_of(function, shape), compute_capability=capability).launches
    assert (launch.cluster > 1) == clusters
    assert launch.grid == (4 * launch.cluster,)


# Words ---------------------------------------------------------------------------------------------------------------


def test_what_a_plan_prints():
    documented = LaunchPlan("name_kernel", (32,), 1024, 80_000)
    launches = [LaunchPlan("name_rows_kernel", (64,), 512, 0, 2), LaunchPlan("name_rows_kernel", (1,), 32, 8)]
    assert str(Plan("name", documented, 2_560_000, 1000, 8, launches)).splitlines() == [
        "name",
        "  documented  name_kernel: grid (32,), block 1024, 80,000 shared bytes",
        "  launched    name_rows_kernel: grid (64,), block 512, 0 shared bytes, clusters of 2",
        "  launched    name_rows_kernel: grid (1,), block 32, 8 shared bytes",
        "  bytes       input 2,560,000, output 1,000, temporary 8",
    ]
    planned = plan("attention_softmax", batch_size=1, num_heads=2, seq_len=3)
    assert all(f"  launched    {launch}" in str(planned).splitlines() for launch in planned.launches)
    nothing = str(plan("attention_softmax", batch_size=1, num_heads=2, seq_len=0)).splitlines()
    assert [line.split()[0] for line in nothing] == ["attention_softmax", "documented", "bytes"]


ATTENTION = {"batch_size": 1, "num_heads": 2, "seq_len": 3}
REFUSALS = [
    ("softmax", {}, "plan: name: expected one of attention_softmax, constrained_softmax, got 'softmax'"),
    (None, {}, "plan: name: expected one of attention_softmax, constrained_softmax, got None"),
    ("constrained_softmax", {}, "plan: constrained_softmax: batch_size is missing"),
    ("constrained_softmax", {"batch_size": 3}, "plan: constrained_softmax: num_classes is missing"),
    (
        "constrained_softmax",
        {"batch_size": 3, "num_classes": 0},
        "plan: constrained_softmax: num_classes: expected an integer of at least 1, got 0",
    ),
    (
        "constrained_softmax",
        {"batch_size": -1, "num_classes": 5},
        "plan: constrained_softmax: batch_size: expected an integer of at least 0, got -1",
    ),
    (
        "constrained_softmax",
        {"batch_size": 3, "num_classes": 5, "dtype": "float64"},
        "plan: constrained_softmax: dtype: expected float32 or float16, got float64",
    ),
    (
        "constrained_softmax",
        {"batch_size": 3, "num_classes": 5, "seq_len": 3, "heads": 1},
        "plan: constrained_softmax: unexpected heads, seq_len",
    ),
    ("attention_softmax", {"batch_size": 1, "num_heads": 2}, "plan: attention_softmax: seq_len is missing"),
    (
        "attention_softmax",
        {**ATTENTION, "key_len": -2},
        "plan: attention_softmax: key_len: expected an integer of at least 0, got -2",
    ),
    ("attention_softmax", {**ATTENTION, "num_classes": 4}, "plan: attention_softmax: unexpected num_classes"),
]


@pytest.mark.parametrize(("name", "dims", "message"), REFUSALS)
def test_refusals(name, dims, message):
    with pytest.raises(BurtDimensionError) as refused:
        plan(name, **dims)
    assert str(refused.value) == message
    assert refused.value.code == 6


@pytest.mark.parametrize("value", [1.0, "3", [3]])
def test_refuses_sizes_that_are_no_integers(value):
    with pytest.raises(TypeError, match=r"^plan: constrained_softmax: batch_size: expected an integer, got "):
        plan("constrained_softmax", batch_size=value, num_classes=5)
