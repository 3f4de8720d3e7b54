"""The one table of moves: the database's types, its CHECKs and every verb agree with domain/states.py (V4)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.domain.access import Actor
from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey
from evertick.domain.errors import Conflict
from evertick.domain.states import TERMINAL_TASK_STATES, RunState, TaskState, TriggerRule
from evertick.engine.dags import pause, unpause
from evertick.engine.finish_and_claim import claim_selected
from evertick.engine.maintenance import promote_due_tasks, reconcile_runs
from evertick.engine.remote_attempts import DispatchResult, NotStarted, claim_for_dispatch, end_queued
from evertick.engine.runners import mark_runner_dead
from evertick.engine.runs import cancel
from evertick.engine.tasks import clear, mark, select_tasks
from evertick.engine.triggers import encode_end, exchange_triggers
from tests.engine.audit import Move, forget_moves, illegal_moves, install_audit, legal_moves, moves, moves_of
from tests.engine.script import SCENES, Scene, play
from tests.engine.subject import SUBJECT, Subject, place_subject, reopen_before
from tests.engine.world import key_of, make_dag, put, start

T = TaskState

# Legal, but not made here: what is deferred is in test_children.py.
LATER_STATES = {"deferred"}
LATER_RUNS = {Move("run", "queued", "failed")}
# Legal as one committed move. The verbs go by way of the state between, in the same transaction.
BY_WAY_OF = {
    *(Move("task", state, new) for state in TERMINAL_TASK_STATES for new in ("pending", "available")),
    Move("task", "running", "available"),
    Move("task", "queued", "available"),
}


@pytest.mark.parametrize(
    ("name", "states"), [("task_state", TaskState), ("run_state", RunState), ("trigger_rule", TriggerRule)]
)
async def test_the_types_of_the_database_are_those_of_the_domain(
    rollback_conn: AsyncConnection, name: str, states: type[StrEnum]
) -> None:
    query = "select e.enumlabel from pg_enum e where e.enumtypid = %s::regtype order by e.enumsortorder"
    cursor = await rollback_conn.execute(query, [name])
    assert [row[0] for row in await cursor.fetchall()] == [state.value for state in states]


@pytest.mark.requirement("I8")
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
async def test_a_scene_of_a_day_makes_no_illegal_move(rollback_conn: AsyncConnection, scene: Scene) -> None:
    await install_audit(rollback_conn)
    await play(rollback_conn, scene)
    assert await illegal_moves(rollback_conn) == set()


@pytest.mark.requirement("I8")
async def test_a_whole_day_makes_every_move_that_verbs_can_make_today(rollback_conn: AsyncConnection) -> None:
    await install_audit(rollback_conn)
    for scene in SCENES:
        await play(rollback_conn, scene)
    expected = {
        move
        for move in legal_moves() - BY_WAY_OF - LATER_RUNS
        if move.thing == "run" or not LATER_STATES & {move.old, move.new}
    }
    assert expected - await moves(rollback_conn) == set(), "no scene of tests/engine/script.py makes these"


# Every verb from every state ------------------------------------------------------------------------------------------

Verb = Callable[[Subject], Awaitable[object]]
Chains = dict[TaskState, list[TaskState]]

ENDED = sorted(TERMINAL_TASK_STATES)
UNSTARTED = [T.WAITING, T.PENDING, T.AVAILABLE, T.DEFERRED]


def reports(kind: str, **fields: Any) -> Verb:
    return lambda subject: subject.runner.finish(subject.claim, kind, **fields)


def before_ends(kind: str) -> Verb:
    async def verb(subject: Subject) -> None:
        claim = await reopen_before(subject)
        await forget_moves(subject.conn)
        await subject.runner.finish(claim, kind, no_retry=True)

    return verb


def marks(state: TaskState) -> Verb:
    async def verb(subject: Subject) -> None:
        try:
            await mark(subject.conn, key_of(subject.claim), state=state, actor=Actor("me"))
        except Conflict:
            assert await subject.state() == state

    return verb


async def claims_by_place(subject: Subject) -> None:
    cursor = await subject.conn.execute("select rank, seq from ready_task")
    rows = await cursor.fetchall()
    session = subject.runner.session
    places, seqs = [rank for rank, _ in rows], [seq for _, seq in rows]
    await claim_selected(subject.conn, session=session, queues=["default"], places=places, seqs=seqs)


async def claims_for_dispatch(subject: Subject) -> None:
    await claim_for_dispatch(subject.conn, session=subject.runner.session, queues=["default"], free=9)


def ends_queued(kind: DispatchResult) -> Verb:
    def verb(subject: Subject) -> Awaitable[object]:
        claim, session = subject.claim, subject.runner.session
        end = NotStarted(key=key_of(claim), epoch=claim.epoch, session=session, kind=kind, reason="x")
        return end_queued(subject.conn, [end], infra_retries=3)

    return verb


async def clears(subject: Subject) -> None:
    chosen = await select_tasks(subject.conn, run_id=subject.run_id, names=["subject"])
    await clear(subject.conn, run_id=subject.run_id, chosen=chosen, actor=Actor("me"))


async def fires(subject: Subject) -> None:
    """Whatever the task's state, its trigger is held and reports an event."""
    cursor = await subject.conn.execute(
        "insert into task_trigger (run_id, idx, map_index, epoch, attempt, queue, classpath, given, since, session)"
        " select k.run_id, k.idx, k.map_index, k.epoch, 1, 'default', 'm.T', '{}', clock(), %s from task k"
        " where k.run_id = %s and k.idx = %s returning map_index, epoch",
        [subject.runner.session, subject.run_id, SUBJECT],
    )
    for map_index, epoch in await cursor.fetchall():
        key = TaskKey(subject.run_id, SUBJECT, map_index)
        event = encode_end(Outcome(key=key, epoch=epoch, kind=OutcomeKind.SUCCESS, result_json='{"event": 1}'))
        session = subject.runner.session
        await exchange_triggers(subject.conn, session=session, reports=[event], held=[], queues=[], free=0)


