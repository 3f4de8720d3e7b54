"""A seeded simulation: many runners, two leaders and people do random things; the invariants are checked after each step.

    python -m tests.engine.simulation --steps 1000000 [--seed N]

A failing seed repeats exactly: every choice comes from one random generator, and the clock is set, not read.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

from psycopg import AsyncConnection, DatabaseError
from psycopg.errors import RaiseException

from evertick.db.connect import Purpose, connect
from evertick.db.queries import runners, waits
from evertick.db.queries.runners import QueuedRow
from evertick.db.queries.tasks import ExchangeRow
from evertick.db.task_commit import TAKEN_AWAY
from evertick.domain.access import Actor
from evertick.domain.attempt import AttemptRef, Outcome, OutcomeKind, TaskKey
from evertick.domain.dags.gates import EXCLUSIVE, GateKind, GateSpec
from evertick.domain.dags.mapping import MapHow, MappedList, Mapping
from evertick.domain.dags.spec import ChildSpec, TaskKind
from evertick.domain.dags.waits import TimeoutAction, WaitKind, WaitSpec
from evertick.domain.errors import NotLeader, UserError
from evertick.domain.retention import Pace
from evertick.domain.retry import RetryPolicy
from evertick.domain.routing import read_pattern
from evertick.domain.schedules.events import on_event
from evertick.domain.schedules.preview import Reprocess
from evertick.domain.schedules.spec import parse_schedule
from evertick.domain.states import TriggerRule
from evertick.engine import backfills
from evertick.engine.backfills import BackfillRequest
from evertick.engine.dags import delete, pause, unpause
from evertick.engine.finish_and_claim import ClaimCursor, PatternClaims, exchange_matching, finish_and_claim
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.gates import admit_gated_tasks, reconcile_gates, release_admissions, set_pool
from evertick.engine.inbound.events import route_events
from evertick.engine.inbound.requests import start_delayed_runs, take_requests
from evertick.engine.maintenance import promote_due_tasks, reconcile_runs
from evertick.engine.remote_attempts import (
    DispatchResult,
    NotStarted,
    adopt_dispatches,
    claim_for_dispatch,
    delete_dispatches,
    end_queued,
)
from evertick.engine.retention import Kind, PendingCleanup, PruneGrant, prune_kind, prune_runs, sweep
from evertick.engine.runners import extend, mark_runner_dead
from evertick.engine.runs import cancel
from evertick.engine.shards import acquire_shard, poll_work, rebalance_shard, set_shards
from evertick.engine.tasks import clear, mark, select_tasks
from evertick.engine.triggers import encode_end, exchange_triggers
from evertick.engine.waits import Decision, decide_approval, send_event, wake
from tests.databases import Cluster, own_cluster
from tests.engine import invariants
from tests.engine.remote_agents import as_claim, begin
from tests.engine.world import T0, Runner, key_of, make_dag, put, set_clock, start

STEPS_PER_EPISODE = 500
DAGS = ("one", "two", "three")
POOLS = ("red", "blue")
WAITS = (
    WaitSpec(kind=WaitKind.TIME, seconds=9),
    WaitSpec(kind=WaitKind.CLOCK, until="00:01:00"),
    WaitSpec(kind=WaitKind.EVENT, name="word", timeout_seconds=60),
    WaitSpec(kind=WaitKind.APPROVAL, name="Well?", timeout_seconds=60, on_timeout=TimeoutAction.SKIP),
)


class Violation(AssertionError):
    """An invariant does not hold."""


class World:
    """One episode on a fresh database."""

    def __init__(self, conn: AsyncConnection, seed: int) -> None:
        self.conn, self.dice, self.seed = conn, random.Random(seed), seed
        self.now = T0
        self.runners: list[Runner] = []
        self.held: list[tuple[Runner, ExchangeRow]] = []
        self.past: list[tuple[Runner, ExchangeRow]] = []
        self.triggers: list[tuple[Runner, AttemptRef]] = []
        self.past_triggers: list[AttemptRef] = []
        # Of the runner that drives an executor elsewhere: what it was given, and of that what is over.
        self.queued: list[QueuedRow] = []
        self.queued_past: list[QueuedRow] = []
        # Of each shard, those of all its leaders. Every other episode has two, and DAGs that move between them.
        self.epochs: dict[int, list[int]] = {shard: [0] for shard in range(1 + seed % 2)}
        self.closed: set[int] = set()
        self.did: Counter[str] = Counter()
        self.trace: list[str] = []

    async def begin(self) -> None:
        await invariants.install(self.conn)
        await set_clock(self.conn, self.now)
        if len(self.epochs) > 1:
            await set_shards(self.conn, shards=len(self.epochs), actor=Actor("sim"))
        for shard in self.epochs:
            await self._take_over(shard)
        for _ in range(3):
            self.runners.append(await Runner.join(self.conn))
        self.far = await Runner.join(self.conn, executor="far", slots=6)
        for name in POOLS:
            await set_pool(self.conn, name=name, slots=2, actor=Actor("sim"))
        for name in DAGS:
            await self.publish(name)

    async def step(self) -> None:
        names = list(ACTIONS)
        weights = [ACTIONS[name][1] for name in names]
        name = self.dice.choices(names, weights)[0]
        self.trace.append(name)
        await ACTIONS[name][0](self)
        self.did[name] += 1
        found = await invariants.violations(self.conn)
        if found:
            raise Violation(f"seed {self.seed}, step {len(self.trace)} ({name}): {found[:5]}")

    # what can happen ----------------------------------------------------------------------------------------------

    async def publish(self, name: str | None = None) -> None:
        dice, count = self.dice, self.dice.randint(1, 7)
        tasks = [f"t{index}" for index in range(count)]
        shape = {task: dice.sample(tasks[:i], min(i, dice.randint(0, 3))) for i, task in enumerate(tasks)}
        options = {
            task: {
                "trigger_rule": dice.choice(list(TriggerRule)) if dice.random() < 0.5 else TriggerRule.ALL_SUCCESS,
                "retry": RetryPolicy(retries=dice.randint(0, 2), delay_seconds=dice.choice([0, 3])),
                "priority": dice.randint(0, 9),
                "rerun_on_loss": dice.random() < 0.8,
                "is_setup": dice.random() < 0.1,
                **self._gates_or_mapping(shape[task]),
            }
            if dice.random() > 0.12
            # Some wait for something outside; some start another DAG, and wait for it or not.
            else {"kind": TaskKind.WAIT, "wait": dice.choice(WAITS)}
            if dice.random() < 0.5
            else {
                "kind": TaskKind.TRIGGER,
                "child": ChildSpec(dag=dice.choice(DAGS), waits=dice.random() < 0.7),
                "timeout_seconds": dice.choice([None, 20]),
            }
            for task in tasks
        }
        words = [on_event("word", each=True, key="x"), on_event("word", debounce=3), on_event("word", each=True)]
        every = dice.choice([None, "@every 7s", "@every 10s", "*/1 * * * *", dice.choice(words)])
        limit = dice.choice([None, None, 1, 2])
        dag = make_dag(
            name or dice.choice(DAGS),
            shape,
            per_task=options,
            every=every,
            max_active_runs=limit,
            max_active_tasks=dice.choice([None, None, None, 3]),
        )
        await self._try(lambda: put(self.conn, dag))

    async def wake(self) -> None:
        shard, epoch = self._leader()
        await wake(self.conn, shard=shard, epoch=epoch, batch=self.dice.choice([1, 100]))

    async def tell(self) -> None:
        """An event, or somebody's decision."""
        if self.dice.random() < 0.5:
            await send_event(self.conn, name="word", payload=None, actor=Actor("sim"))
        if asked := await waits.list_approvals(self.conn, limit=1):
            run, task, decision = (
                asked[0].run_id,
                asked[0].task,
                Decision(is_approved=self.dice.random() < 0.5, actor=Actor("sim")),
            )
            await self._try(lambda: decide_approval(self.conn, run_id=run, task=task, decision=decision))

    def _gates_or_mapping(self, upstream: list[str]) -> dict[str, object]:
        """Both, unless one of the gates is not for mapped tasks. Some wait for an upstream task of the run before, too."""
        gates, mapping = self._gates(), self._mapping(upstream)
        if upstream and any(gate.kind is GateKind.PAST for gate in gates) and self.dice.random() < 0.5:
            gates = (*gates, GateSpec(kind=GateKind.PAST, name=upstream[0]))
        if any(gate.kind is GateKind.ORDER for gate in gates):
            return {"gates": gates}
        return {"gates": gates, "mapping": mapping}

    def _mapping(self, upstream: list[str]) -> Mapping | None:
        """Few tasks are mapped: over a list in the code, or over what an upstream task returns, which may be no list."""
        dice = self.dice
        if dice.random() > 0.25:
            return None
        lists = [MappedList(argument="x", length=dice.choice([0, 1, 2, 3]))]
        if upstream and dice.random() < 0.7:
            lists = [MappedList(argument="x", task=upstream[0]), *dice.choice([[], lists])]
        return Mapping(lists=tuple(lists), how=dice.choice([MapHow.PRODUCT, MapHow.PRODUCT, MapHow.ZIP]), most=4)

    def _gates(self) -> tuple[GateSpec, ...]:
        """Half of the tasks have none; the others one to three of few, so that they meet."""
        dice = self.dice
        choices = [
            GateSpec(kind=GateKind.POOL, name=dice.choice(POOLS), weight=dice.choice([1, 1, 2])),
            GateSpec(kind=GateKind.MUTEX, name=dice.choice("xy"), weight=dice.choice([1, EXCLUSIVE])),
            GateSpec(kind=GateKind.KEY, name="k", capacity=dice.choice([1, 3])),
            GateSpec(kind=GateKind.TASK, name="", capacity=1),
            GateSpec(kind=GateKind.GROUP, name="g", capacity=dice.choice([1, 2])),
            GateSpec(kind=GateKind.ORDER, name=dice.choice("vw"), version=dice.randint(1, 4)),
            GateSpec(
                kind=GateKind.RATE, name="r", capacity=dice.choice([2, 4]), period_seconds=dice.choice([1.0, 5.0])
            ),
            GateSpec(kind=GateKind.PAST, name=""),
        ]
        return tuple(dice.sample(choices, dice.choice([0, 0, 0, 1, 1, 2, 3])))

    async def resize_pool(self) -> None:
        slots = self.dice.choice([0, 1, 2, 2, 3, 5])
        await set_pool(self.conn, name=self.dice.choice(POOLS), slots=slots, actor=Actor("sim"))

    async def tend_gates(self) -> None:
        """What the leader does for gates. It never finds anything wrong, nor anybody whom it had time to let in before."""
        grace, batch = self.dice.choice([0, 5]), self.dice.choice([1, 100])
        epoch = self.epochs[0][-1]
        await release_admissions(self.conn, shard=0, epoch=epoch, grace=grace, limit=100)
        await admit_gated_tasks(self.conn, shard=0, epoch=epoch, limit=batch)
        done = await reconcile_gates(self.conn, shard=0, epoch=epoch, after=0, limit=100)
        if done.drifted or (done.admitted and batch > 1):
            raise Violation(f"seed {self.seed}, step {len(self.trace)}: gates had drifted: {done}")

    async def trigger(self) -> None:
        key = f"k{self.dice.randint(1, 30)}" if self.dice.random() < 0.3 else None
        await self._try(lambda: start(self.conn, self.dice.choice(DAGS), key))

    async def advance(self) -> None:
        self.now += timedelta(seconds=self.dice.choice([0.5, 2, 5, 30]))
        await set_clock(self.conn, self.now)

    async def fire(self) -> None:
        shard, epoch = self._leader()
        await fire_schedules(self.conn, shard=shard, epoch=epoch, batch=self.dice.choice([1, 2, 100]))

    async def fire_as_old_leader(self) -> None:
        before = await self._snapshot()
        shard, _ = self._leader()
        old = self.dice.choice(self.epochs[shard][:-1])
        for verb in (
            lambda: fire_schedules(self.conn, shard=shard, epoch=old, batch=100),
            lambda: promote_due_tasks(self.conn, shard=shard, epoch=old, limit=100),
            lambda: backfills.advance(self.conn, shard=shard, epoch=old, backfill_id=1),
            lambda: rebalance_shard(self.conn, shard=shard, epoch=old, limit=100),
            lambda: prune_runs(
                self.conn,
                PruneGrant(shard=shard, epoch=old, before=self.now, actor=Actor("sim")),
                after=0,
                pace=Pace(),
                now=self.now,
            ),
            lambda: reconcile_runs(self.conn, shard=shard, epoch=old, limit=100),
            lambda: take_requests(self.conn, shard=shard, epoch=old, limit=100),
            lambda: route_events(self.conn, shard=shard, epoch=old, limit=100),
            lambda: start_delayed_runs(self.conn, shard=shard, epoch=old, limit=100),
        ):
            try:
                await verb()
            except NotLeader:
                continue
        if await self._snapshot() != before:
            raise Violation(f"seed {self.seed}: an old leader changed something")

    async def backfill(self) -> None:
        """Somebody makes one, of a schedule or of an expression, or changes one that there is."""
        dice = self.dice
        wish = BackfillRequest(
            dag=dice.choice(DAGS),
            first=self.now - timedelta(seconds=dice.choice([20, 100, 1000])),
            last=None,
            spec=parse_schedule("@every 13s") if dice.random() < 0.3 else None,
            reprocess=dice.choice(list(Reprocess)),
            newest_first=dice.random() < 0.5,
            parallel=dice.choice([1, 2, 5]),
        )
        some = dice.randint(1, 10)
        verbs: list[Callable[[], Awaitable[object]]] = [
            lambda: backfills.create(self.conn, wish, request=f"r{dice.randint(1, 20)}", actor=Actor("sim")),
            lambda: backfills.pause(self.conn, backfill_id=some, actor=Actor("sim")),
            lambda: backfills.unpause(self.conn, backfill_id=some, actor=Actor("sim")),
            lambda: backfills.cancel(self.conn, backfill_id=some, leaves_runs=dice.random() < 0.5, actor=Actor("sim")),
        ]
        await self._try(dice.choices(verbs, [5, 2, 4, 1])[0])

    async def move_on(self) -> None:
        shard, epoch = self._leader()
        seen = await poll_work(self.conn, shard=shard, epoch=epoch, lost_after=90.0)
        for backfill_id in seen.backfills or []:
            await backfills.advance(self.conn, shard=shard, epoch=epoch, backfill_id=backfill_id)

    async def take_over(self) -> None:
        await self._take_over(self._leader()[0])

    async def set_shards(self) -> None:
        if len(self.epochs) > 1:
            await set_shards(self.conn, shards=self.dice.choice([1, 2]), actor=Actor("sim"))

    async def move_out(self) -> None:
        """A leader moves some of what is not its own. One whose shard closed leads it again when that comes back."""
        shard, epoch = self._leader()
        done = await rebalance_shard(self.conn, shard=shard, epoch=epoch, limit=self.dice.choice([1, 3, 100]))
        if done.is_closed:
            self.closed.add(shard)
        cursor = await self.conn.execute("select shard from shard where state <> 'closed'")
        for (back,) in await cursor.fetchall():
            if back in self.closed:
                self.closed.remove(back)
                await self._take_over(back)

    async def promote(self) -> None:
        bound = self.dice.choice([None, None, 1, 3])
        shard, epoch = self._leader()
        await promote_due_tasks(self.conn, shard=shard, epoch=epoch, limit=self.dice.choice([1, 100]), bound=bound)

    async def prune(self) -> None:
        """What is over goes, however young; its remains sometimes later."""
        before, pace = (
            self.now - timedelta(seconds=self.dice.choice([0, 5, 30])),
            Pace(batch=self.dice.choice([1, 100])),
        )
        mandate = PruneGrant(shard=0, epoch=self.epochs[0][-1], before=before, actor=Actor("sim"))
        done = await prune_runs(self.conn, mandate, after=0, pace=pace, now=self.now)
        swept = await sweep(self.conn, mandate, PendingCleanup.RUN, after=0, pace=pace)
        await prune_kind(self.conn, mandate, Kind.VERSIONS, pace=pace)
        if done.refused or swept.refused:
            raise Violation(
                f"seed {self.seed}, step {len(self.trace)}: could not prune {done.refused or swept.refused}"
            )

    async def reconcile(self) -> None:
        shard, epoch = self._leader()
        done = await reconcile_runs(self.conn, shard=shard, epoch=epoch, limit=1000)
        if done.repaired:
            raise Violation(f"seed {self.seed}, step {len(self.trace)}: reconcile found {done.repaired}")

    async def claim(self) -> None:
        runner = self.dice.choice(self.runners)
        self.held += [(runner, claim) for claim in await runner.claim(self.dice.choice([1, 1, 2, 5]))]

    async def claim_matching(self) -> None:
        """A runner of some names, or one that asks who waited too long: both claim by place."""
        runner, free = self.dice.choice(self.runners), self.dice.choice([1, 2, 5])
        if self.dice.random() < 0.5:
            cursor = ClaimCursor(1, aging_seconds=self.dice.choice([0.001, 1.0, 60.0]))
            session = runner.session
            done = await finish_and_claim(
                self.conn, session=session, reports=[], queues=["default"], free=free, infra_retries=3, cursor=cursor
            )
        else:
            pattern = read_pattern(self.dice.choice(["**", "*::a*", f"{self.dice.choice(DAGS)}::**", "nobody"]))
            matching = PatternClaims([pattern], ["default"], aging_seconds=self.dice.choice([0.0, 1.0]))
            done = await exchange_matching(
                self.conn, matching, session=runner.session, reports=[], free=free, infra_retries=3
            )
        self.held += [(runner, claim) for claim in done.claims]

    async def claim_remote(self) -> None:
        free = self.dice.choice([1, 2, 5])
        self.queued += await claim_for_dispatch(self.conn, session=self.far.session, queues=["default"], free=free)

    async def begin_remote(self) -> None:
        """An agent begins, unless somebody asked it to stop; from then on it is a runner with one slot."""
        if not self.queued:
            return
        row = self.dice.choice(self.queued)
        if await begin(self.conn, session=row.session, epoch=row.epoch):
            self.queued.remove(row)
            self.held.append((Runner(self.conn, row.session), as_claim(row)))

    async def end_remote(self) -> None:
        """Nothing of it is left over there, and it never began."""
        if not self.queued:
            return
        row = self.dice.choice(self.queued)
        if not await self._end_queued(row):
            raise Violation(f"seed {self.seed}, step {len(self.trace)}: the end of {row[:5]} was refused")
        self.queued.remove(row)
        self.queued_past.append(row)

    async def end_remote_stale(self) -> None:
        if not self.queued_past:
            return
        row, before = self.dice.choice(self.queued_past[-50:]), await self._snapshot()
        if await self._end_queued(row) or await self._snapshot() != before:
            raise Violation(f"seed {self.seed}, step {len(self.trace)}: V3 a stale end of {row[:5]} changed something")

    async def tidy_remote(self) -> None:
        """All is over there that is over; and now and then the runner is another one, which looks after what the first did."""
        rows = await runners.list_of(self.conn, owner=self.far.session)
        gone = await delete_dispatches(self.conn, [row.session for row in rows])
        if gone != sum(row.state is None for row in rows):
            raise Violation(f"seed {self.seed}, step {len(self.trace)}: {gone} of {rows} were taken off the list")
        if self.dice.random() < 0.3:
            await mark_runner_dead(self.conn, session=self.far.session, reason="agent_lost: test", infra_retries=3)
            self.far = await Runner.join(self.conn, executor="far", slots=6)
            await adopt_dispatches(self.conn, session=self.far.session, silent_seconds=30, most=100)

    async def _end_queued(self, row: QueuedRow) -> bool:
        kind, key = self.dice.choice(list(DispatchResult)), TaskKey(row.run_id, row.idx, row.map_index)
        end = NotStarted(key=key, epoch=row.epoch, session=row.session, kind=kind, reason="test")
        return bool((await end_queued(self.conn, [end], infra_retries=3)).moved_sessions)

    async def finish(self) -> None:
        if not self.held:
            return
        runner = self.dice.choice(self.held)[0]
        mine = [pair for pair in self.held if pair[0] is runner]
        is_agent = runner not in self.runners
        ending = self.dice.sample(mine, self.dice.randint(1, len(mine)))
        ends = [self._end(claim) for _, claim in ending]
        claims, refused = await runner.step(ends, free=0 if is_agent else self.dice.choice([0, 1, 3]))
        if refused:
            raise Violation(f"seed {self.seed}: the owner's report was refused: {refused}")
        self.past += ending
        self.held = [pair for pair in self.held if pair not in ending] + [(runner, claim) for claim in claims]

    async def enqueue(self) -> None:
        """An application asks for a run: now or later, of an unknown DAG, with a key, unique for a while."""
        dice = self.dice
        later = self.now + timedelta(seconds=dice.choice([-5, 8, 20])) if dice.random() < 0.4 else None
        key, unique_for = (
            dice.choice([None, f"q{dice.randint(1, 9)}"]),
            dice.choice([None, None, timedelta(seconds=20)]),
        )
        given = [dice.choice([*DAGS, "none"]), key, later, unique_for]
        await self.conn.execute("select evertick.enqueue(%s, '{}', %s, %s, %s)", given)

    async def take_requests(self) -> None:
        leader, limit = {"shard": 0, "epoch": self.epochs[0][-1]}, self.dice.choice([1, 2, 100])
        await route_events(self.conn, **leader, limit=limit)
        await take_requests(self.conn, **leader, limit=limit)
        await start_delayed_runs(self.conn, **leader, limit=limit)

    async def commit(self) -> None:
        """A task ends in its own transaction; the report of its process follows, and moves nothing."""
        if not self.held:
            return
        runner, claim = self.dice.choice(self.held)
        args = [runner.session, claim.run_id, claim.idx, claim.map_index, claim.epoch]
        try:
            await self.conn.execute("select commit_attempt(%s, %s, %s, %s, %s, '7')", args)
        except DatabaseError as error:
            if error.sqlstate != TAKEN_AWAY:
                raise
            return  # it is asked to stop
        # Its report brings only its last lines.
        await runner.step([self._end(claim)])
        self.held.remove((runner, claim))
        self.past.append((runner, claim))

    async def finish_again(self) -> None:
        """A report whose reply was lost is sent again: nothing may change."""
        await self._stale(self.past, same_session=True)

    async def finish_stale(self) -> None:
        """Any token ever issued, by any session, that is not the current one."""
        await self._stale(self.past, same_session=False)

    async def extend(self) -> None:
        runner = self.dice.choice(self.runners)
        mine = [(key_of(claim), claim.epoch) for owner, claim in self.held if owner is runner]
        reply = await extend(self.conn, session=runner.session, held=mine)
        if reply.lost or reply.unknown or reply.is_gone:
            raise Violation(f"seed {self.seed}: a live runner lost {reply.lost} or found {reply.unknown}")

    async def kill_runner(self) -> None:
        runner = self.dice.choice(self.runners)
        await mark_runner_dead(self.conn, session=runner.session, reason="agent_lost: test", infra_retries=3)
        self.past_triggers += [ref for owner, ref in self.triggers if owner is runner]
        self.triggers = [pair for pair in self.triggers if pair[0] is not runner]
        self.past += [pair for pair in self.held if pair[0] is runner]
        self.held = [pair for pair in self.held if pair[0] is not runner]
        self.runners.remove(runner)
        self.runners.append(await Runner.join(self.conn))

    async def run_triggers(self) -> None:
        """Some triggers end or are given back, and others are leased. What is refused or lost was ended by somebody else."""
        runner = self.dice.choice(self.runners)
        held = [ref for owner, ref in self.triggers if owner is runner]
        query = "select run_id, idx, map_index, epoch from task_trigger where session = %s"
        rows = await (await self.conn.execute(query, [runner.session])).fetchall()
        owned = {AttemptRef(TaskKey(*row[:3]), row[3]) for row in rows}
        ending = self.dice.sample(held, self.dice.randint(0, len(held)))
        kept = [ref for ref in held if ref not in ending]
        ends = {ref: self._trigger_end(ref) for ref in ending}
        events = {ref for ref, end in ends.items() if "value" in end}
        free, session = self.dice.choice([0, 1, 5]), runner.session
        done = await exchange_triggers(
            self.conn, session=session, reports=[*ends.values()], held=held, queues=["default"], free=free
        )
        self._expect(events - owned <= set(done.refused) <= ends.keys() - owned, f"refused {done.refused}")
        self._expect({*done.lost, *done.stopped} == set(kept) - owned, f"lost {done.lost} and {done.stopped}")
        self.past_triggers += [ref for ref in held if ref in ending or ref not in owned]
        self.triggers = [pair for pair in self.triggers if pair[0] is not runner]
        self.triggers += [(runner, ref) for ref in [*(owned & set(kept)), *(row.ref for row in done.started)]]

    async def run_triggers_stale(self) -> None:
        """A trigger process that lost its lease, or never had it, reports an event."""
        holders = {ref for _, ref in self.triggers}
        refs = [ref for ref in self.past_triggers[-50:] if ref not in holders]
        if not refs:
            return
        ref, sender, before = self.dice.choice(refs), self.dice.choice(self.runners), await self._snapshot()
        session, ends = sender.session, [self._trigger_end(ref)]
        held = [each for owner, each in self.triggers if owner is sender]
        await exchange_triggers(self.conn, session=session, reports=ends, held=held, queues=["default"], free=0)
        self._expect(await self._snapshot() == before, f"V3 a stale event of {ref} changed something")

    def _trigger_end(self, ref: AttemptRef) -> str:
        is_event = self.dice.random() < 0.7
        kind = OutcomeKind.SUCCESS if is_event else OutcomeKind.LOST
        outcome = Outcome(key=ref.key, epoch=ref.epoch, kind=kind, result_json='{"event": 1}' if is_event else None)
        return encode_end(outcome)

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(f"seed {self.seed}, step {len(self.trace)}: {what}")

    async def cancel(self) -> None:
        await self._on_some_run(lambda run: cancel(self.conn, run_id=run, actor=Actor("sim")))

    async def clear(self) -> None:
        async def some(run: int) -> None:
            rows = await select_tasks(self.conn, run_id=run, with_downstream=False)
            chosen = self.dice.sample(rows, self.dice.randint(1, len(rows)))
            await clear(self.conn, run_id=run, chosen=chosen, actor=Actor("sim"))

        await self._on_some_run(some)

    async def mark(self) -> None:
        async def some(run: int) -> None:
            rows = await select_tasks(self.conn, run_id=run)
            row = self.dice.choice(rows)
            key = TaskKey(run, row.idx, row.map_index)
            await mark(self.conn, key, state=self.dice.choice(["success", "failed", "skipped"]), actor=Actor("sim"))

        await self._on_some_run(some)

    async def pause(self) -> None:
        verb = self.dice.choice([pause, unpause])
        await self._try(lambda: verb(self.conn, dag=self.dice.choice(DAGS), actor=Actor("sim")))

    async def remove(self) -> None:
        await self._try(lambda: delete(self.conn, dag=self.dice.choice(DAGS), actor=Actor("sim")))

    # ------------------------------------------------------------------------------------------------------------

    def _leader(self) -> tuple[int, int]:
        """One of the shards that are led, and its leader's epoch."""
        shard = self.dice.choice([each for each in self.epochs if each not in self.closed])
        return shard, self.epochs[shard][-1]

    async def _take_over(self, shard: int) -> None:
        await self.conn.execute("update shard set lease_until = null where shard = %s", [shard])
        owner = f"leader-{len(self.epochs[shard])}"
        epoch = await acquire_shard(self.conn, shard=shard, owner=owner, seconds=1e6)
        assert epoch is not None
        self.epochs[shard].append(epoch)

    async def _stale(self, tokens: list[tuple[Runner, ExchangeRow]], *, same_session: bool) -> None:
        if not tokens:
            return
        owner, claim = self.dice.choice(tokens[-50:])
        sender = owner if same_session else self.dice.choice(self.runners)
        if not same_session and any(
            c.run_id == claim.run_id and c.idx == claim.idx and c.epoch == claim.epoch and r is sender
            for r, c in self.held
        ):
            return
        before = await self._snapshot()
        await sender.step([self._end(claim)])
        if await self._snapshot() != before:
            raise Violation(
                f"seed {self.seed}, step {len(self.trace)}: V3 a stale report of {claim[:5]} changed something"
            )

    async def _on_some_run(self, verb: Callable[[int], Awaitable[object]]) -> None:
        cursor = await self.conn.execute("select coalesce(max(run_id), 0) from run")
        row = await cursor.fetchone()
        newest = int(row[0]) if row else 0
        if newest:
            run = max(1, newest - self.dice.randint(0, 8))
            await self._try(lambda: verb(run))

    async def _try(self, verb: Callable[[], Awaitable[object]]) -> None:
        """People get clear refusals; that is no violation."""
        try:
            await verb()
        except (UserError, AssertionError) as error:
            if isinstance(error, Violation):
                raise

    async def _snapshot(self) -> list[tuple[str, str]]:
        tables = (
            "task",
            "run_status",
            "lease",
            "dispatch",
            "ready_task",
            "task_timer",
            "retry_queue",
            "retry_slot",
            "result",
            "attempt",
            "schedule_state",
            "run",
            "backfill",
            "backfill_run",
            "deferral",
            "task_trigger",
            "dag",
            "log_chunk",
            "gate",
            "gate_holder",
            "gate_waiter",
            "gate_queue",
            "gate_order",
            "rate_slot",
            "inbox",
            "dead_letter",
            "delayed_run",
            "event_arrival",
            "event_window",
        )
        query = " union all ".join(
            f"select '{t}', md5(coalesce(string_agg(x::text, ',' order by x::text), '')) from {t} x" for t in tables
        )
        cursor = await self.conn.execute(query)  # type: ignore[arg-type]
        return sorted(await cursor.fetchall())

    def _end(self, claim: ExchangeRow) -> tuple[ExchangeRow, str, dict[str, object]]:
        """Some attempts defer to a trigger, others are polled."""
        kind, fields = self._outcome(), self._fields()
        if kind == "deferred" and self.dice.random() < 0.6:
            limit = self.dice.choice([None, 8])
            fields["result"] = {"trigger": {"classpath": "m.T", "kwargs": {}, "timeout": limit}}
        return claim, kind, fields

    def _outcome(self) -> str:
        return self.dice.choices(
            ["success", "failed", "skipped", "timed_out", "killed", "given_back", "deferred"], [60, 15, 8, 5, 5, 7, 6]
        )[0]

    def _fields(self) -> dict[str, object]:
        # A deferred one may ask people, and waits for their answer.
        asks = {"poll_at": "infinity", "request": {"title": "?", "options": ["Approve", "Reject"]}}
        result = self.dice.choice([7, [], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5], asks])
        # A branch skips what it did not choose, wherever that stands; most tasks are none.
        skip = {"skip": self.dice.sample(range(9), 2)} if self.dice.random() < 0.05 else {}
        return {**skip, "result": result, "retry_in": self.dice.choice([0, 0, 4]), "log": "1 INFO x\n"}


