"""Tasks that wait without a slot: the leader resumes due tasks; events, approvals and assets end others.

Waking is one bounded batch: it starts runs of other DAGs, computes times of day, and resumes tasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from psycopg import AsyncConnection
from psycopg.types.json import Jsonb

from evertick.db.queries import assets, waits
from evertick.db.queries.waits import ApprovalRow, ChildDue, ClockDue
from evertick.db.statements import sql_function
from evertick.domain.access import Actor, Role
from evertick.domain.dags.params import ParamSpec, as_json, check_params, fill_params
from evertick.domain.dags.spec import read_form
from evertick.domain.dags.waits import MOST_PAYLOAD_BYTES, check_event_name, clock_instant
from evertick.domain.errors import Conflict, Forbidden, NotFound, UserError
from evertick.domain.schedules.partition_keys import of_asset
from evertick.domain.schedules.partitions import check_key
from evertick.engine.runs import find_dag
from evertick.engine.verbs import leader_verb

# The limit on the length of a chain of runs that triggered each other. It ends cycles of DAGs.
MOST_ABOVE = 10


@dataclass(frozen=True, slots=True)
class Woken:
    """How many waits were checked, how many of them were quarantined, and when the next is due."""

    looked_at: int
    refused: int
    next_wake: datetime | None


@leader_verb
async def wake_deferred_tasks(conn: AsyncConnection, *, shard: int, epoch: int, limit: int) -> Woken: ...


@leader_verb
async def start_child_run(
    conn: AsyncConnection,
    due: ChildDue,
    *,
    shard: int,
    epoch: int,
    dag_id: int | None,
    params: dict[str, object],
    reason: str | None,
) -> int | None:
    """The run; None when the task no longer waits, or fails for `reason`."""


@leader_verb
async def set_clock_waits(
    conn: AsyncConnection, *, shard: int, epoch: int, instants: list[dict[str, object]]
) -> None: ...


async def wake(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> Woken:
    """One batch of the due waits."""
    due = await waits.child_runs_due(conn, shard=shard, limit=batch)
    for each in due:
        await _start(conn, each, shard=shard, epoch=epoch)
    clocks = await waits.clock_waits_due(conn, shard=shard, limit=batch)
    if clocks:
        await set_clock_waits(conn, shard=shard, epoch=epoch, instants=[clock_row(each) for each in clocks])
    done = await wake_deferred_tasks(conn, shard=shard, epoch=epoch, limit=batch)
    return replace(done, looked_at=done.looked_at + len(due) + len(clocks))


def clock_row(due: ClockDue) -> dict[str, object]:
    """A time of day becomes an instant, by the rules of schedules. One that fails, because its zone is no longer known here, does
    not affect the others."""
    row: dict[str, object] = {name: getattr(due, name) for name in ("run_id", "idx", "map_index", "epoch")}
    try:
        return {**row, "wake_at": clock_instant(due.at, due.timezone, due.since).isoformat()}
    except UserError as error:
        return {**row, "reason": str(error)}


async def _start(conn: AsyncConnection, due: ChildDue, *, shard: int, epoch: int) -> None:
    """Start one task's run, or record the reason why it cannot start."""
    dag_id, reason = None, None
    params: dict[str, object] = {}
    try:
        if due.depth > MOST_ABOVE:
            raise UserError(f"trigger depth limit ({MOST_ABOVE}) reached; check for a cycle between DAGs.")
        row, spec = await find_dag(conn, due.dag)
        given = fill_params(due.params, due.given, results=due.results, own=due.own)
        params = dict(check_params(spec.params, given))
        dag_id = row.dag_id
    except UserError as error:
        reason = f"cannot start {due.dag}: {error}"
    await start_child_run(conn, due, shard=shard, epoch=epoch, dag_id=dag_id, params=params, reason=reason)


@dataclass(frozen=True, slots=True)
class SentEvent:
    """`is_new`: False for a key that was sent before; the record then describes the earlier event."""

    event_id: int
    is_new: bool
    sent_at: datetime
    sent_by: str


@sql_function(retries=False)
async def _send_event(
    conn: AsyncConnection, *, name: str, key: str | None, payload: Jsonb, actor: Actor
) -> SentEvent | None: ...


LONGEST_KEY = 200


async def send_event(
    conn: AsyncConnection,
    *,
    name: str,
    payload: object,
    actor: Actor,
    key: str | None = None,
    most_bytes: int = MOST_PAYLOAD_BYTES,
) -> SentEvent:
    """Sending the same key under the same name again returns the first event. It must have the same payload."""
    if problem := check_event_name(name):
        raise UserError(f"{name[:100]!r} is not a valid name for an event: {problem}.")
    if key is not None and not 0 < len(key) <= LONGEST_KEY:
        raise UserError(f"The key of an event must have 1 to {LONGEST_KEY} characters.")
    try:
        plain = as_json(payload)
    except ValueError as error:
        raise UserError(f"The payload of event {name!r}: {error}.") from None
    if (size := len(json.dumps(plain, ensure_ascii=False).encode())) > most_bytes:
        raise UserError(f"The payload of event {name!r} takes {size:,} bytes; at most {most_bytes:,} are allowed.")
    sent = await _send_event(conn, name=name, key=key, payload=Jsonb(plain), actor=actor)
    if sent is None:
        raise Conflict(f"Key {key!r} belongs to an event {name!r} with another payload: choose another key.")
    return sent


