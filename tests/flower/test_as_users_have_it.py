"""Flower as its users have it: their own networks and clients, Flower's mods and wrappers, their own loops."""

import ast
import importlib
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow.default_workflows import default_init_params_workflow
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import nn
from torch.nn import functional

import fedbe.flower
from fedbe.errors import AggregationError, RunError, SettingError, StateError
from fedbe.experiment import checkpoint
from fedbe.flower import FedAvg, FedAvgM, FedBE, FedProx, Scaffold, client_app, resume

CLIENTS, CLASSES = 4, 3
QUIET = {"fraction_evaluate": 0.0}
SMALL = {"distill_epochs": 2, "num_samples": 2}


class Net(nn.Module):
    """Convolution, pooling and `x.view`, as in the networks of tutorials."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8 * 9, CLASSES)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.conv(x)), 2)
        return self.head(x.view(-1, 8 * 9))


class NormNet(Net):
    """With BatchNorm, whose statistics and counters travel with the weights."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.norm(self.conv(x))), 2)
        return self.head(x.view(-1, 8 * 9))


def images(count, seed):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    return torch.randn(count, 3, 8, 8, generator=draw) + 2.0 * (labels - 1)[:, None, None, None], labels


def train_locally(net, client, lr=0.1):
    inputs, labels = images(24, client)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(10):
        optimizer.zero_grad()
        functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()


def own_app(net=Net, mods=()):
    """A ClientApp that knows nothing of fedbe: plain torch in, plain records out."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        model = net()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train_locally(model, context.node_config["partition-id"])
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 24})}
        return Message(RecordDict(content), reply_to=message)

    return app


def listing_app(mods=(), net=Net):
    """The same with plain lists of arrays."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        model = net()
        values = message.content["arrays"].to_numpy_ndarrays()
        model.load_state_dict({k: torch.tensor(v) for k, v in zip(model.state_dict(), values, strict=True)})
        train_locally(model, context.node_config["partition-id"])
        arrays = ArrayRecord([v.numpy() for v in model.state_dict().values()])
        return Message(RecordDict({"arrays": arrays, "m": MetricRecord({"num-examples": 24})}), reply_to=message)

    return app


def start(net=Net):
    return ArrayRecord(net().state_dict())


def accuracy(arrays, net=Net):
    model = net()
    model.load_state_dict(arrays.to_torch_state_dict())
    inputs, labels = images(60, 99)
    return float((model.eval()(inputs).argmax(1) == labels).float().mean())


def same(ours, theirs):
    return all(np.allclose(a, b, atol=1e-5) for a, b in zip(ours.values(), theirs.values(), strict=True))


def values(record):
    return {name: array.numpy() for name, array in record.items()}


@pytest.mark.parametrize("net", [Net, NormNet])
def test_a_network_with_view_needs_one_changed_line(net, local_grid):
    grid = local_grid(own_app(net), CLIENTS)
    ours = FedBE(model=net, unlabeled=images(30, 50)[0], **QUIET, **SMALL)
    result = ours.start(grid, start(net), 4)
    assert accuracy(start(net), net) < 0.6 < 0.9 < accuracy(result.arrays, net)
    assert not ours.server.runner.channels_last


def test_a_train_message_has_one_config_record_and_the_users_settings(local_grid):
    seen = []

    def train(request):
        seen.append(dict(request.config))
        return request.fit(Net(), *images(24, request.client_id), fedbe.LocalSettings(epochs=1))

    grid = local_grid(client_app(train), 2)
    usual = grid.deliver

    def deliver(message):
        assert list(message.content.config_records) == ["config"]
        assert len(message.content.array_records) == 1
        return usual(message)

    grid.deliver = deliver
    config = ConfigRecord({"lr": 0.5})
    FedProx(model=Net, **QUIET).start(grid, start(), 1, train_config=config)
    assert seen == [{"lr": 0.5, "server-round": 1}] * 2
    assert dict(config) == {"lr": 0.5, "server-round": 1}  # no key of ours in the user's record


