import threading
from typing import NamedTuple

import pytest
import torch
from torch import nn

from fedbe import Plan
from fedbe.core.inputs import TensorInputs
from fedbe.core.model_runner import ModelRunner, try_model
from fedbe.errors import ModelError, ModelWarning, SettingError


@pytest.mark.parametrize("name", ["mlp-bn", "conv-gn", "dense"])
def test_a_loaded_state_can_be_read(network, nearby, name):
    module = network(name)
    runner = ModelRunner(module)
    for state in nearby(module):
        packed = runner.layout.pack(state)
        runner.load(packed)
        assert runner.read().digest() == packed.digest()


def test_the_callers_module_is_never_changed(network, nearby):
    module = network("mlp-bn").eval()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    runner = ModelRunner(module)
    runner.load(runner.layout.pack(nearby(module)[0]))
    runner.module.train()
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert not module.training


def test_tied_weights_stay_tied():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    runner = ModelRunner(module)
    assert runner.module[1].weight is runner.module[0].weight
    assert [n for n, _ in runner.trainable()] == ["0.weight", "0.bias", "1.bias"]


def test_a_buffer_with_two_names_and_one_of_them_saved():
    module = nn.Linear(2, 2)
    module.register_buffer("scratch", torch.ones(3), persistent=False)
    module.register_buffer("saved", module.scratch)
    runner = ModelRunner(module)
    assert runner.layout.unpack(runner.read())["saved"].tolist() == [1, 1, 1]
    runner.load(runner.layout.pack({**module.state_dict(), "saved": torch.full((3,), 5.0)}))
    assert runner.module.saved.tolist() == [5, 5, 5]


def test_unsaved_buffers_are_reset_for_the_next_model():
    module = nn.Linear(2, 2)
    module.register_buffer("seen", torch.zeros(1), persistent=False)
    runner = ModelRunner(module)
    runner.module.seen += 3
    runner.load(runner.layout.pack(module.state_dict()))
    assert runner.module.seen.tolist() == [0]


def test_one_logit_is_not_enough():
    with pytest.raises(ModelError, match="returns one number for each input"):
        ModelRunner(nn.Linear(3, 1)).logits(torch.zeros(4, 3))


def test_sparse_gradients_are_refused_before_training():
    layers = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    with pytest.raises(ModelError, match="sparse gradients in '0'"):
        ModelRunner(layers).trainable()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_working_precision(dtype):
    runner = ModelRunner(nn.Linear(3, 2).to(dtype))
    logits = runner.logits(torch.zeros(4, 3, dtype=dtype))
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_integer_inputs_reach_an_embedding():
    runner = ModelRunner(nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3)))
    assert runner.logits(torch.tensor([[1, 2], [3, 4]])).shape == (2, 3)


def test_a_module_that_cannot_be_copied():
    module = nn.Linear(2, 2)
    module.lock = threading.Lock()
    with pytest.raises(ModelError, match="cannot be copied"):
        ModelRunner(module)


@pytest.mark.parametrize("out", [lambda _: "x", lambda _: [], lambda x: x[:1], lambda x: x.sum(), lambda x: x.long()])
def test_something_else_than_logits(out):
    class Wrong(nn.Linear):
        def forward(self, x):
            return out(super().forward(x))

    with pytest.raises(ModelError, match="`model` must return"):
        ModelRunner(Wrong(2, 3)).logits(torch.ones(4, 2))


class Answer(NamedTuple):
    loss: float
    logits: torch.Tensor


@pytest.mark.parametrize(
    ("wrap", "output"),
    [
        (lambda x: (x, "cache"), None),
        (lambda x: {"loss": 1.0, "logits": x}, None),
        (lambda x: Answer(1.0, x), None),
        (lambda x: ("cache", x), 1),
        (lambda x: {"scores": x}, "scores"),
        (lambda x: Answer(1.0, x), "logits"),
    ],
)
def test_outputs_with_logits_in_them(wrap, output):
    class Wrapped(nn.Linear):
        def forward(self, x):
            return wrap(super().forward(x))

    module = Wrapped(2, 3)
    got = ModelRunner(module, output=output).logits(torch.ones(4, 2))
    assert torch.equal(got, nn.functional.linear(torch.ones(4, 2), module.weight, module.bias))


@pytest.mark.parametrize(
    ("wrap", "output", "message"),
    [
        (lambda x: {"scores": x}, None, "dict with scores. has no 'logits'"),
        (lambda x: x, "logits", "Tensor. has no 'logits'"),
        (lambda x: (x,), 1, "tuple. has no 1"),
    ],
)
def test_outputs_without_the_named_logits(wrap, output, message):
    class Wrapped(nn.Linear):
        def forward(self, x):
            return wrap(super().forward(x))

    with pytest.raises(ModelError, match=message):
        ModelRunner(Wrapped(2, 3), output=output).logits(torch.ones(4, 2))


