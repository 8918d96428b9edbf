"""The run folder of Flower and NVFlare."""

from pathlib import Path

import pytest
from torch import nn

import fedbe
from fedbe.errors import RunError
from fedbe.experiment import provenance
from fedbe.experiment.recorder import NODES_FILE, RunRecorder, read_node_count


@pytest.mark.parametrize(("variant", "refused"), [("released", True), ("paper", False)])
def test_a_run_of_the_released_program_depends_on_its_version(
    variant: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    server = fedbe.server("fedavgm", model, variant=variant)
    recorder = RunRecorder(tmp_path, server)
    after = server.aggregate(model.state_dict(), [fedbe.ClientUpdate(model.state_dict(), 1)])
    recorder.save_round(after, {}, (), 0.0, None)
    monkeypatch.setattr(provenance, "RELEASED_VERSION", provenance.RELEASED_VERSION + 1)
    if refused:
        with pytest.raises(RunError, match="its numerics was"):
            recorder.load()
    else:
        assert recorder.load() is not None


@pytest.mark.parametrize("text", ['{"online": 1e999, "needed": 4}', '{"online": 2}', "[]", "[" * 100_000, "no JSON"])
def test_a_damaged_count_of_nodes_is_none(tmp_path, text):
    (tmp_path / NODES_FILE).write_text(text)
    assert read_node_count(tmp_path) is None
