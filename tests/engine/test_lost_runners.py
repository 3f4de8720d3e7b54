"""The reaper of lost runners: it acts on silence that the leader itself has watched, and on nothing else (V5)."""

from __future__ import annotations

import asyncio

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import runners
from evertick.domain.errors import NotLeader
from evertick.engine.runners import extend, mark_runner_dead, reap_runner
from evertick.engine.shards import LivenessChange, observe_heartbeats, poll_work
from tests.engine import invariants
from tests.engine.poison import cure, refuse
from tests.engine.world import Runner, key_of, later, lead, make_dag, put, set_clock, start, states, value
from tests.waiting import eventually

LOST_AFTER = 9.0
MANY: dict[str, list[str]] = {f"t{number:03}": [] for number in range(100)}


async def hear(conn: AsyncConnection, epoch: int, elapsed: float = 1.0) -> LivenessChange:
    return await observe_heartbeats(conn, shard=0, epoch=epoch, elapsed=elapsed, lost_after=LOST_AFTER)


async def reap(conn: AsyncConnection, epoch: int, session: int) -> tuple[int | None, int]:
    done = await reap_runner(conn, shard=0, epoch=epoch, session=session, lost_after=LOST_AFTER, infra_retries=3)
    return done.reaped, done.refused


async def be_silent(conn: AsyncConnection, epoch: int, seconds: float) -> list[int]:
    """The leader watches for so long, tick by tick; returns whom it would give up then."""
    heard = LivenessChange(silent_sessions=[], dead_sessions=[])
    whole, rest = divmod(seconds, 1)
    for elapsed in [1.0] * int(whole) + ([rest] if rest else []):
        heard = await hear(conn, epoch, elapsed)
    return heard.silent_sessions


async def holding(conn: AsyncConnection) -> tuple[int, Runner, int]:
    """A leader, a runner that holds a task since long ago, and the task's run."""
    await set_clock(conn, later(0))
    epoch, runner = await lead(conn), await Runner.join(conn)
    await put(conn, make_dag("one", {"a": []}))
    run = await start(conn, "one")
    await runner.claim()
    await hear(conn, epoch, 0)
    await set_clock(conn, later(1000))
    return epoch, runner, run


# watched silence -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A7", "B2", "N07")
@pytest.mark.parametrize(("seconds", "is_lost"), [(8.9, False), (9.0, False), (9.1, True)])
async def test_a_runner_is_lost_past_the_threshold_and_not_at_it(
    rollback_conn: AsyncConnection, seconds: float, is_lost: bool
) -> None:
    epoch, runner, run = await holding(rollback_conn)
    assert (await be_silent(rollback_conn, epoch, seconds) == [runner.session]) is is_lost
    assert (await reap(rollback_conn, epoch, runner.session) == (1, 0)) is is_lost
    assert await states(rollback_conn, run) == {"a": "available" if is_lost else "running"}


@pytest.mark.requirement("K3", "V8", "A7")
async def test_silence_that_nobody_watched_counts_for_two_seconds_at_most(rollback_conn: AsyncConnection) -> None:
    """A frozen leader, a database that was away, a clock that was set: none of them makes a runner silent."""
    epoch, runner, _ = await holding(rollback_conn)
    for elapsed in (0, 1000, 0):
        assert (await hear(rollback_conn, epoch, elapsed)).silent_sessions == []
    assert await value(rollback_conn, "select silent_seconds from runner where session = %s", runner.session) == 2


@pytest.mark.requirement("A7")
async def test_a_change_of_leader_loses_no_silence_and_adds_none(rollback_conn: AsyncConnection) -> None:
    conn = rollback_conn
    epoch, runner, _ = await holding(conn)
    assert await be_silent(conn, epoch, 6) == []
    epoch = await lead(conn)
    await hear(conn, epoch, 0)
    assert await value(conn, "select silent_seconds from runner where session = %s", runner.session) == 6
    assert await be_silent(conn, epoch, 4) == [runner.session]


