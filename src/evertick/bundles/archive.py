"""Packs a folder of DAG files as one archive, and unpacks an archive of any origin: tar, tar.gz or zip. Trusts nothing in it.

Everything is checked before anything is written: the names, the kinds, the number and the size of all members.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from stat import S_ISDIR, S_ISREG
from typing import IO, BinaryIO, NoReturn

from evertick.bundles.bundle import MAX_FILES, is_inside
from evertick.domain.errors import UserError

MOST_ARCHIVE_BYTES = 64 * 1024 * 1024
MOST_UNPACKED_BYTES = 100_000_000
# Text compresses to a tenth; only an attack, or empty files of this total size, compresses to less than a hundredth.
_MOST_RATIO, _UNSUSPICIOUS_BYTES = 100, 10_000_000
_LONGEST_NAME, _LONGEST_PART = 1000, 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")
_CHUNK_BYTES = 256 * 1024
# The directory of a zip file is read into memory: 46 bytes and a name for each member.
_MOST_DIRECTORY_BYTES = 4_000_000
_END_OF_ZIP, _ZIP64, _UTF8_FLAG, _ENCRYPTED_FLAG = b"PK\x05\x06", b"PK\x06\x07", 0x800, 0x1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """`content` can be read until the next member is taken."""

    name: str
    size: int
    is_executable: bool
    content: IO[bytes]


def pack_folder(folder: Path) -> bytes:
    """The visible files of a folder as tar.gz: the same bytes for the same files. A link to a file counts by its content; links
    to folders are skipped."""
    if not folder.is_dir():
        raise UserError(f"The folder {folder} does not exist.")
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in visible_files(folder):
            header = tarfile.TarInfo(path.relative_to(folder).as_posix())
            with path.open("rb") as opened:
                status = os.fstat(opened.fileno())
                header.size, header.mode = status.st_size, 0o700 if status.st_mode & 0o100 else 0o600
                tar.addfile(header, opened)
            _check_packed(folder, packed)
    _check_packed(folder, packed)
    return packed.getvalue()


def _check_packed(folder: Path, packed: io.BytesIO) -> None:
    if packed.tell() > MOST_ARCHIVE_BYTES:
        raise UserError(
            f"{folder} is too large: packed it has more than {MOST_ARCHIVE_BYTES:,} bytes. Move data out of it, or hide it in a"
            " folder whose name starts with a dot."
        )


def visible_files(folder: Path) -> list[Path]:
    """Every file of a folder that is not hidden, without byte code."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in path.relative_to(folder).parts)
    ]


def unpack_archive(archive: BinaryIO, folder: Path) -> list[str]:
    """Write the files of an archive into an empty folder, and return their names. Raises UserError, and has written
    nothing, if a part of it is refused."""
    names = [member.name for member in _checked(archive)]
    for member in _checked(archive):
        path = folder / member.name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o700 if member.is_executable else 0o600), "wb") as opened:
            while chunk := member.content.read(_CHUNK_BYTES):
                opened.write(chunk)
    return names


def _checked(archive: BinaryIO) -> Iterator[_Member]:
    """The files of an archive, each read to its end before the next one is checked."""
    archive.seek(0, os.SEEK_END)
    packed_bytes = archive.tell()
    if packed_bytes > MOST_ARCHIVE_BYTES:
        _refuse(f"it has {packed_bytes:,} bytes, and the limit is {MOST_ARCHIVE_BYTES:,}")
    archive.seek(0)
    start = archive.read(4)
    archive.seek(0)
    members = (
        _zip_members(archive) if start == b"PK\x03\x04" else _tar_members(archive, is_packed=start[:2] == b"\x1f\x8b")
    )
    files, folders = dict[str, str](), dict[str, str]()
    total = 0
    try:
        for member in members:
            _check_name(member.name, files, folders)
            if len(files) > MAX_FILES:
                _refuse(f"it has more than {MAX_FILES:,} files")
            counted = _Counted(member.content, total, packed_bytes)
            yield _Member(name=member.name, size=member.size, is_executable=member.is_executable, content=counted)  # type: ignore[arg-type]
            while counted.read(_CHUNK_BYTES):
                pass
            total = counted.total
    except UnicodeError:
        _refuse("the name of a file in it is not UTF-8")
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, gzip.BadGzipFile, EOFError) as error:
        _refuse(f"it is damaged, or neither a .tar.gz nor a .zip file ({error})")
    except (ValueError, NotImplementedError, RuntimeError, OSError) as error:
        _refuse(f"it cannot be read ({error})")


class _Counted:
    """Reads one member, and ends the archive's reading when it unpacks to too much."""

    def __init__(self, content: IO[bytes], total: int, packed_bytes: int) -> None:
        self._content, self.total, self._packed = content, total, packed_bytes

    def read(self, size: int) -> bytes:
        chunk = self._content.read(size)
        self.total += len(chunk)
        _check_size(self.total, self._packed)
        return chunk


class _Inflated:
    """The plain bytes of a compressed tar file: also those that belong to no file count."""

    def __init__(self, archive: BinaryIO, *, is_packed: bool) -> None:
        archive.seek(0, os.SEEK_END)
        self._packed = archive.tell()
        archive.seek(0)
        self._stream = gzip.GzipFile(fileobj=archive) if is_packed else archive
        self._total = 0

    def read(self, size: int) -> bytes:
        chunk = self._stream.read(size)
        self._total += len(chunk)
        # Headers and padding of a file take up to two blocks.
        _check_size(self._total - 2048 * MAX_FILES, self._packed)
        return chunk


