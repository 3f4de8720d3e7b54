"""What all requests of one API process share, and the caller of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
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
from evertick.domain.access import Permission
from evertick.domain.errors import Conflict, EvertickError, InvalidSettings, OutcomeUnknown
from evertick.logs.reader import LogArchive
from evertick.observability.logging import Log
from evertick.operations.caller import Caller
from evertick.runner.launch import VersionCache
from evertick.runtime.pool import Pool
from evertick.runtime.thread_runner import ThreadRunner
from evertick.secrets.agent_tokens import AgentTokens
from evertick.secrets.backends import SecretProvider
from evertick.storage.results import MOST_TRANSFERS

# Enough for the pages of the UI, and few compared with the connections of the engine (H4).
READERS, WRITERS = 6, 3
# Agents have their own: a heartbeat must not wait for people.
AGENTS = 4
# Each asks the database three times a second.
MOST_LOG_STREAMS, MOST_LOG_STREAMS_OF_USER = 40, 10

F = TypeVar("F")


@dataclass(slots=True)
class ApiContext:
    """What all requests of one process share."""

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
        self.remembered = AuthCache(self.url, is_enabled=self.settings.listen_notify)
        self.hub = EventHub(self.url, self.log)
        self.log_seats = StreamLimit(most=MOST_LOG_STREAMS, most_of_user=MOST_LOG_STREAMS_OF_USER)
        self.agents = Pool(self.url, Purpose.API_WRITE, AGENTS)
        self.stop_watch = StopRequests(self.agents)
        # Their own, so that a storage that hangs stops nothing else that is done in threads: names of servers are looked up there.
        self.storage = ThreadRunner("storage", most=MOST_TRANSFERS)
        self.versions = VersionCache()
        self.log_archive = LogArchive(self.settings)

    @property
    def is_stopping(self) -> bool:
        return self.hub.is_over

    def read(self) -> AbstractAsyncContextManager[AsyncConnection]:
        return self.readers.lent()

    def write(self) -> AbstractAsyncContextManager[AsyncConnection]:
        return self.writers.lent()

    @contextmanager
    def committing(self, conn: AsyncConnection) -> Iterator[None]:
        try:
            yield
        except (psycopg.OperationalError, psycopg.InterfaceError):
            if conn.closed or conn.broken:
                raise OutcomeUnknown("The answer was lost: whether this was done is not known.") from None
            raise
        finally:
            self.remembered.forget()

    def misconfigured(self, error: InvalidSettings, message: str) -> EvertickError:
        self.log.error("secret_key_missing", error=error)
        return Conflict(message)

    @property
    def agent_tokens(self) -> AgentTokens:
        """The key is read, or made, when the first agent comes."""
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
            # The agent's request is valid: a retry succeeds after an operator has corrected the settings.
            self.log.error("agent_settings_invalid", error=error)
            raise EvertickError(
                "Agents cannot be served: the API's log says what is wrong with its settings."
            ) from None


@dataclass(slots=True, kw_only=True)
class ApiCaller(Caller):
    """The caller of one HTTP request."""

    context: ApiContext
    permission: Permission
    # For a session: the value that a page must send back with a change.
    csrf: str | None = None

    @property
    def desk(self) -> ApiContext:
        return self.context


async def caller_of(request: Request) -> ApiCaller:
    """Asynchronous though it waits for nothing: for a plain function FastAPI changes to another thread and back, each time."""
    found: ApiCaller = request.state.caller
    return found


Who = Annotated[ApiCaller, Depends(caller_of)]
