"""Runners and agents, their queues and their submitted attempts; and the cleanup after a runner that is gone.

A row changes only for the session that owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import NamedTuple, cast

from psycopg import AsyncConnection
from psycopg.types.json import Json

from evertick.db.queries.tasks import ClaimPosition, ExchangeRow
from evertick.db.statements import all_rows, one_row, one_value, sql
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
class LiveRunner:
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

    @property
    def is_agent(self) -> bool:
        """It represents one remote attempt, and serves no queue."""
        return not self.queues


@dataclass(frozen=True, slots=True)
class AgentsOf:
    """The agents of an executor: there may be thousands, one for each attempt, so they are counted and not listed."""

    executor: str
    running: int
    silent: int


@dataclass(frozen=True, slots=True)
class Reaped:
    """How many attempts were taken from a runner (None: it is alive), and how many could not be moved and were quarantined."""

    reaped: int | None
    refused: int


async def register(conn: AsyncConnection, runner: NewRunner) -> None:
    await conn.execute(sql("runners", "register"), asdict(runner))


async def ask_of(conn: AsyncConnection, *, sessions: list[int], request: str | None, actor: str) -> list[int]:
    """The sessions that had no such request before."""
    params = {"sessions": sessions, "request": request, "actor": actor}
    cursor = await conn.execute(sql("runners", "ask_of"), params)
    return [cast(int, row[0]) for row in await cursor.fetchall()]


async def mark_runner_dead(conn: AsyncConnection, *, session: int, reason: str, infra_retries: int) -> int:
    """The number of attempts that the runner still held."""
    params = {"session": session, "reason": reason, "infra_retries": infra_retries}
    return cast(int, await one_value(conn, sql("runners", "bury"), params))


async def leave(conn: AsyncConnection, session: int) -> None:
    await conn.execute(sql("runners", "leave"), {"session": session})


async def live(conn: AsyncConnection) -> list[LiveRunner]:
    return await all_rows(conn, sql("runners", "live"), {}, LiveRunner)


async def peers(conn: AsyncConnection, *, host: str, boot_id: str, pid_namespace: str) -> list[LiveRunner]:
    params = {"host": host, "boot_id": boot_id, "pid_namespace": pid_namespace}
    return await all_rows(conn, sql("runners", "neighbours"), params, LiveRunner)


async def namesakes(conn: AsyncConnection, *, runner_id: str, session: int) -> list[LiveRunner]:
    return await all_rows(conn, sql("runners", "namesakes"), {"runner_id": runner_id, "session": session}, LiveRunner)


async def list_busy(conn: AsyncConnection, *, limit: int = 1000, with_agents: bool = True) -> list[BusyRunner]:
    params = {"limit": limit, "with_agents": with_agents}
    return await all_rows(conn, sql("runners", "list_busy"), params, BusyRunner)


async def count_agents(conn: AsyncConnection, *, silent_seconds: float) -> list[AgentsOf]:
    return await all_rows(conn, sql("runners", "count_agents"), {"silent_seconds": silent_seconds}, AgentsOf)


async def reap(
    conn: AsyncConnection, *, shard: int, epoch: int, session: int, lost_after: float, infra_retries: int
) -> Reaped:
    params = {
        "shard": shard,
        "epoch": epoch,
        "session": session,
        "lost_after": lost_after,
        "infra_retries": infra_retries,
    }
    row = await one_row(conn, sql("runners", "reap"), params, Reaped)
    assert row is not None
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAgent:
    """The location of the agent's process: a runner on the same machine can prove that it is gone."""

    runner_id: str
    version: str
    host: str
    boot_id: str
    pid_namespace: str
    uid: int
    pid: int
    pid_started: float


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


async def start(
    conn: AsyncConnection, key: TaskKey, *, epoch: int, session: int, nonce: str, agent: NewAgent, lost_after: float
) -> StartedRow:
    params = {**key._asdict(), "epoch": epoch, "session": session, "nonce": nonce}
    row = await one_row(
        conn, sql("runners", "start"), {**params, "agent": Json(asdict(agent)), "lost_after": lost_after}, StartedRow
    )
    assert row is not None
    return row


async def held(conn: AsyncConnection, key: TaskKey, *, epoch: int, session: int) -> HeldRow | None:
    """None: that attempt does not run under this session, or no longer does."""
    params = {**key._asdict(), "epoch": epoch, "session": session}
    return await one_row(conn, sql("runners", "held"), params, HeldRow)


async def inputs(conn: AsyncConnection, key: TaskKey, *, version_id: int) -> str | None:
    params = {**key._asdict(), "version_id": version_id}
    return cast("str | None", await one_value(conn, sql("runners", "inputs"), params))


async def bundle(conn: AsyncConnection, *, version_id: int, bundle_hash: str) -> bytes | None:
    params = {"version_id": version_id, "bundle_hash": bundle_hash}
    return cast("bytes | None", await one_value(conn, sql("runners", "bundle"), params))


async def disturbed(conn: AsyncConnection, sessions: list[int]) -> set[int]:
    """The sessions that no longer hold their attempt, or have a request to stop."""
    cursor = await conn.execute(sql("runners", "disturbed"), {"sessions": sessions})
    return {cast(int, row[0]) for row in await cursor.fetchall()}


