"""Every door to a task's log, where its lines are in an object storage, and while that is away."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.api.context import ApiContext
from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.runtime.connections import ReconnectingConnection
from tests.api.conftest import Client
from tests.engine.world import lead, make_dag, put, set_clock
from tests.moving import Mover
from tests.s3_server import S3Server, s3_server

LINES = [f"1.{chunk}.{n} and enough of it to be worth an object" for chunk in range(10) for n in range(50)]
V1, AIRFLOW = "/api/v1", "/api/v2"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    with s3_server(tmp_path / "s3") as running:
        yield running


@pytest.fixture
def settings(server: S3Server) -> Settings:
    return Settings(api_rate_limit=0, log_archive=True, log_archive_after_seconds=0, **server.settings)


@pytest.fixture
async def run(conn: AsyncConnection, database: str, settings: Settings) -> AsyncIterator[int]:
    """One whose log is in the storage and nowhere else."""
    await set_clock(conn, datetime.now(UTC) - timedelta(days=1))
    await put(conn, make_dag("d", {"t": []}))
    link = ReconnectingConnection(database, Purpose.SCHEDULER)
    mover = Mover(conn, settings, link, await lead(conn))
    key = await mover.write()
    await mover.round()
    assert await mover.here() == 0
    yield key.run_id
    await link.close()


async def test_every_door_shows_the_lines_and_says_so_when_it_cannot(
    admin: Client, run: int, server: S3Server, context: ApiContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evertick.operations.task_logs.QUIET_SECONDS", 0.0)
    task, page = f"{V1}/runs/{run}/tasks/t", f"/runs/{run}/tasks/t"
    dag_run = (await admin.ok("GET", f"{AIRFLOW}/dags/d/dagRuns"))["dag_runs"][0]["dag_run_id"]
    airflow = f"{AIRFLOW}/dags/d/dagRuns/{dag_run}/taskInstances/t/logs/1"
    ndjson = {"Accept": "application/x-ndjson"}

    shown = await admin.ok("GET", f"{task}/logs")
    assert [line["text"] for line in shown["items"]] == LINES and shown["next_cursor"] is None
    plain = (await admin.get(f"{task}/logs.txt")).text.splitlines()
    assert [line.partition(" INFO ")[2] for line in plain] == LINES
    followed = (await admin.get(f"{task}/logs", params={"follow": "true"})).text
    told = [json.loads(line[6:]) for line in followed.splitlines() if line.startswith("data: ")]
    assert [line["text"] for each in told[:-1] for line in each["lines"]] == LINES and told[-1] == {"state": "success"}
    ids = [line[4:] for line in followed.splitlines() if line.startswith("id: ")]
    rest = (await admin.get(f"{task}/logs", params={"follow": "true", "after": ids[-3]})).text
    assert "1.9.0 " in rest and "1.8.0 " not in rest
    whole = await admin.ok("GET", airflow, params={"full_content": "true"})
    assert [line["event"] for line in whole["content"]] == LINES
    streamed = (await admin.get(airflow, headers=ndjson)).text
    assert [json.loads(line)["event"] for line in streamed.splitlines()] == LINES
    window = await admin.ok("GET", f"{page}/log", params={"find": "1.7.3 "})
    assert [line["text"] for line in window["lines"]] == [LINES[353]]
    assert LINES[-1] in (await admin.get(page)).text

    server.stop()
    for path in (f"{task}/logs", f"{page}/log", airflow):
        assert "cannot be reached" in (await admin.get(path)).text and (await admin.get(path)).status_code == 502
    for path, headers in ((f"{task}/logs.txt", {}), (airflow, ndjson)):
        assert (
            "cannot be read now: s3://attic/below/here cannot be reached"
            in (await admin.get(path, headers=headers)).text
        )
    assert "cannot be reached" in (await admin.get(f"{task}/logs", params={"follow": "true"})).text
    for tab in ("log", "details", "attempts"):
        answer = await admin.get(page, params={"tab": tab})
        assert answer.status_code == 200 and ("cannot be reached" in answer.text) == (tab == "log")


async def test_an_api_that_knows_no_storage_says_what_to_set(admin: Client, run: int, context: ApiContext) -> None:
    context.settings = replace(context.settings, log_archive=False, storage=None)
    context.log_archive = type(context.log_archive)(context.settings)
    refused = await admin.refused("GET", f"{V1}/runs/{run}/tasks/t/logs", 502)
    assert "set EVERTICK_STORAGE" in refused["detail"]
