"""The DAG file of the fault suite: short and long work, retries, warm and single-use processes, and work that misbehaves.

It is loaded once for a whole run of the suite, by the product's own loader, and published into each database.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from psycopg import AsyncConnection

from evertick.bundles.bundle import Bundle, pack
from evertick.bundles.loader import load_file
from evertick.db.queries import dags
from evertick.domain.access import Actor
from evertick.domain.dags.spec import DagSpec
from evertick.engine.gates import set_pool
from evertick.engine.publish import publish
from tests.chaos import effects

FILE = "work.py"

TEXT = """
import os, pathlib, random, signal, subprocess, sys, time
from effects import noted, note
from sink import fenced_put
from evertick import current_context, dag, task

FLAGS = os.environ.get("CHAOS_FLAGS", "")
SCHEDULE = {"schedule": ""}

def is_told(*names):
    return any(pathlib.Path(FLAGS, name).exists() for name in names)

def until(*names):
    while not is_told(*names):
        time.sleep(0.02)

# One warm task: what second-level schedules run.
@task(isolation="warm")
def tick():
    with noted():
        return 1

@dag(params=SCHEDULE)
def pulse():
    tick()

# More of the same, for schedules by the thousand, for each missed-run policy, and to be damaged.
for name in (*(f"spike_{number}" for number in range(20)), "late_skip", "late_latest", "late_all", "victim"):
    dag(name=name, params=SCHEDULE)(pulse.function)

# Three tasks that hand results on, each in a process of its own.
@task
def first():
    with noted():
        return current_context().run_id

@task
def second(x):
    with noted():
        time.sleep(random.uniform(0, 0.05))
        return [x, x]

@task
def third(x):
    with noted():
        print("the third has", x)
        return len(x)

@dag(params=SCHEDULE)
def chain():
    third(second(first()))

# The same in warm processes.
@dag(params=SCHEDULE)
def warm_chain():
    third.override(isolation="warm")(second.override(isolation="warm")(first.override(isolation="warm")()))

# Fails once or twice, by its run, and then succeeds.
@task(retries=4, retry_delay=0.4, retry_jitter=0.3)
def sometimes(x):
    with noted():
        c = current_context()
        if c.attempt <= x % 3:
            raise ConnectionError(f"attempt {c.attempt} of run {c.run_id}")
        return c.attempt

@dag(params=SCHEDULE)
def flaky():
    third.override(name="after")(second.override(name="between")(sometimes(first())))

# Lasts a few seconds: long enough for a fault to meet it.
@task(isolation="warm")
def lasting():
    with noted():
        for number in range(30):
            print("still there", number, flush=True)
            time.sleep(0.1)

@dag(params=SCHEDULE)
def slow():
    lasting() >> tick()

# Just long enough that its lines are shipped while it runs.
@task
def talking():
    with noted():
        for number in range(6):
            print("word", number, flush=True)
            time.sleep(0.1)

@dag(params=SCHEDULE)
def chatter():
    talking()

# Writes once into the fenced sink, whatever happens on the way.
@task
def deposit():
    with noted():
        time.sleep(0.3)
        fenced_put()

@dag(params=SCHEDULE)
def ledger():
    deposit()

# Behind gates: one at a time on each of two keys, three at once of all, and two slots of four.
@task(mutex="half:{params.half}", parallel={"guarded": 3}, pool={"narrow": 2}, retries=2, retry_delay=0.2)
def guard():
    with noted():
        time.sleep(random.uniform(0, 0.1))
        if random.random() < 0.1:
            raise ConnectionError("lost at the gate")

@dag(params={**SCHEDULE, "half": 0}, max_active_tasks=3)
def guarded():
    last = guard.override(name="last", mutex="last", order={"turn": 1}, rate={"last": "500/1s"})
    [guard.override(name=f"guard{number}")() for number in range(2)] >> last()

# Takes up to two seconds, so that its next fire often finds it open.
@task(name="busy", isolation="warm")
def busy():
    with noted():
        time.sleep(random.uniform(0.1, 2.0))

def lingering():
    busy()

for overlap in ("skip", "queue_one", "queue_all", "cancel"):
    dag(name=f"linger_{overlap}", params=SCHEDULE, overlap=overlap)(lingering)

# Lasts until it is told, all epochs or only this one.
@task(name="hold")
def hold():
    with noted():
        c = current_context()
        until("go", f"go-run-{c.run_id}-epoch-{c.epoch}")
        fenced_put()
        return "held"

@dag
def holding():
    hold()

@dag
def obedient():
    hold.override(name="hold", on_lost_contact="stop")()

# Some of these where an executor elsewhere serves the queue.
@dag(task_defaults={"queue": "pods"})
def pod_ledger():
    deposit()

@dag(task_defaults={"queue": "pods"})
def pod_chatter():
    talking()

@dag(task_defaults={"queue": "pods"})
def pod_holding():
    hold()

# Runs past its timeout, hides a grandchild and ignores SIGTERM.
@task(name="stubborn", timeout=1.5)
def stubborn():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note("hidden")
            while True:
                time.sleep(1)
        os._exit(0)
    with noted():
        while True:
            time.sleep(1)

@dag
def obstinate():
    stubborn()

# Frozen by itself: its agent goes on with heartbeats, and only its timeout can end it.
@task(name="frozen", timeout=2.0)
def freeze_yourself():
    with noted():
        os.kill(os.getpid(), signal.SIGSTOP)

@dag
def standstill():
    freeze_yourself()

# Takes memory until it is stopped.
@task(name="greedy")
def greedy():
    with noted():
        taken = []
        while True:
            taken.append(bytearray(8 * 1024 * 1024))
            time.sleep(0.01)

@dag
def hungry():
    greedy()

# Writes as much log as it can for some seconds.
@task(name="pour")
def pour():
    with noted():
        line = "x" * 1000
        over = time.monotonic() + 4
        while time.monotonic() < over:
            for _ in range(200):
                print(line)
        print("last words")

@dag
def flood():
    pour()

# Each run fails twice, at once, and then succeeds: what a retry storm is made of.
@task(name="gust", isolation="warm", retries=3, retry_delay=1.5, retry_jitter=1.0)
def gust():
    with noted():
        if current_context().attempt < 3:
            raise ConnectionError("down")

@dag
def storm():
    for number in range(25):
        gust.override(name=f"gust{number}")()
"""


class Work(NamedTuple):
    """The loaded file; every database can have it."""

    specs: dict[str, DagSpec]
    bundle: Bundle
    file: str = FILE


async def load(folder: Path) -> Work:
    """Write the file, load it as the publisher would, and pack its code."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(TEXT)
    effects.put_beside(folder)
    found = await load_file(folder, FILE)
    assert found.error is None, found.error
    return Work({each.spec.name: each.spec for each in found.dags}, pack(folder, FILE, found.closure))


async def publish_specs(conn: AsyncConnection, work: Work, specs: list[DagSpec]) -> None:
    bundle = work.bundle
    await set_pool(conn, name="narrow", slots=4, actor=Actor("chaos"))
    await dags.put_bundle(conn, bundle_hash=bundle.hash, file=work.file, archive=bundle.archive, uses_threads=None)
    for spec in specs:
        await publish(conn, spec=spec, file=work.file, bundle_hash=bundle.hash, actor=Actor("chaos"))
