"""plan(): the documented launch, the launches that are made, and the bytes, for every function."""

import math
from importlib import import_module

import numpy as np
import pytest
from cifg_support import forget_calls

import burt_numba
from burt_numba import BurtDimensionError, cifg, moe, moe_launches, plan, simulator
from burt_numba.cifg_launches import memory_launches
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


@pytest.mark.parametrize("input_dim_more", [0, 7])
@pytest.mark.parametrize(("d_model", "block"), [(1, 32), (32, 32), (33, 64), (255, 256), (256, 256), (257, 256)])
def test_documented_cifg_update(d_model, block, input_dim_more):
    """Grid (d), block min(d, 256) in whole warps; the documented d * 4 bytes cannot hold [h; x], so 4 bytes of each."""
    width = d_model + input_dim_more
    documented = plan("cifg_update", d_model=d_model, input_dim=width).documented
    assert documented.kernel == "cifg_update_kernel"
    assert (documented.grid, documented.block, documented.shared_bytes) == ((d_model,), block, 4 * width)


@pytest.mark.parametrize(("shared", "grid"), [(False, (3, 300)), (True, (300,))])
def test_documented_batched_cifg_update(shared, grid):
    """Grid (B, d), or (d) with the samples one after the other in each block."""
    dims = {"batch_size": 3, "d_model": 300, "input_dim": 400, "shared_memory_mode": shared}
    documented = plan("batched_cifg_update", **dims).documented
    assert documented.kernel == "batched_cifg_update_kernel"
    assert (documented.grid, documented.block, documented.shared_bytes) == (grid, 256, 1600)


@pytest.mark.parametrize("dims", [{"d_model": 8, "input_dim": 8}, {"batch_size": 2, "d_model": 8, "input_dim": 8}])
def test_documented_memory_kernels_can_be_launched_by_name(dims):
    function = "batched_cifg_update" if "batch_size" in dims else "cifg_update"
    assert hasattr(burt_numba.kernels, plan(function, **dims).documented.kernel)


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


def test_bytes_of_cifg_update():
    """The documented table: d² 4 + 2 d 4 + n 4 bytes in, none out (in place), d 4 beside them, and our workspace."""
    planned = plan("cifg_update", d_model=100, input_dim=130)
    assert (planned.input_bytes, planned.output_bytes) == (4 * (100 * 100 + 2 * 100 + 30), 0)
    workspace = memory_launches(100, 1, None, 130, False, (9, 0), 132).workspace(100, 1, 100)
    assert planned.temporary_bytes == 4 * 100 + sum(workspace)


@pytest.mark.parametrize(("shared", "matrices"), [(False, 3), (True, 1)])
def test_bytes_of_batched_cifg_update(shared, matrices):
    planned = plan("batched_cifg_update", batch_size=3, d_model=100, input_dim=130, shared_memory_mode=shared)
    assert (planned.input_bytes, planned.output_bytes) == (matrices * 4 * 100 * 100, 0)
    workspace = memory_launches(100, matrices, 3, 130, shared, (9, 0), 132).workspace(100, matrices, 300)
    assert planned.temporary_bytes == 4 * 100 + sum(workspace)


@pytest.mark.parametrize(
    ("columns", "width", "samples", "shared", "moved", "arithmetic"),
    [
        (10, 25, 1, False, 4 * (200 + 25 + 250 + 10), 500 + 100 * (2 + 5)),
        (10, 25, 3, False, 4 * (600 + 75 + 250 + 10), 1500 + 100 * (6 + 15)),
        (10, 25, 3, True, 4 * (200 + 75 + 250 + 10), 1500 + 100 * (6 + 5)),
    ],
)
def test_bytes_moved_and_flops_of_the_memory(columns, width, samples, shared, moved, arithmetic):
    assert cifg.bytes_moved(columns, width, samples, shared) == moved
    assert cifg.flops(columns, width, samples, shared) == arithmetic
    step = 4 * columns * columns * (1 if shared else samples)
    assert cifg.flops(columns, width, samples, shared, steps=4) == arithmetic + 3 * step


