"""Kernels as Numba lowered them, kept in a folder from a check in one environment for that in another.

Typing and lowering is half of the time of ``perf.resources``, and what comes of it, the input of libNVVM, depends
neither on the toolkit nor on the compute capability: device code that asks for the capability is answered by libNVVM.
"""

from __future__ import annotations

import gzip
import hashlib
import pickle
import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any


@cache
def _lowering() -> str:
    """What lowering depends on: these sources, and who does it."""
    from burt_numba.host.compiling import sources_key

    return " ".join([sources_key(), *map(version, ("numba", "numba-cuda", "llvmlite"))])


def _file(folder: Path, specialisation: Any) -> Path:
    text = f"{_lowering()} {specialisation.key} {specialisation.kernel.launch_bounds}"
    return folder / f"{specialisation.name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.pickle.gz"


def load(folder: Path, specialisation: Any) -> Any:
    """Return Numba's code library, or None."""
    file = _file(folder, specialisation)
    return pickle.loads(gzip.decompress(file.read_bytes())) if file.exists() else None


def save(folder: Path, specialisation: Any, library: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # A hundredth of the time of lowering; uncompressed, all kernels are 200 MB.
    _file(folder, specialisation).write_bytes(gzip.compress(pickle.dumps(library), compresslevel=1))


_NAME = re.compile(r'@"(?:_ZN|_cudapy_smem_)[^"]*"')
_DEFINITION = re.compile(r'^define [^@]*(@"[^"]*")', re.MULTILINE)


def canonical(modules: Sequence[str]) -> list[str]:
    """Return the LLVM modules of a kernel, its own first, without what depends on the process that lowered it.

    Numba's names hold numbers that it counts up in a process, addresses and the capability, and the modules are listed
    in no order. Here they follow each other as they are called, and names are numbered as they appear.
    """
    definitions = {name: module for module in modules for name in _DEFINITION.findall(module)}
    numbers: dict[str, int] = {}
    ordered = [modules[0]]
    for module in ordered:
        for name in _NAME.findall(module):
            numbers.setdefault(name, len(numbers))
            if name in definitions and definitions[name] not in ordered:
                ordered.append(definitions[name])
    if len(ordered) != len(modules):
        raise ValueError(f"{len(modules) - len(ordered)} of {len(modules)} modules are called by none")
    # The first line is a comment with the name.
    return [_NAME.sub(lambda name: f"@{numbers[name[0]]}", module.partition("\n")[2]) for module in ordered]
