"""The findings of `evertick doctor` about the database, each with its impact and its fix.

Read-only. A check that cannot be made is a finding of its own. The findings about this machine are in `machine.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import version

import psycopg
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.connection import has_own_session
from evertick.db.migrate import SchemaStatus
from evertick.db.queries import accounts, dags, deployments, notifications, runners, schedules, server, shards
from evertick.db.queries.runners import BusyRunner, QueueRow
from evertick.db.queries.server import RemoteRow, SealedBy, ServerFacts, StoredLogs
from evertick.domain.errors import InvalidSettings
from evertick.domain.schedules.computed import MOST_AHEAD
from evertick.engine.public_access import is_loopback

# A scheduler, a runner, a publisher and the API, and a spare of each.
NEEDED_CONNECTIONS = 30
MOST_SKEW_SECONDS = 2.0
LONGEST_SNAPSHOT_SECONDS = 600.0
_MOST_COUNTED = 100_000


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`code` is stable, for programs."""

    code: str
    grade: Severity
    what: str
    why: str
    next_step: str


def error(code: str, what: str, why: str, next_step: str) -> Finding:
    return Finding(code=code, grade=Severity.ERROR, what=what, why=why, next_step=next_step)


def warning(code: str, what: str, why: str, next_step: str) -> Finding:
    return Finding(code=code, grade=Severity.WARNING, what=what, why=why, next_step=next_step)


Check = Callable[[AsyncConnection, Settings], AsyncIterator[Finding]]


async def examine(conn: AsyncConnection, settings: Settings, *more: Check) -> list[Finding]:
    """Findings about a database whose schema fits. Checks that this login may not make are skipped, and a finding says
    so."""
    found, unseen = list[Finding](), list[str]()
    for check in (_check_database, _check_stored, _check_accounts, _check_work, _check_snapshots, *more):
        try:
            found += [each async for each in check(conn, settings)]
        except psycopg.errors.InsufficientPrivilege as denied:
            unseen.append(str(denied).splitlines()[0])
    if unseen:
        found.append(
            warning(
                "not_allowed",
                f"This login lacks the permission for some checks: {'; '.join(unseen)}.",
                "Problems in those areas are not found.",
                "Also run doctor as the owner. A service whose log shows permission_denied lacks its role: evertick db roles",
            )
        )
    return found


async def _check_database(conn: AsyncConnection, settings: Settings) -> AsyncIterator[Finding]:
    before = datetime.now(UTC)
    facts = await server.server(conn)
    skew_seconds = _skew_seconds(before, facts.at, datetime.now(UTC))
    for each in (*check_server(facts), *check_clock(skew_seconds)):
        yield each
    if not has_own_session(conn):
        yield warning(
            "pooler",
            "A transaction-pooling proxy is between Evertick and the server.",
            "LISTEN does not work through it: work waits for the next tick, up to a second.",
            "Give Evertick the server's own address, or read 'Behind a pooler' in docs/howto/operate.md.",
        )
    for each in check_route(route_of(conn)):
        yield each


async def _check_stored(conn: AsyncConnection, settings: Settings) -> AsyncIterator[Finding]:
    for each in check_keys(settings, await server.sealed_by(conn)):
        yield each


