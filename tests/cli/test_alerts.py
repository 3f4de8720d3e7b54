"""`evertick alerts`, and what `evertick health` says of them."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.maintenance import raise_alerts
from tests.cli.conftest import Cli
from tests.engine.world import lead, make_dag, put


async def test_alerts_are_listed_and_shown_by_health(cli: Cli, conn: AsyncConnection) -> None:
    assert "No alerts" in (await cli("alerts", "list")).out
    # The latest fire that it missed may have been due a moment ago: late by any time at all is late enough.
    await put(conn, make_dag("etl", {"a": []}, every="@every 1h", start_within_seconds=0.001))
    epoch = await lead(conn)
    await conn.execute("update schedule_state set next_due = next_due - interval '2 hours'")
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    await raise_alerts(conn, shard=0, epoch=epoch, unfired_seconds=60, limit=10)
    (found,) = (await cli.json("alerts", "list", "etl"))["alerts"]
    assert (found["kind"], found["schedule"], found["run_id"], found["ended_at"]) == ("not_started", "main", 1, None)
    assert "did not start in time" in (await cli("alerts", "list", "--all")).out
    assert "etl, schedule main: did not start in time" in (await cli("health")).out
    assert "Did you mean 'etl'?" in await cli.refused("alerts", "list", "elt")
