"""Write digits_images.npz: twenty images of each of scikit-learn's handwritten digits.

Run with scikit-learn installed (``pip install ".[docs]"``)::

    python examples/make_digits_images.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

IMAGES_OF_A_DIGIT = 20
OUTPUT = Path(__file__).with_name("digits_images.npz")


def main() -> None:
    digits = load_digits()
    first = [np.flatnonzero(digits.target == digit)[:IMAGES_OF_A_DIGIT] for digit in range(10)]
    chosen = np.sort(np.concatenate(first))
    images, labels = digits.data[chosen].astype(np.uint8), digits.target[chosen].astype(np.uint8)
    np.savez_compressed(OUTPUT, images=images, labels=labels)
    print(f"{OUTPUT.name}: {OUTPUT.stat().st_size} bytes, images {images.shape} of 0 to {images.max()}")


if __name__ == "__main__":
    main()
