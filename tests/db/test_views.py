"""What is shown is derived: it can be dropped and made again while work goes on, and no decision reads it."""

from __future__ import annotations

import asyncio
import re

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from tests.engine.world import Runner, make_dag, put, start, states

# In the order in which they were made: one may be made of another.
VIEWS = (
    "select c.relname, pg_get_viewdef(c.oid) from pg_class c"
    " where c.relkind = 'v' and c.relnamespace = current_schema()::regnamespace order by c.oid"
)
FUNCTIONS = "select proname, prosrc from pg_proc where pronamespace = current_schema()::regnamespace"
SHAPE = {"extract": [], "load": ["extract"]}


async def views_of(conn: AsyncConnection) -> dict[str, str]:
    return {str(name): str(text) for name, text in await (await conn.execute(VIEWS)).fetchall()}


async def drop(conn: AsyncConnection, names: list[str]) -> None:
    await conn.execute(f"drop view {', '.join(names)} cascade")  # type: ignore[arg-type]


@pytest.mark.requirement("S4")
async def test_no_stored_function_reads_a_view(conn: AsyncConnection) -> None:
    names = "|".join(await views_of(conn))
    assert names
    for function, source in await (await conn.execute(FUNCTIONS)).fetchall():
        plain = re.sub(r"--[^\n]*", "", str(source)).lower()
        assert not re.search(rf"\b(from|join)\s+({names})\b", plain), function


@pytest.mark.requirement("S4")
async def test_work_goes_on_without_any_view_and_all_is_shown_once_they_are_back(conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", SHAPE))
    views = await views_of(conn)
    await drop(conn, list(views))
    run = await start(conn, "etl")
    runner = await Runner.join(conn)
    for _ in SHAPE:
        (claim,) = await runner.claim()
        assert await runner.finish(claim) == []
    for name, definition in views.items():
        await conn.execute(f"create view {name} as {definition}")  # type: ignore[arg-type]
    assert await states(conn, run) == {"extract": "success", "load": "success"}
    assert (await views_of(conn)).keys() == views.keys()


@pytest.mark.requirement("S4")
async def test_views_are_rebuilt_under_load(conn: AsyncConnection, database: str) -> None:
    """Whoever works waits for nobody who rebuilds, and whoever looks waits for a moment."""
    await put(conn, make_dag("etl", SHAPE))
    views, rebuilt, done = await views_of(conn), 0, asyncio.Event()

    async def work() -> list[int]:
        made = []
        async with await connect(database, purpose=Purpose.SCHEDULER) as own:
            runner = await Runner.join(own)
            for _ in range(30):
                made.append(await start(own, "etl"))
                for _ in SHAPE:
                    for claim in await runner.claim():
                        assert await runner.finish(claim) == []
        done.set()
        return made

    working = asyncio.create_task(work())
    while not done.is_set() and not working.done():
        async with conn.transaction():
            await drop(conn, list(views))
            for name, definition in views.items():
                await conn.execute(f"create view {name} as {definition}")  # type: ignore[arg-type]
        rebuilt += 1
    made = await working
    assert rebuilt > 1
    for run in made:
        assert await states(conn, run) == {"extract": "success", "load": "success"}