@pytest.mark.parametrize(("d_model", "block"), [(1, 32), (32, 32), (33, 64), (255, 256), (256, 256), (257, 256)])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_documented_sparse_moe_dispatch(d_model, block, top_k):
    """Grid (batch_size), block min(d, 256) in whole warps, 8 bytes a choice."""
    documented = plan("sparse_moe_dispatch", batch_size=9, d_model=d_model, num_experts=4, top_k=top_k).documented
    assert documented.kernel == "sparse_moe_dispatch_kernel"
    assert (documented.grid, documented.block, documented.shared_bytes) == ((9,), block, 8 * top_k)
    assert plan("sparse_moe_combine", batch_size=9, d_model=d_model, num_experts=4, top_k=top_k).documented is None


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("float16", 2)])
@pytest.mark.parametrize(("given", "capacity"), [({}, 100), ({"expert_capacity": 7}, 7), ({"top_k": 3}, 150)])
def test_bytes_of_sparse_moe_dispatch(dtype, item, given, capacity):
    """The documented table: T d 4 bytes in, E capacity d 4 out, T k 8 beside them, and our workspace."""
    dims = {"batch_size": 100, "d_model": 30, "num_experts": 4, "dtype": dtype, **given}
    planned, choices = plan("sparse_moe_dispatch", **dims), given.get("top_k", 2)
    assert (planned.input_bytes, planned.output_bytes) == (100 * 30 * item, 4 * capacity * 30 * item)
    workspace = moe_launches.positions_shape(100, choices, 4, (9, 0), 132).workspace
    assert planned.temporary_bytes == 8 * 100 * choices + sum(workspace)
    combined = plan("sparse_moe_combine", **dims)
    assert (combined.output_bytes, combined.temporary_bytes) == (100 * 30 * item, 0)
    assert combined.input_bytes == 100 * choices * (30 * item + 8 + 4)


def test_bytes_moved_and_flops_of_the_experts():
    """A token is read once however many experts take it."""
    cells = 100 * 3 * (4 + 4 + 8 + 4)  # an index and a weight read, a place and a weight written
    assert moe.bytes_moved(100, 30, 3, 5, 4) == 100 * 30 * 4 * (1 + 3) + cells + 5 * 4
    assert moe.bytes_combined(100, 30, 3, 2) == 100 * 30 * 2 * (3 + 1) + 100 * 3 * (8 + 4)
    assert moe.flops_combined(100, 30, 3) == 2 * 100 * 30 * 3


CONTEXTS = {"batch_size": 2, "num_heads": 8, "query_len": 100, "context_len": 65, "d_head": 64}


@pytest.mark.parametrize(("d_head", "block"), [(1, 128), (64, 128), (65, 64), (256, 64)])
@pytest.mark.parametrize(("query_len", "tiles"), [(0, 0), (1, 1), (16, 1), (17, 2), (512, 32)])
def test_documented_biencoder_attention(d_head, block, query_len, tiles):
    """Grid (batch * heads, ceil(query_len / 16)), block TILE_K, shared memory for tiles of queries, keys and scores."""
    dims = CONTEXTS | {"query_len": query_len, "d_head": d_head}
    documented = plan("biencoder_attention", **dims).documented
    assert documented.kernel == "biencoder_attention_kernel"
    assert (documented.grid, documented.block) == ((16, tiles), block)
    assert documented.shared_bytes == 4 * (16 * d_head + block * d_head + 16 * block)


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("float16", 2)])
@pytest.mark.parametrize("key_heads", [8, 2])
def test_bytes_of_biencoder_attention(dtype, item, key_heads):
    planned = plan("biencoder_attention", **CONTEXTS, key_heads=key_heads, dtype=dtype)
    assert planned.input_bytes == 2 * (8 * 100 + 2 * key_heads * 65) * 64 * item
    assert planned.output_bytes == 2 * 8 * 100 * 64 * item
    attention = import_module("burt_numba.biencoder_attention")
    assert attention.bytes_moved(2, 8, 100, 65, 64, item, key_heads) == planned.input_bytes + planned.output_bytes
    assert attention.flops(2, 8, 100, 65, 64) == 2 * (2 * 8 * 100 * 65 * 64) * 2


