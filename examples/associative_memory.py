"""An associative memory of handwritten digits, with and without a bound on its largest singular value.

One image of each digit is written into a matrix memory, then images of other digits, and the first ten are read back::

    NUMBA_ENABLE_CUDASIM=1 python examples/associative_memory.py    # half a minute; without the setting, on a GPU
    NUMBA_ENABLE_CUDASIM=1 python examples/associative_memory.py --picture out.png    # with Matplotlib

h is an image: 64 pixels, the mean image taken off, of length 4. The memory C [64, 64] forgets with the same gate in
each row (W_f = 0, and b_f sets it), writes h hᵀ, and is read as C h.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path

import numpy as np

import burt_numba

IMAGES = Path(__file__).with_name("digits_images.npz")
KEPT = 0.95
"""The forget gate: what is left of the memory after a write."""
KEY_LENGTH = 4.0
BOUNDS = (math.inf, 0.95)
WRITES_AFTER = (0, 10, 20)
"""How many other images have been written when the memory is read."""


def load_images() -> tuple[np.ndarray, np.ndarray]:
    """Pixels [200, 64] from 0 to 16, and the digits [200]."""
    with np.load(IMAGES) as file:
        return file["images"].astype(np.float32), file["labels"]


def choose(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first image of each digit, and all others in a fixed random order."""
    stored = np.array([np.flatnonzero(labels == digit)[0] for digit in range(10)])
    others = np.setdiff1d(np.arange(len(labels)), stored)
    return stored, np.random.default_rng(0).permutation(others)


def write_all(keys: np.ndarray, bound: float) -> tuple[list[np.ndarray], int, float]:
    """Write the keys in order: the memory at each count of `WRITES_AFTER`, how often the bound acted, largest sigma."""
    size = keys.shape[1]
    no_input, no_weights = np.zeros(0, np.float32), np.zeros((size, size), np.float32)
    bias = np.full(size, math.log(KEPT / (1 - KEPT)), np.float32)
    memory, carried, sigma = np.zeros((size, size), np.float32), np.zeros(size, np.float32), np.zeros(1, np.float32)
    memories, acted, largest = [], 0, 0.0
    for count, key in enumerate(keys, 1):
        burt_numba.cifg_update(memory, key, no_input, no_weights, bias, bound, power_vector=carried, sigma_out=sigma)
        acted += bool(sigma[0] > bound)
        if count - 10 in WRITES_AFTER:
            memories.append(memory.copy())
        largest = max(largest, float(np.linalg.norm(memory, 2)))
    return memories, acted, largest


def read(memory: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """What the memory gives back for each key, of length 1."""
    answers = keys @ memory.T
    return answers / np.linalg.norm(answers, axis=1, keepdims=True)


def nearest(vectors: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """For each vector the stored key, 0 to 9, that it is most alike."""
    return (vectors @ stored.T).argmax(axis=1)


def draw(path: Path, rows: list[tuple[str, np.ndarray]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(rows), 10, figsize=(8, 0.85 * len(rows)), squeeze=False)
    for row, (title, images) in zip(axes, rows, strict=True):
        for place, image in zip(row, images, strict=True):
            place.imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=16)
            place.set(xticks=[], yticks=[])
        row[0].set_ylabel(title, rotation=0, ha="right", va="center")
    figure.tight_layout(pad=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Recall of digits from a memory, with and without a spectral bound.")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw what is read back (needs Matplotlib)")
    options = parser.parse_args()
    # Before the work, which would be in vain without it.
    if options.picture and importlib.util.find_spec("matplotlib") is None:
        parser.error("--picture needs Matplotlib: pip install matplotlib")

    pixels, labels = load_images()
    mean = pixels.mean(axis=0)
    lengths = np.linalg.norm(pixels - mean, axis=1, keepdims=True)
    keys = KEY_LENGTH * (pixels - mean) / lengths
    first, others = choose(labels)
    stored, cues, cue_labels = keys[first], keys[others], labels[others]
    unseen = slice(WRITES_AFTER[-1], None)
    plain = np.mean(nearest(cues[unseen], stored) == cue_labels[unseen])
    print(f"{len(stored)} stored keys of length {KEY_LENGTH:g}, gate {KEPT}, then {WRITES_AFTER[-1]} other images")
    print(f"unseen images nearest to the stored key of their digit, with no memory: {plain:.2f}")
    print("bound  writes after  cosine  right  unseen right  |C h| / |h|")
    rows = [("stored", pixels[first])]
    for bound in BOUNDS:
        memories, acted, largest = write_all(np.concatenate([stored, cues[: WRITES_AFTER[-1]]]), bound)
        for count, memory in zip(WRITES_AFTER, memories, strict=True):
            answers = read(memory, stored)
            cosine = np.mean(np.sum(answers * stored, axis=1) / KEY_LENGTH)
            right = np.mean(nearest(answers, stored) == np.arange(10))
            unseen_right = np.mean(nearest(read(memory, cues[unseen]), stored) == cue_labels[unseen])
            gain = np.mean(np.linalg.norm(stored @ memory.T, axis=1)) / KEY_LENGTH
            print(f"{bound:5g}  {count:12}  {cosine:6.3f}  {right:5.2f}  {unseen_right:12.2f}  {gain:11.2f}")
            rows.append((f"bound {bound:g},\n{count} later", mean + lengths[first] * answers))
        print(f"{bound:5g}  the bound acted {acted} times, the largest singular value was {largest:.3f}")
    if options.picture is not None:
        # The mean image and the contrast of each put back; the answers have neither.
        draw(options.picture, rows)


if __name__ == "__main__":
    main()
