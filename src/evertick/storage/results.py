"""Transfers large results to object storage and back.

An attempt's process writes its file locally and has no storage key: the runner uploads the file before it reports, and
downloads the files that a claim's inputs name before it starts. During an outage it retries for as long as the settings
say, and then fails the attempt with the reason. Results in the database cost nothing extra.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from evertick.config import Settings
from evertick.domain.attempt import RESULT_TAG, AttemptRef, Outcome, OutcomeKind
from evertick.domain.errors import StorageUnavailable
from evertick.observability.logging import Log
from evertick.runtime.thread_runner import ThreadRunner
from evertick.storage.object_store import open_store
from evertick.storage.result_files import ResultFiles, files_in

MOST_TRANSFERS = 4
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 10.0
FOLDER = "results"
_HASH = re.compile("[0-9a-f]{64}")


class Transfers(Protocol):
    """How the large results of a runner reach a place that every runner reads, and its inputs the runner."""

    def needs_upload(self, outcome: Outcome) -> bool:
        """Whether other runners can read its result only after an upload."""

    def needs_download(self, inputs_json: str | None) -> bool:
        """Whether some of a claim's inputs must be downloaded first."""

    async def upload(self, outcome: Outcome) -> Outcome:
        """Upload the result. Returns the outcome to report: a failure with the reason if that was not possible."""

    async def download(self, ref: AttemptRef, inputs_json: str) -> None:
        """Download the files that an attempt's inputs name. Raises ResultLost or StorageUnavailable."""


class ResultTransfers:
    """The transfers of one session, to object storage, a few at a time."""

    def __init__(self, settings: Settings, *, log: Log) -> None:
        self._store, self._folder = open_store(settings), settings.result_place.absolute()
        self._retry_seconds, self._log = settings.storage_retry_seconds, log
        # A transfer that hangs does not delay the exit of the process.
        self._threads = ThreadRunner("storage", most=MOST_TRANSFERS)

    def needs_upload(self, outcome: Outcome) -> bool:
        return self._store is not None and has_file(outcome.result_json)

    def needs_download(self, inputs_json: str | None) -> bool:
        return self._store is not None and has_file(inputs_json)

    async def upload(self, outcome: Outcome) -> Outcome:
        assert self._store is not None
        run_id = outcome.key.run_id
        try:
            for sha256 in result_files_in(outcome.result_json or ""):
                name, file = stored_name(run_id, sha256), self._file(run_id, sha256)
                await self._retry("store", partial(self._store.put, name, file, content_hash=sha256))
        except Exception as error:
            # Whatever the error: an attempt whose end is never reported would hold its slot permanently.
            within = f" within {self._retry_seconds:g} s" if isinstance(error, StorageUnavailable) else ""
            reason = f"the result could not be stored{within}: {error or type(error).__name__}"
            return replace(outcome, kind=OutcomeKind.FAILED, reason=reason, result_json=None)
        return outcome

    async def download(self, ref: AttemptRef, inputs_json: str) -> None:
        assert self._store is not None
        run_id = ref.key.run_id
        for sha256 in set(result_files_in(inputs_json)):
            name, file = stored_name(run_id, sha256), self._file(run_id, sha256)
            if not file.exists():
                await self._retry("fetch", partial(self._store.get, name, file, content_hash=sha256))

    async def _retry(self, doing: str, work: Callable[[], None]) -> None:
        """Retry until it succeeds or the time limit is reached."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self._retry_seconds, FIRST_PAUSE_SECONDS
        while True:
            try:
                return await self._threads.do(work)
            except StorageUnavailable as error:
                if loop.time() >= deadline:
                    raise
                self._log.warning("storage_unavailable", doing=doing, error=error)
            await asyncio.sleep(min(pause, deadline - loop.time(), LONGEST_PAUSE_SECONDS) * random.uniform(0.5, 1.0))
            pause *= 2

    def _file(self, run_id: int, sha256: str) -> Path:
        return self._folder / str(run_id) / sha256


def result_files(settings: Settings) -> ResultFiles:
    """The directory for results that are too large for the database."""
    folder, spill_bytes = str(settings.result_place.absolute()), settings.result_spill_bytes
    return ResultFiles(folder=folder, spill_bytes=spill_bytes, max_bytes=settings.result_max_bytes)


def has_file(text: str | None) -> bool:
    """Whether a result or inputs name a file."""
    return bool(text) and next(result_files_in(text or ""), None) is not None


def result_files_in(text: str) -> Iterator[str]:
    """The hashes of the files that a result or inputs name. Most name none, and are not even parsed."""
    if RESULT_TAG in text and '"file"' in text:
        yield from filter(_HASH.fullmatch, files_in(json.loads(text)))


def stored_name(run_id: int, sha256: str) -> str:
    """The name of a result in the storage."""
    return f"{FOLDER}/{run_id}/{sha256}"
