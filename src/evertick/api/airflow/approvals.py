"""Approvals as Airflow's "human in the loop" details, with the options Approve and Reject."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path, Query
from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow import models, query
from evertick.api.airflow.labels import OPERATORS, TASK_STATES
from evertick.api.airflow.runs import R, find_run, whose
from evertick.api.airflow.task_instances import MapIndex, T, find_instance, instance_documents
from evertick.api.auth import GuardedRouter
from evertick.api.context import ApiCaller, Who
from evertick.db.queries import waits
from evertick.db.queries.run_lists import PageRequest
from evertick.db.queries.waits import ApprovalRow, Question, QuestionFilter
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound, UserError
from evertick.engine.waits import APPROVE, REJECT
from evertick.operations.waits import ApprovalDecision, decide_approval

router = GuardedRouter(tags=["Task Instance"])

PLACE = ["run_id", "idx", "map_index"]
ORDER = {
    "ti_id": PLACE,
    "subject": ["title"],
    "responded_at": ["decided_at"],
    "created_at": ["asked_at"],
    "responded_by_user_id": ["answerer"],
    "responded_by_user_name": ["answerer"],
    "dag_id": ["dag"],
    "run_id": ["text_id"],
    "task_display_name": ["task"],
    "run_after": ["due_at"],
    "rendered_map_index": ["map_index"],
    "task_instance_operator": ["operator"],
    "task_instance_state": ["shown"],
}
_MOST_TRIES = 1000


@query.with_ranges("created_at")
class ApprovalQuery(query.Paged):
    dag_id_pattern: query.Pattern = None
    dag_id_prefix_pattern: query.Pattern = None
    task_id: str | None = None
    task_id_pattern: query.Pattern = None
    task_id_prefix_pattern: query.Pattern = None
    map_index: query.Small | None = None
    state: list[models.TaskInstanceState | Literal["none", "no_status"]] | None = None
    response_received: bool | None = None
    responded_by_user_id: list[str] | None = None
    responded_by_user_name: list[str] | None = None
    subject_search: query.Pattern = None
    body_search: query.Pattern = None


class UpdateHITLDetailPayload(query.Body):
    chosen_options: list[str]
    params_input: dict[str, Any] = Field(default_factory=dict)


@router.get(f"{R}/hitlDetails", Permission.READ_RUNS, models.HITLDetailCollection)
async def get_hitl_details(
    dag_id: str, dag_run_id: str, caller: Who, asked: Annotated[ApprovalQuery, Query()]
) -> dict[str, Any]:
    """List the newest approval of each task, open or decided, of one run or of all with `~`."""
    order = query.columns(asked.order_by, ORDER)
    async with caller.read() as conn:
        where = await whose(caller, conn, dag_id)
        if dag_run_id != query.EVERY:
            where["run_id"] = (await find_run(caller, conn, dag_id, dag_run_id)).run_id
        found, total = await waits.list_questions(conn, _filter(asked, where), query.paged(asked, order))
        return {"hitl_details": await _documents(conn, found), "total_entries": total}


@router.get(f"{T}/{{map_index}}/hitlDetails", Permission.READ_RUNS, models.HITLDetail)
async def get_hitl_detail(
    dag_id: str, dag_run_id: str, task_id: str, map_index: MapIndex, caller: Who
) -> dict[str, Any]:
    async with caller.read() as conn:
        found = await _find(caller, conn, (dag_id, dag_run_id, task_id), map_index)
        return (await _documents(conn, [found]))[0]


@router.patch(f"{T}/{{map_index}}/hitlDetails", Permission.DECIDE_APPROVALS, models.HITLDetailResponse)
async def update_hitl_detail(
    dag_id: str, dag_run_id: str, task_id: str, map_index: MapIndex, body: UpdateHITLDetailPayload, caller: Who
) -> dict[str, Any]:
    """Choose some of the options, or approve or reject, with form values in `params_input`. The first decision is final; later
    ones get 409."""
    async with caller.read() as conn:
        found = await _find(caller, conn, (dag_id, dag_run_id, task_id), map_index)
    chosen = body.chosen_options
    has_options = "options" in found.wait
    if not has_options and chosen not in ([APPROVE], [REJECT]):
        raise UserError(f"chosen_options must be [{APPROVE!r}] or [{REJECT!r}].")
    decision = ApprovalDecision(
        is_approved=chosen != [REJECT], fields=body.params_input, chosen=chosen if has_options else None
    )
    row = await decide_approval(caller, run_id=found.task.run_id, task=task_id, map_index=map_index, body=decision)
    return {
        "chosen_options": body.chosen_options,
        "params_input": row.fields,
        "responded_at": row.decided_at,
        "responded_by": _user(row.decided_by),
    }


@router.get(f"{T}/{{map_index}}/hitlDetails/tries/{{try_number}}", Permission.READ_RUNS, models.HITLDetailHistory)
async def get_hitl_detail_try_detail(
    dag_id: str,
    dag_run_id: str,
    task_id: str,
    map_index: MapIndex,
    try_number: Annotated[int, Path(ge=0, le=2**31 - 1)],
    caller: Who,
) -> dict[str, Any]:
    """The approval of one try: a cleared task requests a new one, and the first one is try 1."""
    async with caller.read() as conn:
        task = await find_instance(caller, conn, (dag_id, dag_run_id, task_id), map_index)
        made = await waits.of_task(conn, run_id=task.run_id, task=task_id, map_index=map_index, limit=_MOST_TRIES)
        (instance,) = await instance_documents(conn, [task])
    questions = made[::-1]
    if not 1 <= try_number <= len(questions):
        raise NotFound(f"Task {task_id!r} of run {dag_run_id!r} has no approval in try {try_number}.")
    return {**_question(questions[try_number - 1]), "task_instance": {**instance, "try_number": try_number}}


def _filter(asked: ApprovalQuery, where: dict[str, Any]) -> QuestionFilter:
    names = [set(each) for each in (asked.responded_by_user_id, asked.responded_by_user_name) if each]
    return QuestionFilter(
        **where,
        **query.patterns(asked, dag="dag_id", _="task_id"),
        task=asked.task_id,
        map_index=asked.map_index,
        states=["none" if state == "no_status" else state for state in asked.state] if asked.state else None,
        is_answered=asked.response_received,
        answerers=sorted(set.intersection(*names)) if names else None,
        title_like=query.plainly_contains(asked.subject_search),
        body_like=query.plainly_contains(asked.body_search),
        asked=query.span(asked, "created_at"),
        names=TASK_STATES,
        kinds=OPERATORS,
    )


async def _find(caller: ApiCaller, conn: AsyncConnection, names: tuple[str, str, str], map_index: int) -> Question:
    run = await find_run(caller, conn, *names[:2])
    wanted = QuestionFilter(run_id=run.run_id, task=names[2], map_index=map_index)
    found, _ = await waits.list_questions(conn, wanted, PageRequest(limit=1, is_counted=False))
    if found:
        return found[0]
    await find_instance(caller, conn, names, map_index)
    raise NotFound(f"Task {names[2]!r} of run {names[1]!r} has no approval.")


async def _documents(conn: AsyncConnection, found: list[Question]) -> list[dict[str, Any]]:
    instances = await instance_documents(conn, [each.task for each in found])
    return [{**_question(each), "task_instance": made} for each, made in zip(found, instances, strict=True)]


def _question(row: Question | ApprovalRow) -> dict[str, Any]:
    is_answered = row.decided_at is not None
    form, wait = row.wait.get("form", []), row.wait
    return {
        "subject": wait.get("subject", row.title),
        "body": wait.get("body"),
        "options": wait.get("options", [APPROVE, REJECT]),
        "defaults": wait.get("defaults"),
        "multiple": bool(wait.get("multiple")),
        "assigned_users": wait.get("users", []),
        "params": wait.get("params") or {each["name"]: {"value": each.get("default"), "schema": each} for each in form},
        "created_at": row.asked_at,
        "chosen_options": (row.chosen or [APPROVE if row.is_approved else REJECT]) if is_answered else None,
        "params_input": (row.fields or {}) if is_answered else None,
        "responded_at": row.decided_at,
        "responded_by_user": _user(row.decided_by) if is_answered else None,
        "response_received": is_answered,
    }


def _user(actor: str | None) -> dict[str, str]:
    name = (actor or "").partition(":")[2] or (actor or "")
    return {"id": name, "name": name}
