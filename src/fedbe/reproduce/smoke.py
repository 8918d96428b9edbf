"""Stand-ins for what the smoke scale does not load."""

import numpy as np


def images() -> tuple[np.ndarray, np.ndarray]:
    """Noise in the shape of digits, for studies whose unlabeled images come from another set."""
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (500, 8, 8, 1), dtype=np.uint8), np.arange(500) % 2
