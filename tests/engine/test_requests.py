"""Requests for runs: one run for each that was committed, a dead letter for each that cannot become one, and delays."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import requests
from evertick.domain.access import Actor
from evertick.domain.dags.params import Param, declare_params
from evertick.domain.errors import Conflict, NotLeader, UserError
from evertick.engine.dags import pause, unpause
from evertick.engine.inbound.requests import Taken, replay_dead_letters, start_delayed_runs, take_requests
from evertick.engine.maintenance import admit_queued_runs
from evertick.engine.runs import Particulars, cancel, refuse_another, trigger
from evertick.engine.shards import poll_work
from tests.engine import invariants
from tests.engine.world import OWN_LOCKS, T0, later, lead, make_dag, put, run_state, set_clock, states, value
from tests.system import enqueue_proof

ACTOR = Actor("test")
ROWS = declare_params({"rows": Param(1, type=int, minimum=1), "note": Param("", type=str)})


class Inbox:
    def __init__(self, conn: AsyncConnection, epoch: int) -> None:
        self.conn, self.epoch = conn, epoch

    async def enqueue(self, dag: str = "etl", params: str = "{}", **named: object) -> int:
        names = "".join(f", {name} => %({name})s" for name in named)
        query = f"select evertick.enqueue(%(dag)s, %(params)s{names})"
        cursor = await self.conn.execute(query, {"dag": dag, "params": params, **named})  # type: ignore[arg-type]
        row = await cursor.fetchone()
        assert row is not None
        return int(row[0])

    async def take(self, limit: int = 100) -> Taken | None:
        done = await take_requests(self.conn, shard=0, epoch=self.epoch, limit=limit)
        assert await invariants.violations(self.conn) == []
        return done

    async def runs(self) -> list[tuple[Any, ...]]:
        query = (
            "select r.key, r.params->>'rows', s.state::text from run r join run_status s using (run_id) order by 1, 2"
        )
        return await (await self.conn.execute(query)).fetchall()

    async def letters(self) -> list[tuple[str, str]]:
        found = await requests.dead_letters(self.conn, before=10**9, is_all=True, limit=100)
        return [(each.dag, each.reason) for each in found]


@pytest.fixture
async def inbox(conn: AsyncConnection) -> AsyncIterator[Inbox]:
    await invariants.install(conn)
    await set_clock(conn, T0)
    await put(conn, replace(make_dag("etl", {"t": []}), params=ROWS))
    yield Inbox(conn, await lead(conn))


async def test_a_request_is_a_run_exactly_if_its_transaction_commits(inbox: Inbox, database: str) -> None:
    async with await connect(database, purpose=Purpose.SCHEDULER) as other:
        async with other.transaction():
            await other.execute("select evertick.enqueue('etl', '{\"rows\": 2}', 'open')")
            # The leader neither sees the request of an open transaction nor waits for it.
            await inbox.conn.execute("set lock_timeout = '1ms'")
            seen = await poll_work(inbox.conn, shard=0, epoch=inbox.epoch, lost_after=90.0)
            assert (seen.has_requests, seen.errors) == (False, [])
            await inbox.enqueue(params='{"rows": 3}')
            assert await inbox.take() == Taken(1, 0, 0, None, False)
            held = (
                f"select array_agg(distinct c.relname::text) from {OWN_LOCKS} join pg_class c on c.oid = own.relation"
            )
            pid = other.info.backend_pid
            assert await value(inbox.conn, f"{held} where own.pid = %s", pid) == ["inbox", "inbox_inbox_id_seq"]
        with pytest.raises(ZeroDivisionError):
            async with other.transaction():
                await other.execute("select evertick.enqueue('etl', '{\"rows\": 4}')")
                raise ZeroDivisionError
    assert (await poll_work(inbox.conn, shard=0, epoch=inbox.epoch, lost_after=90.0)).has_requests
    assert await inbox.take() == Taken(1, 0, 0, None, False)
    assert await inbox.take() is None
    assert await inbox.runs() == [("open", "2", "running"), (None, "3", "running")]


async def test_what_cannot_become_a_run_is_a_dead_letter_and_can_be_replayed(inbox: Inbox) -> None:
    await inbox.enqueue("elt")
    await inbox.enqueue(params='{"rows": 0}')
    await inbox.enqueue(params='{"rows": 5}', key="five")
    assert await inbox.take() == Taken(1, 0, 2, None, False)
    assert await inbox.letters() == [
        ("etl", "param 'rows' is 0, but must be an integer of at least 1."),
        ("elt", "There is no DAG 'elt'. Did you mean 'etl'?"),
    ]
    await put(inbox.conn, make_dag("elt", {"t": []}))
    numbers = [each.letter_id for each in await requests.dead_letters(inbox.conn, before=99, is_all=False, limit=9)]
    assert await replay_dead_letters(inbox.conn, letter_ids=numbers, actor=ACTOR) == 2
    assert await replay_dead_letters(inbox.conn, letter_ids=numbers, actor=ACTOR) == 0, "once"
    assert await inbox.take() == Taken(1, 0, 1, None, False)
    assert await requests.dead_letters(inbox.conn, before=numbers[-1], is_all=False, limit=9) == []
    again = await requests.find_letter(inbox.conn, letter_id=numbers[0])
    assert again is not None and again.replayed_by == "test"


async def test_a_request_that_the_database_refuses_is_a_dead_letter_alone(inbox: Inbox) -> None:
    await inbox.conn.execute("alter table run add constraint poison check (params->>'rows' <> '13')")
    for rows in (12, 13, 14):
        await inbox.enqueue(params=f'{{"rows": {rows}}}')
    assert await inbox.take() == Taken(2, 0, 1, None, False)
    assert "poison" in (await inbox.letters())[0][1]


async def test_the_same_key_is_the_same_run(inbox: Inbox) -> None:
    for rows in (1, 1, 2):
        await inbox.enqueue(params=f'{{"rows": {rows}}}', key="a")
    assert await inbox.take() == Taken(1, 1, 1, None, False)
    assert await inbox.letters() == [("etl", "key 'a' belongs to run 1, which has other parameters")]
    await inbox.conn.execute("update dag set deleted_at = clock()")
    assert (await inbox.enqueue(key="b")) and (await inbox.take()) == Taken(0, 0, 1, None, False)


async def test_a_request_is_unique_for_a_period(inbox: Inbox) -> None:
    hour = timedelta(hours=1)
    for key, rows in (("a", 1), ("a", 2), (None, 3), (None, 3), (None, 4)):
        await inbox.enqueue(params=f'{{"rows": {rows}}}', key=key, unique_for=hour)
    assert await inbox.take() == Taken(3, 2, 0, None, False)
    about = Particulars(key="a", unique_for=hour)
    made = await trigger(inbox.conn, dag="etl", params={"rows": 9}, actor=ACTOR, about=about)
    assert (made.run_id, made.is_new) == (1, False), "requests of both kinds share their keys"
    await set_clock(inbox.conn, later(3601))
    made = await trigger(inbox.conn, dag="etl", params={"rows": 9}, actor=ACTOR, about=about)
    assert made.is_new
    await inbox.enqueue(params='{"rows": 10}', key="a", unique_for=hour)
    assert await inbox.take() == Taken(0, 1, 0, None, False)
    keys = [key for key, _, _ in await inbox.runs()]
    assert keys == ["a 2030-01-01T00:00:00.000000Z", "a 2030-01-01T01:00:01.000000Z", None, None]
    with pytest.raises(UserError, match="exclude each other"):
        await trigger(inbox.conn, dag="etl", params={}, actor=ACTOR, about=replace(about, fire_at=T0))
    with pytest.raises(UserError, match="at most ten years"):
        await trigger(inbox.conn, dag="etl", params={}, actor=ACTOR, about=replace(about, unique_for=timedelta(0)))


async def test_a_run_that_is_requested_for_later_begins_then(inbox: Inbox) -> None:
    await inbox.enqueue(run_at=later(60), key="soon")
    await inbox.enqueue(run_at=later(-60), key="past")
    assert await inbox.take() == Taken(2, 0, 0, later(60), False)
    made = await trigger(inbox.conn, dag="etl", params={}, actor=ACTOR, about=Particulars(start_at=later(90)))
    assert made.defers, "the leader has to know when it begins"
    assert [state for *_, state in await inbox.runs()] == ["running", "queued", "queued"]
    seen = await poll_work(inbox.conn, shard=0, epoch=inbox.epoch, lost_after=90.0)
    assert (seen.next_start, seen.dags_with_free_slots) == (later(60), [])
    assert (await admit_queued_runs(inbox.conn, shard=0, epoch=inbox.epoch)).admitted == 0
    await pause(inbox.conn, dag="etl", actor=ACTOR)
    await unpause(inbox.conn, dag="etl", actor=ACTOR)
    done = await start_delayed_runs(inbox.conn, shard=0, epoch=inbox.epoch, limit=10)
    assert (done.started, done.next_start) == (0, later(60))
    await set_clock(inbox.conn, later(60))
    done = await start_delayed_runs(inbox.conn, shard=0, epoch=inbox.epoch, limit=10)
    assert (done.started, done.next_start) == (1, later(90))
    soon = int(str(await value(inbox.conn, "select run_id from run where key = 'soon'")))
    assert await run_state(inbox.conn, soon) == "running" and await states(inbox.conn, soon) == {"t": "available"}
    await cancel(inbox.conn, run_id=made.run_id, actor=ACTOR)
    await set_clock(inbox.conn, later(90))
    await start_delayed_runs(inbox.conn, shard=0, epoch=inbox.epoch, limit=10)
    assert await run_state(inbox.conn, made.run_id) == "canceled"
    assert await invariants.violations(inbox.conn) == []


async def test_only_the_leader_takes_requests(inbox: Inbox) -> None:
    await inbox.enqueue(run_at=later(1))
    await inbox.enqueue(key="b")
    assert (await inbox.take(1)) is not None
    await set_clock(inbox.conn, later(2))
    await lead(inbox.conn)
    with pytest.raises(NotLeader):
        await inbox.take()
    with pytest.raises(NotLeader):
        await start_delayed_runs(inbox.conn, shard=0, epoch=inbox.epoch, limit=10)


async def test_a_repeated_trigger_must_say_the_same(inbox: Inbox) -> None:
    about = Particulars(key="k")
    made = await trigger(inbox.conn, dag="etl", params={"rows": 2}, actor=ACTOR, about=about)
    await refuse_another(inbox.conn, made.run_id, about, {"rows": 2})
    with pytest.raises(Conflict, match="whose 'rows' differs"):
        await refuse_another(inbox.conn, made.run_id, about, {"rows": 3})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("''", "dag is ''"),
        ("'etl', '[]'", "params is '[]'"),
        ("'etl', to_jsonb(repeat('x', 300000))", "params is"),
        ("'etl', jsonb_build_object('x', repeat('x', 300000))", "at most 262144"),
        ("'etl', '{}', ''", "key has 0 characters"),
        ("'etl', '{}', 'k', null, '-1s'", "unique_for is -00:00:01"),
        ("'etl', '{}', 'k', 'infinity'", "run_at is infinity"),
    ],
)
async def test_a_request_that_can_never_become_a_run_is_refused(
    rollback_conn: AsyncConnection, arguments: str, problem: str
) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=problem.replace("[", r"\[")):
        await rollback_conn.execute(f"select evertick.enqueue({arguments})")  # type: ignore[arg-type]


@pytest.mark.parametrize("has_events", [False, True], ids=["requests", "events"])
async def test_one_run_or_none_while_applications_and_leaders_die(database: str, has_events: bool) -> None:
    did, wrong = await enqueue_proof.play(database, count=300, has_events=has_events)
    assert wrong == [] and not did["dead letters"]
    assert did["cut off"] if has_events else did["die in commit"]
    assert did["leaders"] > 1
