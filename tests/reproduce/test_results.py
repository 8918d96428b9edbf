"""The committed results are what their records say."""

from pathlib import Path

import pytest

from fedbe.experiment import run_folder
from fedbe.reproduce import study_runner, table
from fedbe.reproduce.round_curves import chart_by_round
from fedbe.reproduce.study import load_study

RESULTS = Path(__file__).parents[2] / "results"
# Seeds, and what was changed: results/README.md says why.
STUDIES = [
    ("table1", 3, ("training.epochs=5",)),
    ("table4", 1, ("training.epochs=5", "variant=tuned")),
    ("one-round", 1, ()),
]
# Rounds of runs that are shown before their end, by a part of their path; all others must be finished.
MINIMUM = {"resnet20": 10, "late-rounds": 28}


@pytest.mark.parametrize(("name", "seeds", "changes"), STUDIES)
def test_the_table_is_made_of_the_records_beside_it(name: str, seeds: int, changes: tuple[str, ...]) -> None:
    study, root = load_study(name).with_changes(changes), RESULTS / f"reproduce-{name}-paper"
    places = list(study_runner.study_runs(study, "paper", seeds, root))
    study_runner.check_runs(places)
    picture = chart_by_round(study, "paper", places)
    rows = table.collect(study, places)
    assert (root / "table.md").read_text() == table.markdown(study, "paper", rows, {}, [picture] if picture else [])
    assert sum(len(row.ours) + len(row.under_way) for row in rows) == len(list(root.rglob("run.json")))


def test_every_folder_of_results_is_checked() -> None:
    assert sorted(path.name for path in RESULTS.glob("reproduce-*")) == sorted(
        f"reproduce-{s[0]}-paper" for s in STUDIES
    )


def test_every_record_is_whole_and_of_a_clean_commit() -> None:
    folders = [path.parent for path in RESULTS.rglob("run.json")]
    assert folders
    for folder in folders:
        info, recipe = run_folder.read_info(folder), run_folder.read_recipe(folder)
        rounds = 1 if recipe.method_for(info.method).one_round else recipe.training.rounds
        played = rounds if info.finished else len(run_folder.read_rounds(folder))
        place = folder.relative_to(RESULTS).as_posix()
        assert played >= next((least for part, least in MINIMUM.items() if part in place), rounds)
        assert [r["round"] for r in run_folder.read_rounds(folder)] == list(range(1, played + 1))
        assert len(info.made_with["commit"]) == 40  # " and uncommitted changes" would follow
