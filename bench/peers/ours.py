"""Evertick on the work that the peers do, as one row per isolation."""

from __future__ import annotations

import statistics
from pathlib import Path

from bench.case import ISOLATIONS
from bench.house import House, Server
from bench.peers.engine import Row
from bench.work import run, warm_up

from evertick.db.queries import dags

DATABASE = "bench_ours"
TIMES = 3
SINGLES = {"process": 1_000, "warm": 3_000}
FIRES = 20


async def measure_ours(server: Server, folder: Path) -> list[Row]:
    """The product's defaults: first a process per task, which is the default, then reused processes."""
    url = await server.make(DATABASE)
    async with House(url=url, folder=folder) as house:
        await warm_up(house)
        rows = [await _row(house, isolation) for isolation in ISOLATIONS]
        rows[0]["late_ms"] = await _late(house)
    await server.drop(DATABASE)
    return rows


async def _row(house: House, isolation: str) -> Row:
    chains = [await run(house, f"chain_{isolation}") for _ in range(TIMES)]
    fans = [await run(house, f"fan_{isolation}") for _ in range(TIMES)]
    singles = await run(house, f"single_{isolation}", SINGLES[isolation])
    return {
        "engine": f"Evertick, {isolation}",
        "is_reference": True,
        "note": "a process per task" if isolation == "process" else "reused processes",
        "chain_s": statistics.median(done.wall for done in chains),
        "gap_ms": 1000 * statistics.median(gap for done in chains for gap in done.gaps),
        "fan_s": statistics.median(done.wall for done in fans),
        "runs_per_s": singles.per_second,
    }


async def _late(house: House) -> float:
    await house.publish("ticking.py", ["ticking"])
    row = await dags.find(house.conn, "ticking")
    assert row is not None

    async def has_fired() -> bool:
        cursor = await house.conn.execute("select count(*) from run where dag_id = %s", [row.dag_id])
        found = await cursor.fetchone()
        return found is not None and found[0] > FIRES

    await house.until(has_fired, f"{FIRES} fires", pause_seconds=0.25)
    await house.withdraw("ticking.py", ["ticking"])
    cursor = await house.conn.execute(
        """select (v.value->>0)::float8 - extract(epoch from r.fire_at)::float8
             from run r join result v on v.run_id = r.run_id where r.dag_id = %s order by r.fire_at offset 1""",
        [row.dag_id],
    )
    return 1000 * statistics.median(float(found[0]) for found in await cursor.fetchall())
