"""The Flower baseline in baselines/fedbe: the same result as `fedbe run`, and its partitioner."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from fedbe.data import split
from fedbe.experiment import checkpoint, loop, run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors.serial import Serial

BASELINE = Path(__file__).parents[2] / "baselines" / "fedbe"
CONFIG = {
    "method": "fedbe",
    "recipe": "digits",
    "rounds": 2,
    "clients": 3,
    "epochs": 1,
    "changes": "model.hidden=[16] settings.distill_epochs=2 settings.num_samples=2",
    "seed": 4,
}


@pytest.fixture
def baseline(monkeypatch):
    monkeypatch.syspath_prepend(str(BASELINE))
    yield
    for name in [name for name in sys.modules if name.startswith("fedbe_baseline")]:
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.usefixtures("baseline")
def test_the_baseline_equals_the_simulator(local_grid, tmp_path):
    from fedbe_baseline import client_app, dataset, server_app

    config = {**CONFIG, "folder": str(tmp_path / "flower")}
    grid = local_grid(client_app.app, 3)
    for context in grid.contexts.values():
        context.run_config = config
    server_app.app(grid, Context(1, 1, {}, RecordDict(), config))
    folder = run_folder.create(tmp_path / "ours", dataset.get_recipe(config), "fedbe", 4, "float32")
    with Serial() as executor:
        assert loop.execute(folder, executor, Callback())
    theirs, ours = checkpoint.latest(folder), checkpoint.latest(tmp_path / "flower")
    assert theirs.round == ours.round == 2
    assert torch.equal(theirs.model.params, ours.model.params)
    assert '"accuracy"' in (tmp_path / "flower" / "report.json").read_text()


RECORDS = Path(__file__).parents[2] / "results"
TABLE = [
    f"reproduce-table1-paper/step--{row}--convnet/seed" for row in ("fedavg", "v-distillation", "fedbe-sgd", "fedbe")
]
ROWS = [*TABLE, "unbalanced-vote/step-seed"]


@pytest.mark.usefixtures("baseline")
def test_each_row_of_the_readme_has_a_command_with_the_settings_of_its_records():
    from fedbe_baseline import dataset

    defaults = tomllib.loads((BASELINE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    expected_results = (BASELINE / "README.md").read_text().partition("## Expected Results")[2]
    commands = re.findall(r"^flwr run .* --run-config '(.*)'$", expected_results, re.MULTILINE)
    for command, row in zip(commands, ROWS, strict=True):
        config = defaults | tomllib.loads("\n".join(re.findall(r'[\w-]+=(?:"[^"]*"|\S+)', command)))
        folder = RECORDS / f"{row}{config['seed']}"
        ours, recorded = dataset.get_recipe(config), run_folder.read_recipe(folder)
        assert config["method"] == run_folder.read_info(folder).method
        for part in ("data", "split", "model", "training"):
            assert getattr(ours, part) == getattr(recorded, part), (row, part)
        name = str(config["method"])
        assert ours.method_for(name).settings() == recorded.method_for(name).settings(), row


@pytest.mark.usefixtures("baseline")
def test_the_step_partitioner_gives_fedbes_split(library):
    datasets = library("datasets")
    library("flwr_datasets")
    from fedbe_baseline.partitioner import StepPartitioner

    labels = torch.arange(400) % 4
    made = StepPartitioner(4, major_classes=1, minor_images=5, server_images=40, seed=3)
    made.dataset = datasets.Dataset.from_dict({"number": list(range(400)), "label": labels.tolist()})
    expected = split("step", labels, clients=4, server=40, seed=3, major_classes=1, minor_images=5)
    assert made.num_partitions == 4
    assert [made.load_partition(i)["number"][:] for i in range(4)] == [c.tolist() for c in expected.clients]
    assert made.load_server_partition()["number"][:] == expected.server.tolist()
    with pytest.raises(ValueError, match="from 0 to 3"):
        made.load_partition(4)
