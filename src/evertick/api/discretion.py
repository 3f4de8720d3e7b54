"""Hides DAGs that the caller may not see in responses about DAGs that the caller may see."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from psycopg import AsyncConnection

from evertick.api.context import Caller
from evertick.db.queries import dags
from evertick.db.queries.dags import ListedVersion
from evertick.domain.errors import Forbidden
from evertick.domain.explain import Explained, Reason, dags_named, visible_to
from evertick.operations.version_diff import code_changes

WITHHELD = "This code is hidden because its files also define DAGs that you may not see. Put them into separate files."


async def known_dags(caller: Caller, conn: AsyncConnection, names: Collection[str]) -> set[str]:
    """The DAGs among `names` that the caller may see, including deleted ones, whose history remains."""
    if caller.principal.tags is None:
        return set(names)
    rows = [await dags.find(conn, name) for name in sorted(names)]
    return {row.name for row in rows if row is not None and caller.sees(row)}


async def visible_reasons(caller: Caller, conn: AsyncConnection, reasons: Sequence[Reason]) -> Sequence[Reason]:
    """The reasons why a task waits, without holders in DAGs that the caller may not see."""
    known = await known_dags(caller, conn, dags_named(reasons))
    return [visible_to(each, known) for each in reasons]


async def redact(caller: Caller, conn: AsyncConnection, found: Explained) -> Explained:
    """Apply `told_reasons` to a task and to the chain of tasks that it waits for."""
    upstream = await redact(caller, conn, found.upstream) if found.upstream else None
    return replace(found, reasons=await visible_reasons(caller, conn, found.reasons), upstream=upstream)


async def may_read_code(caller: Caller, conn: AsyncConnection, *hashes: str) -> bool:
    """Whether the caller may see all DAGs that the code defines; a file may define several."""
    if caller.principal.tags is None:
        return True
    names = await dags.of_bundles(conn, hashes)
    return await known_dags(caller, conn, names) == set(names)


async def refuse_unless_code_is_theirs(caller: Caller, conn: AsyncConnection, bundle_hash: str) -> None:
    if not await may_read_code(caller, conn, bundle_hash):
        raise Forbidden(WITHHELD)


async def visible_code_changes(
    caller: Caller, conn: AsyncConnection, old: ListedVersion, new: ListedVersion
) -> list[str]:
    """The code changes between two versions, or a note that the code is hidden."""
    if not await may_read_code(caller, conn, old.bundle_hash, new.bundle_hash):
        return [WITHHELD] if old.bundle_hash != new.bundle_hash else []
    return await code_changes(conn, old, new)
