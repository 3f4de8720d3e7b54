"""The tools: each answers one question of an operator with a few operations, in as few words as a client needs.

Every operation is called through `Ask`, which checks the caller's permission; a tool adds no right and no write of its own.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Protocol

from pydantic import Field

from evertick.domain.access import Permission
from evertick.domain.errors import NotFound, UserError
from evertick.domain.states import RunState, TaskState
from evertick.operations import backfills, dags, deployments, gates, runners, runs, schedules, task_logs, tasks
from evertick.operations.backfills import NewBackfill
from evertick.operations.dags import TriggerRequest
from evertick.operations.deployments import DeployRequest
from evertick.operations.schedules import SimulationRequest

# A client reads all of an answer: a page of the API is too long for it.
MOST_ROWS, MOST_LINES, MOST_FAILED_RUNS = 50, 400, 10
_MOST_PAGES = 50
PREVIEW_SECONDS = 600
MOST_FILES, MOST_FILE_BYTES = 100, 200_000


class Ask(Protocol):
    """Calls an operation for the caller. Raises Forbidden without the permission of its route."""

    def __call__(self, operation: Callable[..., Awaitable[Any]], /, **params: Any) -> Awaitable[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """`permission`: without it the tool is not offered. `is_write`: only offered if the caller asked for writes."""

    function: Callable[..., Awaitable[Any]]
    permission: Permission
    is_write: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__


Limit = Annotated[int, Field(ge=1, le=MOST_ROWS, description="Maximum number of items.")]
DagName = Annotated[str, Field(max_length=250, description="Name of the DAG.")]
RunId = Annotated[int, Field(ge=1, description="Number of the run.")]
TaskName = Annotated[str, Field(max_length=1000, description="Name of the task.")]
MapIndex = Annotated[int, Field(ge=-1, description="Index of an instance of a mapped task, otherwise -1.")]
Params = Annotated[dict[str, Any], Field(description="Parameters of the run, by name.")]
Hours = Annotated[float, Field(gt=0, le=24 * 366, description="How many hours to look back.")]
_DAG_FIELDS = ("name", "description", "is_paused", "version", "deployment", "owner", "tags", "task_count")
_RUN_FIELDS = (
    *("run_id", "dag", "version", "kind", "fire_at", "params", "triggered_by", "state", "created_at", "started_at"),
    *("finished_at", "open_tasks", "task_count", "retried", "reason"),
)
_TASK_FIELDS = (
    *(
        "task",
        "map_index",
        "state",
        "attempt",
        "max_attempts",
        "queue",
        "started_at",
        "finished_at",
        "exit_code",
        "reason",
    ),
)
_SCHEDULE_FIELDS = ("dag", "name", "when", "is_paused", "next_due", "last_fired", "misfire", "overlap", "error")


def _short(record: object, names: Sequence[str]) -> dict[str, Any]:
    found = {name: getattr(record, name) for name in names}
    return {name: value for name, value in found.items() if value is not None and value != {}}


async def list_dags(
    ask: Ask,
    *,
    search: Annotated[str | None, Field(max_length=250, description="Text in the name.")] = None,
    tag: Annotated[str | None, Field(max_length=250, description="Only DAGs with this tag.")] = None,
    is_paused: bool | None = None,
    limit: Limit = MOST_ROWS,
) -> object:
    """List or search DAGs by name or tag."""
    page = await ask(dags.list_dags, contains=search, tag=tag, is_paused=is_paused, limit=limit)
    return {"dags": [_short(each, _DAG_FIELDS) for each in page.items], "has_more": page.next_cursor is not None}


async def show_dag(ask: Ask, *, dag: DagName) -> object:
    """Show a DAG: parameters, tasks with their order and options, schedules with their next fires, and its newest runs."""
    found = (await ask(dags.show_dag, dag=dag)).record
    listed = await ask(schedules.list_schedules, dag=dag, limit=MOST_ROWS)
    newest = await ask(runs.list_runs, dag=dag, limit=5)
    names = ("name", "kind", "upstream", "queue", "retries", "timeout_seconds", "trigger_rule")
    return {
        **_short(found, (*_DAG_FIELDS, "timezone", "params", "max_active_runs", "file", "published_at")),
        "tasks": [_short(each, names) for each in found.tasks],
        "schedules": [_short(each, _SCHEDULE_FIELDS) for each in listed.items],
        "newest_runs": [_short(each, ("run_id", "state", "fire_at", "created_at")) for each in newest.items],
    }


async def list_runs(
    ask: Ask,
    *,
    dag: DagName | None = None,
    state: RunState | None = None,
    search: Annotated[
        str | None, Field(max_length=250, description="Text in the DAG's name, key or parameters.")
    ] = None,
    hours: Hours | None = None,
    limit: Limit = 20,
) -> object:
    """List or search runs, newest first, also those that run or are queued now."""
    since = None if hours is None else datetime.now(UTC) - timedelta(hours=hours)
    page = await ask(runs.list_runs, dag=dag, state=state, contains=search, since=since, limit=limit)
    return {"runs": [_short(each, _RUN_FIELDS) for each in page.items], "has_more": page.next_cursor is not None}


async def show_run(ask: Ask, *, run_id: RunId) -> object:
    """Show a run with its parameters, what triggered it, what operators did to it, and the state of each task."""
    found, rows = await ask(runs.show_run, run_id=run_id), await _tasks_of(ask, run_id)
    return {
        **_short(found, (*_RUN_FIELDS, "tasks_by_state", "triggers", "audit", "quarantine")),
        "tasks": [_short(each, _TASK_FIELDS) for each in rows[:MOST_LINES]],
        "has_more": len(rows) > MOST_LINES,
    }


async def list_failures(
    ask: Ask, *, dag: DagName | None = None, hours: Hours = 24, limit: Annotated[int, Field(ge=1, le=10)] = 5
) -> object:
    """List the newest failed runs, each with the tasks that failed and the reason."""
    since = datetime.now(UTC) - timedelta(hours=hours)
    page = await ask(runs.list_runs, dag=dag, state=RunState.FAILED, since=since, limit=limit)
    found = []
    for run in page.items:
        failed = await ask(tasks.list_tasks, run_id=run.run_id, state=TaskState.FAILED, limit=MOST_FAILED_RUNS)
        found.append(
            {**_short(run, _RUN_FIELDS), "failed_tasks": [_short(each, _TASK_FIELDS) for each in failed.items]}
        )
    return {"failed_runs": found, "has_more": page.next_cursor is not None}


async def show_task(ask: Ask, *, run_id: RunId, task: TaskName, map_index: MapIndex = -1) -> object:
    """Show one task of a run with all attempts, where they ran, and what the task returned."""
    return await ask(tasks.show_task, run_id=run_id, task=task, map_index=map_index)


async def why(ask: Ask, *, run_id: RunId, task: TaskName | None = None) -> object:
    """Explain why a task does not run, most binding reason first. Without a task: for the open tasks of the run."""
    if task is not None:
        return await ask(tasks.why_task, run_id=run_id, task=task)
    rows = [each for each in await _tasks_of(ask, run_id) if each.finished_at is None]
    waiting = [each for each in rows if each.state != TaskState.RUNNING][:MOST_FAILED_RUNS]
    return {
        "running": [each.task for each in rows if each.state == TaskState.RUNNING][:MOST_ROWS],
        "waiting": [await ask(tasks.why_task, run_id=run_id, task=each.task) for each in waiting],
    }


async def read_log(
    ask: Ask,
    *,
    run_id: RunId,
    task: TaskName,
    map_index: MapIndex = -1,
    last_lines: Annotated[int, Field(ge=1, le=MOST_LINES, description="How many lines from the end.")] = 100,
    contains: Annotated[
        str | None, Field(max_length=200, description="Only lines with this text, in any case.")
    ] = None,
) -> object:
    """Read the end of a task's log, or the lines that contain a text."""
    found: list[Any] = []
    cursor, pages = None, 0
    while pages < _MOST_PAGES:
        page = await ask(task_logs.read_log, run_id=run_id, task=task, map_index=map_index, cursor=cursor)
        found += [each for each in page.items if contains is None or contains.lower() in each.text.lower()]
        found, pages = found[-last_lines:], pages + 1
        # The last page of a running task's log has a cursor, too.
        if page.next_cursor is None or not page.items:
            break
        cursor = page.next_cursor
    return {"lines": [_short(each, ("epoch", "at", "level", "text")) for each in found]}


