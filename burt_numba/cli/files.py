"""The arrays that each operation of ``burt-numba run`` reads and writes: for its help, and for the run itself.

Imports neither NumPy nor Numba, so that ``--help`` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Files(NamedTuple):
    """Names and shapes; letters as in docs/notation.md."""

    reads: dict[str, str]
    """The first is the array that may be alone in its file, whatever its name there."""
    writes: dict[str, str]
    optional: Mapping[str, str] = MappingProxyType({})
    """Read where they are there."""


_CACHES = {"query": "[M,H,D]", "k_cache": "[M,Hk,S,D]", "v_cache": "[M,Hk,S,D]", "seq_lens": "[M]"}
_RESULT = {"output": "[M,H,D]", "lse": "[M,H]"}
_PLACES = {"dispatch_indices": "[T,k,2]", "combine_weights": "[T,k]"}

FILES = {
    "constrained_softmax": Files(
        {"logits": "[...,C]"},
        {"probabilities": "[...,C]", "temperature": "[...]", "entropy": "[...]"},
        {"labels": "[...]"},
    ),
    "attention_softmax": Files(
        {"scores": "[B,H,Q,K]"},
        {"probabilities": "[B,H,Q,K]", "entropy": "[B,H,Q]"},
        {"mask": "of a shape that broadcasts to the scores"},
    ),
    "biencoder_attention": Files(
        {"query": "[B,H,Q,D]", "context_keys": "[B,Hk,K,D]", "context_values": "[B,Hk,K,D]"},
        {"output": "[B,H,Q,D]", "temperature": "[B,H,Q]", "entropy": "[B,H,Q]"},
        {"context_lengths": "[B]"},
    ),
    "flash_decoding": Files(_CACHES, _RESULT),
    "flash_decoding_chunk": Files(_CACHES, {"partials": "[M,H,N,D+2]", "seq_lens": "[M]", "chunk_size": "(a number)"}),
    "flash_decoding_reduce": Files(
        {"partials": "[M,H,N,D+2]", "seq_lens": "[M]"}, _RESULT, {"chunk_size": "(a number)"}
    ),
    "merge_attention_states": Files({"outs": "[N,...,D]", "lses": "[N,...]"}, {"output": "[...,D]", "lse": "[...]"}),
    "cifg_update": Files(
        {"C": "[d,d]", "h": "[d]", "x": "[n]", "W_f": "[d,d+n]", "b_f": "[d]"},
        {"C": "[d,d]", "sigma": "[1]", "forget_gate": "[d]"},
    ),
    "batched_cifg_update": Files(
        {"C": "[B,d,d] or [d,d]", "H": "[B,d]", "X": "[B,n]", "W_f": "[d,d+n]", "b_f": "[d]"},
        {"C": "[B,d,d] or [d,d]", "sigma": "[B] or [1]", "forget_gate": "[B,d]"},
    ),
    "sparse_moe_dispatch": Files(
        {"input": "[T,d]", "routing_weights": "[T,E]", "top_k_indices": "[T,k]"},
        {
            "expert_inputs": "[E,capacity,d]",
            "dispatch_indices": "[T,k,2]",
            "expert_counts": "[E]",
            "combine_weights": "[T,k]",
        },
    ),
    "sparse_moe_combine": Files({"expert_outputs": "[E,capacity,d]", **_PLACES}, {"output": "[T,d]"}),
}


def _listed(arrays: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in arrays.items())


def reads(operation: str) -> str:
    """What an operation reads, in words."""
    files = FILES[operation]
    return _listed(files.reads) + (f", optionally {_listed(files.optional)}" if files.optional else "")


def writes(operation: str) -> str:
    """What it writes, in words."""
    return _listed(FILES[operation].writes)
