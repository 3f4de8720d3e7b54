"""Pools, keys, and the causes that hold back the most work."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen
from psycopg import AsyncConnection

from evertick.db.notify import Channel
from evertick.db.queries import gates
from evertick.db.queries.gates import GateRow, GateTask
from evertick.domain.dags.gates import MOST_SLOTS
from evertick.domain.errors import NotFound
from evertick.domain.explain import Blocked
from evertick.engine.gates import delete_pool, set_pool
from evertick.operations.caller import Caller
from evertick.operations.paging import MOST_ITEMS, IfMatch, Page, Tagged, refuse_stale

POOL_KINDS = ("pool",)
KEY_KINDS = ("mutex", "key", "group", "task", "dag", "order", "rate", "past")
MOST_TASKS = 10_000
_MOST_GATES = 10_000
_LONGEST_SHOWN_NAME = 200

PoolName = Annotated[str, MaxLen(1000), Doc("The pool's name.")]
KeyName = Annotated[str, MaxLen(1000), Doc("The key, as tasks hold it.")]
MostTasks = Annotated[int, Ge(1), Le(MOST_TASKS), Doc("Maximum number of holders and of waiting tasks.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSlots:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    slots: Annotated[int, Ge(0), Le(MOST_SLOTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A pool, a key or a limit. `version`: of an ordered key, the smallest that is open. `period`: of a rate, in seconds."""

    gate_id: int
    kind: str
    name: str
    slots: int
    used: int
    holders: int
    waiters: int
    version: int | None
    period: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedPool(Gate):
    """A pool after a change. `admitted`: the number of waiting tasks that got slots by it."""

    is_new: bool
    admitted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePage(Gate):
    """A gate with the tasks that hold it, and the tasks that wait for it in the order in which they get it."""

    held_by: list[GateTask]
    waiting: list[GateTask]


async def list_pools(caller: Caller) -> Page[Gate]:
    """List pools: their slots, and how many of them are taken."""
    return await _list(caller, POOL_KINDS)


async def show_pool(caller: Caller, *, name: PoolName, limit: MostTasks = MOST_ITEMS) -> Tagged[GatePage]:
    """Show a pool with its holders and waiting tasks. Its ETag is the number of slots."""
    async with caller.read() as conn:
        page = await _page(conn, POOL_KINDS, name, limit)
    return Tagged(record=page, etag=_etag(page.slots))


async def put_pool(caller: Caller, *, name: PoolName, body: PoolSlots, if_match: IfMatch = None) -> Tagged[ChangedPool]:
    """Create a pool, or change its slots at once. If more slots are taken than it has then, running tasks continue, and
    no other task starts until slots are free."""
    async with caller.write(Channel.TASKS) as conn:
        if if_match is not None:
            refuse_stale(if_match, _etag((await find_gate(conn, POOL_KINDS, name)).capacity))
        done = await set_pool(conn, name=name, slots=body.slots, actor=caller.actor)
        row = await find_gate(conn, POOL_KINDS, name)
    pool = ChangedPool(**asdict(_gate(row)), is_new=done.is_new, admitted=done.admitted)
    return Tagged(record=pool, etag=_etag(row.capacity))


async def remove_pool(caller: Caller, *, name: PoolName) -> None:
    """Delete a pool that no DAG needs and no task holds."""
    async with caller.write() as conn:
        await delete_pool(conn, name=name, actor=caller.actor)


async def list_keys(caller: Caller) -> Page[Gate]:
    """List the mutex keys, ordered keys, rates and limits that tasks hold or wait for now."""
    return await _list(caller, KEY_KINDS)


async def show_key(
    caller: Caller,
    *,
    name: KeyName,
    kind: Annotated[str | None, MaxLen(20), Doc("The kind, if keys of several kinds have this name.")] = None,
    limit: MostTasks = MOST_ITEMS,
) -> GatePage:
    """Show a key with its holders and waiting tasks."""
    async with caller.read() as conn:
        return await _page(conn, [each for each in KEY_KINDS if kind in (None, each)], name, limit)


async def list_blocked(
    caller: Caller,
    *,
    limit: Annotated[int, Ge(1), Le(MOST_TASKS), Doc("Maximum number of items.")] = MOST_ITEMS,
) -> Page[Blocked]:
    """List the causes that hold back the most work now, over all runs."""
    async with caller.read() as conn:
        return Page(items=await gates.blocked(conn, limit=limit), next_cursor=None)


async def find_gate(conn: AsyncConnection, kinds: Sequence[str], name: str) -> GateRow:
    known = await gates.list_gates(conn, kinds=list(kinds), limit=_MOST_GATES)
    for row in known:
        if row.name == name:
            return row
    noun, names = "pool" if "pool" in kinds else "key", [row.name for row in known]
    near = difflib.get_close_matches(name, names, n=1) if len(name) <= _LONGEST_SHOWN_NAME else []
    next_step = f"Did you mean {near[0]!r}?" if near else f"List {noun}s with `evertick {noun}s list`."
    raise NotFound(f"There is no {noun} {name[:_LONGEST_SHOWN_NAME]!r} now. {next_step}")


async def _list(caller: Caller, kinds: Sequence[str]) -> Page[Gate]:
    async with caller.read() as conn:
        found = await gates.list_gates(conn, kinds=list(kinds), limit=_MOST_GATES)
    return Page(items=[_gate(row) for row in found], next_cursor=None)


async def _page(conn: AsyncConnection, kinds: Sequence[str], name: str, limit: int) -> GatePage:
    row = await find_gate(conn, kinds, name)
    return GatePage(
        **asdict(_gate(row)),
        held_by=await gates.holders(conn, row.gate_id, limit=limit),
        waiting=await gates.waiters(conn, row.gate_id, limit=limit),
    )


def _gate(row: GateRow) -> Gate:
    return Gate(
        gate_id=row.gate_id,
        kind=row.kind,
        name=row.name,
        slots=row.capacity,
        used=row.used,
        holders=row.holders,
        waiters=row.waiters,
        version=row.version,
        period=row.period,
    )


def _etag(slots: int) -> str:
    return f'"s{slots}"'
