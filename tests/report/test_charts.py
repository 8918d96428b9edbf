"""Every number of a chart, from hand-written records."""

import json
from pathlib import Path

import pytest

from fedbe.report import build_sections, read_groups
from fedbe.report.chart import Chart, ReportSection, Table


def section_of(*folders: Path) -> ReportSection:
    (section,) = build_sections(read_groups(folders))
    return section


def charts_of(*folders: Path) -> dict[str, Chart]:
    return {chart.id: chart for chart in section_of(*folders).charts}


def test_the_table_of_a_comparison(comparison: Path) -> None:
    section = section_of(comparison)
    # differences 10 and 12: mean 11, std √2, t = 11 / (√2 / √2) = 11, one degree of freedom: p = 2·atan(1/11)/π
    assert section.results == Table(
        ("Method", "Test accuracy, %", "n", "Seeds", "Difference to FedAvg, points", "Paired n", "p"),
        (
            ("FedAvg", "61.0 ± 1.4", "2", "0, 1", "–", "–", "–"),
            ("FedBE", "72.0 ± 2.8", "2", "0, 1", "+11.0 ± 1.4", "2", "0.058"),
        ),
        bold=(1,),
    )
    assert "FedBE has 11.0 points more than FedAvg" in section.finding
    assert "n = 2 seeds, p = 0.058: this may be chance" in section.certainty


def test_one_seed_announces_no_gain(make_run) -> None:
    section = section_of(make_run("a", "fedavg", [0.1, 0.2, 0.5]), make_run("b", "fedbe", [0.1, 0.2, 0.6]))
    assert section.finding.startswith("No certain difference: on this seed FedBE has 10.0 points more")
    assert "n = 1 seed, without a p-value: this may be chance" in section.certainty


def test_a_gain_that_is_unlikely_to_be_chance_is_the_headline(make_run) -> None:
    """Differences 10, 11 and 12: mean 11, std 1, t = 11·√3, two degrees of freedom: p = 0.003."""
    ends = (("fedavg", 0.5, 0.5, 0.5), ("fedbe", 0.6, 0.61, 0.62))
    section = section_of(
        *(make_run(f"{m}{i}", m, [0.1, 0.2, e], i) for m, *all_ends in ends for i, e in enumerate(all_ends))
    )
    assert section.finding == "FedBE is 11.0 points above FedAvg"
    assert "p = 0.003: unlikely to be chance" in section.certainty


def test_brackets_of_a_method_title_stay_in_the_headline(make_run) -> None:
    runs = [make_run("a", "fedavg", [0.1, 0.2, 0.5]), make_run("b", "fedbe-sgd", [0.1, 0.2, 0.6])]
    section = section_of(*runs)
    assert "FedBE (w/o SWA) has 10.0 points more" in section.finding


def test_every_chart_exists_and_states_its_seeds(comparison: Path) -> None:
    charts = charts_of(comparison)
    assert set(charts) == {
        *("accuracy", "teachers", "calibration", "confidence"),
        *("seconds", "sides", "bytes", "split", "memory"),
    }
    assert [c.id for c in charts.values() if "n = 2 seeds (0, 1)" not in c.caption] == ["split"]
    assert "Seed 0; every seed has its own split" in charts["split"].caption
    assert all(chart.table.rows for chart in charts.values())


def test_ensemble_student_and_average(comparison: Path) -> None:
    chart = charts_of(comparison)["teachers"]
    ends = {(p.title, s.label): s.points[-1].y for p in chart.panels for s in p.series}
    assert ends == pytest.approx(
        {
            ("FedAvg", "average"): 61,
            ("FedAvg", "ensemble"): 66,
            ("FedBE", "student"): 72,
            ("FedBE", "ensemble"): 77,
            ("FedBE", "average"): 70,
        }
    )
    assert "ensemble 7.0 points above the average, student 2.0" in chart.title


