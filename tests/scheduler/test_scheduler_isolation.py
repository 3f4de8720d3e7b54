"""A scheduler in the test's own process with something broken beside it: fires stay on time, each failure stays its own.

What was caused is also counted: each test reads the metrics that tell an operator of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Counter
from psycopg import AsyncConnection

from evertick.db import failover
from evertick.db.connect import Purpose, connect
from evertick.db.connection import TimedConnection
from evertick.db.failover import guard_of
from evertick.db.queries import runners
from evertick.domain.errors import NotLeader
from evertick.engine.maintenance import fail_orphaned_run
from evertick.engine.shards import try_acquire_shard
from evertick.observability import metrics
from evertick.runtime import circuit_breaker
from evertick.scheduler import leadership as leadership_module
from evertick.scheduler import maintenance_jobs
from evertick.scheduler.leadership import Leadership
from tests.engine.poison import refuse
from tests.engine.world import Runner, make_dag, put, run_state, start, states, value
from tests.scheduler.test_scheduler import LATE_SECONDS, all_fired, make_scheduler, publish_every, retries
from tests.system.hosting import Said, hosted, quick
from tests.waiting import eventually

CHAIN: dict[str, list[str]] = {"a": [], "b": ["a"]}
# What hangs in a leader's own session is broken off after half of its lease.
SHORT: dict[str, Any] = {"leader_lease_seconds": 1.0}


class Counted:
    """How far counters went since the test began."""

    def __init__(self) -> None:
        self._before = self._all()

    def __getitem__(self, name: str) -> float:
        return self._all().get(name, 0.0) - self._before.get(name, 0.0)

    @staticmethod
    def _all() -> dict[str, float]:
        found = {}
        for family in metrics.REGISTRY.collect():
            for sample in family.samples:
                labels = ",".join(sample.labels.values())
                name = sample.name.removeprefix("evertick_").removesuffix("_total")
                found[f"{name}{{{labels}}}" if labels else name] = sample.value
        return found


@pytest.fixture
def counted() -> Counted:
    assert isinstance(metrics.AGENT_LOST, Counter)
    return Counted()


@asynccontextmanager
async def held(url: str, table: str) -> AsyncIterator[None]:
    """Somebody holds a whole table, as a careless migration or a full vacuum does."""
    async with await connect(url, purpose=Purpose.SCHEDULER) as holder:
        await holder.execute("set idle_in_transaction_session_timeout = 0")
        async with holder.transaction():
            await holder.execute(f"lock table {table} in access exclusive mode")  # type: ignore[arg-type]
            yield


# hangs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A1", "A2", "A12", "N16")
@pytest.mark.parametrize("table", ["runner", "task_timer", "lease", "retry_queue", "orphan_watch", "quarantine"])
async def test_a_table_that_somebody_holds_delays_no_fire(
    database: str, conn: AsyncConnection, tmp_path: Path, table: str
) -> None:
    await Runner.join(conn)
    said = Said()
    async with hosted(make_scheduler(quick(database, tmp_path, **SHORT), said)):
        await said.saw("leadership_acquired")
        async with held(database, table):
            instants = await publish_every(conn, "pulse", seconds=0.2, times=5)
            late = await all_fired(conn, "pulse", instants)
        assert max(late) < LATE_SECONDS
        assert len(said.events("leadership_acquired")) == 1, "it leads all the time"


@pytest.mark.requirement("A1", "A2", "A12")
async def test_a_look_that_takes_for_ever_is_broken_off_and_costs_no_fire_and_no_runner(
    database: str, conn: AsyncConnection, tmp_path: Path, counted: Counted
) -> None:
    """What the look would have found is found apart: a runner that is lost meanwhile is given up all the same."""
    await put(conn, make_dag("one", {"a": []}))
    run = await start(conn, "one")
    lost = await Runner.join(conn)
    await lost.claim()
    await conn.execute("update task set started_at = started_at - interval '1 hour'")
    await conn.execute(
        "create or replace function overdue_runs(p_shard smallint) returns setof bigint language sql stable as"
        " $$ select 1::bigint from pg_sleep(60) $$"
    )
    said = Said()
    settings = quick(database, tmp_path, lost_after_seconds=0.5, **SHORT)
    async with hosted(make_scheduler(settings, said)):
        await said.saw("job_failed", job="look")
        instants = await publish_every(conn, "pulse", seconds=0.2, times=8)
        late = await all_fired(conn, "pulse", instants)
        await said.saw("runner_lost", session=lost.session)
        assert len(said.events("leadership_acquired")) == 1, "it leads all the time"
    assert max(late) < LATE_SECONDS
    assert (await states(conn, run)) == {"a": "available"}
    assert counted["job_failures{look}"] >= 1


@pytest.mark.requirement("A1", "A12")
async def test_a_step_that_takes_for_ever_is_broken_off_and_the_others_go_on(
    database: str, conn: AsyncConnection, tmp_path: Path, counted: Counted
) -> None:
    """Reconciling hangs; retries and lost runners are seen to, and it is not tried at every tick."""
    await put(conn, make_dag("flaky", {"a": []}, per_task={"a": {"retry": retries(3)}}))
    run = await start(conn, "flaky")
    runner, lost = await Runner.join(conn), await Runner.join(conn)
    (claim,) = await runner.claim()
    await conn.execute(
        "create or replace function run_fingerprint(p_run_id bigint) returns text language sql stable as"
        " $$ select 'x'::text from pg_sleep(60) $$"
    )
    version = await put(conn, make_dag("stuck", CHAIN))
    await start(conn, "stuck")
    await conn.execute("update task_spec set upstream_total = 2 where version_id = %s and idx = 1", [version])
    (first,) = await runner.claim()
    await runner.finish(first)
    said = Said()
    settings = quick(database, tmp_path, maintenance_timeout_seconds=0.2, lost_after_seconds=0.5)
    async with hosted(make_scheduler(settings, said)):
        await said.saw("job_failed", job="reconcile")
        await runner.finish(claim, "failed", retry_in=0.1)
        await eventually(lambda: value(conn, "select state = 'available' from task where run_id = %s", run))
        await said.saw("runner_lost", session=lost.session)
        await said.saw("row_quarantined", kind="run", verb="reconcile", within_seconds=60)
    assert counted["job_failures{reconcile}"] >= 1
    assert counted["quarantined{run}"] == 1


@pytest.mark.requirement("A1", "A13", "B2")
async def test_a_lost_runner_whose_run_somebody_holds_delays_the_reaping_of_no_other(
    database: str, conn: AsyncConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be reaped is left alone for as long as this test could last; who dies then is reaped all the same."""
    monkeypatch.setattr(circuit_breaker, "SHORTEST_REST_SECONDS", 60.0)
    await put(conn, make_dag("one", {"a": []}))
    runs, dead = [], []
    for _ in range(2):
        runs.append(await start(conn, "one"))
        dead.append(await Runner.join(conn))
        await dead[-1].claim()
    said = Said()
    settings = quick(database, tmp_path, maintenance_timeout_seconds=0.4)
    async with await connect(database, purpose=Purpose.SCHEDULER) as holder, holder.transaction():
        await holder.execute("set local idle_in_transaction_session_timeout = 0")
        await holder.execute("select 1 from run_status where run_id = %s for update", [runs[0]])
        await runners.leave(conn, dead[0].session)
        async with hosted(make_scheduler(settings, said)):
            failed = await said.saw("job_failed", job="reap")
            assert failed["candidate"] == dead[0].session
            await runners.leave(conn, dead[1].session)
            await said.saw("runner_lost", session=dead[1].session)
    assert await states(conn, runs[1]) == {"a": "available"}


