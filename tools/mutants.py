"""`make mutants`: removes each guard of the store's SQL, one at a time; some test must go red for each.

python tools/mutants.py [ONLY] [--tests PATH ...] [--json FILE] [--again FILE] [--skip-known] [--list]

Survivors are explained in mutants_known.toml; one without a reason, or a reason without a survivor, is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.databases import own_cluster, quick_folder  # noqa: E402  the lines above make this importable
from tools.guards import Guard, find_guards  # noqa: E402

KNOWN = Path(__file__).with_name("mutants_known.toml")
# Those that take long by their nature would only find what the others have let through.
LONG = {"test_simulation.py", "test_scale.py", "test_contract.py"}
TESTS = sorted(
    f"tests/engine/{path.name}" for path in (ROOT / "tests/engine").glob("test_*.py") if path.name not in LONG
)
TESTS += ["tests/store/test_states.py", "tests/store/test_migrate.py", "tests/store/test_cluster.py"]
WORKERS = 2
SLOW_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What became of one mutant. Nobody killed a survivor; a broken one could not even be installed."""

    guard: Guard
    killed_by: str | None
    is_broken: bool
    seconds: float

    @property
    def survived(self) -> bool:
        return self.killed_by is None and not self.is_broken


class Worker:
    """A copy of the program and the process that tests it."""

    def __init__(self, place: Path, url: str, tests: list[str]) -> None:
        self.store = place / "evertick" / "store"
        shutil.copytree(ROOT / "src" / "evertick", place / "evertick")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPATH"] = f"{place}{os.pathsep}{ROOT}"
        command = [sys.executable, "-m", "tools.mutant_worker", url, *tests]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, job: dict[str, Any], guard: Guard | None = None) -> dict[str, Any]:
        """The tests' verdict on the program without `guard`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._without(guard):
            has_own_template = guard is not None and guard.file.startswith("migrations/")
            self._process.stdin.write(json.dumps({**job, "has_own_template": has_own_template}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("A worker of `make mutants` died: run the tests on their own to see why.")
        verdict: dict[str, Any] = json.loads(answer)
        return verdict

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    @contextmanager
    def _without(self, guard: Guard | None) -> Iterator[None]:
        if guard is None:
            yield
            return
        path = self.store / guard.file
        text = path.read_text(encoding="utf-8")
        path.write_text(guard.removed_from(text), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")


class Hunt:
    """All mutants, from a queue, by a few workers. What killed a neighbour is tried first on the next."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self._killers: dict[str, list[str]] = defaultdict(list)
        self._seconds: dict[str, float] = {}
        self._skip: list[str] = []
        self.red: list[str] = []

    def baseline(self) -> float:
        """Run everything on the program as it is: learn how long each test takes. Red and slow ones are left out."""
        verdict = self._workers[0].run({"first": [], "skip": [], "seconds": {}, "stops": False})
        self._seconds, self.red = verdict["seconds"], verdict["red"]
        if not self._seconds:
            raise SystemExit("No test was found, or none could be run.")
        self._skip = self.red + [test for test, seconds in self._seconds.items() if seconds > SLOW_SECONDS]
        return sum(self._seconds.values())

    def run(self, guards: list[Guard]) -> Iterator[Fate]:
        todo: queue.SimpleQueue[Guard] = queue.SimpleQueue()
        done: queue.SimpleQueue[Fate] = queue.SimpleQueue()
        for guard in guards:
            todo.put(guard)
        for worker in self._workers:
            threading.Thread(target=self._work, args=(worker, todo, done), daemon=True).start()
        for _ in guards:
            yield done.get()

    def _work(self, worker: Worker, todo: queue.SimpleQueue[Guard], done: queue.SimpleQueue[Fate]) -> None:
        while not todo.empty():
            try:
                done.put(self._try(worker, todo.get_nowait()))
            except queue.Empty:
                return

    def _try(self, worker: Worker, guard: Guard) -> Fate:
        began = time.monotonic()
        first = [*dict.fromkeys(self._killers[guard.owner]), *self._namesakes(guard)]
        verdict = worker.run({"first": first, "skip": self._skip, "seconds": self._seconds, "stops": True}, guard)
        killer = "too slow" if verdict["is_timeout"] else next(iter(verdict["red"]), None)
        is_broken = verdict["broken"] is not None
        if killer and not is_broken:
            self._killers[guard.owner].insert(0, killer)
        return Fate(
            guard=guard, killed_by=None if is_broken else killer, is_broken=is_broken, seconds=time.monotonic() - began
        )

    def _namesakes(self, guard: Guard) -> list[str]:
        """Tests whose name has the verb in it, the quickest first."""
        verb = re.split(r"[._]", guard.owner.split(".")[-1])[0]
        return sorted((test for test in self._seconds if verb in test.split("::")[1]), key=self._seconds.__getitem__)


