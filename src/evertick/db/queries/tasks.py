"""Tasks: the runner's hot statement, the promoter's statements, and reads and requests of users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, cast

from psycopg import AsyncConnection
from psycopg.types.json import Json

from evertick.db.statements import all_rows, one_row, one_value, sql
from evertick.domain.attempt import TaskKey

JsonObject = dict[str, object]


class ExchangeRow(NamedTuple):
    """A claim, a rejected report, or a notice that more is ready. A tuple, because thousands pass per second."""

    kind: str
    run_id: int
    idx: int
    map_index: int
    epoch: int
    attempt: int
    version_id: int
    fire_at: datetime | None
    params: str
    inputs: str | None
    place: int
    seq: int


class ClaimPosition(NamedTuple):
    """Where a claim starts reading the queue: `low` gives the start for each rank of each queue (`claim`), None is the head; with
    `aging_seconds` overdue tasks are claimed first (`overdue`), without it the most urgent."""

    low: list[int] | None = None
    aging_seconds: float | None = None


FROM_THE_HEAD = ClaimPosition()


class ExtendRow(NamedTuple):
    kind: str
    run_id: int
    idx: int
    map_index: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Promoted:
    """`refused`: rows that had to be quarantined; `has_line`: some retries wait for capacity."""

    promoted: int
    refused: int
    next_due: datetime | None
    has_line: bool


@dataclass(frozen=True, slots=True)
class TimedOut:
    failed: int
    refused: int


@dataclass(frozen=True, slots=True)
class Cleared:
    reopened: int
    asked: int


@dataclass(frozen=True, slots=True)
class TaskRow:
    idx: int
    map_index: int
    task: str
    state: str
    attempt: int
    max_attempts: int
    epoch: int
    queue: str
    priority: int
    not_before: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    exit_code: int | None
    reason: str | None
    request: str | None


@dataclass(frozen=True, slots=True)
class AttemptRow:
    epoch: int
    attempt: int
    outcome: str
    reason: str | None
    exit_code: int | None
    started_at: datetime | None
    finished_at: datetime | None
    runner_id: str | None
    host: str | None
    executor: str | None


async def promote(conn: AsyncConnection, *, shard: int, epoch: int, batch: int, bound: int | None) -> Promoted:
    params = {"shard": shard, "epoch": epoch, "batch": batch, "bound": bound}
    row = await one_row(conn, sql("tasks", "promote"), params, Promoted)
    assert row is not None
    return row


async def time_out_waits(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> TimedOut:
    params = {"shard": shard, "epoch": epoch, "batch": batch}
    row = await one_row(conn, sql("tasks", "time_out_waits"), params, TimedOut)
    assert row is not None
    return row


async def finish_and_claim(
    conn: AsyncConnection,
    *,
    session: int,
    reports_json: str | None,
    infra_retries: int,
    queues: list[str],
    free: int,
    look: ClaimPosition = FROM_THE_HEAD,
) -> list[ExchangeRow]:
    """`reports_json` is the array that the SQL function `finish` describes, or None when nothing ended."""
    params = {
        "session": session,
        "reports": reports_json,
        "infra_retries": infra_retries,
        "queues": queues,
        "free": free,
        "low": look.low,
        "aging_seconds": look.aging_seconds,
    }
    cursor = await conn.execute(sql("tasks", "step"), params, prepare=True)
    return [ExchangeRow(*row) for row in await cursor.fetchall()]


async def claim_rows(
    conn: AsyncConnection, *, session: int, queues: list[str], places: list[int], seqs: list[int]
) -> list[ExchangeRow]:
    """Claim these rows of the queue, if no other runner took them."""
    params = {"session": session, "queues": queues, "places": places, "seqs": seqs}
    cursor = await conn.execute(sql("tasks", "claim_rows"), params, prepare=True)
    return [ExchangeRow(*row) for row in await cursor.fetchall()]


async def extend(conn: AsyncConnection, *, session: int, held: Sequence[tuple[TaskKey, int]]) -> list[ExtendRow]:
    keys = [[*key, epoch] for key, epoch in held]
    cursor = await conn.execute(sql("tasks", "extend"), {"session": session, "held": Json(keys)})
    return [ExtendRow(*row) for row in await cursor.fetchall()]


async def clear(
    conn: AsyncConnection,
    *,
    run_id: int,
    idxs: list[int],
    instances: list[tuple[int, int]],
    actor: str,
    version_id: int | None,
) -> Cleared | None:
    """`idxs` as a whole, and these `instances` (idx, map_index) of mapped tasks. None: there is no such run."""
    params = {"run_id": run_id, "idxs": idxs, "instances": Json(instances), "actor": actor, "version_id": version_id}
    return await one_row(conn, sql("tasks", "clear"), params, Cleared)


async def mark(conn: AsyncConnection, key: TaskKey, *, state: str, actor: str) -> str | None:
    params = {**key._asdict(), "state": state, "actor": actor}
    return cast("str | None", await one_value(conn, sql("tasks", "mark"), params))


async def list_of_run(conn: AsyncConnection, *, run_id: int, limit: int = 1000) -> list[TaskRow]:
    return await all_rows(conn, sql("tasks", "list_of_run"), {"run_id": run_id, "limit": limit}, TaskRow)


async def find(conn: AsyncConnection, key: TaskKey) -> TaskRow | None:
    return await one_row(conn, sql("tasks", "find"), key._asdict(), TaskRow)


async def liveliest_of_run(conn: AsyncConnection, *, run_id: int, limit: int) -> list[TaskRow]:
    return await all_rows(conn, sql("tasks", "liveliest_of_run"), {"run_id": run_id, "limit": limit}, TaskRow)


async def count_by_state(conn: AsyncConnection, *, run_id: int) -> dict[str, int]:
    cursor = await conn.execute(sql("tasks", "count_by_state"), {"run_id": run_id})
    return {cast(str, row[0]): cast(int, row[1]) for row in await cursor.fetchall()}


async def attempts(conn: AsyncConnection, key: TaskKey) -> list[AttemptRow]:
    return await all_rows(conn, sql("tasks", "attempts"), key._asdict(), AttemptRow)


async def result(conn: AsyncConnection, key: TaskKey) -> object:
    return await one_value(conn, sql("tasks", "result"), key._asdict())


async def has_result(conn: AsyncConnection, key: TaskKey) -> bool:
    return bool(await one_value(conn, sql("tasks", "has_result"), key._asdict()))


async def downstream(conn: AsyncConnection, *, version_id: int, idxs: list[int]) -> list[int]:
    cursor = await conn.execute(sql("tasks", "downstream"), {"version_id": version_id, "idxs": idxs})
    return [cast(int, row[0]) for row in await cursor.fetchall()]


async def page_of_run(
    conn: AsyncConnection, *, run_id: int, after: tuple[int, int], state: str | None, limit: int
) -> list[TaskRow]:
    """Rows after this index and map index."""
    params = {"run_id": run_id, "idx": after[0], "map_index": after[1], "state": state, "limit": limit}
    return await all_rows(conn, sql("tasks", "page_of_run"), params, TaskRow)


async def by_name(conn: AsyncConnection, *, run_id: int, task: str, limit: int = 1000) -> list[TaskRow]:
    params = {"run_id": run_id, "task": task, "limit": limit}
    return await all_rows(conn, sql("tasks", "by_name"), params, TaskRow)
