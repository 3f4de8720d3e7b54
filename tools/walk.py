"""The walk of one cron task: the functions through which it passes, from the plan of its fire to the end of its run.

    python tools/walk.py           the functions in order, the functions of the database, and the sums (15 seconds)
    python tools/walk.py --json    {"functions": …, "files": …, "sql": …}

Runs a real scheduler, a real runner and its children on a real PostgreSQL, traced by `sys.setprofile` (tools/walk_trace.py).
The task is a function without gates and secrets, in the second run of its DAG: code, connections and processes are warm.

**Steps.** A step is one tick of a loop, or one event: a call that begins after the leader received the fire's time, in a loop
that was running before. Before that, each loop is woken with nothing to do. A step belongs to the walk if it calls a function
that no loop called then. So idle ticks, heartbeats and polls do not count; the loops themselves and starting them neither.

**Functions.** Within a step, these count, each once: every function that is on the stack when the task is handed over, which is
  - a statement to the database, or its notification,
  - bytes between the runner and the task's process, or from that process to its log,
  - an event or a call for another loop of the same process,
  - the call of the user's function,
  - the decision when to fire next: the deepest stack in domain/schedules.
That is the path that a debugger shows. A function that only computes a value for one of them is a detail of it; how many there
are in all is printed as well. A closure is part of the function around it. Decorators, constructors, comprehensions, lambdas,
properties and generated methods count as none, nor does what lies under every statement (`PLUMBING`).

**Not on the walk** (`APART`) is what the task does not wait for: other jobs that a step starts or wakes.

**SQL functions.** Those that a statement of the walk names, or one of these functions calls, if the server counted a call. Like
above, one that neither changes nor locks anything, nor calls another that does, is a detail. Priorities do not age here: every
second claim of a runner at most checks them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString, NamedTuple

from psycopg import AsyncConnection
from psycopg.sql import SQL, Identifier

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.databases import own_cluster, quick_folder, run  # noqa: E402
from tests.system.hosting import Said, hosted, quick  # noqa: E402
from tests.system.work import Published, loaded, publish_work  # noqa: E402
from tests.waiting import eventually  # noqa: E402
from tools.walk_trace import SOURCE, TRACE_FILE, Entry, Tracer  # noqa: E402

from evertick.config import Settings  # noqa: E402
from evertick.db.connect import Purpose, connect  # noqa: E402
from evertick.db.notify import Channel  # noqa: E402
from evertick.runner.runner import Runner  # noqa: E402
from evertick.scheduler.scheduler import Scheduler  # noqa: E402

# The declarations of statements, how any of them reaches the server, and how anything is logged and measured.
PLUMBING = ("db/", "engine/verbs.py", "observability/")
APART = {
    "executors/local/fork_server_client.py": "the refill of the process pool, for later tasks",
    "logs/shipper.py": "lines of tasks that run for longer",
    "runtime/server_watch.py": "which server is the primary",
    "scheduler/maintenance.py": "the leader's other jobs, which are planned after every poll",
}
_CHANGES = re.compile(r"\b(insert into|update|delete from|pg_advisory\w*)\b")
PURE = "domain/schedules/"
_DAG = """
from evertick import dag, task
from tools.walk_trace import trace_children

trace_children(__file__)

@dag(schedule="* * * * *")
def walk():
    @task
    def walked():
        print("a line")
        return 1
    walked()
