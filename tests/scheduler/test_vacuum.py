"""Upkeep: dead rows are cleared away, old runs go by themselves, and whoever stands in the way is named."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.config import read_settings
from evertick.db.connect import Purpose, connect
from evertick.db.queries import shards
from evertick.db.queries.server import dead_rows, is_behind, sizes, snapshot_holders, vacuum
from evertick.domain.access import Actor
from evertick.domain.errors import InvalidSettings
from evertick.engine.runs import delete_run
from evertick.observability import metrics
from evertick.observability.health import ServiceHealth, track, value_of
from evertick.runtime.connections import ReconnectingConnection
from evertick.scheduler import retention
from evertick.scheduler import vacuum as scheduler_vacuum
from evertick.scheduler.retention import PruneRound, Retention, limits_of, old_run_ids
from evertick.scheduler.scheduler import Scheduler
from evertick.scheduler.vacuum import MANY_DEAD_ROWS, QUICK_TABLES, SnapshotMonitor, TableVacuum
from tests.engine.world import Runner, lead, make_dag, put, run_state, start, value
from tests.system.hosting import Said, hosted, quick
from tests.waiting import eventually

LEADING = 1


@pytest.fixture
async def link(database: str) -> AsyncIterator[ReconnectingConnection]:
    opened = ReconnectingConnection(database, Purpose.SCHEDULER)
    yield opened
    await opened.close()


# Vacuum -------------------------------------------------------------------------------------------------------------


async def make_dead(conn: AsyncConnection, count: int, *, tables: tuple[str, ...] = ("ready_task",)) -> None:
    for table in tables:
        await conn.execute(INSERT[table], [count])
        await conn.execute(f"delete from {table}")
    await conn.execute("select pg_stat_force_next_flush()")
    await conn.execute("select 1")


INSERT = {
    "ready_task": "insert into ready_task (queue, rank, run_id, idx, map_index)"
    " select 'q', 0, n, 0, -1 from generate_series(1, %s) n",
    "lease": "insert into lease select 1, n, 0, -1, 1 from generate_series(1, %s) n",
    "task_timer": "insert into task_timer select 0, clock(), n, 0, -1 from generate_series(1, %s) n",
    "retry_queue": "insert into retry_queue select 0, 'q', clock(), n, 0, -1 from generate_series(1, %s) n",
    "retry_slot": "insert into retry_slot select 0, 'q', n, 0, -1, 1 from generate_series(1, %s) n",
    "schedule_state": """
        with d as (insert into dag (name, file) values (gen_random_uuid()::text, 'd.py') returning dag_id),
        s as (
            insert into schedule (dag_id, name, version, spec, params, misfire, window_seconds, changed_by, changed_at)
            select d.dag_id, n::text, 1, '{}', '{}', 'latest', 0, 'me', clock() from d, generate_series(1, %s) n
            returning schedule_id
        )
        insert into schedule_state (schedule_id, shard, version) select s.schedule_id, 0, 1 from s""",
    "pending_cleanup": "insert into pending_cleanup select 0, 'run', n from generate_series(1, %s) n",
}


async def vacuums(conn: AsyncConnection, table: str = "ready_task") -> object:
    return await value(conn, "select vacuum_count from pg_stat_user_tables where relname = %s", table)


async def test_dead_rows_of_every_quick_table_are_vacuumed(conn: AsyncConnection, link: ReconnectingConnection) -> None:
    await make_dead(conn, MANY_DEAD_ROWS, tables=QUICK_TABLES)
    assert min((await dead_rows(conn, QUICK_TABLES)).values()) >= MANY_DEAD_ROWS
    await TableVacuum(link=link, epoch=lambda: LEADING).tick()
    assert await dead_rows(conn, QUICK_TABLES) == dict.fromkeys(QUICK_TABLES, 0)


async def test_nothing_is_vacuumed_while_little_is_dead_or_somebody_else_leads(
    conn: AsyncConnection, link: ReconnectingConnection
) -> None:
    await make_dead(conn, MANY_DEAD_ROWS // 2)
    await TableVacuum(link=link, epoch=lambda: LEADING).tick()
    await make_dead(conn, MANY_DEAD_ROWS)
    await TableVacuum(link=link, epoch=lambda: None).tick()
    assert await vacuums(conn) == 0
    assert link.reconnects == 0, "who does not lead asks nothing, either"


async def test_what_a_snapshot_keeps_is_not_vacuumed_again_and_again(
    database: str, conn: AsyncConnection, link: ReconnectingConnection
) -> None:
    vacuuming = TableVacuum(link=link, epoch=lambda: LEADING)
    await conn.execute(INSERT["ready_task"], [MANY_DEAD_ROWS])
    async with await AsyncConnection.connect(database) as reader:
        await reader.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        await reader.execute("select 1")
        await make_dead(conn, MANY_DEAD_ROWS)
        for _ in range(3):
            await vacuuming.tick()
        assert await vacuums(conn) == 1, "it could not clear them away, and nothing has happened since"
        assert (await dead_rows(conn, ["ready_task"]))["ready_task"] >= MANY_DEAD_ROWS
        await make_dead(conn, 3 * MANY_DEAD_ROWS)
        await vacuuming.tick()
        assert await vacuums(conn) == 2
    await make_dead(conn, 6 * MANY_DEAD_ROWS)
    await vacuuming.tick()
    assert await dead_rows(conn, ["ready_task"]) == {"ready_task": 0}


async def test_every_kind_of_server_can_be_asked_and_vacuumed(any_postgres: str) -> None:
    async with await connect(any_postgres, purpose=Purpose.SCHEDULER) as conn:
        await make_dead(conn, 10, tables=QUICK_TABLES)
        await vacuum(conn, QUICK_TABLES)
        assert await dead_rows(conn, QUICK_TABLES) == dict.fromkeys(QUICK_TABLES, 0)
        assert await snapshot_holders(conn) == []
        assert "task" in {table.name for table in await sizes(conn)}
        epoch = await lead(conn)
        round_ = PruneRound(limits_of(await shards.read_clock(conn), timedelta(days=90)), actor=Actor("me"))
        while not round_.is_over:
            await round_.step(conn, epoch=epoch)


async def test_vacuum_waits_for_nobody(database: str, conn: AsyncConnection) -> None:
    async with await AsyncConnection.connect(database, options="-c search_path=evertick") as holder:
        await holder.execute("lock table ready_task in share update exclusive mode")
        await conn.execute("set lock_timeout = '100ms'")
        await vacuum(conn, ["ready_task", "lease"])
    assert (await vacuums(conn, "ready_task"), await vacuums(conn, "lease")) == (0, 1)


# Snapshots ----------------------------------------------------------------------------------------------------------


async def test_an_old_snapshot_is_told_with_its_owner_and_seen_in_the_health(
    database: str, conn: AsyncConnection, link: ReconnectingConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said()
    snapshots = SnapshotMonitor(link=link, epoch=lambda: LEADING, log=said.log)
    assert await snapshots.tick() > 0
    assert (said.all, value_of(metrics.OLDEST_SNAPSHOT), snapshots.pulse.blocked) == ([], 0.0, None)
    with track(snapshots.pulse):
        async with await AsyncConnection.connect(database, application_name="report") as reader:
            await reader.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
            await reader.execute("select 1")
            await snapshots.tick()
            assert said.all == [], "it is not old yet"
            assert value_of(metrics.OLDEST_SNAPSHOT) > 0
            monkeypatch.setattr(scheduler_vacuum, "OLD_SNAPSHOT_SECONDS", 0.0)
            for _ in range(2):
                await snapshots.tick()
            (told,) = said.events("snapshot_too_old")
            assert (told["kind"], told["name"], told["pid"]) == ("session", "report", reader.info.backend_pid)
            warning = ServiceHealth("scheduler", owner="x").document()["loops"]["snapshots"]["warning"]  # type: ignore[index]
            assert f"session report (pid {reader.info.backend_pid})" in warning
        await eventually(lambda: _is_gone(conn))
        await snapshots.tick()
        assert (snapshots.pulse.blocked, value_of(metrics.OLDEST_SNAPSHOT)) == (None, 0.0)


async def _is_gone(conn: AsyncConnection) -> bool:
    return not await snapshot_holders(conn)


async def test_a_transaction_that_has_written_counts_without_a_snapshot(database: str, conn: AsyncConnection) -> None:
    async with await AsyncConnection.connect(database, application_name="writer") as writer:
        await writer.execute("create table evertick.scratch ()")
        (holder,) = await snapshot_holders(conn)
        assert (holder.kind, holder.name) == ("session", "writer")
        assert holder.held_seconds is not None
    await eventually(lambda: _is_gone(conn))


async def test_a_standby_reports_no_snapshots(
    database: str, link: ReconnectingConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_vacuum, "OLD_SNAPSHOT_SECONDS", 0.0)
    said, leading = Said(), [LEADING]
    snapshots = SnapshotMonitor(link=link, epoch=lambda: leading[0] or None, log=said.log)
    async with await AsyncConnection.connect(database) as reader:
        await reader.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        await reader.execute("select 1")
        await snapshots.tick()
        assert snapshots.pulse.blocked
        leading[0] = 0
        await snapshots.tick()
    assert (snapshots.pulse.blocked, value_of(metrics.OLDEST_SNAPSHOT)) == (None, 0.0)


# Pruning ------------------------------------------------------------------------------------------------------------


async def finished(conn: AsyncConnection, count: int, *, age: timedelta) -> list[int]:
    """Runs that are over, and began and ended that long ago."""
    await put(conn, make_dag("d", {"a": []}))
    seen = [await start(conn, "d") for _ in range(count)]
    await (await Runner.join(conn)).drain()
    for table, column in (("run", "created_at"), ("run_status", "finished_at")):
        await conn.execute(f"update {table} set {column} = {column} - %s where run_id = any(%s)", [age, seen])
    return seen


async def test_the_leader_prunes_by_itself_and_says_what_went(
    database: str, conn: AsyncConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FIRST_SECONDS", 0.0)
    await finished(conn, 120, age=timedelta(days=3))
    kept = await finished(conn, 2, age=timedelta(0))
    counted = metrics.PRUNED.labels(kind="runs")
    before, said = value_of(counted), Said()
    settings = quick(database, tmp_path, retention_days=1)
    async with hosted(Scheduler(settings, url=database, owner="one", log=said.log)):
        told = await said.saw("history_pruned", within_seconds=60)
    assert (told["runs"], value_of(counted) - before) == (120, 120)
    assert await value(conn, "select array_agg(run_id order by run_id) from run") == kept
    assert await value(conn, "select count(*) from task") == 2
    assert await value(conn, "select detail->>'runs' from audit_log where action = 'prune'") == "120"


async def test_with_a_retention_of_nothing_everything_is_kept_but_what_somebody_deletes(
    database: str, conn: AsyncConnection, link: ReconnectingConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FIRST_SECONDS", 0.0)
    kept, deleted = await finished(conn, 2, age=timedelta(days=30_000))
    await delete_run(conn, run_id=deleted, actor=Actor("me"))
    settings, epoch = quick(database, tmp_path, retention_days=0), await lead(conn)
    rounds = Retention(settings, link=link, epoch=lambda: epoch, log=Said().log)
    for _ in range(5):
        await rounds.tick()
    assert await value(conn, "select array_agg(distinct run_id) from task") == [kept]
    assert await value(conn, "select count(*) from pending_cleanup") == 0


@pytest.mark.parametrize("days", ["-1", "36501", "inf", "nan"])
def test_a_retention_that_cannot_be_is_refused(days: str) -> None:
    with pytest.raises(InvalidSettings, match="EVERTICK_RETENTION_DAYS"):
        read_settings({"EVERTICK_RETENTION_DAYS": days})


async def test_rounds_are_an_hour_apart_and_begin_anew_with_a_new_leader(
    database: str, conn: AsyncConnection, link: ReconnectingConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FIRST_SECONDS", 0.0)
    epoch: list[int | None] = [await lead(conn)]
    rounds = Retention(quick(database, tmp_path), link=link, epoch=lambda: epoch[0], log=Said().log)

    async def one_round() -> int:
        """How many ticks until nothing more is asked of the database."""
        ticks, asked = 0, -1
        while asked != (asked := int(str(await value(conn, STATEMENTS)))):
            await rounds.tick()
            ticks += 1
        return ticks

    assert await one_round() < 20, "a round over nothing is a handful of statements"
    await finished(conn, 1, age=timedelta(days=100))
    assert await one_round() == 1
    assert await value(conn, "select count(*) from run") == 1, "it is not an hour later"
    epoch[0] = None
    await rounds.tick()
    epoch[0] = await lead(conn)
    await one_round()
    assert await value(conn, "select count(*) from run") == 0


# How far the journal of statements is: each statement of the link's session moves its query_start.
STATEMENTS = (
    "select coalesce(extract(epoch from max(query_start)) * 1e6, 0)::bigint from pg_stat_activity"
    " where datname = current_database() and pid <> pg_backend_pid() and application_name = 'evertick-scheduler'"
)


async def test_an_old_leaders_round_ends_without_a_word(
    database: str, conn: AsyncConnection, link: ReconnectingConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FIRST_SECONDS", 0.0)
    (run,) = await finished(conn, 1, age=timedelta(days=100))
    old, said = await lead(conn), Said()
    await lead(conn)
    rounds = Retention(quick(database, tmp_path), link=link, epoch=lambda: old, log=said.log)
    for _ in range(5):
        await rounds.tick()
    assert (said.all, await run_state(conn, run)) == ([], "success")


async def test_a_round_deletes_all_kinds_in_small_steps(database: str, conn: AsyncConnection) -> None:
    await finished(conn, 200, age=timedelta(days=100))
    await put(conn, make_dag("d", {"b": []}))
    for table, column in (("audit_log", "occurred_at"), ("dag_version", "retired_at"), ("runner", "ended_at")):
        await conn.execute(f"update {table} set {column} = clock() - interval '100 days'")
    await conn.execute("insert into bundle values ('x', 'f', '', null, clock() - interval '100 days')")
    epoch = await lead(conn)
    round_ = PruneRound(limits_of(await shards.read_clock(conn), timedelta(days=90)), actor=Actor("me"))
    steps = 0
    while not round_.is_over:
        before = round_.counts.copy()
        await round_.step(conn, epoch=epoch)
        assert (round_.counts - before).total() <= 500
        steps += 1
    assert {kind.value: count for kind, count in round_.counts.items()} == {
        "runs": 200,
        "journal": 2,
        "skip_records": 0,
        "alerts": 0,
        "violations": 0,
        "notifications": 0,
        "backfills": 0,
        "causes": 0,
        "events": 0,
        "asset_updates": 0,
        "state": 0,
        "runners": 1,
        "versions": 1,
        "bundles": 1,
        "deployments": 0,
    }
    assert steps > 8
    assert (
        await value(conn, "select count(*) from task") == await value(conn, "select count(*) from pending_cleanup") == 0
    )
    assert await value(conn, "select count(*) from task_spec") == 1


async def test_it_knows_when_others_wait_for_the_database(conn: AsyncConnection) -> None:
    assert not await is_behind(conn)
    await conn.execute(INSERT["schedule_state"], [1])
    await conn.execute("update schedule_state set next_due = clock() + interval '1 hour'")
    assert not await is_behind(conn)
    await conn.execute("update schedule_state set next_due = clock() - interval '2 seconds'")
    assert await is_behind(conn)
    await conn.execute("update schedule_state set is_paused = true")
    assert not await is_behind(conn)
    await conn.execute(INSERT["ready_task"], [2000])
    await conn.execute("select pg_stat_force_next_flush()")
    assert await is_behind(conn)
    await conn.execute("delete from ready_task")
    assert not await is_behind(conn), "whatever the statistics say by now, nobody is in line"


async def test_old_runs_are_found_by_halves(conn: AsyncConnection) -> None:
    now = await shards.read_clock(conn)
    assert len(await old_run_ids(conn, before=now)) == 0
    old = await finished(conn, 37, age=timedelta(days=100))
    young = await finished(conn, 20, age=timedelta(days=1))
    found = await old_run_ids(conn, before=now - timedelta(days=50))
    assert (found.start, found.stop) == (old[0], old[-1] + 1)
    assert len(await old_run_ids(conn, before=now)) == len(old) + len(young)
    assert len(await old_run_ids(conn, before=now - timedelta(days=500))) == 0
