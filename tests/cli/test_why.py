"""`evertick tasks why` and `evertick blocked`."""

from __future__ import annotations

from datetime import timedelta

from psycopg import AsyncConnection

from evertick.domain.dags.gates import EXCLUSIVE, GateKind, GateSpec
from evertick.domain.retry import RetryPolicy
from tests.cli.conftest import Cli
from tests.engine.world import Runner, make_dag, put, start


async def test_why_tells_the_chain_down_to_who_holds_the_key(cli: Cli, conn: AsyncConnection) -> None:
    key = GateSpec(kind=GateKind.MUTEX, name="table:orders", weight=EXCLUSIVE)
    await put(conn, make_dag("etl", {"load": [], "report": ["load"]}, per_task={"load": {"gates": (key,)}}))
    await Runner.join(conn)
    first, second = await start(conn, "etl"), await start(conn, "etl")
    assert (await cli("tasks", "why", second, "report")).out.splitlines() == [
        f"report of run {second} is waiting",
        "  because it waits for load, which is pending (0 of 1 upstream ended, rule all_success)",
        f"load of run {second} is pending",
        f"  because it needs key table:orders (exclusive), held by etl.load of run {first} (available); 0 ahead in the queue",
    ]
    told = await cli.json("tasks", "why", second, "report")
    assert told["upstream"]["reasons"][0]["holders"][0]["run_id"] == first
    assert "Did you mean 'report'" in await cli.refused("tasks", "why", second, "reprot")
    lines = (await cli("blocked")).out.splitlines()
    assert "mutex table:orders" in lines[1] and f"held by etl.load of run {first}" in lines[1]
    assert (await cli.json("blocked"))["blocked"][0]["waiting"] == 1


async def test_nothing_is_held_back(cli: Cli, conn: AsyncConnection) -> None:
    assert (await cli("blocked")).out == "No blocked tasks.\n"


async def test_orders_rates_and_pasts_are_told_and_listed(cli: Cli, conn: AsyncConnection) -> None:
    await Runner.join(conn)
    order = tuple(GateSpec(kind=GateKind.ORDER, name="schema", version=number) for number in (3, 8))
    await put(conn, make_dag("m", {"x": [], "y": []}, per_task={"x": {"gates": order[:1]}, "y": {"gates": order[1:]}}))
    rate = GateSpec(kind=GateKind.RATE, name="api", capacity=1, period_seconds=timedelta(hours=2).total_seconds())
    await put(conn, make_dag("a", {"t": []}, task_gates=(rate,)))
    run = await start(conn, "m")
    _, second = await start(conn, "a"), await start(conn, "a")
    told = (await cli("tasks", "why", run, "y")).out
    assert f"because version 8 on key schema waits for version 3: m.x of run {run} (available)" in told
    told = (await cli("tasks", "why", second, "t")).out
    assert "because rate api is used up: 1/1 in 7200 s; next slot in 1 h; 0 ahead in the queue" in told
    listed = (await cli("keys", "list")).out
    assert "version 3" in listed and "1/1 in 2 h" in listed
    shown = (await cli("keys", "show", "schema")).out
    assert "order schema: version 3" in shown and "VERSION" in shown
    lines = (await cli("blocked")).out
    assert "smaller version" in lines and f"version 3: m.x of run {run}" in lines
    assert "used up" in lines and "1/1 in 2 h, the next in 1 h" in lines


async def test_instants_are_told_as_all_commands_tell_them(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("a", {"t": []}, task_retry=RetryPolicy(retries=1)))
    runner = await Runner.join(conn)
    run = await start(conn, "a")
    (claim,) = await runner.claim()
    await conn.execute("update task set started_at = started_at - interval '3 hours'")
    assert f"it is running on r{runner.session} and started 3 h ago" in (await cli("tasks", "why", run, "t")).out
    await runner.finish(claim, "failed", retry_in=5 * 3600)
    assert "it will be retried in 4 h, after attempt 1" in (await cli("tasks", "why", run, "t")).out
    assert "the next in 4 h" in (await cli("blocked")).out
    document = await cli.json("tasks", "why", run, "t")
    assert "T" in document["reasons"][0]["until"], "programs get the instant itself"
