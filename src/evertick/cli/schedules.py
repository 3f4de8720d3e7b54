"""`evertick schedules`: when DAGs run, and when an expression would."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli import far_plans, schedule_edits, schedule_put, schedule_records
from evertick.cli.connection import ask
from evertick.cli.dag_page import schedule_document
from evertick.cli.documents import print_json
from evertick.cli.options import Json, Limit
from evertick.cli.tables import Cell, hint, show, state, table
from evertick.cli.travel import explain, next_fires, simulate
from evertick.db.queries import schedules
from evertick.db.queries.schedules import ListedSchedule
from evertick.domain.durations import relative
from evertick.engine.fire_schedules import in_words
from evertick.engine.runs import find_dag_row

app = typer.Typer(no_args_is_help=True, add_completion=False, help="When DAGs run.")

DagFilter = Annotated[str | None, typer.Argument(metavar="[DAG]", help="Only this DAG's schedules.")]
Deleted = Annotated[bool, typer.Option("--deleted", help="Also those that were deleted.")]


@app.command("list", epilog="Example: evertick schedules list")
def list_schedules(dag: DagFilter = None, limit: Limit = 200, deleted: Deleted = False, as_json: Json = False) -> None:
    """List schedules: when each fires next and last, whether it is paused or in error, and whose it is.

    `code`: the DAG's file declares it. `by hand`: somebody changed it since, and publishing leaves it alone.
    """

    async def read(conn: AsyncConnection) -> list[ListedSchedule]:
        if dag is not None:
            await find_dag_row(conn, dag)
        return await schedules.list_all(conn, dag=dag, limit=limit, deleted=deleted)

    found, now = ask(read, far=None if deleted else lambda server: far_plans.list_schedules(server, dag, limit))
    if as_json:
        print_json({"schedules": [{"dag": each.dag, **schedule_document(each)} for each in found]})
        return
    if not found:
        whose = f"{dag} has no schedule" if dag else "No DAG has a schedule yet"
        show(hint(f"{whose}. Give one to a DAG with @dag(schedule='@daily'), or '@every 5m', or '30 6 * * *'."))
        return
    rows: list[list[Cell]] = []
    for each in found:
        words, last = in_words(each.spec), relative(each.last_fired, now)
        rows.append([each.dag, each.name, _status(each), words, _next(each, now), last, _whose(each), each.error])
    show(table(("DAG", "NAME", "STATUS", "WHEN", "NEXT", "LAST", "FROM", "ERROR"), rows))
    if any(each.origin == "user" for each in found):
        show(
            hint("By hand: publishing leaves it alone. `evertick schedules reset DAG NAME` gives it back to the code.")
        )
    if len(found) == limit:
        show(hint(f"The first {limit:,} schedules; see more with --limit"))


app.command("next", epilog="Example: evertick schedules next --cron '30 6 * * MON-FRI' --tz Europe/Berlin -n 3")(
    next_fires
)
app.command("explain", epilog="Example: evertick schedules explain --cron '30 2 * * *' --tz Europe/Berlin")(explain)
app.command(
    "simulate",
    epilog="Example: evertick schedules simulate --cron '30 2 * * *' --tz Europe/Berlin --from 2025-01-01 --to 2025-12-31",
)(simulate)
app.command("put", epilog="Example: evertick schedules put etl nightly --cron '30 2 * * *' --tz Europe/Berlin")(
    schedule_put.put
)
app.command("pause", epilog="Example: evertick schedules pause etl nightly")(schedule_edits.pause)
app.command("unpause", epilog="Example: evertick schedules unpause etl nightly --catch-up latest --dry-run")(
    schedule_edits.unpause
)
app.command("delete", epilog="Example: evertick schedules delete etl nightly --yes")(schedule_edits.delete)
app.command("reset", epilog="Example: evertick schedules reset etl nightly")(schedule_edits.reset)
app.command("history", epilog="Example: evertick schedules history etl nightly")(schedule_records.history)
app.command("skips", epilog="Example: evertick schedules skips etl")(schedule_records.skips)


def _whose(row: ListedSchedule) -> str:
    return "code" if row.origin == "code" else f"by hand ({row.changed_by})"


def _status(row: ListedSchedule) -> Cell:
    if row.deleted_at:
        return state("canceled", "deleted")
    if row.error:
        return state("broken", "error")
    return state("paused") if row.paused else state("success", "on")


def _next(row: ListedSchedule, now: datetime) -> str:
    if row.paused or row.error or row.deleted_at:
        return "-"
    waits = "after" in row.spec
    return relative(row.next_due, now) if row.next_due else "-" if waits else "ended"
