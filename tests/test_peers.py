"""The comparison with peers: what does not install or fails is left out and named."""

import subprocess

import pytest

peers = pytest.importorskip("benchmarks.peers.__main__")


def row(job, peer, **numbers):
    return {
        "job": job,
        "peer": peer,
        "seconds": 2.0,
        "memory": 100.0,
        "accuracy": 0.5,
        "machine": "a laptop",
        **numbers,
    }


def test_a_peer_that_does_not_install_or_run_stops_no_other(tmp_path, monkeypatch, capsys):
    def install(_, peer):
        if peer == "pfl":
            raise subprocess.CalledProcessError(1, ["pip"])

    def drive(peer, *_):
        if peer == "flwr":
            raise RuntimeError("flwr ended with code 1")
        return {"seconds": 1.0, "start": 5.0, "memory": 100.0, "accuracy": 0.5}

    monkeypatch.setattr(peers, "install", install)
    monkeypatch.setattr(peers, "drive", drive)
    monkeypatch.setattr(peers, "attainable", lambda _: {"seconds": 0.5})
    monkeypatch.setattr(peers, "write_data", lambda _: None)
    peers.main(["--turns", "1", "--jobs", "paper", "--peers", "pfl,flwr,fluke", "--out", str(tmp_path)])
    assert "pfl did not install" in (text := capsys.readouterr().err)
    assert "flwr ended with code 1" in text
    lines = (tmp_path / "peers.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ") and "seconds" not in line] == [
        "| attainable",
        "| fedbe",
        "| fluke",
    ]
    assert lines[-1].endswith("Did not install: pfl.")


def test_the_start_is_that_of_the_job_in_which_all_evaluate_in_round_1():
    text = peers.table([row(job, peer, start=5.5) for job in ("paper", "pfl") for peer in ("fedbe", "pfl")])
    paper, pfl = text.split("**pfl**")
    assert "start-up" in paper
    assert "5.5" in paper
    assert "start-up" not in pfl
    assert "5.5" not in pfl
