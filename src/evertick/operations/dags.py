"""DAGs: list, show, pause, trigger, delete, their versions, and the visibility of their code."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge, Gt, Le, MaxLen
from psycopg import AsyncConnection

from evertick.bundles.bundle import contents
from evertick.db.notify import Channel
from evertick.db.queries import dags
from evertick.db.queries.dags import DagFilter, DagRow, ImportErrorRow, ListedVersion
from evertick.domain.dags.spec import DagSpec, from_json
from evertick.domain.errors import Forbidden, NotFound, UserError
from evertick.domain.schedules.misfire import MisfirePolicy
from evertick.domain.schedules.partitions import LONGEST_KEY
from evertick.engine import dags as verbs
from evertick.engine.publish import RollbackResult, find_version, roll_back
from evertick.engine.runs import LONGEST_PERIOD, Particulars, refuse_another, trigger
from evertick.engine.schedules import CatchUp, Missed, preview
from evertick.operations.caller import Caller, known_dags
from evertick.operations.paging import (
    USUAL_ITEMS,
    Cursor,
    IdempotencyKey,
    Limit,
    Page,
    RequestBody,
    Tagged,
    aware,
    etag_of,
    like,
    page_of,
    read_cursor,
    record_of,
    short_page,
)
from evertick.publisher.routing_file import load_routing

LONGEST_NAME = 250
DagName = Annotated[str, MaxLen(LONGEST_NAME), Doc("The DAG's name.")]
_NEWEST_VERSION = 2**31 - 1
_NUMBER = (Ge(1), Le(_NEWEST_VERSION))

WITHHELD = (
    "This code also defines DAGs that you may not see, so it is not shown. Define DAGs of different teams in different"
    " files."
)


async def may_read_code(caller: Caller, conn: AsyncConnection, *hashes: str) -> bool:
    """A file may define several DAGs. Its code is visible to callers who may see all of them."""
    if caller.principal.tags is None:
        return True
    names = await dags.of_bundles(conn, list(hashes))
    return await known_dags(caller, conn, names) == set(names)


async def refuse_unless_code_is_visible(caller: Caller, conn: AsyncConnection, bundle_hash: str) -> None:
    if not await may_read_code(caller, conn, bundle_hash):
        raise Forbidden(WITHHELD)


async def visible_code_changes(
    caller: Caller, conn: AsyncConnection, old: ListedVersion, new: ListedVersion
) -> list[str]:
    """What changed in the code, or the reason why that is not shown."""
    if not await may_read_code(caller, conn, old.bundle_hash, new.bundle_hash):
        return [WITHHELD] if old.bundle_hash != new.bundle_hash else []
    return await _code_changes(conn, old, new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    name: str
    description: str | None
    is_paused: bool
    version: int | None
    deployment: str
    file: str
    owner: str | None
    tags: list[str]
    task_count: int
    max_active_runs: int | None
    published_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DagTask:
    """A task of a DAG. `spec` has the options that differ from the defaults."""

    name: str
    kind: str
    upstream: list[str]
    downstream: list[str]
    queue: str | None
    priority: int
    trigger_rule: str
    retries: int
    timeout_seconds: float | None
    spec: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DagDetails(Dag):
    """`uses_threads`: the threads that importing its file starts. Its tasks then run in fresh interpreters."""

    timezone: str
    uses_threads: str | None
    params: list[dict[str, Any]]
    tasks: list[DagTask]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUpOptions(RequestBody):
    """`catch_up`: which of the fires that the pause prevented run now, not older than `window_seconds`; by default none,
    except for schedules with `catchup`. `is_preview` lists them and changes nothing."""

    catch_up: MisfirePolicy | None = None
    window_seconds: Annotated[float, Ge(0), Le(10**9)] | None = None
    is_preview: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseResult:
    is_changed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpauseResult:
    """`missed`: the fires that the pause prevented, and whether each one ran now or was skipped."""

    is_changed: bool
    missed: list[Missed]


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerRequest(RequestBody):
    """`fire_at`: the date that the run is for; a DAG has one triggered or scheduled run for it. Without it, the run is for the time
    at which it is triggered. `run_after`: the run is queued and begins then. `unique_for_seconds`: for so long, requests with the
    same Idempotency-Key, or without one with the same params, are the same run; without it, a key is one run for ever. `partition`:
    the key of the partition that it is for."""

    params: Mapping[str, Any] = field(default_factory=dict)
    fire_at: datetime | None = None
    run_after: datetime | None = None
    partition: Annotated[str, MaxLen(LONGEST_KEY)] | None = None
    unique_for_seconds: Annotated[float, Gt(0), Le(LONGEST_PERIOD.total_seconds())] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggeredRun:
    run_id: int
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DagVersion:
    """`commit_hash` and `author`: of the deployment that published it first, if it came from a repository."""

    number: int
    hash: str
    bundle: str
    task_count: int
    created_at: datetime
    is_current: bool
    commit_hash: str | None
    author: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DagVersionDetails:
    number: int
    spec: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDiff:
    """Lines of a unified diff. `plan` has the tasks by name, `code` the files of the bundle."""

    old: DagVersion
    new: DagVersion
    plan: list[str]
    code: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRequest(RequestBody):
    """`number`: the version to return to; by default the one before the current version."""

    number: Annotated[int, *_NUMBER] | None = None


async def list_dags(
    caller: Caller,
    *,
    contains: Annotated[str | None, MaxLen(LONGEST_NAME), Doc("Text in the name.")] = None,
    tag: Annotated[str | None, MaxLen(LONGEST_NAME), Doc("Only DAGs with this tag.")] = None,
    is_paused: bool | None = None,
    limit: Limit = USUAL_ITEMS,
    cursor: Cursor = None,
) -> Page[Dag]:
    """List DAGs by name."""
    (after,) = read_cursor(cursor, "")
    async with caller.read() as conn:
        wanted = DagFilter(tags=tags_of(caller.principal.tags), tag=tag, like=like(contains), paused=is_paused)
        found = await dags.page(conn, wanted, after=after, limit=limit)
    return page_of(found, limit, lambda row: (row.name,), _dag)


async def show_dag(caller: Caller, *, dag: DagName) -> Tagged[DagDetails]:
    """Show one DAG with its parameters and tasks."""
    async with caller.read() as conn:
        row = await caller.dag(conn, dag)
        queues = await dags.queues(conn, row.version_id)
    spec = spec_of(row)
    page = record_of(
        DagDetails,
        _dag(row),
        timezone=spec.timezone,
        uses_threads=row.uses_threads,
        params=_list(row, "params"),
        tasks=_tasks(row, spec, queues),
    )
    return Tagged(record=page, etag=etag_of(page))


async def pause_dag(caller: Caller, *, dag: DagName) -> PauseResult:
    """Pause a DAG. Its schedules record their fires as skipped, and tasks that have not started wait. Running tasks
    continue."""
    async with caller.write(Channel.SCHEDULE, Channel.TASKS) as conn:
        await caller.dag(conn, dag)
        return PauseResult(is_changed=await verbs.pause(conn, dag=dag, actor=caller.actor))


async def unpause_dag(caller: Caller, *, dag: DagName, body: CatchUpOptions | None = None) -> UnpauseResult:
    """Resume a DAG. A schedule that is paused itself remains paused."""
    wanted = body or CatchUpOptions()
    catch_up = catch_up_of(wanted)
    async with caller.write(Channel.SCHEDULE, Channel.TASKS) as conn:
        row = await caller.dag(conn, dag)
        missed = await preview(conn, dag=dag, catch_up=catch_up) if row.paused else []
        is_changed = not wanted.is_preview and await verbs.unpause(conn, dag=dag, actor=caller.actor, catch_up=catch_up)
    return UnpauseResult(is_changed=is_changed, missed=missed)


def catch_up_of(wanted: CatchUpOptions) -> CatchUp:
    return CatchUp(policy=wanted.catch_up, window_seconds=wanted.window_seconds)


async def delete_dag(caller: Caller, *, dag: DagName) -> None:
    """Delete a DAG. Its history remains, and its open runs continue."""
    async with caller.write(Channel.SCHEDULE) as conn:
        await caller.dag(conn, dag)
        if not await verbs.delete(conn, dag=dag, actor=caller.actor):
            raise NotFound(f"DAG {dag!r} was deleted by another request.")


async def trigger_run(
    caller: Caller, *, dag: DagName, body: TriggerRequest, idempotency_key: IdempotencyKey = None
) -> TriggeredRun:
    """Start a run. A request that repeats an Idempotency-Key returns the same run with status 200 instead of 201."""
    async with caller.write(Channel.TASKS) as conn:
        await caller.dag(conn, dag)
        about = Particulars(
            key=idempotency_key,
            fire_at=_date_of("fire_at", body.fire_at),
            start_at=_date_of("run_after", body.run_after),
            unique_for=None if body.unique_for_seconds is None else timedelta(seconds=body.unique_for_seconds),
            partition=body.partition,
        )
        made = await trigger(conn, dag=dag, params=body.params, actor=caller.actor, about=about)
        if not made.is_new and about.unique_for is None:
            await refuse_another(conn, made.run_id, about, body.params)
        if made.defers:
            caller.also.add(Channel.SCHEDULE)
    return TriggeredRun(run_id=made.run_id, is_new=made.is_new)


def _date_of(name: str, given: datetime | None) -> datetime | None:
    if given is None:
        return None
    instant = aware(given)
    if not 1900 <= instant.year <= 9998:
        raise UserError(f"{name} is {instant.isoformat()}: give a date from 1900 to 9998.")
    return instant


async def list_import_errors(
    caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None
) -> Page[ImportErrorRow]:
    """List the files that could not be loaded, with the line and the message."""
    async with caller.read() as conn:
        key = attrgetter("deployment", "file")
        return short_page(await dags.import_errors(conn), limit, cursor, key, lambda row: row)


async def list_versions(
    caller: Caller, *, dag: DagName, limit: Limit = USUAL_ITEMS, cursor: Cursor = None
) -> Page[DagVersion]:
    """List the versions of a DAG, newest first."""
    (before,) = read_cursor(cursor, _NEWEST_VERSION)
    async with caller.read() as conn:
        row = await caller.dag(conn, dag)
        found = await dags.versions(conn, dag_id=row.dag_id, before=min(before, _NEWEST_VERSION), limit=limit)
    return page_of(found, limit, lambda row: (row.number,), _version)


async def show_version(
    caller: Caller, *, dag: DagName, number: Annotated[int, *_NUMBER, Doc("The version's number.")]
) -> DagVersionDetails:
    """Show one version of a DAG as it was published."""
    async with caller.read() as conn:
        row = await caller.dag(conn, dag)
        spec = await dags.version_number(conn, dag_id=row.dag_id, number=number)
    if spec is None:
        raise NotFound(f"DAG {dag} has no version {number}.")
    return DagVersionDetails(number=number, spec=spec)


async def diff_versions(
    caller: Caller,
    *,
    dag: DagName,
    old: Annotated[int | None, *_NUMBER, Doc("By default the version before the current one.")] = None,
    new: Annotated[int | None, *_NUMBER, Doc("By default the current version.")] = None,
) -> VersionDiff:
    """Compare two versions of a DAG."""
    async with caller.read() as conn:
        row = await caller.dag(conn, dag)
        before = await find_version(conn, dag, old)
        after = await find_version(conn, dag, new if new is not None else row.number)
        plan = await plan_changes(conn, before, after)
        code = await visible_code_changes(caller, conn, before, after)
    return VersionDiff(old=_version(before), new=_version(after), plan=plan, code=code)


async def roll_back_dag(caller: Caller, *, dag: DagName, body: RollbackRequest | None = None) -> RollbackResult:
    """Make an earlier version the current one again: plan, code and schedules. Open runs keep their version."""
    number = body.number if body else None
    routing = load_routing(caller.context.settings.routing_file)
    async with caller.write(Channel.SCHEDULE, Channel.TASKS) as conn:
        await caller.dag(conn, dag)
        return await roll_back(conn, dag=dag, number=number, actor=caller.actor, routing=routing)


def spec_of(row: DagRow) -> DagSpec:
    return from_json(json.dumps(row.spec))


def tags_of(tags: Collection[str] | None) -> list[str] | None:
    return None if tags is None else sorted(tags)


def _list(row: DagRow, name: str) -> list[Any]:
    """Also of a version that cannot be read: its DAG is listed, so that it can be paused or deleted."""
    found = (row.spec or {}).get(name)
    return found if isinstance(found, list) else []


def _dag(row: DagRow) -> Dag:
    description, owner = ((row.spec or {}).get(name) for name in ("description", "owner"))
    return record_of(
        Dag,
        row,
        description=description if isinstance(description, str) else None,
        owner=owner if isinstance(owner, str) else None,
        is_paused=row.paused,
        version=row.number,
        tags=[str(tag) for tag in _list(row, "tags")],
        task_count=len(_list(row, "tasks")),
        published_at=row.created_at,
    )


def _tasks(row: DagRow, spec: DagSpec, queues: list[str]) -> list[DagTask]:
    raw = _list(row, "tasks")
    names = [task.name for task in spec.tasks]
    return [
        record_of(
            DagTask,
            task,
            upstream=[names[up] for up, down in spec.edges if down == place],
            downstream=[names[down] for up, down in spec.edges if up == place],
            queue=queues[place] if place < len(queues) else task.queue,
            retries=task.retry.retries,
            spec=raw[place],
        )
        for place, task in enumerate(spec.tasks)
    ]


def _version(row: ListedVersion) -> DagVersion:
    return record_of(DagVersion, row, bundle=row.bundle_hash)


async def plan_changes(conn: AsyncConnection, old: ListedVersion, new: ListedVersion) -> list[str]:
    """What changed in the plan, as lines of a unified diff."""
    rows = [await dags.version(conn, each.version_id) for each in (old, new)]
    before, after = (_plan_text(row.spec if row else {}) for row in rows)
    return _unified(before, after, "plan")


async def _code_changes(conn: AsyncConnection, old: ListedVersion, new: ListedVersion) -> list[str]:
    if old.bundle_hash == new.bundle_hash:
        return []
    sides = []
    for each in (old, new):
        row = await dags.bundle(conn, each.bundle_hash)
        sides.append(contents(row.archive, each.bundle_hash) if row else {})
    changes: list[str] = []
    for path in sorted(sides[0].keys() | sides[1].keys()):
        before, after = (side.get(path) for side in sides)
        if before != after:
            changes += _file_changes(path, before, after)
    return changes


def _plan_text(spec: dict[str, Any]) -> str:
    """Tasks by name, with the names of their upstream tasks: indexes in the plan change when a task is added."""
    tasks = spec.get("tasks", [])
    names = [task["name"] for task in tasks]
    after: dict[str, list[str]] = {name: [] for name in names}
    for up, down in spec.get("edges", []):
        after[names[down]].append(names[up])
    plain = {key: value for key, value in spec.items() if key not in ("tasks", "edges")}
    plain["tasks"] = {task["name"]: {**task, "after": sorted(after[task["name"]])} for task in tasks}
    return json.dumps(plain, indent=1, sort_keys=True)


def _file_changes(path: str, before: bytes | None, after: bytes | None) -> list[str]:
    try:
        return _unified((before or b"").decode(), (after or b"").decode(), path)
    except UnicodeDecodeError:
        return [f"{path}: {len(before or b''):,} bytes became {len(after or b''):,}"]


def _unified(before: str, after: str, name: str) -> list[str]:
    made = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{name} before", f"{name} after", lineterm="", n=2
    )
    return list(made)
