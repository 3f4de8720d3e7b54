"""What the services are given to do in these tests, and what can be told from outside about what was done.

Task bodies run in other processes. They append a line to a file when they begin and end, with the machine's monotonic
clock; a task that must last does so until a file of its own appears.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import NamedTuple

from psycopg import AsyncConnection

from evertick.bundles.bundle import Bundle, pack
from evertick.bundles.loader import load_file
from evertick.db.queries import dags, shards
from evertick.domain.access import Actor
from evertick.domain.dags.spec import DagSpec, NamedSchedule
from evertick.domain.schedules.misfire import MisfirePolicy
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.publish import publish
from evertick.engine.runs import trigger

_HEAD = """
import fcntl, os, pathlib, time
from evertick import Skip, TaskContext, current_context, dag, shell, task

EFFECTS = os.environ.get("EFFECTS", "")

def note(what):
    c = current_context()
    line = f"{c.run_id},{c.task},{c.epoch},{what},{time.monotonic_ns()},{os.environ['RUNNER_NAME']},{os.getpid()}"
    with open(EFFECTS, "ab", buffering=0) as file:
        file.write(line.encode() + b"\\n")

def until(*names):
    while not any(pathlib.Path(EFFECTS + "-" + name).exists() for name in names):
        time.sleep(0.01)
