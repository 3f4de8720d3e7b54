"""Writes down every move of every task and run while a test lasts, and says which of them the one table forbids.

For test databases only: the program itself has no triggers.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import LiteralString, NamedTuple, TypeVar

from psycopg import AsyncConnection

from evertick.domain.states import RUN_TRANSITIONS, TASK_TRANSITIONS

S = TypeVar("S", bound=str)

# A task without a row is waiting, so a row that is inserted in another state has moved. A run's first state is no move.
_INSTALL: LiteralString = """
create table audit_move (
    entry bigint generated always as identity primary key,
    thing text not null, run_id bigint not null, idx int, old_state text not null, new_state text not null);
create function audit_move_of_task() returns trigger language plpgsql as $$
begin
    insert into audit_move (thing, run_id, idx, old_state, new_state)
    values ('task', new.run_id, new.idx, case tg_op when 'INSERT' then 'waiting' else old.state::text end, new.state);
    return null;
end $$;
create function audit_move_of_run() returns trigger language plpgsql as $$
begin
    insert into audit_move (thing, run_id, old_state, new_state) values ('run', new.run_id, old.state, new.state);
    return null;
end $$;
create trigger audit_inserted after insert on task for each row
    when (new.state <> 'waiting') execute function audit_move_of_task();
create trigger audit_moved after update on task for each row
    when (old.state <> new.state) execute function audit_move_of_task();
create trigger audit_moved after update on run_status for each row
    when (old.state <> new.state) execute function audit_move_of_run();
"""


class Move(NamedTuple):
    """One recorded change of a state. `thing` is "task" or "run"."""

    thing: str
    old: str
    new: str


async def install_audit(conn: AsyncConnection) -> None:
    """Record every move in this database from now on."""
    await conn.execute(_INSTALL)


async def moves(conn: AsyncConnection) -> set[Move]:
    """Every move that was made, once each."""
    cursor = await conn.execute("select distinct thing, old_state, new_state from audit_move")
    return {Move(*row) for row in await cursor.fetchall()}


async def illegal_moves(conn: AsyncConnection) -> set[Move]:
    """The moves that were made and that the table does not have."""
    return await moves(conn) - legal_moves()


async def moves_of(conn: AsyncConnection, idx: int) -> list[Move]:
    """The moves of the tasks with this index, in their order."""
    query = "select thing, old_state, new_state from audit_move where idx = %s order by entry"
    return [Move(*row) for row in await (await conn.execute(query, [idx])).fetchall()]


async def forget_moves(conn: AsyncConnection) -> None:
    """Start an empty record."""
    await conn.execute("delete from audit_move")


def legal_moves() -> set[Move]:
    return _table("task", TASK_TRANSITIONS) | _table("run", RUN_TRANSITIONS)


def _table(thing: str, transitions: Mapping[S, Set[S]]) -> set[Move]:
    return {Move(thing, str(old), str(new)) for old, states in transitions.items() for new in states}
