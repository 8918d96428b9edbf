"""`fedbe flower …` without Flower's processes: the app it writes, the keys, its error messages."""

import io
import json
import os
import re
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import threading
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import parse_config_args, validate_config
from safetensors.torch import save_file

from fedbe.cli import flower
from fedbe.core.files import locked
from fedbe.errors import BusyError, RunError, SettingError
from fedbe.flower import certs, deployment, processes, submission, template
from fedbe.flower.deployment import Deployment
from fedbe.flower.submission import follow, submit

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


def fedbe(*words, cwd):
    return subprocess.run(
        [sys.executable, "-m", "fedbe", "flower", *words], cwd=cwd, capture_output=True, text=True, check=False
    )


def files(folder):
    paths = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in paths}


def test_new_writes_the_example(tmp_path):
    done = fedbe("new", "mine", cwd=tmp_path)
    assert done.returncode == 0
    assert "README.md" in done.stdout
    assert files(tmp_path / "mine") == files(ROOT / "examples" / "flower")
    again = fedbe("new", "mine", cwd=tmp_path)
    assert again.returncode == 1
    assert "mine exists already" in again.stderr


def test_new_copies_neither_keys_nor_results(tmp_path, monkeypatch):
    used = tmp_path / "used"
    template.write_app(used)
    for name in ("certs", "state", "runs"):
        (used / name).mkdir()
        (used / name / "secret").write_text("x")
    monkeypatch.setattr(template, "source_folder", lambda: used)
    template.write_app(tmp_path / "other")
    assert files(tmp_path / "other") == files(ROOT / "examples" / "flower")


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower uses it
@pytest.mark.parametrize("app", ["examples/flower", "baselines/fedbe"])
def test_an_app_has_the_format_of_flower_hub(app):
    """Format 1, no dependency that Flower would install at run time, only small files of UTF-8 text."""
    folder = ROOT / app
    config = tomllib.loads((folder / "pyproject.toml").read_text())
    valid, errors, warnings = validate_config(config, check_module=True, project_dir=folder)
    assert (valid, errors, warnings) == (True, [], [])
    assert config["tool"]["flwr"]["app"]["fab-format-version"] == 1
    assert [dependency.split(">")[0] for dependency in config["project"]["dependencies"]] == ["flwr"]
    packed = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(folder)))
    assert {"LICENSE", "README.md", "pyproject.toml"} <= set(packed.namelist())
    for name in packed.namelist():
        content = packed.read(name)
        assert len(content) < 1_000_000
        content.decode("utf-8")


