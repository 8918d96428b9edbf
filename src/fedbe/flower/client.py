"""The client side: `client_app(train)` makes a Flower ClientApp that follows the method that the server runs.

    def train(request: TrainRequest) -> TrainReply:
        return request.fit(Net(), inputs, labels, LocalSettings(epochs=5))

    app = client_app(train)

`request.fit` applies the rules of FedProx and SCAFFOLD; the app need not know the method.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedbe.algorithms.client.training import LocalSettings, train
from fedbe.algorithms.methods import Method
from fedbe.core.compute import Plan
from fedbe.core.inputs import Augmentation, as_inputs
from fedbe.core.layout import Layout
from fedbe.core.model_runner import ModelRunner
from fedbe.core.random import generator
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientId
from fedbe.errors import SettingError, StateError
from fedbe.flower import messages
from fedbe.flower.arrays import pack_state, params_spec, read_arrays, read_state, split_extras, to_record

MEMORY = "fedbe.memory"  # the record in the Context's state, which Flower keeps between the rounds of a run


@dataclass(frozen=True, eq=False)
class TrainReply:
    """What a client sends back. `TrainRequest.fit` returns one.

    With your own training loop, `TrainReply(model.state_dict(), num_examples)` is enough for a method without rules.

    Attributes:
        state: the trained `state_dict`.
        num_examples: the number of examples the client trained on.
        metrics: numbers for the report. Default: none.
        extras: what the method's rules send, by name, as named tensors. Default: none.
        memory: vectors that stay at the client until its next round. Default: none.
        applied_method: the name of the method whose rules were applied. A training loop that applies them itself
            passes `request.method.name`. Default: None, no rules.
    """

    state: Mapping[str, Tensor]
    num_examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    applied_method: str | None = None


@dataclass(frozen=True, eq=False)
class TrainRequest:
    """What the server asks of one client in one round; the argument of `train` in `client_app(train)`.

    Attributes:
        instructions: method, seed and round, as the server sent them.
        client_id: the client's stable id: `client-id` of the node's configuration, else `partition-id`, else
            Flower's node id.
        config: the ConfigRecord that the ServerApp sent (`train_config`).
        context: Flower's Context: `request.context.node_config["partition-id"]`, `request.context.run_config[…]`.
        arrays: the global model and extras as received; `load` and `fit` read them.
    """

    instructions: messages.TrainInstructions
    client_id: ClientId
    config: ConfigRecord
    context: Context
    arrays: Mapping[str, Array]

    @property
    def round(self) -> int:
        """The round, from 1; 0 if the server did not send it."""
        return self.instructions.round

    @property
    def method(self) -> Method:
        """The server's method; `method.rules` are the rules for local training."""
        return self.instructions.method

    def load(self, model: nn.Module) -> nn.Module:
        """Load the global weights into a module and return it. StateError if they do not fit.

        Frozen parameters do not travel and stay as they are.
        """
        arrays, _ = split_extras(self.arrays)
        model.load_state_dict(read_state(arrays, Layout(model), "the global model"), strict=False)
        return model

    def fit(
        self,
        model: nn.Module,
        inputs: Any,
        labels: Tensor,
        settings: LocalSettings | None = None,
        *,
        augment: Augmentation | None = None,
        plan: Plan | None = None,
        output: str | int | None = None,
    ) -> TrainReply:
        """Train by local SGD from the global model, with the rules of the server's method.

        The result is a function of (seed, round, client id) and the data.

        Args:
            model: the architecture. It is copied. Its weights do not matter, except frozen ones: they must be the
                server's.
            inputs: the client's inputs, in any form that `unlabeled` of `fedbe.Server` has.
            labels: class indices [N].
            settings: epochs, batch size, learning rate and so on. Default: `LocalSettings()`.
            augment: (batch, generator) -> batch. Default: none.
            plan: precision and memory layout. Default: float32.
            output: which part of the model's output are the logits, as in `fedbe.Server`.

        Returns:
            A complete reply; the metric "train-loss" is included if it is finite.

        Raises:
            StateError: the global model does not fit `model`, or the client's memory was lost.
        """
        runner = ModelRunner(model, plan, output)
        state, broadcast, memory = self._received(runner.layout)
        result = train(
            runner,
            state,
            as_inputs(inputs, augment, "inputs"),
            labels,
            settings or LocalSettings(),
            generator(self.instructions.seed, self.round, "train", self.client_id),
            rules=self.method.rules,
            broadcast=broadcast,
            memory=memory,
        )
        return TrainReply(
            state=runner.layout.unpack(result.state),
            num_examples=len(labels),
            metrics={"train-loss": result.loss} if math.isfinite(result.loss) else {},
            extras={name: runner.layout.unpack_params(vector) for name, vector in result.extras.items()},
            memory=result.memory,
            applied_method=self.method.name,
        )

    def _received(self, layout: Layout) -> tuple[ModelState, dict[str, Any], dict[str, Any]]:
        """The global model, the extras that every client gets, and this client's memory."""
        arrays, extras = split_extras(self.arrays)
        state = pack_state(arrays, layout, "the global model")
        broadcast: dict[str, Any] = {}
        memory: dict[str, Any] = {}
        for name, extra in extras.items():
            tensors = read_arrays(extra, params_spec(layout), f"the extra '{name}'")
            if name.startswith(messages.MEMORY_PREFIX):
                memory[name.removeprefix(messages.MEMORY_PREFIX)] = tensors
            else:
                broadcast[name] = tensors
        return state, broadcast, self._kept_memory(layout) if self.instructions.memory == messages.KEPT else memory

    def _kept_memory(self, layout: Layout) -> dict[str, Tensor]:
        record = self.context.state.array_records.get(MEMORY, ArrayRecord())
        if self.method.extras and not record:
            raise StateError("this client's memory was lost when its node restarted; the server will send it again")
        spec = {name: (torch.Size([layout.size]), layout.dtype) for name in record}
        return read_arrays(record, spec, "the client's memory")


