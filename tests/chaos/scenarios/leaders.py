"""N01 to N05: leaders that die, freeze, are cut off, lose their session, and leaders that are several."""

from __future__ import annotations

from functools import partial

from evertick.db.connect import Purpose, connect
from evertick.db.notify import Channel, notify
from evertick.domain.access import Actor
from evertick.engine.shards import set_shards
from tests.chaos.cluster import Shape
from tests.chaos.faults import database, network, processes
from tests.chaos.record import Fault
from tests.chaos.scenario import Scenario
from tests.chaos.stage import Stage
from tests.chaos.zombie import Zombie
from tests.waiting import elapse, eventually

TAKEOVER_AFTER_KILL = 2.0
TAKEOVER_AFTER_FREEZE = 6.0

# DAGs of one quick task whose names spread over eight shards.
SPREAD = ("pulse", *(f"spike_{number}" for number in range(11)))

# Election switched off: whoever asks leads, with the epoch that the others have, and no epoch is checked.
EVERYBODY_LEADS = (
    "create or replace function fence(p_shard smallint, p_epoch bigint) returns void language sql as $$ select $$",
    "create or replace function acquire_shard(p_shard smallint, p_owner text, p_seconds double precision) returns bigint"
    " language sql as $$ select epoch from shard where shard = p_shard $$",
)
# And on again: nobody leads, so that they elect one.
NOBODY_LEADS = "update shard set epoch = epoch + 1, lease_until = null, leader = null"


def three_schedulers(is_full: bool) -> Shape:
    return Shape(schedulers=3, runners=4 if is_full else 1)


async def kill_leaders(stage: Stage) -> None:
    times = int(stage.scaled(200, 6))
    await stage.begin_load(seconds=stage.scaled(200 * 14, 20), quick=8, steady=int(stage.scaled(200, 0)))
    took = []
    for _ in range(times):
        await elapse(stage.dice.uniform(5, 20) if stage.is_full else stage.dice.uniform(0.3, 1.2))
        await stage.has_standby()
        took.append(await processes.kill_leader(stage.nemesis))
    stage.expect_within(took, TAKEOVER_AFTER_KILL, "takeover after kill -9")


