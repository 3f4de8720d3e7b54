"""DAG files of Airflow, published and run by a real scheduler and a real runner, with Airflow in an interpreter of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.bundles.bundle import pack
from evertick.bundles.loader import LoadedFile
from evertick.cli.main import main
from evertick.config import Settings
from evertick.db.queries import tasks
from evertick.domain.access import Actor
from evertick.domain.dags.findings import Severity
from evertick.domain.deployments import DeploymentChange, DeploymentKind
from evertick.domain.stored_values import ValueKind
from evertick.engine.runs import trigger
from evertick.engine.secrets import put_value
from evertick.publisher.deployment import LoadedFolder, deploy, load_files
from evertick.publisher.publisher import find_dag_files
from evertick.runner.runner import Runner
from evertick.scheduler.scheduler import Scheduler
from evertick.secrets.keyring import load_keyring, make_key
from tests.engine import invariants
from tests.engine.world import run_state, value
from tests.system.hosting import Said, hosted, quick
from tests.waiting import eventually

DAGS = Path(__file__).parent / "dags"
pytestmark = [pytest.mark.long]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("airflow")
    return {"PATH": "/usr/bin:/bin", "HOME": str(home), "AIRFLOW_HOME": str(home), "AIRFLOW_VAR_REGION": "eu"}


@pytest.fixture(scope="module")
def settings(airflow_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    home = tmp_path_factory.mktemp("home")
    return Settings(airflow_python=airflow_python, home=home, load_timeout_seconds=120)


@pytest.fixture(scope="module")
def loaded(settings: Settings, environment: dict[str, str]) -> list[LoadedFile]:
    files = find_dag_files(DAGS, with_airflow=True)
    assert files == ["children.py", "classic.py", "mapping.py", "triggers.py", "waits.py"]
    found = asyncio.run(load_files(DAGS, files, settings, environment))
    assert [file.error for file in found] == [None] * 5
    return found


def test_everything_that_is_not_kept_is_a_finding_with_its_line(loaded: Sequence[LoadedFile]) -> None:
    _, classic, mapping, triggers, waits = loaded
    assert triggers.findings == ()
    assert {dag.name for dag in classic.dags} == {"classic", "target"}
    assert classic.findings == ()
    assert {each.code for each in mapping.findings} == {"AF305"}
    assert {dag.name for dag in waits.dags} == {"deferred"}
    assert set(waits.refused) == {"mapped_group"}
    found = {each.code: each for each in waits.findings}
    assert {code: each.severity for code, each in found.items()} == {"AF301": Severity.REFUSED}
    assert {dag.name: len(dag.spec.mapped_groups) for dag in mapping.dags} == {"expressions": 0, "groups": 3}
    (deferred,) = waits.dags
    assert [each.spec.expression for each in deferred.spec.schedules] == ["0 6 * * *"]


def test_check_prints_what_becomes_of_a_folder(airflow_python: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["airflow", "check", str(DAGS), "--python", str(airflow_python), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["environment"]["airflow"].startswith("3.")
    assert (report["files"], report["dags"], report["broken"]) == (5, 8, [])
    assert report["as_they_are"] == ["children", "classic", "deferred", "expressions", "target", "triggers"]
    assert (report["differing"], report["refused"]) == (["groups"], ["mapped_group"])


async def test_a_dag_of_airflow_runs_unchanged(
    conn: AsyncConnection,
    database: str,
    tmp_path: Path,
    loaded: Sequence[LoadedFile],
    settings: Settings,
    environment: dict[str, str],
) -> None:
    await invariants.install(conn)
    ours = quick(database, tmp_path / "home", airflow_python=settings.airflow_python)
    make_key(ours)
    ring = load_keyring(ours)
    await put_value(
        conn, ring, kind=ValueKind.CONNECTION, name="shop", value="http://:s3cret-pass@shop.example", actor=Actor("t")
    )
    actor = Actor("test")
    folder = tmp_path / "dags"
    shutil.copytree(DAGS, folder)
    usable = [replace(file, findings=()) for file in loaded]
    bundles = {file.file: pack(folder, file.file, file.closure) for file in usable}
    change = DeploymentChange(name="test", kind=DeploymentKind.UPLOAD, is_whole=True)
    await deploy(conn, LoadedFolder(files=usable, bundles=bundles), change, settings=ours, actor=actor)
    params = {"told": str(tmp_path / "told"), "poked": str(tmp_path / "poked"), "extra": 1}
    classic = (await trigger(conn, dag="classic", params=params, actor=actor)).run_id
    deferred = (await trigger(conn, dag="deferred", params={}, actor=actor)).run_id
    await put_value(conn, ring, kind=ValueKind.VARIABLE, name="color", value="green", actor=actor)
    children = (await trigger(conn, dag="children", params={}, actor=actor)).run_id
    groups = (await trigger(conn, dag="groups", params={}, actor=actor)).run_id
    expressions = (await trigger(conn, dag="expressions", params={}, actor=actor)).run_id
    said = Said()
    scheduler = Scheduler(ours, url=database, owner="s0", log=said.log)
    runner = Runner(ours, url=database, log=said.log, environment=environment)
    async with hosted(scheduler), hosted(runner):

        async def ended() -> bool:
            open_runs = "select count(*) from run_status where state in ('queued', 'running')"
            return await value(conn, open_runs) == 0 and await value(conn, "select count(*) from run") == 7

        try:
            await eventually(ended, 120)
        except AssertionError:
            states = [await outcomes(conn, each) for each in (classic, expressions, groups)]
            raise AssertionError((states, said.all[-12:])) from None
    assert await outcomes(conn, classic) == {
        **dict.fromkeys(("extract", "pull", "late", "values", "retried", "after", "sensor", "branch"), "success"),
        **dict.fromkeys(("left", "join", "numbers", "total", "told_total", "trigger"), "success"),
        **dict.fromkeys(("double[0]", "double[1]", "double[2]"), "success"),
        **dict.fromkeys(("skip", "below_skip", "right"), "skipped"),
        "hopeless": "failed",
    }
    assert await run_state(conn, classic) == "success"
    await _check_expressions(conn, expressions)
    await _check_groups(conn, groups)
    assert await run_state(conn, deferred) == "success"
    if not version_of(settings).startswith("3.0."):  # there, child interpreters cannot ask
        assert await outputs(conn, children) == {"read": "green", "reread": "green"}
    results = await outputs(conn, classic)
    day = results["extract"].partition(" ")[0]
    assert results["pull"] == [f"{day} True", f"{day} True"]
    assert results["late"] == f"{day} True"
    assert results["values"] == ["shop.example", "s3cret-pass", {}, "eu"]
    assert results["retried"]["value"] == 2 and results["retried"]["named"] == {"lost": 2}
    assert results["told_total"] == 12
    assert results["after"] == ["half", [1]], "XComs of an attempt that failed"
    assert (tmp_path / "told").read_text() == "hopeless"
    assert (tmp_path / "poked").read_text() == "xxx"
    targets = await value(
        conn,
        "select jsonb_object_agg(d.triggered_by, v.value) from run d join result v using (run_id)"
        " join dag using (dag_id) where dag.name = 'target'",
    )
    assert sorted(map(str, targets.values())) == sorted(["{}", json.dumps({"day": day})])  # type: ignore[attr-defined]
    assert await value(conn, "select count(*) from stored_value where name = 'last_run'") == 1
    assert await invariants.violations(conn) == []


async def _check_expressions(conn: AsyncConnection, run: int) -> None:
    """The instances, their values and their names are those of `dag.test()` of Airflow 3.3."""
    assert await run_state(conn, run) == "success"
    rows = [row for row in await tasks.list_of_run(conn, run_id=run) if row.map_index >= 0]
    assert {row.state for row in rows} == {"success"}
    values: dict[str, list[object]] = defaultdict(list)
    for name, found in await outputs_in_order(conn, run):
        values[name].append(found)
    names = [(row.map_index, row.map_name) for row in rows if row.task == "joined"]
    assert names == [(0, "value 1"), (1, "value 2"), (2, "value 3"), (3, "value 2"), (4, "value 3")]
    shown = {name: values[name] for name in ("doubled", "zipped", "joined", "plain", "items", "pairs", "dicts")}
    assert shown == {
        "doubled": [2, 4, 6],
        "zipped": [[1, "a"], [2, "b"], [3, 0]],
        "joined": [1, 2, 3, 2, 3],
        "plain": ["a", "b"],
        "items": [["x", 1], ["y", 2]],
        "pairs": [[[1, 2], "a"], [[1, 2], "b"], [[2, 3], "a"], [[2, 3], "b"]],
        "dicts": [[1, 0], [2, 0], [3, 0]],
    }
    assert [values["left"], values["right"]] == [["side"], ["side"]]  # a mapped branch skips nothing outside of a group


async def _check_groups(conn: AsyncConnection, run: int) -> None:
    """As under `dag.test()` of Airflow, where a branch skips only in releases before 3.2."""
    assert await run_state(conn, run) == "success"
    found: dict[str, str] = defaultdict(str)
    for row in await tasks.list_of_run(conn, run_id=run):
        found[row.task] += row.state[:2] + " "
        if row.task == "each.value":
            assert row.map_name == f"number value {row.map_index + 2}"
    nothing = (f"none.{each}" for each in ("value", "small_or_large", "small", "large", "told"))
    assert dict(found) == {
        **dict.fromkeys(("numbers", "nothing", "total", "ended"), "su "),
        **dict.fromkeys(("each.value", "each.small_or_large", "each.told", "literal.ended"), "su su su "),
        "each.small": "su sk sk ",
        "each.large": "sk su su ",
        "literal.only_odd": "su sk su ",
        **dict.fromkeys(nothing, "sk "),
    }
    results = await outputs(conn, run)
    assert results["total"] == [[2, 2], [3, 2], [4, 2]]


def version_of(settings: Settings) -> str:
    code = "from importlib.metadata import version; print(version('apache-airflow-core'))"
    return subprocess.run([str(settings.airflow_python), "-c", code], capture_output=True, text=True, check=True).stdout


async def outcomes(conn: AsyncConnection, run: int) -> dict[str, str]:
    rows = await tasks.list_of_run(conn, run_id=run)
    return {row.task if row.map_index < 0 else f"{row.task}[{row.map_index}]": row.state for row in rows}


async def outputs(conn: AsyncConnection, run: int) -> dict[str, Any]:
    return dict(await outputs_in_order(conn, run))


async def outputs_in_order(conn: AsyncConnection, run: int) -> list[tuple[str, Any]]:
    cursor = await conn.execute(
        "select s.name, v.value from result v join run_status r using (run_id)"
        " join task_spec s on s.version_id = r.version_id and s.idx = v.idx where v.run_id = %s order by v.map_index",
        [run],
    )
    return await cursor.fetchall()
