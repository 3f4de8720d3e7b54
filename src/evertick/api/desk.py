"""Who asks, and with what the answer is made: the caller's rights, and connections to read and to change with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import psycopg
from fastapi import Depends, Request
from psycopg import AsyncConnection

from evertick.api.event_stream import Seats
from evertick.api.hub import Hub
from evertick.api.pool import Pool
from evertick.api.remembered import Remembered
from evertick.api.stop_watch import StopWatch
from evertick.config import Settings
from evertick.domain.access import Permission, Principal, Role
from evertick.domain.errors import AnswerLost, EvertickError, Forbidden, InvalidSettings, NotFound
from evertick.services.agent_tokens import AgentTokens
from evertick.services.aside import Aside
from evertick.services.events import Log
from evertick.services.grants import Grants
from evertick.services.log_reading import LogArchive, LogReader
from evertick.services.storing import MOST_TRANSFERS
from evertick.services.versions import Versions
from evertick.store import access, dags
from evertick.store.dags import DagRow
from evertick.store.db import Purpose
from evertick.store.wake import Channel, notify

# Enough for a page of people; small beside what the engine has (H4).
READERS, WRITERS = 6, 3
# Agents have their own: a heartbeat must not wait for people.
AGENTS = 4
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
    remembered: Remembered = field(init=False)
    hub: Hub = field(init=False)
    log_seats: Seats = field(init=False)
    agents: Pool = field(init=False)
    stop_watch: StopWatch = field(init=False)
    storage: Aside = field(init=False)
    versions: Versions = field(init=False)
    log_archive: LogArchive = field(init=False)
    _agent_tokens: AgentTokens | None = field(default=None, init=False)
    _grants: Grants | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.readers = Pool(self.url, Purpose.API_READ, READERS)
        self.writers = Pool(self.url, Purpose.API_WRITE, WRITERS)
        self.remembered = Remembered(self.url, is_enabled=self.settings.notify)
        self.hub = Hub(self.url, self.log)
        self.log_seats = Seats(most=MOST_LOG_STREAMS, most_of_user=MOST_LOG_STREAMS_OF_USER)
        self.agents = Pool(self.url, Purpose.API_WRITE, AGENTS)
        self.stop_watch = StopWatch(self.agents)
        # Their own, so that a storage that hangs stops nothing else that is done in threads: names of servers are looked up there.
        self.storage = Aside("storage", most=MOST_TRANSFERS)
        self.versions = Versions()
        self.log_archive = LogArchive(self.settings)

    @property
    def agent_tokens(self) -> AgentTokens:
        """The key is read, or made, when the first agent comes."""
        if self._agent_tokens is None:
            self._agent_tokens = self._made(AgentTokens)
        return self._agent_tokens

    @property
    def grants(self) -> Grants:
        if self._grants is None:
            self._grants = self._made(Grants)
        return self._grants

    def _made(self, make: Callable[[Settings], F]) -> F:
        try:
            return make(self.settings)
        except InvalidSettings as error:
            # Not what the agent asked for is wrong: it shall come again when somebody has corrected it.
            self.log.error("agents_unserved", error=error)
            raise EvertickError(
                "Agents cannot be served: the API's log says what is wrong with its settings."
            ) from None


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

    def reading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        return self.desk.readers.lent()

    @property
    def log_reader(self) -> LogReader:
        """Lends a connection itself: not to be used within `reading`."""
        return LogReader(self.desk.log_archive, self.reading)

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
            finally:
                self.desk.remembered.forget()
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
    """Asynchronous though it waits for nothing: for a plain function FastAPI changes to another thread and back, each time."""
    found: Caller = request.state.caller
    return found


Who = Annotated[Caller, Depends(caller_of)]


def tags_of(tags: Collection[str] | None) -> list[str] | None:
    return None if tags is None else sorted(tags)
