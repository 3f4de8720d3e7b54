"""The tools that keep the house: the finder of guards, the hunt for mutants, the list of requirements, `make test`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tools.audit import NOT_AUDITED, VULNERABLE, verdict
from tools.clocks import as_of
from tools.figures import (
    FIGURES,
    WALK_GOALS,
    Tree,
    class_names,
    code,
    cycles,
    equal_bodies,
    importers,
    modules,
    wide_sql,
)
from tools.guards import Guard, find_guards
from tools.mutants import known_survivors
from tools.requirements import marked_tests, requirements
from tools.test import Stage, child_environment, failed_tests, run_all, serial_files, slowest, stages, totals
from tools.verdicts import Verdicts
from tools.walk import Walk, path_of, walk_in
from tools.walk_trace import Entry

from tests.chaos.machine import lacks_false_clock
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
        update thing t set state = case when t.is_paused then 'a' else 'b' end
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

HELPER = """
create function helps(t thing) returns boolean language plpgsql as $$
begin
    return true;
end $$;
"""


def guards_of(tmp_path: Path, migration: str = "", statements: str = "", functions: str = "") -> list[Guard]:
    for folder, text in (("migrations", migration), ("functions", functions), ("queries", statements)):
        (tmp_path / folder).mkdir(exist_ok=True)
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
        "move: t.is_paused": "is_paused",
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


def test_guards_are_found_in_the_files_of_functions_as_well(tmp_path: Path) -> None:
    found = guards_of(tmp_path, functions=FUNCTION)
    assert {guard.file for guard in found} == {"functions/0001_things.sql"}
    assert "move: t.epoch = p_epoch" in {guard.name for guard in found}


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
    assert kinds >= {
        "state",
        "epoch",
        "session",
        "request",
        "unique",
        "check",
        "lock",
        "is_paused",
        "version",
        "next_due",
    }


def test_every_explained_survivor_is_a_guard_that_there_is() -> None:
    known = known_survivors()
    assert set(known) - {guard.name for guard in find_guards()} == set(), "remove these from tools/mutants_known.toml"
    assert all(len(reason) > 20 for reason in known.values())


# Mutants --------------------------------------------------------------------------------------------------------------


GUARD = "finish_attempts: k.epoch = d.epoch"


def hunt(cluster: Cluster, tmp_path: Path, tests: str) -> tuple[int, str | None, str]:
    """The exit code, the test that killed the mutant, and the output."""
    files = ["--verdicts", tmp_path / "verdicts.json", "--learned", tmp_path / "learned.json"]
    command = [sys.executable, "tools/mutants.py", GUARD, "--tests", tests, "--url", cluster.url, *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "CI": "true"})
    return done.returncode, json.loads((tmp_path / "verdicts.json").read_text())[GUARD][1], done.stdout


def test_a_finish_without_its_epoch_is_killed_once_and_not_judged_again(cluster: Cluster, tmp_path: Path) -> None:
    code, killer, said = hunt(cluster, tmp_path, "tests/engine/test_flow.py")
    assert str(killer).partition("::")[0] == "tests/engine/test_flow.py"
    assert "left out" not in said, "a test is red without any mutation"
    assert "1 guards, 1 judged now: 1 killed" in said
    assert code == 0
    code, again, said = hunt(cluster, tmp_path, "tests/engine/test_flow.py")
    assert "1 guards, 0 judged now: 1 killed" in said
    assert (code, again) == (0, killer)


def test_a_mutant_that_no_test_sees_survives_and_is_told(cluster: Cluster, tmp_path: Path) -> None:
    code, killer, said = hunt(cluster, tmp_path, "tests/engine/test_rules.py")
    assert killer is None
    assert "1 without" in said
    assert code == 1


def test_a_verdict_holds_until_the_function_what_it_calls_or_its_test_changes(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    test = "tests/test_tools.py::test_every_test_names_requirements_that_there_are"
    text = FUNCTION.replace("t.last", "helps(t)") + HELPER
    guard = next(each for each in guards_of(tmp_path / "store", functions=text) if each.owner == "move")
    file = tmp_path / "verdicts.json"
    verdicts = Verdicts(file, tmp_path / "store")
    verdicts.add(guard, test)
    verdicts.write([guard])
    changes = {
        text.replace("-- where this is a comment", ""): True,
        text.replace("return 0", "return 1"): False,
        text.replace("return true", "return false"): False,
        text + HELPER.replace("helps", "stranger"): True,
    }
    for changed, holds in changes.items():
        guards_of(tmp_path / "store", functions=changed)
        assert Verdicts(file, tmp_path / "store").killed(guard) is holds
    file.write_text(file.read_text().replace(test, f"{test}_not"))
    assert not Verdicts(file, tmp_path / "store").holds(guard)


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


# Clocks ---------------------------------------------------------------------------------------------------------------


def test_the_tests_of_another_moment_see_that_moment_in_its_zone() -> None:
    moment = datetime(2028, 2, 29, 23, 59, 30, tzinfo=UTC)
    environment = as_of(moment, "Asia/Kathmandu")
    ahead = float(environment["FAKETIME"].removesuffix("s"))
    assert abs(datetime.now(UTC) + timedelta(seconds=ahead) - moment) < timedelta(seconds=60)
    assert (environment["TZ"], environment["LANG"]) == ("Asia/Kathmandu", "C")
    if lacks_false_clock():
        return
    shown = subprocess.run(["date", "+%F %H:%M"], env=environment, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("2028-03-01 05:4"), "a quarter to six in the morning there"


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


def test_the_failed_tests_are_named_as_pytest_takes_them(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    failure = '<testcase classname="tests.a.test_b" name="test_c[1 2]"><failure message="no"/></testcase>'
    error = '<testcase classname="tests.test_d" name="test_e"><error message="no"/></testcase>'
    report.write_text(REPORT.replace("</testsuite>", f"{failure}{error}</testsuite>"))
    assert failed_tests(report) == ["tests/a/test_b.py::test_c[1 2]", "tests/test_d.py::test_e"]
    assert failed_tests(tmp_path / "missing.xml") == []


def test_make_test_checks_the_code_and_runs_everything(tmp_path: Path) -> None:
    todo = stages(tmp_path, [])
    assert [stage.name for stage in todo] == ["format", "lint", "types", "tests", "tests on their own"]
    assert [stage.name for stage in todo if stage.is_beside] == ["types"]


def test_those_that_run_alone_are_looked_for_where_they_are(tmp_path: Path) -> None:
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.serial" in path.read_text()}
    alone = stages(tmp_path, ["-x"])[-1].command
    assert {str(path) for path in marked - {Path(__file__)}} <= set(alone)
    assert set(serial_files()) <= set(alone)
    assert not set(serial_files()) & set(stages(tmp_path, ["tests/domain"])[-1].command), "somebody chose others"


def test_what_failed_is_told_also_of_what_ran_beside_another(capfd: pytest.CaptureFixture[str]) -> None:
    def stage(name: str, code: int, **options: bool) -> Stage:
        program = f"import sys; print('{name} speaks'); sys.exit({code})"
        return Stage(name=name, command=[sys.executable, "-c", program], **options)

    todo = [stage("good", 0), stage("beside", 1, is_beside=True), stage("bad", 3), stage("last", 0)]
    assert sorted(run_all(todo)) == ["bad", "beside"]
    said = capfd.readouterr().out
    assert said.index("== beside\nbeside speaks") < said.index("last speaks")
    assert run_all([stage("alone", 1, is_beside=True), stage("end", 0)]) == ["alone"]


def test_children_of_make_test_keep_their_byte_code_and_are_plain_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("CI", "true")
    assert "PYTHONDONTWRITEBYTECODE" not in child_environment()
    assert child_environment()["NO_COLOR"] == "1"


# Figures --------------------------------------------------------------------------------------------------------------

BODY = "    total = [value * 2 for value in values if value]\n    return sum(total)\n"


def test_figures_count_a_small_tree(tmp_path: Path) -> None:
    source = tmp_path / "src" / "evertick"
    (source / "db").mkdir(parents=True)
    (source / "__init__.py").write_text('"""Front."""\n')
    (source / "one.py").write_text(
        f'"""One."""\n\nfrom evertick import two  # why\n\nclass A: ...\n\ndef f(values):\n{BODY}'
    )
    (source / "two.py").write_text(
        f"class A: ...\ndef g(values):\n    import evertick.one\n{BODY}def h(values):\n{BODY}"
    )
    (source / "db" / "x.sql").write_text("select 1\n" + "-" * 121 + "\n")
    tree = Tree(tmp_path)
    assert modules(tree) == (2, ["one", "two"])
    assert code(tree)[0] == 5 + 8
    assert cycles(tree) == (1, ["one ↔ two"])
    assert importers(tree)[0] == 2
    assert equal_bodies(tree) == (1, ["one.f = two.h"])
    assert class_names(tree) == (1, ["A: one, two"])
    assert wide_sql(tree)[0] == 1


def test_the_source_keeps_the_goals_of_plainness() -> None:
    """Those that a feature has no reason to move."""
    tree = Tree(ROOT)
    kept = ("wide-sql", "gucs", "source-words", "odd", "names", "twice", "imports")
    above = {}
    for figure in kept:
        _, goal, function = FIGURES[figure]
        value, found = function(tree)
        if value > goal:
            above[figure] = found
    assert above == {}


# Walk -----------------------------------------------------------------------------------------------------------------


def entry(kind: str, *names: str, at: int, statement: str = "") -> Entry:
    """The stack of a step that begins with the first of these functions; the file is before the colon."""
    stack = [dict(zip(("file", "name"), name.split(":"), strict=True), line=1, at=1) for name in names]
    return {"kind": kind, "at": at, "statement": statement, "stack": stack}


def test_a_walk_has_the_functions_on_the_stack_of_its_handovers() -> None:
    idle = [entry("function", "runner/session.py:LocalSession.tick", at=1)]
    tick, claim = "runner/session.py:LocalSession.tick", "runner/exchange.py:Claims.exchange"
    function, step = path_of(
        [
            entry("function", tick, at=2),
            entry("function", tick, claim, at=3),
            entry("statement", tick, claim, "db/queries/tasks.py:claim", at=4, statement="select 1"),
            entry("function", tick, claim, "runner/state.py:RunnerState.held", at=5),
            entry("event", tick, "runner/launch.py:f.<locals>.<lambda>", at=6),
            entry("event", tick, "logs/shipper.py:LogShipper.set_busy", at=7),
        ],
        idle,
    )[0:2]
    assert [each.name for each in function] == ["LocalSession.tick", "Claims.exchange", "f"]
    assert [each.name for each in step] == ["RunnerState.held"]
    assert path_of([entry("statement", tick, at=2), entry("function", tick, at=2)], idle)[0] == []


def walk_on(cluster: Cluster, template: str, folder: Path) -> Walk:
    folder.mkdir()
    return walk_in(folder, cluster.database_url(cluster.create(template)))


@pytest.mark.serial
def test_the_walk_of_one_cron_task_is_measured(cluster: Cluster, template: str, tmp_path: Path) -> None:
    # A leader that another program holds up past the due time fires by the longer path of a late fire.
    walks = (walk_on(cluster, template, tmp_path / str(number)) for number in range(3))
    for walk in walks:
        names = [function.name for function in walk.functions]
        above = {name: size for name, size in walk.sums().items() if size > WALK_GOALS[name][1]}
        if "fire_planned" in names and not above:
            break
    milestones = [
        "ShardLeader.tick",
        "plan_next_fires",
        "fire_planned",
        "LocalSession.tick",
        "ChildProcess.send",
        "run_body",
    ]
    assert [name for name in names if name in milestones] == milestones
    assert {"finish_and_claim", "claim_tasks", "close_finished_runs"} <= set(walk.sql)
    assert not above, walk.functions
    # No wait for a tick within it, and no function of a heartbeat.
    assert not any(function.file in ("runner/heartbeat.py", "runner/peer_check.py") for function in walk.functions)


# The audit ------------------------------------------------------------------------------------------------------------


def test_an_audit_says_what_is_vulnerable_and_never_that_nothing_is_when_nothing_was_compared(tmp_path: Path) -> None:
    good = {"name": "good", "version": "1.0", "vulns": []}
    bad = {"name": "bad", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
    unknown = {"name": "own", "skip_reason": "Dependency not found"}
    assert verdict({"dependencies": [good]}) == (0, ["1 packages audited, 0 vulnerable."])
    status, lines = verdict({"dependencies": [good, bad, unknown]})
    assert status == VULNERABLE and lines[0] == "bad 2.0: PYSEC-1, fixed in 2.1" and "own" in lines[1]
    status, lines = verdict({"dependencies": [unknown]})
    assert status == NOT_AUDITED and "Nothing was audited" in lines[0]
    # The real tool, on a lock without a network.
    lock = tmp_path / "requirements.lock"
    lock.write_text("sampleproject==1.0\n", encoding="utf-8")
    offline = {**os.environ, "HTTPS_PROXY": "http://127.0.0.1:1", "https_proxy": "http://127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "tools/audit.py", str(lock)],
        cwd=ROOT,
        env=offline,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == NOT_AUDITED and "Traceback" not in done.stdout + done.stderr
    assert "Nothing was audited: the advisory database cannot be reached." in done.stdout
