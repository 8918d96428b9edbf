"""Seconds of the server's step, by hand."""

import json

import pytest

from fedbe.analysis.runs import read_run
from fedbe.analysis.server_costs import measure
from fedbe.errors import RunError


def test_means_over_rounds_and_of_one_member(make_run):
    folder = make_run("run", "fedbe", [0.5, 0.6])
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line, factor in zip(lines, (1, 3), strict=True):
        line["server"] = {"members": {"sample 1": 0.1, "average": 0.2, "client 0": 0.3, "client 1": 0.4}}
        line["seconds"] |= {"fit": 0.5 * factor, "ensemble": 2.0 * factor, "distill": 10.0 * factor}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert measure(read_run(folder), None) == {"distribution": 1.0, "inference": 1.0, "distillation": 20.0}


def test_a_method_without_distillation_has_no_such_parts(make_run):
    with pytest.raises(RunError, match="FedAvg has no distillation"):
        measure(read_run(make_run("run", "fedavg", [0.5])), None)
