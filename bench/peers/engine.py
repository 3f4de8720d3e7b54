"""One peer engine: its packages and requirements. Its script runs in its own environment, with a fresh folder and database."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
from asyncio.subprocess import DEVNULL, STDOUT
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from bench.house import NotMeasured, Server
from bench.venv import CannotInstall, venv
from psycopg import conninfo

from evertick.processes.system import die_with_parent

Row = dict[str, object]

LONGEST_SECONDS = 420.0
_SCRIPTS = Path(__file__).parent
_MEASURED = "MEASURED "


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """`note` explains differences that matter for the comparison; `tuned` lists the settings of the tuned variant."""

    name: str
    title: str
    packages: Sequence[str]
    note: str
    tuned: str
    needs_redis: bool = False

    @property
    def about(self) -> str:
        return f"installing {', '.join(self.packages)} (once), then measuring"


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            name="airflow",
            title="Airflow",
            packages=["apache-airflow[postgres]"],
            note="local executor, a process per task",
            tuned="idle sleep 0.05 s, 64 active runs, 100 runs per loop",
        ),
        Engine(
            name="prefect",
            title="Prefect",
            # Its server does not work with newer releases of these packages, although its requirements allow them.
            packages=["prefect", "asyncpg", "fastapi<0.145", "sqlalchemy<2.1"],
            note="tasks of a flow share one process; a process per flow run",
            tuned="polls every second, 8 flow runs at once",
        ),
        Engine(
            name="dbos",
            title="DBOS",
            packages=["dbos"],
            note="a library: everything in one process; children and runs through its queue",
            tuned="polls every 0.05 s",
        ),
        Engine(
            name="procrastinate",
            title="Procrastinate",
            packages=["procrastinate"],
            note="a job queue, no graphs; jobs share the worker's process",
            tuned="4 jobs at once",
        ),
        Engine(
            name="celery",
            title="Celery + Redis",
            packages=["celery[redis]"],
            note="not durable: Redis answers before it writes; reused processes",
            tuned="4 processes, fair, no gossip, mingle or heartbeat",
            needs_redis=True,
        ),
    )
}


async def measure_engine(engine: Engine, server: Server, folder: Path, *, is_tuned: bool) -> Row:
    """The figures of the engine's script, or the reason why there are none."""
    row: Row = {
        "engine": engine.title + (", tuned" if is_tuned else ""),
        "note": engine.tuned if is_tuned else engine.note,
    }
    place = folder / f"{engine.name}{'-tuned' if is_tuned else ''}"
    place.mkdir()
    database = f"peer_{engine.name}"
    try:
        programs = await asyncio.to_thread(venv, engine.name, engine.packages)
        url = _as_url(await server.make(database, is_migrated=False))
        async with _redis(place, is_needed=engine.needs_redis) as redis:
            environment = {"PEER_URL": url, "PEER_REDIS": redis, "PEER_FOLDER": str(place)}
            found = await _run(engine, programs / "python", place, environment, is_tuned=is_tuned)
    except (CannotInstall, NotMeasured) as error:
        return row | {"problem": str(error)}
    finally:
        await server.drop(database)
    version = found.pop("version", None)
    return row | found | {"engine": f"{engine.title} {version}{', tuned' if is_tuned else ''}"}


async def _run(engine: Engine, python: Path, place: Path, environment: dict[str, str], *, is_tuned: bool) -> Row:
    parent = os.getpid()
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("EVERTICK_", "PYTHON", "PG"))
    }
    with (place / "log").open("wb") as log:
        script = await asyncio.create_subprocess_exec(
            *(str(python), str(_SCRIPTS / f"with_{engine.name}.py"), *(["tuned"] if is_tuned else [])),
            env={**inherited, **environment, "PEER_STAMPS": str(place / "stamps")},
            cwd=place,
            stdin=DEVNULL,
            stdout=log,
            stderr=STDOUT,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent),
        )
        family = psutil.Process(script.pid)
        try:
            async with asyncio.timeout(LONGEST_SECONDS):
                await script.wait()
        except TimeoutError:
            raise NotMeasured(f"not done within {LONGEST_SECONDS:g} s") from None
        finally:
            _end(script, family)
            await script.wait()
    return _read(place / "log", script.returncode)


def _end(script: asyncio.subprocess.Process, family: psutil.Process) -> None:
    """End the processes of a script that did not exit. All of them were started here."""
    if script.returncode is not None:
        return
    with suppress(psutil.NoSuchProcess):
        for child in [*family.children(recursive=True), family]:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def _read(log: Path, status: int | None) -> Row:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in reversed(lines):
        if line.startswith(_MEASURED):
            found: Row = json.loads(line.removeprefix(_MEASURED))
            return found
    last = next((line for line in reversed(lines) if line.strip()), "no output")
    raise NotMeasured(f"its script ended with exit code {status}: {last.strip()[:200]}")


@asynccontextmanager
async def _redis(place: Path, *, is_needed: bool) -> AsyncIterator[str]:
    """Run Redis with its default settings on a free port within the block. Yields its URL, or an empty string."""
    if not is_needed:
        yield ""
        return
    program = shutil.which("redis-server")
    if program is None:
        program = await asyncio.to_thread(_install_redis)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(place)]
    redis = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)
    try:
        await _until_it_listens(port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        redis.terminate()
        await redis.wait()


def _install_redis() -> str:
    """Install Redis with the system's package manager if permitted. Printed, because it changes the machine."""
    if os.geteuid() == 0 and shutil.which("apt-get"):
        print("Installing redis-server with apt-get, for Celery ...", flush=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "redis-server"], stdout=subprocess.DEVNULL)
    program = shutil.which("redis-server")
    if program is None:
        raise NotMeasured("there is no redis-server; install it (Debian: apt-get install redis-server)")
    return program


async def _until_it_listens(port: int) -> None:
    for _ in range(100):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
    raise NotMeasured("redis-server did not start")


def _as_url(name: str) -> str:
    """A URL that every client library accepts: the socket's folder as a parameter."""
    parts = conninfo.conninfo_to_dict(name)
    return f"postgresql://{parts['user']}@/{parts['dbname']}?host={parts['host']}&port={parts['port']}"
