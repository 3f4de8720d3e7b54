"""State that tasks keep, and the results of their steps."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import AsyncConnection

from evertick.db.statements import query
from evertick.domain.state import MOST_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOwner:
    """Whose state it is: of a task in all runs, of a task in one run (`run_id` above 0), or of an asset (`dag_id` 0)."""

    dag_id: int
    owner: str
    run_id: int = 0
    map_index: int = -1


@dataclass(frozen=True, slots=True)
class StateEntry:
    """`changed_by`: the run or the user. `writer`: the task that changed the state of an asset."""

    key: str
    value: Any
    expires_at: datetime | None
    changed_at: datetime
    changed_by: str
    writer: dict[str, Any] | None


@query
async def entries(
    conn: AsyncConnection, of: StateOwner, *, key: str | None = None, after: str = "", limit: int = MOST_KEYS
) -> list[StateEntry]: ...
