"""Questions of Airflow's tasks to people ("human in the loop"): an attempt asks, its task waits without a slot, and another
attempt resumes the operator with the answer. Imports nothing of Airflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from evertick.domain.dags.params import ParamType

_TYPES = {each.value for each in ParamType}
_LONGEST_TITLE = 200
# Before Airflow 3.3 a task waits through a trigger, which asks for the answer every few seconds.
WAITING_TRIGGER = "airflow.providers.standard.triggers.hitl.HITLTrigger"


@dataclass(frozen=True, slots=True)
class AwaitInputTask:
    """The end of an attempt that waits for people, in place of a deferral to `WAITING_TRIGGER`."""

    next_method: str
    next_kwargs: Mapping[str, Any] | None
    timeout: timedelta | None
    state: str = "awaiting_input"


@dataclass(frozen=True, slots=True)
class Resumed:
    """How an operator continues. `event` is None while there is no answer and time is left."""

    next_method: str
    next_kwargs: Mapping[str, Any]
    event: dict[str, Any] | None


def question(asked: Any, final: Any, attempt: int, now: datetime) -> dict[str, Any]:
    """What the database stores of a question: `asked` is the operator's request, `final` the message that ended its attempt."""
    until = None if final.timeout is None else (now + final.timeout).isoformat()
    params = asked.params or {}
    return {
        "poll_at": until or "infinity",
        "request": {
            "title": " ".join(asked.subject.split())[:_LONGEST_TITLE] or "Input",
            "subject": asked.subject,
            "body": asked.body,
            "options": asked.options,
            "defaults": asked.defaults,
            "multiple": bool(asked.multiple),
            "params": params,
            "form": [_field(name, param) for name, param in params.items()],
            "users": [{"id": each.id, "name": each.name} for each in asked.assigned_users or ()],
            "until": until,
            "attempt": attempt,
            "next_method": final.next_method,
            "next_kwargs": dict(final.next_kwargs or {}),
        },
    }


def resumption(found: Mapping[str, Any] | None, attempt: int, now: datetime) -> Resumed | None:
    """How the attempt goes on; None: it starts from the beginning, because it has asked nothing yet."""
    if found is None or found["request"]["attempt"] != attempt:
        return None
    request: Mapping[str, Any] = found["request"]
    event: dict[str, Any] | None = None
    if found["decided_at"] is not None:
        name = str(found["decided_by"]).partition(":")[2] or found["decided_by"]
        event = _answer(found["chosen"], found["fields"], datetime.fromisoformat(found["decided_at"]))
        event |= {"responded_by_user": {"id": name, "name": name}, "timedout": False}
    elif request["until"] is not None and datetime.fromisoformat(request["until"]) <= now:
        if request["defaults"] is None:
            event = {"error": "There was no answer in time.", "error_type": "timeout"}
        else:
            values = {name: _default(param) for name, param in request["params"].items()}
            event = _answer(request["defaults"], values, now) | {"responded_by_user": None, "timedout": True}
    return Resumed(request["next_method"], request["next_kwargs"], event)


def still_waiting(found: Mapping[str, Any]) -> dict[str, Any]:
    """The same question again, for an attempt that was started too early."""
    request = found["request"]
    return {"poll_at": request["until"] or "infinity", "request": request}


def _answer(chosen: list[str], values: Mapping[str, Any] | None, at: datetime) -> dict[str, Any]:
    return {"chosen_options": list(chosen), "params_input": dict(values or {}), "responded_at": at.astimezone(UTC)}


def _field(name: str, param: Any) -> dict[str, Any]:
    """A param as a field of the form that people fill in."""
    schema = param.get("schema") or {} if _is_param(param) else {}
    declared = schema.get("type")
    kinds = [declared] if isinstance(declared, str) else list(declared or ())
    plain = [kind for kind in kinds if kind != "null"]
    value = _default(param)
    field: dict[str, Any] = {"name": name, "default": value}
    if len(plain) == 1 and plain[0] in _TYPES:
        field["type"] = plain[0]
    if schema.get("enum"):
        field["choices"] = schema["enum"]
    if value is None:
        field["nullable"] = True
    if _is_param(param) and param.get("description"):
        field["description"] = param["description"]
    return field


def _default(param: Any) -> Any:
    return param.get("value") if _is_param(param) else param


def _is_param(param: Any) -> bool:
    return isinstance(param, Mapping) and {"value", "schema"} <= set(param)
