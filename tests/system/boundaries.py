"""One small workload, played to its end while a service is killed at a chosen commit boundary and started again.

`python -m tests.system.boundaries` kills at every execution of every statement; the tests take a share of them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from psycopg import AsyncConnection

from evertick.db.statements import sql
from tests.databases import Cluster, own_cluster
from tests.engine import invariants
from tests.system.processes import PATIENCE_SECONDS, Installation, Service
from tests.system.work import SMALL, Published, effects, executed_twice, loaded, publish_work, schedule_now, start_run
from tests.waiting import eventually

FIRES = 4
TRIGGERED = ("chain", "diamond", "branch")
SERVICES = ("scheduler", "runner")
AT_ONCE = 5

# By (DAG, which of its runs, task): state, attempt and result. What an interrupted run must end up with as well.
Outcome = dict[tuple[str, int, str], tuple[Any, ...]]
Counts = dict[str, Counter[str]]
Rehearsed = tuple[Outcome, Counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a service is killed. `earlier` is where a service was killed before, for what only a recovery executes.

    With `is_certified` a dead runner is certified so at once, as `evertick up` does; otherwise its silence tells.
    """

    service: str
    statement: str
    when: str
    number: int = 1
    earlier: Site | None = None
    is_certified: bool = True

    def __str__(self) -> str:
        before = f"{self.earlier} then " if self.earlier else ""
        return f"{before}{self.service} {self.when} {self.statement} #{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where the plays take place."""

    cluster: Cluster
    template: str
    work: Published
    folder: Path


class Play:
    """One run of the workload in a database of its own."""

    def __init__(self, stage: Stage, installation: Installation, site: Site | None) -> None:
        self._stage, self._installation, self._site = stage, installation, site
        self._services: dict[str, Service] = {}
        self._is_certified = site is None or site.is_certified

    async def run(self, record: Path | None = None) -> Outcome:
        there = self._installation
        await invariants.install(there.conn)
        if not self._is_certified:
            await there.keep_runners_elsewhere()
        await publish_work(there.conn, self._stage.work, only=TRIGGERED)
        for dag in TRIGGERED:
            await start_run(there.conn, dag, key="once")
        instants = await schedule_now(there.conn, self._stage.work, "pulse", every=0.3, times=FIRES)
        for kind in SERVICES:
            self._launch(kind, record)
        await eventually(self._has_ended, PATIENCE_SECONDS, pause_seconds=0.03)
        # What is done now and then, as sending what is in the outbox, may come after the end of a short play.
        with suppress(AssertionError):
            await eventually(self._was_hit, PATIENCE_SECONDS, pause_seconds=0.03)
        for kind, service in self._services.items():
            code = await service.terminate()
            # One that was started again a moment ago may not have come to say how it wants to be stopped.
            assert code in (0, -signal.SIGKILL, -signal.SIGTERM), f"the {kind} ended with {code}"
        await eventually(lambda: not there.strays())
        fired = await there.rows("select fire_at from run where fire_at is not null order by 1")
        assert [row[0] for row in fired] == instants, "a fire is missing or was made up"
        broken = await invariants.violations(there.conn)
        assert not broken, broken
        await self._check_effects()
        return await outcome(there.conn)

    def _launch(self, kind: str, record: Path | None = None) -> None:
        failpoint = None
        for number, site in enumerate(_in_order(self._site)):
            marker = self._installation.folder / f"marker-{number}"
            if site.service == kind and not marker.exists():
                failpoint = f"{site.statement}:{site.when}:{site.number}@{marker}"
                break
        self._services[kind] = self._installation.launch(
            kind, failpoint=failpoint, runner_id="r0", record=record and record.with_suffix(f".{kind}")
        )

    async def _has_ended(self) -> bool:
        """Whether every run is over. Meanwhile be the supervisor of services that were killed."""
        for kind, service in list(self._services.items()):
            if not service.is_alive:
                assert service.exit_code == -signal.SIGKILL, f"the {kind} ended by itself: {service.exit_code}"
                if kind == "runner":
                    await eventually(lambda: not self._installation.strays())
                    if self._is_certified:
                        await self._installation.certify_deaths()
                self._launch(kind)
        query = "select count(*) filter (where state in ('queued', 'running')), count(*) from run_status"
        ((still_open, total),) = await self._installation.rows(query)
        return still_open == 0 and total == FIRES + len(TRIGGERED)

    async def _was_hit(self) -> bool:
        hit = self.hit()
        surely = [site for site in _in_order(self._site) if site.number == 1 and site.statement not in AT_THE_END]
        return await self._has_ended() and all(site in hit for site in surely)

    async def _check_effects(self) -> None:
        found = effects(self._installation.effects_file)
        assert not executed_twice(found), f"executed twice: {executed_twice(found)}"
        names = await self._installation.rows("select run_id, task, state from all_tasks where attempt > 0")
        for run_id, task, state in names:
            done = {each.what for each in found if (each.run_id, each.task) == (run_id, task)}
            assert "begin" in done, f"{task} of run {run_id} is {state} and never ran"
            assert "end" in done or state != "success", f"{task} of run {run_id} never got to its end"

    def hit(self) -> list[Site]:
        """Where services were killed. A later one counts only after an earlier one of its recovery."""
        folder = self._installation.folder
        return [site for number, site in enumerate(_in_order(self._site)) if (folder / f"marker-{number}").exists()]


async def outcome(conn: AsyncConnection) -> Outcome:
    cursor = await conn.execute(
        "select t.dag, dense_rank() over (partition by t.dag order by t.run_id), t.task, t.state, t.attempt, v.value,"
        " s.state from all_tasks t join run_status s on s.run_id = t.run_id"
        " left join result v on v.run_id = t.run_id and v.idx = t.idx"
    )
    return {(dag, number, task): tuple(rest) for dag, number, task, *rest in await cursor.fetchall()}


