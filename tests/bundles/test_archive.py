"""An archive of any origin is unpacked whole, or refused with the reason before anything is written."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from evertick.bundles.archive import pack_folder, unpack_archive
from evertick.domain.errors import UserError

Entry = tuple[str, bytes] | tarfile.TarInfo


def tar(*entries: Entry, mode: str = "w:gz", format: int = tarfile.PAX_FORMAT) -> io.BytesIO:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode, format=format) as archive:  # type: ignore[call-overload]
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                archive.addfile(entry)
                continue
            header = tarfile.TarInfo(entry[0])
            header.size = len(entry[1])
            archive.addfile(header, io.BytesIO(entry[1]))
    return made


def special(kind: bytes, name: str = "x", target: str = "/etc/passwd") -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.linkname = kind, target
    return header


def zipped(*entries: tuple[str | zipfile.ZipInfo, bytes]) -> io.BytesIO:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return made


def zip_link() -> io.BytesIO:
    header = zipfile.ZipInfo("x")
    header.external_attr = 0o120777 << 16
    return zipped((header, b"/etc/passwd"))


def many(count: int) -> list[tuple[str, bytes]]:
    return [(f"f{number}", b"") for number in range(count)]


def encrypted() -> io.BytesIO:
    made = bytearray(zipped(("a.py", b"x = 1")).getvalue())
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        made[made.index(signature) + place] |= 1
    return io.BytesIO(bytes(made))


def renamed(archive: io.BytesIO, old: bytes, new: bytes) -> io.BytesIO:
    assert len(old) == len(new) and old in archive.getvalue()
    return io.BytesIO(archive.getvalue().replace(old, new))


REFUSED: dict[str, tuple[Callable[[], io.BytesIO], str]] = {
    "it leads up": (lambda: tar(("a.py", b""), ("../b.py", b"")), "'../b.py' leads out of the folder"),
    "it leads up inside": (lambda: tar(("a/../../b.py", b"")), "leads out of the folder"),
    "it is absolute": (lambda: tar(("/etc/cron.d/x", b"")), "leads out of the folder"),
    "a zip leads up": (lambda: zipped(("../b.py", b"")), "leads out of the folder"),
    "a zip is absolute": (lambda: zipped(("/b.py", b"")), "leads out of the folder"),
    "a backslash": (lambda: zipped(("a\\b.py", b"")), "control character or a backslash"),
    "a control character": (lambda: tar(("a\nb.py", b"")), "control character or a backslash"),
    "a symbolic link": (lambda: tar(special(tarfile.SYMTYPE)), "'x' is a link to '/etc/passwd'"),
    "a hard link": (lambda: tar(("a", b""), special(tarfile.LNKTYPE, target="a")), "'x' is a link to 'a'"),
    "a link in a zip": (zip_link, "'x' is a link or a special file"),
    "a device": (lambda: tar(special(tarfile.CHRTYPE)), "'x' is a device"),
    "a pipe": (lambda: tar(special(tarfile.FIFOTYPE)), "'x' is a sparse or special file"),
    "the same name twice": (lambda: tar(("a.py", b"1"), ("a.py", b"2")), "it contains 'a.py' twice"),
    "the same with a dot": (lambda: tar(("a.py", b"1"), ("./a.py", b"2")), "it contains 'a.py' twice"),
    "another case": (lambda: tar(("a.py", b"1"), ("A.py", b"2")), "are the same name on some file systems"),
    "another case of a folder": (lambda: tar(("a/b", b"1"), ("A/c", b"2")), "are the same name on some file systems"),
    "another form of é": (
        lambda: tar(("caf\u00e9", b""), ("cafe\u0301", b"")),
        "are the same name on some file systems",
    ),
    "a file and a folder": (lambda: tar(("a", b"1"), ("a/b", b"2")), "'a' is a file and a folder"),
    "a folder and a file": (lambda: tar(("a/b", b"1"), ("a", b"2")), "'a' is a file and a folder"),
    "a name that is not UTF-8": (lambda: tar(("caf\udce9", b""), format=tarfile.GNU_FORMAT), "not UTF-8"),
    "a zip's name in an old encoding": (lambda: renamed(zipped(("cafX", b"")), b"cafX", b"caf\xe9"), "not UTF-8"),
    "a long name": (lambda: tar(("a" * 300, b"")), "is too long"),
    "a bomb": (lambda: tar(("zeros", b"\0" * 30_000_000)), "more than 100 times its size"),
    "a bomb in a zip": (lambda: zipped(("zeros", b"\0" * 30_000_000)), "more than 100 times its size"),
    "too much": (lambda: tar(*[(f"{n}", os.urandom(1) * 26_000_000) for n in range(4)], mode="w"), "67,108,864"),
    "many files": (lambda: tar(*many(101), mode="w"), "more than 100 files"),
    "many files in a zip": (lambda: zipped(*many(101)), "more than 100 files"),
    "an encrypted file": (encrypted, "'a.py' is encrypted"),
    "half of a file": (lambda: io.BytesIO(tar(("a", os.urandom(5000))).getvalue()[:-1000]), "it is damaged"),
    "half of a zip": (lambda: io.BytesIO(zipped(("a", os.urandom(5000))).getvalue()[:-40]), "it is damaged"),
    "no archive": (lambda: io.BytesIO(b"print('hello')\n" * 100), "neither a .tar.gz nor a .zip"),
}


@pytest.mark.parametrize("attack", REFUSED)
def test_what_is_refused_is_named_and_nothing_is_written(
    attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evertick.bundles.archive.MAX_FILES", 100)
    make, reason = REFUSED[attack]
    folder = tmp_path / "into"
    folder.mkdir()
    with pytest.raises(UserError) as refused:
        unpack_archive(make(), folder)
    assert reason in str(refused.value)
    assert str(refused.value).startswith("The archive is refused:")
    assert list(folder.iterdir()) == [] and [each.name for each in tmp_path.iterdir()] == ["into"]


def test_a_size_that_the_header_hides_is_counted(tmp_path: Path) -> None:
    """The compressed form is small, the plain one is not, and no single file is large."""
    made = tar(*[(f"{number}", b"\0" * 2_000_000) for number in range(60)])
    with pytest.raises(UserError, match="unpacks to more than"):
        unpack_archive(made, tmp_path)


@pytest.mark.parametrize("pack", [tar, zipped, lambda *entries: tar(*entries, mode="w")], ids=["tar.gz", "zip", "tar"])
def test_an_ordinary_archive_is_unpacked(pack: Callable[..., io.BytesIO], tmp_path: Path) -> None:
    assert unpack_archive(pack(("./etl.py", b"x = 1\n"), ("sql/caf\u00e9.sql", b"select 1")), tmp_path) == [
        "etl.py",
        "sql/caf\u00e9.sql",
    ]
    assert (tmp_path / "etl.py").read_bytes() == b"x = 1\n"
    assert (tmp_path / "sql/caf\u00e9.sql").stat().st_mode & 0o777 == 0o600


def test_a_folder_is_packed_without_what_is_hidden_and_always_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dags"
    for name in ("etl.py", "run.sh", "sub/data.csv", ".git/config", "__pycache__/etl.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "run.sh").chmod(0o700)
    (folder / "link.csv").symlink_to(folder / "sub/data.csv")
    packed = pack_folder(folder)
    os.utime(folder / "etl.py", (1, 1))
    assert pack_folder(folder) == packed
    (tmp_path / "out").mkdir()
    assert unpack_archive(io.BytesIO(packed), tmp_path / "out") == ["etl.py", "link.csv", "run.sh", "sub/data.csv"]
    assert os.access(tmp_path / "out/run.sh", os.X_OK) and not os.access(tmp_path / "out/etl.py", os.X_OK)
    monkeypatch.setattr("evertick.bundles.archive.MOST_ARCHIVE_BYTES", len(packed) - 1)
    with pytest.raises(UserError, match="is too large"):
        pack_folder(folder)
