"""`evertick queues list`: what waits, how long, what runs, and who serves it."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import runners
from evertick.db.queries.runners import NewRunner
from evertick.domain.access import Actor
from evertick.engine.runners import drain
from tests.cli.conftest import Cli
from tests.engine.world import Runner, make_dag, put, start

pytestmark = pytest.mark.requirement("K7")


async def test_without_anything_the_list_says_how_to_start(cli: Cli) -> None:
    assert "No queue is in use" in (await cli("queues", "list")).out
    assert await cli.json("queues", "list") == {"queues": []}


async def test_queues_are_listed_with_what_waits_and_who_serves_them(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"a": [], "b": [], "c": []}))
    await put(conn, make_dag("ml", {"train": []}, task_queue="gpu"))
    await put(conn, make_dag("rare", {"x": []}, task_queue="rare"))
    await start(conn, "etl")
    await start(conn, "ml")
    await conn.execute("update ready_task set enqueued_at = enqueued_at - interval '90 h' where queue = 'gpu'")
    await (await Runner.join(conn)).claim(2)
    place = {"host": "h", "boot_id": "b", "pid_namespace": "p", "pid": 1, "pid_started": 0.0}
    special = NewRunner(session=7, runner_id="s", queues=["default", "spare"], match=["ml::*"], slots=4, **place)  # type: ignore[arg-type]
    await runners.register(conn, special)
    await drain(conn, sessions=[7], actor=Actor("test"))
    out = (await cli("queues", "list")).out.splitlines()
    assert out[0].split() == ["QUEUE", "QUEUED", "OLDEST", "RUNNING", "SLOTS", "RUNNERS"]
    rows = {line.split()[0]: line.split()[1:] for line in out[1:5]}
    assert (rows["default"][0], rows["default"][-10:-7]) == ("1", ["2", "104", "2"])
    assert " ".join(rows["default"]).endswith("2 (1 only for some names, 1 draining)")
    assert rows["gpu"] == ["1", "3", "d", "18", "h", "0", "0", "none"]
    assert rows["rare"] == ["0", "-", "0", "0", "none"]
    assert rows["spare"][:4] == ["0", "-", "0", "4"]
    assert out[-1] == "No runner serves gpu. Start one with: evertick runner --queues gpu"
    found = {each["queue"]: each for each in (await cli.json("queues", "list"))["queues"]}
    assert list(found) == ["default", "gpu", "rare", "spare"]
    assert (found["default"]["depth"], found["default"]["running"], found["default"]["runners"]) == (1, 2, 2)
    assert 90 <= found["gpu"]["oldest_wait_seconds"] / 3600 < 91
    assert found["rare"]["oldest_at"] is None


async def test_runners_are_listed_with_their_patterns(cli: Cli, conn: AsyncConnection) -> None:
    place = {"host": "h", "boot_id": "b", "pid_namespace": "p", "pid": 1, "pid_started": 0.0}
    special = NewRunner(session=7, runner_id="s", queues=["gpu"], match=["ml::*", "heavy_*"], slots=4, **place)  # type: ignore[arg-type]
    await runners.register(conn, special)
    assert "ml::*, heavy_*" in (await cli("runners", "list")).out
    assert (await cli.json("runners", "list"))["runners"][0]["match"] == ["ml::*", "heavy_*"]


async def test_a_bad_pattern_is_refused_before_a_runner_starts(cli: Cli) -> None:
    assert "pattern 'ml::?': only letters" in await cli.refused("runner", "--task-patterns", "ml::?")
