"""Generated DAGs through the real engine and through `domain/dags/run_model.py`: after every end of a task both agree.

    python -m tests.engine.shapes --shapes 5000 [--seed N]

Trigger rules, mapping of tasks and of groups, branches, setups and teardowns, waiting for an answer, skips, failures, retries of
tasks and of groups, and clears, in all combinations that the dice give.
A failing seed repeats exactly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import runs, tasks
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.access import Actor
from evertick.domain.dags.graph import check_groups, check_mapped_groups, skipped_by
from evertick.domain.dags.mapping import HASTY_RULES, MapHow, MappedList, Mapping
from evertick.domain.dags.run_model import READY, WAITING, RunModel, TaskId
from evertick.domain.dags.spec import BranchChoice, DagSpec, GroupSpec, MappedGroup, TaskKind, to_json
from evertick.domain.dags.waits import TimeoutAction, WaitKind, WaitSpec
from evertick.domain.retry import RetryPolicy
from evertick.domain.states import TriggerRule
from evertick.engine.tasks import clear
from evertick.engine.waits import Decision, decide_approval
from tests.databases import Cluster, own_cluster
from tests.engine import invariants
from tests.engine.world import Runner, make_dag, put, start, value

LISTS: tuple[object, ...] = (None, 7, [], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5])


class Differs(AssertionError):
    """The engine and the model came to different ends."""


def draw(dice: random.Random, name: str) -> DagSpec:
    """A DAG of two to nine tasks, some of them in groups with retries."""
    count = dice.randint(2, 9)
    marks = sorted(dice.sample(range(count + 1), 2)) if dice.random() < 0.5 else [count, count]
    # Neighbours by place: a group of such is never waited for by what it waits for.
    group_of = {
        place: "g" if marks[0] <= place < marks[1] else "h" if marks[1] <= place < marks[1] + 2 else None
        for place in range(count)
    }
    groups = (
        tuple(GroupSpec(name=each, retries=dice.choice([1, 2])) for each in sorted({*group_of.values()} - {None}))
        if marks[0] < count
        else ()
    )
    mapped: list[int] = []
    if not groups and dice.random() < 0.6:
        mapped = list(range(*sorted(dice.sample(range(count + 1), 2))))
        group_of = {place: "m" if place in mapped else None for place in range(count)}
    is_grouped = bool(groups or mapped)
    names = [f"{group_of[place]}.t{place}" if is_grouped and group_of[place] else f"t{place}" for place in range(count)]
    shape = {task: dice.sample(names[:i], min(i, dice.choice([0, 1, 1, 2, 2, 3]))) for i, task in enumerate(names)}
    options = {task: _options(dice, shape[task]) for task in names}
    for place, task in enumerate(names if is_grouped else ()):
        options[task]["group"] = group_of[place]
    mapped_groups = _mapped_group(dice, names, [names[place] for place in mapped], shape, options)
    drawn = make_dag(name, shape, per_task=options, groups=groups, mapped_groups=mapped_groups)
    assert not list(check_mapped_groups(drawn))
    if any(check_groups(drawn)):  # a choice that would reach out of its group
        tasks = tuple(replace(task, choice=None if task.group else task.choice) for task in drawn.tasks)
        drawn = replace(drawn, tasks=tasks)
    assert not list(check_groups(drawn))
    return drawn


def _mapped_group(
    dice: random.Random,
    names: list[str],
    members: list[str],
    shape: dict[str, list[str]],
    options: dict[str, dict[str, object]],
) -> tuple[MappedGroup, ...]:
    """The members as a mapped group, over a list of their own number or over the result of a task before them."""
    if not members:
        return ()
    for task in members:
        for each in ("mapping", "is_setup", "is_teardown", "fails_run", "kind", "wait"):
            options[task].pop(each, None)
    given = MappedList(argument="x", length=dice.choice([0, 1, 2, 3]))
    if (first := names.index(members[0])) and dice.random() < 0.7:
        source = names[dice.randrange(first)]
        given = MappedList(argument="x", task=source)
        for task in members:
            if not {*shape[task]} & {*members, source}:
                shape[task].append(source)
    return (MappedGroup(name="m", mapping=Mapping(lists=(given,), most=4)),)


def _options(dice: random.Random, upstream: list[str]) -> dict[str, object]:
    rule = dice.choice(list(TriggerRule)) if dice.random() < 0.6 else TriggerRule.ALL_SUCCESS
    found: dict[str, object] = {
        "trigger_rule": rule,
        "retry": RetryPolicy(retries=dice.choice([0, 0, 1]), delay_seconds=0),
    }
    match dice.choices(["plain", "mapped", "choice", "setup", "teardown", "waits"], [5, 4, 2, 1, 1, 1])[0]:
        case "waits":
            wait = WaitSpec(kind=WaitKind.APPROVAL, name="Go on?", on_reject=dice.choice(list(TimeoutAction)))
            found |= {"kind": TaskKind.WAIT, "wait": wait, "retry": RetryPolicy()}
        case "mapped":
            lists = [MappedList(argument="x", length=dice.choice([0, 1, 2, 3]))]
            if upstream and rule not in HASTY_RULES and dice.random() < 0.8:
                lists = [MappedList(argument="x", task=upstream[0]), *dice.choice([[], [], lists])]
            how = dice.choice([MapHow.PRODUCT, MapHow.PRODUCT, MapHow.ZIP])
            found["mapping"] = Mapping(lists=tuple(lists), how=how, most=4)
        case "choice":
            found["choice"] = dice.choice(list(BranchChoice))
        case "setup":
            found["is_setup"] = True
        case "teardown":
            found |= {"is_teardown": True, "trigger_rule": TriggerRule.ALL_DONE_SETUP_SUCCESS}
            found["fails_run"] = dice.random() < 0.3
    return found


class Pair:
    """One run, twice."""

    def __init__(self, conn: AsyncConnection, runner: Runner, spec: DagSpec, run: int, dice: random.Random) -> None:
        self.conn, self.runner, self.spec, self.run, self.dice = conn, runner, spec, run, dice
        self.model = RunModel(spec)
        self.held: list[ExchangeRow | TaskId] = []
        self.trace: list[object] = []

    async def play(self) -> None:
        await self._compare(await self.runner.claim(100))
        await self._to_the_end()
        for _ in range(self.dice.choice([0, 1, 2])):
            await self._clear()
            await self._to_the_end()

    async def _to_the_end(self) -> None:
        while self.held:
            claim = self.held.pop(self.dice.randrange(len(self.held)))
            if isinstance(claim, TaskId):
                await self._answer(claim)
                continue
            key = TaskId(claim.idx, claim.map_index)
            given = self.model.items.get(key)
            if given != json.loads(claim.inputs or "{}").get(""):
                raise Differs(f"{key} was given {claim.inputs}, not {given}: {self.trace}")
            kind = self.dice.choices(["success", "failed", "skipped"], [6, 3, 2])[0]
            returned = self._value(key.idx)
            self.trace.append((key, kind, returned))
            fields: dict[str, object] = {}
            if kind == "success":
                fields = {} if returned is None else {"result": returned}
                if skips := skipped_by(self.spec, key.idx, returned):
                    fields["skip"] = skips
            more, refused = await self.runner.step([(claim, kind, fields)], free=100)
            assert refused == []
            self.model.end(key, kind, returned)
            await self._compare(more)

    async def _answer(self, asked: TaskId) -> None:
        """Of a task that waits without a slot: somebody approves or rejects."""
        task = self.spec.tasks[asked.idx]
        assert task.wait is not None
        is_approved = self.dice.random() < 0.6
        self.trace.append((asked, "approved" if is_approved else "rejected"))
        said = Decision(is_approved=is_approved, actor=Actor("test"))
        await decide_approval(self.conn, run_id=self.run, task=task.name, decision=said)
        given = "select value from result where run_id = %s and idx = %s"
        rejected = "failed" if task.wait.on_reject is TimeoutAction.FAIL else "skipped"
        result = await value(self.conn, given, self.run, asked.idx)
        self.model.end(asked, "success" if is_approved else rejected, result)
        await self._compare(await self.runner.claim(100))

    async def _clear(self) -> None:
        rows = await tasks.list_of_run(self.conn, run_id=self.run)
        chosen = self.dice.sample(rows, self.dice.randint(1, len(rows)))
        wanted = {idx: sum(row.idx == idx for row in chosen) for idx in {row.idx for row in chosen}}
        whole = {idx for idx, count in wanted.items() if count == sum(row.idx == idx for row in rows)}
        single = {TaskId(row.idx, row.map_index) for row in chosen if row.idx not in whole}
        self.trace.append(("clear", whole, single))
        await clear(self.conn, run_id=self.run, chosen=chosen, actor=Actor("test"))
        self.model.clear(whole, single)
        await self._compare(await self.runner.claim(100))

    async def _compare(self, more: list[ExchangeRow]) -> None:
        rows = await tasks.list_of_run(self.conn, run_id=self.run)
        found = {TaskId(row.idx, row.map_index): row.state for row in rows if row.state != "waiting"}
        asked = [key for key, state in found.items() if state == "deferred" and key not in self.held]
        self.held += [*more, *asked]
        found = {key: READY if state in ("running", "deferred") else state for key, state in found.items()}
        row = await runs.find(self.conn, self.run)
        assert row is not None
        state = None if row.state == "running" else row.state
        said = {key: state for key, state in self.model.states.items() if state != WAITING}
        if (found, state) != (said, self.model.run_state()):
            raise Differs(
                f"after {self.trace}\nengine {state}: {sorted(found.items())}\n"
                f"model  {self.model.run_state()}: {sorted(said.items())}\n{to_json(self.spec)}"
            )

    def _value(self, idx: int) -> object:
        match self.spec.tasks[idx].choice:
            case BranchChoice.BRANCH:
                after = [self.spec.tasks[down].name for up, down in self.spec.edges if up == idx]
                after = [name for name in after if not self.spec.tasks[int(name.split("t")[-1])].is_teardown]
                return self.dice.choice([None, self.dice.sample(after, self.dice.randint(0, len(after)))])
            case None:
                return self.dice.choice(LISTS)
            case _:
                return self.dice.choice([True, False])


async def play_shapes(url: str, seed: int, count: int) -> int:
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        runner = await Runner.join(conn)
        for number in range(count):
            dice = random.Random(seed * 1_000_003 + number)
            spec = draw(dice, f"shape{number}")
            await put(conn, spec)
            run = await start(conn, spec.name)
            try:
                await Pair(conn, runner, spec, run, dice).play()
            except Differs as error:
                raise Differs(f"seed {seed}, shape {number}: {error}") from None
        await invariants.install(conn)
        if found := await invariants.violations(conn):
            raise Differs(f"seed {seed}: {found[:5]}")
    return count


def _some(cluster: Cluster, template: str, seed: int) -> int:
    name = cluster.create(template)
    try:
        return asyncio.run(play_shapes(cluster.database_url(name), seed, 100))
    finally:
        cluster.drop(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=None, help="repeat the hundred shapes of this one")
    options = parser.parse_args()
    first = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    seeds = range(first, first + (1 if options.seed is not None else max(1, options.shapes // 100)))
    done = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        own_cluster(Path(folder) / "postgres") as cluster,
        ProcessPoolExecutor() as workers,
    ):
        template = cluster.template()
        for seed, count in zip(seeds, workers.map(partial(_some, cluster, template), seeds), strict=True):
            done += count
            print(f"\r{done:,} shapes, seed {seed}", end="", file=sys.stderr)
    print(f"\n{done:,} shapes from seed {first}, and the engine did as the model says.")


if __name__ == "__main__":
    main()
