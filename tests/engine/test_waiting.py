"""Tasks that wait without a slot: for a time, a condition, an event or a person; every wait ends once, whoever comes between."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import tasks
from evertick.db.queries import waits as waits_queries
from evertick.db.queries.dags import find
from evertick.db.queries.waits import ApprovalRow
from evertick.domain.access import Actor, Role
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.dags.mapping import MapHow, MappedList, Mapping
from evertick.domain.dags.params import Param, declare_params
from evertick.domain.dags.spec import DagSpec, TaskKind
from evertick.domain.dags.waits import TimeoutAction, WaitKind, WaitSpec
from evertick.domain.errors import Conflict, Forbidden, InvalidParams, NotFound, NotLeader, UserError
from evertick.domain.explain import describe
from evertick.domain.retention import Pace
from evertick.domain.retry import RetryPolicy
from evertick.engine.asks import ask
from evertick.engine.dags import pause, unpause
from evertick.engine.maintenance import reconcile_runs, time_out_run
from evertick.engine.retention import Kind, PruneGrant, prune_kind
from evertick.engine.runners import mark_runner_dead
from evertick.engine.runs import cancel, trigger_run
from evertick.engine.shards import poll_work
from evertick.engine.tasks import clear, mark, select_tasks
from evertick.engine.waits import Decision, Woken, _decide_approval, decide_approval, find_approval, send_event, wake
from tests.engine import invariants
from tests.engine.reasons import explain
from tests.engine.test_asks import holder
from tests.engine.world import Runner, later, lead, make_dag, put, run_state, set_clock, start, states, value

POLL = WaitSpec(kind=WaitKind.POLL, seconds=60, timeout_seconds=600)
ASK = WaitSpec(
    kind=WaitKind.APPROVAL, name="Release?", form=declare_params({"version": Param(type=str, required=True)})
)


def waiting(wait: WaitSpec, **options: object) -> DagSpec:
    """first >> wait >> after."""
    kind = TaskKind.PYTHON if wait.kind is WaitKind.POLL else TaskKind.WAIT
    fields = {key[5:]: options.pop(key) for key in list(options) if key.startswith("wait_")}
    shape = {"first": [], "wait": ["first"], "after": ["wait"]}
    per_task = {"wait": {"kind": kind, "wait": wait, **fields}, "after": {"inputs": ("wait",)}}
    return make_dag("d", shape, per_task=per_task, **options)


async def world(conn: AsyncConnection, spec: DagSpec) -> tuple[int, Runner, int]:
    """A run whose second task waits; the leader's epoch."""
    await set_clock(conn, later(0))
    await invariants.install(conn)
    await put(conn, spec)
    epoch = await lead(conn)
    run = await start(conn, "d")
    runner = await Runner.join(conn)
    (first,) = await runner.claim()
    await runner.finish(first)
    return run, runner, epoch


async def woken(conn: AsyncConnection, epoch: int, seconds: float | None = None) -> Woken:
    if seconds is not None:
        await set_clock(conn, later(seconds))
    done = await wake(conn, shard=0, epoch=epoch, batch=100)
    assert await invariants.violations(conn) == []
    return done


async def why(conn: AsyncConnection, run: int) -> str:
    """What people read; the list of tasks says it in short."""
    (row,) = await tasks.by_name(conn, run_id=run, task="wait")
    assert (row.reason or "").startswith(("waits", "polled"))
    return describe((await explain(conn, run_id=run, task="wait")).reasons[0])


async def reason(conn: AsyncConnection, run: int) -> object:
    return await value(conn, "select reason from task where run_id = %s and idx = 1", run)


async def fails(conn: AsyncConnection, spec: WaitSpec, at: float) -> tuple[str, object]:
    run, _, epoch = await world(conn, spec if isinstance(spec, DagSpec) else waiting(spec))
    await woken(conn, epoch)
    await woken(conn, epoch, at)
    return (await states(conn, run))["wait"], await reason(conn, run)


@pytest.mark.parametrize(
    "wait",
    [
        WaitSpec(kind=WaitKind.TIME, seconds=30),
        WaitSpec(kind=WaitKind.TIME, until=later(30).isoformat()),
        WaitSpec(kind=WaitKind.CLOCK, until="00:00:30"),
    ],
)
async def test_a_time_is_waited_for_to_the_moment_and_no_runner_knows(conn: AsyncConnection, wait: WaitSpec) -> None:
    run, runner, epoch = await world(conn, waiting(wait))
    assert (await states(conn, run))["wait"] == "deferred"
    assert await runner.claim() == []
    assert (await woken(conn, epoch)).next_wake == later(30)
    assert "it waits for a time: it continues at 2030-01-01T00:00:30" in await why(conn, run)
    assert (await woken(conn, epoch, 29.9)).looked_at == 0
    assert (await woken(conn, epoch, 30)).looked_at == 1
    assert (await states(conn, run))["wait"] == "success"
    assert await runner.drain() == ["after"]
    assert await run_state(conn, run) == "success"
    assert await value(conn, "select count(*) from deferral") == 0


