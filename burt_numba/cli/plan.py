"""``burt-numba plan``: sizes on the command line become the keywords of ``burt_numba.plan``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from burt_numba.cli.errors import UsageError

_REQUIRED = {
    "constrained_softmax": {"batch_size": "rows", "num_classes": "C"},
    "attention_softmax": {"batch_size": "B", "num_heads": "H", "seq_len": "Q"},
    "biencoder_attention": {"batch_size": "B", "num_heads": "H", "query_len": "Q", "context_len": "K", "d_head": "D"},
    "flash_decoding": {"batch_size": "M", "num_heads": "H", "seq_len": "S", "d_head": "D"},
    "flash_decoding_chunk": {"batch_size": "M", "num_heads": "H", "seq_len": "S", "d_head": "D"},
    "flash_decoding_reduce": {"batch_size": "M", "num_heads": "H", "max_chunks": "N", "d_head": "D"},
    "merge_attention_states": {"num_states": "N", "batch_size": "rows of a state", "d_head": "D"},
    "cifg_update": {"d_model": "d", "input_dim": "d + n, the length of [h; x]"},
    "batched_cifg_update": {"batch_size": "B", "d_model": "d", "input_dim": "d + n, the length of [h; x]"},
    "sparse_moe_dispatch": {"batch_size": "T", "d_model": "d", "num_experts": "E"},
    "sparse_moe_combine": {"batch_size": "T", "d_model": "d", "num_experts": "E"},
}
"""Sizes without a default, and what they are in docs/notation.md."""

_DTYPE = {"dtype": "default float32"}
_PROCESSORS = {"multiprocessors": "of the device, default 132"}
_EXPERTS = {"top_k": "k, default 2", "expert_capacity": "rows of each expert, default ceil(2 T k / E)"}
_OPTIONAL: dict[str, dict[str, str]] = {
    "constrained_softmax": _DTYPE,
    "attention_softmax": {
        "key_len": "K, default Q",
        "masked": "with a mask [B,1,1,K]",
        "causal": "hide keys past the query",
        "causal_offset": "with --causal, default 0",
        **_DTYPE,
    },
    "biencoder_attention": {"key_heads": "Hk, default H", "precision": "default fp32", **_DTYPE},
    "flash_decoding": {
        "key_heads": "Hk, default H",
        "chunk_size": "keys of a chunk, chosen by default",
        **_DTYPE,
        **_PROCESSORS,
    },
    "flash_decoding_chunk": {"key_heads": "Hk, default H", "chunk_size": "keys of a chunk, default 32", **_DTYPE},
    "flash_decoding_reduce": {},
    "merge_attention_states": _DTYPE,
    "cifg_update": _PROCESSORS,
    "batched_cifg_update": {"shared_memory_mode": "one memory C [d,d] for all samples", **_PROCESSORS},
    "sparse_moe_dispatch": {**_EXPERTS, **_DTYPE, **_PROCESSORS},
    "sparse_moe_combine": {**_EXPERTS, **_DTYPE, **_PROCESSORS},
}
_SWITCHES = ("masked", "causal", "shared_memory_mode")
_CHOICES = {"dtype": ("float32", "float16"), "precision": ("fp32", "tf32")}

_DEFAULT_CAPABILITY, _DEFAULT_PROCESSORS = (9, 0), 132
_ABOUT = """\
The launches and the memory of a call on contiguous arrays; nothing is
launched, and no GPU is needed. Letters are those of docs/notation.md.
"""
_LEGEND = (
    ("documented", "the launch of the kernel in burt_numba.kernels by hand, as the operation's page has it"),
    ("launched", "what the function itself launches, one after the other"),
)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise argparse.ArgumentTypeError(f"expected MAJOR.MINOR as in 9.0, got {text}")
    return int(major), int(minor)


def add_operations(plan: argparse.ArgumentParser) -> None:
    """A parser for each operation."""
    operations = plan.add_subparsers(dest="operation", metavar="OP", required=True)
    for operation, sizes in _REQUIRED.items():
        options = " ".join(f"{_option(name)} 8" for name in sizes)
        parser = operations.add_parser(
            operation,
            help=" ".join(map(_option, sizes)),
            description=_ABOUT,
            epilog=f"Example:\n  burt-numba plan {operation} {options}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for name, meaning in sizes.items():
            parser.add_argument(_option(name), type=int, required=True, metavar="N", help=meaning)
        for name, meaning in _OPTIONAL[operation].items():
            if name in _SWITCHES:
                parser.add_argument(_option(name), action="store_true", default=None, help=meaning)
            elif name in _CHOICES:
                parser.add_argument(_option(name), choices=_CHOICES[name], help=meaning)
            else:
                parser.add_argument(_option(name), type=int, metavar="N", help=meaning)
        parser.add_argument(
            "--compute-capability",
            type=_capability,
            default=_DEFAULT_CAPABILITY,
            metavar="X.Y",
            help="of the device that is planned for, whatever this machine has; default 9.0 (H100, H200)",
        )


def plan(operation: str, arguments: Mapping[str, Any]) -> int:
    names = (*_REQUIRED[operation], *_OPTIONAL[operation], "compute_capability")
    dims = {name: arguments[name] for name in names if arguments[name] is not None}
    import burt_numba

    try:
        planned = burt_numba.plan(operation, **dims)
    except (TypeError, ValueError, MemoryError) as error:
        # Nothing runs here: whatever is refused are the user's sizes.
        said = str(error).removeprefix("plan: ")
        said = re.sub(rf"\b({'|'.join(names)})\b", lambda found: _option(found[0]), said)
        raise UsageError(said) from None
    print(planned)
    capability = ".".join(map(str, dims["compute_capability"]))
    processors = ""
    if "multiprocessors" in names:
        processors = f" with {dims.get('multiprocessors', _DEFAULT_PROCESSORS)} multiprocessors"
    print(f"\nFor a device of compute capability {capability}{processors}; nothing was launched.")
    for word, meaning in _LEGEND[planned.documented is None :]:
        print(f"{word}: {meaning}.")
    return 0
