"""What a study measures in its finished runs beyond their last record: numbers for its table, and a picture.

The result is kept in the run's folder, so a study that is run again only draws.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbe.analysis import calibration, features, server_costs, simplex
from fedbe.analysis.runs import Run, read_run
from fedbe.core.files import write_json
from fedbe.errors import FedBEError, RunError, SettingError, nearest
from fedbe.experiment import run_folder
from fedbe.experiment.executors.base import Executor
from fedbe.report.analysis_charts import Measured, calibration_chart, features_chart, simplex_chart
from fedbe.report.chart import Chart
from fedbe.reproduce.study import NAMES, Cell, Study
from fedbe.reproduce.study_runner import StudyRun

FILE = "analysis.json"
Result = dict[str, Any]
Results = Mapping[Path, tuple[Run, Result] | str]  # by run folder; a string says why there is no result


@dataclass(frozen=True)
class Analysis:
    """One kind of analysis.

    Attributes:
        measure: A finished run -> JSON: numbers, and what the picture needs. A part that is missing is a sentence.
        chart: The picture of the runs of one seed; None for no picture.
    """

    measure: Callable[[Run, Executor], Result]
    chart: Callable[[Measured], Chart] | None = None


def _first_simplex(measured: Measured) -> Chart:
    run, result = measured[0]
    return simplex_chart(run, simplex.SimplexSamples.from_json(result["picture"]))


ANALYSES: Mapping[str, Analysis] = {
    "triangle": Analysis(simplex.measure, _first_simplex),
    "confidence": Analysis(calibration.measure, lambda measured: calibration_chart(measured, NAMES)),
    "features": Analysis(features.measure, lambda measured: features_chart(measured, NAMES)),
    "server-costs": Analysis(server_costs.measure),
}


def analyse(
    study: Study,
    study_runs: Sequence[StudyRun],
    executor: Executor | None,
    should_stop: Callable[[], bool],
    requested: Sequence[StudyRun] | None = None,
) -> tuple[bool, dict[Cell, str], list[Chart]]:
    """Analyse the finished runs of a study, each once.

    Args:
        study: The study; `study.analysis` names the analysis.
        study_runs: All runs of the study.
        executor: Runs the jobs; None: show only the results that were kept before.
        should_stop: Asked before each run.
        requested: The runs to analyse now; default: all. Kept results of the others are shown too.

    Returns:
        Whether all is done; by cell, why it has no number; and the study's picture, if there is one.
    """
    if study.analysis not in ANALYSES:
        raise SettingError(f"unknown analysis '{study.analysis}': {nearest(study.analysis, ANALYSES)}")
    analysis = ANALYSES[study.analysis]
    to_measure = {study_run.folder for study_run in (study_runs if requested is None else requested)}
    results: dict[Path, tuple[Run, Result] | str] = {}
    for folder in dict.fromkeys(study_run.folder for study_run in study_runs):
        if executor is not None and should_stop():
            return False, _missing(study, study_runs, results), []
        results[folder] = _result(folder, analysis, executor if folder in to_measure else None)
    return True, _missing(study, study_runs, results), _charts(analysis, study_runs, results)


def _missing(study: Study, study_runs: Sequence[StudyRun], results: Results) -> dict[Cell, str]:
    """By cell: the sentence that replaces its number."""
    missing = {}
    for study_run in study_runs:
        result = results.get(study_run.folder)
        if result is None:  # stopped before it
            continue
        metric = study.metric_for(study_run.cell)
        with reading(study_run.folder):
            number = result if isinstance(result, str) else look_up({"analysis": result[1]}, metric)
        if isinstance(number, str):
            missing[study_run.cell] = number
    return missing


def _charts(analysis: Analysis, study_runs: Sequence[StudyRun], results: Results) -> list[Chart]:
    """The picture of the first seed, if the analysis has one."""
    if analysis.chart is None:
        return []
    first = min((study_run.seed for study_run in study_runs), default=0)
    folders = dict.fromkeys(study_run.folder for study_run in study_runs if study_run.seed == first)
    measured = [result for folder in folders if not isinstance(result := results[folder], str)]
    with reading(*(run.folder for run, _ in measured)):
        return [analysis.chart(measured)] if measured else []


def _result(folder: Path, analysis: Analysis, executor: Executor | None) -> tuple[Run, Result] | str:
    """The result of a run, kept or measured now, or why there is none."""
    if not run_folder.exists(folder):
        return "it has not been run"
    run, result = read_run(folder), read(folder)
    if not result and executor is None:
        return "it has not been analysed yet"
    if executor is not None and (not result or any(isinstance(part, str) for part in result.values())):
        try:
            result = analysis.measure(run, executor)
        except FedBEError as error:
            return str(error)
        write_json(folder / FILE, result)
    return run, result


def read(folder: Path) -> Result:
    """The kept result of a run's analysis; empty if there is none."""
    path = folder / FILE
    try:
        result: Result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not isinstance(result, dict):
            raise ValueError("it must be a table")
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: remove it, and it is computed again") from error
    return result


@contextmanager
def reading(*folders: Path) -> Iterator[None]:
    """Errors in the use of kept results become one sentence: only each analysis knows the form of its own."""
    try:
        yield
    except FedBEError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        files = ", ".join(str(folder / FILE) for folder in folders)
        raise RunError(f"{files} is damaged ({error!r:.100}): remove it, and it is computed again") from error


def look_up(record: Mapping[str, Any], path: str) -> Any:
    """The number at a path like test_ensemble.accuracy, or the sentence that replaces a part.

    Example:
        >>> look_up({"test": {"accuracy": 0.5}}, "test.accuracy"), look_up({"test": "no images"}, "test.accuracy")
        (0.5, 'no images')
    """
    value: Any = record
    for key in path.split("."):
        if isinstance(value, str):
            break
        value = value[key]
    return value
