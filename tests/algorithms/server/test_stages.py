import pytest
import torch
from torch import nn

from fedbe.algorithms.distillation import DistillSettings
from fedbe.algorithms.ensemble import EnsembleSettings
from fedbe.algorithms.methods import get_method
from fedbe.algorithms.server import ControlUpdate, Distill, KeepMembers, Mean, Momentum
from fedbe.algorithms.server.context import Context, Draft, Round, StepInfo
from fedbe.core.inputs import TensorInputs
from fedbe.core.model_runner import ModelRunner
from fedbe.errors import SettingError

A, B = [[1.0, 2.0], [3.0, 4.0]], [[5.0, 2.0], [7.0, 0.0]]
MEAN = [4.0, 2.0, 6.0, 1.0]  # with 1 and 3 examples


def distill_stage(**settings):
    """The stage of FedBE with these settings, wherever they belong."""
    return get_method("fedbe", "paper", **settings).stages[-1]


@pytest.fixture
def round_of(state):
    """A round of a 2×2 model that started from zero."""

    def make(updates, previous=(0.0, 0.0, 0.0, 0.0), number=1, **context):
        runner = ModelRunner(nn.Linear(2, 2, bias=False))
        return Round(updates, state(previous), Context(runner, 0, number, **context), StepInfo())

    return make


def test_mean(round_of, update, state):
    draft = Mean()(Draft(state([0.0] * 4), {}), round_of([update(0, A, 1), update(1, B, 3)]))
    assert draft.state.params.tolist() == MEAN


class TestMomentum:
    @pytest.mark.parametrize(
        ("form", "expected"),
        [
            # β = 0.5. Round 1 from 0: Δ = (4 2 6 1), m = Δ, model (4 2 6 1).
            # Round 2 from there, clients mean (5 5 5 5): Δ = (1 3 −1 4), m = ½(4 2 6 1) + Δ = (3 4 2 4.5)
            ("heavy-ball", ([4, 2, 6, 1], [7, 6, 8, 5.5], [3, 4, 2, 4.5])),
            # damped. Round 1: m = ½Δ = (2 1 3 .5), model (2 1 3 .5).
            # Round 2: Δ = (3 4 2 4.5), m = ½(2 1 3 .5) + ½Δ = (2.5 2.5 2.5 2.5), model (4.5 3.5 5.5 3)
            ("damped", ([2, 1, 3, 0.5], [4.5, 3.5, 5.5, 3], [2.5, 2.5, 2.5, 2.5])),
        ],
    )
    def test_two_rounds_by_hand(self, round_of, state, form, expected):
        stage = Momentum(beta=0.5, momentum_form=form)
        first = stage(Draft(state(MEAN), {}), round_of([]))
        assert first.state.params.tolist() == expected[0]
        second = stage(Draft(state([5.0] * 4), first.memory), round_of([], previous=first.state.params))
        assert second.state.params.tolist() == expected[1]
        assert second.memory["momentum"].tolist() == expected[2]
        assert first.memory["momentum"].tolist() == expected[0]  # returned, not changed

    def test_the_released_program_by_hand(self, round_of, state):
        # β = 0.5. Round 1: the mean (4 2 6 1), m = Δ. Round 2 is a plain mean, too: m = Δ = (1 3 −1 4).
        # Round 3 from (5 5 5 5), mean (6 6 6 6): Δ = 1, m = ½ (1 3 −1 4) + ½ = (1 2 0 2.5), model 5 + m
        stage = Momentum(beta=0.5, momentum_form="released")
        draft, previous = Draft(state(MEAN), {}), state([0.0] * 4)
        expected = [(MEAN, MEAN), ([5] * 4, [1, 3, -1, 4]), ([6, 7, 5, 7.5], [1, 2, 0, 2.5])]
        for number, (model, momentum) in enumerate(expected, start=1):
            mean = (MEAN, [5.0] * 4, [6.0] * 4)[number - 1]
            draft = stage(Draft(state(mean), draft.memory), round_of([], previous=previous.params, number=number))
            assert draft.state.params.tolist() == model
            assert draft.memory["momentum"].tolist() == momentum
            previous = draft.state

    @pytest.mark.parametrize("form", ["heavy-ball", "damped", "released"])
    def test_beta_zero_is_the_mean_to_the_bit(self, round_of, state, rng, form):
        mean = state(torch.randn(4, generator=rng) * 1e3)
        memory = {"momentum": torch.randn(4, generator=rng), "other": torch.ones(1)}
        draft = Momentum(beta=0.0, momentum_form=form)(
            Draft(mean, memory), round_of([], previous=torch.randn(4, generator=rng))
        )
        assert torch.equal(draft.state.params, mean.params)
        assert "other" in draft.memory

    def test_buffers_are_not_given_momentum(self, round_of, state):
        draft = Momentum()(Draft(state(MEAN, [5.0]), {"momentum": torch.ones(4)}), round_of([]))
        assert draft.state.buffers.tolist() == [5]