async def unpauses(subject: Subject) -> None:
    await subject.conn.execute("update dag set is_paused = true")
    await unpause(subject.conn, dag="chain", actor=Actor("me"))


async def promotes(subject: Subject) -> None:
    await subject.conn.execute("insert into task_timer select 0, clock(), %s, %s, -1", [subject.run_id, SUBJECT])
    await subject.conn.execute(
        "update task k set not_before = w.due_at from task_timer w where k.idx = w.idx and state = 'pending'"
    )
    await promote_due_tasks(subject.conn, shard=0, epoch=subject.leader, limit=10)


VERBS: dict[str, tuple[Verb, Chains]] = {
    "claim": (lambda s: s.runner.claim(), {T.AVAILABLE: [T.RUNNING]}),
    "claim by place": (claims_by_place, {T.AVAILABLE: [T.RUNNING]}),
    "claim for an executor": (claims_for_dispatch, {T.AVAILABLE: [T.QUEUED]}),
    "lose before it began": (ends_queued(DispatchResult.LOST), {T.QUEUED: [T.PENDING, T.AVAILABLE]}),
    "fail before it began": (ends_queued(DispatchResult.FAILED), {T.QUEUED: [T.PENDING, T.AVAILABLE]}),
    "give back before it began": (ends_queued(DispatchResult.GIVEN_BACK), {T.QUEUED: [T.PENDING, T.AVAILABLE]}),
    "report success": (reports("success"), {T.RUNNING: [T.SUCCESS]}),
    "report skipped": (reports("skipped"), {T.RUNNING: [T.SKIPPED]}),
    "report failed for good": (reports("failed", no_retry=True), {T.RUNNING: [T.FAILED]}),
    "report failed": (reports("failed", retry_in=9), {T.RUNNING: [T.PENDING]}),
    "defer to a trigger": (reports("deferred", result={"trigger": {"classpath": "m.T"}}), {T.RUNNING: [T.DEFERRED]}),
    "trigger fires": (fires, {T.DEFERRED: [T.PENDING, T.AVAILABLE]}),
    "give back": (reports("given_back"), {T.RUNNING: [T.PENDING, T.AVAILABLE]}),
    "bury": (
        lambda s: mark_runner_dead(s.conn, session=s.runner.session, reason="gone", infra_retries=3),
        {T.RUNNING: [T.PENDING, T.AVAILABLE]},
    ),
    "upstream succeeds": (before_ends("success"), {T.WAITING: [T.AVAILABLE]}),
    "upstream fails": (before_ends("failed"), {T.WAITING: [T.UPSTREAM_FAILED]}),
    "upstream skips": (before_ends("skipped"), {T.WAITING: [T.SKIPPED]}),
    "promote": (promotes, {T.PENDING: [T.AVAILABLE]}),
    "cancel": (
        lambda s: cancel(s.conn, run_id=s.run_id, actor=Actor("me")),
        {state: [T.CANCELED] for state in UNSTARTED},
    ),
    "clear": (clears, {state: [T.WAITING, T.AVAILABLE] for state in ENDED}),
    "mark success": (marks(T.SUCCESS), {s: [T.SUCCESS] for s in (*UNSTARTED, *ENDED) if s != T.SUCCESS}),
    "mark failed": (marks(T.FAILED), {s: [T.FAILED] for s in (*UNSTARTED, *ENDED) if s != T.FAILED}),
    "mark skipped": (marks(T.SKIPPED), {s: [T.SKIPPED] for s in (*UNSTARTED, *ENDED) if s != T.SKIPPED}),
    "pause": (lambda s: pause(s.conn, dag="chain", actor=Actor("me")), {T.AVAILABLE: [T.PENDING]}),
    "unpause": (unpauses, {T.PENDING: [T.AVAILABLE]}),
    "reconcile": (
        lambda s: reconcile_runs(s.conn, shard=0, epoch=s.leader, limit=10),
        {T.WAITING: [T.AVAILABLE], T.PENDING: [T.AVAILABLE]},
    ),
}


