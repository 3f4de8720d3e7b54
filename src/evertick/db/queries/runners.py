"""Runners and agents, their queues and their submitted attempts; and the cleanup after a runner that is gone.

A row changes only for the session that owns it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from psycopg import AsyncConnection

from evertick.db.statements import query, sql_function
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRunner:
    session: int
    runner_id: str
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    pid_started: float
    queues: list[str]
    slots: int
    match: list[str] = field(default_factory=list)
    uid: int = 0
    name: str | None = None
    version: str = ""
    request: str | None = None
    lost_after_seconds: float = 0.0
    executor: str = "local"


@dataclass(frozen=True, slots=True)
class ListedRunner:
    session: int
    runner_id: str
    host: str
    boot_id: str
    pid_namespace: str
    uid: int
    pid: int
    pid_started: float
    queues: list[str]
    slots: int
    started_at: datetime
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class BusyRunner:
    session: int
    runner_id: str
    name: str | None
    version: str
    host: str
    pid: int
    queues: list[str]
    match: list[str]
    slots: int
    request: str | None
    started_at: datetime
    beat_at: datetime
    silent_seconds: float
    busy: int
    executor: str
    triggers: int
    transport: str


@dataclass(frozen=True, slots=True)
class AgentsOf:
    """The agents of an executor: there may be thousands, one for each attempt, so they are counted and not listed."""

    executor: str
    running: int
    silent: int


@query
async def register(conn: AsyncConnection, runner: NewRunner) -> None: ...


@query
async def ask_of(conn: AsyncConnection, *, sessions: list[int], request: str | None, actor: Actor) -> list[int]:
    """The sessions that had no such request before."""


@query
async def leave(conn: AsyncConnection, session: int) -> None: ...


@query
async def live(conn: AsyncConnection) -> list[ListedRunner]: ...


@query
async def peers(conn: AsyncConnection, *, host: str, boot_id: str, pid_namespace: str) -> list[ListedRunner]: ...


@query
async def namesakes(conn: AsyncConnection, *, runner_id: str, session: int) -> list[ListedRunner]: ...


@query
async def list_busy(conn: AsyncConnection, *, limit: int = 1000, with_agents: bool = True) -> list[BusyRunner]: ...


@query
async def count_agents(conn: AsyncConnection, *, silent_seconds: float) -> list[AgentsOf]: ...


@dataclass(frozen=True, slots=True)
class StartedRow:
    verdict: str
    attempt: int | None
    version_id: int | None
    fire_at: datetime | None
    params: str | None
    inputs: str | None


@dataclass(frozen=True, slots=True)
class HeldRow:
    version_id: int
    attempt: int


@query
async def held(conn: AsyncConnection, key: TaskKey, *, epoch: int, session: int) -> HeldRow | None:
    """None: that attempt does not run under this session, or no longer does."""


@sql_function(retries=False)
async def task_inputs(conn: AsyncConnection, key: TaskKey, *, version_id: int) -> str | None: ...


@query
async def bundle(conn: AsyncConnection, *, version_id: int, bundle_hash: str) -> bytes | None: ...


@query
async def disturbed(conn: AsyncConnection, sessions: list[int]) -> set[int]:
    """The sessions that no longer hold their attempt, or have a request to stop."""


@query
async def has_agents(conn: AsyncConnection) -> bool: ...


@query
async def note_agent_api(conn: AsyncConnection) -> bool | None:
    """For an API that can answer agents. None: there are no agents."""


@dataclass(frozen=True, slots=True)
class QueueRow:
    """`oldest_at` is when the first queued task was enqueued. Runners: the live ones, how many of them drain, and how many
    serve only tasks that match patterns."""

    queue: str
    depth: int
    oldest_at: datetime | None
    running: int
    runners: int
    draining: int
    specialised: int
    slots: int


class QueuedTask(NamedTuple):
    """A queued task: `place` is 10 x the position of its queue, from 0, plus its rank."""

    place: int
    seq: int
    version_id: int
    idx: int
    waited_seconds: float


@dataclass(frozen=True, slots=True)
class NamedTask:
    version_id: int
    idx: int
    dag: str
    task: str


@dataclass(frozen=True, slots=True)
class RoutedTask:
    dag: str
    task: str
    queue: str


@query
async def depths(conn: AsyncConnection, *, cap: int, most: int) -> dict[str, int]:
    """The number of queued tasks of each queue, `cap` if there are as many or more, for at most `most` queues."""


@query
async def list_all(conn: AsyncConnection, *, cap: int, limit: int = 1000) -> list[QueueRow]: ...


@query(prepare=True)
async def queued_tasks(conn: AsyncConnection, *, queues: list[str], begin: list[int], window: int) -> list[QueuedTask]:
    """For each rank of each queue, up to `window` rows starting at that position."""


@query
async def names(conn: AsyncConnection, *, version_ids: list[int], idxs: list[int]) -> list[NamedTask]: ...


@query
async def published(conn: AsyncConnection, *, limit: int) -> list[RoutedTask]: ...


MOST_LISTED = 100_000


class QueuedRow(NamedTuple):
    """A task that was claimed for an executor; `session` is the attempt's own."""

    run_id: int
    idx: int
    map_index: int
    epoch: int
    session: int
    place: int
    seq: int


@dataclass(frozen=True, slots=True)
class DispatchRow:
    """One attempt on the list. `state` is queued or running; None once the attempt is over, whatever the state of its task.
    `has_finished`: its agent reported the outcome and was not declared dead. `is_silent`: it runs, and half of the
    silence has passed after which its agent is declared dead."""

    run_id: int
    idx: int
    map_index: int
    epoch: int
    session: int
    queue: str
    tries: int
    is_submitted: bool
    queued_seconds: float
    tried_seconds: float | None
    retry_seconds: float | None
    trouble: str | None
    state: str | None
    request: str | None
    version_id: int | None
    attempt: int | None
    has_finished: bool
    is_silent: bool

    @property
    def key(self) -> TaskKey:
        return TaskKey(self.run_id, self.idx, self.map_index)


@dataclass(frozen=True, slots=True)
class NotStartedRow:
    """`submitted_at`: when the executor accepted it. `trouble`: the last error."""

    executor: str
    run_id: int
    map_index: int
    dag: str
    task: str
    queue: str
    queued_at: datetime
    tries: int
    submitted_at: datetime | None
    trouble: str | None
    retry_at: datetime | None


@query
async def list_of(conn: AsyncConnection, *, owner: int, limit: int = MOST_LISTED) -> list[DispatchRow]: ...


@query
async def not_started(conn: AsyncConnection, *, limit: int) -> list[NotStartedRow]: ...


@query
async def known(conn: AsyncConnection, sessions: list[int]) -> set[int]: ...


@query
async def note_tries(conn: AsyncConnection, *, owner: int, sessions: list[int]) -> set[int]:
    """The sessions that may be submitted."""


@query
async def note_submitted(conn: AsyncConnection, *, owner: int, sessions: list[int]) -> None: ...


@query
async def note_troubles(conn: AsyncConnection, *, owner: int, troubles: list[dict[str, object]]) -> None:
    """[{session, trouble, seconds until the next try}]."""
