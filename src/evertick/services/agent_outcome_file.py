"""The file in which an agent leaves its attempt's outcome, so that the runner that started it can read it when the API
is unreachable."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from evertick.domain.agent_outcome import parse, refusal_to_bytes, to_bytes
from evertick.domain.attempt import Outcome, OutcomeKind
from evertick.services.events import Log

_UNSENT = "result_lost: the result is too large for the agent's outcome file, and did not reach the API"


class OutcomeFile:
    """`path` is None where there is no place to leave a file."""

    def __init__(self, path: Path | None, *, session: int, log: Log) -> None:
        self._path, self._session, self._log = path, session, log

    async def write(self, outcome: Outcome, *, has_result_elsewhere: bool = False) -> bool:
        """Returns whether the whole outcome is safe in the file. `has_result_elsewhere`: the API does not have its
        result yet."""
        if self._path is None:
            return False
        left = outcome
        if has_result_elsewhere:
            left = replace(outcome, kind=OutcomeKind.LOST, reason=_UNSENT, result_json=None)
        raw = to_bytes(left, session=self._session)
        try:
            await asyncio.to_thread(_write, self._path, raw)
        except OSError as error:
            self._log.warning("outcome_not_left", path=str(self._path), error=error)
            return False
        found = parse(raw, key=outcome.key, epoch=outcome.epoch, session=self._session)
        return found is not None and found.kind is outcome.kind


def leave_refusal(path: Path | None, why: str) -> None:
    """Record why an agent never started, for the runner that started it: the agent's own output disappears with its
    container."""
    # An agent that cannot write here has already logged the reason. And an outcome that is there already takes
    # precedence.
    with suppress(OSError):
        if path is not None and not (path.exists() and path.stat().st_size):
            _write(path, refusal_to_bytes(why))


def _write(path: Path, raw: bytes) -> None:
    """Write in place: a pod's termination message is a mounted file that cannot be replaced. Half of a document counts
    as none."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, raw)
        with suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
