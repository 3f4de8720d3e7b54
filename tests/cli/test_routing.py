"""`evertick routing`: list the rules, and explain which one a task meets."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg import AsyncConnection

from tests.cli.conftest import Cli
from tests.engine.world import make_dag, put

pytestmark = pytest.mark.requirement("K6")

RULES = "default = 'small'\n[[rule]]\nmatch = 'ml::*'\nqueue = 'gpu'\n[[rule]]\nmatch = 'heavy_*'\nqueue = 'big'\n"


@pytest.fixture
def rules(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = nowhere / "routing.toml"
    file.write_text(RULES)
    monkeypatch.setenv("EVERTICK_ROUTING_FILE", str(file))
    return file


async def test_rules_are_listed_in_order_with_the_default_last(cli_without_database: Cli, rules: Path) -> None:
    _, first, second, last = (await cli_without_database("routing", "list")).out.splitlines()
    assert (first.split(), second.split()) == (["1", "ml::*", "gpu"], ["2", "heavy_*", "big"])
    assert last.split() == ["default", "-", "small"]
    found = await cli_without_database.json("routing", "list")
    assert found["rules"] == [{"match": "ml::*", "queue": "gpu"}, {"match": "heavy_*", "queue": "big"}]
    assert (found["default"], found["file"]) == ("small", str(rules))


async def test_without_a_file_there_are_no_rules(cli_without_database: Cli) -> None:
    assert "EVERTICK_ROUTING_FILE is not set" in (await cli_without_database("routing", "list")).out
    found = await cli_without_database.json("routing", "explain", "a::b")
    assert (found["queue"], found["decided_by"], found["file"]) == ("default", "default", None)


async def test_explain_says_which_rule_matched_and_why_the_others_did_not(
    cli_without_database: Cli, rules: Path
) -> None:
    out = (await cli_without_database("routing", "explain", "etl::heavy_load")).out
    assert "etl::heavy_load goes to queue big, by rule 2." in out
    assert "no: 'etl' is not 'ml'" in out
    found = await cli_without_database.json("routing", "explain", "ml::heavy_load")
    assert (found["queue"], found["decided_by"], found["published"]) == ("gpu", "rule 1", None)
    assert [each["is_first"] for each in found["rules"]] == [True, False]


async def test_explain_knows_a_tasks_own_queue_and_what_is_published(
    cli: Cli, conn: AsyncConnection, rules: Path
) -> None:
    await put(conn, make_dag("ml", {"train": [], "mine": []}, per_task={"mine": {"queue": "special"}}))
    out = (await cli("routing", "explain", "ml::mine")).out
    assert "ml::mine goes to queue special: its own queue= takes precedence over the rules." in out
    out = (await cli("routing", "explain", "ml::train")).out
    assert "The published version uses queue default: the publisher uses other rules than these." in out
    found = await cli.json("routing", "explain", "ml::train")
    assert (found["queue"], found["published"]) == ("gpu", {"queue": "default", "written": None})


async def test_another_file_can_be_tried_before_it_is_used(cli_without_database: Cli, rules: Path) -> None:
    other = rules.with_name("new.toml")
    other.write_text("default = 'elsewhere'\n")
    found = await cli_without_database.json("routing", "explain", "ml::train", "--file", other)
    assert found["queue"] == "elsewhere"


async def test_bad_rules_and_names_are_refused_in_one_line(cli_without_database: Cli, rules: Path) -> None:
    assert "write DAG::TASK" in await cli_without_database.refused("routing", "explain", "load")
    rules.write_text(RULES + "[[rule]]\nmatch = 'ml::train'\nqueue = 'x'\n")
    said = await cli_without_database.refused("routing", "list")
    assert str(rules) in said and "rule 3 ('ml::train') can never match: rule 1" in said
    rules.unlink()
    assert "cannot be read" in await cli_without_database.refused("routing", "list")
    assert "cannot be read" in await cli_without_database.refused("up")
