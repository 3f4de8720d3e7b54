"""Triggers of deferrable operators: what a deferral keeps, the coroutine that waits for the event, and how the task resumes.

All triggers of a process share its event loop, and the SDK's one global supervisor: a context variable says whose
question it is. Arguments of a trigger may be secrets: they are never logged.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from airflow.sdk.execution_time import comms, task_runner

from evertick.airflow.messages import Supervisor, encoder
from evertick.attempts.protocol import TRIGGER_STOPPED, AttemptIO, Report
from evertick.domain.attempt import OutcomeKind, storable_text

LONGEST_ON_KILL_SECONDS = 30.0
_FAIL = "__fail__"

_current: ContextVar[Supervisor] = ContextVar("evertick_supervisor")


class SharedSupervisor:
    """The supervisor of a process that runs triggers. Threads that a trigger starts with the tools of asyncio or asgiref
    inherit its context."""

    def send(self, msg: Any) -> Any:
        return self._of_trigger().send(msg)

    async def asend(self, msg: Any) -> Any:
        return await self._of_trigger().asend(msg)

    def _of_trigger(self) -> Supervisor:
        try:
            return _current.get()
        except LookupError:
            raise RuntimeError(
                "this code runs in no trigger: pass it the context of one, contextvars.copy_context()"
            ) from None


def deferral_json(final: Any) -> str:
    """What the database keeps of a DeferTask message."""
    limit = final.trigger_timeout
    # Before 3.2 the message encodes these two when it is dumped.
    given = final.model_dump(include={"trigger_kwargs", "next_kwargs"})
    kept = {
        "classpath": final.classpath,
        "kwargs": given["trigger_kwargs"],
        "timeout": None if limit is None else max(limit.total_seconds(), 0.0),
        "next_method": final.next_method,
        "next_kwargs": given["next_kwargs"],
    }
    return json.dumps({"trigger": kept})


def start_fields(task: Any, context: Any) -> Any:
    """The DeferTask message of an operator with `start_from_trigger`, whose `execute` is never called."""
    args = task.start_trigger_args
    templated = {
        name: task.render_template(value, context) if name in task.template_fields else value
        for name, value in (args.trigger_kwargs or {}).items()
    }
    codec = encoder()
    return comms.DeferTask(
        classpath=args.trigger_cls,
        trigger_kwargs=codec.serialize(templated),
        trigger_timeout=args.timeout,
        next_method=args.next_method,
        next_kwargs=codec.serialize(args.next_kwargs or {}),
    )


def resume_fields(resumed: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the SDK's context for a task whose trigger is over."""
    event, codec = resumed["event"], encoder()
    if event.get("is_late"):
        return {"next_method": _FAIL, "next_kwargs": codec.serialize({"error": "Trigger timeout"})}
    if "error" in event:
        error = {"error": "Trigger failure", "traceback": event["error"]}
        return {"next_method": _FAIL, "next_kwargs": codec.serialize(error)}
    kwargs = dict(codec.deserialize(resumed["next_kwargs"]) or {}) if resumed["next_kwargs"] else {}
    kwargs["event"] = codec.deserialize(event["event"])
    return {"next_method": resumed["next_method"], "next_kwargs": codec.serialize(kwargs)}


async def wait_for_event(
    number: int, given: Mapping[str, Any], instance: Any, supervisor: Supervisor, io: AttemptIO
) -> Report:
    """Run a trigger until its first event. An error is an event, too: the task fails with it."""
    _current.set(supervisor)
    if not isinstance(getattr(task_runner, "SUPERVISOR_COMMS", None), SharedSupervisor):
        task_runner.SUPERVISOR_COMMS = SharedSupervisor()
    try:
        event = await _first_event(given, instance, io)
    except asyncio.CancelledError:
        return Report(number, OutcomeKind.KILLED, "the trigger was stopped")
    except Exception as error:
        lines = traceback.format_exception(error)
        io.say("ERROR", f"The trigger {given['classpath']} failed.\n{''.join(lines)}")
        event = {"error": lines}
    try:
        text = json.dumps(event)
    except (TypeError, ValueError) as error:
        text = json.dumps({"error": [f"the event of {given['classpath']} is not JSON: {error}"]})
    if len(text) > io.files.max_bytes:
        text = json.dumps({"error": [f"the event of {given['classpath']} has more than {io.files.max_bytes:,} bytes"]})
    return Report(number, OutcomeKind.SUCCESS, None, storable_text(text.replace("\\u0000", "\\ufffd")))


async def _first_event(given: Mapping[str, Any], instance: Any, io: AttemptIO) -> dict[str, Any]:
    module, _, name = given["classpath"].rpartition(".")
    kind = getattr(import_module(module), name)
    trigger = kind(**(encoder().deserialize(given["kwargs"] or {}) or {}))
    trigger.task_instance = instance
    trigger.trigger_id = instance.id
    events = trigger.run()
    try:
        event = await anext(events, None)
    except asyncio.CancelledError as canceled:
        if canceled.args[:1] == (TRIGGER_STOPPED,) and hasattr(trigger, "on_kill"):
            await _bounded(trigger.on_kill(), io)
        raise
    finally:
        with suppress(Exception):
            await events.aclose()
        await _bounded(trigger.cleanup(), io)
    if event is None:
        return {"error": ["The trigger ended without an event."]}
    if (state := getattr(event, "task_instance_state", None)) is not None:
        return {"end": str(getattr(state, "value", state)), "xcoms": event.xcoms}
    return {"event": encoder().serialize(event.payload)}


async def _bounded(work: Any, io: AttemptIO) -> None:
    try:
        async with asyncio.timeout(LONGEST_ON_KILL_SECONDS):
            await work
    except Exception:
        io.say("WARNING", f"The trigger did not end cleanly.\n{traceback.format_exc()}")
