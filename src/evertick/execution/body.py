"""Calls a task's function and turns the result or the error into a report. Never lets an exception of user code escape."""

from __future__ import annotations

import json
import logging
import threading
import traceback
from collections.abc import Callable
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from evertick.authoring.context import TaskContext, current_context, enter
from evertick.authoring.location import is_own
from evertick.authoring.resolve import BoundTask, HttpCall
from evertick.authoring.signals import Done, Fail, RetryAfter, Skip, Until
from evertick.domain.attempt import RESULT_TAG, OutcomeKind, storable_text
from evertick.domain.retry import RetryPolicy, class_names, may_retry
from evertick.execution.capture import TASK_LOGGER
from evertick.execution.exits import OUT_OF_MEMORY, explain_exit
from evertick.execution.protocol import Desk, Report, Say, Start
from evertick.execution.result import decode_inputs, encode_outputs, encode_result
from evertick.execution.result_files import ResultFiles

if TYPE_CHECKING:
    from evertick.execution.granted import Granted

LONGEST_REASON_CHARS = 1000

_TASK_LOGGER = logging.getLogger(TASK_LOGGER)

_SUCCESS = OutcomeKind.SUCCESS
_NO_POLICY = RetryPolicy()


def context_of(
    start: Start, bound: BoundTask, cancelled: threading.Event, granted: Granted | None = None
) -> TaskContext:
    """The context that the task can read."""
    given: dict[str, Any] = {}
    if granted is not None:
        given = {
            "variables": granted.variables,
            "connections": granted.connections,
            "secrets": granted.secrets,
        }
    return TaskContext(
        run_id=start.run_id,
        dag=start.dag,
        task=start.task,
        map_index=start.map_index,
        attempt=start.attempt,
        epoch=start.epoch,
        idempotency_key=start.idempotency_key,
        fire_at=datetime.fromisoformat(start.fire_at) if start.fire_at else None,
        schedule=bound.schedule,
        params=_from_json(start.params_json),
        logger=_TASK_LOGGER,
        cancelled=cancelled,
        **given,
    )


def inputs_of(start: Start, files: ResultFiles) -> dict[str, Any]:
    """The results of upstream tasks, by task name. Raises ResultLost."""
    inputs: dict[str, Any] = _from_json(start.inputs_json)
    if RESULT_TAG in start.inputs_json:
        inputs = decode_inputs(inputs, lambda digest, size: files.get(start.run_id, digest, size))
    return inputs


def run_body(start: Start, bound: BoundTask, context: TaskContext, desk: Desk) -> Report:
    """Run a plain function, from its arguments to its report."""
    try:
        enter(context)
        value = _call(bound, start, desk)
    except BaseException as error:
        return report_of_error(start.number, error, desk, bound.retry)
    return report_of_value(start, bound, context, value, desk)


async def await_body(start: Start, bound: BoundTask, context: TaskContext, desk: Desk) -> Report:
    """The same for an async function."""
    try:
        enter(context)
        value = await _call(bound, start, desk)
    except BaseException as error:
        return report_of_error(start.number, error, desk, bound.retry)
    return report_of_value(start, bound, context, value, desk)


def report_of_value(start: Start, bound: BoundTask, context: TaskContext, value: object, desk: Desk) -> Report:
    number, say, files = start.number, desk.say, desk.files
    if bound.polls:
        if (waiting := _still_waiting(number, value, say)) is not None:
            return waiting
        value = value.value if isinstance(value, Done) else None
    if bound.outputs and (missing := _missing_outputs(bound, context, value)):
        refusal = f"the task ended without its outputs {missing}; push() each of them or return a dict with them"
        say("ERROR", refusal)
        return Report(number, OutcomeKind.FAILED, refusal)
    pushed = context.pushed
    encoded = encode_outputs(value, pushed, files.max_bytes) if pushed else encode_result(value, files.max_bytes)
    if encoded.refusal is not None:
        refusal = desk.hide(encoded.refusal)
        say("ERROR", refusal)
        return Report(number, OutcomeKind.FAILED, refusal)
    if encoded.replaced_count:
        count = encoded.replaced_count
        say(
            "WARNING",
            f"{count} characters of the result (NUL or lone surrogates) cannot be stored and were replaced by U+FFFD",
        )
    text = encoded.text
    if text is not None and desk.granted is not None:
        text = desk.granted.masker.hide_json(text)
    if text is not None and len(text) > files.spill_bytes:
        try:
            text = files.put(start.run_id, text)
        except OSError as error:
            refusal = f"the result, {len(text):,} characters, cannot be written to {files.folder}: {error.strerror}"
            say("ERROR", refusal)
            return Report(number, OutcomeKind.FAILED, refusal)
    return Report(number, _SUCCESS, None, text)


def _still_waiting(number: int, value: object, say: Say) -> Report | None:
    """The report of a poll that has not found its condition met; None when it has."""
    if value is True or isinstance(value, Done):
        return None
    if value is False:
        return Report(number, OutcomeKind.DEFERRED)
    if isinstance(value, Until):
        return Report(number, OutcomeKind.DEFERRED, None, json.dumps({"until": value.instant.isoformat()}))
    refusal = f"a sensor returns True, False or Done(value), not {value!r:.100}"
    say("ERROR", refusal)
    return Report(number, OutcomeKind.FAILED, refusal, no_retry=True)


