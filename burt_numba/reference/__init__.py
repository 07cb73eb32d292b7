"""What the operations should give: NumPy in float64, no Numba, written to be read.

One function for each operation, with its name, parameters and degradations. The tests and ``burt-numba check``
measure every kernel against these.
"""

from burt_numba.reference.attention_softmax import AttentionSoftmaxResult, attention_softmax
from burt_numba.reference.biencoder_attention import BiencoderAttentionResult, biencoder_attention
from burt_numba.reference.cifg import CifgResult, batched_cifg_update, cifg_update
from burt_numba.reference.common import entropy
from burt_numba.reference.constrained_softmax import ConstrainedSoftmaxResult, constrained_softmax
from burt_numba.reference.flash_decoding import (
    DEAD_MAX,
    FlashDecodingChunkResult,
    FlashDecodingResult,
    MergeResult,
    flash_decoding,
    flash_decoding_chunk,
    flash_decoding_reduce,
    merge_attention_states,
)
from burt_numba.reference.moe import MoeCombineResult, MoeDispatchResult, sparse_moe_combine, sparse_moe_dispatch

__all__ = [
    "DEAD_MAX",
    "AttentionSoftmaxResult",
    "BiencoderAttentionResult",
    "CifgResult",
    "ConstrainedSoftmaxResult",
    "FlashDecodingChunkResult",
    "FlashDecodingResult",
    "MergeResult",
    "MoeCombineResult",
    "MoeDispatchResult",
    "attention_softmax",
    "batched_cifg_update",
    "biencoder_attention",
    "cifg_update",
    "constrained_softmax",
    "entropy",
    "flash_decoding",
    "flash_decoding_chunk",
    "flash_decoding_reduce",
    "merge_attention_states",
    "sparse_moe_combine",
    "sparse_moe_dispatch",
]
