"""The web pages in a real browser with much data: thousands of DAGs, many runs, a wide graph, a long log.

A page is interactive when its scripts have run. Each page is opened several times with cached assets.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from asyncio.subprocess import DEVNULL, create_subprocess_exec
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from bench.case import Bench
from bench.figures import Figure, at_most, median
from bench.figures import Settings as Facts
from bench.house import NotMeasured, Server
from playwright.async_api import Page, async_playwright
from psycopg import AsyncConnection

from evertick.api.auth import PLAIN_COOKIE
from evertick.db.connect import Purpose, connect
from evertick.db.queries import dags, runs
from evertick.domain.access import Actor, Role
from evertick.domain.dags.spec import DagSpec, NamedSchedule, TaskSpec
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine import accounts
from evertick.engine.publish import publish
from evertick.engine.runs import trigger_run

_DATABASE = "bench_ui"
DATABASES = (_DATABASE,)
_TASKS = 5
_GRAPH_LAYERS, _GRAPH_WIDTH = 20, 25
_CHUNK_BYTES = 64 * 1024
_WAIT_MS = 60_000

# Copies of one DAG: the same version under other names.
_COPY_DAGS = """
    with made as (
        insert into dag (name, file) select 'dag_' || lpad(n::text, 5, '0'), 'bench.py' from generate_series(1, %(count)s) n
        returning dag_id
    ), versions as (
        insert into dag_version (dag_id, number, hash, bundle_hash, spec, task_count, created_at)
        select m.dag_id, 1, v.hash, v.bundle_hash, v.spec, v.task_count, v.created_at
          from made m, dag_version v where v.version_id = %(version)s
        returning version_id, dag_id
    ), tasks as (
        insert into task_spec (version_id, idx, name, queue, priority, trigger_rule, upstream_total, setup_total, is_setup, is_leaf,
                               is_root, max_attempts, rerun_on_loss)
        select n.version_id, s.idx, s.name, s.queue, s.priority, s.trigger_rule, s.upstream_total, s.setup_total, s.is_setup,
               s.is_leaf, s.is_root, s.max_attempts, s.rerun_on_loss
          from versions n, task_spec s where s.version_id = %(version)s
    ), times as (
        insert into schedule (dag_id, name, version, spec, params, misfire, window_seconds, changed_by, changed_at)
        select m.dag_id, c.name, c.version, c.spec, c.params, c.misfire, c.window_seconds, c.changed_by, c.changed_at
          from made m, schedule c where c.dag_id = %(dag)s
        returning schedule_id, version
    ), cursors as (
        insert into schedule_state (schedule_id, shard, version, next_due)
        select schedule_id, 0, version, clock() + interval '1 hour' + schedule_id %% 1440 * interval '1 minute' from times
    )
    select count(*) from versions"""
_POINT = (
    "update dag d set version_id = v.version_id from dag_version v where v.dag_id = d.dag_id and d.version_id is null"
)
# Finished runs, spread over the DAGs and over a month; every twentieth failed. Inserted in batches.
_BATCH = 10_000
_FILL = """
    with made as (
        insert into run (dag_id, version_id, kind, params, triggered_by, created_at)
        select d.dag_id, d.version_id, 'manual', '{}', 'bench', clock() - interval '30 days' + n * interval '30 days' / %(runs)s
          from generate_series(%(first)s::int, least(%(first)s::int + %(batch)s - 1, %(runs)s)) n
          join (select dag_id, version_id, row_number() over (order by dag_id) - 1 as place from dag where name like 'dag_%%') d
            on d.place = n %% %(count)s
        order by n returning run_id, dag_id, version_id, created_at
    ), over as (
        insert into run_status (run_id, dag_id, version_id, state, open_tasks, started_at, finished_at)
        select run_id, dag_id, version_id, case when run_id %% 20 = 0 then 'failed' else 'success' end::run_state, 0,
               created_at, created_at + interval '40 seconds' from made
    )
    insert into task (run_id, idx, version_id, state, epoch, attempt, session, started_at, finished_at)
    select run_id, i, version_id, 'success', 1, 1, 1, created_at + i * interval '8 seconds',
           created_at + (i + 1) * interval '8 seconds'
      from made, generate_series(0, %(last)s) i"""
_LOG = """
    insert into log_chunk (run_id, idx, map_index, epoch, seq, end_offset, content)
    select %(run_id)s, 0, -1, 1, n * %(size)s, (n + 1) * %(size)s,
           repeat('1784000000123456 INFO row 4711 of the orders was read and is as it should be, all of it.' || chr(10),
                  %(size)s / 88)
      from generate_series(0, %(chunks)s - 1) n"""


async def ui(bench: Bench) -> list[Figure]:
    """Every page, the graph of 500 tasks, the log of 100 MB."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise NotMeasured("there is no Chromium here: install Debian's package `chromium`")
    await bench.server.make(_DATABASE)
    async with await connect(bench.server.url_of(_DATABASE), purpose=Purpose.SCHEDULER) as conn:
        wide, run_id, secret = await _prepared(bench, conn)
    async with _served(bench.server) as url, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        context = await browser.new_context(viewport={"width": 1280, "height": 860})
        await context.add_cookies([{"name": PLAIN_COOKIE, "value": secret, "url": url}])
        page = await context.new_page()
        facts: Facts = {"dags": bench.size.ui_dags, "runs": bench.size.ui_runs, "log_bytes": bench.size.ui_log_bytes}
        figures = []
        pages = _pages(run_id, wide)
        for place, (name, path) in enumerate(pages.items(), 1):
            bench.say(f"page {place} of {len(pages)}: {name}")
            await page.goto(url + path)
            times = [await _interactive(page, url + path) for _ in range(bench.size.rounds)]
            figures.append(median(f"ui.{name}", f"{path} interactive", "ms", times, at_most(300), facts))
        figures.append(await _graph(bench, page, f"{url}/runs/{wide}?tab=graph"))
        figures += await _log(bench, page, f"{url}/runs/{run_id}/tasks/task_0")
        await browser.close()
    await bench.server.drop(_DATABASE)
    return figures


