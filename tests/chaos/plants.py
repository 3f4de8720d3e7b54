"""Violations to plant into a good run, of every kind that the checker knows: what it must go red on, and on what alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.chaos.evidence import (
    Change,
    Evidence,
    LeaderCommit,
    Leftover,
    RunMove,
    ScheduleMove,
    ShardMove,
    Skip,
    TaskMove,
)
from tests.chaos.record import Answer, Fault, FaultWindow, Phase
from tests.chaos.sink import Sink
from tests.chaos.story import END, FROZEN, GIVEN_UP, KILLED, TAKEN, THAWED, ns, wall
from tests.chaos.verdict import Limits

KILLED_RUN, FROZEN_RUN, RETRIED_RUN, QUIET_RUN, ELSEWHERE_RUN = 90_001, 90_002, 90_003, 90_004, 90_005
CALM = 120.0  # a fire of the pulse that no fault is near
TIGHT = Limits(drain_seconds=2.0, run_seconds=20.0)

Plant = Callable[[Evidence], Evidence]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """`also` names invariants that cannot hold either: a body that never was is missed and has no effect."""

    invariant: str
    kind: str
    plant: Plant
    also: frozenset[str] = frozenset()
    limits: Limits = TIGHT

    @property
    def name(self) -> str:
        return f"{self.invariant}-{self.kind}-{getattr(self.plant, '__name__', '').partition('_')[2]}"


def pulse_at(evidence: Evidence, seconds: float, schedule: int = 1) -> int:
    return next(run.run_id for run in evidence.runs if run.schedule_id == schedule and run.fire_at == wall(seconds))


def with_parts(evidence: Evidence, parts: dict[str, Any]) -> Evidence:
    return replace(evidence, **parts)


def without_run(evidence: Evidence, run_id: int) -> Evidence:
    """As if the run had never been."""
    parts = ("runs", "run_moves", "task_moves", "lease_moves", "reports", "effects", "results", "past_attempts")
    return with_parts(
        evidence, {part: tuple(row for row in getattr(evidence, part) if row.run_id != run_id) for part in parts}
    )


def changed(evidence: Evidence, part: str, is_it: Callable[[Any], bool], **fields: Any) -> Evidence:
    """The rows that it is, changed."""
    rows = getattr(evidence, part)
    assert any(map(is_it, rows)), f"nothing to change in {part}"
    make = replace if hasattr(rows[0], "__dataclass_fields__") else lambda row, **f: row._replace(**f)
    return with_parts(evidence, {part: tuple(make(row, **fields) if is_it(row) else row for row in rows)})


def added(evidence: Evidence, part: str, *rows: Any) -> Evidence:
    return with_parts(evidence, {part: (*getattr(evidence, part), *rows)})


def removed(evidence: Evidence, part: str, is_it: Callable[[Any], bool]) -> Evidence:
    rows = getattr(evidence, part)
    kept = tuple(row for row in rows if not is_it(row))
    assert len(kept) < len(rows), f"nothing to remove from {part}"
    return with_parts(evidence, {part: kept})


def line_of(evidence: Evidence, run_id: int, epoch: int, what: str = "begin", task: str | None = None) -> Any:
    return next(
        effect
        for effect in evidence.effects
        if (effect.run_id, effect.epoch, effect.what) == (run_id, epoch, what) and task in (None, effect.task)
    )


def with_line(evidence: Evidence, like: Any, **fields: Any) -> Evidence:
    lines = sorted([*evidence.effects, like._replace(**fields)], key=lambda effect: effect.at_ns)
    return replace(evidence, effects=tuple(lines))


def shifted(evidence: Evidence, run_id: int, seconds: float) -> Evidence:
    """Everything about the run but its creation, so much later."""
    by = round(seconds * 1e9)
    for part in ("task_moves", "lease_moves", "reports", "effects", "run_moves"):

        def is_it(row: Any) -> bool:
            return row.run_id == run_id and getattr(row, "old_state", "") is not None

        rows = tuple(row._replace(at_ns=row.at_ns + by) if is_it(row) else row for row in getattr(evidence, part))
        evidence = with_parts(evidence, {part: rows})
    return replace(evidence, effects=tuple(sorted(evidence.effects, key=lambda effect: effect.at_ns)))


def nemesis(evidence: Evidence, **parts: Any) -> Evidence:
    return replace(evidence, nemesis=replace(evidence.nemesis, **parts))


def faults(evidence: Evidence, change: Callable[[FaultWindow], FaultWindow | None]) -> Evidence:
    found = [change(fault) for fault in evidence.nemesis.faults]
    return nemesis(evidence, faults=tuple(fault for fault in found if fault is not None))


def samples(evidence: Evidence, *, is_last: bool, **fields: Any) -> Evidence:
    """One service's looks after the load, or its later ones under load."""

    def is_it(sample: Any) -> bool:
        if is_last:
            return bool(sample.at_ns > ns(140))
        return sample.phase == Phase.LOAD and bool(sample.at_ns > ns(80))

    chosen = tuple(
        replace(sample, **fields) if is_it(sample) and sample.service == "runner-3" else sample
        for sample in evidence.nemesis.samples
    )
    return nemesis(evidence, samples=chosen)


