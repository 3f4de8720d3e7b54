"""Run one service in this process until a signal stops it. A service that ends by itself has to be restarted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from typing import Protocol, runtime_checkable

from evertick.config import Settings
from evertick.db import failpoints
from evertick.db.connect import Purpose, connect, with_advice
from evertick.db.migrate import refuse_pending, status
from evertick.domain.errors import SchemaMismatch
from evertick.observability.health import ServiceHealth, ServicePhase
from evertick.observability.health_endpoint import HealthEndpoint
from evertick.observability.logging import Log, configure
from evertick.processes.identity import process_name
from evertick.runtime.loop import in_background, limit_backoff, run_loop
from evertick.supervisor.postgres_home import own_database_url


class Service(Protocol):
    wake: asyncio.Event
    stop: asyncio.Event

    async def run(self) -> None: ...


@runtime_checkable
class HasStopNow(Protocol):
    """A service that returns its work even when it ends without a grace period."""

    def stop_now(self) -> None: ...


MakeService = Callable[[str, Log], Service]
BackgroundTask = Callable[[str, Log], Coroutine[None, None, None]]


def serve(
    name: str,
    settings: Settings,
    make: MakeService,
    *,
    background: Sequence[BackgroundTask] = (),
    server: str | None = None,
) -> bool:
    """Run the service that `make` returns for the database's URL and a log, until SIGTERM or Ctrl-C. A second signal ends it
    without a grace period. False: it ended by itself.

    The background tasks run as long as the service does. `server`: it works with this server, and has no database.
    """
    owner = process_name()
    log = configure(service=name, owner=owner, as_json=settings.log == "json")
    failpoints.arm(settings.failpoint)
    limit_backoff(settings.heartbeat_seconds)
    url = server or own_database_url(settings)
    health = ServiceHealth(name, owner=owner)
    port = HealthEndpoint(name, health.routes(), settings=settings, log=log)
    port.start()
    port.leave_note()
    if port.url:
        log.info("health_listening", url=port.url)
    try:
        is_stopped = asyncio.run(_serve(url, make, background, health, log, has_database=server is None))
    finally:
        port.stop()
    if not is_stopped:
        log.error("service_ended")
    return is_stopped


async def _serve(
    url: str,
    make: MakeService,
    background: Sequence[BackgroundTask],
    health: ServiceHealth,
    log: Log,
    *,
    has_database: bool,
) -> bool:
    """True after a signal, false if the service ended by itself."""
    loop = asyncio.get_running_loop()
    service = make(url, log)

    def stop() -> None:
        is_first = not service.stop.is_set()
        health.phase = ServicePhase.STOPPING
        service.stop.set()
        service.wake.set()
        if is_first and isinstance(service, HasStopNow):
            return
        if isinstance(service, HasStopNow):
            service.stop_now()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if has_database:
        await _wait_for_schema(url, service, log)
    if not service.stop.is_set():
        health.phase = ServicePhase.RUNNING
        async with in_background(*(each(url, log) for each in background)):
            with with_advice(url) if has_database else nullcontext():
                await service.run()
    return service.stop.is_set()


async def _wait_for_schema(url: str, service: Service, log: Log) -> None:
    """Wait until the database is available, and refuse one with another schema."""
    over, refused = asyncio.Event(), list[SchemaMismatch]()

    async def check_schema() -> float:
        if not service.stop.is_set():
            try:
                async with await connect(url, purpose=Purpose.READ) as conn:
                    refuse_pending(await status(conn), url)
            except SchemaMismatch as error:
                refused.append(error)
        over.set()
        return 0.0

    await run_loop(check_schema, wake=service.wake, stop=over, name="start", log=log)
    if refused:
        raise refused[0]
