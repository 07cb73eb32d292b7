"""A mixture of experts on handwritten digits: a gate trained by k-means, and the load of each expert under a capacity.

Half of the images train eight experts, each of which can draw the images of one cluster with five components of its
own; the other half are sent to the two experts that the gate prefers, and put together from what these give back::

    NUMBA_ENABLE_CUDASIM=1 python examples/expert_routing.py    # some seconds; without the setting, on a GPU
    NUMBA_ENABLE_CUDASIM=1 python examples/expert_routing.py --picture out.png    # with Matplotlib

A token is an image without the mean image, so the zeros that a dropped token comes back as stand for the mean image.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import softmax

import burt_numba

IMAGES = Path(__file__).with_name("digits_images.npz")
EXPERTS, CHOICES, COMPONENTS = 8, 2, 5
FACTORS = (0.5, 0.75, 1.0, 2.0)
"""Capacities, as multiples of the mean load. The last is the default of `sparse_moe_dispatch`."""
DRAWN_FACTOR = 0.75
STEPS = 30
"""Of k-means, which has come to rest by then."""


class Expert(NamedTuple):
    """Draws what lies near its centre: the nearest image in the span of its components."""

    center: np.ndarray
    components: np.ndarray

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        return self.center + (tokens - self.center) @ self.components.T @ self.components


def load_tokens() -> tuple[np.ndarray, np.ndarray]:
    """Images [100, 64] to train with and [100, 64] to route, pixels from 0 to 1, without the mean image."""
    with np.load(IMAGES) as file:
        images = file["images"].astype(np.float32) / 16
    trained, routed = np.split(np.random.default_rng(0).permutation(images), 2)
    mean = trained.mean(axis=0)
    return trained - mean, routed - mean


def squared_distances(tokens: np.ndarray, centers: np.ndarray) -> np.ndarray:
    return ((tokens[:, None] - centers) ** 2).sum(axis=2)


def find_centers(tokens: np.ndarray) -> np.ndarray:
    """k-means, the least asked for first: expert 0 takes what finds no room, so it is the one with room to spare."""
    centers = tokens[np.random.default_rng(0).choice(len(tokens), EXPERTS, replace=False)]
    for _ in range(STEPS):
        nearest = squared_distances(tokens, centers).argmin(axis=1)
        centers = np.stack([tokens[nearest == expert].mean(axis=0) for expert in range(EXPERTS)])
    return centers[np.argsort(loads(gate(tokens, centers)[1]), kind="stable")]


def gate(tokens: np.ndarray, centers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights [T, E], by the distance from each centre, and the experts [T, k] that weigh most, best first."""
    weights = softmax(-squared_distances(tokens, centers), axis=1).astype(np.float32)
    return weights, np.argsort(-weights, axis=1, kind="stable")[:, :CHOICES].astype(np.int32)


def loads(indices: np.ndarray) -> np.ndarray:
    """How many tokens ask for each expert."""
    return np.bincount(indices.ravel(), minlength=EXPERTS)


def fit(tokens: np.ndarray) -> Expert:
    center = tokens.mean(axis=0)
    return Expert(center, np.linalg.svd(tokens - center, full_matrices=False)[2][:COMPONENTS])


def missed(tokens: np.ndarray, drawn: np.ndarray) -> float:
    """The share of the images' variance that is not in what was drawn."""
    return float(((tokens - drawn) ** 2).sum() / (tokens**2).sum())


def route(tokens: np.ndarray, centers: np.ndarray, experts: list[Expert], factor: float) -> dict[str, np.ndarray | int]:
    """Dispatch, let each expert draw its rows, combine."""
    weights, indices = gate(tokens, centers)
    capacity = math.ceil(factor * len(tokens) * CHOICES / EXPERTS)
    dispatch = burt_numba.sparse_moe_dispatch(tokens, weights, indices, capacity, errors=burt_numba.ErrorBuffer())
    outputs = np.stack([draw_rows(rows) for draw_rows, rows in zip(experts, dispatch.expert_inputs, strict=True)])
    drawn = burt_numba.sparse_moe_combine(outputs.astype(np.float32), dispatch, renormalize=True)
    return {
        "drawn": drawn,
        "capacity": capacity,
        "asked": loads(indices),
        "stored": dispatch.expert_counts,
        "overflowed": int(dispatch.num_overflowed[0]),
        "dropped": int(dispatch.num_dropped[0]),
    }


def draw(path: Path, routed: dict[str, np.ndarray | int]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    places = np.arange(EXPERTS)
    moved = np.where(places == 0, routed["overflowed"], 0)
    axes.bar(places - 0.2, routed["asked"], 0.38, color="0.75", label="asked for")
    axes.bar(places + 0.2, routed["stored"] - moved, 0.38, color="tab:blue", label="stored")
    axes.bar(places + 0.2, moved, 0.38, routed["stored"] - moved, color="tab:orange", label="stored, by overflow")
    axes.axhline(routed["capacity"], color="black", linewidth=1, linestyle="--", label="capacity")
    axes.set(xlabel="expert", ylabel="tokens", xticks=places)
    axes.legend(loc="upper left", frameon=False, ncols=2)
    axes.set_ylim(0, 1.35 * np.max(routed["asked"]))
    figure.tight_layout(pad=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits routed to experts, with the load of each under a capacity.")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the load of each expert (needs Matplotlib)")
    options = parser.parse_args()
    # Before the work, which would be in vain without it.
    if options.picture and importlib.util.find_spec("matplotlib") is None:
        parser.error("--picture needs Matplotlib: pip install matplotlib")

    trained, tokens = load_tokens()
    centers = find_centers(trained)
    indices = gate(trained, centers)[1]
    experts = [fit(trained[(indices == expert).any(axis=1)]) for expert in range(EXPERTS)]
    print(f"{len(tokens)} images to {CHOICES} of {EXPERTS} experts, of {COMPONENTS} components each")
    print(f"missed by one expert for all images: {missed(tokens, fit(trained)(tokens)):.3f}")
    print("factor  capacity  overflowed  dropped  missed  asked for / stored, expert 0 first")
    for factor in FACTORS:
        routed = route(tokens, centers, experts, factor)
        each = " ".join(f"{a}/{s}" for a, s in zip(routed["asked"], routed["stored"], strict=True))
        print(
            f"{factor:6g}  {routed['capacity']:8}  {routed['overflowed']:10}  {routed['dropped']:7}  "
            f"{missed(tokens, routed['drawn']):6.3f}  {each}"
        )
        if options.picture is not None and factor == DRAWN_FACTOR:
            draw(options.picture, routed)


if __name__ == "__main__":
    main()
