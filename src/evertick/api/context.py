"""What all requests of one API process share, and the caller of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, TypeVar

import psycopg
from fastapi import Depends, Request
from psycopg import AsyncConnection

from evertick.api.auth_cache import AuthCache
from evertick.api.event_hub import EventHub, StreamLimit
from evertick.api.oidc.service import OidcService
from evertick.api.runner.sessions import JoinedSessions
from evertick.api.runner.waiting import WaitingRunners
from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.queries import runners
from evertick.domain.access import Permission
from evertick.domain.errors import Conflict, EvertickError, InvalidSettings, OutcomeUnknown, PostgresUnavailable
from evertick.logs.reader import LogArchive
from evertick.observability.logging import Log
from evertick.operations.caller import Caller
from evertick.runner.launch import VersionCache
from evertick.runtime.pool import Pool
from evertick.runtime.thread_runner import ThreadRunner
from evertick.secrets.agent_tokens import AgentTokens
from evertick.secrets.backends import SecretProvider
from evertick.secrets.runner_tokens import RunnerSessionTokens
from evertick.storage.results import MOST_TRANSFERS

# Enough for the pages of the UI, and few compared with the connections of the engine (H4).
READERS, WRITERS = 6, 3
# Agents have their own: a heartbeat must not wait for people.
AGENTS = 4
# And runners over HTTPS: their exchanges are the engine's work.
RUNNERS = 4
# Each asks the database three times a second.
MOST_LOG_STREAMS, MOST_LOG_STREAMS_OF_USER = 40, 10

POLL_SECONDS = 1.0

F = TypeVar("F")


class StopRequests:
    """Notifies waiting heartbeats of agents when their attempt must stop: one query a second for all, none if none waits."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: dict[int, asyncio.Event] = {}
        self._polling: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def wait(self, session: int, seconds: float) -> bool:
        """Wait up to `seconds`. Returns whether the attempt was requested to stop or lost its lease."""
        stopped = self._waiting[session] = asyncio.Event()
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll())
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await stopped.wait()
        finally:
            # A newer request of the same agent may have replaced the entry.
            if self._waiting.get(session) is stopped:
                del self._waiting[session]
        return stopped.is_set()

    def close(self) -> None:
        """Release all waiting heartbeats, because the server shuts down."""
        for stopped in self._waiting.values():
            stopped.set()

    async def _poll(self) -> None:
        while self._waiting:
            # Retried by the next query; heartbeats also time out on their own.
            with suppress(psycopg.Error, PostgresUnavailable, OSError):
                async with self._pool.lent() as conn:
                    found = await runners.disturbed(conn, list(self._waiting))
                for session in found & self._waiting.keys():
                    self._waiting[session].set()
            await asyncio.sleep(POLL_SECONDS)


class AgentPresence:
    """Records once a second, while there are agents, that this process could hear them: only then does their silence
    count. Says nothing when the loop or the agents' connections to the database do not work, because then it could not."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        # There may be agents from before this process.
        self.called = asyncio.Event()
        self.called.set()

    async def run(self) -> None:
        """Run until canceled."""
        while True:
            await self.called.wait()
            self.called.clear()
            try:
                async with self._pool.lent() as conn:
                    has_agents = await runners.note_agent_api(conn) is not None
            except (psycopg.Error, PostgresUnavailable, OSError):
                has_agents = True
            if has_agents:
                self.called.set()
            await asyncio.sleep(POLL_SECONDS)


class ApiContext:
    """What all requests of one process share."""

    def __init__(self, settings: Settings, url: str, log: Log) -> None:
        self.settings, self.url, self.log = settings, url, log
        self.readers = Pool(url, Purpose.API_READ, READERS)
        self.writers = Pool(url, Purpose.API_WRITE, WRITERS)
        self.auth_cache = AuthCache(url, is_enabled=settings.listen_notify)
        self.event_hub = EventHub(url, log)
        self.log_streams = StreamLimit(most=MOST_LOG_STREAMS, most_of_user=MOST_LOG_STREAMS_OF_USER)
        self.agents = Pool(url, Purpose.API_WRITE, AGENTS)
        self.runners = Pool(url, Purpose.RUNNER, RUNNERS)
        self.joined = JoinedSessions(settings)
        self.waiting_runners = WaitingRunners(settings, url=url, pool=self.runners, log=log)
        self.stop_requests, self.agent_presence = StopRequests(self.agents), AgentPresence(self.agents)
        # Their own, so that a storage that hangs stops nothing else that is done in threads: names of servers are looked up there.
        self.storage = ThreadRunner("storage", most=MOST_TRANSFERS)
        self.versions = VersionCache()
        self.log_archive = LogArchive(settings)

    @property
    def is_stopping(self) -> bool:
        return self.event_hub.is_over

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
            self.auth_cache.forget()

    def misconfigured(self, error: InvalidSettings, message: str) -> EvertickError:
        self.log.error("secret_key_missing", error=error)
        return Conflict(message)

    @cached_property
    def agent_tokens(self) -> AgentTokens:
        """The key is read, or made, when the first agent comes."""
        return self._made(AgentTokens)

    @cached_property
    def runner_tokens(self) -> RunnerSessionTokens:
        return self._made(RunnerSessionTokens)

    @cached_property
    def oidc(self) -> OidcService:
        try:
            return OidcService(self)
        except InvalidSettings as error:
            raise self.misconfigured(
                error, "Sign-in with a provider is not configured correctly: see the API's log."
            ) from None

    @cached_property
    def secret_provider(self) -> SecretProvider:
        return self._made(SecretProvider)

    def _made(self, make: Callable[[Settings], F]) -> F:
        try:
            return make(self.settings)
        except InvalidSettings as error:
            # The agent's request is valid: a retry succeeds after an operator has corrected the settings.
            self.log.error("agent_settings_invalid", error=error)
            raise EvertickError(
                "Agents and runners cannot be served: the API's log says what is wrong with its settings."
            ) from None


@dataclass(slots=True, kw_only=True)
class ApiCaller(Caller):
    """The caller of one HTTP request."""

    context: ApiContext
    permission: Permission
    # For a session: the value that a page must send back with a change.
    csrf: str | None = None


async def caller_of(request: Request) -> ApiCaller:
    """Asynchronous though it waits for nothing: for a plain function FastAPI changes to another thread and back, each time."""
    found: ApiCaller = request.state.caller
    return found


Who = Annotated[ApiCaller, Depends(caller_of)]