CACHES = {"batch_size": 3, "num_heads": 8, "seq_len": 100, "d_head": 64}
PARTIALS = {"batch_size": 64, "num_heads": 32, "max_chunks": 128, "d_head": 128}
STATES = {"num_states": 3, "batch_size": 40, "d_head": 64}


@pytest.mark.parametrize("max_chunks", [0, 1, 5000])
def test_documented_flash_decoding_reduce(max_chunks):
    """Grid (heads, batch), a warp, no shared memory; the other functions have no documented launch."""
    documented = plan("flash_decoding_reduce", **PARTIALS | {"max_chunks": max_chunks}).documented
    assert documented.kernel == "flash_decoding_reduce_kernel"
    assert (documented.grid, documented.block, documented.shared_bytes) == ((32, 64), 32, 0)
    for name, dims in (
        ("flash_decoding", CACHES),
        ("flash_decoding_chunk", CACHES),
        ("merge_attention_states", STATES),
    ):
        assert plan(name, **dims).documented is None


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("float16", 2)])
@pytest.mark.parametrize("key_heads", [8, 2])
def test_bytes_of_flash_decoding(dtype, item, key_heads):
    """Caches and queries read once; what is left for the second step is neither input nor output."""
    for name, output in (("flash_decoding", 3 * 8 * 64 * item), ("flash_decoding_chunk", 3 * 8 * 4 * 66 * 4)):
        planned = plan(name, **CACHES, key_heads=key_heads, dtype=dtype, chunk_size=32)
        assert planned.input_bytes == 3 * (8 + 2 * key_heads * 100) * 64 * item
        assert planned.output_bytes == output
        assert planned.temporary_bytes == (3 * 8 * 4 * 66 * 4 if name == "flash_decoding" else 0)
    decoding = import_module("burt_numba.flash_decoding")
    assert decoding.bytes_moved(3, 8, 100, 64, item, key_heads) == 3 * (16 + 2 * key_heads * 100) * 64 * item
    assert decoding.flops(3, 8, 100, 64) == 2 * (2 * 3 * 8 * 100 * 64)


def test_bytes_of_merging():
    reduction = import_module("burt_numba.flash_decoding_reduce")
    planned = plan("flash_decoding_reduce", **PARTIALS)
    assert (planned.input_bytes, planned.output_bytes) == (64 * 32 * 128 * 130 * 4, 64 * 32 * 128 * 4)
    assert reduction.bytes_moved(64, 32, 128, 128) == planned.input_bytes + planned.output_bytes
    assert reduction.flops(64, 32, 128, 128) == 2 * 64 * 32 * 128 * 129
    for dtype, item in (("float32", 4), ("float16", 2)):
        planned = plan("merge_attention_states", **STATES, dtype=dtype)
        assert (planned.input_bytes, planned.output_bytes) == (3 * 40 * (64 * item + 4), 40 * 64 * item)


def test_large_sizes_take_no_time():
    planned = plan("attention_softmax", batch_size=64, num_heads=64, seq_len=1 << 20, causal=True)
    assert planned.output_bytes == 64 * 64 * 4 << 40


# What is launched ----------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(monkeypatch):
    """The launches that are asked of the simulator, recorded and not run."""
    record = []

    def launch(kernel, grid, block, arguments, *, shared_bytes=0, cluster=1, group=1, name=None):
        # A launch by the driver has no more than 31 bits of blocks along x, and 16 along y.
        assert len(grid) == 2 and grid[0] < 2**31 and grid[1] < 2**16
        record.append((kernel.__name__, grid if grid[1] > 1 else grid[:1], block, shared_bytes, cluster, group))

    monkeypatch.setattr(simulator, "launch", launch)
    return record


