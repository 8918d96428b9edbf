"""What people expect of a command line: version, help, completion, a doctor, folders, answers to repeated questions."""

import json
import sys
from importlib.metadata import version

import pytest
from PIL import Image
from typer.testing import CliRunner

from fedbe.cli.app import app, main
from fedbe.errors import DataError, RunError
from fedbe.experiment.recipe_files import load_recipe

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
    for word in (version("torch"), "precision", "workers", "digits", "extra flower"):
        assert word in found


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
    fedbe(*[word.replace("fedavg,fedprox", "fedavg") for word in words])
    assert sorted(path.name for path in folder.parent.iterdir()) == ["another", "digits-compare", "digits-compare-2"]


def test_evaluate_names_the_runs_of_a_comparison(comparison):
    folder, _ = comparison
    error = CliRunner().invoke(app, ["evaluate", str(folder)]).exception
    assert isinstance(error, RunError)
    assert "is a comparison; evaluate one of its runs" in str(error)
    assert str(next(folder.glob("*fedprox*"))) in str(error)


def test_predict_on_folders(comparison, tmp_path):
    run = str(next(comparison[0].glob("*fedprox*")))
    (tmp_path / "deep").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    Image.new("L", (9, 9), 200).save(tmp_path / "deep" / "b, c.png")
    (tmp_path / "broken.png").write_text("no image")
    (tmp_path / "notes.txt").write_text("not looked at")
    result = fedbe("predict", run, str(tmp_path), "--format", "json", code=1)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["file"] for line in lines] == [str(tmp_path / "a.png"), str(tmp_path / "deep" / "b, c.png")]
    assert sum(lines[0]["probabilities"].values()) == pytest.approx(1)
    assert lines[0]["class"] == max(lines[0]["probabilities"], key=lines[0]["probabilities"].get)
    assert "broken.png is not an image" in result.stderr
    assert "1 of 3 files could not be read" in result.stderr
    table = fedbe("predict", run, str(tmp_path / "deep"), "--format", "csv").stdout.splitlines()
    assert table[0] == "file,class,probability"
    assert table[1].startswith(f'"{tmp_path}/deep/b, c.png",')
    assert "%" in fedbe("predict", run, str(tmp_path / "a.png")).stdout
    (tmp_path / "empty").mkdir()
    error = CliRunner().invoke(app, ["predict", run, str(tmp_path / "empty")]).exception
    assert isinstance(error, DataError)


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
