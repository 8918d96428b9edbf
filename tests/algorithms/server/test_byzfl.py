"""The rules and attacks that ByzFL has too, compared with it. Skipped where the package `byzfl` is not installed.

`pip install --no-deps byzfl` into a folder on PYTHONPATH is enough. The same rules have hand-worked numbers in
test_robust.py and tests/experiment/test_attacks.py.
"""

import sys
import types

import pytest
import torch

from fedbe.algorithms.server import robust
from fedbe.experiment import attacks


@pytest.fixture(scope="module")
def byzfl():
    """Without its benchmark, which needs torchvision and seaborn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "byzfl.benchmark", types.ModuleType("byzfl.benchmark"))
        yield pytest.importorskip("byzfl")


@pytest.fixture
def rows():
    """Seven clients near each other and two far away, float64 [9, 20]."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 20, dtype=torch.float64, generator=draw)
    rows[[2, 5]] += 30
    return rows


@pytest.mark.parametrize(
    ("name", "settings", "ours"),
    [
        ("Median", {}, robust.coordinate_median),
        ("TrMean", {"f": 2}, lambda rows: robust.trimmed_mean(rows, 2)),
        ("MultiKrum", {"f": 2}, lambda rows: rows[robust.krum_selection(rows, 2)].mean(0)),
        ("GeometricMedian", {"nu": 1e-9, "T": 300}, robust.geometric_median),
    ],
)
def test_robust_means(byzfl, rows, name, settings, ours):
    theirs = torch.from_numpy(getattr(byzfl, name)(**settings)(rows.numpy()))
    torch.testing.assert_close(ours(rows), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "settings", "kind", "strength"),
    [
        ("SignFlipping", {}, "inner-product", 1.0),  # of the mean of the honest; our sign-flip is of each client's own
        ("InnerProductManipulation", {"tau": 2.0}, "inner-product", 2.0),
        ("ALittleIsEnough", {"tau": -1.5}, "little", 1.5),
        ("Mimic", {}, "mimic", 1.0),
        ("Inf", {}, "infinity", 1.0),
    ],
)
def test_attacks(byzfl, rows, name, settings, kind, strength):
    theirs = torch.from_numpy(getattr(byzfl, name)(**settings)(rows.numpy()))
    rule, _ = attacks.MODEL_ATTACKS[kind]
    view = attacks.View(rows[:1], rows, strength, lambda change: change, torch.Generator())
    torch.testing.assert_close(rule(view).reshape(-1), theirs)
