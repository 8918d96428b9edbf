"""The command line in real processes and a pseudo-terminal, with real signals."""

import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from fedbe.algorithms.methods import METHODS
from fedbe.cli import app
from fedbe.core.files import locked
from fedbe.errors import BusyError, RecipeError
from fedbe.experiment import comparison as several
from fedbe.experiment import run_folder
from fedbe.experiment.recipe_files import load_recipe

FEDBE = (sys.executable, "-m", "fedbe")
TRACK = ["--track", "tensorboard"]
QUICK = ("--set", "training.rounds=3", "--set", "training.epochs=1", "--set", "settings.distill_epochs=2")
# Some tenths of a second a round: slow enough to interrupt.
SLOW = ("--set", "training.rounds=6", "--set", "training.epochs=30", "--set", "settings.distill_epochs=5")


def fedbe(*arguments: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FEDBE, *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the entry point in this process, for commands that do not train. Returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["fedbe", *arguments])
    with pytest.raises(SystemExit) as caught:
        app.main()
    return int(caught.value.code or 0)


class Terminal:
    """A fedbe process in a pseudo-terminal."""

    def __init__(self, arguments: Sequence[str], cwd: Path) -> None:
        self.pid, self._screen = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.environ["COLUMNS"] = "120"
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests that run in the background inherit SIG_IGN
            os.execv(sys.executable, [*FEDBE, *arguments])
        self.text = ""

    def read_until(self, pattern: str, timeout: float = 60) -> None:
        until = time.monotonic() + timeout
        while not re.search(pattern, self.text):
            assert time.monotonic() < until, f"'{pattern}' did not appear in {timeout} s; the screen:\n{self.text}"
            self._read()

    def _read(self) -> bool:
        ready, _, _ = select.select([self._screen], [], [], 0.2)
        if not ready:
            return True
        try:
            more = os.read(self._screen, 65536)
        except OSError:  # Linux raises EIO when the other side has closed
            return False
        self.text += more.decode(errors="replace")
        return bool(more)

    def type(self, keys: bytes) -> None:
        os.write(self._screen, keys)

    def wait(self) -> int:
        while self._read():
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self._screen)
        return os.waitstatus_to_exitcode(status)


@pytest.mark.e2e
def test_run_in_a_pipe_prints_a_line_per_round_and_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = fedbe("run", *QUICK, "--method", "fedavg", "--seed", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "FedAvg, seed 3: round 3/3: accuracy" in done.stderr
    assert re.search(r"seed 3: test accuracy \d+\.\d % after round 3", done.stdout)
    folder = tmp_path / "runs" / "digits-fedavg-seed3"
    assert run_folder.read_info(folder).final is not None
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "resume", "runs/digits-fedavg-seed3") == 0
    assert capsys.readouterr().out == done.stdout
    assert call(monkeypatch, "evaluate", "runs/digits-fedavg-seed3") == 0
    assert capsys.readouterr().out.startswith("digits, 359 test examples: accuracy")
    Image.new("L", (20, 20)).save("black.png")
    assert call(monkeypatch, "predict", "runs/digits-fedavg-seed3", "black.png") == 0
    assert re.match(r"black\.png: \d [\d.]+ %, \d [\d.]+ %, \d [\d.]+ %\n", capsys.readouterr().out)


@pytest.mark.e2e
def test_compare_prints_the_verdict_and_the_path_of_the_report(tmp_path: Path) -> None:
    done = fedbe(
        "compare", *QUICK, "--methods", "fedavg,fedbe", "--seeds", "2", "-q", "--track", "tensorboard", cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "n = 2" in done.stdout
    folder = tmp_path / "runs" / "digits-compare"
    assert "report: runs/digits-compare/report.html" in done.stdout
    page = (folder / "report.html").read_text()
    assert "Test accuracy by round." in page
    assert "n = 2 seeds (0, 1)" in page
    report = folder / "comparison.md"
    assert "n = 2 seeds (0, 1)" in report.read_text()
    assert "| FedAvg |" in report.read_text() or "| **FedAvg** |" in report.read_text()
    events = list((tmp_path / "runs" / "digits-compare" / "fedbe-seed1" / "tensorboard").glob("events.*"))
    assert _scalars(events[0])["test/accuracy"] == pytest.approx(
        [r["test"]["accuracy"] for r in run_folder.read_rounds(events[0].parent.parent)]
    )


def _scalars(path: Path) -> dict[str, list[float]]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own imports warn
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(path))
        events.Reload()
    return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.e2e
def test_without_worker_processes_the_result_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "run", *QUICK, "-q", "--workers", "0", "--name", "serial") == 0
    assert fedbe("run", *QUICK, "-q", "--workers", "2", "--name", "pool", cwd=tmp_path).returncode == 0
    assert _same(tmp_path / "runs" / "serial", tmp_path / "runs" / "pool")


