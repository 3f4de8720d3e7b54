"""Runs one service in this process until a signal stops it. A service that ends by itself has to be restarted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol, runtime_checkable

import typer

from evertick.config import Settings
from evertick.db import failpoints
from evertick.db.connect import Purpose, connect, with_advice
from evertick.db.migrate import refuse_pending, status
from evertick.domain.errors import SchemaMismatch
from evertick.observability.health import Health, Phase
from evertick.observability.health_endpoint import HealthEndpoint
from evertick.observability.logging import Log, configure
from evertick.processes.identity import process_name
from evertick.runtime.loop import limit_backoff, run_loop
from evertick.supervisor.postgres_home import own_database_url


class Service(Protocol):
    wake: asyncio.Event
    stop: asyncio.Event

    async def run(self) -> None: ...


@runtime_checkable
class Hurried(Protocol):
    """A service that returns its work even when it ends without a grace period."""

    def stop_now(self) -> None: ...


Make = Callable[[str, Log], Service]
Beside = Callable[[str, Log], Coroutine[None, None, None]]


def serve(name: str, settings: Settings, make: Make, *, beside: Sequence[Beside] = ()) -> None:
    """Run the service that `make` returns for the database's URL and a log, until SIGTERM or Ctrl-C. A second signal ends it
    without a grace period.

    The coroutines of `beside` run concurrently, as long as the service does.
    """
    owner = process_name()
    log = configure(service=name, owner=owner, as_json=settings.log == "json")
    failpoints.arm(settings.failpoint)
    limit_backoff(settings.heartbeat_seconds)
    url = own_database_url(settings)
    health = Health(name, owner=owner)
    port = HealthEndpoint(name, health.routes(), settings=settings, log=log)
    port.start()
    port.leave_note()
    if port.url:
        log.info("health_listening", url=port.url)
    try:
        was_asked = asyncio.run(_serve(url, make, beside, health, log))
    finally:
        port.stop()
    if not was_asked:
        log.error("service_ended")
        raise typer.Exit(1)


async def _serve(url: str, make: Make, beside: Sequence[Beside], health: Health, log: Log) -> bool:
    """Whether it was asked to stop."""
    loop = asyncio.get_running_loop()
    service = make(url, log)

    def stop() -> None:
        is_first = not service.stop.is_set()
        health.phase = Phase.STOPPING
        service.stop.set()
        service.wake.set()
        if is_first and isinstance(service, Hurried):
            return
        if isinstance(service, Hurried):
            service.stop_now()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await _wait_for_schema(url, service, log)
    if not service.stop.is_set():
        health.phase = Phase.RUNNING
        async with asyncio.TaskGroup() as group:
            going = [group.create_task(each(url, log)) for each in beside]
            with with_advice(url):
                await service.run()
            for each in going:
                each.cancel()
    return service.stop.is_set()


async def _wait_for_schema(url: str, service: Service, log: Log) -> None:
    """It waits for a database that is not up yet, and refuses one with another schema."""
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
