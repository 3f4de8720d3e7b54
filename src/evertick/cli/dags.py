"""`evertick dags`: what can run. Lists, shows, pauses, starts and removes DAGs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import typer
from psycopg import AsyncConnection

from evertick.cli import dag_page, dag_versions, far_plans, schedule_edits, trigger, validate
from evertick.cli.connection import actor, ask, change
from evertick.cli.documents import document, print_json
from evertick.cli.options import CatchUpOption, DagName, DryRun, Json, Limit, WindowOption, Yes, noun
from evertick.cli.prompt import confirm
from evertick.cli.run_page import run_document
from evertick.cli.tables import Cell, hint, line, show, state, table
from evertick.config import read_settings
from evertick.db.notify import Channel
from evertick.db.queries import dags, runs, schedules
from evertick.db.queries.dags import DagRow, ImportErrorRow
from evertick.db.queries.runs import RunRow
from evertick.db.queries.schedules import ListedSchedule
from evertick.domain.durations import relative
from evertick.domain.errors import UserError
from evertick.domain.schedules.misfire import MisfirePolicy
from evertick.engine import dags as verbs
from evertick.engine.fire_schedules import in_words
from evertick.engine.runs import find_dag_row
from evertick.engine.schedules import Missed, preview
from evertick.supervisor.postgres_home import shown

app = typer.Typer(no_args_is_help=True, add_completion=False, help="What can run: your DAGs.")

_COLUMNS = ("DAG", "STATUS", "SCHEDULE", "NEXT RUN", "LAST RUN", "#TASKS", "TAGS")
_MOST_SCHEDULES = 100_000


@app.command("list", epilog="Example: evertick dags list")
def list_dags(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the DAGs: whether each is on, when it runs next, and how its last run went."""

    async def read(
        conn: AsyncConnection,
    ) -> tuple[list[DagRow], list[ListedSchedule], list[RunRow], list[ImportErrorRow]]:
        return (
            await dags.list_all(conn, limit=limit),
            await schedules.list_all(conn, limit=_MOST_SCHEDULES),
            await runs.newest_of_each_dag(conn, limit=limit),
            await dags.import_errors(conn),
        )

    (found, planned, newest, errors), now = ask(read, far=lambda server: far_plans.list_dags(server, limit))
    plans: dict[str, list[ListedSchedule]] = {row.name: [] for row in found}
    for each in planned:
        plans.setdefault(each.dag, []).append(each)
    last = {run.dag: run for run in newest}
    broken = {error.file: error for error in errors}
    if as_json:
        listed = [_listed(row, plans[row.name], last.get(row.name), broken.get(row.file)) for row in found]
        print_json({"dags": listed, "import_errors": [document(error, without=["detail"]) for error in errors]})
        return
    if found:
        show(table(_COLUMNS, [_row(row, plans[row.name], last.get(row.name), broken, now) for row in found]))
        if len(found) == limit:
            show(hint(f"The first {limit:,} DAGs; see more with --limit"))
    else:
        folder = shown(read_settings().dags_folder)
        show(
            hint(f"No DAGs yet. Put a Python file with an @dag into {folder}; `evertick dags validate FILE` checks it.")
        )
    for error in errors:
        show(line(f"Broken: {dag_page.place_of(error)}", "red"))


app.command("show", epilog="Example: evertick dags show etl")(dag_page.show_dag)
app.command("validate", epilog="Example: evertick dags validate dags/etl.py")(validate.validate)
app.command("trigger", epilog="Example: evertick dags trigger etl --param rows=50 --wait")(trigger.trigger_dag)

app.command("versions", epilog="Example: evertick dags versions etl")(dag_versions.list_versions)
app.command("diff", epilog="Example: evertick dags diff etl 3 5")(dag_versions.diff_versions)
app.command("rollback", epilog="Example: evertick dags rollback etl 3")(dag_versions.roll_back_dag)


@app.command("pause", epilog="Example: evertick dags pause etl")
def pause(dag: DagName) -> None:
    """Stop a DAG: its schedules skip (on record), and what has not started waits. Running tasks go on."""
    changed = change(
        lambda conn: verbs.pause(conn, dag=dag, actor=actor()),
        Channel.PLAN,
        Channel.READY,
        far=lambda server: far_plans.pause_dag(server, dag),
    )
    show(line(f"{dag} is paused." if changed else f"{dag} was paused already."))
    show(hint(f"Let it go on with: evertick dags unpause {dag}"))