async def finish(conn: AsyncConnection, *, session: int, reports_json: str, infra_retries: int) -> list[ExchangeRow]:
    params = {"session": session, "reports": reports_json, "infra_retries": infra_retries}
    cursor = await conn.execute(sql("runners", "finish"), params)
    return [ExchangeRow(*row) for row in await cursor.fetchall()]


@dataclass(frozen=True, slots=True)
class Depth:
    queue: str
    depth: int


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


async def depths(conn: AsyncConnection, *, cap: int, most: int) -> list[Depth]:
    """The number of queued tasks of each queue, `cap` if there are as many or more, for at most `most` queues."""
    return await all_rows(conn, sql("runners", "depths"), {"cap": cap, "most": most}, Depth)


async def list_all(conn: AsyncConnection, *, cap: int, limit: int = 1000) -> list[QueueRow]:
    return await all_rows(conn, sql("runners", "list"), {"cap": cap, "limit": limit}, QueueRow)


async def queued_tasks(
    conn: AsyncConnection, *, queues: Sequence[str], begin: Sequence[int], window: int
) -> list[QueuedTask]:
    """For each rank of each queue, up to `window` rows starting at that position."""
    params = {"queues": list(queues), "begin": list(begin), "window": window}
    cursor = await conn.execute(sql("runners", "look_in_line"), params, prepare=True)
    return [QueuedTask(*row) for row in await cursor.fetchall()]


async def names(conn: AsyncConnection, tasks: Sequence[tuple[int, int]]) -> list[NamedTask]:
    params = {"version_ids": [version for version, _ in tasks], "idxs": [idx for _, idx in tasks]}
    return await all_rows(conn, sql("runners", "names"), params, NamedTask)


async def published(conn: AsyncConnection, *, limit: int) -> list[RoutedTask]:
    return await all_rows(conn, sql("runners", "published"), {"limit": limit}, RoutedTask)


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
    `has_finished`: its agent reported the outcome and was not declared dead."""

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


@dataclass(frozen=True, slots=True)
class EndedQueued:
    """The sessions of the attempts that moved, and how many tasks can start now."""

    moved_sessions: list[int] | None
    offered: int


async def claim(
    conn: AsyncConnection, *, session: int, queues: list[str], free: int, look: ClaimPosition, sessions: list[int]
) -> list[QueuedRow]:
    """`sessions`: one for each free slot, generated for the attempts."""
    params = {"session": session, "queues": queues, "free": free, "sessions": sessions}
    params |= {"low": look.low, "aging_seconds": look.aging_seconds}
    cursor = await conn.execute(sql("runners", "claim"), params, prepare=True)
    return [QueuedRow(*row) for row in await cursor.fetchall()]


async def claim_rows(
    conn: AsyncConnection, *, session: int, queues: list[str], places: list[int], seqs: list[int], sessions: list[int]
) -> list[QueuedRow]:
    """Claim these rows of the queue, if no other runner took them and there is capacity."""
    params = {"session": session, "queues": queues, "places": places, "seqs": seqs, "sessions": sessions}
    cursor = await conn.execute(sql("runners", "claim_rows"), params, prepare=True)
    return [QueuedRow(*row) for row in await cursor.fetchall()]


async def list_of(conn: AsyncConnection, *, owner: int, limit: int = MOST_LISTED) -> list[DispatchRow]:
    return await all_rows(conn, sql("runners", "list_of"), {"owner": owner, "limit": limit}, DispatchRow)


async def not_started(conn: AsyncConnection, *, limit: int) -> list[NotStartedRow]:
    return await all_rows(conn, sql("runners", "not_begun"), {"limit": limit}, NotStartedRow)


async def known(conn: AsyncConnection, sessions: list[int]) -> set[int]:
    cursor = await conn.execute(sql("runners", "known"), {"sessions": sessions})
    return {cast(int, row[0]) for row in await cursor.fetchall()}


async def note_tries(conn: AsyncConnection, *, owner: int, sessions: list[int]) -> set[int]:
    """The sessions that may be submitted."""
    cursor = await conn.execute(sql("runners", "note_tries"), {"owner": owner, "sessions": sessions})
    return {cast(int, row[0]) for row in await cursor.fetchall()}


async def note_submitted(conn: AsyncConnection, *, owner: int, sessions: list[int]) -> None:
    await conn.execute(sql("runners", "note_submitted"), {"owner": owner, "sessions": sessions})


async def note_troubles(conn: AsyncConnection, *, owner: int, troubles: list[dict[str, object]]) -> None:
    """[{session, trouble, seconds until the next try}]."""
    await conn.execute(sql("runners", "note_troubles"), {"owner": owner, "troubles": Json(troubles)})


async def end_queued(conn: AsyncConnection, *, reports: list[dict[str, object]], infra_retries: int) -> EndedQueued:
    params = {"reports": Json(reports), "infra_retries": infra_retries}
    row = await one_row(conn, sql("runners", "end_queued"), params, EndedQueued)
    assert row is not None
    return row


async def adopt(conn: AsyncConnection, *, session: int, silent_seconds: float, most: int) -> int:
    params = {"session": session, "silent_seconds": silent_seconds, "most": most}
    return cast(int, await one_value(conn, sql("runners", "adopt"), params))


async def forget(conn: AsyncConnection, sessions: list[int]) -> int:
    return cast(int, await one_value(conn, sql("runners", "forget"), {"sessions": sessions}))
