"""unhear: discards asset updates that were delivered to a DAG but have not started a run yet."""

from __future__ import annotations

from datetime import datetime

from psycopg import AsyncConnection

from evertick.domain.errors import NotFound
from evertick.store import assets
from evertick.store.db import retry_on_deadlock


async def unhear(
    conn: AsyncConnection, *, dag_ids: list[int] | None, asset: str | None, before: datetime | None, actor: str
) -> None:
    """For schedules of these DAGs; None for all."""
    count = await retry_on_deadlock(
        lambda: assets.unhear(conn, dag_ids=dag_ids, asset=asset, before=before, actor=actor)
    )
    if count == 0:
        raise NotFound("No delivered asset update is waiting for a run of these DAGs.")
