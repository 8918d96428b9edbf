"""Doctests: those of an engine are left out where it is not installed, and that of `load_model` gets a model file."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ENGINES = {"flwr": "fedbe/flower/*", "nvflare": "fedbe/nvflare/*"}
collect_ignore_glob = [path for name, path in ENGINES.items() if importlib.util.find_spec(name) is None]


@pytest.fixture(autouse=True)
def _run_folder(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any], tmp_path: Path) -> None:
    """`folder` in the example of `load_model`: a run folder with a model of the swiss roll."""
    if not request.node.name.endswith(".load_model"):
        return
    from fedbe.algorithms.vote import Member
    from fedbe.core.layout import Layout
    from fedbe.experiment import saved_model
    from fedbe.experiment.federation import prepare
    from fedbe.experiment.recipe_files import load_recipe

    federation = prepare(load_recipe("swissroll"), seed=0)
    model = federation.build_model()
    layout = Layout(model)
    saved_model.save(tmp_path, [Member("model", layout.pack(model.state_dict()))], layout, federation)
    doctest_namespace["folder"] = tmp_path