class TestControlUpdate:
    def test_by_hand_with_more_clients_than_replied(self, round_of, update, state):
        # c ← (1 1 1 1) + ((1 0 0 0) + (0 2 0 4))/4
        updates = [
            update(0, A, 1, control=torch.tensor([1.0, 0, 0, 0])),
            update(1, B, 3, control=torch.tensor([0.0, 2, 0, 4])),
        ]
        memory = {"control": torch.ones(4)}
        draft = ControlUpdate()(Draft(state(MEAN), memory), round_of(updates, total_clients=4))
        assert draft.memory["control"].tolist() == [1.25, 1.5, 1.0, 2.0]
        assert memory["control"].tolist() == [1, 1, 1, 1]
        assert draft.state.params.tolist() == MEAN

    def test_without_a_total_those_who_replied_are_all(self, round_of, update, state):
        updates = [update(i, A, 1, control=torch.full((4,), 2.0)) for i in range(2)]
        assert ControlUpdate()(Draft(state(MEAN), {}), round_of(updates)).memory["control"].tolist() == [2.0] * 4

    def test_more_replies_than_clients(self, round_of, update, state):
        updates = [update(i, A, 1, control=torch.zeros(4)) for i in range(2)]
        with pytest.raises(SettingError, match="`total_clients` is 1"):
            ControlUpdate()(Draft(state(MEAN), {}), round_of(updates, total_clients=1))


class TestMembers:
    @pytest.mark.parametrize(
        ("members", "names"),
        [
            ("SAC", ["sample 1", "sample 2", "average", "client 0", "client 7"]),
            ("CAS", ["sample 1", "sample 2", "average", "client 0", "client 7"]),
            ("A", ["average"]),
            ("C", ["client 0", "client 7"]),
            ("S", ["sample 1", "sample 2"]),
        ],
    )
    def test_who_votes(self, round_of, update, state, members, names):
        stage = KeepMembers(EnsembleSettings(members=members, num_samples=2))
        round = round_of([update(0, A, 1), update(7, B, 3)])
        kept = stage(Draft(state([9.0] * 4), {}), round).members
        assert [m.name for m in kept] == names
        assert stage.ensemble.count(len(round.updates)) == len(names)
        values = {m.name: m.state.params.tolist() for m in kept}
        if "A" in members:
            assert values["average"] == [9] * 4  # the draft: what the student starts from
        if "C" in members:
            assert values["client 7"] == [5, 2, 7, 0]

    @pytest.mark.parametrize("posterior", ["gaussian", "gaussian-released", "dirichlet"])
    def test_samples_come_from_the_posterior_of_the_clients(self, round_of, update, state, posterior):
        # both clients agree in the second number only
        stage = KeepMembers(EnsembleSettings(members="S", num_samples=3, posterior=posterior))
        kept = stage(Draft(state(MEAN), {}), round_of([update(0, A, 1), update(1, B, 3)])).members
        drawn = torch.stack([m.state.params for m in kept])
        assert len({tuple(row) for row in drawn.tolist()}) == 3
        if posterior != "gaussian-released":
            torch.testing.assert_close(drawn[:, 1], torch.full((3,), 2.0))

    def test_alpha_for_each_client(self, round_of, update, state):
        settings = EnsembleSettings(members="S", num_samples=5, posterior="dirichlet", alpha={0: 1e-6, 1: 1e6})
        stage = KeepMembers(settings)
        for member in stage(Draft(state(MEAN), {}), round_of([update(0, A, 1), update(1, B, 3)])).members:
            torch.testing.assert_close(member.state.params, torch.tensor([5.0, 2, 7, 0]))