@pytest.mark.requirement("I5", "I8")
@pytest.mark.parametrize("name", VERBS)
async def test_a_verb_moves_a_task_from_the_states_that_it_names_and_from_no_other(
    rollback_conn: AsyncConnection, name: str
) -> None:
    verb, expected = VERBS[name]
    await install_audit(rollback_conn)
    found: Chains = {}
    for state in TaskState:
        async with rollback_conn.transaction(force_rollback=True):
            subject = await place_subject(rollback_conn, state)
            await forget_moves(rollback_conn)
            await verb(subject)
            assert await illegal_moves(rollback_conn) == set(), state
            if chain := await moves_of(rollback_conn, SUBJECT):
                found[state] = [T(move.new) for move in chain]
    assert found == expected


# CHECKs ---------------------------------------------------------------------------------------------------------------

NONSENSE = {
    "running without an owner": "update task set state = 'running', session = null, started_at = clock()",
    "running without an epoch": "update task set state = 'running', session = 1, started_at = clock(), epoch = 0",
    "running without a start": "update task set state = 'running', session = 1, epoch = 1, started_at = null",
    "queued without an owner": "update task set state = 'queued', session = null, epoch = 1",
    "queued without an epoch": "update task set state = 'queued', session = 1, epoch = 0",
    "queued and begun": "update task set state = 'queued', session = 1, epoch = 1, started_at = clock()",
    "asked to stop while nothing runs": "update task set request = 'cancel'",
    "waiting for a time while in line": "update task set not_before = clock()",
    "ended without a time": "update task set state = 'success', finished_at = null",
    "less than no attempt": "update task set attempt = -1",
    "more ended tasks than there are": "update run_status set state = 'queued', open_tasks = -1",
    "fewer than no failures": "update run_status set failed_leaves = -1",
    "a run that ended with open tasks": "update run_status set state = 'success', finished_at = clock()",
    "a run that ended without a time": "update run_status set state = 'success', open_tasks = 0",
    "a run that runs nothing": "update run_status set open_tasks = 0",
    "a task that may never be tried": "update task_spec set max_attempts = 0",
    "a rank outside the scale": "update task_spec set priority = 10",
    "a limit that lets nothing run": "update dag set max_active_runs = 0",
    "a schedule without a version": "update schedule set version = 0",
    "a schedule from nowhere": "update schedule set origin = 'elsewhere'",
    "a skip of nothing": "insert into skip_record values (1, clock(), clock(), 0, 'x', clock())",
}


@pytest.mark.parametrize("nonsense", NONSENSE)
async def test_the_database_refuses_a_row_that_makes_no_sense(rollback_conn: AsyncConnection, nonsense: str) -> None:
    await put(rollback_conn, make_dag("one", {"a": []}, every="@daily"))
    await start(rollback_conn, "one")
    with pytest.raises(psycopg.errors.CheckViolation):
        await rollback_conn.execute(NONSENSE[nonsense])