def leaking(is_last: bool, fields: dict[str, int]) -> Plant:
    return lambda e: samples(e, is_last=is_last, **fields)


def j1_two_runs(e: Evidence) -> Evidence:
    run = next(run for run in e.runs if run.run_id == pulse_at(e, CALM))
    return added(e, "runs", run._replace(run_id=7777))


def j1_two_runs_in_effects(e: Evidence) -> Evidence:
    like = line_of(e, KILLED_RUN, 1, "end", "last")
    return with_line(e, like, what="word", fire_at=wall(117), schedule="cron", at_ns=like.at_ns - 1)


def j2_missed(e: Evidence) -> Evidence:
    return without_run(e, pulse_at(e, CALM))


def j2_missed_in_effects(e: Evidence) -> Evidence:
    return removed(e, "effects", lambda effect: effect.run_id == pulse_at(e, CALM))


def j2_missed_while_paused(e: Evidence) -> Evidence:
    return replace(e, skips=())


def j2_run_and_skip(e: Evidence) -> Evidence:
    return added(e, "skips", Skip(1, wall(CALM), wall(CALM), 1, "paused", wall(CALM + 1)))


def j2_unexpected(e: Evidence) -> Evidence:
    run = next(run for run in e.runs if run.run_id == pulse_at(e, CALM))
    return added(e, "runs", run._replace(run_id=7777, fire_at=wall(CALM + 0.5)))


def j2_fired_while_paused(e: Evidence) -> Evidence:
    run = next(run for run in e.runs if run.run_id == pulse_at(e, CALM))
    skips = (Skip(3, wall(30), wall(40), 2, "paused", wall(61)), Skip(3, wall(60), wall(60), 1, "paused", wall(61)))
    return added(replace(e, skips=skips), "runs", run._replace(run_id=7777, schedule_id=3, fire_at=wall(50)))


def j2_skipped_twice(e: Evidence) -> Evidence:
    return added(e, "skips", Skip(3, wall(40), wall(50), 2, "paused", wall(61)))


def j2_skip_miscounted(e: Evidence) -> Evidence:
    return changed(e, "skips", lambda skip: True, total=5)


def j2_skipped_against_policy(e: Evidence) -> Evidence:
    e = without_run(e, pulse_at(e, CALM))
    return added(e, "skips", Skip(1, wall(CALM), wall(CALM), 1, "misfire_latest", wall(CALM + 20)))


def j2_skipped_on_time(e: Evidence) -> Evidence:
    e = without_run(e, pulse_at(e, CALM))
    return added(e, "skips", Skip(1, wall(CALM), wall(CALM), 1, "misfire_latest", wall(CALM + 1)))


def j2_cursor_went_back(e: Evidence) -> Evidence:
    move = ScheduleMove(10**6, wall(130), ns(130), 1, 1, wall(135), wall(125), False, None, True)
    return added(e, "schedule_moves", move)


def j2_extra_in_effects(e: Evidence) -> Evidence:
    return changed(e, "effects", lambda effect: effect.run_id == KILLED_RUN, fire_at=wall(33.3), schedule="cron")


def j3_late_run(e: Evidence) -> Evidence:
    return changed(
        e, "run_moves", lambda move: move.run_id == pulse_at(e, CALM) and move.old_state is None, at_ns=ns(CALM + 2.5)
    )


def j3_early_run(e: Evidence) -> Evidence:
    return changed(
        e, "run_moves", lambda move: move.run_id == pulse_at(e, CALM) and move.old_state is None, at_ns=ns(CALM - 0.5)
    )


