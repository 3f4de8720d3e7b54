"""`evertick events`, `webhooks`, `dead-letters`, `assets` and `approvals`: what comes from outside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from evertick.cli.app import Group
from evertick.cli.options import Json, Limit, Run, Task, Yes, confirm, noun, read_object, read_pairs
from evertick.cli.output import Cell, clock, document, facts, hint, line, print_json, show, show_list
from evertick.client.connect import call, open_client, read, read_pages
from evertick.db.queries.assets import Asset
from evertick.db.queries.requests import DeadLetter
from evertick.domain.dags.params import ParamSpec
from evertick.domain.dags.spec import read_form
from evertick.domain.dags.waits import WaitKind
from evertick.domain.durations import relative
from evertick.domain.errors import UserError
from evertick.domain.inbound.webhooks import USUAL_TOLERANCE_SECONDS, Digest, HmacHeaders, WebhookKind
from evertick.operations import requests, waits, webhooks
from evertick.operations.paging import MOST_LISTED
from evertick.operations.requests import ReplayRequest
from evertick.operations.waits import Approval, ApprovalDecision, AssetUpdate, EventRequest
from evertick.operations.webhooks import WebhookDetails, WebhookRequest

events_app = Group('Send and list events from outside, which tasks wait for with `wait_for_event("NAME")`.')
assets_app = Group(
    'List and update data assets: tasks update them (`outlets=[Asset("NAME")]`), DAGs run after them'
    ' (`after(Asset("NAME"))`).'
)
approvals_app = Group()
dead_letters_app = Group()
webhooks_app = Group()

EventName = Annotated[str, typer.Argument(metavar="NAME", help="The event's name, as tasks wait for it.")]
Payload = Annotated[
    str,
    typer.Option("--payload", metavar="JSON", help="The event's payload; it becomes the result of the waiting task."),
]
Key = Annotated[str | None, typer.Option("--key", help="Idempotency key: events with the same key are one event.")]
OfName = Annotated[str | None, typer.Option("--name", help="Only events with this name.")]
AssetName = Annotated[str, typer.Argument(metavar="NAME", help="The asset's name, as in the DAG.")]
Extra = Annotated[str, typer.Option("--extra", metavar="JSON", help="A JSON object that is stored with the update.")]
UpdatedPartition = Annotated[
    str | None, typer.Option("--partition", metavar="KEY", help="The partition that was updated, such as 2030-01-31.")
]
Note = Annotated[str | None, typer.Option("--note", help="Reason for the decision.")]
Field = Annotated[
    list[str] | None, typer.Option("--field", metavar="NAME=VALUE", help="A field of the form; repeat for several.")
]

Choose = Annotated[
    list[str] | None, typer.Option("--choose", metavar="OPTION", help="An option of the question; repeat for several.")
]


# Events ---------------------------------------------------------------------------------------------------------------


@events_app.command("send", epilog="""Example: evertick events send file-arrived --payload '{"path": "/in/a.csv"}'""")
def send_command(name: EventName, payload: Payload = "null", key: Key = None, as_json: Json = False) -> None:
    """Send an event: all tasks that wait for it continue. A task of an existing run that waits for it later finds it."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--payload is not JSON: {error}. A text needs its quotes: --payload '\"ready\"'.") from None
    sent = call(waits.send_event, name=name, body=EventRequest(payload=value), idempotency_key=key)
    if as_json:
        print_json({"event": sent})
    elif sent.is_new:
        show(line(f"Sent event {name}."))
    else:
        show(line(f"Event {name} with this key was sent before, by {sent.sent_by}; nothing was sent again."))


