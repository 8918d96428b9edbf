"""The controller and the messages, without the simulator."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.job_config.api import FedJob
from torch import nn

from fedbe import LocalSettings
from fedbe.algorithms.methods import METHODS, get_method
from fedbe.algorithms.server.limits import Limits
from fedbe.core.layout import Layout
from fedbe.errors import SettingError, StateError
from fedbe.experiment import run_folder
from fedbe.nvflare import MethodController, fit
from fedbe.nvflare.controller import average_metrics, natural_order
from fedbe.nvflare.messages import instructions, read_update, to_arrays, to_state

SRC = Path(__file__).parents[2] / "src"
MODEL = nn.Linear(2, 3)
START = MODEL.state_dict()


def update(result, method="fedavg"):
    return read_update(result, "site-1", get_method(method), Layout(MODEL), START)


def test_every_argument_is_stored_under_its_name_and_exported(tmp_path):
    """NVFlare's exporter reads the attributes and builds the controller from them."""
    arguments = {
        "method": "fedprox",
        "model": "net:Net",
        "unlabeled": "net:images",
        "settings": {"seed": 3, "proximal_mu": 0.1},
        "folder": "/runs/one",
        "num_clients": 2,
        "num_rounds": 7,
        "timeout": 30,
        "persistor_id": "mine",
    }
    made = MethodController(**arguments)
    assert set(arguments) == set(inspect.signature(MethodController.__init__).parameters) - {"self"}
    assert {name: getattr(made, name) for name in arguments} == arguments
    job = FedJob(name="exported", min_clients=1)
    job.to_server(made)
    job.export_job(str(tmp_path))
    config = json.loads(next(tmp_path.rglob("config_fed_server.json")).read_text())
    exported = config["workflows"][0]
    assert exported["path"] == "fedbe.nvflare.controller.MethodController"
    assert exported["args"] == arguments


def test_a_reply_of_an_nvflare_client_is_read():
    full = {"weight": np.ones((3, 2), np.float32), "bias": np.zeros(3, np.float32)}
    assert update(FLModel(params=full)).num_examples == 1
    steps = update(FLModel(params=full, meta={"NUM_STEPS_CURRENT_ROUND": 8}))
    assert steps.num_examples == 8
    assert steps.state["weight"].tolist() == [[1, 1]] * 3
    moved = update(FLModel(params=full, params_type="DIFF")).state["weight"]
    torch.testing.assert_close(moved, START["weight"] + 1)


@pytest.mark.parametrize("params", [{}, {"weight": np.array(["a"])}, {"weight": object()}])
def test_a_reply_that_cannot_be_read_is_a_state_error(params):
    with pytest.raises(StateError):
        update(FLModel(params=params, params_type="FULL"))


@pytest.mark.parametrize(
    "weight",
    [
        np.zeros((7, 7), np.float32),
        np.zeros((50, 1, 1), np.float32),  # would be broadcast
        np.zeros((3, 2), np.complex64),
        torch.zeros(3, 2).to_sparse(),
        torch.zeros(3, 2, device="meta"),
    ],
    ids=["shape", "broadcast", "complex", "sparse", "meta"],
)
def test_a_change_that_does_not_fit_is_a_state_error(weight):
    params = {"weight": weight, "bias": np.zeros(3, np.float32)}
    with pytest.raises(StateError, match="its change: 'weight' must"):
        update(FLModel(params=params, params_type="DIFF"))


def test_a_method_that_is_not_a_text_is_a_state_error():
    odd = FLModel(params=to_arrays(START), meta={"fedbe": {"method": np.array(["fedprox", "x"])}})
    with pytest.raises(StateError, match="rules of FedProx"):
        update(odd, "fedprox")


class TestVeryMany:
    """A reply of very many parts is counted, and its parts are not looked at."""

    class Part:
        seen = 0

        def __array__(self, dtype=None, copy=None):
            type(self).seen += 1
            return np.zeros(1, np.float32)

    @pytest.fixture
    def flood(self):
        self.Part.seen = 0
        return {f"x{i}": self.Part() for i in range(1000)}

    def test_arrays(self, flood):
        with pytest.raises(StateError, match="at most 2 arrays, got 1000"):
            update(FLModel(params=flood, params_type="FULL"))
        assert self.Part.seen == 0

    def test_extras(self, flood):
        meta = {"fedbe": {"method": "scaffold", "extras": {"control": np.ones(9, np.float32), **flood}}}
        read = update(FLModel(params=to_arrays(START), meta=meta), "scaffold")
        assert set(read.extras) == {"control"}
        assert self.Part.seen == 0

    def test_metrics(self):
        flood = {f"x{i}": 1.0 for i in range(100_000)}
        assert average_metrics([(0, 10, {"loss": 1.0}), (1, 10, flood)], Limits()) == {"loss": 1.0}