async def test_a_time_of_day_is_the_first_one_since_the_instant_that_the_run_is_for(conn: AsyncConnection) -> None:
    """So that a run that is late, or of a backfill, does not wait for another day."""
    await set_clock(conn, later(0))
    await put(conn, waiting(WaitSpec(kind=WaitKind.CLOCK, until="08:00:00"), timezone="Europe/Berlin", every="@daily"))
    epoch = await lead(conn)
    run = await start(conn, "d")
    await conn.execute(
        "update run set fire_at = '2029-07-01T05:30:00Z', kind = 'scheduled', schedule_id = 1 where run_id = %s", [run]
    )
    await invariants.install(conn)
    runner = await Runner.join(conn)
    await runner.finish((await runner.claim())[0])
    assert (await woken(conn, epoch)).looked_at == 2, "read, and over: 06:00 UTC of that summer's day"
    assert (await states(conn, run))["wait"] == "success"


async def test_a_condition_is_polled_until_it_is_met_and_its_polls_are_no_attempts(conn: AsyncConnection) -> None:
    run, runner, epoch = await world(conn, waiting(POLL, wait_retry=RetryPolicy(retries=1, delay_seconds=0)))
    for number in range(3):
        (poll,) = await runner.claim()
        assert poll.attempt == 1
        await runner.finish(poll, "deferred", log=f"poll {number}")
        assert (await states(conn, run))["wait"] == "deferred"
        assert f"it is polled next at 2030-01-01T00:0{number + 1}:00" in await why(conn, run)
        assert (await woken(conn, epoch, 60 * number + 59)).looked_at == 0
        assert (await woken(conn, epoch, 60 * number + 60)).looked_at == 1
    (poll,) = await runner.claim()
    await runner.finish(poll, "success", result={"rows": 3})
    (after,) = await runner.claim()
    assert after.inputs == '{"wait": {"rows": 3}}'
    await runner.finish(after)
    assert await run_state(conn, run) == "success"
    assert await value(conn, "select count(*) from all_attempts where idx = 1") == 1
    assert await value(conn, "select polls from sensor_poll") == 3


async def test_of_many_polls_only_the_last_lines_stay(conn: AsyncConnection) -> None:
    """And those of an attempt that failed, and those that are in the storage already."""
    wait = WaitSpec(kind=WaitKind.POLL, seconds=1)
    run, runner, epoch = await world(conn, waiting(wait, wait_retry=RetryPolicy(retries=1, delay_seconds=0)))
    await runner.finish((await runner.claim())[0], "failed", retry_in=0, log="x", seq=0, until=1)
    for number in range(14):
        (poll,) = await runner.claim()
        await runner.finish(poll, "deferred", log="x", seq=0, until=1)
        if number == 0:
            moved = "content = null, object_id = gen_random_uuid(), object_offset = 0, bytes = 1, digest = ''"
            await conn.execute(f"update log_chunk set {moved} where epoch = %s and idx = 1", [poll.epoch])
        await woken(conn, epoch, number + 1.0)
    left = await value(conn, "select array_agg(epoch order by epoch) from log_chunk where run_id = %s and idx = 1", run)
    assert left == [1, 2, *range(6, 16)]


async def test_polls_back_off_up_to_a_longest_interval(conn: AsyncConnection) -> None:
    wait = WaitSpec(kind=WaitKind.POLL, seconds=10, backoff=2, longest_seconds=30)
    _, runner, epoch = await world(conn, waiting(wait))
    at, waits = 0.0, []
    for _ in range(4):
        await runner.finish((await runner.claim())[0], "deferred")
        due = (await woken(conn, epoch)).next_wake
        assert due is not None
        waits.append((due - later(at)).total_seconds())
        at = (due - later(0)).total_seconds()
        await woken(conn, epoch, at)
    assert waits == [10, 20, 30, 30]


async def test_errors_of_polls_are_retried_by_the_policy_and_counted_anew_after_a_good_one(
    conn: AsyncConnection,
) -> None:
    run, runner, epoch = await world(conn, waiting(POLL, wait_retry=RetryPolicy(retries=1, delay_seconds=0)))
    for number in range(3):
        await runner.finish((await runner.claim())[0], "failed", retry_in=0)
        (again,) = await runner.claim()
        assert again.attempt == 2
        await runner.finish(again, "deferred")
        await woken(conn, epoch, 60 * (number + 1))
    await runner.finish((await runner.claim())[0], "failed", retry_in=0)
    await runner.finish((await runner.claim())[0], "failed", reason="down")
    assert ((await states(conn, run))["wait"], await reason(conn, run)) == ("failed", "down")


