"""Catch-up: what happens after a pause to the fires that the pause suppressed: nothing, or what the user asks for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.domain.misfire import MOST_MISSED, MisfirePolicy, SkipReason
from evertick.engine.plan import UNPLANNABLE, JsonObject, plan_row, plan_skip
from evertick.store import schedules, shards
from evertick.store.schedules import DagSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUp:
    """`policy` SKIP runs none of them. Others go back as far as `window_seconds`, or the schedule's own window."""

    policy: MisfirePolicy = MisfirePolicy.SKIP
    window_seconds: float | None = None

    def plan(self, schedule: DagSchedule, now: datetime) -> JsonObject | None:
        """A plan for `settle_schedules`, complete: a remainder would fall under the schedule's own policy."""
        if self.policy is MisfirePolicy.SKIP:
            return plan_skip(schedule, now, SkipReason.PAUSED)
        most = schedule.catchup_limit or MOST_MISSED
        try:
            return plan_row(schedule, now, most_fires=most, policy=self.policy, window_seconds=self.window_seconds)
        except UNPLANNABLE:
            return None


NOTHING = CatchUp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """The decision about one schedule's missed fires."""

    name: str
    runs: list[datetime]
    skipped: int
    reason: str | None


async def preview(conn: AsyncConnection, *, dag: str, catch_up: CatchUp, name: str | None = None) -> list[Missed]:
    """A preview of what an unpause now would do to the missed fires of a DAG's schedules, or of one. Ignores overlap."""
    now = await shards.read_clock(conn)
    found = []
    for each in await schedules.of_dag(conn, dag=dag, name=name):
        is_let_go = each.is_held if name is not None else not each.is_held
        if each.paused and is_let_go and (plan := catch_up.plan(each, now)):
            found.append(_missed(each.name, plan))
    return found


def _missed(name: str, plan: JsonObject) -> Missed:
    fires, skipped = plan["fires"], plan.get("skipped")
    assert isinstance(fires, list)
    runs = [datetime.fromisoformat(fire) for fire in fires]
    if not isinstance(skipped, dict):
        return Missed(name=name, runs=runs, skipped=0, reason=None)
    return Missed(name=name, runs=runs, skipped=int(skipped["count"]), reason=str(skipped["reason"]))
