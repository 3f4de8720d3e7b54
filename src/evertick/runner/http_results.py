"""Large results of a runner over HTTPS: uploaded to the API before the attempt is reported, and downloaded before one
starts. An upload that was interrupted continues where it ended.

While the API is away it retries: the report could not be sent either. While the API's storage is away it retries for as
long as the settings say, and then fails the attempt with the reason.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from evertick.config import Settings
from evertick.domain.attempt import AttemptRef, Outcome, OutcomeKind
from evertick.domain.errors import ApiUnreachable, Conflict, EvertickError, ResultLost
from evertick.observability.logging import Log
from evertick.processes.private_files import write_private
from evertick.runner.http_api import RunnerApi, read_document
from evertick.runtime.http_client import parts_of
from evertick.runtime.loop import back_off
from evertick.storage.results import MOST_TRANSFERS, has_file, result_files_in

_STORAGE = "storage_unavailable"


class HttpTransfers:
    """The transfers of one session, a few at a time, on connections of their own."""

    def __init__(self, settings: Settings, *, api: RunnerApi, log: Log) -> None:
        self._api, self._log, self._folder = api, log, settings.result_place.absolute()
        self._retry_seconds = settings.storage_retry_seconds
        self._free = asyncio.Semaphore(MOST_TRANSFERS)

    def needs_upload(self, outcome: Outcome) -> bool:
        return has_file(outcome.result_json)

    def needs_download(self, inputs_json: str | None) -> bool:
        return has_file(inputs_json)

    async def upload(self, outcome: Outcome) -> Outcome:
        ref = AttemptRef(outcome.key, outcome.epoch)
        try:
            for sha256 in result_files_in(outcome.result_json or ""):
                file = self._folder / str(outcome.key.run_id) / sha256

                async def send(path: str = _path(ref, sha256), file: Path = file) -> None:
                    await self._send(path, file)

                await self._retry("store", send)
        except Exception as error:
            # Whatever the error: an attempt whose end is never reported would hold its slot permanently.
            reason = f"the result could not be stored: {error or type(error).__name__}"
            return replace(outcome, kind=OutcomeKind.FAILED, reason=reason, result_json=None)
        return outcome

    async def download(self, ref: AttemptRef, inputs_json: str) -> None:
        for sha256 in set(result_files_in(inputs_json)):
            file = self._folder / str(ref.key.run_id) / sha256

            async def fetch(path: str = _path(ref, sha256), file: Path = file, sha256: str = sha256) -> None:
                await self._fetch(path, file, sha256)

            if not file.exists():
                await self._retry("fetch", fetch)

    async def _send(self, path: str, file: Path) -> None:
        endpoint = self._api.endpoint()
        try:
            told = read_document(await self._api.fetch(endpoint, f"{path}/upload"))
            while not told["is_complete"]:
                at = int(told["bytes"])
                size = (await asyncio.to_thread(file.stat)).st_size - at
                content = partial(parts_of, file, at=at)
                told = read_document(await self._api.put(endpoint, f"{path}?offset={at}", content, size))
        finally:
            endpoint.close()

    async def _fetch(self, path: str, file: Path, sha256: str) -> None:
        endpoint = self._api.endpoint()
        try:
            content = (await self._api.fetch(endpoint, path)).body
        finally:
            endpoint.close()
        if await asyncio.to_thread(lambda: hashlib.sha256(content).hexdigest()) != sha256:
            raise ResultLost("a large result has changed on its way from the API.")
        await asyncio.to_thread(write_private, file, content)

    async def _retry(self, doing: str, work: Callable[[], Awaitable[None]]) -> None:
        failures, storage_fails_since = 0, None
        while True:
            try:
                async with self._free:
                    return await work()
            except (ApiUnreachable, Conflict) as error:
                is_storage = isinstance(error, ApiUnreachable) and error.problem == _STORAGE
                now = time.monotonic()
                storage_fails_since = (storage_fails_since or now) if is_storage else None
                if storage_fails_since is not None and now - storage_fails_since >= self._retry_seconds:
                    raise EvertickError(f"{error} (for {self._retry_seconds:g} s)") from None
                failures += 1
                self._log.warning("storage_unavailable", doing=doing, error=error)
            await asyncio.sleep(back_off(failures))


def _path(ref: AttemptRef, sha256: str) -> str:
    key = ref.key
    return f"/attempts/{key.run_id}/{key.idx}/{key.map_index}/{ref.epoch}/results/{sha256}"
