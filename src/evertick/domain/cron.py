"""When a cron expression fires in real time. Never reads the clock, never searches without a bound.

The daylight-saving rule. An hour field that starts with `*` makes a schedule *elapsed*: it fires at every real instant
whose wall clock matches. Any other is *calendar*: each matching wall time fires once, a repeated one at its first occurrence;
the matches skipped by a gap of up to 3 hours fire once, right after the gap; a longer gap is skipped and recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from evertick.domain.cron_fields import CronFields, parse_fields
from evertick.domain.errors import InvalidSchedule
from evertick.domain.zones import Regime, find_zone, from_seconds, regime_at, to_seconds

_LONGEST_EXPRESSION = 256
LONGEST_GAP_SECONDS = 3 * 3600
_MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cron:
    """A validated expression in a known time zone. Created by `parse_cron`."""

    expression: str
    timezone: str
    fields: CronFields

    def next_after(self, instant: datetime) -> datetime | None:
        """The first fire strictly after `instant`, in UTC, or None if there is none before the year 10000.

        Each iteration advances one regime, and a valid expression matches within 400 years, so the loop ends.
        """
        second = to_seconds(instant) + 1
        regime = regime_at(self.timezone, second)
        wall = max(second + regime.offset, self._first_wall(regime))
        if second == regime.start and self._fires_for_gap(regime):
            return from_seconds(second)
        while (match := self.fields.next_wall(wall)) is not None:
            if match < regime.wall_end:
                return from_seconds(match - regime.offset)
            regime = regime_at(self.timezone, regime.end)
            if self._fires_for_gap(regime):
                return from_seconds(regime.start)
            wall = self._first_wall(regime)
        return None

    def count_between(self, after: datetime, through: datetime) -> int:
        """The number of fires after `after` and at or before `through`, without visiting each."""
        second, end = to_seconds(after) + 1, to_seconds(through) + 1
        count = 0
        while second < end:
            regime = regime_at(self.timezone, second)
            begin = max(second + regime.offset, self._first_wall(regime))
            count += self.fields.count_walls(begin, min(end, regime.end) + regime.offset)
            if second == regime.start and self._fires_for_gap(regime):
                count += self.fields.next_wall(regime.wall_start) != regime.wall_start
            second = regime.end
        return count

    def lost_between(self, after: datetime, through: datetime) -> tuple[datetime, int] | None:
        """The fires skipped by gaps that are too long to make up for, after `after` and at or before `through`:
        the first instant after the last such gap, and the number of matching wall times that all of them skipped."""
        if self.fields.is_elapsed:
            return None
        end = to_seconds(through)
        regime = regime_at(self.timezone, to_seconds(after))
        count, at = 0, None
        while regime.end <= end:
            regime = regime_at(self.timezone, regime.end)
            if regime.wall_start - regime.gap_start > LONGEST_GAP_SECONDS and (
                lost := self.fields.count_walls(regime.gap_start, regime.wall_start)
            ):
                count, at = count + lost, from_seconds(regime.start)
        return None if at is None else (at, count)

    def _first_wall(self, regime: Regime) -> int:
        """Where matching starts in a regime: a calendar schedule has already fired for repeated wall times."""
        return regime.wall_start if self.fields.is_elapsed else regime.first_new_wall

    def _fires_for_gap(self, regime: Regime) -> bool:
        """Whether the clock change at the start of the regime skipped matches that fire once after it."""
        if self.fields.is_elapsed or not 0 < regime.wall_start - regime.gap_start <= LONGEST_GAP_SECONDS:
            return False
        swallowed = self.fields.next_wall(regime.gap_start)
        return swallowed is not None and swallowed < regime.wall_start


def parse_cron(expression: str, timezone: str = "UTC") -> Cron:
    """Parse and validate an expression of 5 or 6 fields, or a macro such as `@daily`."""
    if len(expression) > _LONGEST_EXPRESSION:
        raise InvalidSchedule(
            f"cron {expression[:40]!r}… has {len(expression)} characters: at most {_LONGEST_EXPRESSION} are allowed"
        )
    find_zone(timezone)
    written = " ".join(expression.split())
    is_macro = written.startswith("@")
    canonical = written.lower() if is_macro else written.upper()
    if is_macro and canonical not in _MACROS:
        raise InvalidSchedule(f"cron {expression!r} is not a known macro: use one of {', '.join(_MACROS)}")
    # An error quotes the expression as it was written.
    fields = parse_fields(_MACROS.get(canonical, written))
    if fields.next_wall(0) is None:
        raise InvalidSchedule(
            f"cron {written!r} never fires: it has no fire in 400 years, because no date matches its day-of-month, month and "
            "day-of-week fields; change one of them"
        )
    return Cron(expression=canonical, timezone=timezone, fields=fields)
