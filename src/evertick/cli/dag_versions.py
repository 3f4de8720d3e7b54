"""`evertick dags versions`, `diff` and `rollback`: what changed in a DAG, and back to how it was."""

from __future__ import annotations

from typing import Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli import far_plans
from evertick.cli.connection import actor, ask, change
from evertick.cli.documents import document, print_json
from evertick.cli.options import DagName, Json, Limit, Yes
from evertick.cli.prompt import confirm
from evertick.cli.tables import Cell, heading, hint, line, show, state, table
from evertick.config import read_settings
from evertick.db.notify import Channel
from evertick.db.queries import dags
from evertick.db.queries.dags import ListedVersion
from evertick.domain.durations import relative
from evertick.engine.publish import RolledBack, find_version, roll_back
from evertick.engine.runs import find_dag_row
from evertick.operations.version_diff import code_changes, plan_changes
from evertick.publisher.publisher import DEPLOYED
from evertick.publisher.routing_file import load_routing

_MOST_LINES = 2000

Number = Annotated[
    int | None, typer.Argument(metavar="VERSION", min=1, help="A version's number; the one before if left out.")
]
Other = Annotated[
    int | None, typer.Argument(metavar="OTHER", min=1, help="Compared with this one; the current if left out.")
]


def list_versions(dag: DagName, limit: Limit = 20, as_json: Json = False) -> None:
    """List a DAG's versions, the newest first: when each was published, and which one new runs take."""

    async def read(conn: AsyncConnection) -> list[ListedVersion]:
        row = await find_dag_row(conn, dag)
        return await dags.versions(conn, dag_id=row.dag_id, limit=limit)

    found, now = ask(read, far=lambda server: far_plans.list_versions(server, dag, limit))
    if as_json:
        print_json({"dag": dag, "versions": [document(each, without=("version_id",)) for each in found]})
        return
    rows: list[list[Cell]] = [
        [
            each.number,
            state("success", "current") if each.is_current else None,
            relative(each.created_at, now),
            each.task_count,
            each.hash[:12],
            each.bundle_hash[:12],
        ]
        for each in found
    ]
    show(table(("#VERSION", "", "PUBLISHED", "#TASKS", "PLAN", "CODE"), rows))
    show(hint(f"See what changed with: evertick dags diff {dag}"))


def diff_versions(dag: DagName, number: Number = None, other: Other = None, as_json: Json = False) -> None:
    """Show what changed from one version to another, in the plan and in the code. Without numbers: the last change."""

    async def read(conn: AsyncConnection) -> tuple[ListedVersion, ListedVersion, list[str], list[str]]:
        row = await find_dag_row(conn, dag)
        old = await find_version(conn, dag, number)
        new = await find_version(conn, dag, other if other is not None else row.number)
        return old, new, await plan_changes(conn, old, new), await code_changes(conn, old, new)

    (old, new, plan, code), _ = ask(read, far=lambda server: far_plans.diff(server, dag, number, other))
    if as_json:
        print_json({"dag": dag, "from": old.number, "to": new.number, "plan": plan, "code": code})
        return
    show(line(f"{dag}: version {old.number} to {new.number}", "bold"))
    if not plan and not code:
        show(hint("They are the same."))
    for title, lines in (("Plan", plan), ("Code", code)):
        if lines:
            show(heading(title))
            for each in lines[:_MOST_LINES]:
                typer.echo(each)
            if len(lines) > _MOST_LINES:
                show(hint(f"and {len(lines) - _MOST_LINES:,} lines more"))


def roll_back_dag(dag: DagName, number: Number = None, yes: Yes = False) -> None:
    """Make an earlier version the current one again: plan, code and schedules. Open runs keep theirs."""
    # The older side of a comparison with the current one is what it goes back to.
    wanted, _ = ask(
        lambda conn: find_version(conn, dag, number),
        far=lambda server: far_plans.diff(server, dag, number, None)[0],
    )
    confirm(f"Roll {dag} back to version {wanted.number}?", yes=yes)

    async def work(conn: AsyncConnection) -> RolledBack:
        routing = load_routing(read_settings().routing_file)
        return await roll_back(conn, dag=dag, number=wanted.number, actor=actor(), routing=routing)

    done = change(work, Channel.PLAN, Channel.READY, far=lambda server: far_plans.roll_back(server, dag, wanted.number))
    show(line(f"{dag} is at version {done.now}; it was at {done.before}."))
    if not done.file.startswith(DEPLOYED):
        show(
            hint(
                f"It comes from {done.file} in a watched folder: roll that back, too, or its next change is published."
            )
        )
