"""Every table and figure from its grid to its table, at the smallest scale."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedbe.cli.app import app
from fedbe.errors import RecipeError, RunError
from fedbe.experiment import loop, run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.recipe_files import load_recipe
from fedbe.report.chart import Chart
from fedbe.reproduce import cost, study_analysis, study_runner, table
from fedbe.reproduce.results import CellResult
from fedbe.reproduce.round_curves import chart_by_round
from fedbe.reproduce.study import SCALES, Cell, Study, available_studies, load_study
from fedbe.reproduce.study_runner import StudyRun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(2) as workers:
        yield workers


def _train(
    runs: Sequence[StudyRun], pool: ProcessPool, should_stop: Callable[[], bool] = lambda: False, *, whole: bool = False
) -> tuple[bool, dict[Cell, str]]:
    jobs, missing = study_runner.plan_jobs(runs, "float32")
    return study_runner.run_study(jobs, pool, Callback(), should_stop, whole=whole), missing


def _run(name: str, pool: ProcessPool, root: Path, seeds: int = 1) -> tuple[Study, list[StudyRun]]:
    study = load_study(name)
    runs = list(study_runner.study_runs(study, "smoke", seeds, root))
    finished, missing = _train(runs, pool)
    assert finished
    assert missing == {}
    return study, runs


def _analyse(study: Study, runs: list[StudyRun], pool: ProcessPool) -> list[Chart]:
    if not study.analysis:
        return []
    finished, missing, charts = study_analysis.analyse(study, runs, pool, lambda: False)
    assert finished
    assert missing == {}
    return charts


@pytest.mark.parametrize("name", available_studies())
def test_every_study_runs_end_to_end(name: str, pool: ProcessPool, tmp_path: Path) -> None:
    study, runs = _run(name, pool, tmp_path)
    charts = _analyse(study, runs, pool)
    path, pictures = table.write(study, "smoke", runs, {}, tmp_path, charts)
    written = path.read_text()
    assert written.startswith(f"# {study.title}")
    assert all(m.ours for m in table.collect(study, runs))
    for chart in charts:
        assert f"({chart.id}.svg)" in written
        assert chart.title.split()[0] in (tmp_path / f"{chart.id}.svg").read_text()
        assert (tmp_path / f"{chart.id}.png").read_bytes().startswith(b"\x89PNG")
        numbers = list(csv.reader(io.StringIO((tmp_path / f"{chart.id}.csv").read_text())))
        assert len(numbers) == 1 + len(chart.table.rows)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert len(rows) == len(study.cells("smoke"))
    one_round = all(len(run_folder.read_rounds(run.folder)) == 1 for run in runs)
    drawn = [picture.stem for picture in pictures]
    expected = ["heat-map"] if study.heat_map else [] if one_round or study.analysis else ["rounds"]
    assert drawn == [*expected, *(chart.id for chart in charts)]


@pytest.mark.parametrize("name", available_studies())
@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_of_every_scale_is_a_valid_recipe(name: str, scale: str) -> None:
    study = load_study(name)
    for cell in study.cells(scale):  # type: ignore[arg-type]
        assert study.recipe_for(cell, scale).method_for()  # type: ignore[arg-type]


def test_the_list_fits_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "images_per_second", lambda *_: 1000.0)
    result = CliRunner().invoke(app, ["reproduce", "--list"], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for name in available_studies():
        index = next(i for i, line in enumerate(lines) if line.startswith(f"{name} "))
        assert len(lines[index].split("  ")) > 4
        assert lines[index + 1] == f"  {load_study(name).title}"


def test_finished_runs_are_not_run_again(pool: ProcessPool, tmp_path: Path) -> None:
    _, runs = _run("table3", pool, tmp_path)
    before = [(run.folder / "rounds.jsonl").stat().st_mtime_ns for run in runs]
    _run("table3", pool, tmp_path)
    assert [(run.folder / "rounds.jsonl").stat().st_mtime_ns for run in runs] == before


def test_a_run_with_other_settings_is_refused(pool: ProcessPool, tmp_path: Path) -> None:
    (run, *_) = study_runner.study_runs(load_study("table3"), "smoke", 1, tmp_path)
    run_folder.create(run.folder, load_recipe("digits"), "fedbe", 0, "float32")
    with pytest.raises(RunError, match="was run with other settings"):
        _train([run], pool)


def test_a_run_with_the_same_settings_under_other_names_is_accepted(pool: ProcessPool, tmp_path: Path) -> None:
    (run, *_) = study_runner.study_runs(load_study("table1"), "smoke", 1, tmp_path)
    renamed = run.recipe.model_copy(update={"name": "own", "method": "fedavg"})
    run_folder.create(run.folder, renamed, run.recipe.method, 0, "float32")
    assert loop.execute(run.folder, pool, Callback())
    assert _train([run], pool) == (True, {})
    for other in ({"seed": 1}, {"recipe": load_recipe("digits")}):
        with pytest.raises(RunError, match="was run with other settings"):
            _train([replace(run, **other)], pool)


def test_records_without_weights_are_enough_for_table_and_picture(pool: ProcessPool, tmp_path: Path) -> None:
    """`results/` has no weights: the command draws its tables again and trains nothing."""
    study, runs = _run("table1", pool, tmp_path)
    before, _ = table.write(study, "smoke", runs, {}, tmp_path)
    text = before.read_text()
    for weights in tmp_path.rglob("*.safetensors"):
        weights.unlink()
    study, runs = _run("table1", pool, tmp_path)
    again, (picture,) = table.write(study, "smoke", runs, {}, tmp_path)
    assert again.read_text() == text
    assert picture.name == "rounds.svg"


def test_no_train_draws_existing_runs_and_checks_their_settings(tmp_path: Path) -> None:
    def reproduce(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["reproduce", "table1", "--scale", "smoke", "--runs", str(tmp_path), *arguments])

    only = [word for value in ("step", "fedavg", "convnet") for word in ("--only", value)]
    assert reproduce(*only, "--quiet").exit_code == 0
    folders = sorted(tmp_path.rglob("run.json"))
    result = reproduce("--no-train")
    assert result.exit_code == 0
    assert "| step | 1-ensemble | – |" in result.stdout
    assert re.search(r"\| step \| fedavg \| \d+\.\d \(n=1\) \|", result.stdout)
    assert sorted(tmp_path.rglob("run.json")) == folders
    assert reproduce(*only, "--seeds", "2", "--quiet").exit_code == 0
    result = reproduce("--no-train")  # the default is one seed, but existing runs are not dropped
    assert re.search(r"\| step \| fedavg \| \d+\.\d ± \d+\.\d \(n=2\) \|", result.stdout)
    other = reproduce("--no-train", "--set", "training.epochs=3")
    assert isinstance(other.exception, RunError)
    assert "was run with other settings" in str(other.exception)


def test_no_train_does_not_create_a_folder(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reproduce", "table1", "--no-train", "--runs", str(tmp_path / "typo")])
    assert isinstance(result.exception, RunError)
    assert "does not exist" in str(result.exception)
    assert not (tmp_path / "typo").exists()


def test_runs_of_two_precisions_are_refused(pool: ProcessPool, tmp_path: Path) -> None:
    one, two, *_ = study_runner.study_runs(load_study("table3"), "smoke", 1, tmp_path)
    run_folder.create(one.folder, one.recipe, one.recipe.method, 0, "bfloat16")
    with pytest.raises(RunError, match="must have one precision"):
        _train([one, two], pool)
    assert not two.folder.exists()
    study_runner.check_runs([one, two])
    run_folder.create(two.folder, two.recipe, two.recipe.method, 0, "float32")
    with pytest.raises(RunError, match="must have one precision"):
        study_runner.check_runs([one, two])


def test_columns_without_a_finished_run_are_named_below_the_table() -> None:
    study = load_study("table1")
    rows = [
        CellResult(("step", "fedavg", model), ours, (72.0, 0.25))
        for model, ours in (("convnet", {0: 70.0}), ("resnet20", {}))
    ]
    text = table.markdown(study, "paper", rows, {})
    assert "| step | fedavg | 70.0 (n=1) | 72.0 ± 0.25 | -2.0 |" in text
    assert text.endswith("Not finished yet: resnet20.\n")


def test_the_chart_by_round_has_a_line_for_each_method_in_its_colour(tmp_path: Path) -> None:
    study = load_study("table1")
    wanted = {("step", "fedavg", "convnet"), ("step", "fedbe-tuned", "convnet"), ("step", "1-ensemble", "convnet")}
    runs = [run for run in study_runner.study_runs(study, "paper", 2, tmp_path) if run.cell in wanted]
    for run in runs:
        _write_run(run)
    chart = chart_by_round(study.with_changes(["training.lr=1"]), "paper", runs)
    assert chart is not None
    assert chart.title == "Table 1: non-i.i.d. CIFAR-10; scale paper, training.lr=1"
    (panel,) = chart.panels
    assert panel.title == "step, convnet"
    assert [(s.label, s.method, len(s.points)) for s in panel.series] == [
        ("1-ensemble", "1-ensemble", 1),
        ("fedavg", "fedavg", 2),
        ("fedbe-tuned", "fedbe-tuned", 2),
    ]
    assert [(p.x, p.y, p.n) for p in panel.series[1].points] == [(1, pytest.approx(11), 2), (2, pytest.approx(21), 2)]
    assert "n = 2 seeds (0, 1)" in chart.caption
    assert chart.note == ""


def _write_run(run: study_runner.StudyRun) -> None:
    run_folder.create(run.folder, run.recipe, run.recipe.method, run.seed, "float32")
    rounds = (1,) if run.cell[1] == "1-ensemble" else (1, 2)
    lines = [{"round": r, "test": {"accuracy": 0.1 * r + 0.02 * run.seed}} for r in rounds]
    (run.folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_panel_shows_only_the_seeds_that_all_its_lines_have(tmp_path: Path) -> None:
    study = load_study("table1")
    cells = {("step", "fedavg", "convnet"): (0, 1, 2), ("step", "fedbe", "convnet"): (0, 2)}
    cells |= {("dirichlet", "fedavg", "convnet"): (1,)}
    runs = [run for run in study_runner.study_runs(study, "paper", 3, tmp_path) if run.seed in cells.get(run.cell, ())]
    for run in runs:
        _write_run(run)
    chart = chart_by_round(study, "paper", runs)
    assert chart is not None
    assert {p.title: [(s.label, s.points[-1].n) for s in p.series] for p in chart.panels} == {
        "step, convnet": [("fedavg (n = 2)", 2), ("fedbe (n = 2)", 2)],
        "dirichlet, convnet": [("fedavg (n = 1)", 1)],
    }
    assert chart.panels[0].series[0].points[0].y == pytest.approx(12)  # seeds 0 and 2: 10 and 14
    assert "are left out (1;" in chart.note


def test_a_panel_without_a_common_seed_compares_the_lines_of_the_most_common_one(tmp_path: Path) -> None:
    study = load_study("table1")
    cells = {("step", "fedavg", "convnet"): (0, 1), ("step", "fedbe", "convnet"): (0,)}
    cells |= {("step", "fedbe-tuned", "convnet"): (1, 2), ("step", "fedbe-sgd", "convnet"): (0,)}
    runs = [run for run in study_runner.study_runs(study, "paper", 3, tmp_path) if run.seed in cells.get(run.cell, ())]
    for run in runs:
        _write_run(run)
    chart = chart_by_round(study, "paper", runs)
    assert chart is not None
    assert {s.label for s in chart.panels[0].series} == {"fedavg", "fedbe", "fedbe-sgd"}  # seed 0
    assert chart.panels[0].series[0].points[0].y == pytest.approx(10)
    assert "are left out (3;" in chart.note


def test_values_other_than_methods_have_different_colours() -> None:
    from fedbe.reproduce.round_curves import series_colours

    colours = series_colours(("fedavg", "CIFAR-10", "none"))
    assert colours["fedavg"] == "fedavg"
    assert len(set(colours.values())) == 3


def test_two_views_of_one_run_are_one_run(tmp_path: Path) -> None:
    runs = list(study_runner.study_runs(load_study("fig-ensemble"), "paper", 1, tmp_path))
    assert len(runs) == 4
    assert len({run.folder for run in runs}) == 2


def test_a_stopped_study_continues(pool: ProcessPool, tmp_path: Path) -> None:
    study = load_study("table3")
    runs = list(study_runner.study_runs(study, "smoke", 1, tmp_path))
    finished, _ = _train(runs, pool, lambda: runs[1].rounds_left == 1)
    assert not finished
    assert [run.rounds_left for run in runs] == [0, 1] + [2] * (len(runs) - 2)
    half = table.markdown(study, "smoke", table.collect(study, runs), {})
    assert "| – |" in half
    now = 100 * run_folder.read_rounds(runs[1].folder)[0]["test"]["accuracy"]
    assert f"{' / '.join(runs[1].cell)}, seed 0: {now:.1f} after round 1" in half
    _run("table3", pool, tmp_path)
    assert sum(run.rounds_left for run in runs) == 0


def test_whole_runs_of_a_study_have_the_same_bits_and_leave_nothing_else(pool: ProcessPool, tmp_path: Path) -> None:
    study, in_turn = _run("table3", pool, tmp_path / "in_turn", seeds=2)
    together = list(study_runner.study_runs(study, "smoke", 2, tmp_path / "together"))
    assert _train(together, pool, whole=True) == (True, {})
    for a, b in zip(in_turn, together, strict=True):
        assert (a.folder / "model.safetensors").read_bytes() == (b.folder / "model.safetensors").read_bytes()
    assert sorted(p.name for p in (tmp_path / "together").iterdir()) == sorted({r.folder.parent.name for r in together})
    assert study_runner.plan_jobs(together, "float32") == ([], {})


def test_missing_data_is_listed_with_the_reason(
    pool: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDBE_DATA", str(tmp_path / "empty"))
    study = load_study("table5")
    runs = list(study_runner.study_runs(study, "cpu", 1, tmp_path))
    finished, missing = _train(runs, pool)
    assert finished
    assert set(missing) == set(study.cells("cpu"))
    text = table.markdown(study, "cpu", table.collect(study, runs), missing)
    assert "Not run: step / fedavg / resnet20: " in text
    assert "tiny-imagenet" in text
    assert "27.5 ± 0.78" in text


def test_our_numbers_are_next_to_the_papers() -> None:
    measured = CellResult(("step", "fedbe", "convnet"), {0: 74.0, 1: 76.0}, (74.5, 0.51))
    assert measured.text == "75.0 ± 1.4 (n=2)"
    assert measured.paper_text == "74.5 ± 0.51"
    assert measured.difference == "+0.5"
    assert CellResult((), {}, (1.0,)).difference == "–"


def test_means_over_different_seeds_get_a_warning() -> None:
    study = load_study("table1")

    def rows(*values: dict[int, float]) -> list[CellResult]:
        methods = ("fedavg", "fedbe", "v-distillation")
        return [CellResult(("step", m, "convnet"), v, ()) for m, v in zip(methods, values, strict=True)]

    assert table.uneven_seeds(rows({0: 70.0, 1: 60.0}, {0: 69.0, 1: 62.0}, {})) == []
    uneven = rows({0: 70.8, 1: 60.0, 2: 61.0}, {0: 69.8}, {})
    (sentence,) = table.uneven_seeds(uneven)
    assert sentence.startswith("step / convnet: ")
    assert sentence.endswith("which all have: fedavg 70.8, fedbe 69.8.")
    assert sentence in table.markdown(study, "paper", uneven, {})
    (sentence,) = table.uneven_seeds(rows({0: 70.8, 1: 60.0, 2: 61.0}, {0: 69.8, 2: 64.0}, {}))
    assert sentence.endswith("which all have: fedavg 65.9, fedbe 66.9.")
    (sentence,) = table.uneven_seeds(rows({0: 70.8}, {1: 69.8}, {}))
    assert sentence.endswith("No seed is common to all.")


TEX = Path(__file__).parents[3] / "shared" / "paper" / "fedbe.tex"
LABELS = {
    "table1": "tbl:main", "table2": "tbl:main_compl", "table3": "tbl:ablation", "table4": "tbl:transfer",
    "table5": "tbl:tiny", "table6": "tbl:control", "dirichlet-alpha": "suppl-tbl:alpha",
    "one-round": "suppl-tbl:1-round", "cifar100-partial": "suppl-tbl:cifar100",
}  # fmt: skip


@pytest.mark.skipif(not TEX.exists(), reason="the paper's source is not here")
@pytest.mark.parametrize("name", LABELS)
def test_every_number_equals_the_papers_source(name: str) -> None:
    text = TEX.read_text()
    begin = text.rindex(r"\begin{tabular}", 0, text.index(rf"\label{{{LABELS[name]}}}"))
    body = re.sub(r"\\textbf\{([^}]*)\}", r"\1", text[begin : text.index(r"\end{tabular}", begin)])
    numbers = [(float(mean), float(std)) for mean, std in re.findall(r"([\d.]+)\$\\pm\$([\d.]+)", body)]
    assert numbers
    assert list(load_study(name).paper.values()) == numbers


def test_the_papers_main_numbers() -> None:
    paper = load_study("table1").paper
    assert paper["step/fedavg/convnet"] == (72.0, 0.25)
    assert paper["step/fedbe/resnet20"] == (77.5, 0.42)
    assert paper["dirichlet/fedbe/resnet56"] == (67.0, 0.30)
    assert len(paper) == 50


def test_the_exact_protocol_is_the_papers() -> None:
    study = load_study("table1")
    recipe = study.recipe_for(("step", "fedbe", "resnet20"), "paper")
    assert (recipe.training.rounds, recipe.training.epochs, recipe.training.batch_size) == (40, 20, 40)
    assert (recipe.split.major_classes, recipe.split.minor_images, recipe.data.server) == (2, 10, 10_000)
    assert recipe.method_for().settings()["num_samples"] == 10
    assert study.limits("paper").seeds == 5


def test_a_cell_can_have_its_own_metric() -> None:
    study = load_study("one-round")
    assert study.metric_for(("ensemble", "none")) == "test_ensemble.accuracy"
    assert study.metric_for(("ensemble", "swa")) == "test.accuracy"
    assert ("weight-average", "sgd") not in study.cells("paper")


def test_the_table_lists_what_a_scale_changes_and_leaves_out() -> None:
    sentences = " ".join(table.reductions(load_study("table5"), "cpu"))
    assert "`training.rounds=10`" in sentences
    assert "`data.unlabeled_size=2000`" in sentences
    assert "split iid; model mobilenetv2." in sentences
    assert table.reductions(load_study("table5"), "paper") == []
    sentences = table.reductions(load_study("fig-confidence"), "cpu")
    assert sentences == ["Changed against the paper (cifar10-step): `training.epochs=2`, `training.rounds=20`."]


def speed_of_two_idle_cores(
    name: str, shape: tuple[int, ...], _classes: int, settings: str, _batch: int, _device: str
) -> float:
    """Training images a second: a quarter at 64 × 64 pixels, 1 / 1.6 with four more layers."""
    known = {"convnet": 3300.0, "resnet20": 550.0, "mlp": 60_000.0}
    return known[name] / (4 if shape[-1] == 64 else 1) / (1.6 if json.loads(settings).get("extra_layers") == 4 else 1)


@pytest.mark.parametrize("name", available_studies())
def test_the_documentation_lists_what_the_scale_cpu_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text()
    _, after = text.split("## What the scale `cpu` changes")
    (row,) = [line for line in after.splitlines() if line.startswith(f"| `{name}` |")]
    study = load_study(name)
    changes = [f"`{change.partition('.')[2]}`" for change in study.limits("cpu").changes]
    left_out = [f"{axis} {', '.join(values)}" for axis, values in study.left_out("cpu").items()]
    monkeypatch.setattr(cost, "images_per_second", speed_of_two_idle_cores)
    hours = max(cost.seconds_by_column(study, "cpu").values()) / 3600
    assert hours <= 3
    expected = [
        ", ".join(changes) or "–",
        "; ".join(left_out) or "–",
        "seconds |" if hours < 0.05 else f"{hours:.1f} |",
    ]
    assert row.split(" | ")[1:] == expected


def test_the_cost_of_a_run_is_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedBE, one round: 40,000 × 2 + 10,000 × (20 epochs + 21 voters × 0.3) + 10,000 tests × 0.3 = 346,000 images."""
    monkeypatch.setattr(cost, "images_per_second", lambda *_: 1000.0)
    recipe = load_recipe("cifar10-step", ("variant=paper", "training.rounds=1", "training.epochs=2"))
    assert cost.run_seconds(recipe) == pytest.approx(346)


