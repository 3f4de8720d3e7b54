"""Permissions: roles, permissions, and the one matrix that joins them. Anything not granted is denied.

A principal limited to DAG tags holds only permissions that apply to a DAG, and only for DAGs that carry one of its tags.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Self

from evertick.domain.errors import UserError

LONGEST_NAME = 100
SHORTEST_PASSWORD, LONGEST_PASSWORD = 8, 1000
# Without the digits and signs around them.
_COMMON_PASSWORDS = frozenset((
    "", "password", "passw0rd", "p@ssw0rd", "pa$$word", "passwort", "letmein", "welcome", "changeme", "default",
    "secret", "admin", "administrator", "root", "user", "guest", "test", "master", "login", "evertick",
    "airflow", "postgres", "iloveyou", "monkey", "dragon", "sunshine", "princess", "football", "baseball",
    "superman", "batman", "trustno", "qwerty", "qwertz", "azerty", "qwertyuiop", "asdfgh", "asdfghjkl",
    "zxcvbnm", "abc", "abcd", "qwe", "qaz", "1q2w3e4r",
))  # fmt: skip
_SEQUENCES = (
    "01234567890123456789",
    "abcdefghijklmnopqrstuvwxyz",
    "qwertyuiopasdfghjklzxcvbnm",
    "1q2w3e4r5t6y7u8i9o0p",
    "1qaz2wsx3edc4rfv",
)
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


@dataclass(frozen=True, slots=True)
class Rule:
    """The lowest role that holds a permission (None: no sign-in needed), and whether the permission applies to a DAG."""

    lowest: Role | None
    is_per_dag: bool
    about: str


class Permission(StrEnum):
    """The permission that a route requires, each with its rule: the matrix of roles and permissions."""

    rule: Rule
    _value_: str

    def __new__(cls, value: str, rule: Rule) -> Self:
        found = str.__new__(cls, value)
        found._value_, found.rule = value, rule
        return found

    OPEN = "open", Rule(None, False, "version, health for load balancers, signing in")
    OWN = "own", Rule(Role.VIEWER, False, "your own session, password and tokens; the OpenAPI documents")
    READ_DAGS = "dags.read", Rule(Role.VIEWER, True, "DAGs, their tasks and versions")
    PAUSE_DAGS = "dags.pause", Rule(Role.OPERATOR, True, "pause and unpause DAGs")
    DELETE_DAGS = "dags.delete", Rule(Role.EDITOR, True, "delete DAGs")
    ROLL_BACK_DAGS = "dags.roll_back", Rule(Role.EDITOR, True, "make an earlier version of a DAG the current one")
    READ_DEPLOYMENTS = "deployments.read", Rule(Role.VIEWER, False, "deployments and their versions")
    DEPLOY = (
        "deployments.deploy",
        Rule(
            Role.EDITOR,
            False,
            "publish an uploaded folder of DAGs, which runs its code; roll a deployment back, and delete it",
        ),
    )
    READ_RUNS = "runs.read", Rule(Role.VIEWER, True, "runs, tasks, attempts, results, and why a task does not run")
    READ_LOGS = "logs.read", Rule(Role.VIEWER, True, "task logs")
    TRIGGER_RUNS = "runs.trigger", Rule(Role.OPERATOR, True, "start runs")
    CANCEL_RUNS = "runs.cancel", Rule(Role.OPERATOR, True, "cancel runs")
    DELETE_RUNS = "runs.delete", Rule(Role.EDITOR, True, "delete finished runs")
    CLEAR_TASKS = "tasks.clear", Rule(Role.OPERATOR, True, "run tasks again, and preview which ones")
    MARK_TASKS = "tasks.mark", Rule(Role.OPERATOR, True, "set the state of a task, and write notes")
    DECIDE_APPROVALS = (
        "approvals.decide",
        Rule(Role.OPERATOR, True, "approve and reject approval tasks; a DAG may require a higher role"),
    )
    READ_EVENTS = "events.read", Rule(Role.VIEWER, False, "events that were sent")
    SEND_EVENTS = "events.send", Rule(Role.OPERATOR, False, "send events that tasks wait for, and report asset updates")
    REPLAY = "events.replay", Rule(Role.OPERATOR, False, "put requests that could not become a run back into the inbox")
    EDIT_WEBHOOKS = (
        "webhooks.edit",
        Rule(Role.EDITOR, False, "create, change and delete webhooks, whose senders send events"),
    )
    READ_NOTIFICATIONS = (
        "notifications.read",
        Rule(Role.OPERATOR, False, "notifications: deliveries by destination, and their failures"),
    )
    RESEND_NOTIFICATIONS = "notifications.resend", Rule(Role.OPERATOR, False, "try failed notifications again")
    READ_SCHEDULES = "schedules.read", Rule(Role.VIEWER, True, "schedules, their next fires and history")
    PAUSE_SCHEDULES = "schedules.pause", Rule(Role.OPERATOR, True, "pause and unpause schedules")
    EDIT_SCHEDULES = "schedules.edit", Rule(Role.EDITOR, True, "create, change, delete and reset schedules")
    READ_BACKFILLS = "backfills.read", Rule(Role.VIEWER, True, "backfills and previews of backfills")
    RUN_BACKFILLS = "backfills.run", Rule(Role.OPERATOR, True, "create, pause, unpause and cancel backfills")
    READ_GATES = "gates.read", Rule(Role.VIEWER, False, "pools, keys, and what holds work back")
    EDIT_POOLS = "pools.edit", Rule(Role.EDITOR, False, "create, change and delete pools")
    READ_VALUES = (
        "values.read",
        Rule(Role.OPERATOR, False, "variables, connections without their secret fields, names of secrets"),
    )
    EDIT_VALUES = (
        "values.edit",
        Rule(Role.EDITOR, False, "create, change and delete variables, connections and secrets"),
    )
    READ_RUNNERS = "runners.read", Rule(Role.VIEWER, False, "runners and queues")
    DRAIN_RUNNERS = "runners.drain", Rule(Role.OPERATOR, False, "drain and undrain runners")
    MANAGE_RUNNERS = (
        "runners.manage",
        Rule(Role.ADMIN, False, "join tokens of runners over HTTPS: such a runner receives code, values and secrets"),
    )
    READ_IMPORTS = "imports.read", Rule(Role.VIEWER, False, "files that could not be loaded, and quarantined rows")
    READ_METRICS = "metrics.read", Rule(Role.VIEWER, False, "metrics and detailed health")
    MANAGE_USERS = "users.manage", Rule(Role.ADMIN, False, "users, and the tokens of all users")
    READ_AUDIT = "audit.read", Rule(Role.ADMIN, False, "the audit log")


MATRIX: Mapping[Permission, Rule] = {each: each.rule for each in Permission}


@dataclass(frozen=True, slots=True)
class Actor:
    """The author of a change, for the audit log: `origin` is the address or the host of the request."""

    name: str
    origin: str | None = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The caller, with the rights that remain after the limits of their token. `tags` None: every DAG."""

    name: str
    role: Role
    tags: frozenset[str] | None = None
    credential_id: int | None = None
    is_session: bool = False

    def may(self, permission: Permission) -> bool:
        rule = permission.rule
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


