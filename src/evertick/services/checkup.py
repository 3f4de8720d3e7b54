"""What is wrong with an installation, each finding with why it matters and what to do: asked by `evertick doctor`.

Only looks: it changes nothing, and a check that cannot be made is a finding of its own. What this machine shows is in
`checkup_here.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

import psycopg
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.domain.errors import InvalidSettings
from evertick.engine.open_door import is_loopback
from evertick.store import access, checkup, dags, quarantine, queues, runners, shards, upkeep
from evertick.store.checkup import SealedBy, ServerFacts
from evertick.store.line import keeps_session
from evertick.store.queues import QueueRow

# A scheduler, a runner, a publisher and the API with one more of each in reserve.
NEEDED_CONNECTIONS = 30
MOST_SKEW_SECONDS = 2.0
LONGEST_SNAPSHOT_SECONDS = 600.0
_MOST_COUNTED = 100_000


class Grade(StrEnum):
    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`code` stays the same, for programs."""

    code: str
    grade: Grade
    what: str
    why: str
    next_step: str


def error(code: str, what: str, why: str, next_step: str) -> Finding:
    return Finding(code=code, grade=Grade.ERROR, what=what, why=why, next_step=next_step)


def warning(code: str, what: str, why: str, next_step: str) -> Finding:
    return Finding(code=code, grade=Grade.WARNING, what=what, why=why, next_step=next_step)


Check = Callable[[AsyncConnection, Settings], Awaitable[list[Finding]]]


async def examine(conn: AsyncConnection, settings: Settings, *more: Check) -> list[Finding]:
    """What the database shows, once its schema fits. What this login may not look at is left out, and that is told."""
    found, unseen = list[Finding](), list[str]()
    for check in (_judge_database, _judge_stored, _judge_people, _judge_work, _judge_snapshots, *more):
        try:
            found += await check(conn, settings)
        except psycopg.errors.InsufficientPrivilege as denied:
            unseen.append(str(denied).splitlines()[0])
    if unseen:
        found.append(
            warning(
                "not_allowed",
                f"This login may not look at everything: {'; '.join(unseen)}.",
                "What is wrong there is not found from here.",
                "Run it with the owner's login, too. A service whose log says not_allowed lacks its role: evertick db roles",
            )
        )
    return found


async def _judge_database(conn: AsyncConnection, settings: Settings) -> list[Finding]:
    before = datetime.now(UTC)
    facts = await checkup.server(conn)
    skew_seconds = _skew_seconds(before, facts.at, datetime.now(UTC))
    found = [*judge_server(facts), *judge_clock(skew_seconds)]
    if not keeps_session(conn):
        found.append(
            warning(
                "pooler",
                "A pooler that shares sessions stands between Evertick and the server.",
                "Nobody can be woken through it: work waits for the next tick, up to a second.",
                "Give Evertick the server's own address, or read 'Behind a pooler' in docs/howto/operate.md.",
            )
        )
    return [*found, *judge_way(way_of(conn))]


async def _judge_stored(conn: AsyncConnection, settings: Settings) -> list[Finding]:
    return list(judge_keys(settings, await checkup.sealed_by(conn)))


