"""Loads a task's function, calls it, and turns the result or the error into a report.

Never lets an exception of user code escape.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from evertick.attempts.protocol import AttemptIO, Report, Start, json_encoder
from evertick.domain.attempt import RESULT_TAG, UNSTORABLE, OutcomeKind, storable_text
from evertick.domain.errors import InvalidDag
from evertick.domain.retry import RetryPolicy, class_names, may_retry
from evertick.logs.capture import TASK_LOGGER
from evertick.processes.system import native_threads
from evertick.processes.tree import OUT_OF_MEMORY, explain_exit
from evertick.sdk.dag import Rehearsal, load_dag_file
from evertick.sdk.durable import Durable
from evertick.sdk.runtime import (
    BoundTask,
    CompiledDag,
    Done,
    Fail,
    HttpCall,
    RetryAfter,
    Skip,
    TaskContext,
    Until,
    current_context,
    enter,
    find_task,
)
from evertick.sdk.source_location import is_own
from evertick.storage.result_files import ResultFiles

if TYPE_CHECKING:
    from evertick.attempts.injected_secrets import InjectedSecrets


DEFAULT_RESULT_BYTES = 1024 * 1024


_to_json = json_encoder(allow_nan=False)


class EncodedResult(NamedTuple):
    """Either `text`, with the number of replaced characters, or the `refusal` that fails the task."""

    text: str | None
    refusal: str | None = None
    replaced_count: int = 0


def encode_result(
    value: Any, max_bytes: int = DEFAULT_RESULT_BYTES, pushed: Mapping[str, object] | None = None
) -> EncodedResult:
    """`pushed` are the outputs that were pushed by name."""
    if pushed:
        return _encode_typed(value, max_bytes, pushed)
    if value is None:
        return EncodedResult(None)
    try:
        text = _to_json(value)
        if RESULT_TAG in text:
            return _encode_typed(value, max_bytes)
        return _within_bounds(text, value, max_bytes)
    except (TypeError, ValueError, RecursionError):
        return _encode_typed(value, max_bytes)


def _encode_typed(value: Any, max_bytes: int, pushed: Mapping[str, object] | None = None) -> EncodedResult:
    typed = _typed()
    try:
        named = {name: typed.to_plain(item, f"output {name!r}") for name, item in (pushed or {}).items()}
        plain = typed.to_plain(value)
        if pushed:
            plain = {RESULT_TAG: "outputs", "value": plain, "named": named}
        return _within_bounds(_to_json(plain), plain, max_bytes)
    except RecursionError:
        return EncodedResult(
            None, "result cannot be stored: it is nested too deeply or contains itself; return a flatter value"
        )
    except (typed.Unstorable, TypeError, ValueError) as error:
        return EncodedResult(
            None,
            f"result cannot be stored as JSON: {storable_text(str(error))}; return only dict, list, set, str, int,"
            " finite float, bool, None, bytes, Decimal, UUID, dates and times, and dataclasses, pydantic models or enums of"
            " a module; write anything else, such as a DataFrame, to a file, and return its path",
        )


def _typed() -> ModuleType:
    """Imported when a value first needs it: otherwise every attempt's process would map its modules."""
    from evertick.attempts import typed_json

    return typed_json


def decode_inputs(inputs: Any, read_file: Callable[[str, int], str]) -> Any:
    """Upstream results, with types that JSON lacks restored. Raises ResultLost."""
    return _typed().from_plain(inputs, read_file)


def _within_bounds(text: str, value: Any, max_bytes: int) -> EncodedResult:
    replaced_count = 0
    if "\\u0000" in text or (not text.isascii() and UNSTORABLE.search(text)):
        cleaned, replaced_count = _clean(value)
        text = _to_json(cleaned)
    size = len(text) if text.isascii() else len(text.encode())
    if size > max_bytes:
        return EncodedResult(
            None,
            f"result too large: {type(value).__name__} of {size:,} bytes as JSON, at most {max_bytes:,} are kept; "
            "write it to a file or a table and return its location",
        )
    return EncodedResult(text, None, replaced_count)


def _clean(value: Any) -> tuple[Any, int]:
    if isinstance(value, str):
        return UNSTORABLE.subn("\ufffd", value)
    if isinstance(value, dict):
        pairs = [(_clean(key), _clean(item)) for key, item in value.items()]
        return {key[0]: item[0] for key, item in pairs}, sum(key[1] + item[1] for key, item in pairs)
    if isinstance(value, list | tuple):
        items = [_clean(item) for item in value]
        return [item for item, _ in items], sum(count for _, count in items)
    return value, 0


