"""Workers of a Ray cluster on accelerators: Ray reserves logical GPUs, and the emulated device computes."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedbe.cli.app import app
from fedbe.core.compute import Plan
from fedbe.experiment import loop, run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors.ray_pool import RayPool
from fedbe.experiment.executors.serial import Serial
from fedbe.experiment.federation import prepare
from fedbe.experiment.recipe_files import load_recipe
from fedbe.experiment.run_jobs import NewRun, RunJob, execute_runs

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]
ray = pytest.importorskip("ray")

HERE = Path(__file__).parent
SMALL = ("training.rounds=2", "training.epochs=1", "split.clients=4", "training.batch_size=80", "model.hidden=[16]")
SMALL += ("variant=paper", "settings.num_samples=2", "settings.distill_epochs=1")


@dataclass(frozen=True)
class Look:
    """What a worker has: the GPUs that Ray reserved, those that it sees, and where its model is."""

    name: str = "look"

    def run(self, federation, runner):  # noqa: ARG002
        return ray.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"], str(runner.device)


@pytest.fixture(scope="module", autouse=True)
def _two_gpus():
    """A node with two logical GPUs; its worker processes have emulated ones."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        address="local",  # not a cluster that another test has started
        num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False,
        _node_ip_address="127.0.0.1",
        runtime_env={"worker_process_setup_hook": "ray_hook.enter", "env_vars": {"PYTHONPATH": paths}},
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture
def recipe():
    return load_recipe("digits", SMALL)


def test_each_worker_computes_on_the_gpu_that_ray_reserved(recipe):
    with RayPool(num_gpus=0.75, device="emu:0,1") as pool:  # the device's numbers are those of another machine
        assert pool.workers == 2
        pool.configure(prepare(recipe, 0), Plan())
        seen = [outcome.value for outcome in pool.map([Look()] * 40)]
    assert {device for *_, device in seen} == {"emu:0"}
    assert {visible for _, visible, _ in seen} == {"0", "1"}
    assert all([int(visible)] == reserved for reserved, visible, _ in seen)


def test_a_driver_without_an_accelerator_and_a_whole_run(recipe, tmp_path, monkeypatch, emulator):
    here = run_folder.create(tmp_path / "here", recipe, "fedbe", 0, "float32")
    with Serial() as executor:
        assert loop.execute(here, executor, Callback())
    monkeypatch.setattr(type(torch.emu), "is_available", lambda _: False)
    there = run_folder.create(tmp_path / "there", recipe, "fedbe", 0, "float32", "emu")
    whole = NewRun(recipe, "fedbe", 0, "float32", "emu:0,1")
    with RayPool(2, num_gpus=1, device="emu") as pool:
        assert loop.execute(there, pool, Callback())
        assert execute_runs([RunJob(tmp_path / "whole", whole)], pool, Callback(), lambda: False, whole=True)
    assert not emulator.used
    model = (here / "model.safetensors").read_bytes()
    assert model == (there / "model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    info = run_folder.read_info(there)
    assert (info.device, info.made_with["device"]) == ("emu", "emu (of the workers; the server step on cpu)")


def test_the_command_line_reserves_and_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*words):
        changes = [word for change in SMALL for word in ("--set", change)]
        done = CliRunner().invoke(app, ["run", *changes, "--executor", "ray", "--method", "fedavg", *words])
        return f"{done.output} {done.exception or ''}"

    text = run("--device", "cuda", "--gpus-per-worker", "1")
    assert "device: cuda of the workers; this machine has none, so the server step is on its CPU" in text
    assert re.search(r"could not be trained: on .*, torch .* sees no cuda device on this machine", text)
    assert "a worker needs 1 CPUs and 3 GPUs, but the Ray cluster has 2 CPUs and 2 GPUs" in run(
        "--device", "cuda", "--gpus-per-worker", "3"
    )
    assert "add --device cuda" in run("--device", "cpu", "--gpus-per-worker", "1")
    assert not list((tmp_path / "runs").iterdir())
