"""`evertick schedules history|skips`: who changed a schedule, and which fires got no run."""

from __future__ import annotations

from typing import Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli import far_schedules
from evertick.cli.connection import ask
from evertick.cli.documents import document, print_json
from evertick.cli.options import DagName, Json, Limit, ScheduleName
from evertick.cli.tables import Cell, hint, show, table
from evertick.cli.times import clock
from evertick.db.queries import schedules
from evertick.db.queries.schedules import ScheduleVersion, Skip
from evertick.domain.errors import NotFound
from evertick.engine.fire_schedules import JsonObject, in_words
from evertick.engine.runs import find_dag_row

_RULES = ("misfire", "window_seconds", "catchup_limit", "overlap", "start_within", "finish_within", "params")
_REASONS = {
    "misfire_latest": "missed; only the latest ran",
    "misfire_skip": "missed; the policy is skip",
    "outside_window": "missed for longer than the catch-up window",
    "over_limit": "missed; more than the catch-up limit",
    "paused": "paused",
    "set_aside": "could not be planned",
    "past_when_published": "over before the schedule was known",
    "overlap_skip": "the run before was still open",
    "overlap_queue_one": "one run was waiting already",
    "overlap_cancel": "a later fire was due as well",
}

DagFilter = Annotated[str | None, typer.Argument(metavar="[DAG]", help="Only this DAG's.")]
NameFilter = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this schedule's.")]


def history(dag: DagName, name: ScheduleName, limit: Limit = 50, as_json: Json = False) -> None:
    """Every version of a schedule: who changed what, and when. Also of one that was deleted."""

    async def read(conn: AsyncConnection) -> list[ScheduleVersion]:
        await find_dag_row(conn, dag)
        return await schedules.history(conn, dag=dag, name=name, limit=limit)

    found, _ = ask(read, far=lambda server: far_schedules.history(server, dag, name, limit))
    if not found:
        raise NotFound(f"DAG {dag!r} never had a schedule {name!r}. `evertick schedules list {dag}` shows what it has.")
    if as_json:
        print_json({"dag": dag, "name": name, "versions": [document(each) for each in found]})
        return
    rows: list[list[Cell]] = []
    for place, each in enumerate(found):
        before = found[place + 1].settings if place + 1 < len(found) else {}
        words = in_words(_object(each.settings["spec"]))
        rows.append([each.version, clock(each.changed_at), each.changed_by, each.change, words, _changed(each, before)])
    show(table(("#VERSION", "CHANGED", "BY", "CHANGE", "WHEN", "ALSO CHANGED"), rows))


def skips(dag: DagFilter = None, name: NameFilter = None, limit: Limit = 50, as_json: Json = False) -> None:
    """Fires that got no run: each range with its first and last instant, how many they are, and why. Latest first."""

    async def read(conn: AsyncConnection) -> list[Skip]:
        if dag is not None:
            await find_dag_row(conn, dag)
        return await schedules.skips(conn, dag=dag, name=name, limit=limit)

    found, _ = ask(read, far=lambda server: far_schedules.skips(server, dag, name, limit))
    if as_json:
        print_json({"skips": [document(each) for each in found]})
        return
    if not found:
        show(hint("No fire was skipped."))
        return
    rows: list[list[Cell]] = [
        [
            each.dag,
            each.name,
            clock(each.first_at),
            clock(each.last_at),
            each.count,
            _REASONS.get(each.reason, each.reason),
        ]
        for each in found
    ]
    show(table(("DAG", "NAME", "FIRST", "LAST", "#COUNT", "WHY"), rows))


def _changed(version: ScheduleVersion, before: JsonObject) -> str | None:
    """The rules that differ from the version before."""
    found = [
        f"{name}={version.settings.get(name)}"
        for name in _RULES
        if before and version.settings.get(name) != before.get(name)
    ]
    return ", ".join(found) or None


def _object(raw: object) -> JsonObject:
    return raw if isinstance(raw, dict) else {}
