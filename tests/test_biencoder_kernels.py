"""The kernels of biencoder_attention in launches that a call of this size does not choose, and the documented one."""

from importlib import import_module

import numpy as np
import pytest
from biencoder_support import (
    DOCUMENTED,
    FEW,
    ROWS,
    Attended,
    Inputs,
    assert_attended,
    check_biencoder,
    each_type,
    inputs_of,
    inputs_with_scores,
    kernel_of,
    run_biencoder,
    same_results,
)
from support import NO_EVENT, Guarded, cases, to_host, to_target

from burt_numba import biencoder_launches, kernels, plan
from burt_numba.biencoder_launches import PARTS_CELL, SCORES_CELL, Choice, rows_kernel_spec
from burt_numba.host.compiling import compute_capability

# The module, which has the name of its function.
MODULE = import_module("burt_numba.biencoder_attention")


# One query a block or a cluster --------------------------------------------------------------------------------------


def choose_rows(monkeypatch, blocks=1, threads=256, is_resident=True):
    """Until the test is over, give each query so many blocks, with or without room for its scores."""

    def choose(sizes, rows, vector, dtype, precision, capability):
        first_score = PARTS_CELL if blocks == 1 else SCORES_CELL
        chunks = -(-max(sizes.contexts, 1) // 32)
        cells = first_score + (32 * -(-chunks // blocks) if is_resident else 0)
        return Choice(rows_kernel_spec(vector, dtype, blocks, is_resident), rows * blocks, threads, 4 * cells, blocks)

    monkeypatch.setattr(MODULE, "choose", choose)
    monkeypatch.setattr(MODULE._OPERATION, "_calls", {})


# The kernel of a cluster is made for 256 threads, that of one block for any whole number of warps up to it.
SHAPES = [(1, 32), (1, 96), (8, 256)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_room = pytest.mark.parametrize("is_resident", [True, False], ids=["scores kept", "scores computed again"])


@pytest.mark.parametrize("threads", [32, 96, 256])
@each_room
@each_type
@pytest.mark.parametrize(("K", "D"), cases([(1, 5), (33, 8), (300, 4)], [(255, 64), (3000, 46), (9000, 256)]))
def test_rows(monkeypatch, threads, is_resident, dtype, K, D):
    choose_rows(monkeypatch, 1, threads, is_resident)
    inputs = inputs_of(1, 2, 1, K, D, key_heads=1, dtype=dtype)
    check_biencoder(inputs, None, np.float32([0.2, 20.0]))
    check_biencoder(inputs, None, None, context_lengths=np.int32([max(1, K - 32)]))


@each_room
@pytest.mark.parametrize(
    ("K", "D", "dtype"),
    cases(
        [(5, 5, np.float32), (300, 8, np.float16)],
        [(K, D, dtype) for K, D in ((3000, 46), (20_000, 128), (5000, 256)) for dtype in (np.float32, np.float16)],
    ),
)
def test_rows_of_clusters(monkeypatch, is_resident, K, D, dtype):
    choose_rows(monkeypatch, 8, 256, is_resident)
    check_biencoder(inputs_of(1, 2, 1, K, D, key_heads=1, dtype=dtype), None, np.float32([0.2, 20.0]))


@each_shape
@each_room
def test_rows_with_bad_elements(monkeypatch, shape, is_resident):
    """Each is counted once, though a score that is computed again meets it again."""
    choose_rows(monkeypatch, *shape, is_resident)
    inputs = inputs_of(1, 2, 1, 70, 5, key_heads=1)
    for array in inputs:
        array.ravel()[3::17], array.ravel()[5::19], array.ravel()[8::23] = np.nan, np.inf, -np.inf
    check_biencoder(inputs)
    large = Inputs(*(np.full((1, 1, n, 4), 1e20, np.float32) for n in (1, 40, 40)))
    outcome = check_biencoder(large, None, 5.0, context_lengths=np.int32([37]))
    assert (outcome.counts, outcome.first) == ({2: 37}, (0, 2))


@each_shape
@each_room
def test_rows_count_each_element_once(monkeypatch, shape, is_resident):
    choose_rows(monkeypatch, *shape, is_resident)
    inputs = inputs_of(1, 2, 2, 70, 5, key_heads=1)
    inputs.query[:, :, :, 2], inputs.context_keys[:, :, :, 3] = np.nan, np.inf
    outcome = check_biencoder(inputs, None, 20.0, context_lengths=np.int32([68]))
    assert outcome.counts == {1: 4, 2: 68}


@each_shape
@each_room
def test_rows_with_few_contexts_or_none(monkeypatch, shape, is_resident):
    """Blocks and warps without a context of their own."""
    choose_rows(monkeypatch, *shape, is_resident)
    inputs = inputs_of(3, 1, 1, 40, 8)
    outcome = check_biencoder(inputs, context_lengths=np.int32([0, 1, 33]))
    assert (outcome.out[0] == 0).all()
    ties = inputs_with_scores([1.0] * 2 + [0.0] * 50)
    assert check_biencoder(ties, 1.0).counts == {3: 1}


@each_shape
def test_rows_give_the_same_bits_whether_scores_are_kept_or_not(monkeypatch, shape):
    outcomes = []
    for is_resident in (True, False):
        choose_rows(monkeypatch, *shape, is_resident)
        outcomes.append(run_biencoder(inputs_of(1, 1, 1, 100, 8)))
    assert same_results(*outcomes)


@pytest.mark.parametrize("D", [1, 3, 4, 5, 8, 16, 33, 64, 100, 129, 255, 256])
@each_type
def test_rows_of_every_width(monkeypatch, D, dtype):
    """Lanes that share a value, and pieces of it that a lane has: vectors of 16 bytes, and elements one by one."""
    choose_rows(monkeypatch, threads=32)
    inputs = inputs_of(1, 1, 1, 9, D, dtype=dtype)
    check_biencoder(inputs, None, 5.0)
    padded = Inputs(*(np.concatenate([array, array[..., :1]], axis=3)[..., :D] for array in inputs))
    check_biencoder(padded, None, 5.0)


@pytest.mark.parametrize(("limit", "queries"), [(1, 2), (3, 2), (4, 2), (7, 5)])
def test_more_rows_than_a_launch_takes(monkeypatch, limit, queries):
    """Rows beyond a limit go to further launches, and know their place."""
    inputs = inputs_of(2, 2, queries, 9, 4)
    whole = check_biencoder(inputs, None, np.float32([0.2, 1.0]), context_lengths=np.int32([9, 10]))
    monkeypatch.setattr(MODULE, "MOST_ROWS", limit)
    monkeypatch.setattr(MODULE._OPERATION, "_calls", {})
    parts = check_biencoder(inputs, None, np.float32([0.2, 1.0]), context_lengths=np.int32([9, 10]))
    assert same_results(parts, whole)


# Choices -------------------------------------------------------------------------------------------------------------


@each_type
@pytest.mark.parametrize(("queries", "kernel"), [(2, ROWS), (3, ROWS), (4, FEW), (5, FEW), (33, FEW)])
def test_the_tests_reach_both_kernels(queries, kernel, dtype):
    """Those with a number of queries as a parameter, on devices whose tensor cores take float32."""
    pytest.importorskip("burt_numba.kernels.biencoder_tiles", reason="no kernel of tiles")
    inputs = inputs_of(1, 2, queries, 40, 8, key_heads=1, dtype=dtype)
    assert kernel_of(inputs) == (kernel if compute_capability(0) >= (8, 0) else ROWS)


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_choice_fits_the_device(capability, dtype):
    """Shared memory within what a block may have, whole warps, a grid within its limit."""
    for queries in (1, 17, 3000):
        for contexts in (0, 1, 33, 1025, 30_000, 10**6):
            for d_head in (1, 64, 256):
                planned = plan(
                    "biencoder_attention",
                    batch_size=2,
                    num_heads=3,
                    query_len=queries,
                    context_len=contexts,
                    d_head=d_head,
                    dtype=dtype,
                    compute_capability=capability,
                )
                assert planned.launches
                for launch in planned.launches:
                    assert 0 < launch.block <= 1024 and launch.block % 32 == 0
                    assert launch.shared_bytes + 1024 <= biencoder_launches.most_shared_bytes(capability)
                    assert 0 < launch.grid[0] < 2**31


# The documented kernel -----------------------------------------------------------------------------------------------


def attend_by_hand(
    inputs, scale=None, bound=0.2, numbers=(0.01, 10.0, 20), *, bounds=(), lengths=(), grid=None,
    block=None, shared_bytes=None, side_outputs=True, lse=False, length_type=np.int32,
):  # fmt: skip
    """Launch biencoder_attention_kernel between guard cells of NaN."""
    (B, H, Q, D), K = inputs.query.shape, inputs.context_keys.shape[2]
    planned = plan(
        "biencoder_attention",
        batch_size=B,
        num_heads=H,
        query_len=Q,
        context_len=K,
        d_head=D,
        key_heads=inputs.context_keys.shape[1],
        dtype=inputs.query.dtype.name,
    ).documented
    out = Guarded(np.full(inputs.query.shape, np.nan, inputs.query.dtype), 777)
    present = [side_outputs, side_outputs, lse]
    sides = [Guarded(np.full(B * H * Q if given else 0, np.nan, np.float32), 777) for given in present]
    errors = to_target(np.array([NO_EVENT] + [0] * 7))
    kernels.biencoder_attention_kernel[
        planned.grid if grid is None else grid,
        planned.block if block is None else block,
        0,
        planned.shared_bytes if shared_bytes is None else shared_bytes,
    ](
        *(Guarded(array, np.nan).array for array in inputs),
        out.array,
        *(B, Q, K, D, H),
        np.float32(D**-0.5 if scale is None else scale),
        np.float32(bound),
        *(np.float32(number) for number in numbers[:2]),
        numbers[2],
        to_target(np.asarray(bounds, np.float32)),
        to_target(np.asarray(lengths, length_type)),
        *(side.array for side in sides),
        errors,
    )
    words = to_host(errors)
    first = None if words[0] == NO_EVENT else divmod(int(words[0]), 8)
    counts = {code: int(words[code]) for code in range(1, 8) if words[code]}
    temperature, entropy, sums = (
        side.result().reshape((B, H, Q) if given else 0) for side, given in zip(sides, present, strict=True)
    )
    return Attended(out.result(), temperature, entropy, sums if lse else None, counts, first)


def check_by_hand(inputs, *, bound=0.2, bounds=(), lengths=(), **options):
    outcome = attend_by_hand(inputs, bound=bound, bounds=bounds, lengths=lengths, **options)
    given = np.float32(bounds) if len(bounds) else None if np.isinf(bound) else bound
    assert_attended(
        outcome, inputs, None, given, context_lengths=np.int32(lengths) if len(lengths) else None, kernel=DOCUMENTED
    )
    return outcome


# Numba's launch asks for no more than 48 KB, which a hand-made launch for D above 137 needs.
BEYOND_NUMBA = pytest.mark.simulator_only("more shared memory than Numba's launch can ask for")


@pytest.mark.parametrize(
    ("Q", "K", "D"),
    [
        *cases([(1, 1, 1), (17, 9, 5), (3, 130, 8), (2, 65, 64)], [(33, 300, 100), (16, 1025, 128)]),
        pytest.param(2, 65, 256, marks=BEYOND_NUMBA),
    ],
)
@each_type
def test_the_documented_launch(Q, K, D, dtype):
    """Grid (B H, ceil(Q / TILE_Q)), block TILE_K, shared memory for a tile of queries, of keys and of scores."""
    check_by_hand(inputs_of(1, 2, Q, K, D, key_heads=1, dtype=dtype))


@pytest.mark.parametrize("block", [32, 96, 256])
@pytest.mark.parametrize("grid", [(4, 1), (1, 1), (9, 5)])
def test_another_grid_and_block(grid, block):
    check_by_hand(inputs_of(2, 2, 5, 40, 8), grid=grid, block=block, shared_bytes=40_000)


@pytest.mark.parametrize("K", [33, 200])
def test_more_shared_memory_than_documented(K):
    """Room for the scores of all contexts, which then are computed once; and less, down to the documented."""
    inputs = inputs_of(1, 1, 3, K, 8)
    documented = plan(
        "biencoder_attention", batch_size=1, num_heads=1, query_len=3, context_len=K, d_head=8
    ).documented.shared_bytes
    for more in (0, 4, 1000, 64 * K):
        check_by_hand(inputs, shared_bytes=documented + more)


def test_bounds_and_lengths_by_hand():
    inputs = inputs_of(2, 4, 3, 20, 8, key_heads=2)
    outcome = check_by_hand(inputs, bounds=[0.2, np.nan, 9.0, -1.0], lengths=[21, 0])
    assert outcome.counts[6] == 3
    check_by_hand(inputs, bound=np.inf, lse=True, lengths=[5, 20])
    wide = attend_by_hand(inputs, lengths=np.array([2**32 + 1, 3], np.int64), length_type=np.int64)
    assert_attended(wide, inputs, context_lengths=np.int64([2**32 + 1, 3]), kernel=DOCUMENTED)


def test_bad_elements_by_hand():
    inputs = inputs_of(1, 4, 3, 20, 8, key_heads=2)
    for array in inputs:
        array.ravel()[3::17], array.ravel()[5::19], array.ravel()[8::23] = np.nan, np.inf, -np.inf
    check_by_hand(inputs)
    large = Inputs(*(np.full((2, 1, n, 4), 1e20, np.float32) for n in (2, 40, 40)))
    assert check_by_hand(large, bound=5.0).counts == {2: 160}
    outcome = check_by_hand(large, bound=5.0, lengths=[0, 7])
    assert (outcome.counts, outcome.first) == ({2: 14}, (80, 2))


@pytest.mark.parametrize("shared_bytes", [4 * (16 * 8 + 32 * 8 + 16 * 32), 40_000])
def test_elements_are_counted_once_by_hand(shared_bytes):
    """Whichever heads and tiles of queries read them; with no bad values the counts are exact."""
    inputs = inputs_of(2, 4, 17, 40, 8, key_heads=2)
    inputs.query[:, :, :, 2], inputs.context_keys[:, :, :, 6] = np.nan, np.inf
    outcome = check_by_hand(inputs, bound=20.0, lengths=[40, 3], block=32, shared_bytes=shared_bytes)
    assert outcome.counts == {1: 2 * 4 * 17, 2: 2 * 43}


def test_without_side_outputs():
    inputs = inputs_of(1, 2, 3, 20, 8)
    outcome = attend_by_hand(inputs, side_outputs=False)
    assert outcome.temperature.size == outcome.entropy.size == 0
    assert outcome.out.tobytes() == attend_by_hand(inputs).out.tobytes()


def test_parameters_by_hand():
    inputs = inputs_of(1, 2, 3, 20, 8)
    outcome = attend_by_hand(inputs, 0.7, 0.5, (0.3, 0.5, 20))
    assert_attended(outcome, inputs, 0.7, 0.5, 0.3, 0.5, kernel=DOCUMENTED)
