"""`evertick state`: what tasks and assets keep."""

from __future__ import annotations

from psycopg import AsyncConnection

from tests.cli.conftest import Cli
from tests.engine.world import make_dag, put, start

TASK, ASSET = ("--dag", "etl", "--task", "load"), ("--asset", "orders")


async def test_state_is_set_listed_shown_and_deleted(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"load": []}, task_outlets=("orders",)))
    run = await start(conn, "etl")
    for owner in (TASK, ASSET, (*TASK, "--run", run)):
        assert "No state." in (await cli("state", "list", *owner)).out
        assert (await cli("state", "set", "cursor/1", '{"n": [1]}', *owner)).out == "Set cursor/1.\n"
        assert (await cli("state", "get", "cursor/1", *owner)).out == '{"n": [1]}\n'
        (row,) = (await cli.json("state", "list", *owner))["state"]
        assert (row["key"], row["value"], row["expires_at"]) == ("cursor/1", {"n": [1]}, None)
        assert (await cli("state", "delete", "cursor/1", *owner)).out == "Deleted cursor/1.\n"
        assert "no state under the key 'cursor/1'" in await cli.refused("state", "get", "cursor/1", *owner)
        assert "evertick state list" in await cli.refused("state", "delete", "cursor/1", *owner)


async def test_state_without_an_owner_or_with_a_wrong_value_is_refused(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"load": []}))
    run = await start(conn, "etl")
    assert "Name the owner" in await cli.refused("state", "list", "--dag", "etl")
    assert "Name the owner" in await cli.refused("state", "list", *TASK, *ASSET)
    assert "is not JSON" in await cli.refused("state", "set", "k", "ready", *TASK)
    assert "null cannot be" in await cli.refused("state", "set", "k", "null", *TASK)
    assert "cannot be a key" in await cli.refused("state", "set", "k" * 513, "1", *TASK)
    assert "no DAG 'etl2'" in await cli.refused("state", "list", "--dag", "etl2", "--task", "load")
    assert "with a task 'lod'" in await cli.refused("state", "list", "--dag", "etl", "--task", "lod", "--run", run)
