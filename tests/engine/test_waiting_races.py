"""Events and waits that come together never miss each other: transactions are held open, so that each order is tried."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.domain.access import Actor
from evertick.domain.dags.spec import TaskKind
from evertick.domain.dags.waits import WaitKind, WaitSpec
from evertick.engine.waits import send_event, wake
from tests.engine.world import Runner, end, lead, make_dag, put, start, states, value

EVENT = {"kind": TaskKind.WAIT, "wait": WaitSpec(kind=WaitKind.EVENT, name="file")}


class Stage:
    """Three who work at the same time: one defers the task, one sends the event, one leads."""

    def __init__(self, deferring: AsyncConnection, sending: AsyncConnection, leading: AsyncConnection) -> None:
        self.deferring, self.sending, self.leading = deferring, sending, leading
        self.run = self.epoch = 0

    async def begin(self) -> None:
        shape = {"first": [], "wait": ["first"]}
        await put(self.leading, make_dag("d", shape, per_task={"wait": EVENT}))
        self.epoch = await lead(self.leading)
        self.run = await start(self.leading, "d")
        self.runner = await Runner.join(self.leading)
        (self.claim,) = await self.runner.claim()

    async def act(self, step: str) -> None:
        match step:
            case "defer":
                await self.deferring.execute("begin")
                report = f"[{end(self.claim, 'success')}]"
                await self.deferring.execute(
                    "select * from finish_and_claim(%s, %s, 3, '{}', 0, null, null)", [self.runner.session, report]
                )
            case "send":
                await self.sending.execute("begin")
                await send_event(self.sending, name="file", payload=1, actor=Actor("me"))
            case "look":
                await wake(self.leading, shard=0, epoch=self.epoch, batch=10)
            case "deferred":
                await self.deferring.execute("commit")
            case "sent":
                await self.sending.execute("commit")


@pytest.mark.parametrize(
    "order",
    [
        "defer send look sent look deferred look",
        "defer send look deferred look sent look",
        "send defer look sent deferred look",
        "send look sent look defer look deferred look",
        "defer look deferred look send look sent look",
        "defer send sent look deferred look",
    ],
)
async def test_in_whatever_order_they_come_the_wait_ends(database: str, order: str) -> None:
    conns = [await connect(database, purpose=Purpose.SCHEDULER) for _ in range(3)]
    stage = Stage(*conns)
    try:
        await stage.begin()
        for step in order.split():
            await stage.act(step)
        assert (await states(stage.leading, stage.run))["wait"] == "success"
    finally:
        for conn in conns:
            await conn.close()


async def test_a_wait_whose_run_somebody_works_on_is_passed_by_and_found_again(database: str) -> None:
    conns = [await connect(database, purpose=Purpose.SCHEDULER) for _ in range(3)]
    stage = Stage(*conns)
    try:
        await stage.begin()
        for step in ("defer", "deferred", "send", "sent"):
            await stage.act(step)
        await stage.sending.execute("begin")
        await stage.sending.execute("select 1 from run_status where run_id = %s for no key update", [stage.run])
        done = await wake(stage.leading, shard=0, epoch=stage.epoch, batch=10)
        assert done.looked_at == 0 and done.next_wake is not None
        await stage.sending.execute("rollback")
        await stage.act("look")
        assert (await states(stage.leading, stage.run))["wait"] == "success"
    finally:
        for conn in conns:
            await conn.close()


async def test_a_leader_that_dies_between_waking_and_committing_changes_nothing_and_the_next_one_does_it(
    database: str,
) -> None:
    conns = [await connect(database, purpose=Purpose.SCHEDULER) for _ in range(3)]
    stage = Stage(*conns)
    try:
        await stage.begin()
        for step in ("defer", "deferred", "send", "sent"):
            await stage.act(step)
        dying = await connect(database, purpose=Purpose.SCHEDULER)
        await dying.execute("begin")
        await dying.execute("select * from wake_deferred_tasks(0::smallint, %s, 10)", [stage.epoch])
        await dying.close()
        assert (await states(stage.leading, stage.run))["wait"] == "deferred"
        stage.epoch = await lead(stage.leading)
        await stage.act("look")
        assert (await states(stage.leading, stage.run))["wait"] == "success"
        assert await value(stage.leading, "select is_delivered from event")
        done = await wake(stage.leading, shard=0, epoch=stage.epoch, batch=10)
        assert (done.looked_at, done.next_wake) == (0, None), "a second wake-up finds nothing"
    finally:
        for conn in conns:
            await conn.close()


async def test_a_cancel_and_an_event_at_once_neither_wait_for_each_other_nor_lose_a_word(database: str) -> None:
    """The row is in the hands of somebody who gives up: the event is told again until it was heard."""
    conns = [await connect(database, purpose=Purpose.SCHEDULER) for _ in range(3)]
    stage = Stage(*conns)
    try:
        await stage.begin()
        for step in ("defer", "deferred", "look"):
            await stage.act(step)
        await stage.deferring.execute("begin")
        await stage.deferring.execute("select stop_run(%s, ('me', null, null), null, null)", [stage.run])
        for step in ("send", "sent", "look"):
            await stage.act(step)
        assert not await value(stage.leading, "select is_delivered from event")
        await stage.deferring.execute("rollback")
        await stage.act("look")
        assert (await states(stage.leading, stage.run))["wait"] == "success"
    finally:
        for conn in conns:
            await conn.close()
