"""An open transaction holds an old snapshot, so that dead rows cannot be vacuumed: claims must not slow down."""

from __future__ import annotations

import psycopg
from bench.case import Bench
from bench.figures import Figure, at_least, median
from bench.house import House
from bench.work import run

_BATCHES = 3


async def pinned(bench: Bench, house: House) -> list[Figure]:
    """Each round runs the same work without the snapshot, then with it, after the same amount of work has left dead rows."""
    count, ratios = bench.size.singles["warm"], []
    for _ in bench.rounds():
        free = (await run(house, "single_warm", count)).per_second
        with psycopg.connect(house.url) as reader:
            reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            reader.execute("select 1")
            for _ in range(_BATCHES):
                done = await run(house, "single_warm", count)
        ratios.append(done.per_second / free)
    facts = await bench.facts(house, "warm", done.run_ids)
    about = f"one-task runs with a snapshot that is {_BATCHES * count:,} tasks old ÷ without"
    return [median("pinned.share", about, "ratio", ratios, at_least(0.9), facts)]