async def play(stage: Stage, site: Site | None, record: Path | None = None) -> tuple[Outcome, list[Site]]:
    """How it ended, and where services were killed."""
    name = stage.cluster.create(stage.template)
    try:
        async with Installation(stage.cluster.database_url(name), stage.folder / name) as installation:
            played = Play(stage, installation, site)
            try:
                return await played.run(record), played.hit()
            except AssertionError as error:
                raise AssertionError(f"{site}: {error}\n{await installation.diagnosis()}") from error
    finally:
        stage.cluster.drop(name)


async def rehearse(stage: Stage) -> Rehearsed:
    """The uninterrupted play, and how often each service executed which statement."""
    record = stage.folder / "record"
    expected, _ = await play(stage, None, record)
    return expected, {kind: Counter(record.with_suffix(f".{kind}").read_text().split()) for kind in SERVICES}


async def failures(stage: Stage, sites: Iterable[Site], expected: Outcome) -> tuple[list[str], list[Site]]:
    """Play every site, several at once. Returns what went wrong, and which sites were reached."""
    wrong: list[str] = []
    reached: list[Site] = []
    room = asyncio.Semaphore(AT_ONCE)

    async def one(site: Site) -> None:
        async with room:
            try:
                found, hit = await play(stage, site)
            except AssertionError as error:
                wrong.append(str(error))
                return
        reached.extend(hit)
        if found != expected:
            difference = {key: (expected.get(key), found.get(key)) for key in expected.keys() | found.keys()}
            wrong.append(f"{site}: { ({key: pair for key, pair in difference.items() if pair[0] != pair[1]}) }")

    async with asyncio.TaskGroup() as group:
        for site in sites:
            group.create_task(one(site))
    return wrong, reached


def in_pairs(first: Sequence[Site], second: Sequence[Site]) -> Iterator[Site]:
    """A place in each of two services for one play, as both die of different things. A recovery has a play of its own."""
    singles = [[site for site in sites if not site.earlier] for sites in (first, second)]
    yield from (site for site in (*first, *second) if site.earlier)
    for one, other in zip_longest(*singles):
        yield replace(other, earlier=one) if one and other else one or other


def every_site(counts: Counts, kind: str) -> Iterator[Site]:
    """Every execution of every statement that an undisturbed service makes, and of those that only a recovery makes."""
    for statement, count in counts[kind].items():
        for number in range(1, count + 1):
            for when in ("before", "after"):
                yield Site(service=kind, statement=statement, when=when, number=number)
    yield from recovery_sites(kind)


def recovery_sites(kind: str) -> Iterator[Site]:
    mid_task = Site(service="runner", statement="logs.append", when="after")
    for when in ("before", "after"):
        if kind == "runner":
            yield Site(service="runner", statement="logs.shipped_until", when=when, earlier=mid_task)
        else:
            yield Site(service="scheduler", statement="reap_runner", when=when, earlier=mid_task, is_certified=False)


# What a service does when it is told to stop.
AT_THE_END = {"release_shard", "runners.leave"}
# A rehearsal may see these and the play not. The first only reads, so seldom that a play may be over before. The second is called
# if a new leader's sender is faster than its first poll; tests/system/test_notifications.py kills it with something to send.
BY_CHANCE = {"server.snapshot_holders", "claim_deliveries"}
WRITES = re.compile(r"\binsert into\b|\bdelete from\b|\bupdate\b|_lock")


def sides(statement: str) -> tuple[str, ...]:
    """Before and after it; a statement that only reads has no commit, so once."""
    noun, _, name = statement.rpartition(".")
    return ("before",) if noun and not WRITES.search(sql(noun, name)) else ("before", "after")


def chosen_sites(counts: Counts, kind: str, dice: random.Random) -> Iterator[Site]:
    """Each statement before and after, once early and, if it is executed often, once somewhere later."""
    for statement, count in counts[kind].items():
        if statement in BY_CHANCE:
            continue
        for when in sides(statement):
            yield Site(service=kind, statement=statement, when=when)
            if statement in ("finish_and_claim", "fire_schedules"):
                # By the load of the machine a play may have fewer executions than the rehearsal had.
                for number in dice.sample(range(2, max(count // 2, 3)), k=min(3, max(count // 2 - 2, 1))):
                    yield Site(service=kind, statement=statement, when=when, number=number)
    yield from recovery_sites(kind)


def main() -> int:
    """The full sweep."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("--only", default="", help="statements whose name contains this")
    only = options.parse_args().only
    with tempfile.TemporaryDirectory() as folder, own_cluster(Path(folder) / "home") as cluster:
        stage = Stage(
            cluster=cluster, template=cluster.template(), work=loaded(SMALL, Path(folder) / "dags"), folder=Path(folder)
        )
        return asyncio.run(_sweep(stage, only))


async def _sweep(stage: Stage, only: str) -> int:
    expected, counts = await rehearse(stage)
    wrong: list[str] = []
    for kind in SERVICES:
        sites = [site for site in every_site(counts, kind) if only in site.statement]
        found, reached = await failures(stage, sites, expected)
        print(
            f"{kind}: {len(sites)} places to be killed at, {len({*sites} & {*reached})} reached, {len(found)} failures",
            flush=True,
        )
        wrong += found
    print("\n\n".join(wrong))
    return 1 if wrong else 0


def _in_order(site: Site | None) -> list[Site]:
    return [] if site is None else [*_in_order(site.earlier), site]


if __name__ == "__main__":
    sys.exit(main())
