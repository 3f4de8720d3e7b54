"""update: somebody outside tells that an asset was updated. DAGs that run after it hear of it as of a task's update."""

from __future__ import annotations

import json
from collections.abc import Mapping

from psycopg import AsyncConnection

from evertick.domain.errors import NotFound, UserError
from evertick.domain.params import as_json
from evertick.domain.waiting import MOST_PAYLOAD_BYTES
from evertick.store import assets
from evertick.store.assets import Told


async def find_asset(conn: AsyncConnection, asset: str) -> None:
    """For people, who mistype: an asset is what some DAG updates or waits for."""
    if not await assets.is_known(conn, asset):
        raise NotFound(
            f"No DAG updates asset {asset[:100]!r} or waits for it. `evertick assets list` shows what there is."
        )


async def update_asset(conn: AsyncConnection, *, asset: str, extra: Mapping[str, object], actor: str) -> Told:
    """`extra` is what they say about it; it stays on record with the update."""
    try:
        size = len(json.dumps(as_json(dict(extra))))
    except ValueError as error:
        raise UserError(f"What is said about the update of asset {asset!r}: {error}.") from None
    if size > MOST_PAYLOAD_BYTES:
        raise UserError(
            f"What is said about the update of asset {asset!r} takes {size:,} bytes; at most {MOST_PAYLOAD_BYTES:,} are"
            " allowed."
        )
    return await assets.update(conn, asset=asset, extra=extra, actor=actor)
