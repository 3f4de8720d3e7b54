"""Events over HTTP, through a real server: what happens, and logs as they grow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import structlog
from psycopg import AsyncConnection

from evertick.api.context import MOST_LOG_STREAMS_OF_USER
from evertick.api.server import serve
from evertick.config import Settings
from evertick.db import connect
from evertick.db.connect import Purpose
from evertick.db.queries import logs
from evertick.db.queries.logs import NewChunk
from evertick.domain.access import Actor, Role
from evertick.domain.attempt import TaskKey
from evertick.engine import accounts
from evertick.runtime.listen_socket import address_of, bound
from tests.api.applications import shared_app
from tests.api.test_airflow import address as served
from tests.engine.world import Runner, key_of, make_dag, put, start, value
from tests.waiting import eventually

address = served
LONGEST_SECONDS = 20.0
Event = tuple[str, str, dict[str, Any]]


class Stream:
    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines

    async def next(self) -> Event:
        """The next event as (id, name, data). Not that a DAG was published: before the beginning, but while an older transaction of
        any database of this server is open it is told once more."""
        fields: dict[str, str] = {}
        async for line in self._lines:
            if line.startswith(":"):
                continue
            if line:
                name, _, text = line.partition(": ")
                fields[name] = text
            else:
                data = json.loads(fields.get("data", "{}"))
                if "event" in fields and data.get("verb") != "publish":
                    return fields["id"], fields["event"], data
                fields = {}
        raise EOFError("the stream has ended")

    async def until(self, name: str, **facts: object) -> list[Event]:
        """All events up to the first of that name with these facts."""
        found: list[Event] = []
        async with asyncio.timeout(LONGEST_SECONDS):
            while True:
                found.append(await self.next())
                _, said, data = found[-1]
                if said == name and facts.items() <= data.items():
                    return found


@pytest.fixture
async def secret(conn: AsyncConnection) -> str:
    await accounts.add_user(conn, name="ann", role=Role.VIEWER, tags=["finance"], actor=Actor("test"))
    row = await accounts.find_user(conn, "ann")
    return (await accounts.issue(conn, row, kind="token", name="t", actor=Actor("test"), seconds=600)).secret


@pytest.fixture
async def http(address: str, secret: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(base_url=f"{address}/api/v1", headers=headers, timeout=LONGEST_SECONDS) as client:
        yield client


@asynccontextmanager
async def watching(http: httpx.AsyncClient, path: str, after: str | None = None) -> AsyncIterator[Stream]:
    headers = {"Last-Event-ID": after} if after else {}
    async with http.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Stream(answer.aiter_lines())


async def test_a_run_is_watched_from_its_start_to_its_end_over_two_connections(
    http: httpx.AsyncClient, conn: AsyncConnection
) -> None:
    await put(conn, make_dag("etl", {"extract": [], "load": ["extract"]}, tags=("finance",)))
    await put(conn, make_dag("secret", {"t": []}))
    async with watching(http, "/events?dag=etl") as stream:
        ((cursor, hello, data),) = await stream.until("hello")
        assert data["cursor"] == cursor
        await start(conn, "secret")
        run = await start(conn, "etl")
        first = await stream.until("task", task="extract", state="available")
        assert {event[2]["run_id"] for event in first} == {run}
    await (await Runner.join(conn)).drain()
    async with watching(http, f"/events?dag=etl&after={cursor}") as stream:
        every = await stream.until("run", state="success")
    async with watching(http, "/events?dag=etl", after=first[-1][0]) as stream:
        rest = await stream.until("run", state="success")
    assert [each[0] for each in every[1:]] == [each[0] for each in [*first, *rest[1:]]]
    assert hello == "hello" and [each[2].get("task") for each in rest[1:]] == ["extract", "load", None]


async def test_what_cannot_be_watched_is_said_before_the_stream_begins(
    http: httpx.AsyncClient, conn: AsyncConnection
) -> None:
    await put(conn, make_dag("secret", {"t": []}))
    run = await start(conn, "secret")
    for query, status in (
        ("dag=secret", 404),
        ("dag=nothing", 404),
        (f"run={run}", 404),
        ("run=0", 422),
        ("run=x", 422),
        ("&".join(f"run={number}" for number in range(1, 60)), 422),
        ("after=" + "x" * 200, 422),
    ):
        answer = await http.get(f"/events?{query}")
        assert answer.status_code == status, (query, answer.text)
    answer = await http.get("/events", headers={"Authorization": "Bearer evt_wrong"})
    assert answer.status_code == 401


async def test_a_revoked_token_ends_its_streams(
    http: httpx.AsyncClient, conn: AsyncConnection, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evertick.api.event_hub.CHECK_SECONDS", 0.1)
    async with watching(http, "/events") as stream:
        await stream.until("hello")
        found = await accounts.authenticate(conn, secret)
        assert found is not None and found.principal.credential_id is not None
        await accounts.revoke(conn, credential_id=found.principal.credential_id, actor=Actor("test"))
        await stream.until("end")
        with pytest.raises(EOFError):
            await stream.next()
    assert (await http.get("/events")).status_code == 401


@pytest.mark.parametrize(
    "path", ["/api/v1/runs/{run}/tasks/t/logs.txt?follow=true", "/api/v2/dags/etl/dagRuns/r1/wait?interval=0.1"]
)
async def test_a_revoked_token_ends_what_is_told_line_by_line(
    http: httpx.AsyncClient,
    address: str,
    conn: AsyncConnection,
    secret: str,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
) -> None:
    monkeypatch.setattr("evertick.operations.task_logs.CHECK_SECONDS", 0.1)
    await put(conn, make_dag("etl", {"t": []}, tags=("finance",)))
    run = await start(conn, "etl", "r1")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await logs.append(conn, session=runner.session, chunks=[chunk(key_of(claim), claim.epoch, 0, "one")])
    async with asyncio.timeout(LONGEST_SECONDS), http.stream("GET", address + path.format(run=run)) as answer:
        lines = answer.aiter_lines()
        assert "one" in (first := await anext(lines)) or json.loads(first) == {"state": "running"}
        found = await accounts.authenticate(conn, secret)
        assert found is not None and found.principal.credential_id is not None
        await accounts.revoke(conn, credential_id=found.principal.credential_id, actor=Actor("test"))
        rest = [line async for line in lines]
    assert (
        "sign in again" in rest[-1] if "logs" in path else {json.loads(line)["state"] for line in rest} <= {"running"}
    )
    assert await value(conn, "select state from task") == "running", "nothing else has ended it"


async def test_a_revoked_token_ends_a_wait(http: httpx.AsyncClient, conn: AsyncConnection, secret: str) -> None:
    await put(conn, make_dag("etl", {"t": []}, tags=("finance",)))
    run = await start(conn, "etl")
    waiting = asyncio.create_task(http.get(f"/runs/{run}/wait?seconds=60"))
    found = await accounts.authenticate(conn, secret)
    assert found is not None and found.principal.credential_id is not None
    await eventually(lambda: value(conn, "select used_at is not null from credential"))
    await accounts.revoke(conn, credential_id=found.principal.credential_id, actor=Actor("test"))
    assert (await waiting).status_code == 401
    assert await value(conn, "select state from run_status") == "running", "nothing else has ended it"


async def test_a_log_is_followed_as_text_without_a_gap_and_by_few_at_once(
    http: httpx.AsyncClient, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evertick.operations.task_logs.QUIET_SECONDS", 0.2)
    monkeypatch.setattr("evertick.operations.task_logs.POLL_SECONDS", 0.05)
    await put(conn, make_dag("etl", {"t": []}, tags=("finance",)))
    run = await start(conn, "etl")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    one = chunk(key_of(claim), claim.epoch, 0, "one")
    two = chunk(key_of(claim), claim.epoch, one.until, "two")
    three = chunk(key_of(claim), claim.epoch, two.until, "three")
    await logs.append(conn, session=runner.session, chunks=[one])
    path = f"/runs/{run}/tasks/t/logs.txt?follow=true"
    async with asyncio.timeout(LONGEST_SECONDS), http.stream("GET", path) as answer:
        lines = answer.aiter_lines()
        assert (await anext(lines)).endswith("INFO one")
        async with AsyncExitStack() as others:
            for _ in range(MOST_LOG_STREAMS_OF_USER - 1):
                assert (await others.enter_async_context(http.stream("GET", path))).status_code == 200
            assert (await http.get(path)).status_code == 429
        # What comes first need not have been said first.
        await logs.append(conn, session=runner.session, chunks=[three])
        await logs.append(conn, session=runner.session, chunks=[two])
        await runner.finish(claim)
        assert [line.split()[-1] async for line in lines] == ["two", "three"]


def chunk(key: TaskKey, epoch: int, seq: int, *lines: str) -> NewChunk:
    content = "".join(f"1893456000000000 INFO {line}\n" for line in lines)
    return NewChunk(key=key, epoch=epoch, seq=seq, until=seq + len(content), content=content)


def texts(events: list[Event]) -> list[str]:
    return [line["text"] for _, name, data in events if name == "lines" for line in data["lines"]]


async def test_a_log_is_followed_to_its_end_without_a_gap_whatever_comes_first(
    http: httpx.AsyncClient, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evertick.operations.task_logs.QUIET_SECONDS", 0.2)
    monkeypatch.setattr("evertick.operations.task_logs.POLL_SECONDS", 0.05)
    await put(conn, make_dag("etl", {"t": []}, tags=("finance",)))
    run = await start(conn, "etl")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    key, epoch = key_of(claim), claim.epoch
    one = chunk(key, epoch, 0, "one")
    two = chunk(key, epoch, one.until, "two")
    three, four = chunk(key, epoch, two.until, "three"), chunk(key, epoch + 1, 0, "of the next attempt")
    path = f"/runs/{run}/tasks/t/logs?follow=true"
    async with watching(http, path) as stream:
        await logs.append(conn, session=runner.session, chunks=[one])
        first = await stream.until("lines")
        # What the attempt said last is there before what it said before, and the next attempt has begun.
        await logs.append(conn, session=runner.session, chunks=[three])
        await logs.append(conn, session=runner.session, chunks=[two])
        await runner.finish(claim)
        rest = await stream.until("end")
        assert texts([*first, *rest]) == ["one", "two", "three"] and rest[-1][2] == {"state": "success"}
    await logs.append(conn, session=runner.session, chunks=[four])
    late = chunk(key, epoch, three.until, "late")
    async with watching(http, path, after=first[-1][0]) as stream:
        again = await stream.until("end")
        assert texts(again) == ["two", "three", "of the next attempt"]
    await logs.append(conn, session=runner.session, chunks=[late])
    async with watching(http, f"{path}&after={again[-1][0]}") as stream:
        assert texts(await stream.until("end")) == ["late"]
    answer = await http.get(f"{path}&after=1.x")
    assert answer.status_code == 400 and "Start without an id" in answer.text


async def test_a_reader_who_hangs_up_in_the_middle_of_a_question_leaves_the_others_served(
    http: httpx.AsyncClient, address: str, database: str, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = connect._SESSION[Purpose.API_READ] | {"lock_timeout": "60s", "statement_timeout": "60s"}
    monkeypatch.setitem(connect._SESSION, Purpose.API_READ, patient)
    monkeypatch.setitem(connect._LONGEST_SECONDS, Purpose.API_READ, 60.0)
    await put(conn, make_dag("etl", {"t": []}, tags=("finance",)))
    run = await start(conn, "etl")
    waiting = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name = 'evertick-api-read' and wait_event_type = 'Lock'"
    )
    async with await connect.connect(database, purpose=Purpose.SCHEDULER) as other, other.transaction():
        await other.execute("set local idle_in_transaction_session_timeout = 0")
        async with watching(http, f"/runs/{run}/tasks/t/logs?follow=true"):
            await other.execute("lock table task in access exclusive mode")
            await eventually(lambda: value(conn, waiting), within_seconds=60)
        # On the same loop as the server: it has heard of the end when it answers this.
        assert (await http.get(f"{address}/auth/session")).status_code == 200
    for _ in range(3):
        answer = await http.get(f"/runs/{run}/tasks/t")
        assert answer.status_code == 200, answer.text


async def test_a_server_that_stops_ends_its_streams(database: str, secret: str) -> None:
    """In order: a stream that is cut off would be an error for its reader."""
    at, stop = bound("127.0.0.1", 0), asyncio.Event()
    serving = asyncio.create_task(
        serve(shared_app, Settings(api_rate_limit=0), database, structlog.get_logger(), at, stop)
    )
    headers = {"Authorization": f"Bearer {secret}"}
    async with (
        httpx.AsyncClient(base_url=address_of(at), headers=headers, timeout=LONGEST_SECONDS) as http,
        watching(http, "/api/v1/events") as stream,
    ):
        await stream.until("hello")
        stop.set()
        with pytest.raises(EOFError):
            await stream.next()
    await serving
