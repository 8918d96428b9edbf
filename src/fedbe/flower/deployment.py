"""A whole deployment on this machine: a SuperLink with TLS, node authentication and a database, and SuperNodes.

DIR/state/deployment.json   the ports, and how many nodes there are
DIR/state/registered.json   the node id of each public key
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedbe.core.files import write_atomic, write_json
from fedbe.errors import RunError
from fedbe.flower import _bootstrap, processes

LINK = "superlink"
START_SECONDS = 90.0  # a SuperLink takes a node that ended without a word for online for 60 s
OWN_FOLDERS = ("certs/", "state/", "runs/")
Say = Callable[[str], None]


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

    @property
    def _connections(self) -> Path:
        return self.state / "flwr" / "config.toml"

    def environment(self) -> dict[str, str]:
        """Flower finds its own programs by PATH, its configuration by FLWR_HOME."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        return {**os.environ, **_bootstrap.NO_TELEMETRY, "PATH": path, "FLWR_HOME": str(self.state / "flwr")}

    def up(self, nodes: int, say: Say = lambda _: None) -> None:
        """Start what is not running yet; the ports and the database stay from one time to the next.

        If that fails, what this call has started is stopped, and what ran before goes on.
        """
        names = [f"node-{number}" for number in range(nodes)]
        self._check_keys(names)
        self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.keep_out_of_bundle(say)
        ran = {name for name in processes.names(self.state) if processes.alive(self.state, name) is not None}
        ports = self._plan(nodes, ran)
        try:
            self._start_link(ports[0], say)
            ids = self._register(names)
            new = [name for name in names if name not in ran]
            self._await_goodbyes(new, ids, say)
            for name in new:
                self._start_node(name, nodes, ports)
            self._await(lambda: self._offline(ids), f"{nodes} nodes to come online", names)
        except BaseException:
            self._stop([name for name in processes.names(self.state) if name not in ran])
            raise
        say(f"nodes online: {nodes}")

    def down(self) -> list[str]:
        """Stop everything that `up` started here; the names of what was running."""
        return self._stop(processes.names(self.state))

    def size(self) -> int:
        """How many nodes there are, as the ones that run here were told when they started; 0 before the first `up`."""
        return int(self._planned().get("nodes", 0))

    def online(self) -> set[str]:
        """The ids of the nodes that the SuperLink takes for connected."""
        listed = self.flwr("supernode", "list")["nodes"]
        return {str(node["node-id"]) for node in listed if node["status"] == "online"}

    def keep_out_of_bundle(self, say: Say = lambda _: None) -> None:
        """Keys, state and results stay here: Flower sends every node what .gitignore does not name, *.json among it."""
        path = self.folder / ".gitignore"
        content = path.read_bytes() if path.exists() else b""
        if missing := [own for own in OWN_FOLDERS if own.encode() not in content.splitlines()]:
            end = b"" if not content or content.endswith(b"\n") else b"\n"
            write_atomic(path, content + end + "".join(f"{own}\n" for own in missing).encode())
            say(f"added {' '.join(missing)} to {path}: Flower would send them to every node with the app")

    def check_was_up(self) -> None:
        if not self._connections.exists():
            raise RunError(f"nothing was ever up in {self.folder}: run `fedbe flower up {self.folder}`")

    def flwr(self, *words: str) -> dict[str, Any]:
        """One of Flower's own commands on this deployment, and its answer."""
        self.check_was_up()
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

    def _check_keys(self, names: Sequence[str]) -> None:
        make = f"run `fedbe flower certs {self.folder} --nodes {len(names)}`"
        whole = f"remove {self.certs} and {make}, which ends trust in the old keys" if self.certs.exists() else make
        needed = {"ca.pem": whole, "server.pem": whole, "server.key": whole}
        for name in names:
            needed |= {name: make, f"{name}.pub": f"remove {self.certs / name} and {make}, which makes both anew"}
        for name, remedy in needed.items():
            if not (self.certs / name).exists():
                raise RunError(f"{self.certs / name} is missing: {remedy}")

    def _stop(self, names: Sequence[str]) -> list[str]:
        """Nodes first, and to their end: one that cannot tell the SuperLink that it goes is not let in again soon."""
        nodes = [name for name in names if name != LINK]
        return processes.stop(self.state, nodes) + processes.stop(self.state, [name for name in names if name == LINK])

    def _start_link(self, port: int, say: Say) -> None:
        connection = {"address": f"127.0.0.1:{port}", "root-certificates": str(self.certs / "ca.pem")}
        self._connections.parent.mkdir(exist_ok=True)
        config = {"superlink": {"default": "fedbe", "fedbe": connection}}
        write_atomic(self._connections, tomli_w.dumps(config).encode())
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
        self._await(lambda: [] if self._healthy(port) else [LINK], "the SuperLink to answer", [LINK])
        say(f"the SuperLink answers on 127.0.0.1:{port}")

    def _register(self, names: Sequence[str]) -> dict[str, str]:
        """Make the SuperLink know each node's key; the ids that it gave them."""
        done = self.state / "registered.json"
        known: dict[str, str] = json.loads(done.read_text()) if done.exists() else {}
        keys = {name: self.certs / f"{name}.pub" for name in names}
        for path in keys.values():
            if path.read_text() not in known:
                known[path.read_text()] = str(self.flwr("supernode", "register", str(path))["node-id"])
                write_json(done, known)
        return {name: known[path.read_text()] for name, path in keys.items()}

    def _offline(self, ids: Mapping[str, str]) -> list[str]:
        online = self.online()
        return [name for name, number in ids.items() if number not in online]

    def _await_goodbyes(self, names: Sequence[str], ids: Mapping[str, str], say: Say) -> None:
        """A SuperLink lets a node in only when it does not take it for online already."""

        def lingering() -> list[str]:
            offline = self._offline(ids)
            return [name for name in names if name not in offline]

        if gone := ", ".join(lingering()):
            say(f"the SuperLink has not noticed yet that {gone} ended: waiting, which can take a minute")
            self._await(lingering, f"the SuperLink to notice that {gone} ended", [LINK])

    def _start_node(self, name: str, nodes: int, ports: Sequence[int]) -> None:
        number = int(name.removeprefix("node-"))
        command = [
            *(processes.tool("flower-supernode"), "--superlink", f"127.0.0.1:{ports[0]}"),
            *("--root-certificates", str(self.certs / "ca.pem")),
            *("--auth-supernode-private-key", str(self.certs / name)),
            *("--node-config", f"partition-id={number} num-partitions={nodes}"),
            *("--host", "127.0.0.1", "--port", str(ports[1 + number])),
        ]
        processes.start(self.state, name, command, self.environment())

    def _planned(self) -> dict[str, Any]:
        path = self.state / "deployment.json"
        planned: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return planned

    def _plan(self, nodes: int, running: set[str]) -> list[int]:
        """The ports of the SuperLink and of each node. RunError if nodes run that were told another number of nodes."""
        if running - {LINK} and self.size() != nodes:
            raise RunError(
                f"the nodes that run in {self.folder} were told that they are {self.size()}, not {nodes}: "
                f"run `fedbe flower down {self.folder}` first, and all start anew"
            )
        ports: list[int] = self._planned().get("ports", [])
        ports += processes.free_ports(max(0, nodes + 1 - len(ports)))
        write_json(self.state / "deployment.json", {"nodes": nodes, "ports": ports})
        return ports

    def _healthy(self, port: int) -> bool:
        trust = ssl.create_default_context(cafile=str(self.certs / "ca.pem"))
        try:
            with urllib.request.urlopen(f"https://127.0.0.1:{port}/health", timeout=5, context=trust) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _await(self, missing: Callable[[], list[str]], what: str, needed: Sequence[str]) -> None:
        """Wait until nothing is missing. The needed processes must live, also when nothing is."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            late = missing()
            ended = [name for name in needed if processes.alive(self.state, name) is None]
            if not late and not ended:
                return
            if ended or time.monotonic() > deadline:
                name = (ended or late)[0]
                why = f"{name} ended" if ended else f"not within {START_SECONDS:.0f} s"
                said = processes.last_lines(self.state, name)
                raise RunError(f"waited for {what}, but {why}; {self.state / name}.log ends with:\n{said}")
            time.sleep(0.5)