@app.command("unpause", epilog="Example: evertick dags unpause etl --catch-up latest --dry-run")
def unpause(
    dag: DagName,
    catch_up: CatchUpOption = MisfirePolicy.SKIP,
    window: WindowOption = None,
    dry_run: DryRun = False,
) -> None:
    """Let a paused DAG go on: waiting tasks now, its schedules with their next fire, unless you ask for what they missed.

    --dry-run shows what would run. A schedule that is paused for itself stays so.
    """
    asked = schedule_edits.read_catch_up(catch_up, window)

    async def look(conn: AsyncConnection) -> list[Missed]:
        row = await find_dag_row(conn, dag)
        return await preview(conn, dag=dag, catch_up=asked) if row.paused else []

    # A server tells what came of it, not what would.
    missed, _ = ask(look, far=None if dry_run else lambda _: [])
    if dry_run:
        schedule_edits.show_missed(missed, is_done=False)
        return
    changed = change(
        lambda conn: verbs.unpause(conn, dag=dag, actor=actor(), catch_up=asked),
        Channel.PLAN,
        Channel.READY,
        far=lambda server: far_plans.unpause_dag(server, dag, asked),
    )
    show(line(f"{dag} goes on." if changed else f"{dag} was not paused."))
    if changed and missed:
        schedule_edits.show_missed(missed, is_done=True)


@app.command("delete", epilog="Example: evertick dags delete old_report --yes")
def delete(dag: DagName, yes: Yes = False) -> None:
    """Take a DAG out of planning. Its history stays, and its open runs go on."""
    row, _ = ask(lambda conn: find_dag_row(conn, dag), far=lambda server: far_plans.find_dag(server, dag))
    planned, _ = ask(
        lambda conn: schedules.list_all(conn, dag=dag),
        far=lambda server: far_plans.list_schedules(server, dag, _MOST_SCHEDULES),
    )
    confirm(f"Delete {dag} with {noun(len(planned), 'schedule')}? Its history stays.", yes=yes)
    if not change(
        lambda conn: verbs.delete(conn, dag=dag, actor=actor()),
        Channel.PLAN,
        far=lambda server: far_plans.delete_dag(server, dag),
    ):
        raise UserError(f"{dag} was deleted by somebody else just now.")
    show(line(f"Deleted {dag}."), hint(f"Remove {row.file} from the DAGs folder too, or it is published again."))


def _row(
    row: DagRow, plans: list[ListedSchedule], last: RunRow | None, broken: Mapping[str, object], now: datetime
) -> list[Cell]:
    status = state("broken") if row.file in broken else state("paused") if row.paused else state("success", "on")
    words = "; ".join(in_words(each.spec) for each in plans) or "by hand"
    due = min((each.next_due for each in plans if each.next_due), default=None)
    next_run = "-" if row.paused else relative(due, now)
    went = state(last.state, f"{last.state} {relative(last.finished_at or last.created_at, now)}") if last else None
    return [row.name, status, words, next_run, went, _task_count(row), _tags(row)]


def _task_count(row: DagRow) -> int:
    tasks = (row.spec or {}).get("tasks")
    return len(tasks) if isinstance(tasks, list) else 0


def _tags(row: DagRow) -> str | None:
    tags = (row.spec or {}).get("tags")
    return ", ".join(map(str, tags)) if isinstance(tags, list) else None


def _listed(
    row: DagRow, plans: list[ListedSchedule], last: RunRow | None, error: ImportErrorRow | None
) -> dict[str, object]:
    spec = row.spec or {}
    return {
        "dag": row.name,
        "is_paused": row.paused,
        "version": row.number,
        "file": row.file,
        "description": spec.get("description"),
        "tags": spec.get("tags", []),
        "task_count": _task_count(row),
        "schedules": [dag_page.schedule_document(each) for each in plans],
        "last_run": run_document(last) if last else None,
        "import_error": document(error, without=["detail"]) if error else None,
    }
