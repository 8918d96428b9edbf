"""Atomic writes; and a lock, which belongs to one process and ends with its block."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedbe.core.files import append_line, locked, make_folder, write_atomic, write_json
from fedbe.errors import BusyError, DataError, RunError
from fedbe.experiment.run_folder import new_folder

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


def test_a_second_lock_is_refused(tmp_path):
    with locked(tmp_path), pytest.raises(BusyError, match="another process"), locked(tmp_path):
        pytest.fail("it is locked twice")


def test_a_folder_that_does_not_exist_cannot_be_locked(tmp_path):
    with pytest.raises(RunError, match="cannot write"), locked(tmp_path / "none"):
        pytest.fail("it is not locked")


class TestLinks:
    """A link that somebody put there must not lead a write elsewhere."""

    def test_a_write_does_not_follow_one(self, tmp_path):
        victim = tmp_path / "victim"
        victim.write_text("precious")
        (tmp_path / ".a.bin.part").symlink_to(victim)
        write_atomic(tmp_path / "a.bin", b"new")
        assert victim.read_text() == "precious"
        assert (tmp_path / "a.bin").read_bytes() == b"new"
        assert not (tmp_path / "a.bin").is_symlink()

    def test_an_appended_line_does_not_follow_one(self, tmp_path):
        victim = tmp_path / "victim"
        victim.write_text("precious")
        (tmp_path / "rounds.jsonl").symlink_to(victim)
        with pytest.raises(RunError, match="cannot write"):
            append_line(tmp_path / "rounds.jsonl", {"round": 1})
        assert victim.read_text() == "precious"

    def test_a_lock_does_not_follow_one(self, tmp_path):
        victim = tmp_path / "victim"
        victim.write_text("precious")
        (tmp_path / ".lock").symlink_to(victim)
        with pytest.raises(RunError, match="cannot write"), locked(tmp_path):
            pytest.fail("it is locked")
        assert victim.read_text() == "precious"


def test_a_new_folder_s_name_is_synced(tmp_path, monkeypatch):
    synced = []
    real = os.fsync

    def fsync(handle):
        synced.append(str(Path(f"/proc/self/fd/{handle}").resolve()))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with new_folder(tmp_path / "runs" / "a"):
        pass
    append_line(tmp_path / "runs" / "a" / "rounds.jsonl", {})
    assert str(tmp_path / "runs") in synced
    assert str(tmp_path / "runs" / "a") in synced


class TestWriting:
    def test_a_file_is_replaced_and_nothing_else_is_left(self, tmp_path):
        path = tmp_path / "a.bin"
        write_atomic(path, b"old")
        write_atomic(path, b"new")
        assert path.read_bytes() == b"new"
        assert list(tmp_path.iterdir()) == [path]

    def test_a_failed_write_leaves_the_old_file(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        path = tmp_path / "a.bin"
        path.write_bytes(b"old")
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match="No space left"):
            write_atomic(path, b"new", DataError)
        assert path.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [path]
        with pytest.raises(RunError, match="No space left"):
            append_line(path, {})

    def test_a_folder_is_not_a_file(self):
        with pytest.raises(RunError, match="it is a folder"):
            write_atomic(Path("/"), b"")

    def test_json(self, tmp_path):
        path = tmp_path / "rounds.jsonl"
        append_line(path, {"round": 1})
        append_line(path, {"round": 2})
        assert path.read_text() == '{"round": 1}\n{"round": 2}\n'
        write_json(path, [1])
        assert path.read_text() == "[\n  1\n]\n"

    def test_folders(self, tmp_path):
        make_folder(tmp_path / "a" / "b")
        make_folder(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").is_dir()
        (tmp_path / "file").touch()
        with pytest.raises(RunError, match="cannot create"):
            make_folder(tmp_path / "file")
