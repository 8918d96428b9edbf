"""The code and the commands in the README and in the documentation run.

A page is run from top to bottom in one folder: its blocks of Python share their names, and its commands of fedbe run
between them, with tiny settings and a tiny CIFAR-10. A block that needs what a test does not have (a download, a
server) is marked with a comment before it: <!-- not run: the reason -->. The commands that are not run are in NOT_RUN.
Commands of make, pip and Python are in RUN or in OTHERS_NOT_RUN.
"""

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import tomllib
import warnings
from pathlib import Path

import click
import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from fedbe.cli.app import app
from fedbe.data import sources
from fedbe.experiment.recipe_files import load_recipe
from fedbe.reproduce.study import load_study

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = r"(?:<!-- not run: (?P<reason>[^>]+) -->\n\n?)?^```python\n(?P<code>.*?)^```"
BLOCK = re.compile(CODE, re.M | re.S)
COMMAND = r"^    (?P<line>fedbe [^#\n]*)|`(?P<quoted>fedbe [a-z-][^`]*)`"
PART = re.compile(f"{CODE}|{COMMAND}", re.M | re.S)
OTHER = re.compile(r"^    ((?:make|pip|python) [^#\n]*)|`((?:make|pip|python) [^`\n]*)`", re.M)

NOT_RUN = {
    "fedbe data get": "downloads; tests/data/test_download.py downloads from a server of its own",
    "fedbe watch": "serves until Ctrl-C; tests/cli/test_report.py starts and ends it",
    "fedbe flower certs": "tests/flower/test_commands.py runs a deployment: certs, up, run, down",
    "fedbe flower up": "as certs",
    "fedbe flower run": "as certs",
    "fedbe flower down": "as certs",
    "fedbe run cifar10-step --executor ray": "tests/experiment/test_ray_pool.py runs a driver on a cluster",
    'fedbe resume "$SCRATCH': "as the line above, in a script of Slurm",
    "fedbe reproduce --list": "measures the speed of every network; tests/reproduce/test_reproduce.py runs it",
    "fedbe reproduce table1 --scale paper --seeds 3": "writes into results/; tests/reproduce/test_results.py checks it",
}
# Commands of Python that are run, with small values.
RUN = {
    "python -m benchmarks.many_clients": shlex.split(
        "--clients 20 --cohort 4 --rounds 1 --hidden 8 --method fedavg --workers 0"
    ),
}
# Commands of make, pip and Python that are not run.
OTHERS_NOT_RUN = {
    "make run": "installs; the comparison that it starts is run with one round, for every page of this file",
    "make bench": "measures speed, which no test does",
    "make chaos": "takes half an hour; tests/test_chaos.py runs its short form",
    "make check": "CI runs it before the tests",
    "make gpu-check": "measures speed on an accelerator; tests/devices/test_gpu_check.py runs it on an emulated one",
    "make test": "these are its tests",
    "pip install": "downloads; CI installs the extras, tests/contract/test_package.py the wheel and the source archive",
    "python examples/nvflare/job.py": "tests/nvflare/test_simulator.py runs jobs in NVFlare's simulator",
    "python -m benchmarks loader": "measures speed, which no test does",
    "python -m benchmarks.chaos": "tests/test_chaos.py runs its short form",
    "python -m benchmarks.bench_server": "measures speed, which no test does",
    "python -m benchmarks.branch": "continues a long run from a checkpoint that is not in the repository",
    "python -m benchmarks.choose_auto": "trains on CIFAR-10: the search behind the default settings",
    "python -m benchmarks.choose_digits": "trains hundreds of models: the search behind the recipe digits",
    "python -m benchmarks.concept_pictures": "writes into docs/; test_docs.py compares the names of the pictures",
    "python -m benchmarks.honest_clients": "trains for minutes; test_honest_clients.py is its short form",
    "python -m benchmarks.licences --write": "writes into docs/; tests/contract/test_licences.py compares the list",
    "python -m benchmarks.peers": "measures speed; its environments take gigabytes",
    "python -m benchmarks.server_variants": "needs a finished run on CIFAR-10; it measured choices of docs/variants.md",
}
NAMES = {"fedbe flower", "fedbe predict", "fedbe evaluate", "fedbe resume"}  # of commands, in a sentence
WORDS = {
    "RUN…": "runs/first",
    "RUN": "runs/first",
    "runs/NAME": "runs/first",
    "FOLDER": "photos",
    "DIR": "pictures",
    "RECIPE": "digits",
    "key=value": "training.rounds=1",
    "training.epochs=E": "training.epochs=1",
    "…": "float32",  # after --precision
}
QUICK = ["training.rounds=1", "training.epochs=1", "settings.distill_epochs=1"]
QUICK_CIFAR = ["data.server=50"]


def commands(page):
    """The commands of fedbe in a page, one by one."""
    for part in PART.finditer(page.read_text(encoding="utf-8")):
        text = part["line"] or part["quoted"]
        for one in (text or "").split(";"):
            if one.strip():
                yield " ".join(one.split())


COMMANDS = [(page, text) for page in PAGES for text in commands(page)]
FIRST = {text: page for page, text in reversed(COMMANDS)}  # the page that runs a command that several pages have


def is_left_out(text):
    """A command in NOT_RUN, or the name of a command or of a study in a sentence."""
    named_study = text.startswith("fedbe reproduce") and " -" not in text
    return named_study or text in NAMES or any(text.startswith(start) for start in NOT_RUN)


def name(page):
    return page.relative_to(ROOT).as_posix()


