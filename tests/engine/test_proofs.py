"""The proof: each kind of violation, planted by hand, is found with its subject, and a sound database has none."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import pytest
from psycopg import AsyncConnection
from psycopg.types.json import Jsonb

from evertick.db.queries import proofs
from evertick.domain.access import Actor
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.dags.waits import WaitKind, WaitSpec
from evertick.domain.proofs import GUARANTEES, Check, Violation
from evertick.domain.retry import RetryPolicy
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.gates import set_pool
from evertick.engine.proofs import positions_since, record_slice, resolved, round_of
from evertick.engine.runs import delete_run
from tests.engine.world import T0, Runner, later, lead, make_dag, put, set_clock, start, states, value

ACTOR = Actor("test", origin="here")


async def round_since(conn: AsyncConnection) -> tuple[list[Violation], dict[Check, int]]:
    found: list[Violation] = []
    checked: dict[Check, int] = {}
    async for each in round_of(conn, await positions_since(conn, T0 - timedelta(days=1))):
        found += each.found
        for check, count in each.checked.items():
            checked[check] = checked.get(check, 0) + count
    return found, checked


@pytest.fixture
async def busy(conn: AsyncConnection) -> dict[str, int]:
    """Runs with a task in every state, a schedule that fired and skipped, and ended runs. By name, the ids of the runs."""
    await set_clock(conn, T0)
    await lead(conn)
    await set_pool(conn, name="narrow", slots=1, actor=ACTOR)
    pool = GateSpec(kind=GateKind.POOL, name="narrow", weight=1)
    retried = RetryPolicy(retries=2)
    sensor = WaitSpec(kind=WaitKind.TIME, seconds=1e6)
    await put(conn, make_dag("diamond", {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}))
    await put(conn, make_dag("retried", {"a": []}, task_retry=retried))
    await put(conn, make_dag("pooled", {"a": [], "b": []}, task_gates=(pool,)))
    await put(conn, make_dag("deferred", {"a": []}, task_wait=sensor, task_kind="wait"))
    await put(conn, make_dag("ended", {"a": [], "b": ["a"]}))
    await put(conn, make_dag("timed", {"a": []}, every="@every 10s"))
    runner = await Runner.join(conn)
    ended = await start(conn, "ended")
    await runner.drain()
    epoch = int(str(await value(conn, "select epoch from shard where shard = 0")))
    for second in (10, 20, 65):
        await set_clock(conn, later(second))
        await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    await runner.drain()
    waiting = await start(conn, "retried")
    (claim,) = await runner.claim()
    await runner.step([(claim, "failed", {"retry_in": 3600})])
    diamond, pooled, deferred = (
        await start(conn, "diamond"),
        await start(conn, "pooled"),
        await start(conn, "deferred"),
    )
    first = next(each for each in await runner.claim(free=2) if each.run_id == diamond)
    await runner.step([(first, "success", {"result": 1})], free=1)
    await conn.execute(
        "insert into audit_log (occurred_at, action, actor, run_id, detail) values (clock(), 'trigger', 'a', %s, '{}')",
        [diamond],
    )
    await set_clock(conn, later(300))
    await conn.execute("update schedule_state set next_due = %s", [later(500)])
    await conn.execute("update schedule set deleted_at = null")
    await skip_until(conn, 500)
    return {"ended": ended, "retried": waiting, "diamond": diamond, "pooled": pooled, "deferred": deferred}


async def skip_until(conn: AsyncConnection, second: int) -> None:
    """As a leader that was away would: what it passed has a skip record."""
    await conn.execute(
        "insert into skip_record select schedule_id, %s, %s, 42, 'misfire_latest', clock() from schedule",
        [later(70), later(second - 10)],
    )


# The damage, and a part of the subject with which it is found. Run ids by the names of `busy`.
PLANTED: dict[Check, Sequence[tuple[str, str]]] = {
    Check.FIRE_UNANSWERED: [
        ("delete from run where schedule_id is not null and fire_at = '2030-01-01T00:00:20Z'", "schedule"),
        ("delete from skip_record where first_at = '2030-01-01T00:01:10Z'", "schedule"),
        (
            "update skip_record set first_at = '2030-01-01T00:01:00Z' where first_at = '2030-01-01T00:01:10Z'",
            "schedule",
        ),
    ],
    Check.TRIGGER_LOST: [("delete from run where run_id = {diamond}", "run {diamond}")],
    Check.EVENT_UNDELIVERED: [
        ("insert into event (name, payload, sent_at, sent_by) values ('e', '{{}}', '2029-12-31Z', 'a')", "event"),
        (
            "insert into dependency_event (kind, name, run_id, occurred_at) values ('dag', 'x', 1, '2029-12-31Z')",
            "event of dag x",
        ),
    ],
    Check.RUN_WITHOUT_CAUSE: [
        ("delete from task where run_id = {deferred}", "run {deferred}"),
        ("update run_status set failed_leaves = 7 where run_id = {diamond}", "run {diamond}"),
    ],
    Check.RUN_WITHOUT_STATUS: [("delete from run where run_id = {ended}", "run {ended}")],
    Check.RUN_COUNTED_WRONG: [("update run_status set extra_tasks = 1 where run_id = {ended}", "run {ended}")],
    Check.RUN_ENDED_EARLY: [
        ("update task set state = 'waiting' where run_id = {ended} and idx = 1", "run {ended} task 1")
    ],
    Check.RUN_RESULT_WRONG: [
        ("update task set state = 'failed' where run_id = {ended} and idx = 1", "run {ended}"),
        ("update run_status set state = 'failed' where run_id = {ended}", "run {ended}"),
    ],
    Check.RUNNING_WITHOUT_LEASE: [
        ("delete from lease where run_id = {diamond}", "run {diamond} task"),
        ("update lease set epoch = epoch + 1 where run_id = {diamond}", "run {diamond} task"),
    ],
    Check.QUEUED_WITHOUT_DISPATCH: [
        (
            "update task set state = 'queued', session = 1, epoch = 1, started_at = null where run_id = {deferred}",
            "run {deferred}",
        )
    ],
    Check.AVAILABLE_WITHOUT_PLACE: [
        ("delete from ready_task where run_id = {diamond}", "run {diamond} task"),
        (
            "insert into ready_task (queue, rank, run_id, idx, map_index)"
            " select queue, rank, run_id, idx, map_index from ready_task where run_id = {diamond}",
            "run {diamond} task",
        ),
    ],
    Check.PENDING_WITHOUT_TIMER: [("delete from task_timer where run_id = {retried}", "run {retried} task 0")],
    Check.PENDING_WITHOUT_CAUSE: [("delete from gate_waiter where run_id = {pooled}", "run {pooled} task 1")],
    Check.DEFERRED_WITHOUT_WAIT: [
        ("delete from deferral where run_id = {deferred}", "run {deferred} task 0"),
        ("update deferral set epoch = epoch + 1 where run_id = {deferred}", "run {deferred} task 0"),
    ],
    Check.RETRIES_OVER_BUDGET: [
        ("update task set attempt = 9 where run_id = {ended} and idx = 1", "run {ended} task 1")
    ],
    Check.ATTEMPT_ENDED_TWICE: [
        (
            "insert into attempt (run_id, idx, map_index, epoch, attempt, outcome, finished_at)"
            " select run_id, idx, map_index, epoch, 1, 'failed', clock() from task where run_id = {ended} and idx = 1",
            "run {ended} task 1",
        )
    ],
    Check.EPOCH_WENT_BACK: [
        (
            "update task set epoch = 0 where run_id = {ended} and idx = 1;"
            " insert into result values ({ended}, 1, -1, 1, '1') on conflict do nothing",
            "run {ended} task 1",
        ),
        (
            "insert into log_chunk (run_id, idx, map_index, epoch, seq, end_offset, content)"
            " values ({ended}, 1, -1, 99, 0, 1, 'x')",
            "run {ended} task 1",
        ),
    ],
    Check.LEASE_WITHOUT_TASK: [("insert into lease values (7, {ended}, 1, -1, 1)", "run {ended} task 1")],
    Check.TWO_OWNERS: [
        (
            "insert into lease select 7, run_id, idx, map_index, epoch from lease where run_id = {diamond}",
            "run {diamond}",
        )
    ],
    Check.READY_WITHOUT_TASK: [
        ("insert into ready_task (queue, rank, run_id, idx, map_index) values ('q', 0, {ended}, 1, -1)", "run {ended}")
    ],
    Check.TIMER_WITHOUT_TASK: [
        ("insert into task_timer values (0, '2029-12-31Z', {ended}, 1, -1)", "run {ended} task 1")
    ],
    Check.WAITER_WITHOUT_TASK: [("update gate_waiter set run_id = {ended}", "run {ended}")],
    Check.HOLDER_WITHOUT_TASK: [("update gate_holder set run_id = {ended}", "run {ended}")],
    Check.GATE_COUNTED_WRONG: [("update gate set used = used + 1 where name = 'narrow'", "pool narrow")],
    Check.GATE_OVER_SIZE: [("update gate set used = 5 where name = 'narrow'", "pool narrow")],
    Check.BACKFILL_COUNTED_WRONG: [
        (
            "insert into backfill (shard, dag_id, spec, params, first_at, last_at, reprocess, newest_first, parallel,"
            " request, state, total, created, succeeded, created_by, created_at) select 0, min(dag_id), '{{}}', '{{}}',"
            " clock(), clock(), 'none', false, 1, 'r', 'running', 1, 1, 2, 'a', clock() from dag",
            "backfill",
        )
    ],
}


@pytest.mark.requirement("V1", "V2", "V6", "V7")
async def test_every_planted_violation_is_found_and_a_sound_database_has_none(
    conn: AsyncConnection, busy: dict[str, int]
) -> None:
    found, checked = await round_since(conn)
    assert found == []
    assert checked.keys() == GUARANTEES.keys() == set(Check), "every guarantee was checked"
    assert checked[Check.FIRE_UNANSWERED] > 10 and checked[Check.RUN_COUNTED_WRONG] >= 3
    missed = []
    for check, damages in PLANTED.items():
        for damage, subject in damages:
            async with conn.transaction(force_rollback=True):
                for statement in damage.format(**busy).split(";"):
                    await conn.execute(statement)  # type: ignore[arg-type]
                seen, _ = await round_since(conn)
                if not any(each.check is check and each.subject.startswith(subject.format(**busy)) for each in seen):
                    missed.append((check, damage, seen))
    assert missed == []
    assert PLANTED.keys() == set(Check), "each check has a damage"


async def test_a_fire_whose_run_an_operator_deleted_is_no_violation(
    conn: AsyncConnection, busy: dict[str, int]
) -> None:
    fired = int(str(await value(conn, "select min(run_id) from run where schedule_id is not null")))
    await delete_run(conn, run_id=fired, actor=ACTOR)
    assert (await round_since(conn))[0] == []


async def test_violations_are_recorded_once_sent_and_end_when_they_no_longer_hold(
    conn: AsyncConnection, busy: dict[str, int]
) -> None:
    epoch = await lead(conn)
    await conn.execute("insert into default_notification_rule values ('failure', 'webhook:http://127.0.0.1:9', true)")
    before = await positions_since(conn, None)
    await conn.execute("update gate set used = 5 where name = 'narrow'")
    move = "update deferral set epoch = epoch + %s where run_id = %s"
    await conn.execute(move, [1, busy["deferred"]])
    new = []
    for _ in range(2):
        async for each in round_of(conn, await positions_since(conn, None)):
            new += await record_slice(conn, each, [], shard=0, epoch=epoch)
    names = ["deferred_without_wait", "gate_counted_wrong", "gate_over_size"]
    assert sorted(each.check_name for each in new) == names, "each only once"
    assert await value(conn, "select count(*) from outbox where event = 'violation'") == 3
    assert (await positions_since(conn, None)).fires > before.fires - timedelta(minutes=2)
    known = await proofs.found(conn, with_ended=False, limit=10)
    name = await value(conn, "select task from listed_task where run_id = %s and idx = 0", busy["deferred"])
    assert name and {each.task for each in known} == {None, name}
    assert await resolved(conn, known) == []
    await conn.execute("update gate set used = 1 where name = 'narrow'")
    await conn.execute(move, [-1, busy["deferred"]])
    ended = await resolved(conn, known)
    assert sorted(ended) == sorted(each.violation_id for each in known)
    async for each in round_of(conn, await positions_since(conn, None)):
        await record_slice(conn, each, ended, shard=0, epoch=epoch)
    assert await proofs.found(conn, with_ended=False, limit=10) == []
    assert len(await proofs.found(conn, with_ended=True, limit=10)) == 3
    runner = await Runner.join(conn)
    await start(conn, "ended")
    await runner.drain()
    before = {each.check_name: each.checked for each in await proofs.cursors(conn)}
    await set_clock(conn, later(400))
    async for each in round_of(conn, await positions_since(conn, None)):
        await record_slice(conn, each, [], shard=0, epoch=epoch)
    after = {each.check_name: each.checked for each in await proofs.cursors(conn)}
    grown = {Check.RUN_COUNTED_WRONG, Check.FIRE_UNANSWERED}
    assert all(after[check] > before.get(check, 0) for check in grown), "the next round begins where the first one did"
    assert await states(conn, busy["ended"]) == {"a": "success", "b": "success"}


async def test_a_lost_trigger_is_not_explained_by_a_retention_of_other_rows_or_of_older_runs(
    conn: AsyncConnection, busy: dict[str, int]
) -> None:
    await conn.execute("delete from run where run_id = %s", [busy["diamond"]])
    prune = "insert into audit_log (occurred_at, action, actor, detail) values (clock(), 'prune', 'a', %s)"

    async def lost() -> int:
        return sum(each.check is Check.TRIGGER_LOST for each in (await round_since(conn))[0])

    triggered_at = await value(
        conn, "select occurred_at from audit_log where run_id = %s and action = 'trigger'", busy["diamond"]
    )
    assert isinstance(triggered_at, datetime)
    for detail in (
        {"journal": 3, "before": (triggered_at + timedelta(seconds=9)).isoformat()},
        {"runs": 3, "before": (triggered_at - timedelta(seconds=9)).isoformat()},
    ):
        await set_clock(conn, later(400))
        await conn.execute(prune, [Jsonb(detail)])
        assert await lost() > 0, detail
    await conn.execute(prune, [Jsonb({"runs": 3, "before": (triggered_at + timedelta(seconds=9)).isoformat()})])
    assert await lost() == 0
