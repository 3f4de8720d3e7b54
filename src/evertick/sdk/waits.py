"""Tasks that wait without a slot: `wait_until`, `wait_for`, `wait_for_event`, `approval`. While they wait they are a row.

If the wait is known when the DAG is written, no runner is involved. An instant known only in a run takes one short attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypedDict, TypeVar, Unpack

from evertick.domain.access import Role
from evertick.domain.dags.params import declare_params
from evertick.domain.dags.spec import TaskKind
from evertick.domain.dags.waits import TimeoutAction, WaitKind, WaitSpec, read_clock
from evertick.domain.errors import InvalidDag, UserError
from evertick.domain.states import TriggerRule
from evertick.sdk.builder import TaskRef, current_builder
from evertick.sdk.options import Seconds, check_names, read_choice, read_seconds, task_spec
from evertick.sdk.runtime import BoundTask, ParamRef, TaskContext, Until
from evertick.sdk.source_location import refused
from evertick.sdk.task import Task

T = TypeVar("T")
When = datetime | str | Callable[..., object] | TaskRef | ParamRef
# The time limit of an attempt that computes an instant.
_WORKED_OUT_SECONDS = 300.0


class WaitOptions(TypedDict, total=False):
    """The options of every waiting task."""

    name: str
    trigger_rule: TriggerRule | str
    finish_within: Seconds | None
    on_success: object
    on_failure: object
    on_skipped: object
    on_deadline: object


def wait_until(when: When, /, **options: Unpack[WaitOptions]) -> TaskRef:
    """Wait until an instant: a `datetime` with a time zone, or a time of day such as "08:00" in the DAG's zone: the first one
    at or after the run's logical date. It may come from a parameter, a task's result or a function of the params."""
    check_names("wait_until", options, WaitOptions.__annotations__)
    if isinstance(when, datetime):
        return _placed("wait_until", WaitSpec(kind=WaitKind.TIME, until=_instant(when).isoformat()), options)
    if isinstance(when, str):
        if clock := read_clock(when):
            return _placed("wait_until", WaitSpec(kind=WaitKind.CLOCK, until=clock), options)
        return _placed("wait_until", WaitSpec(kind=WaitKind.TIME, until=_instant(when).isoformat()), options)
    if not isinstance(when, TaskRef | ParamRef) and (isinstance(when, Task) or not callable(when)):
        raise refused(
            f'wait_until takes a datetime, a time such as "08:00", a param, a task\'s result or a function, not {when!r:.100}.'
        )
    given = {"name": "wait_until", "timeout": _WORKED_OUT_SECONDS, **options}
    return Task(_worked_out, given, {"wait": WaitSpec(kind=WaitKind.POLL, seconds=60.0)})(when)  # type: ignore[arg-type]


def wait_for(duration: Seconds, /, **options: Unpack[WaitOptions]) -> TaskRef:
    """Wait for a duration: seconds, a `timedelta` or a text such as "1h30m"."""
    check_names("wait_for", options, WaitOptions.__annotations__)
    wait = WaitSpec(kind=WaitKind.TIME, seconds=_seconds("wait_for", "the duration", duration))
    return _placed("wait_for", wait, options)


def wait_for_event(
    event: str,
    /,
    *,
    timeout: Seconds | None = None,
    on_timeout: str = "fail",
    lookback: Seconds = 0,
    **options: Unpack[WaitOptions],
) -> TaskRef:
    """Wait until the event is sent: `evertick events send NAME`. The task's result is the event's payload.

    The name may use parameters of the run, as in "file-{params.day}". Events sent since the run was created count, and with
    `lookback` also events sent up to that long before.
    """
    owner = f"wait_for_event({event!r})"
    check_names(owner, options, WaitOptions.__annotations__)
    if not isinstance(event, str):
        raise refused(f"wait_for_event takes the name of an event, not {event!r}.")
    wait = WaitSpec(
        kind=WaitKind.EVENT,
        name=event,
        timeout_seconds=_timeout(owner, timeout),
        on_timeout=_otherwise(owner, "on_timeout", on_timeout),
        lookback_seconds=_seconds(owner, "lookback", lookback),
    )
    return _placed("wait_for_event", wait, options)


def approval(
    title: str,
    /,
    *,
    form: Mapping[str, object] | None = None,
    approvers: str | None = None,
    timeout: Seconds | None = None,
    on_timeout: str = "fail",
    on_reject: str = "fail",
    **options: Unpack[WaitOptions],
) -> TaskRef:
    """Ask for an approval, and wait for the decision: `evertick approvals approve RUN TASK`.

    `form` has the fields to fill in, declared like the params of a DAG. `approvers` is the lowest role that may decide. The
    result has `by`, `at`, `note` and `fields`.
    """
    owner = f"approval({title!r})"
    check_names(owner, options, WaitOptions.__annotations__)
    if not isinstance(title, str):
        raise refused(f"approval takes a title, not {title!r}.")
    if form is not None and not isinstance(form, Mapping):
        raise refused(f"{owner}: form must be a dict of fields, not {form!r:.100}.")
    try:
        fields = declare_params(form or {})
    except InvalidDag as error:
        raise refused(f"{owner}: form: {error.message}") from None
    wait = WaitSpec(
        kind=WaitKind.APPROVAL,
        name=title,
        timeout_seconds=_timeout(owner, timeout),
        on_timeout=_otherwise(owner, "on_timeout", on_timeout),
        on_reject=_otherwise(owner, "on_reject", on_reject),
        form=fields,
        approvers=None if approvers is None else _checked(owner, "approvers", approvers, read_choice(Role)),
    )
    return _placed("approval", wait, options)


@dataclass(frozen=True, slots=True, kw_only=True)
class PollResult:
    """The options of `@task.sensor(...)` in addition to those of a task."""

    interval: Seconds = 60
    timeout: Seconds | None = None
    on_timeout: str = "fail"
    backoff: float = 1.0
    max_interval: Seconds | None = None

    def wait(self) -> WaitSpec:
        owner = "@task.sensor"
        if isinstance(self.backoff, bool) or not isinstance(self.backoff, int | float):
            raise refused(f"{owner}: backoff is {self.backoff!r}, but it must be a number from 1 to 10.")
        seconds = _seconds(owner, "interval", self.interval)
        longest = seconds if self.backoff == 1 else max(seconds, 3600.0)
        return WaitSpec(
            kind=WaitKind.POLL,
            seconds=seconds,
            timeout_seconds=_timeout(owner, self.timeout),
            on_timeout=_otherwise(owner, "on_timeout", self.on_timeout),
            backoff=float(self.backoff),
            longest_seconds=longest
            if self.max_interval is None
            else _seconds(owner, "max_interval", self.max_interval),
        )


def _placed(local: str, wait: WaitSpec, options: Mapping[str, Any]) -> TaskRef:
    draft = current_builder(f"{local}(...)")
    name = draft.claim_name(options.get("name") or local, numbered="name" not in options)
    kept = {key: value for key, value in draft.task_defaults.items() if key in WaitOptions.__annotations__}
    draft.note_callbacks({**kept, **options})
    spec = replace(task_spec(name, {**kept, **options}), kind=TaskKind.WAIT, group=draft.group, wait=wait)
    return draft.add(spec, BoundTask(name=name, kind=TaskKind.WAIT))


def _worked_out(when: object, context: TaskContext) -> Until:
    value = when(context.params) if callable(when) else when
    if isinstance(value, timedelta):
        raise UserError("wait_until needs an instant, not a duration; use wait_for(...) for a duration")
    return Until(_instant(value))


def _instant(value: object) -> datetime:
    """An unambiguous instant, with a time zone."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise refused(
                f'wait_until: {value!r:.100} is neither an instant nor a time of day such as "08:00".'
            ) from None
    if not isinstance(value, datetime):
        raise refused(f"wait_until needs a datetime, not {value!r:.100}.")
    if value.tzinfo is None:
        raise refused(
            f"wait_until: {value.isoformat()} has no time zone; write datetime(..., tzinfo=UTC) or another zone."
        )
    return value


def _timeout(owner: str, value: object) -> float | None:
    return None if value is None else _seconds(owner, "timeout", value)


def _seconds(owner: str, option: str, value: object) -> float:
    return _checked(owner, option, value, read_seconds)


def _otherwise(owner: str, option: str, value: object) -> TimeoutAction:
    return _checked(owner, option, value, read_choice(TimeoutAction))


def _checked(owner: str, option: str, value: object, read: Callable[[object], T]) -> T:
    try:
        return read(value)
    except (TypeError, ValueError, UserError) as error:
        raise refused(f"{owner}: {option} is {value!r:.100}, but {error}.") from None
