"""Tasks that wait without a slot: `wait_until`, `wait_for`, `wait_for_event`, `approval`. While they wait they are a row.

If the wait is known when the DAG is written, no runner is involved. An instant known only in a run takes one short attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Unpack

from evertick.domain.access import Role
from evertick.domain.dags.params import declare_params
from evertick.domain.dags.spec import TaskKind
from evertick.domain.dags.waits import TimeoutAction, WaitKind, WaitSpec, read_clock
from evertick.domain.errors import InvalidDag, UserError
from evertick.sdk.builder import FutureResult, TaskRef, current_builder
from evertick.sdk.options import (
    Seconds,
    TimeoutName,
    WaitOptions,
    check_names,
    check_options,
    read_choice,
    read_option,
    read_optional,
    read_seconds,
)
from evertick.sdk.runtime import BoundTask, ParamRef, TaskContext, Until
from evertick.sdk.source_location import refused
from evertick.sdk.task import Task

When = datetime | str | Callable[..., object] | TaskRef | ParamRef
# The time limit of an attempt that computes an instant.
_COMPUTE_SECONDS = 300.0
_read_timeout, _read_action = read_optional(read_seconds), read_choice(TimeoutAction)


def wait_until(when: When, /, **options: Unpack[WaitOptions]) -> TaskRef:
    """Wait until an instant: a `datetime` with a time zone, or a time of day such as "08:00" in the DAG's zone: the first one
    at or after the run's logical date. It may come from a parameter, a task's result or a function of the params."""
    if isinstance(when, str) and (clock := read_clock(when)):
        return _placed("wait_until", WaitSpec(kind=WaitKind.CLOCK, until=clock), options)
    if isinstance(when, datetime | str):
        return _placed("wait_until", WaitSpec(kind=WaitKind.TIME, until=_instant(when).isoformat()), options)
    if not isinstance(when, TaskRef | ParamRef) and (isinstance(when, Task) or not callable(when)):
        raise refused(
            f'wait_until takes a datetime, a time such as "08:00", a param, a task\'s result or a function, not {when!r:.100}.'
        )
    check_names("wait_until", options, WaitOptions.__annotations__)
    given = {"timeout": _COMPUTE_SECONDS, **options}
    computed: Task[..., Any, Any] = Task(_computed, given, {"wait": WaitSpec(kind=WaitKind.POLL, seconds=60.0)})  # type: ignore[arg-type]
    computed.name, computed.names_one_call = options.get("name", "wait_until"), "name" in options
    return computed.place((when,), {}, None)


def wait_for(duration: Seconds, /, **options: Unpack[WaitOptions]) -> TaskRef:
    """Wait for a duration: seconds, a `timedelta` or a text such as "1h30m"."""
    wait = WaitSpec(kind=WaitKind.TIME, seconds=_seconds("wait_for", "the duration", duration))
    return _placed("wait_for", wait, options)


def wait_for_event(
    event: str,
    /,
    *,
    timeout: Seconds | None = None,
    on_timeout: TimeoutAction | TimeoutName = "fail",
    lookback: Seconds = 0,
    **options: Unpack[WaitOptions],
) -> FutureResult:
    """Wait until the event is sent: `evertick events send NAME`. The task's result is the event's payload.

    The name may use parameters of the run, as in "file-{params.day}". Events sent since the run was created count, and with
    `lookback` also events sent up to that long before.
    """
    owner = f"wait_for_event({event!r})"
    check_options(owner, options, wait_for_event, WaitOptions)
    if not isinstance(event, str):
        raise refused(f"wait_for_event takes the name of an event, not {event!r}.")
    wait = WaitSpec(
        kind=WaitKind.EVENT,
        name=event,
        timeout_seconds=read_option(owner, "timeout", timeout, _read_timeout),
        on_timeout=read_option(owner, "on_timeout", on_timeout, _read_action),
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
    on_timeout: TimeoutAction | TimeoutName = "fail",
    on_reject: TimeoutAction | TimeoutName = "fail",
    **options: Unpack[WaitOptions],
) -> FutureResult:
    """Ask for an approval, and wait for the decision: `evertick approvals approve RUN TASK`.

    `form` has the fields to fill in, declared like the params of a DAG. `approvers` is the lowest role that may decide. The
    result has `by`, `at`, `note` and `fields`.
    """
    owner = f"approval({title!r})"
    check_options(owner, options, approval, WaitOptions)
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
        timeout_seconds=read_option(owner, "timeout", timeout, _read_timeout),
        on_timeout=read_option(owner, "on_timeout", on_timeout, _read_action),
        on_reject=read_option(owner, "on_reject", on_reject, _read_action),
        form=fields,
        approvers=read_option(owner, "approvers", approvers, read_optional(read_choice(Role))),
    )
    return _placed("approval", wait, options)


def sensor_wait(
    interval: Seconds, timeout: Seconds | None, on_timeout: str, backoff: float, max_interval: Seconds | None
) -> WaitSpec:
    """The wait of `@task.sensor(...)`."""
    owner = "@task.sensor"
    if isinstance(backoff, bool) or not isinstance(backoff, int | float):
        raise refused(f"{owner}: backoff is {backoff!r}, but it must be a number from 1 to 10.")
    seconds = _seconds(owner, "interval", interval)
    longest = seconds if backoff == 1 else max(seconds, 3600.0)
    return WaitSpec(
        kind=WaitKind.POLL,
        seconds=seconds,
        timeout_seconds=read_option(owner, "timeout", timeout, _read_timeout),
        on_timeout=read_option(owner, "on_timeout", on_timeout, _read_action),
        backoff=float(backoff),
        longest_seconds=longest if max_interval is None else _seconds(owner, "max_interval", max_interval),
    )


def _placed(local: str, wait: WaitSpec, options: Mapping[str, Any]) -> TaskRef:
    check_names(local, options, WaitOptions.__annotations__)
    builder = current_builder(f"{local}(...)")
    name = builder.claim_name(options.get("name") or local, numbered="name" not in options)
    kept = {key: value for key, value in builder.task_defaults.items() if key in WaitOptions.__annotations__}
    return builder.add(BoundTask(name=name, kind=TaskKind.WAIT), {**kept, **options}, {}, wait=wait)


def _computed(when: object, context: TaskContext) -> Until:
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


def _seconds(owner: str, option: str, value: object) -> float:
    return read_option(owner, option, value, read_seconds)