"""

# Results, a fan-out and fan-in with a retry, a skipped branch, and a schedule (which `publish_work` makes start now).
SMALL = (
    _HEAD
    + '''
def noted(function):
    def body(*args):
        note("begin")
        value = function(*args)
        note("end")
        return value
    return body

@dag
def pulse():
    task(noted(lambda: 1), name="tick")() >> task(noted(lambda: 2), name="tock")()

def say_it_slowly(x, y):
    """Long enough that its lines are shipped while it runs."""
    print("so far", x, flush=True)
    time.sleep(0.5)
    print("and now", y)
    return [x, y, x + y]

@dag
def chain():
    one = task(noted(lambda: 1), name="one")()
    two = task(noted(lambda x: x + 10), name="two")(one)
    task(noted(say_it_slowly), name="three")(one, two)

def fail_once():
    if current_context().attempt == 1:
        raise ConnectionError("the first time")
    return "at last"

@dag
def diamond():
    start = task(noted(lambda: 0), name="start")()
    left = task(noted(lambda x: "left"), name="left")(start)
    flaky = task(noted(fail_once), name="flaky", retries=2, retry_delay=0.2)()
    start >> flaky
    task(noted(lambda *all: sorted(all)), name="join")(left, flaky)

def leave_out():
    raise Skip("nothing to do")

@dag
def branch():
    choose = task(noted(lambda: "kept"), name="choose")()
    kept = task(noted(lambda x: x), name="kept")(choose)
    dropped = task(noted(leave_out), name="dropped")()
    below = task(noted(lambda: None), name="below")()
    choose >> dropped >> below
    gather = task(noted(lambda x: x), name="gather", trigger_rule="none_failed")(kept)
    below >> gather
'''
)

# Tasks that last until they are told, talk, hide processes, or are simply many.
LONG = (
    _HEAD
    + '''
@task
def hold():
    """Until it is told to go on, all epochs or only this one. Notes if another body of its task is at work."""
    lock = open(f"{EFFECTS}-lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note("overlap")
    note("begin")
    print("holding", flush=True)
    until("go", f"go{current_context().epoch}")
    note("end")
    return "held"

@task
def after(x):
    note("begin")
    return x

@dag
def holding():
    after(hold())

@dag
def only_once():
    @task(rerun_on_loss=False)
    def once():
        note("begin")
        until("go")
    once() >> after.override(name="tidy_up")(1)

@dag
def careful():
    """May not run beside its successor, not even while its runner is frozen or cut off."""
    after(hold.override(on_lost_contact="stop")())

@dag
def deadly():
    @task
    def kills_its_fork_server():
        os.kill(os.getppid(), 9)
        time.sleep(60)
    kills_its_fork_server()

@dag
def family():
    @task
    def parent():
        """Has a child in a session of its own that ignores SIGTERM."""
        note("begin")
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                import signal
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                note("hidden")
                while True:
                    time.sleep(1)
            os._exit(0)
        until("go")
        note("end")
    parent()

@task(name="quick")
def quick():
    note("begin")
    time.sleep(0.002)
    note("end")

@dag
def single():
    quick()

@dag
def again():
    @task(retries=1, retry_delay=0.2)
    def fail_once():
        note("begin")
        if current_context().attempt == 1:
            raise ConnectionError("the first time")
    fail_once()

@dag
def hurried():
    """Takes longer than it may."""
    task(name="endless", timeout=0.3)(lambda: time.sleep(60))()

@dag
def warm():
    task(isolation="warm", name="nothing")(lambda: None)()

@dag
def alone():
    task(name="nothing")(lambda: None)()

@dag
def many():
    """Forty tasks at once, twice, with a fan-in between."""
    first = [quick.override(name=f"a{i}")() for i in range(40)]
    middle = quick.override(name="middle")()
    last = [quick.override(name=f"b{i}")() for i in range(40)]
    first >> middle >> last

@dag
def talker():
    @task
    def talk():
        for number in range(1000):
            print(number, time.time(), flush=True)
            time.sleep(0.05)
            if pathlib.Path(EFFECTS + "-go").exists():
                return number
    talk()

@dag
def flood():
    @task
    def pour():
        for number in range(40_000):
            print(number, "x" * 200)
        print("last words")
    pour() >> quick()

@dag
def last_words():
    @task
    def speak():
        print("before the end", flush=True)
        note("begin")
        until("go")
    speak()
'''
)


class Published(NamedTuple):
    """A DAG file that was loaded once; every database can have it."""

    file: str
    specs: tuple[DagSpec, ...]
    bundle: Bundle


@cache
def loaded(text: str, folder: Path) -> Published:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "work.py").write_text(text)
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        found = runner.run(load_file(folder, "work.py"))
    assert found.error is None, found.error
    return Published("work.py", tuple(each.spec for each in found.dags), pack(folder, "work.py", found.closure))


async def publish_work(conn: AsyncConnection, work: Published, *, only: Iterable[str] = ()) -> None:
    await dags.put_bundle(
        conn, bundle_hash=work.bundle.hash, file=work.file, archive=work.bundle.archive, uses_threads=None
    )
    for spec in work.specs:
        if not only or spec.name in only:
            await publish(conn, spec=spec, file=work.file, bundle_hash=work.bundle.hash, actor=Actor("test"))


async def schedule_now(
    conn: AsyncConnection, work: Published, name: str, *, every: float, times: int, delay: float = 0.3
) -> list[datetime]:
    """Publish the DAG with a schedule that fires so many times from almost now; returns its instants."""
    start_at = await shards.read_clock(conn) + timedelta(seconds=delay)
    instants = [start_at + timedelta(seconds=every * number) for number in range(times)]
    schedule = parse_schedule(
        timedelta(seconds=every), start_at=start_at, anchor_at=start_at, end_at=instants[-1] + timedelta(milliseconds=1)
    )
    found = next(spec for spec in work.specs if spec.name == name)
    spec = replace(found, schedules=(NamedSchedule(name="main", spec=schedule),), misfire=MisfirePolicy.ALL)
    await dags.put_bundle(
        conn, bundle_hash=work.bundle.hash, file=work.file, archive=work.bundle.archive, uses_threads=None
    )
    async with conn.transaction():
        await publish(conn, spec=spec, file=work.file, bundle_hash=work.bundle.hash, actor=Actor("test"))
        await start_with(conn, name, instants[0])
    return instants


async def start_with(conn: AsyncConnection, dag: str, first: datetime) -> None:
    """On a busy machine the first instant may have passed while its schedule was being published."""
    await conn.execute(
        "update schedule_state s set next_due = %s from schedule c join dag d using (dag_id)"
        " where c.schedule_id = s.schedule_id and d.name = %s and s.next_due is distinct from %s",
        [first, dag, first],
    )


async def start_run(conn: AsyncConnection, dag: str, key: str | None = None) -> int:
    return (await trigger(conn, dag=dag, params={}, actor=Actor("test"), key=key)).run_id


def let_go(effects_file: Path, name: str = "go") -> None:
    """Let the tasks end that hold on until told."""
    Path(f"{effects_file}-{name}").touch()


class Effect(NamedTuple):
    """One line that a task body wrote."""

    run_id: int
    task: str
    epoch: int
    what: str
    nanoseconds: int
    runner: str
    pid: int


def effects(file: Path) -> list[Effect]:
    found = []
    for line in file.read_text().splitlines():
        run_id, task, epoch, what, nanoseconds, runner, pid = line.split(",")
        found.append(Effect(int(run_id), task, int(epoch), what, int(nanoseconds), runner, int(pid)))
    return found


def executed_twice(found: Iterable[Effect]) -> list[tuple[int, str, int]]:
    """Attempts whose body began more than once."""
    began = Counter((each.run_id, each.task, each.epoch) for each in found if each.what == "begin")
    return [attempt for attempt, count in began.items() if count > 1]


def most_at_once(found: Iterable[Effect]) -> int:
    """The largest number of bodies between their begin and their end."""
    level = most = 0
    for each in sorted(found, key=lambda effect: effect.nanoseconds):
        level += {"begin": 1, "end": -1}.get(each.what, 0)
        most = max(most, level)
    return most
