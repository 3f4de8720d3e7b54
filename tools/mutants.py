"""`make mutants`: removes each guard of the store's SQL, one at a time. At least one test must fail for each.

python tools/mutants.py [ONLY ...] [--tests PATH ...] [--verdicts FILE] [--learned FILE] [--all] [--list]

The tests that call a guard's function or statement run, most likely first; for a table's guard, the tests of refused rows.
mutants_verdicts.json stores which test killed which guard: a guard is judged again only if its function, the functions that
it calls, or that test has changed, and that test runs first. A run that is stopped continues from there.
mutants_known.toml explains survivors; a survivor without a reason, or a reason without a survivor, is a failure.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
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
from tools.verdicts import Verdicts  # noqa: E402

KNOWN = Path(__file__).with_name("mutants_known.toml")
VERDICTS = Path(__file__).with_name("mutants_verdicts.json")
LEARNED = ROOT / "build" / "mutants_learned.json"
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


def report(console: Console, guards: list[Guard], verdicts: Verdicts, fates: list[Fate]) -> bool:
    """Print the survivors and the counts. Returns whether every guard is judged, and each survivor has its reason."""
    known = known_survivors()
    table = Table("", "guard", "where", "why it may", title="Survivors", title_justify="left")
    counts = Counter[str]()
    stale: list[str] = []
    broken = {fate.guard for fate in fates if fate.is_broken}
    for guard in guards:
        outcome = "broken" if guard in broken else _outcome(guard, verdicts, known)
        counts[outcome] += 1
        if outcome == "killed" and guard.name in known:
            stale.append(guard.name)
        if outcome in ("known", "survived", "broken"):
            table.add_row(outcome, _plain(guard.name), f"{guard.file}:{guard.line}", known.get(guard.name, ""))
    if table.row_count:
        console.print(table)
    for name in stale:
        console.print(f"{KNOWN.name} explains a guard that a test kills: {name}", markup=False)
    console.print(
        f"{len(guards)} guards, {len(fates)} judged now: {counts['killed']} killed, {counts['known']} survived with a"
        f" reason, {counts['survived']} without, {counts['broken']} broken, {counts['not judged']} not judged."
    )
    return not stale and counts["killed"] + counts["known"] == len(guards)


def _outcome(guard: Guard, verdicts: Verdicts, known: dict[str, str]) -> str:
    if not verdicts.holds(guard):
        return "not judged"
    if verdicts.killed(guard):
        return "killed"
    return "known" if guard.name in known else "survived"


def _plain(name: str) -> str:
    return name.replace("[", "\\[")


def hunt(
    console: Console, options: argparse.Namespace, guards: list[Guard], verdicts: Verdicts, every: list[Guard]
) -> Iterator[Fate]:
    """Judge these guards. Each verdict is stored at once, so that a run that is stopped loses nothing."""
    killers = {guard: test for guard in every if (test := verdicts.killer(guard)) is not None}
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evertick-mutants-", dir=quick_folder())))
        workers: list[Worker] = []
        for number in range(min(options.workers, len(guards))):
            # One server per worker: tests of the server itself would interfere on a shared one.
            place = home / f"worker-{number}"
            url = options.url or stack.enter_context(own_cluster(place / "postgres", track_functions="all")).url
            workers.append(Worker(place, url, options.tests or TESTS))
        for worker in workers:
            stack.callback(worker.close)
        party = Hunt(workers, killers)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        progress = stack.enter_context(Progress(*columns, console=console, disable=not console.is_terminal))
        task = progress.add_task("testing", total=len(guards))
        for number, fate in enumerate(_fates(console, party, guards, options.learned), 1):
            if not fate.is_broken:
                verdicts.add(fate.guard, fate.killed_by)
                verdicts.write(every)
            if fate.survived and fate.guard.name not in known_survivors():
                console.print(f"survived {fate.tests} tests: {fate.guard.name}", markup=False, highlight=False)
            progress.update(task, advance=1)
            if not console.is_terminal and number % 25 == 0:
                console.print(f"{number} of {len(guards)}")
            yield fate


def _fates(console: Console, party: Hunt, guards: list[Guard], learned: Path) -> Iterator[Fate]:
    killed = set[Guard]()
    for fate in party.repeat(guards):
        killed.add(fate.guard)
        yield fate
    # The known survivors last: each needs all its tests.
    known = known_survivors()
    rest = sorted((guard for guard in guards if guard not in killed), key=lambda guard: guard.name in known)
    if not rest:
        return
    seconds = party.learn(learned)
    console.print(f"{len(rest)} guards need all tests. They take {seconds:.1f} s on the unchanged program.")
    for test in party.red:
        console.print(f"left out, because it fails without a mutation: {test}", markup=False)
    for test in party.slow:
        console.print(f"left out, because it is slow: {test}", markup=False)
    yield from party.run(rest)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Removes each guard of the store's SQL; at least one test must fail for each."
    )
    parser.add_argument("only", nargs="*", default=[""], help="guards whose name, kind or file contains one of these")
    parser.add_argument("--tests", nargs="+", help="test files (default: fast tests of engine and db)")
    parser.add_argument("--verdicts", type=Path, default=VERDICTS, help="file of verdicts, read and written")
    parser.add_argument("--learned", type=Path, default=LEARNED, help="file of durations and calls of tests")
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"number of test processes (default: {WORKERS})")
    parser.add_argument("--all", action="store_true", help="judge every guard again")
    parser.add_argument("--list", action="store_true", help="list the guards, judge none")
    parser.add_argument("--url", help="a PostgreSQL server to use instead of starting one")
    options = parser.parse_args(arguments)
    plain = os.environ.get("CI") == "true"
    console = Console(force_terminal=False if plain else None, width=None if sys.stdout.isatty() else 160)
    every = find_guards()
    guards = [g for g in every if any(only in f"{g.name} {g.kind} {g.file}" for only in options.only)]
    if not guards:
        console.print(f"No guard matches {' or '.join(map(repr, options.only))}. See --list.")
        return 2
    verdicts, known = Verdicts(options.verdicts), known_survivors()
    if options.list:
        for guard in guards:
            console.print(f"{_outcome(guard, verdicts, known):<12}{guard.kind:<17}{guard.name}", markup=False)
        return 0
    due = [g for g in guards if options.all or _outcome(g, verdicts, known) in ("not judged", "survived")]
    began = time.monotonic()
    # On termination, the servers and workers must end, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fates: list[Fate] = []
    with suppress(KeyboardInterrupt):
        for fate in hunt(console, options, due, verdicts, every) if due else ():
            fates.append(fate)
    is_right = report(console, guards, verdicts, fates)
    console.print(f"{time.monotonic() - began:.0f} s in total.")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
