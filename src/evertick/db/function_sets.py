"""The stored functions and views of this release: a schema of their own, named by the hash of their files.

Releases call their own set each, so two of them work side by side. Must never change a set that is installed, nor drop one
that a connection uses. Why: docs/decisions/0036-function-sets.md.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import LiteralString, cast

from psycopg import AsyncConnection
from psycopg.sql import SQL, Identifier

from evertick.db.statements import all_rows, one_value, sql

FUNCTIONS_DIRECTORY = Path(__file__).with_name("functions")
TABLES_SCHEMA = "evertick"

# The high bits of the advisory lock of a set: any number would do, as long as it never changes.
_LOCK_SPACE = 0x4556 << 48


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSet:
    """All function files of one release, in load order."""

    hash: str
    scripts: tuple[LiteralString, ...]

    @property
    def schema(self) -> str:
        return f"evertick_fn_{self.hash}"

    @property
    def search_path(self) -> str:
        """What every connection of this release has: its functions first, then the tables that all releases share."""
        return f"{self.schema},{TABLES_SCHEMA}"

    @property
    def label(self) -> str:
        return f"functions_{self.hash}"


@dataclass(frozen=True, slots=True)
class _Superseded:
    """A set that is neither ours nor one of the two newest."""

    hash: str


@cache
def own_set(directory: Path = FUNCTIONS_DIRECTORY) -> FunctionSet:
    """The set of this program. Read once: a process keeps the functions that it started with."""
    paths = sorted(directory.glob("*.sql"))
    if not paths:
        raise LookupError(f"There are no function files in {directory}: reinstall Evertick.")
    scripts = tuple(path.read_text(encoding="utf-8") for path in paths)
    text = "\0".join(f"{path.name}\0{script}" for path, script in zip(paths, scripts, strict=True))
    return FunctionSet(hash=hashlib.sha256(text.encode()).hexdigest()[:12], scripts=scripts)


def lock_key(set_hash: str) -> int:
    """The advisory lock that every connection shares while it may call this set, and that dropping the set takes alone."""
    return _LOCK_SPACE | int(set_hash, 16)


async def is_installed(conn: AsyncConnection, functions: FunctionSet) -> bool:
    """Only asked of a database that has the tables."""
    params = {"hash": functions.hash, "schema": functions.schema}
    return cast(bool, await one_value(conn, sql("function_sets", "is_installed"), params))


async def install(conn: AsyncConnection, functions: FunctionSet) -> None:
    """Create the schema with everything in it, in the transaction of the caller. Nothing that runs waits for it."""
    await conn.execute(SQL("create schema {}").format(Identifier(functions.schema)))
    await conn.execute(
        SQL("set local search_path = {}, {}").format(Identifier(functions.schema), Identifier(TABLES_SCHEMA))
    )
    # A function may call one of a later file; a test loads the set with the check on.
    await conn.execute("set local check_function_bodies = off")
    for script in functions.scripts:
        await conn.execute(script, prepare=False)
    # A partial restore may have left the row.
    await conn.execute(sql("function_sets", "forget"), {"hash": functions.hash})
    params = {"hash": functions.hash, "release": version("evertick")}
    await conn.execute(sql("function_sets", "record"), params)


async def drop_superseded(conn: AsyncConnection, own: FunctionSet) -> list[str]:
    """Drop the sets of earlier releases that no connection uses, in the transaction of the caller; their hashes."""
    dropped = []
    for each in await all_rows(conn, sql("function_sets", "superseded"), {"hash": own.hash}, _Superseded):
        if not await one_value(conn, sql("migration", "lock"), {"key": lock_key(each.hash)}):
            continue
        await conn.execute(SQL("drop schema if exists {} cascade").format(Identifier(f"evertick_fn_{each.hash}")))
        await conn.execute(sql("function_sets", "forget"), {"hash": each.hash})
        dropped.append(each.hash)
    return dropped
