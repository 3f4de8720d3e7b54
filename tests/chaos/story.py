"""A made-up run of the suite in which everything went well: what the checker must find nothing in.

Two leaders, three runners of which one is killed and one frozen past the threshold, an attempt that is lost elsewhere, retries,
a pause, an edit, an outage, clients, stale writers, bodies, the sink. Deterministic; `tell` gives the evidence. Tests plant
violations into it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.chaos import expected
from tests.chaos.effects import Effect
from tests.chaos.evidence import (
    AttemptReport,
    Change,
    ClockReading,
    Evidence,
    LeaderCommit,
    LeaseMove,
    Need,
    PastAttempt,
    PoolMove,
    ResultRow,
    RunFact,
    RunMove,
    RunnerFact,
    RunnerMove,
    ScheduleMove,
    ScheduleVersion,
    ShardMove,
    Skip,
    TaskMove,
    TaskPlan,
)
from tests.chaos.record import (
    Answer,
    ClientRequest,
    Fault,
    FaultWindow,
    Nemesis,
    Phase,
    Placement,
    ProcessLife,
    Sample,
    TotalSample,
    disturbed_by,
)
from tests.chaos.sink import Sink, SinkRow, SinkTouch

BOOT = 10**12
T0 = datetime(2030, 1, 1, 12, tzinfo=UTC)
RETRY = {"delay_seconds": 2.0, "jitter": 0.25, "retries": 2}
RUNNERS = {1: "runner-1", 2: "runner-2", 3: "runner-3", 11: "runner-1"}
PIDS = {1: 101, 2: 102, 3: 103, 11: 111, "scheduler-1": 201, "scheduler-2": 202}
KILLED, FROZEN, THAWED, TAKEN = 40.0, 60.0, 75.0, 31.5
# The sessions of two attempts elsewhere, and when the first was removed there and given up.
FIRST, SECOND, REMOVED, GIVEN_UP = 51, 52, 104.0, 108.0
END = 160.0


def ns(seconds: float) -> int:
    return BOOT + round(seconds * 1e9)


def wall(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


@dataclass(slots=True)
class Story:
    """Writes down what happens, second by second. Methods return what they made, so that a test can find it again."""

    _entries: Any = field(default_factory=lambda: itertools.count(1))
    _tx: Any = field(default_factory=lambda: itertools.count(1000))
    parts: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, part: str, row: Any) -> Any:
        self.parts.setdefault(part, []).append(row)
        return row

    def entry(self) -> int:
        return int(next(self._entries))

    # Runs and attempts ----------------------------------------------------------------------------------------------

    def create(
        self, run_id: int, dag: str, at: float, *, schedule: int | None = None, fire: float | None = None
    ) -> None:
        tx = next(self._tx)
        key = None if schedule is not None else f"key-{run_id}"
        fire_at = None if fire is None else wall(fire)
        kind = "scheduled" if schedule is not None else "manual"
        self.add("runs", RunFact(run_id, dag, _VERSION[dag], kind, schedule, fire_at, key, "x", wall(at), "success"))
        self.add("run_moves", RunMove(self.entry(), tx, wall(at), ns(at), run_id, None, "running", None))
        self.move(tx, at, run_id, 0, None, "available")
        if key is not None:
            self.add("changes", Change("trigger", key))
            self.add(
                "client",
                ClientRequest(
                    op="trigger", request=key, asked_ns=ns(at), answered_ns=ns(at), answer=Answer.OK, detail={}
                ),
            )

    def move(
        self,
        tx: int,
        at: float,
        run_id: int,
        idx: int,
        old: str | None,
        new: str,
        epochs: tuple[int, int] = (0, 0),
        sessions: tuple[int | None, int | None] = (None, None),
    ) -> TaskMove:
        row = TaskMove(
            self.entry(),
            tx,
            ns(at),
            run_id,
            idx,
            -1,
            old,
            new,
            epochs[0],
            epochs[1],
            sessions[0],
            sessions[1],
            1,
            0,
            None,
        )
        self.add("task_moves", row)
        return row

    def claim(self, run_id: int, idx: int, at: float, epoch: int, session: int) -> None:
        tx = next(self._tx)
        self.move(tx, at, run_id, idx, "available", "running", (epoch - 1, epoch), (None, session))
        self.add("lease_moves", LeaseMove(self.entry(), tx, ns(at), session, run_id, idx, -1, epoch, True))

    def end(self, run_id: int, idx: int, at: float, epoch: int, session: int, kind: str, new: str) -> int:
        """The attempt's end is recorded. Returns the transaction."""
        tx: int = next(self._tx)
        self.add("reports", AttemptReport(self.entry(), tx, ns(at), session, run_id, idx, -1, epoch, kind, False))
        self.move(tx, at, run_id, idx, "running", new, (epoch, epoch), (session, session if new != "pending" else None))
        self.add("lease_moves", LeaseMove(self.entry(), tx, ns(at), session, run_id, idx, -1, epoch, False))
        if new == "pending":
            self.add("past_attempts", PastAttempt(run_id, idx, -1, epoch, session))
        if new == "success":
            self.add("results", ResultRow(run_id, idx, -1, epoch))
        return tx

    def close(self, tx: int, run_id: int, at: float) -> None:
        self.add("run_moves", RunMove(self.entry(), tx, wall(at), ns(at), run_id, "running", "success", None))

    def line(self, run_id: int, idx: int, at: float, epoch: int, session: int, what: str) -> None:
        run = next(run for run in reversed(self.parts["runs"]) if run.run_id == run_id)
        name, schedule = _TASKS[run.dag][idx], _name(run.schedule_id)
        self.add(
            "effects",
            Effect(
                run_id, name, -1, epoch, 1, 5000 + run_id * 10 + epoch, ns(at), what, run.fire_at, run.dag, schedule,
                RUNNERS[session],
            ),
        )  # fmt: skip

    def attempt(self, run_id: int, idx: int, at: float, *, epoch: int = 1, session: int = 3, lasts: float = 0.5) -> int:
        """One good attempt, from its claim to its end."""
        self.claim(run_id, idx, at, epoch, session)
        self.line(run_id, idx, at + 0.05, epoch, session, "begin")
        self.line(run_id, idx, at + lasts - 0.05, epoch, session, "end")
        return self.end(run_id, idx, at + lasts, epoch, session, "success", "success")

    # What happens ---------------------------------------------------------------------------------------------------

    def fire(self, schedules: dict[int, tuple[str, str]]) -> None:
        """All but the third, which is paused for a while."""
        run_id = 0
        for schedule, (dag, _) in schedules.items():
            if schedule == 3:
                continue
            for instant in expected.fires(_spec(schedule), wall(5), wall(END - 20)):
                run_id += 1
                at = (instant - T0).total_seconds()
                # Nothing is created while nobody leads, nor during the outage.
                made = {True: TAKEN + 0.1}.get(30 <= at < TAKEN, 95.5 if 90 <= at < 95.5 else at + 0.02)
                self.create(run_id, dag, made, schedule=schedule, fire=at)
                tx = self.attempt(run_id, 0, made + 0.1)
                if dag == "chain":
                    self.move(tx, made + 0.6, run_id, 1, None, "available")
                    tx = self.attempt(run_id, 1, made + 0.7)
                    self.put(run_id, 1, 1)
                    self.close(tx, run_id, made + 1.2)
                else:
                    self.close(tx, run_id, made + 0.6)

    def put(self, run_id: int, idx: int, epoch: int, *, is_refused: bool = False) -> None:
        """The body writes into the sink."""
        run = next(run for run in reversed(self.parts["runs"]) if run.run_id == run_id)
        name = _TASKS[run.dag][idx]
        number = len(self.parts.get("touches", ())) + 1
        is_first = not is_refused
        pid = 5000 + run_id * 10 + epoch
        self.add("touches", SinkTouch(number, run_id, name, -1, epoch, pid, not is_refused, is_first))
        if is_first:
            self.add("rows", SinkRow(run_id, name, -1, epoch))

    def lose_one_by_kill(self) -> None:
        """Run 90_001: its runner is killed; another one does it again."""
        self.create(90_001, "chain", 38.0)
        self.claim(90_001, 0, 38.5, 1, 1)
        self.line(90_001, 0, 38.6, 1, 1, "begin")
        self.end(90_001, 0, KILLED + 0.5, 1, 1, "lost", "pending")
        self._promote(90_001, 0, KILLED + 0.6, 1)
        self._finish_chain(90_001, KILLED + 0.8, epoch=2)

    def lose_one_by_freeze(self) -> None:
        """Run 90_002: its runner is frozen past the threshold; its body goes on and is refused when its runner wakes."""
        self.create(90_002, "chain", 59.0)
        self.claim(90_002, 0, 59.2, 1, 2)
        self.line(90_002, 0, 59.3, 1, 2, "begin")
        lost = FROZEN + 9.5
        self.end(90_002, 0, lost, 1, 2, "lost", "pending")
        self._promote(90_002, 0, lost + 0.1, 1)
        self.line(90_002, 0, lost + 2.0, 1, 2, "word")
        self._finish_chain(90_002, lost + 0.5, epoch=2)
        tx = next(self._tx)
        self.add("reports", AttemptReport(self.entry(), tx, ns(THAWED + 0.2), 2, 90_002, 0, -1, 1, "success", True))

    def retry_one(self) -> None:
        """Run 90_003: fails twice, waits for its back-off, succeeds."""
        self.try_until_success(90_003, 112.0, ["failed", "failed"])

    def try_until_success(self, run_id: int, at: float, outcomes: list[str]) -> None:
        """A run of the flaky task whose attempts end so, and whose last one succeeds. Failures wait for their back-off."""
        self.create(run_id, "flaky", at)
        at += 0.2
        for epoch, outcome in enumerate(outcomes, start=1):
            self.claim(run_id, 0, at, epoch, 3)
            self.line(run_id, 0, at + 0.05, epoch, 3, "begin")
            self.line(run_id, 0, at + 0.15, epoch, 3, "fail")
            self.end(run_id, 0, at + 0.2, epoch, 3, outcome, "pending")
            pause = 2.0 if outcome == "failed" else 0.3
            self._promote(run_id, 0, at + pause, epoch)
            at += pause + 0.1
        tx = self.attempt(run_id, 0, at, epoch=len(outcomes) + 1)
        self.close(tx, run_id, at + 0.5)

    def _promote(self, run_id: int, idx: int, at: float, epoch: int) -> None:
        self.move(next(self._tx), at, run_id, idx, "pending", "available", (epoch, epoch))

    def _finish_chain(self, run_id: int, at: float, *, epoch: int) -> None:
        tx = self.attempt(run_id, 0, at, epoch=epoch)
        self.move(tx, at + 0.5, run_id, 1, None, "available")
        tx = self.attempt(run_id, 1, at + 0.6)
        self.put(run_id, 1, 1)
        self.close(tx, run_id, at + 1.1)

    def lose_a_quiet_one(self) -> None:
        """Run 90_004: like 90_001, but its bodies write nothing."""
        self.create(90_004, "quiet", 38.0)
        self.claim(90_004, 0, 38.5, 1, 1)
        self.end(90_004, 0, KILLED + 0.5, 1, 1, "lost", "pending")
        self._promote(90_004, 0, KILLED + 0.6, 1)
        self.claim(90_004, 0, KILLED + 0.8, 2, 3)
        tx = self.end(90_004, 0, KILLED + 1.8, 2, 3, "success", "success")
        self.close(tx, 90_004, KILLED + 1.8)

    def lose_one_elsewhere(self) -> None:
        """Run 90_005: an executor elsewhere took it, and somebody removed it there before it began; then its agent does it."""
        run_id = 90_005
        self.create(run_id, "far", 100.0)
        self._queue(run_id, 100.2, 1, FIRST)
        lost = self.move(next(self._tx), GIVEN_UP, run_id, 0, "queued", "pending", (1, 1), (FIRST, None))
        self.parts["task_moves"][-1] = lost._replace(reason="dispatch_lost: its executor does not know it")
        self.add("past_attempts", PastAttempt(run_id, 0, -1, 1, FIRST))
        self._promote(run_id, 0, GIVEN_UP + 0.1, 1)
        self._queue(run_id, GIVEN_UP + 0.2, 2, SECOND)
        tx = next(self._tx)
        self.move(tx, GIVEN_UP + 1, run_id, 0, "queued", "running", (2, 2), (SECOND, SECOND))
        self.add("lease_moves", LeaseMove(self.entry(), tx, ns(GIVEN_UP + 1), SECOND, run_id, 0, -1, 2, True))
        self.close(self.end(run_id, 0, GIVEN_UP + 3, 2, SECOND, "success", "success"), run_id, GIVEN_UP + 3)

    def _queue(self, run_id: int, at: float, epoch: int, session: int) -> None:
        self.move(next(self._tx), at, run_id, 0, "available", "queued", (epoch - 1, epoch), (None, session))

    def lead(self) -> None:
        """Two leaders, a tick each second, silence counted by whoever leads; nobody while the database is away."""
        for second in range(1, int(END)):
            if 30 <= second < TAKEN or 90 <= second < 95:
                continue
            epoch, backend, owner = (1, "b1", "scheduler-1") if second < 30 else (2, "b2", "scheduler-2")
            old = {1: 0, 32: 1}.get(second, epoch)
            at = float(second)
            self.add("shard_moves", ShardMove(self.entry(), wall(at), ns(at), 0, old, epoch, owner))
            self.add("clock", ClockReading(ns(at), wall(at)))
            for kind in ("take" if old != epoch else "renew", "planning"):
                self._commit(backend, at, kind, epoch)
            self._commit(backend, at + 0.01, "silence", None)

    def _commit(self, backend: str, at: float, kind: str, epoch: int | None) -> LeaderCommit:
        place = len(self.parts.get("leader_commits", ())) + 1
        shard = None if epoch is None else 0
        row = LeaderCommit(place, next(self._tx), backend, ns(at), kind, shard, epoch)
        self.add("leader_commits", row)
        return row

    def beat(self) -> None:
        for session, service in RUNNERS.items():
            began, ended = (41.0 if session == 11 else 0.5), (KILLED if session == 1 else END)
            self.add("runners", RunnerFact(session, service, int(PIDS[session])))
            self.add("runner_moves", RunnerMove(self.entry(), ns(began), session, "started", None))
            for second in range(int(began) + 1, int(ended)):
                if not (session == 2 and FROZEN <= second < THAWED) and not 90 <= second < 95:
                    self.add("runner_moves", RunnerMove(self.entry(), ns(second), session, "beat", None))

    def schedule(self, schedules: dict[int, tuple[str, str]]) -> None:
        for schedule, (dag, name) in schedules.items():
            policy, spec = "latest" if schedule == 3 else "all", _spec(schedule)
            self.add(
                "schedule_versions",
                ScheduleVersion(
                    self.entry(), wall(5), schedule, dag, name, 1, spec, policy, 3600.0, None, "x", False, _OVERLAP[dag]
                ),
            )
            self._schedule_move(schedule, 5.0, is_paused=False)
        # The third is paused for 40 s: four fires are skipped on record, and it ends before it fires again.
        self._schedule_move(3, 21.0, is_paused=True)
        self._schedule_move(3, 61.0, is_paused=False)
        self.add("skips", Skip(3, wall(30), wall(60), 4, "paused", wall(61)))

    def _schedule_move(self, schedule: int, at: float, *, is_paused: bool) -> None:
        due = wall(at + 5)
        self.add(
            "schedule_moves",
            ScheduleMove(self.entry(), wall(at), ns(at), schedule, 1, None, due, is_paused, None, True),
        )

    def torment(self) -> Nemesis:
        def fault(kind: Fault, target: str, start: float, stop: float, **parameters: Any) -> FaultWindow:
            return FaultWindow(
                number=round(start * 10), kind=kind, target=target, start_ns=ns(start), stop_ns=ns(stop),
                disturbs=disturbed_by(kind, target), parameters=parameters,
            )  # fmt: skip

        def life(name: str, pid: int, start: float, stop: float | None) -> ProcessLife:
            exit_ns = None if stop is None else ns(stop)
            return ProcessLife(
                service=name, pid=pid, start_ns=ns(start), exit_ns=exit_ns, status=None if stop is None else -9
            )

        lives = [
            life(name, int(PIDS[s]), 41 if s == 11 else 0, KILLED if s == 1 else None) for s, name in RUNNERS.items()
        ]
        lives += [life("scheduler-1", 201, 0, 30.0), life("scheduler-2", 202, 0, None)]
        faults = (
            fault(Fault.KILL, "scheduler-1", 30, 30),
            fault(Fault.KILL, "runner-1", KILLED, KILLED),
            fault(Fault.FREEZE, "runner-2", FROZEN, THAWED),
            fault(Fault.OUTAGE, "postgres", 90, 95),
            fault(Fault.POISON, "all", 110, 111),
        )
        phases = ((Phase.IDLE, 1), (Phase.LOAD, 5), (Phase.STOPPED, END - 18), (Phase.HEALED, END - 15),
                  (Phase.IDLE, END - 8), (Phase.READ, END - 1))  # fmt: skip
        return Nemesis(
            faults=faults,
            lives=tuple(lives),
            phases=tuple((str(phase), ns(at)) for phase, at in phases),
            samples=tuple(self._samples()),
            totals=tuple(
                TotalSample(at_ns=ns(at), connections=12, strays=0, phase=phase)
                for phase, at in ((Phase.IDLE, 2), (Phase.LOAD, 50), (Phase.IDLE, END - 5))
            ),
            placements=tuple(
                Placement(name=f"et-90005-0-x-{epoch}-{session:016x}", start_ns=ns(start), stop_ns=ns(stop))
                for epoch, session, start, stop in (
                    (1, FIRST, 100.5, REMOVED),
                    (2, SECOND, GIVEN_UP + 0.5, GIVEN_UP + 4),
                )
            ),
        )

    def _samples(self) -> list[Sample]:
        times = [(Phase.IDLE, 2.0), *((Phase.LOAD, float(at)) for at in range(10, 140, 5)), (Phase.IDLE, END - 5)]
        return [
            Sample(
                service=name, pid=pid, at_ns=ns(at), fds=20 + (at > 5), threads=2, children=4, rss_kb=50_000 + int(at),
                connections=3, phase=phase,
            )
            for name, pid in (("runner-3", 103), ("scheduler-2", 202))
            for phase, at in times
        ]  # fmt: skip

    def haunt(self) -> None:
        """Stale writers, all refused; a client that never heard back; one that was refused."""
        for number in range(5):
            self._request("stale_finish", f"z-{number}", Answer.ERROR)
        self._request("trigger", "unheard-1", Answer.UNKNOWN)
        self._request("trigger", "unheard-2", Answer.UNKNOWN)
        self.add("changes", Change("trigger", "unheard-2"))
        self._request("trigger", "refused", Answer.ERROR)

    def _request(self, op: str, request: str, answer: Answer) -> None:
        self.add(
            "client",
            ClientRequest(op=op, request=request, asked_ns=ns(50), answered_ns=ns(51), answer=answer, detail={}),
        )


