"""Runs a program in any language: its environment describes the run, JSON lines on its standard output report the result.

{"evertick": "result", "value": …}                    {"evertick": "output", "name": "rows", "value": …}
{"evertick": "log", "level": "INFO", "text": "…"}     {"evertick": "skip" | "fail" | "retry_after", "reason": "…", …}
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from evertick.sdk.runtime import Fail, ProgramCall, RetryAfter, Skip, TaskContext, push

_LONGEST_LINE_BYTES = 16 * 1024 * 1024
_WORD = "evertick"


class _Answer:
    """The program's reports so far. The last one counts."""

    def __init__(self, context: TaskContext) -> None:
        self._logger = context.logger
        self.value: object = None
        self.ending: Exception | None = None

    def add(self, said: Mapping[str, Any]) -> None:
        reason = str(said.get("reason", ""))
        match said[_WORD]:
            case "result":
                self.value = said.get("value")
            case "output":
                push(str(said.get("name", "")), said.get("value"))
            case "log":
                level = logging.getLevelNamesMapping().get(str(said.get("level", "INFO")).upper(), logging.INFO)
                self._logger.log(level, "%s", said.get("text", ""))
            case "skip":
                self.ending = Skip(reason)
            case "fail":
                self.ending = Fail(reason, no_retry=not said.get("retry", False))
            case "retry_after":
                self.ending = RetryAfter(float(said.get("seconds", 0)), reason)
            case other:
                raise ValueError(f"unknown report {other!r}")


def run_program(
    call: ProgramCall,
    variables: Mapping[str, str],
    context: TaskContext,
    *,
    say: Callable[[str, str], None],
    explain: Callable[[int], str],
) -> object:
    """The exit code decides the outcome, unless the program reported one; `explain` describes an exit code in words. Processes
    that it left running are killed with the attempt."""
    for name, value in variables.items():
        os.putenv(name, value)
    try:
        # In the same process group: a stop request reaches it as well. Its standard error already goes to the attempt's log.
        process = subprocess.Popen(call.argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    except (OSError, ValueError) as error:
        raise Fail(f"{call.argv[0]} cannot be started: {error}") from None
    answer = _Answer(context)
    assert process.stdout is not None
    while line := process.stdout.readline(_LONGEST_LINE_BYTES):
        _take(line, answer, say)
    code = process.wait()
    if answer.ending is not None:
        raise answer.ending
    if code != 0:
        raise Fail(explain(code), no_retry=False)
    return answer.value


def _take(line: bytes, answer: _Answer, say: Callable[[str, str], None]) -> None:
    """A line that is not a report goes to the log."""
    text = line.decode("utf-8", "replace").rstrip("\r\n")
    said: object = None
    if text.startswith("{") and f'"{_WORD}"' in text:
        with suppress(ValueError, RecursionError):
            said = json.loads(text)
    if not isinstance(said, dict) or _WORD not in said:
        say("OUT", text)
        return
    try:
        answer.add(said)
    except (TypeError, ValueError) as error:
        raise Fail(f"the program wrote {text[:200]!r}, which is not a valid report: {error}") from None
