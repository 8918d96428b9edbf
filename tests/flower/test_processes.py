"""End to end: Flower's simulation engine, and deployments of real processes on 127.0.0.1.

Every test starts its own deployment on free ports and stops it by pid. The results must equal, to the last bit, those
of the same app on the grid in this process.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import tomli_w
import torch
from flwr.app import Context, RecordDict
from safetensors.torch import load_file

from fedbe.algorithms import methods
from fedbe.errors import RunError
from fedbe.flower import certs, processes, template
from fedbe.flower.deployment import Deployment
from fedbe.flower.submission import follow, submit

pytestmark = pytest.mark.e2e

NODES = 3
SPOILED = """
import os, time
from pathlib import Path

import numpy as np
from flwr.app import Array
from flwr.clientapp import ClientApp

from digits_app.honest import app as honest

HEADER = b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 9), }"
HUGE = b"\\x93NUMPY\\x01\\x00\\x50\\x00" + HEADER.ljust(80)
app = ClientApp()


@app.train()
def train(message, context):
    client, number = context.node_config["partition-id"], message.content["config"]["server-round"]
    reply = honest(message, context)
    arrays = reply.content["arrays"]
    what = {plan}.get((client, number))
    if what == "nan":
        arrays["1.bias"] = Array(np.full(64, np.nan, np.float32))
    if what == "shapes":
        arrays["1.bias"] = Array(np.zeros(65, np.float32))
    if what == "keys":
        arrays["one.bias"] = arrays.pop("1.bias")
    if what == "huge":
        arrays["1.bias"] = Array("float32", (64,), "numpy.ndarray", HUGE)
    if what == "hang":
        Path("{marker}").write_text(str(os.getpid()))
        time.sleep(600)
    return reply
"""


@pytest.fixture(autouse=True)
def _nothing_outlives_a_test(tmp_path):
    """A process of a test has its folder in its environment or arguments, also after its parent was killed."""
    yield
    deadline = time.monotonic() + 10
    while (left := of_folder(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == {}


def of_folder(folder):
    """pid -> arguments of the processes of a test."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            texts = [(path / name).read_bytes() for name in ("environ", "cmdline")]
        except OSError:  # it has ended
            continue
        if any(f"{folder}/".encode() in text for text in texts):
            found[int(path.name)] = texts[1].replace(b"\0", b" ").decode(errors="replace")
    return found


@pytest.fixture
def app(tmp_path):
    """The example app, as `fedbe flower new` writes it."""
    folder = tmp_path / "app"
    template.write_app(folder)
    return folder


def spoil(folder, plan, marker=""):
    """Replace the ClientApp by one that breaks its replies: (client, round) -> how."""
    here = folder / "digits_app"
    (here / "honest.py").write_text((here / "client_app.py").read_text())
    (here / "client_app.py").write_text(SPOILED.replace("{plan}", repr(plan)).replace("{marker}", str(marker)))


@pytest.fixture
def deployment(app):
    certs.create(app, NODES)
    ours = Deployment(app)
    yield ours
    pids = [processes.running_pid(ours.state, name) for name in processes.names(ours.state)]
    ours.down()
    assert not any(p is not None and Path(f"/proc/{p}/exe").exists() for p in pids)


@pytest.fixture
def expected(local_grid, monkeypatch, tmp_path):
    """expected(rounds=2, …): the final weights of the example on the grid in this process."""
    for name in [n for n in sys.modules if n.startswith("digits_app")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(template.source_folder()))
    from digits_app import client_app, server_app

    def play(**settings):
        config = {"method": "fedbe", "rounds": 2, "clients": NODES, "fraction": 1.0, "epochs": 5, "seed": 0}
        config |= {"folder": str(tmp_path / "expected")} | settings
        grid = local_grid(client_app.app, NODES)
        for context in grid.contexts.values():
            context.run_config = config
        server_app.app(grid, Context(1, 1, {}, RecordDict(), config))
        return load_file(tmp_path / "expected" / "model.safetensors")

    return play


