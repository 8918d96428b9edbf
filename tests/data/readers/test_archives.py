import gzip
import io
import os
import tarfile
import tracemalloc
import zipfile

import pytest

from fedbe.data.readers import archives
from fedbe.data.readers.archives import read_files
from fedbe.errors import DataError

FILES = {"set/a.bin": b"alpha", "set/sub/b.bin": b"beta", "set/readme.txt": b"no"}


def is_bin(name):
    return name.endswith(".bin")


def make_zip(path, files, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def make_tar(path, files, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "tar.bz2", "tar.xz", "directory"])
def test_wanted_files_by_name(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    if kind == "zip":
        make_zip(path, FILES)
    elif kind == "directory":
        for name, content in FILES.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
    else:
        make_tar(path, FILES, f"w:{kind.partition('.')[2]}")
    assert read_files(path, is_bin) == {"set/a.bin": b"alpha", "set/sub/b.bin": b"beta"}


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/evil", "C:/evil", "..\\evil"])
@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_names_that_leave_the_archive_are_refused(tmp_path, make, name):
    path = make(tmp_path / "evil", {"good.bin": b"1", name: b"2"})
    with pytest.raises(DataError, match="name that leaves the archive"):
        read_files(path, is_bin)
    assert [path.name for path in tmp_path.iterdir()] == ["evil"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar_are_refused(tmp_path, kind):
    path = tmp_path / "evil.tar"
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("a.bin")
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(DataError, match=r"link or device, 'a\.bin'"):
        read_files(path, is_bin)


def test_a_link_in_a_zip_is_refused(tmp_path):
    path = tmp_path / "evil.zip"
    with zipfile.ZipFile(path, "w") as archive:
        member = zipfile.ZipInfo("a.bin")
        member.external_attr = 0o120777 << 16
        archive.writestr(member, "/etc/passwd")
    with pytest.raises(DataError, match="link or device"):
        read_files(path, is_bin)


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_a_bomb_is_refused(tmp_path, make):
    path = make(tmp_path / "bomb", {"a.bin": bytes(40 << 20)})
    assert path.stat().st_size < 100_000
    with pytest.raises(DataError, match="looks like a zip bomb"):
        read_files(path, is_bin)


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_a_bomb_in_a_file_name_is_refused_before_it_is_unpacked(tmp_path, kind):
    size = 40 << 20
    header = tarfile.TarInfo("name")
    header.type, header.size = kind, size
    path = tmp_path / "bomb.tar.gz"
    with gzip.open(path, "wb") as file:
        file.write(header.tobuf() + bytes(size))
    tracemalloc.start()
    with pytest.raises(DataError, match="looks like a zip bomb"):
        read_files(path, is_bin)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < size / 2


@pytest.mark.parametrize(("at", "value"), [((6, 8), 1), ((8, 10), 9)], ids=["password", "deflate64"])
def test_an_unsupported_zip_is_an_error(tmp_path, at, value):
    path = make_zip(tmp_path / "other.zip", {"a.bin": b"content"})
    raw = bytearray(path.read_bytes())
    for magic, offset in zip((b"PK\x03\x04", b"PK\x01\x02"), at, strict=True):  # the local and the central header
        raw[raw.index(magic) + offset] = value
    path.write_bytes(raw)
    with pytest.raises(DataError, match="is damaged or cut short"):
        read_files(path, is_bin)


def test_a_zip_that_lies_about_its_size_takes_no_memory(tmp_path):
    size = 60 << 20
    path = make_zip(tmp_path / "lie.zip", {"a.bin": bytes(size)})
    path.write_bytes(path.read_bytes().replace(size.to_bytes(4, "little"), (1000).to_bytes(4, "little")))
    tracemalloc.start()
    with pytest.raises(DataError, match="is damaged or cut short"):
        read_files(path, is_bin)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < size / 10


def test_a_zip_with_a_false_size_is_refused(tmp_path):
    path = make_zip(tmp_path / "lie.zip", {"a.bin": bytes(40 << 20)})
    raw = path.read_bytes()
    true_size, small = (40 << 20).to_bytes(4, "little"), (1000).to_bytes(4, "little")
    path.write_bytes(raw.replace(true_size, small))
    with pytest.raises(DataError, match="damaged or cut short"):
        read_files(path, is_bin)


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_too_many_members_or_bytes_are_refused(tmp_path, monkeypatch, make):
    path = make(tmp_path / "many", {f"{n}.bin": b"x" * 100 for n in range(30)})
    monkeypatch.setattr(archives, "MAX_MEMBERS", 20)
    with pytest.raises(DataError, match="more than 20 members"):
        read_files(path, is_bin)
    monkeypatch.undo()
    monkeypatch.setattr(archives, "MAX_BYTES", 2000)
    with pytest.raises(DataError, match="more than 2000 bytes"):
        read_files(path, is_bin)


@pytest.mark.parametrize("make", [make_zip, make_tar])
@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_a_truncated_archive_is_refused(tmp_path, make, keep):
    path = make(tmp_path / "cut", {"a.bin": os.urandom(50_000)})
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * keep)])
    with pytest.raises(DataError, match="damaged"):
        read_files(path, is_bin)


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_a_flipped_byte_is_noticed(tmp_path, make):
    path = make(tmp_path / "flipped", {"a.bin": os.urandom(50_000)})
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(DataError, match="damaged or cut short"):
        read_files(path, is_bin)


def test_another_file_is_an_error(tmp_path):
    path = tmp_path / "text.zip"
    path.write_text("hello")
    with pytest.raises(DataError, match="must be a directory, a zip or"):
        read_files(path, is_bin)


def test_a_member_without_a_name_is_refused(tmp_path):
    path = tmp_path / "a.zip"
    make_zip(path, {"QQ.bin": b"x"})
    path.write_bytes(path.read_bytes().replace(b"QQ", b"\0Q"))  # a name ends at a zero
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == [""]
    with pytest.raises(DataError, match="a member without a name"):
        read_files(path, lambda _: True)
