"""Accounts, credentials and failed logins, statement by statement: whom each touches, and whom it leaves alone."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import NamedTuple

import pytest
from psycopg import AsyncConnection
from psycopg.errors import CheckViolation, LockNotAvailable, UniqueViolation

from evertick.db.connect import Purpose, connect
from evertick.db.queries import accounts
from evertick.db.queries.accounts import NewCredential
from evertick.domain.access import Actor
from evertick.engine.accounts import AccountChange, change_account, record_login_attempt
from tests.engine.world import T0, later, set_clock, value
from tests.waiting import eventually

DAY = timedelta(days=1).total_seconds()
VIEWER = AccountChange(role="viewer")


@pytest.fixture
async def db(rollback_conn: AsyncConnection) -> AsyncConnection:
    await set_clock(rollback_conn, T0)
    return rollback_conn


async def account(conn: AsyncConnection, name: str, role: str = "viewer", tags: list[str] | None = None) -> int:
    made = await accounts.add_account(conn, name=name, role=role, tags=tags, password_hash=None, actor=Actor("test"))
    assert made is not None
    return made


async def credential(
    conn: AsyncConnection, account_id: int, secret: str, kind: str = "token", seconds: float | None = 60.0
) -> int:
    new = NewCredential(
        account_id=account_id, kind=kind, name=secret, secret_hash=secret.encode(), actor=Actor("test"), seconds=seconds
    )
    return (await accounts.add_credential(conn, new))[0]


async def change(conn: AsyncConnection, name: str, wanted: AccountChange) -> str:
    return await change_account(conn, wanted, name=name, actor=Actor("test"))


class LoginAttempt(NamedTuple):
    subject: str
    free: int
    is_fading: bool = False


async def tries(conn: AsyncConnection, tried: list[LoginAttempt]) -> float:
    fading = [each.subject for each in tried if each.is_fading]
    subjects, free = [each.subject for each in tried], [each.free for each in tried]
    return await record_login_attempt(conn, subjects=subjects, free=free, fading=fading)


async def forgive(conn: AsyncConnection, tried: list[LoginAttempt]) -> None:
    fading = [each.subject for each in tried if each.is_fading]
    await accounts.forgive(conn, subjects=[each.subject for each in tried if not each.is_fading], fading=fading)


async def refused(conn: AsyncConnection, error: type[Exception], statement: str) -> None:
    with pytest.raises(error):
        async with conn.transaction():
            await conn.execute(statement)  # type: ignore[arg-type]


# What the tables refuse ---------------------------------------------------------------------------------------------------


async def test_the_tables_refuse_what_makes_no_sense(db: AsyncConnection) -> None:
    an_account = "insert into account (name, role, tags, created_by, created_at) values ('a', {}, {}, 'x', clock())"
    await refused(db, CheckViolation, an_account.format("'king'", "null"))
    await refused(db, CheckViolation, an_account.format("'admin'", "'{}'"))
    await db.execute(an_account.format("'admin'", "null"))  # type: ignore[arg-type]
    one = (
        "insert into credential (secret_hash, account_id, kind, name, role, created_by, created_at, expires_at)"
        " values ('s', (select account_id from account), {}, 'n', {}, 'x', clock(), {})"
    )
    await refused(db, CheckViolation, one.format("'key'", "null", "clock()"))
    await refused(db, CheckViolation, one.format("'token'", "'king'", "clock()"))
    await refused(db, CheckViolation, one.format("'session'", "null", "null"))
    await db.execute(one.format("'token'", "'viewer'", "null"))  # type: ignore[arg-type]
    await refused(db, UniqueViolation, one.format("'token'", "'viewer'", "null"))
    await refused(db, CheckViolation, "insert into stored_value values ('thing', 'n', 'c', 'k', null, 'x', clock())")


async def test_a_name_is_taken_whatever_its_case_and_nothing_is_journalled_then(db: AsyncConnection) -> None:
    await account(db, "Ann")
    again = await accounts.add_account(db, name="ann", role="admin", tags=None, password_hash=None, actor=Actor("test"))
    assert again is None
    assert await value(db, "select count(*) from audit_log where action = 'add_user'") == 1
    await refused(
        db,
        UniqueViolation,
        "insert into account (name, role, created_by, created_at) select 'ANN', 'viewer', 'x', clock()",
    )


# Changing accounts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["nobody", "viewer", "disabled", "limited", "admin"])
async def test_the_last_admin_who_can_do_everything_stays(db: AsyncConnection, other: str) -> None:
    await account(db, "root", "admin")
    if other != "nobody":
        await account(db, "other", "viewer" if other == "viewer" else "admin", ["x"] if other == "limited" else None)
    if other == "disabled":
        assert await change(db, "other", AccountChange(disabled=True)) == "changed"
    assert await change(db, "root", VIEWER) == ("changed" if other == "admin" else "last_admin")


async def test_a_change_is_of_one_account_and_ends_what_that_one_gave_out(db: AsyncConnection) -> None:
    ann, bob = await account(db, "ann"), await account(db, "bob")
    old = await credential(db, ann, "old")
    assert await accounts.revoke(db, credential_id=old, actor=Actor("test")) == "ann"
    await credential(db, ann, "a")
    await credential(db, bob, "b")
    await set_clock(db, later(10))
    assert await change(db, "ANN", AccountChange(role="editor", password_hash="h")) == "changed"
    cursor = await db.execute("select name, role, password_hash from account order by name")
    assert await cursor.fetchall() == [("ann", "editor", "h"), ("bob", "viewer", None)]
    assert [await accounts.authenticate(db, secret) is None for secret in (b"a", b"b")] == [True, False]
    assert await value(db, "select revoked_at from credential where name = 'old'") == T0, "it ended when it ended"
    assert await value(db, "select detail->'after'->>'role' from audit_log where action = 'change_user'") == "editor"
    assert await change(db, "cid", VIEWER) == "unknown"


async def test_two_at_once_do_not_take_each_other_the_last_admin(conn: AsyncConnection, database: str) -> None:
    for name in ("a", "b"):
        await account(conn, name, "admin")
    async with await connect(database, purpose=Purpose.SCHEDULER) as other:
        async with other.transaction():
            assert await change(other, "a", VIEWER) == "changed"
            second = asyncio.ensure_future(change(conn, "b", VIEWER))
            waits = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
            await eventually(lambda: value(other, waits, conn.info.backend_pid))
        assert await second == "last_admin"


async def test_whoever_changes_a_viewer_waits_for_admins_and_not_for_other_viewers(
    conn: AsyncConnection, database: str
) -> None:
    for name in ("a", "b"):
        await account(conn, name)
    await account(conn, "root", "admin")
    await conn.execute("set lock_timeout = '300ms'")
    async with await connect(database, purpose=Purpose.SCHEDULER) as other, other.transaction():
        await other.execute("select from account where name = 'b' for no key update")
        assert await change(conn, "a", AccountChange(role="editor")) == "changed"
        await other.execute("select from account where name = 'root' for no key update")
        with pytest.raises(LockNotAvailable):
            await change(conn, "a", VIEWER)


# Logging in ---------------------------------------------------------------------------------------------------------------


async def test_failures_are_counted_by_subject_and_forgotten_by_subject(db: AsyncConnection) -> None:
    for _ in range(3):
        assert await tries(db, [LoginAttempt("ann", 3)]) == 0
    assert await tries(db, [LoginAttempt("bob", 3)]) == 0
    assert await tries(db, [LoginAttempt("ann", 3)]) == 1
    await forgive(db, [LoginAttempt("ann", 3)])
    assert await value(db, "select array_agg(subject) from login_attempt") == ["bob"]


async def test_tries_of_long_ago_go_but_not_those_of_who_tries_again(db: AsyncConnection) -> None:
    for _ in range(3):
        await tries(db, [LoginAttempt("ann", 3)])
    await tries(db, [LoginAttempt("bob", 3)])
    await set_clock(db, later(DAY - 10))
    await tries(db, [LoginAttempt("cid", 3)])
    assert await value(db, "select count(*) from login_attempt") == 3
    await set_clock(db, later(DAY + 10))
    assert await tries(db, [LoginAttempt("ann", 3)]) == 0
    assert await tries(db, [LoginAttempt("ann", 3)]) == 2, "four in a row, however long ago the first was"
    assert await value(db, "select array_agg(subject order by subject) from login_attempt") == ["ann", "cid"]


async def test_an_address_forgets_a_failure_a_minute_and_one_for_a_password_that_was_right(db: AsyncConnection) -> None:
    """Whoever has a password of their own must not be able to try those of all others from there."""
    there, elsewhere = LoginAttempt("from a", 10, is_fading=True), LoginAttempt("from b", 10, is_fading=True)
    counted = "select array_agg(failures order by subject) from login_attempt"
    await set_clock(db, T0)
    for _ in range(8):
        assert await tries(db, [there]) == 0
    await tries(db, [LoginAttempt("ann", 3), there])
    await tries(db, [LoginAttempt("bob", 3), elsewhere])
    assert await value(db, counted) == [1, 1, 9, 1]
    await forgive(db, [LoginAttempt("ann", 3), there])
    assert await value(db, counted) == [1, 8, 1], "of ann nothing is left, and of the address the others' failures"
    for _ in range(2):
        await forgive(db, [LoginAttempt("bob", 3), elsewhere])
    assert await value(db, counted) == [8, 0]
    await set_clock(db, later(59))
    await tries(db, [there])
    assert await value(db, counted) == [9, 0]
    await set_clock(db, later(59 + 60 * 3 + 30))
    await tries(db, [there, LoginAttempt("cid", 3)])
    assert await value(db, counted) == [1, 7, 0], "three minutes, and this try"
    await set_clock(db, later(60 * 60))
    await tries(db, [there, LoginAttempt("cid", 3)])
    assert await value(db, counted) == [2, 1, 0], "of a user nothing fades"
    await set_clock(db, later(0))
    await tries(db, [there, LoginAttempt("cid", 3)])
    assert await value(db, counted) == [3, 2, 0], "a clock that goes back neither forgets nor adds"


# Credentials --------------------------------------------------------------------------------------------------------------


async def test_a_new_credential_sweeps_what_ended_long_ago_of_the_same_account(db: AsyncConnection) -> None:
    ann, bob = await account(db, "ann"), await account(db, "bob")
    await credential(db, ann, "session", "session")
    await credential(db, ann, "link", "link")
    await credential(db, ann, "token")
    await credential(db, ann, "young", "session", DAY / 2)
    await credential(db, bob, "his", "session")
    await set_clock(db, later(DAY + 61))
    await credential(db, ann, "new")
    assert await value(db, "select array_agg(name order by credential_id) from credential") == [
        "token",
        "young",
        "his",
        "new",
    ]


async def test_a_link_works_once_in_time_for_an_account_that_may_come(db: AsyncConnection) -> None:
    ann, bob = await account(db, "ann"), await account(db, "bob")
    for secret, kind in (("token", "token"), ("one", "link"), ("two", "link")):
        await credential(db, ann, secret, kind)
    await credential(db, bob, "bob", "link")

    async def take(secret: str) -> str | None:
        taken = await accounts.take_link(db, secret_hash=secret.encode(), origin="here")
        return taken.name if taken else None

    assert await take("token") is None
    assert [await take("one") for _ in range(2)] == ["ann", None]
    assert await value(db, "select count(*) from credential where revoked_at is not null") == 1
    await db.execute("update account set is_disabled = true where name = 'bob'")
    assert await take("bob") is None
    await set_clock(db, later(60))
    assert await take("two") is None


async def test_use_is_noted_once_a_minute_for_the_one_that_was_used(db: AsyncConnection) -> None:
    ann = await account(db, "ann")
    used, _ = await credential(db, ann, "used", seconds=None), await credential(db, ann, "other")
    for seconds in (0, 60, 61):
        await set_clock(db, later(seconds))
        await accounts.note_use(db, credential_id=used, origin="here")
        assert await value(db, "select used_at from credential where name = 'used'") == later(61 if seconds > 60 else 0)
    assert await value(db, "select count(used_at) from credential") == 1


async def test_a_credential_is_revoked_once_and_by_who_has_it(db: AsyncConnection) -> None:
    ann, bob = await account(db, "ann"), await account(db, "bob")
    first, _ = await credential(db, ann, "first"), await credential(db, bob, "second")
    assert await accounts.revoke(db, credential_id=first, actor=Actor("test"), account="bob") is None
    assert await accounts.revoke(db, credential_id=first, actor=Actor("test"), account="ANN") == "ann"
    assert await accounts.revoke(db, credential_id=first, actor=Actor("test")) is None
    assert [await accounts.authenticate(db, secret) is None for secret in (b"first", b"second")] == [True, False]
    assert await value(db, "select count(*) from audit_log where action = 'revoke_token'") == 1
