"""Triggers of deferred tasks: leased by one session at a time, one event each, and nothing of an older epoch counts."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from psycopg import AsyncConnection
from psycopg.errors import LockNotAvailable

from evertick.db.connect import Purpose, connect
from evertick.db.queries import gates, runners
from evertick.db.queries.secrets import AttemptHolder
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.access import Actor
from evertick.domain.attempt import AttemptRef, Outcome, OutcomeKind, TaskKey
from evertick.domain.errors import LeaseLost
from evertick.domain.explain import describe
from evertick.domain.retry import RetryPolicy
from evertick.engine import asks
from evertick.engine.maintenance import reconcile_runs
from evertick.engine.runners import extend, mark_runner_dead
from evertick.engine.runs import cancel
from evertick.engine.tasks import clear, mark, select_tasks
from evertick.engine.triggers import TriggerExchange, TriggerRow, encode_end, exchange_triggers
from evertick.engine.waits import wake
from tests.engine import invariants
from tests.engine.test_asks import holder
from tests.engine.world import Runner, key_of, later, lead, make_dag, put, run_state, set_clock, start, states, value

GIVEN = {"classpath": "mod.Trigger", "kwargs": {"token": "s3cret"}, "next_method": "execute_complete"}
GIVEN |= {"next_kwargs": {"a": 1}}
EVENT = {"event": "come"}
ROW = "select (epoch, session, event, given ? 'kwargs')::text from task_trigger"


async def exchange(
    runner: Runner, *, ends: Sequence[str] = (), held: Sequence[TriggerRow] = (), free: int = 10
) -> TriggerExchange:
    refs = [row.ref for row in held]
    return await exchange_triggers(
        runner.conn, session=runner.session, reports=ends, held=refs, queues=["default"], free=free
    )


def ended(ref: AttemptRef, kind: OutcomeKind = OutcomeKind.SUCCESS, value: object = EVENT) -> str:
    result = json.dumps(value) if kind is OutcomeKind.SUCCESS else None
    return encode_end(
        Outcome(key=ref.key, epoch=ref.epoch, kind=kind, result_json=result, log=b"1 INFO x\n", log_end=9)
    )


@pytest.fixture
async def runner(conn: AsyncConnection) -> Runner:
    await invariants.install(conn)
    await set_clock(conn, later(0))
    retry = RetryPolicy(retries=1, delay_seconds=0)
    pools = {"task_asks": True, "task_knows_run": True, "task_retry": retry}
    await put(conn, make_dag("chain", {"a": [], "b": ["a"]}, **pools))
    return await Runner.join(conn)


async def deferred(runner: Runner, **given: object) -> tuple[int, ExchangeRow]:
    run = await start(runner.conn, "chain")
    (claim,) = await runner.claim()
    await runner.finish(claim, "deferred", result={"trigger": {**GIVEN, **given}})
    assert (await states(runner.conn, run))["a"] == "deferred"
    return run, claim


async def why(conn: AsyncConnection, run: int) -> str:
    (reason,) = await gates.explain_task(conn, TaskKey(run, 0, -1))
    return describe(reason)


async def leased(runner: Runner, *held: TriggerRow) -> tuple[int, TriggerRow]:
    run, _ = await deferred(runner)
    (row,) = (await exchange(runner, held=held)).started
    return run, row


async def test_a_task_waits_for_its_trigger_and_resumes_with_the_event(conn: AsyncConnection, runner: Runner) -> None:
    run, claim = await deferred(runner)
    waits = "it waits for trigger mod.Trigger, deferred at 2030-01-01T00:00:00"
    assert (await why(conn, run)).startswith(waits) and "a runner of queue default must run it" in await why(conn, run)
    assert await value(conn, "select count(*) from lease") == 0
    assert (await extend(conn, session=runner.session, held=[])).has_triggers
    (row,) = (await exchange(runner)).started
    assert (row.classpath, row.kwargs, row.attempt) == ("mod.Trigger", {"token": "s3cret"}, 1)
    assert row.epoch == claim.epoch + 1 and isinstance(row.run, dict) and row.run["dag"] == "chain"
    assert not (await extend(conn, session=runner.session, held=[])).has_triggers
    assert (await why(conn, run)).endswith(f", run by r{runner.session}")
    reason = await value(conn, "select reason from all_tasks where run_id = %s and task = 'a'", run)
    assert reason == "waits for trigger mod.Trigger since 2030-01-01 00:00:00 UTC"
    assert await value(conn, "select phase from listed_task where run_id = %s and task = 'a'", run) == "deferred"
    (busy,) = await runners.list_busy(conn, limit=9)
    assert (busy.busy, busy.triggers) == (0, 1)
    # A reply that was lost is repeated, and nothing is leased twice.
    other = await Runner.join(conn)
    assert (await exchange(other)).started == []
    assert (await exchange(runner)).started == [row]
    assert (await exchange(runner, held=[row])).started == []
    as_held = holder(runner, row)  # type: ignore[arg-type]  # it has the key and the epoch
    assert await asks.ask(conn, as_held, "dag", {"dag": "chain"})
    done = await exchange(runner, ends=[ended(row.ref)], held=[row])
    assert (done.started, done.refused, done.lost, done.has_more) == ([], [], [], True)
    assert await value(conn, ROW) == f'({row.epoch},,"{{""event"": ""come""}}",f)'
    assert await value(conn, "select content from log_chunk where epoch = %s", row.epoch) == "1 INFO x\n"
    # The same report twice is one event.
    assert (await exchange(runner, ends=[ended(row.ref)], held=[row])).refused == []
    late = ended(row.ref, value={"event": "late"})
    assert (await exchange(runner, ends=[late], held=[row])).refused == [row.ref]
    (again,) = await runner.claim()
    assert (again.idx, again.attempt) == (claim.idx, 1)
    facts = await asks.ask(conn, holder(runner, again), "run", {})
    assert isinstance(facts, dict)
    kept = {name: GIVEN[name] for name in ("next_method", "next_kwargs")}
    assert facts["resumed"] == {**kept, "event": EVENT}
    assert json.loads(again.inputs or "") == {"a": facts}
    # A lost attempt resumes again; a retry begins from the start.
    await runner.finish(again, "lost")
    (again,) = await runner.claim()
    assert (await asks.ask(conn, holder(runner, again), "run", {}))["resumed"] is not None  # type: ignore[index,call-overload]
    await runner.finish(again, "failed", retry_in=0)
    (again,) = await runner.claim()
    assert again.attempt == 2
    assert (await asks.ask(conn, holder(runner, again), "run", {}))["resumed"] is None  # type: ignore[index,call-overload]
    # It may defer again, and time out. A row of an older wait is replaced.
    await conn.execute(
        "insert into deferral (run_id, idx, map_index, epoch, shard, kind, wake_at) values (%s, 0, -1, 1, 0, 'time', clock())",
        [run],
    )
    await runner.finish(again, "deferred", result={"trigger": {**GIVEN, "timeout": 5}})
    leader = await lead(conn)
    await wake(conn, shard=0, epoch=leader, batch=10)
    assert (await states(conn, run))["a"] == "deferred"
    await set_clock(conn, later(6))
    await wake(conn, shard=0, epoch=leader, batch=10)
    (again,) = await runner.claim()
    assert again.attempt == 2
    facts = await asks.ask(conn, holder(runner, again), "run", {})
    assert isinstance(facts, dict) and facts["resumed"]["event"] == {"is_late": True}  # type: ignore[index,call-overload]
    await runner.finish(again)
    await runner.drain()
    assert await run_state(conn, run) == "success"
    assert await invariants.violations(conn) == []


async def test_an_event_of_another_session_or_epoch_changes_nothing(conn: AsyncConnection, runner: Runner) -> None:
    run, row = await leased(runner)
    other = await Runner.join(conn)
    before = await value(conn, ROW)
    old = AttemptRef(row.ref.key, row.epoch - 1)
    assert await asks.ask(conn, AttemptHolder(key=row.ref.key, epoch=row.epoch, session=runner.session), "run", {})
    for session, epoch in ((other.session, row.epoch), (runner.session, old.epoch)):
        with pytest.raises(LeaseLost):
            await asks.ask(conn, AttemptHolder(key=row.ref.key, epoch=epoch, session=session), "run", {})
    assert (await exchange(other, ends=[ended(row.ref)])).refused == [row.ref]
    assert (await exchange(runner, ends=[ended(old)], held=[row])).refused == [old]
    assert (await exchange(other, ends=[ended(row.ref, OutcomeKind.LOST)])).refused == [row.ref]
    assert await value(conn, ROW) == before
    # Given back, it is leased again with another epoch, and the old one can end it no more.
    assert (await exchange(runner, ends=[ended(row.ref, OutcomeKind.LOST)], held=[row], free=0)).lost == []
    (again,) = (await exchange(other)).started
    assert again.epoch == row.epoch + 1
    late = await exchange(runner, ends=[ended(row.ref)], held=[row])
    assert (late.refused, late.started) == ([row.ref], [])
    assert (await states(conn, run))["a"] == "deferred"
    assert (await exchange(runner, held=[row])).lost == [row.ref]


async def test_triggers_of_a_runner_that_is_gone_are_leased_again(conn: AsyncConnection, runner: Runner) -> None:
    _, row = await leased(runner)
    other = await Runner.join(conn)
    await mark_runner_dead(conn, session=runner.session, reason="gone", infra_retries=3)
    (again,) = (await exchange(other)).started
    assert again.epoch == row.epoch + 1
    # The dead one neither leases nor reports, though another trigger waits.
    await deferred(await Runner.join(conn))
    late = await exchange(runner, ends=[ended(row.ref)], held=[row])
    assert (late.started, late.lost) == ([], [row.ref])
    mine = await Runner.join(conn)
    assert len((await exchange(mine, free=1)).started) == 1
    await conn.execute("update runner set ended_at = clock() where session = %s", [other.session])
    assert await value(conn, "select dead_sessions_with_leases()") == other.session
    await conn.execute("update runner set ended_at = null, request = 'drain' where session = %s", [other.session])
    await conn.execute("select release_triggers(%s)", [other.session])
    assert (await exchange(other)).started == []
    assert await value(conn, "select count(*) from task_trigger where session = %s", mine.session) == 1


@pytest.mark.parametrize("how", ["cancel", "mark", "clear"])
async def test_a_person_ends_the_wait(conn: AsyncConnection, runner: Runner, how: str) -> None:
    run, row = await leased(runner)
    me = Actor("me")
    if how == "cancel":
        await cancel(conn, run_id=run, actor=me)
    elif how == "mark":
        await mark(conn, row.ref.key, state="success", actor=me)  # type: ignore[arg-type]
    else:
        await mark(conn, row.ref.key, state="failed", actor=me)  # type: ignore[arg-type]
        chosen = await select_tasks(conn, run_id=run, names=["a"])
        await clear(conn, run_id=run, chosen=chosen, actor=me)
    assert await value(conn, "select count(*) from task_trigger") == 0
    after = await exchange(runner, held=[row])
    assert (after.stopped, after.lost) == ([row.ref], [])
    assert (await exchange(runner, ends=[ended(row.ref)], held=[row])).refused == [row.ref]
    if how == "clear":
        (claim,) = await runner.claim()
        assert (await asks.ask(conn, holder(runner, claim), "run", {}))["resumed"] is None  # type: ignore[index,call-overload]
    assert await invariants.violations(conn) == []


async def test_a_lost_trigger_or_deferral_is_repaired(conn: AsyncConnection, runner: Runner) -> None:
    run, _ = await deferred(runner)
    leader = await lead(conn)
    await conn.execute("delete from deferral")
    repairs = await reconcile_runs(conn, shard=0, epoch=leader, limit=10)
    assert repairs.repaired and await value(conn, "select kind::text from deferral") == "trigger"
    assert not (await reconcile_runs(conn, shard=0, epoch=leader, limit=10)).repaired
    await conn.execute("delete from task_trigger")
    await reconcile_runs(conn, shard=0, epoch=leader, limit=10)
    await wake(conn, shard=0, epoch=leader, batch=10)
    (claim,) = await runner.claim()
    assert key_of(claim).run_id == run
    assert await invariants.violations(conn) == []


async def test_a_report_alone_leases_and_lists_nothing(conn: AsyncConnection, runner: Runner) -> None:
    _, first = await leased(runner)
    await deferred(runner)
    done = await exchange_triggers(
        conn, session=runner.session, reports=[ended(first.ref)], held=None, queues=["default"], free=9
    )
    assert (done.started, done.lost, done.stopped, done.refused, done.has_more) == ([], [], [], [], True)
    assert len((await exchange(runner)).started) == 1


async def test_only_what_was_reported_is_over(conn: AsyncConnection, runner: Runner) -> None:
    _, first = await leased(runner)
    _, second = await leased(runner, first)
    done = await exchange(runner, ends=[ended(first.ref, OutcomeKind.LOST)], held=[first, second], free=0)
    assert (done.started, done.lost, done.stopped) == ([], [], [])
    assert (await exchange(runner, ends=[ended(first.ref, OutcomeKind.LOST)], held=[second], free=0)).refused == []
    older = AttemptRef(first.ref.key, first.epoch - 1)
    assert (await exchange(runner, ends=[ended(older, OutcomeKind.LOST)], held=[second], free=0)).refused == [older]
    (again,) = (await exchange(runner, held=[second])).started
    assert again.epoch == first.epoch + 1
    # The session's older lease of the same trigger is not the one that it holds now.
    mixed = await exchange(runner, held=[first, second])
    assert (mixed.lost, [row.ref for row in mixed.started]) == ([first.ref], [again.ref])
    quiet = encode_end(Outcome(key=again.ref.key, epoch=again.epoch, kind=OutcomeKind.SUCCESS, result_json="{}"))
    lines = "select count(*) from log_chunk where epoch = %s"
    await exchange(runner, ends=[quiet], held=[again, second], free=0)
    assert await value(conn, lines, again.epoch) == 0
    # Lines that were shipped before come again with the report.
    await conn.execute(
        "insert into log_chunk (run_id, idx, map_index, epoch, seq, end_offset, content) values (%s, %s, -1, %s, 0, 9, 'x')",
        [second.run_id, second.idx, second.epoch],
    )
    assert (await exchange(runner, ends=[ended(second.ref)], held=[second], free=0)).refused == []


async def test_a_row_whose_task_does_not_wait_with_its_epoch_changes_nothing(
    conn: AsyncConnection, runner: Runner
) -> None:
    run, row = await leased(runner)
    await conn.execute("update task set epoch = epoch + 1 where run_id = %s", [run])
    await exchange(runner, ends=[ended(row.ref)], held=[row], free=0)
    assert (await states(conn, run))["a"] == "deferred"
    await conn.execute("update task_trigger set session = null, event = null")
    assert (await exchange(runner)).started == []
    await conn.execute(
        "update task_trigger w set epoch = k.epoch from task k where k.run_id = w.run_id and k.idx = w.idx"
    )
    await conn.execute("update task set state = 'pending' where run_id = %s and idx = %s", [run, row.idx])
    assert (await exchange(runner)).started == []
    await conn.execute("update task set state = 'deferred' where run_id = %s and idx = %s", [run, row.idx])
    patterns = {"session": runner.session, "reports": [], "held": [], "queues": ["default"], "free": 1}
    assert (await exchange_triggers(conn, match=["other::*"], **patterns)).started == []  # type: ignore[arg-type]
    assert len((await exchange_triggers(conn, match=["chain::*"], **patterns)).started) == 1  # type: ignore[arg-type]


async def test_leases_pass_by_locked_runs_and_everything_else_waits_for_them(
    conn: AsyncConnection, database: str, runner: Runner
) -> None:
    _, row = await leased(runner)
    run, _ = await deferred(runner)
    lock = "select from run_status where run_id = %s for update"
    await conn.execute("set lock_timeout = '200ms'")
    async with await connect(database, purpose=Purpose.SCHEDULER) as holder:
        async with holder.transaction():
            await holder.execute(lock, [run])
            assert (await exchange(runner, held=[row])).started == []
        async with holder.transaction():
            await holder.execute(lock, [row.run_id])
            with pytest.raises(LockNotAvailable):
                await exchange(runner, ends=[ended(row.ref)], held=[row])
            with pytest.raises(LockNotAvailable):
                await mark_runner_dead(conn, session=runner.session, reason="gone", infra_retries=3)
    assert len((await exchange(runner, held=[row])).started) == 1
