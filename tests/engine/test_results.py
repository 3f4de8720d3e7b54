"""Which result a task sees: always that of the attempt that counts."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import tasks
from evertick.domain.access import Actor
from evertick.domain.dags.spec import DagSpec
from evertick.engine.runners import mark_runner_dead
from evertick.engine.tasks import clear, select_tasks
from tests.engine.world import Runner, key_of, make_dag, put, start


def two() -> DagSpec:
    return make_dag("d", {"a": [], "b": ["a"]}, per_task={"b": {"inputs": ("a",), "trigger_rule": "all_done"}})


@pytest.mark.requirement("F8")
async def test_a_zombie_attempt_changes_no_result(conn: AsyncConnection) -> None:
    """A runner that was given up comes back with a result when its task has run elsewhere, and before that."""
    await put(conn, two())
    run_id = await start(conn, "d")
    zombie, other = await Runner.join(conn), await Runner.join(conn)
    (old,) = await zombie.claim()
    await mark_runner_dead(conn, session=zombie.session, reason="killed", infra_retries=3)
    assert await zombie.finish(old, result={"of": "zombie"}) == [(key_of(old), old.epoch)]
    assert await tasks.result(conn, key_of(old)) is None
    (new,) = await other.claim()
    assert await zombie.finish(old, result={"of": "zombie"}) == [(key_of(old), old.epoch)]
    claims, refused = await other.step([(new, "success", {"result": {"of": "other"}})], free=1)
    assert refused == []
    assert await zombie.finish(old, result={"of": "zombie"}) == [(key_of(old), old.epoch)]
    assert [claim.inputs for claim in claims] == ['{"a": {"of": "other"}}']
    assert await tasks.result(conn, key_of(old)) == {"of": "other"}
    assert run_id == old.run_id


async def test_what_was_cleared_has_no_result_until_it_has_run_again(conn: AsyncConnection) -> None:
    await put(conn, two())
    run_id = await start(conn, "d")
    runner = await Runner.join(conn)
    (first,) = await runner.claim()
    (second,), _ = await runner.step([(first, "success", {"result": 1})], free=1)
    assert second.inputs == '{"a": 1}'
    await runner.finish(second)
    chosen = await select_tasks(conn, run_id=run_id, names=["a"], with_downstream=True)
    await clear(conn, run_id=run_id, chosen=chosen, actor=Actor("test"))
    assert await tasks.result(conn, key_of(first)) is None
    (again,) = await runner.claim()
    (below,), _ = await runner.step([(again, "failed", {"no_retry": True})], free=1)
    assert below.inputs == '{"a": null}'
