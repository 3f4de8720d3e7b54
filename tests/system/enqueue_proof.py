"""Applications that commit, roll back and die while leaders take their requests and are cut off: one run or none for each. And
senders of events that are cut off and try again: one run for each.

`python -m tests.system.enqueue_proof --count 100000` is `make enqueue`, with --events `make events`; the tests take a share.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psycopg
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.domain.access import Actor
from evertick.domain.dags.params import declare_params
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.errors import NotLeader
from evertick.domain.schedules.events import on_event
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.inbound.events import route_events
from evertick.engine.inbound.requests import take_requests
from evertick.engine.shards import acquire_shard
from evertick.engine.waits import send_event
from evertick.enqueue import enqueue_async
from tests.databases import own_cluster
from tests.engine.world import make_dag, put

CLIENTS, LEADERS = 6, 2
# What an application may do after it has written its own row and asked for the run.
ENDS = ("commit", "commit", "roll back", "die", "die in commit", "repeat")
# Every row of the application and every run, by number: the answer names those that have only one of the two, or two runs.
WRONG = """
    select coalesce(o.n, r.n), o.n is not null as has_row, r.runs from app_order o
    full join (select (coalesce(nullif(params->'payload', 'null'), params)->>'n')::int as n, count(*) as runs
               from run group by 1) r on r.n = o.n
    where o.n is null or r.n is null or r.runs <> 1 limit 10
"""


async def client(url: str, numbers: asyncio.Queue[int], dice: random.Random, did: Counter[str]) -> None:
    """Until the numbers are used up. Every second request has a key."""
    conn: AsyncConnection | None = None
    while not numbers.empty():
        number, end = numbers.get_nowait(), dice.choice(ENDS)
        did[end] += 1
        if conn is None or conn.closed:
            conn = await AsyncConnection.connect(url)
        key = f"order {number}" if number % 2 or end == "repeat" else None
        try:
            await conn.execute("insert into app_order (n) values (%s)", [number])
            await enqueue_async(conn, "work", {"n": number}, key=key)
            if end == "roll back":
                await conn.rollback()
            elif end == "die":
                conn.pgconn.finish()
            elif end == "die in commit":
                # The commit is on its way when the connection breaks: nobody knows whether it happened.
                conn.pgconn.send_query(b"commit")
                conn.pgconn.flush()
                conn.pgconn.finish()
            else:
                await conn.commit()
            if end == "repeat":
                await enqueue_async(conn, "work", {"n": number}, key=key)
                await conn.commit()
        except psycopg.OperationalError:
            did["cut off"] += 1
            conn = None
    if conn is not None and not conn.closed:
        await conn.close()


async def sender(url: str, numbers: asyncio.Queue[int], dice: random.Random, did: Counter[str]) -> None:
    """Sends each event with its key until it is acknowledged, whatever happens to the connection."""
    conn: AsyncConnection | None = None
    while not numbers.empty():
        number, is_acknowledged = numbers.get_nowait(), False
        did["events"] += 1
        while not is_acknowledged:
            try:
                conn = await connect(url, purpose=Purpose.SCHEDULER) if conn is None or conn.closed else conn
                if dice.random() < 0.02:
                    did["cut off"] += 1
                    await asyncio.gather(cut_off(url, conn.info.backend_pid), _send(conn, number))
                await _send(conn, number)
                is_acknowledged = True
            except psycopg.OperationalError:
                conn = None
    if conn is not None:
        await conn.close()


async def _send(conn: AsyncConnection, number: int) -> None:
    await send_event(conn, name=f"orders.{number % 7}", payload={"n": number}, key=str(number), actor=Actor("test"))


async def leader(url: str, dice: random.Random, clients: asyncio.Task[None], did: Counter[str]) -> None:
    """Takes over, takes requests and events, and loses its connection at any moment. Ends when the clients have and nothing is
    left."""
    cuts: list[asyncio.Task[None]] = []
    while True:
        with suppress(psycopg.OperationalError, NotLeader):
            async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
                await conn.execute("update shard set lease_until = null")
                epoch = await acquire_shard(conn, shard=0, owner=f"leader {dice.random()}", seconds=1e6)
                did["leaders"] += 1
                while epoch is not None:
                    if dice.random() < 0.02:
                        cuts.append(asyncio.create_task(cut_off(url, conn.info.backend_pid)))
                    is_over, limit = clients.done(), dice.choice([1, 7, 100, 500])
                    taken = await take_requests(conn, shard=0, epoch=epoch, limit=limit)
                    routed = await route_events(conn, shard=0, epoch=epoch, limit=limit)
                    if taken is None and routed is None and is_over:
                        await asyncio.gather(*cuts)
                        return
                    did["made"] += sum(each.made for each in (taken, routed) if each is not None)


async def cut_off(url: str, pid: int) -> None:
    """At any moment of what the leader does next."""
    async with await AsyncConnection.connect(url, autocommit=True) as conn:
        await conn.execute("select pg_terminate_backend(%s)", [pid])


async def play(
    url: str, *, count: int, seed: int = 1, has_events: bool = False
) -> tuple[Counter[str], list[tuple[object, ...]]]:
    """What happened how often, and the requests with no run or several, or with a run that nobody committed."""
    did: Counter[str] = Counter()
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        schedule = NamedSchedule(name="main", spec=parse_schedule(on_event("orders.{n}", each=True)))
        params = declare_params({"n": None, "payload": None})
        await put(conn, replace(make_dag("work", {"t": []}), params=params, schedules=(schedule,)))
        await conn.execute("update dag set is_paused = true")
        await conn.execute("create table public.app_order (n int primary key)")
    numbers: asyncio.Queue[int] = asyncio.Queue()
    for number in range(count):
        numbers.put_nowait(number)
    own = psycopg.conninfo.make_conninfo(url, options="-c search_path=public")

    async def all_clients() -> None:
        some = [random.Random(seed * 100 + n) for n in range(CLIENTS)]
        if has_events:
            await asyncio.gather(*(sender(url, numbers, dice, did) for dice in some))
        else:
            await asyncio.gather(*(client(own, numbers, dice, did) for dice in some))

    clients = asyncio.create_task(all_clients())
    await asyncio.gather(
        clients, *(leader(url, random.Random(seed * 100 + 50 + n), clients, did) for n in range(LEADERS))
    )
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        await conn.execute("set search_path = evertick, public")
        if has_events:
            await conn.execute("insert into app_order select key::int from event")
        wrong = await (await conn.execute(WRONG)).fetchall()
        cursor = await conn.execute("select count(*) filter (where reason <> '') from dead_letter")
        did["dead letters"] = int((await cursor.fetchone() or (0,))[0])
    return did, wrong


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, own_cluster(Path(place) / "home") as cluster:
        url = cluster.database_url(cluster.create(cluster.template()))
        did, wrong = asyncio.run(play(url, count=asked.count, seed=asked.seed, has_events=asked.events))
    print(f"{asked.count:,} {'events' if asked.events else 'requests'}: {dict(did)}; wrong: {wrong or 'none'}")
    return 1 if wrong or did["dead letters"] else 0


if __name__ == "__main__":
    sys.exit(_main())
