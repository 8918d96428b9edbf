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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedbe.core.files import open_no_follow, write_json
from fedbe.errors import RunError, missing_extra

MARK = "FEDBE_PROCESS"
PROC = Path("/proc")
KILL_SECONDS = 5.0  # so long killed processes are waited for
EXEC_SECONDS = 0.1  # between fork and exec, on a busy machine
_children: dict[tuple[int, str], "subprocess.Popen[bytes]"] = {}  # (pid, mark) -> child of this process, until reaped


def executable(name: str) -> str:
    """The path of one of Flower's programs, in the environment of this Python."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise missing_extra(f"`{name}` is not installed next to {sys.executable}", "flower")
    return str(path)


def start(folder: Path, name: str, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Start a process and return its pid. It gets its own session, so that it can be stopped with its children.

    An earlier process of that name may have been killed, and its children may still run: they are stopped first.
    """
    stop(folder, [name])
    mark = uuid.uuid4().hex
    with open_no_follow(folder / f"{name}.log", "ab") as log:
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


def _read_pid_file(folder: Path, name: str) -> tuple[int, str]:
    try:
        content = json.loads((folder / f"{name}.pid").read_text())
        return int(content["pid"]), str(content["mark"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, ""


def stop(folder: Path, names: Sequence[str], seconds: float = 10.0) -> list[str]:
    """Stop processes and their children: SIGTERM to all, then, after `seconds`, SIGKILL to what is left.

    Children with a session of their own (Flower's SuperExec) end by themselves when their parent has ended. They are
    waited for, and killed if they do not end.

    Returns:
        The names of the processes that were running, or whose children were.
    """
    running = [name for name in names if _family(folder, name)]
    for name in running:
        _terminate(folder, name)
    deadline = time.monotonic() + seconds
    for name in running:
        _kill_after(deadline, folder, name)
        if child := _children.pop(_read_pid_file(folder, name), None):
            child.wait()
    for name in names:
        (folder / f"{name}.pid").unlink(missing_ok=True)
    return running


def _terminate(folder: Path, name: str) -> None:
    """SIGTERM to a process and its group; to the children one by one if it has ended before them."""
    pid = _read_pid_file(folder, name)[0]
    if running_pid(folder, name) is None or not _signal(os.killpg, pid, signal.SIGTERM):
        for member in _family(folder, name):
            _signal(os.kill, member, signal.SIGTERM)


def _kill_after(deadline: float, folder: Path, name: str) -> None:
    """Wait for a process and its children until `deadline`, then kill what is left."""
    while (left := _settled_family(folder, name)) and time.monotonic() < deadline:
        time.sleep(0.1)
    while left and time.monotonic() < deadline + KILL_SECONDS:
        for member in left:
            _signal(os.kill, member, signal.SIGKILL)
        time.sleep(0.02)  # a process ends a moment after the signal
        left = {member for member in left if _is_alive(member)} or _settled_family(folder, name)


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


def _signal(send: Callable[[int, int], None], pid: int, number: int) -> bool:
    """Send a signal to a process or a group. False if it does not exist or is not ours."""
    try:
        send(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _is_alive(pid: int) -> bool:
    """Whether a process has not ended. Without /proc that is unknown, and the answer is no."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _family(folder: Path, name: str) -> set[int]:
    """The pids of a started process and its children that still run; they all have its mark.

    Without /proc (macOS) the children are not found. Flower's children end by themselves when their parent has ended.
    """
    mark, pid = _read_pid_file(folder, name)[1], running_pid(folder, name)
    marked = {int(path.name) for path in PROC.glob("[0-9]*") if mark and _has_mark(int(path.name), mark)}
    return marked if pid is None else {pid, *marked}


def _settled_family(folder: Path, name: str) -> set[int]:
    """The family. If it seems to be empty, look again: a child that is between fork and exec shows no mark."""
    if not (family := _family(folder, name)):
        time.sleep(EXEC_SECONDS)
        family = _family(folder, name)
    return family


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
