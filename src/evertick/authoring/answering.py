"""Waiting tasks in `dag.test()`: times pass at once, sensors really poll, events and approvals take given answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from time import monotonic, sleep

from evertick.authoring.signals import Done, Fail, Skip, Until
from evertick.domain.dag import DagSpec
from evertick.domain.errors import UserError
from evertick.domain.params import check_params, parse_param
from evertick.domain.waiting import Otherwise, WaitKind, WaitSpec


def check_answers(spec: DagSpec, answers: Mapping[str, object]) -> None:
    """Refuse an answer for a task that does not wait for one."""
    asked = [task.name for task in spec.tasks if task.wait and task.wait.kind in (WaitKind.EVENT, WaitKind.APPROVAL)]
    if unknown := sorted(set(answers) - set(asked)):
        raise UserError(
            f"answers: task {unknown[0]!r} does not wait for an answer; tasks that do: {', '.join(asked) or 'none'}."
        )


def answered(name: str, wait: WaitSpec, answers: Mapping[str, object]) -> object:
    """The result of a task that waits for a time, an event or an approval."""
    match wait.kind:
        case WaitKind.EVENT:
            return answers.get(name)
        case WaitKind.APPROVAL:
            return _decided(name, wait, answers)
        case _:
            return None


def polled(call: Callable[[], object], wait: WaitSpec) -> object:
    """The value that a sensor found, with its real intervals and timeout."""
    began, pause = monotonic(), wait.seconds or 0.0
    while True:
        value = call()
        if isinstance(value, Done | Until) or value is True:
            return value.value if isinstance(value, Done) else None
        if value is not False:
            raise Fail(f"a sensor returns True, False or Done(value), not {value!r:.100}")
        left = float("inf") if wait.timeout_seconds is None else wait.timeout_seconds - (monotonic() - began)
        if left <= pause:
            reason = f"sensor_timeout: not true within {wait.timeout_seconds:g} s"
            raise Skip(reason) if wait.on_timeout is Otherwise.SKIP else Fail(reason)
        sleep(pause)
        pause = min(pause * wait.backoff, wait.longest_seconds or pause)


def _decided(name: str, wait: WaitSpec, answers: Mapping[str, object]) -> object:
    given = answers.get(name)
    if given is None:
        given = _asked(name, wait)
    if given is False:
        raise Skip("rejected") if wait.on_reject is Otherwise.SKIP else Fail("rejected")
    if not isinstance(given, Mapping):
        raise UserError(
            f"answers[{name!r}] must be a dict of the form's fields, or False to reject, not {given!r:.100}."
        )
    return {"by": "dag.test", "at": None, "note": None, "fields": check_params(wait.form, given)}


def _asked(name: str, wait: WaitSpec) -> object:
    """Ask on the terminal, if there is one; otherwise approve a form that needs no input."""
    if not sys.stdin.isatty():
        if any(field.required for field in wait.form):
            raise UserError(f"{wait.name!r} has a form: fill it in with dag.test(answers={{{name!r}: {{...}}}}).")
        return {}
    if input(f"{wait.name} Approve? [Y/n] ").strip().lower() in ("n", "no"):
        return False
    typed = {field.name: input(f"  {field.name} ({field.allowed}): ") for field in wait.form}
    return {key: parse_param(wait.form, key, text) for key, text in typed.items() if text}
