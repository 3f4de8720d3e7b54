"""Runners that serve only tasks of some names: they claim nothing else, find their own behind others, and share one line."""

from __future__ import annotations

import random

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import gates, runners
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.gates import EXCLUSIVE, GateKind, GateSpec
from evertick.domain.explain import describe
from evertick.domain.routing import matches, read_pattern
from evertick.engine import finish_and_claim
from evertick.engine.finish_and_claim import (
    FULL_SCAN_SECONDS,
    LAG_SECONDS,
    Exchange,
    PatternClaims,
    claim_selected,
    exchange_matching,
)
from evertick.engine.gates import admit_gated_tasks, release_admissions
from evertick.engine.runners import drain
from evertick.engine.shards import poll_work
from tests.engine.world import Runner, end, later, lead, make_dag, names_of, put, set_clock, start, states, value

pytestmark = pytest.mark.requirement("K7")


class Special:
    """A runner that serves only what its patterns name."""

    def __init__(
        self, runner: Runner, *patterns: str, queues: tuple[str, ...] = ("default",), aging: float = 0
    ) -> None:
        self.runner = runner
        self.matching = PatternClaims([read_pattern(text) for text in patterns], queues, aging_seconds=aging)

    async def step(self, free: int = 100, ends: tuple[ExchangeRow, ...] = ()) -> Exchange:
        reports = [end(claim, "success") for claim in ends]
        session = self.runner.session
        return await exchange_matching(
            self.runner.conn, self.matching, session=session, reports=reports, free=free, infra_retries=3
        )

    async def claim(self, free: int = 100) -> list[str]:
        return await names_of(self.runner.conn, (await self.step(free)).claims)


async def put_two(conn: AsyncConnection) -> None:
    await put(conn, make_dag("ml", {"train": [], "g.predict": []}))
    await put(conn, make_dag("etl", {"extract": [], "load": ["extract"]}))


async def test_it_claims_only_what_it_matches_and_leaves_the_rest_in_line(conn: AsyncConnection) -> None:
    await put_two(conn)
    await start(conn, "etl")
    await start(conn, "ml")
    special, general = Special(await Runner.join(conn), "ml::*"), await Runner.join(conn)
    assert await special.claim() == ["train"]
    assert await special.claim() == []
    assert sorted(await names_of(conn, await general.claim())) == ["extract", "g.predict"]


async def test_several_patterns_are_one_or_the_other_and_queues_still_count(conn: AsyncConnection) -> None:
    await put_two(conn)
    await put(conn, make_dag("far", {"load": []}, task_queue="elsewhere"))
    for dag in ("etl", "ml", "far"):
        await start(conn, dag)
    special = Special(await Runner.join(conn), "ml::**", "load")
    assert sorted(await special.claim()) == ["g.predict", "train"]
    both = Special(await Runner.join(conn), "load", queues=("default", "elsewhere"))
    assert await both.claim() == ["load"]
    assert await value(conn, "select count(*) from ready_task") == 1, "extract is nobody's"


async def test_what_ended_is_reported_and_its_successor_is_for_whoever_matches_it(conn: AsyncConnection) -> None:
    await put_two(conn)
    await start(conn, "etl")
    first, second = Special(await Runner.join(conn), "extract"), Special(await Runner.join(conn), "etl::load")
    assert await second.claim() == []
    (extract,) = (await first.step()).claims
    done = await first.step(ends=(extract,))
    assert (done.claims, done.has_more) == ([], True), "others are told"
    assert await second.claim() == ["load"]


async def test_it_keeps_priority_age_and_its_slots(conn: AsyncConnection) -> None:
    for name, priority in (("low", 1), ("high", 8)):
        await put(conn, make_dag(name, {name: []}, task_priority=priority))
        await put(conn, make_dag(f"other_{name}", {"x": []}, task_priority=priority))
    runs = []
    for _ in range(3):
        for dag in ("other_low", "low", "other_high", "high"):
            runs.append(await start(conn, dag))
    special = Special(await Runner.join(conn), "low", "high")
    taken = [(await special.step(2)).claims for _ in range(3)]
    assert [len(claims) for claims in taken] == [2, 2, 2]
    assert [claim.run_id for claims in taken for claim in claims] == [*runs[3::4], *runs[1::4]]


