"""Default is no: every route has its permission, every role gets exactly what the matrix says, strangers get nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest
from fastapi import APIRouter, FastAPI
from psycopg import AsyncConnection
from starlette.routing import Mount, Route

from evertick.api.agent.auth import PREFIX as AGENT_PREFIX
from evertick.api.agent.auth import AgentRoute
from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import ApiContext
from evertick.api.runner.auth import PREFIX as RUNNER_PREFIX
from evertick.api.runner.auth import RunnerRoute, RunnerTokenUse
from evertick.domain.access import MATRIX, Actor, Permission, Principal, Role, narrowed
from evertick.domain.agent_protocol import TokenUse
from evertick.domain.attempt import TaskKey
from evertick.engine import accounts, runner_tokens
from evertick.operations.routes import ROUTES
from evertick.secrets.runner_tokens import RunnerIdentity
from evertick.ui.layout import PageRoute
from tests.api.applications import parts_of
from tests.api.conftest import Client, Signed
from tests.engine.world import value
from tests.source_tree import ROOT

LIMITED = frozenset({"finance"})


class Cell(NamedTuple):
    """`is_page`: for people, who are led to the login instead of being told a status."""

    method: str
    path: str
    permission: Permission
    is_page: bool


def walk(routes: Iterable[Any]) -> Iterator[Any]:
    """Each route, also of routers within."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        yield from walk(inner.routes) if inner is not None else [route]


def cells(app: FastAPI) -> Iterator[Cell]:
    for prefix, part in parts_of(app).items():
        for route in walk(part.routes):
            if isinstance(route, GuardedRoute):
                path = prefix + re.sub(r"\{[^}]*\}", "999999", route.path)
                for method in sorted(route.methods or ()):
                    yield Cell(method, path, route.permission, isinstance(route, PageRoute))


def test_every_operation_is_served_with_its_permission(app: FastAPI) -> None:
    served = {(cell.method, cell.path): cell.permission for cell in cells(app)}
    for row in ROUTES:
        path = "/api/v1" + re.sub(r"\{[^}]*\}", "999999", row.path)
        assert served[row.method, path] is row.permission, row.path


def test_every_route_of_every_part_goes_through_the_door(app: FastAPI) -> None:
    for prefix, part in parts_of(app).items():
        door = {AGENT_PREFIX: AgentRoute, RUNNER_PREFIX: RunnerRoute}.get(prefix, GuardedRoute)
        others = [route for route in walk(part.routes) if not isinstance(route, door)]
        assert all(isinstance(route, Mount) and isinstance(route.app, FastAPI) for route in others), (prefix, others)
    assert len(list(cells(app))) > 10


def test_no_route_hides_another(app: FastAPI) -> None:
    """The first of two with one method and one path would answer for both."""
    found = [f"{cell.method} {cell.path}" for cell in cells(app)]
    assert sorted(found) == sorted(set(found))


def test_a_route_without_a_permission_cannot_be_made() -> None:
    router = APIRouter(route_class=GuardedRoute)

    async def naked() -> None: ...

    with pytest.raises(TypeError, match="declares no permission"):
        router.get("/naked")(naked)
    router.get("/dressed")(requires(Permission.OWN)(naked))
    assert [route.path for route in router.routes if isinstance(route, Route)] == ["/dressed"]


def agent_cells(app: FastAPI) -> Iterator[tuple[str, str, TokenUse]]:
    for route in walk(parts_of(app)[AGENT_PREFIX].routes):
        for method in sorted(route.methods):
            yield method, AGENT_PREFIX + re.sub(r"\{[^}]*\}", "a" * 64, route.path), route.token_use


def tokens_of(context: ApiContext) -> dict[TokenUse, str]:
    tokens, whose = context.agent_tokens, {"key": TaskKey(1, 0, -1), "epoch": 1, "session": 7}
    made = {TokenUse.START: tokens.make_start_token(**whose), TokenUse.ATTEMPT: tokens.make_attempt_token(**whose)}  # type: ignore[arg-type]
    return made


def test_a_route_for_agents_names_its_token_or_cannot_be_made() -> None:
    router = APIRouter(route_class=AgentRoute)

    async def naked() -> None: ...

    with pytest.raises(TypeError, match="declares no token"):
        router.get("/naked")(naked)


async def test_nobody_but_an_attempt_gets_in_where_agents_do(app: FastAPI, admin: Client, nobody: Client) -> None:
    """Not even with a body that cannot be read: nothing is looked at before the door."""
    assert len(list(agent_cells(app))) == 7
    for method, path, _ in agent_cells(app):
        for caller in (admin, nobody):
            answer = await caller.request(method, path, content=b"{broken")
            assert answer.status_code == 401, (method, path, answer.text)


