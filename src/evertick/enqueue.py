"""Ask for runs from an application, in the transaction of its own data: the run exists exactly if the transaction commits.

Works with connections of psycopg and other DB-API drivers, SQLAlchemy and Django, and imports none of them. The database is
the one that Evertick uses; the application's user needs the role evertick_enqueue. Other languages call the same function:
`select evertick.enqueue('etl', '{"rows": 5}', key => 'order-17')`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from importlib import import_module
from typing import Any

from evertick.db.statements import sql

_CALL = sql("requests", "enqueue")
_SQLALCHEMY_CALL = re.sub(r"%\((\w+)\)s::(\w+)", r"cast(:\1 as \2)", _CALL)
_SQLALCHEMY_CALL = re.sub(r"%\((\w+)\)s", r":\1", _SQLALCHEMY_CALL)


def enqueue(
    connection: Any,
    dag: str,
    params: Mapping[str, object] | None = None,
    *,
    key: str | None = None,
    run_at: datetime | None = None,
    unique_for: timedelta | None = None,
) -> int:
    """Ask for a run when the open transaction of `connection` commits; returns the number of the request.

    `connection`: of psycopg 3 or 2, a `Connection` or `Session` of SQLAlchemy, or `django.db.connection`. `key`: the same key is
    the same run, for `unique_for` or for ever; `unique_for` without a key: the same params are. `run_at`: it begins then.
    """
    given = _values(dag, params, key, run_at, unique_for)
    if _is_of_sqlalchemy(connection):
        found = connection.execute(import_module("sqlalchemy").text(_SQLALCHEMY_CALL), given)
        return int(found.scalar_one())
    with connection.cursor() as cursor:
        cursor.execute(_CALL, given)
        return int(cursor.fetchone()[0])


async def enqueue_async(
    connection: Any,
    dag: str,
    params: Mapping[str, object] | None = None,
    *,
    key: str | None = None,
    run_at: datetime | None = None,
    unique_for: timedelta | None = None,
) -> int:
    """The same with an `AsyncConnection` of psycopg, or an `AsyncConnection` or `AsyncSession` of SQLAlchemy."""
    given = _values(dag, params, key, run_at, unique_for)
    if _is_of_sqlalchemy(connection):
        found = await connection.execute(import_module("sqlalchemy").text(_SQLALCHEMY_CALL), given)
        return int(found.scalar_one())
    async with connection.cursor() as cursor:
        await cursor.execute(_CALL, given)
        return int((await cursor.fetchone())[0])


def _is_of_sqlalchemy(connection: object) -> bool:
    return any(each.__module__.partition(".")[0] == "sqlalchemy" for each in type(connection).__mro__)


def _values(
    dag: str,
    params: Mapping[str, object] | None,
    key: str | None,
    run_at: datetime | None,
    unique_for: timedelta | None,
) -> dict[str, object]:
    if run_at is not None and run_at.tzinfo is None:
        raise ValueError(f"run_at {run_at} has no time zone: the database would take that of its session. Give one.")
    # As texts, because drivers bind instants and lengths differently.
    return {
        "dag": dag,
        "params": json.dumps(dict(params or {}), allow_nan=False),
        "key": key,
        "run_at": None if run_at is None else run_at.isoformat(),
        "unique_for": None if unique_for is None else f"{unique_for.total_seconds():.6f} seconds",
    }