def test_the_gate_shows_scores_decisions_and_rests(make_run) -> None:
    """Three rounds: accepted, refused, rest."""
    folder = make_run("gated", "fedbe", [0.5, 0.6, 0.7])
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    gates = [{"average": 0.8, "student": 0.9, "accepted": True}, {"average": 0.95, "student": 0.9, "accepted": False}]
    for line, gate in zip(lines, gates, strict=False):
        line.setdefault("server", {})["gate"] = gate
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chart = charts_of(folder)["gate"]
    assert "1 of 2 students" in chart.title
    assert "1 of 3 rounds" in chart.title
    shown = {s.label: [(p.x, p.y) for p in s.points] for s in chart.panels[0].series}
    assert shown == {"student": [(1, 90), (2, 90)], "average": [(1, 80), (2, 95)]}


def test_one_ensemble_has_no_student(make_run) -> None:
    chart = charts_of(make_run("one", "1-ensemble", [0.5, 0.6, 0.7]))["teachers"]
    assert [s.label for s in chart.panels[0].series] == ["kept members' vote", "ensemble"]


def test_calibration(comparison: Path) -> None:
    charts = charts_of(comparison)
    assert [p.y for p in charts["calibration"].panels[0].series[0].points] == [25, 25, 25]
    dots = {d.label: (d.x, d.y) for d in charts["confidence"].panels[0].dots}
    assert dots["FedBE, seed 1"] == pytest.approx((50, 74))
    assert dots["FedBE"] == pytest.approx((50, 72))
    assert charts["confidence"].title == "FedBE is underconfident by 22.0 points"


def test_server_time_excludes_training_and_evaluation(comparison: Path) -> None:
    charts = charts_of(comparison)
    seconds = {p.title: {b.method: b.value for b in p.bars} for p in charts["seconds"].panels}
    assert seconds["ensemble"] == pytest.approx({"fedbe": 0.16})
    assert seconds["distillation"] == pytest.approx({"fedbe": 0.3})
    assert seconds["guard and average"] == pytest.approx({"fedavg": 0.04, "fedbe": 0.04})
    sides = {p.title: {b.method: b.value for b in p.bars} for p in charts["sides"].panels}
    assert sides["clients"] == pytest.approx({"fedavg": 0.5, "fedbe": 0.5})
    assert sides["server"] == pytest.approx({"fedavg": 0.04, "fedbe": 0.5})


def test_memory_is_the_largest_round_and_bytes_go_both_ways(comparison: Path) -> None:
    charts = charts_of(comparison)
    assert [b.text for b in charts["memory"].panels[0].bars] == ["103 MB", "103 MB"]
    assert [[b.text for b in p.bars] for p in charts["bytes"].panels] == [["3 kB", "3 kB"], ["2 kB", "2 kB"]]
    assert charts["bytes"].title == "A round sends 5 kB"


def test_the_split_equals_the_run_s(comparison: Path, recipe) -> None:
    from fedbe.experiment.federation import prepare

    drawn = charts_of(comparison)["split"].panels[0]
    federation = prepare(recipe, 0)
    assert [sum(row) for row in drawn.counts] == [len(indices) for indices in federation.clients]
    assert drawn.counts[2][3] == int((federation.labels[federation.clients[2]] == 3).sum())


def test_an_unfinished_run_is_shown_as_unfinished(make_run) -> None:
    section = section_of(make_run("late", "fedavg", [0.4, 0.5]))
    assert section.finding == "Unfinished: FedAvg has done 2 of 3 rounds"
    assert section.results.rows == (("FedAvg", "–", "0", "unfinished: 0"),)
    assert {c.id: c for c in section.charts}["accuracy"].title == "After 2 rounds so far: FedAvg 50.0 %"
    assert "Unfinished: FedAvg, seed 0: 2 of 3 rounds." in section.about