@pytest.mark.parametrize(("how", "ended"), [(TimeoutAction.FAIL, "failed"), (TimeoutAction.SKIP, "skipped")])
async def test_a_condition_that_is_not_met_in_time_ends_with_its_reason(
    conn: AsyncConnection, how: TimeoutAction, ended: str
) -> None:
    wait = WaitSpec(kind=WaitKind.POLL, seconds=60, timeout_seconds=90, on_timeout=how)
    run, runner, epoch = await world(conn, waiting(wait))
    await runner.finish((await runner.claim())[0], "deferred")
    await woken(conn, epoch, 60)
    await runner.finish((await runner.claim())[0], "deferred")
    assert (await woken(conn, epoch, 89)).next_wake == later(90), "the deadline comes before the next poll"
    await woken(conn, epoch, 90)
    assert (await states(conn, run))["wait"] == ended
    assert await reason(conn, run) == "sensor_timeout: not true within 90 s, 2 polls"
    assert await runner.claim() == []


async def test_an_attempt_may_work_out_until_when_its_task_waits(conn: AsyncConnection) -> None:
    run, runner, epoch = await world(conn, waiting(POLL))
    await runner.finish((await runner.claim())[0], "deferred", result={"until": later(45).isoformat()})
    assert (await woken(conn, epoch, 44)).looked_at == 0
    await woken(conn, epoch, 45)
    assert (await states(conn, run))["wait"] == "success"
    assert await runner.drain() == ["after"]


async def test_an_attempt_asks_people_and_another_one_gets_their_answer(conn: AsyncConnection) -> None:
    """The question and the wait are stored together; the first answer wakes the task, and the next attempt reads it until the
    task is cleared. An answer that comes too late, or to a question that was asked again, is refused."""
    run, runner, epoch = await world(conn, waiting(WaitSpec(kind=WaitKind.POLL, seconds=60)))
    request: dict[str, object] = {
        "title": "Which?",
        "options": ["a", "b"],
        "multiple": True,
        "until": later(500).isoformat(),
    }
    request["users"] = [{"id": "1", "name": "Ann"}]
    (first,) = await runner.claim()
    await runner.finish(first, "deferred", result={"poll_at": "infinity", "request": request})
    assert (await woken(conn, epoch, 100_000)).next_wake is None
    assert "it waits for an approval, 'Which?'" in await why(conn, run)
    (asked,) = await waits_queries.list_approvals(conn)
    assert (asked.wait, asked.deadline) == (request, later(500))

    async def answer(chosen: list[str] | None, who: str = "user:Ann") -> ApprovalRow:
        given = Decision(is_approved=True, actor=Actor(who), chosen=chosen)
        return await decide_approval(conn, run_id=run, task="wait", decision=given, role=Role.ADMIN)

    for wrong in (None, [], ["c"], ["a", "a"]):
        with pytest.raises(UserError, match=r"choose one or more of \['a', 'b'\]"):
            await answer(wrong)
    with pytest.raises(Forbidden, match="Only Ann can answer 'Which"):
        await answer(["a"], "user:bob")
    assert (await answer(["b", "a"])).chosen == ["b", "a"]
    with pytest.raises(Conflict, match="was approved by user:Ann"):
        await answer(["a"])
    await woken(conn, epoch, 100_001)
    for _ in range(2):  # also after its runner was lost
        (claim,) = await runner.claim()
        found = (await ask(conn, holder(runner, claim), "run", {}))["input"]  # type: ignore[index, call-overload]
        assert (found["request"], found["chosen"], found["decided_by"]) == (request, ["b", "a"], "user:Ann")
        await runner.finish(claim, "given_back")
    (claim,) = await runner.claim()
    await runner.finish(claim, "deferred", result={"poll_at": "infinity", "request": request})
    assert not await _decide_approval(
        conn, asked, is_approved=True, actor=Actor("x"), note=None, fields={}, chosen=["a"]
    )
    assert (await answer(["a"])).chosen == ["a"], "it was asked again"
    await woken(conn, epoch, 100_002)
    (claim,) = await runner.claim()
    await runner.finish(claim)
    with pytest.raises(Conflict, match="was approved by user:Ann"):
        await answer(["b"])
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run, names=["wait"]), actor=Actor("test"))
    (claim,) = await runner.claim()
    assert (await ask(conn, holder(runner, claim), "run", {}))["input"] is None  # type: ignore[index, call-overload]


