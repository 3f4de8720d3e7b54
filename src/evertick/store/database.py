"""A database as a whole: whether it answers, whether it exists, creating it. Knows nothing of its content."""

from __future__ import annotations

import asyncio

import psycopg
from psycopg import AsyncConnection, conninfo, errors
from psycopg.sql import SQL, Identifier

# A running server answers within milliseconds; one that hangs must not block the process that monitors it.
_PATIENCE_SECONDS = 5.0


async def answers(url: str) -> bool:
    """Whether the server answers a query. A process or a socket that merely exists does not count."""
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            async with await AsyncConnection.connect(url, autocommit=True, connect_timeout=2) as conn:
                await conn.execute("select 1")
    except (psycopg.Error, OSError):
        return False
    return True


async def create_database(url: str) -> None:
    """Create the database that `url` names, unless it exists."""
    name = str(conninfo.conninfo_to_dict(url)["dbname"])
    async with await AsyncConnection.connect(conninfo.make_conninfo(url, dbname="postgres"), autocommit=True) as conn:
        found = await conn.execute("select from pg_database where datname = %s", [name])
        if found.rowcount:
            return
        try:
            await conn.execute(SQL("create database {}").format(Identifier(name)))
        except (errors.DuplicateDatabase, errors.UniqueViolation):
            # Another process created it between the query and the command.
            return
