"""Gates: pools, keys and limits, their holders and their waiters."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.statements import query, sql_function
from evertick.domain.attempt import TaskKey
from evertick.domain.explain import Blocked, Reason


@dataclass(frozen=True, slots=True)
class Gate:
    """A pool, a key or a limit. `version`: of an ordered key, the smallest that is open. `period`: of a rate, in seconds.
    `revision` changes with every size of a pool."""

    gate_id: int
    kind: str
    name: str
    slots: int
    used: int
    holders: int
    waiters: int
    version: int | None
    period: float | None
    revision: str


@dataclass(frozen=True, slots=True)
class GateTask:
    """A task that holds slots of a gate, or waits for them."""

    run_id: int
    task_index: int
    map_index: int
    dag: str
    task: str
    state: str
    weight: int
    since: datetime


@dataclass(frozen=True, slots=True)
class OutsidePools:
    running: int
    queued: int


@query
async def list_gates(conn: AsyncConnection, *, kinds: list[str], limit: int = 10000) -> list[Gate]: ...


@query
async def holders(conn: AsyncConnection, gate_id: int, *, limit: int = 1000) -> list[GateTask]: ...


@query
async def waiters(conn: AsyncConnection, gate_id: int, *, limit: int = 1000) -> list[GateTask]: ...


@query
async def outside_pools(conn: AsyncConnection, *, cap: int = 10000) -> OutsidePools: ...


@query
async def blocked(conn: AsyncConnection, *, limit: int) -> list[Blocked]:
    """The blockers of the most work now."""


@query
async def describe_pool(conn: AsyncConnection, *, name: str, description: str) -> None: ...


@query
async def pool_descriptions(conn: AsyncConnection, names: list[str]) -> dict[str, str]: ...


@sql_function(retries=False)
async def explain_task(conn: AsyncConnection, key: TaskKey) -> list[Reason]:
    """Why a task is not running, the most binding reason first."""