async def test_the_same_poll_reported_twice_is_one(conn: AsyncConnection) -> None:
    _, runner, epoch = await world(conn, waiting(POLL))
    (poll,) = await runner.claim()
    assert await runner.finish(poll, "deferred") == []
    assert await runner.finish(poll, "deferred") == []
    assert await value(conn, "select polls from sensor_poll") == 1
    await woken(conn, epoch, 60)
    (second,) = await runner.claim()
    assert await runner.finish(poll, "deferred") != [], "that poll is over"
    await runner.finish(second)


async def test_a_poll_whose_runner_dies_is_made_again_elsewhere(conn: AsyncConnection) -> None:
    run, runner, epoch = await world(conn, waiting(POLL))
    await runner.finish((await runner.claim())[0], "deferred")
    await woken(conn, epoch, 60)
    assert len(await runner.claim()) == 1
    await mark_runner_dead(conn, session=runner.session, reason="killed", infra_retries=3)
    other = await Runner.join(conn)
    (again,) = await other.claim()
    await other.finish(again, "deferred")
    assert await value(conn, "select polls from sensor_poll") == 2
    assert (await states(conn, run))["wait"] == "deferred"


async def test_between_polls_gates_are_given_back_and_taken_again(conn: AsyncConnection) -> None:
    key = GateSpec(kind=GateKind.MUTEX, name="k", weight=1_000_000)
    spec = waiting(POLL, wait_gates=(key,))
    run, runner, epoch = await world(conn, spec)
    (poll,) = await runner.claim()
    assert await value(conn, "select count(*) from gate_holder") == 1
    await runner.finish(poll, "deferred")
    assert await value(conn, "select count(*) from gate_holder") == 0
    other = await start(conn, "d")
    await runner.finish((await runner.claim())[0])
    (held,) = await runner.claim()
    assert held.run_id == other
    await woken(conn, epoch, 60)
    assert (await states(conn, run))["wait"] == "pending", "the key is the other's now"
    await runner.finish(held)
    assert run in [claim.run_id for claim in await runner.claim()]


async def test_an_event_ends_the_wait_and_is_its_result(conn: AsyncConnection) -> None:
    run, runner, epoch = await world(conn, waiting(WaitSpec(kind=WaitKind.EVENT, name="file")))
    assert (await woken(conn, epoch)).looked_at == 1, "it may be there already"
    assert (await woken(conn, epoch)) == Woken(looked_at=0, refused=0, next_wake=None)
    assert "it waits for event file: `evertick events send file`" in await why(conn, run)
    await send_event(conn, name="other", payload=1, actor=Actor("me"))
    await woken(conn, epoch)
    assert (await states(conn, run))["wait"] == "deferred"
    await send_event(conn, name="file", payload={"path": "/in"}, actor=Actor("me"))
    await woken(conn, epoch)
    assert (await runner.claim())[0].inputs == '{"wait": {"path": "/in"}}'


@pytest.mark.parametrize(("lookback", "ended"), [(0, "deferred"), (20, "success")])
async def test_what_was_sent_since_the_run_began_counts_and_with_lookback_what_was_before(
    conn: AsyncConnection, lookback: float, ended: str
) -> None:
    await set_clock(conn, later(-10))
    await send_event(conn, name="file", payload=None, actor=Actor("me"))
    wait = WaitSpec(kind=WaitKind.EVENT, name="file", lookback_seconds=lookback)
    run, _, epoch = await world(conn, waiting(wait))
    await woken(conn, epoch)
    assert (await states(conn, run))["wait"] == ended


async def test_an_event_that_came_before_its_wait_began_is_found(conn: AsyncConnection) -> None:
    await set_clock(conn, later(0))
    await invariants.install(conn)
    await put(conn, waiting(WaitSpec(kind=WaitKind.EVENT, name="file")))
    epoch = await lead(conn)
    run = await start(conn, "d")
    await send_event(conn, name="file", payload=7, actor=Actor("me"))
    await woken(conn, epoch)
    runner = await Runner.join(conn)
    await runner.finish((await runner.claim())[0])
    await woken(conn, epoch)
    assert (await states(conn, run))["wait"] == "success"


async def test_one_event_is_for_all_who_wait_however_small_the_batches(conn: AsyncConnection) -> None:
    _, runner, epoch = await world(conn, waiting(WaitSpec(kind=WaitKind.EVENT, name="file")))
    for _ in range(4):
        await start(conn, "d")
    await runner.drain()
    await woken(conn, epoch)
    for name in ("other", "another", "file"):
        await send_event(conn, name=name, payload=None, actor=Actor("me"))
    for _ in range(8):
        await wake(conn, shard=0, epoch=epoch, batch=2)
    assert await value(conn, "select count(*) from deferral") == 0
    assert await value(conn, "select bool_and(is_delivered) from event")