async def _check_snapshots(conn: AsyncConnection, settings: Settings) -> AsyncIterator[Finding]:
    for holder in await server.snapshot_holders(conn):
        if (holder.held_seconds or 0.0) >= LONGEST_SNAPSHOT_SECONDS:
            yield warning(
                "old_snapshot",
                f"{holder.kind} {holder.name} has kept an old snapshot for {holder.held_seconds:.0f} s.",
                "Rows deleted since then cannot be vacuumed, and every table grows.",
                "End it. 'Retention' in docs/howto/operate.md explains how to find its owner.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionRoute:
    """How a connection reaches its server."""

    host: str
    address: str
    is_encrypted: bool
    sslmode: str | None = None


def route_of(conn: AsyncConnection) -> ConnectionRoute:
    sslmode = conn.info.get_parameters().get("sslmode")
    info = conn.info
    return ConnectionRoute(host=info.host, address=info.hostaddr, is_encrypted=conn.pgconn.ssl_in_use, sslmode=sslmode)


def check_route(way: ConnectionRoute) -> Iterator[Finding]:
    """Whether others on the network could read the traffic or impersonate the server."""
    name = way.host or way.address
    if name.startswith("/") or is_loopback(way.address or name):
        return
    if not way.is_encrypted:
        yield warning(
            "no_tls",
            f"The connection to the database at {name} is not encrypted.",
            "Anyone on the network path can read and change passwords, code and results.",
            "Add ?sslmode=verify-full&sslrootcert=ca.crt to EVERTICK_DATABASE_URL; see docs/howto/other-machines.md.",
        )
    elif way.sslmode not in ("verify-full", "verify-ca"):
        yield warning(
            "unverified_tls",
            f"The connection to the database at {name} is encrypted, but the server's certificate is not verified.",
            "An attacker on the network path can impersonate the server.",
            "Use sslmode=verify-full with sslrootcert= in EVERTICK_DATABASE_URL; see docs/howto/other-machines.md.",
        )


def check_server(facts: ServerFacts) -> Iterator[Finding]:
    if facts.is_standby:
        yield error(
            "standby",
            "The server is a standby: it is read-only.",
            "Schedules cannot fire, and tasks cannot run.",
            "Name the primary in EVERTICK_DATABASE_URL, or all hosts with target_session_attrs=read-write.",
        )
    if facts.encoding != "UTF8":
        yield error(
            "encoding",
            f"The database is encoded in {facts.encoding}.",
            "Names, logs and results with other characters are refused or damaged.",
            "Create a database with: createdb --encoding=UTF8 --template=template0, and move the data to it.",
        )
    for name, value in (("fsync", facts.fsync), ("full_page_writes", facts.full_page_writes)):
        if value != "on":
            yield error(
                name,
                f"The server runs with {name} = {value}.",
                "A power failure or a crash of the machine may destroy the whole database.",
                f"Set {name} = on in postgresql.conf and reload the configuration.",
            )
    if facts.synchronous_commit == "off":
        yield error(
            "synchronous_commit",
            "The server runs with synchronous_commit = off.",
            "After a crash, acknowledged writes may be lost: a task that has run would run again.",
            "Set synchronous_commit = on, for the role, the database or the server.",
        )
    for name, value in (("autovacuum", facts.autovacuum), ("track_counts", facts.track_counts)):
        if value != "on":
            yield error(
                name,
                f"The server runs with {name} = {value}.",
                "Tables grow without bound and get slower with every run.",
                f"Set {name} = on in postgresql.conf and reload the configuration.",
            )
    free = facts.max_connections - facts.kept_connections - facts.connections
    if facts.max_connections - facts.kept_connections < NEEDED_CONNECTIONS:
        yield error(
            "max_connections",
            f"The server accepts {facts.max_connections} connections, {facts.kept_connections} of them reserved for superusers.",
            f"Evertick needs about {NEEDED_CONNECTIONS} with one service of each kind.",
            f"Set max_connections to {NEEDED_CONNECTIONS + facts.kept_connections} or more, and restart the server.",
        )
    elif free < 10:
        yield warning(
            "connections",
            f"Only {max(free, 0)} of the server's {facts.max_connections} connections are free.",
            "After a restart all processes connect at once, and a process without a connection cannot work.",
            "Reserve some for Evertick: see 'Connections' in docs/howto/operate.md.",
        )
    if 0 <= facts.role_limit < max(NEEDED_CONNECTIONS, facts.role_connections + 10):
        yield warning(
            "role_limit",
            f"This role may hold {facts.role_limit} connections and has {facts.role_connections}.",
            f"Evertick needs about {NEEDED_CONNECTIONS} with one service of each kind.",
            "Raise the limit: alter role ... connection limit -1.",
        )


def check_clock(skew_seconds: float) -> Iterator[Finding]:
    if abs(skew_seconds) > MOST_SKEW_SECONDS:
        side = "behind" if skew_seconds > 0 else "before"
        yield warning(
            "clock",
            f"This machine's clock is {abs(skew_seconds):.1f} s {side} the database's.",
            "The database's clock decides what is due. Log lines from this machine have times that differ from their runs.",
            "Synchronize both clocks with the same source (NTP).",
        )


def check_keys(settings: Settings, sealed: list[SealedBy]) -> Iterator[Finding]:
    """Whether the stored values can be decrypted here."""
    # Imported late: it loads the cryptography library, which nothing else here needs.
    from evertick.secrets.keyring import load_keyring

    try:
        keyring = load_keyring(settings)
    except InvalidSettings as wrong:
        if sealed:
            count = sum(each.count for each in sealed)
            yield error(
                "secret_key",
                f"{count} stored values cannot be decrypted here: {wrong}",
                "Tasks that declare one of them fail before they start.",
                "Restore the key, as EVERTICK_SECRET_KEY_FILE or EVERTICK_SECRET_KEYS, on every machine with a runner.",
            )
        return
    for each in sealed:
        if not keyring.knows(each.key_id):
            yield error(
                "secret_key",
                f"{each.count} stored values were encrypted with the key {each.key_id}, which is missing here.",
                "Tasks that declare one of them fail before they start.",
                "Add that key to the key file or to EVERTICK_SECRET_KEYS, or set these values again.",
            )


async def _check_accounts(conn: AsyncConnection, settings: Settings) -> AsyncIterator[Finding]:
    known = await accounts.count_accounts(conn)
    if known.with_password or settings.admin_password is not None:
        return
    if not is_loopback(settings.api_host):
        yield error(
            "open_door",
            f"The API is configured to listen on {settings.api_host}, but no user has a password.",
            "It refuses to start: the first person to find the sign-in link would become the administrator.",
            "Set one with: evertick users password admin",
        )
    else:
        yield warning(
            "no_password",
            "No user has a password yet.",
            "The one-time link is the only way to sign in, and it expires after an hour.",
            "Set one with: evertick users password admin (or sign in with: evertick users link admin)",
        )


async def _check_work(conn: AsyncConnection, settings: Settings) -> AsyncIterator[Finding]:
    leader = await shards.leader(conn, shard=0)
    alive = await runners.list_busy(conn, limit=1)
    for each in check_queues(await runners.list_all(conn, cap=_MOST_COUNTED)):
        yield each
    if leader is None or leader.unled:
        is_partly_led = leader is not None and bool(leader.leaders)
        yield error(
            "no_leader",
            f"No scheduler leads{_shards(leader.unled) if leader and is_partly_led else ''}.",
            "No schedule fires, and nothing is retried or repaired, until one does.",
            "Start one with: evertick up, or: evertick scheduler. If one is running, its log says why it cannot lead.",
        )
    if not alive:
        start = "Start one with: evertick up, or: evertick runner"
        yield error("no_runner", "No runner is alive.", "No task can run.", start)
    if broken := await dags.import_errors(conn):
        yield warning(
            "import_errors",
            f"{len(broken)} DAG files cannot be loaded, the first is {broken[0].file}: {broken[0].message}",
            "Their DAGs are missing, or stay at their last valid version.",
            f"Fix the file, and check it with: evertick dags validate {broken[0].file}",
        )
    for ending in await schedules.running_out(conn, fewest=MOST_AHEAD):
        yield warning(
            "schedule_running_out",
            f"Schedule {ending.name} of {ending.dag} has instants until {ending.until.isoformat(timespec='minutes')} only.",
            "Its code computes more when its file is loaded. After the last one it does not fire.",
            f"Start a publisher, correct the file's import error, or deploy again. See: evertick dags show {ending.dag}",
        )
    for failed in await deployments.failed(conn):
        yield warning(
            "deployment_failed",
            f"The newest commit of deployment {failed.name} is not published: {failed.problem}",
            "Its last good version continues.",
            f"Correct the repository or the publisher's options, and check it with: evertick deployments show {failed.name}",
        )
    if aside := await notifications.list_quarantined(conn):
        yield warning(
            "quarantine",
            f"{len(aside)} items are in quarantine because they fail every time, the first: {aside[0].reason}",
            "They are retried only occasionally.",
            "List them with: evertick quarantine",
        )


def check_queues(found: list[QueueRow]) -> Iterator[Finding]:
    for each in (each for each in found if each.depth and each.runners == each.draining):
        yield error(
            "unserved_queue",
            f"{each.depth} tasks wait in queue {each.queue}, which no live runner serves.",
            "They wait until a runner serves it.",
            f"Start one with: evertick runner --queues {each.queue}",
        )


def _skew_seconds(before: datetime, there: datetime, after: datetime) -> float:
    """How far the database's clock is ahead, beyond what the round trip can explain."""
    if before <= there <= after:
        return 0.0
    return (there - after).total_seconds() if there > after else (there - before).total_seconds()


def _shards(numbers: list[int]) -> str:
    return f" shard{'s' if len(numbers) > 1 else ''} {', '.join(str(each) for each in numbers)}"


async def examine_remote(conn: AsyncConnection, settings: Settings) -> AsyncIterator[Finding]:
    for row in await server.remote(conn):
        for each in check_remote(row):
            yield each


def check_remote(row: RemoteRow) -> Iterator[Finding]:
    if not row.has_runner:
        yield error(
            "unserved_executor",
            f"{row.attempts} attempts of queue {row.queue} were submitted to executor {row.executor}, and no live runner watches"
            " them.",
            "Attempts that have not started wait, and the outcome of the others is not recorded.",
            f"Start one with: evertick runner --executor {row.executor} --queues {row.queue}",
        )
    elif row.stuck:
        yield warning(
            "not_begun",
            f"{row.stuck} attempts of queue {row.queue} have been prevented from starting by executor {row.executor} for over ten"
            f" minutes: {row.trouble}",
            "Their tasks stay queued until the executor starts them or reports that it cannot.",
            "List them with: evertick tasks why RUN TASK; docs/howto/remote.md and docs/howto/kubernetes.md describe the fixes.",
        )


_SHOWN = 3


_ADVICE = "Install the same release everywhere, one service after the other: see docs/howto/upgrade.md."


async def examine_releases(conn: AsyncConnection, schema: SchemaStatus) -> AsyncIterator[Finding]:
    alive = await runners.list_busy(conn, with_agents=False)
    for each in (*check_schema(schema), *check_runner_releases(alive)):
        yield each


def check_schema(schema: SchemaStatus) -> Iterator[Finding]:
    if schema.newer:
        yield warning(
            "later_schema",
            f"The database has {schema.newer[-1].label} of a later release; this is Evertick {version('evertick')}.",
            "This release is compatible with the next one, but not necessarily with later ones.",
            _ADVICE,
        )


def check_runner_releases(alive: Iterable[BusyRunner]) -> Iterator[Finding]:
    mine = version("evertick")
    others = [each for each in alive if each.version not in ("", mine)]
    if others:
        shown = ", ".join(f"{each.name or each.runner_id} is {each.version}" for each in others[:_SHOWN])
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        yield warning(
            "other_release",
            f"Runners of another release are running: {shown}{more}. This is {mine}.",
            "Two consecutive releases work side by side, but a DAG that uses a new feature fails on the older one.",
            _ADVICE,
        )


# An outage of some minutes is not worth a finding.
LONGEST_WAIT_SECONDS = 3600.0


async def examine_logs(conn: AsyncConnection, settings: Settings) -> AsyncIterator[Finding]:
    for each in check_logs(settings, await server.stored_logs(conn)):
        yield each


def check_logs(settings: Settings, logs: StoredLogs) -> Iterator[Finding]:
    if settings.storage is None and logs.are_there:
        yield error(
            "storage",
            "Logs of ended runs were archived to an object storage, but none is configured here.",
            "They cannot be read from here, and a scheduler without the setting does not delete expired ones.",
            "Set EVERTICK_STORAGE and its keys for every scheduler and API, and where `evertick tasks logs` is used.",
        )
    late_seconds = settings.log_archive_after_seconds + LONGEST_WAIT_SECONDS
    if settings.log_archive and (logs.waiting_seconds or 0.0) > late_seconds:
        yield warning(
            "log_moves",
            f"Logs of runs that ended {(logs.waiting_seconds or 0.0) / 3600:.0f} hours ago have not been archived to the storage.",
            "Until then they fill the database.",
            "The leading scheduler reports why: storage_unavailable or log_archive_refused in its log, log_moving in its health.",
        )
