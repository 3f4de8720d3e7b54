"""A real installation to break: PostgreSQL, schedulers and runners as separate processes, each behind a proxy of its own.

Everything lives in one folder on memory and dies with this process. Nothing here injects a fault or judges one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from psycopg import conninfo

from evertick.config import Settings, environment_for
from evertick.db.connect import Purpose, connect
from evertick.domain.access import Actor
from evertick.engine.shards import set_shards
from evertick.processes.system import children_of
from evertick.processes.tree import find_by_token, kill_tree
from tests.chaos import sink
from tests.chaos.audit import install_audit
from tests.chaos.dags import Work
from tests.chaos.machine import false_clock, remove_clock_memory, small_disk
from tests.chaos.members import Member
from tests.chaos.proxy import Proxy, proxied
from tests.chaos.record import ClientLog, NemesisLog
from tests.chaos.server import PostgresServer, Template, from_template
from tests.chaos.watch import Led, Watcher
from tests.waiting import eventually

# What takes minutes is scaled down by ten; the leader's lease and the tick are what users have.
SCALED: dict[str, Any] = {
    "heartbeat_seconds": 1.0,
    "lost_after_seconds": 9.0,
    "reconcile_seconds": 3.0,
    "orphan_after_seconds": 30.0,
    "health_port": 0,
    "stop_grace_seconds": 3.0,
    "log": "json",
}

START_SECONDS = 60.0
# A service must not see what the harness was started with, but for the place of the program itself.
_STRIPPED = ("EVERTICK_", "PYTHONDONTWRITEBYTECODE", "LD_PRELOAD", "FAKETIME")
CLIENT = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large the installation is, and what differs from the scaled settings."""

    schedulers: int = 2
    shards: int = 1
    runners: int = 2
    slots: int = 4
    settings: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, str] = field(default_factory=dict)
    # How large the disk of the server's write-ahead log is, as "64m"; empty: as large as that of all else.
    wal_disk: str = ""
    has_false_clock: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What all installations of one run of the suite are built from. `sink_server` is never broken."""

    template: Template
    work: Work
    sink_server: PostgresServer


class Outside(Protocol):
    """What runs tasks of the installation and is no service of it: pods of a cluster beside it."""

    def pids(self) -> list[int]: ...

    def condition(self) -> str: ...


OutsideT = TypeVar("OutsideT", bound=Outside)


class Cluster:
    """One installation. Leaving the block ends every process of it, whatever happened."""

    def __init__(self, ground: Ground, folder: Path, shape: Shape | None = None) -> None:
        self.ground, self.folder, self.shape = ground, folder, shape or Shape()
        self.settings: dict[str, Any] = {**SCALED, "runner_slots": self.shape.slots, **self.shape.settings}
        self.members: dict[str, Member] = {}
        self.effects_file = folder / "effects"
        self.flags = folder / "flags"
        self.nemesis_file, self.client_file = folder / "nemesis.jsonl", folder / "client.jsonl"
        self._token = uuid.uuid4().hex
        self._stack = AsyncExitStack()
        self.outside: Outside | None = None
        self.server: PostgresServer
        self.proxy: Proxy
        self.watch: Watcher
        self.sink_url: str

    async def __aenter__(self) -> Self:
        try:
            await self._build()
        except BaseException:
            await self._tear_down()
            raise
        return self

    async def _build(self) -> None:
        for folder in (self.folder, self.flags):
            folder.mkdir(parents=True, exist_ok=True)
        self.effects_file.touch()
        (self.folder / "postgres.clock").write_text("+0\n")
        self.record, self.clients = NemesisLog(self.nemesis_file), ClientLog(self.client_file)
        self._stack.callback(self.record.close)
        self._stack.callback(self.clients.close)
        shape = self.shape
        self.server = await from_template(
            self.ground.template,
            self.folder / "postgres",
            settings=shape.server,
            extra=false_clock(self.folder / "postgres.clock") if shape.has_false_clock else {},
        )
        if shape.wal_disk:
            self._stack.enter_context(small_disk(self.folder / "wal", shape.wal_disk))
            shutil.copytree(self.server.data / "pg_wal", self.folder / "wal", dirs_exist_ok=True)
            shutil.rmtree(self.server.data / "pg_wal")
            (self.server.data / "pg_wal").symlink_to(self.folder / "wal")
        self._stack.push_async_callback(self._stop_server)
        await self.server.start()
        self.watch = Watcher(self.server.url)
        self._stack.push_async_callback(self.watch.close)
        self.proxy = self._stack.enter_context(Proxy.start(upstream=f"127.0.0.1:{self.server.port}"))
        self.client_url = proxied(self.server.url, self.proxy.listen(CLIENT))
        async with await connect(self.server.url, purpose=Purpose.SCHEDULER) as conn:
            # Before anybody takes notes: no leader has ticked yet.
            if shape.shards > 1:
                await set_shards(conn, shards=shape.shards, actor=Actor("chaos"))
            await install_audit(conn)
        self.sink_url = await _sink_database(self.ground.sink_server)
        for number in range(1, shape.schedulers + 1):
            await self.add("scheduler", f"scheduler-{number}")
        for number in range(1, shape.runners + 1):
            await self.add("runner", f"runner-{number}")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tear_down()

    async def _stop_server(self) -> None:
        """The one that serves in the end; after a failover that is another."""
        await self.server.stop("immediate")

    async def _tear_down(self) -> None:
        await asyncio.gather(*(member.stop() for member in self.members.values()))
        await self._stack.aclose()
        for pid in find_by_token(self._token):
            kill_tree(pid)
        lives = {life.pid for member in self.members.values() for life in member.lives}
        remove_clock_memory(lives | self.server.pids if self.shape.has_false_clock else lives)

    async def add(
        self,
        kind: str,
        name: str,
        *,
        wrapper: tuple[str, ...] = (),
        extra: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Member:
        """One more service, not started. It has a home, a log, a database user and a way to the database of its own."""
        await self.watch.must(f'create role "{name}" superuser login')
        url = conninfo.make_conninfo(proxied(self.server.url, self.proxy.listen(name)), user=name)
        chosen = Settings(
            database_url=url,
            home=self.folder / name,
            **{**self.settings, **({"runner_id": name} if kind == "runner" else {}), **settings},
        )
        kept = {key: value for key, value in os.environ.items() if not key.startswith(_STRIPPED)}
        environment = environment_for(chosen, kept) | {
            "CHAOS_EFFECTS": str(self.effects_file),
            "CHAOS_FLAGS": str(self.flags),
            "CHAOS_SERVICE": name,
            "CHAOS_SINK_URL": self.sink_url,
            "CHAOS_TOKEN": self._token,
            **(extra or {}),
        }
        member = Member(
            name=name, kind=kind, folder=self.folder, environment=environment, record=self.record, wrapper=wrapper
        )
        self.members[name] = member
        return member

    async def beside(self, outside: AbstractAsyncContextManager[OutsideT]) -> OutsideT:
        """Something that runs tasks outside the services, until the end of the installation."""
        self.outside = made = await self._stack.enter_async_context(outside)
        return made

    @property
    def token(self) -> str:
        """What every process of this installation has in its environment."""
        return self._token

    async def start(self) -> None:
        """Start every service and wait until all are at work: a leader, and every runner in the book."""
        for member in self.members.values():
            member.start()
        await eventually(self._is_up, START_SECONDS, pause_seconds=0.05)

    async def _is_up(self) -> bool:
        known = await self.watch.value("select count(distinct runner_id) from runner where ended_at is null")
        return await self.watch.is_led() and (known or 0) >= len(self.of_kind("runner"))

    def of_kind(self, kind: str) -> list[Member]:
        return [member for member in self.members.values() if member.kind == kind]

    @property
    def lease_seconds(self) -> float:
        """How long a leader leads without renewing."""
        return float(self.settings.get("leader_lease_seconds", Settings().leader_lease_seconds))

    async def leader(self) -> Member | None:
        """The scheduler that holds the first shard now, if it is one of ours and its lease is live."""
        return next((member for member, led in await self.leaders() if 0 in led), None)

    async def leaders(self) -> list[tuple[Member, Led]]:
        """The schedulers of ours that lead, each with the epochs of its shards."""
        live = [each for each in await self.watch.leaders() if each.is_live]
        found = []
        for member in self.of_kind("scheduler"):
            led = {each.shard: each.epoch for each in live if _owns(each.owner, member)}
            if led:
                found.append((member, led))
        return found

    async def sample(self) -> None:
        """What every process of it uses now, for the search for leaks."""
        status = self.proxy.status()
        for member in self.members.values():
            if member.pid is not None:
                self.record.sample(member.name, member.pid, connections=status[member.name]["connections"])
        sessions = await self.watch.value(
            "select count(*) from pg_stat_activity where backend_type = 'client backend' and application_name like 'evertick%%'"
        )
        self.record.sample_total(connections=sessions or 0, strays=len(self.strays()))

    def strays(self) -> list[int]:
        """Processes of this installation that no service owns any more, and no pod."""
        owners = [member.pid for member in self.members.values() if member.pid]
        owners += self.outside.pids() if self.outside is not None else []
        owned = {pid for owner in owners for pid in _tree(owner)}
        return [pid for pid in find_by_token(self._token) if pid not in owned]

    def tell(self, flag: str) -> None:
        """Let the bodies go on that wait for this word."""
        (self.flags / flag).touch()

    def untell(self, flag: str) -> None:
        (self.flags / flag).unlink(missing_ok=True)

    def unexpected_deaths(self) -> list[str]:
        """Services that ended although nobody did anything to them. A runner that was buried ends on purpose."""
        found = []
        for member in self.members.values():
            buried = len(member.events("session_declared_dead"))
            ended = [life for life in member.lives if life.ended_ns is not None and life.cause is None]
            if len(ended) > buried:
                codes = ", ".join(str(life.exit_code) for life in ended)
                found.append(f"{member.name} ended by itself {len(ended)} times ({codes}), buried {buried} times")
        return found

    async def diagnosis(self) -> str:
        """What a person would look at first."""
        lines = [f"work left: {await self.watch.open_work()}", f"leaders: {await self.watch.leaders()}"]
        for query in (
            "select run_id, dag, task, state::text, epoch, attempt, session, request, not_before from all_tasks"
            " where finished_at is null limit 20",
            "select * from shard",
            "select runner_id, session, pid, heartbeat_seq, silent_seconds, ended_at, end_reason from runner"
            " order by started_at desc limit 10",
        ):
            lines += [str(row) for row in await self.watch.rows(query) or []]
        lines += [str(row) for row in await self.watch.rows("select * from dispatch limit 20") or []]
        lines += [self.outside.condition()] if self.outside is not None else []
        lines += [f"proxy: {self.proxy.status()}", f"--- postgres\n{self.server.tail()}"]
        for member in self.members.values():
            lines.append(f"--- {member.name} (pid {member.pid}, {len(member.lives)} lives)\n{member.tail()}")
        return "\n".join(lines)


def _owns(owner: str, member: Member) -> bool:
    """A scheduler signs with its host and its pid."""
    return member.pid is not None and str(member.pid) in owner.replace(":", "-").split("-")


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for child in children_of(pid):
        yield from _tree(child)


async def _sink_database(server: PostgresServer) -> str:
    """A fresh database on a server that no fault reaches."""
    name = f"sink_{uuid.uuid4().hex[:12]}"
    watcher = Watcher(server.url_of("postgres"))
    try:
        await watcher.must(f"create database {name}")
    finally:
        await watcher.close()
    url = server.url_of(name)
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        await sink.install(conn)
    return url