def _seconds(study: Study, scale: Any) -> float:
    return study.limits(scale).seeds * sum(cost.seconds_by_column(study, scale).values())


def test_runs_with_the_same_first_round_train_it_once(
    pool: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "images_per_second", lambda *_: 1000.0)
    study = load_study("one-round")
    recipes = [study.recipe_for(cell, "paper") for cell in study.cells("paper")]
    training = 40_000 * 200 / 1000
    assert _seconds(study, "paper") == pytest.approx(5 * (sum(map(cost.run_seconds, recipes)) - 6 * training))

    monkeypatch.setattr("fedbe.experiment.cohort_training.CACHE_AFTER_SECONDS", -1.0)
    monkeypatch.setattr("fedbe.experiment.cohort_training.CACHE_SHARE", float("inf"))
    trained: list[int] = []
    original_map = ProcessPool.map

    def recording_map(self: ProcessPool, jobs: Any, **options: Any) -> Any:
        if "should_stop" in options:  # only training can be stopped
            trained.extend(job.client for job in jobs if job.round == 1)
        return original_map(self, jobs, **options)

    monkeypatch.setattr(ProcessPool, "map", recording_map)
    _, runs = _run("one-round", pool, tmp_path)
    assert len({run.folder for run in runs}) == 3
    assert sorted(trained) == list(range(10))
    assert not list(tmp_path.glob("first-round*"))


