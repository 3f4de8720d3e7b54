"""N12, N13, N15 to N18: the database dies, restarts, is away, is slow, loses answers, or has no room for us."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import AsyncConnection

from tests.chaos.cluster import CLIENT, Shape
from tests.chaos.faults import database, network
from tests.chaos.record import Answer, Fault
from tests.chaos.scenario import Scenario
from tests.chaos.scenarios.runners import HOLDING, begin_tasks, effects_of
from tests.chaos.stage import Stage
from tests.chaos.writers import writing
from tests.waiting import elapse, eventually

HOG = "hog"
UNAVAILABLE = 503


async def kill_under_writes(stage: Stage) -> None:
    """N12: what was acknowledged is there afterwards."""
    await stage.publish()
    async with writing(stage.cluster, dag="pulse", most=int(stage.scaled(100_000, 1200)), per_second=200) as writers:
        for _ in range(int(stage.scaled(60, 3))):
            await elapse(stage.dice.uniform(0.5, 2) if not stage.is_full else stage.dice.uniform(3, 10))
            await database.kill_postmaster(stage.nemesis)
    stage.note(f"answers: { {str(k): v for k, v in writers.answers.items()} }")
    stage.expect(writers.answers[Answer.UNKNOWN], "no request was on its way when the server was killed")


async def restart_again_and_again(stage: Stage) -> None:
    """N13: no process ends, nothing is missed, nothing leaks."""
    await stage.begin_load(
        seconds=stage.scaled(1200, 16),
        quick=10,
        steady=int(stage.scaled(40, 12)),
        per_second=2,
        paces=(5, 10) if stage.is_full else (2, 3, 5),
    )
    assert stage.load is not None
    lives = {name: len(member.lives) for name, member in stage.cluster.members.items()}
    for _ in range(int(stage.scaled(120, 5))):
        await elapse(stage.dice.uniform(3, 15) if stage.is_full else stage.dice.uniform(1, 2.5))
        await database.restart(stage.nemesis, stage.dice.choice(("fast", "immediate")))
    ended = [name for name, member in stage.cluster.members.items() if len(member.lives) != lives[name]]
    stage.expect(not ended, f"a restart of the database ended {ended}")


async def long_outage(stage: Stage) -> None:
    """N15: away for longer than any threshold, with healthy bodies at work: none is reaped, all succeed."""
    count = int(stage.scaled(50, 12, 8))
    runs = await begin_tasks(stage, "holding", count)
    bodies = {(e.run_id, e.pid) for e in effects_of(stage, "begin", dags=HOLDING)}
    seconds = stage.scaled(120, float(stage.cluster.settings["lost_after_seconds"]) + 4)
    answers: dict[str, int] = {}

    async def ask_in_the_middle() -> None:
        await elapse(seconds - 1)
        answers.update({name: await member.readiness() for name, member in stage.cluster.members.items()})

    await asyncio.gather(database.outage(stage.nemesis, seconds), ask_in_the_middle())
    stage.expect(UNAVAILABLE in answers.values(), f"while the database was away, /readyz said {answers}")
    stage.expect(0 not in answers.values(), f"no answer at /readyz while the database was away: {answers}")
    stage.cluster.tell("go")
    await stage.runs_over(runs)
    states = await stage.cluster.watch.must(
        "select s.state::text, k.epoch from run_status s join task k using (run_id) where run_id = any(%s)", runs
    )
    stage.expect(all(row == ("success", 1) for row in states), f"not all succeeded at once: {states}")
    ended = {(e.run_id, e.pid) for e in effects_of(stage, "end", dags=HOLDING)}
    stage.expect(bodies == ended, "not the bodies that began have ended")
    reaped = await stage.cluster.watch.value("select count(*) from runner where ended_at is not null")
    stage.expect(reaped == 0, f"{reaped} runners were given up because of the outage")


async def slow_database(stage: Stage) -> None:
    """N16: delays, a table that somebody holds, heavy queries, a full vacuum: late, perhaps, but nobody is reaped."""
    held = await begin_tasks(stage, "holding", 4)
    await stage.begin_load(seconds=stage.scaled(120, 22), quick=5, per_second=1)
    for milliseconds in (50, 400, 2000) if stage.is_full else (50, 700):
        await network.delay(stage.nemesis, stage.scaled(15, 3), milliseconds, target="all")
    await database.lock(stage.nemesis, stage.scaled(20, 6))
    await database.lock(stage.nemesis, stage.scaled(20, 3), table="runner")
    await database.crowd(stage.nemesis, stage.scaled(20, 3))
    async with stage.nemesis.fault(Fault.LOCK, database.POSTGRES, part="vacuum full") as struck:
        for table in ("task", "run_status", "lease", "ready_task"):
            await stage.cluster.watch.rows(f"vacuum full {table}")
    await stage.nemesis.recovery(struck, stage.nemesis.works_again())
    reaped = await stage.cluster.watch.value("select count(*) from runner where ended_at is not null")
    stage.expect(reaped == 0, f"{reaped} runners were given up because the database was slow")
    stage.cluster.tell("go")
    await stage.runs_over(held)


async def lost_answers(stage: Stage) -> None:
    """N17: a commit whose answer is lost is not done again."""
    await stage.begin_load(seconds=stage.scaled(60, 10, 6), quick=6, per_second=6)
    for _ in range(int(stage.scaled(30, 2, 1))):
        leader = await stage.cluster.leader()
        targets: list[tuple[str | None, str]] = [
            (CLIENT, "trigger_run"),
            ("runner-1", "finish_and_claim"),
            ("runner-2", "finish_and_claim"),
        ]
        targets += (
            [("runner-1", "extend_leases"), (leader.name, "fire_schedules"), (leader.name, "renew_shard")]
            if leader
            else []
        )
        for target, match in targets:
            await network.drop_reply(stage.nemesis, to=target, match=match)
    dropped = {name: len(status["dropped"]) for name, status in stage.cluster.proxy.status().items()}
    stage.note(f"answers lost: {dropped}")
    stage.expect(dropped[CLIENT] and dropped["runner-1"], f"nothing was dropped: {dropped}")


async def no_room(stage: Stage) -> None:
    """N18: strangers take every connection that is free, while ours are thrown out."""
    await stage.cluster.watch.must(f"create role {HOG} login")
    held = await begin_tasks(stage, "holding", 3)
    await stage.begin_load(seconds=stage.scaled(60, 14), quick=5)
    async with stage.nemesis.fault(Fault.CROWD, database.POSTGRES, part="connections") as struck:
        async with _crowd(stage) as crowd:
            await eventually(lambda: crowd.refused > 0, 30)
            for _ in range(3):
                await database.terminate_leader(stage.nemesis)
                await elapse(stage.scaled(10, 2))
    stage.note(f"strangers: {crowd}")
    await stage.nemesis.recovery(struck, stage.nemesis.works_again())
    reaped = await stage.cluster.watch.value("select count(*) from runner where ended_at is not null")
    stage.expect(reaped == 0, f"{reaped} runners were given up because there was no connection for them")
    stage.cluster.tell("go")
    await stage.runs_over(held)


@dataclass(slots=True)
class Crowd:
    taken: int = 0
    refused: int = 0


@asynccontextmanager
async def _crowd(stage: Stage) -> AsyncIterator[Crowd]:
    """Strangers who take every connection that becomes free, again and again."""
    url = stage.cluster.server.url_of("postgres").replace("evertick@", f"{HOG}@")
    crowd, held = Crowd(), list[AsyncConnection[Any]]()

    async def grab() -> None:
        while True:
            try:
                held.append(await AsyncConnection.connect(url, connect_timeout=2))
                crowd.taken += 1
            except psycopg.OperationalError:
                crowd.refused += 1
                await elapse(0.02)

    grabbing = asyncio.create_task(grab())
    try:
        yield crowd
    finally:
        grabbing.cancel()
        for conn in held:
            await conn.close()


SCENARIOS = (
    Scenario(
        name="N12",
        title="kill -9 PostgreSQL under two hundred writes per second",
        play=kill_under_writes,
        shape=lambda is_full: Shape(schedulers=1, runners=2, slots=8),
        required=("J10",),
    ),
    Scenario(
        name="N13",
        title="restart PostgreSQL again and again",
        play=restart_again_and_again,
        required=("J1", "J2", "J4", "J5", "J6", "J8", "J14"),
    ),
    Scenario(
        name="N15",
        title="PostgreSQL is away for longer than any threshold, with healthy tasks at work",
        play=long_outage,
        shape=lambda is_full: Shape(schedulers=2, runners=2, slots=30 if is_full else 8),
        required=("J8",),
    ),
    Scenario(
        name="N16",
        title="a slow database: delays, a held table, heavy queries, a full vacuum",
        play=slow_database,
        required=("J3", "J13"),
    ),
    Scenario(name="N17", title="answers are lost after their commit", play=lost_answers, required=("J1", "J10")),
    Scenario(
        name="N18",
        title="no connection is free",
        play=no_room,
        shape=lambda is_full: Shape(
            schedulers=2, runners=2, server={"max_connections": "60", "superuser_reserved_connections": "3"}
        ),
        required=("J9",),
    ),
)