@pytest.fixture
def launched(monkeypatch, recorded):
    """The launches of a softmax on packed arrays."""
    for function in SIZES:
        monkeypatch.setattr(import_module(f"burt_numba.{function}")._OPERATION, "_calls", {})

    def call(function, shape, dtype="float32", masked=False, causal=False):
        recorded.clear()
        # Never touched, so that a large array is a range of addresses and no more.
        array = np.empty(shape, dtype)
        if function == "constrained_softmax":
            burt_numba.constrained_softmax(array)
        else:
            mask = np.zeros((shape[0], 1, 1, shape[3]), np.float32) if masked else None
            burt_numba.attention_softmax(array, mask, causal, causal_offset=0 if causal else None)
        assert all(len(grid) == 1 for _, grid, *_ in recorded)
        return list(recorded)

    return call


@pytest.fixture
def updated(monkeypatch, recorded):
    """The launches of an update of memories."""
    forget_calls(monkeypatch)

    def call(d, width, samples=None, shared=False):
        recorded.clear()
        batch = () if samples is None else (samples,)
        C = np.empty((d, d) if shared else (*batch, d, d), np.float32)
        h, x = np.empty((*batch, d), np.float32), np.empty((*batch, width - d), np.float32)
        weights, bias = np.empty((d, width), np.float32), np.empty(d, np.float32)
        if samples is None:
            burt_numba.cifg_update(C, h, x, weights, bias)
        else:
            burt_numba.batched_cifg_update(C, h, x, weights, bias, shared_memory_mode=shared)
        return list(recorded)

    return call


def planned_launches(*args, **kwargs):
    launches = plan(*args, **kwargs).launches
    return [
        (
            entry.kernel,
            entry.grid if entry.grid[-1] > 1 or len(entry.grid) == 1 else entry.grid[:1],
            entry.block,
            entry.shared_bytes,
            entry.cluster,
            entry.group,
        )
        for entry in launches
    ]


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


MEMORY_COLUMNS = [0, 1, 2, 3, 4, 5, 31, 63, 64, 65, 127, 256, 500, 1000, 4097]


@pytest.mark.simulator_only("launches are recorded in the simulator, which stands for 9.0 and 4 multiprocessors")
@pytest.mark.parametrize("more", [0, 1, 500])
def test_planned_launches_of_cifg_update_are_made(updated, more):
    for d in MEMORY_COLUMNS:
        planned = planned_launches("cifg_update", d_model=d, input_dim=d + more, multiprocessors=4)
        assert planned == updated(d, d + more), d
        assert len(planned) == 3 * (d > 0)


@pytest.mark.simulator_only("launches are recorded in the simulator, which stands for 9.0 and 4 multiprocessors")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("samples", [0, 1, 2, 3, 33])
def test_planned_launches_of_batched_cifg_update_are_made(updated, samples, shared):
    for d in MEMORY_COLUMNS:
        dims = {"batch_size": samples, "d_model": d, "input_dim": d + 3, "shared_memory_mode": shared}
        planned = planned_launches("batched_cifg_update", **dims, multiprocessors=4)
        assert planned == updated(d, d + 3, samples, shared), d
        assert len(planned) == (3 + shared) * (d > 0 and samples > 0)


@pytest.fixture
def routed(monkeypatch, recorded):
    """The launches of a dispatch that allocates, and of a combine."""
    for operation in (moe._DISPATCH_OPERATION, moe._COMBINE_OPERATION):
        monkeypatch.setattr(operation, "_calls", {})

    def call(T, d, experts, k, capacity=None, dtype="float32"):
        recorded.clear()
        indices = np.empty((T, k), np.int32)
        dispatch = burt_numba.sparse_moe_dispatch(
            np.empty((T, d), dtype), np.empty((T, experts), np.float32), indices, capacity
        )
        dispatched = list(recorded)
        recorded.clear()
        burt_numba.sparse_moe_combine(dispatch.expert_inputs, dispatch)
        return dispatched, list(recorded)

    return call


