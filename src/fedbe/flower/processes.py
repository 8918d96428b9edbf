"""Background processes that outlive the command that started them, with a pid file and a log each.

A pid may be reused by another process. So each process gets a unique mark in its environment, which its children
inherit. A process group without that mark is never stopped.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedbe.core.files import write_json
from fedbe.errors import ExtraError, RunError

MARK = "FEDBE_PROCESS"
PROC = Path("/proc")
_children: dict[tuple[int, str], "subprocess.Popen[bytes]"] = {}  # (pid, mark) -> child of this process, until reaped


def executable(name: str) -> str:
    """The path of one of Flower's programs, in the environment of this Python."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise ExtraError(f"`{name}` is not installed next to {sys.executable}: pip install 'fedbe[flower]'")
    return str(path)


def start(folder: Path, name: str, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Start a process and return its pid. It gets its own session, so that it can be stopped with its children."""
    mark = uuid.uuid4().hex
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environment, MARK: mark},
            start_new_session=True,
        )
    _children[process.pid, mark] = process
    write_json(folder / f"{name}.pid", {"pid": process.pid, "mark": mark})
    return process.pid


def running_pid(folder: Path, name: str) -> int | None:
    """The pid of a started process if it still runs, else None. The pid may have been reused by another process.

    A child of this process counts as running until it is reaped: its own children look for its pid, which exists until
    then. Its mark is not checked, because a process that is starting or ending shows none.
    """
    pid, mark = _read_pid_file(folder, name)
    child = _children.get((pid, mark))
    if child is None:
        return pid if pid and _has_mark(pid, mark) else None
    if child.poll() is None:
        return pid
    del _children[pid, mark]
    return None


def _orphaned_group(folder: Path, name: str) -> int | None:
    """The process group of an ended process whose children still run. While they do, its pid is not reused.

    Without /proc (macOS) such children are not found. Flower's children end by themselves when their parent has ended.
    """
    pid, mark = _read_pid_file(folder, name)
    return pid if pid and any(_has_mark(member, mark) for member in _group_members(pid)) else None


def _read_pid_file(folder: Path, name: str) -> tuple[int, str]:
    try:
        content = json.loads((folder / f"{name}.pid").read_text())
        return int(content["pid"]), str(content["mark"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, ""


def stop(folder: Path, names: Sequence[str], seconds: float = 10.0) -> list[str]:
    """Stop processes and their children: SIGTERM to all, then, after `seconds`, SIGKILL to what is left.

    Returns:
        The names of the processes that were running.
    """
    pids = {name: running_pid(folder, name) or _orphaned_group(folder, name) for name in names}
    running = {name: pid for name, pid in pids.items() if pid is not None}
    for pid in running.values():
        _signal_group(pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    for name, pid in running.items():
        _wait_for_end(folder, name, pid, deadline)
        _signal_group(pid, signal.SIGKILL)
        if child := _children.pop(_read_pid_file(folder, name), None):
            child.wait()
    for name in names:
        (folder / f"{name}.pid").unlink(missing_ok=True)
    return list(running)


def _wait_for_end(folder: Path, name: str, pid: int, deadline: float) -> None:
    while (running_pid(folder, name) or _signal_group(pid, 0)) and time.monotonic() < deadline:
        time.sleep(0.1)


def names(folder: Path) -> list[str]:
    """The names of all processes that were started in a folder and not stopped, sorted."""
    return sorted(path.stem for path in folder.glob("*.pid"))


def last_lines(folder: Path, name: str, count: int = 8) -> str:
    """The end of a process's log."""
    try:
        text = (folder / f"{name}.log").read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that are free now. RunError if there are not enough."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    except OSError as error:
        raise RunError(f"no free port on 127.0.0.1: {error.strerror}") from error
    finally:
        for one in sockets:
            one.close()


def _signal_group(pid: int, number: int) -> bool:
    """Send a signal (0: none) to a process group. False if the group does not exist or is not ours."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _has_mark(pid: int, mark: str) -> bool:
    """Whether the mark is in the process's environment. It is not after the process has ended, reaped or not."""
    entry = f"{MARK}={mark}".encode()
    try:
        if PROC.exists():
            return entry in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
        ps = subprocess.run(["ps", "eww", "-o", "command=", "-p", str(pid)], capture_output=True, check=False)
        return entry in ps.stdout.split()
    except OSError:  # it has ended, it belongs to another user, or `ps` is not installed
        return False


def _group_members(group: int) -> Iterator[int]:
    """The pids of a process group."""
    for path in PROC.glob("[0-9]*/stat"):
        try:
            if path.read_text(errors="replace").rpartition(")")[2].split()[2] == str(group):
                yield int(path.parent.name)
        except (OSError, IndexError):  # it has just ended
            continue
