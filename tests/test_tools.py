"""The tools that keep the house: the finder of guards, the hunt for mutants, the list of requirements, `make test`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools.guards import Guard, find_guards
from tools.mutants import known_survivors
from tools.requirements import marked_tests, requirements
from tools.test import child_environment, slowest, stages, totals

from tests.databases import Cluster

ROOT = Path(__file__).parents[1]

# Guards ---------------------------------------------------------------------------------------------------------------

FUNCTION = """
create table thing (
    thing_id int generated always as identity primary key,
    name text not null unique,
    state text check (state in ('a', 'b')),
    unique (name, state)
);
create unique index thing_one on thing (name) where state = 'a';
create function move(p_epoch int) returns int language plpgsql as $$
begin
    perform 1 from thing t where t.name = 'where' order by 1 for no key update skip locked;
    if not found then
        return 0;
    end if;
    -- where this is a comment
    with x as (
        update thing t set state = case when t.paused then 'a' else 'b' end
        from other o where t.thing_id = o.thing_id and t.run_id = o.run_id and t.state = 'a' and t.epoch = p_epoch
          and 1 = case when t.x > 1 and t.y then 1 else 2 end and t.z not between 1 and 2 and t.last
        returning t.name
    )
    insert into thing (name) select name from x where (x.a or x.b)
    on conflict (name) where state = 'a' do update set name = excluded.name where thing.session = 1
    returning 1;
    return count(*) filter (where state = 'a') from thing;
