"""Locks: of one process, for as long as its block lasts."""

import errno
import fcntl
import subprocess
import sys

import pytest

from fedbe.core.files import locked
from fedbe.errors import RunError

FORKING = """
import multiprocessing, sys, time
from pathlib import Path
from fedbe.core.files import locked

folder = Path(sys.argv[1])
with locked(folder):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
try:
    with locked(folder):
        print("mine again")
finally:
    child.kill()
"""


def test_a_lock_ends_with_its_block_though_a_child_was_forked_meanwhile(tmp_path):
    """As the workers of a DataLoader are, which have the file open too."""
    done = subprocess.run([sys.executable, "-c", FORKING, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "mine again\n"


def test_a_disk_without_locks_is_not_called_another_process(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(RunError, match=r"cannot lock .* \(No locks available\)"), locked(tmp_path):
        pytest.fail("it is not locked")
