"""What has moved since the last look: everything once, in whatever order transactions commit."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from psycopg import AsyncConnection

from evertick.api import change_feed as module
from evertick.api.change_feed import Change, ChangeFeed, Interest, TooManyChanges
from evertick.db.connect import Purpose, connect
from evertick.domain.access import Actor
from evertick.engine.dags import pause
from evertick.engine.gates import set_pool
from evertick.engine.runners import drain
from evertick.engine.runs import cancel
from evertick.engine.tasks import clear, select_tasks
from tests.engine.world import Runner, make_dag, put, start

ALL = Interest(is_all=True)
SHAPE = {"extract": [], "load": ["extract"]}


@pytest.fixture
async def reader(database: str) -> AsyncIterator[AsyncConnection]:
    async with await connect(database, purpose=Purpose.API_READ) as opened:
        yield opened


@pytest.fixture
async def other(database: str) -> AsyncIterator[AsyncConnection]:
    async with await connect(database, purpose=Purpose.SCHEDULER) as opened:
        yield opened


@pytest.fixture
async def tail(reader: AsyncConnection, conn: AsyncConnection) -> ChangeFeed:
    await put(conn, make_dag("etl", SHAPE))
    made = ChangeFeed()
    await made.begin(reader)
    # While an older transaction of any database is open, what was written just before the beginning is told once: here, not later.
    await made.look(reader, lambda: ALL)
    return made


async def told(tail: ChangeFeed, reader: AsyncConnection, interest: Interest = ALL) -> list[tuple[object, ...]]:
    return [brief(change) for change in await tail.look(reader, lambda: interest)]


def brief(change: Change) -> tuple[object, ...]:
    facts = change.facts
    kept = [facts[name] for name in ("run_id", "task", "state", "verb", "pool", "runner") if name in facts]
    return (change.name, *kept)


async def test_each_step_of_a_run_is_told_once_and_in_its_order(
    tail: ChangeFeed, reader: AsyncConnection, conn: AsyncConnection
) -> None:
    assert await told(tail, reader) == []
    run = await start(conn, "etl")
    assert await told(tail, reader) == [("run", run, "running"), ("task", run, "extract", "available")]
    assert await told(tail, reader) == []
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    assert await told(tail, reader) == [("task", run, "extract", "running")]
    await runner.finish(claim)
    assert sorted(await told(tail, reader)) == [
        ("run", run, "running"),
        ("task", run, "extract", "success"),
        ("task", run, "load", "available"),
    ]
    assert await runner.drain() == ["load"]
    # It began and ended between two looks; the end of the run comes last.
    assert await told(tail, reader) == [("task", run, "load", "success"), ("run", run, "success")]
    assert await told(tail, reader) == []


async def test_a_run_that_came_and_went_between_two_looks_is_told(
    tail: ChangeFeed, reader: AsyncConnection, conn: AsyncConnection
) -> None:
    run = await start(conn, "etl")
    await (await Runner.join(conn)).drain()
    found = await told(tail, reader)
    assert found[-1] == ("run", run, "success") and len(found) == 3
    assert await told(tail, reader) == []


async def test_what_commits_later_is_told_later_and_what_was_told_is_not_told_again(
    tail: ChangeFeed, reader: AsyncConnection, conn: AsyncConnection, other: AsyncConnection
) -> None:
    """The one that drew its numbers first commits last: a reader that goes by the largest number would miss it."""
    async with conn.transaction():
        first = await start(conn, "etl")
        second = await start(other, "etl")
        assert second > first
        assert ("run", second, "running") in await told(tail, reader)
        assert await told(tail, reader) == []
    assert await told(tail, reader) == [("run", first, "running"), ("task", first, "extract", "available")]
    assert await told(tail, reader) == []


async def test_a_part_behind_a_savepoint_is_not_missed(
    tail: ChangeFeed, reader: AsyncConnection, conn: AsyncConnection, other: AsyncConnection
) -> None:
    """It has a number of its own, which no snapshot names."""
    async with conn.transaction():
        await start(conn, "etl")
        async with conn.transaction():
            inner = await start(conn, "etl")
        later = await start(other, "etl")
        assert ("run", later, "running") in await told(tail, reader)
    assert ("run", inner, "running") in await told(tail, reader)
    assert await told(tail, reader) == []


async def test_a_short_run_that_commits_out_of_order_is_told_when_it_is_over_by_then(
    tail: ChangeFeed, reader: AsyncConnection, conn: AsyncConnection, other: AsyncConnection
) -> None:
    async with conn.transaction():
        first = await start(conn, "etl")
        for _ in range(3):
            await start(other, "etl")
            await told(tail, reader)
    await (await Runner.join(conn)).drain()
    found = await told(tail, reader)
    assert ("run", first, "success") in found and ("task", first, "load", "success") in found


async def test_an_old_transaction_of_somebody_else_does_not_make_it_read_everything_again(
    tail: ChangeFeed,
    reader: AsyncConnection,
    conn: AsyncConnection,
    other: AsyncConnection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with other.transaction():
        await other.execute("select pg_current_xact_id()")
        for _ in range(5):
            await start(conn, "etl")
            assert len(await told(tail, reader)) == 2
        assert len([key for key in tail._reported if key[0] != "entry"]) == 10
        monkeypatch.setattr(module, "LONGEST_TRANSACTION_SECONDS", 0.0)
        assert await told(tail, reader) == []
        assert await told(tail, reader) == []
        assert len(tail._reported) == 0 and len(tail._marks) <= 4


async def test_what_people_do_is_told_without_its_details(
    tail: ChangeFeed, reader: AsyncConnection, conn: AsyncConnection
) -> None:
    run = await start(conn, "etl")
    runner = await Runner.join(conn)
    await runner.drain()
    await told(tail, reader)
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run, names=["load"]), actor=Actor("ann"))
    found = await told(tail, reader)
    assert found[0] == ("run", run, "running", "clear") and ("task", run, "load", "available") in found
    await cancel(conn, run_id=run, actor=Actor("ann"), reason="secret reason")
    changes = await tail.look(reader, lambda: ALL)
    assert brief(changes[0]) == ("run", run, "canceled", "cancel")
    assert "secret reason" not in str(changes) and "ann" not in str(changes)
    await pause(conn, dag="etl", actor=Actor("ann"))
    await set_pool(conn, name="db", slots=2, actor=Actor("ann"))
    await drain(conn, sessions=[runner.session], actor=Actor("ann"))
    found = await told(tail, reader)
    assert found == [("dag", "pause"), ("pool", "set_pool", "db"), ("runner", "drain", f"r{runner.session}")]


async def test_only_what_somebody_watches_is_looked_at_task_by_task(
    tail: ChangeFeed, reader: AsyncConnection, conn: AsyncConnection
) -> None:
    await put(conn, make_dag("other", SHAPE))
    await told(tail, reader)
    one, two, third = await start(conn, "etl"), await start(conn, "etl"), await start(conn, "other")
    found = await told(tail, reader, Interest(runs=frozenset({two})))
    assert [each for each in found if each[0] == "task"] == [("task", two, "extract", "available")]
    assert {each[1] for each in found} == {one, two, third}
    await (await Runner.join(conn)).drain()
    found = await told(tail, reader, Interest(dags=frozenset({"other"})))
    assert {each[1] for each in found if each[0] == "task"} == {third}
    assert len([each for each in found if each[0] == "task"]) == 2


async def test_a_flood_is_not_told_one_by_one(
    tail: ChangeFeed, reader: AsyncConnection, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_CHANGES", 3)
    for _ in range(4):
        await start(conn, "etl")
    with pytest.raises(TooManyChanges):
        await tail.look(reader, lambda: ALL)
    # Whoever watched reads everything again. While somebody else's transaction is older, some of it may be told once more.
    monkeypatch.undo()
    run = await start(conn, "etl")
    assert ("run", run, "running") in await told(tail, reader)


async def test_ends_are_found_among_more_open_runs_than_one_look_asks_about(
    tail: ChangeFeed, reader: AsyncConnection, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OPEN_PER_LOOK", 2)
    started = [await start(conn, "etl") for _ in range(5)]
    await told(tail, reader)
    await cancel(conn, run_id=started[3], actor=Actor("ann"), reason=None)
    found = [each for _ in range(3) for each in await told(tail, reader)]
    assert found.count(("run", started[3], "canceled")) == 1
