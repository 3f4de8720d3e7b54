"""Files of attempts, named by the hash of their content: the code of the attempt's version, and large results.

An attempt can read only its own code and inputs; anything else is reported as not found. With an object storage, results only
pass through this process, in an unnamed temporary file that the kernel removes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse, StreamingResponse
from psycopg import AsyncConnection

from evertick.api.agent.auth import AgentRequest, AgentRoute, Who, shows
from evertick.api.context import ApiContext
from evertick.db.queries import runners
from evertick.domain.agent_protocol import TokenUse
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import NotFound, ResultLost, TooLarge, UserError
from evertick.storage.object_store import PIECE_BYTES, ObjectStore, open_store
from evertick.storage.result_files import files_in
from evertick.storage.results import stored_name

OCTETS = "application/octet-stream"
Hash = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{64}$")]
BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}}}
}

router = APIRouter(route_class=AgentRoute, tags=["files"])


@router.get("/bundles/{bundle_hash}", response_class=Response, responses=BYTES)
@shows(TokenUse.ATTEMPT)
async def bundle(agent: Who, bundle_hash: Hash) -> Response:
    """The packed code of the attempt's DAG version."""
    async with agent.lent() as lent:
        row = await agent.held(lent.conn)
        archive = await runners.bundle(lent.conn, version_id=row.version_id, bundle_hash=bundle_hash)
    if archive is None:
        raise NotFound("This hash is not the code of this attempt.")
    return Response(archive, media_type=OCTETS)


@router.get("/results/{sha256}", response_class=FileResponse, responses=BYTES)
@shows(TokenUse.ATTEMPT)
async def read_result(agent: Who, sha256: Hash) -> Response:
    """A large result that is an input of the attempt."""
    key = agent.bearer.key
    async with agent.lent() as lent:
        row = await agent.held(lent.conn)
        await refuse_other_input(lent.conn, key, version_id=row.version_id, sha256=sha256)
    return await send_result(agent.context, key.run_id, sha256)


async def refuse_other_input(conn: AsyncConnection, key: TaskKey, *, version_id: int, sha256: str) -> None:
    inputs = await runners.task_inputs(conn, key, version_id=version_id)
    if sha256 not in await asyncio.to_thread(lambda: files_in(json.loads(inputs or "{}"))):
        raise NotFound("This hash is not an input of this attempt.")


async def send_result(context: ApiContext, run_id: int, sha256: str) -> Response:
    """The content of a large result of that run."""
    settings = context.settings
    path, store = settings.result_place.absolute() / str(run_id) / sha256, open_store(settings)
    if await asyncio.to_thread(path.is_file):
        return FileResponse(path, media_type=OCTETS)
    if store is None:
        raise ResultLost(
            "The file of a large result is missing. Runners and the API need a shared EVERTICK_RESULTS_FOLDER,"
            " or EVERTICK_STORAGE."
        )
    place, result = settings.result_place, (run_id, sha256)
    file = await context.storage.do(lambda: _fetched(store, place, result))
    size = os.fstat(file.fileno()).st_size
    return StreamingResponse(_pieces(file), media_type=OCTETS, headers={"Content-Length": str(size)})


@router.put(
    "/results/{sha256}",
    status_code=204,
    openapi_extra={
        "requestBody": {"content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}}, "required": True}
    },
)
@shows(TokenUse.ATTEMPT)
async def put_result(agent: Who, sha256: Hash, request: Request) -> Response:
    """Store a large result before the outcome that names it. The content must match the hash."""
    async with agent.lent() as lent:
        await agent.held(lent.conn)
    settings, folder = agent.context.settings, _folder(agent)
    if (store := open_store(settings)) is not None:
        # While the object storage is unreachable, the agent retries.
        with await asyncio.to_thread(_nameless, settings.result_place) as file:
            await _receive(request.stream(), file, sha256, most=settings.result_max_bytes)
            name = stored_name(agent.bearer.key.run_id, sha256)
            await agent.context.storage.do(lambda: store.put_file(name, file, content_hash=sha256))
    elif not await asyncio.to_thread((folder / sha256).is_file):
        await _keep(request.stream(), folder, sha256, most=settings.result_max_bytes)
    return Response(status_code=204)


async def refuse_missing_file(agent: AgentRequest, result_json: str | None) -> None:
    """Refuse an outcome that names a large result that was not uploaded."""
    if result_json is None or len(result_json) > 1000:
        return
    found = json.loads(result_json)
    for sha256 in files_in(found):
        if not await is_stored(agent.context, agent.bearer.key.run_id, Path(sha256).name):
            raise UserError("The outcome names a large result that was not uploaded. PUT it to /results first.")


async def is_stored(context: ApiContext, run_id: int, sha256: str) -> bool:
    """Whether the shared folder or storage has the result. Another API process may have received it."""
    store = open_store(context.settings)
    if store is None:
        return await asyncio.to_thread((context.settings.result_place.absolute() / str(run_id) / sha256).is_file)
    return await context.storage.do(lambda: store.has(stored_name(run_id, sha256)))


def _folder(agent: AgentRequest) -> Path:
    return agent.context.settings.result_place.absolute() / str(agent.bearer.key.run_id)


async def _keep(stream: AsyncIterator[bytes], folder: Path, sha256: str, *, most: int) -> None:
    """Write to a temporary name, and rename once the content is complete and matches the hash."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True, mode=0o700)
    draft = folder / f".{secrets.token_hex(8)}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            await _receive(stream, file, sha256, most=most)
            await asyncio.to_thread(os.fsync, file.fileno())
        draft.rename(folder / sha256)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()


async def _receive(stream: AsyncIterator[bytes], file: BinaryIO, sha256: str, *, most: int) -> None:
    """Receive the complete body and check its size and hash."""
    digest, size = hashlib.sha256(), 0
    async for part in stream:
        size += len(part)
        if size > most:
            raise TooLarge(f"The result is too large: the limit is {most} bytes.")
        digest.update(part)
        file.write(part)
    if digest.hexdigest() != sha256:
        raise UserError("The content does not match the hash in the URL. Send it again.")
    file.flush()


def _nameless(place: Path) -> BinaryIO:
    """Open an unnamed file on the disk of the results; the kernel removes it after a crash."""
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    return tempfile.TemporaryFile(dir=place)


def _fetched(store: ObjectStore, place: Path, result: tuple[int, str]) -> BinaryIO:
    file = _nameless(place)
    try:
        store.get_file(stored_name(*result), file, content_hash=result[1])
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return file


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    """Yield the content. The file is closed even if the client disconnects: with the last reference."""
    with file:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece
