"""The cost of an idle `evertick up`, with all of its processes, after it has run something."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import psycopg
from bench.case import Bench
from bench.figures import Figure, Settings, at_most
from bench.house import DAGS, ROOT, NotMeasured, service_environment
from bench.usage import pss_bytes, tree, tree_seconds

from evertick.cli.commands.up import put_examples
from evertick.processes.system import die_with_parent
from evertick.supervisor.postgres_home import PostgresDirectory

_READY_SECONDS = 60.0


async def idle(bench: Bench) -> list[Figure]:
    """CPU share, transactions and memory of all processes of `up`, including PostgreSQL."""
    folder = bench.folder / "idle"
    (folder / "dags").mkdir(parents=True)
    (folder / "dags" / "light.py").write_bytes((DAGS / "light.py").read_bytes())
    async with _up(folder) as top:
        await _run_something(folder)
        _vacuum(folder)
        bench.say("letting autovacuum make its first round")
        await asyncio.sleep(bench.size.first_round_seconds)
        bench.say(f"watching it idle for {bench.size.idle_seconds:g} s")
        before, began = (tree_seconds(top), _transactions(folder)), time.monotonic()
        await asyncio.sleep(bench.size.idle_seconds)
        after, elapsed = (tree_seconds(top), _transactions(folder)), time.monotonic() - began
        memory, processes = pss_bytes(top), len(tree(top))
    watched = f"over {bench.size.idle_seconds:g} s, after its first minute, vacuumed once before"
    facts: Settings = {"note": f"{processes} processes, {watched}"}
    cpu, transactions = (100 * (after[0] - before[0]) / elapsed), (after[1] - before[1]) / elapsed
    about = "all of `up`, idle"
    return [
        Figure(name="idle.cpu", about=f"{about}: of one core", unit="%", value=cpu, goal=at_most(2), settings=facts),
        Figure(
            name="idle.transactions",
            about=f"{about}: transactions",
            unit="1/s",
            value=transactions,
            goal=at_most(5),
            settings=facts,
        ),
        Figure(
            name="idle.pss",
            about=f"{about}: sum of PSS",
            unit="MB",
            value=memory / 1e6,
            goal=at_most(250),
            settings=facts,
        ),
    ]


@asynccontextmanager
async def _up(folder: Path) -> AsyncIterator[psutil.Process]:
    parent = os.getpid()
    put_examples(folder / "dags")
    with (folder / "up.log").open("wb") as log:
        up = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "evertick.cli.main", "up"),
            env=service_environment(
                EVERTICK_HOME=str(folder / "home"), EVERTICK_DAGS_FOLDER=str(folder / "dags"), EVERTICK_DATABASE_URL=""
            ),
            cwd=ROOT,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent),
        )
    try:
        deadline = time.monotonic() + _READY_SECONDS
        while "Evertick is up" not in (folder / "up.log").read_text(errors="replace"):
            if up.returncode is not None or time.monotonic() > deadline:
                raise NotMeasured(
                    f"`evertick up` did not come up:\n{(folder / 'up.log').read_text(errors='replace')[-2000:]}"
                )
            await asyncio.sleep(0.05)
        yield psutil.Process(up.pid)
    finally:
        with suppress(ProcessLookupError):
            up.terminate()
        await up.wait()


async def _run_something(folder: Path) -> None:
    """Run a DAG first, so that the fork server and its idle children exist."""
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        command = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "evertick.cli.main", "dags", "trigger", "single_process", "--wait", "--json"),
            env=service_environment(EVERTICK_HOME=str(folder / "home"), EVERTICK_DATABASE_URL=""),
            cwd=ROOT,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        if await command.wait() == 0:
            return
        if time.monotonic() > deadline:
            raise NotMeasured("no task could be run on the installation started by `evertick up`")
        await asyncio.sleep(0.1)


def _vacuum(folder: Path) -> None:
    """Autovacuum visits each table of a new database once in the first minutes, in about 80 transactions that do not recur.
    Vacuum now, so that they are not counted."""
    with psycopg.connect(PostgresDirectory(folder / "home").url, autocommit=True) as conn:
        conn.execute("vacuum (analyze)")


def _transactions(folder: Path) -> int:
    """Count transactions from the maintenance database, so that the query itself is not counted."""
    with psycopg.connect(PostgresDirectory(folder / "home").maintenance_url, autocommit=True) as conn:
        row = conn.execute(
            "select xact_commit + xact_rollback from pg_stat_database where datname = 'evertick'"
        ).fetchone()
    assert row is not None
    return int(row[0])
