"""Kept results of an analysis: a file that is not what was written is one sentence."""

import json
from dataclasses import replace
from typing import Any

import pytest

from fedbe.errors import RunError
from fedbe.reproduce import study_analysis, study_runner, table
from fedbe.reproduce.study import load_study

NUMBERS = {"models": 3, "accuracy": 0.5, "confidence": 0.6, "confidence when wrong": 0.4, "ECE": 0.1}
PART = NUMBERS | {"bins": [[3.0] * 20, [2.0] * 20]}
KEPT = {"clients": PART, "samples": PART}


@pytest.mark.parametrize(
    "kept",
    [
        [],
        {"clients": PART},
        KEPT | {"clients": [1]},
        KEPT | {"clients": None},
        KEPT | {"clients": PART | {"accuracy": None}},
        KEPT | {"clients": PART | {"accuracy": 10**400}},
        KEPT | {"clients": PART | {"bins": 3}},
    ],
)
def test_a_damaged_file_is_one_sentence(make_run: Any, kept: Any) -> None:
    study = load_study("fig-confidence")
    folder = make_run("kept", "fedavg", [0.5, 0.6, 0.7])
    runs = [replace(run, folder=folder) for run in study_runner.study_runs(study, "smoke", 1, folder.parent)]

    def read() -> None:
        study_analysis.analyse(study, runs, None, lambda: False)
        table.collect(study, runs)

    (folder / "analysis.json").write_text(json.dumps(KEPT))
    read()
    (folder / "analysis.json").write_text(json.dumps(kept))
    with pytest.raises(RunError, match=r"analysis\.json.*: remove it, and it is computed again"):
        read()
