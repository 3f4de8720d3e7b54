"""Requests for runs: what applications put into the inbox becomes runs or dead letters, and delayed runs begin.

A request is checked here and applied by the database, one batch in one transaction: each becomes exactly one run, the run
that its key stands for, or a dead letter. A request that the database refuses becomes a dead letter alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import psycopg
from psycopg import AsyncConnection

from evertick.db.queries import requests
from evertick.db.queries.dags import DagRow
from evertick.db.queries.requests import InboxRow
from evertick.db.statements import sql_function
from evertick.domain.access import Actor
from evertick.domain.dags.spec import DagSpec
from evertick.domain.dags.validation import check_run_params
from evertick.domain.errors import UserError
from evertick.engine.fire_schedules import JsonObject
from evertick.engine.runs import find_dag
from evertick.engine.verbs import is_poison, leader_verb


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of a batch. `repeated`: their key stood for a run. `next_start`: of delayed runs. `defers`: some first tasks
    wait for something outside."""

    made: int
    repeated: int
    dead: int
    next_start: datetime | None
    defers: bool


@dataclass(frozen=True, slots=True)
class Started:
    started: int
    next_start: datetime | None
    defers: bool


@leader_verb
async def _take_requests(conn: AsyncConnection, *, shard: int, epoch: int, decisions: list[JsonObject]) -> Taken: ...


@leader_verb
async def start_delayed_runs(conn: AsyncConnection, *, shard: int, epoch: int, limit: int) -> Started: ...


async def take_requests(conn: AsyncConnection, *, shard: int, epoch: int, limit: int) -> Taken | None:
    """One batch, the oldest first. None: the inbox is empty."""
    found = await requests.inbox(conn, limit=limit)
    if not found:
        return None
    decisions = await _decide(conn, found)
    return await _apply(conn, decisions, shard=shard, epoch=epoch)


async def _decide(conn: AsyncConnection, found: Sequence[InboxRow]) -> list[JsonObject]:
    known: dict[str, tuple[DagRow, DagSpec] | UserError] = {}
    decisions: list[JsonObject] = []
    for each in found:
        try:
            if each.dag not in known:
                known[each.dag] = await find_dag(conn, each.dag)
            dag = known[each.dag]
            if isinstance(dag, UserError):
                raise dag
            row, spec = dag
            params = check_run_params(spec, each.params)
            decisions.append({"inbox_id": each.inbox_id, "dag_id": row.dag_id, "params": params})
        except UserError as error:
            known.setdefault(each.dag, error)
            decisions.append({"inbox_id": each.inbox_id, "reason": str(error)})
    return decisions


async def _apply(conn: AsyncConnection, decisions: list[JsonObject], *, shard: int, epoch: int) -> Taken:
    """All at once; if the database refuses the batch, in halves, until the refused request is alone."""
    try:
        return await _take_requests(conn, shard=shard, epoch=epoch, decisions=decisions)
    except psycopg.Error as error:
        if not is_poison(error.sqlstate):
            raise
        if len(decisions) == 1:
            refused: JsonObject = {"inbox_id": decisions[0]["inbox_id"], "reason": f"the database refuses it: {error}"}
            return await _take_requests(conn, shard=shard, epoch=epoch, decisions=[refused])
    middle = len(decisions) // 2
    first = await _apply(conn, decisions[:middle], shard=shard, epoch=epoch)
    second = await _apply(conn, decisions[middle:], shard=shard, epoch=epoch)
    return Taken(
        made=first.made + second.made,
        repeated=first.repeated + second.repeated,
        dead=first.dead + second.dead,
        next_start=second.next_start,
        defers=first.defers or second.defers,
    )


@sql_function
async def replay_dead_letters(conn: AsyncConnection, *, letter_ids: list[int], actor: Actor) -> int:
    """The number of letters that went back into the inbox, without those that were replayed before."""
