"""Every table and figure, from its grid to its table: small, but end to end."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedbe.errors import RecipeError
from fedbe.reproduce import cost, play, table
from fedbe.reproduce.play import Place
from fedbe.reproduce.study import SCALES, Study, available, load_study
from fedbe.simulation import run
from fedbe.simulation.workers import Pool
from fedbe.watching import Nobody


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as workers:
        yield workers


def _play(name: str, pool: Pool, root: Path, seeds: int = 1) -> tuple[Study, list[Place]]:
    study = load_study(name)
    places = list(play.places(study, "smoke", seeds, root))
    whole, missing = play.play(places, pool, Nobody(), "float32", lambda: False)
    assert whole
    assert missing == {}
    return study, places


@pytest.mark.parametrize("name", available())
def test_every_study_runs_end_to_end(name: str, pool: Pool, tmp_path: Path) -> None:
    study, places = _play(name, pool, tmp_path)
    written = table.write(study, "smoke", places, {}, tmp_path).read_text()
    assert written.startswith(f"# {study.title}")
    assert all(m.ours for m in table.collect(study, places))
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert len(rows) == len(study.cells("smoke"))
    assert (tmp_path / "rounds.csv").exists() == study.series


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_of_every_scale_is_a_valid_recipe(name: str, scale: str) -> None:
    study = load_study(name)
    for cell in study.cells(scale):  # type: ignore[arg-type]
        assert study.recipe_for(cell, scale).method_for()  # type: ignore[arg-type]


def test_what_is_done_is_not_run_again(pool: Pool, tmp_path: Path) -> None:
    _, places = _play("table3", pool, tmp_path)
    before = [(p.folder / "rounds.jsonl").stat().st_mtime_ns for p in places]
    _play("table3", pool, tmp_path)
    assert [(p.folder / "rounds.jsonl").stat().st_mtime_ns for p in places] == before


def test_two_views_of_one_run_are_one_run(tmp_path: Path) -> None:
    places = list(play.places(load_study("fig-ensemble"), "paper", 1, tmp_path))
    assert len(places) == 4
    assert len({p.folder for p in places}) == 2


def test_a_stopped_study_goes_on(pool: Pool, tmp_path: Path) -> None:
    study = load_study("table3")
    places = list(play.places(study, "smoke", 1, tmp_path))
    answers = iter([False, True])
    whole, _ = play.play(places, pool, Nobody(), "float32", lambda: next(answers, True))
    assert not whole
    assert sum(play.rounds_left(p) for p in places) > 0
    half = table.markdown(study, "smoke", table.collect(study, places), {})
    assert "| – |" in half
    _play("table3", pool, tmp_path)
    assert sum(play.rounds_left(p) for p in places) == 0


def test_missing_data_is_said_not_hidden(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBE_DATA", str(tmp_path / "empty"))
    study = load_study("table5")
    places = list(play.places(study, "cpu", 1, tmp_path))
    whole, missing = play.play(places, pool, Nobody(), "float32", lambda: False)
    assert whole
    assert set(missing) == set(study.cells("cpu"))
    text = table.markdown(study, "cpu", table.collect(study, places), missing)
    assert "Not run: iid / fedavg / resnet20: " in text
    assert "tiny-imagenet" in text
    assert "32.4 ± 0.68" in text


def test_ours_stands_beside_the_papers() -> None:
    measured = table.Measured(("step", "fedbe", "convnet"), (74.0, 76.0), (74.5, 0.51))
    assert measured.text == "75.0 ± 1.4 (n=2)"
    assert measured.paper_text == "74.5 ± 0.51"
    assert measured.difference == "+0.5"
    assert table.Measured((), (), (1.0,)).difference == "–"


def test_the_papers_headline_is_typed_in_right() -> None:
    paper = load_study("table1").paper
    assert paper["step/fedavg/convnet"] == (72.0, 0.25)
    assert paper["step/fedbe/resnet20"] == (77.5, 0.42)
    assert paper["dirichlet/fedbe/resnet56"] == (67.0, 0.30)
    assert len(paper) == 50


def test_the_exact_protocol_is_the_papers() -> None:
    study = load_study("table1")
    recipe = study.recipe_for(("step", "fedbe", "resnet20"), "paper")
    assert (recipe.training.rounds, recipe.training.epochs, recipe.training.batch) == (40, 20, 40)
    assert (recipe.split.major_classes, recipe.split.minor_images, recipe.data.server) == (2, 10, 10_000)
    assert recipe.method_for().settings()["samples"] == 10
    assert study.limits("paper").seeds == 5


def test_a_metric_can_belong_to_a_cell() -> None:
    study = load_study("one-round")
    assert study.metric_for(("ensemble", "none")) == "test_ensemble.accuracy"
    assert study.metric_for(("ensemble", "swa")) == "test.accuracy"
    assert ("weight-average", "sgd") not in study.cells("paper")


def test_costs_grow_with_the_scale() -> None:
    study = load_study("table3")
    assert 0 < cost.seconds(study, "smoke") < cost.seconds(study, "cpu") < cost.seconds(study, "paper")


def test_an_unknown_study_gets_the_nearest_name() -> None:
    with pytest.raises(RecipeError, match="no study 'tabel1': did you mean 'table1'"):
        load_study("tabel1")


def test_a_number_of_no_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="'a/c' is of no cell"):
        Study(name="x", title="x", recipe="digits", rows=("r",), columns="c",
              axes={"r": {"a": ()}, "c": {"b": ()}}, paper={"a/c": (1.0,)})  # fmt: skip


def test_runs_are_ordinary_runs(pool: Pool, tmp_path: Path) -> None:
    _, places = _play("table6", pool, tmp_path)
    assert run.read_info(places[0].folder).final is not None
