"""`fedbe flower …` short of starting Flower: the app that it writes, the keys, what it says when something is wrong."""

import os
import signal
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedbe.errors import RunError, SettingError
from fedbe.flower import certs, processes, template
from fedbe.flower.deployment import Deployment
from fedbe.flower.running import submit

ROOT = Path(__file__).parents[2]


def fedbe(*words, cwd):
    return subprocess.run(
        [sys.executable, "-m", "fedbe", "flower", *words], cwd=cwd, capture_output=True, text=True, check=False
    )


def files(folder):
    found = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}


def test_new_writes_the_example(tmp_path):
    done = fedbe("new", "mine", cwd=tmp_path)
    assert done.returncode == 0
    assert "README.md" in done.stdout
    assert files(tmp_path / "mine") == files(ROOT / "examples" / "flower")
    again = fedbe("new", "mine", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (
        1,
        "fedbe: mine exists already and is not an empty folder: choose another name\n",
    )


def test_new_takes_neither_keys_nor_results_along(tmp_path, monkeypatch):
    used = tmp_path / "used"
    template.write(used)
    for name in ("certs", "state", "runs"):
        (used / name).mkdir()
        (used / name / "secret").write_text("x")
    monkeypatch.setattr(template, "source", lambda: used)
    template.write(tmp_path / "other")
    assert files(tmp_path / "other") == files(ROOT / "examples" / "flower")


def test_the_apps_dependencies_are_empty():
    """Flower would install whatever stands there."""
    import tomllib

    assert tomllib.loads((ROOT / "examples/flower/pyproject.toml").read_text())["project"]["dependencies"] == []


def test_keys_are_for_their_owner_only_and_the_certificate_holds(tmp_path):
    done = fedbe("certs", "app", "--nodes", "2", "--host", "fl.example.org", "--host", "10.0.0.7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    place = tmp_path / "app" / "certs"
    names = {"ca.key", "ca.pem", "server.key", "server.pem", "node-0", "node-0.pub", "node-1", "node-1.pub"}
    assert {p.name for p in place.iterdir()} == names
    assert {stat.S_IMODE(p.stat().st_mode) for p in place.iterdir()} == {0o600}
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    server = x509.load_pem_x509_certificate((place / "server.pem").read_bytes())
    server.verify_directly_issued_by(x509.load_pem_x509_certificate((place / "ca.pem").read_bytes()))
    named = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert named.get_values_for_type(x509.DNSName) == ["localhost", "fl.example.org"]
    assert [str(a) for a in named.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "10.0.0.7"]
    ssl.create_default_context(cafile=str(place / "ca.pem")).load_cert_chain(place / "server.pem", place / "server.key")
    private = load_ssh_private_key((place / "node-0").read_bytes(), None)
    assert private.public_key() == load_ssh_public_key((place / "node-0.pub").read_bytes())
    assert (place / "node-0").read_bytes() != (place / "node-1").read_bytes()


def test_keys_are_never_replaced(tmp_path):
    certs.make(tmp_path, 1)
    before = files(tmp_path)
    for nodes, hosts in ((1, ()), (3, ("fl.example.org",))):
        with pytest.raises(RunError, match="exists already: remove it to make new keys"):
            certs.make(tmp_path, nodes, hosts)
    assert files(tmp_path) == before
    certs.make(tmp_path, 2)  # the federation grows
    assert files(tmp_path).items() >= before.items()
    assert files(tmp_path).keys() - before.keys() == {"certs/node-1", "certs/node-1.pub"}
    assert stat.S_IMODE((tmp_path / "certs/node-1").stat().st_mode) == 0o600


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(RunError, match=r"ca\.pem is missing: run `fedbe flower certs"):
        Deployment(tmp_path).up(3)
    with pytest.raises(RunError, match="nothing was ever up in"):
        submit(Deployment(tmp_path), None)
    with pytest.raises(SettingError, match="must be KEY=VALUE, got 'rounds'"):
        submit(Deployment(tmp_path), None, ["rounds"])
    assert Deployment(tmp_path).down() == []
    certs.make(tmp_path, 1)
    with pytest.raises(RunError, match="node-1 is missing"):
        Deployment(tmp_path).up(2)


@pytest.mark.parametrize("killed", [False, True])
def test_a_process_is_ended_by_its_own_id_with_its_children(killed, tmp_path):
    family = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])"
    family += "; print(p.pid, flush=True); time.sleep(99)"
    pid = processes.start(tmp_path, "one", [sys.executable, "-c", family], {})
    assert processes.alive(tmp_path, "one") == pid
    while not (child := (tmp_path / "one.log").read_text().strip()):
        pass
    if killed:  # its children are not forgotten
        os.kill(pid, signal.SIGKILL)
        while processes.alive(tmp_path, "one"):
            pass
    assert processes.stop(tmp_path, ["one", "never"]) == ["one"]
    assert processes.alive(tmp_path, "one") is None
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]


def test_a_stranger_with_a_known_pid_is_left_alone(tmp_path):
    pid = processes.start(tmp_path, "one", [sys.executable, "-c", "import time; time.sleep(99)"], {})
    kept = (tmp_path / "one.pid").read_text()
    (tmp_path / "other.pid").write_text(kept.replace('"started": "', '"started": "1'))
    assert processes.alive(tmp_path, "other") is None
    assert processes.stop(tmp_path, ["other"]) == []
    assert processes.alive(tmp_path, "one") == pid
    assert processes.stop(tmp_path, ["one"]) == ["one"]
