"""N30b and N34b: the past is made up for, and the past is deleted, while leaders die and the present goes on."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta

from evertick.db.connect import Purpose, connect
from evertick.db.queries import shards
from evertick.domain.access import Actor
from evertick.domain.schedules.preview import Reprocess
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine import backfills as engine_backfills
from evertick.engine.backfills import BackfillRequest
from tests.chaos.cluster import Shape
from tests.chaos.faults import database, network, planning, processes
from tests.chaos.scenario import Scenario
from tests.chaos.stage import Stage
from tests.waiting import elapse, eventually

PARALLEL = 4


async def backfills(stage: Stage) -> None:
    """N30b: two backfills, oldest and newest first. Each instant gets one run, and no more than allowed are open at once."""
    count = int(stage.scaled(1500, 60))
    await stage.begin_load(seconds=stage.scaled(120, 14), quick=4)
    async with await connect(stage.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
        last = await shards.read_clock(conn)
        for number in range(2):
            wish = BackfillRequest(
                dag=f"spike_{number}", first=last - timedelta(minutes=count), last=last - timedelta(seconds=1),
                spec=parse_schedule("@every 1m"), reprocess=Reprocess.ALL, newest_first=bool(number), parallel=PARALLEL,
            )  # fmt: skip
            await engine_backfills.create(conn, wish, request=f"backfill-{number}", actor=Actor("chaos"))
    deeds = (processes.kill_leader, planning.overlap, database.terminate_leader, network.drop_reply)
    for deed in deeds * int(stage.scaled(4, 1)):
        await deed(stage.nemesis)
        await elapse(stage.dice.uniform(0.2, 0.8))
    watch = stage.cluster.watch
    is_done = "select count(*) = 2 from backfill where state = 'done'"
    await eventually(lambda: watch.value(is_done), stage.scaled(600, 90), pause_seconds=0.1)
    rows = await watch.must(
        "select b.backfill_id, b.total, b.succeeded, count(r.run_id), count(distinct r.fire_at)"
        " from backfill b join backfill_run r using (backfill_id) group by b.backfill_id order by 1"
    )
    stage.note(f"total, succeeded, runs and instants of each: {[tuple(row[1:]) for row in rows]}")
    stage.expect(all(len(set(row[1:])) == 1 for row in rows), f"an instant has no run, or two: {rows}")
    moves = await watch.must(
        "select b.backfill_id, m.run_id, m.new_state in ('queued', 'running') from chaos_audit.run_move m"
        " join backfill_run b using (run_id) order by m.entry"
    )
    open_runs: dict[int, set[int]] = defaultdict(set)
    most = 0
    for backfill_id, run_id, is_open in moves:
        (open_runs[backfill_id].add if is_open else open_runs[backfill_id].discard)(run_id)
        most = max(most, len(open_runs[backfill_id]))
    stage.note(f"{most} open at once, of {PARALLEL}")
    stage.expect(0 < most <= PARALLEL, f"{most} runs of a backfill were open at once, {PARALLEL} are allowed")


# A hundred days ago, each with all that hangs on a run. Past the audit, which takes them for what was always there.
_OLD = """
with made as (
    insert into run (dag_id, version_id, kind, params, triggered_by, created_at)
    select dag_id, version_id, 'manual', '{}', 'long ago', clock() - interval '100 days'
    from dag, generate_series(1, %(count)s) where name = 'chain' returning run_id, dag_id, version_id
), ended as (
    insert into run_status (run_id, dag_id, version_id, state, open_tasks, started_at, finished_at)
    select run_id, dag_id, version_id, 'success', 0, clock() - interval '100 days', clock() - interval '100 days' from made
), told as (
    insert into chaos_audit.old_run select run_id from made
), tasks as (
    insert into task (run_id, idx, version_id, state, epoch, attempt, started_at, finished_at)
    select run_id, idx, version_id, 'success', 1, 1, clock() - interval '100 days', clock() - interval '100 days'
    from made, generate_series(0, 2) idx returning run_id, idx
), results as (
    insert into result (run_id, idx, map_index, epoch, value) select run_id, idx, -1, 1, '1' from all_tasks
)
insert into log_chunk (run_id, idx, map_index, epoch, seq, end_offset, is_late, content)
select run_id, idx, -1, 1, 0, 1000, false, repeat('x', 1000) from all_tasks
"""


async def remember(stage: Stage) -> None:
    """Before anything is started, so that the old runs are the first: ids rise with time."""
    await stage.publish()
    async with await connect(stage.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
        await conn.execute("set session_replication_role = replica")
        await conn.execute(_OLD, {"count": int(stage.scaled(20_000, 2_000))})


async def forget(stage: Stage) -> None:
    """N34b: retention deletes what is old while schedules fire and its leader dies in the middle; nothing young goes along."""
    watch = stage.cluster.watch
    await stage.begin_load(seconds=stage.scaled(180, 24), quick=6, steady=8, paces=(3, 5))

    async def has_begun() -> bool:
        return bool(await watch.value("select exists (select 1 from pending_cleanup)"))

    # A leader rests before its first round.
    await eventually(has_begun, 60, pause_seconds=0.02)
    await processes.kill_leader(stage.nemesis)
    await eventually(has_begun, 60, pause_seconds=0.02)
    await database.terminate_leader(stage.nemesis)
    tables = ("run", "run_status", "task", "result", "log_chunk")
    left = " union all ".join(
        f"select '{table}', count(*) from {table} join chaos_audit.old_run using (run_id)" for table in tables
    )

    async def is_gone() -> bool:
        return not any(count for _, count in await watch.rows(left) or [("unknown", 1)])

    try:
        await eventually(is_gone, stage.scaled(300, 60), pause_seconds=0.2)
    except AssertionError:
        stage.expect(False, f"what is old is still there: {await watch.rows(left)}")
    noted = await watch.value("select sum((detail->>'runs')::int) from audit_log where action = 'prune'")
    old = await watch.value("select count(*) from chaos_audit.old_run")
    stage.note(f"{noted} old runs deleted, on record")
    stage.expect(noted == old, f"{old} old runs are gone, and {noted} are on record")


SCENARIOS = (
    Scenario(
        name="N30b",
        title="backfills while leaders die and overlap",
        play=backfills,
        shape=lambda is_full: Shape(schedulers=2, runners=2),
        required=("J1", "J8", "J9"),
    ),
    Scenario(
        name="N34b",
        title="retention deletes while leaders die and schedules fire",
        play=forget,
        prepare=remember,
        shape=lambda is_full: Shape(schedulers=2, runners=1),
        required=("J2", "J3", "J6", "J13"),
    ),
)
