"""Run folders are grouped: which runs share a chart, and which are left out."""

import math
from pathlib import Path

import pytest

from fedbe.analysis.runs import over_seeds, seeds_of
from fedbe.errors import RunError
from fedbe.experiment.recipe_files import load_recipe
from fedbe.report import find_folders, read_groups, readable_folders
from fedbe.report.chart import Point
from fedbe.report.curves import percent


def test_a_comparison_is_a_group_in_the_requested_order(comparison: Path) -> None:
    (group,) = read_groups([comparison])
    assert [(t.info.method, t.info.seed) for t in group.runs] == [
        ("fedavg", 0),
        ("fedavg", 1),
        ("fedbe", 0),
        ("fedbe", 1),
    ]
    assert group.methods == {"fedavg": "FedAvg", "fedbe": "FedBE"}
    assert (group.name, seeds_of(group.runs)) == ("both", "n = 2 seeds (0, 1)")


def test_mean_and_band_by_round(comparison: Path) -> None:
    (group,) = read_groups([comparison])
    points = over_seeds(group.of("fedbe"), percent("test", "accuracy"))
    spread = math.sqrt(8)  # of 70 and 74: √((2² + 2²) / 1)
    assert points[-1] == Point(3, pytest.approx(72), pytest.approx(72 - spread), pytest.approx(72 + spread), 2)
    assert [p.y for p in points] == pytest.approx([52, 62, 72])


def test_runs_of_one_recipe_are_one_group(make_run) -> None:
    a, b = make_run("a", "fedbe", [0.5, 0.6, 0.7]), make_run("b", "fedavg", [0.5, 0.6, 0.7])
    other = make_run("c", "fedavg", [0.5, 0.6], recipe=load_recipe("digits", ("training.rounds=2", "split.clients=4")))
    first, second = read_groups([a, b, other])
    assert list(first.methods) == ["fedavg", "fedbe"]  # the catalogue's order, not that of the folders
    assert [t.folder for t in second.runs] == [other]


def test_a_seed_counts_once_and_a_note_says_so(make_run) -> None:
    late, whole = make_run("late", "fedavg", [0.1]), make_run("whole", "fedavg", [0.5, 0.6, 0.7])
    (group,) = read_groups([late, whole])
    assert [t.folder for t in group.runs] == [whole]
    (note,) = group.notes
    assert f"{late} is left out: {whole} has the same" in note


def test_find_folders_returns_comparisons_and_single_runs(make_run, comparison: Path, tmp_path: Path) -> None:
    single = make_run("deeper/single", "fedavg", [0.5])
    assert find_folders(tmp_path) == [comparison, single]
    with pytest.raises(RunError, match="no runs below"):
        find_folders(tmp_path / "nowhere")


def test_unreadable_folders_are_named(make_run, tmp_path: Path) -> None:
    good, bad = make_run("good", "fedavg", [0.5]), make_run("bad", "fedavg", [0.5])
    (bad / "run.json").write_text("{")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "compare.json").write_text("{")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "compare.json").write_text('{"methods": [], "seeds": []}')
    kept, notes = readable_folders(find_folders(tmp_path))
    assert kept == [good]
    assert [note.split(" is left out: ")[0] for note in notes] == [str(broken), str(empty), str(bad)]
