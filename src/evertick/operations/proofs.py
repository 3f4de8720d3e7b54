"""The guarantees: what the leader has checked on the live database, and what it has found."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from annotated_doc import Doc

from evertick.db.queries import proofs
from evertick.db.queries.proofs import FoundViolation
from evertick.domain.proofs import GUARANTEES
from evertick.operations.caller import Caller
from evertick.operations.paging import USUAL_ITEMS, Limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """One guarantee. `checked` counts the checked runs, fires or triggers, or the rounds over live work."""

    name: str
    statement: str
    checked: int
    violations: int
    checked_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofStatus:
    """The state of the continuous proof. `fires_proven_until`: every fire up to this instant was checked."""

    guarantees: list[Guarantee]
    violations: list[FoundViolation]
    fires_proven_until: datetime | None


async def show_proof(
    caller: Caller,
    *,
    with_ended: Annotated[bool, Doc("Also violations that no longer hold.")] = False,
    limit: Limit = USUAL_ITEMS,
) -> ProofStatus:
    """Show every guarantee: how much of it was checked, when, and what violates it."""
    async with caller.read() as conn:
        cursors = {each.check_name: each for each in await proofs.cursors(conn)}
        found = await proofs.found(conn, with_ended=with_ended, limit=limit)
    fires = cursors.get("fires")
    until = (fires.position or {}).get("until") if fires is not None else None
    return ProofStatus(
        guarantees=[
            Guarantee(
                name=check,
                statement=statement,
                checked=cursors[check].checked if check in cursors else 0,
                violations=sum(each.check_name == check and each.ended_at is None for each in found),
                checked_at=cursors[check].checked_at if check in cursors else None,
            )
            for check, statement in GUARANTEES.items()
        ],
        violations=found,
        fires_proven_until=datetime.fromisoformat(until) if isinstance(until, str) else None,
    )
