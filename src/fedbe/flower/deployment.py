"""A complete deployment on this machine: a SuperLink with TLS, node authentication and a database, and SuperNodes.

DIR/state/deployment.json   the ports, and the number of nodes
DIR/state/registered.json   public key -> node id
DIR/state/*.pid, *.log      one of each for every process
DIR/state/superlink.db      the SuperLink's database: runs, registered nodes
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

SUPERLINK = "superlink"
START_SECONDS = 90.0  # a SuperLink lists a crashed node as online for 60 s
RECONNECT_SECONDS = 20.0  # for nodes that run but are offline, for example because the SuperLink was restarted
NO_INSTALLATION = "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"  # no new environment for each run
PRIVATE_FOLDERS = ("certs/", "state/", "runs/")
Print = Callable[[str], None]  # receives a line of progress for the user


@dataclass(frozen=True)
class Deployment:
    """One deployment, kept in the folder of its app.

    Args:
        folder: the folder of the app.
    """

    folder: Path

    @property
    def state(self) -> Path:
        """The folder of logs, pid files and the database."""
        return self.folder.resolve() / "state"

    @property
    def certs(self) -> Path:
        """The folder of keys and certificates."""
        return self.folder.resolve() / "certs"

    @property
    def _flwr_config(self) -> Path:
        return self.state / "flwr" / "config.toml"

    def environment(self) -> dict[str, str]:
        """The environment of Flower's processes: it finds its programs by PATH and its configuration by FLWR_HOME."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        ours = {"PATH": path, "FLWR_HOME": str(self.state / "flwr"), **_bootstrap.NO_TELEMETRY, NO_INSTALLATION: "1"}
        return {**os.environ, **ours}

    def up(self, nodes: int, show: Print = lambda _: None) -> None:
        """Start every process that is not running yet, and nodes again that run but do not connect.

        Ports and database are kept from earlier calls.

        If that fails, the processes started by this call are stopped, and the others continue.

        Args:
            nodes: the number of nodes.
            show: receives lines of progress. Default: none are shown.

        Raises:
            RunError: a key is missing, a process ended or was not online in time, or the running nodes were started
                for another number of nodes.
        """
        names = [f"node-{number}" for number in range(nodes)]
        self._check_keys(names)
        self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.ignore_private_folders(show)
        running = {name for name in processes.names(self.state) if processes.running_pid(self.state, name) is not None}
        ports = self._plan_ports(nodes, running)
        try:
            self._start_superlink(ports[0], show)
            ids = self._register(names)
            running -= self._stop_unconnected([name for name in names if name in running], ids, show)
            new = [name for name in names if name not in running]
            self._wait_until_offline(new, ids, show)
            for name in new:
                self._start_node(name, nodes, ports)
            self._wait(lambda: self._offline(ids), f"{nodes} nodes to come online", names)
        except BaseException:
            self._stop([name for name in processes.names(self.state) if name not in running])
            raise
        show(f"nodes online: {nodes}")

    def down(self) -> list[str]:
        """Stop every process that `up` started here, and return the names of those that were running."""
        return self._stop(processes.names(self.state))

    def size(self) -> int:
        """The number of nodes at the last `up`; 0 before the first."""
        return int(self._read_plan().get("nodes", 0))

    def online(self) -> set[str]:
        """The ids of the nodes that the SuperLink lists as online."""
        listed = self.flwr("supernode", "list")["nodes"]
        return {str(node["node-id"]) for node in listed if node["status"] == "online"}

    def ignore_private_folders(self, show: Print = lambda _: None) -> None:
        """Add keys, state and results to .gitignore: Flower sends all other files to every node, *.json included."""
        path = self.folder / ".gitignore"
        content = path.read_bytes() if path.exists() else b""
        if missing := [name for name in PRIVATE_FOLDERS if name.encode() not in content.splitlines()]:
            end = b"" if not content or content.endswith(b"\n") else b"\n"
            write_atomic(path, content + end + "".join(f"{name}\n" for name in missing).encode())
            show(f"added {' '.join(missing)} to {path}: Flower would send them to every node with the app")

    def check_was_up(self) -> None:
        """RunError if `up` was never called in this folder."""
        if not self._flwr_config.exists():
            raise RunError(f"no deployment was started in {self.folder}: run `fedbe flower up {self.folder}`")

    def flwr(self, *words: str) -> dict[str, Any]:
        """Run one of Flower's commands on this deployment and return its JSON answer. RunError if it failed."""
        self.check_was_up()
        command = [processes.executable("flwr"), *words, "fedbe", "--format", "json"]
        result = subprocess.run(command, capture_output=True, text=True, env=self.environment(), check=False)
        begin, end = result.stdout.find("{"), result.stdout.rfind("}")
        try:
            answer: dict[str, Any] = json.loads(result.stdout[begin : end + 1])
        except ValueError:
            answer = {"success": False, "error-message": (result.stderr or result.stdout).strip()[-300:]}
        if not answer.get("success"):
            raise RunError(f"`flwr {' '.join(words[:2])}` failed: {answer.get('error-message', 'no reason was given')}")
        return answer

    def _check_keys(self, names: Sequence[str]) -> None:
        create = f"run `fedbe flower certs {self.folder} --nodes {len(names)}`"
        create_all = create
        if self.certs.exists():
            create_all = f"remove {self.certs} and {create}; the old keys will no longer be trusted"
        remedies = {"ca.pem": create_all, "server.pem": create_all, "server.key": create_all}
        for name in names:
            remedies[name] = create
            remedies[f"{name}.pub"] = f"remove {self.certs / name} and {create}, which creates both again"
        for name, remedy in remedies.items():
            if not (self.certs / name).exists():
                raise RunError(f"{self.certs / name} is missing: {remedy}")

    def _stop(self, names: Sequence[str]) -> list[str]:
        """Stop nodes before the SuperLink: it accepts a node again at once only if the node disconnected cleanly."""
        nodes = [name for name in names if name != SUPERLINK]
        superlink = [name for name in names if name == SUPERLINK]
        return processes.stop(self.state, nodes) + processes.stop(self.state, superlink)

    def _start_superlink(self, port: int, show: Print) -> None:
        connection = {"address": f"127.0.0.1:{port}", "root-certificates": str(self.certs / "ca.pem")}
        self._flwr_config.parent.mkdir(exist_ok=True)
        config = {"superlink": {"default": "fedbe", "fedbe": connection}}
        write_atomic(self._flwr_config, tomli_w.dumps(config).encode())
        if processes.running_pid(self.state, SUPERLINK) is not None:
            return
        if not (self.state / "superlink.db").exists():  # a new SuperLink has no registered nodes
            (self.state / "registered.json").unlink(missing_ok=True)
        command = [
            *(processes.executable("flower-superlink"), "--host", "127.0.0.1", "--port", str(port)),
            *("--ssl-ca-certfile", str(self.certs / "ca.pem")),
            *("--ssl-certfile", str(self.certs / "server.pem")),
            *("--ssl-keyfile", str(self.certs / "server.key")),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            *("--database", str(self.state / "superlink.db")),
        ]
        processes.start(self.state, SUPERLINK, command, self.environment())
        self._wait(lambda: [] if self.is_healthy(port) else [SUPERLINK], "the SuperLink to answer", [SUPERLINK])
        show(f"the SuperLink answers on 127.0.0.1:{port}")

    def _register(self, names: Sequence[str]) -> dict[str, str]:
        """Register the nodes' keys with the SuperLink and return their node ids."""
        path = self.state / "registered.json"
        id_by_key: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        key_files = {name: self.certs / f"{name}.pub" for name in names}
        for key_file in key_files.values():
            if key_file.read_text() not in id_by_key:
                id_by_key[key_file.read_text()] = str(self.flwr("supernode", "register", str(key_file))["node-id"])
                write_json(path, id_by_key)
        return {name: id_by_key[key_file.read_text()] for name, key_file in key_files.items()}

    def _offline(self, ids: Mapping[str, str]) -> list[str]:
        online = self.online()
        return [name for name, node_id in ids.items() if node_id not in online]

    def _stop_unconnected(self, names: Sequence[str], ids: Mapping[str, str], show: Print) -> set[str]:
        """Stop nodes that run but do not connect, and return their names: they are started again."""
        deadline = time.monotonic() + RECONNECT_SECONDS
        own_ids = {name: ids[name] for name in names}
        while names and (lost := self._offline(own_ids)):
            if time.monotonic() > deadline:
                show(f"{', '.join(lost)}: running, but not connected for {RECONNECT_SECONDS:.0f} s; starting again")
                return set(self._stop(lost))
            time.sleep(0.5)
        return set()

    def _wait_until_offline(self, names: Sequence[str], ids: Mapping[str, str], show: Print) -> None:
        """Wait until the SuperLink lists ended nodes as offline; before that it refuses them."""

        def still_listed() -> list[str]:
            offline = self._offline(ids)
            return [name for name in names if name not in offline]

        if ended := ", ".join(still_listed()):
            show(f"the SuperLink still lists {ended} as online: waiting, which can take a minute")
            self._wait(still_listed, f"the SuperLink to list {ended} as offline", [SUPERLINK])

    def _start_node(self, name: str, nodes: int, ports: Sequence[int]) -> None:
        number = int(name.removeprefix("node-"))
        command = [
            *(processes.executable("flower-supernode"), "--superlink", f"127.0.0.1:{ports[0]}"),
            *("--root-certificates", str(self.certs / "ca.pem")),
            *("--auth-supernode-private-key", str(self.certs / name)),
            *("--node-config", f"partition-id={number} num-partitions={nodes}"),
            *("--host", "127.0.0.1", "--port", str(ports[1 + number])),
        ]
        processes.start(self.state, name, command, self.environment())

    def _read_plan(self) -> dict[str, Any]:
        path = self.state / "deployment.json"
        plan: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return plan

    def _plan_ports(self, nodes: int, running: set[str]) -> list[int]:
        """The ports of the SuperLink and of each node. RunError if nodes run that were started for another number."""
        if running - {SUPERLINK} and self.size() != nodes:
            raise RunError(
                f"the nodes that run in {self.folder} were started for {self.size()} nodes, not {nodes}: "
                f"run `fedbe flower down {self.folder}` first, so that all start again"
            )
        ports: list[int] = self._read_plan().get("ports", [])
        ports += processes.free_ports(max(0, nodes + 1 - len(ports)))
        write_json(self.state / "deployment.json", {"nodes": nodes, "ports": ports})
        return ports

    def is_healthy(self, port: int) -> bool:
        """Whether the SuperLink answers on this port."""
        tls = ssl.create_default_context(cafile=str(self.certs / "ca.pem"))
        try:
            with urllib.request.urlopen(f"https://127.0.0.1:{port}/health", timeout=5, context=tls) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _wait(self, missing: Callable[[], list[str]], what: str, needed: Sequence[str]) -> None:
        """Wait until nothing is missing. RunError if a needed process has ended, or after START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            late = missing()
            ended = [name for name in needed if processes.running_pid(self.state, name) is None]
            if not late and not ended:
                return
            if ended or time.monotonic() > deadline:
                name = (ended or late)[0]
                reason = f"{name} ended" if ended else f"not within {START_SECONDS:.0f} s"
                log = processes.last_lines(self.state, name)
                advice = "" if ended else f" (`fedbe flower down {self.folder}` and `up` start everything again)"
                raise RunError(f"waited for {what}, but {reason}{advice}; {self.state / name}.log ends with:\n{log}")
            time.sleep(0.5)
