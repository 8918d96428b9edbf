"""What a study does with its finished runs beyond reading their last record: numbers for its table, and a picture.

What was found is kept in the run's folder, so that a study that is asked for again only draws.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from fedbe.analysis.rerun import last_round
from fedbe.analysis.runs import Trial, read_trial
from fedbe.core.files import write_json
from fedbe.errors import FedBEError, RunError, SettingError, nearest
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.report import simplex
from fedbe.report.chart import Chart
from fedbe.reproduce import confidence, features
from fedbe.reproduce.study import Study
from fedbe.reproduce.study_runner import Place

FILE = "analysis.json"
Found = dict[str, Any]


@dataclass(frozen=True)
class Analysis:
    """measure  a finished run -> JSON: numbers, and what the picture needs; a part that cannot be is a sentence
    chart       the picture of the runs of one seed
    """

    measure: Callable[[Trial, ProcessPool], Found]
    chart: Callable[[Sequence[tuple[Trial, Found]]], Chart]


def _triangle(trial: Trial, pool: ProcessPool) -> Found:
    """The models between the clients; and, for the same clients, models of the Gaussian."""
    replayed = last_round(trial, pool)
    found = simplex.sample(replayed)
    gaussian = replayed.sim.teacher(members="S", num_samples=simplex.SAMPLES, posterior="gaussian")
    drawn = (member.state for member in gaussian.voters(replayed.draft, replayed.round))
    judged = {"dirichlet": found.judged, "gaussian": simplex.judge(replayed, drawn)}
    return {"picture": asdict(found), **{name: _numbers(found, own) for name, own in judged.items()}}


def _numbers(found: simplex.Sampled, judged: simplex.Judged) -> dict[str, float]:
    percent = {
        "FedAvg": found.average,
        "vote of 10": judged.vote,
        "clients": mean(accuracy for _, accuracy in found.clients),
        "samples": mean(judged.accuracies),
        "best sample": max(judged.accuracies),
        "samples above FedAvg": 100 * mean(a > found.average for a in judged.accuracies),
    }
    return {name: value / 100 for name, value in percent.items()}


def _triangle_chart(seen: Sequence[tuple[Trial, Found]]) -> Chart:
    trial, found = seen[0]
    sampled = simplex.Sampled(**found["picture"])
    return simplex.chart(trial, replace(sampled, judged=simplex.Judged(**found["picture"]["judged"])))


ANALYSES: Mapping[str, Analysis] = {
    "triangle": Analysis(_triangle, _triangle_chart),
    "confidence": Analysis(confidence.measure, confidence.chart),
    "features": Analysis(features.measure, features.chart),
}


def analyse(
    study: Study,
    places: Sequence[Place],
    pool: ProcessPool | None,
    should_stop: Callable[[], bool],
    asked: Sequence[Place] | None = None,
) -> tuple[bool, dict[tuple[str, ...], str], list[Chart]]:
    """(all done, reasons why cells have no number, the study's picture): over the finished runs, each once.

    Without a pool, and of places that are not `asked` for (default: all are), only what was found before is shown.
    """
    if study.analysis not in ANALYSES:
        raise SettingError(f"unknown analysis '{study.analysis}': {nearest(study.analysis, ANALYSES)}")
    chosen = ANALYSES[study.analysis]
    missing: dict[tuple[str, ...], str] = {}
    seen: dict[Path, tuple[Trial, Found] | str] = {}
    now = {place.folder for place in (places if asked is None else asked)}
    for place in places:
        if place.folder not in seen:
            if pool is not None and should_stop():
                return False, missing, []
            seen[place.folder] = _look(place.folder, chosen, pool if place.folder in now else None)
        here = seen[place.folder]
        reason = here if isinstance(here, str) else look_up({"analysis": here[1]}, study.metric_for(place.cell))
        if isinstance(reason, str):
            missing[place.cell] = reason
    first = min((place.seed for place in places), default=0)
    drawn = {p.folder: s for p in places if p.seed == first and not isinstance(s := seen[p.folder], str)}
    return True, missing, [chosen.chart(list(drawn.values()))] if drawn else []


def _look(folder: Path, chosen: Analysis, pool: ProcessPool | None) -> tuple[Trial, Found] | str:
    """What was found in a run, now or before; or why nothing could be."""
    if not (folder / "run.json").exists():
        return "it has not been run"
    trial, found = read_trial(folder), read(folder)
    if not found and pool is None:
        return "it has not been looked at yet"
    if pool is not None and (not found or any(isinstance(part, str) for part in found.values())):
        try:
            found = chosen.measure(trial, pool)
        except FedBEError as error:
            return str(error)
        write_json(folder / FILE, found)
    return trial, found


def read(folder: Path) -> Found:
    """What the analysis of a run found; nothing if it has not been made."""
    path = folder / FILE
    try:
        found: Found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise RunError(f"{path} cannot be read: remove it, and it is made anew") from error
    return found


def look_up(record: Mapping[str, Any], path: str) -> Any:
    """The number at a path like test_ensemble.accuracy; or the sentence that stands in the place of a part.

    >>> look_up({"test": {"accuracy": 0.5}}, "test.accuracy"), look_up({"test": "no images"}, "test.accuracy")
    (0.5, 'no images')
    """
    found: Any = record
    for key in path.split("."):
        if isinstance(found, str):
            break
        found = found[key]
    return found
