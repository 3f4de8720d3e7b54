"""Many schedules: fifty thousand due within one second, and a million that are not due."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta

import psutil  # type: ignore[import-untyped]
from bench.case import Bench
from bench.figures import Figure, at_most, median
from bench.house import House, NotMeasured
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.notify import Channel, notify
from evertick.db.queries import dags
from evertick.db.statements import sql

_OTHERS = 20
_DUE = 50
_FEW = 1_000
_PLANT = """
with made as (
    insert into schedule (dag_id, name, version, spec, params, misfire, window_seconds, origin, changed_by, changed_at)
    select %(dag)s, %(name)s || n, 1, jsonb_build_object('kind', 'interval', 'timezone', 'UTC', 'every_seconds', %(every)s::float8,
           'anchor_at', to_char(w.due at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')),
           '{}', 'all', 86400, 'user', 'bench', clock()
    from generate_series(1, %(count)s) n
    cross join lateral (select %(due)s::timestamptz + make_interval(secs => %(spread)s::float8 * n / %(count)s) as due) w
    returning schedule_id, (spec->>'anchor_at')::timestamptz as due
)
insert into schedule_state (schedule_id, shard, version, next_due) select schedule_id, 0, 1, due from made returning schedule_id
"""


async def fire_50k(bench: Bench) -> list[Figure]:
    """Schedules due one after the other within one second, while others fire constantly. No runner: only fires are measured."""
    drained, doubles, lags = [], [], []
    await bench.server.make("fire_50k")
    async with bench.house("fire_50k", runners=0) as house:
        dag = await _dag(house)
        others = await _plant(house.conn, dag, "other-", _OTHERS, every=0.5, due=await _now(house.conn), spread=0.5)
        for number in bench.rounds():
            due = await _now(house.conn) + timedelta(seconds=bench.size.notice_seconds)
            # Each is due once, and then not for a day.
            ids = await _plant(house.conn, dag, f"spike-{number}-", bench.size.spike, every=86_400, due=due, spread=1)
            await house.conn.execute("vacuum analyze schedule_state")
            await notify(house.conn, Channel.SCHEDULE)
            drained.append(await _seconds_until_fired(house, ids, due))
            cursor = await house.conn.execute(
                "select count(*), count(distinct schedule_id) from run where schedule_id = any(%s)", [ids]
            )
            runs, fired = await cursor.fetchone() or (0, 0)
            if fired < len(ids):
                raise NotMeasured(f"{len(ids) - fired} of {len(ids)} schedules did not fire")
            doubles.append(float(runs - fired))
            cursor = await house.conn.execute(
                "select max(extract(epoch from created_at - fire_at))::float8 from run"
                " where schedule_id = any(%s) and fire_at >= %s",
                [others, due - timedelta(seconds=1)],
            )
            row = await cursor.fetchone()
            lags.append(float(row[0]) if row and row[0] is not None else 0.0)
    count = f"{bench.size.spike:,} schedules due within one second"
    return [
        median(
            "fire_50k.drained", f"{count}: from the first instant to the last commit", "s", drained, at_most(3.0), {}
        ),
        median("fire_50k.twice", f"{count}: fired twice", "runs", doubles, at_most(0), {}),
        median("fire_50k.others", f"{count}: longest lag of {_OTHERS} other schedules", "s", lags, at_most(1.0), {}),
    ]


async def idle_schedules(bench: Bench) -> list[Figure]:
    """The buffers that the due query reads with few and with very many idle schedules, and the scheduler's memory."""
    url = await bench.server.make("idle_schedules")
    async with bench.house("idle_schedules", runners=0) as house:
        dag = await _dag(house)
        scheduler = house.services["scheduler"].pid
        bench.say(f"{bench.size.idle_schedules:,} idle schedules")
        later = await _now(house.conn) + timedelta(days=300)
        await _plant(house.conn, dag, "few-", _FEW, every=86_400, due=later, spread=8e6)
        few = await _buffers(url, dag, "a-")
        for part in range(10):
            await _plant(
                house.conn, dag, f"many-{part}-", bench.size.idle_schedules // 10, every=86_400, due=later, spread=8e6
            )
        many = await _buffers(url, dag, "b-")
        await asyncio.sleep(bench.size.settle_seconds)
        memory = psutil.Process(scheduler).memory_info().rss / 1e6
    about = f"{bench.size.idle_schedules:,} idle schedules"
    facts = {"note": f"{_DUE} due; {few} buffers with {_FEW:,} idle ones, {many} with all"}
    return [
        Figure(
            name="idle_schedules.buffers",
            about=f"{about}: buffers of the due query ÷ those with {_FEW:,}",
            unit="ratio",
            value=many / few,
            goal=at_most(2.0),
            settings=facts,
        ),
        Figure(
            name="idle_schedules.memory",
            about=f"{about}: resident memory of the scheduler",
            unit="MB",
            value=memory,
            goal=at_most(100),
            settings=facts,
        ),
    ]


async def _dag(house: House) -> int:
    row = await dags.find(house.conn, "single_warm")
    assert row is not None
    return row.dag_id


async def _now(conn: AsyncConnection) -> datetime:
    cursor = await conn.execute("select date_trunc('second', clock())")
    row = await cursor.fetchone()
    assert row is not None
    return row[0]  # type: ignore[no-any-return]


async def _plant(
    conn: AsyncConnection, dag: int, name: str, count: int, *, every: float, due: datetime, spread: float
) -> list[int]:
    """Insert schedules whose first due times are spread over `spread` seconds from `due`."""
    values = {"dag": dag, "name": name, "count": count, "every": every, "due": due, "spread": spread}
    async with conn.transaction():
        await conn.execute("set local statement_timeout = 0")
        cursor = await conn.execute(_PLANT, values)
        return [row[0] for row in await cursor.fetchall()]


async def _seconds_until_fired(house: House, ids: list[int], due: datetime) -> float:
    """The time until another session sees that none of them is due, which is when the last commit is visible."""
    last = due + timedelta(seconds=1)
    await asyncio.sleep(max(0.0, last.timestamp() - time.time()))

    async def none_is_due() -> bool:
        cursor = await house.conn.execute(
            """select 1 from schedule_state where shard = 0 and next_due <= %s and next_due is not null and not is_paused
                  and error is null and schedule_id between %s and %s limit 1""",
            [last, ids[0], ids[-1]],
        )
        return await cursor.fetchone() is None

    await house.until(none_is_due, "all schedules have fired", pause_seconds=0.01)
    return time.time() - due.timestamp()


async def _buffers(url: str, dag: int, name: str) -> int:
    """The buffers that the due query touches, with the same number of due schedules. In a transaction that is rolled back."""
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        await conn.execute("set statement_timeout = 0")
        await conn.execute("vacuum analyze schedule_state")
        await conn.execute("vacuum analyze schedule")
        async with conn.transaction(force_rollback=True):
            now = await _now(conn)
            await _plant(conn, dag, name, _DUE, every=86_400, due=now - timedelta(seconds=60), spread=1)
            cursor = await conn.execute(
                f"explain (analyze, buffers, format json) {sql('schedules', 'due')}",  # type: ignore[arg-type]
                {"shard": 0, "batch": 1000, "passed_over": [], "half": None, "until": None},
            )
            row = await cursor.fetchone()
            assert row is not None
            plan = row[0][0]["Plan"]
            if plan["Actual Rows"] != _DUE:
                raise NotMeasured(f"{plan['Actual Rows']} schedules were due, not {_DUE}")
            return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