def test_keys_are_readable_by_their_owner_only_and_the_certificate_is_valid(tmp_path):
    done = fedbe("certs", "app", "--nodes", "2", "--host", "fl.example.org", "--host", "10.0.0.7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    certs_folder = tmp_path / "app" / "certs"
    names = {"ca.key", "ca.pem", "server.key", "server.pem", "node-0", "node-0.pub", "node-1", "node-1.pub"}
    assert {p.name for p in certs_folder.iterdir()} == names
    assert {stat.S_IMODE(p.stat().st_mode) for p in certs_folder.iterdir()} == {0o600}
    assert stat.S_IMODE(certs_folder.stat().st_mode) == 0o700
    server = x509.load_pem_x509_certificate((certs_folder / "server.pem").read_bytes())
    server.verify_directly_issued_by(x509.load_pem_x509_certificate((certs_folder / "ca.pem").read_bytes()))
    named = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert named.get_values_for_type(x509.DNSName) == ["localhost", "fl.example.org"]
    assert [str(a) for a in named.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "10.0.0.7"]
    tls = ssl.create_default_context(cafile=str(certs_folder / "ca.pem"))
    tls.load_cert_chain(certs_folder / "server.pem", certs_folder / "server.key")
    private = load_ssh_private_key((certs_folder / "node-0").read_bytes(), None)
    assert private.public_key() == load_ssh_public_key((certs_folder / "node-0.pub").read_bytes())
    assert (certs_folder / "node-0").read_bytes() != (certs_folder / "node-1").read_bytes()


def test_keys_are_never_replaced(tmp_path):
    certs.create(tmp_path, 1)
    before = files(tmp_path)
    for nodes, hosts in ((1, ()), (3, ("fl.example.org",))):
        with pytest.raises(RunError, match="exists already"):
            certs.create(tmp_path, nodes, hosts)
    assert files(tmp_path) == before
    certs.create(tmp_path, 2)  # the federation grows
    assert files(tmp_path).items() >= before.items()
    assert files(tmp_path).keys() - before.keys() == {"certs/node-1", "certs/node-1.pub"}
    assert stat.S_IMODE((tmp_path / "certs/node-1").stat().st_mode) == 0o600


@pytest.mark.parametrize("host", ["bücher.example", "fl.example.org:443", "", "a" * 64, "10.0.0.300", "[::1]", "*.org"])
def test_an_invalid_host_is_refused_before_anything_is_written(host, tmp_path):
    with pytest.raises(SettingError, match="`host` must be") as refused:
        certs.create(tmp_path, 1, ["fl.example.org", host])
    assert str(refused.value).endswith(f"got '{host}'")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("days", [0, 36_501, 4_000_000])
def test_certificates_are_valid_for_a_day_to_a_century(days, tmp_path):
    with pytest.raises(SettingError, match=f"`days` must be .*, got {days}"):
        certs.create(tmp_path, 1, days=days)
    assert list(tmp_path.iterdir()) == []


def test_a_host_may_be_longer_than_a_common_name(tmp_path):
    long = ".".join(["fl", "a" * 60, "example", "org"])
    certs_folder = certs.create(tmp_path, 1, [long], days=36_500)
    server = x509.load_pem_x509_certificate((certs_folder / "server.pem").read_bytes())
    named = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert long in named.get_values_for_type(x509.DNSName)


def test_keys_are_created_completely_or_not_at_all(tmp_path, monkeypatch):
    def stopped(path):
        if path.name == "node-1":
            raise KeyboardInterrupt
        (path.parent / path.name).write_text("a key")

    monkeypatch.setattr(certs, "create_node_key", stopped)
    with pytest.raises(KeyboardInterrupt):
        certs.create(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()

    # a private key exists only if its public key does
    certs.create(tmp_path, 1)
    write, written = certs.write_atomic, []

    def full(path, content):
        if written:
            raise RunError("the disk is full")
        written.append(path)
        write(path, content)

    monkeypatch.setattr(certs, "write_atomic", full)
    with pytest.raises(RunError, match="the disk is full"):
        certs.create(tmp_path, 2)
    monkeypatch.undo()
    certs.create(tmp_path, 2)
    private = load_ssh_private_key((tmp_path / "certs/node-1").read_bytes(), None)
    assert private.public_key() == load_ssh_public_key((tmp_path / "certs/node-1.pub").read_bytes())


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RunError, match=r"ca\.pem is missing: run"):
        Deployment(tmp_path).up(3)
    with pytest.raises(RunError, match="no deployment was started"):
        submit(Deployment(tmp_path), None)
    with pytest.raises(SettingError, match="KEY=VALUE, got 'rounds'"):
        submit(Deployment(tmp_path), None, ["rounds"])
    assert Deployment(tmp_path).down() == []
    certs.create(tmp_path, 1)
    with pytest.raises(RunError, match="node-1 is missing"):
        Deployment(tmp_path).up(2)
    (tmp_path / "certs/node-0.pub").unlink()
    with pytest.raises(RunError, match=r"node-0\.pub is missing: remove .*node-0 and run"):
        Deployment(tmp_path).up(1)
    (tmp_path / "certs/server.pem").unlink()
    with pytest.raises(RunError, match=r"server\.pem is missing: remove .*certs and run"):
        Deployment(tmp_path).up(1)
    assert files(tmp_path).keys() == {"certs/ca.key", "certs/ca.pem", "certs/server.key", "certs/node-0"}


class Stage(Deployment):
    """A deployment of fakes: scripts instead of Flower's programs, and a SuperLink that lists what this object sets.

    scripts  name -> the script that runs instead
    looks    name -> how many more times it is listed as online, in any case
    lasting  names that are listed as online after they have ended
    silent   names that are never listed as online
    started  (name, command) of every started process
    """

    def __init__(self, folder):
        super().__init__(folder)
        for name, value in {"scripts": {}, "looks": {}, "lasting": set(), "silent": set(), "started": []}.items():
            object.__setattr__(self, name, value)

    def start(self, folder, name, command, environment):
        assert self.looks.get(name, 0) <= 0, f"{name} was started while it was online"
        self.started.append((name, command))
        script = self.scripts.get(name, "import time; print('ready', flush=True); time.sleep(99)")
        return START(folder, name, [sys.executable, "-c", script], environment)

    def flwr(self, *words):
        if words[:2] == ("supernode", "register"):
            return {"node-id": 100 + int(Path(words[2]).stem.removeprefix("node-"))}
        assert words[:2] == ("supernode", "list")
        status = {f"{100 + i}": "online" if self._online(f"node-{i}") else "offline" for i in range(3)}
        return {"nodes": [{"node-id": node, "status": value} for node, value in status.items()]}

    def _online(self, name):
        self.looks[name] = self.looks.get(name, 0) - 1
        lasts = name in self.lasting and name in dict(self.started) and not processes.running_pid(self.state, name)
        return self.looks[name] >= 0 or lasts or (self._ready(name) and name not in self.silent)

    def _ready(self, name):
        return processes.running_pid(self.state, name) and "ready" in (self.state / f"{name}.log").read_text()

    def is_healthy(self, port):  # noqa: ARG002
        return self._ready("superlink")

    def pids(self):
        return {name: processes.running_pid(self.state, name) for name in processes.names(self.state)}


START = processes.start


@pytest.fixture
def stage(tmp_path, monkeypatch):
    certs.create(tmp_path / "app", 3)
    one = Stage(tmp_path / "app")
    monkeypatch.setattr(processes, "start", one.start)
    yield one
    one.down()


def test_a_node_starts_only_after_the_superlink_lists_it_as_offline(stage):
    stage.looks["node-1"] = 3  # the number of times it is still listed as online
    shown = []
    stage.up(2, shown.append)
    assert any("still lists node-1" in line for line in shown)
    assert shown[-1] == "nodes online: 2"


def test_a_node_that_ended_fails_up_even_if_the_superlink_lists_it_as_online(stage):
    stage.scripts["node-0"] = "print('my key is broken')"
    stage.lasting.add("node-0")
    with pytest.raises(RunError, match=r"node-0 ended; .*node-0\.log .*\nmy key is broken$"):
        stage.up(1)
    assert stage.pids() == {}


def test_of_several_nodes_the_one_that_ended_is_quoted(stage):
    stage.scripts["node-0"] = "print('my key is broken')"
    with pytest.raises(RunError, match=r"node-0 ended; .*\nmy key is broken$"):
        stage.up(2)


def test_the_node_that_does_not_come_online_is_quoted(stage, monkeypatch):
    monkeypatch.setattr(deployment, "START_SECONDS", 3.0)
    stage.silent.add("node-0")
    with pytest.raises(RunError, match=r"not within 3 s \(`fedbe flower down .*node-0\.log"):
        stage.up(2)


def test_up_restarts_what_died_and_only_that(stage):
    stage.up(2)
    before = stage.pids()
    os.kill(before["node-1"], signal.SIGKILL)
    while processes.running_pid(stage.state, "node-1"):
        pass
    stage.up(2)
    after = stage.pids()
    assert [name for name, _ in stage.started] == ["superlink", "node-0", "node-1", "node-1"]
    assert {name: pid for name, pid in after.items() if pid != before[name]} == {"node-1": after["node-1"]}


def test_up_restarts_nodes_that_run_but_do_not_connect(stage, monkeypatch):
    """As after a restart of the SuperLink on another port: the process lives, but nobody hears of it."""
    monkeypatch.setattr(deployment, "RECONNECT_SECONDS", 0.0)
    stage.up(2)
    before, shown = stage.pids(), []
    stage.silent.add("node-1")

    def start(*arguments):
        stage.silent.clear()
        return stage.start(*arguments)

    monkeypatch.setattr(processes, "start", start)
    stage.up(2, shown.append)
    changed = [name for name, pid in stage.pids().items() if pid != before[name]]
    assert changed == ["node-1"]
    assert any("node-1: running, but not connected" in line for line in shown)


def test_all_nodes_get_the_same_number_of_nodes(stage):
    stage.up(2)
    before = stage.pids()
    with pytest.raises(RunError, match=r"2 nodes, not 3: run `fedbe flower down"):
        stage.up(3)
    assert stage.pids() == before
    asked = flower.nodes_sentence(stage, "long", 2, 3)
    app = stage.folder
    assert f"fedbe flower down {app}," in asked
    assert f"fedbe flower up {app} --nodes 3," in asked
    assert f"fedbe flower run {app} --name long;" in asked
    stage.down()
    stage.started.clear()
    stage.up(3)
    configs = [command[command.index("--node-config") + 1] for name, command in stage.started if name != "superlink"]
    assert configs == [f"partition-id={i} num-partitions=3" for i in range(3)]
    assert f": fedbe flower up {app} --nodes 3;" in flower.nodes_sentence(stage, "long", 2, 3)


def test_nodes_are_stopped_before_the_superlink(stage, tmp_path):
    order = tmp_path / "order"
    last_words = """
import signal, sys, time
def end(*_):
    time.sleep({seconds})
    print("{name}", file=open("{order}", "a"))
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(99)
"""
    for name, seconds in (("superlink", 0), ("node-0", 0.5)):
        stage.scripts[name] = last_words.format(seconds=seconds, name=name, order=order)
    stage.up(1)
    assert stage.down() == ["node-0", "superlink"]
    assert order.read_text().split() == ["node-0", "superlink"]


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's own
def test_flower_gets_neither_keys_nor_results_of_an_app_without_a_gitignore(stage):
    app = stage.folder
    shutil.copytree(template.source_folder(), app, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (app / ".gitignore").write_text("/secret.toml")  # without a line end
    shown = []
    stage.up(1, shown.append)
    added = f"added certs/ state/ runs/ to {app / '.gitignore'}"
    assert sum(added in line for line in shown) == 1
    assert (app / ".gitignore").read_text() == "/secret.toml\ncerts/\nstate/\nruns/\n"
    for path in ("secret.toml", "state/flwr/apps/a/b/c/d/e/f/g/h/i/j/k.py", "runs/run-1/report.json", "certs/x.json"):
        (app / path).parent.mkdir(parents=True, exist_ok=True)
        (app / path).write_text("")
    packed = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))).namelist()
    assert "digits_app/server_app.py" in packed
    assert not [name for name in packed if name.startswith(("certs", "state", "runs", "secret"))]
    stage.up(1, shown.append)
    assert sum(added in line for line in shown) == 1


