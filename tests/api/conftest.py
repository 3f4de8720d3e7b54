"""The application on a real database, and callers with each role."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any

import httpx
import pytest
import structlog
from fastapi import FastAPI
from psycopg import AsyncConnection

from evertick.api.context import ApiContext
from evertick.config import Settings
from evertick.domain.access import Actor, Role
from evertick.engine import accounts
from tests.api.applications import shared_app

BASE = "http://evertick.test"
ORDINARY = Settings(api_rate_limit=0, agent_key=("k" * 43,))
_NUMBERS = itertools.count(1)

Signed = Callable[..., Awaitable["Client"]]


class Client(httpx.AsyncClient):
    """A caller with a token, or nobody."""

    def __init__(self, app: FastAPI, token: str | None, address: str = "10.0.0.1") -> None:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False, client=(address, 4000))
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        super().__init__(transport=transport, base_url=BASE, headers=headers)
        self.token = token

    async def ok(self, method: str, path: str, *, status: int = 200, **options: Any) -> Any:
        """The document of an answer that must have this status."""
        answer = await self.request(method, path, **options)
        assert answer.status_code == status, (method, path, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    async def refused(self, method: str, path: str, status: int, **options: Any) -> Any:
        """The problem that an answer tells."""
        answer = await self.request(method, path, **options)
        assert answer.status_code == status, (method, path, answer.status_code, answer.text)
        assert "Traceback" not in answer.text
        return answer.json()


@pytest.fixture
def settings() -> Settings:
    return ORDINARY


@pytest.fixture
async def context(database: str, settings: Settings) -> AsyncIterator[ApiContext]:
    made = ApiContext(settings, database, structlog.get_logger())
    yield made
    for pool in (made.readers, made.writers, made.agents):
        for _, link in pool._idle:
            with suppress(OSError):
                await link.close()


@pytest.fixture
def app(context: ApiContext) -> FastAPI:
    return shared_app(context)


@pytest.fixture
def nobody(app: FastAPI) -> Client:
    return Client(app, None)


@pytest.fixture
async def signed(app: FastAPI, conn: AsyncConnection) -> Signed:
    """Makes a user of that role, and a caller with a token of theirs."""

    async def make(
        role: Role | str = Role.ADMIN,
        tags: Collection[str] | None = None,
        *,
        name: str | None = None,
        kind: str = "token",
        limits: tuple[Role | None, Collection[str] | None] = (None, None),
    ) -> Client:
        user = name or f"{role}{next(_NUMBERS)}"
        await accounts.add_user(conn, name=user, role=Role(role), tags=tags, actor=Actor("test"))
        row = await accounts.find_user(conn, user)
        issued = await accounts.issue(
            conn, row, kind=kind, name="test", actor=Actor("test"), seconds=3600, limits=limits
        )
        return Client(app, issued.secret)

    return make


@pytest.fixture
async def admin(signed: Signed) -> Client:
    return await signed(Role.ADMIN, name="root")
