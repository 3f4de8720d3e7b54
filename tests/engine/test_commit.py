"""The end of a task in the transaction of its own writes: both or none, and never of an attempt that was taken away."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.attempts.protocol import OPEN_VERBS
from evertick.db import roles
from evertick.db.function_sets import own_set
from evertick.db.queries.secrets import AttemptHolder
from evertick.db.queries.tasks import ExchangeRow
from evertick.db.task_commit import FENCE_TABLE, EndingAttempt, commit
from evertick.domain.errors import LeaseLost, UserError
from evertick.engine.asks import ask
from evertick.engine.runners import mark_runner_dead
from evertick.runner.asks import FACTS
from tests.engine import invariants
from tests.engine.world import Runner, key_of, make_dag, put, run_state, start, states, value

# `make durable` plays 200 of them.
ZOMBIES = int(os.environ.get("EVERTICK_TEST_ZOMBIES", "20"))
TABLE = "create table public.ledger (run_id bigint, epoch int)"
COUNT = "select count(*) from public.ledger"


class Task:
    """The process of an attempt, with a connection of its own."""

    def __init__(self, url: str, runner: Runner, claim: ExchangeRow) -> None:
        self.conn = psycopg.connect(url)
        self.runner, self.claim = runner, claim

    def write(self) -> None:
        self.conn.execute("insert into public.ledger values (%s, %s)", [self.claim.run_id, self.claim.epoch])

    async def place(self) -> dict[str, str]:
        key = key_of(self.claim)
        holder = AttemptHolder(session=self.runner.session, key=key, epoch=self.claim.epoch)
        found: Any = await ask(self.runner.conn, holder, "commit_place", {})
        return dict(found)

    async def commit(self, place: dict[str, str], result: object = None, mark: str = "m") -> object:
        at = self.claim
        attempt = EndingAttempt(
            session=self.runner.session, run_id=at.run_id, idx=at.idx, map_index=at.map_index, epoch=at.epoch, mark=mark
        )
        return json.loads(await asyncio.to_thread(commit, self.conn, attempt, place, json.dumps(result)))


async def claimed(conn: AsyncConnection, database: str) -> Task:
    runner = await Runner.join(conn)
    (claim,) = await runner.claim(1)
    return Task(database, runner, claim)


@pytest.fixture
async def ledger(conn: AsyncConnection) -> AsyncConnection:
    await invariants.install(conn)
    await put(conn, make_dag("pay", {"charge": [], "ship": ["charge"]}))
    await conn.execute(TABLE)
    return conn


async def test_what_the_task_wrote_its_end_and_its_successors_are_one_transaction(
    ledger: AsyncConnection, database: str
) -> None:
    run_id = await start(ledger, "pay")
    task = await claimed(ledger, database)
    task.write()
    assert await task.commit(await task.place(), {"paid": 3}) == {"paid": 3}
    assert await states(ledger, run_id) == {"charge": "success", "ship": "available"}
    assert await value(ledger, COUNT) == 1
    assert await value(ledger, "select value from result") == {"paid": 3}
    # The report of the process follows. It changes nothing, and its last lines are kept.
    assert await task.runner.finish(task.claim, "failed", log="1 INFO x\n", seq=0, until=9) == []
    assert (await states(ledger, run_id))["charge"] == "success"
    assert await value(ledger, "select content from log_chunk") == "1 INFO x\n"
    with pytest.raises(LeaseLost, match="rolled back"):
        task.write()
        await task.commit({"path": str(await value(ledger, "show search_path")), "server": await server(ledger)})
    assert (await value(ledger, COUNT), await invariants.violations(ledger)) == (1, [])
    await (await Runner.join(ledger)).drain()
    assert await run_state(ledger, run_id) == "success"


async def server(conn: AsyncConnection) -> str:
    return str(await value(conn, "select server_name()"))


async def test_an_attempt_that_is_asked_to_stop_commits_nothing(ledger: AsyncConnection, database: str) -> None:
    run_id = await start(ledger, "pay")
    task = await claimed(ledger, database)
    place = await task.place()
    await ledger.execute("update task set request = 'cancel' where run_id = %s and state = 'running'", [run_id])
    task.write()
    with pytest.raises(LeaseLost):
        await task.commit(place)
    assert await value(ledger, COUNT) == 0


async def test_a_frozen_worker_changes_nothing_after_its_lease_was_taken(
    ledger: AsyncConnection, database: str
) -> None:
    for number in range(ZOMBIES):
        await start(ledger, "pay")
        zombie = await claimed(ledger, database)
        place = await zombie.place()
        zombie.write()
        # It freezes with its transaction open, and another attempt does the work before it wakes, or after.
        await mark_runner_dead(ledger, session=zombie.runner.session, reason="agent_lost: test", infra_retries=3)
        heir = await claimed(ledger, database)
        for each in (zombie, heir) if number % 2 else (heir, zombie):
            if each is heir:
                heir.write()
                await heir.commit(await heir.place())
            else:
                with pytest.raises(LeaseLost):
                    await zombie.commit(place)
        await heir.runner.drain()
        zombie.conn.close()
        heir.conn.close()
    query = "select count(*), count(distinct run_id), min(epoch) from public.ledger"
    assert await (await ledger.execute(query)).fetchone() == (ZOMBIES, ZOMBIES, 2)
    assert await invariants.violations(ledger) == []


async def test_on_another_database_the_effects_exist_once(ledger: AsyncConnection, database: str) -> None:
    run_id = await start(ledger, "pay")
    first = await claimed(ledger, database)
    elsewhere = {**await first.place(), "server": "another one"}
    first.write()
    with pytest.raises(UserError, match="create table evertick_fence"):
        await first.commit(elsewhere)
    await ledger.execute(FENCE_TABLE.replace("evertick_fence", "public.evertick_fence"))
    first.conn.execute("set search_path = public")
    first.write()
    assert await first.commit(elsewhere, "first") == "first"
    assert (await states(ledger, run_id))["charge"] == "running", "its end is reported as usual"
    await mark_runner_dead(ledger, session=first.runner.session, reason="agent_lost: test", infra_retries=3)
    second = await claimed(ledger, database)
    second.conn.execute("set search_path = public")
    second.write()
    assert await second.commit(elsewhere, "second") == "first"
    assert await value(ledger, COUNT) == 1
    # A task that was cleared has another mark, and does its work again.
    second.write()
    assert await second.commit(elsewhere, "third", mark="n") == "third"
    assert await value(ledger, COUNT) == 2


async def test_a_role_of_tasks_may_only_commit(ledger: AsyncConnection, database: str) -> None:
    run_id = await start(ledger, "pay")
    task = await claimed(ledger, database)
    place = await task.place()
    await roles.apply(ledger)
    task.conn.execute(f"set role {roles.COMMIT}")
    await task.commit(place)
    assert (await states(ledger, run_id))["charge"] == "success"
    for query in ("select * from evertick.lease", f"select {own_set().schema}.finish_attempt(1, '{{}}', 0)"):
        with pytest.raises((psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedFunction)):
            task.conn.execute(query)  # type: ignore[arg-type]
        task.conn.rollback()


def test_every_attempt_may_ask_where_it_can_commit() -> None:
    assert "commit_place" in OPEN_VERBS and "commit_place" in FACTS


def test_only_a_connection_can_be_committed() -> None:
    attempt = EndingAttempt(session=1, run_id=1, idx=0, map_index=-1, epoch=1, mark="m")
    with pytest.raises(UserError, match="takes a DB-API connection"):
        commit("postgresql://", attempt, {}, "null")