def j3_late_start(e: Evidence) -> Evidence:
    return shifted(e, pulse_at(e, CALM), 17.0)


def j4_two_starters(e: Evidence) -> Evidence:
    e = removed(
        e, "effects", lambda effect: effect.run_id == KILLED_RUN and effect.task == "first" and effect.epoch == 1
    )
    like = line_of(e, KILLED_RUN, 2)
    return with_line(e, like, pid=1, at_ns=like.at_ns + 1)


def j4_epoch_did_not_rise(e: Evidence) -> Evidence:
    def again(row: Any) -> bool:
        return row.run_id == QUIET_RUN and getattr(row, "epoch", None) == 2

    for part in ("lease_moves", "reports", "results"):
        e = changed(e, part, again, epoch=1)
    e = changed(e, "task_moves", lambda move: move.run_id == QUIET_RUN and move.old_epoch == 2, old_epoch=1)
    return changed(e, "task_moves", lambda move: move.run_id == QUIET_RUN and move.new_epoch == 2, new_epoch=1)


def j4_late_old_epoch(e: Evidence) -> Evidence:
    e = changed(
        e, "effects", lambda x: x.run_id == KILLED_RUN and x.task == "first" and x.epoch == 1, at_ns=ns(KILLED + 1.0)
    )
    return replace(e, effects=tuple(sorted(e.effects, key=lambda effect: effect.at_ns)))


def j4_two_bodies(e: Evidence) -> Evidence:
    return with_line(e, line_of(e, KILLED_RUN, 1), what="word", at_ns=ns(KILLED + 1.0))


def j4_unclaimed_start(e: Evidence) -> Evidence:
    return with_line(e, line_of(e, RETRIED_RUN, 1), run_id=QUIET_RUN, dag="quiet", task="mute", epoch=9)


def j4_unknown_run(e: Evidence) -> Evidence:
    return with_line(e, line_of(e, RETRIED_RUN, 1), run_id=424_242)


def j4_two_owners(e: Evidence) -> Evidence:
    rows = list(e.lease_moves)
    place = next(i for i, lease in enumerate(rows) if lease.run_id == QUIET_RUN and lease.is_gained)
    return replace(e, lease_moves=(*rows[: place + 1], rows[place]._replace(session=3), *rows[place + 1 :]))


def j4_no_lease(e: Evidence) -> Evidence:
    return removed(e, "lease_moves", lambda lease: lease.run_id == QUIET_RUN and lease.epoch == 2)


def j4_foreign_start(e: Evidence) -> Evidence:
    return changed(
        e, "task_moves", lambda move: move.run_id == ELSEWHERE_RUN and move.new_state == "running", old_session=9
    )


def j4_two_places(e: Evidence) -> Evidence:
    second = e.nemesis.placements[-1]
    again = replace(second, start_ns=ns(GIVEN_UP + 5), stop_ns=ns(GIVEN_UP + 6))
    return nemesis(e, placements=(*e.nemesis.placements, again))


def j5_other_session(e: Evidence) -> Evidence:
    return changed(e, "reports", lambda report: report.run_id == QUIET_RUN and report.epoch == 2, session=1)


def j5_old_epoch(e: Evidence) -> Evidence:
    return changed(e, "reports", lambda report: report.run_id == QUIET_RUN and report.epoch == 2, epoch=1)


def j5_refused_and_done(e: Evidence) -> Evidence:
    return changed(e, "reports", lambda report: report.run_id == QUIET_RUN and report.epoch == 2, is_refused=True)


def j5_stale_result(e: Evidence) -> Evidence:
    return changed(e, "results", lambda row: row.run_id == QUIET_RUN, epoch=1)


def j5_stale_attempt(e: Evidence) -> Evidence:
    return changed(e, "past_attempts", lambda row: row.run_id == QUIET_RUN, session=3)


def j5_accepted_stale(e: Evidence) -> Evidence:
    return changed(e, "client", lambda request: request.request == "z-3", answer=Answer.OK)


def j5_late_body(e: Evidence) -> Evidence:
    return with_line(e, line_of(e, FROZEN_RUN, 1), what="word", at_ns=ns(THAWED + 8))


def move_of(run_id: int, old: str | None, new: str, *, at: float, tx: int, idx: int = 7, entry: int = 0) -> TaskMove:
    return TaskMove(entry, tx, ns(at), run_id, idx, -1, old, new, 0, 0, None, None, 0, 0, None)


