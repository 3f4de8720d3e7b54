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
from evertick.db.statements import known_names, query, text_of

RUNNER, SCHEDULER, PUBLISHER, API = "evertick_runner", "evertick_scheduler", "evertick_publisher", "evertick_api"
# Of applications, which may ask for runs in their own transactions and do nothing else.
ENQUEUE = "evertick_enqueue"
# Of connections of tasks, which may end the attempt that opened them (`context.commit`).
COMMIT = "evertick_commit"
LAUNCHER = "evertick_launcher"

# The statements of every service: the schema check, the server's identity, the time.
_EVERYBODY = (
    *("migrate.has_record", "migrate.applied_migrations", "function_sets.is_installed", "shards.read_clock"),
    *("failover.look*", "failover.mark*", "failover.report_loss"),
)

# The stored functions that a service calls, and patterns of `noun.statement`. A service that acts for users may do everything
# except what a leader, a runner or the owner does.
MAY: dict[str, tuple[str, ...]] = {
    RUNNER: (
        *_EVERYBODY,
        *("runners.register", "runners.leave", "runners.live", "runners.peers", "runners.namesakes"),
        *(
            "finish_and_claim",
            "claim_selected",
            "exchange_triggers",
            "extend_leases",
            "runners.queued_tasks",
            "runners.names",
        ),
        *("runners.published", "dags.version", "dags.bundle", "values_of_attempt", "logs.append", "logs.shipped_until"),
        *("runs.existing", "mark_runner_dead", "answer_ask", "trigger_for_attempt", "put_variable_for_attempt"),
        *("put_outputs_for_attempt", "put_state_for_attempt", "put_step_for_attempt", "put_updates_for_attempt"),
        "name_instance_for_attempt",
        *("dags.find", "dags.names"),
        # For a runner that drives a remote executor.
        *("claim_for_dispatch", "queue_selected", "runners.list_of", "runners.known", "runners.note_*", "end_queued"),
        *("adopt_dispatches", "delete_dispatches", "runners.held", "finish_attempt"),
    ),
    SCHEDULER: (
        *_EVERYBODY,
        *("shards.*", "try_acquire_shard", "poll_work", "observe_heartbeats", "renew_shard", "release_shard"),
        *("survey_shards", "rebalance_shard", "set_shard_count"),
        *("schedules.due", "schedules.next_due", "schedules.of_dag", "schedules.waits", "fire_schedules"),
        *("assets.arrivals", "assets.pending", "apply_partition_arrivals", "deliver_dependencies"),
        *("apply_due_fires", "quarantine_schedule", "promote_due_tasks"),
        *("admit_queued_runs", "reconcile_runs", "skip_run_once", "time_out_run", "runs.orphans"),
        *("time_out_queued_tasks", "fail_orphaned_run"),
        *("runners.live", "runners.peers", "runners.depths", "mark_runner_dead", "reap_runner"),
        *("child_runs_due", "start_child_run", "clock_waits_due", "set_clock_waits", "wake_deferred_tasks"),
        *("admit_gated_tasks", "release_admissions", "reconcile_gates", "raise_alerts", "maintain_outbox"),
        *("claim_deliveries", "notifications.record", "backfills.position", "backfills.find", "advance_backfill"),
        *("fail_backfill", "retention.*", "prune_runs", "prune_audit_log", "prune_kind", "prune_versions"),
        *("delete_pending_cleanup", "server.dead_rows", "server.is_behind", "server.snapshot_holders", "server.sizes"),
        *("logs.ended", "logs.part", "queue_log_archiving", "create_archive_object", "archive_logs"),
        *("finish_log_archiving", "orphaned_archive_objects", "delete_archive_objects"),
        *("changes.newest", "changes.open_run_ids", "changes.ended_after", "changes.runs", "changes.attempts"),
        *("dags.find", "dags.names", "runs.find", "secrets.find", "trigger_run", "proofs.*", "record_proof"),
        *("count_figures", "figures.*", "record_forecast", "raise_late_checkins", "checkins.*", "enqueue_lineage"),
        *("runs.has_failed", "pause_dag", "tasks.list_of_run", "mark_task"),
        *("requests.inbox", "take_requests", "start_delayed_runs", "requests.arrivals", "requests.sent_events"),
        *("requests.event_schedules", "requests.due_windows", "requests.windows", "apply_events"),
    ),
    PUBLISHER: (
        *_EVERYBODY,
        *("dags.put_bundle", "dags.find", "dags.files", "dags.names", "dags.named", "dags.queues", "dags.versions"),
        "dags.published_bundle",
        *("dags.put_import_error", "dags.drop_import_errors", "dags.import_errors", "dags.owners", "publish_dags"),
        *("deployments.find", "note_deployment"),
        *("schedules.of_dag", "schedules.waits", "schedules.outlets", "gates.list_gates", "secrets.find"),
        "apply_due_fires",
    ),
    LAUNCHER: (
        *_EVERYBODY,
        *(
            "runner_tokens.fleet_load",
            "renew_fleet_lease",
            "leave_fleet",
            "pilots_of",
            "add_pilots",
            "note_fleet",
            "withdraw_pilot",
        ),
        "end_pilot",
    ),
    API: (
        "*.*",
        *(
            "trigger_run",
            "clear_run_partitions",
            "cancel_run",
            "delete_run",
            "put_note",
            "put_output",
            "clear_tasks",
            "mark_task",
        ),
        "explain_task",
        "put_state_for_operator",
        *(
            "publish_dags",
            "delete_deployment",
            "put_upload_piece",
            "delete_upload",
            "pause_dag",
            "delete_dag",
            "put_schedule",
            "change_schedule",
            "apply_due_fires",
        ),
        *("put_checkin", "delete_checkin", "record_checkin"),
        *("create_backfill", "pause_backfill", "cancel_backfill", "set_pool", "delete_pool", "retry_deliveries"),
        *("send_event", "decide_approval", "update_asset", "discard_asset_events", "set_shard_count"),
        *("sign_in_with_provider", "claim_provider_check", "record_provider_check", "end_provider_sessions"),
        *("replay_dead_letters", "put_webhook", "delete_webhook"),
        *("change_account", "record_login_attempt", "put_value", "delete_value", "reencrypt_value"),
        *("start_attempt", "finish_attempt", "extend_leases", "task_inputs", "values_of_attempt", "mark_runner_dead"),
        # For runners over HTTPS.
        *(
            "exchange_triggers",
            "join_runner",
            "extend_joined",
            "revoke_runner_token",
            "finish_and_claim",
            "claim_selected",
            "answer_ask",
        ),
        *("trigger_for_attempt", "put_variable_for_attempt", "put_state_for_attempt", "put_step_for_attempt"),
        *("put_outputs_for_attempt", "put_updates_for_attempt", "name_instance_for_attempt"),
    ),
}
_MAY_NOT: dict[str, tuple[str, ...]] = {
    API: (
        *("migrate.*lock*", "migrate.in_the_way", "migrate.record", "logs.ended", "logs.part"),
        *("function_sets.record", "function_sets.superseded", "function_sets.forget", "shards.announce_leave"),
        *("requests.enqueue", "state.server_name", "state.set_path", "state.commit_attempt"),
    )
}
_OF_TASKS = "commit_attempt"
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
        return self.kind == "function" and self.schema == TABLES_SCHEMA and not self.is_door

    @property
    def is_door(self) -> bool:
        """The function of applications."""
        return self.name == "enqueue" and self.schema == TABLES_SCHEMA