async def test_the_name_of_an_event_is_made_of_the_params(conn: AsyncConnection) -> None:
    await invariants.install(conn)
    wait = WaitSpec(kind=WaitKind.EVENT, name="file-{params.day}")
    await put(conn, waiting(wait, params=declare_params({"day": Param("mon")})))
    epoch = await lead(conn)
    row = await find(conn, "d")
    assert row is not None
    made = await trigger_run(conn, dag_id=row.dag_id, params={"day": "tue"}, key=None, actor=Actor("me"))
    assert made is not None and not made.defers
    runner = await Runner.join(conn)
    await runner.drain()
    await send_event(conn, name="file-mon", payload=None, actor=Actor("me"))
    await woken(conn, epoch)
    assert (await states(conn, made.run_id))["wait"] == "deferred"
    await send_event(conn, name="file-tue", payload=None, actor=Actor("me"))
    await woken(conn, epoch)
    assert (await states(conn, made.run_id))["wait"] == "success"


async def test_a_key_makes_an_event_one_however_often_it_is_sent(conn: AsyncConnection) -> None:
    first = await send_event(conn, name="file", payload=1, actor=Actor("me"), key="k")
    again = await send_event(conn, name="file", payload=1, actor=Actor("you"), key="k")
    with pytest.raises(Conflict, match="another payload"):
        await send_event(conn, name="file", payload=2, actor=Actor("you"), key="k")
    assert (first.is_new, again.is_new, again.sent_by) == (True, False, "me")
    assert again.event_id == first.event_id
    assert (await send_event(conn, name="other", payload=2, actor=Actor("you"), key="k")).is_new


