"""The kernels of flash decoding in launches that a call of this size does not choose, and the documented one."""

from importlib import import_module

import numpy as np
import pytest
from flash_support import (
    Reduced,
    assert_reduced,
    check_chunk,
    check_flash,
    each_index,
    each_type,
    inputs_of,
    partials_of,
    run_reduce,
)
from support import NO_EVENT, Guarded, cases, to_host, to_target

from burt_numba import flash_launches, kernels, plan
from burt_numba.host.compiling import compute_capability

# The modules, of which two have the names of their functions.
DECODING = import_module("burt_numba.flash_decoding")
REDUCTION = import_module("burt_numba.flash_decoding_reduce")


# The documented kernel -----------------------------------------------------------------------------------------------


def run_documented(partials, seq_lens, chunk_size=32, *, grid=None, block=32, lse=True):
    """The documented kernel by hand, on guarded arrays; also the cells of its error buffer."""
    M, H, N, width = partials.shape
    source = Guarded(partials, np.nan)
    out = Guarded(np.full((M, H, width - 2), np.nan, np.float32), 777)
    sums = Guarded(np.full(M * H if lse else 0, np.nan, np.float32), 777)
    cells = np.zeros(8, np.int64)
    cells[0] = NO_EVENT
    errors = to_target(cells)
    kernels.flash_decoding_reduce_kernel[(H, M) if grid is None else grid, block](
        source.array, out.array, to_target(np.asarray(seq_lens)), N, chunk_size, sums.array, errors
    )
    source.check()
    cells = to_host(errors)
    counts = {code: int(cells[code]) for code in range(1, 8) if cells[code]}
    first = None if cells[0] == NO_EVENT else (int(cells[0]) >> 3, int(cells[0]) & 7)
    return Reduced(out.result(), sums.result().reshape(M, H) if lse else None, counts, first)


@pytest.mark.parametrize("block", [32, 64, 96, 256])
@pytest.mark.parametrize("D", cases([1, 33, 96], [31, 32, 64, 128, 129, 256]))
def test_documented(block, D):
    """Elements 128 and on were for no lane of the seed's block."""
    partials, lengths = partials_of(2, 2, 5, D), np.int32([160, 70])
    assert_reduced(run_documented(partials, lengths, block=block), partials, lengths)


@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (1, 3), (5, 7), 1])
@each_index
def test_documented_in_any_grid(grid, index):
    partials, lengths = partials_of(3, 2, 4, 8), np.array([128, 0, 33], index)
    assert_reduced(run_documented(partials, lengths, grid=grid), partials, lengths)


@pytest.mark.parametrize("block", [32, 64])
def test_documented_with_events(block):
    partials = partials_of(3, 2, 4, 40)
    partials[0, 1, 1, 39], partials[1, 0, 0, 40], partials[1, 1, 2, 41], partials[1, 1, 1, 3] = (
        np.nan,
        np.inf,
        np.nan,
        -np.inf,
    )
    partials[2, 0, 1, 40], partials[2, 0, 1, 3] = -np.inf, np.nan
    partials[2, 1, 3], partials[0, 0, 2, 41] = np.nan, 0
    lengths = np.int64([129, 128, 96])
    outcome = run_documented(partials, lengths, block=block)
    assert_reduced(outcome, partials, lengths)
    assert outcome.counts == {1: 2, 2: 2, 6: 1}


def test_documented_without_sums():
    partials, lengths = partials_of(2, 2, 5, 8), np.int32([160, 70])
    assert run_documented(partials, lengths, lse=False).out.tobytes() == run_documented(partials, lengths).out.tobytes()


def test_documented_is_close_to_the_function():
    partials, lengths = partials_of(2, 2, 5, 8), np.int32([160, 70])
    assert np.abs(run_documented(partials, lengths).out - run_reduce(partials, lengths).out).max() <= 1e-5


# Every way to make partials ------------------------------------------------------------------------------------------

# Key heads a block; each is a kernel of its own.
GROUPS = [1, 2, 3, 8]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("D", [8, 7])
@each_type
def test_kernels_of_groups(group, D, dtype):
    """Read by vectors and element by element, with bad elements among them."""
    inputs = inputs_of(1, group, 40, D, key_heads=1, dtype=dtype)
    inputs.k_cache[0, 0, 33, D - 1], inputs.v_cache[0, 0, [3, 39], 0], inputs.query[0, -1, 2] = np.inf, np.nan, np.nan
    check_chunk(inputs, 32)


@pytest.mark.parametrize(("D", "dtype"), [(200, np.float32), (256, np.float16), (129, np.float32)])
def test_values_of_several_pieces(D, dtype):
    check_chunk(inputs_of(1, 2, 35, D, key_heads=1, dtype=dtype), 35)


@pytest.mark.parametrize("chunk_size", [33, 64, 65, 128, 129, 300])
def test_warps_that_share_a_chunk(chunk_size):
    """One, two or four of them, with and without a tile for each."""
    inputs = inputs_of(3, 1, 300, 4, seq_lens=[300, 129, 1])
    check_chunk(inputs, chunk_size)


