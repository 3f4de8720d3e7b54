"""`evertick alerts`: schedules that did not fire, and runs or tasks that did not start or finish, in time."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli import far_troubles
from evertick.cli.connection import ask
from evertick.cli.documents import document, print_json
from evertick.cli.options import Json, Limit
from evertick.cli.tables import Cell, hint, line, show, table
from evertick.cli.times import clock
from evertick.db.queries import notifications
from evertick.db.queries.notifications import Alert
from evertick.domain.durations import relative
from evertick.engine.runs import find_dag_row

app = typer.Typer(no_args_is_help=True, add_completion=False, help="What did not happen in time.")

DagFilter = Annotated[str | None, typer.Argument(metavar="[DAG]", help="Only this DAG's.")]
All = Annotated[bool, typer.Option("--all", help="Also those that are over.")]

_WORDS = {
    "not_fired": "did not fire in time",
    "not_started": "did not start in time",
    "not_finished": "did not finish in time",
}


@app.callback()
def _alerts() -> None:
    pass


@app.command("list", epilog="Example: evertick alerts list --all")
def list_alerts(dag: DagFilter = None, everything: All = False, limit: Limit = 100, as_json: Json = False) -> None:
    """List alerts, open ones first: what should have been by when, how often it was missed, and since when.

    One alert is one episode: it ends when the schedule fires again, or a later run is in time.
    """

    async def read(conn: AsyncConnection) -> list[Alert]:
        if dag is not None:
            await find_dag_row(conn, dag)
        return await notifications.list_alerts(conn, notifications.AlertFilter(dag=dag, ended=everything), limit=limit)

    found, now = ask(read, far=lambda server: far_troubles.list_alerts(server, dag, limit, everything=everything))
    if as_json:
        print_json({"alerts": [document(each) for each in found]})
    elif found:
        columns = ("DAG", "SCHEDULE", "WHAT", "#RUN", "DUE", "#TIMES", "RAISED", "OVER")
        show(table(columns, [_cells(each, now) for each in found]))
    else:
        show(
            hint("No alerts. A schedule gets deadlines with start_within and finish_within, a task with finish_within.")
        )


def words(alert: Alert) -> str:
    return f"{alert.dag}, schedule {alert.schedule}: {what(alert)}" + (
        f" ({alert.count} times)" if alert.count > 1 else ""
    )


def what(alert: Alert) -> str:
    return f"{alert.task} {_WORDS[alert.kind]}" if alert.task else _WORDS[alert.kind]


def _cells(each: Alert, now: datetime) -> list[Cell]:
    over: Cell = relative(each.ended_at, now) if each.ended_at else line("open", "bold red")
    return [
        each.dag,
        each.schedule,
        what(each),
        each.run_id,
        clock(each.due_at),
        each.count,
        relative(each.raised_at, now),
        over,
    ]
