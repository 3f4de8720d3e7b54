"""Two PostgreSQL servers of our own, a primary and its standby, that a test may promote, stop and start again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from evertick.supervisor.postgres import environment, launch_command, programs
from tests.databases import QUICK_SETTINGS, Cluster, quick_folder
from tests.waiting import eventually_sync

_INITDB_OPTIONS = ("-U", "evertick", "--auth=trust", "--no-sync", "--locale=C", "--encoding=UTF8")
# Shared memory as files of its own folder: what a killed server leaves goes with that.
_QUIET = {
    **QUICK_SETTINGS,
    "listen_addresses": "",
    "hot_standby": "on",
    "max_connections": "100",
    "dynamic_shared_memory_type": "mmap",
}


class Member:
    """One server: its data, its socket, and its process while it runs."""

    def __init__(self, folder: Path) -> None:
        self.data, self.sockets, self._log = folder / "data", folder / "run", folder / "log"
        for directory in (folder, self.data, self.sockets):
            directory.mkdir(mode=0o700)
        self._process: subprocess.Popen[bytes] | None = None
        self.user = "evertick"

    @property
    def url(self) -> str:
        return f"postgresql:///postgres?host={quote(str(self.sockets), safe='/')}&port=5432&user={self.user}"

    def run(self, program: str, *arguments: str | Path) -> None:
        """One of PostgreSQL's programs, to its end."""
        done = subprocess.run(
            launch_command(self.data, signal.SIGKILL, [programs() / program, *arguments]),
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"

    def start(self, **settings: str) -> None:
        options = [part for name, value in {**_QUIET, **settings}.items() for part in ("-c", f"{name}={value}")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                launch_command(
                    self.data, signal.SIGINT, [programs() / "postgres", "-D", self.data, "-k", self.sockets, *options]
                ),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        eventually_sync(self._answers, 30)

    def stop(self, with_signal: signal.Signals = signal.SIGQUIT) -> None:
        """At once, as a crash; SIGINT is the orderly way."""
        if self._process is not None:
            self._process.send_signal(with_signal)
            self._process.wait(timeout=30)
            self._process = None

    def connect(self, database: str = "postgres") -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, dbname=database, autocommit=True)

    def rows(self, query: str, *, database: str = "postgres") -> list[tuple[Any, ...]]:
        with self.connect(database) as conn:
            return conn.execute(query).fetchall()

    def break_connections(self, database: str) -> None:
        """Whoever is connected must find a server anew."""
        self.rows(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            f" where datname = '{database}' and pid <> pg_backend_pid()"
        )

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True


class Pair:
    """`first` is the primary to begin with, and the one that every URL names first."""

    def __init__(self, folder: Path, *, is_synchronous: bool) -> None:
        self.first, self.second = Member(folder / "a"), Member(folder / "b")
        self._is_synchronous = is_synchronous

    @property
    def cluster(self) -> Cluster:
        return Cluster(url=self.first.url)

    def url(self, database: str) -> str:
        """Both servers, as an operator would write it."""
        hosts = ",".join(quote(str(member.sockets), safe="/") for member in (self.first, self.second))
        return f"postgresql:///{database}?host={hosts}&port=5432,5432&user=evertick&target_session_attrs=read-write"

    def add_standby(self) -> None:
        """Copy the primary, and have it followed. From here on commits wait for the standby if they should."""
        self.second.run(
            "pg_basebackup",
            "-h",
            self.first.sockets,
            "-U",
            "evertick",
            "-D",
            self.second.data,
            "-R",
            "-c",
            "fast",
            "-N",
        )
        self.second.start()
        eventually_sync(lambda: self.first.rows("select 1 from pg_stat_replication where state = 'streaming'"))
        if self._is_synchronous:
            with self.first.connect() as conn:
                conn.execute("alter system set synchronous_standby_names = '*'")
                conn.execute("select pg_reload_conf()")
            synchronous = "select 1 from pg_stat_replication where sync_state = 'sync'"
            eventually_sync(lambda: self.first.rows(synchronous))

    def catch_up(self) -> None:
        """Wait until the standby has all that there is."""
        behind = "select 1 from pg_stat_replication where replay_lsn < pg_current_wal_lsn()"
        eventually_sync(lambda: not self.first.rows(behind))

    @contextmanager
    def lagging(self) -> Iterator[None]:
        """Within the block nothing reaches the standby: its sender on the primary is frozen."""
        ((sender,),) = self.first.rows("select pid from pg_stat_replication")
        os.kill(sender, signal.SIGSTOP)
        try:
            yield
        finally:
            # It must not wake up and send what it has: the primary is to be dead by now, and it with it.
            with suppress(ProcessLookupError):
                os.kill(sender, signal.SIGKILL)

    def promote(self) -> None:
        """Make the standby a primary of its own, whatever the old one does."""
        self.second.run("pg_ctl", "-D", self.second.data, "promote", "-w")

    def crash_first(self) -> None:
        self.first.stop(signal.SIGKILL)
        for pid in _at_work_in(self.first.data):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually_sync(lambda: not _at_work_in(self.first.data))

    def stop(self) -> None:
        for member in (self.second, self.first):
            member.stop()


@contextmanager
def primary_data() -> Iterator[Path]:
    """The data of a primary on which the template of databases is made already, to be copied for each pair."""
    with tempfile.TemporaryDirectory(prefix="evertick-primary-", dir=quick_folder()) as folder:
        server = Member(Path(folder) / "server")
        server.run("initdb", "-D", server.data, *_INITDB_OPTIONS)
        server.start()
        try:
            Cluster(url=server.url).template()
        finally:
            server.stop(signal.SIGINT)
        yield server.data


@contextmanager
def two_servers(data: Path, *, is_synchronous: bool) -> Iterator[Pair]:
    """`data` is copied for the primary; whoever wants a standby adds it."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="evertick-pair-", dir=quick_folder()))
        pair = Pair(Path(folder), is_synchronous=is_synchronous)
        stack.callback(pair.stop)
        shutil.copytree(data, pair.first.data, dirs_exist_ok=True)
        pair.first.start()
        yield pair


def _at_work_in(data: Path) -> list[int]:
    """Backends outlive a killed postmaster for a moment, and would go on writing."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").readlink() == data.resolve():
                found.append(int(entry.name))
    return found
