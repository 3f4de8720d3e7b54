"""`evertick approvals`: what tasks ask people, and the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from evertick.cli import far_waiting
from evertick.cli.connection import actor, ask, change
from evertick.cli.documents import document, print_json
from evertick.cli.options import Json, Limit, Run, Task, run_number
from evertick.cli.tables import Cell, hint, line, show, table
from evertick.db.notify import Channel
from evertick.db.queries import waits
from evertick.db.queries.waits import ApprovalRow
from evertick.domain.dags.params import ParamSpec, parse_param
from evertick.domain.dags.spec import read_form
from evertick.domain.durations import relative
from evertick.domain.errors import UserError
from evertick.engine.waits import Decision, decide_approval

app = typer.Typer(no_args_is_help=True, add_completion=False)

Note = Annotated[str | None, typer.Option("--note", help="Why, for the record.")]
Field = Annotated[
    list[str] | None,
    typer.Option("--field", metavar="NAME=VALUE", help="A field of the form; give it once for each."),
]


@app.callback()
def about() -> None:
    """Approvals: tasks that wait for somebody's decision."""


@app.command("list", epilog="Example: evertick approvals list")
def list_approvals(limit: Limit = 100, as_json: Json = False) -> None:
    """List what is asked now, the oldest first."""
    found, now = ask(
        lambda conn: waits.list_approvals(conn, limit=limit),
        far=lambda server: far_waiting.list_approvals(server, limit),
    )
    if as_json:
        print_json({"approvals": [_document(each) for each in found]})
        return
    if not found:
        show(hint("Nobody is asked for anything now."))
        return
    rows: list[list[Cell]] = [
        [
            each.run_id,
            each.dag,
            each.task,
            each.title,
            ", ".join(f"{field.name}: {field.allowed}" for field in read_form(each.wait)) or None,
            relative(each.asked_at, now),
            relative(each.deadline, now) if each.deadline else None,
        ]
        for each in found
    ]
    show(table(("#RUN", "DAG", "TASK", "TITLE", "FORM", "ASKED", "UNTIL"), rows))
    show(hint(f"Decide with: evertick approvals approve {found[0].run_id} {found[0].task}"))


@app.command("approve", epilog="Example: evertick approvals approve 12 release --field version=2.1 --note 'tested'")
def approve(run: Run, task: Task, field: Field = None, note: Note = None, as_json: Json = False) -> None:
    """Approve: the task succeeds, and the form's values, who and the note are its result."""
    _decide(run, task, is_approved=True, pairs=field or [], note=note, as_json=as_json)


@app.command("reject", epilog="Example: evertick approvals reject 12 release --note 'not before Monday'")
def reject(run: Run, task: Task, field: Field = None, note: Note = None, as_json: Json = False) -> None:
    """Reject: the task fails, or is skipped if its DAG says so."""
    _decide(run, task, is_approved=False, pairs=field or [], note=note, as_json=as_json)


def _decide(run: str, task: str, *, is_approved: bool, pairs: list[str], note: str | None, as_json: bool) -> None:
    run_id = run_number(run)
    decision = Decision(
        is_approved=is_approved, actor=actor(), note=note, fields=lambda form: _read_fields(form, pairs)
    )
    done = change(
        lambda conn: decide_approval(conn, run_id=run_id, task=task, decision=decision),
        Channel.READY,
        Channel.PLAN,
        far=lambda server: far_waiting.decide(
            server, run_id, task, is_approved=is_approved, note=note, fields=decision.fields
        ),
    )
    if as_json:
        print_json({"approval": _document(done)})
        return
    show(line(f"{'Approved' if is_approved else 'Rejected'} {done.title!r}: {task} of run {run_id}."))


def _document(row: ApprovalRow) -> dict[str, object]:
    shown = {"form": row.wait.get("form", []), "approvers": row.wait.get("approvers")}
    return {**document(row, without=("dag_id", "wait", "is_open")), **shown, "is_open": bool(row.is_open)}


def _read_fields(form: tuple[ParamSpec, ...], pairs: list[str]) -> Mapping[str, object]:
    """`name=value` as people type it, each by its field's type."""
    found: dict[str, object] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise UserError(f"--field {pair!r} needs a name and a value, as in --field amount=5.")
        found[name] = parse_param(form, name, text)
    return found