@pytest.mark.parametrize("odd", [10**400, 1e308, float("nan"), float("inf"), "x", None])
def test_metrics_that_cannot_be_averaged_are_left_out(odd):
    replies = [(0, 10, {"loss": 1.0, "more": odd}), (1, 30, {"loss": 2.0, "more": odd}), (2, 10, "x")]
    assert average_metrics(replies, Limits()) == {"loss": 1.75}


@pytest.mark.parametrize(
    ("weights", "expected"), [("reported", 0.75), ("equal", 0.5), ({0: 1, 1: 4}, 0.8), ({0: 1}, 0.0)]
)
def test_metrics_are_weighted_as_updates_are(weights, expected):
    replies = [(0, 100, {"loss": 0.0}), (1, 10**15, {"loss": 1.0})]
    assert average_metrics(replies, Limits(client_weights=weights)) == {"loss": expected}


def test_a_client_must_apply_the_rules_of_the_method():
    with pytest.raises(StateError, match=r"rules of FedProx: use fedbe\.nvflare\.fit"):
        update(FLModel(params=to_arrays(START)), "fedprox")


@pytest.mark.parametrize("name", METHODS)
def test_a_client_follows_every_method(name):
    method = get_method(name)
    asked = {**instructions(method, 3, 1), "broadcast": {}, "memory": {}}
    received = FLModel(params=to_arrays(START), meta={"fedbe": asked})
    reply = fit(
        received, MODEL, torch.randn(8, 2), torch.arange(8) % 3, LocalSettings(epochs=1, batch_size=4), client_id=1
    )
    read = update(reply, name)
    assert (read.num_examples, set(read.extras)) == (8, set(method.extras))
    assert not np.allclose(reply.params["weight"], START["weight"])


def test_bfloat16_travels_as_float32():
    half = nn.Linear(2, 3).to(torch.bfloat16)
    arrays = to_arrays(half.state_dict())
    assert arrays["weight"].dtype == np.float32
    assert torch.equal(to_state(arrays, Layout(half), "it")["weight"], half.weight)


def test_a_message_of_another_controller_is_refused():
    with pytest.raises(SettingError, match="MethodController"):
        fit(FLModel(params=to_arrays(START)), MODEL, torch.zeros(1, 2), torch.zeros(1))


def test_sites_are_in_their_natural_order():
    names = [f"site-{i}" for i in (10, 2, 1)]
    assert sorted([*names, "hospital"], key=natural_order) == ["hospital", "site-1", "site-2", "site-10"]


def test_without_nvflare_the_extra_is_named():
    code = "import importlib.util as u; u.find_spec = lambda *_: None; import fedbe.nvflare"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install -c constraints.txt -e '.[nvflare]'" in done.stderr


EXAMPLE = Path(__file__).parents[2] / "examples" / "nvflare" / "job.py"


@pytest.mark.e2e
def test_the_example_exports_a_job(tmp_path):
    subprocess.run([sys.executable, EXAMPLE, "--export", tmp_path], check=True, capture_output=True)
    assert next(tmp_path.rglob("config_fed_server.json"))
    assert list(tmp_path.rglob("task.py"))


@pytest.mark.e2e
@pytest.mark.slow
def test_the_example_runs_in_nvflares_simulator(tmp_path):
    folder, environment = tmp_path / "run", {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, EXAMPLE, "--rounds", "1", "--folder", folder, "--workspace", tmp_path / "workspace"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    (line,) = run_folder.read_rounds(folder) if folder.exists() else [{}]
    assert line.get("clients") == ["site-1", "site-2", "site-3"], (done.stdout + done.stderr)[-3000:]
    assert "distill" in line["seconds"]
    assert (folder / "model.safetensors").exists()
