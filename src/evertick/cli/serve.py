"""Running one service in this process until somebody asks it to stop. A service that ends by itself is to be restarted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Protocol

import typer

from evertick.cli.connection import database_url, refuse_pending, telling
from evertick.config import Settings
from evertick.domain.errors import SchemaMismatch
from evertick.services.events import Log, configure
from evertick.services.loop import run_loop
from evertick.store import failpoints
from evertick.store.db import Purpose, connect
from evertick.store.migrate import status


class Service(Protocol):
    wake: asyncio.Event
    stop: asyncio.Event

    async def run(self) -> None: ...


Make = Callable[[str, Log], Service]


def serve(name: str, settings: Settings, make: Make) -> None:
    """Run what `make` gives, for the database's URL and a log, until SIGTERM or Ctrl-C; the second Ctrl-C is at once."""
    log = configure(service=name, as_json=settings.log == "json")
    failpoints.arm(settings.failpoint)
    url = database_url(settings)
    if not asyncio.run(_serve(url, make, log)):
        log.error("ended_by_itself")
        raise typer.Exit(1)


async def _serve(url: str, make: Make, log: Log) -> bool:
    """Whether it was asked to stop."""
    loop = asyncio.get_running_loop()
    service = make(url, log)
    asked = asyncio.Event()

    def stop() -> None:
        asked.set()
        service.stop.set()
        service.wake.set()
        loop.remove_signal_handler(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await _wait_for_schema(url, service, log)
    if not asked.is_set():
        with telling(url):
            await service.run()
    return asked.is_set()


async def _wait_for_schema(url: str, service: Service, log: Log) -> None:
    """A database that is not up yet is waited for; one with another schema is refused."""
    over, refused = asyncio.Event(), list[SchemaMismatch]()

    async def look() -> float:
        if not service.stop.is_set():
            try:
                async with await connect(url, purpose=Purpose.READ) as conn:
                    refuse_pending(await status(conn), url)
            except SchemaMismatch as error:
                refused.append(error)
        over.set()
        return 0.0

    await run_loop(look, wake=service.wake, stop=over, name="start", log=log)
    if refused:
        raise refused[0]
