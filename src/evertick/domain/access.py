"""Permissions: roles, permissions, and the one matrix that joins them. Anything not granted is denied.

A principal limited to DAG tags holds only permissions that apply to a DAG, and only for DAGs that carry one of its tags.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from evertick.domain.errors import UserError

LONGEST_NAME = 100
SHORTEST_PASSWORD, LONGEST_PASSWORD = 8, 1000
MOST_TAGS = 50


class Role(StrEnum):
    """Each role includes every permission of the roles before it."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    EDITOR = "editor"
    ADMIN = "admin"

    @property
    def rank(self) -> int:
        return _RANKS[self]


_RANKS = {role: rank for rank, role in enumerate(Role)}


class Permission(StrEnum):
    """The permission that a route requires."""

    OPEN = "open"
    OWN = "own"
    READ_DAGS = "dags.read"
    PAUSE_DAGS = "dags.pause"
    DELETE_DAGS = "dags.delete"
    ROLL_BACK_DAGS = "dags.roll_back"
    READ_RUNS = "runs.read"
    READ_LOGS = "logs.read"
    TRIGGER_RUNS = "runs.trigger"
    CANCEL_RUNS = "runs.cancel"
    DELETE_RUNS = "runs.delete"
    CLEAR_TASKS = "tasks.clear"
    MARK_TASKS = "tasks.mark"
    DECIDE_APPROVALS = "approvals.decide"
    READ_EVENTS = "events.read"
    SEND_EVENTS = "events.send"
    READ_NOTIFICATIONS = "notifications.read"
    RESEND_NOTIFICATIONS = "notifications.resend"
    READ_SCHEDULES = "schedules.read"
    PAUSE_SCHEDULES = "schedules.pause"
    EDIT_SCHEDULES = "schedules.edit"
    READ_BACKFILLS = "backfills.read"
    RUN_BACKFILLS = "backfills.run"
    READ_GATES = "gates.read"
    EDIT_POOLS = "pools.edit"
    READ_VALUES = "values.read"
    EDIT_VALUES = "values.edit"
    READ_RUNNERS = "runners.read"
    DRAIN_RUNNERS = "runners.drain"
    READ_IMPORTS = "imports.read"
    READ_METRICS = "metrics.read"
    MANAGE_USERS = "users.manage"
    READ_AUDIT = "audit.read"


@dataclass(frozen=True, slots=True)
class Rule:
    """The lowest role that holds a permission (None: no sign-in needed), and whether the permission applies to a DAG."""

    lowest: Role | None
    is_per_dag: bool
    about: str