@pytest.mark.e2e
def test_a_run_stopped_by_ctrl_c_and_kill_9_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = (*SLOW, "--method", "fedbe+scaffold")
    uninterrupted = fedbe("run", *settings, "--name", "uninterrupted", "-q", cwd=tmp_path)
    assert uninterrupted.returncode == 0, uninterrupted.stderr

    screen = Terminal(["run", *settings, "--name", "stopped"], tmp_path)
    screen.read_until(r"1/6")
    screen.type(b"\x03")
    screen.read_until("stopping after the current step")
    assert screen.wait() == 130
    assert "fedbe resume runs/stopped" in screen.text
    assert "Traceback" not in screen.text
    folder = tmp_path / "runs" / "stopped"
    rounds_before = len(run_folder.read_rounds(folder))
    assert 0 < rounds_before < 5

    with subprocess.Popen([*FEDBE, "resume", str(folder), "-q"], cwd=tmp_path) as process:
        _wait_for(lambda: len(run_folder.read_rounds(folder)) > rounds_before)
        time.sleep(random.Random(5).uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
    assert run_folder.read_info(folder).finished is None

    again = Terminal(["resume", "runs/stopped"], tmp_path)
    assert again.wait() == 0
    assert "test accuracy" in again.text
    assert _same(tmp_path / "runs" / "uninterrupted", folder)


@pytest.mark.e2e
def test_runs_at_the_same_time_stopped_by_ctrl_c_and_kill_9_end_with_the_same_bits(tmp_path: Path) -> None:
    sizes_of_a_round = ("--set", "training.rounds=8", "--set", "training.epochs=8", "--set", "evaluation.ensemble=")
    settings = ("compare", *sizes_of_a_round, "--methods", "fedavg,fedprox", "--seeds", "1", "--workers", "2")
    screen = Terminal([*settings, "--name", "together"], tmp_path)
    screen.read_until(r"all rounds.*[1-9]/16", timeout=120)
    screen.type(b"\x03")
    screen.read_until("stopping after the current step")
    assert screen.wait() == 130
    assert "fedbe resume runs/together" in screen.text
    assert "Traceback" not in screen.text
    folder = tmp_path / "runs" / "together"
    cells = several.cells(folder)
    assert all(run_folder.rounds_left(cell) for cell in cells)
    done = [len(run_folder.read_rounds(cell)) for cell in cells]  # 0 for a run that was stopped in its first round

    with subprocess.Popen([*FEDBE, "resume", str(folder), "-q", "--workers", "2"], cwd=tmp_path) as process:
        _wait_for(lambda: [len(run_folder.read_rounds(cell)) for cell in cells] > done, timeout=120)
        process.send_signal(signal.SIGKILL)
    _wait_for(lambda: all(_is_free(cell) for cell in cells))  # the processes of the runs notice, and end
    again = fedbe("resume", str(folder), "-q", "--workers", "2", cwd=tmp_path, timeout=300)
    assert (again.returncode, again.stderr) == (0, "")

    in_turn = fedbe(*settings, "--spread", "clients", "--name", "in_turn", cwd=tmp_path, timeout=300)
    assert in_turn.returncode == 0, in_turn.stderr
    assert all(_same(cell, tmp_path / "runs" / "in_turn" / cell.name) for cell in cells)


def _is_free(folder: Path) -> bool:
    try:
        with locked(folder):
            return True
    except BusyError:
        return False


@pytest.mark.e2e
def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    endless = ("--set", "training.rounds=2", "--set", "training.epochs=100000")
    screen = Terminal(["run", *endless, "--name", "long"], tmp_path)
    screen.read_until("clients train")
    screen.type(b"\x03")
    screen.read_until("press Ctrl-C again")
    screen.type(b"\x03")
    assert screen.wait() == 130
    assert "stopped at once" in screen.text
    assert "Traceback" not in screen.text


def _wait_for(condition, timeout: float = 60) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def _same(a: Path, b: Path) -> bool:
    return (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("run", "nosuch"), 2, "fedbe: no recipe 'nosuch', and no TOML file of that name: choose one of"),
        (("run", "--set", "training.round=1"), 2, "did you mean 'rounds'?"),
        (("run", "--method", "fedbee"), 2, "unknown method 'fedbee': did you mean 'fedbe'?"),
        (("run", "--precision", "float16"), 2, "unknown precision 'float16'"),
        (("compare", "--methods", "fedavg,fedbo"), 2, "unknown method 'fedbo'"),
        (("compare", "--methods", ","), 2, "name at least one method"),
        (("compare", "--methods", "fedavg,fedavg"), 2, "listed twice"),
        (("run", "--workers", "-1"), 2, "Invalid value for '--workers'"),
        (("resume", "nowhere"), 1, "nowhere is not a run folder"),
        (("evaluate", "nowhere"), 1, "nowhere has no model.safetensors"),
        (("predict", "nowhere", "a.png"), 1, "nowhere has no model.safetensors"),
        (("report",), 2, "or --all for everything"),
        (("report", "a", "--all"), 2, "or --all for everything"),
        (("report", "nowhere"), 1, "nowhere is not a run folder"),
        (("report", "--all"), 1, "there are no runs below runs"),
        (("report", "nowhere", "--format", "gif"), 2, "Invalid value for '--format'"),
        (("watch", "nowhere"), 1, "nowhere is not a run folder"),
        (("watch", "nowhere", "--port", "70000"), 2, "Invalid value for '--port'"),
        (("nonsense",), 2, "No such command 'nonsense'"),
        (("run", "--name", ""), 2, "--name must be the name"),
        (("run", "--name", ".."), 2, "--name must be the name"),
        (("run", "--set", "training.lr=inf"), 2, "'training.lr': input should be a finite"),
        (("run", "--set", "settings.distill_lr=inf"), 2, "`distill_lr` must be a finite"),
        (("run", "--set", "training.epochs=x"), 2, "'training.epochs': input should be"),
        (("run", "--set", "model.name=no.such:thing"), 2, "'no.such:thing' must name a function"),
        (("run", "--set", "model.name=torch.hub:load"), 2, "'torch.hub:load' would run code from"),
        (("run", "--set", "data.source=os:getcwd"), 1, "give --trust if you trust the source of that name"),
        (("run", "--set", "name=../../x"), 2, "becomes the name of a folder"),
        (("run", "--set", "data.source=imagenet"), 1, "'imagenet' is neither a known data set"),
        (("compare", "--set", "split.clients=100000"), 2, "100000 clients"),
    ],
)
def test_wrong_arguments_get_one_sentence_and_an_exit_code(
    arguments: tuple[str, ...],
    code: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, *arguments) == code
    printed = capsys.readouterr().err
    assert sentence in printed
    assert "Traceback" not in printed
    assert not any(tmp_path.rglob("*.json"))  # a run that cannot start leaves no folder