def test_an_unfinished_comparison_pairs_only_finished_runs(comparison: Path) -> None:
    cell = comparison / "fedbe-seed1"
    info = json.loads((cell / "run.json").read_text()) | {"finished": None, "final": None}
    (cell / "run.json").write_text(json.dumps(info))
    lines = (cell / "rounds.jsonl").read_text().splitlines()
    (cell / "rounds.jsonl").write_text(lines[0] + "\n")
    section = section_of(comparison)
    assert section.finding == "Unfinished: 3 of 4 runs are finished"
    row = ("FedBE", "70.0", "1", "0; unfinished: 1", "+10.0", "1", "–")
    assert section.results.rows[1] == row
    accuracy = section.charts[0]
    assert [p.n for p in accuracy.panels[0].series[1].points] == [2, 1, 1]
    assert "some seeds have fewer rounds" in accuracy.note


def test_the_best_method_is_chosen_on_common_seeds(make_run) -> None:
    """FedAvg: 80 and 40 %. FedBE: 70 % on the first seed only, which is below 80 but above the mean of 60."""
    uneven = [make_run(f"a{seed}", "fedavg", [0.1, 0.2, end], seed) for seed, end in enumerate((0.8, 0.4))]
    section = section_of(*uneven, make_run("b0", "fedbe", [0.1, 0.2, 0.7]))
    assert "FedAvg has the highest accuracy on seed 0, 80.0 %" in section.finding
    assert "have different seeds" in section.certainty
    assert section.results.bold == (0,)
    assert section.charts[0].title.endswith("3 rounds: FedAvg 80.0 %, FedBE 70.0 %")


def test_without_a_common_seed_no_method_is_best(make_run) -> None:
    section = section_of(make_run("a", "fedavg", [0.1, 0.2, 0.8], 0), make_run("b", "fedbe", [0.1, 0.2, 0.7], 1))
    assert section.finding == "The methods have no seed in common"
    assert section.results.bold == ()
    assert not any(method in section.charts[i].title for i in (0, 2) for method in ("FedAvg", "FedBE"))


def test_unfinished_methods_are_compared_in_their_last_common_round(make_run) -> None:
    """FedBE has one round of three and is ahead in it; FedAvg has a higher final accuracy."""
    section = section_of(make_run("a", "fedavg", [0.3, 0.5, 0.6]), make_run("b", "fedbe", [0.4]))
    assert section.charts[0].title.endswith("so far: FedBE 40.0 %, FedAvg 30.0 %")


def test_recipes_with_equal_settings_and_other_names_are_one_group(make_run, recipe) -> None:
    other = recipe.model_copy(update={"name": "mine", "summary": "words"})
    runs = make_run("a", "fedavg", [0.1, 0.2, 0.5]), make_run("b", "fedbe", [0.1, 0.2, 0.6], recipe=other)
    assert "FedBE has 10.0 points more than FedAvg" in section_of(*runs).finding


def test_changes_to_a_shipped_recipe_are_listed(make_run) -> None:
    from fedbe.experiment.recipe_files import load_recipe

    about = section_of(make_run("a", "fedavg", [0.1, 0.2, 0.5])).about
    assert about[0] == "Recipe digits with split.clients=4, variant=paper."
    other = load_recipe("digits", ["split.kind=dirichlet", "model.name=convnet"])
    about = section_of(make_run("c", "fedavg", [0.1, 0.2, 0.5], recipe=other)).about
    # The settings of the old split and network are gone because the new ones do not have them: nobody removed them.
    assert about[0] == "Recipe digits with model.name=convnet, split.kind=dirichlet."
    other = load_recipe("digits", ["split.minor_images=", "split.major_share=0.9"])
    about = section_of(make_run("d", "fedavg", [0.1, 0.2, 0.5], recipe=other)).about
    assert about[0] == "Recipe digits with split.major_share=0.9, split.minor_images=."
    plain = load_recipe("digits")
    as_shipped = section_of(make_run("b", "fedavg", [0.5] * plain.training.rounds, recipe=plain)).about
    assert as_shipped[0] == f"Recipe digits: {plain.summary}."