def same(folder, weights):
    saved = load_file(folder / "model.safetensors")
    return list(saved) == list(weights) and all(torch.equal(saved[k], weights[k]) for k in weights)


def fedbe(*words):
    command = [sys.executable, "-m", "fedbe", "flower", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def lines(folder):
    path = folder / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(ready, seconds=240):
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.2)


def test_the_simulation_engine(app, expected):
    """Flower's own engine with Ray, started as `flwr run` does; with SCAFFOLD, so that clients need their memory."""
    ours = Deployment(app)
    (ours.state / "flwr").mkdir(parents=True)
    (port,) = processes.free_ports(1)
    options = {"num-supernodes": NODES, "backend": {"client-resources": {"num-cpus": 1}, "init-args": {"num-cpus": 2}}}
    connection = {"address": f"127.0.0.1:{port}", "insecure": True, "options": options}
    (ours.state / "flwr/config.toml").write_text(
        tomli_w.dumps({"superlink": {"default": "fedbe", "fedbe": connection}})
    )
    command = [processes.executable("flower-superlink"), "--simulation", "--insecure", "--host", "127.0.0.1"]
    # Else Ray joins a cluster of another test, and its workers give way to every other process.
    environment = {**ours.environment(), "RAY_ADDRESS": "local", "RAY_worker_niceness": "0"}
    processes.start(ours.state, "superlink", [*command, "--port", str(port)], environment)
    try:
        wait_for(lambda: _answers(port))
        run, folder = submit(ours, None, ["method=fedbe+scaffold", "rounds=2", "fraction=0.67"])
        result = follow(ours, run, folder, lambda _: None)
    finally:
        assert processes.stop(ours.state, ["superlink"]) == ["superlink"]
    assert result.rounds == 2
    assert same(folder, expected(method="fedbe+scaffold", fraction=0.67))


