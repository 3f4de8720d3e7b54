"""The commit of a task's own transaction together with the task's end, on a connection that the task opened.

On Evertick's own database the attempt ends in that transaction. On another one a row of `evertick_fence` there says that the
effects of the task exist. Works with any driver of the DB-API for PostgreSQL, and imports none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evertick.db.statements import sql
from evertick.domain.errors import LeaseLost, UserError

TAKEN_AWAY, _NO_TABLE = "EV007", "42P01"
# For the tables of other databases, which no migration of ours creates.
FENCE_TABLE = (
    "create table evertick_fence (id text primary key, result text, committed_at timestamptz not null default now())"
)
_MARK = "insert into evertick_fence (id, result) values (%(id)s, %(result)s) on conflict (id) do nothing"
_MARKED = "select result from evertick_fence where id = %(id)s"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingAttempt:
    """`mark`: names the task on another database, the same for all attempts until the task is cleared."""

    session: int
    run_id: int
    idx: int
    map_index: int
    epoch: int
    mark: str


def commit(conn: Any, attempt: EndingAttempt, place: Mapping[str, str], result: str) -> str:
    """Commit the transaction of `conn`, or roll it back and raise LeaseLost. The result of the task, as JSON: on another
    database, that of the attempt that committed first."""
    if not all(callable(getattr(conn, name, None)) for name in ("cursor", "commit", "rollback")):
        raise UserError(f"context.commit() takes a DB-API connection to PostgreSQL, not {type(conn).__name__}.")
    try:
        with conn.cursor() as cursor:
            cursor.execute(sql("state", "server_name"))
            if cursor.fetchone()[0] == place["server"]:
                cursor.execute(sql("state", "set_path"), {"path": place["path"]})
                values = {name: getattr(attempt, name) for name in ("session", "run_id", "idx", "map_index", "epoch")}
                cursor.execute(sql("state", "commit_attempt"), {**values, "result": result})
            else:
                result = _mark(cursor, attempt.mark, result)
        conn.commit()
    except _Committed as before:
        conn.rollback()
        return before.result
    except BaseException as error:
        conn.rollback()
        code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if code == TAKEN_AWAY:
            raise LeaseLost(
                "This attempt was taken away or is asked to stop: its transaction was rolled back."
            ) from None
        if code == _NO_TABLE and "evertick_fence" in str(error):
            raise UserError(f"The database has no table for commits of tasks. Create it: {FENCE_TABLE}") from None
        raise
    return result


class _Committed(Exception):
    """An earlier attempt has committed; this one waited for it, if it was about to."""

    def __init__(self, result: str) -> None:
        super().__init__()
        self.result = result


def _mark(cursor: Any, mark: str, result: str) -> str:
    cursor.execute(_MARK, {"id": mark, "result": result})
    if cursor.rowcount:
        return result
    cursor.execute(_MARKED, {"id": mark})
    raise _Committed(json.dumps(None) if (row := cursor.fetchone()) is None else row[0])