CONFIGURATION = """
[tool.flwr.app.config]
folder = ""
rounds = 3
lr = 0.1
swa = false
method = "fedbe"
title = ""
fraction = 1.0
share = 1
agent = ""
a.b = 0
"""
SETTINGS = {
    "rounds=5": 5,
    "lr=1e-3": 0.001,
    "swa=true": True,
    "method=fedbe+scaffold": "fedbe+scaffold",
    'title="a b"': "a b",
    "fraction=.5": 0.5,
    "share=0.25": 0.25,
    "agent=007": "007",
    "a.b=-1": -1,
}
TEXTS = ["5", "true", "2020-01-01", "[1, 2]", 'it\'s "so" = so', '"a"\nrounds = 2', "1\nrounds = 2"]


@pytest.fixture
def submitted(tmp_path, monkeypatch):
    """An app with settings, and the settings that Flower receives."""
    app = tmp_path / 'it\'s 😀 "mine"'
    app.mkdir()
    (app / "pyproject.toml").write_text(CONFIGURATION)
    read = []

    def flwr(_, *words):
        assert words[:2] == ("run", str(app.resolve()))
        assert words[2] == "--run-config"
        read.append(parse_config_args([words[3]]))
        return {"run-id": "7"}

    monkeypatch.setattr(Deployment, "flwr", flwr)
    monkeypatch.setattr(Deployment, "check_was_up", lambda _: None)
    return app, read