def _missing_outputs(bound: BoundTask, context: TaskContext, value: object) -> str:
    given = context.pushed.keys() | (value.keys() if isinstance(value, dict) else set())
    return ", ".join(name for name in bound.outputs if name not in given)


def report_of_error(number: int, error: BaseException, desk: Desk, policy: RetryPolicy = _NO_POLICY) -> Report:
    say = desk.say
    is_final = bool(policy.retry_on or policy.never_on) and not may_retry(policy, class_names(error))
    match error:
        case Skip():
            return Report(number, OutcomeKind.SKIPPED, _bounded(desk.hide(str(error.reason))) or None)
        case Fail():
            return Report(
                number, OutcomeKind.FAILED, _bounded(desk.hide(str(error.reason))) or "Fail", no_retry=error.no_retry
            )
        case RetryAfter():
            reason = _bounded(desk.hide(str(error.reason))) or f"RetryAfter: {error.seconds:g} s"
            return Report(number, OutcomeKind.FAILED, reason, retry_after_seconds=error.seconds)
        case SystemExit():
            return _report_of_exit(number, error, desk)._replace(no_retry=is_final)
        case MemoryError():
            say("ERROR", user_traceback(error))
            return Report(
                number, OutcomeKind.FAILED, f"{OUT_OF_MEMORY}: {described(error, desk.hide)}", no_retry=is_final
            )
        case _:
            say("ERROR", user_traceback(error))
            return Report(number, OutcomeKind.FAILED, described(error, desk.hide), no_retry=is_final)


def described(error: BaseException, hide: Callable[[str], str] = str) -> str:
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be shown)"
    name = type(error).__name__
    return _bounded(hide(f"{name}: {text}" if text else name))


def user_traceback(error: BaseException) -> str:
    """The traceback for the task's author, without Evertick's own frames at the top."""
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


def _call(bound: BoundTask, start: Start, desk: Desk) -> Any:
    inputs = inputs_of(start, desk.files)
    if bound.function is None:
        return _perform(bound, start, inputs, desk)
    args, kwargs = bound.call_arguments(inputs)
    return bound.function(*args, **kwargs)


def _perform(bound: BoundTask, start: Start, inputs: dict[str, Any], desk: Desk) -> object:
    """Run a task that is not a function: an HTTP request, or a program."""
    if isinstance(bound.call, HttpCall):
        from evertick.authoring.http_request import raw_fields, rendered_fields, send
        from evertick.execution.rendered import tell_rendered

        call, names = bound.call, bound.template_names(inputs) if bound.is_template else None
        if names is not None and rendered_fields(call, names) != raw_fields(call):
            tell_rendered(desk, names, lambda hidden: rendered_fields(call, hidden))
        return send(call, names)
    from evertick.authoring.program import run_program

    assert bound.call is not None
    variables = {**task_variables(start), **desk_variables(desk), **bound.environment(inputs)}
    return run_program(bound.call, variables, current_context(), say=desk.say, explain=_exit_of_program)


def _exit_of_program(code: int) -> str:
    status = code << 8 if code >= 0 else -code
    return explain_exit(status, has_oom_evidence=False, is_shell=True).reason


def desk_variables(desk: Desk) -> dict[str, str]:
    return {} if desk.granted is None else desk.granted.environment()


def task_variables(start: Start) -> dict[str, str]:
    """The environment variables that describe the task to a shell or another program."""
    return {
        "EVERTICK_RUN_ID": str(start.run_id),
        "EVERTICK_DAG": start.dag,
        "EVERTICK_TASK": start.task,
        "EVERTICK_MAP_INDEX": str(start.map_index),
        "EVERTICK_ATTEMPT": str(start.attempt),
        "EVERTICK_EPOCH": str(start.epoch),
        "EVERTICK_IDEMPOTENCY_KEY": start.idempotency_key,
        "EVERTICK_FIRE_AT": start.fire_at or "",
        "EVERTICK_PARAMS": start.params_json,
        "EVERTICK_INPUTS": start.inputs_json,
    }


def _report_of_exit(number: int, error: SystemExit, desk: Desk) -> Report:
    """`sys.exit()` and `sys.exit(0)` end a task successfully, as they end a program."""
    code = error.code
    if code is None or code == 0:
        return Report(number, OutcomeKind.SUCCESS)
    if isinstance(code, int):
        return Report(number, OutcomeKind.FAILED, f"exited with code {code}", exit_code=code)
    desk.say("ERR", str(code))
    return Report(number, OutcomeKind.FAILED, _bounded(desk.hide(f"exited with code 1: {code}")), exit_code=1)


def _bounded(text: str) -> str:
    clean = storable_text(str(text))
    return clean if len(clean) <= LONGEST_REASON_CHARS else clean[: LONGEST_REASON_CHARS - 1] + "…"
