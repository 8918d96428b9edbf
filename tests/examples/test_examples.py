"""Every example runs and learns."""

import ast
import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
needs_transformers = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "peft")) or shutil.which("npm") is None,
    reason="needs transformers, peft and npm: pip install -c constraints.txt -e '.[examples]'",
)

needs_jupyter = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("nbclient", "ipykernel")),
    reason="needs nbclient and ipykernel: pip install -c constraints.txt -e '.[dev]'",
)


@pytest.fixture
def example(monkeypatch):
    """Imports an example as its own script would."""
    monkeypatch.syspath_prepend(EXAMPLES)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == EXAMPLES:
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("library_loop", 0.7), ("hospitals", 0.85), ("image_folder", 0.8)])
def test_an_example_learns(example, name, least):
    assert example(name).main() > least


@needs_transformers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers and peft
@pytest.mark.parametrize(("name", "least"), [("text", 0.65), ("lora", 0.6)])
def test_a_text_example_learns(example, name, least):
    assert example(name).main(1) > least


@needs_transformers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lora_needs_less_traffic_and_less_memory(example, capsys):
    lora, text = example("lora"), example("text")
    lora.print_sizes(lora.build_adapters(), text.build_model(), clients=4)
    full, adapters = (line.split()[-3:] for line in capsys.readouterr().out.splitlines()[1:])
    sizes = [[int(word.replace(",", "")) for word in words] for words in (full, adapters)]
    assert all(small < large for large, small in zip(*sizes, strict=True))


@needs_jupyter
@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")  # of Jupyter
def test_the_notebook_runs_in_a_jupyter_kernel():
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    shown = [out.data["text/plain"] for cell in notebook.cells for out in cell.get("outputs", ()) if "data" in out]
    results = next(text for text in shown if text.startswith("{'FedAvg'"))
    assert min(ast.literal_eval(results).values()) > 0.5


def notebook_code():
    """The code of each cell."""
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells), "a notebook in the repository has no outputs"
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.e2e
def test_without_fedbe_the_first_cell_asks_for_a_wheel(tmp_path):
    """As on Colab: a Python without site-packages."""
    alone = [sys.executable, "-I", "-S", "-c", notebook_code()[0]]
    done = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "upload a wheel of fedbe" in done.stderr
    (tmp_path / "fedbe-0.0-py3-none-any.whl").write_bytes(b"")
    done = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True)
    assert "'-m', 'pip', 'install', '-q', 'fedbe-0.0-py3-none-any.whl'" in done.stderr  # there is no pip either


def test_every_example_is_listed():
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.iterdir():
        if path.suffix in {".py", ".ipynb"}:
            assert f"]({path.name})" in listed