@events_app.command("list", epilog="Example: evertick events list --name file-arrived")
def list_events_command(name: OfName = None, limit: Limit = 50, as_json: Json = False) -> None:
    """List sent events, newest first."""
    found, now = read_pages(waits.list_sent_events, limit, name=name)
    show_list(
        "events",
        found,
        ("EVENT", "KEY", "SENT", "BY", "PAYLOAD"),
        lambda each: [each.name, each.key, relative(each.sent_at, now), each.sent_by, json.dumps(each.payload)],
        as_json=as_json,
        empty="No event was sent. Send one with: evertick events send NAME",
    )


# Webhooks -------------------------------------------------------------------------------------------------------------

Hook = Annotated[str, typer.Argument(metavar="NAME", help="The webhook's name, the last part of its path.")]
HookKind = Annotated[WebhookKind, typer.Option("--kind", help="The sender, whose way of signing is checked.")]
HookSecret = Annotated[str, typer.Option("--secret", metavar="SECRET", help="The name of the stored secret.")]
HookEvent = Annotated[
    str, typer.Option("--event", metavar="EVENT", help="The events' name; {type} in it is the type of the message.")
]
Tolerance = Annotated[
    float, typer.Option("--tolerance", metavar="SECONDS", help="How far the time of a signature may be from now.")
]
SignatureHeader = Annotated[
    str, typer.Option("--signature-header", metavar="HEADER", help="Of the kind hmac: the header with the signature.")
]
TimeHeader = Annotated[
    str | None,
    typer.Option(
        "--time-header", metavar="HEADER", help="Of the kind hmac: the header with the time, which is signed as well."
    ),
]
IdHeader = Annotated[
    str | None,
    typer.Option("--id-header", metavar="HEADER", help="Of the kind hmac: the header with the id of the delivery."),
]
Prefix = Annotated[str, typer.Option("--prefix", metavar="TEXT", help="Of the kind hmac: what precedes the signature.")]
DigestOption = Annotated[Digest, typer.Option("--digest", help="Of the kind hmac: the digest.")]


@webhooks_app.command(
    "set", epilog="Example: evertick webhooks set repo --kind github --secret hook --event 'github.{type}'"
)
def set_webhook_command(
    name: Hook,
    kind: HookKind,
    secret: HookSecret,
    event: HookEvent,
    tolerance: Tolerance = USUAL_TOLERANCE_SECONDS,
    signature_header: SignatureHeader = "X-Signature",
    time_header: TimeHeader = None,
    id_header: IdHeader = None,
    prefix: Prefix = "",
    digest: DigestOption = Digest.SHA256,
    as_json: Json = False,
) -> None:
    """Create a webhook, or replace it: what is signed with its secret becomes an event."""
    headers = HmacHeaders(
        signature=signature_header, digest=digest, prefix=prefix, timestamp=time_header, delivery=id_header
    )
    body = WebhookRequest(
        kind=kind,
        secret=secret,
        event=event,
        tolerance_seconds=tolerance,
        headers=headers if kind is WebhookKind.HMAC else None,
    )
    done = call(webhooks.put_webhook, name=name, body=body)
    if as_json:
        print_json({"is_new": done.is_new})
    else:
        show(line(f"{'Created' if done.is_new else 'Changed'} webhook {name}."))
        show(hint(f"Its address is that of the API, with the path /api/v1/hooks/{name}"))


@webhooks_app.command("list", epilog="Example: evertick webhooks list")
def list_webhooks_command(limit: Limit = 100, as_json: Json = False) -> None:
    """List webhooks by name."""
    found, now = read_pages(webhooks.list_webhooks, limit)

    def cells(each: WebhookDetails) -> list[Cell]:
        return [each.name, each.kind, each.event, each.secret, relative(each.changed_at, now), each.changed_by]

    columns = ("WEBHOOK", "KIND", "EVENT", "SECRET", "CHANGED", "BY")
    show_list("webhooks", found, columns, cells, as_json=as_json, empty="There is no webhook.")


@webhooks_app.command("delete", epilog="Example: evertick webhooks delete repo")
def delete_webhook_command(name: Hook, yes: Yes = False) -> None:
    """Delete a webhook. Later deliveries to it are refused."""
    confirm(f"Delete webhook {name}?", yes=yes)
    call(webhooks.delete_webhook, name=name)
    show(line(f"Deleted webhook {name}."))


