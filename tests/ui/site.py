"""A site to look at: an API server on a thread, a database with history in it, and people of every role."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import structlog
from psycopg import AsyncConnection

from evertick.api.serving import serve
from evertick.config import Settings
from evertick.domain.access import Role
from evertick.domain.dag import DagSpec, NamedSchedule
from evertick.domain.params import Param, declare_params
from evertick.domain.schedule import parse_schedule
from evertick.engine import accounts
from evertick.services.listening import address_of, listen
from evertick.store import dags, runs
from evertick.store.db import Purpose, connect
from evertick.ui.app import make_app
from tests.engine.world import Runner, lead, make_dag, names_of, put, set_clock

T = TypeVar("T")
PASSWORD = "correct horse"

CHAIN: dict[str, list[str]] = {
    "extract.orders": [],
    "extract.customers": [],
    "transform": ["extract.orders", "extract.customers"],
    "check": ["transform"],
    "load": ["transform", "check"],
    "report": ["load"],
}


@dataclass(slots=True)
class Site:
    """`sessions`: the cookie's value of somebody of each role."""

    url: str
    database: str
    sessions: dict[str, str] = field(default_factory=dict)
    runs: dict[str, list[int]] = field(default_factory=dict)

    def do(self, verb: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """Something in its database, on a connection of its own."""

        async def once() -> T:
            async with await connect(self.database, purpose=Purpose.PLANNING) as conn:
                return await verb(conn)

        # On a thread of its own: a browser that is driven from this one keeps its event loop running.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(once())).result()


@contextmanager
def served(database: str) -> Iterator[Site]:
    """The whole application on a free port, until the end of the block."""
    log = structlog.get_logger()
    settings = Settings(api_rate=0, api_port=0)
    socket = listen(settings, log)
    started = threading.Event()
    held: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def run() -> None:
        stop = asyncio.Event()
        held.append((asyncio.get_running_loop(), stop))
        started.set()
        await serve(make_app, settings, database, log, socket, stop)

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield Site(url=address_of(socket).rstrip("/"), database=database)
    finally:
        loop, stop = held[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(15)


async def people(conn: AsyncConnection) -> dict[str, str]:
    """Somebody of each role with a session, and `limited`, an operator for one tag."""
    sessions = {}
    for name, role, tags in [*((each.value, each, None) for each in Role), ("limited", Role.OPERATOR, ["finance"])]:
        await accounts.add_user(conn, name=name, role=role, tags=tags, actor="test")
        row = await accounts.find_user(conn, name)
        issued = await accounts.issue(conn, row, kind="session", name="test", actor="test", seconds=3600)
        sessions[name] = issued.secret
    return sessions


async def past_run(
    conn: AsyncConnection, runner: Runner, dag: str, ago: timedelta, *, lasts: float = 60.0, bad: str | None = None
) -> int:
    """A run that began so long ago; each of its tasks took the same time, and `bad` failed."""
    at = datetime.now(UTC) - ago
    await set_clock(conn, at)
    row = await dags.find(conn, dag)
    assert row is not None
    made = await runs.trigger(conn, dag_id=row.dag_id, params={}, key=None, actor="user:ann")
    assert made is not None
    claims = await runner.claim()
    while claims:
        at += timedelta(seconds=lasts)
        await set_clock(conn, at)
        names = await names_of(conn, claims)
        ends = [
            (claim, "failed" if name == bad else "success", {"reason": "ValueError: no rows"} if name == bad else {})
            for claim, name in zip(claims, names, strict=True)
        ]
        claims, _ = await runner.step(ends, free=100)
    await conn.execute("select set_config('evertick.now', '', false)")
    return made.run_id


def pipeline(name: str, every: str | None, **options: object) -> DagSpec:
    if every is not None:
        options["schedules"] = (NamedSchedule(name="main", spec=parse_schedule(every)),)
    groups = {task: {"group": "extract"} for task in CHAIN if task.startswith("extract.")}
    return make_dag(name, CHAIN, per_task=groups, **options)


async def history(conn: AsyncConnection) -> dict[str, list[int]]:
    """Some DAGs with what a week leaves: good runs, failing ones, one that runs now, one that is paused."""
    await lead(conn)
    runner = await Runner.join(conn)
    params = declare_params(
        {
            "region": Param("eu", choices=["eu", "us"], description="Whose orders."),
            "limit": Param(1000, type=int, minimum=1, maximum=100_000, description="How many rows at most."),
            "dry_run": Param(False, description="Only look."),
            "day": Param(type=str, required=True, pattern=r"\d{4}-\d{2}-\d{2}", description="As 2026-11-30."),
        }
    )
    await put(
        conn,
        pipeline(
            "orders", "*/15 * * * *", description="Orders of the shops, four times an hour.", tags=("finance", "hourly")
        ),
    )
    await put(conn, pipeline("billing", "30 6 * * 1-5", description="Invoices of the day before.", tags=("finance",)))
    await put(conn, pipeline("web_logs", "@every 5m", tags=("web",)))
    await put(
        conn,
        make_dag("report_by_hand", {"collect": [], "send": ["collect"]}, params=params, description="Sends a report."),
    )
    await put(conn, pipeline("archive", "0 3 * * *", starts_paused=True, description="Moves old files away."))
    made: dict[str, list[int]] = {}
    for dag, count, bad_ones in (("orders", 14, {3}), ("billing", 6, {4, 5}), ("web_logs", 10, set())):
        for place in range(count):
            ago = timedelta(minutes=15 * (count - place) + 20)
            bad = "load" if place in bad_ones else None
            run_id = await past_run(conn, runner, dag, ago, lasts=20 + 7 * (place % 4), bad=bad)
            made.setdefault(dag, []).append(run_id)
    row = await dags.find(conn, "orders")
    assert row is not None
    open_run = await runs.trigger(conn, dag_id=row.dag_id, params={}, key=None, actor="user:ann")
    assert open_run is not None
    (first, *_) = await runner.claim(2)
    await runner.finish(first)
    made["orders"].append(open_run.run_id)
    return made
