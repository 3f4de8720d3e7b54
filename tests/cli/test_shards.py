"""`evertick shards`: how many there are, who leads which; and what other commands say where one is not led."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.db.queries import shards
from evertick.engine.shards import acquire_shard
from tests.cli.conftest import Cli
from tests.engine.world import lead, make_dag, put, value


async def test_a_new_installation_has_one_shard_that_nobody_leads(cli: Cli) -> None:
    out = (await cli("shards", "list")).out
    assert out.splitlines()[0].split() == ["SHARD", "STATE", "LEADER", "SINCE", "EPOCH", "DAGS", "TO", "MOVE"]
    assert "none" in out and "evertick scheduler" in out


async def test_the_number_of_shards_is_set_and_seen(cli: Cli, conn: AsyncConnection) -> None:
    for number in range(12):
        await put(conn, make_dag(f"d{number}", {"a": []}))
    out = (await cli("shards", "set", "3")).out
    assert out.startswith("3 shards from now on.") and "evertick shards list" in out
    await lead(conn)
    first, second, third = (await cli.json("shards", "list"))["shards"]
    assert (first["shard"], first["state"], first["owner"], first["is_live"], first["epoch"]) == (
        0,
        "open",
        "test",
        True,
        1,
    )
    assert (first["dags"], second["dags"], third["dags"]) == (12, 0, 0)
    assert 0 < first["misplaced"] < 12 and second["misplaced"] == 0
    assert "No scheduler leads shards 1, 2" in (await cli("shards", "list")).out
    assert await value(conn, "select count(*) from audit_log where action = 'set_shards'") == 1


async def test_a_number_that_makes_no_sense_is_refused(cli: Cli, conn: AsyncConnection) -> None:
    for count in ("0", "-2", "65"):
        assert "must be from 1 to 64" in await cli.refused("shards", "set", count)
    assert "valid integer" in await cli.refused("shards", "set", "many")
    assert await value(conn, "select count(*) from shard") == 1


async def test_health_and_doctor_name_the_shard_that_nobody_leads(cli: Cli, conn: AsyncConnection) -> None:
    await cli("shards", "set", "3")
    await lead(conn)
    await acquire_shard(conn, shard=2, owner="other", seconds=1000)
    health = await cli("health", "--json")
    assert "shard 1: no scheduler leads, so nothing fires there" in health.out
    doctor = await cli("doctor")
    assert "No scheduler leads shard 1." in doctor.out
    await acquire_shard(conn, shard=1, owner="third", seconds=1000)
    leader = await shards.leader(conn, shard=0)
    assert leader is not None and leader.missing is None
    assert leader.leaders == ["other", "test", "third"]