async def test_those_that_waited_too_long_go_first_here_too(conn: AsyncConnection) -> None:
    for name, priority in (("low", 0), ("high", 9)):
        await put(conn, make_dag(name, {name: []}, task_priority=priority))
    await set_clock(conn, later(0))
    await start(conn, "low")
    await set_clock(conn, later(91))
    await start(conn, "high")
    runner = await Runner.join(conn)
    assert await Special(runner, "**", aging=11).claim(1) == ["high"]
    await start(conn, "high")
    assert await Special(runner, "**", aging=10).claim(1) == ["low"]


async def test_it_finds_its_own_behind_a_long_line_of_others_and_does_not_look_at_those_again(
    conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finish_and_claim, "WINDOW", 5)
    await put_two(conn)
    await set_clock(conn, later(0))
    for _ in range(23):
        await start(conn, "etl")
    await start(conn, "ml")
    await set_clock(conn, later(LAG_SECONDS + 1))
    special, looks = Special(await Runner.join(conn), "train"), 0
    while not (done := await special.step()).claims:
        looks += 1
        assert done.is_walking and looks < 10
    assert looks == 23 // 5
    while (await special.step()).is_walking:
        pass
    begin = special.matching.begin(0.0)
    seen = await value(conn, "select count(*) from ready_task where queue = 'default' and seq >= %s", begin[4])
    assert seen == 0, "the others are behind it"
    # What appeared there late, or was let go of, is found by the next look at everything.
    assert special.matching.begin(FULL_SCAN_SECONDS * 1e6)[4] == 0


async def test_what_is_young_is_looked_at_again_because_one_before_it_may_not_be_committed_yet(
    conn: AsyncConnection,
) -> None:
    await put_two(conn)
    await set_clock(conn, later(0))
    await start(conn, "etl")
    special = Special(await Runner.join(conn), "train")
    await special.claim()
    assert special.matching.begin(0.0) == [0] * 10
    await set_clock(conn, later(LAG_SECONDS))
    await special.claim()
    assert special.matching.begin(0.0)[4] > 0


async def test_one_that_waits_for_a_slot_is_not_passed_over(conn: AsyncConnection) -> None:
    await put(conn, make_dag("ml", {"train": []}))
    await set_clock(conn, later(0))
    for _ in range(3):
        await start(conn, "ml")
    await set_clock(conn, later(LAG_SECONDS + 1))
    special = Special(await Runner.join(conn), "train")
    assert [len(await special.claim(1)) for _ in range(4)] == [1, 1, 1, 0]


async def test_of_two_that_want_the_same_row_one_gets_it_and_a_runner_out_of_service_none(
    conn: AsyncConnection,
) -> None:
    await put_two(conn)
    await start(conn, "ml")
    cursor = await conn.execute("select rank, seq from ready_task order by seq")
    places, seqs = map(list, zip(*await cursor.fetchall(), strict=True))
    first, second, third = [await Runner.join(conn) for _ in range(3)]
    wanted = {"queues": ["default"], "places": places, "seqs": seqs}
    await drain(conn, sessions=[second.session], actor=Actor("test"))
    assert await claim_selected(conn, session=second.session, **wanted) == []
    await runners.leave(conn, third.session)
    assert await claim_selected(conn, session=third.session, **wanted) == []
    claims = await claim_selected(conn, session=first.session, **wanted)
    assert [(claim.epoch, claim.attempt) for claim in claims] == [(1, 1), (1, 1)]
    assert await claim_selected(conn, session=first.session, **wanted) == []
    assert await value(conn, "select count(*) from lease where session = %s", first.session) == 2
    await first.step([(claim, "success", {}) for claim in claims])


async def test_a_row_of_a_task_that_is_no_longer_available_is_not_claimed(conn: AsyncConnection) -> None:
    await put_two(conn)
    run_id = await start(conn, "ml")
    await conn.execute("update task set state = 'pending' where run_id = %s and idx = 0", [run_id])
    cursor = await conn.execute("select rank, seq from ready_task order by seq")
    places, seqs = map(list, zip(*await cursor.fetchall(), strict=True))
    runner = await Runner.join(conn)
    claims = await claim_selected(conn, session=runner.session, queues=["default"], places=places, seqs=seqs)
    assert [claim.idx for claim in claims] == [1]


