"""Many claimers at one line at the same moment: nobody waits for another, nothing goes twice, and few claims are wasted."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.domain.routing import read_pattern
from evertick.engine.finish_and_claim import ClaimCursor, PatternClaims, exchange_matching, finish_and_claim
from tests.engine.world import Runner, make_dag, put, start, value

TASKS, BATCH = 300, 5
OF_ALL, FAIR, BY_NAME = "of all", "fair", "by name"


async def claim_until_empty(runner: Runner, kind: str) -> list[int]:
    """The sizes of the replies until one came back empty."""
    sizes, is_over = list[int](), False
    asked = {"session": runner.session, "reports": [], "free": BATCH, "infra_retries": 0}
    matching = PatternClaims([read_pattern("busy::*")], ["default"])
    while not is_over:
        if kind == BY_NAME:
            done = await exchange_matching(runner.conn, matching, **asked)  # type: ignore[arg-type]
        else:
            # A cursor of its own each time, so that every claim asks who waited too long.
            cursor = ClaimCursor(1, aging_seconds=0.001) if kind == FAIR else None
            done = await finish_and_claim(runner.conn, queues=["default"], cursor=cursor, **asked)  # type: ignore[arg-type]
        sizes.append(len(done.claims))
        is_over = not done.claims and not done.is_walking
    return sizes


@pytest.mark.requirement("H2", "K1", "D2")
@pytest.mark.parametrize("kind", [OF_ALL, FAIR, BY_NAME])
@pytest.mark.parametrize("claimers", [1, 8])
async def test_claimers_at_one_line_share_it_and_waste_little(
    conn: AsyncConnection, database: str, kind: str, claimers: int
) -> None:
    priorities = {f"t{n}": {"priority": n % 10} for n in range(TASKS)}
    await put(conn, make_dag("busy", {name: [] for name in priorities}, per_task=priorities))
    await start(conn, "busy")
    async with AsyncExitStack() as stack:
        conns = [
            await stack.enter_async_context(await connect(database, purpose=Purpose.RUNNER)) for _ in range(claimers)
        ]
        runners = [await Runner.join(each) for each in conns]
        replies = await asyncio.gather(*(claim_until_empty(runner, kind) for runner in runners))
    assert sum(map(sum, replies)) == TASKS == await value(conn, "select count(*) from lease")
    assert await value(conn, "select max(epoch) from task") == 1
    if kind == OF_ALL:
        # Each passes over what others have locked: only the end of the line gives less than was asked for.
        wasted = [size for sizes in replies for size in sizes if size < BATCH]
        assert len(wasted) <= 3 * claimers
