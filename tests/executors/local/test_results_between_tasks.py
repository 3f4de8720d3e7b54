"""What attempts give and take: types, named outputs, files for large results."""

from __future__ import annotations

import json
from pathlib import Path

from evertick.executors.local.child_process import ExecutorLimits
from evertick.storage.result_files import ResultFiles
from tests.executors.local.executor_rig import dag_of, log_text, rig

SHOP = """
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from zoneinfo import ZoneInfo
from evertick import *


@dataclass
class Sale:
    at: datetime
    total: Decimal


@task
def sell() -> Sale:
    return Sale(datetime(2030, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin")), Decimal("9.50"))


@task
async def book(sale: Sale) -> str:
    assert isinstance(sale, Sale)
    return f"{sale.at.tzinfo} {sale.total + Decimal('0.25')}"


@task(outputs=["rows", "path"])
def extract(how: str = "all") -> dict[str, int] | None:
    if how == "none":
        return None
    push("path", {"of": Decimal("1")})
    return {"rows": 3}


@task
def use(rows: int, where: Decimal) -> str:
    return f"{rows} {where!r}"


@task
def big() -> list[str]:
    return ["x" * 100] * 100


@task
def count(lines: list[str]) -> int:
    return len(lines)


@task
def fail_after_push() -> None:
    push("half", 1)
    raise ValueError("no")


@task
def wrong_push() -> None:
    push(3, 1)


@dag
def d():
    book(sell())
    out = extract()
    use(out["rows"], out["path"]["of"])
    count(big())
    fail_after_push()
    wrong_push()
    shell("show", 'echo "$SALE"', env={"SALE": out["path"]})
"""


async def test_a_dataclass_goes_from_one_task_to_the_next(tmp_path: Path) -> None:
    async with rig(tmp_path, SHOP) as made:
        sale = await made.result("sell")
        assert sale["class"] == "d:Sale"
        assert await made.result("book", inputs_json=json.dumps({"sell": sale})) == "Europe/Berlin 9.75"


async def test_named_outputs_are_taken_apart(tmp_path: Path) -> None:
    async with rig(tmp_path, SHOP) as made:
        given = await made.result("extract")
        assert given["named"]["path"] == {"of": {"$evertick": "decimal", "value": "1"}}
        inputs = json.dumps({"extract": given})
        assert await made.result("use", inputs_json=inputs) == "3 Decimal('1')"


async def test_what_is_taken_from_nothing_is_none_and_from_another_shape_a_failure(tmp_path: Path) -> None:
    async with rig(tmp_path, SHOP) as made:
        assert await made.result("use", inputs_json='{"extract": null}') == "None None"
        outcome = await made.run("use", inputs_json='{"extract": {"path": {"of": 1}}}')
        assert outcome.reason == "ResultLost: the result of task 'extract' has no 'rows'; it has: 'path'."


async def test_an_output_that_was_promised_and_not_given_fails_the_task(tmp_path: Path) -> None:
    source = SHOP.replace("out = extract()", 'out = extract("none")')
    async with rig(tmp_path, source) as made:
        outcome = await made.run("extract")
        assert outcome.kind == "failed"
        assert "without its outputs rows, path" in (outcome.reason or "")


async def test_a_failed_attempt_leaves_nothing_that_it_pushed(tmp_path: Path) -> None:
    async with rig(tmp_path, SHOP) as made:
        assert (await made.run("fail_after_push")).result_json is None
        assert "push() takes a name" in ((await made.run("wrong_push")).reason or "")


async def test_outputs_of_one_attempt_are_not_seen_by_the_next_in_a_warm_process(tmp_path: Path) -> None:
    source = dag_of("def first():\n    push('a', 1)", "def second():\n    return current_context().pushed")
    async with rig(tmp_path, source) as made:
        await made.result("first", isolation="warm")
        assert await made.result("second", isolation="warm") == {}


async def test_a_large_result_goes_through_a_file_of_its_run(tmp_path: Path) -> None:
    files = ResultFiles(folder=str(tmp_path / "results"), spill_bytes=1000, max_bytes=20_000)
    async with rig(tmp_path, SHOP, limits=ExecutorLimits(results=files)) as made:
        order = made.order("big")
        made.start(order)
        given = json.loads((await made.outcome(order)).result_json or "")
        assert given["$evertick"] == "file"
        taker = made.order("count", inputs_json=json.dumps({"big": given}), key=order.key._replace(idx=1))
        made.start(taker)
        assert (await made.outcome(taker)).result_json == "100"
        (file,) = (tmp_path / "results" / str(order.key.run_id)).iterdir()
        file.write_text(file.read_text().replace("x", "y", 1))
        again = made.order("count", inputs_json=json.dumps({"big": given}), key=order.key._replace(idx=2))
        made.start(again)
        assert "was changed. Clear the task that produced it" in ((await made.outcome(again)).reason or "")


async def test_a_result_beyond_every_limit_or_without_a_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no folder").touch()
    files = ResultFiles(folder=str(tmp_path / "no folder"), spill_bytes=1000, max_bytes=20_000)
    async with rig(tmp_path, SHOP, limits=ExecutorLimits(results=files)) as made:
        assert "cannot be written to" in ((await made.run("big")).reason or "")
    async with rig(tmp_path, SHOP, limits=ExecutorLimits(results=ResultFiles(max_bytes=5000))) as made:
        outcome = await made.run("big")
        assert "result too large" in (outcome.reason or "")
        assert any("result too large" in line for line in log_text(outcome))


async def test_a_shell_task_gets_a_part_as_json(tmp_path: Path) -> None:
    async with rig(tmp_path, SHOP) as made:
        inputs = '{"extract": {"$evertick": "outputs", "value": null, "named": {"path": {"of": 5}}}}'
        outcome = await made.run("show", inputs_json=inputs, command='echo "$SALE"')
        assert log_text(outcome) == ['RAW {"of": 5}']