@pytest.mark.requirement("A7", "V5")
async def test_the_silence_of_an_agent_counts_only_while_an_api_could_hear_it(rollback_conn: AsyncConnection) -> None:
    """An API that restarts within a third of the threshold changes nothing; one that is away for longer starts anew."""
    conn = rollback_conn
    epoch, agent, run = await holding(conn)
    await conn.execute("update runner set queues = '{}' where session = %s", [agent.session])

    async def be_unheard(seconds: int) -> list[int]:
        """An API is there."""
        silent: list[int] = []
        for _ in range(seconds):
            await runners.note_agent_api(conn)
            silent = await be_silent(conn, epoch, 1)
        return silent

    assert await be_silent(conn, epoch, 30) == []
    assert await reap(conn, epoch, agent.session) == (None, 0)
    assert await be_unheard(5) == []
    assert await be_silent(conn, epoch, 4) == [], "by now the API is away for too long"
    assert await be_unheard(9) == []
    assert await be_silent(conn, epoch, 1) == [agent.session], "it restarts"
    assert await reap(conn, epoch, agent.session) == (1, 0)
    assert await states(conn, run) == {"a": "available"}
    before = await value(conn, "select heartbeat_seq from agent_api")
    assert await runners.note_agent_api(conn) is None and not await runners.has_agents(conn)
    assert await value(conn, "select heartbeat_seq from agent_api") == before, "without agents nothing is written"


@pytest.mark.requirement("A7", "K9")
async def test_a_new_heartbeat_takes_all_silence_back(rollback_conn: AsyncConnection) -> None:
    epoch, runner, _ = await holding(rollback_conn)
    await be_silent(rollback_conn, epoch, 9)
    await extend(rollback_conn, session=runner.session, held=[])
    assert await be_silent(rollback_conn, epoch, 9) == []


@pytest.mark.requirement("A7", "V5")
async def test_who_spoke_between_the_look_and_the_reaping_is_not_reaped(rollback_conn: AsyncConnection) -> None:
    epoch, runner, run = await holding(rollback_conn)
    assert await be_silent(rollback_conn, epoch, 10) == [runner.session]
    await extend(rollback_conn, session=runner.session, held=[])
    assert await reap(rollback_conn, epoch, runner.session) == (None, 0)
    assert await states(rollback_conn, run) == {"a": "running"}


@pytest.mark.requirement("A7", "B6")
async def test_a_claim_counts_as_a_heartbeat(rollback_conn: AsyncConnection) -> None:
    """No attempt is judged by a silence that began before it, and a claim saves what was claimed with it."""
    conn = rollback_conn
    epoch, runner, _ = await holding(conn)
    assert await be_silent(conn, epoch, 8) == []
    await start(conn, "one")
    (claim,) = await runner.claim()
    assert await be_silent(conn, epoch, 4) == []
    assert await reap(conn, epoch, runner.session) == (None, 0)
    await set_clock(conn, later(1000 + LOST_AFTER + 1))
    assert await be_silent(conn, epoch, 1) == [runner.session]
    assert await reap(conn, epoch, runner.session) == (2, 0)
    assert await value(conn, "select state from task where run_id = %s", claim.run_id) == "available"


@pytest.mark.requirement("V8")
async def test_a_claim_in_the_future_of_a_clock_that_was_set_back_saves_nobody(rollback_conn: AsyncConnection) -> None:
    epoch, runner, _ = await holding(rollback_conn)
    await set_clock(rollback_conn, later(-5000))
    assert await be_silent(rollback_conn, epoch, 10) == [runner.session]


@pytest.mark.requirement("V5")
async def test_a_runner_is_never_given_up_before_it_gives_up_itself(rollback_conn: AsyncConnection) -> None:
    """Its own threshold may be longer than the leader's: until then it keeps what must not run twice."""
    conn = rollback_conn
    epoch, runner, _ = await holding(conn)
    await conn.execute("update runner set lost_after_seconds = 30 where session = %s", [runner.session])
    assert await be_silent(conn, epoch, 30) == []
    assert await reap(conn, epoch, runner.session) == (None, 0)
    assert await be_silent(conn, epoch, 1) == [runner.session]


