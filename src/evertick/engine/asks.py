"""What a running attempt asks for and changes. Each statement names the attempt with its session and epoch; a session that does
not hold it changes nothing and learns nothing (LeaseLost)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import AsyncConnection

from evertick.db.queries.secrets import AttemptHolder
from evertick.db.queries.state import StateOwner
from evertick.db.statements import sql_function
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey, storable_text
from evertick.domain.dags.params import JsonValue
from evertick.domain.dags.validation import check_run_params, check_run_type
from evertick.domain.encryption import Keyring
from evertick.domain.errors import LeaseLost, UserError
from evertick.domain.state import LARGEST_VALUE_BYTES, StateScope, check_key, check_size, check_step
from evertick.domain.stored_values import ValueKind, check_name, check_value
from evertick.engine.runs import Particulars, Triggered, find_dag, with_partition

# Airflow's limit of the same text.
MOST_NAME = 250
MOST_UPDATES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variable:
    name: str
    description: str | None


@sql_function
async def _answer_ask(
    conn: AsyncConnection, task: TaskKey, *, epoch: int, session: int, verb: str, args: dict[str, object]
) -> dict[str, JsonValue] | None:
    """`{"value": ...}`, or None: the session does not hold the attempt."""


@sql_function
async def _trigger_for_attempt(
    conn: AsyncConnection,
    task: TaskKey,
    about: Particulars,
    *,
    epoch: int,
    session: int,
    dag_id: int,
    params: dict[str, object],
    actor: Actor,
) -> Triggered | None: ...


@sql_function(retries=False)
async def _put_variable_for_attempt(
    conn: AsyncConnection,
    task: TaskKey,
    about: _Variable,
    *,
    epoch: int,
    session: int,
    content: str | None,
    key_id: str | None,
    actor: Actor,
) -> bool | None: ...


@sql_function
async def _put_outputs_for_attempt(
    conn: AsyncConnection, task: TaskKey, *, epoch: int, session: int, value: str | None
) -> bool | None: ...


@sql_function
async def _name_instance_for_attempt(
    conn: AsyncConnection, task: TaskKey, *, epoch: int, session: int, name: str
) -> bool | None: ...


async def name_instance(conn: AsyncConnection, holder: AttemptHolder, name: str) -> bool:
    """What users see as the name of an instance of a mapped task, next to its number."""
    shown = storable_text(name)[:MOST_NAME]
    named = await _name_instance_for_attempt(conn, holder.key, epoch=holder.epoch, session=holder.session, name=shown)
    if named is None:
        raise _lost(holder)
    return named


@sql_function
async def _put_updates_for_attempt(
    conn: AsyncConnection, task: TaskKey, *, epoch: int, session: int, updates: list[dict[str, object]]
) -> bool | None: ...


async def ask(conn: AsyncConnection, holder: AttemptHolder, verb: str, args: Mapping[str, object]) -> JsonValue:
    """A fact about runs, tasks or outputs; see `answer_ask`."""
    answer = await _answer_ask(conn, holder.key, epoch=holder.epoch, session=holder.session, verb=verb, args=dict(args))
    if answer is None:
        raise _lost(holder)
    return answer["value"]


async def trigger(
    conn: AsyncConnection, holder: AttemptHolder, *, dag: str, params: Mapping[str, object], about: Particulars
) -> Triggered:
    """Trigger a run for an attempt. The same key twice is one run."""
    row, spec = await find_dag(conn, dag)
    check_run_type(spec, "operator_triggered")
    checked: dict[str, object] = {**check_run_params(spec, params, accepts_unknown=True)}
    actor = Actor(f"run {holder.key.run_id}")
    made = await _trigger_for_attempt(
        conn,
        holder.key,
        with_partition(spec, about),
        epoch=holder.epoch,
        session=holder.session,
        dag_id=row.dag_id,
        params=checked,
        actor=actor,
    )
    if made is None:
        raise _lost(holder)
    return made


async def put_variable(
    conn: AsyncConnection,
    keyring: Keyring,
    holder: AttemptHolder,
    *,
    name: str,
    value: str | None,
    description: str | None = None,
) -> bool:
    """Set a variable for an attempt, or delete it (None). Whether it is new, or existed."""
    name = check_name(ValueKind.VARIABLE, name)
    content = None if value is None else keyring.seal("variable", name, check_value(ValueKind.VARIABLE, value))
    changed = await _put_variable_for_attempt(
        conn,
        holder.key,
        _Variable(name=name, description=description),
        epoch=holder.epoch,
        session=holder.session,
        content=content,
        key_id=keyring.first_id,
        actor=Actor(f"run {holder.key.run_id}"),
    )
    if changed is None:
        raise _lost(holder)
    return changed


async def put_outputs(conn: AsyncConnection, holder: AttemptHolder, value: str | None) -> bool:
    """Store the outputs of an attempt before its end, as JSON, in place of those before; None deletes them."""
    done = await _put_outputs_for_attempt(conn, holder.key, epoch=holder.epoch, session=holder.session, value=value)
    if done is None:
        raise _lost(holder)
    return done


async def put_updates(conn: AsyncConnection, holder: AttemptHolder, updates: list[dict[str, object]]) -> bool:
    """Describe the updates of assets that count when the attempt succeeds."""
    if len(updates) > MOST_UPDATES or len(json.dumps(updates)) > LARGEST_VALUE_BYTES:
        raise UserError(
            f"the attempt describes {len(updates):,} updates of assets: at most {MOST_UPDATES:,}, with 1 MiB in all, are kept."
        )
    done = await _put_updates_for_attempt(conn, holder.key, epoch=holder.epoch, session=holder.session, updates=updates)
    if done is None:
        raise _lost(holder)
    return done


# State and steps ------------------------------------------------------------------------------------------------------


@sql_function
async def _put_state_for_attempt(
    conn: AsyncConnection,
    task: TaskKey,
    *,
    epoch: int,
    session: int,
    scope: str,
    asset: str | None,
    key: str | None,
    value: str | None,
    expires_at: datetime | None,
) -> bool | None: ...


@sql_function
async def _put_step_for_attempt(
    conn: AsyncConnection, task: TaskKey, *, epoch: int, session: int, name: str, value: str
) -> bool | None: ...


@sql_function
async def _put_state_for_operator(
    conn: AsyncConnection,
    of: StateOwner,
    *,
    key: str | None,
    value: str | None,
    expires_at: datetime | None,
    actor: Actor,
) -> bool: ...


async def put_state(conn: AsyncConnection, holder: AttemptHolder, args: Mapping[str, Any]) -> bool:
    """Set a value for an attempt, delete it (`value` None), or delete all (`key` None too). Whether there was one."""
    scope, asset, key, value = StateScope(args["scope"]), args.get("asset"), args.get("key"), args.get("value")
    if (scope is StateScope.ASSET) != bool(asset):
        raise UserError("state of an asset needs the asset's name.")
    if key is not None:
        check_key(key)
    if value is not None:
        check_size(value, f"key {key!r}")
    expires_at = args.get("expires_at")
    done = await _put_state_for_attempt(
        conn,
        holder.key,
        epoch=holder.epoch,
        session=holder.session,
        scope=scope.value,
        asset=asset,
        key=key,
        value=value,
        expires_at=None if expires_at is None else datetime.fromisoformat(expires_at),
    )
    if done is None:
        raise _lost(holder)
    return done


async def put_step(conn: AsyncConnection, holder: AttemptHolder, *, name: str, value: str) -> bool:
    """Store the result of a step of an attempt. The same step again changes nothing."""
    text = check_size(value, f"step {check_step(name)!r}")
    done = await _put_step_for_attempt(
        conn, holder.key, epoch=holder.epoch, session=holder.session, name=name, value=text
    )
    if done is None:
        raise _lost(holder)
    return done


async def change_state(
    conn: AsyncConnection,
    of: StateOwner,
    *,
    key: str | None,
    value: str | None,
    actor: Actor,
    expires_at: datetime | None = None,
) -> bool:
    """Set a value (as JSON) for an operator, delete it, or delete all, with an entry in the audit log."""
    if key is not None:
        check_key(key)
    if value is not None:
        check_size(value, f"key {key!r}")
    return await _put_state_for_operator(conn, of, key=key, value=value, expires_at=expires_at, actor=actor)


def _lost(holder: AttemptHolder) -> LeaseLost:
    return LeaseLost(f"attempt {holder.epoch} of task {holder.key} was taken away from this runner")