async def compare_runs(ask: Ask, *, run_id: RunId, other_run_id: RunId) -> object:
    """Compare two runs: version, parameters, duration, and each task whose state, attempts or duration differ."""
    pair = [await ask(runs.show_run, run_id=each) for each in (run_id, other_run_id)]
    rows = [{(each.task, each.map_index): each for each in await _tasks_of(ask, run.run_id)} for run in pair]
    differing = []
    for key in sorted({*rows[0], *rows[1]}):
        one, two = (_timed(side.get(key)) for side in rows)
        if one != two:
            differing.append({"task": key[0], "map_index": key[1], "run": one, "other": two})
    differing.sort(key=lambda each: -abs(_seconds(each["run"]) - _seconds(each["other"])))
    return {
        "runs": [{**_short(each, _RUN_FIELDS), "seconds": _duration(each)} for each in pair],
        "same_version": pair[0].dag == pair[1].dag and pair[0].version == pair[1].version,
        "same_params": pair[0].params == pair[1].params,
        "differing_tasks": differing[:MOST_ROWS],
    }


async def diff_versions(ask: Ask, *, dag: DagName, old: int | None = None, new: int | None = None) -> object:
    """Compare two versions of a DAG: plan and code, as a unified diff. By default the current one with the one before."""
    found = await ask(dags.diff_versions, dag=dag, old=old, new=new)
    return {**_short(found, ("old", "new")), "plan": found.plan[:MOST_LINES], "code": found.code[:MOST_LINES]}


