"""The public names, and what importing them costs."""

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import fedbe
from fedbe import errors

DOCS = Path(__file__).parent.parent / "docs"


def _modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_heavy():
    loaded = _modules_after("import fedbe")
    assert "fedbe" in loaded
    assert not loaded & {"torch", "numpy", "flwr", "ray", "matplotlib", "plotly", "sklearn", "pydantic", "typer"}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("from fedbe import *", {"flwr", "ray", "matplotlib", "plotly", "sklearn", "typer"}),
        (
            "import fedbe.algorithms.api, fedbe.models",
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


def _declared() -> dict[str, str]:
    """Name -> module, as `from module import name` says it for type checkers."""
    tree = ast.parse(Path(fedbe.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    return {alias.name: node.module for node in block.body for alias in node.names}


def test_type_checkers_and_the_interpreter_see_the_same_names():
    declared = _declared()
    assert sorted(declared) == sorted(fedbe.__all__)
    for name, module in declared.items():
        assert getattr(fedbe, name) is getattr(sys.modules[module], name)


def test_every_error_class_is_public():
    classes = {
        name for name, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == "fedbe.errors"
    }
    assert "StateError" in classes
    assert classes <= set(fedbe.__all__)
    assert all(issubclass(getattr(fedbe, name), fedbe.FedBEError) for name in classes if not name.endswith("Warning"))


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="no attribute 'FedBEE'"):
        _ = fedbe.FedBEE


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["data.load_task", "report.write_page"])
def test_packages_that_the_documents_name_need_no_import_of_their_own(name):
    code = f"import fedbe; assert callable(fedbe.{name})"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_reference_lists_every_public_name():
    paths = re.findall(r"^::: (.+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert len(paths) == len(set(paths))
    listed = {}
    for path in paths:
        module, _, name = path.rpartition(".")
        listed[name] = getattr(import_module(module), name)
    for name in fedbe.__all__:
        assert listed[name] is getattr(fedbe, name)


def test_the_python_blocks_of_the_library_page_run(capsys):
    """In one session, from the top of the page to its end. A comment after a `print` says what it prints."""
    blocks = re.findall(r"```python\n(.+?)```", (DOCS / "library.md").read_text(), re.DOTALL)
    assert len(blocks) >= 5
    session: dict[str, object] = {}
    for block in blocks:
        exec(block, session)  # noqa: S102
    printed = capsys.readouterr().out
    promised = re.findall(r"print\(.+\)  # (\{.+)", "".join(blocks))
    assert promised
    assert all(line in printed for line in promised)
