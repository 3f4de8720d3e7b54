"""N24 to N26, N30 and N34: very much at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta

from evertick.db.connect import Purpose, connect
from evertick.db.queries import shards
from evertick.domain.dags.spec import DagSpec, NamedSchedule
from evertick.domain.schedules.misfire import MisfirePolicy
from evertick.domain.schedules.spec import parse_schedule
from tests.chaos.claimers import Claimer
from tests.chaos.cluster import Shape
from tests.chaos.dags import publish_specs
from tests.chaos.faults import planning
from tests.chaos.record import Fault
from tests.chaos.scenario import Scenario
from tests.chaos.stage import Stage
from tests.waiting import elapse, eventually

SCHEDULES_PER_DAG = 500
SPIKE_SECONDS = 10.0
DOWN = timedelta(hours=2)


async def spike(stage: Stage) -> None:
    """N24: so many schedules are due in one second."""
    count = int(stage.scaled(10_000, 1_500))
    # That is what is promised for so many at once; their bodies then wait for a slot.
    stage.limits |= {"fire_tolerance_seconds": SPIKE_SECONDS, "start_tolerance_seconds": 300.0, "run_seconds": 300.0}
    await stage.publish()
    async with await connect(stage.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
        due = await shards.read_clock(conn) + timedelta(seconds=4 + count / 1000)
        await publish_specs(conn, stage.cluster.ground.work, list(_once(stage, count, due)))
    async with stage.nemesis.fault(Fault.SPIKE, "all", part="schedules", schedules=count, disturbs=()):

        async def all_fired() -> bool:
            return bool(
                await stage.cluster.watch.value("select count(*) = %s from run where fire_at is not null", count)
            )

        await eventually(all_fired, 60, pause_seconds=0.05)
    lag = await stage.cluster.watch.value("select max(created_at - fire_at) from run where fire_at is not null")
    stage.note(f"{count} runs created within {lag}")
    stage.expect(lag <= timedelta(seconds=SPIKE_SECONDS), f"the last run was created {lag} after its instant")
    await stage.runs_over(within_seconds=stage.scaled(300, 90))


def _once(stage: Stage, count: int, due: datetime) -> list[DagSpec]:
    """DAGs with one-time schedules, all within one second."""
    known = stage.cluster.ground.work.specs
    specs = []
    for begin in range(0, count, SCHEDULES_PER_DAG):
        schedules = []
        for number in range(begin, min(begin + SCHEDULES_PER_DAG, count)):
            at = due + timedelta(milliseconds=stage.dice.randrange(1000))
            name = f"once-{number}"
            schedules.append(NamedSchedule(name=name, spec=parse_schedule(at), params={"schedule": name}))
        spec = known[f"spike_{begin // SCHEDULES_PER_DAG}"]
        specs.append(replace(spec, schedules=tuple(schedules), misfire=MisfirePolicy.ALL))
    return specs


async def contention(stage: Stage) -> None:
    """N25: many claimers, one line."""
    claimers, tasks = int(stage.scaled(50, 12)), int(stage.scaled(20_000, 1_500))
    spec = stage.cluster.ground.work.specs["storm"]
    wide = replace(spec, name="wide", tasks=tuple(replace(task, queue="crowd") for task in spec.tasks))
    await stage.publish()
    async with await connect(stage.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
        await publish_specs(conn, stage.cluster.ground.work, [wide])
    for number in range(tasks // len(wide.tasks)):
        await stage.trigger("wide", f"wide-{number}")
    crowd = [
        Claimer(cluster=stage.cluster, name=f"claimer-{number}", queue="crowd", spec=wide) for number in range(claimers)
    ]
    async with stage.nemesis.fault(Fault.SPIKE, "all", part="claimers", claimers=claimers, disturbs=()):
        await asyncio.gather(*(claimer.work() for claimer in crowd))
    claimed = Counter(claim for claimer in crowd for claim in claimer.claimed)
    errors = [error for claimer in crowd for error in claimer.errors]
    stage.note(f"{claimed.total()} claims by {sum(1 for c in crowd if c.claimed)} of {claimers} claimers")
    stage.expect(not errors, f"claimers were told: {errors[:3]}")
    stage.expect(max(claimed.values()) == 1, "a claim was given out twice")
    stage.expect(len(claimed) == tasks // len(wide.tasks) * len(wide.tasks), f"only {len(claimed)} tasks were claimed")


async def retry_storm(stage: Stage) -> None:
    """N26: thousands fail at once; their retries are spread, and new work does not wait for them."""
    if stage.is_full:
        # The first attempts of all of them stand in line at once.
        stage.limits |= {"start_tolerance_seconds": 90.0, "run_seconds": 600.0}
    await stage.begin_load(seconds=stage.scaled(60, 12), quick=6)
    await planning.retry_storm(stage.nemesis, runs=int(stage.scaled(200, 12)))
    waits = await stage.cluster.watch.must(
        "select extract(epoch from b.started_at - a.finished_at)::float8 from all_attempts a join all_attempts b"
        " on b.run_id = a.run_id and b.idx = a.idx and b.map_index = a.map_index and b.epoch = a.epoch + 1"
        " join all_tasks t on t.run_id = a.run_id and t.idx = a.idx where t.dag = 'storm'"
    )
    ordered = sorted(wait for (wait,) in waits)
    stage.expect(len(ordered) > 20, f"only {len(ordered)} retries")
    if ordered:
        spread = ordered[int(len(ordered) * 0.9)] - ordered[int(len(ordered) * 0.1)]
        stage.note(f"{len(ordered)} retries, the middle four fifths spread over {spread:.2f} s of 1.5 s")
        stage.expect(spread >= 0.6, f"four fifths of the retries came within {spread:.2f} s")


async def after_a_long_absence(stage: Stage) -> None:
    """N30: nobody planned for two hours; each policy's set, and nothing else, is made up for."""
    if stage.is_full:
        stage.limits |= {"start_tolerance_seconds": 1200.0, "run_seconds": 1200.0}
    count = int(stage.scaled(1_000, 30))
    for scheduler in stage.cluster.of_kind("scheduler"):
        await scheduler.stop()
    await stage.publish()
    known = stage.cluster.ground.work.specs
    async with await connect(stage.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
        now = await shards.read_clock(conn)
        begin, end = now - DOWN, now + timedelta(seconds=5)
        for policy in MisfirePolicy:
            schedules = tuple(
                NamedSchedule(
                    name=f"minute-{policy}-{number}",
                    spec=parse_schedule("* * * * *", start_at=begin, end_at=end),
                    params={"schedule": f"minute-{policy}-{number}"},
                )
                for number in range(count // 3)
            )
            late = replace(known[f"late_{policy}"], schedules=schedules, misfire=policy)
            await publish_specs(conn, stage.cluster.ground.work, [late])
        # As if it had been published two hours ago, and nobody had planned since.
        await conn.execute("select set_config('session_replication_role', 'replica', false)")
        await conn.execute(
            "update schedule_state set next_due = date_trunc('minute', %s::timestamptz) + interval '1 minute'", [begin]
        )
        await conn.execute("update chaos_audit.schedule_version set at = %s", [begin])
        await conn.execute(
            "update chaos_audit.schedule_move set at = %s, new_due = date_trunc('minute', %s::timestamptz) + interval '1 minute'",
            [begin, begin],
        )
    async with stage.nemesis.fault(Fault.STOP, "all", part="two hours", schedules=count):
        for scheduler in stage.cluster.of_kind("scheduler"):
            scheduler.start()

        async def is_caught_up() -> bool:
            behind = "select count(*) = 0 from schedule_state where next_due < clock() - interval '1 second'"
            return bool(await stage.cluster.watch.value(behind))

        await eventually(is_caught_up, stage.scaled(600, 60), pause_seconds=0.1)
    found = await stage.cluster.watch.must(
        "select c.misfire, count(r.run_id) from schedule c left join run r using (schedule_id) group by 1 order by 1"
    )
    stage.note(f"runs by policy: {dict(found)}")
    await stage.runs_over(within_seconds=stage.scaled(900, 90))


async def flood(stage: Stage) -> None:
    """N34: tasks that log as fast as they can; schedules do not feel it."""
    await stage.begin_load(seconds=stage.scaled(60, 12), quick=6)
    async with stage.nemesis.fault(Fault.FLOOD, "runner-1", part="log"):
        runs = [await stage.trigger("flood", f"flood-{number}") for number in range(int(stage.scaled(8, 2)))]
        await stage.runs_over(runs, within_seconds=90)
    await elapse(0.5)


SCENARIOS = (
    Scenario(
        name="N24",
        title="thousands of schedules in one second",
        play=spike,
        shape=lambda is_full: Shape(schedulers=2, runners=2, slots=8),
        required=("J1", "J2", "J13"),
    ),
    Scenario(
        name="N25",
        title="many claimers on one line",
        play=contention,
        shape=lambda is_full: Shape(schedulers=1, runners=1),
        required=("J4", "J5"),
        without=("J12",),
    ),
    Scenario(name="N26", title="a retry storm", play=retry_storm, required=("J11", "J13")),
    Scenario(
        name="N30",
        title="nobody planned for two hours, each missed-run policy",
        play=after_a_long_absence,
        shape=lambda is_full: Shape(schedulers=2, runners=2, slots=8),
        required=("J2",),
        without=("J3",),
    ),
    Scenario(name="N34", title="a flood of log lines", play=flood, required=("J3", "J13")),
)