"""
# No tick and no heartbeat comes by within the walk: notifications wake the loops.
_SELDOM: dict[str, Any] = {
    "tick_seconds": 60.0,
    "leader_lease_seconds": 200.0,
    "heartbeat_seconds": 100.0,
    "lost_after_seconds": 1000.0,
    "priority_aging_seconds": 0.0,
}
SETTLE_SECONDS = 0.15
_CHANNELS = (Channel.SCHEDULE, Channel.TASKS, Channel.RUNNER, Channel.STOP)


class Function(NamedTuple):
    file: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """`functions` in the order in which the task passes through them; `details`: the others that the steps call."""

    functions: list[Function]
    details: list[Function]
    sql: list[str]

    @property
    def files(self) -> list[str]:
        return sorted({function.file for function in self.functions})

    def sums(self) -> dict[str, int]:
        return {"functions": len(self.functions), "files": len(self.files), "sql": len(self.sql)}


def path_of(entries: list[Entry], idle: list[Entry]) -> tuple[list[Function], list[Function], list[str]]:
    """The functions of the walk, those that they only call, and the statements."""
    known = {_place(entry["stack"][-1]) for entry in idle if entry["kind"] == "function"}
    steps: dict[tuple[object, ...], list[Entry]] = defaultdict(list)
    for entry in entries:
        first = entry["stack"][0]
        steps[entry.get("pid"), first["at"], _place(first)].append(entry)
    called = [
        entry
        for step in steps.values()
        if any(entry["kind"] == "function" and _place(entry["stack"][-1]) not in known for entry in step)
        for entry in step
        if not any(frame["file"] in APART for frame in entry["stack"])
    ]
    decided = [entry for entry in called if entry["stack"][-1]["file"].startswith(PURE)]
    handed_over = [entry for entry in called if entry["kind"] != "function"]
    handed_over += [max(decided, key=lambda entry: len(entry["stack"]))] if decided else []
    walk = _functions(handed_over)
    details = [function for function in _functions(called) if function not in walk]
    return walk, details, [entry["statement"] for entry in handed_over if entry["kind"] == "statement"]


def _place(frame: Entry) -> tuple[str, str, int]:
    return frame["file"], frame["name"], frame["line"]


def _functions(entries: list[Entry]) -> list[Function]:
    found: dict[Function, None] = {}
    for entry in sorted(entries, key=lambda entry: int(entry["at"])):
        for frame in entry["stack"]:
            name = frame["name"].partition(".<locals>")[0]
            if not frame["file"].startswith(PLUMBING) and _counts(frame["file"], name):
                found[Function(frame["file"], name)] = None
    return list(found)


def _counts(file: str, name: str) -> bool:
    """Not constructors and other special methods, lambdas and properties."""
    last = name.rpartition(".")[2]
    return not (last.startswith(("__", "<")) or name in _properties(file))


def _properties(file: str) -> frozenset[str]:
    text = (Path(SOURCE) / file).read_text(encoding="utf-8")
    found, of = set(), ""
    for before, line in zip(["", *text.splitlines()], text.splitlines(), strict=False):
        if match := re.match(r"class (\w+)", line):
            of = match[1]
        elif "property" in before and before.strip().startswith("@") and (match := re.match(r"\s+def (\w+)", line)):
            found.add(f"{of}.{match[1]}")
    return frozenset(found)


def walk_in(folder: Path, url: str) -> Walk:
    """Walk on an empty, migrated database. What this process starts inherits its environment."""
    os.environ[TRACE_FILE] = str(folder / "trace")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), before)))
    try:
        return run(_walk(url, folder, loaded(_DAG, folder / "dags")))
    finally:
        del os.environ[TRACE_FILE]
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


async def _walk(url: str, folder: Path, work: Published) -> Walk:
    said, entries = Said(), list[Entry]()
    settings = quick(url, folder / "home", **_SELDOM)
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        database = Identifier(conn.info.dbname)
        await conn.execute(SQL("alter database {} set track_functions = 'all'").format(database))
        await publish_work(conn, work)
        tracer = Tracer(entries.append)
        tracer.start()
        async with _services(settings, said):
            await _fire(conn)
            idle_at = time.monotonic_ns()
            await _idle(conn)
            begins_at = time.monotonic_ns()
            await _fire(conn)
            ends_at = time.monotonic_ns()
        tracer.stop()
        functions, details, statements = path_of(
            _of_task(entries + _of_children(), begins_at, ends_at),
            [entry for entry in entries if idle_at <= entry["at"] < begins_at],
        )
        return Walk(functions=functions, details=details, sql=await _sql_functions(conn, statements))


@asynccontextmanager
async def _services(settings: Settings, said: Said) -> AsyncIterator[None]:
    url = settings.database_url or ""
    async with hosted(Scheduler(settings, url=url, owner="walk", log=said.log)):
        async with hosted(Runner(settings, url=url, log=said.log)):
            said.all.clear()
            await said.saw("leadership_acquired")
            await said.saw("runner_started")
            yield


async def _idle(conn: AsyncConnection) -> None:
    """Wake every loop, with nothing to do; twice, because a wake-up may arrive while another one is served."""
    await conn.execute("update schedule_state set next_due = clock() + interval '1 day'")
    for channel in _CHANNELS * 2:
        await conn.execute("select pg_notify(%s, '')", [channel])
        await asyncio.sleep(SETTLE_SECONDS)


async def _fire(conn: AsyncConnection) -> None:
    """Let the next instant of the schedule come soon, and wait until its run has ended and every loop rests."""
    ended = "select count(*) from run_status where state = 'success'"
    before = await _value(conn, ended)
    await conn.execute("update schedule_state set next_due = clock() + interval '0.5 s'")
    await conn.execute("select pg_notify('evertick_plan', '')")

    async def is_over() -> bool:
        return bool(await _value(conn, ended) > before)

    await eventually(is_over)
    await asyncio.sleep(SETTLE_SECONDS)


async def _sql_functions(conn: AsyncConnection, statements: list[str]) -> list[str]:
    """The statistics of a session are complete once it is closed."""
    rows = await (
        await conn.execute(
            "select p.proname, p.prosrc from pg_proc p join pg_stat_user_functions s on s.funcid = p.oid"
        )
    ).fetchall()
    sources, found = dict(rows), dict[str, None]()
    texts = [*statements]
    while texts:
        text = texts.pop()
        new = [name for name in sources if name not in found and _calls(text, name)]
        found |= dict.fromkeys(new)
        texts += [sources[name] for name in new]
    changing = {name for name in found if _CHANGES.search(sources[name])}
    while more := {name for name in found if any(_calls(sources[name], each) for each in changing)} - changing:
        changing |= more
    return sorted(changing)


def _calls(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\(", text) is not None


async def _value(conn: AsyncConnection, query: LiteralString) -> Any:
    row = await (await conn.execute(query)).fetchone()
    return row[0] if row else None


def _of_task(entries: list[Entry], begins_at: int, ends_at: int) -> list[Entry]:
    """The entries of that time, without the frames that began before; of the children only the one that ran the task."""
    during = [entry for entry in entries if begins_at <= entry["at"] <= ends_at]
    child = next(entry["pid"] for entry in during if entry["kind"] == "task")
    found = []
    for entry in during:
        stack = [frame for frame in entry["stack"] if frame["at"] >= begins_at]
        if stack and entry.get("pid", child) == child:
            found.append({**entry, "stack": stack})
    return found


def _of_children() -> list[Entry]:
    return [json.loads(line) for line in Path(os.environ[TRACE_FILE]).read_text(encoding="utf-8").splitlines()]


def shown(walk: Walk) -> str:
    lines = [f"{number:3} {function.file} {function.name}" for number, function in enumerate(walk.functions, 1)]
    pure = [file for file in walk.files if file.startswith(PURE)]
    lines += ["", "SQL functions: " + ", ".join(walk.sql), ""]
    lines.append(
        f"{len(walk.functions)} functions in {len(walk.files) - len(pure)} files and {len(pure)} pure ones of {PURE},"
        f" {len(walk.sql)} SQL functions; {len(walk.details)} more functions compute values for them."
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--details", action="store_true", help="also list the functions that only compute values")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=quick_folder()) as name, own_cluster(Path(name) / "postgres") as cluster:
        walk = walk_in(Path(name), cluster.database_url(cluster.create(cluster.template())))
    print(json.dumps(walk.sums()) if options.json else shown(walk))
    if options.details:
        print("\n".join(f"    {function.file} {function.name}" for function in walk.details))
    return 0


if __name__ == "__main__":
    sys.exit(main())
