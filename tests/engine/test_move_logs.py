"""move_logs: lines leave the database only for an object that is listed and in time; nothing is lost, doubled or forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import UUID

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import logs
from evertick.db.queries.logs import BEFORE_ALL, NewChunk, RunWithLogs
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import NotLeader
from evertick.domain.log_archive import pack
from evertick.domain.retention import Pace
from evertick.engine.retention import (
    Leading,
    PendingCleanup,
    PruneGrant,
    archive_logs,
    create_archive_object,
    delete_archive_objects,
    finish_log_archiving,
    orphaned_archive_objects,
    prune_runs,
    queue_log_archiving,
    sweep,
)
from evertick.engine.tasks import clear, select_tasks
from tests.engine.world import Runner, key_of, later, lead, make_dag, put, set_clock, start, value
from tests.waiting import eventually

HOUR = 3600.0
ALL = Pace(batch=100)


@pytest.fixture
async def leading(conn: AsyncConnection) -> Leading:
    await set_clock(conn, later(0))
    await put(conn, make_dag("d", {"t": []}))
    return Leading(0, await lead(conn))


@pytest.fixture
async def other(database: str) -> AsyncIterator[AsyncConnection]:
    async with await connect(database, purpose=Purpose.SCHEDULER) as connection:
        await set_clock(connection, later(0))
        yield connection


async def written(conn: AsyncConnection, *contents: str, run_id: int | None = None) -> int:
    """A run that has ended, with these chunks."""
    run = run_id or await start(conn, "d")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim(1)
    place, chunks = 0, []
    for content in contents:
        chunks.append(NewChunk(key_of(claim), claim.epoch, place, place + len(content), content))
        place += len(content)
    await logs.append(conn, session=runner.session, chunks=chunks)
    await runner.finish(claim)
    return run


async def moved(conn: AsyncConnection, leading: Leading, run: int) -> tuple[UUID, int]:
    """As a mover does, but that nothing is put anywhere."""
    part = await logs.part(conn, run, after=BEFORE_ALL, chunks=100, bytes_=10_000)
    body, pieces = pack(content for _, content in part)
    listed = await create_archive_object(conn, leading, run_id=run, bytes=len(body))
    placed = [(key, piece) for (key, _), piece in zip(part, pieces, strict=True)]
    return listed, await archive_logs(conn, leading, listed, placed)


async def here(conn: AsyncConnection, run: int) -> list[bool]:
    """Of each chunk in its order whether its lines are in the database."""
    found = await (
        await conn.execute("select content is not null from log_chunk where run_id = %s order by epoch, seq", [run])
    ).fetchall()
    return [row[0] for row in found]


async def listed(conn: AsyncConnection) -> object:
    return await value(conn, "select count(*) from log_archive_object")


async def due(conn: AsyncConnection, *, seconds: float = 0) -> list[int]:
    return [each.run_id for each in await logs.ended(conn, after=0, seconds=seconds, batch=100)]


async def test_a_chunk_that_was_moved_keeps_its_row_and_comes_no_second_time(
    conn: AsyncConnection, leading: Leading
) -> None:
    run, untouched = await written(conn, "one\n", "two\n"), await written(conn, "three\n")
    before = await logs.read(conn, key := TaskKey(run, 0, -1))
    object_id, count = await moved(conn, leading, run)
    assert count == 2 and await here(conn, run) == [False, False] and await here(conn, untouched) == [True]
    after = await logs.read(conn, key)
    assert [each[:4] for each in after] == [each[:4] for each in before]
    assert {each.object_id for each in after} == {object_id}
    again = [NewChunk(key, before[0].epoch, each.seq, each.until, each.content or "") for each in before]
    await logs.append(conn, session=1, chunks=again)
    assert await here(conn, run) == [False, False]
    assert await logs.part(conn, run, after=BEFORE_ALL, chunks=9, bytes_=99) == []
    assert (await moved(conn, leading, run))[1] == 0


async def test_an_object_holds_as_many_chunks_as_fit_and_the_next_goes_on_after_them(
    conn: AsyncConnection, leading: Leading
) -> None:
    run = await written(conn, *(f"{number:09}\n" for number in range(7)))
    seen, after = [], BEFORE_ALL
    while part := await logs.part(conn, run, after=after, chunks=3, bytes_=15):
        seen.append([content for _, content in part])
        after = part[-1][0]
    assert [len(each) for each in seen] == [2, 2, 2, 1], "the one that exceeds the size is the last"
    assert [content for each in seen for content in each] == [f"{number:09}\n" for number in range(7)]
    assert [len(part) for part in [await logs.part(conn, run, after=BEFORE_ALL, chunks=3, bytes_=999)]] == [3]


async def test_only_runs_that_ended_long_enough_ago_are_due(conn: AsyncConnection, leading: Leading) -> None:
    ended = await written(conn, "x\n")
    assert await queue_log_archiving(conn, leading, limit=10) == 0, "the youngest may not be the last to be seen"
    await set_clock(conn, later(120))
    young, running = await written(conn, "x\n"), await start(conn, "d")
    assert await queue_log_archiving(conn, leading, limit=10) == 1
    assert await due(conn) == [ended]
    await set_clock(conn, later(HOUR))
    assert [await queue_log_archiving(conn, leading, limit=1) for _ in range(3)] == [1, 1, 0]
    assert await value(conn, "select max(run_id) from log_archive_queue") == running
    assert await due(conn) == [ended, young]
    assert await due(conn, seconds=HOUR - 60) == [ended]
    sizes = await logs.ended(conn, after=0, seconds=0, batch=100)
    assert {each.bytes for each in sizes} == {2} and await logs.ended(conn, after=ended, seconds=HOUR, batch=9) == []


async def test_a_run_that_says_to_be_of_the_future_does_not_end_the_walk(
    conn: AsyncConnection, leading: Leading
) -> None:
    await set_clock(conn, later(9 * HOUR))
    future = await written(conn, "x\n")
    await set_clock(conn, later(0))
    run = await written(conn, "x\n")
    await set_clock(conn, later(HOUR))
    assert await queue_log_archiving(conn, leading, limit=10) == 2
    assert await due(conn) == [run] and future < run


async def test_a_run_is_left_when_it_is_moved_or_gone_but_not_when_it_began_again(
    conn: AsyncConnection, leading: Leading
) -> None:
    done, again = await written(conn, "x\n"), await written(conn, "x\n")
    await set_clock(conn, later(120))
    await queue_log_archiving(conn, leading, limit=10)
    found = await logs.ended(conn, after=0, seconds=0, batch=10)
    await clear(conn, run_id=again, chosen=await select_tasks(conn, run_id=again), actor=Actor("me"))
    await finish_log_archiving(conn, leading, [*found, RunWithLogs(987, None, 0)])
    assert await value(conn, "select array_agg(run_id) from log_archive_queue") == [again]
    await written(conn, "y\n", run_id=again)
    await set_clock(conn, later(240))
    assert await due(conn) == [again]
    await finish_log_archiving(conn, leading, found)
    assert await due(conn) == [again], "it ended at another time than it did then"
    await finish_log_archiving(conn, leading, await logs.ended(conn, after=0, seconds=0, batch=10))
    await clear(conn, run_id=done, chosen=await select_tasks(conn, run_id=done), actor=Actor("me"))
    assert await value(conn, "select array_agg(run_id) from log_archive_queue") == [done], "and is looked after again"


async def test_a_clear_writes_nothing_down_where_logs_are_never_moved_or_are_still_to_be_walked_over(
    conn: AsyncConnection, leading: Leading
) -> None:
    run = await written(conn, "x\n")
    for _ in range(2):
        await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run), actor=Actor("me"))
        assert await value(conn, "select count(*) from log_archive_queue") == 0
        await written(conn, "x\n", run_id=run)
        await queue_log_archiving(conn, leading, limit=10)


async def test_an_object_that_nothing_was_moved_into_within_the_hour_is_lost_and_then_removed(
    conn: AsyncConnection, leading: Leading
) -> None:
    run = await written(conn, "x\n")
    lost = await create_archive_object(conn, leading, run_id=run, bytes=1)
    part = await logs.part(conn, run, after=BEFORE_ALL, chunks=9, bytes_=99)
    _, pieces = pack(content for _, content in part)
    placed = [(part[0][0], pieces[0])]
    await set_clock(conn, later(HOUR - 1))
    assert await orphaned_archive_objects(conn, leading, limit=10) == []
    await set_clock(conn, later(HOUR))
    assert await archive_logs(conn, leading, lost, placed) == 0 and await here(conn, run) == [True]
    kept, _ = await moved(conn, leading, run)
    for _ in range(2):
        (dead,) = await orphaned_archive_objects(conn, leading, limit=10)
        assert (dead.object_id, dead.run_id) == (lost, run), "until it is forgotten"
    await delete_archive_objects(conn, leading, [lost, kept])
    assert await value(conn, "select array_agg(object_id) from log_archive_object") == [kept], "only what is dead"


async def test_an_object_with_a_line_in_it_is_not_removed_whatever_the_list_says(
    conn: AsyncConnection, leading: Leading
) -> None:
    object_id, _ = await moved(conn, leading, await written(conn, "x\n"))
    await conn.execute("update log_archive_object set look_at = clock()")
    assert await orphaned_archive_objects(conn, leading, limit=10) == []
    assert await value(conn, "select look_at is null from log_archive_object where object_id = %s", object_id)


async def test_retention_lists_the_objects_of_what_it_deleted_and_gives_those_on_their_way_their_hour(
    conn: AsyncConnection, leading: Leading
) -> None:
    run, kept = await written(conn, "x\n", "y\n"), await start(conn, "d")
    object_id = await create_archive_object(conn, leading, run_id=run, bytes=1)
    one, next_one = ([(BEFORE_ALL._replace(idx=0, epoch=1, seq=seq), pack(["x"])[1][0])] for seq in (0, 2))
    assert await archive_logs(conn, leading, object_id, one) == 1
    await set_clock(conn, later(50 * HOUR))
    coming = await create_archive_object(conn, leading, run_id=run, bytes=1)
    await create_archive_object(conn, leading, run_id=kept, bytes=1)
    given = PruneGrant(shard=0, epoch=leading.epoch, before=later(HOUR), actor=Actor("test"))
    assert (await prune_runs(conn, given, after=0, pace=ALL, now=later(50 * HOUR))).pruned == 1
    assert await orphaned_archive_objects(conn, leading, limit=10) == []
    assert await archive_logs(conn, leading, coming, next_one) == 0, "of a run that is gone nothing is moved"
    await sweep(conn, given, PendingCleanup.RUN, after=0, pace=ALL)
    assert [each.object_id for each in await orphaned_archive_objects(conn, leading, limit=10)] == [object_id]
    await set_clock(conn, later(51 * HOUR))
    assert len(await orphaned_archive_objects(conn, leading, limit=10)) == 3
    assert len(await orphaned_archive_objects(conn, leading, limit=2)) == 2


async def test_a_prune_waits_for_lines_that_are_being_moved(
    conn: AsyncConnection, other: AsyncConnection, leading: Leading
) -> None:
    """It deletes by place, and a row that was changed meanwhile has another."""
    run = await written(conn, "x\n")
    given = PruneGrant(shard=0, epoch=leading.epoch, before=later(HOUR), actor=Actor("test"))
    async with conn.transaction():
        assert (await moved(conn, leading, run))[1] == 1
        done = await prune_runs(other, given, after=0, pace=ALL, now=later(HOUR))
        assert done.pruned == 0
    assert (await prune_runs(other, given, after=0, pace=ALL, now=later(HOUR))).pruned == 1


async def test_an_object_is_not_removed_while_lines_are_being_moved_into_it(
    conn: AsyncConnection, other: AsyncConnection, leading: Leading
) -> None:
    """Whoever moves them came in time, and is held up until its hour is over."""
    run = await written(conn, "x\n")
    coming = await create_archive_object(conn, leading, run_id=run, bytes=1)
    placed = [(BEFORE_ALL._replace(idx=0, epoch=1, seq=0), pack(["x"])[1][0])]
    async with conn.transaction():
        await conn.execute("select from log_chunk for update")
        moving = asyncio.create_task(archive_logs(other, leading, coming, placed))
        await eventually(lambda: waits(conn))
        await set_clock(conn, later(HOUR))
        assert await orphaned_archive_objects(conn, leading, limit=10) == []
    assert await moving == 1
    assert await orphaned_archive_objects(conn, leading, limit=10) == []


async def test_leaving_a_run_waits_for_the_clear_that_reopens_it(
    conn: AsyncConnection, other: AsyncConnection, leading: Leading
) -> None:
    run = await written(conn, "x\n")
    await set_clock(conn, later(120))
    await queue_log_archiving(conn, leading, limit=10)
    found = await logs.ended(conn, after=0, seconds=0, batch=10)
    chosen = await select_tasks(conn, run_id=run)
    async with conn.transaction():
        await clear(conn, run_id=run, chosen=chosen, actor=Actor("me"))
        leaving = asyncio.create_task(finish_log_archiving(other, leading, found))
        await eventually(lambda: waits(conn))
    await leaving
    assert await value(conn, "select array_agg(run_id) from log_archive_queue") == [run]


async def waits(conn: AsyncConnection) -> object:
    return await value(
        conn,
        "select 1 from pg_locks l join pg_stat_activity a using (pid) where not granted and datname = current_database()",
    )


async def test_of_several_objects_only_the_one_that_is_named_is_used(conn: AsyncConnection, leading: Leading) -> None:
    first, second = await written(conn, "x\n"), await written(conn, "y\n")
    coming = await create_archive_object(conn, leading, run_id=first, bytes=1)
    _, count = await moved(conn, leading, second)
    assert (count, await here(conn, first), await here(conn, second)) == (1, [True], [False])
    assert await value(conn, "select array_agg(object_id) from log_archive_object where look_at is not null") == [
        coming
    ]
    late = await create_archive_object(conn, leading, run_id=first, bytes=1)
    await conn.execute("update log_archive_object set look_at = clock() where object_id = %s", [late])
    placed = [(BEFORE_ALL._replace(idx=0, epoch=1, seq=0), pack(["x"])[1][0])]
    assert await archive_logs(conn, leading, late, placed) == 0, "its hour is over, whatever others have"


async def test_only_the_named_attempt_is_moved_and_what_was_moved_stays_where_it_is(
    conn: AsyncConnection, leading: Leading
) -> None:
    run = await written(conn, "one\n")
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run), actor=Actor("me"))
    await written(conn, "two\n", run_id=run)
    placed = [(BEFORE_ALL._replace(idx=0, epoch=1, seq=0), pack(["one\n"])[1][0])]
    first, again = [await create_archive_object(conn, leading, run_id=run, bytes=1) for _ in range(2)]
    assert await archive_logs(conn, leading, first, placed) == 1 and await here(conn, run) == [False, True]
    assert await archive_logs(conn, leading, again, placed) == 0
    assert await value(conn, "select object_id from log_chunk where run_id = %s and epoch = 1", run) == first


async def test_only_the_named_objects_are_forgotten(conn: AsyncConnection, leading: Leading) -> None:
    one, other = [await create_archive_object(conn, leading, run_id=1, bytes=1) for _ in range(2)]
    await set_clock(conn, later(2 * HOUR))
    await delete_archive_objects(conn, leading, [one])
    assert await value(conn, "select array_agg(object_id) from log_archive_object") == [other]


@pytest.mark.requirement("A4")
async def test_a_former_leader_archives_nothing(conn: AsyncConnection, leading: Leading) -> None:
    run = await written(conn, "x\n")
    object_id = await create_archive_object(conn, leading, run_id=run, bytes=1)
    await set_clock(conn, later(120))
    await queue_log_archiving(conn, leading, limit=10)
    await conn.execute("update log_archive_object set look_at = clock()")
    old = leading._replace(epoch=leading.epoch - 1)
    found = await logs.ended(conn, after=0, seconds=0, batch=10)
    placed = [(BEFORE_ALL._replace(idx=0, epoch=1, seq=0), pack(["x"])[1][0])]
    for verb in (
        lambda: queue_log_archiving(conn, old, limit=10),
        lambda: create_archive_object(conn, old, run_id=run, bytes=1),
        lambda: archive_logs(conn, old, object_id, placed),
        lambda: finish_log_archiving(conn, old, found),
        lambda: orphaned_archive_objects(conn, old, limit=10),
        lambda: delete_archive_objects(conn, old, [object_id]),
    ):
        with pytest.raises(NotLeader):
            await verb()
    assert await due(conn) == [run] and await here(conn, run) == [True] and await listed(conn) == 1
