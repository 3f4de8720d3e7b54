"""Runs for events: one for each, one after some quiet, one for a group; in order by key, exactly once, and like a model."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import requests
from evertick.domain.access import Actor
from evertick.domain.dags.params import Param, declare_params
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.dags.validation import validate
from evertick.domain.errors import InvalidDag, NotLeader
from evertick.domain.schedules.events import EventTrigger, on_event
from evertick.domain.schedules.spec import ScheduleSpec, describe, parse_schedule
from evertick.engine.dags import delete
from evertick.engine.inbound.events import route_events
from evertick.engine.schedules import pause_schedule, unpause_schedule
from evertick.engine.shards import poll_work
from evertick.engine.waits import send_event
from tests.domain.schedules.event_model import Sent, groups_of
from tests.engine import invariants
from tests.engine.world import T0, Runner, later, lead, make_dag, put, set_clock, value

ACTOR = Actor("test")
PARAMS = declare_params({"region": Param(""), "n": Param(0, type=int), "events": Param([], type=list), "payload": None})


class Scene:
    """A DAG that runs for events, and its leader."""

    def __init__(self, conn: AsyncConnection, epoch: int) -> None:
        self.conn, self.epoch = conn, epoch

    async def publish(self, trigger: EventTrigger, **given: object) -> None:
        schedule = NamedSchedule(name="main", spec=parse_schedule(trigger), params=given)  # type: ignore[arg-type]
        await put(self.conn, replace(make_dag("w", {"t": []}), schedules=(schedule,), params=PARAMS))

    async def send(self, name: str, payload: object = None, key: str | None = None) -> int:
        return (await send_event(self.conn, name=name, payload=payload, key=key, actor=ACTOR)).event_id

    async def route(self, limit: int = 100) -> None:
        """As the leader does, until nothing is left."""
        while (await route_events(self.conn, shard=0, epoch=self.epoch, limit=limit)) is not None:
            assert await invariants.violations(self.conn) == []

    async def at(self, seconds: float) -> None:
        await set_clock(self.conn, later(seconds))
        await self.route()

    async def runs(self, name: str = "n") -> list[Any]:
        query = "select r.params->%s from run r order by r.run_id"
        return [row[0] for row in await (await self.conn.execute(query, [name])).fetchall()]

    async def groups(self) -> list[list[int]]:
        return [[each["payload"]["n"] for each in events] for events in await self.runs("events")]

    async def next_start(self) -> datetime | None:
        return (await poll_work(self.conn, shard=0, epoch=self.epoch, lost_after=90.0)).next_start


@pytest.fixture
async def scene(conn: AsyncConnection) -> AsyncIterator[Scene]:
    await invariants.install(conn)
    await set_clock(conn, T0)
    yield Scene(conn, await lead(conn))


async def test_each_event_is_one_run_with_its_payload_as_parameters(scene: Scene) -> None:
    await scene.publish(on_event("orders.{region}", each=True, where={"kind": ["new", "old"], "n": {"min": 1}}))
    await scene.send("orders.eu", {"n": 1, "kind": "new", "else": 5}, key="a")
    await scene.send("orders.eu", {"n": 1, "kind": "new", "else": 5}, key="a")
    await scene.send("orders.us", {"n": 2, "kind": "old"})
    for name, payload in (
        ("orders.eu", {"n": 0, "kind": "new"}),
        ("orders.eu.x", {"n": 1, "kind": "new"}),
        ("orders.eu", 1),
    ):
        await scene.send(name, payload)
    assert (await poll_work(scene.conn, shard=0, epoch=scene.epoch, lost_after=90.0)).has_requests
    await scene.route(limit=2)
    assert (await scene.runs(), await scene.runs("region")) == ([1, 2], ["eu", "us"])
    assert (await scene.runs("payload"))[0] == {"n": 1, "kind": "new", "else": 5}
    query = "select array_agg(distinct triggered_by), min(key) from run"
    found = await (await scene.conn.execute(query)).fetchone()
    assert found == (["event orders.eu", "event orders.us"], "main: event 1")
    assert await value(scene.conn, "select count(*) from event_arrival") == 0


async def test_an_event_that_cannot_be_a_run_is_a_dead_letter(scene: Scene) -> None:
    await scene.publish(on_event("orders", each=True))
    await scene.send("orders", {"n": "many"})
    await scene.send("orders", {"n": 3})
    await scene.route()
    assert await scene.runs() == [3]
    (letter,) = await requests.dead_letters(scene.conn, before=99, is_all=False, limit=9)
    assert (letter.dag, letter.key, letter.sent_by) == ("w", "main: event 1", "event orders")
    assert "param 'n' is 'many'" in letter.reason


async def test_nothing_is_noted_of_an_event_that_starts_nothing(scene: Scene) -> None:
    await scene.send("orders")
    assert await value(scene.conn, "select count(*) from event_arrival") == 0


async def test_events_of_a_key_run_one_after_the_other(scene: Scene) -> None:
    await scene.publish(on_event("orders", each=True, key="customer.id"))
    runner = await Runner.join(scene.conn)
    for n, customer in enumerate("aabab"):
        await scene.send("orders", {"n": n, "customer": {"id": customer}})
    await scene.route()
    assert await scene.runs() == [0, 2]
    first, second = await runner.claim()
    await runner.finish(first, "failed", no_retry=True)
    assert await scene.next_start() == T0, "the end of a run makes the next one due"
    await scene.route()
    assert await scene.runs() == [0, 2, 1]
    await runner.finish(second)
    await scene.send("orders", {"n": "bad", "customer": {"id": "b"}})
    await scene.route()
    assert await scene.runs() == [0, 2, 1, 4]
    for claim in await runner.claim():
        await runner.finish(claim)
        await scene.route()
    assert await scene.runs() == [0, 2, 1, 4, 3]
    for claim in await runner.claim():
        await runner.finish(claim)
    await scene.route()
    # A lost wake-up is found by the regular check.
    assert await value(scene.conn, "select count(*) from event_window") == 0
    await scene.send("orders", {"n": 7, "customer": {"id": "a"}})
    await scene.route()
    assert await scene.next_start() == later(600)


async def test_a_pause_of_the_schedule_and_its_end(scene: Scene) -> None:
    await scene.publish(on_event("orders", debounce="5s"))
    await scene.send("orders", {"n": 1})
    await scene.route()
    await pause_schedule(scene.conn, dag="w", name="main", actor=ACTOR)
    await scene.send("orders", {"n": 2})
    await scene.at(6)
    assert (await scene.runs(), await scene.next_start()) == ([], None)
    await unpause_schedule(scene.conn, dag="w", name="main", actor=ACTOR)
    await scene.route()
    assert await scene.runs() == [1], "what had come before the pause"
    await scene.send("orders", {"n": 3})
    await scene.route()
    await delete(scene.conn, dag="w", actor=ACTOR)
    await scene.at(60)
    assert (await scene.runs(), await value(scene.conn, "select count(*) from event_window")) == ([1], 0)


@pytest.mark.parametrize(
    "trigger",
    [
        on_event("e", debounce=2),
        on_event("e", batch=(3, "2s")),
        on_event("e", batch=(3, "2s"), key="g"),
        on_event("e", each=True),
    ],
    ids=["debounce", "batch", "batch by key", "each"],
)
async def test_runs_equal_the_model_whenever_the_leader_looks(scene: Scene, trigger: EventTrigger) -> None:
    dice = random.Random(7)
    await scene.publish(trigger)
    sent: list[Sent] = []
    now = 0.0
    for n in range(40):
        now += dice.choice([0, 0.3, 0.9, 1.9, 2.0, 5.0])
        await set_clock(scene.conn, later(now))
        group = dice.choice("ab")
        await scene.send("e", {"n": n, "g": group})
        sent.append(Sent(n, T0 + timedelta(seconds=now), group if trigger.key else ""))
        if dice.random() < 0.3:
            await scene.route(dice.choice([1, 3, 100]))
        if dice.random() < 0.2:
            scene.epoch = await lead(scene.conn)
    await scene.at(now + 60)
    assert sorted(await scene.groups()) == sorted(groups_of(trigger, sent))


async def test_only_the_leader_decides_and_each_event_once(scene: Scene) -> None:
    await scene.publish(on_event("orders", each=True))
    await scene.send("orders", {"n": 1})
    old, scene.epoch = scene.epoch, await lead(scene.conn)
    with pytest.raises(NotLeader):
        await route_events(scene.conn, shard=0, epoch=old, limit=9)
    query = "select * from apply_events(0::smallint, %s, '{1}', '[]', '[]')"
    await scene.conn.execute(query, [scene.epoch])
    with pytest.raises(Exception, match="taken by another leader"):
        await scene.conn.execute(query, [scene.epoch])


def test_a_group_of_events_needs_a_parameter_for_them() -> None:
    schedule = NamedSchedule(name="main", spec=parse_schedule(on_event("e", batch=(3, "2s"))))
    dag = replace(make_dag("w", {"t": []}), schedules=(schedule,))
    with pytest.raises(InvalidDag, match="needs a parameter for its events"):
        validate(dag)


def test_words() -> None:
    trigger = on_event("orders.{region}", debounce="5s", key="id", where={"n": {"min": 1}})
    spec = parse_schedule(trigger)
    assert ScheduleSpec.from_json(spec.to_json()) == spec
    words = 'event orders.{region}, after 5 seconds without another, separately by id, where {"n": {"min": 1}}'
    assert describe(spec) == words
    assert describe(parse_schedule(on_event("e", each=True, key="id"))) == "event e, each, in order by id"
    assert describe(parse_schedule(on_event("e", batch=(9, 1)))) == "event e, in groups of up to 9 within 1 second"