end $$;
"""


def guards_of(tmp_path: Path, migration: str = "", statements: str = "") -> list[Guard]:
    for folder, text in (("migrations", migration), ("sql", statements)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0001_things.sql").write_text(text)
    return find_guards(tmp_path)


def test_every_guard_of_a_function_and_a_table_is_found(tmp_path: Path) -> None:
    found = {guard.name: guard.kind for guard in guards_of(tmp_path, FUNCTION)}
    assert found == {
        "thing: unique (name, state)": "unique",
        "thing: unique": "unique",
        "thing: check (state in ('a', 'b'))": "check",
        "thing: unique index thing_one on thing": "unique",
        "move: for no key update skip locked": "lock",
        "move: skip locked": "lock",
        "move: not found": "found",
        "move: t.paused": "paused",
        "move: t.thing_id = o.thing_id": "condition",
        "move: t.state = 'a'": "state",
        "move: t.epoch = p_epoch": "epoch",
        "move: 1 = case when t.x > 1 and t.y then 1 else 2 end": "condition",
        "move: t.z not between 1 and 2": "condition",
        "move: t.last": "condition",
        "move: (x.a or x.b)": "condition",
        "move: on conflict (name) where state = 'a' do update set name = excluded.name where thing.session = 1": "unique",
        "move: thing.session = 1": "session",
    }


def test_a_removed_guard_leaves_the_rest_as_it_was(tmp_path: Path) -> None:
    guards = {guard.name: guard for guard in guards_of(tmp_path, FUNCTION)}
    text = guards["move: t.epoch = p_epoch"].removed_from(FUNCTION)
    assert text == FUNCTION.replace("t.epoch = p_epoch", "true")
    text = guards["move: not found"].removed_from(FUNCTION)
    assert text == FUNCTION.replace("if not found then", "if false then")


def test_guards_of_statements_are_found_where_something_is_written_or_locked(tmp_path: Path) -> None:
    statements = (
        "-- name: read\nselect 1 from thing where state = 'a'\n\n"
        "-- name: write\n-- why\ndelete from thing where state = 'a' and state = 'a'\n\n"
        "-- name: lock\nselect pg_advisory_xact_lock(%(key)s)\n"
    )
    assert [(guard.name, guard.instead) for guard in guards_of(tmp_path, statements=statements)] == [
        ("0001_things.write: state = 'a'", "true"),
        ("0001_things.write: state = 'a' #2", "true"),
        ("0001_things.lock: pg_advisory_xact_lock(%(key)s)", "num_nulls(%(key)s)"),
    ]


def test_the_store_is_full_of_guards_and_each_has_a_name_of_its_own() -> None:
    guards = find_guards()
    assert len(guards) > 200
    assert len({guard.name for guard in guards}) == len(guards)
    kinds = {guard.kind for guard in guards}
    assert kinds >= {"state", "epoch", "session", "request", "unique", "check", "lock", "paused", "version", "next_due"}


def test_every_explained_survivor_is_a_guard_that_there_is() -> None:
    known = known_survivors()
    assert set(known) - {guard.name for guard in find_guards()} == set(), "remove these from tools/mutants_known.toml"
    assert all(len(reason) > 20 for reason in known.values())


# Mutants --------------------------------------------------------------------------------------------------------------


def hunt(cluster: Cluster, tmp_path: Path, only: str, tests: str) -> tuple[int, list[dict[str, object]], str]:
    written = tmp_path / "fates.json"
    command = [sys.executable, "tools/mutants.py", only, "--tests", tests, "--url", cluster.url, "--json", str(written)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "CI": "true"})
    return done.returncode, json.loads(written.read_text()), done.stdout


def test_a_finish_without_its_epoch_is_killed_and_the_program_as_it_is_passes(cluster: Cluster, tmp_path: Path) -> None:
    code, fates, said = hunt(cluster, tmp_path, "finish: k.epoch = d.epoch", "tests/engine/test_flow.py")
    assert [str(fate["killed_by"]).partition("::")[0] for fate in fates] == ["tests/engine/test_flow.py"]
    assert "left out" not in said, "a test is red without any mutation"
    assert code == 0


def test_a_mutant_that_no_test_sees_survives_and_is_told(cluster: Cluster, tmp_path: Path) -> None:
    code, fates, said = hunt(cluster, tmp_path, "finish: k.epoch = d.epoch", "tests/engine/test_rules.py")
    assert [fate["killed_by"] for fate in fates] == [None]
    assert "1 without" in said
    assert code == 1


# Requirements ---------------------------------------------------------------------------------------------------------


def test_every_test_names_requirements_that_there_are() -> None:
    assert set(marked_tests()) - set(requirements()) == set()


def test_requirements_are_read_from_the_tables_and_from_the_tests(tmp_path: Path) -> None:
    document = tmp_path / "requirements.md"
    document.write_text("| id | statement |\n|---|---|\n| A1 | it works |\n\nText.\n\n| B12 | it lasts |\n")
    assert requirements(document) == {"A1": "it works", "B12": "it lasts"}
    (tmp_path / "test_it.py").write_text(
        "pytestmark = pytest.mark.requirement('A1')\n"
        "@pytest.mark.requirement('B12 C3', 'A1')\ndef test_one(): ...\n"
        "async def test_two(): ...\n"
    )
    assert marked_tests(tmp_path) == {
        "A1": ["test_it.py::test_one", "test_it.py::test_two"],
        "B12": ["test_it.py::test_one"],
        "C3": ["test_it.py::test_one"],
    }


# make test ------------------------------------------------------------------------------------------------------------

REPORT = """<testsuites><testsuite tests="4" failures="1" errors="0" skipped="1">
<testcase classname="tests.test_a" name="test_slow" time="2.5"/><testcase classname="tests.test_a" name="test_fast" time="0.1"/>
</testsuite></testsuites>"""


def test_the_slowest_tests_and_the_totals_are_read_from_what_pytest_wrote(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    missing = tmp_path / "missing.xml"
    assert slowest([report, missing], 1) == [(2.5, "tests.test_a::test_slow")]
    assert totals([report, report, missing]) == "2 failed, 4 passed, 2 skipped"


def test_make_test_checks_the_code_before_it_runs_everything(tmp_path: Path) -> None:
    names = [stage.name for stage in stages(tmp_path, [])]
    assert names == ["format", "lint", "types", "tests", "tests on their own"]


def test_children_of_make_test_keep_their_byte_code_and_are_plain_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("CI", "true")
    assert "PYTHONDONTWRITEBYTECODE" not in child_environment()
    assert child_environment()["NO_COLOR"] == "1"
