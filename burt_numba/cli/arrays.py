"""Reading and writing the user's arrays."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import numpy as np

from burt_numba.cli.errors import UsageError
from burt_numba.cli.files import FILES

# How a zip archive, an empty one too, and an .npy file begin.
_MAGIC = (b"PK\x03\x04", b"PK\x05\x06", np.lib.format.MAGIC_PREFIX[:4])


def load(path: Path, operation: str) -> dict[str, np.ndarray]:
    """Read what the operation does, optional arrays where they are there, from an .npz or .npy file.

    An array that is alone in its file is the first of them whatever its name.
    """
    required, _, optional = FILES[operation]
    main = next(iter(required))
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    try:
        with path.open("rb") as file:
            if file.read(4) not in _MAGIC:
                raise UsageError(f"{path}: neither an .npz nor an .npy file")
            file.seek(0)
            loaded = np.load(file, allow_pickle=False)
            arrays = {main: loaded} if isinstance(loaded, np.ndarray) else loaded
            names = list(arrays)
            if len(names) == 1 and names[0] not in (*required, *optional):
                arrays, names = {main: arrays[names[0]]}, [main]
            for name in required:
                if name not in names:
                    held = ", ".join(names) or "nothing"
                    raise UsageError(f"{path}: holds no array named {name} (it holds: {held})")
            return {name: arrays[name] for name in (*required, *optional) if name in names}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path}: cannot be read ({reason})") from None


def without_float64(name: str, array: np.ndarray) -> np.ndarray:
    """Return the array in native byte order, and as float32 where it was float64, which is said on stderr."""
    if array.dtype.kind == "f" and array.dtype.itemsize == 8:
        print(f"{name}: float64 converted to float32.", file=sys.stderr)
        # A value past the range of float32 becomes an infinity, which the operation reports.
        with np.errstate(over="ignore"):
            return array.astype(np.float32)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def check_output(output: Path, source: Path) -> None:
    """Refuse before the work what could not be written after it."""
    if output.suffix != ".npz":
        raise UsageError(f"--output: expected a name that ends in .npz, got {output}")
    if not output.parent.is_dir():
        raise UsageError(f"--output: no such folder: {output.parent}")
    if output.exists() and (not output.is_file() or (source.exists() and output.samefile(source))):
        raise UsageError(f"--output: would not overwrite {output}")


def save(output: Path, operation: str, *arrays: np.ndarray | int) -> None:
    """Write what the operation does, in the order of its names."""
    named = dict(zip(FILES[operation].writes, arrays, strict=True))
    try:
        with output.open("wb") as file:
            np.savez(file, allow_pickle=False, **named)
    except OSError as error:
        raise UsageError(f"{output}: cannot be written ({error.strerror})") from None
