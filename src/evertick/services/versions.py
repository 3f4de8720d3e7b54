"""Caches the facts about a DAG version that a runner needs to run its tasks. Unpacks its code when needed."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from psycopg import AsyncConnection

from evertick.domain.attempt import AttemptOrder, Isolation, TaskKey
from evertick.domain.dag import DagSpec, OnLostContact, TaskKind, from_json
from evertick.domain.errors import NotFound
from evertick.execution.bundle import unpack
from evertick.execution.bundle_folders import keep
from evertick.store import dags
from evertick.store.line import Opened
from evertick.store.tasks import StepRow

MOST_VERSIONS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    spec: DagSpec
    bundle: str
    file: str
    uses_threads: str | None


class Versions:
    """A bounded cache: versions never change, so the least recently used can be dropped at any time."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, Version] = OrderedDict()

    def known(self, version_id: int) -> Version | None:
        if version_id in self._known:
            self._known.move_to_end(version_id)
        return self._known.get(version_id)

    async def fetch(self, link: Opened, version_id: int) -> Version:
        found = self.known(version_id)
        if found is not None:
            return found
        row = await dags.version(await link.get(), version_id)
        if row is None:
            raise NotFound(f"DAG version {version_id} is not in the database.")
        spec = await asyncio.to_thread(from_json, json.dumps(row.spec))
        version = Version(spec=spec, bundle=row.bundle_hash, file=row.file, uses_threads=row.uses_threads)
        self._known[version_id] = version
        while len(self._known) > MOST_VERSIONS:
            self._known.popitem(last=False)
        return version


def order(claim: StepRow, version: Version, session: int, granted_json: str = "") -> AttemptOrder:
    """The executor's order for one claim."""
    task = version.spec.tasks[claim.idx]
    stops = task.on_lost_contact is OnLostContact.STOP
    return AttemptOrder(
        key=TaskKey(claim.run_id, claim.idx, claim.map_index),
        epoch=claim.epoch,
        session=session,
        attempt=claim.attempt,
        dag=version.spec.name,
        task=task.name,
        version_id=claim.version_id,
        bundle=version.bundle,
        file=version.file,
        fire_at=claim.fire_at.isoformat() if claim.fire_at else None,
        params_json=claim.params,
        inputs_json=claim.inputs or "{}",
        timeout_seconds=task.timeout_seconds,
        # A task that may be killed on its own must not share its process, nor one that changes its environment or has
        # secrets.
        isolation=Isolation.PROCESS if stops or granted_json or task.kind is TaskKind.PROGRAM else task.isolation,
        command=task.command,
        stops_on_lost_contact=stops,
        granted_json=granted_json,
    )


async def unpacked(conn: AsyncConnection, bundle_hash: str, folder: Path) -> tuple[Path, bool]:
    """The path of the bundle's code on this machine, fetched by its hash and verified, and whether it uses threads."""
    place = folder / bundle_hash
    row = await dags.bundle(conn, bundle_hash)
    if row is None:
        raise NotFound(f"The code {bundle_hash[:12]} of this DAG version is not in the database. Publish it again.")
    if not await asyncio.to_thread(keep, place):
        await asyncio.to_thread(unpack, row.archive, bundle_hash, folder)
    return place, row.uses_threads is not None