ACTIONS: dict[str, tuple[Callable[[World], Awaitable[None]], int]] = {
    "publish": (World.publish, 2),
    "trigger": (World.trigger, 10),
    "advance": (World.advance, 8),
    "fire": (World.fire, 8),
    "fire_as_old_leader": (World.fire_as_old_leader, 1),
    "backfill": (World.backfill, 3),
    "move_on": (World.move_on, 8),
    "take_over": (World.take_over, 1),
    "set_shards": (World.set_shards, 1),
    "move_out": (World.move_out, 4),
    "promote": (World.promote, 8),
    "prune": (World.prune, 1),
    "reconcile": (World.reconcile, 3),
    "claim": (World.claim, 20),
    "claim_matching": (World.claim_matching, 10),
    "finish": (World.finish, 40),
    "commit": (World.commit, 3),
    "enqueue": (World.enqueue, 4),
    "take_requests": (World.take_requests, 6),
    "claim_remote": (World.claim_remote, 6),
    "begin_remote": (World.begin_remote, 8),
    "end_remote": (World.end_remote, 4),
    "end_remote_stale": (World.end_remote_stale, 1),
    "tidy_remote": (World.tidy_remote, 4),
    "finish_again": (World.finish_again, 3),
    "finish_stale": (World.finish_stale, 4),
    "extend": (World.extend, 4),
    "kill_runner": (World.kill_runner, 2),
    "run_triggers": (World.run_triggers, 10),
    "run_triggers_stale": (World.run_triggers_stale, 3),
    "cancel": (World.cancel, 2),
    "clear": (World.clear, 5),
    "mark": (World.mark, 4),
    "pause": (World.pause, 3),
    "remove": (World.remove, 1),
    "resize_pool": (World.resize_pool, 4),
    "tend_gates": (World.tend_gates, 3),
    "wake": (World.wake, 6),
    "tell": (World.tell, 2),
}


