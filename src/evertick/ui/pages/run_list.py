"""Runs of all DAGs, newest first, with filters, and actions for several of them at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import date, datetime, time, timedelta
from typing import Annotated, Any
from urllib.parse import parse_qs, urlencode

from fastapi import Query, Request, Response

from evertick.api.context import ApiCaller, Who
from evertick.domain.access import Permission
from evertick.domain.errors import EvertickError, NotFound, UserError
from evertick.domain.states import RunKind, RunState, TaskState
from evertick.operations import dags, runs
from evertick.operations.paging import Cursor
from evertick.operations.runs import ClearRequest
from evertick.ui.layout import done, page, page_router, zone_of

router = page_router()

_SHOWN, _MOST_CHOSEN = 50, 200
Text = Annotated[str, Query(max_length=250)]
Day = Annotated[str, Query(max_length=10)]


@router.get("/runs", Permission.READ_RUNS)
async def list_runs(
    request: Request,
    caller: Who,
    dag: Text = "",
    q: Text = "",
    tag: Text = "",
    state: Text = "",
    kind: Text = "",
    since: Day = "",
    until: Day = "",
    cursor: Cursor = None,
) -> Response:
    if dag and not await _is_known(caller, dag):
        dag, q = "", q or dag  # a part of a name
    last = _midnight(request, until)
    found = await runs.list_runs(
        caller,
        dag=dag or None,
        tag=tag or None,
        state=RunState(state) if state in set(RunState) else None,
        kind=RunKind(kind) if kind in set(RunKind) else None,
        since=_midnight(request, since),
        until=last + timedelta(days=1) if last else None,
        contains=q.strip().replace("\x00", "") or None,
        limit=_SHOWN,
        cursor=cursor,
    )
    given: dict[str, Any] = {
        "dag": dag,
        "q": q,
        "tag": tag,
        "state": state,
        "kind": kind,
        "since": since,
        "until": until,
    }
    filters = {name: value for name, value in given.items() if value}
    return page(
        request,
        "runs.html",
        here="runs",
        rows=found.items,
        **given,
        states=list(RunState),
        kinds=list(RunKind),
        is_filtered=bool(filters),
        is_first=cursor is None,
        older=urlencode(filters | {"cursor": found.next_cursor}) if found.next_cursor else None,
        without_dag=urlencode({name: value for name, value in filters.items() if name != "dag"}),
        bulk=[action for action, (permission, _, _) in RUN_ACTIONS.items() if caller.principal.may(permission)],
    )


async def _is_known(caller: ApiCaller, dag: str) -> bool:
    async with caller.read() as conn:
        try:
            await caller.known_dag(conn, dag.replace("\x00", ""))
        except NotFound:
            return False
    return True


def _midnight(request: Request, day: str) -> datetime | None:
    """The beginning of a day in the time zone of the page."""
    if not day:
        return None
    try:
        return datetime.combine(date.fromisoformat(day), time(), zone_of(request))
    except ValueError:
        raise UserError(f"{day!r} is not a date. Write one such as 2026-11-30.") from None


Act = Callable[[ApiCaller, str], Awaitable[object]]


async def _clear(caller: ApiCaller, run: str) -> object:
    cleared = await runs.clear_run(caller, run_id=_number(run), body=ClearRequest(only_failed=True))
    if not cleared.tasks:
        raise UserError(f"Run {run} has no failed tasks.")
    return cleared


async def _succeed(caller: ApiCaller, run: str) -> object:
    return await runs.mark_run(caller, run_id=_number(run), state=TaskState.SUCCESS)


async def _fail(caller: ApiCaller, run: str) -> object:
    return await runs.mark_run(caller, run_id=_number(run), state=TaskState.FAILED)


async def _cancel(caller: ApiCaller, run: str) -> object:
    return await runs.cancel_run(caller, run_id=_number(run))


async def _delete(caller: ApiCaller, run: str) -> object:
    return await runs.delete_run(caller, run_id=_number(run))


async def _pause(caller: ApiCaller, dag: str) -> object:
    return await dags.pause_dag(caller, dag=dag)


async def _unpause(caller: ApiCaller, dag: str) -> object:
    return await dags.unpause_dag(caller, dag=dag)


# The permission of each action, what it does to one object, and its past tense.
RUN_ACTIONS: dict[str, tuple[Permission, Act, str]] = {
    "Clear failed tasks": (Permission.CLEAR_TASKS, _clear, "cleared"),
    "Mark success": (Permission.MARK_TASKS, _succeed, "marked success"),
    "Mark failed": (Permission.MARK_TASKS, _fail, "marked failed"),
    "Cancel": (Permission.CANCEL_RUNS, _cancel, "canceled"),
    "Delete": (Permission.DELETE_RUNS, _delete, "deleted"),
}
DAG_ACTIONS: dict[str, tuple[Permission, Act, str]] = {
    "Pause": (Permission.PAUSE_DAGS, _pause, "paused"),
    "Unpause": (Permission.PAUSE_DAGS, _unpause, "unpaused"),
}


@router.post("/runs/bulk", Permission.READ_RUNS)
async def change_runs(request: Request, caller: Who) -> Response:
    return await _change(request, caller, RUN_ACTIONS, "run")


@router.post("/dags/bulk", Permission.READ_DAGS)
async def change_dags(request: Request, caller: Who) -> Response:
    return await _change(request, caller, DAG_ACTIONS, "DAG")


async def _change(
    request: Request, caller: ApiCaller, actions: dict[str, tuple[Permission, Act, str]], noun: str
) -> Response:
    """Do one action to each chosen object, and report how many it was done to and the first refusals."""
    try:
        form = parse_qs((await request.body()).decode(), max_num_fields=_MOST_CHOSEN + 2)
    except ValueError:
        raise UserError(f"Choose at most {_MOST_CHOSEN} {noun}s.") from None
    name, chosen = form.get("action", [""])[-1], list(dict.fromkeys(form.get("chosen", [])))
    if name not in actions:
        raise UserError(f"Choose an action: {', '.join(actions)}.")
    if not chosen:
        raise UserError(f"Select at least one {noun} with its check box.")
    permission, act, past = actions[name]
    caller.require(permission)
    refusals = []
    for each in chosen:
        try:
            await act(caller, each)
        except EvertickError as error:
            refusals.append(str(error))
    count = len(chosen) - len(refusals)
    return done(" ".join([f"{count} of {len(chosen)} {noun}s {past}.", *_first(refusals)]))


def _first(refusals: list[str]) -> Iterable[str]:
    yield from refusals[:3]
    if len(refusals) > 3:
        yield f"And {len(refusals) - 3} more."


def _number(run: str) -> int:
    if not run.isascii() or not run.isdigit() or len(run) > 18:
        raise UserError(f"{run[:40]!r} is not the number of a run.")
    return int(run)