def invoke(words):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"{' '.join(words)}: {done.output}{done.exception or ''}"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with a finished run, a comparison as `make run` leaves it, images, and a CIFAR-10 of 1,250 images."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "data/cifar-10-batches-bin").mkdir(parents=True)
    draw, labels = np.random.default_rng(0), np.arange(250, dtype=np.uint8)[:, None] % 10
    for stem in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = np.hstack([labels, draw.integers(0, 256, (250, 3072), dtype=np.uint8)])
        (folder / f"data/cifar-10-batches-bin/{stem}.bin").write_bytes(records.tobytes())
    (folder / "photos").mkdir()
    for path in ("image.png", "photos/one.png"):
        Image.new("L", (8, 8)).save(folder / path)
    quick = [*settings(QUICK), "--workers", "0", "-q", "--runs", str(folder / "runs")]
    invoke(["run", "--method", "fedavg", "--name", "first", *quick])
    invoke(["compare", "--methods", "fedavg", "--seeds", "1", *quick])
    return folder


@pytest.fixture
def place(prepared, tmp_path, monkeypatch):
    """The test runs in a copy of that folder."""
    folder = shutil.copytree(prepared, tmp_path / "place")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("FEDBE_DATA", str(folder / "data"))
    monkeypatch.setattr(sources, "check_official", lambda *_: None)  # its CIFAR-10 is not the official one


def settings(changes):
    return [word for change in changes for word in ("--set", change)]


def quickly(text):
    """The words of a command with values for its placeholders, and with tiny settings."""
    text = re.sub(r" > \S+|[\[\]]", "", text).replace("key=value …", "key=value").replace("--runs DIR", "--runs runs")
    words = shlex.split(text)[1:]
    words = [WORDS.get(word, word) for word in words]
    if words[0] not in {"run", "compare", "reproduce"} or "--list" in words:
        return words
    on_cifar = "cifar10" in text or "paper" in text or "table1 --scale cpu" in text
    words += settings(QUICK + QUICK_CIFAR * on_cifar)
    if words[0] == "reproduce" and "table1" in words:
        words += ["--only", "step", "--only", "fedavg", "--only", "convnet"]
    return [*words, *(["--seeds", "1"] if words[0] != "run" else []), "--workers", "0", "-q"]


@pytest.mark.slow
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("page", [p for p in PAGES if PART.search(p.read_text(encoding="utf-8"))], ids=name)
def test_a_page_runs_from_top_to_bottom(page):
    text, names, done = page.read_text(encoding="utf-8"), {"__name__": "docs"}, set()
    for part in PART.finditer(text):
        if part["code"] and not part["reason"]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                code = "\n" * text[: part.start("code")].count("\n") + part["code"]
                exec(compile(code, str(page), "exec"), names)  # noqa: S102
        for one in ((part["line"] or part["quoted"]) or "").split(";"):
            command = " ".join(one.split())
            if command and FIRST[command] == page and command not in done and not is_left_out(command):
                done.add(command)
                invoke(quickly(command))


RECIPES = [
    (name(page), recipe)
    for page in PAGES
    for recipe in re.findall(r"^```toml\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
]


@pytest.mark.parametrize(("page", "recipe"), RECIPES, ids=[page for page, _ in RECIPES])
def test_a_recipe_of_a_page_is_valid(page, recipe, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(recipe, encoding="utf-8")
    assert load_recipe(path).method_for().settings(), page


@pytest.mark.parametrize("text", dict.fromkeys(text for _, text in COMMANDS))
def test_the_command_exists(text):
    """Its names and options, also of the commands that are not run."""
    words = [word for word in shlex.split(text) if word not in ("…", "...")][1:]
    command: click.Command = typer.main.get_command(app)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h", "--debug"}
    if text.startswith("fedbe reproduce ") and not words[0].startswith("-"):
        load_study(words[0])
    for word in words:
        option = word.strip("[]").partition("=")[0]
        assert not option.startswith("-") or option in known, f"{command.name} has no option {option}"


def test_every_exception_is_needed():
    texts = {text for _, text in COMMANDS}
    assert [start for start in NOT_RUN if not any(text.startswith(start) for text in texts)] == []
    assert NAMES - texts == set()


OTHERS = list(
    dict.fromkeys(
        " ".join((a or b).split()) for page in PAGES for a, b in OTHER.findall(page.read_text(encoding="utf-8"))
    )
)


@pytest.mark.parametrize("text", OTHERS)
def test_other_commands_name_what_exists(text):
    """Targets of make, modules and scripts of Python, extras of pip, and each has its reason if it is not run."""
    words = shlex.split(text)
    if words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True, env=dict(os.environ))
    elif words[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\[(\w+)\]", text)) <= set(extras)
        assert "-c" not in words or (ROOT / words[words.index("-c") + 1]).exists()
    elif words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None
    else:
        assert (ROOT / words[1]).exists()
    assert any(text.startswith(start) for start in (*RUN, *OTHERS_NOT_RUN)), "run it, or say why not"


def test_every_exception_of_the_others_is_needed():
    assert [start for start in (*RUN, *OTHERS_NOT_RUN) if not any(text.startswith(start) for text in OTHERS)] == []


@pytest.mark.slow
@pytest.mark.parametrize("start", RUN)
def test_another_command_runs(start, tmp_path, monkeypatch):
    """With the options of the page, and with small values for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    words = shlex.split(start)
    used = {word for text in OTHERS if text.startswith(start) for word in text.split() if word.startswith("--")}
    used -= {"--executor", "--address"}  # of a Ray cluster: tests/experiment/test_ray_pool.py
    assert used <= {word for word in RUN[start] if word.startswith("--")}
    monkeypatch.setattr("sys.argv", [words[2], *RUN[start]])
    try:
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    except SystemExit as done:
        assert not done.code  # noqa: PT017


def test_make_help_lists_every_target():
    done = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True)
    targets = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[0].split()
    assert re.findall(r"^  make (\S+) +\w", done.stdout, re.M) == targets