def test_settings_and_the_folder_reach_flower_unchanged(submitted):
    (app, read), shown = submitted, []
    number, folder = submit(Deployment(app), None, list(SETTINGS), shown.append)
    assert (number, folder) == (7, app / "runs/run-1")
    meant = {key.split("=")[0]: value for key, value in SETTINGS.items()} | {"folder": str(folder)}
    assert read == [meant]
    assert [type(v) for v in read[0].values()] == [type(v) for v in meant.values()]
    assert "certs/ state/ runs/" in shown[0]
    assert (app / ".gitignore").exists()


def test_following_a_run_reads_the_folder_often_and_asks_flower_rarely(tmp_path, monkeypatch):
    asked, shown = [], []
    monkeypatch.setattr(submission, "POLL_SECONDS", 0.01)

    def status(*_):
        asked.append(time.monotonic())
        return "finished:completed" if (tmp_path / "model.safetensors").exists() else "running"

    def on_round(line):
        shown.append(line["round"])
        if line["round"] == 3:
            (tmp_path / "report.json").write_text("{}")
            save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")

    def write(count):
        (tmp_path / "rounds.jsonl").write_text("".join(f'{{"round": {r + 1}}}\n' for r in range(count)))

    monkeypatch.setattr(submission, "run_status", status)
    timers = [threading.Timer(0.1 * n, write, [n]) for n in (1, 2, 3)]
    for timer in timers:
        timer.start()
    assert follow(Deployment(tmp_path), 7, tmp_path, on_round).rounds == 3
    assert shown == [1, 2, 3]
    assert len(asked) == 2  # at the start, and when the model was there


