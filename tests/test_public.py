"""The public names, and what importing them costs."""

import subprocess
import sys

import pytest

import fedbe


def _modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_heavy():
    loaded = _modules_after("import fedbe")
    assert "fedbe" in loaded
    assert not loaded & {"torch", "numpy", "flwr", "ray", "matplotlib", "plotly", "sklearn", "pydantic", "typer"}


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("from fedbe import *", {"flwr", "ray", "matplotlib", "plotly", "sklearn", "typer"}),
        (
            "import fedbe.algorithms.server.api, fedbe.models",
            {"flwr", "ray", "matplotlib", "plotly", "sklearn", "pydantic"},
        ),
    ],
)
def test_using_it_imports_neither_flower_nor_pictures(statement, unwanted):
    loaded = _modules_after(statement)
    assert "torch" in loaded
    assert not loaded & unwanted


@pytest.mark.parametrize("name", fedbe.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert getattr(fedbe, name).__doc__
    assert name in dir(fedbe)


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="module 'fedbe' has no attribute 'FedBEE'"):
        _ = fedbe.FedBEE


@pytest.mark.parametrize("name", ["data.load_task", "report.write_page"])
def test_packages_that_the_documents_name_need_no_import_of_their_own(name):
    code = f"import fedbe; assert callable(fedbe.{name})"
    subprocess.run([sys.executable, "-c", code], check=True)
