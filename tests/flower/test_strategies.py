"""What comes back from clients: good replies count, broken ones are set aside with a reason, too few end the run."""

import json
import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Strategy
from torch import nn

import fedbe
from fedbe.errors import AggregationError, RunError, SettingError, StateError
from fedbe.flower import (
    FedAvg,
    FedAvgM,
    FedBE,
    FedProx,
    OneEnsemble,
    Reply,
    Scaffold,
    VDistillation,
    client_app,
    resume,
)
from fedbe.methods import CATALOGUE


class Net(nn.Sequential):
    def __init__(self):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(3)
            super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


IMAGES = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
QUIET = {"fraction_evaluate": 0.0}


def plain_app(moves=(1.0, 2.0, 3.0, 4.0), examples=(10, 20, 30, 40)):
    """A user's own ClientApp, as Flower's templates write it: client i moves every weight by moves[i] / 10."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        i = context.node_config["partition-id"]
        state = message.content["arrays"].to_torch_state_dict()
        moved = {k: v + moves[i] / 10 if v.is_floating_point() else v + 1 for k, v in state.items()}
        metrics = MetricRecord({"num-examples": examples[i], "loss": float(i)})
        return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        i = context.node_config["partition-id"]
        metrics = {"num-examples": examples[i], "accuracy": i / 10}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def arrays():
    return ArrayRecord(Net().state_dict())


def breaking(how):
    """A change on the way that breaks client 1's training replies."""

    def change(client, message):
        return how(message) if client == 1 and message.metadata.message_type == "train" else message

    return change


def _set(name, value):
    def change(message):
        message.content["arrays"][name] = value
        return message

    return change


def _metrics(**values):
    def change(message):
        message.content["metrics"] = MetricRecord(values)
        return message

    return change


def _drop(record):
    def change(message):
        del message.content[record]
        return message

    return change


def _drop_all(message):  # noqa: ARG001
    return None


def _more(message):
    message.content["more"] = ArrayRecord()
    return message


