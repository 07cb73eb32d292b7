"""``plan``: what a call would launch and touch."""

from __future__ import annotations

from typing import Any

from burt_numba.attention_softmax import plan as _plan_attention_softmax
from burt_numba.attention_softmax import specialisations as _attention_softmax_specialisations
from burt_numba.biencoder_attention import plan as _plan_biencoder_attention
from burt_numba.biencoder_attention import specialisations as _biencoder_attention_specialisations
from burt_numba.cifg import plan as _plan_cifg_update
from burt_numba.cifg import plan_batched as _plan_batched_cifg_update
from burt_numba.cifg import specialisations as _cifg_specialisations
from burt_numba.constrained_softmax import plan as _plan_constrained_softmax
from burt_numba.constrained_softmax import specialisations as _constrained_softmax_specialisations
from burt_numba.flash_decoding import plan as _plan_flash_decoding
from burt_numba.flash_decoding import plan_chunk as _plan_flash_decoding_chunk
from burt_numba.flash_decoding import specialisations as _flash_decoding_specialisations
from burt_numba.flash_decoding_reduce import plan as _plan_flash_decoding_reduce
from burt_numba.flash_decoding_reduce import plan_merge as _plan_merge_attention_states
from burt_numba.flash_decoding_reduce import specialisations as _flash_decoding_reduce_specialisations
from burt_numba.host.errors import BurtDimensionError
from burt_numba.host.plans import Plan
from burt_numba.kernels_by_hand import documented_specialisations
from burt_numba.moe import plan as _plan_sparse_moe_dispatch
from burt_numba.moe import plan_combine as _plan_sparse_moe_combine
from burt_numba.moe import specialisations as _moe_specialisations
from burt_numba.validation import validation_specialisations

_PLANS = {
    "attention_softmax": _plan_attention_softmax,
    "batched_cifg_update": _plan_batched_cifg_update,
    "biencoder_attention": _plan_biencoder_attention,
    "cifg_update": _plan_cifg_update,
    "constrained_softmax": _plan_constrained_softmax,
    "flash_decoding": _plan_flash_decoding,
    "flash_decoding_chunk": _plan_flash_decoding_chunk,
    "flash_decoding_reduce": _plan_flash_decoding_reduce,
    "merge_attention_states": _plan_merge_attention_states,
    "sparse_moe_combine": _plan_sparse_moe_combine,
    "sparse_moe_dispatch": _plan_sparse_moe_dispatch,
}

SPECIALISATIONS = (
    _attention_softmax_specialisations,
    _biencoder_attention_specialisations,
    _cifg_specialisations,
    _constrained_softmax_specialisations,
    _flash_decoding_specialisations,
    _flash_decoding_reduce_specialisations,
    _moe_specialisations,
    documented_specialisations,
    validation_specialisations,
)
"""What each part of the package can launch."""


def plan(name: str, *, compute_capability: tuple[int, int] = (9, 0), **dims: Any) -> Plan:
    """The documented launch, the launches really made, and the bytes touched, without launching.

    Parameters
    ----------
    name : str
        A public function.
    compute_capability : (int, int)
        Of the device that is asked about.
    **dims
        ``constrained_softmax``: batch_size, num_classes. ``attention_softmax``: batch_size, num_heads, seq_len
        (queries), key_len (seq_len), masked (False), causal (False), causal_offset (0). Both: dtype ("float32").
        ``cifg_update``: d_model, input_dim (d + n). ``batched_cifg_update``: batch_size, too, and shared_memory_mode
        (False). Both: multiprocessors (132) of the device. Their input bytes are those of the documented table, which
        leaves out W_f, and of a batch all but C; temporary bytes count the workspace that the functions keep.
        ``sparse_moe_dispatch``, ``sparse_moe_combine``: batch_size (tokens), d_model, num_experts, top_k (2),
        expert_capacity (that of the function), dtype ("float32"), multiprocessors (132). There is no documented launch
        for combining. ``biencoder_attention``: batch_size, num_heads, key_heads (num_heads), query_len, context_len,
        d_head, dtype ("float32"), precision ("fp32"). ``flash_decoding_reduce``: batch_size, num_heads, max_chunks,
        d_head. ``flash_decoding_chunk``: batch_size, num_heads, key_heads (num_heads), seq_len (S), d_head, chunk_size
        (32), dtype ("float32"). ``flash_decoding``: the same, with the chunk_size of the function and multiprocessors
        (132). ``merge_attention_states``: num_states, batch_size (rows), d_head, dtype ("float32").

    Returns
    -------
    Plan
        For contiguous arrays at aligned addresses; ``str()`` of it reads well.

    Examples
    --------
    >>> import burt_numba
    >>> burt_numba.plan("constrained_softmax", batch_size=32, num_classes=1000).documented.shared_bytes
    4000
    """
    if not (
        isinstance(compute_capability, tuple)
        and len(compute_capability) == 2
        and all(isinstance(number, int) for number in compute_capability)
    ):
        raise TypeError(f"plan: compute_capability: expected a pair such as (9, 0), got {compute_capability!r}")
    if not isinstance(name, str) or name not in _PLANS:
        raise BurtDimensionError(f"plan: name: expected one of {', '.join(sorted(_PLANS))}, got {name!r}")
    return _PLANS[name](compute_capability=compute_capability, **dims)
