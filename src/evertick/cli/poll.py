"""Looking again and again until something is over. A database that is away for a while ends no wait."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable

import psycopg
from psycopg import AsyncConnection

from evertick.db.connect import Purpose
from evertick.domain.errors import PostgresUnavailable
from evertick.runtime.connections import ReconnectingConnection
from evertick.runtime.loop import back_off

PAUSE_SECONDS = 0.2
# A look at a run of ten thousand tasks costs the database some milliseconds: rest for longer than it worked.
_REST_PER_LOOK = 5.0

Look = Callable[[AsyncConnection], Awaitable[bool]]


async def poll(url: str, look: Look, *, within_seconds: float | None = None) -> bool:
    """Look until it says that all is over. False: it was not within the time given.

    No look is cut short by that: however little time is given, there is one to tell of.
    """
    deadline = math.inf if within_seconds is None else time.monotonic() + within_seconds
    link = ReconnectingConnection(url, Purpose.READ)
    try:
        return await _until_over(link, look, deadline)
    finally:
        await link.close()


async def _until_over(link: ReconnectingConnection, look: Look, deadline: float) -> bool:
    failures = 0
    while True:
        began = time.monotonic()
        try:
            if await look(await link.get()):
                return True
        except (psycopg.OperationalError, psycopg.InterfaceError, PostgresUnavailable, OSError):
            failures += 1
            if failures == 1:
                sys.stderr.write("The database does not answer; waiting for it.\n")
            pause = back_off(failures)
        else:
            failures = 0
            pause = max(PAUSE_SECONDS, _REST_PER_LOOK * (time.monotonic() - began))
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        await asyncio.sleep(min(pause, left))