# Dead letters ---------------------------------------------------------------------------------------------------------

Replayed = Annotated[bool, typer.Option("--all", help="Also replayed ones.")]
LetterNumber = Annotated[int, typer.Argument(metavar="NUMBER", help="The dead letter's number.", min=1)]
LetterNumbers = Annotated[list[int], typer.Argument(metavar="NUMBER...", help="Their numbers.", min=1)]


@dead_letters_app.command("list", epilog="Example: evertick dead-letters list")
def list_dead_letters_command(everything: Replayed = False, limit: Limit = 50, as_json: Json = False) -> None:
    """List requests that could not become a run, with the reason, newest first."""
    found, now = read_pages(requests.list_dead_letters, limit, with_replayed=everything)

    def cells(each: DeadLetter) -> list[Cell]:
        again = relative(each.replayed_at, now) if each.replayed_at else None
        return [each.letter_id, each.dag, each.key, each.sent_by, relative(each.sent_at, now), each.reason, again]

    columns = ("#NUMBER", "DAG", "KEY", "BY", "SENT", "REASON", "REPLAYED")
    show_list("dead_letters", found, columns, cells, as_json=as_json, empty="Every request became a run.")
    if found and not as_json:
        show(hint(f"When the cause is gone: evertick dead-letters replay {found[0].letter_id}"))


@dead_letters_app.command("show", epilog="Example: evertick dead-letters show 17")
def show_dead_letter_command(number: LetterNumber, as_json: Json = False) -> None:
    """Show one dead letter with its parameters."""
    found, now = read(requests.show_dead_letter, letter_id=number)
    if as_json:
        return print_json(document(found))
    replayed = f"{relative(found.replayed_at, now)}, by {found.replayed_by}" if found.replayed_at else None
    rows: dict[str, Cell] = {
        "DAG": found.dag,
        "key": found.key,
        "reason": line(found.reason, "bold red"),
        "sent": f"{relative(found.sent_at, now)}, by {found.sent_by}",
        "failed": relative(found.failed_at, now),
        "begins": clock(found.run_at) if found.run_at else None,
        "replayed": replayed,
        "params": json.dumps(found.params),
    }
    show(facts(rows))


@dead_letters_app.command("replay", epilog="Example: evertick dead-letters replay 17 18")
def replay_command(numbers: LetterNumbers, as_json: Json = False) -> None:
    """Put dead letters back into the inbox. What still cannot become a run is a new dead letter."""
    done = call(requests.replay_dead_letters, body=ReplayRequest(letter_ids=numbers))
    if as_json:
        print_json({"count": done.count})
    else:
        show(line(f"{noun(done.count, 'dead letter')} replayed."))


# Assets ---------------------------------------------------------------------------------------------------------------


@assets_app.command("list", epilog="Example: evertick assets list")
def list_assets_command(as_json: Json = False) -> None:
    """List assets with the tasks that update them and the DAGs that wait for them."""
    found, _ = read_pages(waits.list_assets, MOST_LISTED)
    empty = 'No DAG has assets. A task updates an asset with outlets=[Asset("NAME")].'
    show_list("assets", found, ("ASSET", "UPDATED BY", "WAITED FOR BY"), _asset_cells, as_json=as_json, empty=empty)


def _asset_cells(asset: Asset) -> list[Cell]:
    producers = ", ".join(f"{each.dag}.{each.task}" for each in asset.producers)
    consumers = ", ".join(f"{each.dag}{' (updated)' if each.updated_at else ''}" for each in asset.consumers)
    return [asset.name, producers or None, consumers or None]