LONGEST_NOTE = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision. `fields` receives the form, so that typed texts are converted to its types. `chosen`: of the options of a
    question that an attempt asked; None takes the one that is named like the decision."""

    is_approved: bool
    actor: Actor
    note: str | None = None
    chosen: Sequence[str] | None = None
    fields: Callable[[tuple[ParamSpec, ...]], Mapping[str, object]] = lambda form: {}


@sql_function
async def _decide_approval(
    conn: AsyncConnection,
    row: ApprovalRow,
    *,
    is_approved: bool,
    actor: Actor,
    note: str | None,
    fields: dict[str, object],
    chosen: list[str] | None,
) -> bool:
    """Whether this call decided it; False when the task no longer waits for a decision."""


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
    if role is not None and (users := row.wait.get("users")):
        _check_user(row, users, decision.actor)
    if not row.is_open:
        raise _too_late(row)
    chosen = _chosen(row, decision)
    form = read_form(row.wait)
    given = decision.fields(form)
    # A rejection does not need the form's fields.
    fields: dict[str, object] = {**check_params(form, given)} if decision.is_approved or given else {}
    is_taken = await _decide_approval(
        conn,
        row,
        is_approved=decision.is_approved,
        actor=decision.actor,
        note=decision.note,
        fields=fields,
        chosen=chosen,
    )
    after = await find_approval(conn, run_id=run_id, task=task, map_index=map_index)
    if not is_taken:
        raise _too_late(after)
    return after


APPROVE, REJECT = "Approve", "Reject"


def _chosen(row: ApprovalRow, decision: Decision) -> list[str] | None:
    """The options of the answer; None for an approval without options."""
    options: list[str] | None = row.wait.get("options")
    if options is None:
        if decision.chosen is not None:
            raise UserError(f"Approval {row.title!r} has no options: approve it, or reject it.")
        return None
    chosen = list(decision.chosen) if decision.chosen is not None else [APPROVE if decision.is_approved else REJECT]
    wrong = [each for each in chosen if each not in options]
    if wrong or len(chosen) != len(set(chosen)) or not chosen or (len(chosen) > 1 and not row.wait.get("multiple")):
        how = "one or more" if row.wait.get("multiple") else "one"
        raise UserError(
            f"{', '.join(map(repr, chosen)) or 'Nothing'} is no answer to {row.title!r}: choose {how} of {options}."
        )
    return chosen


def _check_user(row: ApprovalRow, users: list[dict[str, str]], actor: Actor) -> None:
    name = actor.name.partition(":")[2] or actor.name
    if not any(name in (each["id"], each["name"]) for each in users):
        names = ", ".join(each["name"] or each["id"] for each in users)
        raise Forbidden(f"Only {names} can answer {row.title!r}.")


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


@dataclass(frozen=True, slots=True)
class AssetEvent:
    """An external update that was recorded."""

    update_id: int
    occurred_at: datetime


@sql_function(retries=False)
async def _update_asset(
    conn: AsyncConnection, *, asset: str, extra: dict[str, object], key: str | None, actor: Actor
) -> AssetEvent: ...


async def update_asset(
    conn: AsyncConnection, *, asset: str, extra: Mapping[str, object], actor: Actor, partition: str | None = None
) -> AssetEvent:
    """`extra` describes the update and is stored with it. `partition`: the key of the one that was updated."""
    if partition is not None:
        await _check_partition(conn, asset, partition)
    try:
        size = len(json.dumps(as_json(dict(extra))))
    except ValueError as error:
        raise UserError(f"The extra of the update of asset {asset!r}: {error}.") from None
    if size > MOST_PAYLOAD_BYTES:
        raise UserError(
            f"The extra of the update of asset {asset!r} takes {size:,} bytes; at most {MOST_PAYLOAD_BYTES:,} are"
            " allowed."
        )
    return await _update_asset(conn, asset=asset, extra=dict(extra), key=partition, actor=actor)


async def _check_partition(conn: AsyncConnection, asset: str, key: str) -> None:
    check_key(key)
    declared = of_asset(await assets.partitions(conn, asset))
    if declared is not None:
        declared.date_of(key)


@sql_function
async def _discard_asset_events(
    conn: AsyncConnection, *, dag_ids: list[int] | None, asset: str | None, before: datetime | None, actor: Actor
) -> int: ...


async def discard_asset_events(
    conn: AsyncConnection, *, dag_ids: list[int] | None, asset: str | None, before: datetime | None, actor: Actor
) -> None:
    """For schedules of these DAGs; None for all."""
    if not await _discard_asset_events(conn, dag_ids=dag_ids, asset=asset, before=before, actor=actor):
        raise NotFound("No delivered asset update is waiting for a run of these DAGs.")
