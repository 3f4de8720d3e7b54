"""What is left out of an answer about a DAG that the caller may know of: other DAGs, whose names stand in it by the way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from psycopg import AsyncConnection

from evertick.api.desk import Caller
from evertick.domain.errors import Forbidden
from evertick.domain.why import Explained, Reason, dags_named, told_to
from evertick.execution.version_diff import code_changes
from evertick.store import dags
from evertick.store.dags import ListedVersion

WITHHELD = "This code also has DAGs that you may not know of, so it is not shown: DAGs of others belong in other files."


async def known_dags(caller: Caller, conn: AsyncConnection, names: Collection[str]) -> set[str]:
    """Which of these the caller may know of; deleted ones, too, because their history stays."""
    if caller.principal.tags is None:
        return set(names)
    rows = [await dags.find(conn, name) for name in sorted(names)]
    return {row.name for row in rows if row is not None and caller.sees(row)}


async def told_reasons(caller: Caller, conn: AsyncConnection, reasons: Sequence[Reason]) -> Sequence[Reason]:
    """Why a task does not run, without the tasks of other DAGs that have what it needs."""
    known = await known_dags(caller, conn, dags_named(reasons))
    return [told_to(each, known) for each in reasons]


async def discreetly(caller: Caller, conn: AsyncConnection, found: Explained) -> Explained:
    """The same for it and all that it waits for."""
    upstream = await discreetly(caller, conn, found.upstream) if found.upstream else None
    return replace(found, reasons=await told_reasons(caller, conn, found.reasons), upstream=upstream)


async def may_read_code(caller: Caller, conn: AsyncConnection, *hashes: str) -> bool:
    """A file may define several DAGs: its code is for those who may know of all of them."""
    if caller.principal.tags is None:
        return True
    names = await dags.of_bundles(conn, hashes)
    return await known_dags(caller, conn, names) == set(names)


async def refuse_unless_code_is_theirs(caller: Caller, conn: AsyncConnection, bundle_hash: str) -> None:
    if not await may_read_code(caller, conn, bundle_hash):
        raise Forbidden(WITHHELD)


async def told_code_changes(caller: Caller, conn: AsyncConnection, old: ListedVersion, new: ListedVersion) -> list[str]:
    """What changed in the code, or that it is not told."""
    if not await may_read_code(caller, conn, old.bundle_hash, new.bundle_hash):
        return [WITHHELD] if old.bundle_hash != new.bundle_hash else []
    return await code_changes(conn, old, new)
