"""The short form of `make chaos`: nothing is lost. And planted faults: each kind of trial finds what it is for."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from benchmarks.chaos import __main__ as chaos
from benchmarks.chaos import disks, fuzz, processes, replies
from benchmarks.chaos.common import reference_run

from fedbe.algorithms.server import guard
from fedbe.core import files
from fedbe.errors import DataError
from fedbe.experiment import checkpoint, run_folder, tensor_files
from fedbe.experiment.executors import watchdog
from fedbe.flower import replies as flower_replies

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_nothing_is_lost(capsys):
    counts = {"kills": 6, "workers": 1, "writes": 16, "read-only": 4, "power": 16, "inputs": 1500, "replies": 100}
    arguments = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    assert chaos.main([*arguments, "--seed", "1"]) == 0, capsys.readouterr().out


@pytest.fixture
def draw():
    return random.Random(0)


class TestPlantedFaults:
    """The product is broken on purpose. Each fault would be a silent loss, and the table must show it."""

    def test_files_that_are_not_synced(self, monkeypatch, tmp_path, draw):
        monkeypatch.setattr(files, "write_and_sync", lambda file, content: file.write(content))
        assert disks.power_failures(24, draw, tmp_path, ("fedavg",)).lost

    def test_names_that_are_not_synced(self, monkeypatch, tmp_path, draw):
        monkeypatch.setattr(files, "sync_folder", lambda _: None)
        assert disks.power_failures(24, draw, tmp_path, ("fedavg",)).lost

    def test_a_file_that_is_rewritten_in_place(self, monkeypatch, tmp_path, draw):
        def in_place(path, content, *_):
            with path.open("wb") as file:
                files.write_and_sync(file, content)

        monkeypatch.setattr(run_folder, "write_atomic", in_place)
        assert disks.power_failures(30, draw, tmp_path, ("fedavg",)).bad

    def test_a_resume_that_drops_what_clients_remember(self, monkeypatch, tmp_path, draw):
        read = checkpoint.read
        monkeypatch.setattr(checkpoint, "read", lambda *args: replace(read(*args), clients={}))
        assert disks.power_failures(16, draw, tmp_path, ("scaffold",)).differing

    def test_a_line_that_is_never_written(self, monkeypatch, tmp_path, draw):
        reference_run(tmp_path, "fedavg")
        monkeypatch.setattr(run_folder, "append_round", lambda *_: None)
        monkeypatch.setattr(run_folder, "mark_finished", lambda *_: None)
        assert processes.kills(6, draw, tmp_path, ("fedavg",)).bad

    def test_a_full_disk_that_is_a_raw_error(self, monkeypatch, tmp_path):
        monkeypatch.setattr(tensor_files, "write_atomic", lambda path, content, *_: files.write_synced(path, content))
        assert disks.full(40, tmp_path).raw

    def test_a_read_only_disk_that_is_a_raw_error(self, monkeypatch, tmp_path):
        monkeypatch.setattr(tensor_files, "write_atomic", lambda path, content, *_: files.write_synced(path, content))
        assert disks.read_only_disks(8, tmp_path, ("fedavg",)).raw

    def test_a_checksum_that_is_not_compared(self, monkeypatch, tmp_path):
        monkeypatch.setattr(tensor_files, "content_digest", lambda *_: "")
        run = reference_run(tmp_path, "fedavg")
        tallies = fuzz.fuzz(300, 0, {k: r for k, r in fuzz.run_readers(run).items() if k == "checkpoint"})
        assert tallies["damaged checkpoint"].differing

    def test_a_reader_with_raw_errors(self, monkeypatch, tmp_path):
        run = reference_run(tmp_path, "fedavg")
        readers = {k: r for k, r in fuzz.run_readers(run).items() if k == "checkpoint"}
        monkeypatch.setattr(checkpoint, "UNREADABLE", (OSError,))
        assert fuzz.fuzz(50, 0, readers)["damaged checkpoint"].raw

    def test_a_worker_that_nobody_watches(self, monkeypatch, tmp_path, draw):
        monkeypatch.setattr(watchdog, "TICK_SECONDS", 3600.0)  # it looks at them for the first time in an hour
        assert processes.workers(3, draw, tmp_path, patience=20).hung

    def test_a_guard_that_admits_everything(self, monkeypatch, draw):
        monkeypatch.setattr(guard, "find_outliers", lambda *_: {})
        assert replies.library(300, draw).differing

    def test_flower_replies_that_are_not_checked(self, monkeypatch, draw):
        monkeypatch.setattr(flower_replies, "StateError", DataError)  # what a bad reply raises is not expected
        tally = replies.flower(20, draw)
        assert tally.lost + tally.raw


def test_the_disk_forgets_what_was_not_synced(tmp_path, draw):
    """The model of the disk, by hand: a synced file in a synced folder stays; nothing else is certain."""
    root = tmp_path / "disk"
    root.mkdir()
    (root / "old").write_bytes(b"old")
    left = []
    for number in range(40):
        disk = disks.Disk(root, 10**9, tmp_path / f"left{number}", draw)
        with disk.powered():
            files.write_atomic(root / "safe", b"safe")
            (root / "old").write_bytes(b"new")
            (root / "unsynced").write_bytes(b"x" * 2000)
        left.append({p.name: p.read_bytes() for p in (tmp_path / f"left{number}").iterdir()})
        (root / "old").write_bytes(b"old")
        (root / "unsynced").unlink()
    assert all(state["safe"] == b"safe" for state in left)
    assert {b"old", b"new", b""} <= {state["old"] for state in left} <= {b"old", b"new", b"", b"\0\0\0"}
    sizes = {len(state.get("unsynced", b"none")) for state in left}
    assert {0, 4, 2000} <= sizes
    assert any(0 < state.get("unsynced", b"").count(b"\0") < 2000 for state in left)


def test_a_read_only_disk_is_one(tmp_path):
    (tmp_path / "a").write_text("x")
    with disks.read_only(tmp_path):
        assert (tmp_path / "a").read_text() == "x"
        for change in (
            lambda: (tmp_path / "b").write_text("y"),
            lambda: (tmp_path / "a").unlink(),
            lambda: (tmp_path / "a").replace(tmp_path / "c"),
            lambda: (tmp_path / "d").mkdir(),
        ):
            with pytest.raises(OSError, match="Read-only"):
                change()
    assert [p.name for p in Path(tmp_path).iterdir()] == ["a"]
