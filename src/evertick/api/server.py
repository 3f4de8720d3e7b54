"""The API's server: Uvicorn with the connections of `api/http_connection.py`, and the tasks of an API process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from evertick.api.context import ApiContext
from evertick.api.http_connection import BoundedHttp, close_slow_connections
from evertick.api.service import IDLE_SECONDS, STOP_SECONDS
from evertick.config import Settings
from evertick.db.queries import runs
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.runner.housekeeping import clean_results

# Connections that are accepted at once. More at once would use more descriptors than a process may have.
_BACKLOG = 128


class _HttpServer(uvicorn.Server):
    """A server without signal handlers: the service installs its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _existing_runs(context: ApiContext, run_ids: list[int]) -> set[int]:
    async with context.agents.lent() as conn:
        return await runs.existing(conn, run_ids)


async def serve(
    make_app: Callable[[ApiContext], FastAPI],
    settings: Settings,
    url: str,
    log: Log,
    at: socket.socket,
    stop: asyncio.Event,
) -> None:
    """Serve until `stop` is set."""
    context = ApiContext(settings, url, log)
    metrics.WAITING_RUNNERS.set_function(lambda: context.waiting_runners.count)
    config = uvicorn.Config(
        make_app(context),
        loop="asyncio",
        http=cast("Any", partial(BoundedHttp, settings=settings)),
        ws="none",
        lifespan="off",
        log_config=None,
        # No access log: paths may contain a one-time secret.
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.api_trusted_proxies),
        forwarded_allow_ips=list(settings.api_trusted_proxies),
        limit_concurrency=settings.api_connections,
        backlog=_BACKLOG,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    server = _HttpServer(config)

    async def end() -> None:
        await stop.wait()
        # Close the streams before the server waits for open requests: streams do not end on their own.
        context.event_hub.close()
        context.stop_requests.close()
        context.waiting_runners.close()
        server.should_exit = True

    async with asyncio.TaskGroup() as group:
        pools = [context.readers, context.writers, context.agents, context.runners]
        # Large results of agents are stored on the API's machine.
        cleaning = clean_results(settings, existing=partial(_existing_runs, context), log=log)
        slow = close_slow_connections(server.server_state.connections)
        shared = (
            context.event_hub.run(),
            context.auth_cache.run(),
            context.agent_presence.run(),
            context.waiting_runners.run(),
        )
        works = (end(), slow, *shared, cleaning, *(pool.tend() for pool in pools))
        running = [group.create_task(each) for each in works]
        await server.serve(sockets=[at])
        for each in running:
            each.cancel()
