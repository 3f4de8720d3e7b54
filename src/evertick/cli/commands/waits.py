"""`evertick events`, `evertick assets` and `evertick approvals`: what tasks and DAGs wait for from outside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from evertick.cli.options import Json, Limit, Run, Task, run_number
from evertick.cli.output import Cell, hint, line, print_json, show, table
from evertick.client.connect import open_client
from evertick.domain.dags.params import ParamSpec, parse_param
from evertick.domain.dags.spec import read_form
from evertick.domain.dags.waits import WaitKind
from evertick.domain.durations import relative
from evertick.domain.errors import UserError
from evertick.operations import waits
from evertick.operations.waits import Approval, Event, Update, Verdict

events_app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help='Send and list events from outside, which tasks wait for with `wait_for_event("NAME")`.',
)
assets_app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help='List and update data assets: tasks update them (`outlets=[Asset("NAME")]`), DAGs run after them'
    ' (`after(Asset("NAME"))`).',
)
approvals_app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="List, approve and reject: tasks that wait for a user's decision."
)

EventName = Annotated[str, typer.Argument(metavar="NAME", help="The event's name, as tasks wait for it.")]
Payload = Annotated[
    str,
    typer.Option("--payload", metavar="JSON", help="The event's payload; it becomes the result of the waiting task."),
]
Key = Annotated[str | None, typer.Option("--key", help="Idempotency key: events with the same key are one event.")]
OfName = Annotated[str | None, typer.Option("--name", help="Only events with this name.")]
AssetName = Annotated[str, typer.Argument(metavar="NAME", help="The asset's name, as in the DAG.")]
Extra = Annotated[str, typer.Option("--extra", metavar="JSON", help="A JSON object that is stored with the update.")]
Note = Annotated[str | None, typer.Option("--note", help="Reason for the decision.")]
Field = Annotated[
    list[str] | None,
    typer.Option("--field", metavar="NAME=VALUE", help="A field of the form; repeat it for more fields."),
]


# Events ---------------------------------------------------------------------------------------------------------------


@events_app.command("send", epilog="""Example: evertick events send file-arrived --payload '{"path": "/in/a.csv"}'""")
def send_command(name: EventName, payload: Payload = "null", key: Key = None, as_json: Json = False) -> None:
    """Send an event: all tasks that wait for it continue. A task of an existing run that waits for it later finds it."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--payload is not JSON: {error}. A text needs its quotes: --payload '\"ready\"'.") from None
    with open_client() as client:
        sent = client.call(waits.send, name=name, body=Event(payload=value), idempotency_key=key)
    if as_json:
        print_json({"event": sent})
    elif sent.is_new:
        show(line(f"Sent event {name}."))
    else:
        show(line(f"Event {name} with this key was sent before, by {sent.sent_by}; nothing was sent again."))


@events_app.command("list", epilog="Example: evertick events list --name file-arrived")
def list_events_command(name: OfName = None, limit: Limit = 50, as_json: Json = False) -> None:
    """List sent events, newest first."""
    with open_client() as client:
        every, one = waits.list_all_sent, waits.list_sent
        found = client.pages(every, limit) if name is None else client.pages(one, limit, name=name)
        now = client.now
    if as_json:
        print_json({"events": found})
        return
    if not found:
        show(hint("No event was sent. Send one with: evertick events send NAME"))
        return
    rows: list[list[Cell]] = [
        [each.name, each.key, relative(each.sent_at, now), each.sent_by, json.dumps(each.payload)] for each in found
    ]
    show(table(("EVENT", "KEY", "SENT", "BY", "PAYLOAD"), rows))


# Assets ---------------------------------------------------------------------------------------------------------------


@assets_app.command("list", epilog="Example: evertick assets list")
def list_assets_command(as_json: Json = False) -> None:
    """List assets with the tasks that update them and the DAGs that wait for them."""
    with open_client() as client:
        found = client.call(waits.list_assets).items
    if as_json:
        print_json({"assets": found})
        return
    if not found:
        show(hint('No DAG has assets. A task updates an asset with outlets=[Asset("NAME")].'))
        return
    rows: list[list[Cell]] = [
        [
            each.name,
            ", ".join(f"{producer.dag}.{producer.task}" for producer in each.producers) or None,
            ", ".join(f"{consumer.dag}{' (updated)' if consumer.heard_at else ''}" for consumer in each.consumers)
            or None,
        ]
        for each in found
    ]
    show(table(("ASSET", "UPDATED BY", "WAITED FOR BY"), rows))


