"""The client for programs, against a server: every operation, paging, repeated requests, waiting and following."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx2
import pytest
from psycopg import AsyncConnection

from evertick.client import AsyncEvertick, Evertick, library
from evertick.domain.access import Actor, Role
from evertick.domain.errors import NotFound, OutcomeUnknown
from evertick.engine import accounts
from evertick.operations.dags import TriggerRequest
from evertick.operations.routes import ROUTES
from tests.engine.world import Runner, lead, make_dag, put, value
from tests.ui.site import Site, served


@pytest.fixture
def site(database: str) -> Iterator[Site]:
    with served(database) as made:
        yield made


async def a_token(conn: AsyncConnection) -> str:
    await accounts.add_user(conn, name="ci", role=Role.ADMIN, actor=Actor("test"))
    row = await accounts.find_user(conn, "ci")
    return (await accounts.issue(conn, row, kind="token", name="t", actor=Actor("test"), seconds=3600)).secret


class LosesAnswers(httpx2.AsyncHTTPTransport):
    """The server has processed a request, and its answer does not arrive."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = await super().handle_async_request(request)
        if self.left:
            self.left -= 1
            await answer.aclose()
            raise httpx2.ReadError("cut")
        return answer


def test_every_operation_of_the_api_is_a_method_with_its_documentation() -> None:
    methods = {name: each for name, each in vars(library.Operations).items() if isinstance(each, library.Method)}
    assert {each.operation for each in methods.values()} == {route.function for route in ROUTES}
    with Evertick("http://127.0.0.1:1") as client:
        assert all(getattr(client, name).__doc__ for name in methods)


async def test_a_program_starts_waits_and_reads(
    site: Site, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lead(conn)
    for name in ("a", "b", "c"):
        await put(conn, make_dag(name, {"load": []}))
    token, runner = await a_token(conn), await Runner.join(conn)
    monkeypatch.setattr(library, "RETRY_SECONDS", (0.0, 0.0))
    async with AsyncEvertick(site.url, token=token) as client:
        assert [each.name async for each in client.items(client.list_dags, limit=1)] == ["a", "b", "c"]
        # Its answer is lost; it is sent again with the same key, and starts one run.
        client._http = httpx2.AsyncClient(transport=LosesAnswers(1), headers=client._http.headers)
        made = await client.trigger_run(dag="a", body=TriggerRequest())
        assert not made.is_new and await value(conn, "select count(*) from run") == 1
        (claim,) = await runner.claim()
        await runner.finish(claim)
        run = await client.wait(made.run_id, timeout_seconds=30)
        assert run.state == "success"
        assert [line.text async for line in client.follow_log(run.run_id, "load")] == []
        # Without a key it may have been done: the program must decide.
        client._http = httpx2.AsyncClient(transport=LosesAnswers(1), headers=client._http.headers)
        with pytest.raises(OutcomeUnknown):
            await client.pause_dag(dag="b")
        with pytest.raises(NotFound):
            await client.show_dag(dag="none")


async def test_the_same_without_a_loop(site: Site, conn: AsyncConnection) -> None:
    await lead(conn)
    await put(conn, make_dag("etl", {"load": []}))
    token = await a_token(conn)

    def program() -> tuple[list[str], bool]:
        with Evertick(site.url, token=token) as client:
            names = [each.name for each in client.items(client.list_dags)]
            made = client.trigger_run(dag="etl", body=TriggerRequest())
            with pytest.raises(TimeoutError):
                client.wait(made.run_id, timeout_seconds=0.01)
            return names, client.show_run(run_id=made.run_id).open_tasks == 1

    assert await asyncio.to_thread(program) == (["etl"], True)