def check_password(password: str, user: str) -> str:
    """Refuse a password that is tried first: a common one, one or two characters repeated, a sequence, or the user's name."""
    if not SHORTEST_PASSWORD <= len(password) <= LONGEST_PASSWORD:
        raise UserError(f"A password must have {SHORTEST_PASSWORD} to {LONGEST_PASSWORD} characters.")
    plain = password.lower()
    core = plain.strip("0123456789!?.,-_*# ")
    is_sequence = any(plain in row or plain in row[::-1] for row in _SEQUENCES)
    if len(set(plain)) < 3 or is_sequence or core in _COMMON_PASSWORDS or core == user.strip().lower():
        raise UserError("This password is among the first that are tried. Choose a longer one of several words.")
    return password


def network_of(address: str) -> str:
    """An IPv4 address, or the /64 of an IPv6 address: one subscriber has all addresses in it."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or IPv6Network((found, 64), strict=False))
    return str(found)


def check_tags(tags: Collection[str] | None) -> list[str] | None:
    if tags is None:
        return None
    found = sorted(set(tags))
    if not found or len(found) > MOST_TAGS or any(not tag or len(tag) > LONGEST_NAME for tag in found):
        raise UserError(f"Name 1 to {MOST_TAGS} tags of up to {LONGEST_NAME} characters, or none for every DAG.")
    return found
