"""What happened in one `aggregate` of a server, and how it is printed."""

from dataclasses import dataclass

from fedbe.algorithms.server.context import StepInfo
from fedbe.algorithms.server.guard import SetAside, printable
from fedbe.algorithms.server.influence import Capped
from fedbe.core.metrics import Metrics
from fedbe.core.updates import ClientId


@dataclass(frozen=True)
class RoundInfo:
    """What happened in the last `aggregate`. `print(server.info)` shows it as a table.

    Attributes:
        round: the number of the round, from 1.
        clients: ids of the clients whose updates were used.
        set_aside: clients whose updates were not used, with the reason.
        step: who voted, how long each phase took, and metrics where labels are known.
        capped: clients that count less than they report (`max_share`, `max_size_ratio`).
    """

    round: int
    clients: tuple[ClientId, ...]
    set_aside: tuple[SetAside, ...]
    step: StepInfo
    capped: tuple[Capped, ...] = ()

    def __str__(self) -> str:
        rows = [("round", str(self.round)), ("clients", _some([str(c) for c in self.clients]))]
        rows += [("set aside", f"client {s.client_id}: {s.reason}") for s in self.set_aside]
        rows += [("capped", str(c)) for c in self.capped]
        if self.step.members:
            rows.append(("members", _some([m.name for m in self.step.members])))
        if self.step.disagreement is not None:
            rows.append(("disagreement", f"{self.step.disagreement:.3f}"))
        for name in ("average", "ensemble", "student"):
            metrics: Metrics | None = getattr(self.step, name)
            if metrics is not None:
                rows.append((name, f"accuracy {metrics.accuracy:.3f}, nll {metrics.nll:.3f}"))
        if not self.step.channels_last:
            rows.append(("memory layout", "contiguous"))  # not channels-last: see `ModelRunner.choose_memory_format`
        if (gate := self.step.gate) is not None:
            kept = "student" if gate.accepted else "average"
            scores = f"average {gate.average:.3f}, student {gate.student:.3f}"
            rows.append(("gate", f"the {kept} stays; agreement with the vote: {scores}; lr {gate.lr:.2g}"))
        rows.append(("seconds", ", ".join(f"{k} {v:.2f}" for k, v in self.step.seconds.items())))
        return "\n".join(f"{name:<14}{printable(value)}" for name, value in rows)  # ids are the clients' words


def _some(names: list[str], shown: int = 8) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{len(names)} ({', '.join(names[:shown])}{more})"
