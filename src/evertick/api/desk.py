"""Who asks, and with what the answer is made: the caller's rights, and connections to read and to change with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import psycopg
from fastapi import Depends, Request
from psycopg import AsyncConnection

from evertick.api.event_stream import Seats
from evertick.api.hub import Hub
from evertick.api.pool import Pool
from evertick.config import Settings
from evertick.domain.access import Permission, Principal, Role
from evertick.domain.errors import AnswerLost, Forbidden, NotFound
from evertick.services.events import Log
from evertick.store import access, dags
from evertick.store.dags import DagRow
from evertick.store.db import Purpose
from evertick.store.wake import Channel, notify

# Enough for a page of people; small beside what the engine has (H4).
READERS, WRITERS = 6, 3
# Each asks the database three times a second.
MOST_LOG_STREAMS, MOST_LOG_STREAMS_OF_USER = 40, 10
NOBODY = Principal(name="nobody", role=Role.VIEWER, tags=frozenset())

F = TypeVar("F")


@dataclass(slots=True)
class Desk:
    """What all requests of one process share."""

    settings: Settings
    url: str
    log: Log
    readers: Pool = field(init=False)
    writers: Pool = field(init=False)
    hub: Hub = field(init=False)
    log_seats: Seats = field(init=False)

    def __post_init__(self) -> None:
        self.readers = Pool(self.url, Purpose.API_READ, READERS)
        self.writers = Pool(self.url, Purpose.API_WRITE, WRITERS)
        self.hub = Hub(self.url, self.log)
        self.log_seats = Seats(most=MOST_LOG_STREAMS, most_of_user=MOST_LOG_STREAMS_OF_USER)


@dataclass(slots=True, kw_only=True)
class Caller:
    """One request, from somebody who may make it."""

    desk: Desk
    principal: Principal
    permission: Permission
    origin: str
    request_id: str
    # Of a cookie: what a page must send back with a change.
    csrf: str | None = None
    # Whom else to wake, as a verb turned out.
    also: set[Channel] = field(default_factory=set)

    @property
    def actor(self) -> str:
        return f"user:{self.principal.name}"

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        async with self.desk.readers.lent() as conn:
            yield conn

    @asynccontextmanager
    async def changing(self, *wake: Channel) -> AsyncIterator[AsyncConnection]:
        """For an engine verb. What it journals has the caller's origin; afterwards those who should act are woken."""
        async with self.desk.writers.lent() as conn:
            await access.say_origin(conn, origin=self.origin, request_id=self.request_id)
            try:
                yield conn
            except (psycopg.OperationalError, psycopg.InterfaceError):
                if conn.closed or conn.broken:
                    raise AnswerLost("The answer was lost: whether this was done is not known.") from None
                raise
            # A wake-up only shortens a wait: the change is done, whether it arrives or not.
            with suppress(psycopg.Error):
                for channel in {*wake, *self.also} if self.desk.settings.notify else ():
                    await notify(conn, channel)

    def require(self, permission: Permission) -> None:
        """For a route that does one thing or another."""
        if not self.principal.may(permission):
            raise Forbidden(f"{self.principal.name} may not do this: it needs {permission}.")

    async def dag(self, conn: AsyncConnection, name: str) -> DagRow:
        """A DAG that exists and that the caller may know of. Another one's is as if it were not there."""
        row = await dags.find(conn, name)
        if row is None or row.deleted_at is not None or row.spec is None or not self.sees(row):
            raise NotFound(f"There is no DAG {name[:200]!r}.")
        return row

    def sees(self, row: DagRow) -> bool:
        tags = (row.spec or {}).get("tags")
        return self.principal.sees([str(tag) for tag in tags] if isinstance(tags, list) else [])

    async def visible(self, conn: AsyncConnection) -> list[int] | None:
        """The ids of the DAGs whose runs may be shown; None for all."""
        if self.principal.tags is None:
            return None
        return await dags.ids_with_tags(conn, tags=sorted(self.principal.tags))


async def caller_of(request: Request) -> Caller:
    """Asynchronous though it waits for nothing: for a plain function FastAPI changes to another thread and back, at every request."""
    found: Caller = request.state.caller
    return found


Who = Annotated[Caller, Depends(caller_of)]


def tags_of(tags: Collection[str] | None) -> list[str] | None:
    return None if tags is None else sorted(tags)
