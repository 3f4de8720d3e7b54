"""Where an agent leaves how its attempt ended, for whoever started it to find when the API is not there."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from evertick.domain.agent_outcome import parse, refusal_to_bytes, to_bytes
from evertick.domain.attempt import Outcome, OutcomeKind
from evertick.services.events import Log

_UNSENT = "result_lost: its result is too large to be left behind by the agent, and did not reach the API"


class OutcomeFile:
    """`path` None: there is nowhere to leave it."""

    def __init__(self, path: Path | None, *, session: int, log: Log) -> None:
        self._path, self._session, self._log = path, session, log

    async def write(self, outcome: Outcome, *, has_result_elsewhere: bool = False) -> bool:
        """Whether all of the outcome is safe there. `has_result_elsewhere`: its result is not with the API yet."""
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
    """Why an agent never began, for whoever started it: what it said itself is gone with its place."""
    # Whoever cannot write there has said it on its own output already. And an outcome that somebody left counts for more.
    with suppress(OSError):
        if path is not None and not (path.exists() and path.stat().st_size):
            _write(path, refusal_to_bytes(why))


def _write(path: Path, raw: bytes) -> None:
    """In place: a pod's termination message is a file that was put there, and cannot be replaced. Half of it is none."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, raw)
        with suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
