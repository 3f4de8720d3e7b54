"""N06: services die at every commit boundary, each just before a statement is sent and just after it was committed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from evertick.db.statements import known_names
from tests.chaos.cluster import Shape
from tests.chaos.members import FAILPOINT, Life, Member
from tests.chaos.record import Fault
from tests.chaos.scenario import Scenario
from tests.chaos.stage import Size, Stage
from tests.waiting import eventually

# What a service writes, by who writes it. Creating a run and moving its schedule's cursor are one statement, and so are
# recording an end, closing the run and claiming what comes next.
SITES: dict[str, tuple[str, ...]] = {
    "scheduler": ("try_acquire_shard", "poll_work", "fire_schedules", "promote_due_tasks", "reconcile_runs"),
    "runner": ("runners.register", "finish_and_claim", "extend_leases", "logs.append"),
}


# Services die all the time here, and how long a takeover takes is the question of others: every statement comes often.
HURRIED = {"tick_seconds": 0.2, "leader_lease_seconds": 0.8, "heartbeat_seconds": 0.4, "reconcile_seconds": 0.5}


# Around an edit, such as the end of the load, it is uncertain what was due: with less nothing at all would be certain.
LEAST_LOAD_SECONDS = 12.0


class Carousel:
    """The sites of one kind of service. Each life of its members is armed with the site that was tried least so far."""

    def __init__(self, stage: Stage, kind: str) -> None:
        self._stage = stage
        both = ("before", "after")
        # In the short form each statement is died at once, on one of its sides.
        sides = {site: [stage.dice.choice(both)] if stage.size is Size.SHORT else both for site in SITES[kind]}
        self.sites = [f"{site}:{side}" for site, chosen in sides.items() for side in chosen]
        stage.dice.shuffle(self.sites)
        self._armed: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()

    def take(self, member: Member) -> None:
        member.next_environment = self._arm
        member.on_end = lambda life: self._count(member, life)

    def _arm(self, life: int) -> Mapping[str, str]:
        site = min(self.sites, key=lambda each: (self.hits[each], self._armed[each]))
        self._armed[site] += 1
        number = 1 if site.startswith(("try_acquire_shard", "runners.register")) else self._stage.dice.randint(1, 3)
        return {FAILPOINT: f"{site}:{number}"}

    def _count(self, member: Member, life: Life) -> None:
        site = (life.cause or "").rpartition(":")[0]
        if life.exit_code == -9 and site in self.sites:
            self.hits[site] += 1
            self._stage.nemesis.done[f"{Fault.FAILPOINT} {site}"] += 1
            self._stage.cluster.record.instant(Fault.FAILPOINT, member.name, site=site)

    def missed(self, wanted: int) -> list[str]:
        return [site for site in self.sites if self.hits[site] < wanted]


async def _restart(stage: Stage, member: Member) -> None:
    """Its next life has another environment."""
    async with stage.nemesis.fault(Fault.KILL, member.name, part="to arm it"):
        await member.kill()


async def die_at_boundaries(stage: Stage) -> None:
    wanted = int(stage.scaled(20, 2, 1))
    unknown = {site for names in SITES.values() for site in names} - set(known_names())
    stage.expect(not unknown, f"these statements do not exist any more: {unknown}")
    await stage.begin_load(
        # At most: it is ended when every site was reached.
        seconds=stage.scaled(1500, 70, 130),
        quick=6,
        steady=int(stage.scaled(24, 8)),
        paces=(2, 3, 5),
        steady_dags=("flaky", "chatter"),
    )
    enough_at = time.monotonic() + LEAST_LOAD_SECONDS
    carousels = {kind: Carousel(stage, kind) for kind in SITES}
    # One runner stays whole, so that there is always somebody to finish what the others began.
    members = [m for m in stage.cluster.members.values() if m.name != "runner-1"]
    for member in members:
        carousels[member.kind].take(member)
        await _restart(stage, member)

    def missed() -> list[str]:
        return [site for carousel in carousels.values() for site in carousel.missed(wanted)]

    try:
        await eventually(
            lambda: not missed() and time.monotonic() > enough_at, stage.scaled(1500, 60, 120), pause_seconds=0.1
        )
    except AssertionError:
        stage.expect(False, f"not reached {wanted} times: {missed()}")
    for member in members:
        member.next_environment = lambda life: {}
        await _restart(stage, member)
    assert stage.load is not None
    await stage.load.cut_short()
    hits = sum((carousel.hits for carousel in carousels.values()), Counter[str]())
    stage.note(f"{hits.total()} deaths at {len(hits)} boundaries")


SCENARIOS = (
    Scenario(
        name="N06",
        title="die at every commit boundary",
        play=die_at_boundaries,
        shape=lambda is_full: Shape(schedulers=2, runners=3, settings=HURRIED),
        required=("J1", "J2", "J4", "J5", "J6", "J7", "J8"),
    ),
)
