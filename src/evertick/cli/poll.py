"""Looking again and again until something is over. A database that is away for a while ends no wait."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

import psycopg
from psycopg import AsyncConnection

from evertick.domain.errors import PostgresUnavailable
from evertick.services.link import Link
from evertick.services.loop import back_off
from evertick.store.db import Purpose

PAUSE_SECONDS = 0.2
# A look at a run of ten thousand tasks costs the database some milliseconds: rest for longer than it worked.
_REST_PER_LOOK = 5.0

Look = Callable[[AsyncConnection], Awaitable[bool]]


async def poll(url: str, look: Look, *, within_seconds: float | None = None) -> bool:
    """Look until it says that all is over. False: it was not within the time given."""
    link = Link(url, Purpose.READ)
    try:
        async with asyncio.timeout(within_seconds):
            await _until_over(link, look)
    except TimeoutError:
        return False
    finally:
        await link.close()
    return True


async def _until_over(link: Link, look: Look) -> None:
    failures = 0
    while True:
        began = time.monotonic()
        try:
            if await look(await link.get()):
                return
        except (psycopg.OperationalError, psycopg.InterfaceError, PostgresUnavailable, OSError):
            failures += 1
            if failures == 1:
                sys.stderr.write("The database does not answer; waiting for it.\n")
            await asyncio.sleep(back_off(failures))
        else:
            failures = 0
            await asyncio.sleep(max(PAUSE_SECONDS, _REST_PER_LOOK * (time.monotonic() - began)))
