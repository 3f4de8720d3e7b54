"""N25b: everybody wants the same few slots, their number changes, and those who hold some die."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import psycopg

from evertick.db.connect import Purpose, connect
from evertick.domain.access import Actor
from evertick.domain.errors import EvertickError
from evertick.engine.gates import set_pool
from tests.chaos.cluster import Shape
from tests.chaos.faults import database, network, planning, processes
from tests.chaos.record import Fault
from tests.chaos.scenario import Scenario
from tests.chaos.stage import Stage
from tests.waiting import elapse

POOL = "narrow"
SIZES = (4, 2, 6, 3, 8)


async def narrow_gates(stage: Stage) -> None:
    """Pools, keys and limits hold whoever dies, whoever leads, and while people make the pool smaller and larger."""
    # To wait for a slot is what this is about.
    stage.limits |= {"start_tolerance_seconds": 180.0, "run_seconds": 300.0}
    await stage.begin_load(
        seconds=stage.scaled(120, 14), steady=12, steady_dags=("guarded",), paces=(3, 5), per_second=1.5,
        trigger_dags=("guarded",), quick=2,
    )  # fmt: skip
    over = asyncio.Event()
    resizing = asyncio.create_task(_resize(stage, over))
    try:
        deeds = (processes.kill_runner, processes.kill_leader, network.drop_reply, planning.overlap, database.terminate)
        for _ in range(int(stage.scaled(6, 1))):
            for deed in deeds:
                await deed(stage.nemesis)
                await elapse(stage.dice.uniform(0.3, 1.0))
    finally:
        over.set()
        await resizing


async def _resize(stage: Stage, over: asyncio.Event) -> None:
    """Its size changes until all is over, and ends as it began."""
    number = 0
    while not over.is_set():
        number += 1
        # Sessions are ended meanwhile, and so may be this one.
        with suppress(psycopg.OperationalError, EvertickError):
            async with stage.nemesis.fault(Fault.EDITS, "all", part="pool", disturbs=()):
                await _set(stage, SIZES[number % len(SIZES)])
        await elapse(stage.dice.uniform(0.3, 0.9))
    await _set(stage, SIZES[0])
    stage.note(f"the pool was resized {number} times")


async def _set(stage: Stage, slots: int) -> None:
    async with await connect(stage.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
        await set_pool(conn, name=POOL, slots=slots, actor=Actor("chaos"))


SCENARIOS = (
    Scenario(
        name="N25b",
        title="few slots, whose number changes and whose holders die",
        play=narrow_gates,
        shape=lambda is_full: Shape(schedulers=2, runners=2),
        required=("J4", "J8", "J15"),
    ),
)
