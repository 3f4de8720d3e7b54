"""unhear: updates of assets that a DAG has heard of, and not yet run for, count no more."""

from __future__ import annotations

from datetime import datetime

from psycopg import AsyncConnection

from evertick.domain.errors import NotFound
from evertick.store import assets
from evertick.store.db import retry_on_deadlock


async def unhear(
    conn: AsyncConnection, *, dag_ids: list[int] | None, asset: str | None, before: datetime | None, actor: str
) -> None:
    """Of schedules of these DAGs; None for all."""
    count = await retry_on_deadlock(
        lambda: assets.unhear(conn, dag_ids=dag_ids, asset=asset, before=before, actor=actor)
    )
    if count == 0:
        raise NotFound("There are no such updates that a DAG has heard of and not yet run for.")
