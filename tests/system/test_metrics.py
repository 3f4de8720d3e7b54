"""Each metric is caused, and then scraped from the process that counts it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from evertick.config import environment_for
from tests.system.processes import Installation
from tests.system.served import Served, served
from tests.system.work import Published, let_go, schedule_now, start_run
from tests.waiting import eventually


@asynccontextmanager
async def scraped(there: Installation, kind: str, **settings: Any) -> AsyncIterator[Served]:
    env = environment_for(there.settings(health_port=0, **settings), there._environment())
    async with served(kind, {**env, "RUNNER_NAME": "r1"}, there.folder) as service:
        await eventually(service.is_ready, 60)
        yield service


async def counted(service: Served, name: str, at_least: float = 1, **labels: str) -> float:
    async def value() -> float:
        found = await service.metric(name, **labels)
        return found if found >= at_least else 0.0

    found: float = await eventually(value, 60, pause_seconds=0.05)
    return found


@pytest.mark.requirement("A14")
async def test_a_runner_counts_what_it_claims_runs_finishes_and_loses(there: Installation) -> None:
    # No heartbeat tells it before its own report does.
    quiet = {"heartbeat_seconds": 30.0, "lost_after_seconds": 3600.0}
    async with scraped(there, "runner", runner_slots=3, **quiet) as runner:
        assert await runner.metric("evertick_runner_slots") == 3
        assert await runner.metric("evertick_tick_duration_seconds_count", service="runner") > 0
        await start_run(there.conn, "again")
        await counted(runner, "evertick_attempts_finished_total", outcome="failed")
        await start_run(there.conn, "hurried")
        await counted(runner, "evertick_timeouts_total", kind="execution")
        await start_run(there.conn, "holding")
        await there.begun("hold")
        await counted(runner, "evertick_attempts_running")
        # Its lease passes on while it is at work: what it reports is refused, and it knows it.
        async with there.conn.transaction():
            await there.conn.execute("update task set epoch = epoch + 1 where state = 'running'")
            await there.conn.execute("update lease set epoch = epoch + 1")
        let_go(there.effects_file)
        await counted(runner, "evertick_stale_writes_refused_total")
        await counted(runner, "evertick_claims_lost_total")
        assert await runner.metric("evertick_claims_total") >= 2
        # Every connection is cut at once.
        await there.conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        await counted(runner, "evertick_reconnects_total")
        await counted(runner, "evertick_job_failures_total")


async def test_a_chain_of_tasks_tells_how_long_a_hop_takes(there: Installation) -> None:
    async with scraped(there, "runner") as runner:
        let_go(there.effects_file)
        run = await start_run(there.conn, "holding")
        await there.ended(run)
        assert await counted(runner, "evertick_handoff_latency_seconds_count") >= 1
        assert await counted(runner, "evertick_attempts_finished_total", 2, outcome="success") == 2


@pytest.mark.requirement("A14", "B8")
async def test_a_scheduler_counts_what_it_fires_and_what_is_in_line(there: Installation, long: Published) -> None:
    async with scraped(there, "scheduler") as scheduler:
        assert await counted(scheduler, "evertick_leader") == 1
        assert await scheduler.metric("evertick_leadership_changes_total") >= 1
        instants = await schedule_now(there.conn, long, "alone", every=0.1, times=5)
        assert await counted(scheduler, "evertick_fires_total", len(instants)) == len(instants)
        assert await scheduler.metric("evertick_fire_lag_seconds_count") >= 1
        await counted(scheduler, "evertick_queue_depth", queue="default")
        async with scraped(there, "runner", lost_after_seconds=3600.0) as runner:
            await start_run(there.conn, "holding")
            await there.begun("hold")
            os.kill(runner.process.pid, signal.SIGKILL)
            await counted(scheduler, "evertick_agent_lost_tasks_total")


@pytest.mark.requirement("A14", "B8")
async def test_a_scheduler_counts_what_it_finds_damaged_skips_and_cannot_list(
    there: Installation, long: Published
) -> None:
    run = await start_run(there.conn, "single")
    await there.conn.execute("update run_status set open_tasks = 7 where run_id = %s", [run])
    await schedule_now(there.conn, long, "warm", every=60, times=2)
    await there.conn.execute('update schedule set spec = \'{"kind": "nonsense"}\'')
    long_ago = await there.value("select clock() - interval '1 hour'")
    await schedule_now(there.conn, long, "alone", every=60, times=2)
    await there.conn.execute(
        "update schedule c set misfire = 'skip' from dag d where d.dag_id = c.dag_id and d.name = 'alone'"
    )
    await there.conn.execute("update schedule_state set next_due = %s", [long_ago])
    async with scraped(there, "scheduler", failpoint="runs.orphans:error") as scheduler:
        await counted(scheduler, "evertick_drift_repaired_total")
        await counted(scheduler, "evertick_quarantined_total", kind="schedule")
        await counted(scheduler, "evertick_skipped_fires_total")
        await counted(scheduler, "evertick_orphan_list_error_total")
        await there.conn.execute("alter table runner rename column observed_seq to nowhere")
        try:
            await counted(scheduler, "evertick_agent_lost_list_error_total")
        finally:
            await there.conn.execute("alter table runner rename column nowhere to observed_seq")
        # None of it keeps the others from their work.
        await eventually(scheduler.is_ready, 60)
