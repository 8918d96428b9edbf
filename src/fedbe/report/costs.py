"""Charts of cost: time and memory by phase, the server beside the clients, bytes over the network."""

from collections.abc import Callable, Mapping
from statistics import mean

from fedbe.analysis.runs import Record, Run, RunGroup, seeds_of
from fedbe.report.chart import Bar, Chart, Panel, Table

# The steps of a round as the record names them, gathered into what a reader can tell apart.
PHASES: Mapping[str, tuple[str, ...]] = {
    "clients train": ("train",),
    "guard and average": ("guard", "mean"),
    "members vote": ("fit", "ensemble"),
    "student learns": ("distill",),
    "measuring": ("evaluate", "test"),
}
MEMORY = {"train": "clients train", "server": "server step", "test": "measuring"}
NOT_SERVER = ("train", "test", "evaluate", "round")  # `evaluate` measures the student: a report needs it, a server not


def seconds(group: RunGroup) -> Chart | None:
    """Seconds a round by phase."""
    columns = {name: _mean(group, _sum_of(keys)) for name, keys in PHASES.items()}
    whole = _mean(group, lambda r: r.get("seconds", {}).get("round"))
    if not whole:
        return None
    titles = group.methods
    spent = ", ".join(f"{time(whole[m])} with {titles[m]}" for m in whole)
    return Chart(
        "seconds",
        "bars",
        f"A round takes {spent}" if len(whole) < 4 else "Where the time of a round goes",
        f"Wall-clock time of a round by phase, mean over rounds and seeds; {seeds_of(group.runs)}. {_machine(group)} "
        "Measuring is for this report only.",
        tuple(_panel(group, name, found, time) for name, found in columns.items() if found),
        _table(group, {**columns, "whole round": whole}, "s", lambda v: f"{v:.4f}"),
        unit="s",
    )


def memory(group: RunGroup) -> Chart | None:
    """Peak memory by phase: the largest round of each run, mean over seeds."""
    columns = {title: _peak(group, key) for key, title in MEMORY.items()}
    if not any(columns.values()):
        return None
    top = max((mb, m) for found in columns.values() for m, mb in found.items())
    return Chart(
        "memory",
        "bars",
        f"Memory peaks at {megabytes(top[0])}" + (f", with {group.methods[top[1]]}" if len(group.methods) > 1 else ""),
        "Largest resident memory of all processes of a run by phase, mean over seeds; pages that processes share count "
        f"in each; {seeds_of(group.runs)}.",
        tuple(_panel(group, name, found, megabytes) for name, found in columns.items() if found),
        _table(group, columns, "MB", lambda v: f"{v:.1f}"),
        unit="MB",
    )


def sides(group: RunGroup) -> Chart | None:
    """What the server's step costs beside what the clients' training costs, in seconds."""
    columns = {"clients": _mean(group, _sum_of(("train",))), "server": _mean(group, _server_seconds)}
    clients, server = columns.values()
    if not clients or not server:
        return None
    heavy = max(server, key=lambda m: server[m])
    return Chart(
        "sides",
        "bars",
        f"{group.methods[heavy]}'s server works {time(server[heavy])} a round, its clients {time(clients[heavy])}",
        "Seconds a round of the clients' training (all clients, shared by the worker processes) and of the server's "
        f"step, mean over rounds and seeds; {seeds_of(group.runs)}.",
        tuple(_panel(group, name, values, time) for name, values in columns.items()),
        _table(group, columns, "s", lambda v: f"{v:.4f}"),
        unit="s",
    )


def traffic(group: RunGroup) -> Chart | None:
    """Bytes a round, down to the clients and up to the server."""
    columns = {"server to clients": _mean(group, _bytes("down")), "clients to server": _mean(group, _bytes("up"))}
    whole = _mean(group, lambda r: sum(r["bytes"].values()) if "bytes" in r else None)
    if not whole:
        return None
    most, differ = max(whole, key=lambda m: whole[m]), len(set(whole.values())) > 1
    return Chart(
        "bytes",
        "bars",
        f"A round moves {size(whole[most])}" + (f" with {group.methods[most]}, the most" if differ else ""),
        "What a network would have moved in a round, mean over rounds and seeds; the server's own work moves "
        f"nothing; {seeds_of(group.runs)}.",
        tuple(_panel(group, name, values, size) for name, values in columns.items()),
        _table(group, columns, "bytes", lambda v: f"{v:,.0f}"),
        unit="bytes",
    )


def time(value: float) -> str:
    """
    >>> time(0.0042), time(0.42), time(42.0)
    ('4.2 ms', '0.42 s', '42.0 s')
    """
    if value < 0.1:
        return f"{1000 * value:.1f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def megabytes(value: float) -> str:
    return f"{value:,.0f} MB"


def size(value: float) -> str:
    """
    >>> size(525_200), size(900), size(5.252e9)
    ('525 kB', '900 B', '5.25 GB')
    """
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= step:
            return f"{value / step:.3g} {unit}"
    return f"{value:.0f} B"


def _panel(group: RunGroup, name: str, values: Mapping[str, float], text: Callable[[float], str]) -> Panel:
    return Panel(name, bars=tuple(Bar(group.methods[m], m, v, text(v)) for m, v in values.items()))


def _table(
    group: RunGroup, columns: Mapping[str, Mapping[str, float]], unit: str, text: Callable[[float], str]
) -> Table:
    rows = tuple(
        (title, *(text(found[m]) if m in found else "–" for found in columns.values()))
        for m, title in group.methods.items()
    )
    return Table(("Method", *(f"{name}, {unit}" for name in columns)), rows)


def _mean(group: RunGroup, value: Callable[[Record], float | None]) -> dict[str, float]:
    """By method: the mean over all rounds of all its runs, of which those without a value count as 0 (a phase that only
    some rounds have); methods that never have one are left out."""
    found = {}
    for method in group.methods:
        values = [value(r) for t in group.of(method) for r in t.records]
        if any(v is not None for v in values):
            found[method] = mean(v or 0.0 for v in values)
    return found


def _sum_of(keys: tuple[str, ...]) -> Callable[[Record], float | None]:
    def read(record: Record) -> float | None:
        parts = [v for k, v in record.get("seconds", {}).items() if k in keys]
        return sum(parts) if parts else None

    return read


def _bytes(way: str) -> Callable[[Record], float | None]:
    return lambda record: record.get("bytes", {}).get(way)


def _server_seconds(record: Record) -> float | None:
    found = record.get("seconds", {})
    return sum(v for k, v in found.items() if k not in NOT_SERVER) if found else None


def _peak(group: RunGroup, key: str) -> dict[str, float]:
    def largest(run: Run) -> float | None:
        return max((r["memory_mb"][key] for r in run.records if key in r.get("memory_mb", {})), default=None)

    found = {m: [v for t in group.of(m) if (v := largest(t)) is not None] for m in group.methods}
    return {m: mean(values) for m, values in found.items() if values}


def _machine(group: RunGroup) -> str:
    machines = sorted({t.info.made_with.get("machine", "unknown") for t in group.runs})
    return f"Machine: {'; '.join(machines)}."