async def _judge_snapshots(conn: AsyncConnection, settings: Settings) -> list[Finding]:
    found = []
    for holder in await upkeep.snapshot_holders(conn):
        if (holder.held_seconds or 0.0) >= LONGEST_SNAPSHOT_SECONDS:
            found.append(
                warning(
                    "old_snapshot",
                    f"{holder.kind} {holder.name} has kept an old snapshot for {holder.held_seconds:.0f} s.",
                    "What is deleted since then cannot be cleared away, and every table grows.",
                    "End it; 'Retention' in docs/howto/operate.md says how to find out whose it is.",
                )
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a connection reaches its server."""

    host: str
    address: str
    is_encrypted: bool
    sslmode: str | None = None


def way_of(conn: AsyncConnection) -> Way:
    sslmode = conn.info.get_parameters().get("sslmode")
    info = conn.info
    return Way(host=info.host, address=info.hostaddr, is_encrypted=conn.pgconn.ssl_in_use, sslmode=sslmode)


def judge_way(way: Way) -> Iterator[Finding]:
    """Whether others on the network could read along, or answer in the server's stead."""
    name = way.host or way.address
    if name.startswith("/") or is_loopback(way.address or name):
        return
    if not way.is_encrypted:
        yield warning(
            "no_tls",
            f"The connection to the database at {name} is not encrypted.",
            "Whoever is on the network in between reads passwords, code and results, and can change them.",
            "Add ?sslmode=verify-full&sslrootcert=ca.crt to EVERTICK_DATABASE_URL; see docs/howto/other-machines.md.",
        )
    elif way.sslmode not in ("verify-full", "verify-ca"):
        yield warning(
            "unverified_tls",
            f"The connection to the database at {name} is encrypted, and nobody checks whose certificate it is.",
            "Somebody in between can answer in the server's stead.",
            "Use sslmode=verify-full with sslrootcert= in EVERTICK_DATABASE_URL; see docs/howto/other-machines.md.",
        )


def judge_server(facts: ServerFacts) -> Iterator[Finding]:
    if facts.is_standby:
        yield error(
            "standby",
            "The server is a standby: it can only be read.",
            "Nothing can be fired, run or recorded there.",
            "Name the primary in EVERTICK_DATABASE_URL, or all hosts with target_session_attrs=read-write.",
        )
    if facts.encoding != "UTF8":
        yield error(
            "encoding",
            f"The database is encoded in {facts.encoding}.",
            "Names, logs and results with other letters are refused or damaged.",
            "Make a database with: createdb --encoding=UTF8 --template=template0, and move there.",
        )
    for name, value in (("fsync", facts.fsync), ("full_page_writes", facts.full_page_writes)):
        if value != "on":
            yield error(
                name,
                f"The server runs with {name} = {value}.",
                "A power failure or a crash of the machine may destroy the whole database.",
                f"Set {name} = on in postgresql.conf, and reload it.",
            )
    if facts.synchronous_commit == "off":
        yield error(
            "synchronous_commit",
            "The server runs with synchronous_commit = off.",
            "After a crash what was acknowledged may be gone: a task that has run would run again.",
            "Set synchronous_commit = on, for the role, the database or the server.",
        )
    for name, value in (("autovacuum", facts.autovacuum), ("track_counts", facts.track_counts)):
        if value != "on":
            yield error(
                name,
                f"The server runs with {name} = {value}.",
                "Tables grow without bound and get slower with every run.",
                f"Set {name} = on in postgresql.conf, and reload it.",
            )
    free = facts.max_connections - facts.kept_connections - facts.connections
    if facts.max_connections - facts.kept_connections < NEEDED_CONNECTIONS:
        yield error(
            "max_connections",
            f"The server takes {facts.max_connections} connections, of which {facts.kept_connections} are kept for superusers.",
            f"Evertick needs about {NEEDED_CONNECTIONS} with one service of each kind.",
            f"Set max_connections to {NEEDED_CONNECTIONS + facts.kept_connections} or more, and restart the server.",
        )
    elif free < 10:
        yield warning(
            "connections",
            f"Only {max(free, 0)} of the server's {facts.max_connections} connections are free.",
            "After a restart everybody wants one at once, and who gets none cannot work.",
            "Reserve some for Evertick: see 'Connections' in docs/howto/operate.md.",
        )
    if 0 <= facts.role_limit < max(NEEDED_CONNECTIONS, facts.role_connections + 10):
        yield warning(
            "role_limit",
            f"This role may hold {facts.role_limit} connections and has {facts.role_connections}.",
            f"Evertick needs about {NEEDED_CONNECTIONS} with one service of each kind.",
            "Raise it: alter role ... connection limit -1.",
        )


def judge_clock(skew_seconds: float) -> Iterator[Finding]:
    if abs(skew_seconds) > MOST_SKEW_SECONDS:
        side = "behind" if skew_seconds > 0 else "before"
        yield warning(
            "clock",
            f"This machine's clock is {abs(skew_seconds):.1f} s {side} the database's.",
            "The database's clock decides what is due; lines of logs from here have other times than the runs they tell of.",
            "Let both take their time from the same source (NTP).",
        )


def judge_keys(settings: Settings, sealed: list[SealedBy]) -> Iterator[Finding]:
    """Whether the stored values can be opened here."""
    # Late: it brings the library of ciphers, which nobody else here needs.
    from evertick.services.keyring import load_keyring

    try:
        keyring = load_keyring(settings)
    except InvalidSettings as wrong:
        if sealed:
            count = sum(each.count for each in sealed)
            yield error(
                "secret_key",
                f"{count} stored values cannot be opened here: {wrong}",
                "Tasks that declare one of them fail before they start.",
                "Bring back the key, as EVERTICK_SECRET_KEY_FILE or EVERTICK_SECRET_KEYS, wherever a runner works.",
            )
        return
    for each in sealed:
        if not keyring.knows(each.key_id):
            yield error(
                "secret_key",
                f"{each.count} stored values were sealed with the key {each.key_id}, which is not here.",
                "Tasks that declare one of them fail before they start.",
                "Add that key to the key file or to EVERTICK_SECRET_KEYS, or set these values anew.",
            )


async def _judge_people(conn: AsyncConnection, settings: Settings) -> list[Finding]:
    known = await access.count_accounts(conn)
    if known.with_password or settings.admin_password is not None:
        return []
    if not is_loopback(settings.api_host):
        return [
            error(
                "open_door",
                f"The API shall listen on {settings.api_host}, and no user has a password.",
                "It refuses to start so: the first to find the login link would own it all.",
                "Set one with: evertick users password admin",
            )
        ]
    return [
        warning(
            "no_password",
            "No user has a password yet.",
            "Only the one-time link leads in, and it lives for an hour.",
            "Set one with: evertick users password admin (or sign in with: evertick users link admin)",
        )
    ]


async def _judge_work(conn: AsyncConnection, settings: Settings) -> list[Finding]:
    leader = await shards.leader(conn, shard=0)
    alive = await runners.list_busy(conn, limit=1)
    found = list(judge_queues(await queues.list_all(conn, cap=_MOST_COUNTED)))
    if leader is None or leader.unled:
        is_partly_led = leader is not None and bool(leader.leaders)
        found.append(
            error(
                "no_leader",
                f"No scheduler leads{_shards(leader.unled) if leader and is_partly_led else ''}.",
                "Nothing is fired, retried or repaired until one does.",
                "Start one with: evertick up, or: evertick scheduler. If one runs, its log says why it cannot lead.",
            )
        )
    if not alive:
        found.append(
            error(
                "no_runner",
                "No runner is alive.",
                "Nothing can run.",
                "Start one with: evertick up, or: evertick runner",
            )
        )
    broken = await dags.import_errors(conn)
    if broken:
        found.append(
            warning(
                "import_errors",
                f"{len(broken)} DAG files cannot be loaded, the first is {broken[0].file}: {broken[0].message}",
                "Their DAGs are missing, or their last good version goes on.",
                f"Correct it, and look with: evertick dags validate {broken[0].file}",
            )
        )
    aside = await quarantine.list_all(conn)
    if aside:
        found.append(
            warning(
                "quarantine",
                f"{len(aside)} things are set aside because they fail every time, the first: {aside[0].reason}",
                "They are tried again only now and then.",
                "See which and why with: evertick quarantine",
            )
        )
    return found


def judge_queues(found: list[QueueRow]) -> Iterator[Finding]:
    unserved = [each for each in found if each.depth and each.runners == each.draining]
    for each in unserved:
        yield error(
            "unserved_queue",
            f"{each.depth} tasks wait in queue {each.queue}, and no live runner takes from it.",
            "They wait until one does.",
            f"Start one with: evertick runner --queues {each.queue}",
        )


def _skew_seconds(before: datetime, there: datetime, after: datetime) -> float:
    """How far the database is ahead, beyond what the way there and back may explain."""
    if before <= there <= after:
        return 0.0
    return (there - after).total_seconds() if there > after else (there - before).total_seconds()


def _shards(numbers: list[int]) -> str:
    return f" shard{'s' if len(numbers) > 1 else ''} {', '.join(str(each) for each in numbers)}"
