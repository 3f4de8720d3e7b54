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
from typing import LiteralString

from psycopg import AsyncConnection
from psycopg.sql import SQL, Identifier

from evertick.db.statements import FUNCTIONS_DIRECTORY, function_files, query

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
        return schema_of(self.hash)

    @property
    def search_path(self) -> str:
        """What every connection of this release has: its functions first, then the tables that all releases share."""
        return f"{self.schema},{TABLES_SCHEMA}"

    @property
    def label(self) -> str:
        return f"functions_{self.hash}"


@cache
def own_set(directory: Path = FUNCTIONS_DIRECTORY) -> FunctionSet:
    """The set of this program."""
    files = function_files(directory)
    if not files:
        raise LookupError(f"There are no function files in {directory}: reinstall Evertick.")
    text = "\0".join(f"{name}\0{script}" for name, script in files.items())
    return FunctionSet(hash=hashlib.sha256(text.encode()).hexdigest()[:12], scripts=tuple(files.values()))


def schema_of(set_hash: str) -> str:
    return f"evertick_fn_{set_hash}"


def lock_key(set_hash: str) -> int:
    """The advisory lock that every connection shares while it may call this set, and that dropping the set takes alone."""
    return _LOCK_SPACE | int(set_hash, 16)


@query
async def is_installed(conn: AsyncConnection, *, hash: str, schema: str) -> bool:
    """Only asked of a database that has the tables."""


@query
async def record(conn: AsyncConnection, *, hash: str, release: str) -> None: ...


@query
async def forget(conn: AsyncConnection, *, hash: str) -> None: ...


@query
async def superseded(conn: AsyncConnection, *, hash: str) -> list[str]:
    """The sets that are neither ours nor one of the two newest."""


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
    await forget(conn, hash=functions.hash)
    await record(conn, hash=functions.hash, release=version("evertick"))