@pytest.mark.requirement("A1", "A12")
async def test_where_every_candidate_hangs_the_step_rests_and_the_others_go_on(
    database: str, conn: AsyncConnection, tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit_breaker, "SHORTEST_REST_SECONDS", 60.0)
    await put(conn, make_dag("one", {"a": []}))
    await put(conn, make_dag("flaky", {"a": []}, per_task={"a": {"retry": retries(3)}}))
    dead = [await Runner.join(conn) for _ in range(5)]
    for each in dead:
        await start(conn, "one")
        await each.claim()
        await runners.leave(conn, each.session)
    runner, run = await Runner.join(conn), await start(conn, "flaky")
    (claim,) = await runner.claim()
    await conn.execute(
        "create or replace function mark_runner_dead(p_session bigint, p_reason text, p_infra_retries int) returns int"
        " language sql as $$ select 1 from pg_sleep(60) $$"
    )
    said = Said()
    async with hosted(make_scheduler(quick(database, tmp_path, maintenance_timeout_seconds=0.2), said)):
        await said.saw("job_failed", job="reap", within_seconds=60)
        await runner.finish(claim, "failed", retry_in=0.1)
        await eventually(lambda: value(conn, "select state = 'available' from task where run_id = %s", run))
    assert counted["job_failures{reap}"] <= circuit_breaker.MOST_FAILURES_IN_A_ROW + 1


