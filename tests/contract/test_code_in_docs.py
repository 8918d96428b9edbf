"""The code in the README and in the documentation runs, and the commands there exist.

Blocks of one page share their names and a folder. A block that needs what a test does not have (a download, a server)
is marked with a comment before it: <!-- not run: the reason -->
"""

import re
import shlex
import warnings
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from fedbe.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^>]+) -->\n\n?)?^```python\n(?P<code>.*?)^```", re.M | re.S)
COMMAND = re.compile(r"^    (fedbe [^#\n]*)|`(fedbe [a-z][^`]*)`", re.M)
COMMANDS = [
    pytest.param((line or code).strip(), id=f"{page.name}: {(line or code).strip()[:60]}")
    for page in PAGES
    for line, code in COMMAND.findall(page.read_text(encoding="utf-8"))
]


def name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text(encoding="utf-8"))], ids=name)
def test_the_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if page.name == "report.md":  # which reads what `make run` leaves
        words = ["compare", "-q", "--workers", "0", "--seeds", "1", "--set", "training.rounds=1", "--methods", "fedavg"]
        assert CliRunner().invoke(app, words).exit_code == 0
    names = {"__name__": "docs"}
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["reason"]:
            continue
        line = page.read_text(encoding="utf-8")[: block.start("code")].count("\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile("\n" * line + block["code"], str(page), "exec"), names)  # noqa: S102


@pytest.mark.parametrize("text", COMMANDS)
def test_the_command_exists(text):
    """Its names and options; what it would do is tested elsewhere."""
    for part in text.split(";"):
        words = [word for word in shlex.split(part) if word not in ("…", "...")][1:]
        command: click.Command = typer.main.get_command(app)
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            assert words[0] in command.commands, f"there is no command {words[0]}"
            command, words = command.commands[words[0]], words[1:]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        known |= {"--help", "-h", "--debug"}
        for word in words:
            option = word.strip("[]").partition("=")[0]
            assert not option.startswith("-") or option in known, f"{command.name} has no option {option}"
