"""N14: a standby is promoted while the old primary lives, once with synchronous and once with asynchronous replication."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections import defaultdict
from contextlib import suppress
from datetime import datetime

from tests.chaos.cluster import Cluster, Shape
from tests.chaos.effects import read
from tests.chaos.record import Fault, boot_ns
from tests.chaos.scenario import Scenario
from tests.chaos.server import PostgresServer
from tests.chaos.stage import Stage
from tests.chaos.usage import descendants
from tests.chaos.watch import Watcher
from tests.chaos.writers import writing
from tests.ports import own_port
from tests.waiting import elapse, eventually

OLD_AGAIN_SECONDS = 5.0
SETTLED_NS = 2_000_000_000
# What a service's write would change.
WRITES = "select (select count(*) from run), (select coalesce(sum(epoch), 0) from task), (select sum(epoch) from shard)"


async def add_standby(cluster: Cluster, *, is_synchronous: bool) -> PostgresServer:
    """A copy that follows. Made while the server is down, which is the simplest true copy."""
    primary = cluster.server
    standby = PostgresServer(folder=primary.folder.with_name("standby"), port=own_port(), settings=primary.settings)
    standby.folder.mkdir()
    await primary.stop()
    await asyncio.to_thread(shutil.copytree, primary.data, standby.data, symlinks=True)
    standby.data.chmod(0o700)
    (standby.data / "standby.signal").touch()
    with (standby.data / "postgresql.auto.conf").open("a") as file:
        file.write(f"primary_conninfo = 'host=127.0.0.1 port={primary.port} user=evertick application_name=standby'\n")
    await primary.start()
    await standby.start()
    following = "select count(*) from pg_stat_replication where state = 'streaming'"
    await eventually(lambda: cluster.watch.value(following), 30, pause_seconds=0.05)
    if is_synchronous:
        await cluster.watch.must("alter system set synchronous_standby_names = 'standby'")
        await cluster.watch.must("select pg_reload_conf()")
        synchronous = "select count(*) from pg_stat_replication where sync_state = 'sync'"
        await eventually(lambda: cluster.watch.value(synchronous), 30, pause_seconds=0.05)
    return standby


async def fail_over(stage: Stage, *, is_synchronous: bool) -> None:
    cluster = stage.cluster
    old = cluster.server
    standby = await add_standby(cluster, is_synchronous=is_synchronous)
    try:
        await stage.begin_load(seconds=stage.scaled(60, 16), quick=6)
        async with writing(cluster, dag="pulse", most=int(stage.scaled(3000, 300)), per_second=60):
            await elapse(2)
            await _promote(stage, old, standby, lags=not is_synchronous)
        if stage.load is not None:
            await stage.load.over()
    finally:
        await old.stop("immediate")
        # From here on it is the server, also for the end of the installation.
        cluster.server = standby


async def _promote(stage: Stage, old: PostgresServer, standby: PostgresServer, *, lags: bool) -> None:
    cluster = stage.cluster
    async with stage.nemesis.fault(Fault.FAILOVER, "postgres", part="lagging" if lags else "synchronous") as struck:
        if lags:
            # Acknowledged commits that the standby never gets: the sender stands still.
            sender = await cluster.watch.value("select pid from pg_stat_replication")
            os.kill(sender, signal.SIGSTOP)
            await elapse(1)
        promoted = Watcher(standby.url)
        try:
            await promoted.must("select pg_promote()")
        finally:
            await promoted.close()
        stage.marks["promoted"] = boot_ns()
        cluster.proxy.redirect(f"127.0.0.1:{standby.port}")
        cluster.server = standby
        await cluster.watch.close()
        cluster.watch.url = standby.url
        for name in cluster.proxy.status():
            cluster.proxy.reset(name)
    await stage.nemesis.recovery(struck, stage.nemesis.works_again())
    await _go_back(stage, old, standby)


async def _go_back(stage: Stage, old: PostgresServer, standby: PostgresServer) -> None:
    """The way leads to the old primary again, which is alive and writable: nobody who has seen the new one may write."""
    cluster = stage.cluster
    with suppress(ProcessLookupError):
        for pid in descendants(old.pid) if old.pid else []:
            os.kill(pid, signal.SIGCONT)
    looker = Watcher(old.url)
    try:
        # Without its standby it would never answer a commit, and that would prove nothing about us.
        await looker.must("set synchronous_commit = local")
        await looker.must("alter system set synchronous_standby_names = ''")
        await looker.must("select pg_reload_conf()")
        await elapse(0.3)
        before = (await looker.must(WRITES))[0]
        async with stage.nemesis.fault(Fault.FAILOVER, "postgres", part="back to the old"):
            cluster.proxy.redirect(f"127.0.0.1:{old.port}")
            for name in cluster.members:
                cluster.proxy.reset(name)
            await elapse(OLD_AGAIN_SECONDS)
            after = (await looker.must(WRITES))[0]
            cluster.proxy.redirect(f"127.0.0.1:{standby.port}")
            for name in cluster.members:
                cluster.proxy.reset(name)
        stage.expect(before == after, f"written to the old primary after the new one was seen: {before} then {after}")
    finally:
        await looker.close()


def _said(stage: Stage, event: str) -> int:
    return sum(len(member.events(event)) for member in stage.cluster.members.values())


async def synchronous(stage: Stage) -> None:
    """Nothing that was acknowledged is lost."""
    await fail_over(stage, is_synchronous=True)
    stage.note(f"failover told {_said(stage, 'failover_detected')} times")
    stage.expect(_said(stage, "failover_detected"), "no service told of the failover")
    stage.expect(not _said(stage, "writes_lost"), "a service told of lost writes, and there were none")


async def asynchronous(stage: Stage) -> None:
    """What was acknowledged and not copied is lost; that must be detected and told, and no fire is doubled."""
    await fail_over(stage, is_synchronous=False)
    # What ran on the old server and was lost with it fires again. After that, every instant has one run.
    bodies: dict[tuple[str, datetime], set[int]] = defaultdict(set)
    for effect in read(stage.cluster.effects_file):
        if effect.fire_at is not None and effect.at_ns > stage.marks["promoted"] + SETTLED_NS:
            bodies[effect.schedule, effect.fire_at].add(effect.run_id)
    doubled = {key: runs for key, runs in bodies.items() if len(runs) > 1}
    stage.expect(bodies, "nothing fired after the failover")
    stage.expect(not doubled, f"fired twice after the failover: {doubled}")
    stage.note(f"lost writes told {_said(stage, 'writes_lost')} times")
    stage.expect(_said(stage, "writes_lost"), "no service told of the lost writes")


SCENARIOS = (
    Scenario(
        name="N14",
        title="promote a synchronous standby while the old primary lives",
        play=synchronous,
        shape=lambda is_full: Shape(server={"max_wal_senders": "4", "wal_level": "replica", "hot_standby": "on"}),
        required=("J1", "J9", "J10"),
    ),
    Scenario(
        name="N14b",
        title="promote a lagging asynchronous standby while the old primary lives",
        play=asynchronous,
        shape=lambda is_full: Shape(server={"max_wal_senders": "4", "wal_level": "replica", "hot_standby": "on"}),
        required=("J9",),
        # Acknowledged writes are lost here by the nature of the thing, and what they began is begun again.
        without=("J1", "J2", "J4", "J10", "J12"),
    ),
)
