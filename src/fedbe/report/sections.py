"""A group of runs -> a section of the report: its table, its charts, and sentences for what is missing."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedbe.analysis.runs import RunGroup, seeds_of
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import available_recipes, dump_recipe, load_recipe
from fedbe.report import costs, curves, results
from fedbe.report.analysis_charts import has_simplex, simplex_of_group
from fedbe.report.chart import Chart, ReportSection
from fedbe.report.gate_chart import gate_of_group
from fedbe.report.split_chart import split_of_group

# Makers of charts, each with the sentence for a group without the data.
CHARTS: tuple[tuple[Callable[[RunGroup], Chart | None], str], ...] = (
    (curves.accuracy, "Accuracy by round is not shown: no round has been tested yet."),
    (
        curves.ensembles,
        "Ensemble, student and average are not shown: no ensemble was tested "
        '(set `evaluation.ensemble = "SAC"` in the recipe).',
    ),
    (curves.calibration, "Calibration error is not shown: no round has been tested yet."),
    (curves.confidence, "Confidence and accuracy are not shown: no round has been tested yet."),
    (costs.seconds, "Time by phase is not shown: no round is done yet."),
    (costs.server_and_clients, "Server and client time are not shown: no round is done yet."),
    (costs.traffic, "Network traffic is not shown: no round is done yet."),
)


def build_sections(groups: Sequence[RunGroup], *, trusted: bool = False) -> list[ReportSection]:
    """Make a section for each group of runs.

    Args:
        groups: What `read_groups` returns.
        trusted: The runs were made here, so a function that their recipe names as data may be called.
    """
    return [_section(group, f"s{i}", trusted) for i, group in enumerate(groups)]


def _section(group: RunGroup, prefix: str, trusted: bool) -> ReportSection:
    """`prefix` keeps the ids of several sections apart."""
    charts: list[Chart | str] = [make(group) or reason for make, reason in CHARTS]
    if (gate := gate_of_group(group)) is not None:  # most methods have none, so nothing is missing then
        charts.insert(2, gate)
    charts.append(split_of_group(group, trusted=trusted))
    if has_simplex(group):
        charts.append(simplex_of_group(group))
    charts.append(costs.memory(group) or "Memory by phase is not shown: these runs did not record it.")
    headline, certainty = results.finding(group)
    return ReportSection(
        id=f"{prefix}-{re.sub('[^a-z0-9]+', '-', group.name.lower())}",
        title=group.name,
        finding=headline,
        certainty=certainty,
        about=_about(group),
        results=results.table(group),
        charts=tuple(chart for chart in charts if isinstance(chart, Chart)),
        methods=tuple(group.methods.items()),
        missing=(*group.notes, *(reason for reason in charts if isinstance(reason, str))),
    )


def _about(group: RunGroup) -> tuple[str, ...]:
    """Where the numbers come from: recipe, seeds, precision, versions, machine, device."""
    recipe, infos = group.recipe, [run.info for run in group.runs]

    def made_with(key: str, missing: str = "unknown") -> str:
        versions = ", ".join(sorted({info.made_with.get(key, missing) for info in infos}))
        return re.sub(r"\b([0-9a-f]{10})[0-9a-f]{30}\b", r"\1", versions)  # ten digits identify a commit

    facts = [
        f"Recipe {recipe.name}{_summary_or_changes(recipe)}.",
        f"{recipe.data.source}, {recipe.split.kind} split, {recipe.split.clients} clients, {recipe.model.name}, "
        f"{recipe.training.rounds} rounds; variant {recipe.variant}; {seeds_of(group.runs)}; {infos[0].precision}.",
        f"fedbe {made_with('fedbe')}, commit {made_with('commit')}, torch {made_with('torch')}; "
        f"{made_with('machine')}; device {made_with('device', missing='cpu')}.",
    ]
    if group.unfinished:
        progress = (f"{r.title}, seed {r.info.seed}: {len(r.records)} of {r.rounds} rounds" for r in group.unfinished)
        facts.append(f"Unfinished: {'; '.join(progress)}.")
    return tuple(facts)


def _summary_or_changes(recipe: Recipe) -> str:
    """The recipe's summary; or, for a shipped recipe with other settings, these: the summary may not be true then."""
    changes = []
    if recipe.name in available_recipes():
        now, shipped = _flat(dump_recipe(recipe)), _flat(dump_recipe(load_recipe(recipe.name)))
        keys = [key for key in sorted(now | shipped) if now.get(key) != shipped.get(key)]
        # A new split or network removes the settings of the old one; only its name was changed.
        renewed = tuple(f"{key.partition('.')[0]}." for key in keys if key in ("split.kind", "model.name"))
        changes = [f"{key}={now.get(key, '')}" for key in keys if key in now or not key.startswith(renewed)]
    if changes:
        return f" with {', '.join(changes)}"
    return f": {recipe.summary}" if recipe.summary else ""


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings by their dotted names, without the method, which every line of a report names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return {key: value for key, value in flat.items() if key not in ("method", "summary")}