def _pages(run_id: int, wide: int) -> dict[str, str]:
    """Every page with data; variants of the same page once."""
    dag, run = "/dags/dag_00001", f"/runs/{run_id}"
    return {
        "home": "/",
        "dags": "/dags",
        "dags_search": "/dags?q=4711",
        "dags_failed": "/dags?state=failed",
        "dags_slowest": "/dags?sort=-took",
        "dag": dag,
        "dag_graph": f"{dag}/graph",
        "calendar": f"{dag}/calendar",
        "durations": f"{dag}/durations",
        "schedules": f"{dag}/schedules",
        "schedule_form": f"{dag}/schedules/edit?name=main",
        "versions": f"{dag}/versions",
        "code": f"{dag}/code",
        "details": f"{dag}/details",
        "trigger": f"{dag}/trigger",
        "wide_dag": "/dags/wide",
        "runs": "/runs",
        "runs_failed": "/runs?state=failed",
        "run": run,
        "gantt": f"{run}?tab=gantt",
        "history": f"{run}?tab=history",
        "wide_run": f"/runs/{wide}",
        "wide_graph": f"/runs/{wide}?tab=graph",
        "task": f"{run}/tasks/task_1",
        "task_attempts": f"{run}/tasks/task_1?tab=attempts",
        "approvals": "/approvals",
        "backfills": "/backfills",
        "backfill_form": "/backfills/new?dag=dag_00001",
        "assets": "/assets",
        "pools": "/pools",
        "keys": "/keys",
        "queues": "/queues",
        "runners": "/runners",
        "schedulers": "/schedulers",
        "variables": "/variables",
        "connections": "/connections",
        "secrets": "/secrets",
        "users": "/users",
        "tokens": "/tokens",
        "audit": "/audit",
    }


