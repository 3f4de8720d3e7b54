"""Which names get a series of their own: those of the most activity. All others share one, so that their number is bounded.

Pure. A name that has one keeps it until another is twice as active, so that series rarely end.
"""

from __future__ import annotations

OTHER = "other"
# How many names are compared. Of more, the least active are forgotten.
MOST_KNOWN = 10_000


class Busiest:
    def __init__(self, most: int) -> None:
        self._most = most
        self._activity: dict[tuple[str, str], float] = {}
        self._named: set[tuple[str, str]] = set()

    @property
    def is_empty(self) -> bool:
        return not self._activity

    def add(self, name: tuple[str, str], activity: float) -> tuple[tuple[str, str], tuple[str, str] | None]:
        """The name of the series that counts this, and the name whose series ends, if one does."""
        self._activity[name] = self._activity.get(name, 0.0) + activity
        if len(self._activity) > MOST_KNOWN:
            self._forget()
        if name in self._named:
            return name, None
        if len(self._named) < self._most:
            self._named.add(name)
            return name, None
        least = min(self._named, key=lambda each: (self._activity.get(each, 0.0), each))
        if self._activity.get(name, 0.0) <= 2 * self._activity.get(least, 0.0):
            return (OTHER, OTHER), None
        self._named.remove(least)
        self._named.add(name)
        return name, least

    def age(self) -> None:
        """What happened before counts half."""
        self._activity = {name: activity / 2 for name, activity in self._activity.items()}

    def _forget(self) -> None:
        by_activity = sorted(self._activity.items(), key=lambda each: -each[1])
        self._activity = dict(by_activity[: MOST_KNOWN // 2])
