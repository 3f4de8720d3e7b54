"""Who watches is told everything from their place on, or to read it all again; nobody waits for anybody."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime

import psycopg
import pytest
import structlog
from psycopg import AsyncConnection

from evertick.api import event_hub as module
from evertick.api.event_hub import IDLE_SECONDS, EventHub, Watcher
from evertick.domain.access import Actor, Principal, Role
from evertick.domain.errors import PostgresUnavailable, RateLimited
from evertick.engine.gates import set_pool
from tests.engine.world import Runner, make_dag, put, start, value

ANN = Principal(name="ann", role=Role.VIEWER)
SHAPE = {"extract": [], "load": ["extract"]}


class Heard:
    """One watcher's stream, read event by event."""

    def __init__(self, hub: EventHub, watcher: Watcher, after: str | None) -> None:
        self.hub, self.watcher = hub, watcher
        self.stream: AsyncGenerator[str, None] = hub.events(watcher, after=after)
        self.last_id = ""
        self.began = datetime.now(UTC).isoformat()

    async def next(self) -> list[tuple[str, dict[str, object]]]:
        """The next part, as (name, data) of each event in it. But for what the fixture published: while an older transaction
        of any database of this server is open, what was done just before the beginning is told once more."""
        found: list[tuple[str, dict[str, object]]] = []
        while not found:
            for text in (await anext(self.stream)).removesuffix("\n\n").split("\n\n"):
                fields = dict(line.split(": ", 1) for line in text.split("\n"))
                self.last_id = fields["id"]
                name, data = fields.get("event", "heartbeat"), json.loads(fields.get("data", "{}"))
                is_past = data.get("verb") == "publish" and str(data["at"]) < self.began
                found += [] if is_past else [(name, data)]
        return found

    async def names(self) -> list[str]:
        return [name for name, _ in await self.next()]

    async def leave(self) -> None:
        await self.stream.aclose()
        self.hub.leave(self.watcher)


@pytest.fixture
async def hub(database: str, conn: AsyncConnection) -> AsyncIterator[EventHub]:
    await put(conn, make_dag("etl", SHAPE, tags=("finance",)))
    await put(conn, make_dag("other", SHAPE))
    made = EventHub(database, structlog.get_logger())
    yield made
    await made._link.close()


async def watch(
    hub: EventHub,
    who: Principal = ANN,
    *,
    after: str | None = None,
    runs: tuple[int, ...] = (),
    dags: tuple[str, ...] = (),
) -> Heard:
    heard = Heard(hub, hub.join(who, runs=runs, dags=dags), after)
    if not hub._token:
        await hub.tick()
    await hub.started()
    ((name, data),) = await heard.next()
    assert name == "hello" and data["cursor"] == heard.last_id
    return heard


async def test_everybody_is_told_from_their_place_on_by_one_look(hub: EventHub, conn: AsyncConnection) -> None:
    first, second = await watch(hub), await watch(hub, dags=("etl",))
    run = await start(conn, "etl")
    other = await start(conn, "other")
    await hub.tick()
    told = await first.next()
    assert [(name, data["dag"], data["run_id"]) for name, data in told] == [
        ("run", "etl", run),
        ("run", "other", other),
        ("task", "etl", run),
        ("task", "other", other),
    ]
    assert [data["run_id"] for _, data in await second.next()] == [run, run]
    task = dict(told)["task"]
    assert {"dag", "run_id", "task", "map_index", "state", "attempt", "at"} == task.keys()
    assert task["map_index"] == -1 and task["state"] == "available"


async def test_who_comes_back_goes_on_without_a_gap_and_without_a_repetition(
    hub: EventHub, conn: AsyncConnection
) -> None:
    heard = await watch(hub, dags=("etl",))
    run = await start(conn, "etl")
    await hub.tick()
    await heard.next()
    left_at = heard.last_id
    await heard.leave()
    await (await Runner.join(conn)).drain()
    await hub.tick()
    again = await watch(hub, dags=("etl",), after=left_at)
    assert again.last_id == left_at
    told = [(name, data.get("task"), data["state"]) for name, data in await again.next()]
    assert told[-1] == ("run", None, "success") and len(told) == 3
    once_more = await watch(hub, dags=("etl",), after=left_at)
    assert len(await once_more.next()) == 3
    # At its end there is nothing to be told.
    at_end = await watch(hub, dags=("etl",), after=again.last_id)
    assert at_end.watcher.place == hub._number
    assert run == dict(await (await watch(hub, dags=("etl",), after=left_at)).next())["run"]["run_id"]


@pytest.mark.parametrize("after", ["nonsense", "-1", "beef-3", "{token}-99", "{token}-x", "{token}-٣", "{token}--1"])
async def test_an_id_that_is_not_ours_means_to_read_everything_again(hub: EventHub, after: str) -> None:
    await watch(hub)
    heard = await watch(hub, after=after.format(token=hub._token))
    assert await heard.names() == ["reset"]