def j6_illegal_move(e: Evidence) -> Evidence:
    moves = (move_of(QUIET_RUN, None, "deferred", at=39, tx=1), move_of(QUIET_RUN, "deferred", "canceled", at=39, tx=2))
    return added(e, "task_moves", *moves)


def j6_illegal_move_of_a_run(e: Evidence) -> Evidence:
    return added(e, "run_moves", RunMove(10**6, 1, wall(130), ns(130), QUIET_RUN, "success", "running", None))


def j6_broken_chain(e: Evidence) -> Evidence:
    return removed(e, "task_moves", lambda move: move.run_id == QUIET_RUN and move.old_state == "pending")


def j6_closed_with_open_tasks(e: Evidence) -> Evidence:
    return added(e, "task_moves", move_of(QUIET_RUN, None, "available", at=39, tx=1))


def j6_fact_changed(e: Evidence) -> Evidence:
    return replace(e, changed_facts=("run 1: update",))


def j7_reaped_alive(e: Evidence) -> Evidence:
    return faults(e, lambda fault: None if fault.kind is Fault.FREEZE else fault)


def j7_frozen_too_short(e: Evidence) -> Evidence:
    return faults(e, lambda f: replace(f, stop_ns=ns(FROZEN + 6)) if f.kind is Fault.FREEZE else f)


def j7_somebody_else_was_frozen(e: Evidence) -> Evidence:
    return faults(e, lambda f: replace(f, target="runner-3") if f.kind is Fault.FREEZE else f)


def j7_an_outage_is_no_excuse(e: Evidence) -> Evidence:
    """The database was away and not the runner: nobody may be given up for that."""
    return faults(e, lambda f: replace(f, kind=Fault.OUTAGE, target="postgres") if f.kind is Fault.FREEZE else f)


def j7_dispatch_lost_there(e: Evidence) -> Evidence:
    first, second = e.nemesis.placements
    return nemesis(e, placements=(replace(first, stop_ns=ns(GIVEN_UP + 1)), second))


def j7_dispatch_lost_unasked(e: Evidence) -> Evidence:
    away = FaultWindow(
        number=1,
        kind=Fault.OUTAGE,
        target="kubernetes",
        start_ns=ns(GIVEN_UP - 1),
        stop_ns=ns(GIVEN_UP + 1),
        disturbs=("running",),
    )
    return nemesis(e, faults=(*e.nemesis.faults, away))


def j8_left_with_its_executor(e: Evidence) -> Evidence:
    first, second = e.nemesis.placements
    return nemesis(e, placements=(first, replace(second, stop_ns=None)))


def j7_killed_only_later(e: Evidence) -> Evidence:
    lives = tuple(replace(life, exit_ns=ns(KILLED + 5)) if life.pid == 101 else life for life in e.nemesis.lives)
    return nemesis(e, lives=lives)


def j7_reaped_after_beat(e: Evidence) -> Evidence:
    beat = next(move for move in e.runner_moves if move.session == 2 and move.what == "beat")
    return added(e, "runner_moves", beat._replace(at_ns=ns(FROZEN + 3)))


def j7_body_outlived(e: Evidence) -> Evidence:
    return with_line(e, line_of(e, KILLED_RUN, 1), what="word", at_ns=ns(KILLED + 0.8))


def j7_orphaned_alive(e: Evidence) -> Evidence:
    e = added(
        e,
        "run_moves",
        RunMove(10**6, 1, wall(130), ns(130), 5555, None, "running", None),
        RunMove(10**6 + 2, 2, wall(136), ns(136), 5555, "running", "failed", "orphaned: nothing moves"),
    )
    waiting = move_of(5555, None, "pending", at=130, tx=1, entry=10**6 + 1)
    given_up = move_of(5555, "pending", "failed", at=136, tx=2, entry=10**6 + 3)
    return added(e, "task_moves", waiting, given_up)


def leftover(kind: str) -> Plant:
    return lambda e: replace(e, leftovers=(Leftover(kind, f"a {kind}"),))


def j8_slow_recovery(e: Evidence) -> Evidence:
    run_id = pulse_at(e, 140.0)
    return changed(e, "run_moves", lambda m: m.run_id == run_id and m.new_state == "success", at_ns=ns(148))


