"""Fault injection for tests: a process dies, or loses its connection, at a chosen statement.

Nothing is installed unless a failpoint is armed. `finish_and_claim:after:2@/tmp/marker` kills this process when the server
has committed the second call of that function and before the client knows; the marker limits that to one time, across
restarts. A statement that is not a call has the name of its file and its own: `logs.append`.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, Self

import psycopg
from psycopg import AsyncCursor

from evertick.db.statements import executed_name, known_names
from evertick.domain.errors import InvalidSettings

_FORM = re.compile(r"(?P<statement>\w+(?:\.\w+)?):(?P<fault>\w+)(?::(?P<number>\d+))?(?:@(?P<marker>.+))?")

Cursor = AsyncCursor[Any]

# Counted per process, not per connection: the process dies, whichever of its connections executes the statement.
_installed: list[type[Cursor]] = []


class Fault(StrEnum):
    """The fault: the process dies, or the connection is lost, before the statement is sent or after its commit."""

    BEFORE = "before"
    AFTER = "after"
    ERROR = "error"
    DROP_REPLY = "drop_reply"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failpoint:
    """The statement, the number of its execution, and the fault. With a marker file it happens once while that file exists."""

    statement: str
    fault: Fault
    number: int = 1
    marker: Path | None = None

    @property
    def is_after(self) -> bool:
        return self.fault in (Fault.AFTER, Fault.DROP_REPLY)

    def is_first(self) -> bool:
        if self.marker is None:
            return True
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        return True


def arm(text: str | None) -> None:
    """Install the failpoint for every connection that this process opens from now on. None installs nothing."""
    if text is not None:
        install(cursor_for(parse(text)))


def install(cursor: type[Cursor]) -> None:
    """Use this cursor class for every new connection of this process."""
    _installed[:] = [cursor]


def disarm() -> None:
    _installed.clear()


def cursor_class() -> type[Cursor] | None:
    """The cursor class that `connect` passes to psycopg: None, and so psycopg's own, unless a failpoint is armed."""
    return _installed[0] if _installed else None


def parse(text: str) -> Failpoint:
    found = _FORM.fullmatch(text)
    if found is None or found["fault"] not in list(Fault):
        raise InvalidSettings(
            f"The failpoint {text!r} is invalid: it must look like finish_and_claim:after:2@/path/marker, with one of"
            f" {', '.join(Fault)}."
        )
    known = known_names()
    if found["statement"] not in known:
        near = difflib.get_close_matches(found["statement"], known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise InvalidSettings(f"The failpoint {text!r} names a statement that does not exist.{hint}")
    return Failpoint(
        statement=found["statement"],
        fault=Fault(found["fault"]),
        number=int(found["number"] or 1),
        marker=Path(found["marker"]) if found["marker"] else None,
    )


def cursor_for(failpoint: Failpoint) -> type[Cursor]:
    executions = itertools.count(1)

    class FaultyCursor(Cursor):
        async def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
            is_named = executed_name(query) == failpoint.statement
            is_due = is_named and next(executions) == failpoint.number and failpoint.is_first()
            if is_due and not failpoint.is_after:
                await _fail(self, failpoint)
            await super().execute(query, params, **options)
            if is_due:
                await _fail(self, failpoint)
            return self

    return FaultyCursor


async def _fail(cursor: Cursor, failpoint: Failpoint) -> NoReturn:
    if failpoint.fault in (Fault.BEFORE, Fault.AFTER):
        os.kill(os.getpid(), signal.SIGKILL)
    await cursor.connection.close()
    raise psycopg.OperationalError(f"failpoint {failpoint.statement}:{failpoint.fault}: the connection is lost")
