"""An outside store that keeps the highest fencing token it has seen: what a user gets who hands the epoch on.

Nothing but the token and the key make a second row impossible: the table of rows has no unique index, so that the checker
can find two. One statement per call, so a frozen caller holds no lock. Copied beside the DAG files, as effects.py is.
"""

from __future__ import annotations

import os
import time
from typing import LiteralString, NamedTuple

import psycopg
from psycopg import AsyncConnection

from evertick import current_context

URL_VARIABLE = "CHAOS_SINK_URL"

_RETRY_SECONDS = 0.2
_LONGEST_SECONDS = 300.0

_INSTALL: LiteralString = """
create schema if not exists chaos_sink;
create table if not exists chaos_sink.token (
    run_id bigint, task text, map_index int, epoch bigint not null, primary key (run_id, task, map_index));
create table if not exists chaos_sink.row (
    run_id bigint not null, task text not null, map_index int not null, epoch bigint not null);
create index if not exists row_of_task on chaos_sink.row (run_id, task, map_index);
create table if not exists chaos_sink.touch (
    number bigint generated always as identity primary key, run_id bigint not null, task text not null, map_index int not null,
    epoch bigint not null, pid int not null, is_accepted boolean not null, is_written boolean not null);
create or replace function chaos_sink.put(p_run bigint, p_task text, p_map int, p_epoch bigint, p_pid int) returns text
language plpgsql as $$
declare
    highest bigint;
    wrote boolean := false;
begin
    insert into chaos_sink.token as t values (p_run, p_task, p_map, p_epoch)
    on conflict (run_id, task, map_index) do update set epoch = greatest(t.epoch, p_epoch)
    returning t.epoch into highest;
    if highest = p_epoch and not exists (
        select 1 from chaos_sink.row r where r.run_id = p_run and r.task = p_task and r.map_index = p_map) then
        insert into chaos_sink.row values (p_run, p_task, p_map, p_epoch);
        wrote := true;
    end if;
    insert into chaos_sink.touch (run_id, task, map_index, epoch, pid, is_accepted, is_written)
    values (p_run, p_task, p_map, p_epoch, p_pid, highest = p_epoch, wrote);
    return case when wrote then 'written' when highest = p_epoch then 'there already' else 'refused' end;
end $$;
"""


class SinkTouch(NamedTuple):
    """One call, in the order in which the store decided about them."""

    number: int
    run_id: int
    task: str
    map_index: int
    epoch: int
    pid: int
    is_accepted: bool
    is_written: bool


class SinkRow(NamedTuple):
    """One row of the store."""

    run_id: int
    task: str
    map_index: int
    epoch: int


class Sink(NamedTuple):
    """The whole store."""

    touches: tuple[SinkTouch, ...] = ()
    rows: tuple[SinkRow, ...] = ()


def fenced_put() -> str:
    """Write this task's one row with its epoch as the token: "written", "there already" or "refused".

    Waits while the store is away. Repeating it after a lost reply is harmless.
    """
    context = current_context()
    call = (context.run_id, context.task, context.map_index, context.epoch, os.getpid())
    over = time.monotonic() + _LONGEST_SECONDS
    while True:
        try:
            with psycopg.connect(os.environ[URL_VARIABLE], autocommit=True, connect_timeout=5) as conn:
                found = conn.execute("select chaos_sink.put(%s::bigint, %s::text, %s::int, %s::bigint, %s::int)", call)
                row = found.fetchone()
                assert row is not None
                return str(row[0])
        except psycopg.OperationalError:
            if context.cancelled.wait(_RETRY_SECONDS) or time.monotonic() > over:
                raise


async def install(conn: AsyncConnection) -> None:
    """Create the store in the database of this connection."""
    await conn.execute(_INSTALL)


async def read(conn: AsyncConnection) -> Sink:
    touches = await conn.execute(
        "select number, run_id, task, map_index, epoch, pid, is_accepted, is_written from chaos_sink.touch order by number"
    )
    rows = await conn.execute(
        "select run_id, task, map_index, epoch from chaos_sink.row order by run_id, task, map_index"
    )
    return Sink(
        touches=tuple(SinkTouch(*each) for each in await touches.fetchall()),
        rows=tuple(SinkRow(*each) for each in await rows.fetchall()),
    )