def tell(*, busy: int = 0, also: Callable[[Story], None] = lambda story: None) -> Evidence:
    """The whole story, with so many more schedules that fire each second, and with what `also` adds to it."""
    story = Story()
    schedules = _SCHEDULES | {number: ("pulse", f"busy-{number}") for number in range(100, 100 + busy)}
    story.schedule(schedules)
    story.fire(schedules)
    story.lose_one_by_kill()
    story.lose_one_by_freeze()
    story.lose_a_quiet_one()
    story.lose_one_elsewhere()
    story.retry_one()
    also(story)
    story.lead()
    story.beat()
    story.haunt()
    parts = {name: tuple(rows) for name, rows in story.parts.items()}
    touches, rows = parts.pop("touches"), parts.pop("rows")
    parts["effects"] = tuple(sorted(parts["effects"], key=lambda effect: effect.at_ns))
    parts["lease_moves"] = tuple(sorted(parts["lease_moves"]))
    plans = {
        (version, idx): TaskPlan(name, 3 if dag == "flaky" else 1, RETRY if dag == "flaky" else {}, _NEEDS.get(dag, ()))
        for dag, version in _VERSION.items()
        for idx, name in enumerate(_TASKS[dag])
    }
    return Evidence(
        **parts,
        sink=Sink(touches, rows),
        nemesis=story.torment(),
        plans=plans,
        pool_moves=(PoolMove(0, "wide", 1000),),
        refused={"finish": 1, "extend": 0, "fence": 0},
        read_at=wall(END - 1),
        read_ns=ns(END - 1),
    )


