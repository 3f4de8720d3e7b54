"""`evertick db prune` and what `evertick db status` says about size and age."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from psycopg import AsyncConnection

from evertick.cli.commands.db import _NAMES
from evertick.engine.retention import Kind
from tests.cli.conftest import Cli
from tests.engine.world import Runner, make_dag, put, start, value


@pytest.fixture
async def history(conn: AsyncConnection) -> AsyncConnection:
    """Twenty runs that ended 40 days ago, ten of today, and one that is open since long."""
    await put(conn, make_dag("d", {"a": []}))
    runner = await Runner.join(conn)
    for _ in range(30):
        await start(conn, "d")
    await runner.drain()
    await conn.execute("update run set created_at = created_at - interval '40 days' where run_id <= 20")
    await conn.execute("update run_status set finished_at = finished_at - interval '40 days' where run_id <= 20")
    await start(conn, "d")
    await conn.execute("update run set created_at = created_at - interval '40 days' where run_id = 31")
    return conn


async def test_it_shows_what_it_would_delete_and_deletes_nothing(history: AsyncConnection, cli: Cli) -> None:
    ran = await cli("db", "prune", "--older-than", "30d", "--dry-run")
    assert ran.status == 0
    assert "Would delete 20 runs: older than 30 d" in ran.out
    assert await value(history, "select count(*) from run") == 31


async def test_it_deletes_what_is_old_and_says_so(history: AsyncConnection, cli: Cli) -> None:
    done = await cli.json("db", "prune", "--older-than", "30d", "--yes")
    assert (done["runs"], done["journal"], done["versions"], done["is_dry_run"]) == (20, 0, 0, False)
    assert await value(history, "select count(*) from run") == 11
    assert await value(history, "select count(*) from task") == 11
    assert str(await value(history, "select actor from audit_log where action = 'prune'")).startswith("cli:")
    ran = await cli("db", "prune", "--older-than", "30d", "--yes")
    assert ran.out.startswith("Nothing is older than 30 d")


async def test_without_an_age_the_retention_counts(
    history: AsyncConnection, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await cli.json("db", "prune", "--dry-run"))["runs"] == 0
    monkeypatch.setenv("EVERTICK_RETENTION_DAYS", "0.5")
    assert (await cli.json("db", "prune", "--dry-run"))["runs"] == 20
    monkeypatch.setenv("EVERTICK_RETENTION_DAYS", "0")
    assert "--older-than" in await cli.refused("db", "prune", "--dry-run")


async def test_it_asks_before_it_deletes(history: AsyncConnection, cli: Cli) -> None:
    said = await cli.refused("db", "prune", "--older-than", "30d")
    assert "about 20 runs" in said and "--yes" in said
    assert await value(history, "select count(*) from run") == 31


@pytest.mark.parametrize("age", ["soon", "3", "", "-5d", "999999999999w"])
async def test_an_age_that_is_none_is_refused(cli: Cli, age: str) -> None:
    assert "--older-than" in await cli.refused("db", "prune", f"--older-than={age}", "--yes")


async def test_everything_that_is_over_may_go(history: AsyncConnection, cli: Cli) -> None:
    assert (await cli.json("db", "prune", "--older-than", "0s", "--yes"))["runs"] == 30
    assert await value(history, "select array_agg(run_id) from run") == [31], "what is open stays"


async def test_whatever_is_deleted_has_a_name(history: AsyncConnection, cli: Cli) -> None:
    await history.execute(
        "insert into outbox (shard, sink, event, payload, created_at, waiting_since, due_at, state, ended_at)"
        " select 0, 'email:a@example.com', 'failure', '{}', t, t, t, 'sent', t from (select clock() - interval '40 days' as t) x"
    )
    await history.execute(
        "insert into asset_update (asset, extra, updated_by, occurred_at)"
        " select 'orders', '{}', 'ann', clock() - interval '40 days' from generate_series(1, 2)"
    )
    ran = await cli("db", "prune", "--older-than", "30d", "--yes")
    assert ran.status == 0 and "1 notification, 2 updates of assets" in " ".join(ran.out.split()), ran
    assert set(_NAMES) == set(Kind)


async def test_a_terminal_gets_a_bar(history: AsyncConnection, cli: Cli, colours: Callable[[], None]) -> None:
    colours()
    ran = await cli("db", "prune", "--older-than", "30d", "--yes")
    assert (ran.status, "━" in ran.out, "Deleted 20 runs" in ran.out) == (0, True, True)


async def test_the_status_tells_size_and_age(history: AsyncConnection, cli: Cli) -> None:
    told = await cli.json("db", "status")
    assert told["bytes"] == sum(told["tables"].values()) > 0
    assert {"run", "task", "log_chunk"} <= told["tables"].keys()
    assert told["oldest_run_at"].endswith("Z")
    shown = (await cli("db", "status")).out
    assert "MB" in shown and "40 d ago (run 1)" in shown
    await history.execute("truncate run")
    assert "no runs yet" in (await cli("db", "status")).out
