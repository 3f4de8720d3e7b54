"""Runs tests against a copy of the program whose SQL changes from job to job: imports everything once, forks per job.

python -m tools.mutant_worker URL PATH...     one JSON job per line on stdin, one JSON verdict per line on stdout
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.databases import Cluster, template_name

from evertick.store.statements import statements

LONGEST_JOB_SECONDS = 120.0
QUIET = ["-q", "--tb=no", "--no-header", "--no-summary", "-p", "no:xdist", "-p", "no:cacheprovider"]


@dataclass(slots=True)
class Verdict:
    """What the tests said. `red` names those that failed; `broken` is why there is no database to run them on."""

    red: list[str] = field(default_factory=list)
    broken: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    is_timeout: bool = False


class Recorder:
    """A pytest plugin: the likeliest tests first, the ones to leave out left out, every outcome written down."""

    def __init__(self, first: list[str], skip: list[str], seconds: dict[str, float]) -> None:
        self._place = {test: number for number, test in enumerate(first)}
        self._skip, self._seconds = set(skip), seconds
        self.verdict = Verdict()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._skip]
        items.sort(
            key=lambda item: (self._place.get(item.nodeid, len(self._place)), self._seconds.get(item.nodeid, 0.0))
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self.verdict.seconds
        seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.verdict.red.append(report.nodeid)


def main(url: str, paths: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    silence()
    for path in paths:
        for module in sorted(Path(path).rglob("test_*.py")) if Path(path).is_dir() else [Path(path)]:
            importlib.import_module(".".join(module.with_suffix("").parts))
    for line in sys.stdin:
        answers.write(json.dumps(asdict(in_child(json.loads(line), url, paths))) + "\n")


def in_child(job: dict[str, Any], url: str, paths: list[str]) -> Verdict:
    """Run one job in a process of its own, which is killed when it takes too long."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.setsid()
        verdict = run_tests(job, url, paths)
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(asdict(verdict)))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        is_timeout = not select.select([pipe], [], [], LONGEST_JOB_SECONDS)[0]
        if is_timeout:
            os.killpg(pid, signal.SIGKILL)
        answer = "" if is_timeout else pipe.read()
    os.waitpid(pid, 0)
    return Verdict(**json.loads(answer)) if answer else Verdict(is_timeout=True)


def run_tests(job: dict[str, Any], url: str, paths: list[str]) -> Verdict:
    os.environ["EVERTICK_TEST_URL"] = url
    statements.cache_clear()
    recorder = Recorder(job["first"], job["skip"], job["seconds"])
    try:
        Cluster(url=url).template()
    except psycopg.Error as error:
        recorder.verdict.broken = str(error)
        return recorder.verdict
    pytest.main([*QUIET, *(["-x"] if job["stops"] else []), *paths], plugins=[recorder])
    if job["has_own_template"]:
        Cluster(url=url).drop(template_name())
    return recorder.verdict


def silence() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
