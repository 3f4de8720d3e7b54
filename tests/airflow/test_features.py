"""Schedules, limits and people of Airflow's DAG files, by a real scheduler and a real runner."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.bundles.bundle import pack
from evertick.bundles.loader import LoadedFile
from evertick.config import Settings
from evertick.domain.access import Actor, Role
from evertick.domain.dags.gates import GateKind
from evertick.domain.deployments import DeploymentChange, DeploymentKind
from evertick.domain.errors import Conflict, Forbidden, UserError
from evertick.domain.schedules.misfire import OverlapPolicy
from evertick.engine.runs import trigger
from evertick.engine.waits import Decision, decide_approval
from evertick.publisher.deployment import LoadedFolder, deploy, load_files
from evertick.runner.runner import Runner
from evertick.scheduler.scheduler import Scheduler
from tests.airflow.test_files import environment, outcomes, outputs, settings, version_of
from tests.engine import invariants
from tests.engine.world import value
from tests.system.hosting import Said, hosted, quick
from tests.waiting import eventually

__all__ = ["environment", "settings"]
DAGS = Path(__file__).parent / "features"
pytestmark = [pytest.mark.long]


@pytest.fixture(scope="module")
def loaded(settings: Settings, environment: dict[str, str]) -> list[LoadedFile]:
    files = ["limits.py", *(["people.py"] if not version_of(settings).startswith("3.0.") else [])]
    found = asyncio.run(load_files(DAGS, files, settings, environment))
    assert [file.error for file in found] == [None] * len(files)
    assert [(each.code, each.dag) for file in found for each in file.findings] == [("AF502", "stops")]
    return found


def test_limits_are_gates_of_a_run(loaded: Sequence[LoadedFile]) -> None:
    specs = {dag.spec.name: dag.spec for dag in loaded[0].dags}
    first, second = specs["caught_up"].tasks
    assert {(gate.kind, gate.name, gate.capacity) for gate in first.gates} == {
        (GateKind.GROUP, "max_active_tasks", 2),
        (GateKind.PAST, "", None),
        (GateKind.PAST, "second", None),
    }
    assert (GateKind.GROUP, "second", 1) in {(gate.kind, gate.name, gate.capacity) for gate in second.gates}
    assert {task.name: task.priority for task in specs["newest"].tasks} == {"only": 0, "longer": 9}
    (schedule,) = specs["endless"].schedules
    assert (schedule.spec.every_seconds, schedule.overlap) == (1, OverlapPolicy.SKIP)
    times = {name: specs[name].schedules[0].spec.instants for name in ("custom", "monthly", "twice")}
    assert [f"{at:%d %H:%M}" for at in times["custom"]] == ["01 00:05", "01 03:05"]
    assert {at.day for at in times["monthly"]} == {1}
    hours = [at.hour for at in times["twice"] if at > datetime.now(UTC)]
    assert len(hours) == 500 and set(pairwise(hours)) == {(6, 18), (18, 6)}


async def test_runs_of_the_past_and_answers_of_people(
    conn: AsyncConnection,
    database: str,
    tmp_path: Path,
    loaded: Sequence[LoadedFile],
    settings: Settings,
    environment: dict[str, str],
) -> None:
    await invariants.install(conn)
    ours = quick(database, tmp_path / "home", airflow_python=settings.airflow_python)
    actor = Actor("test")
    bundles = {file.file: pack(DAGS, file.file, file.closure) for file in loaded}
    change = DeploymentChange(name="test", kind=DeploymentKind.UPLOAD, is_whole=True)
    await deploy(conn, LoadedFolder(files=list(loaded), bundles=bundles), change, settings=ours, actor=actor)
    people = (await trigger(conn, dag="people", params={}, actor=actor)).run_id if len(loaded) > 1 else None
    stops, *_ = [(await trigger(conn, dag=name, params={}, actor=actor)).run_id for name in ("stops", "fails", "works")]
    environment = {**environment, "AIRFLOW_VAR_TOLD": str(tmp_path / "told")}
    said = Said()
    scheduler = Scheduler(ours, url=database, owner="s0", log=said.log)
    runner = Runner(ours, url=database, log=said.log, environment=environment)

    async def count(query: str) -> int:
        return int(await value(conn, f"select count(*) from {query}"))  # type: ignore[call-overload]

    async def asked() -> bool:
        return await count("listed_approval where is_open") == 3 and await count("approval") == 5

    async def ended() -> bool:
        is_open = await count("run_status where state in ('queued', 'running')")
        return is_open == 0 and await count("outbox where state = 'waiting'") == 0

    async with hosted(scheduler), hosted(runner):
        if people is not None:
            await eventually(asked, 120)
            await answer(conn, people)
        await eventually(ended, 120)
    assert await invariants.violations(conn) == []
    of_schedules = (
        "select jsonb_object_agg(n, dates) from (select name as n, jsonb_agg(fire_at::text order by fire_at) as dates"
        " from run join dag using (dag_id) where fire_at is not null and kind = 'scheduled' group by 1) x"
    )
    found = await value(conn, of_schedules)
    assert {name: [date[:13] for date in some] for name, some in found.items()} == {  # type: ignore[attr-defined]
        "caught_up": ["2026-01-01 06", "2026-01-02 06"],
        "once": ["2026-01-01 00"],
        "newest": ["2026-01-01 00"],
        "custom": ["2026-01-01 00", "2026-01-01 03"],
    }
    intervals = await value(
        conn,
        "select jsonb_agg(v.value order by v.run_id) from result v join run using (run_id) join dag using (dag_id)"
        " where name = 'caught_up' and idx = 0",
    )
    day = "2026-01-{}:00:00+00:00"
    assert intervals == [[day.format(f"0{n} 04"), day.format(f"0{n} 06"), day.format(f"0{n} 04")] for n in (1, 2)]
    found = await value(
        conn,
        "select jsonb_agg(v.value order by v.run_id) from result v join run using (run_id) join dag using (dag_id)"
        " where name = 'custom'",
    )
    halves = (("2025-12-31 23:30", "2026-01-01 00:00"), ("2026-01-01 02:30", "2026-01-01 03:00"))
    assert found == [[f"{start}:00+00:00", f"{end}:00+00:00"] for start, end in halves]
    assert sorted((tmp_path / "told").read_text().splitlines()) == ["success works fine", "task_failure fails bad"]
    assert await outcomes(conn, stops) == {"bad": "failed", "runs": "failed", "later": "skipped"}
    paused = "select jsonb_agg(name) from dag where is_paused and name in ('fails', 'works')"
    assert await value(conn, paused) == ["fails"]
    called = "select jsonb_object_agg(name, state) from run_status join dag using (dag_id) where strpos(name, '.callback.') > 0"
    assert await value(conn, called) == {
        "fails.callback.on_failure_callback": "failed",
        "works.callback.on_success_callback": "success",
    }
    if people is not None:
        assert await outcomes(conn, people) == {
            **dict.fromkeys(("ask", "read", "approve", "late", "branch", "right"), "success"),
            **dict.fromkeys(("ship", "left"), "skipped"),
            "too_late": "failed",
        }
        results = await outputs(conn, people)
        assert results["read"] == [["a", "c"], {"rows": 7}, "ann"]


async def answer(conn: AsyncConnection, run: int) -> None:
    """One answer each, by an assigned user and with its options."""

    async def decide(task: str, who: str, chosen: list[str] | None, **more: object) -> None:
        given = Decision(
            is_approved=chosen != ["Reject"], actor=Actor(f"user:{who}"), chosen=chosen, fields=lambda form: more
        )
        await decide_approval(conn, run_id=run, task=task, decision=given, role=Role.ADMIN)

    with pytest.raises(Forbidden, match="Only Ann"):
        await decide("ask", "bob", ["a"])
    with pytest.raises(UserError, match="choose one or more"):
        await decide("ask", "ann", ["a", "d"])
    await decide("ask", "ann", ["a", "c"], rows=7)
    with pytest.raises(Conflict):
        await decide("ask", "ann", ["b"])
    await decide("approve", "bob", ["Reject"])
    with pytest.raises(UserError, match="choose one of"):
        await decide("branch", "bob", ["left", "right"])
    await decide("branch", "bob", ["right"])