async def list_schedules(ask: Ask, *, dag: DagName | None = None, limit: Limit = MOST_ROWS) -> object:
    """List schedules with their next and last fire, and those that are paused or have an error."""
    page = await ask(schedules.list_all_schedules, dag=dag, limit=limit)
    return {"schedules": [_short(each, _SCHEDULE_FIELDS) for each in page.items], "has_more": bool(page.next_cursor)}


async def simulate_schedule(
    ask: Ask,
    *,
    when: Annotated[str, Field(max_length=1000, description="An expression such as `30 6 * * *` or `@every 5m`.")],
    timezone: Annotated[str | None, Field(max_length=100)] = None,
    first: Annotated[datetime | None, Field(description="Begin of the range, with an offset. Default: now.")] = None,
    days: Annotated[float, Field(gt=0, le=1800, description="Length of the range in days.")] = 7,
    limit: Limit = 20,
) -> object:
    """List when an expression would fire, with the effect of clock changes. Saves nothing."""
    begin = first or datetime.now(UTC)
    body = SimulationRequest(when=when, timezone=timezone, first=begin, last=begin + timedelta(days=days), limit=limit)
    return await ask(schedules.simulate_schedule, body=body)


async def preview_backfill(
    ask: Ask,
    *,
    dag: DagName,
    first: datetime,
    last: datetime | None = None,
    schedule: Annotated[str | None, Field(description="Name of the DAG's schedule whose instants are used.")] = None,
    when: Annotated[str | None, Field(description="An expression instead of a schedule.")] = None,
) -> object:
    """Count the runs that a backfill of a range would create. Creates nothing."""
    body = NewBackfill(dag=dag, first=first, last=last, schedule=schedule, when=when, is_preview=True)
    return await ask(backfills.create_backfill, body=body)


async def check_health(ask: Ask) -> object:
    """Check whether runs can be planned and executed: scheduler, runners, queues, what holds work back, broken DAG files."""
    health = await ask(runners.show_health)
    queues, blocked = await ask(runners.list_queues, limit=MOST_ROWS), await ask(gates.list_blocked, limit=10)
    live, broken = await ask(runners.list_runners, limit=MOST_ROWS), await ask(dags.list_import_errors, limit=10)
    return {
        "health": health,
        "runners": [_short(each, ("name", "host", "queues", "slots", "busy", "request")) for each in live.items],
        "queues": queues.items,
        "blocked": blocked.items,
        "broken_files": broken.items,
    }


async def list_pools(ask: Ask) -> object:
    """List pools and keys: slots, how many are taken, and how many tasks wait for them."""
    pools, keys = await ask(gates.list_pools, limit=MOST_ROWS), await ask(gates.list_keys, limit=MOST_ROWS)
    return {"pools": pools.items, "keys": keys.items}


async def validate_deploy(
    ask: Ask,
    *,
    deployment: Annotated[str, Field(max_length=250, description="Name of the deployment.")],
    files: Annotated[dict[str, str], Field(description="Content of each file, by its path.")],
) -> object:
    """Load DAG files as a deploy would, and list what it would add, change, retire or refuse. Publishes nothing."""
    content = _packed(files)
    digest = hashlib.sha256(content).hexdigest()
    await ask(deployments.put_upload, archive_hash=digest, content=content)
    body = DeployRequest(archive_hash=digest)
    return (await ask(deployments.deploy_archive, name=deployment, body=body, dry_run=True)).record


