"""The same engine on the embedded PostgreSQL 18 and on an external one of another version, over TCP with a password."""

from __future__ import annotations

import pytest

from evertick.db.connect import Purpose, connect
from evertick.domain.retry import RetryPolicy
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.maintenance import promote_due_tasks
from tests.engine.simulation import run_episode
from tests.engine.world import T0, Runner, later, lead, make_dag, put, run_state, set_clock, start, states


@pytest.mark.requirement("A9")
async def test_a_schedule_a_retry_and_a_join_work_on_every_server(any_postgres: str) -> None:
    async with await connect(any_postgres, purpose=Purpose.SCHEDULER) as conn:
        await set_clock(conn, T0)
        epoch = await lead(conn)
        shape = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}
        await put(conn, make_dag("diamond", shape, every="@every 10s", task_retry=RetryPolicy(retries=1)))
        await set_clock(conn, later(10))
        assert (await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).settled == 1
        runner = await Runner.join(conn)
        (claim,) = await runner.claim()
        await runner.finish(claim, "failed", retry_in=5)
        assert await states(conn, 1) == {"a": "pending", "b": "waiting", "c": "waiting", "d": "waiting"}
        await set_clock(conn, later(15))
        assert (await promote_due_tasks(conn, shard=0, epoch=epoch, limit=10)).promoted == 1
        assert await runner.drain() == ["a", "b", "c", "d"]
        assert await run_state(conn, 1) == "success"
        assert await start(conn, "diamond") == 2


@pytest.mark.requirement("A9")
async def test_the_simulation_holds_on_every_server(any_postgres: str) -> None:
    assert sum((await run_episode(any_postgres, seed=424242, steps=300)).values()) == 300
