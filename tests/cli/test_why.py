"""`evertick tasks why` and `evertick blocked`."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.gates import EXCLUSIVE, GateKind, GateSpec
from tests.cli.conftest import Cli
from tests.engine.world import Runner, make_dag, put, start


async def test_why_tells_the_chain_down_to_who_holds_the_key(cli: Cli, conn: AsyncConnection) -> None:
    key = GateSpec(kind=GateKind.MUTEX, name="table:orders", weight=EXCLUSIVE)
    await put(conn, make_dag("etl", {"load": [], "report": ["load"]}, per_task={"load": {"gates": (key,)}}))
    await Runner.join(conn)
    first, second = await start(conn, "etl"), await start(conn, "etl")
    assert (await cli("tasks", "why", second, "report")).out.splitlines() == [
        f"report of run {second} is waiting",
        "  because it waits for load, which is pending (0 of 1 before it ended, rule all_success)",
        f"load of run {second} is pending",
        f"  because it needs key table:orders (alone), held by etl.load of run {first} (available); 0 before it in line",
    ]
    told = await cli.json("tasks", "why", second, "report")
    assert told["upstream"]["reasons"][0]["holders"][0]["run_id"] == first
    assert "Did you mean 'report'" in await cli.refused("tasks", "why", second, "reprot")
    lines = (await cli("blocked")).out.splitlines()
    assert "mutex table:orders" in lines[1] and f"held by etl.load of run {first}" in lines[1]
    assert (await cli.json("blocked"))["blocked"][0]["waiting"] == 1


async def test_nothing_is_held_back(cli: Cli, conn: AsyncConnection) -> None:
    assert (await cli("blocked")).out == "Nothing is held back.\n"
