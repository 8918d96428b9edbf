"""The committed results agree with their records."""

import re
from pathlib import Path

import pytest

from fedbe.experiment import run_folder
from fedbe.reproduce import study_runner, table
from fedbe.reproduce.round_curves import chart_by_round
from fedbe.reproduce.study import load_study

RESULTS = Path(__file__).parents[2] / "results"
# Study, seeds, changes; results/README.md says why.
STUDIES = [
    ("table1", 3, ("training.epochs=5",)),
    ("table4", 1, ("training.epochs=5", "variant=tuned")),
    ("one-round", 1, ()),
]
# The least rounds of unfinished runs, by a part of their path; all other runs must be finished.
MINIMUM = {
    "resnet20": 10,
    "late-rounds": 28,
    "unbalanced-vote": 31,
    "large-steps": 19,
    "first-round-counts": 15,
    "in-progress": 1,
}


@pytest.mark.parametrize(("name", "seeds", "changes"), STUDIES)
def test_the_table_agrees_with_the_records(name: str, seeds: int, changes: tuple[str, ...]) -> None:
    study, root = load_study(name).with_changes(changes), RESULTS / f"reproduce-{name}-paper"
    runs = list(study_runner.study_runs(study, "paper", seeds, root))
    study_runner.check_runs(runs)
    picture = chart_by_round(study, "paper", runs)
    rows = table.collect(study, runs)
    assert (root / "table.md").read_text() == table.markdown(study, "paper", rows, {}, [picture] if picture else [])
    assert sum(len(row.ours) + len(row.under_way) for row in rows) == len(list(root.rglob("run.json")))


def test_every_folder_of_results_is_checked() -> None:
    assert sorted(path.name for path in RESULTS.glob("reproduce-*")) == sorted(
        f"reproduce-{s[0]}-paper" for s in STUDIES
    )


def test_every_record_is_complete_and_of_a_clean_commit() -> None:
    folders = [path.parent for path in RESULTS.rglob("run.json")]
    assert folders
    for folder in folders:
        info, recipe = run_folder.read_info(folder), run_folder.read_recipe(folder)
        rounds = 1 if recipe.method_for(info.method).one_round else recipe.training.rounds
        count = rounds if info.finished else len(run_folder.read_rounds(folder))
        path = folder.relative_to(RESULTS).as_posix()
        assert count >= next((least for part, least in MINIMUM.items() if part in path), rounds)
        assert [r["round"] for r in run_folder.read_rounds(folder)] == list(range(1, count + 1))
        # " and uncommitted changes" would follow; a run that another commit has continued names both
        assert re.fullmatch(r"[0-9a-f]{40}(, from round \d+ on [0-9a-f]{40})*", info.made_with["commit"])
