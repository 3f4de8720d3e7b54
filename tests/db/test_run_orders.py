"""Lists in every order: as sorting all of it would give, read from an index, or refused where that cannot be done in time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
import pytest_asyncio
from psycopg import AsyncConnection
from psycopg.sql import SQL
from psycopg.types.range import Range

from evertick.db.connect import Purpose, connect
from evertick.db.queries import accounts, dags, listings, run_lists
from evertick.db.queries.accounts import EventFilter
from evertick.db.queries.listings import TaskFilter
from evertick.db.queries.run_lists import ListedRun, MatchingRuns, PageRequest, RunFilter
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.errors import UserError
from evertick.domain.schedules.spec import parse_schedule
from tests.databases import Cluster
from tests.engine.world import make_dag, put, value

pytestmark = pytest.mark.asyncio(loop_scope="module")

# What each order sorts by, of a run as it is listed.
KEYS: dict[str, Callable[[ListedRun], Any]] = {
    "dag": lambda run: run.dag,
    "text_id": lambda run: run.text_id,
    "due_at": lambda run: run.due_at,
    "fire_at": lambda run: run.fire_at,
    "finished_at": lambda run: run.finished_at,
    "changed_at": lambda run: run.finished_at or run.started_at or run.created_at,
    "started_at": lambda run: run.started_at,
    "seconds": lambda run: run.seconds,
    "run_id": lambda run: run.run_id,
}
INDEXES = {
    "text_id": "run_of_display_id",
    "due_at": "run_fire",
    "fire_at": "run_filled",
    "finished_at": "run_ended",
    "changed_at": "run_ended",
    "started_at": "run_ended",
}
# Manual and scheduled ones and backfills, some of them with an instant that is not in the order of their numbers; two that are open
# for each that was never begun; starts and ends that overtake each other, and equal ones.
FILL = """
with made as (
    insert into run (dag_id, version_id, kind, schedule_id, fire_at, params, triggered_by, created_at)
    select d.dag_id, d.version_id, (case i %% 3 when 0 then 'manual' when 1 then 'scheduled' else 'backfill' end)::run_kind,
           case when i %% 3 = 1 then (
               select c.schedule_id from schedule c where c.dag_id = d.dag_id order by c.schedule_id offset i %% 2 limit 1) end,
           case when i %% 3 > 0 or i %% 5 = 0 then clock() - make_interval(mins => i * 37 %% 1009) end, '{}', 'test',
           clock() - make_interval(mins => i * 11 %% 997)
      from dag d cross join generate_series(1, %s) i where d.name = any(%s)
    returning run_id, dag_id, version_id, created_at)
insert into run_status (run_id, dag_id, version_id, state, open_tasks, started_at, finished_at)
select m.run_id, m.dag_id, m.version_id,
       (case when m.run_id %% 17 = 0 then 'canceled' when m.run_id %% 13 = 0 then 'queued' when m.run_id %% 7 = 0 then 'running'
             when m.run_id %% 5 = 0 then 'failed' else 'success' end)::run_state,
       (m.run_id %% 17 > 0 and (m.run_id %% 13 = 0 or m.run_id %% 7 = 0))::int,
       case when m.run_id %% 17 > 0 and m.run_id %% 13 > 0 then s.at end,
       case when m.run_id %% 17 = 0 or m.run_id %% 13 > 0 and m.run_id %% 7 > 0
            then s.at + make_interval(mins => (m.run_id * 31 %% 251)::int) end
  from made m cross join lateral (select m.created_at + make_interval(mins => (m.run_id * 7 %% 11)::int) as at) s
"""

# Of what is over one task each, two in each twelfth, and one of a run that was deleted.
TASKS = """
insert into task (run_id, idx, map_index, version_id, state, epoch, attempt, session, started_at, finished_at)
select s.run_id, 0, m, s.version_id, ('{success,failed,skipped,upstream_failed,canceled}'::task_state[])[1 + s.run_id % 5], 1, 1, 1,
       s.started_at, s.finished_at
  from run_status s cross join lateral generate_series(-1, case when s.run_id % 12 = 0 then 0 else -1 end) m
 where s.finished_at is not null
