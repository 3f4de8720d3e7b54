"""What tasks and DAGs of a server wait for from outside: events, approvals, and updates of assets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from evertick.cli.far import path, record
from evertick.db.queries.assets import Asset, AssetEvent, Consumer, Producer
from evertick.db.queries.waits import ApprovalRow, EventRow, Sent
from evertick.domain.dags.params import ParamSpec
from evertick.domain.dags.spec import read_form
from evertick.domain.dags.waits import WaitKind

if TYPE_CHECKING:
    from evertick.cli.server import Server

_MOST = 200


def send_event(server: Server, name: str, payload: object, key: str | None) -> Sent:
    headers = {} if key is None else {"Idempotency-Key": key}
    return record(Sent, server.post(path("events", name), {"payload": payload}, **headers))


def list_events(server: Server, name: str | None, limit: int) -> list[EventRow]:
    where = path("sent-events") if name is None else path("events", name)
    return [record(EventRow, each) for each in server.get(where, limit=min(limit, _MOST))["items"]]


def list_assets(server: Server) -> list[Asset]:
    return [
        record(
            Asset,
            each,
            producers=[record(Producer, one) for one in each["producers"]],
            consumers=[record(Consumer, one) for one in each["consumers"]],
        )
        for each in server.get(path("assets"))["items"]
    ]


def update_asset(server: Server, name: str, extra: Mapping[str, object]) -> AssetEvent:
    return record(AssetEvent, server.post(path("assets", name, "updates"), {"extra": dict(extra)}))


def list_approvals(server: Server, limit: int) -> list[ApprovalRow]:
    return [_approval_row(each) for each in server.get(path("approvals"), limit=min(limit, _MOST))["items"]]


def decide(
    server: Server,
    run_id: int,
    task: str,
    *,
    is_approved: bool,
    note: str | None,
    fields: Callable[[tuple[ParamSpec, ...]], Mapping[str, object]],
) -> ApprovalRow:
    """`fields` reads the form that the task shows."""
    place = path("runs", run_id, "tasks", task, "approval")
    form = read_form(_approval_row(server.get(place)).wait)
    body = {"is_approved": is_approved, "note": note, "fields": dict(fields(form))}
    return _approval_row(server.post(place, body))


def _approval_row(document: Mapping[str, Any]) -> ApprovalRow:
    wait = {"kind": WaitKind.APPROVAL, "form": document["form"], "approvers": document["approvers"]}
    return record(ApprovalRow, document, dag_id=0, wait={name: value for name, value in wait.items() if value})
