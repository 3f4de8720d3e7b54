"""Variables, connections and secrets as they are stored: told apart by kind and name, never changed behind somebody's back."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection
from psycopg.errors import UniqueViolation

from evertick.db.queries import secrets
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.stored_values import ValueKind
from evertick.engine.secrets import About, _delete_value, _put_value, reencrypt_value
from tests.engine.world import Runner, key_of, make_dag, start, value
from tests.engine.world import put as publish

KINDS = ("connection", "secret", "variable")


@pytest.fixture
async def db(rollback_conn: AsyncConnection) -> AsyncConnection:
    for kind in KINDS:
        await put(rollback_conn, kind, f"a {kind}")
    return rollback_conn


async def put(
    conn: AsyncConnection,
    kind: str,
    content: str,
    description: str | None = "why",
    *,
    name: str = "n",
    only_new: bool = False,
) -> bool | None:
    about = About(kind=ValueKind(kind), name=name, description=description)
    return await _put_value(conn, about, content=content, key_id="k1", actor=Actor("test"), only_new=only_new)


async def find(conn: AsyncConnection) -> list[secrets.ValueRow]:
    return await secrets.find(conn, kinds=["secret"], names=["n"])


async def contents(conn: AsyncConnection) -> list[str]:
    return [row.content for row in await secrets.list_all(conn, kind=None, limit=10)]


async def test_the_same_name_of_another_kind_is_another_value(db: AsyncConnection) -> None:
    assert await put(db, "secret", "not this one", only_new=True) is None
    assert await put(db, "secret", "changed", description=None) is False
    assert await contents(db) == ["a connection", "changed", "a variable"]
    assert (await find(db))[0].description == "why"
    assert await _delete_value(db, kind="secret", name="n", actor=Actor("test"))
    assert await contents(db) == ["a connection", "a variable"]
    with pytest.raises(UniqueViolation):
        async with db.transaction():
            await db.execute("insert into stored_value select * from stored_value")


async def test_what_is_not_there_is_not_deleted_and_not_journalled(db: AsyncConnection) -> None:
    assert not await _delete_value(db, kind="secret", name="other", actor=Actor("test"))
    assert await value(db, "select count(*) from audit_log where action = 'delete_value'") == 0


async def test_a_value_that_was_changed_meanwhile_is_not_resealed(db: AsyncConnection) -> None:
    (seen,) = await find(db)
    await db.execute("update stored_value set content = %s where kind = 'variable'", [seen.content])
    named = {"kind": "secret", "name": "n", "old": seen.content}
    assert await reencrypt_value(db, **named, content="sealed anew", key_id="k2")
    assert await contents(db) == ["a connection", "sealed anew", "a secret"], "the variable has the same text"
    assert not await reencrypt_value(db, **named, content="sealed late", key_id="k3")
    assert (await find(db))[0].key_id == "k2"


async def test_the_holder_of_an_attempt_is_given_what_its_task_declares_and_nobody_else_anything(
    db: AsyncConnection,
) -> None:
    await put(db, "secret", "not declared", name="other")
    await publish(db, make_dag("d", {"a": ()}, task_secrets=("n",), task_connections=("n",)))
    await start(db, "d")
    runner = await Runner.join(db)
    (claim,) = await runner.claim()
    key = key_of(claim)

    async def given(key: TaskKey, epoch: int, session: int, *kinds: str) -> list[tuple[str, str]]:
        wanted = [(kind, name) for kind in kinds or KINDS for name in ("n", "other")]
        named = {"kinds": [kind for kind, _ in wanted], "names": [name for _, name in wanted]}
        rows = await secrets.values_of_attempt(db, key, epoch=epoch, session=session, **named)
        return sorted((row.kind, row.name) for row in rows)

    assert await given(key, claim.epoch, runner.session) == [("connection", "n"), ("secret", "n")]
    assert await given(key, claim.epoch, runner.session, "secret") == [("secret", "n")]
    assert await given(key, claim.epoch, runner.session + 1) == []
    assert await given(key, claim.epoch + 1, runner.session) == []
    assert await given(key._replace(idx=1), claim.epoch, runner.session) == []
    assert await given(key._replace(map_index=7), claim.epoch, runner.session) == []
    assert await given(key._replace(run_id=key.run_id + 1), claim.epoch, runner.session) == []
    await runner.finish(claim)
    assert await given(key, claim.epoch, runner.session) == []