union all
select max(s.run_id) + 1, 0, -1, max(s.version_id), 'failed', 1, 1, 1, clock(), clock() from run_status s
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader(cluster: Cluster, template: str) -> AsyncIterator[AsyncConnection]:
    """As the API reads: two DAGs with 200 runs each, and one with a few."""
    name = cluster.create(template)
    async with await connect(cluster.database_url(name), purpose=Purpose.SCHEDULER) as conn:
        for dag in ("etl", "load", "few"):
            hourly = NamedSchedule(name="hourly", spec=parse_schedule("@every 1h"))
            daily = NamedSchedule(name="daily", spec=parse_schedule("@every 24h"))
            await put(conn, replace(make_dag(dag, {"a": []}), schedules=(hourly, daily)))
        await conn.execute(FILL, [200, ["etl", "load"]])
        await conn.execute(FILL, [3, ["few"]])
        await conn.execute(
            "insert into audit_log (occurred_at, action, actor, detail)"
            " select clock() - make_interval(mins => i * 7 % 41), 'v' || i % 5, 'test', '{}' from generate_series(1, 40) i"
        )
        await conn.execute(TASKS)
        for table in ("run", "run_status", "task", "audit_log"):
            await conn.execute(f"analyze {table}")
    async with await connect(cluster.database_url(name), purpose=Purpose.API_READ) as conn:
        yield conn
    cluster.drop(name)


def in_order(runs: list[ListedRun], column: str, *, is_down: bool) -> list[int]:
    """Those without a value last, equal ones by their numbers."""
    by_number = sorted(runs, key=lambda run: run.run_id)
    known = [run for run in by_number if KEYS[column](run) is not None]
    known.sort(key=KEYS[column], reverse=is_down)
    return [run.run_id for run in (*known, *(run for run in by_number if KEYS[column](run) is None))]


async def filters(reader: AsyncConnection) -> list[RunFilter]:
    etl, few = await dags.find(reader, "etl"), await dags.find(reader, "few")
    assert etl is not None and few is not None
    some, _ = await run_lists.list_runs(reader, RunFilter(), PageRequest(limit=1000))
    middle, later = sorted(run.due_at for run in some)[150], sorted(run.due_at for run in some)[300]
    spans = [Range(middle, later, "(]"), Range(middle, None, "[)"), Range(None, middle, "[)")]
    return [
        RunFilter(),
        RunFilter(dag_id=etl.dag_id),
        RunFilter(dag_id=few.dag_id),
        RunFilter(dag_ids=[etl.dag_id, few.dag_id]),
        RunFilter(dag_like=["%e%"], states=["failed", "canceled"]),
        RunFilter(dags=["load"], states=["running", "queued"]),
        RunFilter(kinds=["manual"]),
        RunFilter(dag_id=etl.dag_id, kinds=["backfill"], states=["success"]),
        RunFilter(dag_heads=["nothing"]),
        *(RunFilter(**{name: span}) for name in SPANS for span in spans),  # type: ignore[arg-type]
        RunFilter(dag_id=etl.dag_id, started=spans[0], finished=spans[1], changed=spans[1]),
        RunFilter(dag_id=etl.dag_id, heads=["scheduled__20"]),
        RunFilter(heads=["manual__", "backfill__"]),
    ]


SPANS = {
    "due": lambda run: run.due_at,
    "fire": lambda run: run.fire_at,
    "started": lambda run: run.started_at,
    "finished": lambda run: run.finished_at,
    "changed": KEYS["changed_at"],
}


