"""`fedbe report` and `fedbe watch` as commands."""

import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from fedbe.cli import app
from fedbe.report.live import Page, serve


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedbe", *arguments])
    with pytest.raises(SystemExit) as caught:
        app.main()
    return int(caught.value.code or 0)


@pytest.mark.e2e
def test_a_report_is_written_into_the_folder_of_its_run(
    comparison: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(monkeypatch, "report", str(comparison), "--figures", str(tmp_path / "f"), "--format", "svg") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"report: {comparison / 'report.html'}"
    assert f"picture: {tmp_path / 'f' / 'accuracy.svg'}" in lines
    assert "FedBE has 11.0" in (comparison / "report.html").read_text()


def test_all_includes_everything_and_names_unreadable_folders(
    make_run, comparison: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    single, bad = make_run("single", "scaffold", [0.5]), make_run("bad", "fedavg", [0.5])
    (bad / "recipe.toml").write_text("[")
    assert call(monkeypatch, "report", "--all", "--runs", str(tmp_path)) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'report.html'}\n"
    text = (tmp_path / "report.html").read_text()
    assert all(word in text for word in (comparison.name, single.name, f"{bad} is left out"))


def test_a_used_port_is_an_error(make_run, monkeypatch, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert call(monkeypatch, "watch", str(make_run("a", "fedavg", [0.5])), "--port", str(port)) == 1
    assert f"cannot serve on 127.0.0.1:{port}" in capsys.readouterr().err


def test_watch_serves_this_machine_only(make_run) -> None:
    with serve(Page(make_run("a", "fedavg", [0.5])), 0) as server:
        assert server.server_address[0] == "127.0.0.1"


def test_a_closed_tab_is_not_an_error(make_run, capfd: pytest.CaptureFixture[str]) -> None:
    with serve(Page(make_run("a", "fedavg", [0.5])), 0) as server:
        server.daemon_threads = False  # so that server_close waits for them
        threading.Thread(target=server.serve_forever).start()
        try:
            for request in (b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1", b"GET /none HTTP/1.1\r\n\r\n"):
                with socket.create_connection(server.server_address[:2]) as tab:
                    tab.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, no goodbye
                    tab.sendall(request)
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/version") as reply:
                assert reply.status == 200
        finally:
            server.shutdown()
    assert capfd.readouterr() == ("", "")


@pytest.mark.e2e
def test_watch_serves_the_page_until_ctrl_c(make_run) -> None:
    folder = make_run("a", "fedavg", [0.5])
    command = [sys.executable, "-u", "-m", "fedbe", "watch", str(folder)]
    # A background shell makes its children ignore SIGINT.
    listen_to_ctrl_c = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen_to_ctrl_c
    ) as process:
        try:
            assert process.stdout is not None
            match = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
            assert match is not None
            address = match[0]
            with urllib.request.urlopen(address) as reply:
                assert "Unfinished: FedAvg has done 1 of 3 rounds" in reply.read().decode()
            foreign = urllib.request.Request(address, headers={"Host": "evil.example"})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(foreign)
            refused.value.close()
            assert refused.value.code == 421
            with pytest.raises(urllib.error.HTTPError) as missing:
                urllib.request.urlopen(f"{address}run.json")
            missing.value.close()
            assert missing.value.code == 404
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, stderr) == (0, "watch ended; the run is not affected\n")


def test_the_version_changes_with_the_files_and_only_then(make_run) -> None:
    folder = make_run("a", "fedavg", [0.5])
    page = Page(folder)
    first, html = page.version(), page.html()
    assert page.version() == first
    assert page.html() is html  # built once
    with (folder / "rounds.jsonl").open("a") as file:
        file.write("\n")
    assert page.version() != first
    assert page.html() is not html
