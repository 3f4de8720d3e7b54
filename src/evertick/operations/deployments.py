"""Deployments: upload and publish a folder as a whole, list, show, compare versions, roll back, and delete.

An archive is uploaded first, in pieces, under the hash of its content; a client continues after the last piece that arrived.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen
from psycopg import AsyncConnection

from evertick.bundles.archive import MOST_ARCHIVE_BYTES, unpack_archive
from evertick.config import user_environment
from evertick.db.notify import Channel
from evertick.db.queries import deployments
from evertick.db.queries.dags import files
from evertick.db.queries.deployments import DagChange, DeploymentRow, DeploymentVersionRow
from evertick.domain.deployments import DeploymentChange, DeploymentKind, check_name, one_line
from evertick.domain.errors import Conflict, NotFound, TooLarge
from evertick.engine import deployments as verbs
from evertick.operations.caller import Caller
from evertick.operations.paging import (
    USUAL_ITEMS,
    Cursor,
    IfMatch,
    Limit,
    Page,
    RequestBody,
    Tagged,
    TextPattern,
    page_of,
    read_cursor,
    record_of,
    refuse_stale,
)
from evertick.publisher.deployment import DeployResult, deploy, deployed_locks, load_folder
from evertick.publisher.routing_file import load_routing

LONGEST_NAME = 100
PIECE_BYTES = 1024 * 1024
MOST_KEPT_BYTES = 4 * MOST_ARCHIVE_BYTES
_NEWEST = 2**31 - 1
_LONGEST_TEXT = 1000

_NUMBER = (Ge(1), Le(_NEWEST))
Name = Annotated[str, MaxLen(LONGEST_NAME), Doc("The deployment's name.")]
Hash = Annotated[str, TextPattern("^[0-9a-f]{64}$"), Doc("The SHA-256 hash of the archive, in hexadecimal.")]
Text = Annotated[str, MaxLen(_LONGEST_TEXT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """`kind`: where its DAGs come from: a watched folder, uploads, or git. `version` is 0 for a folder, which has no versions.
    `problem`: why the newest commit of a git repository is not published. `deleted_at`: it is no longer listed, and can be
    rolled back."""

    name: str
    kind: DeploymentKind
    version: int
    dag_count: int
    url: str | None
    ref: str | None
    path: str | None
    published_commit: str | None
    problem: str | None
    created_at: datetime
    deleted_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentVersion:
    """`restores`: the version that a rollback published again. `is_complete`: it can be restored, because no DAG version of it
    was pruned. A version without DAGs is the deletion of the deployment."""

    number: int
    commit_hash: str | None
    author: str | None
    message: str | None
    restores: int | None
    deployed_by: str
    deployed_at: datetime
    dag_count: int
    is_current: bool
    is_complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentDetails(Deployment):
    """`dags`: the DAGs of the current version."""

    dags: list[str]
    current: DeploymentVersion | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployRequest(RequestBody):
    """`archive_hash`: an archive that was uploaded. The other fields describe its origin, and are shown with the version."""

    archive_hash: Annotated[str, TextPattern("^[0-9a-f]{64}$")]
    commit_hash: Text | None = None
    author: Text | None = None
    message: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRollback(RequestBody):
    """`number`: the version to restore; by default the one before the current version."""

    number: Annotated[int, *_NUMBER] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredVersion:
    """`version`: the new version of the deployment. It has the DAGs of the version `restores`."""

    version: int
    restores: int
    dags: list[str]
    retired: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentDiff:
    """The DAGs that differ between two versions. `before` and `after` are the versions of a DAG; null: it is not there."""

    old: int
    new: int
    dags: list[DagChange]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """`received`: how many bytes of the archive arrived, from its start: where to continue."""

    archive_hash: str
    received: int


async def list_deployments(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[Deployment]:
    """List deployments by name."""
    (after,) = read_cursor(cursor, "")
    async with caller.read() as conn:
        found = await deployments.page(conn, after=after, limit=limit)
    return page_of(found, limit, lambda row: (row.name,), lambda row: _record(Deployment, row))


async def show_deployment(caller: Caller, *, name: Name) -> Tagged[DeploymentDetails]:
    """Show one deployment with its current version."""
    async with caller.read() as conn:
        row = await _find(conn, name)
        versions = await deployments.versions(conn, name, before=row.version + 1, limit=1)
        dags = sorted(row.name for row in await files(conn, name))
    current = _version(versions[0]) if versions else None
    return Tagged(record=_record(DeploymentDetails, row, dags=dags, current=current), etag=_etag(row.version))


async def list_deployment_versions(
    caller: Caller, *, name: Name, limit: Limit = USUAL_ITEMS, cursor: Cursor = None
) -> Page[DeploymentVersion]:
    """List the versions of a deployment, newest first."""
    (before,) = read_cursor(cursor, _NEWEST)
    async with caller.read() as conn:
        await _find(conn, name)
        found = await deployments.versions(conn, name, before=min(before, _NEWEST), limit=limit)
    return page_of(found, limit, lambda row: (row.number,), _version)


async def diff_deployment_versions(
    caller: Caller,
    *,
    name: Name,
    old: Annotated[int | None, *_NUMBER, Doc("By default the version before the other one.")] = None,
    new: Annotated[int | None, *_NUMBER, Doc("By default the current version.")] = None,
) -> DeploymentDiff:
    """Compare the DAGs of two versions of a deployment."""
    async with caller.read() as conn:
        row = await _find(conn, name)
        after = row.version if new is None else new
        before = old if old is not None else max(after - 1, 0)
        for number in {before, after} - {0}:
            found = await deployments.versions(conn, name, before=number + 1, limit=1)
            if not found or found[0].number != number:
                raise NotFound(f"Deployment {name!r} has no version {number}. Old versions are pruned.")
        changes = await deployments.changes(conn, name, old=before, new=after)
    return DeploymentDiff(old=before, new=after, dags=changes)


async def show_upload(caller: Caller, *, archive_hash: Hash) -> Upload:
    """Show how much of an archive was uploaded."""
    async with caller.read() as conn:
        received = await deployments.received(conn, hash=archive_hash, owner=caller.actor.name)
    return Upload(archive_hash=archive_hash, received=received)


async def put_upload(
    caller: Caller,
    *,
    archive_hash: Hash,
    content: bytes,
    start: Annotated[int, Ge(0), Le(MOST_ARCHIVE_BYTES), Doc("The place of this piece in the archive, in bytes.")] = 0,
) -> Upload:
    """Upload an archive, or a piece of one, of up to 8 MiB. Repeating a piece changes nothing."""
    if start + len(content) > MOST_ARCHIVE_BYTES:
        raise TooLarge(f"The archive is too large: the limit is {MOST_ARCHIVE_BYTES:,} bytes.")
    async with caller.write() as conn:
        owner = caller.actor.name
        if await deployments.kept_bytes(conn, hash=archive_hash, owner=owner) > MOST_KEPT_BYTES:
            raise TooLarge(
                f"{owner} has uploaded more than {MOST_KEPT_BYTES:,} bytes that were not published. Publish them, or wait: they"
                " are deleted after a day."
            )
        await verbs.put_upload_piece(conn, hash=archive_hash, owner=owner, start=start, content=content)
        received = await deployments.received(conn, hash=archive_hash, owner=owner)
    return Upload(archive_hash=archive_hash, received=received)


async def deploy_archive(
    caller: Caller,
    *,
    name: Name,
    body: DeployRequest,
    dry_run: Annotated[bool, Doc("Check everything and publish nothing.")] = False,
    if_match: IfMatch = None,
) -> Tagged[DeployResult]:
    """Publish an uploaded archive as the next version of a deployment: all of its DAGs, or nothing if one file is refused.

    DAGs that the deployment had before and that are not in the archive are retired. The same archive again changes nothing.
    """
    owner = caller.actor.name
    async with caller.read() as conn:
        pieces = await deployments.pieces(conn, hash=body.archive_hash, owner=owner)
    content = b"".join(pieces)
    if hashlib.sha256(content).hexdigest() != body.archive_hash:
        async with caller.write() as conn:
            await verbs.delete_upload(conn, hash=body.archive_hash, owner=owner)
        raise NotFound(
            f"The archive {body.archive_hash[:12]} is not uploaded, or its content has another hash. Upload it again."
        )
    found = await deploy_content(caller, name=name, content=content, body=body, dry_run=dry_run, if_match=if_match)
    if not dry_run:
        async with caller.write() as conn:
            await verbs.delete_upload(conn, hash=body.archive_hash, owner=owner)
    return found


async def deploy_content(
    caller: Caller,
    *,
    name: str,
    content: bytes,
    body: DeployRequest,
    dry_run: bool = False,
    if_match: str | None = None,
) -> Tagged[DeployResult]:
    """The same for an archive that is here."""
    check_name(name)
    async with caller.read() as conn:
        row, known = await deployments.find(conn, name), await deployed_locks(conn, name)
    expected = row.version if row else 0
    refuse_stale(if_match, _etag(expected))
    if row is not None and row.kind != DeploymentKind.UPLOAD and row.dag_count:
        raise Conflict(
            f"The DAGs of deployment {name!r} come from {DeploymentKind(row.kind).about}. Choose another name."
        )
    change = DeploymentChange(
        name=name,
        kind=DeploymentKind.UPLOAD,
        expected=expected,
        is_whole=True,
        content_hash=body.archive_hash,
        commit_hash=one_line(body.commit_hash),
        author=one_line(body.author),
        message=one_line(body.message),
    )
    async with _unpacked(content) as folder:
        settings = caller.context.settings
        loaded = await load_folder(folder, settings, user_environment(), known)
        async with caller.write(Channel.SCHEDULE, Channel.TASKS) as conn:
            try:
                result = await deploy(conn, loaded, change, settings=settings, actor=caller.actor, is_dry_run=dry_run)
            except Conflict:
                # The same request may have been sent again before this one was answered.
                if not await _has_content(conn, name, body.archive_hash):
                    raise
                again = await deployments.find(conn, name)
                change = replace(change, expected=again.version if again else 0)
                result = await deploy(conn, loaded, change, settings=settings, actor=caller.actor, is_dry_run=dry_run)
    return Tagged(record=result, etag=_etag(result.version), is_new=result.is_new and not dry_run)


async def roll_back_deployment(
    caller: Caller, *, name: Name, body: DeploymentRollback | None = None, if_match: IfMatch = None
) -> RestoredVersion:
    """Publish all DAGs of an earlier version again, as the next version. Open runs keep their version."""
    routing = load_routing(caller.context.settings.routing_file)
    async with caller.write(Channel.SCHEDULE, Channel.TASKS) as conn:
        row = await _find(conn, name)
        refuse_stale(if_match, _etag(row.version))
        done = await verbs.roll_back(
            conn, name, number=body.number if body else None, actor=caller.actor, routing=routing
        )
    return record_of(RestoredVersion, done)


async def delete_deployment(caller: Caller, *, name: Name, if_match: IfMatch = None) -> None:
    """Delete a deployment: its DAGs are retired as if its files were deleted. Their history remains, and open runs continue."""
    async with caller.write(Channel.SCHEDULE) as conn:
        row = await _find(conn, name)
        refuse_stale(if_match, _etag(row.version))
        if await verbs.delete(conn, name, expected=row.version, actor=caller.actor) is None:
            raise NotFound(f"Deployment {name!r} is deleted already.")


async def _find(conn: AsyncConnection, name: str) -> DeploymentRow:
    row = await deployments.find(conn, name)
    if row is None:
        raise NotFound(f"There is no deployment {name[:200]!r}. List them with `evertick deployments list`.")
    return row


async def _has_content(conn: AsyncConnection, name: str, content_hash: str) -> bool:
    newest = await deployments.versions(conn, name, limit=1)
    return bool(newest) and newest[0].content_hash == content_hash


@asynccontextmanager
async def _unpacked(content: bytes) -> AsyncIterator[Path]:
    with TemporaryDirectory(prefix="evertick-deploy-", ignore_cleanup_errors=True) as folder:
        await asyncio.to_thread(unpack_archive, io.BytesIO(content), Path(folder))
        yield Path(folder)


def _record(record: type[Deployment], row: DeploymentRow, **more: object) -> Any:
    source = row.source or {}
    place = {key: source.get(key) for key in ("url", "ref", "path")}
    if row.kind == DeploymentKind.FOLDER:
        place["path"] = source.get("folder")
    return record_of(record, row, kind=DeploymentKind(row.kind), **place, **more)


def _version(row: DeploymentVersionRow) -> DeploymentVersion:
    return record_of(DeploymentVersion, row)


def _etag(version: int) -> str:
    return f'"{version}"'