def client_app(train: Callable[[TrainRequest], TrainReply]) -> ClientApp:
    """Make a ClientApp from a training function.

    Args:
        train: called once in every round in which this client takes part.

    Returns:
        A ClientApp; add `@app.evaluate()` to it as to any other.

    Example:
        >>> app = client_app(lambda request: TrainReply(request.load(nn.Linear(3, 2)).state_dict(), num_examples=10))
    """
    app = ClientApp()

    @app.train()
    def _train(message: Message, context: Context) -> Message:
        request = _read_request(message, context)
        reply = train(request)
        if not isinstance(reply, TrainReply):
            raise SettingError(f"`train` must return a fedbe.flower.TrainReply, got {type(reply).__name__}")
        if reply.memory:
            context.state[MEMORY] = to_record(reply.memory)
        key = next(iter(message.content.array_records))
        # What does not come with the request, such as frozen parameters, is not sent back.
        state = {name: tensor for name, tensor in reply.state.items() if name in request.arrays}
        metrics: dict[str, Any] = {request.instructions.weight_key: reply.num_examples, **reply.metrics}
        content = RecordDict(
            {
                key: to_record(state, reply.extras),
                "metrics": MetricRecord(metrics),
                messages.RECORD: messages.client_record(context, reply.applied_method),
            }
        )
        return Message(content, reply_to=message)

    @app.query("fedbe")
    def _identify(message: Message, context: Context) -> Message:
        return Message(RecordDict({messages.RECORD: messages.client_record(context)}), reply_to=message)

    return app


def _read_request(message: Message, context: Context) -> TrainRequest:
    records = message.content.array_records
    if len(records) != 1:
        raise StateError(f"the server's message must have one ArrayRecord, got {len(records)}")
    client = messages.client_id(context)
    return TrainRequest(
        instructions=messages.read_instructions(message.content),
        client_id=context.node_id if client is None else client,
        config=messages.users_config(message.content),
        context=context,
        arrays=next(iter(records.values())),
    )
