"""A grid in this process: Flower's messages and apps without its processes. Without Flower, these tests are skipped."""

import importlib.util
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

MISSING = importlib.util.find_spec("flwr") is None
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
if MISSING and os.environ.get("CI"):
    raise RuntimeError("CI must run the Flower tests: pip install -c constraints.txt -e '.[flower]'")
if MISSING:
    collect_ignore_glob = ["test_*.py"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if MISSING:
        terminalreporter.write_line(
            "tests/flower is skipped: Flower is not installed (pip install -c constraints.txt -e '.[flower]')"
        )


if not MISSING:
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # Flower's runtime sets these for a ServerApp

    class LocalGrid(Grid):
        """Nodes with random-looking ids, each with its own Context; replies arrive in another order.

        change  (client, reply) -> the reply that arrives, or None if none does
        """

        def __init__(self, app: ClientApp, clients: int, change: Callable[..., Any] = lambda _, message: message):
            self.app, self.change = app, change
            self.nodes = {(7919 * (client + 3)) % 1009 + 2**62: client for client in range(clients)}
            self.contexts = {
                node: Context(1, node, {"partition-id": client}, RecordDict(), {})
                for node, client in self.nodes.items()
            }
            self.asked: list[tuple[str, list[int]]] = []

        def set_run(self, run: Any) -> None: ...

        @property
        def run(self) -> Any: ...

        def create_message(self, *args: Any, **others: Any) -> Any: ...

        def push_messages(self, messages: Any) -> Any: ...

        def pull_messages(self, message_ids: Any) -> Any: ...

        def get_node_ids(self) -> Iterable[int]:
            return list(self.nodes)

        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:  # noqa: ARG002
            messages = list(messages)
            if messages:
                kind = messages[0].metadata.message_type
                self.asked.append((kind, sorted(self.nodes[m.metadata.dst_node_id] for m in messages)))
            replies = [self.deliver(m) for m in reversed(messages)]
            return [r for r in replies if r is not None]

        def deliver(self, message: Message) -> Message | None:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = f"{message.metadata.message_type} {node}"
            try:
                reply = self.app(message, self.contexts[node])
            except Exception as error:
                reply = Message(Error(0, f"Traceback\n{type(error).__name__}: {error}"), reply_to=message)
            return self.change(self.nodes[node], reply)  # type: ignore[no-any-return]

    @pytest.fixture(autouse=True)
    def flower_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        """Flower's lines reach caplog, whatever a test of another folder did to the loggers of this process."""
        monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
        monkeypatch.setattr(logging.getLogger("flwr"), "disabled", False)
        monkeypatch.setattr(logging.getLogger("flwr"), "filters", [])
        monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
        caplog.set_level(logging.INFO, "flwr")  # also forgets which levels were off

    @pytest.fixture
    def local_grid() -> type[LocalGrid]:
        return LocalGrid
