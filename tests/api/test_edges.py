"""What surrounds every request: ids, sizes, how often, errors that say nothing of the inside, and a database that is away."""

from __future__ import annotations

import asyncio

import pytest
import structlog
from fastapi import FastAPI
from psycopg import AsyncConnection
from psycopg.sql import SQL, Identifier

from evertick.api.app import make_app
from evertick.api.context import READERS, ApiContext
from evertick.api.middleware import MOST_BODY_BYTES, Bucket
from evertick.api.problems import STATUS
from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.domain import errors
from evertick.domain.errors import EvertickError, PostgresUnavailable
from evertick.runtime.pool import Pool
from tests.api.conftest import Client
from tests.engine.world import value
from tests.waiting import eventually


def test_every_error_of_ours_has_a_status() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, EvertickError)]
    assert {each.code for each in kinds} == STATUS.keys()


async def test_a_request_keeps_its_id_and_a_strange_one_is_replaced(admin: Client) -> None:
    answer = await admin.get("/auth/session", headers={"X-Request-Id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    answer = await admin.get("/nothing", headers={"X-Request-Id": "a b\t<script>"})
    assert answer.headers["x-request-id"] == answer.json()["request_id"] != "a b\t<script>"
    assert answer.headers["content-type"] == "application/problem+json"


async def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(admin: Client) -> None:
    large = b"x" * (MOST_BODY_BYTES + 1)

    async def parts() -> object:
        for _ in range(3):
            yield large[: MOST_BODY_BYTES // 2]

    for content in (large, parts()):
        answer = await admin.request(
            "PUT", "/auth/password", content=content, headers={"Content-Type": "application/json"}
        )
        assert (answer.status_code, answer.json()["code"]) == (413, "too_large")


async def test_large_answers_are_packed(admin: Client) -> None:
    answer = await admin.get("/api/v1/openapi.json", headers={"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip" and answer.json()["info"]["title"] == "Evertick API"


async def test_who_asks_too_often_waits_and_others_do_not(database: str, conn: AsyncConnection) -> None:
    app = make_app(ApiContext(Settings(api_rate_limit=1), database, structlog.get_logger()))
    greedy, modest = Client(app, None), Client(app, None, address="10.0.0.2")
    answers = [await greedy.get("/healthz") for _ in range(8)]
    assert [answer.status_code for answer in answers[:4]] == [200] * 4
    assert answers[-1].status_code == 429 and int(answers[-1].headers["retry-after"]) >= 1
    assert (await modest.get("/healthz")).status_code == 200


def test_a_bucket_fills_up_with_time_and_made_up_tokens_are_no_way_round() -> None:
    bucket = Bucket(2)
    assert [bucket.take("a", 0.0) > 0 for _ in range(9)] == [False] * 8 + [True]
    assert bucket.take("a", 0.5) == 0.0 < bucket.take("a", 0.5)
    assert Bucket(0).take("a", 0.0) == 0.0


async def test_health_is_told_to_who_asks_for_no_body(nobody: Client) -> None:
    for path in ("/healthz", "/readyz"):
        assert (await nobody.head(path)).status_code == (await nobody.get(path)).status_code == 200, path


@pytest.mark.parametrize("path", ["/api/v1/runs", "/api/v2/dags", "/api/v2/dags/~/dagRuns"])
async def test_nobody_is_led_elsewhere_by_what_stands_in_host(admin: Client, path: str) -> None:
    """A redirect to an address made of it would carry a token there, or into the clear behind a proxy."""
    for at in (f"{path}/", path.rpartition("/")[0]):
        answer = await admin.get(at, headers={"Host": "evil.test"})
        assert answer.status_code in (404, 405) and "location" not in answer.headers, at


async def test_without_a_database_the_answer_is_503_with_a_time_and_nothing_of_the_inside() -> None:
    url = "postgresql://user:hunter22secret@127.0.0.1:1/x"
    client = Client(make_app(ApiContext(Settings(api_rate_limit=0), url, structlog.get_logger())), "evt_any")
    for path in ("/readyz", "/auth/session", "/metrics"):
        answer = await client.get(path)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        assert "hunter22secret" not in answer.text and "127.0.0.1" not in answer.text
    assert (await client.get("/healthz")).status_code == 200


async def test_a_login_without_rights_is_told_as_that(admin: Client, conn: AsyncConnection) -> None:
    # Sessions that begin from now on have the rights of a role that may read nothing here.
    await conn.execute("grant usage on schema evertick to pg_monitor")
    await conn.execute(SQL("alter database {} set role to pg_monitor").format(Identifier(conn.info.dbname)))
    told = await admin.refused("GET", "/auth/session", 503)
    assert "evertick db roles" in told["detail"] and "credential" not in told["detail"]
    await conn.execute(SQL("alter database {} reset role").format(Identifier(conn.info.dbname)))


async def test_a_fault_of_ours_is_told_without_a_traceback(app: FastAPI, admin: Client, conn: AsyncConnection) -> None:
    await conn.execute("alter table credential rename to lost")
    answer = await admin.get("/auth/session")
    assert answer.status_code == 500
    assert answer.json()["code"] == "error" and "credential" not in answer.text


@pytest.mark.requirement("H4")
async def test_readers_wait_their_turn_and_connections_are_few_and_named(
    database: str, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evertick.runtime.pool.WAIT_SECONDS", 0.2)
    pool = Pool(database, Purpose.API_READ, 2)
    held, free = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with pool.lent() as lent:
            assert await value(lent, "show statement_timeout") == "5s"
            held.set()
            await free.wait()

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            held.clear()
            group.create_task(hold())
            await held.wait()
        query = "select count(*) from pg_stat_activity where datname = current_database() and application_name = %s"
        assert await value(conn, query, "evertick-api-read") == 2
        with pytest.raises(PostgresUnavailable, match="busy"):
            async with pool.lent():
                pass
        free.set()
    monkeypatch.setattr("evertick.runtime.pool.IDLE_SECONDS", 0.0)
    tending = asyncio.create_task(pool.tend())

    async def all_closed() -> bool:
        return await value(conn, query, "evertick-api-read") == 0

    await eventually(all_closed)
    tending.cancel()


@pytest.mark.requirement("H4")
async def test_whoever_is_cut_off_at_any_moment_leaves_all_connections_usable(database: str) -> None:
    """A reader who hangs up is canceled wherever it stands, and again while it tidies up: that is how streams are ended."""
    pool = Pool(database, Purpose.API_READ, 2)

    async def ask() -> None:
        async with pool.lent() as lent, lent.transaction():
            await value(lent, "select count(*) from generate_series(1, 10000)")

    rounds = [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987]
    for turns in rounds:
        asking = asyncio.create_task(ask())
        for _ in range(turns):
            await asyncio.sleep(0)
        while not asking.done():
            asking.cancel()
            await asyncio.sleep(0)
        async with pool.lent() as one, pool.lent() as another:
            assert [await value(each, "select 1") for each in (one, another)] == [1, 1]
    for _, link in pool._idle:
        await link.close()


async def test_a_connection_that_the_server_has_ended_is_not_handed_out(database: str, conn: AsyncConnection) -> None:
    pool = Pool(database, Purpose.API_READ, 2)
    async with pool.lent() as one, pool.lent() as another:
        pids = {each.info.backend_pid for each in (one, another)}
    for pid in pids:
        assert await value(conn, "select pg_terminate_backend(%s, 20000)", pid)
    async with pool.lent() as one, pool.lent() as another:
        assert [await value(each, "select 1") for each in (one, another)] == [1, 1]
    for _, link in pool._idle:
        await link.close()


async def test_a_reader_cannot_write(admin: Client, context: ApiContext) -> None:
    assert READERS > 1
    async with context.readers.lent() as conn:
        with pytest.raises(Exception, match="read-only"):
            await conn.execute("delete from account")