def test_a_run_of_two_cells_costs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "images_per_second", lambda *_: 1000.0)
    study = load_study("fig-ensemble")
    once = sum(cost.run_seconds(study.recipe_for(("average", m), "paper")) for m in ("resnet20", "convnet"))
    assert _seconds(study, "paper") == pytest.approx(5 * once)


def test_only_smoke_makes_embedded_data_smaller() -> None:
    study = load_study("fig-confidence")
    cell = ("swissroll", "clients", "ECE")
    assert (
        study.recipe_for(cell, "cpu") == study.recipe_for(cell, "paper") == load_recipe("swissroll", ["variant=paper"])
    )
    small = study.recipe_for(cell, "smoke")
    assert (small.data.source, small.model.name, small.training.rounds) == ("swissroll", "mlp", 2)
    assert study.recipe_for(("cifar10", "clients", "ECE"), "smoke").data.source == "digits"
    assert study.metric_for(cell) == "analysis.clients.ECE"


def test_costs_grow_with_the_scale() -> None:
    study = load_study("table3")
    assert 0 < _seconds(study, "smoke") < _seconds(study, "cpu") < _seconds(study, "paper")


def test_an_unknown_study_gets_the_nearest_name() -> None:
    with pytest.raises(RecipeError, match="no study 'tabel1': did you mean 'table1'"):
        load_study("tabel1")


