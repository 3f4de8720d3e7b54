"""Refuses cycles of DAGs that start each other endlessly, when a DAG is published or its dependencies change.

Checks the currently published DAGs. Two changes that close a cycle at the same moment both pass; the next publish fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from psycopg import AsyncConnection

from evertick.domain.after import Condition, Source, find_loop, read_text
from evertick.domain.dag import NamedSchedule
from evertick.domain.errors import EndlessLoop, InvalidSchedule
from evertick.domain.schedule import ScheduleKind
from evertick.store import schedules
from evertick.store.schedules import Wait


async def refuse_loops(
    conn: AsyncConnection,
    *,
    dag: str,
    wanted: Sequence[NamedSchedule],
    outlets: Collection[str],
    stays: Callable[[Wait], bool],
) -> None:
    """`wanted`: the schedules that the DAG is about to have, in addition to current ones that stay."""
    new = [each for each in wanted if each.spec.kind is ScheduleKind.AFTER]
    if not new:
        return
    waits: dict[str, list[Condition | Source]] = {}
    kept = [each for each in await schedules.waits(conn) if each.dag != dag or stays(each)]
    own = {each.name for each in kept if each.dag == dag}
    for name, text in [
        *((each.dag, each.condition) for each in kept),
        *((dag, each.spec.after or "") for each in new if each.name not in own),
    ]:
        try:
            waits.setdefault(name, []).append(read_text(text))
        except InvalidSchedule:
            continue  # it never fires
    updated: dict[str, set[str]] = {}
    for outlet in await schedules.outlets(conn, dags=waits):
        updated.setdefault(outlet.dag, set()).add(outlet.asset)
    updated[dag] = set(outlets)
    if way := find_loop(dag, waits, updated):
        raise EndlessLoop(
            f"DAG {dag!r} would start itself again endlessly: {' → '.join(way)}. Give one of them a time instead of"
            " after(...), or let it also wait for something that none of them causes."
        )