def j8_slow_run(e: Evidence) -> Evidence:
    run_id = pulse_at(e, 110.0)
    return changed(e, "run_moves", lambda m: m.run_id == run_id and m.new_state == "success", at_ns=ns(135))


def j8_not_drained(e: Evidence) -> Evidence:
    return nemesis(e, phases=tuple(phase for phase in e.nemesis.phases if phase[0] != Phase.HEALED))


def commit(kind: str, epoch: int | None, backend: str = "b1") -> Plant:
    shard = None if epoch is None else 0
    return lambda e: added(e, "leader_commits", LeaderCommit(10**6, 1, backend, ns(159), kind, shard, epoch))


def j9_two_leaders(e: Evidence) -> Evidence:
    return added(e, "shard_moves", ShardMove(10**6, wall(150), ns(150), 0, 2, 2, "usurper"))


def j10_lost(e: Evidence) -> Evidence:
    return removed(e, "changes", lambda change: change.request == f"key-{QUIET_RUN}")


def j10_doubled(e: Evidence) -> Evidence:
    return added(e, "changes", Change("trigger", "unheard-2"))


def j10_refused_but_there(e: Evidence) -> Evidence:
    return added(e, "changes", Change("trigger", "refused"))


def plans(e: Evidence, **fields: Any) -> Evidence:
    """What was published for the flaky task."""
    return replace(e, plans={key: p._replace(**fields) if p.name == "sometimes" else p for key, p in e.plans.items()})


def j11_too_soon_by_the_audit(e: Evidence) -> Evidence:
    """The first body was killed: nothing but the audit says when it ended."""
    e = removed(e, "effects", lambda effect: effect.run_id == RETRIED_RUN and effect.what == "fail")
    return plans(e, retry={"delay_seconds": 3.0, "jitter": 0.25})


def sinks(e: Evidence, change: Callable[[Sink], Sink]) -> Evidence:
    return replace(e, sink=change(e.sink))


def j12_no_row(e: Evidence) -> Evidence:
    return sinks(e, lambda sink: sink._replace(rows=sink.rows[1:]))


def j12_two_rows(e: Evidence) -> Evidence:
    return sinks(e, lambda sink: sink._replace(rows=(*sink.rows, sink.rows[0])))


def j12_stale_touch(e: Evidence) -> Evidence:
    """Epoch 5 was there, and then epoch 4 was taken."""
    last = e.sink.touches[-1]
    stale = (last._replace(epoch=5, is_written=False), last._replace(epoch=4, is_written=False))
    return sinks(e, lambda sink: sink._replace(touches=(*sink.touches, *stale)))


def j12_shared_token(e: Evidence) -> Evidence:
    again = e.sink.touches[-1]._replace(pid=1, is_written=False)
    return sinks(e, lambda sink: sink._replace(touches=(*sink.touches, again)))


def j12_no_effect(e: Evidence) -> Evidence:
    run_id = chain_at(e, 117)
    return removed(e, "effects", lambda effect: effect.run_id == run_id and effect.task == "last")


def j12_effects_beyond_epochs(e: Evidence) -> Evidence:
    return with_line(e, line_of(e, pulse_at(e, CALM), 1), epoch=2)


def j13_gap(e: Evidence) -> Evidence:
    return removed(e, "leader_commits", lambda commit: ns(115.5) < commit.at_ns < ns(120.5))


def j13_gap_of_one_shard(e: Evidence) -> Evidence:
    """The first shard is led all the time; another one is not."""
    ticks = [LeaderCommit(10**6 + n, n, "b9", ns(n), "renew", 1, 1) for n in range(1, int(END)) if not 115 < n < 121]
    excused = [tick for tick in ticks if not ns(30) <= tick.at_ns < ns(TAKEN) and not ns(90) <= tick.at_ns < ns(95)]
    return replace(e, leader_commits=(*e.leader_commits, *excused))


def closed_shard(e: Evidence, *, opened: float, led_again: float) -> Evidence:
    """Shard 1 is led from the beginning, closed at 100 s, opened again later, and led again some time after that."""
    at = [n for n in range(1, int(END)) if not 100 < n < led_again and not 30 <= n < TAKEN and not 90 <= n < 95]
    ticks = [LeaderCommit(10**6 + n, n, "b9", ns(n), "renew", 1, 1) for n in at]
    moves = [
        ShardMove(10**6, wall(100), ns(100), 1, 1, 2, None, "closed"),
        ShardMove(10**6 + 1, wall(opened), ns(opened), 1, 2, 2, None, "open"),
    ]
    return replace(e, leader_commits=(*e.leader_commits, *ticks), shard_moves=(*e.shard_moves, *moves))


