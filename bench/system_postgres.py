"""A server from the operating system's PostgreSQL packages, for extensions that the embedded one lacks.

Runs durably in its own folder within a block. Never touches an existing server.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.house import NotMeasured, Server

from evertick.db.migrate import answers
from evertick.supervisor.postgres import environment, launch_command

_READY_SECONDS = 30.0
_SETTINGS = {
    "listen_addresses": "",
    "fsync": "on",
    "synchronous_commit": "on",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
    "jit": "off",
}


def programs() -> Path | None:
    """The directory of the newest installed server's programs: on the PATH, or in Debian's location."""
    if found := shutil.which("postgres"):
        return Path(found).parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: path.parts[-3])
    return versions[-1].parent if versions else None


@asynccontextmanager
async def system_postgres(folder: Path, *, preload: str = "") -> AsyncIterator[Server]:
    """A new server; `preload` names a library for shared_preload_libraries."""
    where = programs()
    if where is None:
        raise NotMeasured("no PostgreSQL is installed; EVERTICK_DATABASE_URL can name one")
    data, sockets = folder / "data", folder / "sockets"
    for directory in (data, sockets):
        directory.mkdir(parents=True, mode=0o700)
    await asyncio.to_thread(_initdb, where, data)
    settings = {**_SETTINGS, "shared_preload_libraries": preload}
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    with (folder / "postgres.log").open("wb") as log:
        server = await asyncio.create_subprocess_exec(
            *launch_command(data, signal.SIGINT, [where / "postgres", "-D", data, "-k", sockets, *options]),
            env=environment(),
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
        )
    url = f"postgresql:///postgres?host={sockets}&port=5432&user=evertick"
    try:
        await _until_it_answers(url, server, folder / "postgres.log")
        yield Server(url=url)
    finally:
        if server.returncode is None:
            os.kill(server.pid, signal.SIGINT)
        await server.wait()


def _initdb(where: Path, data: Path) -> None:
    options = ["--username=evertick", "--auth=trust", "--locale=C", "--encoding=UTF8"]
    command = launch_command(data, signal.SIGKILL, [where / "initdb", "--pgdata", data, *options])
    made = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if made.returncode != 0:
        raise NotMeasured(f"initdb of {where} failed: {made.stderr.strip()[-300:]}")


async def _until_it_answers(url: str, server: asyncio.subprocess.Process, log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while not await answers(url):
        if server.returncode is not None or time.monotonic() > deadline:
            raise NotMeasured(f"the system's PostgreSQL did not start: {_tail(log)}")
        await asyncio.sleep(0.05)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-500:]
