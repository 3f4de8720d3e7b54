"""After a change those who must act on it are woken; without NOTIFY the change is made all the same."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.notify import Channel
from evertick.domain.dags.spec import TaskKind
from evertick.domain.dags.waits import WaitKind, WaitSpec
from tests.cli.conftest import Cli
from tests.engine.world import Runner, make_dag, put, start

READY, STOP, PLAN = Channel.TASKS, Channel.STOP, Channel.SCHEDULE


@pytest.mark.parametrize(
    ("command", "woken"),
    [
        (["dags", "trigger", "etl"], {READY}),
        # The leader evaluates the wait of its first task.
        (["dags", "trigger", "waits"], {READY, PLAN}),
        # What it held of its pools and keys goes to others.
        (["dags", "pause", "etl"], {PLAN, READY}),
        (["dags", "unpause", "etl"], {PLAN, READY}),
        (["dags", "delete", "etl", "--yes"], {PLAN}),
        (["runs", "cancel", "1"], {STOP, READY}),
        (["pools", "set", "db", "2"], {READY}),
        (["runs", "clear", "1", "--yes"], {READY, STOP, PLAN}),
        (["tasks", "mark", "1", "b", "failed"], {READY, STOP, PLAN}),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
async def test_a_change_wakes_those_who_act_on_it(
    cli: Cli, conn: AsyncConnection, database: str, command: list[str], woken: set[Channel]
) -> None:
    await _world(conn)
    async with await connect(database, purpose=Purpose.LISTEN) as listener:
        for channel in Channel:
            await listener.execute(f"listen {channel.value}")
        assert (await cli(*command)).status == 0
        heard = {Channel(message.channel) async for message in listener.notifies(timeout=20, stop_after=len(woken))}
    assert heard == woken


async def test_with_wake_ups_switched_off_none_is_sent(
    cli: Cli, conn: AsyncConnection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _world(conn)
    monkeypatch.setenv("EVERTICK_LISTEN_NOTIFY", "off")
    async with await connect(database, purpose=Purpose.LISTEN) as listener:
        await listener.execute("listen evertick_ready")
        assert (await cli("dags", "trigger", "etl")).status == 0
        await listener.execute("select pg_notify('evertick_ready', 'mine')")
        assert [message.payload async for message in listener.notifies(timeout=20, stop_after=1)] == ["mine"]


async def _world(conn: AsyncConnection) -> None:
    """A run with an ended and a running task, of a DAG with a schedule."""
    await put(conn, make_dag("etl", {"a": [], "b": []}, every="@every 1h"))
    wait = WaitSpec(kind=WaitKind.APPROVAL, name="Release?")
    await put(conn, make_dag("waits", {"ask": []}, per_task={"ask": {"kind": TaskKind.WAIT, "wait": wait}}))
    await start(conn, "etl")
    runner = await Runner.join(conn)
    first, _ = await runner.claim()
    await runner.finish(first)