def test_an_unexpected_error_is_one_sentence_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("fedbe.experiment.recipe_files.load_recipe", broken)
    assert call(monkeypatch, "show") == 1
    assert "unexpected error: KeyError: 'a bug'; --debug" in capsys.readouterr().err


def test_paths_are_not_read_as_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "resume", "a[/red]b :b:") == 1
    assert "a[/red]b :b: is not a run folder" in capsys.readouterr().err


def test_a_comparison_with_an_existing_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    several.create(tmp_path / "runs" / "both", load_recipe("digits"), ["fedavg"], [0], "float32")
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "compare", "--methods", "fedbe", "--name", "both") == 1
    assert "`fedbe resume runs/both`" in capsys.readouterr().err
    assert several.cells(tmp_path / "runs" / "both") == [tmp_path / "runs" / "both" / "fedavg-seed0"]


@pytest.mark.e2e
@pytest.mark.parametrize("seconds", [0.3, 1.0, 2.0])
def test_ctrl_c_during_startup_ends_quietly(tmp_path: Path, seconds: float) -> None:
    screen = Terminal(["run", *SLOW, "--name", "early"], tmp_path)
    time.sleep(seconds)
    screen.type(b"\x03")
    assert screen.wait() == 130
    assert "Traceback" not in screen.text
    folder = tmp_path / "runs" / "early"
    assert not folder.exists() or run_folder.read_info(folder).finished is None


@pytest.mark.parametrize("words", [["--debug", "run", "nosuch"], ["run", "nosuch", "--debug"]])
def test_debug_shows_the_traceback(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fedbe", *words])
    with pytest.raises(RecipeError, match="no recipe 'nosuch'"):
        app.main()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("methods",), ["1-ensemble", "fedbe+scaffold", "FedBE (w/o SWA)"]),
        (("recipes",), ["digits", "cifar10-step", "swissroll"]),
        (
            ("show", "digits", "--set", "training.rounds=7"),
            ["rounds = 7", "sharpening = 3.0", 'client_weights = "declared"'],
        ),
    ],
)
def test_lists_name_everything(
    arguments: tuple[str, ...],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, *arguments) == 0
    printed = capsys.readouterr().out
    assert [word for word in words if word not in printed] == []


def test_help_lists_commands_in_the_order_of_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--help") == 0
    listed = re.findall(r"^│ ([a-z]+)  ", capsys.readouterr().out, flags=re.MULTILINE)
    before = ["doctor", "methods", "recipes", "show", "data"]
    training = ["run", "compare", "resume"]
    after = ["evaluate", "predict", "report", "watch", "reproduce", "flower"]
    assert listed == [*before, *training, *after]


def test_show_prints_a_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for recipe in ("cifar10-step", "digits"):
        call(monkeypatch, "show", recipe)
        (tmp_path / "mine.toml").write_text(capsys.readouterr().out)
        for method in METHODS:  # with its own defaults, not with those of the recipe's method
            for change in ("variant=paper", "variant=tuned"):
                mine, shipped = load_recipe(tmp_path / "mine.toml", [change]), load_recipe(recipe, [change])
                assert mine.method_for(method) == shipped.method_for(method)


@pytest.mark.e2e
def test_help_does_not_import_torch() -> None:
    code = "import sys, fedbe.cli.app; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
