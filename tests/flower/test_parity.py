"""The same federation in our simulator and in Flower gives the same model to the last bit, for every method."""

import pytest
import torch

from fedbe.algorithms.methods import METHODS
from fedbe.core.compute import one_thread
from fedbe.errors import RunError
from fedbe.experiment import checkpoint, loop, run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.federation import initial_weights, prepare
from fedbe.experiment.recipe_files import load_recipe
from fedbe.experiment.simulation import Simulation
from fedbe.flower import client_app, resume, strategy, to_record

pytestmark = pytest.mark.slow

SMALL = (
    "training.rounds=3",
    "training.epochs=2",
    "training.one_round_epochs=3",
    "split.clients=4",
    "training.clients_per_round=3",
    "model.hidden=[16]",
    "settings.distill_epochs=2",
    "settings.num_samples=3",
    "settings.distill_until=0.6",  # in rounds 1 and 2 of 3: the server must know the number of rounds
)
SEED = 5
# With convolutions the server computes the parts of a batch in threads; with BatchNorm it learns from whole batches.
CONVNET = ("model.name=convnet", "model.hidden=", "model.padding=1", "model.widths=[4, 8, 8]", "variant=auto")
RESNET = ("model.name=resnet20", "model.hidden=", "training.rounds=1", "training.epochs=1", "settings.distill_until=1")


@pytest.fixture(scope="module")
def recipe(request):
    return load_recipe("digits", (*SMALL, *getattr(request, "param", ())))


@pytest.fixture(scope="module")
def federation(recipe):
    return prepare(recipe, SEED)


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(1) as workers:
        yield workers


@pytest.fixture(scope="module")
def simulated(recipe, pool, tmp_path_factory):
    """simulated(method): the last checkpoint of our simulator; each method once."""
    known = {}

    def play(method):
        if method not in known:
            folder = run_folder.create(tmp_path_factory.mktemp("runs") / "run", recipe, method, SEED, "float32")
            assert loop.execute(folder, pool, Callback())
            known[method] = checkpoint.latest(folder)
        return known[method]

    return play


@pytest.fixture
def flower(recipe, federation, local_grid, tmp_path):
    """flower(method): a strategy and a grid of clients for the same federation."""

    def make(method, change=lambda _, message: message, **arguments):
        chosen = recipe.method_for(method)
        module = initial_weights(federation.model, SEED)
        sim = Simulation(recipe, chosen, SEED, federation, None, None)

        def train(request):
            index = federation.clients[request.client_id]
            settings = sim.local_settings(request.round, request.client_id)
            inputs, labels = federation.train.select(index), federation.labels[index]
            with one_thread():  # as in the simulator's workers
                return request.fit(initial_weights(federation.model, 99), inputs, labels, settings)

        ours = strategy(
            method,
            module,
            unlabeled=federation.server,
            labels=federation.server_labels,
            seed=SEED,
            fraction_evaluate=0.0,
            identify=True,
            folder=tmp_path / "flower",
            total_clients=4,
            **{"fraction_train": 0.75, **chosen.settings(), **arguments},
        )
        return ours, local_grid(client_app(train), 4, change), to_record(module.state_dict()), sim.rounds

    return make


def same(a, b):
    return torch.equal(a.params, b.params) and torch.equal(a.buffers, b.buffers)


@pytest.mark.parametrize("method", METHODS)
def test_flower_equals_the_simulator(method, simulated, flower, tmp_path, recipe, federation):
    expected = simulated(method)
    ours, grid, arrays, rounds = flower(method)
    result = ours.start(grid, arrays, rounds)
    saved = checkpoint.latest(tmp_path / "flower")
    layout = ours.server.runner.layout
    assert same(layout.pack(result.arrays.to_torch_state_dict()), expected.model)
    assert (saved.round, same(saved.model, expected.model)) == (rounds, True)
    assert {n: t.tolist() for n, t in saved.memory.items()} == {n: t.tolist() for n, t in expected.memory.items()}
    assert saved.clients.keys() == expected.clients.keys()
    for client, memory in expected.clients.items():
        assert {n: t.tolist() for n, t in saved.clients[client].items()} == {n: t.tolist() for n, t in memory.items()}
    assert [m.name for m in saved.members] == [m.name for m in expected.members]
    assert all(same(a.state, b.state) for a, b in zip(saved.members, expected.members, strict=True))
    sim = Simulation(recipe, ours.method, SEED, federation, None, None)
    assert [who for kind, who in grid.asked if kind == "train"] == [sim.cohort(r + 1) for r in range(rounds)]


@pytest.mark.parametrize("recipe", [CONVNET, RESNET], ids=["convnet", "resnet"], indirect=True)
def test_convolutions_equal_the_simulators(recipe, simulated, flower):  # noqa: ARG001 (both use it)
    expected = simulated("fedbe").model  # also sets the server's threads: with BatchNorm the bits depend on them
    ours, grid, arrays, rounds = flower("fedbe")
    result = ours.start(grid, arrays, rounds)
    assert same(ours.server.runner.layout.pack(result.arrays.to_torch_state_dict()), expected)


@pytest.mark.parametrize("method", [m for m in METHODS if not METHODS[m].one_round])
def test_a_stopped_federation_resumes_with_new_nodes_and_ends_the_same(method, simulated, flower):
    """It crashes after each round: the strategy and the node contexts are new, only the folder is kept."""

    for last in (1, 2, 3):
        ours, grid, arrays, _ = flower(method)

        def crash(number, _, last=last):
            if number == last < 3:
                raise KeyboardInterrupt

        if last < 3:
            with pytest.raises(KeyboardInterrupt):
                resume(ours, grid, arrays, 3, evaluate_fn=crash)
        else:
            result = resume(ours, grid, arrays, 3)
    assert list(result.train_metrics_clientapp) == [3]
    layout = ours.server.runner.layout
    assert same(layout.pack(result.arrays.to_torch_state_dict()), simulated(method).model)
    again = resume(flower(method)[0], grid, arrays, 3)  # no round is left
    assert same(layout.pack(again.arrays.to_torch_state_dict()), simulated(method).model)


def test_another_number_of_rounds_is_refused_where_settings_depend_on_it(flower):
    ours, grid, arrays, _ = flower("fedbe")
    resume(ours, grid, arrays, 1)
    with pytest.raises(RunError, match="number of rounds"):
        resume(flower("fedbe")[0], grid, arrays, 3)


def test_other_methods_can_be_given_more_rounds(flower):
    ours, grid, arrays, _ = flower("fedavg")
    resume(ours, grid, arrays, 1)
    assert list(resume(flower("fedavg")[0], grid, arrays, 2).train_metrics_clientapp) == [2]


@pytest.mark.parametrize("method", ["scaffold", "fedbe+scaffold"])
def test_a_client_whose_reply_is_lost_continues_from_the_servers_memory(method, flower):
    """The client has updated its control variate, but the server has not received it: the server's copy is used."""
    lost = []

    def lose(client, message):
        if message.metadata.message_type == "train" and client == 2 and not lost:
            lost.append(client)
            return None
        return message

    ours, grid, arrays, rounds = flower(method, lose, fraction_train=1.0)
    ours.start(grid, arrays, rounds)
    total = torch.stack([m["control"] for m in ours.nodes.memories.values()]).sum(0) / 4
    assert lost == [2]
    torch.testing.assert_close(ours.server.memory["control"], total, rtol=0, atol=1e-6)
    for node, client in grid.nodes.items():
        kept = grid.contexts[node].state.array_records["fedbe.memory"].to_torch_state_dict()["control"]
        assert torch.equal(kept, ours.nodes.memories[client]["control"])
