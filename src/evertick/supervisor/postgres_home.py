"""The directory of an embedded PostgreSQL: its private parts, and the process that holds its lock.

Must never narrow the mode of a directory that contains other users' files.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from evertick.config import Settings
from evertick.domain.errors import Conflict, PostgresUnavailable

# The shortest limit of a socket path on the systems that the wheel is built for, without its terminating null.
_SOCKET_PATH_BYTES = 103
_SOCKET_NAME = ".s.PGSQL.5432"
_LOCK_TRIES = 20
_LOCK_PAUSE_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """The process that holds a home, as written into its lock file."""

    pid: int
    since: str
    url: str


class PostgresDirectory:
    """The paths of one embedded PostgreSQL. Holds no open files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.data = self.directory / "postgres"
        self.lock = self.directory / "lock"
        self.log = self.directory / "logs" / "postgres.log"
        self.sockets = _socket_directory(self.directory)

    @property
    def url(self) -> str:
        """The connection URL: by the socket only, as the owner of the database."""
        return self._url_of("evertick")

    @property
    def maintenance_url(self) -> str:
        """The URL of the database that exists before our own is created."""
        return self._url_of("postgres")

    def prepare(self) -> None:
        """Create missing directories, readable only by this user."""
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self.directory.mkdir(mode=0o700, exist_ok=True)
            is_ours = self.lock.exists() or not any(self.directory.iterdir())
            if is_ours:
                self.directory.chmod(0o700)
            for directory in (self.log.parent, self.sockets):
                directory.mkdir(mode=0o700, exist_ok=True)
                _refuse_foreign(directory)
                directory.chmod(0o700)
        except OSError as error:
            raise PostgresUnavailable(
                f"The home directory {self.directory} cannot be used: {error.strerror or error}."
                " Set EVERTICK_HOME to a directory that this user may write to."
            ) from None

    def leave(self) -> None:
        """Remove the socket directory if it is in a shared place. Safe to call twice."""
        if self.sockets.parent != self.directory:
            with suppress(OSError):
                self.sockets.rmdir()

    def _url_of(self, database: str) -> str:
        # The port names the socket's file; without it, libpq would use the caller's PGPORT.
        return f"postgresql:///{database}?host={quote(str(self.sockets), safe='/')}&port=5432&user=evertick"


class PostgresDirectoryLock:
    """The lock of this process on a home, while it is open. The kernel releases it when the process dies."""

    def __init__(self, home: PostgresDirectory) -> None:
        self._home = home
        self._file: int | None = None

    async def acquire(self) -> None:
        """Lock the home, or raise Conflict that names the holder."""
        try:
            descriptor = os.open(self._home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise PostgresUnavailable(f"{self._home.lock} cannot be opened: {error.strerror}.") from None
        if not await _try_lock(descriptor):
            os.close(descriptor)
            raise Conflict(_held_message(self._home))
        self._file = descriptor
        record = {"pid": os.getpid(), "since": datetime.now(UTC).isoformat(timespec="seconds"), "url": self._home.url}
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(record).encode(), 0)

    def release(self) -> None:
        """Release the home. Safe to call twice."""
        if self._file is not None:
            os.truncate(self._file, 0)
            os.close(self._file)
            self._file = None


def holder_of(directory: Path) -> LockHolder | None:
    """The process that holds this home, or None. Other processes find the embedded server's URL with it."""
    home = PostgresDirectory(directory)
    try:
        descriptor = os.open(home.lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PostgresUnavailable(f"{home.lock} cannot be read: {error.strerror}. Run this as its owner.") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(home)
    finally:
        os.close(descriptor)
    return None


async def _try_lock(descriptor: int) -> bool:
    """Retry for a moment: `holder_of` in another process also holds the lock for an instant."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(_LOCK_PAUSE_SECONDS)
        else:
            return True
    return False


def _read_holder(home: PostgresDirectory) -> LockHolder | None:
    try:
        record = json.loads(home.lock.read_text(encoding="utf-8"))
        return LockHolder(pid=int(record["pid"]), since=str(record["since"]), url=str(record["url"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _held_message(home: PostgresDirectory) -> str:
    holder = _read_holder(home)
    if holder is None:
        return f"{home.directory} is held by another Evertick that is starting or stopping: try again."
    return (
        f"{home.directory} is held by process {holder.pid} since {holder.since}; its database is {holder.url}."
        " Stop that process first, or set EVERTICK_HOME to another directory."
    )


def _socket_directory(home: Path) -> Path:
    inside = home / "run"
    if len(os.fsencode(inside / _SOCKET_NAME)) <= _SOCKET_PATH_BYTES:
        return inside
    digest = hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:16]
    return Path("/tmp") / f"evertick-{os.getuid()}-{digest}"


def _refuse_foreign(directory: Path) -> None:
    """In a shared place another user may have created a directory or a link with this name."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PostgresUnavailable(
            f"{directory} belongs to another user. Remove it, or set EVERTICK_HOME to another directory."
        )


def own_database_url(settings: Settings) -> str:
    """The database URL: the configured one, or that of the Evertick running in the home."""
    if settings.database_url:
        return settings.database_url
    holder = holder_of(settings.home)
    if holder is None:
        raise PostgresUnavailable(
            f"Evertick is not running in {shown(settings.home)}; start it with `evertick up`, or set"
            " EVERTICK_HOME or EVERTICK_DATABASE_URL."
        )
    return holder.url


def shown(path: Path) -> str:
    return str(path) if path.is_absolute() else f"./{path}"
