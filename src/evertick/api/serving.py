"""Runs the application with uvicorn on an already bound socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from evertick.api.desk import Desk
from evertick.api.http_door import BoundedHttp
from evertick.api.service import IDLE_SECONDS, STOP_SECONDS
from evertick.config import Settings
from evertick.services.events import Log
from evertick.services.link import Link
from evertick.services.result_cleaning import keep_results
from evertick.store.db import Purpose


class _Server(uvicorn.Server):
    """A server without signal handlers: the service installs its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    make_app: Callable[[Desk], FastAPI],
    settings: Settings,
    url: str,
    log: Log,
    at: socket.socket,
    stop: asyncio.Event,
) -> None:
    """Serve until `stop` is set."""
    desk = Desk(settings, url, log)
    config = uvicorn.Config(
        make_app(desk),
        loop="asyncio",
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        # No access log: paths may contain a one-time secret.
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.api_proxies),
        forwarded_allow_ips=list(settings.api_proxies),
        limit_concurrency=settings.api_connections,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    server = _Server(config)

    async def end() -> None:
        await stop.wait()
        # Close the streams before the server waits for open requests: streams do not end on their own.
        desk.hub.close()
        desk.stop_watch.close()
        server.should_exit = True

    async with asyncio.TaskGroup() as group:
        pools = [desk.readers, desk.writers, desk.agents]
        # Large results of agents are stored on the API's machine.
        cleaning = keep_results(settings, link=Link(url, Purpose.API_READ), log=log, is_own=True)
        works = (end(), desk.hub.run(), desk.remembered.run(), cleaning, *(pool.tend() for pool in pools))
        beside = [group.create_task(each) for each in works]
        await server.serve(sockets=[at])
        for each in beside:
            each.cancel()
