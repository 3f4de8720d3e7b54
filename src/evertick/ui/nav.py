"""What stands in the menu, in its order, and the right that shows it. `key` is what a page calls itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from evertick.domain.access import Permission, Principal


@dataclass(frozen=True, slots=True)
class Entry:
    """`shortcut`: the letter that follows `g`. `icon`: a drawing of templates/_icons.html."""

    key: str
    label: str
    path: str
    permission: Permission
    icon: str
    shortcut: str | None = None
    section: str = ""


ENTRIES = (
    Entry("home", "Home", "/", Permission.READ_DAGS, "home", "h"),
    Entry("dags", "DAGs", "/dags", Permission.READ_DAGS, "dags", "d"),
)


def entries_for(principal: Principal) -> Iterator[Entry]:
    return (each for each in ENTRIES if principal.may(each.permission))
