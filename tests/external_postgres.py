"""A second PostgreSQL, of another major version, reached over TCP with a password: a server that is not ours."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psycopg

from evertick.supervisor.postgres import environment, launch_command, programs
from tests.databases import QUICK_SETTINGS, Cluster
from tests.ports import own_port
from tests.waiting import eventually_sync

PASSWORD = "correct horse/battery@staple"
_ESCAPED_PASSWORD = "correct%20horse%2Fbattery%40staple"


# The oldest that Evertick works with.
_OLDEST = 15


def system_programs() -> Path | None:
    """The programs of the oldest PostgreSQL of this machine that Evertick works with, where Debian puts them."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres") if path.parts[-3].isdigit()]
    good = sorted((int(each.parent.name), each) for each in found if int(each.parent.name) >= _OLDEST)
    return good[0][1] if good else None


@contextmanager
def external_cluster(
    directory: Path, where: Path | None = None, *, files: Mapping[str, bytes] | None = None, **extra: str
) -> Iterator[Cluster]:
    """PostgreSQL 16, or the one whose programs are there, on a free port of the loop-back interface, for as long as the
    block lasts. `files` go to its data directory, `extra` are settings."""
    programs_there = where or programs("pginstall")
    data = directory / "data"
    data.mkdir(mode=0o700, parents=True)
    password = directory / "password"
    password.write_text(PASSWORD)
    initdb: list[str | Path] = [
        programs_there / "initdb",
        "-D",
        data,
        "-U",
        "evertick",
        "--auth=scram-sha-256",
        f"--pwfile={password}",
    ]
    subprocess.run(
        launch_command(data, signal.SIGKILL, [*initdb, "--locale=C", "--encoding=UTF8", "--no-sync"]),
        env=environment(),
        check=True,
        capture_output=True,
    )
    for name, content in (files or {}).items():
        (data / name).touch(mode=0o600)
        (data / name).write_bytes(content)
    port = own_port()
    settings = {
        **QUICK_SETTINGS,
        "listen_addresses": "127.0.0.1",
        "port": str(port),
        "unix_socket_directories": "",
        **extra,
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with subprocess.Popen(
        launch_command(data, signal.SIGINT, [programs_there / "postgres", "-D", data, *options]),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    ) as server:
        os.close(log)
        url = f"postgresql://evertick:{_ESCAPED_PASSWORD}@127.0.0.1:{port}/postgres"
        try:
            eventually_sync(lambda: _answers(url), within_seconds=60)
            yield Cluster(url=url)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=30)


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True
