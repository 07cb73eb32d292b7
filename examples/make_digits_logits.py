"""Write digits_logits.npz: the logits of a plain classifier on scikit-learn's handwritten digits.

Run with scikit-learn installed (``pip install ".[docs]"``)::

    python examples/make_digits_logits.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.special import entr, softmax
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold

ENTROPY_BOUND = 0.20
OUTPUT = Path(__file__).with_name("digits_logits.npz")


def cross_validated_logits(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return [1797, 10] float32: each row from a model that did not see that row."""
    logits = np.zeros((len(labels), 10), dtype=np.float32)
    for train, held_out in StratifiedKFold(10, shuffle=True, random_state=0).split(images, labels):
        model = LogisticRegression(max_iter=3000).fit(images[train], labels[train])
        logits[held_out] = model.decision_function(images[held_out])
    return logits


def main() -> None:
    digits = load_digits()
    labels = digits.target.astype(np.int64)
    logits = cross_validated_logits(digits.data / 16.0, labels)
    np.savez_compressed(OUTPUT, logits=logits, labels=labels)

    entropy = entr(softmax(logits.astype(np.float64), axis=-1)).sum(axis=-1)
    print(f"{OUTPUT.name}: {OUTPUT.stat().st_size} bytes, logits {logits.shape} {logits.dtype}")
    print(f"accuracy {np.mean(logits.argmax(axis=-1) == labels):.4f}")
    print(f"softmax entropy in nats: mean {entropy.mean():.4f}, largest {entropy.max():.4f}")
    above = int(np.sum(entropy > ENTROPY_BOUND))
    print(f"rows above {ENTROPY_BOUND}: {above} of {len(labels)} ({above / len(labels):.1%})")


if __name__ == "__main__":
    main()
