"""The public door: what people with their own training loop meet."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedbe
from fedbe import ClientUpdate, FedAvg, FedAvgM, FedBE, FedProx, OneEnsemble, Plan, Scaffold, VDistillation
from fedbe.core.inputs import TensorInputs
from fedbe.errors import AggregationError, ModelError, SettingError

QUICK = {"variant": "paper", "distill_epochs": 2, "distill_batch_size": 8, "num_samples": 2}


def _round(server, module, updates):
    return server.aggregate(module.state_dict(), updates)


class TestMethods:
    def test_fedavg_is_the_weighted_average(self, network, replies):
        module = network("conv-gn")
        given = replies(module)
        state = _round(FedAvg(module), module, given)
        for key in state:
            expected = sum(u.num_examples * u.state[key].double() for u in given) / 70
            torch.testing.assert_close(state[key].double(), expected, rtol=1e-5, atol=1e-6)

    def test_fedprox_s_server_is_fedavg_s(self, network, replies, same):
        module = network("mlp-bn")
        assert same(_round(FedProx(module), module, replies(module)), _round(FedAvg(module), module, replies(module)))

    def test_fedavgm_without_momentum_is_fedavg(self, network, replies, same):
        module = network("mlp-bn")
        plain, still, moving = FedAvg(module), FedAvgM(module, beta=0.0), FedAvgM(module, beta=0.9)
        state = module.state_dict()
        for _ in range(2):
            expected = plain.aggregate(state, replies(module))
            assert same(still.aggregate(state, replies(module)), expected)
            moved = moving.aggregate(state, replies(module))
            state = expected
        assert not same(moved, expected)

    def test_scaffold_s_first_round_is_fedavg(self, network, replies, same):
        module = network("mlp-bn")
        server = Scaffold(module, total_clients=10)
        assert server.broadcast == {}
        given = replies(module)
        assert same(_round(server, module, given), _round(FedAvg(module), module, given))
        names = dict(module.named_parameters())
        assert list(server.broadcast["control"]) == list(names)
        total = sum(u.extras["control"] for u in given) / 10
        flat = torch.cat([t.reshape(-1) for t in server.broadcast["control"].values()])
        torch.testing.assert_close(flat, total)
        server.broadcast["control"]["0.weight"].zero_()
        assert server.memory["control"].count_nonzero() == total.count_nonzero()

    def test_scaffold_takes_named_control_variates(self, network, replies, same):
        module = network("mlp-bn")
        packed, named = Scaffold(module), Scaffold(module)
        given = replies(module)
        layout = packed.runner.layout
        by_name = [
            ClientUpdate(u.state, u.num_examples, u.client_id, {"control": layout.unpack_params(u.extras["control"])})
            for u in given
        ]
        assert same(_round(packed, module, given), _round(named, module, by_name))
        assert torch.equal(packed.memory["control"], named.memory["control"])

    def test_one_ensemble_predicts_the_mean_of_the_clients(self, network, replies, inputs_for, nearby):
        module = network("mlp-bn")
        server = OneEnsemble(module)
        state = _round(server, module, replies(module))
        inputs = inputs_for("mlp-bn", 9)
        single = []
        for client in nearby(module):
            module.load_state_dict(client)
            with torch.no_grad():
                single.append(module.eval()(inputs).softmax(1))
        torch.testing.assert_close(server.predict_proba(state, inputs), sum(single) / 3)

    def test_predict_of_other_methods_is_the_model_s(self, network, replies, inputs_for):
        module = network("mlp-bn")
        server = FedAvg(module)
        state = _round(server, module, replies(module))
        inputs = inputs_for("mlp-bn", 9)
        module.load_state_dict(state)
        with torch.no_grad():
            expected = module.eval()(inputs).softmax(1)
        torch.testing.assert_close(server.predict_proba(state, inputs), expected)
        torch.testing.assert_close(server.predict_proba(state, TensorDataset(inputs)), expected)

    @pytest.mark.parametrize(
        ("made", "name"),
        [
            (FedAvg, "fedavg"), (FedAvgM, "fedavgm"), (FedProx, "fedprox"), (Scaffold, "scaffold"),
            (VDistillation, "v-distillation"), (OneEnsemble, "1-ensemble"), (FedBE, "fedbe"),
        ],
    )  # fmt: skip
    def test_classes_are_names(self, network, inputs_for, replies, same, made, name):
        module, inputs = network("mlp"), inputs_for("mlp")
        settings = QUICK if made in (FedBE, VDistillation) else {}
        one = made(module, unlabeled=inputs, **settings)
        two = fedbe.server(name, module, unlabeled=inputs, **settings)
        assert one.method == two.method
        assert same(_round(one, module, replies(module)), _round(two, module, replies(module)))

    def test_combinations_by_name(self, network, inputs_for, replies):
        module = network("mlp-bn")
        server = fedbe.server("fedbe+fedavgm", module, unlabeled=inputs_for("mlp-bn"), beta=0.5, **QUICK)
        _round(server, module, replies(module))
        assert server.memory["momentum"].count_nonzero() > 0
        assert server.method.settings()["beta"] == 0.5

    def test_momentum_comes_before_distillation(self, network, inputs_for, replies):
        """Member A, and the student's start, is the draft with momentum, not the bare average."""
        module, inputs = network("mlp"), inputs_for("mlp")
        labels = torch.arange(24) % 3
        server = fedbe.server("fedbe+fedavgm", module, unlabeled=inputs, labels=labels, members="A", **QUICK)
        server.memory = {"momentum": torch.full((server.runner.layout.size,), 0.5)}
        _round(server, module, replies(module))
        moved = FedAvgM(module)
        moved.memory = {"momentum": torch.full((server.runner.layout.size,), 0.5)}
        state = _round(moved, module, replies(module))
        accuracy = (moved.predict_proba(state, inputs).argmax(1) == labels).double().mean()
        assert server.info.step.average.accuracy == pytest.approx(float(accuracy))

    def test_unknown_names(self, network):
        with pytest.raises(SettingError, match="unknown method 'fedbe-fedavgm'"):
            fedbe.server("fedbe-fedavgm", network("mlp"))
        with pytest.raises(SettingError, match="did you mean 'beta'"):
            FedAvgM(network("mlp"), betta=0.9)


