"""A study -> a section of the report: its table, its charts, and sentences for what is missing."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedbe.analysis.runs import RunGroup, seeds_of
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import available_recipes, dump_recipe, load_recipe
from fedbe.report import costs, curves, results
from fedbe.report.analysis_charts import has_simplex, simplex_of_group
from fedbe.report.chart import Chart, ReportSection
from fedbe.report.split_chart import split_of_group

# A chart that has no data, and the sentence that says so.
CURVES: tuple[tuple[Callable[[RunGroup], Chart | None], str], ...] = (
    (curves.accuracy, "Accuracy by round is not shown: no round has been measured yet."),
    (
        curves.teachers,
        "Ensemble, student and average are not shown: no ensemble was measured "
        '(set `evaluation.ensemble = "SAC"` in the recipe).',
    ),
    (curves.calibration, "Calibration is not shown: no round has been measured yet."),
    (curves.confidence, "Confidence against accuracy is not shown: no round has been measured yet."),
    (costs.seconds, "Time by phase is not shown: no round has been timed yet."),
    (costs.sides, "Server and client time are not shown: no round has been timed yet."),
    (costs.traffic, "Bytes over the network are not shown: no round has been played yet."),
)


def build_sections(groups: Sequence[RunGroup], *, trusted: bool = False) -> list[ReportSection]:
    """A section for each study; ids tell charts of several studies apart. `own`: they were played here, just now."""
    return [_section(group, f"s{i}", trusted) for i, group in enumerate(groups)]


def _section(group: RunGroup, prefix: str, trusted: bool) -> ReportSection:
    charts: list[Chart] = []
    missing = list(group.notes)
    for make, absent in CURVES:
        _keep(make(group) or absent, charts, missing)
    _keep(split_of_group(group, trusted=trusted), charts, missing)
    if has_simplex(group):
        _keep(simplex_of_group(group), charts, missing)
    _keep(costs.memory(group) or "Memory by phase is not shown: these runs did not record it.", charts, missing)
    finding, deck = results.finding(group)
    return ReportSection(
        id=f"{prefix}-{re.sub('[^a-z0-9]+', '-', group.name.lower())}",
        title=group.name,
        finding=finding,
        deck=deck,
        about=_about(group),
        results=results.table(group),
        charts=tuple(charts),
        methods=tuple(group.methods.items()),
        missing=tuple(missing),
    )


def _keep(found: Chart | str, charts: list[Chart], missing: list[str]) -> None:
    if isinstance(found, str):
        missing.append(found)
    else:
        charts.append(found)


def _told(recipe: Recipe) -> str:
    """What a recipe says of itself; or, where a shipped one was changed, how: its own words may no longer be true."""
    changed = []
    if recipe.name in available_recipes():
        now, shipped = _flat(dump_recipe(recipe)), _flat(dump_recipe(load_recipe(recipe.name)))
        changed = [f"{key}={now.get(key, '')}" for key in sorted(now | shipped) if now.get(key) != shipped.get(key)]
    if changed:
        return f" with {', '.join(changed)}"
    return f": {recipe.summary}" if recipe.summary else ""


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings by their dotted names, without the method, which every line of a report names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return {key: value for key, value in found.items() if key not in ("method", "summary")}


def _about(group: RunGroup) -> tuple[str, ...]:
    """What ran, so that a number can be traced: recipe, seeds, precision, versions, machine."""
    recipe, infos = group.recipe, [t.info for t in group.runs]

    def made(what: str) -> str:
        told = ", ".join(sorted({i.made_with.get(what, "unknown") for i in infos}))
        return re.sub(r"\b([0-9a-f]{10})[0-9a-f]{30}\b", r"\1", told)  # ten digits of a commit tell it apart

    late = [f"{t.title}, seed {t.info.seed}: {len(t.records)} of {t.rounds} rounds" for t in group.unfinished]
    facts = [
        f"Recipe {recipe.name}{_told(recipe)}.",
        f"{recipe.data.source}, {recipe.split.kind} split, {recipe.split.clients} clients, {recipe.model.name}, "
        f"{recipe.training.rounds} rounds; variant {recipe.variant}; {seeds_of(group.runs)}; {infos[0].precision}.",
        f"fedbe {made('fedbe')}, commit {made('commit')}, torch {made('torch')}; {made('machine')}.",
    ]
    if late:
        facts.append(f"Unfinished: {'; '.join(late)}.")
    return tuple(facts)
