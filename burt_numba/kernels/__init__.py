"""The raw kernels, launched by hand as ``kernel[grid, block, stream, shared_bytes](...)``.

Each is right for its documented grid and block (rounded up to whole warps) and for any other whole number of warps.
Error buffers are ``int64[8]`` arrays: element 0 starts as the largest int64, the others as 0 (docs/errors.md).
"""

from burt_numba.kernels.attention_softmax import attention_softmax_kernel
from burt_numba.kernels.biencoder_attention import biencoder_attention_kernel
from burt_numba.kernels.cifg import batched_cifg_update_kernel, cifg_projection_kernel, cifg_update_kernel
from burt_numba.kernels.constrained_softmax import constrained_softmax_kernel
from burt_numba.kernels.flash_decoding_reduce import flash_decoding_reduce_kernel
from burt_numba.kernels.moe import sparse_moe_dispatch_kernel

__all__ = [
    "attention_softmax_kernel",
    "batched_cifg_update_kernel",
    "biencoder_attention_kernel",
    "cifg_projection_kernel",
    "cifg_update_kernel",
    "constrained_softmax_kernel",
    "flash_decoding_reduce_kernel",
    "sparse_moe_dispatch_kernel",
]
