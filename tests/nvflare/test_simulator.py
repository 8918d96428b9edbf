"""Jobs in NVFlare's real simulator: parity with `fedbe run`, resuming, and broken clients."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedbe.algorithms.methods import get_method
from fedbe.experiment import checkpoint, loop, run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors.serial import Serial

APP = Path(__file__).parent / "app"
SRC = Path(__file__).parents[2] / "src"

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def task(monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    import federation_for_tests

    return federation_for_tests


@pytest.fixture
def run_job(tmp_path):
    """run_job(method=…, num_rounds=…): the folder of the run, and the simulator's output."""

    def run(faults="", **arguments):
        folder = tmp_path / "run"
        arguments = {"settings": {"seed": 5}, "folder": str(folder), "timeout": 60, **arguments}
        environment = {**os.environ, "PYTHONPATH": f"{SRC}:{APP}", "FEDBE_TEST_FAULTS": faults, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, APP / "job_for_tests.py", json.dumps(arguments), str(tmp_path / "workspace")]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
        )
        return folder, done.stdout + done.stderr

    return run


def test_a_resumed_job_equals_the_simulator(task, run_job, tmp_path):
    """FedBE with SCAFFOLD: members, posterior, distillation, control variates of server and clients."""
    method = "fedbe+scaffold"
    expected = run_folder.create(tmp_path / "simulated", task.recipe(), method, task.SEED, "float32")
    with Serial() as executor:
        assert loop.execute(expected, executor, Callback())
    settings = {"seed": task.SEED, **task.recipe().method_for(method).settings()}
    arguments = {"method": method, "settings": settings, "num_clients": 3}
    for rounds in (2, 3):  # the second job continues the first
        folder, output = run_job(num_rounds=rounds, **arguments)
        assert (folder / "model.safetensors").exists(), output[-3000:]
    assert "resuming after round 2" in output
    ours, theirs = checkpoint.latest(folder), checkpoint.latest(expected)
    assert ours.round == 3
    for name in ("params", "buffers"):
        torch.testing.assert_close(getattr(ours.model, name), getattr(theirs.model, name), rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.memory["control"], theirs.memory["control"], rtol=0, atol=1e-6)
    sites = [[f"site-{c + 1}" for c in line["clients"]] for line in run_folder.read_rounds(expected)]
    assert [line["clients"] for line in run_folder.read_rounds(folder)] == sites
    report = json.loads((folder / "report.json").read_text())
    assert list(report["train"]) == ["1", "2", "3"]


def test_the_default_equals_the_simulator(task, run_job, tmp_path):
    """FedBE as users have it: only what the recipe changes is given; the variant `auto` is the default."""
    expected = run_folder.create(tmp_path / "simulated", task.recipe(), "fedbe", task.SEED, "float32")
    with Serial() as executor:
        assert loop.execute(expected, executor, Callback())
    default, recipes = get_method("fedbe").settings(), task.recipe().method_for("fedbe").settings()
    changed = {name: value for name, value in recipes.items() if value != default[name]}
    assert set(changed) == {"num_samples", "distill_epochs", "distill_lr", "distill_lr_min"}
    folder, output = run_job(method="fedbe", settings={"seed": task.SEED, **changed}, num_clients=3, num_rounds=3)
    assert (folder / "model.safetensors").exists(), output[-3000:]
    ours, theirs = checkpoint.latest(folder), checkpoint.latest(expected)
    assert ours.round == theirs.round == 3
    for name in ("params", "buffers"):
        torch.testing.assert_close(getattr(ours.model, name), getattr(theirs.model, name), rtol=0, atol=1e-6)
    seconds = [line["seconds"] for line in run_folder.read_rounds(folder)]
    assert all("distill" in line for line in seconds), "no student was trained, so nothing was compared"


def test_broken_clients_are_set_aside_and_the_job_continues(run_job):
    folder, output = run_job("site-2=nan site-3=raise", method="fedavg", num_rounds=2)
    lines = run_folder.read_rounds(folder)
    assert [line["clients"] for line in lines] == [["site-1", "site-4"]] * 2, output[-3000:]
    reasons = {one["client"]: one["reason"] for one in lines[0]["set_aside"]}
    assert "NaN" in reasons["site-2"]
    assert "no reply" in reasons["site-3"]
    assert "client site-2 is set aside" in output


def test_a_client_that_dies_is_set_aside(run_job):
    folder, output = run_job("site-3=die", method="fedavg", num_rounds=2, timeout=30)
    lines = run_folder.read_rounds(folder)
    assert [line["clients"] for line in lines] == [["site-1", "site-2", "site-4"]] * 2, output[-3000:]
    assert (folder / "model.safetensors").exists()


def test_too_few_clients_end_the_job_with_a_reason(run_job):
    faults = " ".join(f"site-{i}=nan" for i in (1, 2, 3, 4))
    folder, output = run_job(faults, method="fedavg", num_rounds=2)
    assert "round 1: 0 usable client updates" in output
    assert not (folder / "model.safetensors").exists()
