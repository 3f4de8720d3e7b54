"""The caller of an operation: identity, rights, and the connections that an operation reads and writes with.

Free of HTTP: the API makes a caller for each request, the command line one for each command.
"""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import psycopg
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.notify import Channel, notify
from evertick.db.queries import dags
from evertick.db.queries.dags import DagRow
from evertick.domain.access import Actor, Permission, Principal, Role
from evertick.domain.errors import EvertickError, Forbidden, InvalidSettings, NotFound
from evertick.domain.explain import Explained, Reason, dags_named, visible_to
from evertick.engine.accounts import still_valid
from evertick.logs.reader import LogArchive, LogReader

ANONYMOUS = Principal(name="anonymous", role=Role.VIEWER, tags=frozenset())
LONGEST_SHOWN_NAME = 200


class Context(Protocol):
    """What the callers of one process share."""

    @property
    def settings(self) -> Settings: ...

    @property
    def log_archive(self) -> LogArchive: ...

    @property
    def is_stopping(self) -> bool:
        """Whether the process is shutting down: streams end."""

    def misconfigured(self, error: InvalidSettings, message: str) -> EvertickError:
        """What to report when the process has wrong settings. A server reports only `message` and logs the details."""

    def read(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A connection to read with."""

    def write(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A connection to change with."""

    def committing(self, conn: AsyncConnection) -> AbstractContextManager[None]:
        """The time in which a change is made. If the connection breaks meanwhile, the outcome is unknown."""


@dataclass(slots=True, kw_only=True)
class Caller:
    """The caller of one operation. `origin` is the address or host, for the audit log."""

    context: Context
    principal: Principal
    origin: str
    request_id: str | None = None
    # Other processes to wake, as the outcome of a verb requires.
    also: set[Channel] = field(default_factory=set)
    client: str = "user"

    @property
    def actor(self) -> Actor:
        return Actor(f"{self.client}:{self.principal.name}", self.origin, self.request_id)

    def read(self) -> AbstractAsyncContextManager[AsyncConnection]:
        return self.context.read()

    @asynccontextmanager
    async def write(self, *wake: Channel) -> AsyncIterator[AsyncConnection]:
        """A connection for an engine verb. Afterwards the processes that should act are woken."""
        async with self.context.write() as conn:
            with self.context.committing(conn):
                yield conn
            # A notification only shortens a wait: the change is made, whether it arrives or not.
            with suppress(psycopg.Error):
                for channel in {*wake, *self.also} if self.context.settings.listen_notify else ():
                    await notify(conn, channel)

    @property
    def log_reader(self) -> LogReader:
        """Takes a connection itself: not to be used within `read`."""
        return LogReader(self.context.log_archive, self.read)

    def require(self, permission: Permission) -> None:
        """For an operation whose required permission depends on its parameters."""
        if not self.principal.may(permission):
            raise Forbidden(f"{self.principal.name} lacks the permission {permission}.")

    async def dag(self, conn: AsyncConnection, name: str) -> DagRow:
        """A published DAG that the caller may see. Other DAGs are reported as missing."""
        row = await self.known_dag(conn, name)
        if row.deleted_at is not None or row.spec is None:
            raise await self._no_dag(conn, name)
        return row

    async def known_dag(self, conn: AsyncConnection, name: str) -> DagRow:
        """The same, also of a deleted DAG: its history remains."""
        row = await dags.find(conn, name)
        if row is None or not self.sees(row):
            raise await self._no_dag(conn, name)
        return row

    async def _no_dag(self, conn: AsyncConnection, name: str) -> NotFound:
        text = f"There is no DAG {name[:LONGEST_SHOWN_NAME]!r}."
        # A suggestion must not reveal DAGs that the caller may not see.
        if self.principal.tags is not None or len(name) > LONGEST_SHOWN_NAME:
            return NotFound(text)
        return NotFound(f"{text} {similar(name, await dags.names(conn), 'List DAGs with `evertick dags list`.')}")

    def sees(self, row: DagRow) -> bool:
        tags = (row.spec or {}).get("tags")
        return self.principal.sees([str(tag) for tag in tags] if isinstance(tags, list) else [])

    async def sees_dag(self, conn: AsyncConnection, name: str) -> bool:
        """Whether the caller may see the runs of a DAG, which may be deleted by now: its history remains."""
        if self.principal.tags is None:
            return True
        row = await dags.find(conn, name)
        return row is not None and self.sees(row)

    async def visible_dag_ids(self, conn: AsyncConnection) -> list[int] | None:
        """The ids of the DAGs whose runs may be shown; None for all."""
        if self.principal.tags is None:
            return None
        return await dags.ids_with_tags(conn, tags=sorted(self.principal.tags))


def similar(name: str, known: Sequence[str], otherwise: str) -> str:
    """The advice for an unknown name: the most similar one that is known. A long text is not compared."""
    near = difflib.get_close_matches(name, known, n=1) if len(name) <= LONGEST_SHOWN_NAME else []
    return f"Did you mean {near[0]!r}?" if near else otherwise


async def is_still_valid(caller: Caller, conn: AsyncConnection) -> bool:
    """Whether the caller's session or token is still valid and still grants the rights that it had."""
    credential_id = caller.principal.credential_id
    return credential_id is None or await still_valid(conn, [credential_id]) == [caller.principal]


async def known_dags(caller: Caller, conn: AsyncConnection, names: Collection[str]) -> set[str]:
    """Which of these DAGs the caller may see, including deleted ones: their history remains."""
    return {name for name in sorted(names) if await caller.sees_dag(conn, name)}


async def visible_reasons(caller: Caller, conn: AsyncConnection, reasons: Sequence[Reason]) -> Sequence[Reason]:
    """Why a task does not run, without the tasks of other DAGs that hold what it needs."""
    known = await known_dags(caller, conn, dags_named(reasons))
    return [visible_to(each, known) for each in reasons]


async def redact(caller: Caller, conn: AsyncConnection, found: Explained) -> Explained:
    """The same for a task and all tasks that it waits for."""
    upstream = await redact(caller, conn, found.upstream) if found.upstream else None
    return replace(found, reasons=await visible_reasons(caller, conn, found.reasons), upstream=upstream)
