"""The protocol between a runner and an attempt's process: length-prefixed JSON frames over a socket pair.

No I/O here. JSON is decoded without the modules that each fork would map.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from evertick.domain.attempt import AttemptOrder, Isolation, OutcomeKind, Usage
from evertick.storage.result_files import ResultFiles

if TYPE_CHECKING:
    from evertick.attempts.injected_secrets import InjectedSecrets


def json_encoder(*, allow_nan: bool) -> Callable[[Any], str]:
    """Like `json.JSONEncoder.encode`, with its C encoder created once instead of for every call. A value that contains
    itself raises RecursionError."""
    plain = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=allow_nan, separators=(",", ":"))
    make = getattr(json.encoder, "c_make_encoder", None)
    quote = getattr(json.encoder, "encode_basestring", None)
    try:
        encode = make(None, plain.default, quote, None, ":", ",", False, False, allow_nan)  # type: ignore[misc]
    except TypeError:
        return plain.encode
    return lambda value: "".join(encode(value, 0))


_HEAD_BYTES = 4


# `json.loads` searches for white space by regular expression: twice the time, and 40 pages more.
_scan: Callable[[str, int], tuple[Any, int]] = vars(json.JSONDecoder())["scan_once"]


_to_json = json_encoder(allow_nan=True)


class Start(NamedTuple):
    """An order as a child sees it. A tuple, because a fresh child pays 3 µs for every page that creating it touches."""

    verb: str
    number: int
    run_id: int
    idx: int
    map_index: int
    epoch: int
    session: int
    attempt: int
    dag: str
    task: str
    idempotency_key: str
    fire_at: str
    params_json: str
    inputs_json: str
    is_single_use: bool
    command: str | None
    granted_json: str


class Report(NamedTuple):
    """A child's report when a body has ended. `number` identifies the attempt within the child."""

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
    usage: Usage | None = None
    skips: tuple[str, ...] = ()


def frame(message: list[Any] | tuple[Any, ...]) -> bytes:
    body = _to_json(message).encode()
    return len(body).to_bytes(_HEAD_BYTES, "big") + body


class Frames:
    """Splits a byte stream into messages; many per read when many arrived together."""

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending = b""

    @property
    def is_cut(self) -> bool:
        """Whether a message has arrived in part."""
        return bool(self._pending)

    def feed(self, received: bytes) -> list[list[Any]]:
        pending = self._pending + received if self._pending else received
        messages: list[list[Any]] = []
        at = 0
        while len(pending) - at >= _HEAD_BYTES:
            end = at + _HEAD_BYTES + int.from_bytes(pending[at : at + _HEAD_BYTES], "big")
            if end > len(pending):
                break
            messages.append(_scan(pending[at + _HEAD_BYTES : end].decode(), 0)[0])
            at = end
        self._pending = pending[at:]
        return messages


def start_frame(number: int, order: AttemptOrder, *, is_joining: bool = False) -> bytes:
    """The part of an order that a child needs. `is_joining` makes it a coroutine next to others in the same child; a
    trigger always is one."""
    key = order.key
    start = Start(
        "trigger" if order.is_trigger else "join" if is_joining else "start",
        number,
        key.run_id,
        key.idx,
        key.map_index,
        order.epoch,
        order.session,
        order.attempt,
        order.dag,
        order.task,
        order.idempotency_key,
        order.fire_at,
        order.params_json,
        order.inputs_json,
        order.isolation is Isolation.PROCESS or order.command is not None,
        order.command,
        order.granted_json,
    )
    return frame(start)


def read_report(message: list[Any]) -> Report:
    number, kind, *rest, used, skips = message
    return Report(number, _KINDS[kind], *rest)._replace(usage=Usage(*used) if used else None, skips=tuple(skips))


_KINDS = {kind.value: kind for kind in OutcomeKind}


# The reason to stop a trigger whose wait a person has ended: work that it started elsewhere may be ended as well.
TRIGGER_STOPPED = "a person ended the wait"


class Masks(Protocol):
    """The masker of an attempt, which can learn more secrets while it runs."""

    def hide(self, text: str) -> str: ...

    def add(self, secrets: list[str]) -> None: ...


Say = Callable[[str, str], None]
Ask = Callable[[str, dict[str, Any]], Any]


# What every attempt may ask. The other questions need a task that declares `asks`.
OPEN_VERBS = frozenset({"state", "put_state", "steps", "step", "put_step", "partition", "put_updates", "commit_place"})


class AskRefused(Exception):
    """The runner did not answer a question of the attempt. `code` is that of the error there, such as `not_found`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _no_ask(verb: str, _args: dict[str, Any]) -> Any:
    raise AskRefused("unsupported", f"asking for {verb!r} is not possible here")


class AttemptIO(NamedTuple):
    """The context of a body's process: functions for log lines, large results and questions, the injected secrets, and what masks
    its output."""

    say: Say
    files: ResultFiles = ResultFiles()
    granted: InjectedSecrets | None = None
    ask: Ask = _no_ask
    masks: Masks | None = None

    def hide(self, text: str) -> str:
        if self.masks is not None:
            return self.masks.hide(text)
        return text if self.granted is None else self.granted.masker.hide(text)
