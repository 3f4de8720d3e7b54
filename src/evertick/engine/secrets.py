"""put, delete and reseal: variables, connections and secrets are stored encrypted; reading them needs the key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from psycopg import AsyncConnection

from evertick.db.queries import secrets
from evertick.db.queries.secrets import AttemptHolder, ValueRow
from evertick.db.statements import sql_function
from evertick.domain.access import Actor
from evertick.domain.dags.params import JsonValue
from evertick.domain.encryption import Keyring
from evertick.domain.errors import Conflict, NotFound
from evertick.domain.stored_values import Connection, ValueKind, check_connection, check_name, check_value
from evertick.engine.verbs import did_you_mean

MOST_VALUES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The value to change. `is_new`: none with that name may exist yet."""

    kind: ValueKind
    name: str
    description: str | None = None
    is_new: bool = False


@sql_function(retries=False)
async def _put_value(
    conn: AsyncConnection, about: About, *, content: str, key_id: str, actor: Actor, only_new: bool = False
) -> bool | None:
    """Whether it is new; None if only a new one was wanted and it exists."""


@sql_function(retries=False)
async def _delete_value(conn: AsyncConnection, *, kind: str, name: str, actor: Actor) -> bool: ...


@sql_function(retries=False)
async def reencrypt_value(
    conn: AsyncConnection, *, kind: str, name: str, old: str, content: str, key_id: str
) -> bool: ...


async def put_value(
    conn: AsyncConnection,
    keyring: Keyring,
    *,
    kind: ValueKind,
    name: str,
    value: str,
    actor: Actor,
    description: str | None = None,
) -> bool:
    """Whether it is new."""
    about = About(kind=kind, name=name, description=description)
    return await put(conn, keyring, about, value, actor=actor)


async def put(
    conn: AsyncConnection,
    keyring: Keyring,
    about: About,
    content: str | Connection,
    *,
    extra: Mapping[str, JsonValue] | None = None,
    actor: Actor,
) -> bool:
    """Whether it is new. A connection may be given in parts, with its extra values: not every combination can be written as a
    URI."""
    text = check_value(about.kind, content) if isinstance(content, str) else check_connection(content, extra or {})
    sealed = keyring.seal(about.kind, check_name(about.kind, about.name), text)
    is_new = await _put_value(conn, about, content=sealed, key_id=keyring.first_id, actor=actor, only_new=about.is_new)
    if is_new is None:
        raise Conflict(f"{about.kind.capitalize()} {about.name!r} already exists: change it, or choose another name.")
    return is_new


async def read_value(conn: AsyncConnection, keyring: Keyring, *, kind: ValueKind, name: str) -> tuple[ValueRow, str]:
    found = await secrets.find(conn, kinds=[kind], names=[name])
    if not found:
        raise await missing_value(conn, kind, name)
    row = found[0]
    return row, keyring.open(kind, name, row.content, row.key_id)


async def read_values(
    conn: AsyncConnection, keyring: Keyring, wanted: Collection[tuple[str, str]], holder: AttemptHolder | None = None
) -> dict[tuple[str, str], str]:
    """The stored ones of these values; for the holder of an attempt only the values that its task declares."""
    kinds, names = [kind for kind, _ in wanted], [name for _, name in wanted]
    rows = await (
        secrets.values_of_attempt(
            conn, holder.key, epoch=holder.epoch, session=holder.session, kinds=kinds, names=names
        )
        if holder
        else secrets.find(conn, kinds=kinds, names=names)
    )
    return {(row.kind, row.name): keyring.open(row.kind, row.name, row.content, row.key_id) for row in rows}


async def delete_value(conn: AsyncConnection, *, kind: ValueKind, name: str, actor: Actor) -> None:
    if not await _delete_value(conn, kind=kind, name=name, actor=actor):
        raise await missing_value(conn, kind, name)


async def reseal(conn: AsyncConnection, keyring: Keyring) -> int:
    """Re-encrypt all values with the primary key. Returns how many had another key. Resumes after an interruption."""
    count = 0
    for row in await secrets.list_all(conn, kind=None, limit=MOST_VALUES):
        if row.key_id != keyring.first_id:
            value = keyring.open(row.kind, row.name, row.content, row.key_id)
            content = keyring.seal(row.kind, row.name, value)
            count += await reencrypt_value(
                conn, kind=row.kind, name=row.name, old=row.content, content=content, key_id=keyring.first_id
            )
    return count


async def missing_value(conn: AsyncConnection, kind: ValueKind, name: str) -> NotFound:
    """The error for a name that does not exist, with a similar name if there is one."""
    known = [row.name for row in await secrets.list_all(conn, kind=kind, limit=1000)]
    hint = did_you_mean(name, known, f"List {kind}s with `evertick {kind}s list`.")
    return NotFound(f"There is no {kind} {name!r}. {hint}")
