"""How a runner under test reaches the engine: its database, or an API over HTTP. The same tests hold for both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from psycopg import AsyncConnection

from evertick.api.server import serve
from evertick.config import Settings
from evertick.domain.access import Actor
from evertick.engine import runner_tokens
from evertick.runner.runner import Runner
from evertick.runtime.listen_socket import bound
from tests.api.applications import shared_app
from tests.ports import own_port
from tests.system.hosting import Said, quick

TRANSPORTS = ("database", "https")


@dataclass(kw_only=True)
class ApiServer:
    """An API that can be taken away and come back at the same address."""

    database: str
    settings: Settings
    port: int = field(default_factory=own_port)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._stop = asyncio.Event()
        at = bound("127.0.0.1", self.port)
        log = Said().log
        self._serving = asyncio.create_task(serve(shared_app, self.settings, self.database, log, at, self._stop))

    async def close(self) -> None:
        if self._serving is not None:
            self._stop.set()
            await self._serving
            self._serving = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.open()
        try:
            yield
        finally:
            await self.close()


@dataclass(kw_only=True)
class Reach:
    """`url` is the address that a runner is given, `secret` its join token."""

    url: str
    secret: str | None = None
    api: ApiServer | None = None

    @property
    def is_remote(self) -> bool:
        return self.secret is not None

    def settings(self, folder: Path, **changes: Any) -> Settings:
        made = quick(self.url, folder, **changes)
        return replace(made, database_url=None, runner_token=self.secret) if self.is_remote else made

    def runner(self, folder: Path, said: Said, **changes: Any) -> Runner:
        return Runner(self.settings(folder, **changes), url=self.url, log=said.log)


async def new_token(conn: AsyncConnection, *queues: str, days: float = 1.0) -> str:
    _, secret = await runner_tokens.create(
        conn, name="test", queues=queues or ("default",), days=days, actor=Actor("test")
    )
    return secret


@asynccontextmanager
async def reaching(transport: str, database: str, conn: AsyncConnection, folder: Path) -> AsyncIterator[Reach]:
    if transport == "database":
        yield Reach(url=database)
        return
    settings = quick(database, folder / "api", api_rate_limit=0, agent_key=("k" * 43,))
    api = ApiServer(database=database, settings=settings)
    async with api.running():
        yield Reach(url=api.url, secret=await new_token(conn), api=api)