async def preview_trigger(ask: Ask, *, dag: DagName, params: Params | None = None) -> object:
    """Show what `trigger_run` would start, and the preview id that it needs. Starts nothing."""
    found = (await ask(dags.show_dag, dag=dag)).record
    known = {each.get("name") for each in found.params}
    if unknown := sorted(set(params or {}) - known):
        raise UserError(f"{dag} has no parameter {unknown[0]!r}. It has: {', '.join(map(str, known)) or 'none'}.")
    return {
        "dag": dag,
        "version": found.version,
        "params": found.params,
        "given": params or {},
        "tasks": [each.name for each in found.tasks],
        "is_paused": found.is_paused,
        "preview_id": _preview_id(int(time.time()), dag, found.version, params or {}),
    }


async def trigger_run(
    ask: Ask,
    *,
    dag: DagName,
    preview_id: Annotated[
        str, Field(max_length=100, description="What `preview_trigger` returned for the same values.")
    ],
    params: Params | None = None,
) -> object:
    """Start the run that was previewed. The same preview starts one run, however often it is repeated."""
    found = (await ask(dags.show_dag, dag=dag)).record
    made_at = int(preview_id.partition("-")[0]) if preview_id.partition("-")[0].isdecimal() else 0
    if preview_id != _preview_id(made_at, dag, found.version, params or {}):
        raise UserError("This preview is of another DAG, version or other parameters: call preview_trigger again.")
    if not 0 <= time.time() - made_at <= PREVIEW_SECONDS:
        raise UserError("This preview is older than ten minutes: call preview_trigger again.")
    body = TriggerRequest(params=params or {})
    return await ask(dags.trigger_run, dag=dag, body=body, idempotency_key=f"mcp-{preview_id}")


TOOLS: Mapping[str, Tool] = {
    each.name: each
    for each in (
        Tool(function=list_dags, permission=Permission.READ_DAGS),
        Tool(function=show_dag, permission=Permission.READ_DAGS),
        Tool(function=list_runs, permission=Permission.READ_RUNS),
        Tool(function=show_run, permission=Permission.READ_RUNS),
        Tool(function=list_failures, permission=Permission.READ_RUNS),
        Tool(function=show_task, permission=Permission.READ_RUNS),
        Tool(function=why, permission=Permission.READ_RUNS),
        Tool(function=read_log, permission=Permission.READ_LOGS),
        Tool(function=compare_runs, permission=Permission.READ_RUNS),
        Tool(function=diff_versions, permission=Permission.READ_DAGS),
        Tool(function=list_schedules, permission=Permission.READ_SCHEDULES),
        Tool(function=simulate_schedule, permission=Permission.READ_SCHEDULES),
        Tool(function=preview_backfill, permission=Permission.RUN_BACKFILLS),
        Tool(function=check_health, permission=Permission.READ_METRICS),
        Tool(function=list_pools, permission=Permission.READ_GATES),
        Tool(function=validate_deploy, permission=Permission.DEPLOY),
        Tool(function=preview_trigger, permission=Permission.READ_DAGS),
        Tool(function=trigger_run, permission=Permission.TRIGGER_RUNS, is_write=True),
    )
}


async def _tasks_of(ask: Ask, run_id: int) -> list[Any]:
    """All tasks of a run, up to a number that an answer could hold."""
    found: list[Any] = []
    cursor: str | None = None
    for _ in range(_MOST_PAGES):
        page = await ask(tasks.list_tasks, run_id=run_id, limit=200, cursor=cursor)
        found += page.items
        if (cursor := page.next_cursor) is None:
            break
    return found


def _timed(row: Any) -> dict[str, Any] | None:
    return None if row is None else {"state": row.state, "attempt": row.attempt, "seconds": _duration(row)}


def _duration(row: Any) -> float | None:
    if row.started_at is None or row.finished_at is None:
        return None
    return round(float((row.finished_at - row.started_at).total_seconds()), 3)


def _seconds(found: Mapping[str, Any] | None) -> float:
    return (found or {}).get("seconds") or 0.0


def _preview_id(made_at: int, dag: str, version: int | None, params: Mapping[str, Any]) -> str:
    """No secret: the caller's permission decides. It ties a start to values that were shown before."""
    text = json.dumps([made_at, dag, version, params], sort_keys=True)
    return f"{made_at}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def _packed(files: Mapping[str, str]) -> bytes:
    if not 0 < len(files) <= MOST_FILES:
        raise NotFound(f"Give 1 to {MOST_FILES} files.")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path, text in sorted(files.items()):
            content = text.encode()
            if len(content) > MOST_FILE_BYTES:
                raise UserError(
                    f"{path[:200]!r} is larger than {MOST_FILE_BYTES} bytes: deploy it with `evertick deploy`."
                )
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()
