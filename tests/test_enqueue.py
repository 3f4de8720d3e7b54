"""The client of the inbox: with each kind of connection the run exists exactly if the application's transaction commits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

from evertick.db import roles
from evertick.db.connect import Purpose, connect
from evertick.enqueue import enqueue, enqueue_async
from tests.engine.world import value

INSTANT = datetime(2030, 1, 2, 3, tzinfo=UTC)


@contextmanager
def of_psycopg(url: str) -> Iterator[Any]:
    with psycopg.connect(url) as conn:
        yield conn


@contextmanager
def of_sqlalchemy(url: str) -> Iterator[Any]:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(url))
    with engine.begin() as conn:
        yield conn
    engine.dispose()


@contextmanager
def of_a_session(url: str) -> Iterator[Any]:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(url))
    with import_module("sqlalchemy.orm").Session(engine) as session, session.begin():
        yield session
    engine.dispose()


@contextmanager
def of_django(url: str) -> Iterator[Any]:
    pytest.importorskip("django")
    given = conninfo.conninfo_to_dict(url)
    names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
    settings = {name: str(given.get(key) or "") for name, key in names.items()}
    django_settings = import_module("django.conf").settings
    if not django_settings.configured:
        django_settings.configure()
    defaults = {"ATOMIC_REQUESTS": False, "AUTOCOMMIT": True, "CONN_MAX_AGE": 0, "CONN_HEALTH_CHECKS": False}
    extra = {"OPTIONS": {}, "TIME_ZONE": None, "TEST": {}, "ENGINE": "django.db.backends.postgresql"}
    wrapper = import_module("django.db.backends.postgresql.base").DatabaseWrapper
    conn = wrapper({**defaults, **extra, **settings}, alias="default")
    conn.connect()
    conn.set_autocommit(False)
    try:
        yield conn
        conn.commit()
    except BaseException:
        conn.rollback()
        raise
    finally:
        conn.close()


def use(opened: Any, url: str) -> int:
    """As an application does, which is not async: Django insists on that."""
    made: AbstractContextManager[Any] = opened(url)
    with made as conn:
        enqueue(conn, "etl", {"rows": 5}, key="a", run_at=INSTANT, unique_for=timedelta(seconds=1.5))
        number = enqueue(conn, "etl")
    with pytest.raises(ZeroDivisionError), opened(url) as conn:
        enqueue(conn, "etl")
        raise ZeroDivisionError
    return number


@pytest.mark.parametrize("opened", [of_psycopg, of_sqlalchemy, of_a_session, of_django])
async def test_every_kind_of_connection(database: str, opened: Any) -> None:
    number = await asyncio.to_thread(use, opened, database)
    async with await connect(database, purpose=Purpose.SCHEDULER) as own:
        cursor = await own.execute("select dag, params, key, run_at, unique_for from inbox order by inbox_id")
        first, second = await cursor.fetchall()
        assert await value(own, "select max(inbox_id) from inbox") == number
    assert first == ("etl", {"rows": 5}, "a", INSTANT, timedelta(seconds=1.5))
    assert second == ("etl", {}, None, None, None)


async def test_an_application_may_only_enqueue(database: str) -> None:
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as conn:
        await roles.apply(conn)
        await conn.execute(f"set role {roles.ENQUEUE}")
        assert await enqueue_async(conn, "etl", {"rows": 1}) > 0
        for other in ("select * from evertick.inbox", "select evertick.clock()", "delete from evertick.run"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await conn.execute(other)  # type: ignore[arg-type]
        for role in roles.MAY:
            await conn.execute("reset role")
            await conn.execute(f"set role {role}")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await enqueue_async(conn, "etl")


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="no time zone"):
        enqueue(None, "etl", run_at=INSTANT.replace(tzinfo=None))
