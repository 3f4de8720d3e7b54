"""The outbox: notifications that wait to be sent, and the results of the others."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection

from evertick.domain.notices import Fact
from evertick.store.rows import all_rows, one_row, one_value
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True)
class Taken:
    """A notification to send now. `attempts` includes this attempt and guards its record."""

    delivery_id: int
    sink: str
    event: str
    fact: Fact
    attempts: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Delivery:
    delivery_id: int
    sink: str
    event: str
    run_id: int | None
    fact: Fact
    created_at: datetime
    state: str
    attempts: int
    due_at: datetime
    ended_at: datetime | None
    answer: str | None


@dataclass(frozen=True, slots=True)
class Tended:
    """How many notifications expired, and how many have been waiting for how long."""

    given_up: int
    waiting: int
    oldest_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The default recipients for all DAGs, the expiry time (and how many expire per call), and the limit of counting."""

    defaults: list[dict[str, object]]
    give_up_seconds: float
    batch: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A sender's capacity: per sink, in total, and the time by which it finishes."""

    passed_over: Collection[str]
    each: int
    batch: int
    seconds: float


async def tend(conn: AsyncConnection, *, shard: int, epoch: int, wish: Wish) -> Tended:
    params = {
        "shard": shard,
        "epoch": epoch,
        "defaults": json.dumps(wish.defaults),
        "give_up_seconds": wish.give_up_seconds,
        "batch": wish.batch,
        "most": wish.most,
    }
    row = await one_row(conn, sql("outbox", "tend"), params, Tended)
    assert row is not None
    return row


async def take(conn: AsyncConnection, *, shard: int, epoch: int, room: Room) -> list[Taken]:
    params = {
        "shard": shard,
        "epoch": epoch,
        "passed_over": list(room.passed_over),
        "each": room.each,
        "batch": room.batch,
        "seconds": room.seconds,
    }
    return await all_rows(conn, sql("outbox", "take"), params, Taken)


async def record(conn: AsyncConnection, taken: Taken, *, state: str, answer: str, rest_seconds: float) -> bool:
    """Whether this attempt still owned the notification."""
    params = {
        "delivery_id": taken.delivery_id,
        "attempts": taken.attempts,
        "state": state,
        "answer": answer,
        "rest_seconds": rest_seconds,
    }
    return await one_value(conn, sql("outbox", "record"), params) is not None


async def retry(conn: AsyncConnection, *, ids: list[int] | None, sink: str | None, batch: int, actor: str) -> int:
    params = {"ids": ids, "sink": sink, "batch": batch, "actor": actor}
    return cast(int, await one_value(conn, sql("outbox", "retry"), params))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A filter; None for all. `before`: only ids below this one."""

    state: str | None = None
    sink: str | None = None
    dag: str | None = None
    run_id: int | None = None
    before: int | None = None


EVERYTHING = Wanted()


async def list_all(conn: AsyncConnection, wanted: Wanted = EVERYTHING, *, limit: int = 100) -> list[Delivery]:
    """The latest first."""
    return await all_rows(conn, sql("outbox", "list"), {**asdict(wanted), "limit": limit}, Delivery)


async def find(conn: AsyncConnection, delivery_id: int) -> Delivery | None:
    return await one_row(conn, sql("outbox", "find"), {"delivery_id": delivery_id}, Delivery)
