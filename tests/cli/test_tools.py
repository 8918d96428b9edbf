"""What people expect of a command line: version, help, completion, a doctor, folders, answers to repeated questions."""

import json
import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedbe.cli.app import app, main
from fedbe.errors import RunError
from fedbe.experiment import provenance
from fedbe.experiment.comparison import create
from fedbe.experiment.recipe_files import load_recipe

ROOT = Path(__file__).parents[2]
FAST = ["--set", "training.rounds=1", "--set", "training.epochs=1", "--workers", "0", "-q"]
QUICK = [*FAST, "--set", "model.hidden=[8]"]


def fedbe(*words, code=0):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result


def test_version_and_help():
    assert fedbe("--version").stdout == f"fedbe {version('fedbe')}\n"
    for words in (["-h"], ["run", "-h"], ["data", "-h"], ["data", "get", "-h"]):
        assert "Usage" in fedbe(*words).stdout


def test_completion():
    words = {"_FEDBE_COMPLETE": "complete_bash", "COMP_WORDS": "fedbe ev", "COMP_CWORD": "1"}
    assert "evaluate" in CliRunner().invoke(app, prog_name="fedbe", env=words).stdout


def test_doctor():
    found = fedbe("doctor").stdout
    for word in (version("torch"), "precision", "workers", "digits"):
        assert word in found
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall("extra ([a-z]+)", found)) == set(extras) - {"docs", "dev"}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A finished comparison of two methods, and the words that made it."""
    runs = tmp_path_factory.mktemp("runs")
    words = ["compare", "digits", *QUICK, "--methods", "fedavg,fedprox", "--seeds", "1", "--runs", str(runs)]
    fedbe(*words)
    return runs / "digits-compare", words


def test_an_identical_comparison_is_shown_again(comparison):
    folder, words = comparison
    again = fedbe(*words)
    assert "digits-compare has the same settings" in again.stderr
    assert "FedProx" in again.stdout
    assert [path.name for path in folder.parent.iterdir()] == ["digits-compare"]
    fedbe(*words, "--name", "another")
    alone = fedbe(*[word.replace("fedavg,fedprox", "fedavg") for word in words])
    assert "FedAvg reaches" in alone.stdout
    assert sorted(path.name for path in folder.parent.iterdir()) == ["another", "digits-compare", "digits-compare-2"]


MODEL = (
    "from torch import nn\ndef make(classes, shape):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
)


def test_a_comparison_of_other_data_or_another_model_is_not_shown(tmp_path, monkeypatch):
    def write_data(first):
        images = (np.arange(first, first + 60 * 64) % 251).astype(np.uint8).reshape(60, 8, 8)
        np.savez("mine.npz", inputs=images, labels=np.arange(60) % 2)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "model_for_tests", raising=False)
    changes = ["data.source=npz:mine.npz", "data.server=6", "split.kind=iid", "split.clients=2"]
    changes.append("model.name=model_for_tests:make")
    words = ["compare", *FAST, "--methods", "fedavg", "--seeds", "2"]
    words += [word for change in changes for word in ("--set", change)]
    (tmp_path / "model_for_tests.py").write_text(MODEL)
    write_data(0)
    fedbe(*words)
    assert "digits-compare has the same settings; showing it" in fedbe(*words).stderr
    write_data(1)
    assert "same settings" not in fedbe(*words).stderr
    write_data(0)
    assert "digits-compare has the same settings; showing it" in fedbe(*words).stderr
    (tmp_path / "model_for_tests.py").write_text(f"{MODEL}# changed\n")
    assert "same settings" not in fedbe(*words).stderr
    monkeypatch.setattr(provenance, "NUMERICS_VERSION", 0)
    assert "same settings" not in fedbe(*words).stderr
    assert len(list((tmp_path / "runs").iterdir())) == 4


def test_an_unfinished_comparison_is_continued(tmp_path):
    changes = ["training.rounds=1", "training.epochs=1", "model.hidden=[8]"]
    folder = create(tmp_path / "started", load_recipe("digits", changes), ["fedavg"], [0], "float32")
    words = [
        "compare",
        *QUICK,
        "--methods",
        "fedavg",
        "--seeds",
        "1",
        "--precision",
        "float32",
        "--runs",
        str(tmp_path),
    ]
    assert "started has the same settings; continuing it" in fedbe(*words).stderr
    assert "started has the same settings; showing it" in fedbe(*words).stderr
    assert list(tmp_path.iterdir()) == [folder]


def test_evaluate_says_which_part_of_a_file_it_measures(comparison, tmp_path):
    run = str(next(comparison[0].glob("*fedprox*")))
    images, labels, classes = np.zeros((50, 8, 8), np.uint8), np.arange(50) % 10, [str(i) for i in range(10)]
    np.savez(tmp_path / "new.npz", inputs=images, labels=labels, classes=classes)
    done = fedbe("evaluate", run, "--data", str(tmp_path / "new.npz"))
    assert "new has no test part" in done.stderr
    assert "10 test examples" in done.stdout
    np.savez(
        tmp_path / "new.npz", inputs=images, labels=labels, test_inputs=images, test_labels=labels, classes=classes
    )
    done = fedbe("evaluate", run, "--data", str(tmp_path / "new.npz"))
    assert "no test part" not in done.stderr
    assert "50 test examples" in done.stdout
    assert "no test part" not in fedbe("evaluate", run).stderr


def test_evaluate_says_that_the_run_had_another_precision(tmp_path):
    for precision, is_named in (("bfloat16", True), ("float32", False)):
        words = ["run", "--method", "fedavg", "--precision", precision, "--name", precision, "--runs", str(tmp_path)]
        fedbe(*words, *QUICK)
        notes = fedbe("evaluate", str(tmp_path / precision)).stderr
        assert ("measured in bfloat16" in notes) == is_named


@pytest.mark.parametrize("words", [["evaluate"], ["predict", "a.png"]])
def test_evaluate_and_predict_name_the_runs_of_a_comparison(words, comparison):
    folder, _ = comparison
    error = CliRunner().invoke(app, [words[0], str(folder), *words[1:]]).exception
    assert isinstance(error, RunError)
    assert "is a comparison; name one of its runs" in str(error)
    assert str(next(folder.glob("*fedprox*"))) in str(error)


def test_a_file_cannot_control_the_terminal(tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "odd.toml"
    recipe.write_text('"\\u001b]52;c;QQ==\\u0007" = 1')
    monkeypatch.setattr(sys, "argv", ["fedbe", "run", str(recipe)])
    with pytest.raises(SystemExit):
        main()
    assert "unknown setting '?]52;c;QQ==?'" in capsys.readouterr().err


def test_predict_on_folders(comparison, tmp_path):
    run = str(next(comparison[0].glob("*fedprox*")))
    (tmp_path / "deep").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    Image.new("L", (9, 9), 200).save(tmp_path / "deep" / "b, c.png")
    (tmp_path / "broken.png").write_text("no image")
    for name in ("notes.txt", "._a.png"):  # macOS writes the second
        (tmp_path / name).write_text("not looked at")
    result = fedbe("predict", run, str(tmp_path), "--format", "json", code=1)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["file"] for line in lines] == [str(tmp_path / "a.png"), str(tmp_path / "deep" / "b, c.png")]
    assert sum(lines[0]["probabilities"].values()) == pytest.approx(1)
    assert lines[0]["class"] == max(lines[0]["probabilities"], key=lines[0]["probabilities"].get)
    assert "broken.png is not an image" in result.stderr
    assert "1 of 3 paths could not be read" in result.stderr
    table = fedbe("predict", run, str(tmp_path / "deep"), "--format", "csv").stdout.splitlines()
    assert table[0] == "file,class,probability"
    assert table[1].startswith(f'"{tmp_path}/deep/b, c.png",')
    assert "%" in fedbe("predict", run, str(tmp_path / "a.png")).stdout
    (tmp_path / "empty").mkdir()
    some = fedbe("predict", run, str(tmp_path / "empty"), str(tmp_path / "a.png"), code=1)
    assert "empty has no images; skipped" in some.stderr
    assert f"{tmp_path / 'a.png'}: " in some.stdout
    Image.new("L", (8, 8)).save(odd := tmp_path / "empty" / "\x1b]0;odd.png")
    assert "/?]0;odd.png: " in fedbe("predict", run, str(odd)).stdout


def test_another_model_drops_the_settings_of_the_old_one():
    assert load_recipe("digits").model.settings()
    assert load_recipe("digits", ["model.name=convnet"]).model.settings() == {}
    assert load_recipe("digits", ["model.name=mlp", "model.hidden=[3]"]).model.settings()["hidden"] == [3]
    assert load_recipe("digits", ["model.width=2", "model.name=convnet"]).model.settings() == {"width": 2}


def test_a_warning_about_the_model_is_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "softmax_for_tests.py").write_text(
        "from torch import nn\n\n"
        "def model(classes, shape):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes), nn.Softmax(1))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["run", "digits", *FAST, "--method", "fedavg", "--set", "model.name=softmax_for_tests:model"]
    monkeypatch.setattr(sys, "argv", ["fedbe", *words])
    monkeypatch.setattr("warnings.filters", [("default", None, UserWarning, None, 0)])
    with pytest.raises(SystemExit, match="0"):
        main()
    error = capsys.readouterr().err
    assert "fedbe: `model` returns probabilities" in error
    assert "model_runner.py" not in error
