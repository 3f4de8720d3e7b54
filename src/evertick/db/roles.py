"""A PostgreSQL role for each kind of service, with the privileges that the service's statements need and nothing else.

The privileges are derived from the statements: a role may execute the functions that its statements call, and access the
tables that they name. Functions run with the owner's privileges, so that a task changes only through its verb.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

from psycopg import AsyncConnection

from evertick.db.function_sets import TABLES_SCHEMA, own_set
from evertick.db.statements import all_rows, nouns, one_value, sql, statements

RUNNER, SCHEDULER, PUBLISHER, API = "evertick_runner", "evertick_scheduler", "evertick_publisher", "evertick_api"

# The statements of every service: the schema check, the server's identity, the time.
_EVERYBODY = (
    *("migration.has_record", "migration.applied", "function_sets.is_installed", "shards.read_clock"),
    *("failover.look*", "failover.mark*", "failover.report_loss"),
)

# Patterns of `noun.statement`. A service that acts for users may do everything except what a leader, a runner or the owner does.
MAY: dict[str, tuple[str, ...]] = {
    RUNNER: (
        *_EVERYBODY,
        *(
            "runners.register",
            "runners.bury",
            "runners.leave",
            "runners.live",
            "runners.neighbours",
            "runners.namesakes",
        ),
        *(
            "tasks.step",
            "tasks.claim_rows",
            "tasks.extend",
            "runners.look_in_line",
            "runners.names",
            "runners.published",
        ),
        *("dags.version", "dags.bundle", "secrets.of_attempt", "logs.append", "logs.shipped_until", "runs.existing"),
        # For a runner that drives a remote executor.
        *("runners.claim*", "runners.list_of", "runners.known", "runners.note_*", "runners.end_queued"),
        *("runners.adopt", "runners.forget", "runners.held", "runners.finish"),
    ),
    SCHEDULER: (
        *_EVERYBODY,
        *("shards.*", "schedules.due", "schedules.next_due", "schedules.fire", "schedules.hear", "schedules.settle"),
        *("schedules.set_aside", "schedules.of_dag", "schedules.waits", "tasks.promote", "tasks.time_out_waits"),
        *("runs.admit", "runs.reconcile", "runs.skip_one", "runs.time_out", "runs.orphans", "runs.reap_orphan"),
        *(
            "runners.bury",
            "runners.reap",
            "runners.live",
            "runners.neighbours",
            "runners.depths",
            *("waits.children_due", "waits.start_child", "waits.clocks_due", "waits.set_clocks", "waits.wake_waits"),
        ),
        *(
            "gates.tend",
            "gates.unadmit",
            "gates.reconcile",
            "notifications.raise",
            "notifications.tend",
            "notifications.take",
            "notifications.record",
        ),
        *(
            "backfills.position",
            "backfills.step",
            "backfills.fail",
            "backfills.find",
            "retention.*",
            *("server.dead_rows", "server.is_behind", "server.snapshot_holders", "server.sizes"),
            *(
                "logs.watch",
                "logs.ended",
                "logs.part",
                "logs.list_object",
                "logs.move",
                "logs.unwatch",
                "logs.dead",
                "logs.forget",
            ),
            *("changes.newest", "changes.open_runs", "changes.ended_after", "changes.runs", "changes.attempts"),
        ),
        *("dags.find", "dags.names_like", "runs.trigger", "runs.find", "secrets.find"),
    ),
    PUBLISHER: (
        *_EVERYBODY,
        *("dags.publish", "dags.put_bundle", "dags.delete", "dags.find", "dags.files", "dags.names_like", "dags.named"),
        *("dags.put_import_error", "dags.drop_import_error", "dags.import_errors", "dags.queues", "dags.versions"),
        *("schedules.of_dag", "schedules.waits", "schedules.outlets", "gates.list", "secrets.find"),
    ),
    API: ("*",),
}
_MAY_NOT: dict[str, tuple[str, ...]] = {
    API: (
        *(
            "migration.*lock*",
            "migration.in_the_way",
            "migration.record",
            "function_sets.record",
            "function_sets.superseded",
            "function_sets.forget",
            "retention.prune_*",
            "retention.sweep",
            *(
                "logs.watch",
                "logs.ended",
                "logs.part",
                "logs.list_object",
                "logs.move",
                "logs.unwatch",
                "logs.dead",
                "logs.forget",
            ),
            "tasks.step",
            "tasks.claim_rows",
        ),
        *(
            "tasks.promote",
            "tasks.time_out_waits",
            "schedules.fire",
            "schedules.settle",
            "schedules.hear",
            "runners.reap",
        ),
        *("shards.stand_by", "shards.look", "shards.listen", "shards.renew", "shards.resign", "runs.reconcile"),
        *("shards.survey", "shards.leave", "shards.hand_over", "shards.move_out"),
        *("runs.reap_orphan", "runs.skip_one", "runs.admit", "runs.time_out", "notifications.take", "gates.reconcile"),
    ),
}
# Without login: the installer of a service creates a login role, with its own password or certificate, and grants it this role.
# Roles belong to the whole server, and another process may be creating the same one at this moment.
_CREATE = (
    "do $$ begin create role {role} nologin; exception when duplicate_object or unique_violation then null; end $$"
)
# An insert, up to where the next change of the same statement begins.
_INSERT = re.compile(
    r"\binsert into (?:evertick\.)?(\w+)(.*?)(?=\binsert into\b|(?<!do )\bupdate\b|\bdelete from\b|\Z)", re.DOTALL
)
# From this version on there is a privilege to vacuum without owning the table.
_MAINTAIN_VERSION = 170000


@dataclass(frozen=True, slots=True)
class _Thing:
    """A function (with its arguments), a table or a view of ours."""

    kind: str
    schema: str
    name: str
    arguments: str

    @property
    def is_plain(self) -> bool:
        """A function that tables need. It reads none, and is part of so many statements and views that it must stay part of their
        plans: it works with its caller's rights, and every role may call it."""
        return self.kind == "function" and self.schema == TABLES_SCHEMA


