"""The client's side: `client_app(train)` makes a Flower ClientApp that follows whatever method the server runs.

    def train(job: Job) -> Reply:
        return job.fit(Net(), inputs, labels, LocalSettings(epochs=5))

    app = client_app(train)

The rules of FedProx and SCAFFOLD are applied by `job.fit`; the app itself need not know the method.
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
from fedbe.core.compute import Plan
from fedbe.core.inputs import Augmentation, Inputs, as_inputs
from fedbe.core.model_runner import ModelRunner
from fedbe.core.random import generator
from fedbe.core.state import Layout, ModelState
from fedbe.core.updates import ClientId
from fedbe.errors import SettingError, StateError
from fedbe.flower import wire
from fedbe.flower.arrays import expected, expected_extra, read, split, to_record

MEMORY = "fedbe.memory"  # the record in the Context's state, which Flower keeps between the rounds of a run


@dataclass(frozen=True, eq=False)
class Reply:
    """What a client sends back.

    state     its trained `state_dict`
    examples  how many examples it trained on
    metrics   numbers for the report
    extras    what the rules send, by name, as named tensors; `job.fit` fills it in
    memory    vectors that stay with the client until its next round; `job.fit` fills it in
    followed  the method whose rules it trained with; `job.fit` fills it in. A loop of your own that applies them
              itself says `job.order.method.name`
    """

    state: Mapping[str, Tensor]
    num_examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    followed: str | None = None


@dataclass(frozen=True, eq=False)
class Job:
    """One client's work in one round.

    order    method, seed and round, as the server said
    client   this client's stable id
    config   the ConfigRecord that the ServerApp sent along (`train_config`)
    context  Flower's Context: `job.context.node_config["partition-id"]`, `job.context.run_config[…]`
    """

    order: wire.Order
    client_id: ClientId
    config: ConfigRecord
    context: Context
    arrays: Mapping[str, Array]

    @property
    def round(self) -> int:
        return self.order.round

    def load(self, model: nn.Module) -> nn.Module:
        """Put the global weights into a module, and return it."""
        own, _ = split(self.arrays)
        model.load_state_dict(read(own, expected(Layout(model)), "the global model"))
        return model

    def fit(
        self,
        model: nn.Module,
        inputs: "Inputs | Tensor | torch.utils.data.Dataset[Any]",
        labels: Tensor,
        settings: LocalSettings | None = None,
        *,
        augment: Augmentation | None = None,
        plan: Plan | None = None,
    ) -> Reply:
        """Local SGD from the global model with the rules of the server's method; reproducible."""
        runner = ModelRunner(model, plan)
        state, broadcast, memory = self._given(runner.layout)
        done = train(
            runner,
            state,
            as_inputs(inputs, augment, "inputs"),
            labels,
            settings or LocalSettings(),
            generator(self.order.seed, self.round, "train", self.client_id),
            rules=self.order.method.rules,
            broadcast=broadcast,
            memory=memory,
        )
        metrics = {"train-loss": done.loss} if math.isfinite(done.loss) else {}
        extras = {name: runner.layout.unpack_params(vector) for name, vector in done.extras.items()}
        state_dict, method = runner.layout.unpack(done.state), self.order.method.name
        return Reply(state_dict, len(labels), metrics, extras, done.memory, method)

    def _given(self, layout: Layout) -> tuple[ModelState, dict[str, Any], dict[str, Any]]:
        """The global model, what came with it for everybody, and what this client is to remember."""
        own, extras = split(self.arrays)
        state = layout.pack(read(own, expected(layout), "the global model"))
        named = {n: read(a, expected_extra(layout), f"the extra '{n}'") for n, a in extras.items()}
        broadcast = {n: t for n, t in named.items() if not n.startswith(wire.MEMORY)}
        if self.order.memory == wire.OWN:
            return state, broadcast, self._kept(layout)
        return state, broadcast, {n.removeprefix(wire.MEMORY): t for n, t in named.items() if n not in broadcast}

    def _kept(self, layout: Layout) -> dict[str, Tensor]:
        kept = self.context.state.array_records.get(MEMORY, ArrayRecord())
        if self.order.method.extras and not kept:
            raise StateError("this client's memory is gone, because its node was restarted; the server will send it")
        wanted = {name: (torch.Size([layout.size]), layout.dtype) for name in kept}
        return read(kept, wanted, "the client's memory")


def client_app(train: Callable[[Job], Reply]) -> ClientApp:
    """A ClientApp whose training is `train(job) -> Reply`; add `@app.evaluate()` to it as to any other."""
    app = ClientApp()

    @app.train()
    def _train(message: Message, context: Context) -> Message:
        job = _job(message, context)
        reply = train(job)
        if not isinstance(reply, Reply):
            raise SettingError(f"`train` must return a fedbe.flower.Reply, got {type(reply).__name__}")
        if reply.memory:
            context.state[MEMORY] = to_record(reply.memory)
        key = next(iter(message.content.array_records))
        metrics: dict[str, Any] = {job.order.weight: reply.num_examples, **reply.metrics}
        content = RecordDict(
            {
                key: to_record(reply.state, reply.extras),
                "metrics": MetricRecord(metrics),
                wire.RECORD: wire.signature(context, reply.followed),
            }
        )
        return Message(content, reply_to=message)

    @app.query("fedbe")
    def _who(message: Message, context: Context) -> Message:
        return Message(RecordDict({wire.RECORD: wire.signature(context)}), reply_to=message)

    return app


def _job(message: Message, context: Context) -> Job:
    records = message.content.array_records
    if len(records) != 1:
        raise StateError(f"the server's message must have one ArrayRecord, got {len(records)}")
    configs = {k: c for k, c in message.content.config_records.items() if k != wire.RECORD}
    client = wire.client_id(context)
    return Job(
        order=wire.read_order(message.content),
        client_id=context.node_id if client is None else client,
        config=next(iter(configs.values()), ConfigRecord()),
        context=context,
        arrays=next(iter(records.values())),
    )