class TestDistill:
    INPUTS = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))

    def _run(self, round_of, update, state, **settings):
        labels = settings.pop("labels", None)
        progress_calls = []
        round = round_of(
            [update(0, A, 1), update(1, B, 3)],
            inputs=TensorInputs(self.INPUTS, settings.pop("augment_with", None)),
            labels=labels,
            progress=lambda *a: progress_calls.append(a),
        )
        stage = distill_stage(num_samples=2, distill_epochs=2, distill_batch_size=10, distill_lr=0.1, **settings)
        draft = stage(Draft(state(MEAN), {"kept": torch.ones(1)}), round)
        return draft, round.info, progress_calls

    def test_the_draft_is_the_start_and_the_vote_the_target(self, round_of, update, state):
        draft, info, progress_calls = self._run(round_of, update, state)
        assert not torch.equal(draft.state.params, torch.tensor(MEAN))
        assert "kept" in draft.memory
        assert [m.name for m in info.members] == ["sample 1", "sample 2", "average", "client 0", "client 1"]
        assert info.ensemble is info.average is info.student is None
        assert 0 <= info.disagreement <= 1
        assert {"fit", "ensemble", "distill"} <= set(info.seconds)
        assert progress_calls[:5] == [("ensemble", i, 5) for i in range(5)]
        assert progress_calls[5:] == [("distill", i, 6) for i in range(1, 7)]

    def test_after_its_share_of_the_rounds_the_average_stays_as_it_is(self, round_of, update, state):
        def of_ten(number, share):
            round = round_of([update(0, A, 1)], inputs=TensorInputs(self.INPUTS), number=number, rounds=10)
            stage = distill_stage(num_samples=2, distill_epochs=2, distill_batch_size=10, distill_until=share)
            return stage(Draft(state(MEAN), {}), round).state.params.tolist() != MEAN

        assert [of_ten(number, 0.3) for number in (1, 3, 4, 10)] == [True, True, False, False]
        half = DistillSettings(distill_until=0.55)  # 0.55 * 20 is a little more than 11 in floating point
        assert [half.is_active(number, 20) for number in (11, 12)] == [True, False]
        assert not of_ten(1, 0.0)
        assert of_ten(10, 1.0)

    def test_a_share_of_the_rounds_needs_their_number(self, round_of, update, state):
        with pytest.raises(SettingError, match="give `rounds`"):
            self._run(round_of, update, state, distill_until=0.5)

    def test_labels_are_for_the_report_only(self, round_of, update, state):
        labels = torch.arange(30) % 2
        with_labels, info, _ = self._run(round_of, update, state, labels=labels)
        without, _, _ = self._run(round_of, update, state)
        assert torch.equal(with_labels.state.params, without.state.params)
        logits = self.INPUTS @ torch.tensor(MEAN).view(2, 2).T
        assert info.average.accuracy == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
        student = self.INPUTS @ with_labels.state.params.view(2, 2).T
        assert info.student.accuracy == pytest.approx(float((student.argmax(1) == labels).double().mean()))
        assert all(m.metrics is not None for m in info.members)

    def test_the_oracle_learns_the_labels(self, round_of, update, state):
        labels = (self.INPUTS[:, 0] > 0).long()
        draft, info, _ = self._run(round_of, update, state, labels=labels, targets="labels", optimizer="sgd")
        assert info.members == ()
        better = self.INPUTS @ draft.state.params.view(2, 2).T
        before = self.INPUTS @ torch.tensor(MEAN).view(2, 2).T
        loss = nn.functional.cross_entropy
        assert float(loss(better, labels)) < float(loss(before, labels)) - 0.1

    def test_the_oracle_needs_labels(self, round_of, update, state):
        with pytest.raises(SettingError, match="needs the true labels"):
            self._run(round_of, update, state, targets="labels")

    def test_no_inputs(self, round_of, update, state):
        with pytest.raises(SettingError, match="give `unlabeled`"):
            Distill()(Draft(state(MEAN), {}), round_of([update(0, A, 1)]))

    @pytest.mark.parametrize("augment", [True, False])
    def test_augmentation_can_be_switched_off(self, round_of, update, state, augment):
        calls = []

        def shift(batch, _):
            calls.append(len(batch))
            return batch

        self._run(round_of, update, state, augment=augment, augment_with=shift)
        assert calls == ([10] * 6 if augment else [])

    @pytest.mark.parametrize(
        "change",
        [
            {"sharpening": 1.0}, {"members": "C"}, {"posterior": "dirichlet"}, {"posterior": "gaussian-released"},
            {"scale": 0.1}, {"loss": "kl_over_classes"}, {"optimizer": "sgd"}, {"distill_momentum": 0.0},
            {"distill_weight_decay": 0.1}, {"posterior": "dirichlet-released"},
        ],
        ids=str,
    )  # fmt: skip
    def test_every_setting_matters(self, round_of, update, state, change):
        default, _, _ = self._run(round_of, update, state)
        changed, _, _ = self._run(round_of, update, state, **change)
        assert not torch.equal(default.state.params, changed.state.params)