def statements_of(role: str) -> list[str]:
    """The statements that a service with that role executes."""
    known = [f"{noun}.{name}" for noun in nouns() for name in statements(noun)]
    wanted, unwanted = MAY[role], _MAY_NOT.get(role, ())
    return [each for each in known if _fits(each, wanted) and not _fits(each, unwanted)]


async def script(conn: AsyncConnection, *, keeps_older: bool = False) -> list[str]:
    """The statements that create the roles and grant their privileges, for the database of this connection. Idempotent.

    `keeps_older`: nothing is revoked, because services of the previous release may be running.
    """
    functions = own_set()
    things = await all_rows(conn, sql("roles", "things"), {"functions": functions.schema}, _Thing)
    schemas = sorted({each.schema for each in things})
    database = str(await one_value(conn, sql("roles", "database"), {}))
    lines = [_CREATE.format(role=role) for role in MAY]
    for schema in schemas:
        lines += [
            f"revoke all on schema {schema} from public",
            f"revoke execute on all functions in schema {schema} from public",
        ]
    everybody = ", ".join(MAY)
    lines += [
        f"grant connect on database {database} to {everybody}",
        f"grant usage on schema {', '.join(schemas)} to {everybody}",
    ]
    for role in () if keeps_older else MAY:
        # What an older release gave and this one does not need goes.
        lines += [
            f"revoke all on all {kind} in schema {', '.join(schemas)} from {role}" for kind in ("tables", "functions")
        ]
    named = {name for role in MAY for name in _functions(role, things)}
    lines += [
        f"alter function {each.schema}.{each.name}({each.arguments})"
        f" security definer set search_path = {functions.schema}, {TABLES_SCHEMA}, pg_temp"
        for each in things
        if each.kind == "function" and each.name in named and not each.is_plain
    ]
    for role in MAY:
        lines += _grants(role, things)
    if conn.info.server_version >= _MAINTAIN_VERSION:
        lines.append(f"grant maintain on all tables in schema evertick to {SCHEDULER}")
    return lines


async def are_used(conn: AsyncConnection) -> bool:
    """Whether these roles have privileges in this database."""
    return bool(await one_value(conn, sql("roles", "are_used"), {"role": RUNNER}))


async def apply(conn: AsyncConnection, *, keeps_older: bool = False) -> None:
    """In one transaction: no role ever has only part of its privileges."""
    lines = await script(conn, keeps_older=keeps_older)
    async with conn.transaction():
        await conn.execute(";\n".join(lines), prepare=False)


def _grants(role: str, things: list[_Thing]) -> Iterator[str]:
    called = _functions(role, things)
    for each in things:
        if each.kind == "function" and (each.name in called or each.is_plain):
            yield f"grant execute on function {each.schema}.{each.name}({each.arguments}) to {role}"
    schema_of = {each.name: each.schema for each in things if each.kind != "function"}
    for name, rights in sorted(_tables(role, things).items()):
        yield f"grant {', '.join(sorted(rights))} on {schema_of[name]}.{name} to {role}"


def _functions(role: str, things: list[_Thing]) -> set[str]:
    """The functions that the role's statements call, and those called by the views that they read."""
    views = {each.name: each.arguments for each in things if each.kind == "view"}
    texts = _texts(role) + [views[name] for name in _tables(role, things) if name in views]
    known = {each.name for each in things if each.kind == "function"}
    return {name for text in texts for name in re.findall(r"\b(\w+)\(", text) if name in known}


def _tables(role: str, things: Iterable[_Thing]) -> dict[str, set[str]]:
    known = {each.name for each in things if each.kind != "function"}
    rights: dict[str, set[str]] = {}
    for text in _texts(role):
        for name, right in _touched(text):
            if name in known:
                rights.setdefault(name, set()).add(right)
    return rights


def _touched(text: str) -> Iterator[tuple[str, str]]:
    """The names that a statement reads, inserts into, updates and deletes from. Some of them are its own CTEs."""
    read = re.findall(r"\b(?:from|join)\s+(?:evertick\.)?(\w+)", text)
    inserted = re.findall(r"\binsert into (?:evertick\.)?(\w+)", text)
    updated = re.findall(r"(?<!do )\bupdate (?:only )?(?:evertick\.)?(\w+)", text)
    deleted = re.findall(r"\bdelete from (?:evertick\.)?(\w+)", text)
    for name, clause in _INSERT.findall(text):
        read += [name] if "on conflict" in clause or "returning" in clause else []
        updated += [name] if "do update" in clause else []
    if re.search(r"\bfor (no key )?update\b", text):
        updated += read
    yield from ((name, "select") for name in [*read, *updated, *deleted])
    yield from ((name, "insert") for name in inserted)
    yield from ((name, "update") for name in updated)
    yield from ((name, "delete") for name in deleted)


def _texts(role: str) -> list[str]:
    found = [each.split(".") for each in statements_of(role)]
    return [statements(noun)[name] for noun, name in found]


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
