"""A deployment is published as a whole, owns its DAGs, and is guarded by its version, also against what happens meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick import after
from evertick.db.connect import Purpose, connect
from evertick.db.queries import dags, deployments
from evertick.domain.access import Actor
from evertick.domain.dags.spec import DagSpec, NamedSchedule
from evertick.domain.deployments import DeploymentChange, DeploymentKind, check_name, one_line
from evertick.domain.errors import Conflict, CyclicDependency, NotFound, NotOwned, UserError
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.deployments import delete, delete_upload, note_deployment, put_upload_piece, roll_back
from evertick.engine.publish import NO_RULES, Published, PublishedDag, publish, publish_all
from tests.engine.world import later, make_dag, set_clock, start, value
from tests.waiting import eventually

T = TypeVar("T")
ME = Actor("me")
ONE = {"a": []}


async def deployed(
    conn: AsyncConnection,
    *specs: DagSpec,
    name: str = "shop",
    expected: int | None = None,
    retired: tuple[str, ...] = (),
) -> Published:
    if not await value(conn, "select count(*) from bundle"):  # otherwise a transaction would wait for it alone
        await dags.put_bundle(conn, bundle_hash="b", file="f.py", archive=b"", uses_threads=None)
    change = DeploymentChange(name=name, kind=DeploymentKind.UPLOAD, expected=expected, is_whole=True)
    given = [PublishedDag(spec=spec, file="f.py", bundle_hash="b") for spec in specs]
    return await publish_all(conn, change, given, retired=retired, actor=ME)


async def waiting(conn: AsyncConnection, work: Awaitable[T]) -> asyncio.Task[T]:
    """The work, once it waits for a lock of another transaction."""
    task = asyncio.ensure_future(work)
    query = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    await eventually(lambda: value(conn, query))
    return task


@pytest.fixture
async def other(database: str) -> AsyncIterator[AsyncConnection]:
    async with await connect(database, purpose=Purpose.SCHEDULER) as made:
        yield made


@pytest.fixture
async def third(database: str) -> AsyncIterator[AsyncConnection]:
    async with await connect(database, purpose=Purpose.SCHEDULER) as made:
        yield made


def scheduled_dag(name: str, when: object) -> DagSpec:
    return make_dag(name, ONE, schedules=(NamedSchedule(name="main", spec=parse_schedule(when)),))


async def test_all_dags_of_a_deployment_become_current_at_once_or_none(conn: AsyncConnection) -> None:
    await deployed(conn, make_dag("a", ONE), make_dag("b", ONE))
    changed = make_dag("a", {"a": [], "new": []})
    with pytest.raises(psycopg.errors.CheckViolation):
        await deployed(conn, changed, make_dag("z", ONE, max_active_runs=-1))
    assert await dags.names(conn) == ["a", "b"]
    assert await value(conn, "select count(*) from dag_version") == 2
    done = await deployed(conn, changed, retired=("b",))
    assert (done.version, done.is_new, [each["dag"] for each in done.done]) == (2, True, ["a"])
    assert await dags.names(conn) == ["a"]
    again = await deployed(conn, changed)
    assert (again.version, again.is_new) == (2, False)


async def test_a_retired_dag_keeps_its_history_and_its_schedules_end(conn: AsyncConnection) -> None:
    await deployed(conn, scheduled_dag("a", "@every 1h"))
    run = await start(conn, "a")
    await deployed(conn, make_dag("b", ONE), retired=("a",))
    assert await value(conn, "select count(*) from schedule where deleted_at is null") == 0
    assert await value(conn, "select state::text from run_status where run_id = %s", run) == "running"
    await roll_back(conn, "shop", number=None, actor=ME, routing=NO_RULES)
    assert await value(conn, "select count(*) from schedule where deleted_at is null") == 1
    assert await value(conn, "select count(*) from dag") == 2, "the same one as before"


async def test_what_another_deployment_owns_is_not_retired(conn: AsyncConnection) -> None:
    await deployed(conn, make_dag("a", ONE), name="one")
    await deployed(conn, make_dag("b", ONE), name="two", retired=("a",))
    assert await dags.names(conn) == ["a", "b"]


async def test_each_deployment_has_versions_of_its_own(conn: AsyncConnection) -> None:
    for name in ("one", "two"):
        await deployed(conn, make_dag(f"of_{name}", ONE), name=name)
    again = await deployed(conn, make_dag("of_one", ONE), name="one")
    assert (again.version, again.is_new) == (1, False)
    await deployed(conn, make_dag("new", ONE), name="one", retired=("of_one",))
    deleted = "select count(*) from audit_log where action = 'delete'"
    assert await value(conn, deleted) == 1
    await deployed(conn, make_dag("new", ONE), name="one", retired=("of_one",))
    assert await value(conn, deleted) == 1, "it is gone already"
    rows = [await deployments.find(conn, name) for name in ("one", "two")]
    assert [row and row.version for row in rows] == [2, 1]


async def test_of_two_deployments_that_publish_one_name_at_once_one_gets_it(
    conn: AsyncConnection, other: AsyncConnection, third: AsyncConnection
) -> None:
    await deployed(conn, make_dag("own", ONE), name="two")
    async with other.transaction():
        await deployed(other, make_dag("same", ONE), name="one")
        second = await waiting(third, deployed(conn, make_dag("same", ONE), make_dag("own", ONE), name="two"))
    with pytest.raises(NotOwned, match=r"DAG 'same' belongs to deployment 'one' \(f.py\), so deployment 'two'"):
        await second
    assert await dags.names(conn) == ["own", "same"]
    row = await deployments.find(conn, "two")
    assert row is not None and row.version == 1, "nothing of it is there"


async def test_a_deployment_that_was_prepared_before_another_finished_is_refused(
    conn: AsyncConnection, other: AsyncConnection, third: AsyncConnection
) -> None:
    await deployed(conn, make_dag("a", ONE))
    async with other.transaction():
        await deployed(other, make_dag("a", {"a": [], "b": []}), expected=1)
        late = await waiting(third, deployed(conn, make_dag("a", {"a": [], "c": []}), expected=1))
    with pytest.raises(Conflict, match="is at version 2, not at 1: another change finished first"):
        await late
    with pytest.raises(Conflict, match="another change finished first"):
        await deployed(conn, make_dag("a", ONE), expected=0)


async def test_the_version_is_read_after_the_deployment_is_locked(
    conn: AsyncConnection, other: AsyncConnection, third: AsyncConnection
) -> None:
    await deployed(conn, make_dag("a", ONE))
    async with other.transaction():
        await other.execute("select from deployment where name = 'shop' for no key update")
        late = await waiting(third, deployed(conn, make_dag("a", {"a": [], "c": []}), expected=1))
        await other.execute("update deployment set version = version + 1 where name = 'shop'")
    with pytest.raises(Conflict, match="is at version 2, not at 1"):
        await late


async def test_a_name_that_has_dags_from_elsewhere_is_refused_until_they_are_gone(conn: AsyncConnection) -> None:
    await dags.put_bundle(conn, bundle_hash="b", file="f.py", archive=b"", uses_threads=None)
    await publish(conn, spec=make_dag("a", ONE), file="f.py", bundle_hash="b", actor=ME, deployment="shop")
    with pytest.raises(Conflict, match="come from a folder that a publisher watches"):
        await deployed(conn, make_dag("b", ONE))
    with pytest.raises(Conflict, match="it is a folder"):
        await roll_back(conn, "shop", number=None, actor=ME, routing=NO_RULES)
    await conn.execute("update dag set deleted_at = clock()")
    await deployed(conn, make_dag("other", ONE), name="other")
    assert (await deployed(conn, make_dag("b", ONE))).version == 1
    with pytest.raises(NotFound, match="has only version 1"):
        await roll_back(conn, "shop", number=None, actor=ME, routing=NO_RULES)


async def test_dags_of_one_deployment_cannot_start_each_other_endlessly(conn: AsyncConnection) -> None:
    ring = [scheduled_dag(name, after(of)) for name, of in (("a", "b"), ("b", "a"))]
    with pytest.raises(CyclicDependency, match="endlessly"):
        await deployed(conn, *ring)
    assert await dags.names(conn) == []


async def test_a_deleted_deployment_retires_its_dags_alone_and_can_be_rolled_back(conn: AsyncConnection) -> None:
    await deployed(conn, make_dag("other", ONE), name="other")
    await deployed(conn, scheduled_dag("a", "@every 1h"), make_dag("b", ONE))
    await deployed(conn, scheduled_dag("a", "@every 1h"), retired=("b",))
    for place in ("shop", "other"):
        await dags.put_import_error(conn, deployment=place, file="x.py", line=None, message="broken", detail="")
    run = await start(conn, "a")
    assert await delete(conn, "shop", expected=2, actor=ME) == ["a"]
    assert await delete(conn, "shop", expected=3, actor=ME) is None, "it is deleted already"
    assert [row.name for row in await deployments.page(conn, after="", limit=9)] == ["other"]
    assert [row.deployment for row in await dags.import_errors(conn)] == ["other"]
    assert await dags.names(conn) == ["other"]
    assert await value(conn, "select count(*) from schedule where deleted_at is null") == 0
    assert await value(conn, "select state::text from run_status where run_id = %s", run) == "running"
    audited = "select detail->>'dags' from audit_log where action = 'delete_deployment'"
    assert await value(conn, audited) == '["a"]'
    assert await value(conn, "select count(*) from audit_log where action = 'delete'") == 2, "b was retired before"
    with pytest.raises(Conflict, match="is at version 3, not at 2: another change finished first"):
        await deployed(conn, make_dag("a", ONE), expected=2)
    assert [each.dag_count for each in await deployments.versions(conn, "shop")] == [0, 1, 2]
    with pytest.raises(Conflict, match="Version 3 has no DAGs"):
        await roll_back(conn, "shop", number=3, actor=ME, routing=NO_RULES)
    restored = await roll_back(conn, "shop", number=None, actor=ME, routing=NO_RULES)
    assert (restored.version, restored.restores, restored.dags) == (4, 2, ["a"])
    row = await deployments.find(conn, "shop")
    assert row is not None and row.deleted_at is None
    changes = await deployments.changes(conn, "shop", old=1, new=4)
    assert [(each.name, each.before, each.after) for each in changes] == [("b", 1, None)]


async def test_a_deployment_that_changes_meanwhile_is_not_deleted(
    conn: AsyncConnection, other: AsyncConnection, third: AsyncConnection
) -> None:
    await deployed(conn, make_dag("a", ONE))
    async with other.transaction():
        await deployed(other, make_dag("a", ONE), make_dag("b", ONE), expected=1)
        late = await waiting(third, delete(conn, "shop", expected=1, actor=ME))
    with pytest.raises(Conflict, match="is at version 2, not at 1: another change finished first"):
        await late
    assert await dags.names(conn) == ["a", "b"]


async def test_a_deletion_locks_schedules_in_their_order_before_it_changes_one(
    conn: AsyncConnection, other: AsyncConnection, third: AsyncConnection
) -> None:
    """As a fire does, which would otherwise wait for it in a circle."""
    await deployed(conn, scheduled_dag("z", "@every 1h"))
    await deployed(conn, scheduled_dag("z", "@every 1h"), scheduled_dag("a", "@every 1h"))
    first, second = [
        row[0] for row in await (await conn.execute("select schedule_id from schedule order by 1")).fetchall()
    ]
    lock = "select from schedule_state where schedule_id = %s for no key update"
    async with other.transaction():
        await other.execute(lock, [first])
        late = await waiting(third, delete(conn, "shop", expected=2, actor=ME))
        await other.execute(lock + " nowait", [second])
    assert await late == ["a", "z"]


async def test_a_deleted_folder_has_no_versions_and_comes_back_with_its_next_file(conn: AsyncConnection) -> None:
    await dags.put_bundle(conn, bundle_hash="b", file="f.py", archive=b"", uses_threads=None)
    for _ in range(2):
        await publish(conn, spec=make_dag("a", ONE), file="f.py", bundle_hash="b", actor=ME, deployment="team")
        assert await delete(conn, "team", expected=0, actor=ME) == ["a"]
    assert await deployments.versions(conn, "team") == []
    assert (await deployed(conn, make_dag("a", ONE), name="team")).version == 1, "its name is free for another kind"


async def test_a_version_without_all_of_its_dags_is_not_restored(conn: AsyncConnection) -> None:
    await deployed(conn, make_dag("a", ONE))
    await deployed(conn, make_dag("a", {"a": [], "b": []}))
    await conn.execute("delete from dag_version where number = 1")
    (_, first) = await deployments.versions(conn, "shop")
    assert not first.is_complete
    with pytest.raises(NotFound, match="cannot be restored: parts of it were pruned"):
        await roll_back(conn, "shop", number=1, actor=ME, routing=NO_RULES)


async def test_pieces_of_an_upload_belong_to_one_user_and_are_kept_for_a_day(conn: AsyncConnection) -> None:
    await set_clock(conn, later(0))
    for owner, content in (("ann", b"ab"), ("ann", b"xy"), ("bob", b"12")):
        await put_upload_piece(conn, hash="h", owner=owner, start=0, content=content)
    await set_clock(conn, later(86_000))
    assert await put_upload_piece(conn, hash="h", owner="bob", start=2, content=b"34") == 4
    assert await deployments.pieces(conn, hash="h", owner="ann") == [b"xy"], "what is sent again replaces it"
    await delete_upload(conn, hash="h", owner="ann")
    assert await deployments.pieces(conn, hash="h", owner="ann") == []
    assert await deployments.pieces(conn, hash="h", owner="bob") == [b"12", b"34"]
    await set_clock(conn, later(86_401))
    await put_upload_piece(conn, hash="other", owner="ann", start=0, content=b"ab")
    assert await deployments.pieces(conn, hash="h", owner="bob") == [b"34"]


async def test_a_problem_is_noted_for_a_repository_only(conn: AsyncConnection) -> None:
    source: dict[str, object] = {"url": "https://git.example.com/x"}
    await note_deployment(conn, name="team", kind="git", source=source, problem="broken")
    await note_deployment(conn, name="team", kind="git", source=source, problem=None)
    row = await deployments.find(conn, "team")
    assert row is not None and (row.kind, row.version, row.problem) == ("git", 0, None)
    await deployed(conn, make_dag("a", ONE))
    await note_deployment(conn, name="shop", kind="git", source=source, problem="broken")
    row = await deployments.find(conn, "shop")
    assert row is not None and (row.kind, row.problem) == ("upload", None)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "-a", "é", "x" * 101])
def test_a_name_that_cannot_be_part_of_an_address_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="not a valid name for a deployment"):
        check_name(name)


def test_the_text_of_a_commit_is_one_line_without_control_characters() -> None:
    assert one_line("Fix\n\nthe \x1b[31m thing") == "Fix the [31m thing"
    assert (one_line("x" * 600), one_line(" \n"), one_line(None)) == ("x" * 500, None, None)