def test_a_paper_number_without_a_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="'a/c' does not belong"):
        Study(name="x", title="x", recipe="digits", rows=("r",), columns="c",
              axes={"r": {"a": ()}, "c": {"b": ()}}, paper={"a/c": (1.0,)})  # fmt: skip


def test_runs_are_ordinary_runs(pool: ProcessPool, tmp_path: Path) -> None:
    _, runs = _run("table6", pool, tmp_path)
    assert run_folder.read_info(runs[0].folder).final is not None


def test_only_selects_cells_and_set_changes_settings(tmp_path: Path) -> None:
    command = ["reproduce", "table3", "--scale", "smoke", "--runs", str(tmp_path), "--only", "A"]
    result = CliRunner().invoke(app, [*command, "--set", "training.rounds=1", "--quiet"])
    assert result.exit_code == 0, result.output
    root = tmp_path / "reproduce-table3-smoke"
    assert [p.name.split("--")[0] for p in root.iterdir() if p.is_dir()] == ["A", "A"]
    written = (root / "table.md").read_text()
    assert "`training.rounds=1`" in written
    assert [line.count("(n=1)") for line in written.splitlines() if line.startswith("| ")] == [0, 2, 0]
    again = CliRunner().invoke(app, [*command, "--quiet"])
    assert "other settings" in str(again.exception)  # existing runs have other settings now
    unknown = CliRunner().invoke(app, [*command[:-1], "AA"])
    assert "table3 has no 'AA'" in str(unknown.exception)


def test_without_training_the_picture_of_an_analysis_stays(tmp_path: Path) -> None:
    command = ["reproduce", "fig-triangle", "--scale", "smoke", "--runs", str(tmp_path), "--quiet"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    path = tmp_path / "reproduce-fig-triangle-smoke" / "table.md"
    written = path.read_text()
    assert "(triangle.svg)" in written
    assert CliRunner().invoke(app, [*command, "--no-train"]).exit_code == 0
    assert path.read_text() == written