async def test_an_attempts_token_is_good_for_its_own_use_alone(
    app: FastAPI, context: ApiContext, nobody: Client
) -> None:
    for shown, token in tokens_of(context).items():
        nobody.headers["Authorization"] = f"Bearer {token}"
        for method, path, use in agent_cells(app):
            answer = await nobody.request(method, path, content=b"{broken")
            assert (answer.status_code == 401) is (use is not shown), (method, path, shown, answer.text)


def runner_cells(app: FastAPI) -> Iterator[tuple[str, str, RunnerTokenUse]]:
    for route in walk(parts_of(app)[RUNNER_PREFIX].routes):
        for method in sorted(route.methods):
            path = re.sub(
                r"\{(\w+)\}", lambda found: "a" * 64 if "sha" in found[1] or "hash" in found[1] else "1", route.path
            )
            yield method, RUNNER_PREFIX + path, route.token_use


def test_a_route_for_runners_names_its_token_or_cannot_be_made() -> None:
    router = APIRouter(route_class=RunnerRoute)

    async def naked() -> None: ...

    with pytest.raises(TypeError, match="declares no token"):
        router.get("/naked")(naked)


async def test_a_runners_tokens_are_good_for_their_own_use_and_no_other_door(
    app: FastAPI, context: ApiContext, conn: AsyncConnection, admin: Client, nobody: Client
) -> None:
    """Nothing of a request is looked at before the door: a body that cannot be read is refused for the token first."""
    row, secret = await runner_tokens.create(conn, name="t", queues=["default"], days=1, actor=Actor("test"))
    who = RunnerIdentity(session=7, token_id=row.token_id, claims_until=row.expires_at.timestamp())
    made = {RunnerTokenUse.JOIN: secret, RunnerTokenUse.SESSION: context.runner_tokens.make(who)}
    attempts = tokens_of(context)
    assert len(list(runner_cells(app))) == 19
    for method, path, use in runner_cells(app):
        for token in (
            None,
            admin.token,
            *attempts.values(),
            made[RunnerTokenUse(set(RunnerTokenUse).difference({use}).pop())],
        ):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            answer = await nobody.request(method, path, content=b"{broken", headers=headers)
            assert answer.status_code == 401, (method, path, token, answer.text)
        answer = await nobody.request(
            method, path, content=b"{broken", headers={"Authorization": f"Bearer {made[use]}"}
        )
        assert answer.status_code != 401 or "No runner joined" in answer.text, (method, path, answer.text)
    for token in made.values():
        nobody.headers["Authorization"] = f"Bearer {token}"
        for method, path, _ in agent_cells(app):
            assert (await nobody.request(method, path, content=b"{broken")).status_code == 401, path
        for cell in cells(app):
            if cell.permission is not Permission.OPEN:
                answer = await nobody.request(cell.method, cell.path, content=b"{broken")
                is_led_to_login = cell.is_page and cell.method == "GET" and answer.status_code == 303
                assert is_led_to_login or answer.status_code == 401, (cell, answer.text)


async def test_an_attempts_token_opens_no_other_door(app: FastAPI, context: ApiContext, nobody: Client) -> None:
    for token in tokens_of(context).values():
        nobody.headers["Authorization"] = f"Bearer {token}"
        for cell in cells(app):
            if cell.permission is not Permission.OPEN:
                answer = await nobody.request(cell.method, cell.path, content=b"{broken")
                is_led_to_login = cell.is_page and cell.method == "GET" and answer.status_code == 303
                assert is_led_to_login or answer.status_code == 401, (cell, answer.text)


def test_only_these_routes_are_open(app: FastAPI) -> None:
    """A new one must be named here: whoever opens a door says so twice."""
    opened = {f"{cell.method} {cell.path}" for cell in cells(app) if cell.permission is Permission.OPEN}
    assert opened == OPEN


OPEN = {
    "GET /login",
    "POST /login",
    # A provider of OpenID Connect, and a program with the token of its platform: what they send is verified.
    "GET /login/999999",
    "GET /login/999999/callback",
    "POST /auth/oidc/999999/logout",
    "POST /auth/workload",
    "GET /static/999999/999999",
    "GET /favicon.ico",
    # The documentation of the release. It has no data.
    "GET /docs",
    "GET /docs/999999",
    "GET /healthz",
    "HEAD /healthz",
    "GET /readyz",
    "HEAD /readyz",
    "POST /auth/token",
    "POST /auth/token/cli",
    # Airflow's tools read it without a token. It has no data.
    "GET /openapi.json",
    "POST /auth/login",
    "GET /auth/link/999999",
    "POST /auth/link/999999",
    # It has a signature of its own.
    "POST /api/v1/deployments/999999/push",
    "POST /api/v1/hooks/999999",
    "GET /api/v2/version",
    "GET /api/v2/monitor/health",
}


