"""The guides for users of other schedulers: the DAGs that they end with run. The README's figures are the measured ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from evertick.sdk.dag import load_dags
from evertick.sdk.runtime import CompiledDag
from tests.source_tree import ROOT

HOWTO = ROOT / "docs/howto"


def dags_of(page: Path, folder: Path) -> dict[str, CompiledDag]:
    """The DAGs of the page's one Python snippet, loaded from a file with a name of its own."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[:1]
    name = f"guide_{page.stem.lower().replace('-', '_')}.py"
    (folder / name).write_text(code, encoding="utf-8")
    return dict(load_dags(folder, name))


def test_the_dag_of_the_readme_runs_and_has_ten_lines(tmp_path: Path) -> None:
    ran = dags_of(ROOT / "README.md", tmp_path)["hello"].test()
    assert ran.state == "success" and ran.results["fetch"] == [3, 1, 2]
    code = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line]) == 10


def test_an_airflow_dag_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    ran = dags_of(HOWTO / "from-airflow.md", tmp_path)["daily"].test()
    assert ran.state == "success", ran.reasons
    assert ran.results["extract"] == {"rows": 3} and (tmp_path / "out.tgz").exists()


def test_the_lines_of_a_crontab_become_dags(tmp_path: Path) -> None:
    dags = dags_of(HOWTO / "from-cron.md", tmp_path)
    assert [dag.spec.schedules[0].spec.expression for dag in dags.values()] == ["*/15 * * * *", "30 2 * * *"]
    assert dags["sync"].spec.overlap == "skip" and dags["sync"].spec.tasks[0].timeout_seconds == 600
    assert dags["sync"].test().state == "failed"  # there is no /opt/sync here


def test_a_celery_chord_becomes_a_mapped_task(tmp_path: Path) -> None:
    ran = dags_of(HOWTO / "from-celery.md", tmp_path)["refresh"].test()
    assert ran.state == "success" and ran.results["total"] == 60


def test_a_prefect_flow_becomes_a_dag(tmp_path: Path) -> None:
    weather = dags_of(HOWTO / "from-prefect.md", tmp_path)["weather"]
    assert weather.test().results["summarize"] == 5.5
    alone = weather.test(params={"cities": ["Rome"]})
    assert alone.state == "success" and alone.states["summarize"] == "skipped"


def test_the_figures_of_the_readme_are_the_measured_ones() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    peers = {row["engine"]: row for row in json.loads((ROOT / "bench/peers.json").read_text())["rows"]}
    latest = {row["name"]: row["value"] for row in json.loads((ROOT / "bench/latest.json").read_text())}
    own = peers["Evertick, process"]
    assert f"(median) | {own['gap_ms']:.1f} ms |" in text
    assert f"a process per task | {own['runs_per_s']:.0f} |" in text
    assert f"until all have fired | {latest['fire_50k.drained']:.1f} s |" in text
    gaps = [f"{peers[name]['gap_ms']:,.0f} ms" for name in ("Airflow 3.3.2", "Prefect 3.8.8")]
    celery = f"{peers['Celery + Redis 5.7.0']['gap_ms']:.1f} ms, not durable"
    row = f"| {own['gap_ms']:.0f} ms | {gaps[0]} | {gaps[1]} in one process | not measured | not measured | {celery} |"
    assert row in text
