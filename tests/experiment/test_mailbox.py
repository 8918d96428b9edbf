"""Tensors through shared memory: equal values, a copy only where one is needed, what does not fit by message."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from fedbe.algorithms.client.training import LocalSettings
from fedbe.core.compute import Plan
from fedbe.core.model_runner import ModelRunner
from fedbe.experiment.executors import mailbox
from fedbe.experiment.executors.base import Done
from fedbe.experiment.executors.mailbox import Mailbox, SharedArray
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.federation import prepare
from fedbe.experiment.jobs import TrainJob
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import override_recipe


@dataclass(frozen=True, eq=False)
class Letter:
    large: torch.Tensor
    small: torch.Tensor
    named: dict[str, torch.Tensor] = field(default_factory=dict)
    words: str = "words"


@pytest.fixture
def ends() -> tuple[Mailbox, Mailbox]:
    memory = np.zeros(2**20, dtype=np.uint8)
    return Mailbox(memory), Mailbox(memory)


def letter() -> Letter:
    turned = torch.arange(20_000.0).reshape(100, 200).T  # not contiguous
    return Letter(turned, torch.tensor([]), {"steps": torch.arange(5_000), "few": torch.ones(2, dtype=torch.bool)})


def test_what_arrives_is_what_was_sent(ends: tuple[Mailbox, Mailbox]) -> None:
    sender, receiver = ends
    sent = letter()
    message = sender.put(sent)
    assert isinstance(message.large, SharedArray)
    assert isinstance(message.named["steps"], SharedArray)
    assert isinstance(message.small, np.ndarray)
    assert message.named["steps"].offset % mailbox.ALIGNMENT == 0
    received = receiver.take(message, copy=False)
    assert received.words == "words"
    for a, b in [
        (sent.large, received.large),
        (sent.small, received.small),
        *zip(sent.named.values(), received.named.values(), strict=True),
    ]:
        assert torch.equal(a, b)
        assert a.dtype == b.dtype


def test_only_a_copy_outlives_the_next_value(ends: tuple[Mailbox, Mailbox]) -> None:
    sender, receiver = ends
    message = sender.put(torch.ones(10_000))
    view, copy = receiver.take(message, copy=False), receiver.take(message, copy=True)
    sender.put(torch.zeros(10_000))
    assert view.sum() == 0
    assert copy.sum() == 10_000


def test_a_tensor_is_written_again_only_if_it_changed(ends: tuple[Mailbox, Mailbox]) -> None:
    sender, receiver = ends
    model, other = torch.ones(10_000), torch.ones(10_000)
    arrived = receiver.take(sender.put(model), copy=False)
    arrived.zero_()  # what the reader does to the memory shows whether it is written
    assert receiver.take(sender.put(model), copy=True).sum() == 0
    model.add_(1)
    assert receiver.take(sender.put(model), copy=True).sum() == 20_000
    assert receiver.take(sender.put(other), copy=True).sum() == 10_000
    assert receiver.take(sender.put(model), copy=True).sum() == 20_000


def test_the_last_two_results_are_kept() -> None:
    memory = np.zeros(2**17, dtype=np.uint8)
    sender, receiver = Mailbox(memory, values=2), Mailbox(memory, values=2)
    first, second = (receiver.take(sender.put(torch.full((10_000,), value)), copy=False) for value in (1.0, 2.0))
    assert (first.sum(), second.sum()) == (10_000, 20_000)
    sender.put(torch.full((10_000,), 3.0))
    assert (first.sum(), second.sum()) == (30_000, 20_000)


def test_what_does_not_fit_travels_with_the_message(ends: tuple[Mailbox, Mailbox]) -> None:
    sender, receiver = ends
    values = {"fits": torch.ones(200_000), "not": torch.ones(200_000)}
    message = sender.put(values)
    assert (type(message["fits"]), type(message["not"])) == (SharedArray, np.ndarray)
    assert receiver.take(message, copy=True)["not"].sum() == 200_000
    assert Mailbox(None).take(Mailbox(None).put(values), copy=False)["fits"].sum() == 200_000


def test_worker_processes_do_without_shared_memory(small: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = prepare(override_recipe(small, ["model.hidden=[200, 200]"]), 0)
    state = ModelRunner(federation.build_model()).read()
    job = TrainJob(0, 1, 0, state, LocalSettings(epochs=1), federation.clients.sizes[0])
    assert 4 * len(state.params) > mailbox.SMALL

    def trained() -> torch.Tensor:
        with ProcessPool(1) as workers:
            workers.configure(federation, Plan())
            (outcome,) = workers.map([job])
        assert isinstance(outcome, Done)
        params: torch.Tensor = outcome.value.state.params
        return params

    with_memory = trained()
    monkeypatch.delattr("os.memfd_create")
    assert torch.equal(trained(), with_memory)
    assert not torch.equal(with_memory, state.params)
