"""The door remembers whom it let in, and forgets it before anybody could notice that it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest
from psycopg import AsyncConnection

from evertick.api.auth_cache import IDLE_SECONDS, KEPT_SECONDS, AuthCache
from evertick.db import connect
from evertick.db.connect import Purpose
from evertick.domain.access import Actor, Role
from evertick.domain.errors import PostgresUnavailable
from evertick.engine import accounts
from evertick.runtime.pool import Pool
from tests.engine.world import OWN_LOCKS
from tests.waiting import eventually

# Where nobody answers: who is known all the same is remembered.
NOWHERE = Pool("postgresql://nobody@127.0.0.1:1/nothing", Purpose.API_READ, 1)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def remembered(database: str, clock: Clock) -> AsyncIterator[AuthCache]:
    made = AuthCache(database, is_enabled=True, now=clock)
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


@pytest.fixture
async def readers(database: str) -> AsyncIterator[Pool]:
    pool = Pool(database, Purpose.API_READ, 2)
    yield pool
    for _, link in pool._idle:
        await link.close()


@pytest.fixture
async def secret(conn: AsyncConnection) -> str:
    await accounts.add_user(conn, name="ann", role=Role.EDITOR, tags=["finance"], actor=Actor("test"))
    return await token_for(conn, "ann")


async def token_for(conn: AsyncConnection, name: str, seconds: float | None = 600) -> str:
    row = await accounts.find_user(conn, name)
    return (await accounts.issue(conn, row, kind="token", name="t", actor=Actor("test"), seconds=seconds)).secret


async def is_kept(remembered: AuthCache, secret: str) -> bool:
    try:
        return await remembered.authenticate(NOWHERE, secret) is not None
    except PostgresUnavailable:
        return False


async def keep(remembered: AuthCache, readers: Pool, secret: str) -> None:
    async def is_remembered() -> bool:
        assert await remembered.authenticate(readers, secret) is not None
        return await is_kept(remembered, secret)

    await eventually(is_remembered)


async def revoke(conn: AsyncConnection, secret: str) -> None:
    found = await accounts.authenticate(conn, secret)
    assert found is not None and found.principal.credential_id is not None
    await accounts.revoke(conn, credential_id=found.principal.credential_id, actor=Actor("test"))


CHANGES: dict[str, Callable[[AsyncConnection, str], Awaitable[None]]] = {
    "revoked": revoke,
    "disabled": lambda conn, _: accounts.change_user(conn, name="ann", actor=Actor("test"), disabled=True),
    "another role": lambda conn, _: accounts.change_user(conn, name="ann", actor=Actor("test"), role=Role.VIEWER),
    "other tags": lambda conn, _: accounts.change_user(conn, name="ann", actor=Actor("test"), tags=["other"]),
    "another password": lambda conn, _: accounts.set_password(
        conn, name="ann", actor=Actor("test"), password="another long one"
    ),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_through_another_api_process_is_noticed(
    remembered: AuthCache, readers: Pool, conn: AsyncConnection, secret: str, change: str
) -> None:
    await keep(remembered, readers, secret)
    before = await remembered.authenticate(NOWHERE, secret)
    await CHANGES[change](conn, secret)

    async def is_forgotten() -> bool:
        return not await is_kept(remembered, secret)

    await eventually(is_forgotten)
    assert await remembered.authenticate(readers, secret) != before


async def test_that_somebody_came_is_no_change(conn: AsyncConnection, secret: str, database: str) -> None:
    """Or each use of a token would be told to every API process."""
    async with await connect.connect(database, purpose=Purpose.LISTEN) as other:
        await other.execute("listen evertick_access")
        found = await accounts.authenticate(conn, secret)
        assert found is not None and found.is_use_old
        await conn.execute("update credential set used_at = clock(), used_from = 'here'")
        await accounts.add_user(conn, name="bob", role=Role.VIEWER, actor=Actor("test"))
        await token_for(conn, "bob")
        await revoke(conn, secret)
        await conn.execute("select pg_notify('evertick_access', 'end')")
        told = []
        async for note in other.notifies(timeout=30.0):
            told.append(note.payload)
            if note.payload == "end":
                break
        assert told == ["", "end"]


async def test_what_this_process_changes_is_forgotten_at_once(
    remembered: AuthCache, readers: Pool, secret: str
) -> None:
    await keep(remembered, readers, secret)
    remembered.forget()
    assert not await is_kept(remembered, secret)


async def test_an_answer_that_a_change_overtook_is_not_kept(
    remembered: AuthCache, readers: Pool, conn: AsyncConnection, secret: str, database: str
) -> None:
    await keep(remembered, readers, secret)
    remembered.forget()
    async with await connect.connect(database, purpose=Purpose.SCHEDULER) as other:
        async with other.transaction():
            await other.execute("lock table account in access exclusive mode")
            asking = asyncio.create_task(remembered.authenticate(readers, secret))

            async def is_waiting() -> bool:
                cursor = await conn.execute(
                    f"select 1 from {OWN_LOCKS} where relation = 'account'::regclass and not granted"
                )
                return await cursor.fetchone() is not None

            await eventually(is_waiting)
            remembered.forget()
        assert await asking is not None
    assert not await is_kept(remembered, secret)


async def test_nothing_is_kept_longer_than_some_seconds_or_than_it_is_good(
    remembered: AuthCache, readers: Pool, conn: AsyncConnection, secret: str, clock: Clock
) -> None:
    short, endless = await token_for(conn, "ann", 3.0), await token_for(conn, "ann", None)
    for each in (secret, short, endless):
        await keep(remembered, readers, each)
    clock.now += 2.9
    assert await is_kept(remembered, secret) and await is_kept(remembered, endless)
    clock.now += 0.1
    assert not await is_kept(remembered, short)
    assert await is_kept(remembered, secret) and await is_kept(remembered, endless)
    clock.now += KEPT_SECONDS - 3.0
    assert not await is_kept(remembered, secret) and not await is_kept(remembered, endless)


async def test_nothing_is_kept_while_nobody_tells_of_changes(
    database: str, remembered: AuthCache, readers: Pool, conn: AsyncConnection, secret: str
) -> None:
    for deaf in (AuthCache(database, is_enabled=True), AuthCache(database, is_enabled=False)):
        assert await deaf.authenticate(readers, secret) is not None
        assert not await is_kept(deaf, secret)
    await keep(remembered, readers, secret)
    remembered._url = "postgresql://nobody@127.0.0.1:1/nothing"
    cut = await conn.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and application_name = 'evertick-listen' and pid <> pg_backend_pid()"
    )
    assert [row[0] for row in await cut.fetchall()] == [True]

    async def is_forgotten() -> bool:
        return not await is_kept(remembered, secret)

    await eventually(is_forgotten)
    assert await remembered.authenticate(readers, secret) is not None
    assert not await is_kept(remembered, secret)
    # And again, once it is told again.
    remembered._url = database
    await keep(remembered, readers, secret)


async def test_a_wrong_secret_is_asked_for_each_time(remembered: AuthCache, readers: Pool, secret: str) -> None:
    await keep(remembered, readers, secret)
    wrong = secret[:-1] + ("a" if secret[-1] != "a" else "b")
    assert await remembered.authenticate(readers, wrong) is None
    assert not await is_kept(remembered, wrong)


async def test_when_nobody_asks_no_connection_is_held(
    remembered: AuthCache,
    readers: Pool,
    conn: AsyncConnection,
    secret: str,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("evertick.db.notify.LOOK_UP_SECONDS", 0.05)
    await keep(remembered, readers, secret)
    clock.now += IDLE_SECONDS

    async def is_free() -> bool:
        cursor = await conn.execute(
            "select 1 from pg_stat_activity where datname = current_database() and application_name = 'evertick-listen'"
        )
        return await cursor.fetchone() is None

    await eventually(is_free)
    await keep(remembered, readers, secret)
