"""The menu entries in display order, each with the permission that shows it. `key` identifies the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from evertick.domain.access import Permission, Principal


@dataclass(frozen=True, slots=True)
class Entry:
    """`shortcut` is the letter typed after `g`. `icon` names an icon of templates/_icons.html."""

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
    Entry("runs", "Runs", "/runs", Permission.READ_RUNS, "runs", "r"),
    Entry("approvals", "Approvals", "/approvals", Permission.READ_RUNS, "ok", "y"),
    Entry("backfills", "Backfills", "/backfills", Permission.READ_BACKFILLS, "backfills", "b"),
    Entry("assets", "Assets", "/assets", Permission.READ_GATES, "assets", "e"),
    Entry("pools", "Pools", "/pools", Permission.READ_GATES, "pools", "p", "Capacity"),
    Entry("keys", "Keys", "/keys", Permission.READ_GATES, "keys", "k", "Capacity"),
    Entry("queues", "Queues", "/queues", Permission.READ_RUNNERS, "queues", "q", "Capacity"),
    Entry("runners", "Runners", "/runners", Permission.READ_RUNNERS, "runners", "w", "Capacity"),
    Entry("schedulers", "Schedulers", "/schedulers", Permission.READ_METRICS, "clock", "l", "Capacity"),
    Entry("variables", "Variables", "/variables", Permission.READ_VALUES, "variables", "v", "Values"),
    Entry("connections", "Connections", "/connections", Permission.READ_VALUES, "connections", "c", "Values"),
    Entry("secrets", "Secrets", "/secrets", Permission.READ_VALUES, "secrets", "s", "Values"),
    Entry("users", "Users", "/users", Permission.MANAGE_USERS, "users", "u", "Access"),
    Entry("tokens", "Tokens", "/tokens", Permission.OWN, "tokens", "t", "Access"),
    Entry("audit", "Audit", "/audit", Permission.READ_AUDIT, "audit", "a", "Access"),
)


def entries_for(principal: Principal) -> Iterator[Entry]:
    return (each for each in ENTRIES if principal.may(each.permission))