@pytest.mark.slow
def test_the_commands_for_processes_import_neither_torch_nor_flower():
    code = "import sys, fedbe.cli.flower, fedbe.flower.deployment; print({'torch', 'flwr'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_simultaneous_runs_without_a_name_get_different_folders(submitted):
    app, read = submitted
    assert [submit(Deployment(app), None)[1].name for _ in range(2)] == ["run-1", "run-2"]
    assert [one["folder"] for one in read] == [str(app / "runs/run-1"), str(app / "runs/run-2")]


def test_a_run_in_progress_is_not_submitted_again(submitted, monkeypatch):
    app, read = submitted
    (app / "runs/mine").mkdir(parents=True)
    monkeypatch.setattr(submission, "BUSY_SECONDS", 0.0)
    with locked(app / "runs/mine"), pytest.raises(BusyError, match="mine is being trained"):
        submit(Deployment(app), "mine")
    assert not read
    submit(Deployment(app), "mine")
    assert read


def test_submit_waits_for_the_server_of_a_stopped_run(submitted):
    app, read = submitted
    (app / "runs/mine").mkdir(parents=True)
    held, shown = threading.Event(), []

    def show(line):
        shown.append(line)
        if "is still being trained" in line:
            held.set()

    def hold():
        with locked(app / "runs/mine"):
            holding.set()
            held.wait(30)

    holding = threading.Event()
    server = threading.Thread(target=hold)
    server.start()
    assert holding.wait(30)
    submit(Deployment(app), "mine", (), show)
    server.join()
    assert read
    assert sum("is still being trained" in line for line in shown) == 1


@pytest.mark.parametrize("problem", [RunError("no"), KeyboardInterrupt()])
def test_a_run_that_flower_refuses_leaves_no_folder(submitted, monkeypatch, problem):
    def refuse(*_):
        raise problem

    app, _ = submitted
    monkeypatch.setattr(Deployment, "flwr", refuse)
    with pytest.raises(type(problem)):
        submit(Deployment(app), None)
    assert not any((app / "runs").iterdir())


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_stays_unchanged(text, submitted):
    app, read = submitted
    submit(Deployment(app), None, [f"title={text}"])
    assert read[0]["title"] == text
    assert "rounds" not in read[0]


@pytest.mark.parametrize(
    ("setting", "fragment"),
    [
        ("round=5", "no setting 'round': did you mean 'rounds'?"),
        ("fraction=half", "`fraction` must be a number, got 'half'"),
        ("rounds=", "`rounds` must be a number, got ''"),
        ("swa=1", "`swa` must be true or false, got '1'"),
    ],
)
def test_a_setting_that_the_app_cannot_use_is_refused_before_the_run(setting, fragment, submitted):
    app, read = submitted
    with pytest.raises(SettingError, match=re.escape(fragment)):
        submit(Deployment(app), None, [setting])
    assert not read


@pytest.mark.parametrize(
    ("configuration", "fragment"),
    [
        (None, "of a Flower app"),
        ("[tool", "of a Flower app"),
        ("[tool]\nflwr = 1", "of a Flower app"),
        ("[tool.flwr.app.config]\nrounds = 3", '`folder = ""` in [tool.flwr.app.config]'),
    ],
)
def test_a_folder_that_is_not_a_suitable_app_is_refused_before_the_run(configuration, fragment, submitted):
    app, read = submitted
    (app / "pyproject.toml").unlink()
    if configuration is not None:
        (app / "pyproject.toml").write_text(configuration)
    with pytest.raises(RunError, match=re.escape(fragment)):
        submit(Deployment(app), None)
    assert not read


@pytest.mark.parametrize("report", [None, "{"])
def test_a_run_without_a_report_names_the_remedy(report, tmp_path, monkeypatch):
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    if report is not None:
        (tmp_path / "report.json").write_text(report)
    monkeypatch.setattr(submission, "run_status", lambda *_: "finished:completed")
    with pytest.raises(RunError, match=r"run 1 completed without a report .* `folder`"):
        follow(Deployment(tmp_path), 1, tmp_path, lambda _: None)


