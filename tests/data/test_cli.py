import pytest
from PIL import Image
from typer.testing import CliRunner

from fedbe.cli.data import app
from fedbe.errors import DataError, SettingError


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_list_shows_every_data_set_and_whether_it_is_local(tmp_path, monkeypatch, cifar_binary):
    cifar_binary(tmp_path / "cifar-10-batches-bin", "cifar10")
    monkeypatch.setenv("FEDBE_DATA", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    rows = {line.split()[0]: line for line in run("list").output.splitlines() if line.strip()}
    for name in ("digits", "swissroll", "cifar10", "cifar100", "tiny-imagenet", "mnist", "fashion-mnist"):
        assert name in rows
    assert "yes   170 MB" in rows["cifar10"]
    assert "no    169 MB" in rows["cifar100"]
    assert "MIT" in rows["fashion-mnist"]


def test_show_prints_and_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    done = run("show", "digits", "--split", "step", "--clients", 5, "--minor-images", 2, "--server", 100)
    assert done.exit_code == 0
    assert "5 clients, 100 examples at the server" in done.output
    assert "written: digits-step.png" in done.output
    with Image.open(tmp_path / "digits-step.png") as picture:
        assert picture.width > 500


def test_show_takes_every_setting_and_depends_on_the_seed(tmp_path):
    target = tmp_path / "split.png"
    one, other = (
        run("show", "digits", "--split", "dirichlet", "--alpha", 1, "--seed", s, "--to", target) for s in (0, 1)
    )
    assert one.output != other.output
    done = run("show", "swissroll", "--clients", 3, "--major-classes", 1, "--major-share", 0.8, "--to", target)
    assert done.exit_code == 0
    assert target.exists()


def test_show_takes_the_settings_of_shards_and_quantity(tmp_path):
    shown = [
        run("show", "digits", *words, "--clients", 5, "--to", tmp_path / "split.png").output
        for words in (
            ("--split", "shards"),
            ("--split", "shards", "--shards-per-client", 2),
            ("--split", "shards", "--shards-per-client", 4),
            ("--split", "quantity"),
            ("--split", "quantity", "--alpha", 0.5),
            ("--split", "quantity", "--alpha", 5),
        )
    ]
    assert [shown[i] == shown[i + 1] for i in range(5)] == [True, False, False, True, False]


def test_errors_reach_the_caller(tmp_path):
    with pytest.raises(SettingError, match="`major_classes` must be"):
        run("show", "digits", "--major-classes", 11, "--to", tmp_path / "x.png")
    with pytest.raises(DataError, match="no client ids"):
        run("show", "digits", "--split", "column", "--to", tmp_path / "x.png")
    with pytest.raises(DataError, match="cannot write"):
        run("show", "digits", "--to", tmp_path / "nowhere" / "x.png")
    with pytest.raises(DataError, match="unknown data set"):
        run("get", "imagenet")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match=r"cannot create .*: Not a directory"):
        run("get", "mnist", "--to", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_get_shows_progress_and_the_path(tmp_path, monkeypatch):
    def get(name, root, progress):
        progress("file.gz", 50, 100)
        progress("file.gz", 100, 100)
        return root / name

    monkeypatch.setattr("fedbe.data.download.download_dataset", get)
    done = run("get", "mnist", "--to", tmp_path)
    assert f"mnist is in {tmp_path / 'mnist'}" in done.output
