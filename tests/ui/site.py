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

import httpx
import structlog
from psycopg import AsyncConnection

from evertick.api.auth import PLAIN_COOKIE, csrf_of
from evertick.api.server import serve
from evertick.config import Settings
from evertick.db.connect import Purpose, connect
from evertick.db.queries import runs, schedules
from evertick.domain.access import Actor, Role
from evertick.domain.dags.params import Param, declare_params
from evertick.domain.dags.spec import DagSpec, NamedSchedule
from evertick.domain.encryption import new_key
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine import accounts
from evertick.engine.fire_schedules import fire_schedules
from evertick.runtime.listen_socket import address_of, listen
from evertick.ui.app import make_app
from tests.engine.world import Runner, lead, make_dag, names_of, put, set_clock, start

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
            async with await connect(self.database, purpose=Purpose.SCHEDULER) as conn:
                return await verb(conn)

        # On a thread of its own: a browser that is driven from this one keeps its event loop running.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(once())).result()


@contextmanager
def served(database: str) -> Iterator[Site]:
    """The whole application on a free port, until the end of the block."""
    log = structlog.get_logger()
    settings = Settings(api_rate_limit=0, api_port=0, secret_keys=(new_key(),), cells=("berlin=https://b.example",))
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
    """Somebody of each role with a session that outlives the slowest test run, and `limited`, an operator for one tag."""
    sessions = {}
    for name, role, tags in [*((each.value, each, None) for each in Role), ("limited", Role.OPERATOR, ["finance"])]:
        await accounts.add_user(conn, name=name, role=role, tags=tags, actor=Actor("test"))
        row = await accounts.find_user(conn, name)
        issued = await accounts.issue(conn, row, kind="session", name="test", actor=Actor("test"), seconds=86_400)
        sessions[name] = issued.secret
    return sessions


async def _finish_all(
    conn: AsyncConnection, runner: Runner, at: datetime, *, lasts: float, bad: str | None = None
) -> None:
    """Everything that can run, from then on: each task takes the same time, and `bad` fails."""
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


async def live_through(conn: AsyncConnection, runner: Runner, epoch: int, begin: datetime, end: datetime) -> None:
    """What the schedules did in that time, each a few milliseconds after its instant."""
    place = 0
    while True:
        due, _ = await schedules.next_due(conn, shard=0)
        if due is None or due >= end:
            return
        at = max(due, begin) + timedelta(milliseconds=4 + place % 3)
        await set_clock(conn, at)
        await fire_schedules(conn, shard=0, epoch=epoch, batch=100)
        bad = "load" if place in (4, 9) else None
        await _finish_all(conn, runner, at, lasts=9 + 4 * (place % 5), bad=bad)
        place += 1


def pipeline(name: str, every: str | None, **options: object) -> DagSpec:
    if every is not None:
        options["schedules"] = (NamedSchedule(name="main", spec=parse_schedule(every)),)
    groups = {task: {"group": "extract"} for task in CHAIN if task.startswith("extract.")}
    return make_dag(name, CHAIN, per_task=groups, **options)


async def history(conn: AsyncConnection) -> dict[str, list[int]]:
    """Some DAGs with what two hours leave: good runs, failing ones, one that runs now, one that is paused."""
    now = datetime.now(UTC)
    epoch = await lead(conn)
    await conn.execute("update shard set leader = 'scheduler-1'")
    runner = await Runner.join(conn)
    await conn.execute("update runner set runner_id = 'runner-1', slots = 8")
    params = declare_params(
        {
            "region": Param("eu", choices=["eu", "us"], description="Whose orders."),
            "limit": Param(1000, type=int, minimum=1, maximum=100_000, description="How many rows at most."),
            "dry_run": Param(False, description="Only look."),
            "day": Param(type=str, required=True, pattern=r"\d{4}-\d{2}-\d{2}", description="As 2026-11-30."),
        }
    )
    begin = now - timedelta(hours=2)
    await set_clock(conn, begin)
    orders = "Orders of the shops, four times an hour."
    await put(conn, pipeline("orders", "*/15 * * * *", description=orders, tags=("finance", "hourly")))
    await put(conn, pipeline("billing", "30 6 * * 1-5", description="Invoices of the day before.", tags=("finance",)))
    await put(conn, pipeline("web_logs", "@every 10m", tags=("web",)))
    report = {"collect": [], "send": ["collect"]}
    await put(conn, make_dag("report_by_hand", report, params=params, description="Sends a report."))
    await put(conn, pipeline("archive", "0 3 * * *", starts_paused=True, description="Moves old files away."))
    await live_through(conn, runner, epoch, begin, now)
    for place in range(3):
        at = now - timedelta(minutes=40 - 10 * place)
        await set_clock(conn, at)
        await start(conn, "billing")
        await _finish_all(conn, runner, at, lasts=30, bad="load" if place else None)
    await set_clock(conn, now)
    running = await start(conn, "orders")
    (first, *_) = await runner.claim(2)
    await runner.finish(first)
    found: dict[str, list[int]] = {}
    for row in await runs.list_newest(conn, limit=200):
        found.setdefault(row.dag, []).append(row.run_id)
    assert found["orders"][0] == running
    return found


class HttpVisitor(httpx.Client):
    """Somebody with a session, as a browser has it."""

    def __init__(self, site: Site, who: str | None) -> None:
        cookies = {PLAIN_COOKIE: site.sessions[who]} if who else {}
        super().__init__(base_url=site.url, cookies=cookies, headers={"Accept": "text/html"}, timeout=30)
        self.csrf = csrf_of(site.sessions[who]) if who else ""

    def press(self, path: str, *, csrf: str | None = None, **fields: str) -> httpx.Response:
        """What a button or a form of ours sends."""
        headers = {"HX-Request": "true", "X-CSRF-Token": self.csrf if csrf is None else csrf}
        return self.post(path, data=fields, headers=headers)