_VERSION = {"pulse": 1, "chain": 2, "flaky": 3, "paused": 4, "quiet": 5, "far": 6}
_TASKS = {
    "pulse": ["beat"],
    "chain": ["first", "last"],
    "flaky": ["sometimes"],
    "paused": ["never"],
    "quiet": ["mute"],
    "far": ["away"],
}
_NEEDS = {"pulse": (Need("pool", "wide", 2, None),), "chain": (Need("mutex", "link:{params.link}", 1, None),)}
_OVERLAP = {"pulse": "allow", "chain": "skip", "paused": "allow"}
_SCHEDULES = {1: ("pulse", "main"), 2: ("chain", "cron"), 3: ("paused", "main")}
_UNTIL = wall(END - 20).isoformat()
_SPECS: dict[int, dict[str, Any]] = {
    1: {"kind": "interval", "every_seconds": 5.0, "anchor_at": T0.isoformat(), "end_at": _UNTIL},
    2: {"kind": "cron", "expression": "7-59/10 * * * * *", "timezone": "UTC", "end_at": _UNTIL},
    3: {"kind": "interval", "every_seconds": 10.0, "start_at": wall(25).isoformat(), "end_at": wall(64).isoformat()},
}


def _spec(schedule: int) -> dict[str, Any]:
    return _SPECS.get(schedule) or {"kind": "cron", "expression": "* * * * * *", "timezone": "UTC", "end_at": _UNTIL}


def _name(schedule: int | None) -> str:
    return "" if schedule is None else _SCHEDULES.get(schedule, ("pulse", f"busy-{schedule}"))[1]
