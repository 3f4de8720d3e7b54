"""Tasks that wait without a slot: the leader resumes due tasks; events, approvals and assets end others.

Waking is one bounded batch: it starts runs of other DAGs, computes times of day, and resumes tasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.connect import retry_on_deadlock
from evertick.db.queries import assets, waits
from evertick.db.queries.assets import AssetEvent
from evertick.db.queries.waits import ApprovalRow, ChildDue, ClockDue, Sent, Woken
from evertick.domain.access import Role
from evertick.domain.dags.params import JsonValue, ParamSpec, as_json, check_params, fill_params
from evertick.domain.dags.spec import read_form
from evertick.domain.dags.waits import MOST_PAYLOAD_BYTES, check_event_name, clock_instant
from evertick.domain.errors import Conflict, Forbidden, NotFound, UserError
from evertick.engine.runs import find_dag
from evertick.engine.verbs import as_leader

# The limit on the length of a chain of runs that triggered each other. It ends cycles of DAGs.
MOST_ABOVE = 10


async def wake(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> Woken:
    """One batch of the due waits."""
    due = await waits.children_due(conn, shard=shard, batch=batch)
    for each in due:
        await _start(conn, each, shard=shard, epoch=epoch)
    read = await _read_clocks(conn, shard=shard, epoch=epoch, batch=batch)
    done = await as_leader(
        lambda: waits.wake_waits(conn, shard=shard, epoch=epoch, batch=batch), shard=shard, epoch=epoch
    )
    return replace(done, looked_at=done.looked_at + len(due) + read)


async def _read_clocks(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> int:
    """Times of day become instants, by the rules of schedules. One that fails, because its zone is no longer known here, does
    not affect the others."""
    due = await waits.clocks_due(conn, shard=shard, batch=batch)
    if due:
        instants = [(each, _instant_of(each)) for each in due]
        await as_leader(lambda: waits.set_clocks(conn, instants, shard=shard, epoch=epoch), shard=shard, epoch=epoch)
    return len(due)


def _instant_of(due: ClockDue) -> datetime | str:
    try:
        return clock_instant(due.at, due.timezone, due.since)
    except UserError as error:
        return str(error)


async def _start(conn: AsyncConnection, due: ChildDue, *, shard: int, epoch: int) -> None:
    """Start one task's run, or record the reason why it cannot start."""
    dag_id, params, reason = None, {}, None
    try:
        if due.depth >= MOST_ABOVE:
            raise UserError(f"trigger depth limit ({MOST_ABOVE}) reached; check for a cycle between DAGs.")
        row, spec = await find_dag(conn, due.dag)
        given = fill_params(due.params, due.given, results=due.results, own=due.own)
        params = dict(check_params(spec.params, given))
        dag_id = row.dag_id
    except UserError as error:
        reason = f"cannot start {due.dag}: {error}"
    await as_leader(
        lambda: waits.start_child(conn, due, shard=shard, epoch=epoch, dag_id=dag_id, params=params, reason=reason),
        shard=shard,
        epoch=epoch,
    )


LONGEST_KEY = 200


async def send_event(conn: AsyncConnection, *, name: str, payload: object, actor: str, key: str | None = None) -> Sent:
    """Sending the same key under the same name again returns the first event."""
    if problem := check_event_name(name):
        raise UserError(f"{name[:100]!r} is not a valid name for an event: {problem}.")
    if key is not None and not 0 < len(key) <= LONGEST_KEY:
        raise UserError(f"The key of an event must have 1 to {LONGEST_KEY} characters.")
    try:
        plain = as_json(payload)
    except ValueError as error:
        raise UserError(f"The payload of event {name!r}: {error}.") from None
    if (size := len(json.dumps(plain))) > MOST_PAYLOAD_BYTES:
        raise UserError(
            f"The payload of event {name!r} takes {size:,} bytes; at most {MOST_PAYLOAD_BYTES:,} are allowed."
        )
    sent = await waits.send(conn, name=name, key=key, payload=plain, actor=actor)
    if sent is None:
        # Pruned between the conflict on its key and the read.
        raise UserError(f"Event {name!r} with key {key!r} is being pruned. Send it again.")
    return sent


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
        lambda: waits.decide(
            conn, row, is_approved=decision.is_approved, actor=decision.actor, note=decision.note, fields=fields
        )
    )
    after = await find_approval(conn, run_id=run_id, task=task, map_index=map_index)
    if not is_taken:
        raise _too_late(after)
    return after


async def find_approval(conn: AsyncConnection, *, run_id: int, task: str, map_index: int = -1) -> ApprovalRow:
    """The newest approval of that instance of the task."""
    found = await waits.of_task(conn, run_id=run_id, task=task, map_index=map_index)
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


async def find_asset(conn: AsyncConnection, asset: str) -> None:
    """Catches typing errors: an asset must be updated by some DAG or be a dependency of one."""
    if not await assets.is_known(conn, asset):
        raise NotFound(
            f"No DAG updates asset {asset[:100]!r} or depends on it. List assets with `evertick assets list`."
        )


async def update_asset(conn: AsyncConnection, *, asset: str, extra: Mapping[str, object], actor: str) -> AssetEvent:
    """`extra` describes the update and is stored with it."""
    try:
        size = len(json.dumps(as_json(dict(extra))))
    except ValueError as error:
        raise UserError(f"The extra of the update of asset {asset!r}: {error}.") from None
    if size > MOST_PAYLOAD_BYTES:
        raise UserError(
            f"The extra of the update of asset {asset!r} takes {size:,} bytes; at most {MOST_PAYLOAD_BYTES:,} are"
            " allowed."
        )
    return await assets.update(conn, asset=asset, extra=extra, actor=actor)


async def discard_asset_events(
    conn: AsyncConnection, *, dag_ids: list[int] | None, asset: str | None, before: datetime | None, actor: str
) -> None:
    """For schedules of these DAGs; None for all."""
    count = await retry_on_deadlock(
        lambda: assets.discard_asset_events(conn, dag_ids=dag_ids, asset=asset, before=before, actor=actor)
    )
    if count == 0:
        raise NotFound("No delivered asset update is waiting for a run of these DAGs.")
