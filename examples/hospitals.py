"""A table that is spread over hospitals: 569 real tumours (scikit-learn's breast cancer data), four hospitals.

Each hospital sees tumours of another size, so their classes differ, as they do in reality. The table is a CSV file with
a column for the hospital; the split "column" gives each hospital its rows.

    python examples/hospitals.py
"""

import csv
import tempfile
from pathlib import Path

import numpy as np
import torch
from library_loop import federate
from sklearn.datasets import load_breast_cancer
from torch import nn

import fedbe
from fedbe.data import load_task, split


def write_table(path: Path) -> None:
    """Write the table. A hospital gets a quarter of the tumours, ordered by radius, and some of the others."""
    data = load_breast_cancer()
    quarter = data.data[:, 0].argsort().argsort() * 4 // len(data.target)
    mixed = np.random.default_rng(0).random(len(quarter)) < 0.2
    hospital = np.where(mixed, np.random.default_rng(1).integers(0, 4, len(quarter)), quarter)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*data.feature_names, "hospital", "diagnosis"])
        names = np.array(["malignant", "benign"])[data.target]
        writer.writerows([*row, f"hospital {h}", name] for row, h, name in zip(data.data, hospital, names, strict=True))


def main() -> float:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tumours.csv"
        write_table(path)
        task = load_task(f"csv:{path}?label=diagnosis&client=hospital")
    labels, ids = task.train.labels, task.train.client_ids
    partition = split("column", labels, clients=4, server=80, seed=0, ids=ids)
    print("rows of each hospital by class:", partition.counts(labels, 2).tolist(), "classes:", task.train.classes)
    model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
    settings = fedbe.LocalSettings(epochs=5, batch_size=20, lr=0.02)
    return federate(model, task, partition, settings, rounds=4, distill_epochs=10)


if __name__ == "__main__":
    main()
