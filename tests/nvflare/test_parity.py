"""Controller and clients in this process, without NVFlare's simulator: the models of `fedbe run`, method by method.

`test_simulator.py` runs two methods in the real simulator. What NVFlare does between `send_model` and the callback is
left out here; everything that is fedbe's runs.
"""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedbe.algorithms.methods import METHODS
from fedbe.errors import SettingError
from fedbe.experiment import checkpoint, loop, run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors.serial import Serial
from fedbe.nvflare import MethodController, fit
from fedbe.nvflare.messages import META

APP = Path(__file__).parent / "app"

pytestmark = pytest.mark.slow


@pytest.fixture
def task(monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    import federation_for_tests

    return federation_for_tests


class InProcess(MethodController):
    """The controller with sites that train when a task is sent."""

    def connect(self, task):
        sites = [SimpleNamespace(name=f"site-{i + 1}") for i in range(task.CLIENTS)]
        self.task, self.engine = task, SimpleNamespace(get_clients=lambda: sites)
        self.abort_signal, self.persistor, self.fl_ctx = SimpleNamespace(triggered=False), None, None

    def send_model(self, targets, data, timeout, callback):  # noqa: ARG002
        (site,) = targets
        client, federation = int(site.removeprefix("site-")) - 1, self.task.federation()
        settings = self.task.simulation(self.method).local_settings(data.current_round + 1, client)
        index = federation.clients[client]
        inputs, labels = federation.train.select(index), federation.labels[index]
        reply = fit(data, self.task.model(), inputs, labels, settings, client_id=client)
        reply.meta["client_name"] = site
        callback(reply)

    def get_num_standing_tasks(self):
        return 0

    def info(self, message):
        logging.getLogger("tests").info(message)

    warning = info

    def event(self, event_type): ...

    def fire_event_with_data(self, event_type, fl_ctx, key, data): ...

    def update_model(self, model, model_update, replace_meta=True):  # noqa: ARG002
        return model


def run_in_process(controller, task):
    controller.connect(task)
    threads = torch.get_num_threads()
    try:
        controller.run()
    finally:
        torch.set_num_threads(threads)


def near(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_the_controller_gives_the_models_of_the_simulator(method, task, tmp_path):
    """Every row of the catalogue, without an exception: a new method is included."""
    expected = run_folder.create(tmp_path / "simulated", task.recipe(), method, task.SEED, "float32")
    with Serial() as executor:
        assert loop.execute(expected, executor, Callback())
    settings = {"seed": task.SEED, **task.recipe().method_for(method).settings()}
    paths = {"model": "federation_for_tests:model", "unlabeled": "federation_for_tests:server_inputs"}
    rounds = 1 if METHODS[method].one_round else 3
    controller = InProcess(
        method=method, settings=settings, folder=str(tmp_path / "nvflare"), num_rounds=rounds, num_clients=3, **paths
    )
    run_in_process(controller, task)
    ours, theirs = checkpoint.latest(tmp_path / "nvflare"), checkpoint.latest(expected)
    assert ours.round == theirs.round == rounds
    near({"params": ours.model.params}, {"params": theirs.model.params})
    near({"buffers": ours.model.buffers}, {"buffers": theirs.model.buffers})
    near(ours.memory, theirs.memory)
    sites = {f"site-{client + 1}": memory for client, memory in theirs.clients.items()}
    assert ours.clients.keys() == sites.keys()
    for site, memory in sites.items():
        near(ours.clients[site], memory)
    assert len(ours.members) == len(theirs.members)
    for mine, its in zip(ours.members, theirs.members, strict=True):
        near({"params": mine.state.params}, {"params": its.state.params})


def test_a_method_for_one_round_is_refused_for_more(task):
    paths = {"model": "federation_for_tests:model", "unlabeled": "federation_for_tests:server_inputs"}
    with pytest.raises(SettingError, match="`num_rounds` must be 1"):
        run_in_process(InProcess(method="1-ensemble", num_rounds=2, **paths), task)


def test_a_site_that_claims_a_million_times_its_examples_is_capped(task):
    class Claiming(InProcess):
        def send_model(self, targets, data, timeout, callback):
            def with_claim(reply):
                if reply.meta["client_name"] == "site-1":
                    reply.meta[META]["num_examples"] = 1e9
                callback(reply)

            super().send_model(targets, data, timeout, with_claim)

    controller = Claiming(method="fedavg", model="federation_for_tests:model", num_rounds=1, num_clients=3)
    run_in_process(controller, task)
    (capped,) = controller.server.info.capped
    assert (capped.client_id, round(capped.share, 3)) == ("site-1", 0.6)
