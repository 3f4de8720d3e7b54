"""On a database that has worked for a while: the hot statements use their index, and no verb reads what is over."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, cast

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import runners
from evertick.db.statements import sql, text_of
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.retention import Pace
from evertick.domain.schedules.preview import Reprocess
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine import backfills as engine_backfills
from evertick.engine.backfills import BackfillRequest
from evertick.engine.dags import pause, unpause
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.maintenance import (
    fail_orphaned_run,
    promote_due_tasks,
    reconcile_runs,
    time_out_queued_tasks,
    time_out_run,
)
from evertick.engine.retention import Kind, PendingCleanup, PruneGrant, prune_kind, prune_runs, sweep
from evertick.engine.runners import extend, mark_runner_dead, reap_runner
from evertick.engine.runs import cancel
from evertick.engine.shards import poll_work, try_acquire_shard
from evertick.engine.tasks import clear, mark, select_tasks
from tests.databases import Cluster, run
from tests.db.filling import BUSY, FRESH, Filling, fill
from tests.engine.world import Runner, key_of, later, make_dag, put, set_clock, start

HOT_TABLES = ["task", "ready_task", "lease", "task_timer", "run", "run_status", "schedule_state"]
LEADER = 1

Verb = Callable[[AsyncConnection], Awaitable[object]]


def filled(cluster: Cluster, template: str, filling: Filling) -> Iterator[str]:
    name = cluster.create(template)
    url = cluster.database_url(name)

    async def work() -> None:
        async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
            assert await fill(conn, filling) == LEADER

    run(work())
    yield url
    cluster.drop(name)


@pytest.fixture(scope="module")
def busy_database(cluster: Cluster, template: str) -> Iterator[str]:
    """20,000 ended tasks, 2,000 in line, 5,000 schedules."""
    yield from filled(cluster, template, BUSY)


@pytest.fixture(scope="module")
def fresh_database(cluster: Cluster, template: str) -> Iterator[str]:
    """A hundredth of that."""
    yield from filled(cluster, template, FRESH)


@pytest.fixture
async def busy(busy_database: str) -> AsyncIterator[AsyncConnection]:
    """A connection as a runner has it."""
    async with await connect(busy_database, purpose=Purpose.RUNNER) as conn:
        await set_clock(conn, later(0))
        yield conn


# Plain statements -------------------------------------------------------------------------------------------

TASK: dict[str, object] = {"run_id": 50, "idx": 0, "map_index": -1}
CHUNK = json.dumps([{"r": 50, "i": 0, "m": -1, "e": 1, "seq": 10, "until": 20, "content": "x"}])
OPEN: dict[str, object] = {"idxs": [0], "indexes": [-1], "epochs": [1]}
SOUGHT: dict[str, object] = {
    "before": 10**9, "window": 500, "limit": 50, "state": None, "kind": "manual", "since": later(0), "until": None, "like": "%a%"
}  # fmt: skip

# statement: with what, and the index that it must use
PLANNED: dict[tuple[str, str], tuple[dict[str, object], str]] = {
    ("schedules", "due"): ({"shard": 0, "batch": 100, "passed_over": [], "half": None, "until": None}, "schedule_due"),
    ("schedules", "next_due"): ({"shard": 0}, "schedule_due"),
    ("logs", "ended"): ({"after": 0, "seconds": 0, "batch": 10}, "log_chunk_pkey"),
    ("logs", "part"): (
        {"run_id": 50, "idx": -1, "map_index": -1, "epoch": 0, "seq": -1, "chunks": 10, "bytes": 100},
        "log_chunk_pkey",
    ),
    ("logs", "append"): ({"session": 1, "chunks": CHUNK}, "lease_pkey"),
    ("retention", "walk_runs"): ({"after": 100, "batch": 50}, "run_pkey"),
    ("retention", "walk_journal"): ({"after": 0, "batch": 50}, "audit_log_pkey"),
    ("runners", "queued_tasks"): ({"queues": ["default"], "begin": [0] * 10, "window": 10}, "ready_task_pkey"),
    ("server", "is_behind"): ({"line": 1000}, "schedule_due"),
}
READ: dict[tuple[str, str], tuple[dict[str, object], str]] = {
    ("runs", "find"): ({"run_id": 50}, "run_pkey"),
    ("runs", "list"): ({"state": None, "limit": 50}, "run_pkey"),
    ("retention", "run_at_or_above"): ({"run_id": 50}, "run_pkey"),
    ("retention", "newest_run_id"): ({}, "run_pkey"),
    ("runs", "list_of_dag"): ({"dag_id": 2, "state": None, "limit": 50}, "run_of_dag"),
    ("tasks", "list_of_run"): ({"run_id": 50, "limit": 100}, "task_pkey"),
    ("tasks", "attempts"): (TASK, "task_pkey"),
    ("tasks", "result"): (TASK, "result_pkey"),
    ("logs", "read"): ({**TASK, "epoch": 0, "seq": 0, "limit": 10}, "log_chunk_pkey"),
    ("logs", "attempts_in_order"): (
        {"run_id": 50, "started_at": later(0), "idx": -1, "map_index": -2, "epoch": -1, **OPEN, "limit": 51},
        "task_pkey",
    ),
    ("logs", "of_attempts"): ({"run_id": 50, **OPEN, "seqs": [0], "chunks": 64}, "log_chunk_pkey"),
    ("runs", "page"): ({**SOUGHT, "dag_ids": None}, "run_pkey"),
    ("runs", "page_of_dag"): ({**SOUGHT, "dag_ids": [2]}, "run_of_dag"),
    ("logs", "shipped_until"): ({**TASK, "epoch": 1}, "log_chunk_pkey"),
}


@pytest.mark.parametrize(("noun", "name"), [*PLANNED, *READ])
async def test_a_hot_statement_uses_its_index(busy_database: str, noun: str, name: str) -> None:
    params, index = (PLANNED | READ)[noun, name]
    # What only reads plans freely: it must not need to be forced.
    purpose = Purpose.READ if (noun, name) in READ else Purpose.SCHEDULER
    async with await connect(busy_database, purpose=purpose) as conn:
        nodes = list(nodes_of(await explain(conn, sql(noun, name), params)))
    assert index in {node.get("Index Name") for node in nodes}
    hot = [*HOT_TABLES, "result", "log_chunk", "attempt"]
    assert [n["Relation Name"] for n in nodes if n["Node Type"] == "Seq Scan" and n["Relation Name"] in hot] == []


@pytest.mark.requirement("H6")
async def test_the_due_scan_reads_as_many_rows_as_are_due(busy: AsyncConnection) -> None:
    await set_clock(busy, later(3620))
    due: dict[str, object] = {"shard": 0, "batch": 100, "passed_over": [], "half": None, "until": None}
    oldest, newest = [
        node
        for node in nodes_of(await explain(busy, sql("schedules", "due"), due, ", analyze"))
        if node.get("Index Name") == "schedule_due"
    ]
    assert oldest["Actual Rows"] * oldest["Actual Loops"] in range(1, 30)
    assert newest["Actual Rows"] == 0, "all of them fit"
    assert [scan.get("Rows Removed by Filter", 0) for scan in (oldest, newest)] == [0, 0]


async def explain(
    conn: AsyncConnection, statement: str, params: dict[str, object], options: str = ""
) -> dict[str, Any]:
    query = f"explain (format json{options}) {statement}"
    row = await (await conn.execute(query, params, prepare=False)).fetchone()
    assert row is not None
    return cast("dict[str, Any]", row[0][0]["Plan"])


def nodes_of(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes_of(child)


# Verbs ------------------------------------------------------------------------------------------------------


async def claims_and_finishes(conn: AsyncConnection) -> None:
    runner = await Runner.join(conn)
    claims = await runner.claim(5)
    assert len(claims) == 5
    await extend(conn, session=runner.session, held=[(key_of(claim), claim.epoch) for claim in claims])
    ends = [(claim, "success", {"result": 1, "log": "x"}) for claim in claims[:3]]
    more, refused = await runner.step([*ends, (claims[3], "failed", {"retry_in": 5})], free=4)
    assert (len(more), refused) == (4, [])
    await mark_runner_dead(conn, session=runner.session, reason="gone", infra_retries=3)


async def fires(conn: AsyncConnection) -> None:
    await set_clock(conn, later(3650))
    done = await fire_schedules(conn, shard=0, epoch=LEADER, batch=10)
    assert done.settled == 10


async def promotes(conn: AsyncConnection) -> None:
    await set_clock(conn, later(1e9))
    assert (await promote_due_tasks(conn, shard=0, epoch=LEADER, limit=5)).promoted == 5


async def triggers(conn: AsyncConnection) -> None:
    await start(conn, "past", key="once")
    await start(conn, "past", key="once")


async def looks(conn: AsyncConnection) -> None:
    seen = await poll_work(conn, shard=0, epoch=LEADER, lost_after=90, seconds=5, elapsed=1)
    assert seen.errors == []


async def takes_over(conn: AsyncConnection) -> None:
    """Another scheduler takes the shard whose lease is over, looks around, fires and repairs."""
    await set_clock(conn, later(3650))
    await conn.execute("update shard set lease_until = clock() - interval '1 second'")
    standing = await try_acquire_shard(conn, shard=0, owner="next", seconds=5, watches=True)
    assert standing.epoch == LEADER + 1 and standing.has_session_lock
    seen = await poll_work(
        conn, shard=0, epoch=LEADER + 1, lost_after=90, seconds=5, elapsed=1, watches=True, is_watched=True
    )
    assert seen.errors == [] and seen.next_fire is not None
    assert (await fire_schedules(conn, shard=0, epoch=LEADER + 1, batch=10)).settled == 10
    await reconcile_runs(conn, shard=0, epoch=LEADER + 1, limit=20, counts_line=False)


async def reaps(conn: AsyncConnection) -> None:
    runner = await Runner.join(conn)
    await runner.claim(5)
    await runners.leave(conn, runner.session)
    done = await reap_runner(conn, shard=0, epoch=LEADER, session=runner.session, lost_after=90, infra_retries=3)
    assert done.reaped == 5
    await fail_orphaned_run(conn, shard=0, epoch=LEADER, run_id=50, after=300)


async def times_out(conn: AsyncConnection) -> None:
    run = await start(conn, "past")
    await conn.execute("update dag_version set run_timeout = 1")
    await conn.execute("update dag set has_run_timeout = true")
    await conn.execute("update ready_task set expires_at = clock() where queue = 'default' and run_id <> %s", [run])
    await set_clock(conn, later(5))
    assert await time_out_run(conn, shard=0, epoch=LEADER, run_id=run) == 0
    assert (await time_out_queued_tasks(conn, shard=0, epoch=LEADER, limit=10)).failed == 10


async def reconciles(conn: AsyncConnection) -> None:
    await reconcile_runs(conn, shard=0, epoch=LEADER, limit=20, counts_line=False)


async def people_ask(conn: AsyncConnection) -> None:
    ended, opened = 50, await start(conn, "past")
    await clear(conn, run_id=ended, chosen=await select_tasks(conn, run_id=ended), actor=Actor("me"))
    await mark(conn, TaskKey(opened, 0, -1), state="success", actor=Actor("me"))
    await cancel(conn, run_id=opened, actor=Actor("me"))


async def backfills(conn: AsyncConnection) -> None:
    await set_clock(conn, later(3650))
    every = parse_schedule("@every 10s")
    wish = BackfillRequest(
        dag="past", first=later(0), last=later(3600), spec=every, reprocess=Reprocess.ALL, parallel=5
    )
    made, _ = await engine_backfills.create(conn, wish, request="r", actor=Actor("me"))
    done = await engine_backfills.advance(conn, shard=0, epoch=LEADER, backfill_id=made.id)
    assert (done.made, done.is_over) == (5, False)
    assert (await engine_backfills.advance(conn, shard=0, epoch=LEADER, backfill_id=made.id)).made == 0
    await looks(conn)
    assert (await engine_backfills.cancel(conn, backfill_id=made.id, leaves_runs=False, actor=Actor("me"))).runs == 5


async def pauses(conn: AsyncConnection) -> None:
    await pause(conn, dag="past", actor=Actor("me"))
    await unpause(conn, dag="past", actor=Actor("me"))


async def prunes(conn: AsyncConnection) -> None:
    await set_clock(conn, later(1e7))
    given, pace = PruneGrant(shard=0, epoch=LEADER, before=later(1e6), actor=Actor("test")), Pace(batch=10)
    done = await prune_runs(conn, given, after=0, pace=pace, now=later(1e7))
    assert (done.pruned, done.is_end) == (10, False)
    assert (await sweep(conn, given, PendingCleanup.RUN, after=0, pace=pace)).rows == pace.rows
    for kind in (Kind.SKIP_RECORDS, Kind.RUNNERS, Kind.VERSIONS, Kind.BUNDLES):
        await prune_kind(conn, given, kind, pace=pace)


VERBS: list[Verb] = [
    claims_and_finishes,
    looks,
    takes_over,
    fires,
    promotes,
    triggers,
    reaps,
    times_out,
    reconciles,
    people_ask,
    backfills,
    pauses,
    prunes,
]


@pytest.mark.requirement("H6", "H3")
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
async def test_a_verb_never_reads_a_hot_table_from_end_to_end(busy: AsyncConnection, verb: Verb) -> None:
    before = await sequential_scans(busy)
    async with busy.transaction(force_rollback=True):
        await verb(busy)
    assert await sequential_scans(busy) == before


async def test_reading_a_hot_table_from_end_to_end_would_be_noticed(busy: AsyncConnection) -> None:
    before = await sequential_scans(busy)
    await busy.execute("select count(*) from task where reason = 'nothing indexes this'")
    assert (await sequential_scans(busy))["task"] == before["task"] + 1


async def sequential_scans(conn: AsyncConnection) -> dict[str, int]:
    await conn.execute("select pg_stat_force_next_flush()")
    query = "select relname, seq_scan from pg_stat_user_tables where relname = any(%s)"
    return dict(await (await conn.execute(query, [HOT_TABLES])).fetchall())


# What a verb reads does not grow with what is over ----------------------------------------------------------

STEP = text_of("finish_and_claim")


async def blocks_of_a_step(url: str, aging_seconds: float | None) -> int:
    """Pages that finishing five tasks and claiming five others touches, once everything is planned and cached."""
    async with await connect(url, purpose=Purpose.RUNNER) as conn:
        async with conn.transaction(force_rollback=True):
            await set_clock(conn, later(0))
            runner = await Runner.join(conn)
            for _ in range(2):
                claims = await runner.claim(5)
                await runner.step([(claim, "success", {}) for claim in claims])
            claims = await runner.claim(5)
            reports = json.dumps(
                [{"r": c.run_id, "i": c.idx, "m": c.map_index, "e": c.epoch, "kind": "success"} for c in claims]
            )
            params = {
                "session": runner.session,
                "reports": reports,
                "infra_retries": 3,
                "queues": ["default"],
                "free": 5,
                "low": None,
                "aging": aging_seconds,
            }
            plan = await explain(conn, STEP, params, ", analyze, buffers")
            return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])


@pytest.mark.parametrize("aging_seconds", [None, 60.0])
async def test_a_step_reads_as_little_after_a_long_history_as_after_a_short_one(
    busy_database: str, fresh_database: str, aging_seconds: float | None
) -> None:
    short, long = [await blocks_of_a_step(url, aging_seconds) for url in (fresh_database, busy_database)]
    # A hundred times the rows add a level to a B-tree, not more.
    assert long <= 1.5 * short + 50


async def blocks_of_pruning(url: str) -> int:
    """Pages that deleting five runs and what hung on them touches, from the middle of the history."""
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        async with conn.transaction(force_rollback=True):
            await set_clock(conn, later(1e7))
            named = {
                "shard": 0,
                "epoch": LEADER,
                "before": later(1e6),
                "actor": Actor("test"),
                "entry": None,
                "limit": 100,
            }
            blocks = 0
            for first in (20, 30, 40):
                ids = list(range(first, first + 5))
                plans = [
                    await explain(conn, sql("retention", "walk_runs"), {"after": first - 1, "batch": 5}, ANALYZED),
                    await explain(conn, text_of("prune_runs"), {**named, "run_ids": ids}, ANALYZED),
                    await explain(
                        conn, text_of("delete_pending_cleanup"), {**named, "kind": "run", "ids": ids}, ANALYZED
                    ),
                ]
                blocks = sum(int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"]) for plan in plans)
                assert plans[0]["Actual Rows"] == 5
            return blocks


ANALYZED = ", analyze, buffers"


async def test_pruning_reads_as_little_in_a_long_history_as_in_a_short_one(
    busy_database: str, fresh_database: str
) -> None:
    short, long = await blocks_of_pruning(fresh_database), await blocks_of_pruning(busy_database)
    assert long <= 1.5 * short + 50


OPEN_RUNS = 300


async def test_runs_are_closed_by_their_ids_however_few_the_statistics_believe_open(
    database: str, conn: AsyncConnection
) -> None:
    """Statistics are made when nothing is open. Then all open runs seem fewer than one look by an id costs."""
    await put(conn, make_dag("one", {"a": []}))
    await conn.execute(
        "with made as (insert into run (dag_id, version_id, kind, params, triggered_by, created_at)"
        " select d.dag_id, d.version_id, 'manual', '{}', 'test', clock() from dag d, generate_series(1, 20000)"
        " returning run_id, dag_id, version_id)"
        " insert into run_status (run_id, dag_id, version_id, state, open_tasks, started_at, finished_at)"
        " select run_id, dag_id, version_id, 'success', 0, clock(), clock() from made"
    )
    await conn.execute("analyze run_status")
    for _ in range(OPEN_RUNS):
        await start(conn, "one")
    async with await connect(database, purpose=Purpose.RUNNER) as hot, hot.transaction():
        runner = await Runner.join(hot)
        claims = await runner.claim(8)
        before = await read_rows(hot)
        await runner.step([(claim, "success", {}) for claim in claims])
        assert len(claims) == 8 and await read_rows(hot) - before < OPEN_RUNS / 2


async def read_rows(conn: AsyncConnection) -> int:
    """Rows of run_status that this transaction found by an index."""
    query = "select idx_tup_fetch from pg_stat_xact_user_tables where relname = 'run_status'"
    row = await (await conn.execute(query)).fetchone()
    assert row is not None
    return int(row[0])