WRAPPERS = {
    "client fixed": (DifferentialPrivacyClientSideFixedClipping, fixedclipping_mod, {"clipping_norm": 0.2}),
    "client adaptive": (DifferentialPrivacyClientSideAdaptiveClipping, adaptiveclipping_mod, {}),
    "server fixed": (DifferentialPrivacyServerSideFixedClipping, None, {"clipping_norm": 0.2}),
    "server adaptive": (DifferentialPrivacyServerSideAdaptiveClipping, None, {}),
}


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("net", [Net, NormNet])
def test_flowers_privacy_wrappers_work_with_fedavg_as_with_flowers_own(kind, net, local_grid):
    """With noise 0, the result is that of Flower's FedAvg under the same wrapper and mod."""
    wrapper, mod, options = WRAPPERS[kind]
    results = []
    for strategy in (FlowerFedAvg(**QUIET), FedAvg(model=net, **QUIET)):
        grid = local_grid(own_app(net, [mod] if mod else []), CLIENTS)
        wrapped = wrapper(strategy, noise_multiplier=0.0, num_sampled_clients=CLIENTS, **options)
        arrays = values(wrapped.start(grid, start(net), 3).arrays)
        results.append(
            {name: array for name, array in arrays.items() if "num_batches" not in name}
        )  # Flower averages it
    theirs, ours = results
    assert same(ours, theirs)
    assert not np.allclose(ours["head.weight"], values(start(net))["head.weight"])


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_privacy_wrapper_is_refused_where_its_promise_does_not_hold(kind, local_grid):
    wrapper, mod, options = WRAPPERS[kind]
    robust = FedAvg(model=Net, robust="median", **QUIET)  # one client can move a median further than a mean
    for strategy in (FedBE(model=Net, unlabeled=images(30, 50)[0], **QUIET), FedAvgM(model=Net, **QUIET), robust):
        wrapped = wrapper(strategy, noise_multiplier=0.1, num_sampled_clients=CLIENTS, **options)
        with pytest.raises(SettingError, match=r"calibrated for the mean of clipped updates.*LocalDpMod"):
            wrapped.start(local_grid(own_app(mods=[mod] if mod else []), CLIENTS), start(), 1)


def test_local_privacy_at_the_clients_composes_with_every_method(local_grid):
    """What the server computes from noisy updates is as private as they are."""
    noisy = LocalDpMod(clipping_norm=1.0, sensitivity=1e-3, epsilon=1.0, delta=1e-5)
    ours = FedBE(model=Net, unlabeled=images(30, 50)[0], **QUIET, **SMALL)
    result = ours.start(local_grid(own_app(mods=[noisy]), CLIENTS), start(), 4)
    assert len(ours.server.info.clients) == CLIENTS
    assert accuracy(result.arrays) > 0.8


def test_secure_aggregation_is_refused(local_grid):
    grid = local_grid(own_app(), CLIENTS)
    ours = FedBE(model=Net, unlabeled=images(30, 50)[0], **QUIET)
    context = Context(1, 1, {}, RecordDict(), {})
    with pytest.raises(SettingError, match="secure aggregation shows it only their sum"):
        default_init_params_workflow(grid, LegacyContext(context, ServerConfig(num_rounds=1), ours))
    with pytest.raises(AggregationError, match="0 usable client updates"):
        ours.start(local_grid(own_app(mods=[secaggplus_mod]), CLIENTS), start(), 1)


class OwnLoop(FedBE):
    """A subclass with its own `start`, as for saving the best model or early stopping."""

    def start(self, grid, initial_arrays, num_rounds=3, **_):
        arrays = initial_arrays
        for number in range(1, num_rounds + 1):
            sent = self.configure_train(number, arrays, ConfigRecord(), grid)
            arrays, _ = self.aggregate_train(number, grid.send_and_receive(sent))
        return arrays


def test_a_subclass_with_its_own_loop_must_know_the_rounds_and_writes_its_folder(local_grid, tmp_path):
    def made(**arguments):
        return OwnLoop(model=Net, unlabeled=images(30, 50)[0], distill_until=0.5, **QUIET, **SMALL, **arguments)

    grid = local_grid(own_app(), CLIENTS)
    with pytest.raises(SettingError, match="give the strategy `rounds`"):
        made().start(grid, start(), 2)
    ours = made(rounds=4, folder=tmp_path / "run")
    assert accuracy(ours.start(grid, start(), 4)) > 0.9
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert ["distill" in line["seconds"] for line in lines] == [True, True, False, False]
    assert checkpoint.latest(tmp_path / "run").round == 4
    with pytest.raises(RunError, match="another process"):  # the lock is held as long as the strategy lives
        made(rounds=4, folder=tmp_path / "run").start(grid, start(), 4)


def configured_app(seen):
    """As Flower's advanced example: the step size comes with the message, and the client keeps a head of its own."""
    app = ClientApp()

    def load(message, context):
        model = Net()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        if "head" in context.state:
            model.head.load_state_dict(context.state["head"].to_torch_state_dict())
        return model

    @app.train()
    def train(message, context):
        seen.append((message.content["config"]["server-round"], message.content["config"]["lr"]))
        model = load(message, context)
        train_locally(model, context.node_config["partition-id"], message.content["config"]["lr"])
        context.state["head"] = ArrayRecord(model.head.state_dict())
        metrics = MetricRecord({"train_loss": 1.0, "num-examples": 24})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        inputs, labels = images(30, 200 + context.node_config["partition-id"])
        right = float((load(message, context).eval()(inputs).argmax(1) == labels).float().mean())
        content = RecordDict({"metrics": MetricRecord({"eval_acc": right, "num-examples": 30})})
        return Message(content=content, reply_to=message)

    return app