def j15_a_key_held_twice(e: Evidence) -> Evidence:
    """Two runs of the chain with the same key at the same time, which each of them wants for itself."""
    whole = {
        where: plan._replace(
            needs=tuple(need._replace(weight=1_000_000) for need in plan.needs if need.kind == "mutex")
        )
        for where, plan in e.plans.items()
    }
    late = j16_closed_late(replace(e, plans=whole))
    first, second = (chain_at(e, at) for at in (117, 127))
    (begun,) = (move.entry for move in e.task_moves if move.task == (second, 0, -1) and move.old_state is None)
    ended = max(move.entry for move in e.task_moves if move.run_id == first)
    # The last end of the first one comes right after the second was let in, in the order of the audit.
    return changed(late, "task_moves", lambda move: move.entry == ended, entry=begun + 0.5)


def chain_at(evidence: Evidence, seconds: float) -> int:
    return next(run.run_id for run in evidence.runs if run.dag == "chain" and run.fire_at == wall(seconds))


def j16_closed_late(e: Evidence) -> Evidence:
    """A run of the chain is closed only when the next one has begun."""
    first, second = (chain_at(e, at) for at in (117, 127))
    begun = max(move.entry for move in e.run_moves if move.run_id == second)
    closed = max(move.entry for move in e.run_moves if move.run_id == first)
    return changed(e, "run_moves", lambda move: move.entry == closed, entry=begun - 0.5)


def j16_overlapping(e: Evidence) -> Evidence:
    return changed(j16_closed_late(e), "schedule_versions", lambda each: each.dag == "chain", overlap="queue_all")


def j16_skipped_alone(e: Evidence) -> Evidence:
    run = next(run for run in e.runs if run.run_id == chain_at(e, 117))
    assert run.schedule_id is not None and run.fire_at is not None
    skip = Skip(run.schedule_id, run.fire_at, run.fire_at, 1, "overlap_skip", run.fire_at)
    return added(without_run(e, run.run_id), "skips", skip)


def totals(e: Evidence, **fields: Any) -> Evidence:
    return nemesis(e, totals=(*e.nemesis.totals[:-1], replace(e.nemesis.totals[-1], **fields)))