async def test_silence_is_counted_only_of_the_living(rollback_conn: AsyncConnection) -> None:
    conn = rollback_conn
    epoch, gone = await lead(conn), await Runner.join(conn)
    await runners.leave(conn, gone.session)
    assert await be_silent(conn, epoch, 12) == []
    assert await value(conn, "select silent_seconds from runner where session = %s", gone.session) == 0


@pytest.mark.requirement("A7")
async def test_many_healthy_runners_never_hide_a_lost_one(rollback_conn: AsyncConnection) -> None:
    conn = rollback_conn
    epoch = await lead(conn)
    healthy = [await Runner.join(conn) for _ in range(150)]
    lost = await Runner.join(conn)
    for _ in range(10):
        await conn.execute("update runner set heartbeat_seq = heartbeat_seq + 1 where session <> %s", [lost.session])
        heard = await hear(conn, epoch)
    assert heard.silent_sessions == [lost.session]
    assert lost.session > max(each.session for each in healthy), "it is the last of all"


async def test_a_runner_whose_heartbeat_is_being_written_is_passed_by(database: str) -> None:
    """The leader's look waits for nobody, and a row that somebody writes is no silent one."""
    async with (
        await connect(database, purpose=Purpose.SCHEDULER) as leader,
        await connect(database, purpose=Purpose.SCHEDULER) as other,
    ):
        epoch, busy, silent = await lead(leader), await Runner.join(leader), await Runner.join(leader)
        async with other.transaction():
            await other.execute("select from runner where session = %s for update", [busy.session])
            await hear(leader, epoch)
        counted = "select array_agg(session) from runner where silent_seconds > 0"
        assert await value(leader, counted) == [silent.session]


# stranded leases -----------------------------------------------------------------------------------------------------


async def test_leases_of_sessions_that_are_gone_are_found_and_no_others(rollback_conn: AsyncConnection) -> None:
    conn = rollback_conn
    epoch = await lead(conn)
    await put(conn, make_dag("three", {"a": [], "b": [], "c": []}))
    run = await start(conn, "three")
    gone, alive = await Runner.join(conn), await Runner.join(conn)
    await gone.claim(1)
    await alive.claim(1)
    await runners.leave(conn, gone.session)
    await conn.execute("insert into lease values (999999, %s, 2, -1, 1)", [run])
    heard = await hear(conn, epoch)
    assert (heard.silent_sessions, sorted(heard.dead_sessions)) == ([], [gone.session, 999_999])
    assert await reap(conn, epoch, gone.session) == (1, 0)
    await reap(conn, epoch, 999_999)
    assert (await hear(conn, epoch)).dead_sessions == []
    assert await value(conn, "select array_agg(session) from lease") == [alive.session]


# guards --------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A4", "A10", "N02")
async def test_an_old_leader_can_neither_count_silence_nor_reap(rollback_conn: AsyncConnection) -> None:
    conn = rollback_conn
    old, runner, run = await holding(conn)
    await be_silent(conn, old, 10)
    await lead(conn)
    for verb in (hear(conn, old), reap(conn, old, runner.session)):
        async with conn.transaction():
            with pytest.raises(NotLeader):
                async with conn.transaction():
                    await verb
    assert await value(conn, "select silent_seconds from runner where session = %s", runner.session) == 10
    assert await states(conn, run) == {"a": "running"}


@pytest.mark.requirement("A8")
async def test_of_two_that_reap_at_once_one_does(database: str) -> None:
    async with (
        await connect(database, purpose=Purpose.SCHEDULER) as one,
        await connect(database, purpose=Purpose.SCHEDULER) as two,
    ):
        epoch, runner, run = await holding(one)
        await set_clock(two, later(1000))
        await be_silent(one, epoch, 10)
        results = await asyncio.gather(
            reap(one, epoch, runner.session),
            mark_runner_dead(two, session=runner.session, reason="certified", infra_retries=3),
        )
        taken = sorted([results[0][0] or 0, results[1]])
        assert taken == [0, 1]
        assert await states(one, run) == {"a": "available"}
        assert await value(one, "select lost_attempts from task") == 1


