"""A lock belongs to one process and ends with its block."""

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


def test_a_lock_ends_with_its_block_also_with_a_forked_child(tmp_path):
    """Workers of a DataLoader are forked, and then have the file open too."""
    done = subprocess.run([sys.executable, "-c", FORKING, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "mine again\n"


def test_a_disk_without_locks_is_not_reported_as_busy(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(RunError, match="No locks available"), locked(tmp_path):
        pytest.fail("it is not locked")