async def test_a_row_that_somebody_just_takes_is_not_waited_for(conn: AsyncConnection, database: str) -> None:
    await put_two(conn)
    await start(conn, "ml")
    cursor = await conn.execute("select rank, seq from ready_task order by seq")
    places, seqs = map(list, zip(*await cursor.fetchall(), strict=True))
    runner = await Runner.join(conn)
    async with await AsyncConnection.connect(database, autocommit=True) as other, other.transaction():
        await other.execute("select 1 from evertick.ready_task where seq = %s for update", [seqs[0]])
        claims = await claim_selected(conn, session=runner.session, queues=["default"], places=places, seqs=seqs)
    assert [claim.seq for claim in claims] == [seqs[1]]


async def test_patterns_mean_the_same_to_the_database(conn: AsyncConnection) -> None:
    """The twin in SQL, by which `why` and un-admission know who takes what: random patterns on random names."""
    dice = random.Random(7)
    words = ["a", "ab", "b.c", "x_y", "b-1", "abc"]

    def segment() -> str:
        return dice.choice([*words, "*", "a*", "*b", "a*c", "*.c", "x*y"])

    for _ in range(400):
        text = "::".join(dice.choice([segment(), segment(), "**"]) for _ in range(dice.randint(1, 4)))
        text = text.replace("**::**::**::**", "**").replace("**::**::**", "**").replace("**::**", "**")
        name = [dice.choice(words) for _ in range(dice.randint(2, 4))]
        asked = "select %s ~ pattern_regex(%s)"
        said = await value(conn, asked, "::".join(name) + "::", text)
        assert said == matches(read_pattern(text), name), (text, name)


async def test_a_task_that_all_runners_pass_by_is_explained_and_gives_back_what_it_holds(conn: AsyncConnection) -> None:
    await set_clock(conn, later(0))
    leader = await lead(conn)
    key = GateSpec(kind=GateKind.MUTEX, name="k", weight=EXCLUSIVE)
    await put(conn, make_dag("etl", {"g.load": []}, task_gates=(key,), task_priority=7))
    await put(conn, make_dag("ml", {"train": []}, task_gates=(key,)))
    await Runner.join(conn, match=("ml::**", "other"))
    held, waiting = await start(conn, "etl"), await start(conn, "ml")
    (reason,) = await gates.explain_task(conn, TaskKey(held, 0, -1))
    assert (reason.kind, reason.detail["runners"]) == ("no_runner", 0)
    assert (
        "no live runner of queue default takes this task: the runners that serve it match only ml::**, other"
        in describe(reason)
    )
    found = {(each.kind, each.name): each.waiting for each in await gates.blocked(conn, limit=10)}
    assert found == {("gate", "mutex k"): 1, ("no_runner", "default"): 1}
    await set_clock(conn, later(61))
    assert await release_admissions(conn, shard=0, epoch=leader, grace=60, limit=10) == 1
    assert ((await states(conn, held))["g.load"], (await states(conn, waiting))["train"]) == ("pending", "available")
    (reason,) = await gates.explain_task(conn, TaskKey(held, 0, -1))
    assert (reason.kind, reason.detail["others"]) == ("no_runner", ["ml::**", "other"])
    (reason,) = await gates.explain_task(conn, TaskKey(waiting, 0, -1))
    assert (reason.kind, reason.detail["runners"]) == ("in_line", 1)
    assert (await admit_gated_tasks(conn, shard=0, epoch=leader, limit=10)).admitted == 0
    assert not (await poll_work(conn, shard=0, epoch=leader, lost_after=90)).has_gates
    assert await release_admissions(conn, shard=0, epoch=leader, grace=0, limit=10) == 0, "the other one has its runner"
    # One that does take it brings it back.
    await Runner.join(conn, match=("load",))
    assert (await poll_work(conn, shard=0, epoch=leader, lost_after=90)).has_gates
    await admit_gated_tasks(conn, shard=0, epoch=leader, limit=10)
    (reason,) = await gates.explain_task(conn, TaskKey(held, 0, -1))
    assert reason.kind == "gate", "it comes again, behind the one that has the key now"
