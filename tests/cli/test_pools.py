"""`evertick pools` and `evertick keys`: slots are changed live, and holders and waiters are shown."""

from __future__ import annotations

import re

from psycopg import AsyncConnection

from evertick.domain.dags.gates import EXCLUSIVE, GateKind, GateSpec
from tests.cli.conftest import Cli
from tests.engine.world import Runner, make_dag, put, start


async def test_a_pool_is_made_changed_shown_and_deleted(cli: Cli, conn: AsyncConnection) -> None:
    assert "There are no pools" in (await cli("pools", "list")).out
    assert (await cli("pools", "set", "db", 1)).out == "Created db with 1 slot.\n"
    await put(conn, make_dag("etl", {"t": []}, task_gates=(GateSpec(kind=GateKind.POOL, name="db"),)))
    first, second = await start(conn, "etl"), await start(conn, "etl")
    (pool,) = (await cli.json("pools", "list"))["pools"]
    assert (pool["used"], pool["capacity"], pool["holders"], pool["waiters"]) == (1, 1, 1, 1)
    page = (await cli("pools", "show", "db")).out
    assert page.index("Held by") < page.index(f"{first}  etl") < page.index("Waiting") < page.index(f"{second}  etl")
    shown = (await cli.json("pools", "show", "db"))["pools"][0]
    assert [each["run_id"] for each in shown["held_by"] + shown["waiting"]] == [first, second]
    assert (await cli("pools", "set", "db", 2)).out == "Pool db has 2 slots.\n1 waiting task can start now.\n"
    runner = await Runner.join(conn)
    claims = await runner.claim()
    assert "no other starts until fewer than 1" in (await cli("pools", "set", "db", 1)).out
    assert "is in use" in await cli.refused("pools", "delete", "db", "--yes", status=1)
    for claim in claims:
        await runner.finish(claim)
    assert "DAG 'etl' needs pool 'db'" in await cli.refused("pools", "delete", "db", "--yes", status=1)
    await put(conn, make_dag("etl", {"t": []}))
    assert "use --yes" in await cli.refused("pools", "delete", "db")
    assert (await cli("pools", "delete", "db", "--yes")).out == "Deleted pool db.\n"
    assert "There is no pool 'db'" in await cli.refused("pools", "delete", "db", "--yes")
    assert "There is no pool 'db' now" in await cli.refused("pools", "show", "db")


async def test_bad_slots_are_refused(cli: Cli, conn: AsyncConnection) -> None:
    # Each release of typer has a wording of its own.
    for words in (["-1"], ["--", "-1"]):
        told = await cli.refused("pools", "set", "db", *words)
        assert "'SLOTS'" in told and re.search(r"-1 is not in the range x>=0|greater than or equal to 0", told)
    assert "is not a valid name for a pool" in await cli.refused("pools", "set", "a/b", 1)


async def test_keys_show_who_holds_them_and_who_waits(cli: Cli, conn: AsyncConnection) -> None:
    assert "No key is in use" in (await cli("keys", "list")).out
    key = GateSpec(kind=GateKind.MUTEX, name="table:orders", weight=EXCLUSIVE)
    await put(conn, make_dag("etl", {"t": []}, task_gates=(key,), max_active_tasks=5))
    first, second = await start(conn, "etl"), await start(conn, "etl")
    assert "exclusive" in (await cli("keys", "list")).out
    listed = {each["kind"]: each for each in (await cli.json("keys", "list"))["keys"]}
    assert (listed["mutex"]["waiters"], listed["dag"]["used"], listed["dag"]["capacity"]) == (1, 1, 5)
    page = (await cli("keys", "show", "table:orders")).out
    assert page.index(f"{first}  etl") < page.index("Waiting") < page.index(f"{second}  etl")
    assert "Did you mean 'table:orders'" in await cli.refused("keys", "show", "table:order")
