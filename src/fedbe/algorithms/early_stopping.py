"""Early stopping without labels: the student's loss against the vote, on inputs that it does not learn from.

FedDF measures accuracy on labeled validation data. A server with unlabeled inputs has none, so the teacher takes the
place of the labels. This says when a student stops learning its teacher, not when it stops getting better.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedbe.core.devices import to_device
from fedbe.core.inputs import Inputs, batches
from fedbe.core.model_runner import ModelRunner
from fedbe.core.state import ModelState


class EarlyStopping:
    """Keeps the state with the lowest loss, and ends after `patience` epochs without a lower one.

    Args:
        patience: In epochs; 0 never ends and keeps nothing.
        runner: The model that is being trained.
        inputs, targets: All inputs and targets.
        held_out: The indices to measure on.
        loss_of: (logits, targets) -> the mean loss.

    Attributes:
        best: The state with the lowest finite loss so far; None if there is none.
    """

    def __init__(
        self,
        patience: int,
        runner: ModelRunner,
        inputs: Inputs,
        targets: Tensor,
        held_out: Tensor,
        loss_of: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self._patience, self._runner = patience, runner
        self._inputs, self._targets, self._held_out, self._loss_of = inputs, targets, held_out, loss_of
        self._lowest, self._waited = math.inf, 0
        self.best: ModelState | None = None

    def ends(self) -> bool:
        """Measure the model after an epoch. True if it has waited long enough."""
        if not self._patience:
            return False
        loss = self._loss()
        if loss < self._lowest:
            self._lowest, self._waited, self.best = loss, 0, self._runner.read()
        else:
            self._waited += 1
        return self._waited >= self._patience

    @torch.no_grad()
    def _loss(self) -> float:
        self._runner.module.eval()
        sizes, losses = [], []
        for chosen in batches(len(self._held_out), self._runner.plan.batch_size):
            index = self._held_out[chosen]
            targets = self._targets[to_device(index, self._runner.device)]
            losses.append(self._loss_of(self._runner.logits(self._inputs.batch(index)), targets))
            sizes.append(len(index))
        self._runner.module.train()
        total = 0.0
        for size, loss in zip(sizes, torch.stack(losses).cpu().tolist(), strict=True):  # waits for the device once
            total += size * loss
        return total / len(self._held_out)