@assets_app.command("update", epilog="""Example: evertick assets update orders --extra '{"rows": 7}'""")
def update_command(name: AssetName, extra: Extra = "{}", as_json: Json = False) -> None:
    """Report an update of an asset from outside. A DAG that runs after it starts when all of its conditions are met."""
    try:
        value = json.loads(extra)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--extra is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise UserError("""--extra must be an object, as in --extra '{"rows": 7}'.""")
    with open_client() as client:
        done = client.call(waits.tell, name=name, body=Update(extra=value))
    if as_json:
        print_json({"update": done})
        return
    show(line(f"Reported an update of {name}."))


# Approvals ------------------------------------------------------------------------------------------------------------


@approvals_app.command("list", epilog="Example: evertick approvals list")
def list_approvals_command(limit: Limit = 100, as_json: Json = False) -> None:
    """List the approvals that tasks wait for, oldest first."""
    with open_client() as client:
        found, now = client.pages(waits.list_approvals, limit), client.now
    if as_json:
        print_json({"approvals": found})
        return
    if not found:
        show(hint("No task waits for an approval now."))
        return
    rows: list[list[Cell]] = [
        [
            each.run_id,
            each.dag,
            each.task,
            each.title,
            ", ".join(f"{field.name}: {field.allowed}" for field in _form_of(each)) or None,
            relative(each.asked_at, now),
            relative(each.deadline, now) if each.deadline else None,
        ]
        for each in found
    ]
    show(table(("#RUN", "DAG", "TASK", "TITLE", "FORM", "ASKED", "UNTIL"), rows))
    show(hint(f"Decide with: evertick approvals approve {found[0].run_id} {found[0].task}"))


@approvals_app.command(
    "approve", epilog="Example: evertick approvals approve 12 release --field version=2.1 --note 'tested'"
)
def approve_command(run: Run, task: Task, field: Field = None, note: Note = None, as_json: Json = False) -> None:
    """Approve: the task succeeds. Its result has the form's values, the user and the note."""
    _decide(run, task, is_approved=True, pairs=field or [], note=note, as_json=as_json)


@approvals_app.command("reject", epilog="Example: evertick approvals reject 12 release --note 'not before Monday'")
def reject_command(run: Run, task: Task, field: Field = None, note: Note = None, as_json: Json = False) -> None:
    """Reject: the task fails, or is skipped if its DAG says so."""
    _decide(run, task, is_approved=False, pairs=field or [], note=note, as_json=as_json)


def _decide(run: str, task: str, *, is_approved: bool, pairs: list[str], note: str | None, as_json: bool) -> None:
    run_id = run_number(run)
    with open_client() as client:
        fields: Mapping[str, object] = {}
        if pairs:
            fields = _read_fields(_form_of(client.call(waits.show_approval, run_id=run_id, task=task)), pairs)
        verdict = Verdict(is_approved=is_approved, note=note, fields=fields)
        done = client.call(waits.decide, run_id=run_id, task=task, body=verdict)
    if as_json:
        print_json({"approval": done})
        return
    show(line(f"{'Approved' if is_approved else 'Rejected'} {done.title!r}: {task} of run {run_id}."))


def _form_of(approval: Approval) -> tuple[ParamSpec, ...]:
    wait: dict[str, Any] = {"kind": WaitKind.APPROVAL, "form": approval.form}
    return read_form(wait)


def _read_fields(form: tuple[ParamSpec, ...], pairs: Sequence[str]) -> Mapping[str, object]:
    """Each `name=value` with the type of its field."""
    found: dict[str, object] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise UserError(f"--field {pair!r} needs a name and a value, as in --field amount=5.")
        found[name] = parse_param(form, name, text)
    return found