HUGE = (
    b"\x93NUMPY\x01\x00\x50\x00"
    + b"{'descr': '<f4', 'fortran_order': False, 'shape': (400000000, 400000000), }".ljust(80)
)
BROKEN = {
    "nan": (_set("0.bias", Array(np.full(8, np.nan, np.float32))), "NaN or infinite"),
    "infinite": (_set("1.running_mean", Array(np.full(8, np.inf, np.float32))), "NaN or infinite"),
    "shape": (_set("0.bias", Array(np.zeros(9, np.float32))), "must have shape [8], got [9]"),
    "dtype": (_set("0.bias", Array(np.zeros(8))), "must be float32 ('<f4'), got '<f8'"),
    "huge": (_set("0.bias", Array("float32", (8,), "numpy.ndarray", HUGE)), "must have shape [8], got [400000000"),
    "unknown key": (_set("0.wrong", Array(np.zeros(8))), "unknown '0.wrong'"),
    "wild": (_set("0.bias", Array(np.full(8, 1e9, np.float32))), "changed by"),
    "negative variance": (_set("1.running_var", Array(np.full(8, -1, np.float32))), "below zero"),
    "no arrays": (_drop("arrays"), "one ArrayRecord, got 0"),
    "two arrays": (_more, "one ArrayRecord, got 2"),
    "no metrics": (_drop("metrics"), "one MetricRecord, got 0"),
    "no examples": (_metrics(loss=1.0), "must have the number 'num-examples', got None"),
    "zero examples": (_metrics(**{"num-examples": 0}), "`examples` must be a number > 0, got 0"),
    "nan examples": (_metrics(**{"num-examples": math.nan}), "`examples` must be a number > 0, got nan"),
    "list of examples": (_metrics(**{"num-examples": [1, 2]}), "must have the number 'num-examples', got [1, 2]"),
    "silent": (_drop_all, "no reply in time"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_broken_reply_is_set_aside_and_the_round_goes_on(name, local_grid, tmp_path):
    how, reason = BROKEN[name]
    ours = FedAvg(model=Net, folder=tmp_path, **QUIET)
    result = ours.start(local_grid(plain_app(), 4, breaking(how)), arrays(), 1)
    found = result.arrays.to_torch_state_dict()
    expected = (10 * 1 + 30 * 3 + 40 * 4) / 80 / 10
    before = Net().state_dict()
    for key, tensor in found.items():
        assert tensor.dtype == before[key].dtype
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, before[key] + expected)
        else:
            assert torch.equal(tensor, before[key] + 1)
    (line,) = [json.loads(one) for one in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert len(line["clients"]) == 3
    (aside,) = line["set_aside"]
    assert reason in aside["reason"]
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx((30 * 2 + 40 * 3) / 80)


def test_a_client_that_fails_is_set_aside_with_the_last_line_of_its_traceback(local_grid):
    def train(job):
        if job.client == 1:
            raise ValueError("no data here")
        return Reply(job.load(Net()).state_dict(), 10)

    ours = FedAvg(model=Net(), **QUIET)
    ours.start(local_grid(client_app(train), 3), arrays(), 1)
    assert ours.server.info.clients == (0, 2)


def test_a_node_that_is_gone_is_named_though_flower_answers_for_it(local_grid, tmp_path):
    def train(job):
        return Reply(job.load(Net()).state_dict(), 10)

    grid = local_grid(client_app(train), 4)
    gone = next(n for n, c in grid.nodes.items() if c == 2)
    usual = grid._reply

    def reply(message):
        if message.metadata.dst_node_id != gone or message.metadata.message_type != "train":
            return usual(message)
        message.metadata.__dict__["_message_id"] = "to the one that is gone"
        answer = Message(Error(3, "Node Unavailable"), reply_to=message)
        answer.metadata.__dict__["_src_node_id"] = 1  # the SuperLink's own id
        return answer

    grid._reply = reply
    ours = FedAvg(model=Net, folder=tmp_path, fraction_train=0.75, min_available_nodes=4, identify=True, **QUIET)
    ours.start(grid, arrays(), 3)
    lines = [json.loads(one) for one in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    reasons = [{"client": 2, "reason": "it failed: Node Unavailable"}]
    assert [line["set_aside"] for line in lines] == [
        reasons if 2 in who else [] for kind, who in grid.asked if kind == "train"
    ]
    assert any(line["set_aside"] for line in lines)


@pytest.mark.parametrize("everybody", [_drop_all, BROKEN["nan"][0], BROKEN["shape"][0]], ids=["silent", "nan", "shape"])
def test_too_few_good_replies_end_the_run_with_a_reason(everybody, local_grid, tmp_path):
    def change(client, message):  # noqa: ARG001
        return everybody(message)

    ours = FedAvg(model=Net, folder=tmp_path, **QUIET)
    with pytest.raises(AggregationError, match=r"round 1: 0 usable client updates, at least 1 needed"):
        ours.start(local_grid(plain_app(), 4, change), arrays(), 2)
    assert ours.server.round == 0
    assert not list(tmp_path.iterdir())
    strict = FedAvg(model=Net, min_clients=4, **QUIET)
    with pytest.raises(AggregationError, match="3 usable client updates, at least 4 needed"):
        strict.start(local_grid(plain_app(), 4, breaking(BROKEN["nan"][0])), arrays(), 1)


def test_a_bad_evaluation_reply_is_left_out(local_grid):
    def change(client, message):
        if message.metadata.message_type != "evaluate":
            return message
        spoil = {1: _metrics(accuracy=1.0), 2: _drop("metrics")}.get(client)
        return spoil(message) if spoil else message

    result = FedAvg(model=Net).start(local_grid(plain_app(), 4, change), arrays(), 1)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx(40 * 0.3 / 50)


def test_metrics_of_another_form_do_not_stop_the_round(local_grid):
    odd = _metrics(**{"num-examples": 20, "loss": [1.0, 2.0]})
    result = FedAvg(model=Net, **QUIET).start(local_grid(plain_app(), 4, breaking(odd)), arrays(), 1)
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx((30 * 2 + 40 * 3) / 80)


@pytest.mark.parametrize("made", [FedAvg, FedAvgM, VDistillation, FedBE, OneEnsemble])
def test_one_line_replaces_flowers_own_strategy(made, local_grid):
    """The clients are a user's own; only the strategy's line differs. The answer is that of `fedbe.Server`."""
    names = {"server_epochs": 2, "samples": 2}
    settings = {k: v for k, v in names.items() if k in CATALOGUE[made.method_name].settings()}
    ours = made(model=Net, unlabeled=IMAGES, fraction_train=0.5, min_train_nodes=4, seed=2, **QUIET, **settings)
    assert isinstance(ours, FlowerFedAvg)
    assert isinstance(ours, Strategy)
    grid = local_grid(plain_app(), 4)
    result = ours.start(grid, arrays(), 1)
    server = fedbe.server(made.method_name, Net(), unlabeled=IMAGES, seed=2, **settings)
    state = Net().state_dict()
    updates = [
        fedbe.ClientUpdate(
            {k: v + (i + 1.0) / 10 if v.is_floating_point() else v + 1 for k, v in state.items()}, 10 * (i + 1), node
        )
        for node, i in grid.nodes.items()
    ]
    expected = server.aggregate(state, updates)
    found = result.arrays.to_torch_state_dict()
    assert all(torch.equal(found[k], expected[k]) for k in expected)


@pytest.mark.parametrize("made", [FedProx, Scaffold])
def test_a_method_with_rules_refuses_clients_that_ignore_them(made, local_grid):
    with pytest.raises(
        AggregationError, match=r"it did not follow the rules of \w+: use fedbe.flower.client_app there"
    ):
        made(model=Net, **QUIET).start(local_grid(plain_app(), 3), arrays(), 1)


def test_the_rules_settings_reach_the_clients(local_grid):
    seen = []

    def train(job):
        seen.append((job.order.method.rules, job.round, job.config["epochs"], job.order.seed))
        return Reply(job.load(Net()).state_dict(), 10)

    grid = local_grid(client_app(train), 2)
    FedProx(model=Net, mu=0.25, seed=2**80, **QUIET).start(grid, arrays(), 1, train_config=ConfigRecord({"epochs": 3}))
    assert seen == [((fedbe.Prox(0.25),), 1, 3, 2**80)] * 2


def test_our_clients_serve_flowers_own_strategy_too(local_grid):
    def train(job):
        return job.fit(Net(), IMAGES, torch.arange(24) % 3, fedbe.clients.LocalSettings(epochs=1))

    result = FlowerFedAvg(fraction_evaluate=0.0).start(local_grid(client_app(train), 2), arrays(), 1)
    assert result.train_metrics_clientapp[1]["train-loss"] > 0


def test_who_takes_part_follows_from_the_seed_and_not_from_node_ids(local_grid):
    def cohorts(seed, shift):
        grid = local_grid(client_app(lambda job: Reply(job.load(Net()).state_dict(), 10)), 6)
        grid.nodes = {(n * 31 + shift) % 2**62: c for n, c in grid.nodes.items()}
        grid.contexts = dict(zip(grid.nodes, grid.contexts.values(), strict=True))
        FedAvg(model=Net, fraction_train=0.5, seed=seed, identify=True, **QUIET).start(grid, arrays(), 3)
        return [who for kind, who in grid.asked if kind == "train"]

    assert cohorts(0, 1) == cohorts(0, 12345)
    assert cohorts(0, 1) != cohorts(1, 1)
    assert len({tuple(c) for c in cohorts(0, 1)}) > 1


def test_what_it_waits_for_is_in_its_folder_and_it_goes_on_when_nodes_are_there(local_grid, tmp_path, monkeypatch):
    grid = local_grid(plain_app(), 4)
    everybody, online, told = list(grid.nodes), [2, 2, 3, 4], []
    monkeypatch.setattr(grid, "get_node_ids", lambda: everybody[: online.pop(0) if online else 4])

    def sleep(_):
        told.append(json.loads((tmp_path / "run" / "nodes.json").read_text()))

    monkeypatch.setattr("fedbe.flower.nodes.time.sleep", sleep)
    strategy = FedAvg(Net, min_available_nodes=4, folder=tmp_path / "run", **QUIET)
    strategy.start(grid, arrays(), num_rounds=1)
    assert told == [{"online": n, "needed": 4} for n in (2, 2, 3)]
    assert json.loads((tmp_path / "run" / "nodes.json").read_text()) == {"online": 4, "needed": 4}
    assert grid.asked == [("train", [0, 1, 2, 3])]
    FedAvg(Net, folder=tmp_path / "other", **QUIET).start(grid, arrays(), num_rounds=1)
    assert not (tmp_path / "other" / "nodes.json").exists()  # there was nothing to wait for


def test_nodes_that_do_not_say_who_they_are_take_part_all_the_same(local_grid):
    grid = local_grid(plain_app(), 4)
    FedAvg(model=Net, fraction_train=0.5, identify=True, **QUIET).start(grid, arrays(), 2)
    assert [kind for kind, _ in grid.asked] == ["query.fedbe", "train", "train"]


def test_two_clients_under_one_id_are_both_set_aside(local_grid):
    def train(job):
        own = job.context.node_config["partition-id"]
        state = {k: v + own if v.is_floating_point() else v for k, v in job.load(Net()).state_dict().items()}
        return Reply(state, 10)

    grid = local_grid(client_app(train), 4)
    next(iter(grid.contexts.values())).node_config["client-id"] = 3
    ours = FedAvg(model=Net, **QUIET)
    ours.start(grid, arrays(), 1)
    assert ours.server.info.clients == (1, 2)


def test_wrong_use_is_said_at_once(local_grid):
    grid = local_grid(plain_app(), 4)
    with pytest.raises(SettingError, match="give `unlabeled`"):
        FedBE(model=Net)
    with pytest.raises(SettingError, match="FedAvg has no setting 'fraction_trian'"):
        FedAvg(model=Net, fraction_trian=0.5)
    with pytest.raises(StateError, match=r"the global model does not fit the model: it lacks '1\.weight'"):
        FedAvg(model=Net, **QUIET).start(grid, ArrayRecord(nn.Sequential(nn.Linear(4, 8)).state_dict()), 1)
    with pytest.raises(SettingError, match="1-Ensemble is defined for one round"):
        OneEnsemble(model=Net).start(grid, arrays(), 2)
    with pytest.raises(RunError, match="give the strategy a `folder`"):
        resume(FedAvg(model=Net), grid, arrays(), 1)


def test_a_folder_belongs_to_one_run(local_grid, tmp_path):
    grid = local_grid(plain_app(), 4)
    FedAvg(model=Net, folder=tmp_path, **QUIET).start(grid, arrays(), 1)
    with pytest.raises(RunError, match=r"holds another run: go on with fedbe\.flower\.resume"):
        FedAvg(model=Net, folder=tmp_path, **QUIET).start(grid, arrays(), 1)
    with pytest.raises(RunError, match="its seed was 0 and is now 1"):
        resume(FedAvg(model=Net, folder=tmp_path, seed=1, **QUIET), grid, arrays(), 2)
    with pytest.raises(RunError, match="its method was fedavg and is now fedavgm"):
        resume(FedAvgM(model=Net, folder=tmp_path, **QUIET), grid, arrays(), 2)


def test_resuming_counts_on_and_drops_a_line_that_no_checkpoint_holds(local_grid, tmp_path):
    seen = []
    grid = local_grid(plain_app(), 4)
    FedAvg(model=Net, folder=tmp_path, **QUIET).start(grid, arrays(), 2)
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3}\n{"rou')
    resume(FedAvg(model=Net, folder=tmp_path, **QUIET), grid, arrays(), 4, evaluate_fn=lambda r, _: seen.append(r))
    lines = [json.loads(one) for one in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [one["round"] for one in lines] == [1, 2, 3, 4]
    assert seen == [2, 3, 4]
    assert (tmp_path / "model.safetensors").exists()


def test_a_replys_arrays_are_let_go_as_soon_as_they_are_read(local_grid):
    sizes = []

    class Watched(ArrayRecord):
        def clear(self):
            sizes.append([len(r) for r in records])
            super().clear()

    records = []

    def change(_, message):
        record = Watched(dict(message.content["arrays"]))
        message.content["arrays"] = record
        records.append(record)
        return message

    FedAvg(model=Net, **QUIET).start(local_grid(plain_app(), 3, change), arrays(), 1)
    full = len(Net().state_dict())
    assert sizes == [[full, full, full], [0, full, full], [0, 0, full]]
    assert [len(r) for r in records] == [0, 0, 0]


def test_clients_may_have_names_and_are_remembered_by_them(local_grid, tmp_path):
    def train(job):
        return job.fit(Net(), IMAGES, torch.arange(24) % 3, fedbe.clients.LocalSettings(epochs=1))

    def grid():
        made = local_grid(client_app(train), 3)
        for context, name in zip(made.contexts.values(), ("ward/1", "ward/2", 7), strict=True):
            context.node_config["client-id"] = name
        return made

    Scaffold(model=Net, folder=tmp_path / "a", **QUIET).start(grid(), arrays(), 2)
    Scaffold(model=Net, folder=tmp_path / "b", **QUIET).start(grid(), arrays(), 1)
    ours = Scaffold(model=Net, folder=tmp_path / "b", **QUIET)
    resume(ours, grid(), arrays(), 2)
    assert set(ours.nodes.memories) == {"ward/1", "ward/2", 7}
    names = ("model.safetensors", "checkpoint-000002.safetensors")
    assert all((tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names)