# poison --------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A13", "N23", "A14", "B8", "V11")
async def test_every_kind_of_invalid_row_is_quarantined_and_counted(
    database: str, conn: AsyncConnection, tmp_path: Path, counted: Counted
) -> None:
    """A retry, a lost attempt, a run that needs repair, a run and a wait over their time: one of each, beside a good one."""
    await put(conn, make_dag("flaky", {"a": []}, per_task={"a": {"retry": retries(1)}}))
    await put(conn, make_dag("plain", {"a": []}))
    await put(conn, make_dag("timed", {"a": []}, run_timeout_seconds=0.01))
    await put(conn, make_dag("waiting", {"a": []}, task_queue_timeout_seconds=0.01))
    runner, lost = await Runner.join(conn), await Runner.join(conn)
    pairs: dict[str, list[int]] = {"retry": [await start(conn, "flaky") for _ in range(2)]}
    await runner.step([(claim, "failed", {"retry_in": 0.1}) for claim in await runner.claim()])
    pairs["lost"] = [await start(conn, "plain") for _ in range(2)]
    await lost.claim()
    await conn.execute("update task set started_at = started_at - interval '1 hour' where state = 'running'")
    pairs["drift"] = [await start(conn, "plain") for _ in range(2)]
    await conn.execute("update run_status set open_tasks = 9 where run_id = any(%s)", [pairs["drift"]])
    pairs["timed"] = [await start(conn, "timed") for _ in range(2)]
    pairs["waiting"] = [await start(conn, "waiting") for _ in range(2)]
    bad = [pair[1] for pair in pairs.values()]
    for table in ("task", "run_status"):
        await refuse(conn, table, f"new.run_id in ({', '.join(map(str, bad))})", name=f"poison_{table}")
    said = Said()
    settings = quick(database, tmp_path, lost_after_seconds=0.5)
    async with hosted(make_scheduler(settings, said)):
        await said.saw("runner_lost", session=lost.session)
        await eventually(lambda: value(conn, "select count(*) = %s from quarantine where kind = 'run'", len(bad)))
        good = {name: pair[0] for name, pair in pairs.items()}
        await eventually(lambda: value(conn, "select open_tasks = 1 from run_status where run_id = %s", good["drift"]))
        await eventually(
            lambda: value(conn, "select state = 'failed' from run_status where run_id = %s", good["timed"])
        )
        assert await states(conn, good["retry"]) == {"a": "available"}
        assert await states(conn, good["lost"]) == {"a": "available"}
        assert await run_state(conn, good["waiting"]) == "failed"
    # Where this takes longer than a row is set aside for, the row is tried and quarantined again.
    assert await value(
        conn, "select sum(failures) = %s from quarantine where kind = 'run'", counted["quarantined{run}"]
    )
    assert (counted["agent_lost_tasks"], counted["timeouts{run}"], counted["timeouts{queue_wait}"]) == (1, 1, 1)
    assert counted["drift_repaired{run_counter_drift}"] == 1


async def stuck(conn: AsyncConnection, name: str) -> int:
    version = await put(conn, make_dag(name, CHAIN))
    run, runner = await start(conn, name), await Runner.join(conn)
    await conn.execute("update task_spec set upstream_total = 2 where version_id = %s and idx = 1", [version])
    (claim,) = [each for each in await runner.claim() if each.run_id == run]
    await runner.finish(claim)
    return run


