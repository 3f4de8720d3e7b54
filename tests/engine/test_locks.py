"""Locks are taken in one order: what runs at the same time waits, and never waits in a circle."""

from __future__ import annotations

import asyncio

from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.domain.states import TriggerRule
from tests.engine.world import Runner, end, make_dag, put, start, value
from tests.waiting import eventually

_WAITING = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"


async def _until_waiting(conn: AsyncConnection, count: int) -> None:
    async def reached() -> bool:
        return int(str(await value(conn, _WAITING))) >= count

    await eventually(reached)


async def test_a_claim_and_a_finish_that_meet_on_early_starters_both_go_through(database: str) -> None:
    """t and u start at the first success. The claim takes u before t (by priority), the finish counts t before u (by
    place), while somebody else holds t: if the finish touched what waits no more, the two would wait for each other."""
    early = {"trigger_rule": TriggerRule.ONE_SUCCESS}
    shape = {"p": [], "q": [], "t": ["p", "q"], "u": ["p", "q"]}
    conns = [await connect(database, purpose=Purpose.RUNNER) for _ in range(4)]
    watch, holder, finishing, claiming = conns
    try:
        await put(
            watch, make_dag("meet", shape, per_task={"t": {**early, "priority": 1}, "u": {**early, "priority": 9}})
        )
        await start(watch, "meet")
        runner = await Runner.join(watch)
        p, q = await runner.claim(2)
        await runner.finish(p)
        await holder.execute("begin")
        await holder.execute("select 1 from task where idx = 2 for update")
        second = Runner(claiming, runner.session)
        claim = asyncio.ensure_future(second.claim(5))
        await _until_waiting(watch, 1)
        report = f"[{end(q, 'success')}]"
        finish = asyncio.ensure_future(
            finishing.execute("select refused from finish_attempts(%s, %s, 3, null, null)", [runner.session, report])
        )
        row = await (await asyncio.wait_for(finish, 60)).fetchone()
        assert row == (None,)
        await holder.execute("rollback")
        assert sorted(each.idx for each in await asyncio.wait_for(claim, 60)) == [2, 3]
    finally:
        for conn in conns:
            await conn.close()


async def test_many_runners_and_cancelers_at_once_never_deadlock(database: str) -> None:
    shape = {"a": [], **{f"m{i}": ["a"] for i in range(6)}, "z": [f"m{i}" for i in range(6)]}
    rules = {f"m{i}": {"priority": i} for i in range(6)} | {"z": {"trigger_rule": TriggerRule.ONE_SUCCESS}}
    conns = [await connect(database, purpose=Purpose.RUNNER) for _ in range(5)]
    try:
        await put(conns[0], make_dag("busy", shape, per_task=rules))
        runs = [await start(conns[0], "busy") for _ in range(12)]
        runners = [await Runner.join(conn) for conn in conns[:4]]

        async def cancel_some() -> None:
            for run in runs[::3]:
                await conns[4].execute("select cancel_run(%s, ('test', null, null), 'test')", [run])

        before = await value(conns[0], "select deadlocks from pg_stat_database where datname = current_database()")
        await asyncio.gather(*(runner.drain(batch=3) for runner in runners), cancel_some())
        for runner in runners:
            await runner.drain(batch=50)
        await conns[0].execute("select pg_stat_clear_snapshot()")
        after = await value(conns[0], "select deadlocks from pg_stat_database where datname = current_database()")
        assert after == before
        assert await value(conns[0], "select count(*) from run_status where state in ('queued', 'running')") == 0
    finally:
        for conn in conns:
            await conn.close()