def _answers(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_a_deployment_with_tls_and_authenticated_nodes_one_of_which_is_late(app, deployment, expected, tmp_path):
    up = fedbe("up", app, "--nodes", NODES)
    assert up.returncode == 0, up.stderr
    assert "nodes online: 3" in up.stdout
    processes.stop(deployment.state, ["node-2"])

    # the run shows what it waits for
    command = [sys.executable, "-m", "fedbe", "flower", "run", str(app), "--set", "rounds=2"]
    output = tmp_path / "output"
    with output.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as run:
        try:
            advice = f"waiting for 1 more: fedbe flower up {app} --nodes 3;"
            wait_for(lambda: advice in output.read_text())
            assert "--set clients=2" in output.read_text()

            # a node that cannot start does not stop the others
            ran = {name: processes.running_pid(deployment.state, name) for name in ("superlink", "node-0", "node-1")}
            key = (app / "certs/node-2").read_bytes()
            (app / "certs/node-2").write_bytes(b"no key")
            failed = fedbe("up", app, "--nodes", NODES)
            assert failed.returncode == 1
            assert "but node-2 ended" in failed.stderr
            assert {name: processes.running_pid(deployment.state, name) for name in ran} == ran
            assert processes.names(deployment.state) == sorted(ran)

            # the run continues when all are online
            (app / "certs/node-2").write_bytes(key)
            assert "nodes online: 3" in fedbe("up", app, "--nodes", NODES).stdout
            assert run.wait(240) == 0, output.read_text()
        finally:
            run.kill()
    assert "are online: continuing\nround 1: clients 3" in output.read_text()
    assert "round 2: clients 3" in output.read_text()
    assert "finished after round 2, accuracy" in output.read_text()
    assert same(app / "runs/run-1", expected())

    # a node whose key is not registered
    certs.create_node_key(app / "certs/stranger")
    address = f"127.0.0.1:{json.loads((app / 'state/deployment.json').read_text())['ports'][0]}"
    command = [processes.executable("flower-supernode"), "--superlink", address, "--max-retries", "1"]
    command += ["--root-certificates", str(app / "certs/ca.pem"), "--port", str(processes.free_ports(1)[0])]
    command += ["--auth-supernode-private-key", str(app / "certs/stranger")]
    processes.start(deployment.state, "stranger", command, deployment.environment())
    wait_for(lambda: processes.running_pid(deployment.state, "stranger") is None)
    assert "Failed to activate SuperNode" in (deployment.state / "stranger.log").read_text()
    assert len(deployment.online()) == NODES
    assert len(deployment.flwr("supernode", "list")["nodes"]) == NODES
    processes.stop(deployment.state, ["stranger"])  # its children may need more time

    # a failed run is reported as failed
    failed = fedbe("run", app, "--set", "method=nonsense")
    assert failed.returncode == 1
    assert "read its log with" in failed.stderr

    # down and up again: nodes that signed off are admitted at once
    assert fedbe("down", app).stdout == "stopped: node-0, node-1, node-2, superlink\n"
    shown = []
    deployment.up(NODES, shown.append)
    assert [line.partition(" 127")[0] for line in shown] == ["the SuperLink answers on", "nodes online: 3"]
    assert processes.names(deployment.state) == ["node-0", "node-1", "node-2", "superlink"]
    assert None not in [processes.running_pid(deployment.state, name) for name in processes.names(deployment.state)]


@pytest.mark.parametrize("method", methods.METHODS)
def test_the_example_runs_every_method(method, expected):
    assert expected(method=method, rounds=1, epochs=1)


def test_broken_replies_and_a_node_killed_in_the_middle_of_a_round(app, deployment, tmp_path):
    plan = {(0, 1): "nan", (1, 1): "shapes", (0, 2): "keys", (1, 2): "huge", (2, 3): "hang"}
    spoil(app, plan, tmp_path / "hangs")
    deployment.up(NODES)
    run, folder = submit(deployment, "spoiled", ["method=fedavg", "rounds=3"])
    wait_for(lambda: len(lines(folder)) == 2)
    first, second = lines(folder)
    assert (first["clients"], second["clients"]) == ([2], [2])
    reasons = {s["client"]: s["reason"] for s in first["set_aside"]}
    assert "NaN or infinite" in reasons[0]
    assert "got [65]" in reasons[1]
    reasons = {s["client"]: s["reason"] for s in second["set_aside"]}
    assert "'1.bias' is missing" in reasons[0]
    assert "got [99999999999, 9]" in reasons[1]
    wait_for((tmp_path / "hangs").exists)
    os.kill(processes.running_pid(deployment.state, "node-2"), signal.SIGKILL)
    result = follow(deployment, run, folder, lambda _: None)
    third = lines(folder)[2]
    assert result.rounds == 3
    assert third["clients"] == [0, 1]
    (aside,) = third["set_aside"]
    assert aside["client"] == 2
    assert "Node Unavailable" in aside["reason"]

    # up restarts it, and only it
    ran = {name: processes.running_pid(deployment.state, name) for name in ("superlink", "node-0", "node-1")}
    deployment.up(NODES)
    assert processes.running_pid(deployment.state, "node-2")
    assert not Path("/proc", (tmp_path / "hangs").read_text()).exists()  # the client of the killed node
    assert len(deployment.online()) == NODES
    assert {name: processes.running_pid(deployment.state, name) for name in ran} == ran


def test_training_resumes_after_the_superlink_was_killed(deployment, expected):
    deployment.up(NODES)
    settings = ["method=fedbe+scaffold", "rounds=3", "epochs=2"]
    _, folder = submit(deployment, "long", settings)
    wait_for(lambda: len(lines(folder)) == 1)
    os.kill(processes.running_pid(deployment.state, "superlink"), signal.SIGKILL)
    wait_for(lambda: processes.running_pid(deployment.state, "superlink") is None)
    with pytest.raises(RunError, match="failed"):
        deployment.online()
    done = len(lines(folder))
    deployment.up(NODES)
    run, again = submit(deployment, "long", settings)
    shown = []
    result = follow(deployment, run, again, shown.append)
    assert again == folder
    assert [line["round"] for line in shown] == list(range(done + 1, 4))
    assert result.rounds == 3
    assert same(folder, expected(method="fedbe+scaffold", rounds=3, epochs=2))