@pytest.mark.requirement("A14", "B4", "B8", "A6", "A13")
async def test_orphans_are_reaped_and_what_goes_wrong_with_them_is_counted(
    database: str, conn: AsyncConnection, tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = await stuck(conn, "good"), await stuck(conn, "bad")
    await refuse(conn, "run_status", f"new.run_id = {bad} and new.state = 'failed'")
    said = Said()
    settings = quick(database, tmp_path, orphan_after_seconds=0.4)
    async with hosted(make_scheduler(settings, said)):
        await said.saw("run_orphaned", run=good)
        await said.saw("row_quarantined", kind="run", run=bad)
        await conn.execute("alter table orphan_watch rename column watched_seconds to away")
        await eventually(lambda: counted["orphan_list_error"])
        await conn.execute("alter table orphan_watch rename column away to watched_seconds")
    assert await run_state(conn, good) == "failed"
    assert (counted["orphan_reaped"], counted["orphan_reap_error"], counted["quarantined{run}"]) == (1, 1, 1)


@pytest.mark.requirement("A14")
async def test_a_reaper_that_breaks_off_unexpectedly_is_told_and_starts_anew(
    database: str, conn: AsyncConnection, tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await stuck(conn, "good")
    broken = [True]

    async def breaks(*args, **options):  # type: ignore[no-untyped-def]
        if broken:
            broken.clear()
            raise ZeroDivisionError
        return await fail_orphaned_run(*args, **options)

    monkeypatch.setattr(maintenance_jobs, "fail_orphaned_run", breaks)
    said = Said()
    async with hosted(make_scheduler(quick(database, tmp_path, orphan_after_seconds=0.2), said)):
        await said.saw("job_failed", job="orphans")
        await said.saw("run_orphaned", run=run)
    assert counted["orphan_panic"] == 1


@pytest.mark.requirement("B8", "A14")
async def test_a_search_for_lost_runners_that_fails_is_counted(
    database: str, conn: AsyncConnection, tmp_path: Path, counted: Counted
) -> None:
    await conn.execute("alter table lease rename column session to away")
    said = Said()
    async with hosted(make_scheduler(quick(database, tmp_path), said)):
        await said.saw("job_failed", job="reap")
    assert counted["agent_lost_list_error"] >= 1


@pytest.mark.requirement("A14")
async def test_leading_and_firing_are_counted(
    database: str, conn: AsyncConnection, tmp_path: Path, counted: Counted
) -> None:
    said = Said()
    async with hosted(make_scheduler(quick(database, tmp_path), said)):
        instants = await publish_every(conn, "pulse", seconds=0.1, times=5)
        await all_fired(conn, "pulse", instants)
        assert metrics.LEADER.collect()[0].samples[0].value == 1
    assert metrics.LEADER.collect()[0].samples[0].value == 0
    assert (counted["fires"], counted["leadership_changes"]) == (5, 2)
    assert counted["fire_lag_seconds_count"] >= 1
    assert counted["tick_duration_seconds_count{scheduler}"] >= 1


# a leader that cannot renew -----------------------------------------------------------------------------------------------


@pytest.mark.requirement("A10", "N03")
async def test_a_leader_stops_planning_before_its_lease_ends_by_its_own_clock(
    database: str, conn: AsyncConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted from when the renewal was sent, not from when its answer came."""
    now = [1000.0]
    monkeypatch.setattr(leadership_module, "boot_seconds", lambda: now[0])
    lead = Leadership(quick(database, tmp_path, **SHORT), url=database, owner="me", log=Said().log)
    line = await lead.connection()
    sent_at = now[0]

    async def slowly(*args, **options):  # type: ignore[no-untyped-def]
        now[0] += 0.5
        return await answer(*args, **options)

    answer = try_acquire_shard
    monkeypatch.setattr(leadership_module, "try_acquire_shard", slowly)
    await lead.try_acquire(line)
    lease = SHORT["leader_lease_seconds"]
    for at, may_plan in ((sent_at + 0.5, True), (sent_at + 0.89 * lease, True), (sent_at + 0.91 * lease, False)):
        now[0] = at
        assert lead.may_plan is may_plan
    await lead.poll_work(line)
    assert lead.may_plan, "nobody took over meanwhile"
    await conn.execute("update shard set epoch = epoch + 1")
    now[0] += lease
    with pytest.raises(NotLeader):
        await lead.poll_work(line)
    await lead.release()


async def test_a_leaders_look_makes_marks_once_there_is_one_of_its_server(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(leadership_module, "boot_seconds", lambda: now[0])
    lead, guard = (
        Leadership(quick(database, tmp_path, **SHORT), url=database, owner="me", log=Said().log),
        guard_of(database),
    )
    line = await lead.connection()
    await lead.try_acquire(line)
    for _ in range(2):
        now[0] += 2
        await lead.poll_work(line)
        assert not lead.has_marked and guard.mark is None, "the first one is made by who compares them"
    assert isinstance(line, TimedConnection) and line.server is not None
    first = await failover.mark(line, line.server, actor="me")
    assert first is not None
    guard.remember(first)
    now[0] += 2
    await lead.poll_work(line)
    assert lead.has_marked
    assert guard.mark is not None and guard.mark.lsn > first.lsn
    assert guard.mark.lsn == await failover.marked(line, line.server)
    now[0] += 2
    assert not lead.has_marked
    await lead.release()
