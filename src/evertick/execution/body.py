"""Calls a task's function and turns whatever happens into a report. Never lets an exception of user code out."""

from __future__ import annotations

import json
import logging
import threading
import traceback
from collections.abc import Callable
from datetime import datetime
from types import TracebackType
from typing import Any

from evertick.authoring.context import TaskContext, enter
from evertick.authoring.location import is_own
from evertick.authoring.resolve import BoundTask
from evertick.authoring.signals import Fail, RetryAfter, Skip
from evertick.domain.attempt import OutcomeKind
from evertick.execution.capture import TASK_LOGGER
from evertick.execution.exits import OUT_OF_MEMORY
from evertick.execution.protocol import Report, Start
from evertick.execution.result import encode_result, storable_text

LONGEST_REASON_CHARS = 1000

_TASK_LOGGER = logging.getLogger(TASK_LOGGER)

_SUCCESS = OutcomeKind.SUCCESS

Say = Callable[[str, str], None]


def context_of(start: Start, cancelled: threading.Event) -> TaskContext:
    """What the task can ask about itself."""
    return TaskContext(
        run_id=start.run_id,
        dag=start.dag,
        task=start.task,
        map_index=start.map_index,
        attempt=start.attempt,
        epoch=start.epoch,
        idempotency_key=start.idempotency_key,
        fire_at=datetime.fromisoformat(start.fire_at) if start.fire_at else None,
        params=_from_json(start.params_json),
        logger=_TASK_LOGGER,
        cancelled=cancelled,
    )


def inputs_of(start: Start) -> dict[str, Any]:
    inputs: dict[str, Any] = _from_json(start.inputs_json)
    return inputs


def run_body(start: Start, bound: BoundTask, context: TaskContext, say: Say) -> Report:
    """A plain function, from its arguments to its report."""
    try:
        enter(context)
        value = _call(bound, start)
    except BaseException as error:
        return report_of_error(start.number, error, say)
    return report_of_value(start.number, value, say)


async def await_body(start: Start, bound: BoundTask, context: TaskContext, say: Say) -> Report:
    """The same for an async function."""
    try:
        enter(context)
        value = await _call(bound, start)
    except BaseException as error:
        return report_of_error(start.number, error, say)
    return report_of_value(start.number, value, say)


def report_of_value(number: int, value: object, say: Say) -> Report:
    encoded = encode_result(value)
    if encoded.refusal is not None:
        say("ERROR", encoded.refusal)
        return Report(number, OutcomeKind.FAILED, encoded.refusal)
    if encoded.replaced_count:
        count = encoded.replaced_count
        say("WARNING", f"{count} characters of the result (NUL or lone surrogates) cannot be stored: now U+FFFD")
    return Report(number, _SUCCESS, None, encoded.text)


def report_of_error(number: int, error: BaseException, say: Say) -> Report:
    match error:
        case Skip():
            return Report(number, OutcomeKind.SKIPPED, _bounded(error.reason) or None)
        case Fail():
            return Report(number, OutcomeKind.FAILED, _bounded(error.reason) or "Fail", no_retry=error.no_retry)
        case RetryAfter():
            reason = _bounded(error.reason) or f"RetryAfter: {error.seconds:g} s"
            return Report(number, OutcomeKind.FAILED, reason, retry_after_seconds=error.seconds)
        case SystemExit():
            return _report_of_exit(number, error, say)
        case MemoryError():
            say("ERROR", user_traceback(error))
            return Report(number, OutcomeKind.FAILED, f"{OUT_OF_MEMORY}: {described(error)}")
        case _:
            say("ERROR", user_traceback(error))
            return Report(number, OutcomeKind.FAILED, described(error))


def described(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be shown)"
    name = type(error).__name__
    return _bounded(f"{name}: {text}" if text else name)


def user_traceback(error: BaseException) -> str:
    """The traceback as the task's author reads it: Evertick's own frames at its top left out."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and is_own(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except Exception:
        return described(error)


def _from_json(text: str) -> Any:
    """Most tasks have no params and no inputs."""
    return json.loads(text) if text and text != "{}" else {}


def _call(bound: BoundTask, start: Start) -> Any:
    args, kwargs = bound.call_arguments(inputs_of(start))
    assert bound.function is not None
    return bound.function(*args, **kwargs)


def _report_of_exit(number: int, error: SystemExit, say: Say) -> Report:
    """`sys.exit()` and `sys.exit(0)` end a task well, as they end a program well."""
    code = error.code
    if code is None or code == 0:
        return Report(number, OutcomeKind.SUCCESS)
    if isinstance(code, int):
        return Report(number, OutcomeKind.FAILED, f"exited with code {code}", exit_code=code)
    say("ERR", str(code))
    return Report(number, OutcomeKind.FAILED, _bounded(f"exited with code 1: {code}"), exit_code=1)


def _bounded(text: str) -> str:
    clean = storable_text(str(text))
    return clean if len(clean) <= LONGEST_REASON_CHARS else clean[: LONGEST_REASON_CHARS - 1] + "…"
