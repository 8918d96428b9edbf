"""A whole deployment on this machine: a SuperLink with TLS, node authentication and a database, and SuperNodes.

DIR/state/deployment.json   the ports
DIR/state/*.pid, *.log      one of each for every process
DIR/state/superlink.db      what the SuperLink knows: runs, registered nodes
DIR/state/flwr/config.toml  how the `flwr` command finds this SuperLink: FLWR_HOME=DIR/state/flwr flwr ls
"""

import json
import os
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedbe.errors import RunError
from fedbe.files import write_json, write_whole
from fedbe.flower import _ready, processes

LINK = "superlink"
START_SECONDS = 90.0


@dataclass(frozen=True)
class Deployment:
    """One deployment, kept in one folder."""

    folder: Path

    @property
    def state(self) -> Path:
        return self.folder.resolve() / "state"

    @property
    def certs(self) -> Path:
        return self.folder.resolve() / "certs"

    def environment(self) -> dict[str, str]:
        """Flower finds its own programs by PATH, its configuration by FLWR_HOME."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        return {**os.environ, **_ready.QUIET, "PATH": path, "FLWR_HOME": str(self.state / "flwr")}

    def up(self, nodes: int, say: Callable[[str], None] = lambda _: None) -> None:
        """Start what is not running yet; the ports and the database stay from one time to the next.

        If that fails, what this call has started is stopped, and what ran before goes on.
        """
        for needed in ("ca.pem", "server.pem", "server.key", *(f"node-{i}" for i in range(nodes))):
            if not (self.certs / needed).exists():
                raise RunError(
                    f"{self.certs / needed} is missing: run `fedbe flower certs {self.folder} --nodes {nodes}`"
                )
        self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        ports = self._ports(nodes)
        ran = {name for name in processes.names(self.state) if processes.alive(self.state, name) is not None}
        try:
            self._start_link(ports[0], say)
            self._register(nodes)
            for number in range(nodes):
                self.start_node(number, nodes)
            self._await(lambda: self.online() >= nodes, f"{nodes} nodes to come online", f"node-{nodes - 1}")
        except BaseException:
            processes.stop(self.state, [name for name in processes.names(self.state) if name not in ran])
            raise
        say(f"nodes online: {nodes}")

    def down(self) -> list[str]:
        """Stop everything that `up` started here; the names of what was running."""
        return processes.stop(self.state, processes.names(self.state))

    def start_node(self, number: int, nodes: int) -> None:
        name = f"node-{number}"
        if processes.alive(self.state, name) is not None:
            return
        ports = self._ports(nodes)
        command = [
            *(processes.tool("flower-supernode"), "--superlink", f"127.0.0.1:{ports[0]}"),
            *("--root-certificates", str(self.certs / "ca.pem")),
            *("--auth-supernode-private-key", str(self.certs / name)),
            *("--node-config", f"partition-id={number} num-partitions={nodes}"),
            *("--host", "127.0.0.1", "--port", str(ports[1 + number])),
        ]
        processes.start(self.state, name, command, self.environment())

    def online(self) -> int:
        """How many registered nodes are connected now."""
        return sum(node.get("status") == "online" for node in self.flwr("supernode", "list")["nodes"])

    def flwr(self, *words: str) -> dict[str, Any]:
        """One of Flower's own commands on this deployment, and its answer."""
        if not (self.state / "flwr" / "config.toml").exists():
            raise RunError(f"nothing was ever up in {self.folder}: run `fedbe flower up {self.folder}`")
        command = [processes.tool("flwr"), *words, "fedbe", "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment(), check=False)
        begin, end = done.stdout.find("{"), done.stdout.rfind("}")
        try:
            answer: dict[str, Any] = json.loads(done.stdout[begin : end + 1])
        except ValueError:
            answer = {"success": False, "error-message": (done.stderr or done.stdout).strip()[-300:]}
        if not answer.get("success"):
            raise RunError(f"`flwr {' '.join(words[:2])}` failed: {answer.get('error-message', 'it did not say why')}")
        return answer

    def _start_link(self, port: int, say: Callable[[str], None]) -> None:
        connection = {"address": f"127.0.0.1:{port}", "root-certificates": str(self.certs / "ca.pem")}
        (self.state / "flwr").mkdir(exist_ok=True)
        config = {"superlink": {"default": "fedbe", "fedbe": connection}}
        write_whole(self.state / "flwr" / "config.toml", tomli_w.dumps(config).encode())
        if processes.alive(self.state, LINK) is not None:
            return
        if not (self.state / "superlink.db").exists():  # a new SuperLink knows no node
            (self.state / "registered.json").unlink(missing_ok=True)
        command = [
            *(processes.tool("flower-superlink"), "--host", "127.0.0.1", "--port", str(port)),
            *("--ssl-ca-certfile", str(self.certs / "ca.pem")),
            *("--ssl-certfile", str(self.certs / "server.pem")),
            *("--ssl-keyfile", str(self.certs / "server.key")),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            *("--database", str(self.state / "superlink.db")),
        ]
        processes.start(self.state, LINK, command, self.environment())
        self._await(lambda: self._healthy(port), "the SuperLink to answer", LINK)
        say(f"the SuperLink answers on 127.0.0.1:{port}")

    def _register(self, nodes: int) -> None:
        done = self.state / "registered.json"
        known: list[str] = json.loads(done.read_text()) if done.exists() else []
        for number in range(nodes):
            key = (self.certs / f"node-{number}.pub").read_text()
            if key not in known:
                self.flwr("supernode", "register", str(self.certs / f"node-{number}.pub"))
                known.append(key)
                write_json(done, known)

    def _ports(self, nodes: int) -> list[int]:
        path = self.state / "deployment.json"
        ports: list[int] = json.loads(path.read_text())["ports"] if path.exists() else []
        if len(ports) < nodes + 1:
            ports += processes.free_ports(nodes + 1 - len(ports))
            write_json(path, {"ports": ports})
        return ports

    def _healthy(self, port: int) -> bool:
        trust = ssl.create_default_context(cafile=str(self.certs / "ca.pem"))
        try:
            with urllib.request.urlopen(f"https://127.0.0.1:{port}/health", timeout=5, context=trust) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _await(self, ready: Callable[[], bool], what: str, name: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            dead = processes.alive(self.state, name) is None
            if dead or time.monotonic() > deadline:
                why = "it ended" if dead else f"not within {START_SECONDS:.0f} s"
                said = processes.last_lines(self.state, name)
                raise RunError(f"waited for {what}, but {why}; {self.state / name}.log ends with:\n{said}")
            time.sleep(0.5)
