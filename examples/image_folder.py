"""Your own images: one folder for each class. This makes such a folder from the digits, and trains on it.

python examples/image_folder.py
"""

import tempfile
from pathlib import Path

import torch
from library_loop import federate
from PIL import Image
from torch import nn

import fedbe
from fedbe.data import load_task, split


def write_images(folder: Path) -> None:
    """Write FOLDER/<class>/<number>.png for the digits 0 to 4."""
    digits = load_task("digits").train
    for number, (pixels, label) in enumerate(zip(digits.tensor, digits.labels.tolist(), strict=True)):
        if label < 5:
            (folder / f"digit {label}").mkdir(exist_ok=True)
            Image.fromarray(pixels[..., 0].numpy()).save(folder / f"digit {label}" / f"{number}.png")


def main() -> float:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        task = load_task(f"folder:{folder}")
    print("classes:", task.train.classes)
    partition = split("dirichlet", task.train.labels, clients=5, server=100, seed=0, alpha=0.3)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 5))
    settings = fedbe.LocalSettings(epochs=3, lr=0.02)
    return federate(model, task, partition, settings, rounds=3, distill_epochs=10)


if __name__ == "__main__":
    main()