@assets_app.command("partitions", epilog="Example: evertick assets partitions orders")
def partitions_command(name: AssetName, limit: Limit = 50, as_json: Json = False) -> None:
    """List the partitions of an asset that were updated, the highest key first, with their last updates."""
    found, now = read_pages(waits.list_partitions, limit, name=name)
    show_list(
        "partitions",
        found,
        ("PARTITION", "UPDATED", "BY"),
        lambda each: [each.key, relative(each.updated_at, now), each.updated_by],
        as_json=as_json,
        empty=f"No partition of {name} was updated. Report one with: evertick assets update {name} --partition KEY",
    )


@assets_app.command("update", epilog="Example: evertick assets update orders --partition 2030-01-31")
def update_command(
    name: AssetName, extra: Extra = "{}", partition: UpdatedPartition = None, as_json: Json = False
) -> None:
    """Record an external update of an asset. A DAG that runs after it starts when all of its conditions are met."""
    value = read_object(extra, "--extra")
    done = call(waits.record_asset_update, name=name, body=AssetUpdate(extra=value, partition=partition))
    if as_json:
        print_json({"update": done})
    else:
        show(line(f"Recorded an update of {name}."))


# Approvals ------------------------------------------------------------------------------------------------------------


@approvals_app.command("list", epilog="Example: evertick approvals list")
def list_approvals_command(limit: Limit = 100, as_json: Json = False) -> None:
    """List the approvals that tasks wait for, oldest first."""
    found, now = read_pages(waits.list_approvals, limit)
    columns = ("#RUN", "DAG", "TASK", "TITLE", "FORM", "ASKED", "UNTIL")

    def cells(each: Approval) -> list[Cell]:
        form = ", ".join(f"{field.name}: {field.allowed}" for field in _form_of(each)) or None
        until = relative(each.deadline, now) if each.deadline else None
        return [each.run_id, each.dag, each.task, each.title, form, relative(each.asked_at, now), until]

    show_list("approvals", found, columns, cells, as_json=as_json, empty="No task waits for an approval now.")
    if found and not as_json:
        show(hint(f"Decide with: evertick approvals approve {found[0].run_id} {found[0].task}"))


@approvals_app.command(
    "approve", epilog="Example: evertick approvals approve 12 release --field version=2.1 --note 'tested'"
)
def approve_command(
    run: Run, task: Task, choose: Choose = None, field: Field = None, note: Note = None, as_json: Json = False
) -> None:
    """Approve: the task succeeds. Its result has the form's values, the user and the note. A question with options is
    answered with --choose."""
    decision = ApprovalDecision(is_approved=True, note=note, chosen=choose)
    _decide(run, task, decision, pairs=field or [], as_json=as_json)


@approvals_app.command("reject", epilog="Example: evertick approvals reject 12 release --note 'not before Monday'")
def reject_command(run: Run, task: Task, field: Field = None, note: Note = None, as_json: Json = False) -> None:
    """Reject: the task fails, or is skipped if its DAG says so."""
    _decide(run, task, ApprovalDecision(is_approved=False, note=note), pairs=field or [], as_json=as_json)


def _decide(run_id: int, task: str, decision: ApprovalDecision, *, pairs: Sequence[str], as_json: bool) -> None:
    with open_client() as client:
        if pairs:
            form = _form_of(client.call(waits.show_approval, run_id=run_id, task=task))
            decision = replace(decision, fields=read_pairs(form, pairs, "--field"))
        done = client.call(waits.decide_approval, run_id=run_id, task=task, body=decision)
    if as_json:
        print_json({"approval": done})
    else:
        did = "Answered" if done.chosen else "Approved" if decision.is_approved else "Rejected"
        chosen = f" with {', '.join(done.chosen)}" if done.chosen else ""
        show(line(f"{did} {done.title!r}{chosen}: {task} of run {run_id}."))


def _form_of(approval: Approval) -> tuple[ParamSpec, ...]:
    wait: dict[str, Any] = {"kind": WaitKind.APPROVAL, "form": approval.form}
    return read_form(wait)