@pytest.mark.simulator_only("launches are recorded in the simulator, which stands for 9.0 and 4 multiprocessors")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("T", [1, 33, 1000, 2049, 70_000])
@pytest.mark.parametrize("experts", [1, 8, 3000])
def test_planned_launches_of_the_experts_are_made(routed, T, experts, dtype):
    for d in (0, 1, 3, 8, 100, 512, 7168):
        for k, capacity in ((0, 3), (1, None), (2, 1), (8, 5)):
            dims = {"batch_size": T, "d_model": d, "num_experts": experts, "top_k": k, "dtype": dtype}
            dims |= {} if capacity is None else {"expert_capacity": capacity}
            dispatched, combined = routed(T, d, experts, k, capacity, dtype)
            assert planned_launches("sparse_moe_dispatch", **dims, multiprocessors=4) == dispatched, dims
            assert planned_launches("sparse_moe_combine", **dims, multiprocessors=4) == combined, dims
            assert len(combined) == 1


@pytest.mark.simulator_only("launches are recorded in the simulator, which stands for 9.0 and 4 multiprocessors")
@pytest.mark.parametrize(("T", "capacity"), [(0, 0), (0, 5), (7, 0)])
def test_planned_launches_of_the_experts_over_empty_arrays(routed, T, capacity):
    """Their kernels alone: NumPy gives empty arrays no strides, which are not read by vectors."""
    dims = {"batch_size": T, "d_model": 8, "num_experts": 3, "top_k": 2, "expert_capacity": capacity}
    for function, made in zip(("sparse_moe_dispatch", "sparse_moe_combine"), routed(T, 8, 3, 2, capacity), strict=True):
        assert [launch.kernel for launch in plan(function, **dims).launches] == [launch[0] for launch in made]


@pytest.mark.simulator_only("launches are recorded in the simulator, which stands for compute capability 9.0")
@pytest.mark.parametrize(("dtype", "precision"), [("float32", "fp32"), ("float32", "tf32"), ("float16", "fp32")])
@pytest.mark.parametrize("queries", [0, 1, 17, 64, 2048])
@pytest.mark.parametrize("d_head", [1, 3, 8, 64, 100, 256])
def test_planned_launches_of_biencoder_attention_are_made(monkeypatch, recorded, dtype, precision, queries, d_head):
    monkeypatch.setattr(import_module("burt_numba.biencoder_attention")._OPERATION, "_calls", {})
    for contexts in (0, 1, 64, 128, 1024, 1025, 2048, 30_000, 65_536, 10**6):
        for heads, key_heads in ((4, 4), (4, 2), (40, 8)):
            dims = dict(zip(CONTEXTS, (2, heads, queries, contexts, d_head), strict=True))
            recorded.clear()
            arrays = [
                np.empty((2, count, size, d_head), dtype)
                for count, size in ((heads, queries), (key_heads, contexts), (key_heads, contexts))
            ]
            burt_numba.biencoder_attention(*arrays, precision=precision)
            planned = planned_launches(
                "biencoder_attention", **dims, key_heads=key_heads, dtype=dtype, precision=precision
            )
            assert planned == recorded, dims
            assert len(planned) == (queries > 0)


@pytest.fixture
def decoded(monkeypatch, recorded):
    """The launches of a function of flash decoding over packed arrays."""
    for module, names in (
        ("flash_decoding", ("_DECODE_OPERATION", "_CHUNK_OPERATION")),
        ("flash_decoding_reduce", ("_REDUCE_OPERATION", "_MERGE_OPERATION")),
    ):
        for name in names:
            monkeypatch.setattr(getattr(import_module(f"burt_numba.{module}"), name), "_calls", {})

    def call(function, *arrays, **options):
        recorded.clear()
        getattr(burt_numba, function)(*arrays, **options)
        return list(recorded)

    return call