def test_a_client_that_reads_its_step_size_from_the_message(local_grid):
    """As Flower's quickstart: `msg.content["config"]["lr"]`, evaluation at clients and at the server."""
    seen = []
    ours = FedBE(model=Net, unlabeled=images(30, 50)[0], fraction_evaluate=0.5, **SMALL)
    result = ours.start(
        grid=local_grid(configured_app(seen), CLIENTS),
        initial_arrays=start(),
        train_config=ConfigRecord({"lr": 0.1}),
        num_rounds=3,
        evaluate_fn=lambda _, arrays: MetricRecord({"accuracy": accuracy(arrays)}),
    )
    assert ours.server.info.set_aside == ()
    assert seen == [(r, 0.1) for r in (1, 2, 3) for _ in range(CLIENTS)]
    assert list(result.train_metrics_clientapp) == list(result.evaluate_metrics_clientapp) == [1, 2, 3]
    assert result.evaluate_metrics_clientapp[3]["eval_acc"] > 0.9
    assert result.evaluate_metrics_serverapp[0]["accuracy"] < 0.6 < result.evaluate_metrics_serverapp[3]["accuracy"]


class Scheduled(FedBE):
    """As Flower's advanced example: its own loop, which keeps the best model, and a step size that falls."""

    def configure_train(self, server_round, arrays, config, grid):
        if server_round == 2:
            config["lr"] *= 0.5
        return super().configure_train(server_round, arrays, config, grid)

    def start(self, grid, initial_arrays, num_rounds, train_config, evaluate_fn):
        self.summary()
        arrays, self.best, self.client_metrics = initial_arrays, 0.0, []
        for number in range(1, num_rounds + 1):
            replies = grid.send_and_receive(self.configure_train(number, arrays, train_config, grid), timeout=60)
            new, trained = self.aggregate_train(number, replies)
            arrays = arrays if new is None else new
            asked = grid.send_and_receive(self.configure_evaluate(number, arrays, ConfigRecord(), grid), timeout=60)
            self.client_metrics.append((trained, self.aggregate_evaluate(number, asked)))
            self.best = max(self.best, evaluate_fn(number, arrays)["accuracy"])
        return arrays


def test_a_subclass_changes_the_step_size_between_rounds(local_grid):
    seen = []
    ours = Scheduled(model=Net, unlabeled=images(30, 50)[0], fraction_train=0.5, fraction_evaluate=0.5, **SMALL)
    grid = local_grid(configured_app(seen), CLIENTS)
    ours.start(grid, start(), 3, ConfigRecord({"lr": 0.1}), lambda _, a: MetricRecord({"accuracy": accuracy(a)}))
    assert seen == [(1, 0.1)] * 2 + [(2, 0.05)] * 2 + [(3, 0.05)] * 2
    assert ours.best > 0.9
    assert all(trained["train_loss"] == 1.0 and tested["eval_acc"] > 0.5 for trained, tested in ours.client_metrics)


def test_a_list_of_arrays_is_as_good_as_named_ones(local_grid):
    named = FedAvg(model=Net, **QUIET).start(local_grid(own_app(), CLIENTS), start(), 2)
    listed = ArrayRecord([v.numpy() for v in Net().state_dict().values()])
    result = FedAvg(model=Net, **QUIET).start(local_grid(listing_app(), CLIENTS), listed, 2)
    assert list(result.arrays) == ["0", "1", "2", "3"]
    assert same(values(result.arrays), values(named.arrays))
    wrapped = DifferentialPrivacyClientSideFixedClipping(FedAvg(model=Net, **QUIET), 0.0, 5.0, CLIENTS)
    clipped = wrapped.start(local_grid(listing_app([fixedclipping_mod]), CLIENTS), listed, 2)
    assert same(values(clipped.arrays), values(named.arrays))  # the mod wants the names that were sent
    ours = fedbe.flower.from_record(listed, Net())
    assert torch.equal(ours["head.bias"], Net().head.bias)


def test_flowers_own_log_lines_are_there(local_grid, caplog):
    def fail(client, message):
        if client == 1:
            raise RuntimeError("broken client")
        return message

    app = own_app()

    @app.evaluate()
    def evaluate(message, context):
        fail(context.node_config["partition-id"], message)
        return Message(RecordDict({"m": MetricRecord({"num-examples": 1, "acc": 0.5})}), reply_to=message)

    with caplog.at_level(logging.INFO, "flwr"):
        FedAvg(model=Net, fraction_train=0.75).start(local_grid(app, CLIENTS), start(), 1)
    for line in (
        "configure_train: Sampled 3 nodes (out of 4)",
        "aggregate_train: Received 3 results and 0 failures",
        "configure_evaluate: Sampled 4 nodes (out of 4)",
        "aggregate_evaluate: Received 3 results and 1 failures",
    ):
        assert line in caplog.text


