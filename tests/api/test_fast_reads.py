"""A plain read is answered without the framework's machinery, and nobody can tell but by the time it takes."""

from __future__ import annotations

import re
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, FastAPI, Header, Query, Request, Response
from pydantic import BaseModel
from starlette.routing import Match

from evertick.api.app import FastReads
from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Who
from evertick.api.fast_reads import plain_answer
from evertick.domain.access import Permission, Role
from tests.api.applications import parts_of
from tests.api.conftest import Client, Signed
from tests.api.test_doors import walk
from tests.engine.world import make_dag, put, start, value

# Right, wrong, given twice, empty, unknown: whatever a parameter of that name is.
QUESTIONS = (
    "",
    "?limit=2",
    "?limit=0",
    "?limit=many",
    "?limit=1&limit=2",
    "?limit=",
    "?cursor=x",
    "?dag=etl&state=queued",
    "?dag=nobodys",
    "?state=odd",
    "?is_paused=perhaps&tag=finance&tag=x",
    "?order_by=-nothing&offset=-1",
    "?contains=%00&unheard=of",
)


class Filter(BaseModel):
    limit: int = 5


def short_way(app: FastAPI) -> FastReads:
    layer: Any = app.surroundings  # type: ignore[attr-defined]
    while not isinstance(layer, FastReads):
        layer = getattr(layer, "_app", None) or layer.app
    return layer


def plain_routes(app: FastAPI) -> dict[str, GuardedRoute]:
    """By an address that fits."""
    return {
        prefix + re.sub(r"\{[^}]*\}", lambda part: "etl" if "dag" in part[0] else "1", route.path): route
        for prefix, part in parts_of(app).items()
        for route in walk(part.routes)
        if isinstance(route, GuardedRoute) and route.answer_plainly is not None
    }


def told(answer: Any) -> tuple[int, str, dict[str, str]]:
    """All but what differs from one request to the next."""
    text = re.sub(r'"request_id":"[0-9a-f]+"', "", answer.text)
    text = re.sub(r"\d{4}-\d\d-\d\dT[0-9:.]+(Z|\+00:00)", "then", text)
    text = re.sub(r'"(\w*seconds\w*|uptime)":[0-9.e-]+', "", text)
    headers = {name: each for name, each in answer.headers.items() if name not in ("x-request-id", "content-length")}
    return answer.status_code, text, headers


async def test_both_ways_give_the_same_answer(
    app: FastAPI, signed: Signed, conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(conn, make_dag("etl", {"extract": [], "load": ["extract"]}, every="@every 1h", tags=("finance",)))
    await start(conn, "etl")
    people = [await signed(Role.ADMIN), await signed(Role.VIEWER, {"other"})]
    # The audit log tells of each refusal: that one is longer the second time. Who waits, waits for half a minute.
    routes = {path: route for path, route in plain_routes(app).items() if not path.endswith(("/audit", "/wait"))}
    assert len(routes) > 80
    addresses = [
        path + question
        for path, route in routes.items()
        for question in (QUESTIONS if any(param.name == "limit" for param in route.dependant.query_params) else ("",))
    ]

    async def answers() -> dict[tuple[int, str], Any]:
        return {
            (number, address): told(await each.get(address))
            for number, each in enumerate(people)
            for address in addresses
        }

    for each in people:
        # When a token was used first is on record.
        await each.get("/api/v1/runs")
    short = await answers()
    monkeypatch.setattr(short_way(app), "ways", {})
    for route in routes.values():
        monkeypatch.setattr(route, "answer_plainly", None)
    long = await answers()
    different = [(key, each, long[key]) for key, each in short.items() if each != long[key]]
    assert different == []
    assert {status for status, *_ in short.values()} >= {200, 403, 404, 422}


def test_a_fast_read_answers_like_the_regular_route(app: FastAPI) -> None:
    ways = short_way(app).ways
    assert {"/api/v1/runs", "/api/v1/dags", "/api/v2/version"} <= set(ways)
    for path, (part, permission, answer) in ways.items():
        prefix = next(each for each, other in parts_of(app).items() if other is part)
        scope = {"type": "http", "method": "GET", "path": path.removeprefix(prefix), "root_path": ""}
        first = next(route for route in walk(part.routes) if route.matches(scope)[0] is Match.FULL)
        assert (first.endpoint, first.permission) == (answer.__self__.route.endpoint, permission), path


async def test_the_framework_is_asked_only_where_something_is_to_be_said(
    app: FastAPI, admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, asked = short_way(app), []

    async def long(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await Response(status_code=418)(scope, receive, send)

    monkeypatch.setattr(way, "_app", long)
    assert (await admin.get("/api/v1/runs", params={"limit": 3})).json() == {"items": [], "next_cursor": None}
    assert asked == []
    for method, path in (
        ("GET", "/api/v1/runs?limit=0"),
        ("GET", "/api/v1/runs?dag=nobodys"),
        ("POST", "/api/v1/runs"),
        ("HEAD", "/api/v1/runs"),
        ("GET", "/api/v1/runs/"),
        ("GET", "/api/v1/runs/1"),
    ):
        assert (await admin.request(method, path)).status_code == 418
    assert len(asked) == 6


async def test_a_rejected_fast_read_is_answered_and_audited_once(nobody: Client, signed: Signed, conn: Any) -> None:
    noted = "select count(*) from audit_log where action = 'refuse'"
    before = await value(conn, noted)
    await nobody.refused("GET", "/api/v1/runs", 401)
    assert await value(conn, noted) == before + 1
    viewer = await signed(Role.VIEWER)
    await viewer.refused("GET", "/api/v1/users", 403)
    assert await value(conn, noted) == before + 2


async def test_an_error_of_a_fast_read_is_reported_with_its_number(
    app: FastAPI, admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = short_way(app)

    async def broken(request: Request) -> Response:
        raise ZeroDivisionError("a secret of the program")

    part, permission, _ = way.ways["/api/v1/runs"]
    monkeypatch.setitem(way.ways, "/api/v1/runs", (part, permission, broken))
    answer = await admin.get("/api/v1/runs")
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


def test_only_what_is_plain_is_answered_plainly() -> None:
    router = APIRouter(route_class=GuardedRoute)

    async def plain(caller: Who, path: str, many: Annotated[list[str] | None, Query()] = None, limit: int = 5) -> int:
        return limit

    async def by_header(caller: Who, etag: Annotated[str | None, Header()] = None) -> int:
        return 1

    async def with_response(caller: Who, response: Response) -> int:
        return 1

    async def with_model(caller: Who, asked: Annotated[Filter, Query()]) -> int:
        return 1

    async def with_list(caller: Who, many: Annotated[list[str], Query(default_factory=list)]) -> int:
        return 1

    async def raw(caller: Who) -> Response:
        return Response()

    each = (plain, by_header, with_response, with_model, with_list, raw)
    for function in each:
        router.get(f"/{function.__name__}/{{path}}")(requires(Permission.OWN)(function))
    router.get("/made/{path}", status_code=201)(plain)
    router.post("/posted/{path}")(plain)
    found = [route.path for route in router.routes if isinstance(route, GuardedRoute) and plain_answer(route)]
    assert found == ["/plain/{path}"]