@pytest.mark.parametrize("own_session", [False, True], ids=["", "own-session"])
@pytest.mark.parametrize("how", ["stopped", "killed and stopped", "killed and started again"])
def test_a_process_is_stopped_with_its_children(how, own_session, tmp_path):
    family = "import subprocess, sys, time; sleep = [sys.executable, '-c', 'import time; time.sleep(99)']"
    family += (
        f"; p = subprocess.Popen(sleep, start_new_session={own_session}); print(p.pid, flush=True); time.sleep(99)"
    )
    pid = processes.start(tmp_path, "one", [sys.executable, "-c", family], {})
    assert processes.running_pid(tmp_path, "one") == pid
    while not (child := (tmp_path / "one.log").read_text().strip()):
        pass
    if how != "stopped":  # its children are stopped too
        os.kill(pid, signal.SIGKILL)
        while processes.running_pid(tmp_path, "one"):
            pass
    if how == "killed and started again":
        processes.start(tmp_path, "one", [sys.executable, "-c", "import time; time.sleep(99)"], {})
        gone = not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]
        assert gone
    assert processes.stop(tmp_path, ["one", "never"], 1.0) == ["one"]
    assert processes.running_pid(tmp_path, "one") is None
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]


SPAWNING = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    subprocess.Popen(["sleep", "99"], start_new_session=True)
    print(flush=True)
"""


def test_children_that_start_while_their_parent_is_stopped_do_not_outlive_it(tmp_path):
    """As Flower's SuperExec, which may start a client in the moment in which it is killed."""
    processes.start(tmp_path, "one", [sys.executable, "-c", SPAWNING], {})
    mark = f"{processes.MARK}={json.loads((tmp_path / 'one.pid').read_text())['mark']}".encode()
    while not (tmp_path / "one.log").read_bytes():
        pass
    assert processes.stop(tmp_path, ["one"], 0.2) == ["one"]
    time.sleep(0.2)  # what is between fork and exec shows no mark
    left = [pid for pid in _pids() if mark in _environment(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def _pids():
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _environment(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def test_a_process_reported_as_ended_is_not_a_zombie(tmp_path, monkeypatch):
    """A zombie keeps its pid, and Flower's SuperExec takes an existing pid of its parent for a running parent."""
    monkeypatch.setattr(processes, "PROC", tmp_path)  # without an environment, as a process at its start or end
    pid = processes.start(tmp_path, "one", [sys.executable, "-c", "import time; time.sleep(99)"], {})
    assert processes.running_pid(tmp_path, "one") == pid
    os.kill(pid, signal.SIGKILL)
    while processes.running_pid(tmp_path, "one"):
        pass
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("proc", [True, False])
def test_another_process_with_a_reused_pid_is_not_stopped(proc, tmp_path, monkeypatch):
    pid = processes.start(tmp_path, "one", [sys.executable, "-c", "import time; time.sleep(99)"], {})
    known = json.loads((tmp_path / "one.pid").read_text())
    (tmp_path / "other.pid").write_text(json.dumps(known | {"mark": "that of a process before the last boot"}))
    if not proc:
        if shutil.which("ps") is None:
            pytest.skip("the system has no `ps`")
        monkeypatch.setattr(processes, "PROC", tmp_path / "no-proc")
    assert processes.running_pid(tmp_path, "other") is None
    assert processes.stop(tmp_path, ["other"]) == []
    assert processes.running_pid(tmp_path, "one") == pid
    assert processes.stop(tmp_path, ["one"]) == ["one"]


def test_children_of_another_process_with_a_reused_pid_are_not_stopped(tmp_path):
    """Every daemon is the child of a group leader that has ended."""
    family = "import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])"
    family += "; print(os.getpid(), p.pid)"
    with (tmp_path / "pids").open("wb") as file:
        subprocess.run([sys.executable, "-c", family], stdout=file, start_new_session=True, check=True)
    leader, child = map(int, (tmp_path / "pids").read_text().split())
    try:
        (tmp_path / "superlink.pid").write_text(json.dumps({"pid": leader, "mark": "another"}))
        assert processes.stop(tmp_path, ["superlink"], 1.0) == []
        time.sleep(0.2)  # by now a signal would have ended it
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