def _check_size(total: int, packed_bytes: int) -> None:
    if total > MOST_UNPACKED_BYTES:
        _refuse(f"it unpacks to more than {MOST_UNPACKED_BYTES:,} bytes. Move data out of the folder")
    if total > _UNSUSPICIOUS_BYTES and total > _MOST_RATIO * packed_bytes:
        _refuse(f"it unpacks to more than {_MOST_RATIO} times its size")


def _tar_members(archive: BinaryIO, *, is_packed: bool) -> Iterator[_Member]:
    plain = _Inflated(archive, is_packed=is_packed)
    with tarfile.open(fileobj=plain, mode="r|", errors="strict") as tar:  # type: ignore[call-overload]
        for number, header in enumerate(tar):
            if number > 2 * MAX_FILES:
                _refuse(f"it has more than {MAX_FILES:,} files")
            if header.isdir():
                continue
            # A sparse file counts as a plain one, and a kilobyte of it can be read as terabytes.
            opened = tar.extractfile(header) if header.isreg() and not header.issparse() else None
            if opened is None:
                _refuse(
                    f"{header.name[:200]!r} is {_kind_of(header)}. Only plain files are allowed: put the file itself there"
                )
            name = _without_dot(header.name)
            yield _Member(name=name, size=header.size, is_executable=bool(header.mode & 0o100), content=opened)
            tar.members.clear()


def _kind_of(header: tarfile.TarInfo) -> str:
    if header.issym() or header.islnk():
        return f"a link to {header.linkname[:200]!r}"
    return "a device" if header.ischr() or header.isblk() else "a sparse or special file"


def _zip_members(archive: BinaryIO) -> Iterator[_Member]:
    _check_directory(archive)
    with zipfile.ZipFile(archive) as found:
        infos = found.infolist()
        if len(infos) > 2 * MAX_FILES:
            _refuse(f"it has more than {MAX_FILES:,} files")
        for info in infos:
            mode = info.external_attr >> 16
            if info.is_dir() or (mode and S_ISDIR(mode)):
                continue
            name = info.orig_filename
            if mode and mode & 0o170000 and not S_ISREG(mode):
                _refuse(
                    f"{name[:200]!r} is a link or a special file. Only plain files are allowed: put the file itself there"
                )
            if info.flag_bits & _ENCRYPTED_FLAG:
                _refuse(f"{name[:200]!r} is encrypted")
            if not name.isascii() and not info.flag_bits & _UTF8_FLAG:
                _refuse(f"the name {name[:200]!r} is not UTF-8")
            with found.open(info) as opened:
                yield _Member(
                    name=_without_dot(name), size=info.file_size, is_executable=bool(mode & 0o100), content=opened
                )


def _check_directory(archive: BinaryIO) -> None:
    """Refuse a zip file whose directory is too large to be read."""
    archive.seek(0, os.SEEK_END)
    archive.seek(max(0, archive.tell() - 65_536 - 22 - 20))
    tail = archive.read()
    place = tail.rfind(_END_OF_ZIP)
    if place < 0 or len(tail) < place + 22:
        _refuse("it is damaged: the end of the zip file is missing")
    if (
        tail.rfind(_ZIP64, 0, place) >= 0
        or int.from_bytes(tail[place + 12 : place + 16], "little") > _MOST_DIRECTORY_BYTES
    ):
        _refuse(f"it has more than {MAX_FILES:,} files")


def _without_dot(name: str) -> str:
    """`./etl.py`, as `tar czf dags.tar.gz .` names it, is `etl.py`."""
    return name.removeprefix("./")


def _check_name(name: str, files: dict[str, str], folders: dict[str, str]) -> None:
    """Refuse a name that could be written elsewhere, or that some file system cannot tell from another one."""
    shown = repr(name[:200])
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        _refuse(f"the name {shown} is not UTF-8")
    if not is_inside(name):
        _refuse(f"{shown} leads out of the folder. Names are relative, without '..'")
    if _CONTROL.search(name):
        _refuse(f"the name {shown} has a control character or a backslash")
    parts = PurePosixPath(name).parts
    if length > _LONGEST_NAME or any(len(part.encode()) > _LONGEST_PART for part in parts):
        _refuse(f"the name {shown} is too long")
    for depth in range(1, len(parts) + 1):
        path = "/".join(parts[:depth])
        folded = unicodedata.normalize("NFC", path).casefold()
        is_file = depth == len(parts)
        known = files.get(folded) or (folders.get(folded) if is_file else None)
        if known is None and not is_file:
            known = folders.setdefault(folded, path)
            known = None if known == path else known
        if known == path:
            _refuse(
                f"it contains {known[:200]!r} twice"
                if folded in files and is_file
                else f"{known[:200]!r} is a file and a folder"
            )
        if known is not None:
            _refuse(f"{path[:200]!r} and {known[:200]!r} are the same name on some file systems. Rename one of them")
        if is_file:
            files[folded] = path


def _refuse(why: str) -> NoReturn:
    raise UserError(f"The archive is refused: {why}. Nothing was published.")
