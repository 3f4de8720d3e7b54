"""A PostgreSQL of our own that a test may kill. Its owner is a process that restarts it, unless it is frozen meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import conninfo

from tests.databases import Cluster
from tests.waiting import eventually

_ROOT = Path(__file__).parents[2]


class MortalPostgres:
    def __init__(self, owner: subprocess.Popen[str], url: str, home: Path) -> None:
        self._owner, self._home = owner, home
        self.cluster = Cluster(url=conninfo.make_conninfo(url, dbname="postgres"))

    async def kill(self) -> None:
        """kill -9; it is up again soon."""
        await self._kill()

    async def take_down(self) -> None:
        """kill -9, and nobody starts it until `let_up`."""
        self._owner.send_signal(signal.SIGSTOP)
        await self._kill()

    def let_up(self) -> None:
        self._owner.send_signal(signal.SIGCONT)

    async def _kill(self) -> None:
        pid = int((self._home / "postgres" / "postmaster.pid").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: not _answers(self.cluster))


@contextmanager
def mortal_postgres(home: Path) -> Iterator[MortalPostgres]:
    command = [sys.executable, "-m", "tests.supervisor.postgres_owner", str(home)]
    with subprocess.Popen(
        command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        try:
            yield MortalPostgres(owner, owner.stdout.readline().strip(), home)
            owner.send_signal(signal.SIGCONT)
            owner.stdin.close()
            owner.wait(timeout=60)
        finally:
            owner.kill()


def _answers(cluster: Cluster) -> bool:
    try:
        cluster.admin().close()
    except psycopg.OperationalError:
        return False
    return True
