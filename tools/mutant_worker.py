"""Runs tests against a copy of the program with different SQL for each job. Collects them once and forks per job.

python -m tools.mutant_worker URL PATH...     one JSON job per line on stdin, one JSON verdict per line on stdout
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import IO, Any

import psycopg
import pytest
from psycopg import AsyncCursor
from psycopg.sql import SQL, Identifier
from tests.databases import Cluster, template_name
from tools.calls import Calls

from evertick.db.function_sets import own_set
from evertick.db.migrate import migrations
from evertick.db.statements import function_files, nouns, sql, statements

# A test that hangs counts as failed. The selected tests take a tenth of this time, and a failure is repeated; on the
# unchanged program, slow tests run, too.
LONGEST_TEST_SECONDS, LONGEST_UNCHANGED_SECONDS = 20.0, 300.0
QUIET = ["-q", "--tb=no", "--no-header", "--no-summary", "-p", "no:xdist", "-p", "no:cacheprovider"]


@dataclass(slots=True)
class Verdict:
    """The result of a job. `red` names the failed tests; `broken` is the reason why the database could not be prepared."""

    red: list[str] = field(default_factory=list)
    broken: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    calls: dict[str, list[str]] = field(default_factory=dict)


class Recorder:
    """A pytest plugin that records every outcome and reports every started test."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._began = 0.0
        self.verdict = Verdict()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began = _cpu_seconds()
        self._pipe.write(json.dumps({"began": nodeid}) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self.verdict.seconds
        seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and report.nodeid not in self.verdict.red:
            self.verdict.red.append(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.verdict.cpu[nodeid] = round(_cpu_seconds() - self._began, 3)


class Desk:
    """A pytest plugin that runs jobs one after the other in child processes, instead of running the collected tests once."""

    def __init__(self, url: str, jobs: IO[str], answers: IO[str]) -> None:
        self._url, self._jobs, self._answers = url, jobs, answers

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            return True
        self._say({"tests": [item.nodeid for item in session.items], "template": Cluster(url=self._url).template()})
        for line in self._jobs:
            self._say(asdict(in_child(json.loads(line), self._url, session)))
        return True

    def _say(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")


def main(url: str, paths: list[str]) -> None:
    # pytest replaces both.
    jobs, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    silence()
    # A terminated worker also ends the child that runs its job.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["EVERTICK_TEST_URL"] = url
    pytest.main([*QUIET, *paths], plugins=[Desk(url, jobs, answers)])


def in_child(job: dict[str, Any], url: str, session: pytest.Session) -> Verdict:
    """Run one job in a child process, which is killed if a test hangs."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            with os.fdopen(writer, "w", buffering=1) as pipe:
                pipe.write(json.dumps(asdict(run_tests(job, url, session, pipe))) + "\n")
        finally:
            os._exit(0)
    os.close(writer)
    try:
        return verdict_from(reader, LONGEST_TEST_SECONDS if job["stops"] else LONGEST_UNCHANGED_SECONDS)
    finally:
        os.close(reader)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def verdict_from(reader: int, longest: float) -> Verdict:
    running, said = "", b""
    while select.select([reader], [], [], longest)[0]:
        part = os.read(reader, 1 << 20)
        if not part:
            return Verdict(broken=f"the test process died: {running or 'before the first test'}")
        *lines, said = (said + part).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "began" not in told:
                return Verdict(**told)
            running = told["began"]
    return Verdict(red=[running])


def run_tests(job: dict[str, Any], url: str, session: pytest.Session, pipe: IO[str]) -> Verdict:
    """Run the job's tests in the given order, with the program as it is in the files now."""
    read_statements_again()
    function_files.cache_clear()
    own_set.cache_clear()
    recorder, calls, cluster = Recorder(pipe), Calls(url), Cluster(url=url)
    try:
        if job["function"]:
            replace_function(cluster, job["template"], job["function"])
        cluster.template()
    except psycopg.Error as error:
        return Verdict(broken=str(error))
    session.config.pluginmanager.register(recorder)
    if job["notes_calls"]:
        session.config.pluginmanager.register(calls)
        calls.watch()
    known = {item.nodeid: item for item in session.items}
    items = [known[test] for test in job["tests"] if test in known]
    for item, following in zip_longest(items, items[1:]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if job["stops"] and recorder.verdict.red:
            break
    session.config.hook.pytest_sessionfinish(session=session, exitstatus=0)
    if job["has_own_template"]:
        cluster.drop(template_name())
    recorder.verdict.calls = {test: sorted(names) for test, names in calls.by_test.items()}
    return recorder.verdict


def read_statements_again() -> None:
    """Execute changed statements: a declaration has kept the text that its statement had when it was imported."""
    known = [(noun, name, text) for noun in nouns() for name, text in statements(noun).items()]
    statements.cache_clear()
    changed = {text: sql(noun, name) for noun, name, text in known if sql(noun, name) != text}
    execute = AsyncCursor.execute

    async def execute_changed(cursor: AsyncCursor[Any], query: Any, *args: Any, **options: Any) -> AsyncCursor[Any]:
        return await execute(cursor, changed.get(query, query) if isinstance(query, str) else query, *args, **options)

    AsyncCursor.execute = execute_changed  # type: ignore[method-assign,assignment]


def replace_function(cluster: Cluster, template: str, function: str) -> None:
    """Copy `template` and replace one function by its current text: much faster than running all migrations."""
    name = template_name()
    with cluster.admin() as admin:
        copy = SQL("create database {} template {} strategy file_copy")
        admin.execute(copy.format(Identifier(name), Identifier(template)))
    try:
        with psycopg.connect(cluster.database_url(name), options="-c search_path=evertick") as conn:
            (old,) = conn.execute("select hash from function_set").fetchone() or ("",)
            new = own_set()
            conn.execute(
                SQL("alter schema {} rename to {}").format(Identifier(f"evertick_fn_{old}"), Identifier(new.schema))
            )
            conn.execute("update function_set set hash = %s", [new.hash])
            conn.execute("select set_config('search_path', %s, false)", [new.search_path])
            conn.execute(function.replace("create function", "create or replace function", 1).encode())
            for migration in migrations():
                values = [migration.checksum, migration.number]
                conn.execute("update migration set checksum = %s where number = %s", values)
    except psycopg.Error:
        cluster.drop(name)
        raise


def _cpu_seconds() -> float:
    """The CPU time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def silence() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
