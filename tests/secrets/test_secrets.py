"""Secrets from the command that stores them to the task that declares them, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.queries import secrets
from evertick.domain.access import Actor
from evertick.domain.dags.spec import TaskSpec
from evertick.domain.encryption import Keyring, new_key
from evertick.domain.errors import DecryptionFailed, EvertickError, InvalidSettings, NotFound, UserError
from evertick.domain.stored_values import (
    ValueKind,
    check_value,
    hidden_parts,
    parse_connection,
    read_connection,
    read_extra,
)
from evertick.engine.secrets import delete_value, put_value, read_value, reencrypt_value, reseal
from evertick.runtime.connections import ReconnectingConnection
from evertick.secrets.backends import SecretProvider, open_backends
from evertick.secrets.keyring import add_key, keep_first_key, load_keyring, make_key
from tests.secrets.canaries import hunt

SECRET = ValueKind.SECRET


async def test_no_canary_is_found_anywhere(database: str, conn: AsyncConnection, tmp_path: Path) -> None:
    """At full size by `make canaries`."""
    assert await hunt(database, conn, tmp_path, tasks=70) == []


async def test_a_value_is_stored_sealed_and_read_back(conn: AsyncConnection) -> None:
    ring = Keyring([new_key()])
    assert await put_value(conn, ring, kind=SECRET, name="db", value="s3cret", actor=Actor("a"), description="d")
    assert not await put_value(conn, ring, kind=SECRET, name="db", value="s3cret2", actor=Actor("b"))
    row, value = await read_value(conn, ring, kind=SECRET, name="db")
    assert (value, row.description, row.changed_by) == ("s3cret2", "d", "b")
    assert "s3cret" not in row.content
    await delete_value(conn, kind=SECRET, name="db", actor=Actor("a"))
    with pytest.raises(NotFound, match="There is no secret 'db'"):
        await read_value(conn, ring, kind=SECRET, name="db")
    with pytest.raises(NotFound):
        await delete_value(conn, kind=SECRET, name="db", actor=Actor("a"))


async def test_a_value_under_another_key_or_name_cannot_be_read(conn: AsyncConnection) -> None:
    ring = Keyring([new_key()])
    await put_value(conn, ring, kind=SECRET, name="a", value="x1", actor=Actor("t"))
    with pytest.raises(DecryptionFailed, match="which is not among the configured keys"):
        await read_value(conn, Keyring([new_key()]), kind=SECRET, name="a")
    await conn.execute("update stored_value set name = 'b'")
    with pytest.raises(DecryptionFailed, match="was changed in the database"):
        await read_value(conn, ring, kind=SECRET, name="b")


async def test_rotation_brings_everything_under_the_new_key(conn: AsyncConnection, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    with pytest.raises(InvalidSettings, match="no key for stored values exists"):
        load_keyring(settings)
    assert make_key(settings)
    assert not make_key(settings)
    place = settings.secret_key_place
    assert place.stat().st_mode & 0o777 == 0o600
    old = load_keyring(settings)
    for kind in ValueKind:
        await put_value(conn, old, kind=kind, name="x", value="pg://a:b@c/d", actor=Actor("t"))
    add_key(settings)
    ring = load_keyring(settings)
    assert ring.first_id != old.first_id
    assert (await read_value(conn, ring, kind=SECRET, name="x"))[1] == "pg://a:b@c/d"
    assert await reseal(conn, ring) == 3
    assert await reseal(conn, ring) == 0
    assert keep_first_key(settings) == 1
    assert {row.key_id for row in await secrets.list_all(conn, kind=None, limit=10)} == {ring.first_id}
    assert (await read_value(conn, load_keyring(settings), kind=SECRET, name="x"))[1] == "pg://a:b@c/d"
    place.chmod(0o644)
    with pytest.raises(InvalidSettings, match="chmod 600"):
        load_keyring(settings)


async def test_a_change_during_a_rotation_is_not_undone(conn: AsyncConnection) -> None:
    first, second = new_key(), new_key()
    await put_value(conn, Keyring([first]), kind=SECRET, name="x", value="old", actor=Actor("t"))
    (seen,) = await secrets.list_all(conn, kind=SECRET, limit=10)
    ring = Keyring([second, first])
    await put_value(conn, ring, kind=SECRET, name="x", value="new", actor=Actor("t"))
    assert not await reencrypt_value(
        conn, kind=SECRET, name="x", old=seen.content, content=ring.seal(SECRET, "x", "old"), key_id=ring.first_id
    )
    assert (await read_value(conn, ring, kind=SECRET, name="x"))[1] == "new"


async def test_backends_are_asked_in_their_order(
    database: str, conn: AsyncConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(home=tmp_path, secrets_backends=("env", f"files:{tmp_path}/mounted", "store"))
    make_key(settings)
    for name in ("a", "b", "c"):
        await put_value(conn, load_keyring(settings), kind=SECRET, name=name, value=f"store-{name}", actor=Actor("t"))
    (tmp_path / "mounted" / "variable").mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / "mounted" / name).write_text(f"file-{name}\n")
    (tmp_path / "mounted" / "variable" / "v").write_text("5")
    monkeypatch.setenv("EVERTICK_SECRET__A", "env-a")
    link = ReconnectingConnection(database, Purpose.SCHEDULER)
    try:
        task = TaskSpec(name="t", secrets=("a", "b", "c"), variables=("v",))
        provider = SecretProvider(settings)
        given = json.loads(await provider.of_task(provider.stored(link.get), task))
        assert given["secret"] == {"a": "env-a", "b": "file-b", "c": "store-c"}
        assert given["variable"] == {"v": "5"}
        assert await provider.of_task(provider.stored(link.get), TaskSpec(name="t")) == ""
        with pytest.raises(
            NotFound, match="connection 'no' is not set: give it a value with `evertick connections set no`"
        ):
            await provider.of_task(provider.stored(link.get), TaskSpec(name="t", connections=("no",)))
    finally:
        await link.close()


class Vault:
    def get(self, kind: str, name: str) -> str | None:
        if name == "broken":
            raise RuntimeError("with s3cret in it")
        return f"{kind}-{name}"


async def test_a_backend_of_ones_own(tmp_path: Path) -> None:
    grants = SecretProvider(Settings(home=tmp_path, secrets_backends=(f"{__name__}:Vault",)))
    link = ReconnectingConnection("postgresql://nowhere/", Purpose.SCHEDULER)
    assert json.loads(await grants.of_task(grants.stored(link.get), TaskSpec(name="t", secrets=("x",))))["secret"] == {
        "x": "secret-x"
    }
    with pytest.raises(EvertickError, match="Vault failed: RuntimeError") as told:
        await grants.of_task(grants.stored(link.get), TaskSpec(name="t", secrets=("broken",)))
    assert "s3cret" not in str(told.value)


@pytest.mark.parametrize("name", ["vault", "no.such:thing", "json:loads", "os:getcwd"])
def test_a_backend_that_cannot_be_had_is_refused(name: str) -> None:
    with pytest.raises(InvalidSettings, match="EVERTICK_SECRETS_BACKENDS"):
        open_backends((name,))


def test_a_connection_is_read_from_its_address_and_hides_its_password() -> None:
    made = parse_connection("postgresql://anna:p%40ss%2F1@db.example:5432/shop?sslmode=require")
    assert (made.type, made.host, made.port, made.schema) == ("postgresql", "db.example", 5432, "shop")
    assert (made.login, made.password, made.extra) == ("anna", "p@ss/1", {"sslmode": "require"})
    assert "p@ss" not in repr(made) and "p%40ss" not in made.shown
    assert read_connection(made.uri) == made
    for wrong in ("", "no address", "http://[", "a://b:notaport"):
        with pytest.raises(UserError):
            parse_connection(wrong)


def test_a_connection_as_json_keeps_its_nested_extra_and_hides_all_of_its_texts() -> None:
    given = {
        "conn_type": "http",
        "host": "h",
        "port": 80,
        "password": "pw-1",
        "extra": {"auth": {"token": ["t-1"]}, "n": 1},
    }
    text = check_value(ValueKind.CONNECTION, json.dumps(given))
    assert read_extra(text) == given["extra"]
    found = read_connection(text)
    assert (found.type, found.port, found.extra["auth"]) == ("http", 80, '{"token": ["t-1"]}')
    assert {"pw-1", "t-1"} <= set(hidden_parts(ValueKind.CONNECTION, text))
    assert read_extra(check_value(ValueKind.CONNECTION, '{"type": "x", "extra": "{\\"a\\": [1]}"}')) == {"a": [1]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "no JSON object"),
        ('{"host": "h"}', "needs a type"),
        ('{"type": "x", "hots": "h"}', "no 'hots'"),
        ('{"type": "x", "port": 70000}', "1 to 65535"),
        ('{"type": "x", "login": 1}', "must be a text"),
        ('{"type": "x", "extra": [1]}', "must be a JSON object"),
    ],
)
def test_a_connection_that_is_no_valid_json_object_is_refused(text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        check_value(ValueKind.CONNECTION, text)