async def run_episode(url: str, seed: int, steps: int = STEPS_PER_EPISODE) -> Counter[str]:
    """One episode on the fresh database at `url`."""
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        await conn.execute("set client_min_messages = warning")
        world = World(conn, seed)
        await world.begin()
        for _ in range(steps):
            try:
                await world.step()
            except RaiseException as error:
                raise Violation(f"seed {seed}, step {len(world.trace)} ({world.trace[-1]}): {error}") from error
        return world.did


def _episode(cluster: Cluster, template: str, seed: int) -> Counter[str]:
    name = cluster.create(template)
    try:
        return asyncio.run(run_episode(cluster.database_url(name), seed))
    finally:
        cluster.drop(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None, help="repeat this one episode")
    options = parser.parse_args()
    first = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    episodes = 1 if options.seed is not None else max(1, options.steps // STEPS_PER_EPISODE)
    total: Counter[str] = Counter()
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        own_cluster(Path(folder) / "postgres") as cluster,
        ProcessPoolExecutor() as workers,
    ):
        template = cluster.template()
        seeds = range(first, first + episodes)
        for seed, did in zip(seeds, workers.map(partial(_episode, cluster, template), seeds), strict=True):
            total += did
            rate = sum(total.values()) / (time.monotonic() - began)
            print(f"\r{sum(total.values()):,} steps, seed {seed}, {rate:.0f}/s", end="", file=sys.stderr)
    print(f"\n{sum(total.values()):,} steps from seed {first}, no violation.")
    for name, count in total.most_common():
        print(f"  {name:<20}{count:>10,}")


if __name__ == "__main__":
    main()
