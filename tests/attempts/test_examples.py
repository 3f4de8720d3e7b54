"""The examples run: each task in its order, by the executor, with the results of those before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import evertick
from evertick.bundles.loader import load_file
from evertick.domain.attempt import TaskKey
from tests.executors.local.executor_rig import Rig, log_text, rig

FOLDER = Path(evertick.__file__).parent / "examples"


async def run_example(tmp_path: Path, name: str, **order_fields: Any) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The results and log lines of the DAG in `name`.py, task by task."""
    source = (FOLDER / f"{name}.py").read_text()
    (tmp_path / "read").mkdir()
    (tmp_path / "read" / "d.py").write_text(source)
    loaded = await load_file(tmp_path / "read", "d.py")
    assert loaded.error is None
    spec = loaded.dags[0].spec
    results: dict[str, Any] = {}
    written: dict[str, list[str]] = {}
    async with rig(tmp_path, source) as made:
        for idx, task in enumerate(spec.tasks):
            inputs = json.dumps({each: results[each] for each in task.inputs})
            outcome = await run_one(made, idx, spec.name, task, inputs_json=inputs, **order_fields)
            assert outcome.kind == "success", (task.name, outcome)
            results[task.name] = json.loads(outcome.result_json or "null")
            written[task.name] = log_text(outcome)
    return results, written


async def run_one(made: Rig, idx: int, dag: str, task: Any, **fields: Any) -> Any:
    order = made.order(task.name, key=TaskKey(1, idx, -1), dag=dag, command=task.command, **fields)
    made.start(order)
    return await made.outcome(order)


async def test_invoices(tmp_path: Path) -> None:
    results, _ = await run_example(tmp_path, "invoices")
    assert results["add_up"] == {"$evertick": "decimal", "value": "119.40"}
    assert results["remind"].startswith("3 invoices, 119.40 in all; number 3 is due in 1")


def spoken(lines: list[str]) -> list[str]:
    """Without what was rendered, which stands before it."""
    return [line for line in lines if not line.startswith("RENDER ")]


async def test_kinds(tmp_path: Path, url: str) -> None:
    results, written = await run_example(tmp_path, "kinds", params_json=json.dumps({"url": f"{url}/text"}))
    assert results["fetch"] == "grüß dich"
    assert results["count"] == 2
    assert spoken(written["say"]) == [f"RAW {url}/text is a short page"]


async def test_secrets(tmp_path: Path) -> None:
    granted = {
        "secret": {"shop_token": "tok-123456"},
        "connection": {"warehouse": "pg://anna:pass-word@wh/shop"},
        "variable": {"region": "eu"},
    }
    results, written = await run_example(tmp_path, "secrets", granted_json=json.dumps(granted))
    assert results["store"] == "orders of eu stored on wh"
    assert written["fetch"] == ["OUT asking with *** which is *** in hex"]
    assert written["store"] == ["OUT storing to ***"]
    assert spoken(written["tell"]) == ["RAW orders of eu stored on wh with ***"]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
async def test_every_example_loads(name: str) -> None:
    loaded = await load_file(FOLDER, f"{name}.py")
    assert loaded.error is None
    assert loaded.dags