@query
async def list_things(conn: AsyncConnection, *, functions: str) -> list[_Thing]: ...


@query
async def database(conn: AsyncConnection) -> str:
    """Its name, quoted."""


def statements_of(role: str) -> list[str]:
    """The statements that a service with that role executes, and the stored functions that it calls."""
    wanted, unwanted = MAY[role], _MAY_NOT.get(role, ())
    return [each for each in known_names() if _fits(each, wanted) and not _fits(each, unwanted)]


async def script(conn: AsyncConnection, *, keeps_older: bool = False) -> list[str]:
    """The statements that create the roles and grant their privileges, for the database of this connection. Idempotent.

    `keeps_older`: nothing is revoked, because services of the previous release may be running.
    """
    functions = own_set()
    things = await list_things(conn, functions=functions.schema)
    schemas = sorted({each.schema for each in things})
    lines = [_CREATE.format(role=role) for role in (*MAY, ENQUEUE, COMMIT)]
    for schema in schemas:
        lines += [
            f"revoke all on schema {schema} from public",
            f"revoke execute on all functions in schema {schema} from public",
        ]
    everybody = ", ".join(MAY)
    lines += [
        f"grant connect on database {await database(conn)} to {everybody}",
        f"grant usage on schema {', '.join(schemas)} to {everybody}",
        f"grant usage on schema {TABLES_SCHEMA} to {ENQUEUE}",
        f"grant usage on schema {', '.join(schemas)} to {COMMIT}",
    ]
    lines += [
        f"grant execute on function {each.schema}.{each.name}({each.arguments}) to {ENQUEUE}"
        for each in things
        if each.is_door
    ]
    for role in () if keeps_older else MAY:
        # What an older release gave and this one does not need goes.
        lines += [
            f"revoke all on all {kind} in schema {', '.join(schemas)} from {role}" for kind in ("tables", "functions")
        ]
    named = {name for role in MAY for name in _functions(role, things)} | {_OF_TASKS}
    lines += [
        f"alter function {each.schema}.{each.name}({each.arguments})"
        f" security definer set search_path = {functions.schema}, {TABLES_SCHEMA}, pg_temp"
        for each in things
        if each.kind == "function" and each.name in named and not each.is_plain
    ]
    for role in MAY:
        lines += _grants(role, things)
    lines += [
        f"grant execute on function {each.schema}.{each.name}({each.arguments}) to {COMMIT}"
        for each in things
        if each.kind == "function" and each.name == _OF_TASKS
    ]
    if conn.info.server_version >= _MAINTAIN_VERSION:
        lines.append(f"grant maintain on all tables in schema evertick to {SCHEDULER}")
    return lines


@query
async def are_used(conn: AsyncConnection, *, role: str = RUNNER) -> bool:
    """Whether these roles have privileges in this database."""


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
    return [text_of(each) for each in statements_of(role)]


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
