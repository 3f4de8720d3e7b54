"""`evertick tasks why`, and `evertick blocked`: why something does not run."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import typer

from evertick.cli import far, far_fleet
from evertick.cli.connection import ask
from evertick.cli.documents import document, print_json
from evertick.cli.options import Json, Limit, Run, Task, run_number
from evertick.cli.tables import Cell, hint, line, show, state, table
from evertick.db.queries import gates
from evertick.domain.durations import relative
from evertick.domain.explain import Explained, describe, describe_blocked, kind_of
from evertick.engine.tasks import explain

app = typer.Typer(add_completion=False)


def why_task(run: Run, task: Task, as_json: Json = False) -> None:
    """Say why a task is not running: every reason, the most binding first, and who holds what it waits for."""
    run_id = run_number(run)
    found, now = ask(
        lambda conn: explain(conn, run_id=run_id, task=task), far=lambda server: far.explain(server, run_id, task)
    )
    when = _seen_from(now)
    if as_json:
        print_json(_document(found))
        return
    each: Explained | None = found
    while each is not None:
        show(line(f"{each.task} of run {run_id} is {each.state}", "bold"))
        for number, reason in enumerate(each.reasons):
            show(line(f"{'  because' if number == 0 else '  and'} {describe(reason, when)}"))
        if not each.reasons:
            show(hint("  nothing holds it: it moves this very moment, look again"))
        each = each.upstream


@app.command(epilog="Example: evertick blocked")
def list_blocked(limit: Limit = 50, as_json: Json = False) -> None:
    """List what holds back the most work now, over all runs: full pools and keys, queues without a runner, paused DAGs."""
    found, now = ask(
        lambda conn: gates.blocked(conn, limit=limit), far=lambda server: far_fleet.blocked(server)[:limit]
    )
    if as_json:
        print_json({"blocked": [document(each) for each in found]})
        return
    if not found:
        show(hint("Nothing is held back."))
        return
    rows: list[list[Cell]] = []
    for each in found:
        since = relative(each.since, now) if each.since else None
        rows.append(
            [each.waiting, state("pending", kind_of(each)), each.name, since, describe_blocked(each, _seen_from(now))]
        )
    show(table(("#WAITING", "WHY", "WHAT", "OLDEST", "DETAIL"), rows))
    show(hint("\nAsk about one task with: evertick tasks why RUN TASK"))


def _seen_from(now: datetime) -> Callable[[str], str]:
    """Instants as all commands show them."""
    return lambda instant: relative(datetime.fromisoformat(instant), now)


def _document(found: Explained) -> dict[str, object]:
    return {
        "run_id": found.run_id,
        "task": found.task,
        "state": found.state,
        "reasons": [{"kind": each.kind, "text": describe(each), **each.detail} for each in found.reasons],
        "upstream": _document(found.upstream) if found.upstream else None,
    }