def _planted() -> list[Planted]:
    def of(invariant: str, kind: str, plant: Plant, *also: str, limits: Limits = TIGHT) -> Planted:
        return Planted(invariant=invariant, kind=kind, plant=plant, also=frozenset(also), limits=limits)

    return [
        of("J1", "two_runs", j1_two_runs),
        of("J1", "two_runs_in_effects", j1_two_runs_in_effects),
        of("J2", "missed", j2_missed),
        of("J2", "missed", j2_missed_while_paused),
        of("J2", "run_and_skip", j2_run_and_skip),
        of("J2", "unexpected", j2_unexpected),
        of("J2", "unexpected", j2_fired_while_paused),
        of("J2", "skipped_twice", j2_skipped_twice),
        of("J2", "skip_miscounted", j2_skip_miscounted),
        of("J2", "skipped_against_policy", j2_skipped_against_policy),
        of("J2", "skipped_on_time", j2_skipped_on_time),
        of("J2", "cursor_went_back", j2_cursor_went_back),
        of("J2", "missed_in_effects", j2_missed_in_effects, "J12"),
        of("J2", "unserved", j2_missed_in_effects, "J12"),
        of("J2", "extra_in_effects", j2_extra_in_effects),
        of("J3", "late_run", j3_late_run),
        of("J3", "early_run", j3_early_run),
        of("J3", "late_start", j3_late_start),
        of("J4", "two_starters", j4_two_starters),
        of("J4", "epoch_did_not_rise", j4_epoch_did_not_rise),
        of("J4", "late_old_epoch", j4_late_old_epoch, "J7"),
        of("J4", "two_bodies", j4_two_bodies, "J7"),
        of("J4", "unclaimed_start", j4_unclaimed_start),
        of("J4", "unclaimed_start", j4_unknown_run),
        of("J4", "two_owners", j4_two_owners),
        of("J4", "no_lease", j4_no_lease),
        of("J4", "foreign_start", j4_foreign_start),
        of("J4", "two_places", j4_two_places),
        of("J5", "foreign_report", j5_other_session),
        of("J5", "foreign_report", j5_old_epoch),
        of("J5", "foreign_report", j5_refused_and_done),
        of("J5", "stale_result", j5_stale_result),
        of("J5", "stale_attempt", j5_stale_attempt),
        of("J5", "accepted_stale", j5_accepted_stale),
        of("J5", "late_body", j5_late_body),
        of("J6", "illegal_move", j6_illegal_move),
        of("J6", "illegal_move", j6_illegal_move_of_a_run),
        of("J6", "broken_chain", j6_broken_chain),
        of("J6", "closed_with_open_tasks", j6_closed_with_open_tasks),
        of("J6", "fact_changed", j6_fact_changed),
        of("J7", "reaped_alive", j7_reaped_alive),
        of("J7", "reaped_alive", j7_frozen_too_short),
        of("J7", "reaped_alive", j7_somebody_else_was_frozen),
        of("J7", "reaped_alive", j7_an_outage_is_no_excuse),
        of("J7", "reaped_alive", j7_killed_only_later),
        of("J7", "reaped_after_beat", j7_reaped_after_beat),
        of("J7", "body_outlived", j7_body_outlived),
        of("J7", "orphaned_alive", j7_orphaned_alive),
        of("J7", "dispatch_lost_there", j7_dispatch_lost_there),
        of("J7", "dispatch_lost_unasked", j7_dispatch_lost_unasked),
        of("J8", "stuck_run", leftover("run")),
        of("J8", "stuck_task", leftover("task")),
        of("J8", "leftover", leftover("lease")),
        of("J8", "leftover", j8_left_with_its_executor),
        of("J8", "slow_recovery", j8_slow_recovery),
        of("J8", "slow_run", j8_slow_run),
        of("J8", "not_drained", j8_not_drained),
        of("J9", "old_leader", commit("planning", 1)),
        of("J9", "old_leader", commit("renew", 1)),
        of("J9", "old_leader", commit("silence", None)),
        of("J9", "old_leader", commit("gone", None)),
        of("J9", "epoch_went_back", commit("take", 1)),
        of("J9", "two_leaders", commit("take", 2)),
        of("J9", "two_leaders", j9_two_leaders),
        of("J10", "lost", j10_lost),
        of("J10", "doubled", j10_doubled),
        of("J10", "refused_but_there", j10_refused_but_there),
        of("J11", "too_many_attempts", lambda e: plans(e, max_attempts=2)),
        of("J11", "too_many_losses", lambda e: e, limits=replace(TIGHT, infra_retries=0)),
        of("J11", "too_soon", lambda e: plans(e, retry={"delay_seconds": 3.0, "jitter": 0.25})),
        of("J11", "too_soon", j11_too_soon_by_the_audit),
        of("J12", "no_row", j12_no_row),
        of("J12", "two_rows", j12_two_rows),
        of("J12", "stale_touch", j12_stale_touch),
        of("J12", "shared_token", j12_shared_token),
        of("J12", "no_effect", j12_no_effect),
        of("J12", "effects_beyond_epochs", j12_effects_beyond_epochs, "J4"),
        of("J13", "gap", j13_gap),
        of("J13", "gap", j13_gap_of_one_shard),
        of("J13", "gap", lambda e: closed_shard(e, opened=115, led_again=121)),
        *(
            of("J14", kind, leaking(is_last, fields))
            for is_last in (True, False)
            for kind, fields in (
                ("fds", {"fds": 60}),
                ("threads", {"threads": 9}),
                ("children", {"children": 9}),
                ("rss", {"rss_kb": 120_000}),
                ("connections", {"connections": 15}),
            )
        ),
        of("J14", "connections", lambda e: totals(e, connections=40)),
        of("J14", "strays", lambda e: totals(e, strays=1)),
        of("J15", "overfull", lambda e: changed(e, "pool_moves", lambda each: True, capacity=1)),
        of("J15", "overfull", j15_a_key_held_twice, "J16"),
        of("J15", "limit_drift", lambda e: replace(e, limits_broken=("pool wide: 3 of 2 held, 2 counted",))),
        of("J16", "ran_beside", j16_closed_late),
        of("J16", "runs_overlap", j16_overlapping),
        of("J16", "skipped_alone", j16_skipped_alone),
    ]


PLANTED = _planted()
