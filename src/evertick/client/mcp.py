"""The tools of the Model Context Protocol over standard input and output: one message per line, and nothing else."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from evertick.client.connect import Client, open_client
from evertick.operations.mcp.protocol import Session, answer, offered


def serve(*, allows_writes: bool) -> None:
    """Until the input ends. A server decides about each call; with a database every tool is allowed."""
    with open_client() as client:
        asyncio.run(_serve(client, allows_writes))


async def _serve(client: Client, allows_writes: bool) -> None:
    loop = asyncio.get_running_loop()
    # A client works on one thread, which must have no event loop of its own.
    with ThreadPoolExecutor(1) as thread:

        async def ask(operation: Callable[..., Awaitable[Any]], /, **params: Any) -> Any:
            return await loop.run_in_executor(thread, lambda: client.call(operation, **params))

        session = Session(ask=ask, tools=offered(lambda tool: True, allows_writes=allows_writes))
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            if line.strip() and (found := await answer(session, line)) is not None:
                sys.stdout.write(json.dumps(found) + "\n")
                sys.stdout.flush()