MATRIX: Mapping[Permission, Rule] = {
    Permission.OPEN: Rule(None, False, "version, health for load balancers, signing in"),
    Permission.OWN: Rule(Role.VIEWER, False, "your own session, password and tokens; the OpenAPI documents"),
    Permission.READ_DAGS: Rule(Role.VIEWER, True, "DAGs, their tasks and versions"),
    Permission.PAUSE_DAGS: Rule(Role.OPERATOR, True, "pause and unpause DAGs"),
    Permission.DELETE_DAGS: Rule(Role.EDITOR, True, "delete DAGs"),
    Permission.ROLL_BACK_DAGS: Rule(Role.EDITOR, True, "make an earlier version of a DAG the current one"),
    Permission.READ_RUNS: Rule(Role.VIEWER, True, "runs, tasks, attempts, results, and why a task does not run"),
    Permission.READ_LOGS: Rule(Role.VIEWER, True, "task logs"),
    Permission.TRIGGER_RUNS: Rule(Role.OPERATOR, True, "start runs"),
    Permission.CANCEL_RUNS: Rule(Role.OPERATOR, True, "cancel runs"),
    Permission.DELETE_RUNS: Rule(Role.EDITOR, True, "delete finished runs"),
    Permission.CLEAR_TASKS: Rule(Role.OPERATOR, True, "run tasks again, and preview which ones"),
    Permission.MARK_TASKS: Rule(Role.OPERATOR, True, "set the state of a task, and write notes"),
    Permission.DECIDE_APPROVALS: Rule(
        Role.OPERATOR, True, "approve and reject approval tasks; a DAG may require a higher role"
    ),
    Permission.READ_EVENTS: Rule(Role.VIEWER, False, "events that were sent"),
    Permission.SEND_EVENTS: Rule(Role.OPERATOR, False, "send events that tasks wait for, and report asset updates"),
    Permission.READ_NOTIFICATIONS: Rule(
        Role.OPERATOR, False, "notifications: deliveries by destination, and their failures"
    ),
    Permission.RESEND_NOTIFICATIONS: Rule(Role.OPERATOR, False, "try failed notifications again"),
    Permission.READ_SCHEDULES: Rule(Role.VIEWER, True, "schedules, their next fires and history"),
    Permission.PAUSE_SCHEDULES: Rule(Role.OPERATOR, True, "pause and unpause schedules"),
    Permission.EDIT_SCHEDULES: Rule(Role.EDITOR, True, "create, change, delete and reset schedules"),
    Permission.READ_BACKFILLS: Rule(Role.VIEWER, True, "backfills and previews of backfills"),
    Permission.RUN_BACKFILLS: Rule(Role.OPERATOR, True, "create, pause, resume and cancel backfills"),
    Permission.READ_GATES: Rule(Role.VIEWER, False, "pools, keys, and what holds work back"),
    Permission.EDIT_POOLS: Rule(Role.EDITOR, False, "create, change and delete pools"),
    Permission.READ_VALUES: Rule(
        Role.OPERATOR, False, "variables, connections without their secret fields, names of secrets"
    ),
    Permission.EDIT_VALUES: Rule(Role.EDITOR, False, "create, change and delete variables, connections and secrets"),
    Permission.READ_RUNNERS: Rule(Role.VIEWER, False, "runners and queues"),
    Permission.DRAIN_RUNNERS: Rule(Role.OPERATOR, False, "drain and undrain runners"),
    Permission.READ_IMPORTS: Rule(Role.VIEWER, False, "files that could not be loaded, and quarantined rows"),
    Permission.READ_METRICS: Rule(Role.VIEWER, False, "metrics and detailed health"),
    Permission.MANAGE_USERS: Rule(Role.ADMIN, False, "users, and the tokens of all users"),
    Permission.READ_AUDIT: Rule(Role.ADMIN, False, "the audit log"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The caller, with the rights that remain after the limits of their token. `tags` None: every DAG."""

    name: str
    role: Role
    tags: frozenset[str] | None = None
    credential_id: int | None = None
    is_session: bool = False

    def may(self, permission: Permission) -> bool:
        rule = MATRIX[permission]
        if rule.lowest is None or permission is Permission.OWN:
            return True
        return self.role.rank >= rule.lowest.rank and (self.tags is None or rule.is_per_dag)

    def sees(self, dag_tags: Collection[str]) -> bool:
        """Whether this caller may know that a DAG with these tags exists."""
        return self.tags is None or not self.tags.isdisjoint(dag_tags)


def narrowed(
    role: Role, tags: Collection[str] | None, cap: Role | None, tag_cap: Collection[str] | None
) -> tuple[Role, frozenset[str] | None]:
    """The rights of an account that signs in with a more limited token."""
    least = role if cap is None or cap.rank >= role.rank else cap
    if tags is None or tag_cap is None:
        left = tags if tags is not None else tag_cap
        return least, None if left is None else frozenset(left)
    return least, frozenset(tags) & frozenset(tag_cap)


def check_name(name: str, what: str = "user") -> str:
    plain = name.strip()
    if not plain or len(plain) > LONGEST_NAME or not plain.isprintable():
        raise UserError(
            f"{name[:40]!r} is not a valid name for a {what}: use 1 to {LONGEST_NAME} printable characters."
        )
    return plain


def check_password(password: str) -> str:
    if not SHORTEST_PASSWORD <= len(password) <= LONGEST_PASSWORD:
        raise UserError(f"A password must have {SHORTEST_PASSWORD} to {LONGEST_PASSWORD} characters.")
    return password


def check_tags(tags: Collection[str] | None) -> list[str] | None:
    if tags is None:
        return None
    found = sorted(set(tags))
    if not found or len(found) > MOST_TAGS or any(not tag or len(tag) > LONGEST_NAME for tag in found):
        raise UserError(f"Name 1 to {MOST_TAGS} tags of up to {LONGEST_NAME} characters, or none for every DAG.")
    return found
