"""The audit sees what a real database commits, in its order, and the evidence of real verbs is judged green."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import shards
from evertick.domain.access import Actor
from evertick.domain.dags.gates import EXCLUSIVE, GateKind, GateSpec
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.errors import NotLeader
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.dags import pause, unpause
from evertick.engine.fire_schedules import _fire_schedules, fire_schedules
from evertick.engine.maintenance import promote_due_tasks
from evertick.engine.runners import extend, mark_runner_dead
from evertick.engine.runs import cancel
from evertick.engine.schedules import put_schedule
from tests.chaos.audit import install_audit, refusals
from tests.chaos.checker import check
from tests.chaos.evidence import Evidence
from tests.chaos.history import collect
from tests.chaos.record import Answer, ClientLog, NemesisLog, Phase, boot_ns
from tests.chaos.verdict import Limits
from tests.engine.world import Runner, lead, make_dag, put, start
from tests.waiting import eventually

Conn = AsyncConnection[Any]


@pytest.fixture
async def audited(conn: Conn) -> Conn:
    await install_audit(conn)
    return conn


@pytest.fixture
def logs(tmp_path: Path) -> dict[str, Path]:
    return {name: tmp_path / name for name in ("effects", "nemesis", "client")}


async def value(conn: Conn, query: str) -> Any:
    row = await (await conn.execute(query)).fetchone()
    assert row is not None
    return row[0]


async def gathered(conn: Conn, logs: dict[str, Path]) -> Evidence:
    return await collect(conn, effects=logs["effects"], nemesis=logs["nemesis"], client=logs["client"])


async def test_the_servers_boot_clock_is_ours(audited: Conn) -> None:
    before = boot_ns()
    seen = await value(audited, "select chaos_audit.boot_ns()")
    assert before - 20_000_000 <= seen <= boot_ns()


async def test_what_is_rolled_back_leaves_nothing(audited: Conn, logs: dict[str, Path]) -> None:
    await put(audited, make_dag("d", {"a": []}))
    with pytest.raises(ZeroDivisionError):
        async with audited.transaction():
            await start(audited, "d")
            raise ZeroDivisionError
    await start(audited, "d")
    evidence = await gathered(audited, logs)
    assert [move.new_state for move in evidence.task_moves] == ["available"]


async def test_claims_ends_and_leases_are_seen_with_epoch_and_session(audited: Conn, logs: dict[str, Path]) -> None:
    await put(audited, make_dag("d", {"a": [], "b": ["a"]}))
    await start(audited, "d")
    runner = await Runner.join(audited)
    await runner.drain()
    evidence = await gathered(audited, logs)
    seen = [(move.idx, move.old_state or "waiting", move.new_state, move.new_epoch) for move in evidence.task_moves]
    assert seen == [
        (0, "waiting", "available", 0),
        (0, "available", "running", 1),
        (0, "running", "success", 1),
        (1, "waiting", "available", 0),
        (1, "available", "running", 1),
        (1, "running", "success", 1),
    ]
    assert [lease.is_gained for lease in evidence.lease_moves].count(True) == 2
    assert {(report.session, report.epoch, report.is_refused) for report in evidence.reports} == {
        (runner.session, 1, False)
    }
    assert [(move.old_state, move.new_state) for move in evidence.run_moves] == [
        (None, "running"),
        ("running", "success"),
    ]
    report = check(evidence, only=("J4", "J5", "J6"))
    assert report.is_good(), report.text()


async def test_refused_writes_are_counted_though_nothing_changed(audited: Conn, logs: dict[str, Path]) -> None:
    await put(audited, make_dag("d", {"a": []}))
    await start(audited, "d")
    first, second = await Runner.join(audited), await Runner.join(audited)
    (claim,) = await first.claim()
    await mark_runner_dead(audited, session=first.session, reason="agent_lost: test", infra_retries=3)
    await second.drain()
    assert await first.finish(claim)
    await extend(audited, session=first.session, held=[])
    epoch = await lead(audited)
    await lead(audited)
    for _ in range(2):
        with pytest.raises((psycopg.Error, NotLeader), match="is over"):
            await _fire_schedules(audited, shard=0, epoch=epoch, plans=[])
    assert await refusals(audited) == {"finish": 1, "extend": 1, "fence": 2}
    evidence = await gathered(audited, logs)
    assert [(report.kind, report.is_refused) for report in evidence.reports] == [
        ("lost", False),
        ("success", False),
        ("success", True),
    ]
    assert check(evidence, only=("J4", "J5", "J6")).is_good()


async def test_a_plan_that_commits_after_a_takeover_is_seen_after_it(
    audited: Conn, database: str, logs: dict[str, Path]
) -> None:
    """What the order of the commits is for: a fence that does not hold, and a leader that is slow to commit."""
    epoch = await lead(audited)
    await audited.execute(
        "create or replace function fence_unaudited(p_shard smallint, p_epoch bigint) returns void language sql as ''"
    )
    async with await connect(database, purpose=Purpose.SCHEDULER) as slow, slow.transaction():
        await promote_due_tasks(slow, shard=0, epoch=epoch, limit=10)
        await lead(audited)
    report = check(await gathered(audited, logs), only=("J9",))
    assert [violation.kind for _, violation in report.violations] == ["old_leader"]


async def test_silence_counted_by_an_old_leader_is_seen(audited: Conn, database: str, logs: dict[str, Path]) -> None:
    """An unfenced write of a leader is known by its connection."""
    await Runner.join(audited)
    async with await connect(database, purpose=Purpose.SCHEDULER) as old:
        epoch = await lead(old)
        await promote_due_tasks(old, shard=0, epoch=epoch, limit=10)
        await old.execute("update runner set silent_seconds = 1")
        assert check(await gathered(audited, logs), only=("J9",)).is_good()
        await lead(audited)
        await old.execute("update runner set silent_seconds = 2")
    report = check(await gathered(audited, logs), only=("J9",))
    assert [violation.kind for _, violation in report.violations] == ["old_leader"]


async def test_a_database_that_takes_stale_reports_is_found_out(audited: Conn, logs: dict[str, Path]) -> None:
    """With the guard removed, the report of a replaced attempt ends the one that replaced it."""
    text = await value(audited, "select pg_get_functiondef('finish_attempts_unaudited'::regproc)")
    guard = re.compile(r"and k\.epoch = d\.epoch and k\.session = p_session")
    assert guard.search(text), "this test must follow the guard of finish"
    await put(audited, make_dag("d", {"a": []}))
    await start(audited, "d")
    first, second = await Runner.join(audited), await Runner.join(audited)
    (claim,) = await first.claim()
    await mark_runner_dead(audited, session=first.session, reason="agent_lost: test", infra_retries=3)
    await second.claim()
    await audited.execute(guard.sub("", text))
    await first.finish(claim)
    report = check(await gathered(audited, logs), only=("J5",))
    assert {violation.kind for _, violation in report.violations} == {"foreign_report"}


async def test_who_is_given_up_must_have_ended(audited: Conn, logs: dict[str, Path]) -> None:
    nemesis = NemesisLog(logs["nemesis"])
    await put(audited, make_dag("d", {"a": []}))
    await start(audited, "d")
    pid = 1  # of every runner in that small world
    nemesis.started("runner-1", pid)
    runner = await Runner.join(audited)
    await runner.claim()
    await mark_runner_dead(audited, session=runner.session, reason="agent_lost: test", infra_retries=3)
    alive = check(await gathered(audited, logs), only=("J7",))
    assert [violation.kind for _, violation in alive.violations] == ["reaped_alive"]
    nemesis.exited("runner-1", pid, -9)
    dead = check(await gathered(audited, logs), only=("J7",))
    assert dead.is_good(), dead.text()


async def test_a_run_of_real_verbs_is_judged_green(audited: Conn, logs: dict[str, Path]) -> None:
    nemesis, client = NemesisLog(logs["nemesis"]), ClientLog(logs["client"])
    nemesis.phase(Phase.IDLE)
    epoch = await lead(audited)
    # Its first instant is after it was put, however long that takes: whether earlier ones fire is for nobody to say.
    begin = await shards.read_clock(audited) + timedelta(seconds=1)
    every = parse_schedule(
        timedelta(milliseconds=100), anchor_at=begin, start_at=begin, end_at=begin + timedelta(seconds=0.5)
    )
    dag = make_dag("d", {"a": [], "b": ["a"]}, schedules=(NamedSchedule(name="main", spec=every),), misfire="all")
    await put(audited, dag)
    nemesis.phase(Phase.LOAD)
    runner = await Runner.join(audited)
    client.asked("trigger", request="k-1")
    await start(audited, "d", "k-1")
    client.answered("k-1", Answer.OK)

    async def work() -> bool:
        await fire_schedules(audited, shard=0, epoch=epoch, batch=100)
        await promote_due_tasks(audited, shard=0, epoch=epoch, limit=100)
        for claim in await runner.claim(10):
            await runner.finish(claim)
        return bool(await value(audited, f"select clock() > '{begin + timedelta(seconds=0.6)}'"))

    await eventually(work)
    await runner.drain()
    nemesis.phase(Phase.STOPPED)
    nemesis.phase(Phase.HEALED)
    nemesis.phase(Phase.READ)
    limits = Limits(recovery_seconds=0, fire_tolerance_seconds=0.5, edit_seconds=0, tick_gap_seconds=10)
    report = check(await gathered(audited, logs), limits)
    assert report.violations == [], report.text()
    assert report.not_exercised(("J1", "J2", "J3", "J4", "J5", "J6", "J8", "J9", "J10", "J11", "J13")) == []


async def test_pausing_editing_and_deleting_leave_their_versions(audited: Conn, logs: dict[str, Path]) -> None:
    await put(audited, make_dag("d", {"a": []}, every="@hourly"))
    await pause(audited, dag="d", actor=Actor("p-1"))
    await unpause(audited, dag="d", actor=Actor("p-2"))
    schedule = NamedSchedule(name="main", spec=parse_schedule("@daily"))
    await put_schedule(audited, dag="d", schedule=schedule, actor=Actor("somebody"), request="e-1")
    run_id = await start(audited, "d")
    await cancel(audited, run_id=run_id, actor=Actor("c-1"))
    evidence = await gathered(audited, logs)
    assert [(version.version, version.request) for version in evidence.schedule_versions] == [(1, None), (2, "e-1")]
    assert [move.is_paused for move in evidence.schedule_moves] == [False, True, False, False]
    changes = Counter((change.op, change.request) for change in evidence.changes)
    for wanted in (("pause", "p-1"), ("unpause", "p-2"), ("put_schedule", "e-1"), ("cancel", "c-1")):
        assert changes[wanted] == 1
    assert check(evidence, only=("J2", "J6")).violations == []


async def test_two_writers_of_one_task_leave_their_rows_in_the_order_of_their_locks(
    audited: Conn, database: str
) -> None:
    await put(audited, make_dag("d", {"a": []}))
    run_id = await start(audited, "d")
    async with await connect(database, purpose=Purpose.SCHEDULER) as other:
        async with audited.transaction():
            await audited.execute("update task set epoch = 10 where run_id = %s", [run_id])
            second = asyncio.create_task(other.execute("update task set epoch = 11 where run_id = %s", [run_id]))
            await asyncio.wait([second], timeout=0.1)
            assert not second.done()
        await second
    rows = await (await audited.execute("select new_epoch from chaos_audit.task_move order by entry")).fetchall()
    assert [row[0] for row in rows] == [0, 10, 11]


@pytest.mark.requirement("D3", "D4")
async def test_a_limit_that_is_broken_at_a_commit_is_seen(audited: Conn, logs: dict[str, Path]) -> None:
    key = GateSpec(kind=GateKind.MUTEX, name="k", weight=EXCLUSIVE)
    await put(audited, make_dag("a", {"t": []}, task_gates=(key,)))
    runner = await Runner.join(audited)
    for _ in range(3):
        await start(audited, "a")
    await runner.drain()
    assert await value(audited, "select count(*) from chaos_audit.limit_broken") == 0
    sound = check(await gathered(audited, logs), only=("J15",))
    assert sound.is_good() and sound.findings["J15"].checked == 3, sound.text()
    await start(audited, "a")
    await audited.execute("update gate set used = 0")
    await start(audited, "a")
    evidence = await gathered(audited, logs)
    assert "hold" in {each.kind for each in evidence.leftovers}
    assert "2000000 of 1000000 held" in evidence.limits_broken[0]
    # Once by what the program counts, and once by the moves of the tasks alone.
    found = [violation.kind for _, violation in check(evidence, only=("J15",)).violations]
    assert sorted(found) == ["limit_drift", "overfull"]
