"""declared: the variables, connections and secrets that a DAG's tasks and sinks name but that are not stored.

Used only for a warning: they may be set before the first run, or come from another backend.
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.dag import DagSpec
from evertick.domain.sinks import read_sink
from evertick.domain.stored_values import ValueKind
from evertick.store import secrets


async def not_stored(conn: AsyncConnection, spec: DagSpec) -> list[str]:
    """Each missing value once, with the object that names it and the command that sets it."""
    named: dict[tuple[str, str], str] = {}
    for notice in [*spec.notices, *(notice for task in spec.tasks for notice in task.notices)]:
        sink = read_sink(notice.sink)
        named |= {(ValueKind.SECRET, name): f"sink {sink.text}" for name in (sink.secret, sink.sign_with) if name}
    for task in spec.tasks:
        kinds = {
            ValueKind.SECRET: task.secrets,
            ValueKind.CONNECTION: task.connections,
            ValueKind.VARIABLE: task.variables,
        }
        named |= {(kind, name): f"task {task.name}" for kind, names in kinds.items() for name in names}
    if not named:
        return []
    stored = {(row.kind, row.name) for row in await secrets.find(conn, list(named))}
    return [
        f"{who} of {spec.name} needs {kind} {name!r}, which is not set: evertick {kind}s set {name}"
        for (kind, name), who in named.items()
        if (kind, name) not in stored
    ]