def known_survivors(path: Path = KNOWN) -> dict[str, str]:
    """The guards that no test needs, each with the reason."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["survivors"]
    return {guard: entry["reason"] for entry in entries for guard in entry["guards"]}


def report(console: Console, fates: list[Fate], *, is_whole: bool) -> bool:
    """Say what survived; whether everything is as it should be."""
    known = known_survivors()
    table = Table("", "guard", "where", "why it may", title="Survivors", title_justify="left")
    for fate in sorted(fates, key=lambda fate: (fate.guard.file, fate.guard.line)):
        if not fate.survived and not fate.is_broken:
            continue
        guard = fate.guard
        mark, why = ("broken", "cannot be installed") if fate.is_broken else ("", known.get(guard.name, "[red]?[/red]"))
        table.add_row(mark, guard.name.replace("[", "\\["), f"{guard.file}:{guard.line}", why)
    if table.row_count:
        console.print(table)
    survived = {fate.guard.name for fate in fates if fate.survived}
    stale = sorted(set(known) - survived) if is_whole else []
    for name in stale:
        console.print(f"{KNOWN.name} explains what does not survive (any more): {name}", markup=False)
    unexplained = survived - set(known)
    broken = sum(fate.is_broken for fate in fates)
    killed = sum(fate.killed_by is not None for fate in fates)
    console.print(
        f"{len(fates)} guards removed: {killed} killed, {len(survived) - len(unexplained)} survived with a reason,"
        f" {len(unexplained)} without, {broken} broken."
    )
    return not unexplained and not broken and not stale


def hunt(console: Console, options: argparse.Namespace, guards: list[Guard]) -> list[Fate]:
    tests = options.tests or TESTS
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evertick-mutants-", dir=quick_folder())))
        url = options.url or stack.enter_context(own_cluster(home / "postgres")).url
        count = min(WORKERS, len(guards))
        workers = [Worker(home / f"worker-{number}", url, tests) for number in range(count)]
        for worker in workers:
            stack.callback(worker.close)
        party = Hunt(workers)
        console.print(f"{len(guards)} guards. The tests take {party.baseline():.1f} s on the program as it is.")
        for test in party.red:
            console.print(f"left out, because it is red without any mutation: {test}", markup=False)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        progress = stack.enter_context(Progress(*columns, console=console, disable=not console.is_terminal))
        task = progress.add_task("hunting", total=len(guards))
        fates: list[Fate] = []
        known = known_survivors()
        for fate in party.run(guards):
            fates.append(fate)
            survivors = sum(each.survived for each in fates)
            progress.update(task, advance=1, description=f"hunting, {survivors} survivors")
            if fate.survived and fate.guard.name not in known:
                console.print(f"survived: {fate.guard.name}", markup=False, highlight=False)
            if not console.is_terminal and len(fates) % 25 == 0:
                console.print(f"{len(fates)} of {len(guards)}, {survivors} survivors")
        return fates


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Removes each guard of the store's SQL; some test must go red for each."
    )
    parser.add_argument("only", nargs="?", default="", help="guards whose name, kind or file contains this")
    parser.add_argument(
        "--tests", nargs="+", help="which tests (default: those of the engine that are quick, and two of the store)"
    )
    parser.add_argument("--json", type=Path, help="write what became of each mutant to this file")
    parser.add_argument("--again", type=Path, help="only those that such a file does not call killed")
    parser.add_argument("--skip-known", action="store_true", help="do not try again what is known to survive")
    parser.add_argument("--list", action="store_true", help="only say which guards there are")
    parser.add_argument("--url", help="a PostgreSQL server to use instead of starting one")
    options = parser.parse_args(arguments)
    plain = os.environ.get("CI") == "true"
    console = Console(force_terminal=False if plain else None, width=None if sys.stdout.isatty() else 160)
    found = find_guards()
    guards = [guard for guard in found if options.only in f"{guard.name} {guard.kind} {guard.file}"]
    if options.again:
        killed = {fate["guard"] for fate in json.loads(options.again.read_text()) if fate["killed_by"]}
        guards = [guard for guard in guards if guard.name not in killed]
    if options.skip_known:
        guards = [guard for guard in guards if guard.name not in known_survivors()]
    if options.list or not guards:
        for guard in guards:
            console.print(f"{guard.kind:<16}{guard.name}", markup=False)
        console.print(f"{len(guards)} guards." if guards else f"No guard has {options.only!r} in it: see --list.")
        return 0 if guards else 2
    began = time.monotonic()
    # A terminated hunt must take its server and its workers with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    fates = hunt(console, options, guards)
    is_right = report(console, fates, is_whole=len(guards) == len(found) and not options.tests)
    console.print(f"{time.monotonic() - began:.0f} s in all.")
    if options.json:
        rows = [
            {"guard": f.guard.name, "kind": f.guard.kind, "file": f.guard.file, "line": f.guard.line,
             "killed_by": f.killed_by, "is_broken": f.is_broken, "seconds": round(f.seconds, 3)}
            for f in fates
        ]  # fmt: skip
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
