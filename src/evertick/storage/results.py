"""Transfers large results to object storage and back, concurrently with a runner's other work.

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
from typing import NamedTuple

from evertick.config import Settings
from evertick.domain.attempt import RESULT_TAG, Outcome, OutcomeKind
from evertick.domain.errors import StorageUnavailable
from evertick.observability.logging import Log
from evertick.runtime.thread_runner import ThreadRunner
from evertick.storage.object_store import open_store
from evertick.storage.result_files import files_in

MOST_TRANSFERS = 4
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 10.0
FOLDER = "results"
_HASH = re.compile("[0-9a-f]{64}")


class Spilled(NamedTuple):
    """A result that is a file."""

    sha256: str
    bytes: int


class ResultTransfers:
    """The transfers of one session. `on_stored` receives outcomes whose results every runner can read."""

    def __init__(self, settings: Settings, *, on_stored: Callable[[list[Outcome]], None], log: Log) -> None:
        self._store, self._folder = open_store(settings), settings.result_place.absolute()
        self._patience_seconds, self._on_stored, self._log = settings.storage_patience_seconds, on_stored, log
        # A transfer that hangs does not delay the exit of the process.
        self._aside = ThreadRunner("storage", most=MOST_TRANSFERS)
        self._going: dict[asyncio.Task[None], Outcome] = {}

    def hold_back(self, outcomes: list[Outcome]) -> list[Outcome]:
        """The outcomes that can be reported now; the others arrive by `on_stored`."""
        if self._store is None:
            return outcomes
        large = [each for each in outcomes if each.result_json and next(spilled(each.result_json), None)]
        for outcome in large:
            task = asyncio.get_running_loop().create_task(self._keep(outcome))
            self._going[task] = outcome
            task.add_done_callback(lambda done: self._going.pop(done, None))
        return [each for each in outcomes if each not in large] if large else outcomes

    def needs(self, inputs_json: str | None) -> bool:
        """Whether some of a claim's inputs must be downloaded first."""
        return self._store is not None and bool(inputs_json) and next(spilled(inputs_json or ""), None) is not None

    async def fetch(self, run_id: int, inputs_json: str) -> None:
        """Download the files that these inputs name. Raises ResultLost or StorageUnavailable."""
        for each in set(spilled(inputs_json)):
            file = self._file(run_id, each)
            if not file.exists():
                await self._insist("fetch", partial(self._get, run_id, each, file))

    async def give_up(self) -> None:
        """The runner shuts down: attempts whose results are not stored by now run again elsewhere."""
        reason = "the runner stopped before the result was in the storage"
        for task, outcome in list(self._going.items()):
            # A task that is done has already reported, and is only not removed yet.
            if task.cancel():
                self._on_stored([replace(outcome, kind=OutcomeKind.GIVEN_BACK, reason=reason, result_json=None)])

    async def _keep(self, outcome: Outcome) -> None:
        run_id = outcome.key.run_id
        try:
            for each in spilled(outcome.result_json or ""):
                await self._insist("store", partial(self._put, run_id, each))
        except Exception as error:
            # Whatever the error: an attempt whose end is never reported would hold its slot permanently.
            within = f" within {self._patience_seconds:g} s" if isinstance(error, StorageUnavailable) else ""
            reason = f"the result could not be stored{within}: {error or type(error).__name__}"
            outcome = replace(outcome, kind=OutcomeKind.FAILED, reason=reason, result_json=None)
        self._on_stored([outcome])

    async def _insist(self, what: str, work: Callable[[], None]) -> None:
        """Retry until it succeeds or the time limit is reached."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self._patience_seconds, FIRST_PAUSE_SECONDS
        while True:
            try:
                return await self._aside.do(work)
            except StorageUnavailable as error:
                if loop.time() >= deadline:
                    raise
                self._log.warning("storage_unavailable", doing=what, error=error)
            await asyncio.sleep(min(pause, deadline - loop.time(), LONGEST_PAUSE_SECONDS) * random.uniform(0.5, 1.0))
            pause *= 2

    def _put(self, run_id: int, result: Spilled) -> None:
        assert self._store is not None
        self._store.put(stored_name(run_id, result.sha256), self._file(run_id, result), content_hash=result.sha256)

    def _get(self, run_id: int, result: Spilled, file: Path) -> None:
        assert self._store is not None
        self._store.get(stored_name(run_id, result.sha256), file, content_hash=result.sha256)

    def _file(self, run_id: int, result: Spilled) -> Path:
        return self._folder / str(run_id) / result.sha256


def spilled(text: str) -> Iterator[Spilled]:
    """The files that a result or inputs name. Most name none, and are not even parsed."""
    if RESULT_TAG in text and '"file"' in text:
        for digest, size in files_in(json.loads(text)).items():
            if _HASH.fullmatch(digest):
                yield Spilled(digest, size)


def stored_name(run_id: int, sha256: str) -> str:
    """The name of a result in the storage."""
    return f"{FOLDER}/{run_id}/{sha256}"
