"""Processes that outlive the command that started them: a pid file and a log each, ended by their own id.

A number can belong to somebody else later. So each process gets a mark of its own in its environment, which its
children inherit, and no group without that mark is ever ended.
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
_OURS: dict[tuple[int, str], "subprocess.Popen[bytes]"] = {}  # children of this very process, until they are reaped


def tool(name: str) -> str:
    """One of Flower's programs, from the environment that runs this one."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise ExtraError(f"`{name}` is not beside {sys.executable}: pip install 'fedbe[flower]'")
    return str(path)


def start(folder: Path, name: str, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Start NAME in a session of its own, so that its children can be ended with it."""
    mark = uuid.uuid4().hex
    marked = {**environment, MARK: mark}
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(  # it is to live on
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=marked, start_new_session=True
        )
    _OURS[process.pid, mark] = process
    write_json(folder / f"{name}.pid", {"pid": process.pid, "mark": mark})
    return process.pid


def alive(folder: Path, name: str) -> int | None:
    """The pid of NAME if it still runs; another process that got its number since is not it.

    A child of our own has ended when it is reaped, and not before: what it has started itself looks for its number,
    which stays until then. (A process that is just beginning or ending shows no mark.)
    """
    pid, mark = _known(folder, name)
    if (pid, mark) not in _OURS:
        return pid if pid and _has_mark(pid, mark) else None
    if _OURS[pid, mark].poll() is None:
        return pid
    del _OURS[pid, mark]
    return None


def _left(folder: Path, name: str) -> int | None:
    """The group of NAME if it has ended itself but children of it live on; while they do, no other gets its number.

    Where there is no /proc (macOS), such children are not found: Flower's end by themselves when their parent has.
    """
    pid, mark = _known(folder, name)
    return pid if pid and any(_has_mark(member, mark) for member in _members(pid)) else None


def _known(folder: Path, name: str) -> tuple[int, str]:
    try:
        known = json.loads((folder / f"{name}.pid").read_text())
        return int(known["pid"]), str(known["mark"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, ""


def stop(folder: Path, names: Sequence[str], seconds: float = 10.0) -> list[str]:
    """End these and their children: all politely, then for good what is left. Returns those that were running."""
    running = {name: pid for name in names if (pid := alive(folder, name) or _left(folder, name)) is not None}
    for pid in running.values():
        _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    for name, pid in running.items():
        while (alive(folder, name) or _group_exists(pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        _signal(pid, signal.SIGKILL)
        if child := _OURS.pop(_known(folder, name), None):
            child.wait()
    for name in names:
        (folder / f"{name}.pid").unlink(missing_ok=True)
    return list(running)


def names(folder: Path) -> list[str]:
    """Everything that was started here and not stopped."""
    return sorted(path.stem for path in folder.glob("*.pid"))


def last_lines(folder: Path, name: str, count: int = 8) -> str:
    """The end of a log."""
    try:
        text = (folder / f"{name}.log").read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody uses now."""
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


def _signal(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _group_exists(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _has_mark(pid: int, mark: str) -> bool:
    """Is the mark in the process's environment? One that has ended has none, whether it was reaped or not."""
    entry = f"{MARK}={mark}".encode()
    try:
        if PROC.exists():
            return entry in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
        told = subprocess.run(["ps", "eww", "-o", "command=", "-p", str(pid)], capture_output=True, check=False)
        return entry in told.stdout.split()
    except OSError:  # it has ended, it is another user's, or there is no `ps`
        return False


def _members(group: int) -> Iterator[int]:
    """The processes of a group."""
    for path in PROC.glob("[0-9]*/stat"):
        try:
            if path.read_text(errors="replace").rpartition(")")[2].split()[2] == str(group):
                yield int(path.parent.name)
        except (OSError, IndexError):  # it has just ended
            continue