@pytest.mark.simulator_only("launches are recorded in the simulator, which stands for 9.0 and 4 multiprocessors")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("d_head", [1, 8, 64, 100, 128, 256])
def test_planned_launches_of_flash_decoding_are_made(decoded, dtype, d_head):
    for batch, heads, key_heads in ((0, 4, 4), (1, 4, 4), (2, 12, 4), (3, 9, 1), (200, 64, 4)):
        for keys in (0, 1, 32, 33, 100, 5000, 10**6):
            dims = {"batch_size": batch, "num_heads": heads, "key_heads": key_heads, "seq_len": keys, "d_head": d_head}
            # Never touched, so that a large cache is a range of addresses and no more.
            arrays = [np.empty((batch, heads, d_head), dtype)]
            arrays += [np.broadcast_to(np.zeros((), dtype), (batch, key_heads, keys, d_head))] * 2
            if batch * keys * d_head < 10**7:
                arrays[1:] = [np.empty(arrays[1].shape, dtype) for _ in range(2)]
            lengths = np.zeros(batch, np.int32)
            for chunk_size in (None, 16, 200):
                if chunk_size is not None and keys > 5000:
                    continue  # a workspace of many gigabytes
                given = {} if chunk_size is None else {"chunk_size": chunk_size}
                planned = planned_launches("flash_decoding", **dims, **given, dtype=dtype, multiprocessors=4)
                assert planned == decoded("flash_decoding", *arrays, lengths, **given), (dims, given)
                planned = planned_launches("flash_decoding_chunk", **dims, **given, dtype=dtype)
                if keys <= 5000:
                    assert planned == decoded("flash_decoding_chunk", *arrays, lengths, **given), (dims, given)


@pytest.mark.simulator_only("launches are recorded in the simulator, which stands for compute capability 9.0")
@pytest.mark.parametrize("d_head", [1, 8, 128, 129, 256])
def test_planned_launches_of_merging_are_made(decoded, d_head):
    for rows in (0, 1, 3, 70):
        for states in (0, 1, 2, 3, 8, 9, 256, 257, 70_000):
            # Rows one after another, which no memory has to hold.
            shape = (rows, 2, states, d_head + 2)
            strides = [4 * math.prod(shape[axis + 1 :]) for axis in range(4)]
            partials = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), shape, strides)
            dims = {"batch_size": rows, "num_heads": 2, "max_chunks": states, "d_head": d_head}
            launches = decoded("flash_decoding_reduce", partials, np.zeros(rows, np.int32))
            assert planned_launches("flash_decoding_reduce", **dims) == launches, dims
            for dtype in ("float32", "float16"):
                outs = np.broadcast_to(np.zeros((), dtype), (states, rows, d_head))
                dims = {"num_states": states, "batch_size": rows, "d_head": d_head, "dtype": dtype}
                launches = decoded("merge_attention_states", outs, np.zeros((states, rows), np.float32))
                assert planned_launches("merge_attention_states", **dims) == launches, dims


