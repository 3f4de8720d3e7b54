"""Mutation testing for `make mutants`: removes one guard at a time from a copy of the program and runs the affected tests."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tools.guards import Guard, mentions
from tools.learned import Learned

ROOT = Path(__file__).parents[1]
# Tests that need more CPU time are left out. Not wall-clock time: on a busy machine that would leave out tests that a
# guard needs, and report it as a survivor.
SLOW_CPU_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """The result of one mutant. No test killed a survivor; a broken mutant could not be installed."""

    guard: Guard
    killed_by: str | None
    is_broken: bool
    tests: int
    seconds: float

    @property
    def survived(self) -> bool:
        return self.killed_by is None and not self.is_broken


class Worker:
    """A copy of the program and the process that runs its tests."""

    def __init__(self, place: Path, url: str, tests: list[str]) -> None:
        self.store = place / "evertick" / "db"
        shutil.copytree(ROOT / "src" / "evertick", place / "evertick")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPATH"] = f"{place}{os.pathsep}{ROOT}"
        command = [sys.executable, "-m", "tools.mutant_worker", url, *tests]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        hello = self._answer()
        self.tests: list[str] = hello["tests"]
        self._template: str = hello["template"]

    def learn(self, tests: list[str]) -> dict[str, Any]:
        """Run these tests on the unchanged program: their durations, calls and failures."""
        return self._ask({"tests": tests, "function": None, "notes_calls": True, "stops": False})

    def run(self, tests: list[str], guard: Guard) -> dict[str, Any]:
        """Run the tests on the program without `guard`, until the first failure."""
        path = self.store / guard.file
        text = path.read_text(encoding="utf-8")
        mutant = guard.removed_from(text)
        path.write_text(mutant, encoding="utf-8")
        try:
            is_schema = guard.file.startswith(("migrations/", "functions/"))
            function = function_around(mutant, guard.start) if is_schema else None
            return self._ask({"tests": tests, "function": function, "stops": True, "has_own_template": is_schema})
        finally:
            path.write_text(text, encoding="utf-8")

    def close(self) -> None:
        """End the worker immediately, even in the middle of a job."""
        self._process.terminate()
        self._process.wait()

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        whole = {"notes_calls": False, "has_own_template": False, "template": self._template, **job}
        self._process.stdin.write(json.dumps(whole) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("A worker of `make mutants` died: run the tests directly to see why.")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Hunt:
    """Processes a queue of mutants with a few workers. Tests that killed a similar mutant run first on the next one."""

    def __init__(self, workers: list[Worker], killers: dict[Guard, str]) -> None:
        """`killers`: the test that killed a mutant the last time."""
        self._workers = workers
        self._last = killers
        self._killers: dict[str, list[str]] = defaultdict(list)
        for guard, test in killers.items():
            self._killers[guard.owner].append(test)
        self._callers: dict[str, set[str]] = defaultdict(set)
        self._seconds: dict[str, float] = {}
        self.red: list[str] = []
        self.slow: list[str] = []

    def repeat(self, guards: list[Guard]) -> Iterator[Fate]:
        """The mutants that the same test as before kills. This needs no data about the tests."""
        known = [guard for guard in guards if guard in self._last]
        fates = self._share(known, lambda worker, guard: _try(worker, guard, [self._last[guard]]))
        yield from (fate for fate in fates if fate.killed_by)

    def learn(self, path: Path | None) -> float:
        """Run the tests on the unchanged program, unless `path` has their data. Failing and slow tests are left out."""
        known = Learned.read(path, self._workers[0].tests)
        new = [test for test in self._workers[0].tests if test not in known.seconds]
        shares = [(worker, new[place :: len(self._workers)]) for place, worker in enumerate(self._workers)]
        with ThreadPoolExecutor(len(shares)) as pool:
            for verdict in pool.map(lambda share: share[0].learn(share[1]), shares):
                # A test that fails next to other tests may pass alone.
                again = self._workers[0].learn(verdict["red"]) if verdict["red"] else verdict
                known.add({**verdict, "red": again["red"]})
        self.red = known.red
        usable = known.seconds.keys() - self.red
        asked = {test: known.seconds[test] for test in self._workers[0].tests if test in usable}
        if not asked:
            raise SystemExit("No test was found, or none could be run.")
        known.write(path)
        self._seconds = {test: seconds for test, seconds in asked.items() if known.cpu[test] <= SLOW_CPU_SECONDS}
        self.slow = sorted(asked.keys() - self._seconds.keys())
        for test in self._seconds:
            for name in known.calls.get(test, []):
                self._callers[name].add(test)
        return sum(self._seconds.values())

    def run(self, guards: list[Guard]) -> Iterator[Fate]:
        """Every test that may kill a mutant, until one does. A failure must repeat: a busy machine kills no mutant."""

        def attempt(worker: Worker, guard: Guard) -> Fate:
            tests = self.tests_for(guard)
            fate = _try(worker, guard, tests)
            while fate.killed_by and not _try(worker, guard, [fate.killed_by]).killed_by:
                tests = tests[tests.index(fate.killed_by) + 1 :]
                fate = _try(worker, guard, tests)
            if fate.killed_by:
                self._killers[guard.owner].insert(0, fate.killed_by)
            return fate

        return self._share(guards, attempt)

    def _share(self, guards: list[Guard], attempt: Callable[[Worker, Guard], Fate]) -> Iterator[Fate]:
        todo: queue.SimpleQueue[Guard] = queue.SimpleQueue()
        done: queue.SimpleQueue[Fate | None] = queue.SimpleQueue()
        for guard in guards:
            todo.put(guard)

        def work(worker: Worker) -> None:
            try:
                while True:
                    done.put(attempt(worker, todo.get_nowait()))
            except queue.Empty:
                return
            except (SystemExit, OSError, ValueError):
                done.put(None)

        for worker in self._workers:
            threading.Thread(target=work, args=(worker,), daemon=True).start()
        for _ in guards:
            fate = done.get()
            if fate is None:
                raise SystemExit("A worker of `make mutants` died: run the tests directly to see why.")
            yield fate

    def tests_for(self, guard: Guard) -> list[str]:
        """The tests that call, or may call, the guard's function: most likely first, then fastest."""
        if guard.file.startswith("migrations/"):
            # One test has a row for every check constraint, another one for every unique index.
            return [test for test in self._seconds if "tests/db/test_refused_rows.py" in test]
        called = self._callers.get(guard.owner)
        chosen = called | self._asked_for(guard.owner) if called else self._could_touch(guard.owner)
        chosen = chosen or set(self._seconds)
        killers = {test: place for place, test in reversed([*enumerate(self._killers[guard.owner])])}
        words = [word for word in re.split(r"[._]", guard.owner) if len(word) > 3]

        def likely(test: str) -> tuple[int, int, bool, float]:
            alike = sum(word.rstrip("s") in test for word in words)
            return killers.get(test, len(killers)), -alike, "guards" not in test, self._seconds[test]

        return sorted(chosen, key=likely)

    def _asked_for(self, name: str) -> set[str]:
        """The tests that use a statement which calls the function: PostgreSQL does not count calls that end in an error."""
        statements = [caller for caller in mentions(name) if "." in caller]
        return {test for statement in statements for test in self._callers.get(statement, ())}

    def _could_touch(self, name: str) -> set[str]:
        """The tests for a table, or for a function that PostgreSQL inlines into its callers: its calls are not counted."""
        word = re.compile(rf"\b{name}\b")
        files = {file for file in {test.partition("::")[0] for test in self._seconds} if word.search(_text(file))}
        by_hand = {test for test in self._seconds if test.partition("::")[0] in files}
        return by_hand | {test for caller in mentions(name) for test in self._callers.get(caller, ())}


def _try(worker: Worker, guard: Guard, tests: list[str]) -> Fate:
    began = time.monotonic()
    verdict = worker.run(tests, guard)
    is_broken = verdict["broken"] is not None
    killer = None if is_broken else next(iter(verdict["red"]), None)
    return Fate(guard=guard, killed_by=killer, is_broken=is_broken, tests=len(tests), seconds=time.monotonic() - began)


@cache
def _text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def function_around(text: str, offset: int) -> str | None:
    """The definition of the stored function in which `offset` lies."""
    for match in re.finditer(r"^create function .*?\$\$.*?\$\$;", text, re.S | re.M):
        if match.start() <= offset < match.end():
            return match[0]
    return None
