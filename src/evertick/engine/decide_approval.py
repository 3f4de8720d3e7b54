"""decide: a person approves or rejects an approval. The first decision stands; a later caller gets a conflict that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from psycopg import AsyncConnection

from evertick.domain.access import Role
from evertick.domain.dag import read_form
from evertick.domain.errors import Conflict, Forbidden, NotFound, UserError
from evertick.domain.params import JsonValue, ParamSpec, check_params
from evertick.store import approvals
from evertick.store.approvals import ApprovalRow
from evertick.store.db import retry_on_deadlock

LONGEST_NOTE = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision. `fields` receives the form, so that typed texts are converted to its types."""

    is_approved: bool
    actor: str
    note: str | None = None
    fields: Callable[[tuple[ParamSpec, ...]], Mapping[str, object]] = lambda form: {}


async def decide_approval(
    conn: AsyncConnection, *, run_id: int, task: str, decision: Decision, map_index: int = -1, role: Role | None = None
) -> ApprovalRow:
    """`role` is the caller's role; None for a caller with all rights."""
    if decision.note is not None and len(decision.note) > LONGEST_NOTE:
        raise UserError(f"A note must have at most {LONGEST_NOTE:,} characters.")
    row = await find_approval(conn, run_id=run_id, task=task, map_index=map_index)
    lowest = row.wait.get("approvers")
    if role is not None and lowest is not None and role.rank < Role(lowest).rank:
        raise Forbidden(f"Approval {row.title!r} needs the role {lowest}.")
    if not row.is_open:
        raise _too_late(row)
    form = read_form(row.wait)
    given = decision.fields(form)
    # A rejection does not need the form's fields.
    fields: dict[str, JsonValue] = check_params(form, given) if decision.is_approved or given else {}
    is_taken = await retry_on_deadlock(
        lambda: approvals.decide(
            conn, row, is_approved=decision.is_approved, actor=decision.actor, note=decision.note, fields=fields
        )
    )
    after = await find_approval(conn, run_id=run_id, task=task, map_index=map_index)
    if not is_taken:
        raise _too_late(after)
    return after


async def find_approval(conn: AsyncConnection, *, run_id: int, task: str, map_index: int = -1) -> ApprovalRow:
    """The newest approval of that instance of the task."""
    found = await approvals.of_task(conn, run_id=run_id, task=task, map_index=map_index)
    if not found:
        name = task if map_index < 0 else f"{task}[{map_index}]"
        raise NotFound(
            f"Task {name!r} of run {run_id} has no approval. List open approvals with `evertick approvals list`."
        )
    return found[0]


def _too_late(row: ApprovalRow) -> Conflict:
    what = f"{row.task} of run {row.run_id}"
    if row.decided_at is None:
        return Conflict(f"{what} no longer waits for a decision: it was canceled, marked or timed out.")
    verb = "approved" if row.is_approved else "rejected"
    note = f": {row.note}" if row.note else ""
    return Conflict(f"{what} was {verb} by {row.decided_by} at {row.decided_at.isoformat(timespec='seconds')}{note}.")