@pytest.mark.simulator_only("launches are recorded in the simulator, which stands for 9.0 and 4 multiprocessors")
def test_planned_launches_of_flash_decoding_of_more_than_one_takes(monkeypatch, decoded):
    """Rows past those of a launch, and blocks past those of a grid, go to a further launch."""
    rows = rows_module.MOST_ROWS + 1
    dims = {"batch_size": rows, "num_heads": 1, "max_chunks": 1, "d_head": 1}
    lengths = np.broadcast_to(np.int32(1), (rows,))
    launches = decoded("flash_decoding_reduce", np.broadcast_to(np.float32(0), (rows, 1, 1, 3)), lengths)
    assert planned_launches("flash_decoding_reduce", **dims) == launches
    monkeypatch.setattr(import_module("burt_numba.flash_decoding"), "MOST_BLOCKS", 7)
    dims = {"batch_size": 5, "num_heads": 2, "seq_len": 100, "d_head": 8, "chunk_size": 40}
    arrays = [np.zeros(shape, np.float32) for shape in ((5, 2, 8), (5, 2, 100, 8), (5, 2, 100, 8))]
    for name in ("flash_decoding", "flash_decoding_chunk"):
        launches = decoded(name, *arrays, np.zeros(5, np.int32), chunk_size=40)
        assert len(launches) > 2 and planned_launches(name, **dims) == launches


@pytest.mark.parametrize(
    ("dims", "capability", "cluster", "group"),
    [
        ({"d_model": 512, "batch_size": 32}, (9, 0), 4, 1),
        ({"d_model": 512, "batch_size": 32}, (8, 0), 1, 4),
        ({"d_model": 512, "batch_size": 500}, (9, 0), 1, 1),
        ({"d_model": 512}, (9, 0), 1, 64),
        ({"d_model": 32}, (9, 0), 8, 1),
    ],
)
def test_blocks_of_a_memory_are_a_cluster_or_a_group(dims, capability, cluster, group):
    function = "batched_cifg_update" if "batch_size" in dims else "cifg_update"
    launch = plan(function, input_dim=2 * dims["d_model"], **dims, compute_capability=capability).launches[-1]
    assert (launch.cluster, launch.group) == (cluster, group)
    assert launch.grid[0] % (cluster * group) == 0
    assert launch.grid[0] <= 132


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
    launches.append(LaunchPlan("name_rows_kernel", (64, 2), 512, 0, 1, 32))
    assert str(Plan("name", documented, 2_560_000, 1000, 8, launches)).splitlines() == [
        "name",
        "  documented  name_kernel: grid (32,), block 1024, 80,000 shared bytes",
        "  launched    name_rows_kernel: grid (64,), block 512, 0 shared bytes, clusters of 2",
        "  launched    name_rows_kernel: grid (1,), block 32, 8 shared bytes",
        "  launched    name_rows_kernel: grid (64, 2), block 512, 0 shared bytes, groups of 32",
        "  bytes       input 2,560,000, output 1,000, temporary 8",
    ]
    planned = plan("attention_softmax", batch_size=1, num_heads=2, seq_len=3)
    assert all(f"  launched    {launch}" in str(planned).splitlines() for launch in planned.launches)
    nothing = str(plan("attention_softmax", batch_size=1, num_heads=2, seq_len=0)).splitlines()
    assert [line.split()[0] for line in nothing] == ["attention_softmax", "documented", "bytes"]


