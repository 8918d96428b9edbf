"""The one local SGD loop (Eq. 1)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedbe.algorithms.client.rules import LocalRule, LocalRun, RuleResult
from fedbe.core.devices import to_device
from fedbe.core.inputs import Inputs, batches, in_order
from fedbe.core.metrics import check_labels
from fedbe.core.model_runner import ModelRunner
from fedbe.core.optim import SGD
from fedbe.core.random import global_rng
from fedbe.core.state import ModelState
from fedbe.errors import SettingError

IGNORED_LABEL = -100  # torch's: an example, or a pixel, without a label


@dataclass(frozen=True)
class LocalSettings:
    """One client's training in one round.

    Attributes:
        epochs: E, passes over the client's data. A slow client trains fewer; 0 trains nothing.
        batch_size: examples in a mini-batch.
        lr: η_l, the step size of this round (`step_size` has the schedule over rounds).
        lr_decay: factor on the step size after every step. With 1 it is constant within the round, as in the paper.
        lr_drop_epochs: the step size falls to a tenth after every so many epochs of the round; 0 for never.
        momentum: of SGD. It starts from zero in each round.
        weight_decay: does not apply to normalisation layers.
        decay_biases: whether weight decay applies to biases.

    Raises:
        SettingError: a value is out of its range.

    Example:
        >>> LocalSettings(epochs=5, lr=0.1).momentum
        0.9
    """

    epochs: int = 20
    batch_size: int = 40
    lr: float = 0.01
    lr_decay: float = 1.0
    momentum: float = 0.9
    weight_decay: float = 1e-3
    lr_drop_epochs: int = 0
    decay_biases: bool = True

    def __post_init__(self) -> None:
        if self.epochs < 0:
            raise SettingError(f"`epochs` must be >= 0, got {self.epochs}")
        if self.batch_size < 1:
            raise SettingError(f"`batch_size` must be >= 1, got {self.batch_size}")
        if not self.lr > 0:
            raise SettingError(f"`lr` must be > 0, got {self.lr}")
        if not 0 < self.lr_decay <= 1:
            raise SettingError(f"`lr_decay` must be in (0, 1], got {self.lr_decay}")
        if not 0 <= self.momentum < 1:
            raise SettingError(f"`momentum` must be in [0, 1), got {self.momentum}")
        if not self.weight_decay >= 0:
            raise SettingError(f"`weight_decay` must be >= 0, got {self.weight_decay}")
        if self.lr_drop_epochs < 0:
            raise SettingError(f"`lr_drop_epochs` must be >= 0, got {self.lr_drop_epochs}")

    def step_size(self, step: int, epoch: int) -> float:
        """η of a step of this round; steps and epochs count from 0.

        Example:
            >>> LocalSettings(lr=0.005, lr_drop_epochs=30).step_size(3000, 30)
            0.0005
        """
        drops = epoch // self.lr_drop_epochs if self.lr_drop_epochs else 0
        return self.lr * self.lr_decay**step / 10.0**drops


@dataclass(frozen=True, eq=False)
class Trained:
    """The result of local training.

    Attributes:
        state, extras: are sent to the server.
        memory: stays with the client until its next round.
        loss: the mean cross entropy of the last epoch, without what the rules add.
        steps: SGD steps that were made.
    """

    state: ModelState
    extras: Mapping[str, Tensor]
    memory: Mapping[str, Tensor]
    loss: float
    steps: int


def train(
    runner: ModelRunner,
    start: ModelState,
    inputs: Inputs,
    labels: Tensor,
    settings: LocalSettings,
    generator: torch.Generator,
    *,
    rules: Sequence[LocalRule] = (),
    broadcast: Mapping[str, Mapping[str, Tensor] | Tensor] | None = None,
    memory: Mapping[str, Mapping[str, Tensor] | Tensor] | None = None,
) -> Trained:
    """K steps of SGD from the global model on one client's data: w_i ← w_i − η ∇ℓ(B_k, w_i) (Eq. 1).

    Args:
        runner: runs the model.
        start: the global model.
        inputs: the client's inputs.
        labels: their class indices [N, …]; -100 is ignored.
        settings: epochs, step size and so on.
        generator: all random numbers follow from it (order of examples, augmentation, dropout).
        rules: hooks that change the gradient; any tuple composes.
        broadcast: sent with the global model, by name: vectors [P], or named tensors as in `Server.broadcast`.
        memory: what this client kept from its last round, in the same form.

    Returns:
        The trained model, and what the rules send and keep.

    Raises:
        SettingError: if there are no examples, not as many labels as inputs, or labels that are not class indices.

    Example:
        >>> from fedbe.core.inputs import TensorInputs
        >>> runner = ModelRunner(torch.nn.Linear(1, 2, bias=False))
        >>> start = runner.layout.pack({"weight": torch.zeros(2, 1)})
        >>> inputs, labels = TensorInputs(torch.ones(1, 1)), torch.tensor([0])
        >>> settings, generator = LocalSettings(epochs=1, lr=1.0, weight_decay=0.0), torch.Generator().manual_seed(0)
        >>> trained = train(runner, start, inputs, labels, settings, generator)  # g = softmax(0, 0) − (1, 0)
        >>> trained.steps, trained.state.params
        (1, tensor([ 0.5000, -0.5000]))
    """
    if len(inputs) != len(labels):
        raise SettingError(f"`inputs` and `labels` must be of one length, got {len(inputs)} and {len(labels)}")
    if not len(inputs):
        raise SettingError("`inputs` is empty: a client needs at least one example to train on")
    runner.load(start)
    runner.module.train()
    run = LocalRun(
        layout=runner.layout,
        parameters=dict(runner.trainable()),
        start=to_device(start.params, runner.device),
        broadcast=_vectors(runner, broadcast, "`broadcast`"),
        memory=_vectors(runner, memory, "`memory`"),
    )
    active = [rule.start(run) for rule in rules]
    optimizer = SGD(runner, settings.momentum, settings.weight_decay, decay_biases=settings.decay_biases)
    steps, epoch_loss, odometer = 0, torch.zeros((), device=runner.device), Odometer(settings.momentum)
    with global_rng(generator, runner.device):
        for epoch in range(settings.epochs):
            epoch_loss = torch.zeros((), device=runner.device)
            order = torch.randperm(len(inputs), generator=generator)
            # Whole epochs travel to a device, not every batch's indices and labels.
            ordered, targets = in_order(inputs, order), to_device(labels[order], runner.device)
            for part in _parts(len(inputs), settings.batch_size):
                optimizer.zero_grad()
                target = targets[part]
                logits = runner.logits(ordered.batch(part, generator))
                if not steps:
                    check_labels(labels, logits, IGNORED_LABEL)
                loss = functional.cross_entropy(logits, target, ignore_index=IGNORED_LABEL)
                loss.backward()  # type: ignore[no-untyped-call]
                for rule in active:
                    rule.correct()
                lr = settings.step_size(steps, epoch)
                optimizer.step(lr)
                odometer.step(lr)
                epoch_loss += loss.detach() * len(target)
                steps += 1
    state = runner.read()
    end = to_device(state.params, runner.device) if active else state.params
    results = _joined([rule.finish(end, odometer.distance) for rule in active], runner.layout.device)
    loss_value = float(epoch_loss) / len(inputs) if steps else float("nan")
    return Trained(state, results.extras, results.memory, loss_value, steps)


@dataclass
class Odometer:
    """How far steps of SGD with momentum go along a constant gradient of length 1.

    Σ_k lr_k · v_k with v_k = momentum · v_{k−1} + 1

    Example:
        >>> odometer = Odometer(momentum=0.5)
        >>> odometer.step(1.0)
        >>> odometer.step(1.0)  # 1, then 0.5 + 1
        >>> odometer.distance
        2.5
    """

    momentum: float
    distance: float = 0.0
    velocity: float = 0.0

    def step(self, lr: float) -> None:
        """Make one step of size `lr`."""
        self.velocity = self.momentum * self.velocity + 1.0
        self.distance += lr * self.velocity


def _vectors(
    runner: ModelRunner, given: Mapping[str, Mapping[str, Tensor] | Tensor] | None, what: str
) -> dict[str, Tensor]:
    packed = {name: runner.layout.pack_params(value, f"{what} '{name}'") for name, value in (given or {}).items()}
    return {name: to_device(vector, runner.device) for name, vector in packed.items()}


def _parts(count: int, size: int) -> Iterator[slice]:
    """The positions of each batch of an epoch."""
    first = 0
    for part in batches(count, size):
        yield slice(first, first + len(part))
        first += len(part)


def _joined(results: Sequence[RuleResult], device: torch.device) -> RuleResult:
    extras: dict[str, Tensor] = {}
    memory: dict[str, Tensor] = {}
    for result in results:
        extras |= {name: vector.to(device) for name, vector in result.extras.items()}
        memory |= {name: vector.to(device) for name, vector in result.memory.items()}
    return RuleResult(extras, memory)
