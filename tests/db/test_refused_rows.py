"""What the tables of backfills, schedules, alerts and servers refuse: rows that make no sense, and rows that are there already."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection
from psycopg.errors import CheckViolation, ForeignKeyViolation, RestrictViolation, UniqueViolation

SOUND = {
    "first_at": "clock()",
    "last_at": "clock()",
    "reprocess": "'none'",
    "parallel": "1",
    "state": "'running'",
    "total": "1",
    "open_runs": "0",
    "finished_at": "null::timestamptz",
}


def backfill(**fields: str) -> str:
    """A backfill that makes sense, but for these fields."""
    row = {**SOUND, **fields}
    return (
        f"insert into backfill (shard, dag_id, spec, params, newest_first, request, created_by, created_at, {', '.join(row)})"
        f" select 0, 1, '{{}}', '{{}}', false, 'r', 'me', clock(), {', '.join(row.values())}"
    )


def alert(kind: str) -> str:
    return f"insert into alert (kind, schedule_id, due_at, last_due_at, raised_at) select '{kind}', 1, clock(), clock(), clock()"


NONSENSE = {
    "a way to repeat that there is not": backfill(reprocess="'some'"),
    "a limit that lets nothing run": backfill(parallel="0"),
    "a limit that is none": backfill(parallel="1001"),
    "a state that there is not": backfill(state="'asleep'"),
    "a backfill of nothing": backfill(total="0"),
    "less than no open runs": backfill(open_runs="-1"),
    "an end before the beginning": backfill(last_at="clock() - interval '1 second'"),
    "over without a time": backfill(state="'done'"),
    "a time while it goes on": backfill(finished_at="clock()"),
    "a change that there is not": "insert into schedule_version select 1, 1, 'wish', 'me', clock(), 'code', false, '{}'",
    "waiting for what nobody tells of": "insert into schedule_dependency values ('moon', 'full', 1)",
    "a deadline of nothing": "insert into deadline values (0, clock(), 1, 'pause')",
    "a task's deadline before it begins": "insert into task_deadline values (1, 0, 0)",
    "an alert of nothing": alert("bored"),
    "remains of nothing": "insert into pending_cleanup values (0, 'task', 1)",
    "word of nothing": "insert into dependency_event (kind, name, occurred_at) values ('dag', 'a', clock())",
    "hearing of nothing": "insert into dependency_state values (1, 'dag', 'a', null, clock())",
    "a cause that is none": "insert into run_trigger values (1, '2030-01-01', 'dag', 'a', null, clock())",
    "another walk over the logs": "insert into log_archive_cursor values (false, 1)",
}

TWICE = {
    "backfill": backfill(),
    "backfill_run": "insert into backfill_run values (1, 1, 1, 1, clock())",
    "schedule_version": "insert into schedule_version select 1, 1, 'put', 'me', clock(), 'code', false, '{}'",
    "schedule_dependency": "insert into schedule_dependency values ('dag', 'a', 1)",
    "dependency_state": "insert into dependency_state values (1, 'dag', 'a', 1, clock())",
    "run_trigger": "insert into run_trigger values (1, '2030-01-01', 'dag', 'a', 1, clock())",
    "deadline": "insert into deadline values (0, '2030-01-01', 1, 'start')",
    "task_deadline": "insert into task_deadline values (1, 0, 5)",
    "alert": alert("not_fired"),
    "pending_cleanup": "insert into pending_cleanup values (0, 'run', 1)",
    "pool_description": "insert into pool_description values ('p', 'what it is for')",
    "function_set": "insert into function_set (hash, release) values ('f00', '1.0')",
    "server_timeline": "insert into server_timeline values (1, 1, clock(), clock(), '0/0', false)",
}


@pytest.mark.parametrize("nonsense", NONSENSE)
async def test_a_row_that_makes_no_sense_is_refused(rollback_conn: AsyncConnection, nonsense: str) -> None:
    with pytest.raises(CheckViolation):
        await rollback_conn.execute(NONSENSE[nonsense])  # type: ignore[arg-type]


DAG = "insert into dag (dag_id, name, file) overriding system value values (1, 'a', 'a.py')"
SCHEDULE = (
    "insert into schedule (schedule_id, dag_id, name, version, spec, params, misfire, window_seconds, changed_by, changed_at)"
    " overriding system value values (1, 1, 's', 1, '{}', '{}', 'latest', 0, 'me', clock())"
)
ORPHANS = {
    "dag_version": "insert into dag_version (dag_id, number, hash, bundle_hash, spec, task_count, created_at)"
    " values (1, 1, 'h', 'b', '{}', 1, clock())",
    "schedule": SCHEDULE,
    "schedule_state": "insert into schedule_state (schedule_id, shard, version) values (1, 0, 1)",
    "schedule_version": TWICE["schedule_version"],
    "backfill": backfill(),
    "credential": "insert into credential (secret_hash, account_id, kind, name, created_by, created_at)"
    " values ('s', 1, 'token', 'n', 'x', clock())",
}


@pytest.mark.parametrize("table", ORPHANS)
async def test_a_row_without_its_parent_is_refused(rollback_conn: AsyncConnection, table: str) -> None:
    with pytest.raises(ForeignKeyViolation):
        await rollback_conn.execute(ORPHANS[table])  # type: ignore[arg-type]


@pytest.mark.parametrize("parent", ["dag", "schedule"])
async def test_a_parent_that_has_rows_stays(rollback_conn: AsyncConnection, parent: str) -> None:
    await rollback_conn.execute(DAG)
    await rollback_conn.execute(SCHEDULE)
    await rollback_conn.execute(ORPHANS["schedule_state"])  # type: ignore[arg-type]
    # PostgreSQL 18 calls it a RestrictViolation, those before a ForeignKeyViolation.
    with pytest.raises((ForeignKeyViolation, RestrictViolation)):
        await rollback_conn.execute(f"delete from {parent}")  # type: ignore[arg-type]


@pytest.mark.parametrize("table", TWICE)
async def test_a_row_that_is_there_is_refused(rollback_conn: AsyncConnection, table: str) -> None:
    await rollback_conn.execute(DAG)
    await rollback_conn.execute(SCHEDULE)
    await rollback_conn.execute(TWICE[table])  # type: ignore[arg-type]
    with pytest.raises(UniqueViolation):
        await rollback_conn.execute(TWICE[table])  # type: ignore[arg-type]
