"""When the leader's maintenance jobs are due, by its latest poll and by what their last run found."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import inf
from pathlib import Path
from typing import Any, cast

import pytest
from psycopg import AsyncConnection

from evertick.engine.shards import PendingWork
from evertick.runtime import circuit_breaker
from evertick.runtime.connections import Notifier
from evertick.scheduler import maintenance
from evertick.scheduler.figures import Figures
from evertick.scheduler.forecaster import Forecaster
from evertick.scheduler.leadership import LeaderKey, Leadership
from evertick.scheduler.maintenance import CandidateJob, Job, Maintenance, make_jobs, moves_due, observation_due
from evertick.scheduler.maintenance_jobs import MaintenanceJobs, Reconciliation, Rerun, at_instant
from evertick.scheduler.prover import Prover
from tests.system.hosting import Said, quick

NOWHERE = "postgresql://127.0.0.1:1/nowhere"
NOW = 1000.0
READ_AT = datetime(2026, 1, 1, tzinfo=UTC)
LATER = READ_AT + timedelta(seconds=7)
IDLE = PendingWork(
    read_at=READ_AT,
    has_session_lock=True,
    next_fire=None,
    next_timer=None,
    has_waiting_retries=False,
    next_expiry=None,
    silent_sessions=[],
    dead_sessions=[],
    overdue=[],
    dags_with_free_slots=[],
    backfills=[],
    has_arrivals=False,
    next_wake=None,
    has_gates=False,
    next_opening=None,
    has_deliveries=False,
    marked_lsn=None,
    is_synchronous=None,
    shard_count=1,
    has_moves=False,
    errors=[],
)


def table(folder: Path) -> dict[str, Job | CandidateJob]:
    settings, log = quick(NOWHERE, folder), Said().log
    notifier = Notifier(NOWHERE, is_enabled=False, log=log)
    bodies = MaintenanceJobs(settings, notifier=notifier, log=log)
    jobs = make_jobs(
        bodies,
        Reconciliation(settings, notifier=notifier, log=log),
        Prover(log=log),
        Figures(),
        Forecaster(log=log),
        log=log,
    )
    return {job.name: job for job in jobs}


def due(job: Job | CandidateJob, work: PendingWork) -> float | None:
    if isinstance(job, CandidateJob):
        return NOW if job.candidates(work) else inf
    return job.due(work, NOW)


async def test_an_idle_poll_makes_no_job_due(tmp_path: Path) -> None:
    jobs = table(tmp_path)
    own_timers = {name for name, job in jobs.items() if due(job, IDLE) is None}
    assert own_timers == {
        "reconcile",
        "orphans",
        "count_gates",
        "alerts",
        "prove",
        "figures",
        "forecast",
        "checkins",
        "lineage",
    }
    assert {due(job, IDLE) for name, job in jobs.items() if name not in own_timers} == {inf}


@pytest.mark.parametrize(
    ("found", "name", "at"),
    [
        ({"next_timer": LATER}, "promote", NOW + 7),
        ({"next_timer": LATER, "has_waiting_retries": True}, "promote", NOW),
        ({"silent_sessions": None, "dead_sessions": None}, "observe", NOW),
        ({"silent_sessions": [5]}, "reap", NOW),
        ({"dead_sessions": [5]}, "reap", NOW),
        ({"overdue": [5]}, "time_out_runs", NOW),
        ({"next_expiry": LATER}, "time_out_queued", NOW + 7),
        ({"has_arrivals": True}, "dependencies", NOW),
        ({"next_wake": LATER}, "wake", NOW + 7),
        ({"dags_with_free_slots": [1]}, "admit", NOW),
        ({"backfills": [1]}, "backfill", NOW),
        ({"has_gates": True}, "gates", NOW),
        ({"next_opening": LATER}, "gates", NOW + 7),
        ({"has_moves": True}, "rebalance", NOW),
    ],
)
async def test_each_part_of_a_poll_makes_one_job_due(
    tmp_path: Path, found: dict[str, Any], name: str, at: float
) -> None:
    work = replace(IDLE, **found)
    is_due = {each: due(job, work) for each, job in table(tmp_path).items()}
    assert {each: when for each, when in is_due.items() if when is not None and when < inf} == {name: at}


def test_heartbeats_that_the_poll_failed_to_observe_are_its_failure_and_not_looked_for_apart() -> None:
    unknown = replace(IDLE, silent_sessions=None, dead_sessions=None)
    assert observation_due(unknown, NOW) == NOW
    assert observation_due(replace(unknown, errors=["reap: it failed"]), NOW) == inf
    assert moves_due(replace(IDLE, has_moves=None), NOW) is None, "a poll that did not renew says nothing"


def test_an_instant_that_is_unknown_waits_for_the_next_poll() -> None:
    assert at_instant(None, in_seconds=0.0) == Rerun()
    assert at_instant(LATER, in_seconds=0.5) == Rerun(in_seconds=0.5, at=LATER)


class Rig:
    """A maintenance that never connects, with a clock of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.said = NOW, Said()
        for module in (maintenance, circuit_breaker):
            monkeypatch.setattr(module, "boot_seconds", lambda: self.now)
        settings, log = quick(NOWHERE, folder), self.said.log
        self.wake_leader = asyncio.Event()
        self.leadership = Leadership(settings, url=NOWHERE, owner="me", log=log)
        self.maintenance = Maintenance(
            self.leadership,
            notifier=Notifier(NOWHERE, is_enabled=False, log=log),
            wake_leader=self.wake_leader,
            log=log,
        )
        # Those that begin by themselves are over.
        self.follow("reconcile", Rerun())
        self.follow("alerts", Rerun())

    def follow(self, name: str, again: Rerun) -> None:
        self.maintenance._due_at[name] = self.maintenance._local(again)
        self.maintenance._follow(again)

    def due_jobs(self) -> set[str]:
        it = self.maintenance
        return {job.name for job in it._jobs if it._next_at_of(job) <= self.now}


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