async def _prepared(bench: Bench, conn: AsyncConnection) -> tuple[int, int, str]:
    """A run of the wide graph, the run with the long log, and a session secret."""
    await dags.put_bundle(conn, bundle_hash="b", file="bench.py", archive=b"", uses_threads=None)
    chain = DagSpec(
        name="model",
        tasks=tuple(TaskSpec(name=f"task_{n}") for n in range(_TASKS)),
        edges=tuple((n, n + 1) for n in range(_TASKS - 1)),
        schedules=(NamedSchedule(name="main", spec=parse_schedule("30 6 * * *")),),
    )
    model = await publish(conn, spec=chain, file="bench.py", bundle_hash="b", actor=Actor("bench"))
    wide = await publish(conn, spec=_wide(), file="bench.py", bundle_hash="b", actor=Actor("bench"))
    # Evertick's connections have statement timeouts and no hash joins; both would hinder filling the tables.
    async with await AsyncConnection.connect(bench.server.url_of(_DATABASE), autocommit=True) as plain:
        await plain.execute(_COPY_DAGS, {"count": bench.size.ui_dags, "version": model.version_id, "dag": model.dag_id})
        await plain.execute(_POINT)
        await plain.execute("analyze")
        sizes = {"runs": bench.size.ui_runs, "count": bench.size.ui_dags, "last": _TASKS - 1, "batch": _BATCH}
        for first in range(1, bench.size.ui_runs + 1, _BATCH):
            bench.say(f"{bench.size.ui_dags:,} DAGs, {first - 1:,} of {bench.size.ui_runs:,} runs")
            await plain.execute(_FILL, {**sizes, "first": first})
    started = await trigger_run(conn, dag_id=wide.dag_id, params={}, key=None, actor=Actor("bench"))
    newest = (await runs.list_newest(conn, state="success", limit=1))[0].run_id
    chunks = max(1, bench.size.ui_log_bytes // _CHUNK_BYTES)
    async with await AsyncConnection.connect(bench.server.url_of(_DATABASE), autocommit=True) as plain:
        await plain.execute(_LOG, {"run_id": newest, "size": _CHUNK_BYTES, "chunks": chunks})
        await plain.execute("vacuum analyze")
    await accounts.add_user(conn, name="bench", role=Role.ADMIN, actor=Actor("bench"))
    row = await accounts.find_user(conn, "bench")
    issued = await accounts.issue(conn, row, kind="session", name="bench", actor=Actor("bench"), seconds=86_400)
    assert started is not None
    return started.run_id, newest, issued.secret


def _wide() -> DagSpec:
    """Layers of tasks, each with three upstream tasks in the previous layer."""
    width = _GRAPH_WIDTH
    edges = {
        ((layer - 1) * width + (place * 7 + step * 5) % width, layer * width + place)
        for layer in range(1, _GRAPH_LAYERS)
        for place in range(width)
        for step in range(3)
    }
    names = [f"layer_{layer}.task_{place}" for layer in range(_GRAPH_LAYERS) for place in range(width)]
    tasks = tuple(TaskSpec(name=name, group=name.partition(".")[0]) for name in names)
    return DagSpec(name="wide", tasks=tasks, edges=tuple(sorted(edges)))


@asynccontextmanager
async def _served(server: Server) -> AsyncIterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "evertick.cli.main", "api", "--port", str(port)]
    settings = {**os.environ, "EVERTICK_DATABASE_URL": server.url_of(_DATABASE), "EVERTICK_API_RATE_LIMIT": "0"}
    process = await create_subprocess_exec(*command, env=settings, stdout=DEVNULL, stderr=DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def _interactive(page: Page, address: str) -> float:
    await page.goto(address, wait_until="load")
    return float(await page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"))


async def _graph(bench: Bench, page: Page, address: str) -> Figure:
    """The longest browser task while the graph is dragged."""

    async def once() -> float:
        await page.goto(address)
        await page.wait_for_selector("[data-graph][data-ready]", timeout=_WAIT_MS)
        await page.evaluate(
            "window.longest = 0; new PerformanceObserver((list) => { for (const each of list.getEntries())"
            " window.longest = Math.max(window.longest, each.duration); }).observe({ type: 'longtask' })"
        )
        await page.mouse.move(640, 520)
        await page.mouse.down()
        for step in range(60):
            await page.mouse.move(640 - 5 * step, 520 - step)
        await page.mouse.up()
        await page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")
        return float(await page.evaluate("window.longest"))

    about = f"longest browser task while {_GRAPH_LAYERS * _GRAPH_WIDTH} tasks are moved"
    return median("ui.graph_pan", about, "ms", [await once() for _ in bench.rounds()], at_most(50))


async def _log(bench: Bench, page: Page, address: str) -> list[Figure]:
    async def timed(step: Callable[[], Awaitable[object]]) -> float:
        await step()
        return float(await page.evaluate("performance.now()"))

    async def opened() -> None:
        await page.goto(address)
        await page.wait_for_selector("[data-log][data-ready]", timeout=_WAIT_MS)

    times = [await timed(opened) for _ in bench.rounds()]
    nodes = float(await page.evaluate("document.querySelectorAll('*').length"))
    return [
        median("ui.log_open", f"a log of {bench.size.ui_log_bytes:,} bytes shows its end", "ms", times, at_most(1000)),
        median("ui.log_nodes", "elements in the page at that time", "", [nodes], at_most(5000)),
    ]
