"""Installs the audit into a database under test: triggers on its tables, and three of its functions wrapped.

The wrapped functions do what they did and note what was asked of them: `fence` (by which leader), `finish` (which attempt
was reported by whom, and what was refused) and `extend` (who was told that it lost something). For test databases only.
"""

from __future__ import annotations

from pathlib import Path
from typing import LiteralString, NamedTuple

from psycopg import AsyncConnection
from psycopg.sql import SQL, Identifier

from evertick.db.function_sets import FunctionSet, own_set

_INSIDE = "_unaudited"

_FENCE: LiteralString = """
begin
    perform {inside}({arguments});
    insert into chaos_audit.planning (tx, backend, shard, epoch) values (pg_current_xact_id(), chaos_audit.me(), p_shard, p_epoch);
exception when sqlstate 'EV001' then
    perform chaos_audit.note_refused_fence(p_shard, p_epoch);
    raise;
end
"""

_FINISH: LiteralString = """
declare
    done finish_result;
begin
    done := {inside}({arguments});
    insert into chaos_audit.report (at_ns, session, run_id, idx, map_index, epoch, kind, is_refused)
    select chaos_audit.boot_ns(), p_session, (x->>'r')::bigint, (x->>'i')::int, (x->>'m')::int, (x->>'e')::bigint, x->>'kind',
           exists (select 1 from unnest(done.refused) f where f.run_id = (x->>'r')::bigint and f.idx = (x->>'i')::int
                   and f.map_index = (x->>'m')::int and f.epoch = (x->>'e')::bigint)
    from jsonb_array_elements(p_reports) x;
    return done;
end
"""

_EXTEND: LiteralString = """
#variable_conflict use_column
begin
    return query
    with answer as materialized (select * from {inside}({arguments})), noted as (
        insert into chaos_audit.refusal (at_ns, kind, session)
        select chaos_audit.boot_ns(), 'extend', p_session from answer a where a.kind in ('lost', 'gone'))
    select * from answer;
end
"""

# name: the body around it, and the arguments that the body names
_WRAPPED: dict[LiteralString, tuple[LiteralString, tuple[str, ...]]] = {
    "fence": (_FENCE, ("p_shard", "p_epoch")),
    "finish_attempts": (_FINISH, ("p_session", "p_reports")),
    "extend_leases": (_EXTEND, ("p_session",)),
}


class _Function(NamedTuple):
    """A function as it is declared."""

    signature: str
    declared: str
    result: str
    names: list[str]
    modes: list[str] | None

    def arguments(self, modes: str) -> list[str]:
        """The names of its arguments that have one of those modes."""
        known = self.modes or ["i"] * len(self.names)
        return [name for name, mode in zip(self.names, known, strict=True) if mode in modes]


async def install_audit(conn: AsyncConnection) -> None:
    """After the migrations, as superuser, before any service starts."""
    text = Path(__file__).with_name("audit.sql").read_text(encoding="utf-8")
    async with conn.transaction():
        await conn.execute(text)
        await wrap_functions(conn, own_set())


async def wrap_functions(conn: AsyncConnection, functions: FunctionSet) -> None:
    """Of each set of functions that services will call, after `install_audit` and before any of them starts."""
    async with conn.transaction():
        for name, (body, needed) in _WRAPPED.items():
            await _wrap(conn, functions.schema, name, body, needed)


async def refusals(conn: AsyncConnection) -> dict[str, int]:
    """Stale writes that were tried and refused so far, by what was tried."""
    cursor = await conn.execute(
        "select (select count(*) from chaos_audit.report where is_refused),"
        " (select count(*) from chaos_audit.refusal where kind = 'extend'),"
        " (select count(*) from pg_ls_dir(current_setting('data_directory')) file"
        "   where starts_with(file, chaos_audit.refused_files()))"
    )
    row = await cursor.fetchone()
    assert row is not None
    return dict(zip(("finish", "extend", "fence"), row, strict=True))


async def _wrap(
    conn: AsyncConnection, schema: str, name: LiteralString, body: LiteralString, needed: tuple[str, ...]
) -> None:
    found = await _look_up(conn, schema, name)
    inputs = found.arguments("ib")
    missing = [each for each in needed if each not in inputs]
    assert not missing, f"the audit of {name} must follow its change: it has no argument {', '.join(missing)} any more"
    inside = f"{name}{_INSIDE}"
    filled = SQL(body).format(inside=Identifier(schema, inside), arguments=SQL(", ").join(map(Identifier, inputs)))
    await conn.execute(SQL("alter function {} rename to {}").format(SQL(found.signature), Identifier(inside)))
    declaration = f"create function {schema}.{name}({found.declared}) returns {found.result} language plpgsql as "
    await conn.execute(SQL(declaration) + SQL("$chaos$") + filled + SQL("$chaos$"))


async def _look_up(conn: AsyncConnection, schema: str, name: str) -> _Function:
    cursor = await conn.execute(
        "select p.oid::regprocedure::text, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid), p.proargnames,"
        " p.proargmodes::text[] from pg_proc p where p.pronamespace = %s::regnamespace and p.proname = %s",
        [schema, name],
    )
    rows = await cursor.fetchall()
    assert len(rows) == 1, f"the audit wraps one function {name}, and there are {len(rows)}: it must follow that change"
    return _Function(*rows[0])