# Refused to whoever comes with a token, whatever their role: it must not give more than it has.
FOR_SESSIONS = {("PUT", "/auth/password"), ("POST", "/tokens")}


@pytest.mark.parametrize("tags", [None, LIMITED], ids=["all", "limited"])
@pytest.mark.parametrize("role", list(Role))
async def test_the_matrix_holds_cell_by_cell(
    app: FastAPI,
    conn: AsyncConnection,
    signed: Signed,
    role: Role,
    tags: frozenset[str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each route with each role: forbidden exactly where the matrix says no, and never asked to sign in again."""
    # Nobody looks at what happens here: whoever may watch is told so instead of waiting for ever.
    monkeypatch.setattr("evertick.api.event_hub.START_SECONDS", 0.01)
    caller = await signed(role, tags, name="someone")
    row = await accounts.find_user(conn, "someone")
    wrong = []
    for cell in cells(app):
        if cell.path in ("/auth/logout", "/logout"):
            issued = await accounts.issue(conn, row, kind="session", name="x", actor=Actor("test"), seconds=60)
            caller.headers["Authorization"] = f"Bearer {issued.secret}"
        else:
            caller.headers["Authorization"] = f"Bearer {caller.token}"
        if cell.permission is Permission.OPEN or (cell.method, cell.path) in FOR_SESSIONS:
            continue
        answer = await caller.request(cell.method, cell.path)
        rule = MATRIX[cell.permission]
        assert rule.lowest is not None
        is_held = role.rank >= rule.lowest.rank and (
            tags is None or rule.is_per_dag or cell.permission is Permission.OWN
        )
        is_forbidden = answer.status_code == 403
        if is_forbidden is is_held or answer.status_code in (401, 500):
            wrong.append((cell, answer.status_code, answer.text))
    assert not wrong


async def test_strangers_and_bad_tokens_are_told_to_sign_in_everywhere(app: FastAPI, nobody: Client) -> None:
    """Also with a body that cannot be read: nothing is looked at before the door."""
    for header in (None, "Bearer evt_wrong", "Bearer evl_link", "Bearer", "Basic YTpi", "Bearer " + "x" * 5000):
        for cell in cells(app):
            if cell.permission is Permission.OPEN:
                continue
            headers = {"Authorization": header} if header else {}
            answer = await nobody.request(cell.method, cell.path, headers=headers, content=b"{broken")
            if cell.is_page and cell.method == "GET":
                assert answer.status_code == 303, (cell, answer.text)
                assert answer.headers["location"].startswith("/login")
                continue
            assert answer.status_code == 401, (cell, answer.text)
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/redoc", "/api/v1/docs", "/api/v1/nothing", "/auth"])
async def test_the_frameworks_own_pages_do_not_exist(nobody: Client, path: str) -> None:
    await nobody.refused("GET", path, 404)


def test_the_page_of_permissions_is_the_matrix() -> None:
    page = (ROOT / "docs/reference/permissions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    told = {name: (about, [mark == "yes" for mark in marks], per) for name, about, *marks, per in rows}
    expected = {
        permission.value: (
            rule.about,
            [Principal(name="x", role=role).may(permission) for role in Role],
            "DAGs with its tags" if rule.is_per_dag else "yes" if permission in FOR_ALL else "no",
        )
        for permission, rule in MATRIX.items()
    }
    assert told == expected


FOR_ALL = (Permission.OPEN, Permission.OWN)


def test_a_token_can_only_take_away() -> None:
    assert narrowed(Role.EDITOR, None, Role.ADMIN, None) == (Role.EDITOR, None)
    assert narrowed(Role.EDITOR, None, Role.VIEWER, ["a"]) == (Role.VIEWER, frozenset({"a"}))
    assert narrowed(Role.EDITOR, ["a", "b"], None, ["b", "c"]) == (Role.EDITOR, frozenset({"b"}))
    assert narrowed(Role.EDITOR, ["a"], None, ["c"]) == (Role.EDITOR, frozenset())
    assert not Principal(name="x", role=Role.ADMIN, tags=frozenset()).sees(["a"])


async def test_every_refusal_is_on_record_and_strangers_cannot_fill_it(
    conn: AsyncConnection, signed: Signed, nobody: Client
) -> None:
    viewer = await signed(Role.VIEWER, ["finance"], name="eve")
    await viewer.refused("GET", "/metrics", 403)
    for _ in range(3):
        await nobody.refused("GET", "/metrics", 401)
    line = "actor || ' ' || (detail->>'needs') || ' ' || origin"
    query = f"select string_agg({line}, ',' order by entry_id) from audit_log where action = 'refuse'"
    assert await value(conn, query) == "user:eve metrics.read 10.0.0.1,anonymous metrics.read 10.0.0.1"