def test_the_device_is_named(make_run) -> None:
    folder = make_run("a", "fedavg", [0.1, 0.2, 0.5])
    info = json.loads((folder / "run.json").read_text())
    for device, shown in (("cuda:0 (NVIDIA L4)", "device cuda:0 (NVIDIA L4)."), (None, "device cpu.")):
        info["made_with"]["device"] = device
        if device is None:  # runs from before there was a choice
            del info["made_with"]["device"]
        (folder / "run.json").write_text(json.dumps(info))
        assert section_of(folder).about[2].endswith(shown)


def test_a_report_does_not_call_a_function_that_a_recipe_names(make_run, recipe, tmp_path, monkeypatch) -> None:
    lines = ("import pathlib", "def go():", "    pathlib.Path('called').touch()", "    raise SystemExit")
    (tmp_path / "helper.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    mine = recipe.model_copy(update={"data": recipe.data.model_copy(update={"source": "helper:go"})})
    section = section_of(make_run("mine", "fedavg", [0.1, 0.2, 0.5], recipe=mine))
    assert not (tmp_path / "called").exists()
    assert any("`fedbe data show helper:go`" in sentence for sentence in section.missing)
    with pytest.raises(SystemExit):
        build_sections(read_groups([tmp_path / "mine"]), trusted=True)


def test_without_an_ensemble_the_caption_does_not_name_it(make_run) -> None:
    folders = make_run("a", "fedavg", [0.4]), make_run("b", "fedbe", [0.4])
    for folder in folders:
        line = json.loads((folder / "rounds.jsonl").read_text())
        del line["test_ensemble"]
        (folder / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    chart = charts_of(*folders)["teachers"]
    assert chart.caption.startswith("Test accuracy by round of the average")
    assert chart.note.startswith("Not shown: FedAvg.")


def test_a_run_without_rounds_lists_what_is_missing(make_run) -> None:
    section = section_of(make_run("new", "fedavg", []))
    assert [c.id for c in section.charts] == ["split"]
    assert any("Accuracy by round is not shown" in sentence for sentence in section.missing)
    assert len(section.missing) == 8


def test_a_missing_ensemble_is_explained(make_run) -> None:
    folder = make_run("plain", "fedavg", [0.4])
    line = json.loads((folder / "rounds.jsonl").read_text())
    del line["test_ensemble"], line["memory_mb"]
    (folder / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    section = section_of(folder)
    assert [m.split(" is not ")[0].split(" are not ")[0] for m in section.missing] == [
        "Ensemble, student and average",
        "Memory by phase",
    ]


def test_nan_is_left_out(make_run) -> None:
    folder = make_run("wild", "fedavg", [0.4, 0.5])
    text = (folder / "rounds.jsonl").read_text().replace('"ece": 0.25', '"ece": NaN', 1)
    (folder / "rounds.jsonl").write_text(text)
    assert [p.x for p in charts_of(folder)["calibration"].panels[0].series[0].points] == [2]


def test_missing_data_leaves_out_only_the_split(make_run, recipe) -> None:
    gone = recipe.model_copy(update={"data": recipe.data.model_copy(update={"source": "npz:/nowhere.npz"})})
    section = section_of(make_run("gone", "fedavg", [0.4], recipe=gone))
    assert "split" not in {c.id for c in section.charts}
    assert any(m.startswith("The split is not shown") for m in section.missing)


def test_phases_of_a_run_that_distils_in_some_rounds(make_run, recipe) -> None:  # type: ignore[no-untyped-def]
    """FedBE tuned, three rounds: the first distils for 0.3 s, the others do not distil."""
    tuned = recipe.model_copy(update={"variant": "tuned"})
    folder = make_run("tuned", "fedbe", [0.5, 0.6, 0.7], recipe=tuned)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line["seconds"] = {k: v for k, v in line["seconds"].items() if k not in ("fit", "ensemble", "distill")}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = section_of(folder)
    charts = {chart.id: chart for chart in section.charts}
    (row,) = charts["seconds"].table.rows
    assert row[charts["seconds"].table.columns.index("distillation, s")] == "0.1000"
    assert [s.label for s in charts["teachers"].panels[0].series] == ["model", "ensemble", "average"]
    assert "variant tuned" in " ".join(section.about)