LONGEST_REASON_CHARS = 1000


_TASK_LOGGER = logging.getLogger(TASK_LOGGER)


_SUCCESS = OutcomeKind.SUCCESS


_NO_POLICY = RetryPolicy()


def context_of(
    start: Start,
    bound: BoundTask,
    cancelled: threading.Event,
    durable: Durable | None = None,
    granted: InjectedSecrets | None = None,
) -> TaskContext:
    """The context that the task can read."""
    given: dict[str, Any] = {} if durable is None else {"durable": durable}
    if granted is not None:
        given |= {"variables": granted.variables, "connections": granted.connections, "secrets": granted.secrets}
    return TaskContext(
        run_id=start.run_id,
        dag=start.dag,
        task=start.task,
        map_index=start.map_index,
        attempt=start.attempt,
        epoch=start.epoch,
        idempotency_key=start.idempotency_key,
        fire_at=datetime.fromisoformat(start.fire_at),
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


def run_body(start: Start, bound: BoundTask, context: TaskContext, io: AttemptIO) -> Report:
    """Run a plain function, from its arguments to its report."""
    try:
        enter(context)
        value = _call(bound, start, io)
    except BaseException as error:
        return report_of_error(start.number, error, io, bound.retry)
    return report_of_value(start, bound, context, value, io)


async def await_body(start: Start, bound: BoundTask, context: TaskContext, io: AttemptIO) -> Report:
    """The same for an async function."""
    try:
        enter(context)
        value = await _call(bound, start, io)
    except BaseException as error:
        return report_of_error(start.number, error, io, bound.retry)
    return report_of_value(start, bound, context, value, io)


def report_of_value(start: Start, bound: BoundTask, context: TaskContext, value: object, io: AttemptIO) -> Report:
    number, files = start.number, io.files
    if bound.polls:
        if (waiting := _still_waiting(number, value, io)) is not None:
            return waiting
        value = value.value if isinstance(value, Done) else None
    if bound.outputs and (missing := _missing_outputs(bound, context, value)):
        refusal = f"the task ended without its outputs {missing}; push() each of them or return a dict with them"
        return _refused(number, refusal, io)
    encoded = encode_result(value, files.max_bytes, context.pushed)
    if encoded.refusal is not None:
        return _refused(number, io.hide(encoded.refusal), io)
    if count := encoded.replaced_count:
        replaced = "characters of the result (NUL or lone surrogates) cannot be stored and were replaced by U+FFFD"
        io.say("WARNING", f"{count} {replaced}")
    text = encoded.text
    if text is not None and io.granted is not None:
        text = io.granted.masker.hide_json(text)
    if text is not None and len(text) > files.spill_bytes:
        try:
            text = files.put(start.run_id, text)
        except OSError as error:
            where = f"cannot be written to {files.folder}: {error.strerror}"
            return _refused(number, f"the result, {len(text):,} characters, {where}", io)
    return Report(number, _SUCCESS, None, text)


def _refused(number: int, refusal: str, io: AttemptIO, *, no_retry: bool = False) -> Report:
    io.say("ERROR", refusal)
    return Report(number, OutcomeKind.FAILED, refusal, no_retry=no_retry)


def _still_waiting(number: int, value: object, io: AttemptIO) -> Report | None:
    """The report of a poll that has not found its condition met; None when it has."""
    if value is True or isinstance(value, Done):
        return None
    if value is False:
        return Report(number, OutcomeKind.DEFERRED)
    if isinstance(value, Until):
        return Report(number, OutcomeKind.DEFERRED, None, json.dumps({"until": value.instant.isoformat()}))
    return _refused(number, f"a sensor returns True, False or Done(value), not {value!r:.100}", io, no_retry=True)


def _missing_outputs(bound: BoundTask, context: TaskContext, value: object) -> str:
    given = context.pushed.keys() | (value.keys() if isinstance(value, dict) else set())
    return ", ".join(name for name in bound.outputs if name not in given)


def report_of_error(number: int, error: BaseException, io: AttemptIO, policy: RetryPolicy = _NO_POLICY) -> Report:
    is_final = bool(policy.retry_on or policy.never_on) and not may_retry(policy, class_names(error))
    if isinstance(error, Skip | Fail | RetryAfter):
        given = _bounded(io.hide(str(error.reason)))
    match error:
        case Skip():
            return Report(number, OutcomeKind.SKIPPED, given or None)
        case Fail():
            return Report(number, OutcomeKind.FAILED, given or "Fail", no_retry=error.no_retry)
        case RetryAfter():
            reason = given or f"RetryAfter: {error.seconds:g} s"
            return Report(number, OutcomeKind.FAILED, reason, retry_after_seconds=error.seconds)
        case SystemExit():
            return _report_of_exit(number, error, io)._replace(no_retry=is_final)
    io.say("ERROR", user_traceback(error))
    reason = f"{OUT_OF_MEMORY}: " if isinstance(error, MemoryError) else ""
    return Report(number, OutcomeKind.FAILED, reason + described(error, io.hide), no_retry=is_final)


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


def _call(bound: BoundTask, start: Start, io: AttemptIO) -> Any:
    inputs = inputs_of(start, io.files)
    if bound.function is None:
        return _perform(bound, start, inputs, io)
    args, kwargs = bound.call_arguments(inputs)
    return bound.function(*args, **kwargs)


def _perform(bound: BoundTask, start: Start, inputs: dict[str, Any], io: AttemptIO) -> object:
    """Run a task that is not a function: an HTTP request, or a program."""
    if isinstance(bound.call, HttpCall):
        from evertick.attempts.rendered_templates import tell_rendered
        from evertick.sdk.http_task import raw_fields, rendered_fields, send

        call, names = bound.call, bound.template_names(inputs) if bound.is_template else None
        if names is not None and rendered_fields(call, names) != raw_fields(call):
            tell_rendered(io, names, lambda hidden: rendered_fields(call, hidden))
        return send(call, names)
    from evertick.sdk.program_task import run_program

    assert bound.call is not None
    variables = {**task_variables(start), **attempt_variables(io), **bound.environment(inputs)}
    return run_program(bound.call, variables, current_context(), say=io.say, explain=_exit_of_program)


def _exit_of_program(code: int) -> str:
    status = code << 8 if code >= 0 else -code
    return explain_exit(status, has_oom_evidence=False, is_shell=True).reason


def attempt_variables(io: AttemptIO) -> dict[str, str]:
    return {} if io.granted is None else io.granted.environment()


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
        "EVERTICK_FIRE_AT": start.fire_at,
        "EVERTICK_PARAMS": start.params_json,
        "EVERTICK_INPUTS": start.inputs_json,
    }


