"""Variables, connections and secrets as they are stored: told apart by kind and name, never changed behind somebody's back."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection
from psycopg.errors import UniqueViolation

from evertick.store import secrets
from evertick.store.secrets import NewValue
from tests.engine.world import value

KINDS = ("connection", "secret", "variable")


@pytest.fixture
async def db(rollback_conn: AsyncConnection) -> AsyncConnection:
    for kind in KINDS:
        await put(rollback_conn, kind, f"a {kind}")
    return rollback_conn


async def put(
    conn: AsyncConnection, kind: str, content: str, description: str | None = "why", *, only_new: bool = False
) -> bool | None:
    value = NewValue(kind=kind, name="n", content=content, key_id="k1", description=description)
    return await secrets.put(conn, value, actor="test", only_new=only_new)


async def contents(conn: AsyncConnection) -> list[str]:
    return [row.content for row in await secrets.list_all(conn, kind=None, limit=10)]


async def test_the_same_name_of_another_kind_is_another_value(db: AsyncConnection) -> None:
    assert await put(db, "secret", "not this one", only_new=True) is None
    assert await put(db, "secret", "changed", description=None) is False
    assert await contents(db) == ["a connection", "changed", "a variable"]
    assert (await secrets.find(db, [("secret", "n")]))[0].description == "why"
    assert await secrets.delete(db, kind="secret", name="n", actor="test")
    assert await contents(db) == ["a connection", "a variable"]
    with pytest.raises(UniqueViolation):
        async with db.transaction():
            await db.execute("insert into stored_value select * from stored_value")


async def test_what_is_not_there_is_not_deleted_and_not_journalled(db: AsyncConnection) -> None:
    assert not await secrets.delete(db, kind="secret", name="other", actor="test")
    assert await value(db, "select count(*) from journal where verb = 'delete_value'") == 0


async def test_a_value_that_was_changed_meanwhile_is_not_resealed(db: AsyncConnection) -> None:
    (seen,) = await secrets.find(db, [("secret", "n")])
    await db.execute("update stored_value set content = %s where kind = 'variable'", [seen.content])
    assert await secrets.reseal(db, seen, content="sealed anew", key_id="k2")
    assert await contents(db) == ["a connection", "sealed anew", "a secret"], "the variable has the same text"
    assert not await secrets.reseal(db, seen, content="sealed late", key_id="k3")
    assert (await secrets.find(db, [("secret", "n")]))[0].key_id == "k2"