async def test_what_is_asked_of_time_leaves_what_it_says(reader: AsyncConnection) -> None:
    everything, _ = await run_lists.list_runs(reader, RunFilter(), PageRequest(limit=1000))
    for wanted in await filters(reader):
        found, total = await run_lists.list_runs(reader, wanted, PageRequest(limit=1000))
        asked = {name: span for name in SPANS if (span := getattr(wanted, name)) is not None}
        if asked and wanted.dag_id is None:
            expected = [run.run_id for run in everything if all(holds(asked[name], SPANS[name](run)) for name in asked)]
            assert ([run.run_id for run in found], total) == (expected, len(expected)) and expected, wanted
        for heads in filter(None, [wanted.heads]):
            assert found and all(run.text_id.startswith(tuple(heads)) for run in found)


def holds(span: Range[datetime], at: datetime | None) -> bool:
    """Both ends belong to it or not as it says; what has no time is in none."""
    if at is None:
        return False
    is_after = span.lower is None or at > span.lower or (at == span.lower and span.lower_inc)
    is_before = span.upper is None or at < span.upper or (at == span.upper and span.upper_inc)
    return is_after and is_before


@pytest.mark.requirement("H4")
@pytest.mark.parametrize("column", KEYS)
async def test_a_page_in_any_order_is_that_of_all_runs_sorted(
    reader: AsyncConnection, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of few, which would be fetched and sorted: here they are read from the index that knows the order."""
    for wanted in (await filters(reader))[len(column) % 2 :: 2]:
        everything, _ = await run_lists.list_runs(reader, wanted, PageRequest(limit=1000))
        for is_down, limit, offset, few in ((True, 5, 0, -1), (False, 100, 150, -1), (True, 7, 400, 1000)):
            order = [(column, is_down)]
            monkeypatch.setattr(run_lists, "MOST_FEW", few)
            found, _ = await run_lists.list_runs(reader, wanted, PageRequest(limit=limit, offset=offset, order=order))
            expected = in_order(everything, column, is_down=is_down)[offset : offset + limit]
            assert [run.run_id for run in found] == expected, (wanted, order, limit, offset)


@pytest.mark.requirement("H4")
@pytest.mark.parametrize("column", INDEXES)
async def test_an_order_in_time_is_read_from_an_index(reader: AsyncConnection, column: str) -> None:
    """No plan reads whole tables but that of the few that are open, whatever the number of runs."""
    ids = [int(str(row[0])) for row in await (await reader.execute("select dag_id from dag")).fetchall()]
    schedules = [
        int(str(row[0])) for row in await (await reader.execute("select schedule_id from schedule")).fetchall()
    ]
    await reader.execute("set enable_seqscan = off")
    for is_down in (True,) if column == "started_at" else (False, True):
        asked = PageRequest(limit=3, order=[(column, is_down)], is_counted=False)
        statement, params = run_lists.question_of_runs(RunFilter(), asked, MatchingRuns(ids, schedules))
        explained = await reader.execute(SQL("explain (format json) ") + statement, params, prepare=False)
        ((plan,),) = await explained.fetchall()
        names = {str(node.get("Index Name")) for node in nodes_of(plan[0]["Plan"])}
        assert INDEXES[column] in names, plan
    await reader.execute("reset enable_seqscan")


def nodes_of(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes_of(child)


@pytest.mark.requirement("H4")
async def test_an_order_that_no_index_knows_is_refused_where_too_much_fits(
    reader: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = await dags.find(reader, "few")
    assert few is not None
    monkeypatch.setattr(run_lists, "MOST_SORTED", 30)
    page = {"limit": 2, "offset": 0}
    for order in ([("seconds", True)], [("started_at", False)], [("started_at", True), ("seconds", True)]):
        with pytest.raises(UserError, match="More than 30 rows match"):
            await run_lists.list_runs(reader, RunFilter(), PageRequest(**page, order=order))
        assert (
            len((await run_lists.list_runs(reader, RunFilter(dag_id=few.dag_id), PageRequest(**page, order=order)))[0])
            == 2
        )
    with pytest.raises(UserError, match="More than 30 rows match"):
        await listings.list_tasks(reader, TaskFilter(), PageRequest(**page, order=[("started_at", True)]))
    run_id = int(str(await value(reader, "select min(run_id) from run")))
    in_run, _ = await listings.list_tasks(
        reader, TaskFilter(run_id=run_id), PageRequest(**page, order=[("started_at", True)])
    )
    assert len(in_run) == 1, "of one run it does not matter"
    with pytest.raises(UserError, match="More than 30 rows match"):
        await accounts.list_events(reader, EventFilter(), PageRequest(**page, order=[("verb", False)]))
    found, _ = await accounts.list_events(reader, EventFilter(), PageRequest(limit=5, order=[("occurred_at", True)]))
    times: list[datetime] = [each.occurred_at for each in found]
    assert len(times) == 5 and times == sorted(times, reverse=True)


async def test_runs_are_meant_by_their_texts_in_all_dags(reader: AsyncConnection) -> None:
    some, _ = await run_lists.list_runs(reader, RunFilter(), PageRequest(limit=4, order=[("text_id", True)]))
    texts = [run.text_id for run in some]
    found, total = await listings.list_tasks(reader, TaskFilter(text_ids=[*texts, "none"]), PageRequest(limit=10))
    assert (sorted(each.run_id for each in found), total) == (sorted(run.run_id for run in some), 4)
    assert await listings.list_tasks(reader, TaskFilter(text_ids=["none"]), PageRequest(limit=10)) == ([], 0)


@pytest.mark.requirement("H4")
async def test_tasks_that_have_a_row_are_listed_from_their_rows(
    reader: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the joins of all that is known of tasks would list them."""
    etl = await dags.find(reader, "etl")
    some, _ = await run_lists.list_runs(reader, RunFilter(), PageRequest(limit=1000))
    middle = sorted(run.started_at for run in some if run.started_at is not None)[150]
    assert etl is not None
    names = {state: state for state in ("success", "failed", "skipped", "upstream_failed")} | {"canceled": "failed"}
    failed = TaskFilter(names=names, states=["failed"], plain_states=["canceled", "failed"])
    wanted = [
        failed,
        replace(failed, dag_id=etl.dag_id, tasks=["a"]),
        replace(failed, is_mapped=True, map_indexes=[0]),
        replace(failed, dag_like=["%oa%"], queues=["default"]),
        replace(failed, dags=["load", "etl"], after=[some[50].run_id, 0, -1]),
        replace(failed, dag_ids=[etl.dag_id, 10**6], versions=[1], before=[some[350].run_id, 0, -1]),
        TaskFilter(started=Range(middle, None, "[)"), heads=["a"]),
        TaskFilter(finished=Range(None, middle, "[)")),
    ]
    assert await listings.list_tasks(reader, replace(failed, text_ids=[]), PageRequest(limit=5)) == ([], 0)
    pages_asked = [
        PageRequest(limit=1000),
        PageRequest(limit=7, offset=3, order=[("run_id", True), ("idx", True), ("map_index", True)]),
        PageRequest(limit=3, is_counted=False),
        PageRequest(limit=2, order=[("run_id", True), ("task", True)]),
    ]
    by_rows = [await listings.list_tasks(reader, each, asked) for each in wanted for asked in pages_asked]
    monkeypatch.setattr(listings, "_is_of_rows", lambda _: False)
    assert by_rows == [await listings.list_tasks(reader, each, asked) for each in wanted for asked in pages_asked]
    assert all(total == len(found) > 0 for found, total in by_rows[::4]) and by_rows[0][1] > 20


async def test_a_list_of_what_no_dag_has_is_empty_at_once(reader: AsyncConnection) -> None:
    for nothing in (TaskFilter(queues=["none"]), TaskFilter(tasks=["none"]), TaskFilter(dags=["etl"], versions=[9])):
        assert await listings.list_tasks(reader, nothing, PageRequest(limit=5)) == ([], 0)
    for absent in (EventFilter(dag="none"), EventFilter(dag_like=["none"]), EventFilter(text_id="none")):
        assert await accounts.list_events(reader, absent, PageRequest(limit=5)) == ([], 0)