async def test_what_nobody_watched_meanwhile_means_to_read_everything_again(
    hub: EventHub, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER_SECONDS", 0.0)
    stays, leaves = await watch(hub, dags=("other",)), await watch(hub, dags=("etl",))
    await start(conn, "other")
    await hub.tick()
    left_at = f"{hub._token}-{hub._number}"
    await leaves.leave()
    await start(conn, "etl")
    await hub.tick()
    await start(conn, "other")
    await hub.tick()
    heard = await watch(hub, dags=("etl",), after=left_at)
    assert await heard.names() == ["reset"]
    assert "reset" not in await stays.names()


async def test_a_slow_reader_is_told_to_read_again_and_slows_nobody(
    hub: EventHub, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub._ring = type(hub._ring)(maxlen=4)
    slow, quick = await watch(hub), await watch(hub)
    for _ in range(3):
        await start(conn, "etl")
        await hub.tick()
        assert await quick.names() == ["run", "task"]
    assert await slow.names() == ["reset"]
    run = await start(conn, "etl")
    await hub.tick()
    assert [data["run_id"] for _, data in await slow.next()] == [run, run]


async def test_a_flood_is_told_as_one_reset(
    hub: EventHub, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evertick.api.change_feed.MOST_CHANGES", 3)
    heard = await watch(hub)
    for _ in range(4):
        await start(conn, "etl")
    await hub.tick()
    assert await heard.names() == ["reset"]
    # While somebody who began before is still at work on this server, if only in another test's database, it comes again.
    monkeypatch.undo()
    run = await start(conn, "etl")
    await hub.tick()
    told = await heard.next()
    assert {name for name, _ in told} == {"run", "task"}
    assert [name for name, data in told if data["run_id"] == run] == ["run", "task"]


async def test_tags_and_permissions_hold_for_each_event(hub: EventHub, conn: AsyncConnection) -> None:
    limited = await watch(hub, Principal(name="lim", role=Role.ADMIN, tags=frozenset({"finance"})))
    full = await watch(hub)
    await start(conn, "other")
    await set_pool(conn, name="db", slots=2, actor=Actor("ann"))
    mine = await start(conn, "etl")
    await hub.tick()
    assert {data.get("dag") for _, data in await limited.next()} == {"etl"}
    told = await full.next()
    assert ("pool", "db") in [(name, data.get("pool")) for name, data in told]
    # A tag that is taken away counts from the next event on.
    await put(conn, make_dag("etl", {**SHAPE, "more": []}))
    await (await Runner.join(conn)).drain()
    await hub.tick()
    assert mine in {data.get("run_id") for _, data in await full.next()}
    await put(conn, make_dag("etl", SHAPE, tags=("finance",)))
    await hub.tick()
    assert [(name, data["verb"]) for name, data in await limited.next()] == [("dag", "publish")]


async def test_who_signed_out_is_shown_the_door(
    hub: EventHub, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = await watch(hub, Principal(name="gone", role=Role.VIEWER, credential_id=999))
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.0)
    await hub.tick()
    ((name, data),) = await heard.next()
    assert name == "end" and "sign in" in str(data["reason"])
    with pytest.raises(StopAsyncIteration):
        await anext(heard.stream)


async def test_streams_are_few_per_user_and_in_all(hub: EventHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(module.MOST_STREAMS):
        hub.join(Principal(name=f"user {number // module.MOST_STREAMS_OF_USER}", role=Role.VIEWER))
        if number == module.MOST_STREAMS_OF_USER - 1:
            with pytest.raises(RateLimited, match="20 of user 0"):
                hub.join(Principal(name="user 0", role=Role.VIEWER))
    with pytest.raises(RateLimited, match="100 in total"):
        hub.join(ANN)
    hub.leave(next(iter(hub.watchers)))
    hub.join(ANN)


async def test_a_quiet_stream_keeps_its_place_by_heartbeats(
    hub: EventHub, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = await watch(hub, dags=("other",))
    await start(conn, "etl")
    await hub.tick()
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.0)
    assert await heard.names() == ["heartbeat"]
    assert heard.last_id == f"{hub._token}-{hub._number}" != f"{hub._token}-0"


async def test_after_the_database_was_away_everything_is_read_again(hub: EventHub, conn: AsyncConnection) -> None:
    heard = await watch(hub)
    await value(
        conn,
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'evertick-api-read'"
        " and datname = current_database()",
    )
    with pytest.raises(psycopg.OperationalError):
        await hub.tick()
    await start(conn, "etl")
    await hub.tick()
    assert await heard.names() == ["reset"]
    assert heard.last_id.startswith(f"{hub._token}-"), "numbers begin again, under another token"


async def test_nothing_is_asked_while_nobody_watches(
    hub: EventHub, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER_SECONDS", 0.0)
    assert await hub.tick() == IDLE_SECONDS
    heard = await watch(hub)
    assert await hub.tick() < IDLE_SECONDS
    await heard.leave()
    assert await hub.tick() == IDLE_SECONDS and hub._link._conn is None
    monkeypatch.setattr(module, "START_SECONDS", 0.01)
    hub.join(ANN)
    with pytest.raises(PostgresUnavailable, match="Events are not available"):
        await hub.started()
