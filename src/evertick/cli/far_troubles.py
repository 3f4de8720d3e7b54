"""Alerts, notifications and what was set aside at a server, as the records that commands show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evertick.cli.far import path, record
from evertick.db.queries.notifications import Alert, Delivery, DeliveryFilter, QuarantinedRow

if TYPE_CHECKING:
    from evertick.cli.server import Server


def list_alerts(server: Server, dag: str | None, limit: int, *, everything: bool) -> list[Alert]:
    return [record(Alert, each) for each in server.pages(path("alerts"), limit=limit, dag=dag, all=everything)]


def list_set_aside(server: Server, limit: int) -> list[QuarantinedRow]:
    return [record(QuarantinedRow, each) for each in server.pages(path("quarantine"), limit=limit)]


def list_notifications(server: Server, wanted: DeliveryFilter, limit: int) -> list[Delivery]:
    found = server.pages(
        path("notifications"),
        limit=limit,
        state=wanted.state,
        sink=wanted.sink,
        dag=wanted.dag,
        run_id=wanted.run_id,
    )
    return [_delivery(each) for each in found]


def find_notification(server: Server, number: int) -> Delivery:
    return _delivery(server.get(path("notifications", number)))


def retry_one(server: Server, number: int) -> None:
    server.post(path("notifications", number, "retry"))


def retry_failed(server: Server, sink: str | None) -> int:
    return int(server.post(path("notifications", "retry"), {"sink": sink})["count"])


def _delivery(document: Mapping[str, Any]) -> Delivery:
    return record(Delivery, document, delivery_id=document["number"])
