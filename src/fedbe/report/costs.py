"""Charts of cost: time and memory by phase, server against clients, network traffic."""

from collections.abc import Callable, Collection, Mapping
from statistics import mean

from fedbe.analysis.runs import Run, RunGroup, seeds_of
from fedbe.experiment.run_folder import Record
from fedbe.report.chart import Bar, Chart, Panel, Table

ByMethod = dict[str, float]
# The phases that a chart shows, each with the keys of a record's `seconds` that belong to it.
PHASES: Mapping[str, tuple[str, ...]] = {
    "client training": ("train",),
    "guard and average": ("guard", "mean"),
    "ensemble": ("fit", "ensemble"),
    "distillation": ("distill",),
    "evaluation": ("evaluate", "test"),
}
MEMORY = {"train": "client training", "server": "server step", "test": "evaluation"}
NOT_SERVER = ("train", "test", "evaluate", "round")  # `evaluate` tests the student: for the report, not for the method


def seconds(group: RunGroup) -> Chart | None:
    """Seconds of a round by phase."""
    columns = {phase: _mean(group, _total("seconds", keys)) for phase, keys in PHASES.items()}
    whole = _mean(group, _total("seconds", ("round",)))
    if not whole:
        return None
    by_title = ", ".join(f"{time(whole[m])} with {group.methods[m]}" for m in whole)
    machines = sorted({run.info.made_with.get("machine", "unknown") for run in group.runs})
    return Chart(
        "seconds",
        "bars",
        f"A round takes {by_title}" if len(whole) < 4 else "Time of a round by phase",
        f"Wall-clock time of a round by phase, mean over rounds and seeds; {seeds_of(group.runs)}. Machine: "
        f"{'; '.join(machines)}. Evaluation is only for this report.",
        tuple(_panel(group, phase, values, time) for phase, values in columns.items() if values),
        _table(group, {**columns, "whole round": whole}, "s", lambda v: f"{v:.4f}"),
        unit="s",
    )


def memory(group: RunGroup) -> Chart | None:
    """Peak memory by phase: the largest round of each run, mean over seeds."""
    columns = {phase: _peak(group, key) for key, phase in MEMORY.items()}
    peaks = [(mb, method) for values in columns.values() for method, mb in values.items()]
    if not peaks:
        return None
    peak, method = max(peaks)
    return Chart(
        "memory",
        "bars",
        f"Peak memory: {megabytes(peak)}" + (f", with {group.methods[method]}" if len(group.methods) > 1 else ""),
        "Largest resident memory of all processes of a run by phase, mean over seeds. Memory that processes share is "
        f"counted in each; {seeds_of(group.runs)}.",
        tuple(_panel(group, phase, values, megabytes) for phase, values in columns.items() if values),
        _table(group, columns, "MB", lambda v: f"{v:.1f}"),
        unit="MB",
    )


def server_and_clients(group: RunGroup) -> Chart | None:
    """Seconds of a round on the server and at the clients."""
    columns = {"clients": _mean(group, _total("seconds", ("train",))), "server": _mean(group, _server_seconds)}
    clients, server = columns.values()
    if not clients or not server:
        return None
    slowest = max(server, key=lambda m: server[m])
    title = group.methods[slowest]
    return Chart(
        "sides",
        "bars",
        f"{title}: {time(server[slowest])} a round on the server, {time(clients[slowest])} at the clients",
        "Seconds a round of the clients' training (all clients, shared by the worker processes) and of the server "
        f"step, mean over rounds and seeds; {seeds_of(group.runs)}.",
        tuple(_panel(group, side, values, time) for side, values in columns.items()),
        _table(group, columns, "s", lambda v: f"{v:.4f}"),
        unit="s",
    )


def traffic(group: RunGroup) -> Chart | None:
    """Bytes of a round, down to the clients and up to the server."""
    ways = {"server to clients": "down", "clients to server": "up"}
    columns = {way: _mean(group, _total("bytes", (key,))) for way, key in ways.items()}
    whole = _mean(group, _total("bytes", ways.values()))
    if not whole:
        return None
    most, differ = max(whole, key=lambda m: whole[m]), len(set(whole.values())) > 1
    return Chart(
        "bytes",
        "bars",
        f"A round sends {size(whole[most])}" + (f" with {group.methods[most]}, the most" if differ else ""),
        "Bytes that a network would carry in a round, mean over rounds and seeds. The server step sends nothing; "
        f"{seeds_of(group.runs)}.",
        tuple(_panel(group, way, values, size) for way, values in columns.items()),
        _table(group, columns, "bytes", lambda v: f"{v:,.0f}"),
        unit="bytes",
    )


def time(value: float) -> str:
    """Seconds as text.

    >>> time(0.0042), time(0.42), time(42.0)
    ('4.2 ms', '0.42 s', '42.0 s')
    """
    if value < 0.1:
        return f"{1000 * value:.1f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def megabytes(value: float) -> str:
    """Megabytes as text."""
    return f"{value:,.0f} MB"


def size(value: float) -> str:
    """Bytes as text.

    >>> size(525_200), size(900), size(5.252e9)
    ('525 kB', '900 B', '5.25 GB')
    """
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= step:
            return f"{value / step:.3g} {unit}"
    return f"{value:.0f} B"


def _panel(group: RunGroup, title: str, values: ByMethod, text: Callable[[float], str]) -> Panel:
    return Panel(title, bars=tuple(Bar(group.methods[m], m, v, text(v)) for m, v in values.items()))


def _table(group: RunGroup, columns: Mapping[str, ByMethod], unit: str, text: Callable[[float], str]) -> Table:
    rows = tuple(
        (title, *(text(values[m]) if m in values else "–" for values in columns.values()))
        for m, title in group.methods.items()
    )
    return Table(("Method", *(f"{name}, {unit}" for name in columns)), rows)


def _mean(group: RunGroup, value: Callable[[Record], float | None]) -> ByMethod:
    """By method: the mean over all rounds of all its runs.

    A round without the value counts as 0, because only some rounds have the phase. A method that never has it is left
    out.
    """
    means = {}
    for method in group.methods:
        values = [value(record) for run in group.of(method) for record in run.records]
        if any(v is not None for v in values):
            means[method] = mean(v or 0.0 for v in values)
    return means


def _total(part: str, keys: Collection[str]) -> Callable[[Record], float | None]:
    """A function that sums the values of these keys in a part of a record; None if it has none of them."""

    def read(record: Record) -> float | None:
        values = [v for k, v in record.get(part, {}).items() if k in keys]
        return sum(values) if values else None

    return read


def _server_seconds(record: Record) -> float | None:
    parts = record.get("seconds", {})
    return sum(v for k, v in parts.items() if k not in NOT_SERVER) if parts else None


def _peak(group: RunGroup, key: str) -> ByMethod:
    """By method: the largest memory of each run in a phase, mean over the runs."""

    def largest(run: Run) -> float | None:
        return max((r["memory_mb"][key] for r in run.records if key in r.get("memory_mb", {})), default=None)

    peaks = {m: [mb for run in group.of(m) if (mb := largest(run)) is not None] for m in group.methods}
    return {m: mean(values) for m, values in peaks.items() if values}