async def test_leadership_begins_with_a_round_of_reconciliation_and_alerts_come_later(rig: Rig) -> None:
    rig.maintenance.begin()
    assert rig.due_jobs() == {"reconcile"}
    rig.now += 5.1
    assert rig.due_jobs() == {"reconcile", "alerts"}


async def test_a_later_poll_overrides_an_earlier_one(rig: Rig) -> None:
    rig.maintenance.plan(replace(IDLE, next_timer=READ_AT, overdue=[1]))
    assert rig.due_jobs() == {"promote", "time_out_runs"}
    rig.maintenance.plan(IDLE)
    assert rig.due_jobs() == set()


async def test_rebalancing_keeps_its_pace_between_polls(rig: Rig) -> None:
    moving = replace(IDLE, has_moves=True)
    rig.maintenance.plan(moving)
    assert rig.due_jobs() == {"rebalance"}
    rig.follow("rebalance", Rerun(in_seconds=5.0))
    rig.maintenance.plan(moving)
    rig.maintenance.plan(replace(IDLE, has_moves=None))
    assert rig.due_jobs() == set()
    rig.now += 5.0
    assert rig.due_jobs() == {"rebalance"}
    rig.maintenance.plan(IDLE)
    assert rig.due_jobs() == set()


async def test_a_job_that_finds_work_for_another_makes_that_due(rig: Rig) -> None:
    rig.maintenance.plan(IDLE)
    rig.follow("admit", Rerun(also={"wake": []}))
    rig.follow("observe", Rerun(also={"reap": [5, 6]}))
    assert rig.due_jobs() == {"wake", "reap"}
    assert rig.maintenance._candidates["reap"] == [5, 6]


async def test_a_job_whose_part_of_the_poll_failed_pauses(rig: Rig) -> None:
    rig.maintenance.plan(replace(IDLE, next_wake=READ_AT, has_gates=True, errors=["wake: it failed", "else: so did"]))
    assert rig.due_jobs() == {"gates"}
    assert [event["job"] for event in rig.said.events("job_failed")] == ["wake", "else"]


@pytest.mark.parametrize(("found_meanwhile", "is_due"), [({"dags_with_free_slots": [1]}, True), ({}, False)])
async def test_work_that_a_poll_finds_while_its_job_runs_is_not_forgotten(
    rig: Rig, found_meanwhile: dict[str, Any], is_due: bool
) -> None:
    it = rig.maintenance
    rig.leadership.epoch, rig.leadership._renewed_at = 7, inf
    leaders = []

    async def run(conn: AsyncConnection, leader: LeaderKey) -> Rerun:
        leaders.append(leader)
        it.plan(replace(IDLE, **found_meanwhile))
        return Rerun()

    it._jobs = [replace(job, run=run) if isinstance(job, Job) and job.name == "admit" else job for job in it._jobs]
    it.plan(replace(IDLE, dags_with_free_slots=[1]))
    await it._run_due(cast(AsyncConnection, None))
    assert leaders == [{"shard": 0, "epoch": 7}]
    assert rig.due_jobs() == ({"admit"} if is_due else set())


async def test_a_closed_shard_wakes_the_leader(rig: Rig) -> None:
    rig.follow("rebalance", Rerun(is_shard_closed=True))
    assert rig.maintenance.is_shard_closed and rig.wake_leader.is_set()
    rig.maintenance.begin()
    assert not rig.maintenance.is_shard_closed
