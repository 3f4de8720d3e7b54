"""`make mutants`: removes each guard of the store's SQL, one at a time. At least one test must fail for each.

python tools/mutants.py [ONLY ...] [--tests PATH ...] [--json FILE] [--again FILE] [--learned FILE] [--skip-known] [--list]

The tests that call a guard's function or statement run, most likely first; for a table's guard, the tests of refused rows.
mutants_known.toml explains survivors; a survivor without a reason, or a reason without a survivor, is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import tomllib
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.databases import own_cluster, quick_folder  # noqa: E402  the lines above make this importable
from tools.guards import Guard, find_guards  # noqa: E402
from tools.mutant_hunt import Fate, Hunt, Worker  # noqa: E402

KNOWN = Path(__file__).with_name("mutants_known.toml")
# Slow tests are left out: they would be needed only for guards that no other test covers.
LONG = {"test_simulation.py", "test_scale.py", "test_contract.py"}
TESTS = sorted(
    f"tests/engine/{path.name}" for path in (ROOT / "tests/engine").glob("test_*.py") if path.name not in LONG
)
TESTS += [
    f"tests/db/{name}.py"
    for name in (
        *("queries/test_accounts", "test_failover", "test_functions", "test_migrate"),
        *("test_refused_rows", "test_states", "test_stored_values"),
    )
]
WORKERS = 2


def known_survivors(path: Path = KNOWN) -> dict[str, str]:
    """The guards without a failing test, each with the reason."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["survivors"]
    return {guard: entry["reason"] for entry in entries for guard in entry["guards"]}


def report(console: Console, fates: list[Fate], *, is_whole: bool) -> bool:
    """Print the survivors. Returns whether all results are as expected."""
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
        console.print(f"{KNOWN.name} explains a guard that does not survive (any more): {name}", markup=False)
    unexplained = survived - set(known)
    broken = sum(fate.is_broken for fate in fates)
    killed = sum(fate.killed_by is not None for fate in fates)
    console.print(
        f"{len(fates)} guards removed: {killed} killed, {len(survived) - len(unexplained)} survived with a reason,"
        f" {len(unexplained)} without, {broken} broken."
    )
    return not unexplained and not broken and not stale


def hunt(console: Console, options: argparse.Namespace, guards: list[Guard], fates: list[Fate]) -> None:
    tests = options.tests or TESTS
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evertick-mutants-", dir=quick_folder())))
        workers: list[Worker] = []
        for number in range(min(options.workers, len(guards))):
            # One server per worker: tests of the server itself would interfere on a shared one.
            place = home / f"worker-{number}"
            url = options.url or stack.enter_context(own_cluster(place / "postgres", track_functions="all")).url
            workers.append(Worker(place, url, tests))
        for worker in workers:
            stack.callback(worker.close)
        party = Hunt(workers)
        seconds = party.learn(options.learned)
        console.print(f"{len(guards)} guards. The tests take {seconds:.1f} s on the unchanged program.")
        for test in party.red:
            console.print(f"left out, because it fails without a mutation: {test}", markup=False)
        for test in party.slow:
            console.print(f"left out, because it is slow: {test}", markup=False)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        progress = stack.enter_context(Progress(*columns, console=console, disable=not console.is_terminal))
        task = progress.add_task("hunting", total=len(guards))
        known = known_survivors()
        for fate in party.run(guards):
            fates.append(fate)
            if options.json:
                # Also written when the run is stopped: --again continues from there.
                write_fates(options.json, fates)
            survivors = sum(each.survived for each in fates)
            progress.update(task, advance=1, description=f"testing, {survivors} survivors")
            if fate.survived and fate.guard.name not in known:
                console.print(f"survived {fate.tests} tests: {fate.guard.name}", markup=False, highlight=False)
            if not console.is_terminal and len(fates) % 25 == 0:
                console.print(f"{len(fates)} of {len(guards)}, {survivors} survivors")


def write_fates(path: Path, fates: list[Fate]) -> None:
    rows = [
        {"guard": f.guard.name, "kind": f.guard.kind, "file": f.guard.file, "line": f.guard.line, "tests": f.tests,
         "killed_by": f.killed_by, "is_broken": f.is_broken, "seconds": round(f.seconds, 3)}
        for f in fates
    ]  # fmt: skip
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Removes each guard of the store's SQL; at least one test must fail for each."
    )
    parser.add_argument("only", nargs="*", default=[""], help="guards whose name, kind or file contains one of these")
    parser.add_argument("--tests", nargs="+", help="test files (default: fast engine tests and two store tests)")
    parser.add_argument("--json", type=Path, help="write the result of each mutant to this file")
    parser.add_argument("--again", type=Path, help="test only mutants that this file does not list as killed")
    parser.add_argument("--learned", type=Path, help="save durations and calls of tests in this file for later runs")
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"number of test processes (default: {WORKERS})")
    parser.add_argument("--skip-known", action="store_true", help="skip known survivors")
    parser.add_argument("--list", action="store_true", help="only list the guards")
    parser.add_argument("--url", help="a PostgreSQL server to use instead of starting one")
    options = parser.parse_args(arguments)
    plain = os.environ.get("CI") == "true"
    console = Console(force_terminal=False if plain else None, width=None if sys.stdout.isatty() else 160)
    found = find_guards()
    guards = [
        guard for guard in found if any(only in f"{guard.name} {guard.kind} {guard.file}" for only in options.only)
    ]
    if options.again:
        killed = {fate["guard"] for fate in json.loads(options.again.read_text()) if fate["killed_by"]}
        guards = [guard for guard in guards if guard.name not in killed]
    if options.skip_known:
        guards = [guard for guard in guards if guard.name not in known_survivors()]
    if options.list or not guards:
        for guard in guards:
            console.print(f"{guard.kind:<16}{guard.name}", markup=False)
        console.print(
            f"{len(guards)} guards."
            if guards
            else f"No guard matches {' or '.join(map(repr, options.only))}. See --list."
        )
        return 0 if guards else 2
    began = time.monotonic()
    # On termination, the servers and workers must end, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    fates: list[Fate] = []
    hunt(console, options, guards, fates)
    is_right = report(console, fates, is_whole=len(guards) == len(found) and not options.tests)
    console.print(f"{time.monotonic() - began:.0f} s in total.")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
