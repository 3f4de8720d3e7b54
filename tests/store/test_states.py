"""The one table of moves: the database's types, its CHECKs and every verb agree with domain/states.py (V4)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import LiteralString

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.domain.states import TERMINAL_TASK_STATES, RunState, TaskState, TriggerRule
from evertick.engine.cancel import cancel
from evertick.engine.clear import clear, select_tasks
from evertick.engine.mark import mark
from evertick.engine.pause import pause, unpause
from evertick.engine.promote import promote
from evertick.engine.reap import bury
from evertick.engine.reconcile import reconcile
from tests.engine.audit import Move, illegal_moves, install_audit, legal_moves, moves
from tests.engine.script import SCENES
from tests.engine.subject import SUBJECT, Subject, place_subject, reopen_before
from tests.engine.world import key_of

T = TaskState

# Legal, but nothing makes them yet: remote executors and deferral bring their own verbs.
LATER_STATES = {"queued", "deferred"}
# Legal as one committed move. The verbs go by way of the state between, in the same transaction.
BY_WAY_OF = {
    *(Move("task", state, new) for state in TERMINAL_TASK_STATES for new in ("pending", "available")),
    Move("task", "running", "available"),
}
# A run that fails or ends before it starts: reapers bring this.
LATER_RUNS = {Move("run", "queued", "failed")}


@pytest.mark.parametrize(
    ("name", "states"), [("task_state", TaskState), ("run_state", RunState), ("trigger_rule", TriggerRule)]
)
async def test_the_types_of_the_database_are_those_of_the_domain(
    rollback_conn: AsyncConnection, name: str, states: type[StrEnum]
) -> None:
    cursor = await rollback_conn.execute("select unnest(enum_range(null::%s))::text" % name)  # noqa: UP031
    assert [row[0] for row in await cursor.fetchall()] == [state.value for state in states]


@pytest.mark.requirement("I8")
async def test_a_day_of_work_makes_every_legal_move_and_no_other(conn: AsyncConnection) -> None:
    await install_audit(conn)
    for scene in SCENES:
        await scene(conn)
        assert await illegal_moves(conn) == set(), scene.__name__
    expected = {
        move
        for move in legal_moves() - BY_WAY_OF - LATER_RUNS
        if move.thing == "run" or not LATER_STATES & {move.old, move.new}
    }
    assert expected - await moves(conn) == set(), "no scene of tests/engine/script.py makes these"


Verb = Callable[[Subject], Awaitable[object]]
Chains = dict[TaskState, list[TaskState]]

_ENDED = sorted(TERMINAL_TASK_STATES)
_UNSTARTED = [T.WAITING, T.PENDING, T.AVAILABLE, T.DEFERRED]


def reports(kind: str, **fields: object) -> Verb:
    return lambda subject: subject.runner.finish(subject.claim, kind, **fields)


async def clears(subject: Subject) -> None:
    chosen = await select_tasks(subject.conn, run_id=subject.run_id, names=["subject"])
    await clear(subject.conn, run_id=subject.run_id, chosen=chosen, actor="me")


def marks(state: TaskState) -> Verb:
    async def verb(subject: Subject) -> None:
        with pytest.MonkeyPatch.context():
            try:
                await mark(subject.conn, key_of(subject.claim), state=state, actor="me")
            except psycopg.Error:
                raise
            except Exception as refusal:
                assert await subject.state() == state, refusal

    return verb
