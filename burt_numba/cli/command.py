"""The parser and the exit status: 0 for success, 1 for a failed check, 2 for a mistake of the user.

NumPy, Numba and rich are imported by the commands that need them, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from burt_numba import __version__
from burt_numba.cli.errors import UsageError
from burt_numba.cli.files import reads, writes
from burt_numba.cli.plan import add_operations, plan

OPERATIONS = (
    "constrained_softmax",
    "attention_softmax",
    "biencoder_attention",
    "flash_decoding",
    "flash_decoding_chunk",
    "flash_decoding_reduce",
    "merge_attention_states",
    "cifg_update",
    "batched_cifg_update",
    "sparse_moe_dispatch",
    "sparse_moe_combine",
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _info(arguments: argparse.Namespace) -> int:
    from burt_numba.cli.info import info

    return info()


def _check(arguments: argparse.Namespace) -> int:
    from burt_numba.cli.check import check

    return check([arguments.op] if arguments.op else OPERATIONS, sanitize=arguments.sanitize)


def _run_constrained_softmax(arguments: argparse.Namespace) -> int:
    from burt_numba.cli.run import run_constrained_softmax

    return run_constrained_softmax(
        arguments.input,
        arguments.output,
        entropy_bound=arguments.entropy_bound,
        temperature_min=arguments.temperature_min,
        temperature_max=arguments.temperature_max,
        max_iterations=arguments.max_iterations,
    )


def _run_attention_softmax(arguments: argparse.Namespace) -> int:
    from burt_numba.cli.run import run_attention_softmax

    return run_attention_softmax(
        arguments.input, arguments.output, causal=arguments.causal, causal_offset=arguments.causal_offset
    )


def _run_biencoder_attention(arguments: argparse.Namespace) -> int:
    from burt_numba.cli.run import run_biencoder_attention

    return run_biencoder_attention(
        arguments.input,
        arguments.output,
        scale=arguments.scale,
        entropy_bound=None if arguments.no_bound else arguments.entropy_bound,
        temperature_min=arguments.temperature_min,
        temperature_max=arguments.temperature_max,
        max_iterations=arguments.max_iterations,
        precision=arguments.precision,
    )


def _run_flash_decoding(arguments: argparse.Namespace) -> int:
    from burt_numba.cli.run import run_flash_decoding

    return run_flash_decoding(arguments.input, arguments.output, scale=arguments.scale, chunk_size=arguments.chunk_size)


def _run_flash_decoding_chunk(arguments: argparse.Namespace) -> int:
    from burt_numba.cli.run import run_flash_decoding_chunk

    return run_flash_decoding_chunk(
        arguments.input, arguments.output, scale=arguments.scale, chunk_size=arguments.chunk_size
    )


def _run_flash_decoding_reduce(arguments: argparse.Namespace) -> int:
    from burt_numba.cli.run import run_flash_decoding_reduce

    return run_flash_decoding_reduce(arguments.input, arguments.output, chunk_size=arguments.chunk_size)


def _run_merge(arguments: argparse.Namespace) -> int:
    from burt_numba.cli.run import run_merge

    return run_merge(arguments.input, arguments.output)


def _run_memory(arguments: argparse.Namespace) -> int:
    from burt_numba.cli.run import run_memory

    return run_memory(
        arguments.operation,
        arguments.input,
        arguments.output,
        spectral_bound=arguments.spectral_bound,
        projection=arguments.projection,
        power_iterations=arguments.power_iterations,
        shared_memory_mode=getattr(arguments, "shared_memory_mode", None),
    )


def _run_dispatch(arguments: argparse.Namespace) -> int:
    from burt_numba.cli.run import run_dispatch

    return run_dispatch(
        arguments.input,
        arguments.output,
        expert_capacity=arguments.expert_capacity,
        deterministic=not arguments.any_order,
    )


def _run_combine(arguments: argparse.Namespace) -> int:
    from burt_numba.cli.run import run_combine

    return run_combine(arguments.input, arguments.output, renormalize=arguments.renormalize)


def _plan(arguments: argparse.Namespace) -> int:
    return plan(arguments.operation, vars(arguments))


def _bench(arguments: argparse.Namespace) -> int:
    from burt_numba.cli.bench import bench

    return bench(arguments.op)


def _add_run(commands: argparse._SubParsersAction) -> None:
    run = commands.add_parser("run", help="apply an operation to your arrays")
    operations = run.add_subparsers(dest="operation", metavar="OP", required=True)

    def add(name: str, handler: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        about = f"Reads {reads(name)}. Writes {writes(name)}."
        parser = operations.add_parser(name, help=f"reads {reads(name)}; writes {writes(name)}", description=about)
        parser.add_argument(
            "--input", type=Path, required=True, metavar="X.npz", help="an .npz with the arrays it reads, or an .npy"
        )
        parser.add_argument("--output", type=Path, required=True, metavar="Y.npz", help="the .npz to write")
        parser.set_defaults(handler=handler)
        return parser

    softmax = add("constrained_softmax", _run_constrained_softmax)
    contexts = add("biencoder_attention", _run_biencoder_attention)
    for parser in (softmax, contexts):
        parser.add_argument("--entropy-bound", type=float, default=0.20, metavar="NATS", help="default 0.20")
        parser.add_argument("--temperature-min", type=float, default=0.01, metavar="T", help="default 0.01")
        parser.add_argument("--temperature-max", type=float, default=10.0, metavar="T", help="default 10")
        parser.add_argument("--max-iterations", type=int, default=20, metavar="N", help="default 20")
    contexts.add_argument("--no-bound", action="store_true", help="plain attention")
    contexts.add_argument(
        "--scale", type=float, default=None, metavar="X", help="of the dot products, default 1 / sqrt(D)"
    )
    contexts.add_argument("--precision", choices=("fp32", "tf32"), default="fp32", help="of products, default fp32")

    attention = add("attention_softmax", _run_attention_softmax)
    attention.add_argument("--causal", action="store_true", help="mask key j for query i when j > i + offset")
    attention.add_argument(
        "--causal-offset", type=int, default=None, metavar="N", help="default 0; needed when Q and K differ"
    )

    decoding = add("flash_decoding", _run_flash_decoding)
    chunks = add("flash_decoding_chunk", _run_flash_decoding_chunk)
    reduction = add("flash_decoding_reduce", _run_flash_decoding_reduce)
    add("merge_attention_states", _run_merge)
    for parser in (decoding, chunks):
        parser.add_argument(
            "--scale", type=float, default=None, metavar="X", help="of the dot products, default 1 / sqrt(D)"
        )
    decoding.add_argument(
        "--chunk-size", type=int, default=None, metavar="N", help="keys of a chunk; chosen to fill the device"
    )
    chunks.add_argument("--chunk-size", type=int, default=32, metavar="N", help="keys of a chunk, default 32")
    reduction.add_argument(
        "--chunk-size",
        type=int,
        default=None,
        metavar="N",
        help="keys of a chunk; default the chunk_size in the file, which flash_decoding_chunk writes, else 32",
    )

    memory = add("cifg_update", _run_memory)
    batched = add("batched_cifg_update", _run_memory)
    for parser in (memory, batched):
        parser.add_argument("--spectral-bound", type=float, default=0.95, metavar="SIGMA", help="default 0.95")
        parser.add_argument(
            "--projection", choices=("clip", "scale"), default="clip", help="onto the bound, default clip"
        )
        parser.add_argument("--power-iterations", type=int, default=10, metavar="N", help="default 10")
    batched.add_argument(
        "--shared-memory-mode", action="store_true", help="one memory C [d,d], updated by the mean over the samples"
    )

    dispatch = add("sparse_moe_dispatch", _run_dispatch)
    dispatch.add_argument(
        "--expert-capacity", type=int, default=None, metavar="N", help="rows of each expert, default ceil(2 T k / E)"
    )
    dispatch.add_argument(
        "--any-order",
        action="store_true",
        help="rows by atomic counters: their order, and which tokens find room, may change",
    )
    combine = add("sparse_moe_combine", _run_combine)
    combine.add_argument("--renormalize", action="store_true", help="divide by the sum of a token's weights")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="burt-numba",
        description="Entropy-bounded softmax, attention to retrieved contexts, flash decoding, gated matrix memories "
        "and mixtures of experts on Numba CUDA.",
    )
    parser.add_argument("--version", action="version", version=f"burt-numba {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    about = "versions, devices and their limits"
    info = commands.add_parser("info", help=about, description=about)
    info.set_defaults(handler=_info)

    about = "hold every function against its float64 reference"
    check = commands.add_parser("check", help=about, description=about)
    check.add_argument("--op", choices=OPERATIONS, metavar="NAME", help=f"one of: {', '.join(OPERATIONS)}")
    check.add_argument(
        "--sanitize",
        action="store_true",
        help="run in the simulator and look for races, reads of unwritten memory, bad indices and divergent barriers",
    )
    check.set_defaults(handler=_check)

    _add_run(commands)

    about = "the launches and the memory of a call, without launching"
    planning = commands.add_parser(
        "plan", help=about, description=f"{about.capitalize()}. burt-numba plan OP --help lists the sizes of one."
    )
    add_operations(planning)
    planning.set_defaults(handler=_plan)

    about = "measure on the GPU (from a checkout)"
    bench = commands.add_parser("bench", help=about, description=about)
    bench.add_argument("--op", choices=OPERATIONS, metavar="NAME", help=f"one of: {', '.join(OPERATIONS)}")
    bench.set_defaults(handler=_bench)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.handler(arguments)
    except UsageError as error:
        print(f"burt-numba {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"burt-numba {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) went away: nothing more can be said, also not by the flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
