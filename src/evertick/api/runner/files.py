"""Large results of attempts of runners over HTTPS. An upload that was interrupted continues where it ended.

A runner uploads the results of attempts that it holds, and reads their inputs; anything else is reported as not found.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, BinaryIO, Protocol

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel

from evertick.api.agent.files import BYTES, OCTETS, Hash, is_stored, refuse_other_input, send_result
from evertick.api.agent.routes import Int
from evertick.api.context import ApiContext
from evertick.api.runner.auth import RunnerCall, RunnerRoute, RunnerTokenUse, Who, shows
from evertick.api.runner.sent import Big
from evertick.domain.attempt import AttemptRef, TaskKey
from evertick.domain.errors import Conflict, TooLarge, UserError
from evertick.storage.object_store import PIECE_BYTES, open_store
from evertick.storage.result_files import files_in
from evertick.storage.results import stored_name

_ATTEMPT = "/attempts/{run_id}/{idx}/{map_index}/{epoch}/results/{sha256}"

router = APIRouter(route_class=RunnerRoute, tags=["files"])


class UploadAnswer(BaseModel):
    """`bytes`: how much has arrived; the upload continues there. `is_complete`: nothing is missing."""

    bytes: int
    is_complete: bool


class HasResult(Protocol):
    @property
    def r(self) -> int: ...
    @property
    def result(self) -> object: ...


@router.get(_ATTEMPT, response_class=FileResponse, responses=BYTES)
@shows(RunnerTokenUse.SESSION)
async def read_result(call: Who, run_id: Big, idx: Int, map_index: Int, epoch: Int, sha256: Hash) -> Response:
    """A large result that is an input of an attempt of this session."""
    key = TaskKey(run_id, idx, map_index)
    async with call.lent() as lent:
        row = await call.held(lent, AttemptRef(key, epoch))
        await refuse_other_input(lent.conn, key, version_id=row.version_id, sha256=sha256)
    return await send_result(call.context, run_id, sha256)


@router.get(f"{_ATTEMPT}/upload")
@shows(RunnerTokenUse.SESSION)
async def show_upload(call: Who, run_id: Big, idx: Int, map_index: Int, epoch: Int, sha256: Hash) -> UploadAnswer:
    """How much of a large result of an attempt has arrived here."""
    async with call.lent() as lent:
        await call.held(lent, AttemptRef(TaskKey(run_id, idx, map_index), epoch))
    return await _state(call.context, run_id, sha256)


@router.put(
    _ATTEMPT,
    openapi_extra={
        "requestBody": {"content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}}, "required": True}
    },
)
@shows(RunnerTokenUse.SESSION)
async def put_result(
    call: Who,
    run_id: Big,
    idx: Int,
    map_index: Int,
    epoch: Int,
    sha256: Hash,
    request: Request,
    offset: Annotated[int, Query(ge=0)] = 0,
) -> UploadAnswer:
    """Store the rest of a large result, from that offset on, before the report that names it."""
    async with call.lent() as lent:
        await call.held(lent, AttemptRef(TaskKey(run_id, idx, map_index), epoch))
    context = call.context
    found = await _state(context, run_id, sha256)
    if found.is_complete:
        return found
    folder = _folder(context, run_id)
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True, mode=0o700)
    part = folder / f".{sha256}.part"
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "r+b") as file:
        _lock(file)
        await _append(request.stream(), file, offset, most=context.settings.result_max_bytes)
        await asyncio.to_thread(_verify, file, sha256)
        store = open_store(context.settings)
        if store is None:
            await asyncio.to_thread(os.fsync, file.fileno())
            part.rename(folder / sha256)
        else:
            file.seek(0)
            await context.storage.do(lambda: store.put_file(stored_name(run_id, sha256), file, content_hash=sha256))
            with suppress(FileNotFoundError):
                part.unlink()
    return UploadAnswer(bytes=0, is_complete=True)


async def refuse_missing_files(call: RunnerCall, reports: Iterable[HasResult]) -> None:
    """Refuse reports that name large results that were not uploaded."""
    for report in reports:
        for sha256 in files_in(report.result) if isinstance(report.result, dict) and len(report.result) < 4 else ():
            if not await is_stored(call.context, report.r, Path(sha256).name):
                raise UserError("A report names a large result that was not uploaded: upload it first.")


def _folder(context: ApiContext, run_id: int) -> Path:
    return context.settings.result_place.absolute() / str(run_id)


async def _state(context: ApiContext, run_id: int, sha256: str) -> UploadAnswer:
    if await is_stored(context, run_id, sha256):
        return UploadAnswer(bytes=0, is_complete=True)
    try:
        size = (await asyncio.to_thread((_folder(context, run_id) / f".{sha256}.part").stat)).st_size
    except FileNotFoundError:
        size = 0
    return UploadAnswer(bytes=size, is_complete=False)


def _lock(file: BinaryIO) -> None:
    """One upload of a file at a time: an interrupted one may not have ended here yet."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise Conflict(
            "This result is being uploaded by another request. Ask how much has arrived, and continue."
        ) from None


async def _append(stream: AsyncIterator[bytes], file: BinaryIO, offset: int, *, most: int) -> None:
    """What arrives is kept even if the connection breaks."""
    size = file.seek(0, os.SEEK_END)
    if offset != size:
        raise Conflict(f"{size} bytes of this result have arrived, so the upload continues there and not at {offset}.")
    async for part in stream:
        size += len(part)
        if size > most:
            file.truncate(0)
            raise TooLarge(f"The result is too large: the limit is {most} bytes.")
        file.write(part)
        file.flush()


def _verify(file: BinaryIO, sha256: str) -> None:
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
    if digest.hexdigest() != sha256:
        file.truncate(0)
        raise UserError("The content does not match the hash in the URL. Send it again from its beginning.")
