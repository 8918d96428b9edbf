"""--device of every command that trains or predicts."""

import json
import os

import pytest
from PIL import Image
from typer.testing import CliRunner

from fedbe.cli import reproduce
from fedbe.cli.app import app
from fedbe.cli.options import Workplace
from fedbe.core import compute, devices
from fedbe.errors import SettingError
from fedbe.reproduce import cost, study

QUICK = ["--set", "training.rounds=1", "--set", "training.epochs=1", "--set", "split.clients=2"]
QUICK += ["--set", "settings.distill_epochs=1", "--set", "model.hidden=[8]", "--workers", "0"]
QUICK += ["--precision", "float32"]  # auto is bfloat16 where the processor has it


@pytest.fixture
def command(tmp_path, monkeypatch):
    """command("run", …): the exit code and everything that is printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDBE_DATA", str(tmp_path / "data"))

    def run(*words):
        done = CliRunner().invoke(app, list(words))
        return done.exit_code, done.output if done.exception is None else f"{done.output} {done.exception}"

    return run


def info(folder):
    return json.loads((folder / "run.json").read_text())


@pytest.mark.slow
def test_every_command_takes_a_device(command, tmp_path, emulator):
    assert command("run", *QUICK, "--method", "fedavg", "--device", "emu", "--name", "there", "-q")[0] == 0
    assert emulator.used == {0}
    there = tmp_path / "runs/there"
    assert info(there)["device"] == "emu:0"
    assert command("run", *QUICK, "--method", "fedavg", "--device", "cpu", "--name", "here", "-q")[0] == 0
    assert (there / "model.safetensors").read_bytes() == (tmp_path / "runs/here/model.safetensors").read_bytes()
    Image.new("L", (8, 8)).save("black.png")
    for words in (("evaluate", "runs/there"), ("predict", "runs/there", "black.png")):
        emulator.used.clear()
        code, text = command(*words, "--device", "emu:1")
        assert code == 0, text
        assert emulator.used == {1}
        assert command(*words, "--device", "cpu") == (0, text)


@pytest.mark.slow
def test_a_comparison_and_its_resume(command, tmp_path):
    words = ["compare", *QUICK, "--methods", "fedavg", "--seeds", "1", "--name", "both", "-q"]
    assert command(*words, "--device", "emu")[0] == 0
    cell = tmp_path / "runs/both/fedavg-seed0"
    assert info(cell)["device"] == "emu:0"
    unfinished = info(cell) | {"finished": None, "final": None}
    (cell / "run.json").write_text(json.dumps(unfinished))
    assert command("resume", "runs/both", "--workers", "0", "-q")[0] == 0
    assert info(cell)["device"] == "emu:0"
    (cell / "run.json").write_text(json.dumps(unfinished))
    assert command("resume", "runs/both", "--workers", "0", "-q", "--device", "cpu")[0] == 0
    assert info(cell)["device"] == "cpu"


@pytest.mark.parametrize(("units", "warns"), [(False, True), (True, False)])
def test_a_resume_that_emulates_bfloat16_says_so(units, warns, command, tmp_path, monkeypatch):
    monkeypatch.setattr(compute, "has_bfloat16", lambda: units)
    words = ["run", *QUICK, "--method", "fedavg", "--device", "cpu", "--name", "it", "-q"]
    assert command(*words, "--precision", "bfloat16")[0] == 0
    run = tmp_path / "runs/it"
    (run / "run.json").write_text(json.dumps(info(run) | {"finished": None, "final": None}))
    code, text = command("resume", "runs/it", "--workers", "0", "-q")
    assert code == 0, text
    assert ("cpu has no units for bfloat16" in text) == warns


def test_a_resume_without_the_device_of_the_run_says_only_that(command, tmp_path):
    assert command("run", *QUICK, "--method", "fedavg", "--device", "cpu", "--name", "it", "-q")[0] == 0
    changes = {"finished": None, "final": None, "device": "cuda:0", "precision": "bfloat16"}
    run = tmp_path / "runs/it"
    (run / "run.json").write_text(json.dumps(info(run) | changes))
    code, text = command("resume", "runs/it", "--workers", "0", "-q")
    assert code != 0
    assert "sees no cuda device" in text
    assert "bfloat16" not in text


def test_auto_says_which_accelerator(command, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "ACCELERATORS", ("emu",))
    code, text = command("run", *QUICK, "--method", "fedavg", "--name", "auto")
    assert code == 0, text
    assert "device: emu:0" in text
    assert info(tmp_path / "runs/auto")["device"] == "emu:0"


@pytest.mark.parametrize("words", [("run",), ("compare",), ("evaluate", "runs/x"), ("reproduce", "table1")])
def test_a_device_that_is_not_there_is_one_sentence(words, command, tmp_path):
    (tmp_path / "runs").mkdir()
    code, text = command(*words, "--device", "emu:7")
    assert code != 0
    assert "there is no emu:7" in text
    assert not list((tmp_path / "runs").iterdir())


def test_an_accelerator_gets_few_workers_and_the_clients_of_one_run(monkeypatch):
    monkeypatch.setattr(compute, "cores", lambda: 64)
    where = Workplace(None, "processes", None, "auto")
    assert where.on("cpu") == where
    assert where.on("emu:0,1") == Workplace(8, "processes", None, "clients")
    assert Workplace(3, "processes", None, "runs").on("emu:0") == Workplace(3, "processes", None, "runs")
    on_ray = Workplace(None, "ray", None, "auto").on("emu:0")
    assert on_ray == Workplace(None, "ray", None, "clients", gpus_per_worker=0.25, device="emu:0")
    assert Workplace(None, "ray", None, gpus_per_worker=0.0).on("emu:0").gpus_per_worker == 0
    assert Workplace(None, "ray", None).on("mps").gpus_per_worker is None
    assert Workplace(None, "ray", None).on("cpu").gpus_per_worker is None


def test_with_ray_the_device_is_that_of_the_workers(monkeypatch, capsys):
    ray = Workplace(None, "ray", None)
    assert [ray.choose_device(text) for text in ("cpu", "auto", "emu")] == ["cpu", "cpu", "emu:0"]
    assert not capsys.readouterr().err
    assert ray.choose_device("cuda:0,1") == "cuda:0,1"  # of other machines
    assert "device: cuda of the workers" in capsys.readouterr().err
    assert Workplace(None, "ray", None, gpus_per_worker=0.5).choose_device("auto", quiet=True) == "cuda"
    monkeypatch.setattr(devices, "ACCELERATORS", ("emu",))
    assert Workplace(None, "ray", None, gpus_per_worker=0.5).choose_device("auto", quiet=True) == "emu:0"
    with pytest.raises(SettingError, match="sees no cuda device"):
        Workplace(None, "processes", None).choose_device("cuda")
    with pytest.raises(SettingError, match="unknown device 'gpu'"):
        ray.choose_device("gpu")


class TestReproduce:
    """The cost of a study, before it starts."""

    @pytest.fixture(autouse=True)
    def _long(self, monkeypatch):
        monkeypatch.setattr(cost, "images_per_second", lambda *_: 10.0)
        monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))

    def test_hours_of_work_are_not_started_unasked(self, command, tmp_path):
        code, text = command("reproduce", "table1")
        assert code != 0
        assert "start them with --yes" in text
        assert not (tmp_path / "runs").exists()

    @pytest.mark.parametrize(("answer", "starts"), [(True, True), (False, False)])
    def test_a_person_is_asked(self, answer, starts, command, tmp_path, monkeypatch):
        asked = []
        monkeypatch.setattr(reproduce, "can_ask", lambda: True)
        monkeypatch.setattr(reproduce.typer, "confirm", lambda text, **_: asked.append(text) or answer)
        code, text = command("reproduce", "table1", "-q")
        assert len(asked) == 1
        assert ("days on cpu" in asked[0], code == 0) == (True, starts), text
        assert (tmp_path / "runs").exists() == starts

    def test_yes_and_a_scale_start_at_once(self, command):
        code, text = command("reproduce", "table1", "--yes")  # there is no data, so the table has reasons
        assert code == 0, text
        assert "days on cpu" in text
        assert command("reproduce", "table1", "--scale", "cpu")[0] == 0

    @pytest.fixture
    def _one_study(self, monkeypatch):
        one = {"table1": study.available_studies()["table1"]}
        monkeypatch.setattr(study, "available_studies", lambda: one)

    @pytest.mark.usefixtures("_one_study")
    def test_a_busy_machine_is_named(self, command, monkeypatch):
        monkeypatch.setattr(os, "getloadavg", lambda: (50.0, 0.0, 0.0))
        assert "machine is busy, load 50.0" in command("reproduce", "table1")[1]
        assert "machine is busy" in command("reproduce", "--list")[1]

    @pytest.mark.usefixtures("_one_study")
    def test_the_list_is_for_the_device(self, command):
        assert "(emu:0)" in command("reproduce", "--list", "--device", "emu")[1]


def test_the_speed_of_a_device_is_that_of_one_process(monkeypatch, emulator):
    monkeypatch.setattr(cost, "cores", lambda: 1000)
    asked = []
    monkeypatch.setattr(cost, "ask_for_same_bits", lambda device: asked.append(str(device)))
    rate = cost.images_per_second("mlp", (4,), 3, "{}", 7, "emu:0")
    assert asked == ["emu:0"]
    assert emulator.used == {0}
    assert rate * 100 < cost.images_per_second("mlp", (4,), 3, "{}", 7, "cpu")
