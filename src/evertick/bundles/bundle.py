"""A bundle: the code and data that one DAG file needs, packed once and named by its content.

The same content has the same hash on every machine. Unpacking trusts nothing: neither paths, sizes nor the hash.
"""

from __future__ import annotations

import compileall
import gzip
import hashlib
import io
import os
import py_compile
import re
import shutil
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from evertick.bundles.cache import MAKING, keep
from evertick.bundles.dependencies import LOCK_FILE, Lock
from evertick.domain.errors import InvalidDag

MAX_FILE_BYTES = 1_000_000
MAX_TOTAL_BYTES = 20_000_000
MAX_FILES = 10_000
# Hidden, so that no file of the DAGs folder can have this name. Its content makes the bundles of two DAG files differ.
_MAIN_FILE = ".evertick-main"
_PYTHON = frozenset({".py", ".pyc", ".pyo"})
_HEADER_BYTES = 4_096
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """`archive` contains exactly the content that `hash` identifies."""

    hash: str
    archive: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    path: str
    content: bytes
    is_executable: bool = False


def pack(folder: Path, file: str, closure: Iterable[str], lock: Lock | None = None) -> Bundle:
    """The bundle of `folder/file`: the Python files of its module closure, every other plain file of the folder, and the
    lock of its dependencies."""
    members = [_Member(path=_MAIN_FILE, content=file.encode())]
    if lock is not None:
        members.append(_Member(path=LOCK_FILE, content=lock.text.encode()))
    total = 0
    for path in sorted({file, *closure, *_data_files(folder)}):
        member = _read(folder, path)
        total += len(member.content)
        if total > MAX_TOTAL_BYTES or len(members) > MAX_FILES:
            raise InvalidDag(
                f"the files that belong to {file} exceed {MAX_TOTAL_BYTES:,} bytes or {MAX_FILES:,} files, at {path}."
                "Move data out of the DAGs folder, or hide it in a folder whose name starts with a dot."
            )
        members.append(member)
    return Bundle(hash=_hash(members), archive=_archive(members))


def contents(archive: bytes, hash: str) -> dict[str, bytes]:
    """The files of a bundle by their paths."""
    return {member.path: member.content for member in _open(archive, hash) if member.path != _MAIN_FILE}


def unpack(archive: bytes, hash: str, into: Path) -> Path:
    """The folder `into/hash` with the bundle's files, created if it does not exist. Safe for concurrent processes."""
    if not _HASH.fullmatch(hash):
        raise InvalidDag(f"{hash[:80]!r} is not the hash of a bundle.")
    target = into / hash
    if keep(target):
        return target
    members = _open(archive, hash)
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=MAKING, dir=into))
    try:
        for member in members:
            _write(making, member)
        _compile(making, target)
        making.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process was first, with the same content
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return target


def _data_files(folder: Path) -> Iterator[str]:
    """Every regular file that is neither hidden nor Python. A link to a file counts by its content; a link to a folder
    is skipped, because it can lead anywhere or form a cycle."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in names:
            path = Path(root, name)
            if not name.startswith(".") and path.suffix not in _PYTHON and path.is_file():
                yield path.relative_to(folder).as_posix()


def _read(folder: Path, path: str) -> _Member:
    advice = "Move it out of the DAGs folder, or hide it in a folder whose name starts with a dot."
    if not is_inside(path):
        raise InvalidDag(f"{path!r} is not a file of the DAGs folder and cannot be published with it.")
    try:
        path.encode()
        with (folder / path).open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
            mode = os.fstat(opened.fileno()).st_mode
    except (OSError, UnicodeEncodeError) as error:
        raise InvalidDag(f"{path!r} cannot be published with the DAGs: {error}. {advice}") from None
    if len(content) > MAX_FILE_BYTES:
        raise InvalidDag(f"{path} has more than {MAX_FILE_BYTES:,} bytes. {advice}")
    return _Member(path=path, content=content, is_executable=bool(mode & 0o100))


def _hash(members: Iterable[_Member]) -> str:
    """Over the content, not the archive: two releases of a compressor produce different bytes."""
    digest = hashlib.sha256()
    for member in members:
        mode = "x" if member.is_executable else "-"
        digest.update(f"{member.path}\0{mode}\0{len(member.content)}\0".encode())
        digest.update(member.content)
    return digest.hexdigest()


def _archive(members: Iterable[_Member]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member in members:
            header = tarfile.TarInfo(member.path)
            header.size = len(member.content)
            header.mode = 0o700 if member.is_executable else 0o600
            tar.addfile(header, io.BytesIO(member.content))
    return gzip.compress(packed.getvalue(), mtime=0)


def _open(archive: bytes, hash: str) -> list[_Member]:
    """The files in an archive, after checking its hash and that no path leads out of the folder."""
    limit = MAX_TOTAL_BYTES + MAX_FILES * _HEADER_BYTES
    try:
        inflate = zlib.decompressobj(wbits=31)
        plain = inflate.decompress(archive, limit)
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
            members = [_member(tar, header) for header in tar]
    except (tarfile.TarError, zlib.error, ValueError, EOFError) as error:
        raise _damaged(hash, str(error)) from None
    if len({member.path for member in members}) != len(members):
        raise _damaged(hash, "it contains two files with the same name")
    if not inflate.eof or _hash(members) != hash:
        raise _damaged(hash, "its content has a different hash")
    return members


def _member(tar: tarfile.TarFile, header: tarfile.TarInfo) -> _Member:
    # A sparse file counts as a plain one, and a kilobyte of it can be read as terabytes.
    opened = tar.extractfile(header) if header.isreg() and not header.issparse() else None
    if opened is None or not is_inside(header.name):
        raise ValueError(f"it contains {header.name!r}, which is not a plain file within the folder")
    return _Member(path=header.name, content=opened.read(), is_executable=bool(header.mode & 0o100))


def is_inside(name: str) -> bool:
    """Whether a normalized path stays within the folder."""
    path = PurePosixPath(name)
    return str(path) == name and name != "." and not path.is_absolute() and ".." not in path.parts


def _damaged(hash: str, why: str) -> InvalidDag:
    return InvalidDag(f"bundle {hash[:12]} is damaged: {why}. Publish the DAG file again.")


def _write(making: Path, member: _Member) -> None:
    path = making / member.path
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o700 if member.is_executable else 0o600), "wb") as opened:
        opened.write(member.content)
        opened.flush()
        os.fsync(opened.fileno())  # otherwise a power failure could leave empty files in a folder that looks complete


def _compile(making: Path, target: Path) -> None:
    """Byte code that contains the final path and is never checked against the source, which cannot change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compileall.compile_dir(
            making,
            quiet=2,
            stripdir=str(making),
            prependdir=str(target),
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
