"""Rows that the database refuses to change, as a damaged page, a full index entry or a broken trigger would make them."""

from __future__ import annotations

from psycopg import AsyncConnection


async def refuse(
    conn: AsyncConnection, table: str, condition: str, *, on: str = "update", name: str = "poison"
) -> None:
    """Whatever changes a row of `table` for which `condition` holds (of `new`) fails from now on."""
    await conn.execute(
        f"create or replace function {name}() returns trigger language plpgsql as $$ begin"  # type: ignore[arg-type]
        f" if {condition} then raise exception 'this row is poison'; end if; return new; end $$"
    )
    await conn.execute(f"create trigger {name} before {on} on {table} for each row execute function {name}()")  # type: ignore[arg-type]


async def cure(conn: AsyncConnection, table: str, name: str = "poison") -> None:
    await conn.execute(f"drop trigger {name} on {table}")  # type: ignore[arg-type]