# poison --------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A13", "N23", "V11", "B8")
async def test_one_attempt_that_cannot_be_moved_keeps_no_other(conn: AsyncConnection) -> None:
    await invariants.install(conn)
    await set_clock(conn, later(0))
    epoch, runner = await lead(conn), await Runner.join(conn)
    await put(conn, make_dag("many", {"a": []}))
    made = [await start(conn, "many") for _ in range(100)]
    held = await runner.claim(100)
    assert len(held) == 100
    await set_clock(conn, later(1000))
    await refuse(conn, "task", f"new.run_id = {made[50]}")
    await be_silent(conn, epoch, 10)
    assert await reap(conn, epoch, runner.session) == (99, 1)
    assert await value(conn, "select count(*) from task where state = 'available'") == 99
    reason = "select reason from quarantine where kind = 'run' and subject_id = %s"
    assert "poison" in str(await value(conn, reason, made[50]))
    assert (await hear(conn, epoch)).dead_sessions == [], "it is left alone for a while"
    journal = "select count(*) from audit_log where action = 'quarantine' and run_id = %s"
    assert await value(conn, journal, made[50]) == 1
    await cure(conn, "task")
    await set_clock(conn, later(1011))
    assert (await hear(conn, epoch)).dead_sessions == [runner.session]
    assert await reap(conn, epoch, runner.session) == (1, 0)
    assert await invariants.violations(conn) == []


async def test_a_certificate_takes_what_it_can(conn: AsyncConnection) -> None:
    """The same for whoever has seen the runner die."""
    runner = await Runner.join(conn)
    await put(conn, make_dag("many", MANY))
    await start(conn, "many")
    claims = await runner.claim(100)
    await refuse(conn, "task", "new.idx = 7")
    assert await mark_runner_dead(conn, session=runner.session, reason="certified", infra_retries=3) == 99
    await cure(conn, "task")
    poisoned = claims[7]
    assert await runner.finish(poisoned) == [], "the runner is gone, but this attempt is still its own"
    assert (key_of(poisoned).idx, await value(conn, "select count(*) from lease")) == (7, 0)


async def test_a_runner_with_only_quarantined_tasks_is_skipped(conn: AsyncConnection) -> None:
    epoch, gone, other = await lead(conn), await Runner.join(conn), await Runner.join(conn)
    await put(conn, make_dag("one", {"a": []}))
    aside = await start(conn, "one")
    await gone.claim(1)
    await start(conn, "one")
    await other.claim(1)
    await conn.execute("update runner set ended_at = clock() where session = %s", [gone.session])
    assert (await hear(conn, epoch)).dead_sessions == [gone.session]
    await conn.execute("select quarantine_row('run', %s, 'bury', 'poison', true)", [aside])
    assert (await hear(conn, epoch)).dead_sessions == []
    assert await mark_runner_dead(conn, session=gone.session, reason="once more", infra_retries=3) == 0
    assert await states(conn, aside) == {"a": "running"}


@pytest.mark.requirement("V5", "A7")
async def test_a_heartbeat_that_is_under_way_saves_its_runner(database: str) -> None:
    async with (
        await connect(database, purpose=Purpose.SCHEDULER) as leading,
        await connect(database, purpose=Purpose.SCHEDULER) as beating,
    ):
        epoch, runner, run = await holding(leading)
        await be_silent(leading, epoch, 10)
        async with beating.transaction():
            await extend(beating, session=runner.session, held=[])
            reaping = asyncio.create_task(reap(leading, epoch, runner.session))
            waits = "select count(*) from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
            pid = leading.info.backend_pid
            await eventually(lambda: value(beating, waits, pid))
        assert (await reaping)[0] is None
        assert await states(leading, run) == {"a": "running"}


async def test_looking_says_what_listening_does(rollback_conn: AsyncConnection) -> None:
    conn = rollback_conn
    epoch, runner, _ = await holding(conn)
    await be_silent(conn, epoch, 8.5)
    seen = await poll_work(conn, shard=0, epoch=epoch, lost_after=LOST_AFTER, seconds=5, elapsed=1.0)
    assert (seen.silent_sessions, seen.dead_sessions) == ([runner.session], [])
    seen = await poll_work(conn, shard=0, epoch=epoch, lost_after=LOST_AFTER)
    assert (seen.silent_sessions, seen.dead_sessions) == (None, []), "a look that only reads counts no silence"