@pytest.mark.parametrize(("D", "dtype"), [(64, np.float32), (63, np.float32), (128, np.float16)])
def test_keys_and_values_in_one_place(monkeypatch, D, dtype):
    """Where a block has shared memory for one tile alone, as for large heads on some devices."""
    monkeypatch.setattr(flash_launches, "most_shared_bytes", lambda capability: 14_000)
    for operation in (DECODING._DECODE_OPERATION, DECODING._CHUNK_OPERATION):
        monkeypatch.setattr(operation, "_calls", {})
    sizes = flash_launches.DecodeSizes(2, 2, 1, 100, D)
    shape = flash_launches.ChunkShape.of(sizes, np.dtype(dtype).itemsize, 100, (9, 0))
    assert shape.alternates and shape.warps == 1
    inputs = inputs_of(2, 2, 100, D, key_heads=1, seq_lens=[100, 40], dtype=dtype)
    check_chunk(inputs, 100)
    inputs.k_cache[0, 0, [3, 40], 5], inputs.v_cache[0, 0, [0, 70], 1] = np.inf, np.nan
    check_flash(inputs, chunk_size=64)


@pytest.mark.parametrize("blocks", [1, 3])
def test_more_blocks_than_a_launch_takes(monkeypatch, blocks):
    """A grid is folded: here as if no launch had more blocks than these."""
    monkeypatch.setattr(DECODING, "MOST_BLOCKS", blocks)
    for operation in (DECODING._DECODE_OPERATION, DECODING._CHUNK_OPERATION):
        monkeypatch.setattr(operation, "_calls", {})
    inputs = inputs_of(3, 2, 40, 4, seq_lens=[40, 0, 17])
    check_chunk(inputs, 16)
    check_flash(inputs, chunk_size=40)


# Every way to merge --------------------------------------------------------------------------------------------------

# Kernels of their own: wholes by 16 and by 8 bytes, and element by element.
LAYOUTS = {
    "16 bytes": lambda partials: partials,
    "8 bytes": lambda partials: np.ascontiguousarray(partials[:, :, : max(partials.shape[2] - 1, 1)]),
    "apart": lambda partials: np.repeat(partials, 2, axis=3)[..., ::2],
}


@pytest.mark.parametrize("warps", [1, 4, 1 << 20], ids=lambda warps: f"{warps} warps")
@pytest.mark.parametrize(("N", "D"), cases([(36, 8), (4, 8), (1, 132)], [(300, 8), (68, 256), (132, 128)]))
def test_a_row_has_the_same_bits_however_many_warps_it_has(monkeypatch, warps, N, D):
    """And however it lies in memory; with elements to mend, and chunks that do not count."""
    partials = partials_of(3, 1, N, D)
    partials[2, 0, N // 3, 1], partials[2, 0, N // 2, D], partials[1, 0, 2 * N // 3, D] = np.nan, np.inf, -np.inf
    lengths = np.int32([N, max(min(N - 1, 9), 1), N])

    def outcomes():
        for layout in LAYOUTS.values():
            monkeypatch.setattr(REDUCTION._REDUCE_OPERATION, "_calls", {})
            yield layout, run_reduce(layout(partials), np.minimum(lengths, layout(partials).shape[2]), 1)

    expected = [outcome for _, outcome in outcomes()]
    monkeypatch.setattr(flash_launches, "_MERGING_WARPS", warps)
    for (layout, outcome), before in zip(outcomes(), expected, strict=True):
        assert_reduced(outcome, layout(partials), np.minimum(lengths, layout(partials).shape[2]), 1)
        assert outcome.out.tobytes() == before.out.tobytes() and outcome.lse.tobytes() == before.lse.tobytes()
        assert outcome.counts == before.counts and outcome.first == before.first
    # Where all the chunks are there, layouts give the same bits.
    assert expected[0].out.tobytes() == expected[2].out.tobytes()
    assert expected[0].out[1].tobytes() == expected[1].out[1].tobytes()


@pytest.mark.parametrize("rows", [1, 300, 5000])
@pytest.mark.parametrize("D", [1, 128, 256])
def test_shared_memory_of_merging(rows, D):
    """A block takes no more of it than every device has, and has room for what its warps copy."""
    for states in (0, 1, 5, 40, 256):
        for staged in (False, True):
            shape = flash_launches.MergeShape.of(rows, states, 1, D, staged)
            assert shape.shared_bytes <= 64 * 1024 and shape.rows * shape.row_warps == shape.warps <= 8
            assert shape.slots == 0 or staged


# Plans ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 32, 100])
def test_chunks_that_are_chosen(chunk_size):
    """Of a long sequence alone there is work for every multiprocessor; of a large batch a sequence needs few chunks."""
    sizes = {"num_heads": 32, "key_heads": 8, "seq_len": 32_768, "d_head": 128, "compute_capability": (9, 0)}
    one, many = (plan("flash_decoding", batch_size=batch, **sizes).launches[0] for batch in (1, 256))
    assert one.grid[0] >= 2 * 132 and many.grid[0] <= 256 * 8 * 64
    given = plan("flash_decoding", batch_size=1, **sizes, chunk_size=chunk_size)
    assert given.launches[0].grid != one.grid


def test_no_memory_grows_with_scores():
    """A workspace of at most 256 partials a row, whatever the length of the cache."""
    sizes = {"batch_size": 1, "num_heads": 8, "d_head": 128, "compute_capability": compute_capability(0)}
    taken = [plan("flash_decoding", seq_len=S, **sizes).temporary_bytes for S in (10**4, 10**6, 10**9)]
    assert max(taken) <= 4 * 8 * 257 * 130
