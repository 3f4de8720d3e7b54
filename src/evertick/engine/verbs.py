"""Shared by verbs: the fence that rejects a former leader, the errors that one row can cause, and hints for unknown names.

A leader's verb never guesses: a rejected epoch raises `NotLeader`, and nothing was changed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import psycopg
from psycopg import AsyncConnection

from evertick.db.statements import Declared, function_statement, retry_on_deadlock
from evertick.domain.errors import NotFound, NotLeader

NOT_LEADER = "EV001"
# Invalid values, violated constraints, rows that are too large, damaged pages, and errors raised by a trigger.
_POISON_CLASSES = ("22", "23", "54", "XX")
_RAISED = "P0001"

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def is_poison(code: str | None) -> bool:
    """Whether one row can cause this error. Mirrors the SQL function of that name; a test compares both."""
    return code is not None and (code[:2] in _POISON_CLASSES or code == _RAISED)


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """A similar name for the error about an unknown one, or else another hint."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {near[0]!r}?" if near else otherwise


def require(row: T | None, kind: str, name: object) -> T:
    """The row, or the error that there is none."""
    if row is None:
        raise unknown(kind, name)
    return row


def unknown(kind: str, name: object) -> NotFound:
    return NotFound(f"There is no {kind} {name}. List {kind}s with `evertick {kind}s list`.")


def leader_verb(declared: Declared[P, R]) -> Declared[P, R]:
    """Declares the stored function of that name, which a leader calls with its shard and its epoch: see `sql_function`."""
    statement = function_statement(declared)

    @wraps(declared)
    async def run(conn: AsyncConnection, *args: object, **given: object) -> Any:
        values = statement.bind(args, given)
        try:
            return await retry_on_deadlock(lambda: statement.run(conn, values))
        except psycopg.Error as error:
            if error.sqlstate == NOT_LEADER:
                shard, epoch = values["shard"], values["epoch"]
                raise NotLeader(f"epoch {epoch} of shard {shard} is over; nothing was changed") from error
            raise

    return cast(Declared[P, R], run)