def test_an_unknown_argument_is_compared_with_all_arguments():
    with pytest.raises(SettingError, match=r"the strategy FedAvg has no setting 'fraction_trian': .*'fraction_train'"):
        FedAvg(model=Net, fraction_trian=0.5)
    with pytest.raises(SettingError, match="did you mean 'num_samples'"):
        FedBE(model=Net, nun_samples=5)
    with pytest.raises(SettingError, match=r"choose one of: fraction_train.*min_clients"):
        FedAvg(model=Net, zzz=5)


def test_a_checkpoint_whose_memory_does_not_fit_is_refused(local_grid, tmp_path):
    def train(request):
        return request.fit(Net(), *images(24, request.client_id), fedbe.LocalSettings(epochs=1))

    grid = local_grid(client_app(train), 3)
    ours = Scaffold(model=Net, folder=tmp_path, **QUIET)
    resume(ours, grid, start(), 1)
    state = checkpoint.latest(tmp_path)
    broken = {"control": torch.full_like(state.memory["control"], float("nan"))}
    with pytest.raises(StateError, match="NaN or infinite"):
        ours.restore(type(state)(state.round, state.model, broken, state.clients))
    assert ours.server.round == 1


def test_only_public_names_of_flower_are_imported():
    """A private name may be gone in the next version. Public are these modules, and what their `__all__` lists."""
    public = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}
    folder = Path(fedbe.flower.__file__).parent
    apps = Path(__file__).parents[2] / "examples" / "flower" / "digits_app"
    for path in (*folder.glob("*.py"), *apps.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            plain = (
                [a.name for a in node.names if a.name.split(".")[0] == "flwr"] if isinstance(node, ast.Import) else []
            )
            assert not plain, f"{path.name} imports {plain}: import names from {sorted(public)}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
                assert node.module in public, f"{path.name} imports from {node.module}, which is not public"
                listed = importlib.import_module(node.module).__all__
                missing = [a.name for a in node.names if a.name not in listed]
                assert not missing, f"{path.name} imports {missing} from {node.module}, which does not list them"


class Adapted(Net):
    """The convolution is a backbone that nobody trains."""

    def __init__(self):
        super().__init__()
        self.conv.requires_grad_(False)


@pytest.mark.parametrize("as_list", [False, True], ids=["names", "list"])
def test_a_frozen_backbone_with_clients_that_load_and_send_complete_states(as_list, local_grid, tmp_path):
    """Clients get what the server was given, so `load_state_dict` stays strict; also after a resume."""
    state = Adapted().state_dict()
    first = ArrayRecord([v.numpy() for v in state.values()] if as_list else state)
    app = listing_app(net=Adapted) if as_list else own_app(Adapted)
    options = {"unlabeled": images(12, 9)[0], "folder": tmp_path / "run", **SMALL, **QUIET}
    for rounds in (1, 2):
        strategy = FedBE(model=Adapted, **options)
        result = resume(strategy, local_grid(app, CLIENTS), first, rounds)
        assert (strategy.server.round, strategy.server.info.set_aside) == (rounds, ())
    values = result.arrays.to_numpy_ndarrays()
    final = {name: torch.tensor(value) for name, value in zip(state, values, strict=True)}
    assert torch.equal(final["conv.weight"], state["conv.weight"])
    assert not torch.equal(final["head.weight"], state["head.weight"])
    model = Adapted()
    model.load_state_dict(final)
    inputs, labels = images(60, 77)
    assert float((model(inputs).argmax(1) == labels).double().mean()) > 0.6


def test_adapters_alone_travel_between_clients_that_load_them_without_the_rest(local_grid):
    """LoRA as Flower's users have it: `strict=False`, and only what is trained in the records."""
    app, sent = ClientApp(), []

    @app.train()
    def train(message, context):
        model = Adapted()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
        train_locally(model, context.node_config["partition-id"])
        sent.append(set(message.content["arrays"]))
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        content = {"arrays": ArrayRecord(trained), "metrics": MetricRecord({"num-examples": 24})}
        return Message(RecordDict(content), reply_to=message)

    trained = {name: p.detach() for name, p in Adapted().named_parameters() if p.requires_grad}
    strategy = FedBE(model=Adapted, unlabeled=images(12, 9)[0], **SMALL, **QUIET)
    result = strategy.start(local_grid(app, CLIENTS), ArrayRecord(trained), 2)
    assert strategy.server.info.set_aside == ()
    assert set(map(frozenset, sent)) == {frozenset({"head.weight", "head.bias"})} == {frozenset(result.arrays)}
