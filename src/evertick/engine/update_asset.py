"""update: an outside system reports that an asset was updated. Dependent DAGs treat it like a task's update."""

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
    """Catches typing errors: an asset must be updated by some DAG or be a dependency of one."""
    if not await assets.is_known(conn, asset):
        raise NotFound(
            f"No DAG updates asset {asset[:100]!r} or depends on it. List assets with `evertick assets list`."
        )


async def update_asset(conn: AsyncConnection, *, asset: str, extra: Mapping[str, object], actor: str) -> Told:
    """`extra` describes the update and is stored with it."""
    try:
        size = len(json.dumps(as_json(dict(extra))))
    except ValueError as error:
        raise UserError(f"The extra of the update of asset {asset!r}: {error}.") from None
    if size > MOST_PAYLOAD_BYTES:
        raise UserError(
            f"The extra of the update of asset {asset!r} takes {size:,} bytes; at most {MOST_PAYLOAD_BYTES:,} are"
            " allowed."
        )
    return await assets.update(conn, asset=asset, extra=extra, actor=actor)