EXPERTS = {"batch_size": 3, "d_model": 4, "num_experts": 2}
ATTENTION = {"batch_size": 1, "num_heads": 2, "seq_len": 3}
NAMES = (
    "attention_softmax, batched_cifg_update, biencoder_attention, cifg_update, constrained_softmax, flash_decoding, "
    "flash_decoding_chunk, flash_decoding_reduce, merge_attention_states, sparse_moe_combine, sparse_moe_dispatch"
)
REFUSALS = [
    ("softmax", {}, f"plan: name: expected one of {NAMES}, got 'softmax'"),
    (None, {}, f"plan: name: expected one of {NAMES}, got None"),
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
    ("cifg_update", {"d_model": 3}, "plan: cifg_update: input_dim is missing"),
    (
        "cifg_update",
        {"d_model": 3, "input_dim": 2},
        "plan: cifg_update: input_dim: expected an integer of at least 3, got 2",
    ),
    (
        "cifg_update",
        {"d_model": 46_341, "input_dim": 46_341},
        "plan: cifg_update: d_model: expected at most 46340, got 46341",
    ),
    (
        "cifg_update",
        {"d_model": 3, "input_dim": 3, "multiprocessors": 0},
        "plan: cifg_update: multiprocessors: expected an integer of at least 1, got 0",
    ),
    (
        "cifg_update",
        {"d_model": 3, "input_dim": 3, "batch_size": 2, "shared_memory_mode": True},
        "plan: cifg_update: unexpected batch_size, shared_memory_mode",
    ),
    ("batched_cifg_update", {"d_model": 3, "input_dim": 3}, "plan: batched_cifg_update: batch_size is missing"),
    ("sparse_moe_dispatch", {"batch_size": 3, "d_model": 4}, "plan: sparse_moe_dispatch: num_experts is missing"),
    (
        "sparse_moe_dispatch",
        {**EXPERTS, "num_experts": 0},
        "plan: sparse_moe_dispatch: num_experts: expected an integer of at least 1, got 0",
    ),
    (
        "sparse_moe_dispatch",
        {**EXPERTS, "expert_capacity": -1},
        "plan: sparse_moe_dispatch: expert_capacity: expected an integer of at least 0, got -1",
    ),
    (
        "sparse_moe_combine",
        {**EXPERTS, "dtype": "float64"},
        "plan: sparse_moe_combine: dtype: expected float32 or float16, got float64",
    ),
    ("sparse_moe_combine", {**EXPERTS, "seq_len": 3}, "plan: sparse_moe_combine: unexpected seq_len"),
    ("biencoder_attention", {"batch_size": 3}, "plan: biencoder_attention: num_heads is missing"),
    (
        "biencoder_attention",
        {**CONTEXTS, "d_head": 0},
        "plan: biencoder_attention: d_head: expected an integer of at least 1, got 0",
    ),
    (
        "biencoder_attention",
        {**CONTEXTS, "d_head": 257},
        "plan: biencoder_attention: d_head: expected at most 256, got 257",
    ),
    (
        "biencoder_attention",
        {**CONTEXTS, "key_heads": 3},
        "plan: biencoder_attention: key_heads: expected a divisor of 8, got 3",
    ),
    (
        "biencoder_attention",
        {**CONTEXTS, "precision": "bf16"},
        "plan: biencoder_attention: precision: expected fp32 or tf32, got 'bf16'",
    ),
    (
        "biencoder_attention",
        {**CONTEXTS, "batch_size": 2**28},
        f"plan: biencoder_attention: batch_size * num_heads: expected at most 2**30, got {2**31}",
    ),
    ("biencoder_attention", {**CONTEXTS, "seq_len": 3}, "plan: biencoder_attention: unexpected seq_len"),
    ("flash_decoding", {"batch_size": 3}, "plan: flash_decoding: num_heads is missing"),
    (
        "flash_decoding",
        {**CACHES, "key_heads": 3},
        "plan: flash_decoding: key_heads: expected a divisor of 8, got 3",
    ),
    ("flash_decoding", {**CACHES, "d_head": 257}, "plan: flash_decoding: d_head: expected at most 256, got 257"),
    (
        "flash_decoding_chunk",
        {**CACHES, "chunk_size": 0},
        "plan: flash_decoding_chunk: chunk_size: expected an integer of at least 1, got 0",
    ),
    (
        "flash_decoding_chunk",
        {**CACHES, "multiprocessors": 4},
        "plan: flash_decoding_chunk: unexpected multiprocessors",
    ),
    (
        "flash_decoding_reduce",
        {**PARTIALS, "max_chunks": 2**30 + 1},
        f"plan: flash_decoding_reduce: max_chunks: expected at most 2**30, got {2**30 + 1}",
    ),
    ("flash_decoding_reduce", {**PARTIALS, "dtype": "float16"}, "plan: flash_decoding_reduce: unexpected dtype"),
    (
        "merge_attention_states",
        {**STATES, "dtype": "int8"},
        "plan: merge_attention_states: dtype: expected float32 or float16, got int8",
    ),
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