class Odd(nn.Module):
    """Tied weights, a frozen layer, LayerNorm, an integer and a boolean buffer, an unused parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("on", torch.tensor([True, False]))

    def forward(self, x):
        return self.head(self.norm(self.frozen(self.second(self.first(x)))))


def _moved(module, by):
    """A client state that moved everything trainable, tied names together."""
    fixed = {n for n, p in module.named_parameters() if not p.requires_grad}
    return {k: v + by if v.is_floating_point() and k not in fixed else v for k, v in module.state_dict().items()}


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return torch.zeros(1)

    def set_extra_state(self, state):
        pass


def _with_buffer(tensor):
    module = nn.Linear(4, 3)
    module.register_buffer("extra", tensor)
    return module


class TestModels:
    def test_odd_but_allowed(self, inputs_for):
        torch.manual_seed(0)
        module = Odd()
        clients = [_moved(module, by) for by in (0.1, -0.2)]
        clients[1]["steps"] = torch.tensor(7)
        server = FedBE(module, unlabeled=inputs_for("mlp"), **QUICK)
        state = _round(server, module, [ClientUpdate(s, n) for s, n in zip(clients, (1, 3), strict=True)])
        assert list(state) == list(module.state_dict())
        assert torch.equal(state["first.weight"], state["second.weight"])
        assert torch.equal(state["frozen.weight"], module.frozen.weight)
        assert int(state["steps"]) == 7
        assert state["steps"].dtype == torch.int64
        assert state["on"].tolist() == [True, False]
        assert not torch.equal(state["head.weight"], module.head.weight)
        torch.testing.assert_close(state["unused"], torch.full((2,), 1 + (0.1 - 0.6) / 4))  # the average: no loss

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("name", ["mlp-bn", "conv-gn"])
    def test_precisions(self, network, inputs_for, nearby, name, dtype):
        module = network(name).to(dtype)
        server = FedBE(module, unlabeled=inputs_for(name).to(dtype), **QUICK)
        clients = [ClientUpdate(s, 1 + i, i) for i, s in enumerate(nearby(module))]
        state = _round(server, module, clients)
        assert all(state[k].dtype == v.dtype for k, v in module.state_dict().items())
        assert all(bool(torch.isfinite(v).all()) for v in state.values())
        average = _round(FedAvg(module), module, clients)
        key = "0.weight"
        expected = sum((1 + i) * c.state[key].double() for i, c in enumerate(clients)) / 6
        epsilon = torch.finfo(dtype).eps
        torch.testing.assert_close(average[key].double(), expected, rtol=2 * epsilon, atol=2 * epsilon)

    def test_dense_logits_from_end_to_end(self, network, inputs_for, replies):
        module = network("dense")
        labels = torch.randint(4, (10, 6, 6), generator=torch.Generator().manual_seed(0))
        server = FedBE(module, unlabeled=inputs_for("dense", 10), labels=labels, distill_lr=0.05, **QUICK)
        state = _round(server, module, replies(module))
        info = server.info.step
        assert 0 <= info.ensemble.accuracy <= 1
        assert info.student.nll > 0
        assert server.predict_proba(state, inputs_for("dense", 3)).shape == (3, 4, 6, 6)
        oracle = FedBE(
            module,
            unlabeled=inputs_for("dense", 10),
            labels=labels,
            targets="labels",
            distill_epochs=30,
            distill_lr=0.5,
        )
        _round(oracle, module, replies(module))
        assert oracle.info.step.student.nll < info.student.nll

    def test_all_parameters_frozen(self, network, replies, inputs_for):
        module = network("mlp-bn").requires_grad_(False)
        state = _round(FedAvg(module), module, replies(module))
        assert not torch.equal(state["0.weight"], module[0].weight)
        with pytest.raises(ModelError, match="requires_grad=True"):
            FedBE(module, unlabeled=inputs_for("mlp-bn"))

    @pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: nn.Flatten(), "no parameters"),
            (lambda: nn.Linear(4, 3, device="meta"), "meta device"),
            (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3, device="meta")), "one device"),
            (lambda: nn.LazyLinear(3), "lazy"),
            (lambda: nn.Linear(4, 3, dtype=torch.complex64), "complex 'weight'"),
            (lambda: _with_buffer(torch.zeros(2, dtype=torch.uint16)), "'extra' in torch.uint16, in which torch"),
            (lambda: WithExtraState(4, 3), "an extra state, '_extra_state'"),
            (lambda: "model", r"must be a torch\.nn\.Module, got str"),
        ],
    )
    @pytest.mark.parametrize("server", [FedAvg, FedBE])
    def test_models_that_cannot_work(self, make, message, server):
        with pytest.raises(ModelError, match=message):
            server(make(), unlabeled=torch.zeros(4, 4))

    def test_a_model_that_returns_a_tuple(self, inputs_for):
        class Pair(nn.Linear):
            def forward(self, x):
                return x.sum(1), super().forward(x)

        module = Pair(4, 3)
        _round(FedAvg(module), module, [ClientUpdate(module.state_dict(), 1)])  # nobody asks it anything
        with pytest.raises(ModelError, match="logits of shape"):
            FedBE(module, unlabeled=inputs_for("mlp"), **QUICK)
        server = FedBE(module, unlabeled=inputs_for("mlp"), output=1, **QUICK)
        state = _round(server, module, [ClientUpdate(module.state_dict(), 1)])
        assert server.predict_proba(state, inputs_for("mlp", 5)).shape == (5, 3)

    def test_only_what_is_trained_travels(self, network, inputs_for, nearby, same):
        """A round with partial states equals one with complete states, and frozen parameters come back as they went."""
        torch.manual_seed(0)
        module = network("mlp")
        module[0].requires_grad_(False)
        frozen = {name: tensor for name, tensor in module.state_dict().items() if name.startswith("0.")}
        whole = [state | frozen for state in nearby(module)]
        part = [{n: t for n, t in state.items() if n not in frozen} for state in whole]
        results = []
        for states, start in ((whole, module.state_dict()), (part, part[0].keys())):
            server = FedBE(module, unlabeled=inputs_for("mlp"), **QUICK)
            given = {name: module.state_dict()[name] for name in start}
            results.append(server.aggregate(given, [ClientUpdate(s, 1, i) for i, s in enumerate(states)]))
        assert same({n: results[0][n] for n in frozen}, frozen)
        assert same({n: t for n, t in results[0].items() if n not in frozen}, results[1])
        assert "frozen=" in repr(server)

    def test_a_client_that_changed_a_frozen_parameter_is_set_aside(self, network):
        module = network("mlp")
        module[0].requires_grad_(False)
        server = FedAvg(module)
        good, bad = module.state_dict(), {n: t + 1 for n, t in module.state_dict().items()}
        server.aggregate(good, [ClientUpdate(good, 1, "good"), ClientUpdate(bad, 1, "bad")])
        assert server.info.set_aside[0].client_id == "bad"
        assert "the frozen '0." in server.info.set_aside[0].reason

    def test_a_dropout_network_follows_the_seed(self, network, inputs_for, replies, same):
        module = network("dropout-bn")

        def run(seed, noise):
            torch.manual_seed(noise)
            server = FedBE(module, unlabeled=inputs_for("dropout-bn"), seed=seed, statistics="recalibrated", **QUICK)
            return _round(server, module, replies(module))

        assert same(run(0, 1), run(0, 2))
        assert not same(run(0, 1), run(1, 1))

    def test_bfloat16_arithmetic_is_close(self, network, inputs_for, replies):
        module = network("conv-gn")
        states = [
            _round(FedBE(module, unlabeled=inputs_for("conv-gn"), plan=plan, **QUICK), module, replies(module))
            for plan in (Plan(), Plan(precision="bfloat16"))
        ]
        for key in states[0]:
            torch.testing.assert_close(states[0][key], states[1][key], rtol=0.05, atol=0.01)
            assert states[1][key].dtype == torch.float32


class TestInputs:
    @pytest.mark.parametrize("kind", ["tensor", "dataset", "list"])
    def test_forms_of_unlabeled_are_equal(self, network, inputs_for, replies, same, kind):
        module, inputs = network("mlp-bn"), inputs_for("mlp-bn")
        form = {"tensor": inputs, "dataset": TensorDataset(inputs, torch.zeros(24)), "list": list(inputs)}[kind]
        expected = _round(FedBE(module, unlabeled=inputs, **QUICK), module, replies(module))
        assert same(_round(FedBE(module, unlabeled=form, **QUICK), module, replies(module)), expected)

    def test_augmentation_is_a_function_or_a_switch(self, network, inputs_for, replies):
        module, calls = network("mlp"), []

        def note(batch, _):
            calls.append(len(batch))
            return batch

        for augment in (True, False):
            server = FedBE(module, unlabeled=TensorInputs(inputs_for("mlp"), note), augment=augment, **QUICK)
            _round(server, module, replies(module))
            assert calls == [8] * 6  # three batches in each of two epochs, all of them in the first server's round
        with pytest.raises(SettingError, match="`augment` must be a function"):
            FedBE(module, unlabeled=inputs_for("mlp"), augment="flip")

    def test_a_single_input_is_too_little_for_batch_norm(self, network, inputs_for, replies):
        module = network("mlp-bn")
        server = FedBE(module, unlabeled=inputs_for("mlp-bn", 1), **QUICK)
        with pytest.raises(SettingError, match="single input"):
            _round(server, module, replies(module))

    def test_a_share_of_the_rounds_needs_their_number_before_anybody_trains(self, network, inputs_for):
        with pytest.raises(SettingError, match="give `rounds`"):
            FedBE(network("mlp"), unlabeled=inputs_for("mlp"), variant="tuned")
        assert FedBE(network("mlp"), unlabeled=inputs_for("mlp"), variant="tuned", rounds=10).rounds == 10

    def test_methods_that_distil_need_them(self, network):
        with pytest.raises(SettingError, match="give `unlabeled`"):
            FedBE(network("mlp"))
        with pytest.raises(SettingError, match="give `unlabeled`"):
            VDistillation(network("mlp"))

    @pytest.mark.parametrize(
        ("unlabeled", "message"),
        [
            (torch.zeros(24, 5), "cannot run on `unlabeled`.*2x5"),
            (torch.zeros(24, 4, dtype=torch.uint8), "cannot run on `unlabeled`.*dtype"),
        ],
    )
    def test_inputs_that_the_model_does_not_take_are_refused_before_anybody_trains(self, network, unlabeled, message):
        with pytest.raises(SettingError, match=message):
            FedBE(network("mlp"), unlabeled=unlabeled)
        FedAvg(network("mlp"), unlabeled=unlabeled)  # which asks nothing

    @pytest.mark.parametrize(
        ("labels", "message"),
        [
            (torch.zeros(23, dtype=torch.int64), "each of the 24 inputs, got 23"),
            (torch.zeros(24), "whole numbers"),
            (torch.full((24,), -1), "must be >= 0"),
            ([0] * 24, "must be a tensor of class indices"),
            (torch.tensor(3), "must be a tensor of class indices"),
        ],
    )
    def test_labels_that_cannot_work(self, network, inputs_for, labels, message):
        with pytest.raises(SettingError, match=message):
            FedBE(network("mlp"), unlabeled=inputs_for("mlp"), labels=labels)

    def test_labels_of_other_classes_are_named_when_the_model_answers(self, network, inputs_for, replies):
        module = network("mlp")
        server = FedBE(module, unlabeled=inputs_for("mlp"), labels=torch.full((24,), 9), **QUICK)
        with pytest.raises(SettingError, match="from 0 to 2"):
            _round(server, module, replies(module))
        assert server.round == 0
        oracle = FedBE(module, unlabeled=inputs_for("mlp"), labels=torch.full((24,), 9), targets="labels", **QUICK)
        with pytest.raises(SettingError, match="from 0 to 2"):
            _round(oracle, module, replies(module))

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"rounds": 0}, "`rounds` .*>= 1, got 0"),
            ({"rounds": "3"}, "`rounds` .*>= 1, got '3'"),
            ({"total_clients": 2.5}, "`total_clients` must be"),
            ({"min_clients": "2"}, "`min_clients` must be"),
        ],
    )
    def test_counts_that_are_none(self, network, inputs_for, given, message):
        with pytest.raises(SettingError, match=message):
            FedBE(network("mlp"), unlabeled=inputs_for("mlp"), **given)

    def test_batches_of_one_are_too_little_for_batch_norm(self, network, inputs_for, replies):
        module = network("mlp-bn")
        server = FedBE(module, unlabeled=inputs_for("mlp-bn"), **QUICK | {"distill_batch_size": 1})
        with pytest.raises(SettingError, match="single input"):
            _round(server, module, replies(module))

    def test_small_whole_numbers_are_labels(self, network, inputs_for, replies):
        module = network("mlp")
        labels = (torch.arange(24) % 3).to(torch.uint8)
        server = FedBE(module, unlabeled=inputs_for("mlp"), labels=labels, **QUICK)
        _round(server, module, replies(module))
        assert server.info.step.ensemble is not None


class TestRounds:
    def test_failure_in_the_middle_leaves_the_server_as_it_was(self, network, inputs_for, replies):
        module = network("mlp-bn")
        settings = QUICK | {"distill_lr": 1e30, "distill_lr_min": 1e30}
        server = fedbe.server("fedbe+fedavgm", module, unlabeled=inputs_for("mlp-bn"), **settings)
        with pytest.raises(AggregationError, match="global model is unchanged"):
            _round(server, module, replies(module))
        assert (server.round, dict(server.memory), server.info) == (0, {}, None)

    def test_values_beyond_the_range_of_the_model_s_dtype_are_refused(self):
        module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).half()
        server = FedBE(module, unlabeled=1000 * torch.arange(20.0).reshape(10, 2), **QUICK)
        with pytest.raises(AggregationError, match=r"'0\.running_var' has values beyond"):
            _round(server, module, [ClientUpdate(module.state_dict(), 1)])
        assert server.round == 0

    @pytest.mark.parametrize("updates", [None, ClientUpdate({}, 1)])
    def test_updates_that_are_none(self, network, updates):
        with pytest.raises(SettingError, match="`updates` must be"):
            _round(FedAvg(network("mlp")), network("mlp"), updates)

    def test_info_says_that_a_model_does_not_take_channels_last(self, network, inputs_for, replies):
        for name, shown in (("view", True), ("conv-gn", False)):
            module = network(name)
            server = FedBE(module, unlabeled=inputs_for(name), num_samples=2, distill_epochs=1)
            server.aggregate(module.state_dict(), replies(module))
            assert ("memory layout contiguous" in str(server.info)) == shown

    def test_info_tells_who_and_why(self, network, inputs_for, replies):
        module = network("mlp")
        one, two, three = replies(module, ids=("b", "a", 3))
        bad = ClientUpdate({}, 5, "broken")
        server = FedBE(module, unlabeled=inputs_for("mlp"), labels=torch.arange(24) % 3, **QUICK)
        assert server.info is None
        _round(server, module, [one, bad, two, three])
        info = server.info
        assert info.round == 1
        assert info.clients == (3, "a", "b")
        assert [(s.client_id, "does not fit the model" in s.reason) for s in info.set_aside] == [("broken", True)]
        names = ["sample 1", "sample 2", "average", "client 3", "client a", "client b"]
        assert [m.name for m in info.step.members] == names
        assert set(info.step.seconds) == {"guard", "mean", "fit", "ensemble", "distill", "evaluate"}
        predictions = server.predict_proba(three.state, inputs_for("mlp")).argmax(1)
        accuracy = float((predictions == torch.arange(24) % 3).double().mean())
        assert info.step.members[3].metrics.accuracy == pytest.approx(accuracy)

    def test_a_posterior_without_spread_leaves_one_opinion(self, network, inputs_for):
        """Equal clients: samples, average and clients are one model, so nobody disagrees."""
        module = network("mlp")
        server = FedBE(module, unlabeled=inputs_for("mlp"), **QUICK)
        _round(server, module, [ClientUpdate(module.state_dict(), n, n) for n in (1, 2, 5)])
        assert server.info.step.disagreement == pytest.approx(0)
        assert len({m.confidence for m in server.info.step.members}) == 1

    def test_scale_zero_samples_vote_like_the_average(self, network, inputs_for, replies):
        module = network("mlp-bn")
        server = FedBE(module, unlabeled=inputs_for("mlp-bn"), members="SA", scale=0.0, statistics="averaged", **QUICK)
        _round(server, module, replies(module))
        assert len({m.confidence for m in server.info.step.members}) == 1

    def test_updates_may_come_from_a_generator(self, network, replies, same):
        module = network("mlp")
        given = replies(module)
        assert same(_round(FedAvg(module), module, iter(given)), _round(FedAvg(module), module, given))
