"""prune: what is over and old goes without a trace, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import dags, logs, runs
from evertick.db.queries.logs import NewChunk
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import Conflict, NotFound, NotLeader
from evertick.domain.retention import Pace
from evertick.domain.retry import RetryPolicy
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.retention import (
    Kind,
    PendingCleanup,
    PruneGrant,
    _prune_runs,
    delete_pending_cleanup,
    prune_audit_log,
    prune_journal,
    prune_kind,
    prune_runs,
    sweep,
)
from evertick.engine.runs import cancel
from evertick.engine.tasks import clear, mark, select_tasks
from evertick.engine.waits import send_event, update_asset
from tests.engine.plans import ONE, fire_plan, plan, scheduled
from tests.engine.world import Runner, later, lead, make_dag, put, run_state, set_clock, start, states, value
from tests.waiting import eventually

DAY = 86_400.0
RETRIED = RetryPolicy(retries=3, delay_seconds=0)
OF_A_RUN = ("run", "run_status", "task", "attempt", "result", "log_chunk")
ALL = Pace(batch=1000)


@pytest.fixture
async def other(database: str) -> AsyncIterator[AsyncConnection]:
    """A second connection to the same database."""
    async with await connect(database, purpose=Purpose.SCHEDULER) as connection:
        yield connection


async def at(conn: AsyncConnection, days: float) -> datetime:
    instant = later(days * DAY)
    await set_clock(conn, instant)
    return instant


async def finished(conn: AsyncConnection, dag: str = "past", *, days: float = 0, key: str | None = None) -> int:
    """A run that ended on that day, with an attempt that was retried, results and logs."""
    await at(conn, days)
    run = await start(conn, dag, key=key)
    runner = await Runner.join(conn)
    (claim,) = await runner.claim(1)
    await runner.finish(claim, "failed", retry_in=0)
    for _ in range(2):
        (claim,) = await runner.claim(1)
        await runner.finish(claim, "success", result=1, log="x", seq=0, until=1)
    assert await run_state(conn, run) == "success"
    return run


async def rows_of(conn: AsyncConnection, run: int) -> dict[str, object]:
    counts = {table: await value(conn, f"select count(*) from {table} where run_id = %s", run) for table in OF_A_RUN}
    return {table: count for table, count in counts.items() if count}


async def mandate(conn: AsyncConnection, epoch: int, *, days: float) -> PruneGrant:
    """To prune what is older than that day. It is day 100 now."""
    await at(conn, 100)
    return PruneGrant(shard=0, epoch=epoch, before=later(days * DAY), actor=Actor("test"))


async def prune_all(conn: AsyncConnection, given: PruneGrant, *, pace: Pace = ALL, is_alone: bool = True) -> int:
    """One walk from the beginning to its end, and nothing left behind; returns how many went."""
    count, after, is_end = 0, 0, False
    while not is_end:
        done = await prune_runs(conn, given, after=after, pace=pace, now=later(100 * DAY))
        assert done.refused == () and done.pruned <= pace.batch
        count, after, is_end = count + done.pruned, done.last, done.is_end
    await sweep_all(conn, given, pace=pace, is_alone=is_alone)
    return count


async def sweep_all(
    conn: AsyncConnection,
    given: PruneGrant,
    kind: PendingCleanup = PendingCleanup.RUN,
    *,
    pace: Pace = ALL,
    is_alone: bool = True,
) -> int:
    rows, after, is_end = 0, 0, False
    while not is_end:
        done = await sweep(conn, given, kind, after=after, pace=pace)
        assert done.refused == () and done.rows <= pace.rows
        rows, after, is_end = rows + done.rows, done.last, done.is_end
    assert not is_alone or await value(conn, "select count(*) from pending_cleanup where kind = %s", kind.value) == 0
    return rows


@pytest.fixture
async def epoch(conn: AsyncConnection) -> int:
    await set_clock(conn, later(0))
    await put(conn, make_dag("past", {"a": [], "b": ["a"]}, task_retry=RETRIED))
    return await lead(conn)


# Runs ---------------------------------------------------------------------------------------------------------------


async def test_an_old_run_goes_with_everything_of_its_own_and_its_neighbours_stay(
    conn: AsyncConnection, epoch: int
) -> None:
    old, kept = [await finished(conn, days=day) for day in (0, 1)], await finished(conn, days=50)
    before = await rows_of(conn, kept)
    assert before == {"run": 1, "run_status": 1, "task": 2, "attempt": 1, "result": 2, "log_chunk": 2}
    assert [await rows_of(conn, run) for run in old] == [before, before]
    assert await prune_all(conn, await mandate(conn, epoch, days=10)) == 2
    assert [await rows_of(conn, run) for run in old] == [{}, {}]
    assert await rows_of(conn, kept) == before
    for run in old:
        assert await runs.find(conn, run) is None
        with pytest.raises(NotFound):
            await select_tasks(conn, run_id=run)


async def test_a_run_that_is_open_or_ended_late_stays_whatever_its_age(conn: AsyncConnection, epoch: int) -> None:
    await at(conn, 0)
    await put(conn, make_dag("slow", ONE, max_active_runs=1, task_queue="slow"))
    late, running, queued, canceled = [await start(conn, "slow") for _ in range(4)]
    await cancel(conn, run_id=canceled, actor=Actor("me"))
    await finished(conn, days=1)
    await at(conn, 20)
    runner = await Runner.join(conn)
    (claim,) = await runner.claim(1, queues=("slow",))
    await runner.finish(claim)
    assert [await run_state(conn, run) for run in (late, running, queued)] == ["success", "running", "queued"]
    assert await prune_all(conn, await mandate(conn, epoch, days=10)) == 2, "the canceled one and the finished one"
    assert [await run_state(conn, run) for run in (late, running, queued)] == ["success", "running", "queued"]
    assert await prune_all(conn, await mandate(conn, epoch, days=30)) == 1, "the next round finds what ended late"
    assert await runs.find(conn, late) is None
    assert [await run_state(conn, run) for run in (running, queued)] == ["running", "queued"]


async def test_a_run_that_somebody_has_locked_is_passed_over_without_waiting(
    conn: AsyncConnection, other: AsyncConnection, epoch: int
) -> None:
    locked, free = await finished(conn), await finished(conn)
    given = await mandate(conn, epoch, days=10)
    async with other.transaction():
        await other.execute("select from run_status where run_id = %s for no key update", [locked])
        await conn.execute("set lock_timeout = '100ms'")
        assert await prune_all(conn, given) == 1
    assert (await rows_of(conn, free), len(await rows_of(conn, locked))) == ({}, len(OF_A_RUN))
    assert await prune_all(conn, given) == 1


async def test_a_run_that_is_being_cleared_stays(conn: AsyncConnection, other: AsyncConnection, epoch: int) -> None:
    run = await finished(conn)
    given = await mandate(conn, epoch, days=10)
    async with other.transaction():
        await clear(other, run_id=run, chosen=await select_tasks(other, run_id=run), actor=Actor("me"))
        assert await prune_all(conn, given) == 0
    assert await run_state(conn, run) == "running"
    assert await prune_all(conn, given) == 0, "it is open now"
    assert await states(conn, run) == {"a": "available", "b": "waiting"}


async def test_a_run_that_was_cleared_after_the_walk_stays(conn: AsyncConnection, epoch: int) -> None:
    run = await finished(conn)
    given = await mandate(conn, epoch, days=10)
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run), actor=Actor("me"))
    assert (await _prune_runs(conn, given, [run])).pruned == 0
    await (await Runner.join(conn)).drain()
    assert (await _prune_runs(conn, given, [run])).pruned == 0, "it ended again, and lately"
    assert await run_state(conn, run) == "success"


async def test_an_open_run_stays_even_if_it_has_an_end(conn: AsyncConnection, epoch: int) -> None:
    await at(conn, 0)
    run = await start(conn, "past")
    await conn.execute("update run_status set finished_at = clock()")
    assert (await _prune_runs(conn, await mandate(conn, epoch, days=10), [run])).pruned == 0


async def test_clearing_or_marking_a_run_that_is_being_pruned_finds_none(
    conn: AsyncConnection, other: AsyncConnection, epoch: int
) -> None:
    run = await finished(conn)
    given = await mandate(conn, epoch, days=10)
    chosen = await select_tasks(other, run_id=run)
    async with asyncio.TaskGroup() as group:
        async with conn.transaction():
            assert (await _prune_runs(conn, given, [run])).pruned == 1
            clearing = group.create_task(_error_of(clear(other, run_id=run, chosen=chosen, actor=Actor("me"))))
            waiting = (
                "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
            )
            await eventually(lambda: value(conn, waiting))
    assert isinstance(clearing.result(), NotFound)
    assert isinstance(await _error_of(mark(other, TaskKey(run, 0, -1), state="failed", actor=Actor("me"))), Conflict)
    assert isinstance(await _error_of(cancel(other, run_id=run, actor=Actor("me"))), NotFound)
    assert await value(conn, "select count(*) from task where state = 'waiting'") == 0, "nothing was reopened"
    assert await value(conn, "select count(*) from audit_log where action in ('clear', 'mark', 'cancel')") == 0
    await sweep_all(conn, given)
    assert await rows_of(conn, run) == {}


async def _error_of(work: Awaitable[object]) -> Exception | None:
    try:
        await work
    except (NotFound, Conflict) as error:
        return error
    return None


async def test_two_pruners_at_once_delete_each_run_once(
    conn: AsyncConnection, other: AsyncConnection, epoch: int
) -> None:
    for _ in range(12):
        await finished(conn)
    given = await mandate(conn, epoch, days=10)
    await at(other, 100)
    pace = Pace(batch=3)
    both = [prune_all(each, given, pace=pace, is_alone=False) for each in (conn, other)]
    counts = await asyncio.gather(*both)
    assert await prune_all(conn, given) + sum(counts) == 12
    assert [await value(conn, f"select count(*) from {table}") for table in OF_A_RUN] == [0] * len(OF_A_RUN)


async def test_batches_are_as_small_as_they_are_asked_to_be(conn: AsyncConnection, epoch: int) -> None:
    seen = [await finished(conn) for _ in range(5)]
    given = await mandate(conn, epoch, days=10)
    first = await prune_runs(conn, given, after=0, pace=Pace(batch=2), now=later(100 * DAY))
    assert (first.pruned, first.last, first.is_end) == (2, seen[1], False)
    assert await prune_all(conn, given, pace=Pace(batch=1)) == 3


async def test_a_large_run_is_gone_at_once_and_its_rows_slice_by_slice(conn: AsyncConnection, epoch: int) -> None:
    wide = {f"t{number}": () for number in range(40)}
    await put(conn, make_dag("wide", wide))
    run = await start(conn, "wide")
    await (await Runner.join(conn)).drain()
    given = await mandate(conn, epoch, days=10)
    assert (await prune_runs(conn, given, after=0, pace=Pace(batch=1), now=later(100 * DAY))).pruned == 1
    assert await runs.find(conn, run) is None
    small = Pace(batch=1)
    done = await sweep(conn, given, PendingCleanup.RUN, after=0, pace=small)
    assert (done.rows, done.is_end) == (small.rows, False)
    assert await rows_of(conn, run) == {"task": 40 - small.rows}
    assert await sweep_all(conn, given, pace=small) == 40 - small.rows


async def test_only_the_requested_kind_of_pending_cleanup_is_deleted(conn: AsyncConnection, epoch: int) -> None:
    seen = [await finished(conn) for _ in range(3)]
    given = await mandate(conn, epoch, days=10)
    await prune_runs(conn, given, after=0, pace=ALL, now=later(100 * DAY))
    await conn.execute("insert into pending_cleanup values (0, 'version', %s)", [seen[1]])
    await delete_pending_cleanup(conn, given, kind=PendingCleanup.RUN, ids=[seen[1]], limit=1000)
    assert [len(await rows_of(conn, run)) > 0 for run in seen] == [True, False, True]
    left = await (await conn.execute("select kind, id from pending_cleanup order by 1, 2")).fetchall()
    assert left == [("run", seen[0]), ("run", seen[2]), ("version", seen[1])]


async def test_an_object_that_is_not_pending_cleanup_by_its_kind_is_kept(conn: AsyncConnection, epoch: int) -> None:
    run, version = await finished(conn), await put(conn, make_dag("dag", ONE))
    other_version = await put(conn, make_dag("dag", {"b": []}))
    given = await mandate(conn, epoch, days=10)
    await conn.execute("insert into pending_cleanup values (0, 'version', %s), (0, 'run', %s)", [run, version])
    await delete_pending_cleanup(conn, given, kind=PendingCleanup.RUN, ids=[run], limit=1000)
    await delete_pending_cleanup(conn, given, kind=PendingCleanup.VERSION, ids=[version, other_version], limit=1000)
    assert len(await rows_of(conn, run)) == len(OF_A_RUN)
    specs = "select count(*) from task_spec where version_id = any(%s)"
    assert await value(conn, specs, [version, other_version]) == 2
    await conn.execute("truncate pending_cleanup")
    await conn.execute(
        "insert into pending_cleanup values (0, 'version', %s), (0, 'version', %s), (0, 'run', %s)",
        [version, other_version, version],
    )
    await delete_pending_cleanup(conn, given, kind=PendingCleanup.VERSION, ids=[version], limit=1000)
    assert await value(conn, specs, [version, other_version]) == 1
    left = await (await conn.execute("select kind, id from pending_cleanup order by 1, 2")).fetchall()
    assert left == [("run", version), ("version", other_version)]


async def test_an_object_is_pending_cleanup_once_and_by_its_kind(conn: AsyncConnection) -> None:
    await conn.execute("insert into pending_cleanup values (0, 'run', 1), (0, 'version', 1)")
    with pytest.raises(psycopg.errors.UniqueViolation):
        await conn.execute("insert into pending_cleanup values (0, 'run', 1)")
    with pytest.raises(psycopg.errors.CheckViolation):
        await conn.execute("insert into pending_cleanup values (0, 'dag', 1)")


async def test_a_crash_between_batches_leaves_nothing_that_the_next_round_does_not_find(
    conn: AsyncConnection, other: AsyncConnection, epoch: int
) -> None:
    seen = [await finished(conn) for _ in range(3)]
    given = await mandate(conn, epoch, days=10)
    await prune_runs(conn, given, after=0, pace=ALL, now=later(100 * DAY))
    await sweep(conn, given, PendingCleanup.RUN, after=0, pace=Pace(batch=1))
    left = [len(await rows_of(conn, run)) for run in seen]
    assert any(left)
    # The process is gone. Another one leads, and knows nothing but the database.
    fresh = await mandate(other, await lead(other), days=10)
    assert await prune_all(other, fresh) == 0
    assert [await rows_of(conn, run) for run in seen] == [{}, {}, {}]


async def test_a_run_that_cannot_be_deleted_holds_up_no_other(conn: AsyncConnection, epoch: int) -> None:
    seen = [await finished(conn) for _ in range(5)]
    await conn.execute(
        "create function refuse() returns trigger language plpgsql as $$ begin"
        f" if old.run_id = {seen[2]} then raise exception 'no'; end if; return old; end $$"
    )
    for table in ("run", "task"):
        await conn.execute(f"create trigger refuses before delete on {table} for each row execute function refuse()")
    given = await mandate(conn, epoch, days=10)
    done = await prune_runs(conn, given, after=0, pace=ALL, now=later(100 * DAY))
    assert (done.pruned, done.refused) == (4, (seen[2],))
    assert await rows_of(conn, seen[2])
    await conn.execute("drop trigger refuses on run")
    assert (await prune_runs(conn, given, after=0, pace=ALL, now=later(100 * DAY))).pruned == 1
    swept = await sweep(conn, given, PendingCleanup.RUN, after=0, pace=ALL)
    assert swept.refused == (seen[2],)
    assert [len(await rows_of(conn, run)) > 0 for run in seen] == [False, False, True, False, False]
    assert (await sweep(conn, given, PendingCleanup.RUN, after=swept.last, pace=ALL)).is_end, "it goes on past it"


async def test_late_lines_of_a_pruned_run_are_not_kept(conn: AsyncConnection, epoch: int) -> None:
    run, kept = await finished(conn), await finished(conn, days=50)
    assert await prune_all(conn, await mandate(conn, epoch, days=10)) == 1
    late = [NewChunk(TaskKey(each, 0, -1), 9, 100, 120, "late") for each in (run, kept)]
    await logs.append(conn, session=1, chunks=late)
    assert await rows_of(conn, run) == {}
    assert await value(conn, "select count(*) from log_chunk where content = 'late'") == 1


async def test_the_journal_has_one_entry_for_a_round_with_what_went(conn: AsyncConnection, epoch: int) -> None:
    for _ in range(3):
        await finished(conn)
    given = await mandate(conn, epoch, days=10)
    first = await prune_runs(conn, given, after=0, pace=Pace(batch=2), now=later(100 * DAY))
    second = await prune_runs(conn, given.with_entry(first.entry), after=first.last, pace=ALL, now=later(100 * DAY))
    assert second.entry == first.entry is not None
    done = await prune_kind(conn, given.with_entry(first.entry), Kind.RUNNERS, pace=ALL)
    assert (done.pruned, done.entry) == (0, first.entry)
    rows = await (await conn.execute("select action, actor, detail from audit_log where detail ? 'runs'")).fetchall()
    assert [(verb, actor, detail["runs"]) for verb, actor, detail in rows] == [("prune", "test", 3)]
    assert datetime.fromisoformat(rows[0][2]["before"]) == given.before
    assert await value(conn, "select count(*) from audit_log") == 2, "the other is of publishing"


# Nothing happens twice, nobody else may -----------------------------------------------------------------------------


async def test_a_fire_whose_run_was_pruned_never_happens_again(conn: AsyncConnection) -> None:
    epoch, schedule = await scheduled(conn)
    same = plan(schedule, skipped=None)
    assert await fire_plan(conn, epoch, same) == 1
    await (await Runner.join(conn)).drain()
    given = PruneGrant(shard=0, epoch=epoch, before=await at(conn, 100), actor=Actor("test"))
    assert await prune_all(conn, given) == 1
    assert await fire_plan(conn, epoch, same) == 0, "the cursor has moved on"
    await set_clock(conn, later(125))
    assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).settled == 1
    assert await value(conn, "select array_agg(fire_at) from run") == [later(120)]


async def test_a_key_is_forgotten_with_its_run(conn: AsyncConnection, epoch: int) -> None:
    first = await finished(conn, key="once")
    assert await start(conn, "past", key="once") == first
    assert await prune_all(conn, await mandate(conn, epoch, days=10)) == 1
    assert await start(conn, "past", key="once") != first


Verb = Callable[[AsyncConnection, PruneGrant], Awaitable[object]]

VERBS: dict[str, Verb] = {
    "runs": lambda conn, given: prune_runs(conn, given, after=0, pace=ALL, now=later(100 * DAY)),
    "sweep_runs": lambda conn, given: sweep(conn, given, PendingCleanup.RUN, after=0, pace=ALL),
    "sweep_versions": lambda conn, given: sweep(conn, given, PendingCleanup.VERSION, after=0, pace=ALL),
    "journal": lambda conn, given: prune_journal(conn, given, after=0, pace=ALL, now=later(100 * DAY)),
    **{
        kind.value: lambda conn, given, kind=kind: prune_kind(conn, given, kind, pace=ALL)  # type: ignore[misc]
        for kind in Kind
        if kind not in (Kind.RUNS, Kind.JOURNAL)
    },
}
OF_SCHEDULES = ("skip_record", "alert", "backfill", "run_trigger")
EVERYTHING = (
    *OF_A_RUN,
    *OF_SCHEDULES,
    "outbox",
    "event",
    "asset_update",
    "state_entry",
    "deployment_version",
    "pending_cleanup",
    "audit_log",
    "runner",
    "dag_version",
    "task_spec",
    "edge",
    "bundle",
)


@pytest.mark.requirement("A4")
@pytest.mark.parametrize("verb", VERBS)
async def test_an_old_leader_prunes_nothing(conn: AsyncConnection, epoch: int, verb: str) -> None:
    given = await make_everything_old(conn, epoch)
    before = await counts(conn)
    await lead(conn)
    with pytest.raises(NotLeader):
        await VERBS[verb](conn, given)
    assert await counts(conn) == before


@pytest.mark.parametrize("verb", VERBS)
async def test_the_leader_prunes_each_of_them(conn: AsyncConnection, epoch: int, verb: str) -> None:
    given = await make_everything_old(conn, epoch)
    before = await counts(conn)
    await VERBS[verb](conn, given)
    assert await counts(conn) != before


# What each of them would delete, or must not wait for.
LOCKED = {
    "runs": "run_status",
    "sweep_runs": "pending_cleanup",
    "sweep_versions": "pending_cleanup",
    "journal": "audit_log",
    "skip_records": "skip_record",
    "alerts": "alert",
    "violations": "proof_violation",
    "notifications": "outbox",
    "backfills": "backfill",
    "causes": "run_trigger",
    "events": "event",
    "asset_updates": "asset_update",
    "state": "state_entry",
    "deployments": "deployment_version",
    "runners": "runner",
    "versions": "dag",
    "bundles": "bundle",
}


@pytest.mark.parametrize("verb", VERBS)
async def test_what_somebody_holds_is_passed_over_without_waiting(
    conn: AsyncConnection, other: AsyncConnection, epoch: int, verb: str
) -> None:
    given = await make_everything_old(conn, epoch)
    before = await counts(conn)
    async with other.transaction():
        await other.execute(f"select from {LOCKED[verb]} for update")
        await conn.execute("set lock_timeout = '100ms'")
        await VERBS[verb](conn, given)
        assert await counts(conn) == before
    await VERBS[verb](conn, given)
    assert await counts(conn) != before


async def make_everything_old(conn: AsyncConnection, epoch: int) -> PruneGrant:
    await finished(conn)
    await cancel(conn, run_id=await start(conn, "past"), actor=Actor("me"))
    await conn.execute("insert into skip_record select 1, clock(), clock(), 1, 'x', clock()")
    await put(conn, make_dag("scheduled", ONE, every="@every 3600s"))
    await put(conn, make_dag("scheduled", {"a": [], "b": ["a"]}, every="@every 3600s"))
    await conn.execute(
        "insert into alert (kind, schedule_id, due_at, last_due_at, raised_at, ended_at)"
        " values ('not_fired', 1, clock(), clock(), clock(), clock())"
    )
    await conn.execute(
        "insert into proof_violation (check_name, subject, detail, found_at, seen_at, ended_at)"
        " values ('two_owners', 'run 1', 'x', clock(), clock(), clock())"
    )
    await conn.execute(
        "insert into outbox (shard, sink, event, payload, created_at, waiting_since, due_at, state, ended_at)"
        " values (0, 'email:a@example.com', 'failure', '{}', clock(), clock(), clock(), 'sent', clock())"
    )
    await conn.execute(
        "insert into run_trigger select schedule_id, clock(), 'dag', 'a', 1, clock() from schedule limit 1"
    )
    await conn.execute(
        "insert into backfill (shard, dag_id, spec, params, first_at, last_at, reprocess, newest_first, parallel, request, state,"
        " total, created_by, created_at, finished_at) select 0, 1, '{}', '{}', clock(), clock(), 'none', false, 1, 'r', 'done', 1,"
        " 'me', clock(), clock()"
    )
    await send_event(conn, name="loaded", payload=None, actor=Actor("me"))
    await conn.execute("update event set is_delivered = true")
    await update_asset(conn, asset="orders", extra={}, actor=Actor("me"))
    await conn.execute("insert into state_entry values (0, 1, 'a', -1, 'k', '1', clock(), clock(), 'me', null)")
    await conn.execute("update runner set ended_at = clock()")
    await dags.put_bundle(conn, bundle_hash="unused", file="f.py", archive=b"", uses_threads=None)
    await deployed_twice(conn)
    await conn.execute("insert into pending_cleanup values (0, 'run', 777), (0, 'version', 777)")
    return await mandate(conn, epoch, days=10)


async def deployed_twice(conn: AsyncConnection) -> None:
    await conn.execute("insert into deployment (name, kind, version, created_at) values ('shop', 'upload', 2, clock())")
    await conn.execute(
        "insert into deployment_version (deployment, number, deployed_by, deployed_at)"
        " select 'shop', n, 'me', clock() from generate_series(1, 2) n"
    )
    await conn.execute("insert into deployment_dag select 'shop', n, 777 from generate_series(1, 2) n")


async def test_replaced_versions_of_a_deployment_go_with_their_dags_and_the_current_one_stays(
    conn: AsyncConnection, epoch: int
) -> None:
    await at(conn, 50)
    await deployed_twice(conn)
    given = await mandate(conn, epoch, days=10)
    assert (await prune_kind(conn, given, Kind.DEPLOYMENTS, pace=ALL)).pruned == 0, "they are young"
    await conn.execute("update deployment_version set deployed_at = %s", [later(0)])
    assert [(await prune_kind(conn, given, Kind.DEPLOYMENTS, pace=ALL)).pruned for _ in range(2)] == [1, 0]
    for table in ("deployment_version", "deployment_dag"):
        assert await value(conn, f"select array_agg(number) from {table}") == [2]


async def counts(conn: AsyncConnection) -> dict[str, object]:
    return {table: await value(conn, f"select count(*) from {table}") for table in EVERYTHING}


# The rest -----------------------------------------------------------------------------------------------------------


async def test_the_journal_is_walked_from_its_beginning_to_the_first_young_entry(
    conn: AsyncConnection, epoch: int
) -> None:
    await conn.execute("truncate audit_log")
    for day in (0, 1, 2, 50, 3, 51):
        await conn.execute(
            "insert into audit_log (occurred_at, action, actor, detail) values (%s, 'test', 'me', '{}')",
            [later(day * DAY)],
        )
    given = await mandate(conn, epoch, days=10)
    first = await prune_journal(conn, given, after=0, pace=Pace(batch=2), now=later(100 * DAY))
    assert (first.pruned, first.is_end) == (2, False)
    second = await prune_journal(conn, given.with_entry(first.entry), after=first.last, pace=ALL, now=later(100 * DAY))
    assert (second.pruned, second.is_end) == (1, True)
    left = "select array_agg(occurred_at order by entry_id) from audit_log where action = 'test'"
    young = await (
        await conn.execute("select entry_id from audit_log where occurred_at >= %s", [given.before])
    ).fetchall()
    assert (await prune_audit_log(conn, given, [row[0] for row in young])).pruned == 0
    assert await value(conn, left) == [later(50 * DAY), later(3 * DAY), later(51 * DAY)]


async def test_skip_records_go_when_they_were_recorded_long_ago(conn: AsyncConnection) -> None:
    epoch, schedule = await scheduled(conn)
    for first, last in ((0, 1), (2, 3), (4, 50), (60, 61)):
        await conn.execute(
            "insert into skip_record values (%s, %s, %s, 1, 'x', %s)",
            [schedule.schedule_id, later(first * DAY), later(last * DAY), later(last * DAY)],
        )
    given = await mandate(conn, epoch, days=10)
    assert (await prune_kind(conn, given, Kind.SKIP_RECORDS, pace=Pace(batch=1))).pruned == 1
    assert (await prune_kind(conn, given, Kind.SKIP_RECORDS, pace=ALL)).pruned == 1
    assert (await prune_kind(conn, given, Kind.SKIP_RECORDS, pace=ALL)).pruned == 0
    assert await value(conn, "select array_agg(first_at order by first_at) from skip_record") == [
        later(4 * DAY),
        later(60 * DAY),
    ]


async def test_runners_go_when_they_are_gone_for_long_and_hold_nothing(conn: AsyncConnection, epoch: int) -> None:
    await at(conn, 0)
    gone, holding, alive = [await Runner.join(conn) for _ in range(3)]
    await start(conn, "past")
    assert len(await holding.claim(1)) == 1
    sessions = [gone.session, holding.session]
    await conn.execute("update runner set ended_at = clock() where session = any(%s)", [sessions])
    await at(conn, 50)
    lately = await Runner.join(conn)
    await conn.execute("update runner set ended_at = clock() where session = %s", [lately.session])
    assert (await prune_kind(conn, await mandate(conn, epoch, days=10), Kind.RUNNERS, pace=ALL)).pruned == 1
    left = await value(conn, "select array_agg(session order by session) from runner")
    assert left == [holding.session, alive.session, lately.session]


async def test_causes_alerts_and_backfills_go_when_they_are_over_and_old(conn: AsyncConnection) -> None:
    epoch, schedule = await scheduled(conn)
    for day in (0, 50):
        await at(conn, day)
        await conn.execute(
            "insert into run_trigger values (%s, clock(), 'dag', 'a', 1, clock())", [schedule.schedule_id]
        )
        await conn.execute(
            "insert into alert (kind, schedule_id, due_at, last_due_at, raised_at, ended_at)"
            " values ('not_fired', 1, clock(), clock(), clock(), clock())"
        )
        await conn.execute(
            "insert into proof_violation (check_name, subject, detail, found_at, seen_at, ended_at)"
            " select 'two_owners', 'run 1', 'x', clock(), clock(), n from (values (clock()), (null)) v(n)"
            " where n is not null or not exists (select 1 from proof_violation x where x.ended_at is null)"
        )
        await conn.execute(
            "insert into backfill (shard, dag_id, spec, params, first_at, last_at, reprocess, newest_first, parallel, request,"
            " state, total, created_by, created_at, finished_at, open_runs) select 0, 1, '{}', '{}', clock(), clock(), 'none',"
            " false, 1, %s || ' ' || n, 'done', 1, 'me', clock(), clock(), n from generate_series(0, 1) n",
            [str(day)],
        )
    given = await mandate(conn, epoch, days=10)
    for kind in (Kind.CAUSES, Kind.ALERTS, Kind.VIOLATIONS, Kind.BACKFILLS):
        assert [(await prune_kind(conn, given, kind, pace=ALL)).pruned for _ in range(2)] == [1, 0]
    assert await value(conn, "select array_agg(fire_at) from run_trigger") == [later(50 * DAY)]
    assert await value(conn, "select array_agg(ended_at) from alert") == [later(50 * DAY)]
    assert await value(conn, "select array_agg(ended_at) from proof_violation") == [None, later(50 * DAY)]
    assert await value(conn, "select array_agg(request order by request) from backfill") == ["0 1", "50 0", "50 1"]


# Versions and code --------------------------------------------------------------------------------------------------


async def test_a_version_goes_with_its_tasks_when_it_is_replaced_and_no_run_has_it(
    conn: AsyncConnection, epoch: int
) -> None:
    await at(conn, 0)
    first = await put(conn, make_dag("dag", {"a": [], "b": ["a"]}, per_task={"b": {"inputs": ("a",)}}))
    second = await put(conn, make_dag("dag", {"a": [], "b": ["a"], "c": ["b"]}))
    run = await start(conn, "dag")
    third = await put(conn, make_dag("dag", ONE))
    await (await Runner.join(conn)).drain()
    given = await mandate(conn, epoch, days=10)
    assert (await prune_kind(conn, given, Kind.VERSIONS, pace=ALL)).pruned == 1
    rows = await sweep_all(conn, given, PendingCleanup.VERSION, pace=Pace(batch=1))
    assert rows == 4, "two tasks, an edge and an input"
    assert await versions(conn) == [second, third]
    for table in ("task_spec", "edge", "task_input"):
        assert await value(conn, f"select count(*) from {table} where version_id = %s", first) == 0
    assert await value(conn, "select count(*) from task_spec where version_id = %s", second) == 3
    assert len(await states(conn, run)) == 3, "a run keeps its version"
    assert await prune_all(conn, given) == 1
    assert (await prune_kind(conn, given, Kind.VERSIONS, pace=ALL)).pruned == 1
    assert await versions(conn) == [third], "the current one stays, with runs or without"


async def test_a_version_that_was_replaced_lately_stays(conn: AsyncConnection, epoch: int) -> None:
    first = await put(conn, make_dag("dag", ONE))
    await at(conn, 50)
    second = await put(conn, make_dag("dag", {"b": []}))
    assert (await prune_kind(conn, await mandate(conn, epoch, days=10), Kind.VERSIONS, pace=ALL)).pruned == 0
    assert await versions(conn) == [first, second]


async def test_a_version_that_was_brought_back_stays(conn: AsyncConnection, epoch: int) -> None:
    first = await put(conn, make_dag("dag", ONE))
    second = await put(conn, make_dag("dag", {"b": []}))
    assert await put(conn, make_dag("dag", ONE)) == first
    assert (await prune_kind(conn, await mandate(conn, epoch, days=10), Kind.VERSIONS, pace=ALL)).pruned == 1
    assert await versions(conn) == [first]
    assert await put(conn, make_dag("dag", {"b": []})) not in (first, second), "what is gone is published anew"


async def test_a_run_that_began_while_its_version_was_replaced_keeps_it(conn: AsyncConnection, epoch: int) -> None:
    first = await put(conn, make_dag("dag", ONE))
    await put(conn, make_dag("dag", {"b": []}))
    await conn.execute("update dag set version_id = %s where name = 'dag'", [first])
    racing = await start(conn, "dag")
    await conn.execute("update dag set version_id = %s where name = 'dag'", [first + 1])
    assert await value(conn, "select version_id from run where run_id = %s", racing) == first
    assert (await prune_kind(conn, await mandate(conn, epoch, days=10), Kind.VERSIONS, pace=ALL)).pruned == 0


async def test_a_version_to_which_a_run_was_moved_stays(conn: AsyncConnection, epoch: int) -> None:
    first = await put(conn, make_dag("dag", ONE))
    second = await put(conn, make_dag("dag", {"b": []}))
    await conn.execute("insert into run_version_override values (777, %s)", [first])
    given = await mandate(conn, epoch, days=10)
    assert (await prune_kind(conn, given, Kind.VERSIONS, pace=ALL)).pruned == 0
    assert await versions(conn) == [first, second]
    await conn.execute("delete from run_version_override")
    assert (await prune_kind(conn, given, Kind.VERSIONS, pace=ALL)).pruned == 1


async def test_young_notifications_young_events_and_events_that_nobody_heard_stay(
    conn: AsyncConnection, epoch: int
) -> None:
    for days in (0, 50):
        await at(conn, days)
        await conn.execute(
            "insert into outbox (shard, sink, event, payload, created_at, waiting_since, due_at, state, ended_at)"
            " values (0, 'email:a@example.com', 'failure', '{}', clock(), clock(), clock(), 'sent', clock())"
        )
        for name in ("heard", "new"):
            await send_event(conn, name=f"{name} on day {days}", payload=None, actor=Actor("me"))
        await update_asset(conn, asset=f"of day {days}", extra={}, actor=Actor("me"))
    await conn.execute("update event set is_delivered = true where name ~ 'heard'")
    given = await mandate(conn, epoch, days=10)
    assert (await prune_kind(conn, given, Kind.NOTIFICATIONS, pace=ALL)).pruned == 1
    assert (await prune_kind(conn, given, Kind.EVENTS, pace=ALL)).pruned == 1
    assert await value(conn, "select ended_at = %s from outbox", later(50 * DAY))
    left = await value(conn, "select array_agg(name order by event_id) from event")
    assert left == ["new on day 0", "heard on day 50", "new on day 50"]
    assert (await prune_kind(conn, given, Kind.ASSET_UPDATES, pace=ALL)).pruned == 1
    assert await value(conn, "select array_agg(asset) from asset_update") == ["of day 50"]


async def test_the_current_version_stays_whatever_is_noted_about_it(conn: AsyncConnection, epoch: int) -> None:
    version = await put(conn, make_dag("dag", ONE))
    await conn.execute("update dag_version set retired_at = clock(), final_run_id = 0")
    await prune_kind(conn, await mandate(conn, epoch, days=10), Kind.VERSIONS, pace=ALL)
    assert await versions(conn) == [version]


async def test_a_dag_that_is_being_published_is_passed_over(
    conn: AsyncConnection, other: AsyncConnection, epoch: int
) -> None:
    first = await put(conn, make_dag("dag", ONE))
    await put(conn, make_dag("dag", {"b": []}))
    given = await mandate(conn, epoch, days=10)
    async with other.transaction():
        assert await put(other, make_dag("dag", ONE)) == first
        assert (await prune_kind(conn, given, Kind.VERSIONS, pace=ALL)).pruned == 0
    assert await value(conn, "select version_id from dag where name = 'dag'") == first
    assert first in await versions(conn)


async def test_code_goes_when_no_version_has_it_and_nobody_is_about_to_use_it(
    conn: AsyncConnection, epoch: int
) -> None:
    await at(conn, 0)
    for name in ("unused", "again"):
        await dags.put_bundle(conn, bundle_hash=name, file="f.py", archive=b"", uses_threads=None)
    await at(conn, 99)
    for name in ("again", "new"):
        await dags.put_bundle(conn, bundle_hash=name, file="f.py", archive=b"", uses_threads=None)
    assert (await prune_kind(conn, await mandate(conn, epoch, days=10), Kind.BUNDLES, pace=ALL)).pruned == 1
    assert await value(conn, "select array_agg(hash order by hash) from bundle") == ["again", "b", "new"]


async def versions(conn: AsyncConnection) -> list[int]:
    rows = await conn.execute(
        "select v.version_id from dag_version v join dag d on d.dag_id = v.dag_id where d.name = 'dag' order by 1"
    )
    return [row[0] for row in await rows.fetchall()]