class TwoInputs(nn.Module):
    """Embeds ids and leaves out those that the mask excludes."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, ids, mask):
        return self.head((self.embed(ids) * mask[..., None]).sum(1))


def test_several_tensors_are_arguments_of_the_module():
    torch.manual_seed(0)
    runner = ModelRunner(TwoInputs())
    ids, mask = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 0], [1, 1]])
    by_position, by_name = runner.logits((ids, mask)), runner.logits({"mask": mask, "ids": ids})
    assert torch.equal(by_position, by_name)
    torch.testing.assert_close(by_position[0], runner.module.head(runner.module.embed(torch.tensor(1))))


def test_a_softmax_at_the_end_is_reported_once():
    runner = ModelRunner(nn.Sequential(nn.Linear(2, 3), nn.Softmax(1)))
    with pytest.warns(ModelWarning, match="remove the model's last softmax"):
        runner.logits(torch.randn(4, 2))
    runner.logits(torch.randn(4, 2))
    ModelRunner(nn.Sequential(nn.Linear(2, 3), nn.LogSoftmax(1))).logits(torch.randn(4, 2))  # softmax(log p) = p


def test_a_sigmoid_at_the_end_is_refused():
    with pytest.raises(ModelError, match=r"multi-label.*single-label classification"):
        ModelRunner(nn.Sequential(nn.Linear(2, 3), nn.Sigmoid())).logits(torch.randn(4, 2))
    ModelRunner(nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.Linear(2, 3))).logits(torch.randn(4, 2))


def test_a_model_is_tried_on_its_inputs():
    with pytest.raises(SettingError, match="cannot run on the data: "):
        try_model(ModelRunner(nn.Linear(2, 3)), TensorInputs(torch.ones(4, 5)), "the data")


def test_a_frozen_model_cannot_be_trained():
    with pytest.raises(ModelError, match="requires_grad=True"):
        ModelRunner(nn.Linear(2, 2).requires_grad_(False)).trainable()


def test_images_and_convolutions_are_channels_last_if_planned(network):
    images = torch.rand(2, 3, 8, 8)
    planned, plain = (ModelRunner(network("conv-gn"), Plan(channels_last=on)) for on in (True, False))
    weights = [runner.module[0].weight for runner in (planned, plain)]
    assert [w.is_contiguous(memory_format=torch.channels_last) for w in weights] == [True, False]
    plain.load(planned.read())
    torch.testing.assert_close(planned.logits(images), plain.logits(images))


@pytest.mark.parametrize("name", ["view", "conv-gn"])
def test_a_model_that_does_not_take_channels_last_runs_without_it(network, inputs_for, name):
    """Each pass is as in plain torch: BatchNorm counts one batch, dropout draws the same mask."""
    module, images = network(name).train(), inputs_for(name, 5)
    runner = ModelRunner(module)
    runner.module.train()
    passes = []
    for forward in (runner.logits, module):
        torch.manual_seed(1)
        passes += [forward(images), torch.rand(3)]
    torch.testing.assert_close(passes[0], passes[2])
    assert torch.equal(passes[1], passes[3])
    assert runner.channels_last == (name == "conv-gn")
    torch.testing.assert_close(runner.layout.unpack(runner.read()), dict(module.state_dict()))


def test_only_training_does_not_take_channels_last(inputs_for):
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 3)

        def forward(self, x):
            x = self.conv(x)
            return self.head(x.view(len(x), -1) if self.training else x.flatten(1))

    runner = ModelRunner(Auxiliary())
    runner.module.eval()
    runner.logits(inputs_for("view"))
    runner.module.train()
    assert runner.logits(inputs_for("view")).shape == (24, 3)


def test_a_model_that_fails_in_every_layout_raises_its_own_error_and_may_be_right_later(network, inputs_for):
    runner = ModelRunner(network("view"))
    with pytest.raises(RuntimeError, match="expected input"):
        runner.logits(torch.rand(2, 5, 8, 8))
    assert runner.logits(inputs_for("view", 1)).shape == (1, 3)


def test_not_a_module():
    with pytest.raises(ModelError, match=r"torch\.nn\.Module, got dict"):
        ModelRunner({})
    with pytest.raises(SettingError, match="`plan` must be"):
        ModelRunner(nn.Linear(2, 2), "bfloat16")