@pytest.mark.parametrize(
    ("name", "payload", "key", "message"),
    [
        ("", None, None, "is not a valid name for an event"),
        (" a", None, None, "without spaces around"),
        ("a\n", None, None, "printable"),
        ("a", float("nan"), None, "not JSON"),
        ("a", "x" * 70_000, None, "at most 65,536"),
        ("a", None, "", "1 to 200 characters"),
    ],
)
async def test_bad_events_are_refused(
    conn: AsyncConnection, name: str, payload: object, key: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        await send_event(conn, name=name, payload=payload, actor=Actor("me"), key=key)


async def test_an_event_that_does_not_come_fails_the_task(conn: AsyncConnection) -> None:
    wait = WaitSpec(kind=WaitKind.EVENT, name="file", timeout_seconds=60)
    assert await fails(conn, wait, 60) == ("failed", "event_timeout: file did not come within 60 s")


def says(
    version: str | None = "2", *, is_approved: bool = True, actor: str = "ann", note: str | None = None
) -> Decision:
    given = {} if version is None else {"version": version}
    return Decision(is_approved=is_approved, actor=Actor(actor), note=note, fields=lambda form: given)


async def test_who_approves_fills_in_the_form_and_the_first_decision_stands(conn: AsyncConnection) -> None:
    run, runner, epoch = await world(conn, waiting(ASK))
    await woken(conn, epoch)
    (asked,) = await waits_queries.list_approvals(conn)
    assert (asked.run_id, asked.task, asked.title) == (run, "wait", "Release?")
    assert "it waits for an approval, 'Release?'" in await why(conn, run)
    with pytest.raises(InvalidParams, match="param 'version' is required"):
        await decide_approval(conn, run_id=run, task="wait", decision=says(None))
    done = await decide_approval(conn, run_id=run, task="wait", decision=says(note="tested"))
    assert (done.is_approved, done.decided_by, done.note, done.fields) == (True, "ann", "tested", {"version": "2"})
    with pytest.raises(Conflict, match=r"was approved by ann at .*: tested"):
        await decide_approval(conn, run_id=run, task="wait", decision=says(is_approved=False, actor="bob"))
    (after,) = await runner.claim()
    assert '"by": "ann"' in (after.inputs or "") and '"version": "2"' in (after.inputs or "")
    assert await value(conn, "select actor from audit_log where action = 'approve' and run_id = %s", run) == "ann"
    assert await waits_queries.list_approvals(conn) == []
    assert await value(conn, "select count(*) from deferral") == 0


async def test_an_answer_is_for_the_instance_that_it_names(conn: AsyncConnection) -> None:
    """Not for whichever asked last: another instance has asked later, with a higher epoch."""
    run, _, _ = await world(conn, waiting(WaitSpec(kind=WaitKind.APPROVAL, name="Release?")))
    for kind in ("task", "approval"):
        await conn.execute(
            f"insert into {kind} select (jsonb_populate_record(x, jsonb_build_object('map_index', 3, 'epoch', x.epoch + 5))).*"
            f" from {kind} x where x.run_id = %s and x.map_index = -1 and x.idx = (select min(idx) from approval)",
            [run],
        )
    assert (await find_approval(conn, run_id=run, task="wait", map_index=3)).epoch > 5
    with pytest.raises(NotFound, match=r"wait\[4\]"):
        await decide_approval(conn, run_id=run, task="wait", map_index=4, decision=says(None))
    done = await decide_approval(conn, run_id=run, task="wait", map_index=-1, decision=says(None))
    assert (done.map_index, done.is_approved) == (-1, True)
    query = "select jsonb_object_agg(map_index, decided_by) from approval where run_id = %s"
    assert await value(conn, query, run) == {"-1": "ann", "3": None}
    assert (await find_approval(conn, run_id=run, task="wait", map_index=3)).is_open


@pytest.mark.parametrize(("how", "ended"), [(TimeoutAction.FAIL, "failed"), (TimeoutAction.SKIP, "skipped")])
async def test_who_rejects_ends_the_task(conn: AsyncConnection, how: TimeoutAction, ended: str) -> None:
    run, _, _ = await world(conn, waiting(WaitSpec(kind=WaitKind.APPROVAL, name="Release?", on_reject=how)))
    await decide_approval(conn, run_id=run, task="wait", decision=says(None, is_approved=False, note="no"))
    assert ((await states(conn, run))["wait"], await reason(conn, run)) == (ended, "rejected by ann: no")


async def test_of_two_who_decide_at_once_one_is_too_late(conn: AsyncConnection) -> None:
    """Both have read the question before either wrote."""
    run, _, _ = await world(conn, waiting(ASK))
    (asked,) = await waits_queries.list_approvals(conn)
    taken = [
        await _decide_approval(
            conn, asked, is_approved=is_approved, actor=Actor(who), note=None, fields={}, chosen=None
        )
        for who, is_approved in (("ann", True), ("bob", False))
    ]
    assert taken == [True, False]
    assert await value(conn, "select decided_by from approval where run_id = %s", run) == "ann"


async def test_a_dag_may_say_who_decides(conn: AsyncConnection) -> None:
    wait = WaitSpec(kind=WaitKind.APPROVAL, name="Release?", approvers=Role.EDITOR)
    run, _, _ = await world(conn, waiting(wait))
    with pytest.raises(Forbidden, match="role editor"):
        await decide_approval(conn, run_id=run, task="wait", decision=says(None), role=Role.OPERATOR)
    assert (await decide_approval(conn, run_id=run, task="wait", decision=says(None), role=Role.ADMIN)).is_approved


async def test_nobody_decides_in_time(conn: AsyncConnection) -> None:
    wait = WaitSpec(kind=WaitKind.APPROVAL, name="Release?", timeout_seconds=60, on_timeout=TimeoutAction.SKIP)
    assert await fails(conn, wait, 60) == ("skipped", "approval_timeout: no decision within 60 s")
    with pytest.raises(Conflict, match="timed out"):
        await decide_approval(conn, run_id=1, task="wait", decision=says(None))


EVERY_KIND = [
    WaitSpec(kind=WaitKind.TIME, seconds=30),
    WaitSpec(kind=WaitKind.CLOCK, until="12:00:00"),
    WaitSpec(kind=WaitKind.EVENT, name="file"),
    WaitSpec(kind=WaitKind.APPROVAL, name="Release?"),
    POLL,
]


@pytest.mark.parametrize("wait", EVERY_KIND, ids=lambda wait: str(wait.kind))
@pytest.mark.parametrize("verb", ["cancel", "mark", "run_timeout"])
async def test_whatever_waits_can_be_ended_by_hand_and_by_time(
    conn: AsyncConnection, wait: WaitSpec, verb: str
) -> None:
    run, runner, epoch = await world(conn, waiting(wait, run_timeout_seconds=20.0))
    if wait.kind is WaitKind.POLL:
        await runner.finish((await runner.claim())[0], "deferred")
    await woken(conn, epoch)
    if verb == "cancel":
        await cancel(conn, run_id=run, actor=Actor("me"))
    elif verb == "mark":
        await mark(conn, TaskKey(run, 1, -1), state="skipped", actor=Actor("me"))
    else:
        await set_clock(conn, later(21))
        await time_out_run(conn, shard=0, epoch=epoch, run_id=run)
    assert (await states(conn, run))["wait"] == {"mark": "skipped"}.get(verb, "canceled")
    await send_event(conn, name="file", payload=None, actor=Actor("me"))
    assert (await woken(conn, epoch, 86_400)).next_wake is None
    assert (await states(conn, run))["wait"] == {"mark": "skipped"}.get(verb, "canceled")


@pytest.mark.parametrize("wait", EVERY_KIND, ids=lambda wait: str(wait.kind))
async def test_cleared_it_waits_anew(conn: AsyncConnection, wait: WaitSpec) -> None:
    run, runner, epoch = await world(conn, waiting(wait))
    if wait.kind is WaitKind.POLL:
        await runner.finish((await runner.claim())[0], "deferred")
    await woken(conn, epoch)
    await cancel(conn, run_id=run, actor=Actor("me"))
    await clear(
        conn, run_id=run, chosen=await select_tasks(conn, run_id=run, names=["wait", "after"]), actor=Actor("me")
    )
    if wait.kind is WaitKind.POLL:
        await runner.finish((await runner.claim())[0], "deferred")
        assert await value(conn, "select polls from sensor_poll") == 1
    await woken(conn, epoch)
    assert (await states(conn, run))["wait"] == "deferred"
    assert await value(conn, "select count(*) from deferral") == 1


@pytest.mark.parametrize("wait", EVERY_KIND, ids=lambda wait: str(wait.kind))
async def test_a_wait_that_lost_its_row_is_found_by_reconcile(conn: AsyncConnection, wait: WaitSpec) -> None:
    _, runner, epoch = await world(conn, waiting(wait))
    if wait.kind is WaitKind.POLL:
        await runner.finish((await runner.claim())[0], "deferred")
    await woken(conn, epoch)
    before = await value(conn, "select row(kind, key) from deferral")
    await conn.execute("delete from deferral")
    assert (await reconcile_runs(conn, shard=0, epoch=epoch, limit=10)).repaired == ["deferral_missing"]
    if wait.kind is not WaitKind.POLL:
        await woken(conn, epoch)
        assert await value(conn, "select row(kind, key) from deferral") == before
    assert (await reconcile_runs(conn, shard=0, epoch=epoch, limit=10)).repaired == []


async def test_a_paused_dag_polls_nothing_and_goes_on_when_it_is_unpaused(conn: AsyncConnection) -> None:
    run, runner, epoch = await world(conn, waiting(POLL))
    await runner.finish((await runner.claim())[0], "deferred")
    await pause(conn, dag="d", actor=Actor("me"))
    await woken(conn, epoch, 60)
    assert (await states(conn, run))["wait"] == "pending"
    assert await runner.claim() == []
    await unpause(conn, dag="d", actor=Actor("me"))
    assert len(await runner.claim()) == 1


async def test_what_waits_first_says_so_to_who_starts_the_run(conn: AsyncConnection) -> None:
    task = {"kind": TaskKind.WAIT, "wait": WaitSpec(kind=WaitKind.TIME, seconds=1)}
    await put(conn, make_dag("d", {"wait": []}, per_task={"wait": task}))
    await put(conn, make_dag("plain", {"t": []}))
    for name, defers in (("d", True), ("plain", False)):
        row = await find(conn, name)
        assert row is not None
        made = await trigger_run(conn, dag_id=row.dag_id, params={}, key=None, actor=Actor("me"))
        assert made is not None and made.defers is defers


async def test_a_leader_that_is_none_any_more_wakes_nobody(conn: AsyncConnection) -> None:
    run, _, epoch = await world(conn, waiting(WaitSpec(kind=WaitKind.TIME, seconds=1)))
    await set_clock(conn, later(2))
    newer = await lead(conn)
    with pytest.raises(NotLeader):
        await wake(conn, shard=0, epoch=epoch, batch=10)
    assert (await states(conn, run))["wait"] == "deferred"
    assert (await woken(conn, newer)).looked_at == 1
    assert (await woken(conn, newer)).looked_at == 0, "a second wake-up finds nothing"


async def test_the_look_of_the_leader_says_when_the_next_wait_is_over(conn: AsyncConnection) -> None:
    _, _, epoch = await world(conn, waiting(WaitSpec(kind=WaitKind.TIME, seconds=30)))

    async def next_wake() -> datetime | None:
        return (await poll_work(conn, shard=0, epoch=epoch, lost_after=90)).next_wake

    assert await next_wake() == later(30)
    await send_event(conn, name="x", payload=None, actor=Actor("me"))
    assert await next_wake() == later(0), "an event that nobody was told of"


async def test_one_wait_that_the_database_refuses_keeps_no_other(conn: AsyncConnection) -> None:
    run, _, epoch = await world(conn, waiting(WaitSpec(kind=WaitKind.TIME, seconds=10)))
    other = await start(conn, "d")
    runner = await Runner.join(conn)
    await runner.drain()
    await conn.execute(
        f"""create function refuse() returns trigger language plpgsql as $$ begin
                if new.run_id = {run} and new.state = 'success' then raise exception 'poison'; end if; return new; end $$;
            create trigger refuse before update on task for each row execute function refuse()"""
    )
    done = await woken(conn, epoch, 20)
    assert (done.looked_at, done.refused) == (2, 1)
    assert (await states(conn, other))["wait"] == "success"
    assert (await states(conn, run))["wait"] == "deferred"
    await conn.execute("drop trigger refuse on task")
    await woken(conn, epoch, 20 + 61)
    assert (await states(conn, run))["wait"] == "success"


def test_the_clock_is_read_as_schedules_read_it() -> None:
    from evertick.domain.dags.waits import clock_instant, read_clock

    gap = datetime(2026, 3, 29, 0, 0, tzinfo=UTC)
    assert clock_instant("02:30:00", "Europe/Berlin", gap) == datetime(2026, 3, 29, 1, 0, tzinfo=UTC)
    at = datetime(2026, 7, 1, 6, 0, tzinfo=UTC)
    assert clock_instant("08:00:00", "Europe/Berlin", at) == at
    assert clock_instant("08:00:00", "Europe/Berlin", at + timedelta(seconds=1)) == at + timedelta(days=1)
    assert (read_clock("8:00"), read_clock("23:59:59"), read_clock("24:00"), read_clock("noon")) == (
        *("08:00:00", "23:59:59"),
        *(None, None),
    )


async def test_old_events_go_with_the_runs_of_their_time(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    for at in (0, 1, 100):
        await set_clock(conn, later(at))
        await send_event(conn, name="file", payload=at, actor=Actor("me"))
    mandate = PruneGrant(shard=0, epoch=epoch, before=later(50), actor=Actor("me"))
    assert (await prune_kind(conn, mandate, Kind.EVENTS, pace=Pace())).pruned == 0, "nobody was told of them"
    await wake(conn, shard=0, epoch=epoch, batch=10)
    assert (await prune_kind(conn, mandate, Kind.EVENTS, pace=Pace())).pruned == 2
    assert await value(conn, "select array_agg(payload) from event") == [100]


async def test_a_mapped_condition_is_polled_by_instance_and_cleared_as_a_whole(conn: AsyncConnection) -> None:
    """Also while some of its instances are between two polls."""
    mapping = Mapping(lists=(MappedList(argument="x", length=3),), how=MapHow.PRODUCT, most=10)
    run, runner, epoch = await world(conn, waiting(POLL, wait_mapping=mapping))
    first, second, third = await runner.claim()
    await runner.finish(first, "deferred")
    await runner.finish(second)
    await runner.finish(third, "deferred")
    await woken(conn, epoch)
    chosen = await select_tasks(conn, run_id=run, names=["first", "wait"])
    await clear(conn, run_id=run, chosen=chosen, actor=Actor("me"))
    assert await value(conn, "select count(*) from deferral") == 0
    assert await runner.drain() == ["first", "wait", "wait", "wait", "after"]
    assert await run_state(conn, run) == "success"
    assert (await woken(conn, epoch, 61)).looked_at == 0


@pytest.mark.requirement("V11")
async def test_a_time_zone_that_is_gone_keeps_no_other_clock_from_being_read(conn: AsyncConnection) -> None:
    clock = WaitSpec(kind=WaitKind.CLOCK, until="08:00:00")
    first, runner, epoch = await world(conn, waiting(clock))
    await conn.execute("update wait_spec set timezone = 'Europe/Atlantis'")
    await put(conn, replace(waiting(clock), name="other"))
    second = await start(conn, "other")
    await runner.drain()
    await woken(conn, epoch)
    assert await value(conn, "select kind::text from deferral where run_id = %s", second) == "time"
    assert await value(conn, "select kind::text from deferral where run_id = %s", first) == "clock"
    assert "Europe/Atlantis" in str(await value(conn, "select reason from quarantine where subject_id = %s", first))
    await set_clock(conn, later(30))
    assert (await woken(conn, epoch)).looked_at == 0, "not at every tick"
    await conn.execute("update wait_spec set timezone = 'UTC'")
    await set_clock(conn, later(61))
    await woken(conn, epoch)
    assert await value(conn, "select kind::text from deferral where run_id = %s", first) == "time"


async def test_a_sensor_between_two_polls_is_told_apart_from_other_waits(conn: AsyncConnection) -> None:
    run, runner, _ = await world(conn, waiting(POLL))
    (poll,) = await runner.claim()
    await runner.finish(poll, "deferred")
    assert await value(conn, "select phase from listed_task where run_id = %s and task = 'wait'", run) == "polling"
    await put(conn, replace(waiting(ASK), name="other"))
    asked = await start(conn, "other")
    await runner.drain()
    assert await value(conn, "select phase from listed_task where run_id = %s and task = 'wait'", asked) == "deferred"
