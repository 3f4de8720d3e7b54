"""Priority and fairness in the line: strict order, first in first out, and ageing under an endless stream of urgent work."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest
from psycopg import AsyncConnection

from evertick.db.queries.tasks import ExchangeRow
from evertick.engine import finish_and_claim as step_module
from evertick.engine.finish_and_claim import RANKS, ClaimCursor, finish_and_claim
from evertick.engine.finish_and_claim import overdue as decided
from tests.engine.world import Runner, end, later, make_dag, names_of, put, set_clock, start

AGING = 60.0
Ticking = Callable[[float], Awaitable[None]]


@pytest.fixture
def tick(conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch) -> Ticking:
    """Sets the database's time and the runner's own, to so many seconds."""
    hands = SimpleNamespace(now=0.0, monotonic=lambda: hands.now)
    monkeypatch.setattr(step_module, "time", hands)

    async def go(seconds: float) -> None:
        hands.now = seconds
        await set_clock(conn, later(seconds))

    return go


class Slot:
    """A runner with one slot: each step ends what it has and claims the next."""

    def __init__(self, runner: Runner, aging_seconds: float, queues: tuple[str, ...] = ("default",)) -> None:
        self.runner, self.queues = runner, queues
        self.cursor = ClaimCursor(len(queues), aging_seconds=aging_seconds)
        self.held: list[ExchangeRow] = []

    async def next(self, free: int = 1) -> list[str]:
        done = await finish_and_claim(
            self.runner.conn,
            session=self.runner.session,
            reports=[end(claim, "success") for claim in self.held],
            queues=list(self.queues),
            free=free,
            infra_retries=3,
            cursor=self.cursor,
        )
        self.held = done.claims
        return await names_of(self.runner.conn, done.claims)


async def put_levels(conn: AsyncConnection) -> None:
    for priority in range(10):
        await put(conn, make_dag(f"p{priority}", {f"t{priority}": []}, task_priority=priority))


async def seconds_until_it_starts(conn: AsyncConnection, tick: Ticking, aging: float) -> float | None:
    """How long a task of priority 0 waits while there is always something of priority 9, and more than can be done."""
    await put_levels(conn)
    slot, second = Slot(await Runner.join(conn), aging), 0.0
    await tick(0.0)
    for _ in range(5):
        await start(conn, "p9")
    await start(conn, "p0")
    while second < 12 * AGING:
        # What happens between is the same: the clock may jump until it is nearly over.
        second = second + 0.2 if second >= 9 * AGING - 1 or second < 2 else 9 * AGING - 1
        await tick(second)
        await start(conn, "p9")
        if await slot.next() == ["t0"]:
            return second
        if second > 9 * AGING + 3:
            return None
    return None


async def test_under_an_endless_stream_of_urgent_work_the_least_urgent_starts_in_time(
    conn: AsyncConnection, tick: Ticking
) -> None:
    waited = await seconds_until_it_starts(conn, tick, AGING)
    assert waited is not None and 9 * AGING < waited <= 9 * AGING + 1


async def test_strict_priority_lets_it_wait(conn: AsyncConnection, tick: Ticking) -> None:
    assert await seconds_until_it_starts(conn, tick, 0.0) is None


async def test_a_long_line_of_old_work_never_takes_more_than_every_second_place(
    conn: AsyncConnection, tick: Ticking
) -> None:
    await put_levels(conn)
    await tick(0.0)
    for _ in range(20):
        await start(conn, "p0")
    slot, ran = Slot(await Runner.join(conn), AGING), []
    for n in range(20):
        await tick(100 * AGING + n)
        await start(conn, "p9")
        ran += await slot.next()
    assert ran.count("t9") == ran.count("t0") == 10
    assert all(pair != ("t0", "t0") for pair in pairwise(ran))


async def test_each_level_is_first_in_first_out_also_for_those_that_waited_too_long(
    conn: AsyncConnection, tick: Ticking
) -> None:
    await put_levels(conn)
    runs = []
    for n in range(6):
        await tick(float(n))
        runs.append((await start(conn, "p2"), await start(conn, "p7")))
    slot = Slot(await Runner.join(conn), AGING)
    seen: dict[str, list[int]] = {"t2": [], "t7": []}
    for n in range(12):
        await tick(1000.0 + n)
        (name,) = await slot.next()
        seen[name].append(slot.held[0].run_id)
    assert seen == {"t2": [low for low, _ in runs], "t7": [high for _, high in runs]}


async def test_a_successor_is_handed_on_only_if_nothing_more_urgent_waits(conn: AsyncConnection, tick: Ticking) -> None:
    await put_levels(conn)
    await put(conn, make_dag("chain", {"first": [], "second": ["first"]}, task_priority=5))
    await tick(0.0)
    await start(conn, "chain")
    slot = Slot(await Runner.join(conn), AGING)
    assert await slot.next() == ["first"]
    await start(conn, "p7")
    await start(conn, "p5")
    await start(conn, "p4")
    assert [await slot.next() for _ in range(4)] == [["t7"], ["t5"], ["second"], ["t4"]]


async def test_another_queue_of_the_same_runner_does_not_starve_either(conn: AsyncConnection, tick: Ticking) -> None:
    await put(conn, make_dag("front", {"front": []}))
    await put(conn, make_dag("behind", {"behind": []}, task_queue="slow"))
    await tick(0.0)
    await start(conn, "behind")
    slot, ran = Slot(await Runner.join(conn), AGING, queues=("default", "slow")), []
    for second in (1.0, 2.0, AGING + 1, AGING + 2):
        await tick(second)
        await start(conn, "front")
        ran += await slot.next()
    assert "behind" in ran[2:] and ran[:2] == ["front", "front"]


async def test_half_of_many_free_slots_may_go_to_those_that_waited_too_long(
    conn: AsyncConnection, tick: Ticking
) -> None:
    await put_levels(conn)
    await tick(0.0)
    for priority in (0, 1, 2, 3):
        await start(conn, f"p{priority}")
    await tick(100 * AGING)
    for _ in range(5):
        await start(conn, "p9")
    ran = await Slot(await Runner.join(conn), AGING).next(4)
    assert ran == ["t3", "t2", "t9", "t9"]


async def test_the_database_and_the_program_agree_on_who_goes_first(conn: AsyncConnection) -> None:
    rng = random.Random(7)
    await set_clock(conn, later(0))
    for _ in range(60):
        waited = {rng.randrange(2 * RANKS): round(rng.uniform(0, 100), 3) for _ in range(rng.randint(1, 12))}
        await conn.execute("delete from ready_task")
        for place, seconds in waited.items():
            for more in (0, 5):
                await conn.execute(
                    "insert into ready_task (queue, rank, run_id, idx, map_index, enqueued_at) values (%s, %s, 1, 0, -1, %s)",
                    ["ab"[place // RANKS], place % RANKS, later(more - seconds)],
                )
        cursor = await conn.execute("select place from overdue_queues(array['a', 'b'], null, 10, 100)")
        assert [row[0] for row in await cursor.fetchall()] == decided(waited, 10.0), waited


async def test_what_lies_before_the_place_to_begin_at_is_not_looked_at(conn: AsyncConnection) -> None:
    await set_clock(conn, later(0))
    for rank, seconds in ((0, 0), (9, 500), (9, 200)):
        await conn.execute(
            "insert into ready_task (queue, rank, run_id, idx, map_index, enqueued_at) values ('a', %s, 1, 0, -1, %s)",
            [rank, later(-seconds)],
        )
    cursor = await conn.execute("select seq from ready_task where rank = 9 order by seq")
    (old,), (young,) = await cursor.fetchall()
    query = "select seq from overdue_queues(array['a'], %s::bigint[], 10, 100)"
    assert await (await conn.execute(query, [None])).fetchall() == [(old,)]
    assert await (await conn.execute(query, [[0] * 9 + [old + 1]])).fetchall() == [(young,)]
