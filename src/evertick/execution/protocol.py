"""How a runner and an attempt's process speak: length-prefixed JSON frames over a socket pair. No I/O here."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from evertick.domain.attempt import AttemptOrder, Isolation, OutcomeKind, TaskKey

_HEAD_BYTES = 4
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Report(NamedTuple):
    """What a child says when a body has ended. `number` names the attempt within the child."""

    number: int
    kind: OutcomeKind
    reason: str | None = None
    result_json: str | None = None
    exit_code: int | None = None
    no_retry: bool = False
    retry_after_seconds: float | None = None
    log_end: int | None = 0
    log_trouble: str | None = None
    should_retire: bool = False


def frame(message: list[Any] | tuple[Any, ...]) -> bytes:
    body = _to_json(message).encode()
    return len(body).to_bytes(_HEAD_BYTES, "big") + body


class Frames:
    """Cuts a byte stream back into messages; many per read when many arrived together."""

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, received: bytes) -> list[list[Any]]:
        pending = self._pending + received if self._pending else received
        messages: list[list[Any]] = []
        at = 0
        while len(pending) - at >= _HEAD_BYTES:
            end = at + _HEAD_BYTES + int.from_bytes(pending[at : at + _HEAD_BYTES], "big")
            if end > len(pending):
                break
            messages.append(json.loads(pending[at + _HEAD_BYTES : end]))
            at = end
        self._pending = pending[at:]
        return messages


def start_frame(number: int, order: AttemptOrder, *, is_joining: bool = False) -> bytes:
    """The order as a list in a fixed sequence: half the cost of a dict with names, and both ends are one release.

    `is_joining` makes it a coroutine beside others in the same child.
    """
    fields = (
        "join" if is_joining else "start",
        number,
        order.key,
        order.epoch,
        order.session,
        order.attempt,
        order.dag,
        order.task,
        order.version_id,
        order.bundle,
        order.file,
        order.fire_at,
        order.params_json,
        order.inputs_json,
        order.timeout_seconds,
        order.isolation,
        order.command,
    )
    return frame(fields)


def read_start(message: list[Any]) -> tuple[int, AttemptOrder]:
    _, number, key, epoch, session, attempt, dag, task, version_id, bundle, file, fire_at, *rest = message
    params_json, inputs_json, timeout_seconds, isolation, command = rest
    order = AttemptOrder(
        key=TaskKey(*key),
        epoch=epoch,
        session=session,
        attempt=attempt,
        dag=dag,
        task=task,
        version_id=version_id,
        bundle=bundle,
        file=file,
        fire_at=fire_at,
        params_json=params_json,
        inputs_json=inputs_json,
        timeout_seconds=timeout_seconds,
        isolation=Isolation(isolation),
        command=command,
    )
    return number, order


def read_report(message: list[Any]) -> Report:
    number, kind, *rest = message
    return Report(number, OutcomeKind(kind), *rest)
