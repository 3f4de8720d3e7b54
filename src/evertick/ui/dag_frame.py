"""The shared parts of all views of one DAG: header, buttons and tabs. Each view is a page below /dags/NAME."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection

from evertick.api.desk import Caller
from evertick.api.native.dags import spec_of
from evertick.domain.access import Permission
from evertick.domain.dag import DagSpec
from evertick.domain.errors import InvalidDag
from evertick.store import catalogue
from evertick.store.dags import DagRow
from evertick.ui.frame import segment
from evertick.ui.words import schedule_words

# Key, label and path below the DAG's address of each view, in display order.
TABS = (
    ("grid", "Grid", ""),
    ("graph", "Graph", "/graph"),
    ("calendar", "Calendar", "/calendar"),
    ("durations", "Durations", "/durations"),
    ("schedules", "Schedules", "/schedules"),
    ("versions", "Versions", "/versions"),
    ("code", "Code", "/code"),
    ("details", "Details", "/details"),
)


class DagView:
    """A DAG that the caller may see. `spec` is None if the published document cannot be read."""

    def __init__(self, row: DagRow, spec: DagSpec | None, head: dict[str, Any]) -> None:
        self.row, self.spec, self._head = row, spec, head

    def values(self, tab: str) -> dict[str, Any]:
        """The template values of dag_base.html for one view."""
        path = f"/dags/{segment(self.row.name)}"
        tabs = [(key, label, path + rest) for key, label, rest in TABS]
        return {**self._head, "here": "dags", "dag": self.row, "spec": self.spec, "tabs": tabs, "tab": tab}


async def dag_view(caller: Caller, conn: AsyncConnection, name: str) -> DagView:
    row = await caller.dag(conn, name)
    (fire, *_) = [*await catalogue.next_fires(conn, dag_ids=[row.dag_id]), None]
    try:
        spec = spec_of(row)
    except InvalidDag:
        spec = None
    head = {
        "dag_path": f"/dags/{segment(row.name)}",
        "next_fire": fire,
        "next_words": schedule_words(fire.spec) if fire else None,
        "may_trigger": caller.principal.may(Permission.TRIGGER_RUNS),
        "may_pause": caller.principal.may(Permission.PAUSE_DAGS),
    }
    return DagView(row, spec, head)
