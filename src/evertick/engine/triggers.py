"""exchange_triggers: a runner reports how its triggers ended, learns which it no longer holds, and leases more.

A trigger is held by a session with an epoch of its task. A report of any other session or epoch changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from psycopg import AsyncConnection

from evertick.db.statements import sql_function
from evertick.domain.attempt import AttemptRef, Outcome, OutcomeKind, TaskKey
from evertick.domain.dags.params import JsonValue


class TriggerRow(NamedTuple):
    """A trigger to start; or, with its kind, one that is not held any more, a refused report, or a notice."""

    kind: str
    run_id: int
    idx: int
    map_index: int
    epoch: int
    version_id: int
    attempt: int
    fire_at: datetime | None
    classpath: str
    kwargs: JsonValue
    run: JsonValue

    @property
    def ref(self) -> AttemptRef:
        return AttemptRef(TaskKey(self.run_id, self.idx, self.map_index), self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerExchange:
    """`stopped`: the wait was ended by a person, so that work elsewhere may be ended as well. `has_more`: tasks became
    available for other runners."""

    started: list[TriggerRow]
    lost: list[AttemptRef]
    stopped: list[AttemptRef]
    refused: list[AttemptRef]
    has_more: bool


@sql_function
async def _exchange_triggers(
    conn: AsyncConnection,
    *,
    session: int,
    reports: str | None,
    held: list[list[int]] | None,
    queues: list[str],
    match: list[str],
    free: int,
) -> list[TriggerRow]: ...


async def exchange_triggers(
    conn: AsyncConnection,
    *,
    session: int,
    reports: Sequence[str],
    held: Sequence[AttemptRef] | None,
    queues: Sequence[str],
    match: Sequence[str] = (),
    free: int,
) -> TriggerExchange:
    """`reports` are created by `encode_end`, and `held` contains the reported triggers; None: only report. Sending a report
    again after a lost reply is harmless."""
    rows = await _exchange_triggers(
        conn,
        session=session,
        reports=f"[{','.join(reports)}]" if reports else None,
        held=None if held is None else [[*key, epoch] for key, epoch in held],
        queues=list(queues),
        match=list(match),
        free=free,
    )
    named: dict[str, list[AttemptRef]] = {"lost": [], "stop": [], "refused": []}
    for row in rows:
        if row.kind in named:
            named[row.kind].append(row.ref)
    return TriggerExchange(
        started=[row for row in rows if row.kind == "start"],
        lost=named["lost"],
        stopped=named["stop"],
        refused=named["refused"],
        has_more=any(row.kind == "more" for row in rows),
    )


def encode_end(outcome: Outcome) -> str:
    """The end of a trigger, in the format of the SQL function. Without its own report the trigger is returned."""
    key = outcome.key
    fields: dict[str, object] = {"r": key.run_id, "i": key.idx, "m": key.map_index, "e": outcome.epoch}
    if outcome.log:
        fields["log"] = outcome.log.decode("utf-8", "replace")
        fields["seq"], fields["until"] = outcome.log_offset, outcome.log_end
    if outcome.kind is OutcomeKind.SUCCESS and outcome.result_json is not None:
        return f'{json.dumps(fields)[:-1]}, "value": {outcome.result_json}}}'
    if outcome.kind is OutcomeKind.FAILED:
        fields["value"] = {"error": [outcome.reason or "the trigger failed"]}
    return json.dumps(fields)
