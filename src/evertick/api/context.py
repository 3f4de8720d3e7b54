"""The context of a request: the caller with its permissions, and database connections for reads and changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import psycopg
from fastapi import Depends, Request
from psycopg import AsyncConnection

from evertick.api.agent.stop_requests import StopRequests
from evertick.api.auth_cache import AuthCache
from evertick.api.event_hub import EventHub, StreamLimit
from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.notify import Channel, notify
from evertick.db.queries import accounts, dags
from evertick.db.queries.dags import DagRow
from evertick.domain.access import Permission, Principal, Role
from evertick.domain.errors import EvertickError, Forbidden, InvalidSettings, NotFound, OutcomeUnknown
from evertick.logs.reader import LogArchive, LogReader
from evertick.observability.logging import Log
from evertick.runner.launch import VersionCache
from evertick.runtime.pool import Pool
from evertick.runtime.thread_runner import ThreadRunner
from evertick.secrets.agent_tokens import AgentTokens
from evertick.secrets.backends import SecretProvider
from evertick.storage.results import MOST_TRANSFERS

# Enough for a page with several parts; small compared to the engine's connections (H4).
READERS, WRITERS = 6, 3
# Agents have their own pool: heartbeats must not wait for users.
AGENTS = 4
# Each stream queries the database three times a second.
MOST_LOG_STREAMS, MOST_LOG_STREAMS_OF_USER = 40, 10
NOBODY = Principal(name="nobody", role=Role.VIEWER, tags=frozenset())

F = TypeVar("F")


@dataclass(slots=True)
class ApiContext:
    """State shared by all requests of a process."""

    settings: Settings
    url: str
    log: Log
    readers: Pool = field(init=False)
    writers: Pool = field(init=False)
    remembered: AuthCache = field(init=False)
    hub: EventHub = field(init=False)
    log_seats: StreamLimit = field(init=False)
    agents: Pool = field(init=False)
    stop_watch: StopRequests = field(init=False)
    storage: ThreadRunner = field(init=False)
    versions: VersionCache = field(init=False)
    log_archive: LogArchive = field(init=False)
    _agent_tokens: AgentTokens | None = field(default=None, init=False)
    _grants: SecretProvider | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.readers = Pool(self.url, Purpose.API_READ, READERS)
        self.writers = Pool(self.url, Purpose.API_WRITE, WRITERS)
        self.remembered = AuthCache(self.url, is_enabled=self.settings.notify)
        self.hub = EventHub(self.url, self.log)
        self.log_seats = StreamLimit(most=MOST_LOG_STREAMS, most_of_user=MOST_LOG_STREAMS_OF_USER)
        self.agents = Pool(self.url, Purpose.API_WRITE, AGENTS)
        self.stop_watch = StopRequests(self.agents)
        # A separate thread pool: an object storage that hangs must not block other work in threads, such as DNS lookups.
        self.storage = ThreadRunner("storage", most=MOST_TRANSFERS)
        self.versions = VersionCache()
        self.log_archive = LogArchive(self.settings)

    @property
    def agent_tokens(self) -> AgentTokens:
        """The signer of agent tokens. The key is read, or created, on the first request of an agent."""
        if self._agent_tokens is None:
            self._agent_tokens = self._made(AgentTokens)
        return self._agent_tokens

    @property
    def grants(self) -> SecretProvider:
        if self._grants is None:
            self._grants = self._made(SecretProvider)
        return self._grants

    def _made(self, make: Callable[[Settings], F]) -> F:
        try:
            return make(self.settings)
        except InvalidSettings as error:
            # Not an error of the agent's request: it retries until an operator has fixed the settings.
            self.log.error("agents_unserved", error=error)
            raise EvertickError("The API cannot serve agents because of its settings. See the API's log.") from None


@dataclass(slots=True, kw_only=True)
class Caller:
    """One authorized request."""

    desk: ApiContext
    principal: Principal
    permission: Permission
    origin: str
    request_id: str
    # For cookie sessions: the CSRF token that pages must send with a change.
    csrf: str | None = None
    # Further channels to notify, depending on the result of the verb.
    also: set[Channel] = field(default_factory=set)

    @property
    def actor(self) -> str:
        return f"user:{self.principal.name}"

    def reading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        return self.desk.readers.lent()

    @property
    def log_reader(self) -> LogReader:
        """A log reader. It borrows connections itself, so do not use it inside `reading`."""
        return LogReader(self.desk.log_archive, self.reading)

    @asynccontextmanager
    async def changing(self, *wake: Channel) -> AsyncIterator[AsyncConnection]:
        """Open a transaction for an engine verb. The audit entry records the caller's origin; after commit, `wake` is notified."""
        async with self.desk.writers.lent() as conn:
            await accounts.set_origin(conn, origin=self.origin, request_id=self.request_id)
            try:
                yield conn
            except (psycopg.OperationalError, psycopg.InterfaceError):
                if conn.closed or conn.broken:
                    raise OutcomeUnknown(
                        "The connection to the database broke during the commit: the change may or may not have been applied."
                    ) from None
                raise
            finally:
                self.desk.remembered.forget()
            # A wake-up only shortens a wait, so an error here does not fail the request.
            with suppress(psycopg.Error):
                for channel in {*wake, *self.also} if self.desk.settings.notify else ():
                    await notify(conn, channel)

    def require(self, permission: Permission) -> None:
        """Check a permission that depends on the request's content."""
        if not self.principal.may(permission):
            raise Forbidden(f"{self.principal.name} lacks the permission {permission}.")

    async def dag(self, conn: AsyncConnection, name: str) -> DagRow:
        """Find a DAG that the caller may see. Any other DAG is reported as not found."""
        row = await dags.find(conn, name)
        if row is None or row.deleted_at is not None or row.spec is None or not self.sees(row):
            raise NotFound(f"There is no DAG {name[:200]!r}.")
        return row

    def sees(self, row: DagRow) -> bool:
        tags = (row.spec or {}).get("tags")
        return self.principal.sees([str(tag) for tag in tags] if isinstance(tags, list) else [])

    async def visible(self, conn: AsyncConnection) -> list[int] | None:
        """The ids of the DAGs that the caller may see; None for all."""
        if self.principal.tags is None:
            return None
        return await dags.ids_with_tags(conn, tags=sorted(self.principal.tags))


async def caller_of(request: Request) -> Caller:
    """The caller of a request. Async, because FastAPI runs plain functions in a thread."""
    found: Caller = request.state.caller
    return found


Who = Annotated[Caller, Depends(caller_of)]


def tags_of(tags: Collection[str] | None) -> list[str] | None:
    return None if tags is None else sorted(tags)
