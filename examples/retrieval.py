"""Digits recognised by the images that are retrieved for them, with and without a bound on the entropy of attention.

A hundred images with known digits are the contexts: keys are the images, values their digits, one-hot. The other
hundred are queries, whose result is a vote: the weight that each digit has. The bound makes a decision of it::

    NUMBA_ENABLE_CUDASIM=1 python examples/retrieval.py    # some seconds; without the setting, on a GPU
    NUMBA_ENABLE_CUDASIM=1 python examples/retrieval.py --picture out.png    # with Matplotlib

Queries and keys are images without the mean image, of length 1, so that a score is the scale times a cosine.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import softmax

import burt_numba

IMAGES = Path(__file__).with_name("digits_images.npz")
SCALES = (4.0, 16.0)
BOUNDS = (None, 1.0, 0.2, 0.05)
MASS = 0.95
"""Of the weight, for which contexts are counted."""
DRAWN_SCALE = 4.0
DRAWN_QUERIES = 4
DRAWN_CONTEXTS = 8


class Digits(NamedTuple):
    """Images [100, 64], pixels from 0 to 16, what they are attended by [100, 64], and their digits [100]."""

    images: np.ndarray
    vectors: np.ndarray
    labels: np.ndarray


def load_digits() -> tuple[Digits, Digits]:
    """Ten images of each digit as contexts, the others as queries."""
    with np.load(IMAGES) as file:
        images, labels = file["images"].astype(np.float32), file["labels"].astype(np.int64)
    is_context = np.zeros(len(labels), bool)
    for digit in range(10):
        is_context[np.flatnonzero(labels == digit)[:10]] = True
    vectors = images - images[is_context].mean(axis=0)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    contexts, queries = (Digits(images[part], vectors[part], labels[part]) for part in (is_context, ~is_context))
    return contexts, queries


def vote(contexts: Digits, queries: Digits, scale: float, bound: float | None) -> tuple[np.ndarray, np.ndarray]:
    """The weight of each digit [100, 10], and the temperature of each query."""
    values = np.zeros_like(contexts.vectors)
    values[np.arange(len(values)), contexts.labels] = 1
    temperature = np.empty((1, 1, len(queries.labels)), np.float32)
    out = burt_numba.biencoder_attention(
        *(vectors[None, None] for vectors in (queries.vectors, contexts.vectors, values)),
        scale,
        bound,
        temperature_out=temperature,
        # Two contexts that are equally near are left with half the vote each, and recorded.
        errors=burt_numba.ErrorBuffer(),
    )
    return out[0, 0, :, :10], temperature[0, 0]


def weights_at(contexts: Digits, queries: Digits, scale: float, temperature: np.ndarray) -> np.ndarray:
    """[100, 100], which the function never makes: to be counted and drawn here."""
    return softmax(scale * queries.vectors @ contexts.vectors.T / temperature[:, None], axis=1)


def count_contexts(weights: np.ndarray) -> np.ndarray:
    """How many contexts each query needs for `MASS` of its weight."""
    return 1 + np.count_nonzero(np.cumsum(-np.sort(-weights, axis=1), axis=1) < MASS, axis=1)


def draw(path: Path, contexts: Digits, queries: Digits, weights: dict[str, np.ndarray]) -> None:
    """The queries least sure of their digit without a bound, and under each of their nearest contexts its weights."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    unbounded = next(iter(weights.values()))
    chosen = np.argsort(unbounded.max(axis=1))[:: len(unbounded) // DRAWN_QUERIES][:DRAWN_QUERIES]
    columns = 1 + DRAWN_CONTEXTS
    figure, axes = pyplot.subplots(
        2 * DRAWN_QUERIES,
        columns,
        figsize=(8, 1.45 * DRAWN_QUERIES),
        squeeze=False,
        gridspec_kw={"height_ratios": [1, 0.7] * DRAWN_QUERIES},
    )
    colors = pyplot.get_cmap("viridis")(np.linspace(0.9, 0.1, len(weights)))
    for number, query in enumerate(chosen):
        pictures, bars = axes[2 * number], axes[2 * number + 1]
        nearest = np.argsort(-unbounded[query])[:DRAWN_CONTEXTS]
        images = [queries.images[query], *contexts.images[nearest]]
        for place, image in zip(pictures, images, strict=True):
            place.imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=16)
            place.set(xticks=[], yticks=[])
        pictures[0].set_ylabel("query", fontsize=8)
        bars[0].axis("off")
        for place, context in zip(bars[1:], nearest, strict=True):
            place.bar(range(len(weights)), [of_bound[query, context] for of_bound in weights.values()], color=colors)
            place.set(xticks=[], yticks=[], ylim=(0, 1))
        bars[1].set_yticks([0, 1])
        bars[1].tick_params(labelsize=7)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors]
    figure.legend(handles, weights, ncols=len(weights), loc="lower center", frameon=False, fontsize=8)
    figure.tight_layout(pad=0.3, rect=(0, 0.035, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits recognised by attention to images of known digits.")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw what queries attend to (needs Matplotlib)")
    options = parser.parse_args()
    # Before the work, which would be in vain without it.
    if options.picture and importlib.util.find_spec("matplotlib") is None:
        parser.error("--picture needs Matplotlib: pip install matplotlib")

    contexts, queries = load_digits()
    print(f"{len(queries.labels)} queries, {len(contexts.labels)} contexts")
    print(f"scale  bound  right  contexts for {MASS:.0%} of the weight  weight of the digit voted for  temperature")
    drawn = {}
    for scale in SCALES:
        for bound in BOUNDS:
            votes, temperature = vote(contexts, queries, scale, bound)
            weights = weights_at(contexts, queries, scale, temperature)
            name = "none" if bound is None else f"{bound:g}"
            right = np.mean(votes.argmax(axis=1) == queries.labels)
            print(
                f"{scale:5g}  {name:>5}  {right:5.2f}  {count_contexts(weights).mean():31.1f}  "
                f"{votes.max(axis=1).mean():29.3f}  {temperature.mean():11.3f}"
            )
            if scale == DRAWN_SCALE:
                drawn["no bound" if bound is None else f"bound {name}"] = weights
    if options.picture is not None:
        draw(options.picture, contexts, queries, drawn)


if __name__ == "__main__":
    main()