async def share_and_lose(stage: Stage) -> None:
    """N01b. Whoever is hit leads one or two of four shards: the others take them, and share them out again when it is back.
    In between there are fewer shards and more again, under load."""
    deeds = (
        lambda: processes.kill_leader(stage.nemesis),
        lambda: processes.freeze_leader(stage.nemesis, 8),
        lambda: database.terminate_leader(stage.nemesis),
        lambda: processes.kill_leader(stage.nemesis),
    )
    await stage.begin_load(seconds=stage.scaled(600, 32, 12), quick=12, steady=int(stage.scaled(200, 8)), per_second=2)
    killed, frozen = [], []
    async with await connect(stage.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
        for number in range(int(stage.scaled(40, 4, 2))):
            await set_shards(conn, shards=(2, 4)[number % 2], actor=Actor("chaos"))
            await notify(conn, Channel.LEADER)
            await elapse(stage.dice.uniform(0.3, 1.2))
            await stage.has_standby()
            (killed, frozen, [], killed)[number % 4].append(await deeds[number % 4]())
        await set_shards(conn, shards=4, actor=Actor("chaos"))
    stage.expect_within(killed, TAKEOVER_AFTER_KILL, "takeover after kill -9")
    stage.expect_within(frozen, TAKEOVER_AFTER_FREEZE, "takeover after a freeze")

    async def is_even() -> bool:
        counts = [len(led) for _, led in await stage.cluster.leaders()]
        return sum(counts) == 4 and len(counts) == 3

    await eventually(is_even, 30, pause_seconds=0.1)
    astray = "select sum(misplaced_count(shard, 1000)) = 0 from shard"
    await eventually(lambda: stage.cluster.watch.value(astray), 30, pause_seconds=0.1)


async def share_out_anew(stage: Stage) -> None:
    """N01c. From one shard to four, two, eight and back to one while all of them fire. In the middle of each move a leader is lost,
    and what it had not moved yet is moved by who comes after it. Shards that are not needed any more close, and come back."""
    rounds = int(stage.scaled(10, 1))
    await stage.begin_load(
        seconds=stage.scaled(10 * 200, 36), quick=24, quick_dags=SPREAD, steady=int(stage.scaled(200, 8)), per_second=2
    )
    took = []
    async with await connect(stage.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
        for number, shards in enumerate((4, 2, 8, 1) * rounds):
            await set_shards(conn, shards=shards, actor=Actor("chaos"))
            await notify(conn, Channel.LEADER)
            await elapse(stage.dice.uniform(0.02, 0.6))
            await stage.has_standby()
            if number % 2 == 0:
                took.append(await processes.kill_leader(stage.nemesis))
            else:
                await database.terminate_leader(stage.nemesis)
            await _all_at_home(stage, shards)
    stage.expect_within(took, TAKEOVER_AFTER_KILL, "takeover after kill -9")


async def _all_at_home(stage: Stage, shards: int) -> None:
    """Every DAG and what hangs on it is in its shard, each of which somebody leads; the others are closed."""
    watch = stage.cluster.watch
    await eventually(watch.is_led, 30, pause_seconds=0.05)
    at_home = "select sum(misplaced_count(shard, 1000)) = 0 from shard"
    await eventually(lambda: watch.value(at_home), 30, pause_seconds=0.05)
    closed = "select count(*) = %s and bool_and(state = 'open') from shard where state <> 'closed'"
    if not stage.is_full:
        # The minute in which somebody might still write for a shard that it had read of before.
        await watch.must(
            "update shard set rebalancing_since = rebalancing_since - interval '2 minutes' where rebalancing_since is not null"
        )
    await eventually(lambda: watch.value(closed, shards), 120, pause_seconds=0.05)


async def freeze_leaders(stage: Stage) -> None:
    """N02. A woken leader knows by its own clock that it leads no more, and asks for nothing. What it had sent before comes
    late instead: it is sent in its name, and each must be refused by the fence. A takeover drops no fire of a schedule that fires
    every second, whatever its policy about missed fires."""
    lengths = (3, 10, 120) if stage.is_full else (2.5, 8)
    policies = ("pulse", "pulse", "late_latest", "late_skip")
    await stage.begin_load(seconds=stage.scaled(200, 24), quick=8, quick_dags=policies)
    took = []
    zombie = Zombie(cluster=stage.cluster, dice=stage.dice)
    for seconds, is_planning in [*((each, False) for each in lengths), (8, True)]:
        await elapse(1)
        of = processes.QUICK if is_planning else None
        whom = await eventually(partial(stage.nemesis.pick_leader, of=of), 30, pause_seconds=0.05)
        found = await processes.freeze_leader(stage.nemesis, seconds, is_planning=is_planning, whom=whom)
        if seconds > TAKEOVER_AFTER_FREEZE:
            took.append(found)
            async with await connect(stage.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
                await zombie.plan_everything(conn, whom[1])
    stage.counted(zombie)
    stage.expect_within(took, TAKEOVER_AFTER_FREEZE, "takeover after a freeze")


async def cut_leaders(stage: Stage) -> None:
    await stage.begin_load(seconds=stage.scaled(120, 28), quick=8)
    took = []
    for how in ("blackhole", "deaf", "mute") * int(stage.scaled(3, 1)):
        await elapse(0.5)
        await eventually(stage.nemesis.pick_leader, 30, pause_seconds=0.05)
        took.append(await network.cut_leader(stage.nemesis, stage.scaled(15, 7.5), how))
    stage.expect_within(took, TAKEOVER_AFTER_FREEZE, "takeover after a cut")


async def terminate_leaders(stage: Stage) -> None:
    await stage.begin_load(seconds=stage.scaled(120, 9), quick=8)
    for _ in range(int(stage.scaled(40, 5))):
        await elapse(stage.dice.uniform(0.3, 1.2))
        await eventually(stage.nemesis.pick_leader, 30, pause_seconds=0.05)
        await database.terminate_leader(stage.nemesis)


async def all_lead(stage: Stage) -> None:
    """The keys of the tables alone must hold."""
    await stage.begin_load(
        seconds=stage.scaled(600, 12, 6), quick=10, steady=int(stage.scaled(20, 10)), per_second=2, paces=(2, 3, 5)
    )
    watch = stage.cluster.watch
    elected = await watch.must(
        "select pg_get_functiondef(oid) from pg_proc where pronamespace = current_schema()::regnamespace and proname = any(%s)",
        ["fence", "acquire_shard"],
    )
    async with stage.nemesis.fault(Fault.OVERLAP, "all", part="everybody"):
        for statement in EVERYBODY_LEADS:
            await watch.must(statement)
        await elapse(stage.scaled(600, 10, 5))
        fired = {m.name: len(m.events("schedules_fired")) for m in stage.cluster.of_kind("scheduler")}
        for (definition,) in elected:
            await watch.must(definition.replace("%", "%%"))
        await watch.must(NOBODY_LEADS)
    stage.note(f"rounds of firing: {fired}")
    # Of several shards each may keep to its own: then it is the keys of one leader each that hold.
    stage.expect(all(fired.values()) or stage.cluster.shape.shards > 1, f"not everybody led: {fired}")


SCENARIOS = (
    Scenario(
        name="N01",
        title="kill -9 the leader, again and again",
        play=kill_leaders,
        shape=three_schedulers,
        required=("J1", "J2", "J3", "J9"),
    ),
    Scenario(
        name="N01b",
        title="four shards, three schedulers: leaders die and freeze, shards become fewer and more",
        play=share_and_lose,
        shape=lambda is_full: Shape(schedulers=3, shards=4, runners=2),
        required=("J1", "J2", "J3", "J9", "J13"),
    ),
    Scenario(
        name="N01c",
        title="one, four, two, eight shards and one again under load, a leader lost in each move",
        play=share_out_anew,
        shape=lambda is_full: Shape(schedulers=3, runners=2),
        required=("J1", "J2", "J3", "J9", "J13"),
    ),
    Scenario(
        name="N02",
        title="freeze the leader below and above its lease, also in mid-transaction",
        play=freeze_leaders,
        shape=three_schedulers,
        required=("J2", "J5", "J9"),
    ),
    Scenario(
        name="N03",
        title="cut the leader from the database, both ways and each way alone",
        play=cut_leaders,
        shape=three_schedulers,
        required=("J1", "J9", "J13"),
    ),
    Scenario(
        name="N04",
        title="end the leader's sessions in the server",
        play=terminate_leaders,
        shape=three_schedulers,
        required=("J9",),
    ),
    Scenario(
        name="N05",
        title="no election: all schedulers lead at once",
        play=all_lead,
        shape=three_schedulers,
        required=("J1", "J4", "J6"),
        without=("J9", "J13"),
    ),
)
