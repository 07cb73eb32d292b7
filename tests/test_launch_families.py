"""Every way to spread a row over threads, each on rows short enough for the simulator.

Which one a call gets depends on the length and number of its rows, so left to themselves some are reached by large
inputs alone. Here each is chosen by hand; the tests of the operations run into the edges between them.
"""

from importlib import import_module

import numpy as np
import pytest
from support import check_attention, check_constrained, normal

from burt_numba.softmax_launches import RowShape, row_shapes

# Clusters of small blocks are chosen for no row, and stand in for those of large blocks in the simulator.
SHAPES = [*row_shapes(1), RowShape(64, 8, 2), RowShape(64, 8, 4)]


EVERY_SHAPE = [
    pytest.param(
        shape,
        id="x".join(map(str, shape)),
        marks=[pytest.mark.gpu_only("too slow in the simulator")] if shape.threads > 256 else [],
    )
    for shape in SHAPES
]


def choose(monkeypatch, operation, shape, long_row_shape=(1, 0)):
    """Let the operation spread its rows like this, and forget the choices that it made before."""
    module = import_module(f"burt_numba.{operation}")
    monkeypatch.setattr(module, "choose_row_shape", lambda *_, **__: shape)
    monkeypatch.setattr(module, "long_row_shape", lambda *_: long_row_shape, raising=False)
    monkeypatch.setattr(module._OPERATION, "_calls", {})


def row_length(shape, odd, dtype):
    """A few hundred columns at most; read in vectors of 16 bytes when not odd, where a thread's columns allow that."""
    vector = 16 // np.dtype(dtype).itemsize
    return min(shape.columns, 304) - (odd or shape.per_thread % vector)


def rows_of_every_kind(columns, dtype):
    """Peaked, flat, tied, with bad elements everywhere or in the last place alone, masked but for one, and empty."""
    rows = normal((8, columns), dtype=dtype, seed=columns)
    rows[1] = 0.5 + rows[1] / 64
    rows[2, [0, -1]] = 30.0
    rows[3, ::3], rows[3, 1::3] = np.nan, np.inf
    rows[4, -1] = np.nan
    rows[5, : columns - 1] = -np.inf
    rows[6] = -np.inf
    rows[7, columns // 2 :] = np.inf
    return rows


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("shape", EVERY_SHAPE)
def test_constrained_softmax_in_registers(monkeypatch, shape, odd, dtype):
    choose(monkeypatch, "constrained_softmax", shape)
    for columns in (row_length(shape, odd, dtype), 7):
        check_constrained(rows_of_every_kind(columns, dtype))
    if 304 < shape.columns <= 1024:
        check_constrained(normal((2, shape.columns - odd), dtype=dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("blocks", [1, 2, pytest.param(8, marks=pytest.mark.gpu_only("too slow in the simulator"))])
@pytest.mark.parametrize("staged", [False, True])
def test_constrained_softmax_of_long_rows(monkeypatch, blocks, staged, dtype):
    choose(monkeypatch, "constrained_softmax", None, (blocks, 4 * -(-301 // blocks) if staged else 0))
    check_constrained(rows_of_every_kind(301, dtype)[[0, 3, 6]])


@pytest.mark.parametrize("mask", [None, np.float32, np.bool_])
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("shape", EVERY_SHAPE)
def test_attention_softmax_in_registers(monkeypatch, shape, odd, mask):
    choose(monkeypatch, "attention_softmax", shape)
    for dtype in (np.float32, np.float16):
        columns = row_length(shape, odd, dtype)
        scores = rows_of_every_kind(columns, dtype).reshape(1, 2, 4, columns)
        keys = None if mask is None else (normal((1, 2, 1, columns), spread=1.0) - (mask is np.bool_)).astype(mask)
        check_attention(scores, keys)
        check_attention(scores, keys, True, causal_offset=columns // 2)


@pytest.mark.parametrize("mask", [None, np.float32, np.bool_])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_attention_softmax_streamed(monkeypatch, dtype, mask):
    choose(monkeypatch, "attention_softmax", None)
    scores = rows_of_every_kind(301, dtype)[[0, 3, 6, 7]].reshape(1, 2, 2, 301)
    keys = None if mask is None else (normal((1, 2, 1, 301), spread=1.0) > -1).astype(mask)
    check_attention(scores, keys)
    check_attention(scores, keys, True, causal_offset=150)
