"""A PgBouncer before a server, as an operator may have put it there. Where it is not installed, its tests are skipped."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

from evertick.supervisor.postgres import environment, launch_command
from tests.databases import quick_folder
from tests.waiting import eventually_sync

_PORT = 6432


def program() -> str:
    """Where PgBouncer is, or no test."""
    found = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if found is None:
        pytest.skip("PgBouncer is not installed (Debian: apt install pgbouncer)")
    return found


class Pooler:
    """Passes every database on to one server. Settings go to its file as they are."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self._folder, self._settings = folder, settings
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, database: str) -> str:
        return f"postgresql:///{database}?host={self._folder}&port={_PORT}&user=evertick"

    def start(self, server_url: str) -> None:
        self._write(server_url)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                launch_command(self._folder, signal.SIGKILL, [program(), self._folder / "ini"]),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        eventually_sync(self._answers)

    def point_to(self, server_url: str) -> None:
        """As an operator after a failover: another server behind the same address, and nobody is told."""
        self._write(server_url)
        with psycopg.connect(self.url("pgbouncer"), autocommit=True) as console:
            console.execute("RELOAD")
            console.execute("RECONNECT")

    def logins(self) -> int:
        """How often somebody has connected so far."""
        return (self._folder / "log").read_text().count("login attempt")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)

    def _write(self, server_url: str) -> None:
        server = conninfo.conninfo_to_dict(server_url)
        settings = {
            "pool_mode": "transaction",
            "auth_type": "any",
            "listen_port": str(_PORT),
            "unix_socket_dir": str(self._folder),
            "max_client_conn": "200",
            "default_pool_size": "20",
            "admin_users": "evertick",
            "ignore_startup_parameters": "extra_float_digits,options",
            **self._settings,
        }
        lines = ["[databases]", f"* = host={server['host']} port={server['port']} user=evertick", "[pgbouncer]"]
        lines += [f"{name} = {value}" for name, value in settings.items()]
        (self._folder / "ini").write_text("\n".join(lines) + "\n")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()
        with suppress(psycopg.OperationalError):
            psycopg.connect(self.url("pgbouncer"), autocommit=True).close()
            return True
        return False


@contextmanager
def pooler(server_url: str, **settings: str) -> Iterator[Pooler]:
    program()
    with tempfile.TemporaryDirectory(prefix="evertick-pool-", dir=quick_folder()) as folder:
        found = Pooler(Path(folder), **settings)
        try:
            found.start(server_url)
            yield found
        finally:
            found.stop()
