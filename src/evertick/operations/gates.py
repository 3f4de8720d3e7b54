"""Pools, keys, and the causes that hold back the most work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen
from psycopg import AsyncConnection

from evertick.db.notify import Channel
from evertick.db.queries import gates
from evertick.db.queries.gates import Gate, GateTask
from evertick.domain.dags.gates import MOST_SLOTS
from evertick.domain.errors import NotFound
from evertick.domain.explain import Blocked
from evertick.engine import gates as verbs
from evertick.operations.caller import LONGEST_SHOWN_NAME, Caller, similar
from evertick.operations.paging import (
    MOST_ITEMS,
    USUAL_ITEMS,
    Cursor,
    IfMatch,
    Limit,
    Page,
    RequestBody,
    Tagged,
    record_of,
    refuse_stale,
    short_page,
)

POOL_KINDS = ("pool",)
KEY_KINDS = ("mutex", "key", "group", "task", "dag", "order", "rate", "past")
MOST_TASKS = 10_000
_MOST_GATES = 10_000

PoolName = Annotated[str, MaxLen(1000), Doc("The pool's name.")]
KeyName = Annotated[str, MaxLen(1000), Doc("The key, as tasks hold it.")]
MostTasks = Annotated[int, Ge(1), Le(MOST_TASKS), Doc("Maximum number of holders and of waiting tasks.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest(RequestBody):
    slots: Annotated[int, Ge(0), Le(MOST_SLOTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedPool(Gate):
    """A pool after a change. `admitted`: the number of waiting tasks that got slots by it."""

    is_new: bool
    admitted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GateDetails(Gate):
    """A gate with the tasks that hold it, and the tasks that wait for it in the order in which they get it."""

    held_by: list[GateTask]
    waiting: list[GateTask]


async def list_pools(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[Gate]:
    """List pools: their slots, and how many of them are taken."""
    return await _list(caller, POOL_KINDS, limit, cursor)


async def show_pool(caller: Caller, *, name: PoolName, limit: MostTasks = MOST_ITEMS) -> Tagged[GateDetails]:
    """Show a pool with its holders and waiting tasks. Its ETag changes with every change of its slots, and with nothing
    else."""
    async with caller.read() as conn:
        page = await _page(conn, POOL_KINDS, name, limit)
    return Tagged(record=page, etag=_etag(page))


async def put_pool(
    caller: Caller, *, name: PoolName, body: PoolRequest, if_match: IfMatch = None
) -> Tagged[ChangedPool]:
    """Create a pool, or change its slots at once. If more slots are taken than it has then, running tasks continue, and
    no other task starts until slots are free."""
    async with caller.write(Channel.TASKS) as conn:
        revision = await _revision(conn, name, if_match)
        done = await verbs.set_pool(conn, name=name, slots=body.slots, actor=caller.actor, revision=revision)
        row = await find_gate(conn, POOL_KINDS, name)
    pool = record_of(ChangedPool, row, is_new=done.is_new, admitted=done.admitted)
    return Tagged(record=pool, etag=_etag(row), is_new=done.is_new)


async def delete_pool(caller: Caller, *, name: PoolName, if_match: IfMatch = None) -> None:
    """Delete a pool that no DAG needs and no task holds."""
    async with caller.write() as conn:
        revision = await _revision(conn, name, if_match)
        await verbs.delete_pool(conn, name=name, actor=caller.actor, revision=revision)


async def list_keys(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[Gate]:
    """List the mutex keys, ordered keys, rates and limits that tasks hold or wait for now."""
    return await _list(caller, KEY_KINDS, limit, cursor)


async def show_key(
    caller: Caller,
    *,
    name: KeyName,
    kind: Annotated[str | None, MaxLen(20), Doc("The kind, if keys of several kinds have this name.")] = None,
    limit: MostTasks = MOST_ITEMS,
) -> GateDetails:
    """Show a key with its holders and waiting tasks."""
    async with caller.read() as conn:
        return await _page(conn, [each for each in KEY_KINDS if kind in (None, each)], name, limit)


async def list_blocked(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[Blocked]:
    """List the causes that hold back the most work now, over all runs."""
    async with caller.read() as conn:
        found = await gates.blocked(conn, limit=MOST_TASKS)
    return short_page(found, limit, cursor, lambda row: (-row.waiting, row.kind, row.name or ""), lambda row: row)


async def find_gate(conn: AsyncConnection, kinds: Sequence[str], name: str) -> Gate:
    known = await gates.list_gates(conn, kinds=list(kinds), limit=_MOST_GATES)
    for row in known:
        if row.name == name:
            return row
    noun, names = "pool" if "pool" in kinds else "key", [row.name for row in known]
    advice = similar(name, names, f"List {noun}s with `evertick {noun}s list`.")
    raise NotFound(f"There is no {noun} {name[:LONGEST_SHOWN_NAME]!r} now. {advice}")


async def _list(caller: Caller, kinds: Sequence[str], limit: int, cursor: str | None) -> Page[Gate]:
    async with caller.read() as conn:
        found = await gates.list_gates(conn, kinds=list(kinds), limit=_MOST_GATES)
    return short_page(found, limit, cursor, lambda row: (row.kind, row.name), lambda row: row)


async def _page(conn: AsyncConnection, kinds: Sequence[str], name: str, limit: int) -> GateDetails:
    row = await find_gate(conn, kinds, name)
    return record_of(
        GateDetails,
        row,
        held_by=await gates.holders(conn, row.gate_id, limit=limit),
        waiting=await gates.waiters(conn, row.gate_id, limit=limit),
    )


async def _revision(conn: AsyncConnection, name: str, if_match: str | None) -> str | None:
    """The revision that an ETag stands for. With an ETag the pool must exist."""
    if if_match is None:
        return None
    row = await find_gate(conn, POOL_KINDS, name)
    refuse_stale(if_match, _etag(row))
    return None if if_match == "*" else row.revision


def _etag(row: Gate) -> str:
    return f'"p{row.revision}"'