def _report_of_exit(number: int, error: SystemExit, io: AttemptIO) -> Report:
    """`sys.exit()` and `sys.exit(0)` end a task successfully, as they end a program."""
    code = error.code
    if code is None or code == 0:
        return Report(number, OutcomeKind.SUCCESS)
    if isinstance(code, int):
        return Report(number, OutcomeKind.FAILED, f"exited with code {code}", exit_code=code)
    io.say("ERR", str(code))
    return Report(number, OutcomeKind.FAILED, _bounded(io.hide(f"exited with code 1: {code}")), exit_code=1)


def _bounded(text: str) -> str:
    clean = storable_text(str(text))
    return clean if len(clean) <= LONGEST_REASON_CHARS else clean[: LONGEST_REASON_CHARS - 1] + "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    dags: Mapping[str, CompiledDag] = field(default_factory=dict)
    failure: str | None = None
    traceback: str = ""
    rehearsal: Rehearsal | None = None

    def find(self, dag: str, task: str) -> BoundTask:
        if self.failure is not None:
            raise InvalidDag(self.failure)
        return find_task(self.dags, dag, task)

    def coroutine_tasks(self) -> list[tuple[str, str]]:
        return [(dag.name, task.name) for dag in self.dags.values() for task in dag.tasks.values() if task.is_async]


def load(folder: str, file: str) -> Loaded:
    """Import the file. Any exception, even SystemExit, becomes the failure."""
    try:
        found = load_dag_file(Path(folder), file)
        if found.rehearsal is not None:
            found.rehearsal.warm_up()
        return Loaded(dags=found.dags, rehearsal=found.rehearsal)
    except BaseException as error:
        return Loaded(failure=f"{file} cannot be imported: {described(error)}", traceback=user_traceback(error))


def obstacle_to_forking(spared_fd: int) -> str | None:
    """A state that the import left in this process and that a fork would break."""
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if len(native_threads()) > 1:
        return f"its import starts threads ({', '.join(names) or 'of an extension'})"
    for fd in (int(entry.name) for entry in Path("/dev/fd").iterdir()):
        with suppress(OSError):  # the listing's own
            if fd != spared_fd and stat.S_ISSOCK(os.fstat(fd).st_mode):
                return "its import opens sockets"
    return None
