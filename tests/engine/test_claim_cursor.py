"""Claims stay cheap beside rows that are gone but cannot be vacuumed, and find what lies before the cursor (V11)."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries.tasks import ClaimPosition, ExchangeRow
from evertick.engine.finish_and_claim import (
    EMPTY_LOOK_SECONDS,
    FULL_LOOK_SECONDS,
    LAG_SECONDS,
    RANKS,
    ClaimCursor,
    _finish_and_claim,
)
from tests.engine.world import Runner, make_dag, put, start

MANY = 1500


def claimed(place: int, seq: int) -> ExchangeRow:
    return ExchangeRow("claim", 1, 0, -1, 1, 1, 1, None, "{}", None, place, seq)


def test_the_first_look_is_at_everything_and_the_next_begins_at_the_cursor() -> None:
    cursor = ClaimCursor(2)
    assert cursor.begin(100.0).low is None
    assert cursor.begin(100.1).low == [0] * 2 * RANKS


def test_the_cursor_stays_behind_what_was_claimed_lately() -> None:
    cursor = ClaimCursor(1)
    cursor.begin(100.0)
    cursor.learn([claimed(4, 6), claimed(4, 7)], wanted=2, now=100.0)
    cursor.learn([claimed(4, 90)], wanted=1, now=101.0)
    low = cursor.begin(100.0 + LAG_SECONDS).low
    assert low is not None
    assert (low[4], sum(low)) == (7, 7)


def test_everything_is_looked_at_again_after_a_while_and_sooner_when_the_line_seems_empty() -> None:
    cursor = ClaimCursor(1)
    cursor.begin(100.0)
    cursor.learn([claimed(0, 1)], wanted=1, now=100.0)
    assert cursor.begin(100.0 + EMPTY_LOOK_SECONDS).low is not None
    assert cursor.begin(100.0 + FULL_LOOK_SECONDS).low is None
    cursor.learn([], wanted=1, now=106.0)
    assert cursor.begin(100.0 + FULL_LOOK_SECONDS + EMPTY_LOOK_SECONDS).low is None


async def test_rows_that_cannot_be_vacuumed_are_not_walked_over(conn: AsyncConnection, database: str) -> None:
    await put(conn, make_dag("wide", {f"t{number}": [] for number in range(MANY)}))
    await put(conn, make_dag("one", {"a": []}))
    runner = await Runner.join(conn)
    async with await connect(database, purpose=Purpose.READ) as reader, reader.transaction():
        await reader.execute("set transaction isolation level repeatable read")
        await reader.execute("select count(*) from task")
        await start(conn, "wide")
        claims = await runner.claim(MANY)
        assert len(claims) == MANY
        newest = claims[-1]
        low = [0] * RANKS
        low[newest.place] = newest.seq
        at_the_head = await _entries_read(conn, runner, None)
        at_the_cursor = await _entries_read(conn, runner, low)
    assert at_the_head >= MANY
    assert at_the_cursor < 20


async def test_a_task_before_the_cursor_waits_for_the_full_look_only(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}))
    runner = await Runner.join(conn)
    await start(conn, "one")
    assert await _claim(conn, runner, [1_000_000] * RANKS) == []
    assert len(await _claim(conn, runner, None)) == 1


async def test_each_queue_and_rank_has_its_own_place(conn: AsyncConnection) -> None:
    per_task = {"low": {"priority": 1}, "other": {"queue": "gpu"}}
    await put(conn, make_dag("mixed", {"low": [], "high": [], "other": []}, task_priority=9, per_task=per_task))
    runner = await Runner.join(conn, queues=("default", "gpu"))
    await start(conn, "mixed")
    claims = await _claim(conn, runner, None, queues=["default", "gpu"])
    assert [claim.place for claim in claims] == [0, 8, RANKS]


async def _claim(
    conn: AsyncConnection, runner: Runner, low: list[int] | None, queues: list[str] | None = None
) -> list[ExchangeRow]:
    rows = await _finish_and_claim(
        conn,
        session=runner.session,
        reports=None,
        infra_retries=3,
        queues=queues or ["default"],
        free=10,
        look=ClaimPosition(low),
    )
    return [row for row in rows if row.kind == "claim"]


async def _entries_read(conn: AsyncConnection, runner: Runner, low: list[int] | None) -> int:
    """How many entries of the line's index a claim of one task reads."""
    await start(conn, "one")
    before = await _read_so_far(conn)
    (claim,) = await _claim(conn, runner, low)
    read = await _read_so_far(conn) - before
    await runner.step([(claim, "success", {})])
    return read


async def _read_so_far(conn: AsyncConnection) -> int:
    await conn.execute("select pg_stat_force_next_flush()")
    await conn.execute("select pg_stat_clear_snapshot()")
    cursor = await conn.execute("select idx_tup_read from pg_stat_user_indexes where indexrelname = 'ready_task_pkey'")
    row = await cursor.fetchone()
    assert row is not None
    return int(row[0])
