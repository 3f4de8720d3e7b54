"""Tasks with steps that are killed at every boundary, and writes of attempts that were taken away: how many of both went wrong.

`python -m tests.system.durable --kills 1000 --stale 500` is `make durable`; the tests take a share of it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries.secrets import AttemptHolder
from evertick.domain.attempt import OutcomeKind
from evertick.domain.encryption import Keyring, new_key
from evertick.engine.runners import mark_runner_dead
from evertick.runner.runner import Runner
from evertick.scheduler.scheduler import Scheduler
from tests.databases import Cluster, own_cluster
from tests.engine.test_state import refusals
from tests.engine.world import Runner as Rival
from tests.engine.world import key_of, make_dag, put, run_state, start, value
from tests.system.hosting import Said, hosted, quick
from tests.system.work import loaded, publish_work, start_run
from tests.waiting import eventually

STEPS = ("reserve", "charge", "ship")
# Before and after each step, and in it: the process dies at each of them once.
BOUNDARIES = tuple(f"{when} {step}" for step in STEPS for when in ("before", "in", "after"))

WORK = '''
import asyncio, os, signal, time
from pathlib import Path
from evertick import TaskContext, dag, task

PLACE = Path({place!r})


def die_at(boundary, case):
    """Once: the next attempt passes."""
    mark = PLACE / f"{{case}} {{boundary}}".replace(" ", "-")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def done(step, case):
    with open(PLACE / f"steps-{{case}}", "a") as file:
        file.write(step + "\\n")
    die_at(f"in {{step}}", case)
    return {{"step": step, "case": case, "pid": os.getpid()}}


@task(retries={retries}, retry_delay=0)
def pay(case, context: TaskContext):
    found = []
    for step in {steps!r}:
        die_at(f"before {{step}}", case)
        found.append(context.step(step, done, step, case))
        die_at(f"after {{step}}", case)
        context.state.set(f"{{step}} {{case}}", found[-1])
    return [each["step"] for each in found]


@dag(schedule=None)
def payments():
    pay.expand(case=list(range({cases})))


@task(isolation="warm", retries=1, retry_delay=0)
def many(context: TaskContext):
    took = []
    for number in range({timed}):
        began = time.perf_counter()
        context.step(f"step {{number}}", int, number)
        took.append(time.perf_counter() - began)
    return took


@task(isolation="warm")
async def concurrent(case, context: TaskContext):
    async def slow(x):
        await asyncio.sleep(0.01)
        return x + 1

    before = context.state.get("count", 0)
    found = await context.step("slow", slow, case)
    context.state.set(f"case {{case}}", found)
    asset = context.asset_state("orders")
    asset.set(f"case {{case}}", before)
    return [found, sorted(asset.items())[:1] != []]


@dag(schedule=None)
def warm():
    many() >> concurrent.expand(case=[1, 2, 3])
'''


STUCK = """
    select d.name, s.name, k.map_index, k.state::text, k.epoch, k.reason, right(c.content, 600)
    from task k join run r using (run_id) join dag d using (dag_id)
    join task_spec s on s.version_id = k.version_id and s.idx = k.idx
    left join log_chunk c on c.run_id = k.run_id and c.idx = k.idx and c.map_index = k.map_index and c.epoch = k.epoch
    where k.state <> 'success' order by 1, 2, 3 limit 20
"""


class Outcome(NamedTuple):
    """`kills`: processes that died. `again`: finished steps that ran again. `lost`: instances without their result.
    `step_seconds`: how long each step took in a warm process."""

    kills: int
    again: list[str]
    lost: int
    step_seconds: list[float]


async def play(conn: AsyncConnection, url: str, folder: Path, *, cases: int, timed: int = 20) -> Outcome:
    """Run the payments, whose processes die at every boundary, and the warm tasks."""
    place = folder / "marks"
    place.mkdir()
    text = WORK.format(place=str(place), retries=len(BOUNDARIES) + 1, steps=STEPS, cases=cases, timed=timed)
    await publish_work(conn, await asyncio.to_thread(loaded, text, folder / "dags"))
    said, settings = Said(), quick(url, folder / "home")
    runs = [await start_run(conn, dag) for dag in ("payments", "warm")]
    scheduler = Scheduler(settings, url=url, owner="s0", log=said.log)

    async def are_over() -> bool:
        return all([await run_state(conn, run) not in ("queued", "running") for run in runs])

    async with hosted(scheduler), hosted(Runner(settings, url=url, log=said.log)):
        try:
            await eventually(are_over, 60 + cases)
        except AssertionError:
            rows = await (await conn.execute(STUCK)).fetchall()
            raise AssertionError((rows, said.all[-8:])) from None
    assert [await run_state(conn, run) for run in runs] == ["success", "success"], said.all[-5:]
    ran: Counter[str] = Counter()
    for file in place.glob("steps-*"):
        ran.update(f"{step} of {file.name}" for step in file.read_text().split())
    # Killed in the step, before its result was stored: that is the one boundary after which it runs a second time.
    again = [step for step, count in ran.items() if count > 2]
    count = "select count(*) from result where run_id = %s and map_index >= 0 and value = to_jsonb(%s::text[])"
    whole = await value(conn, count, runs[0], list(STEPS))
    kept = await value(conn, "select count(*) from state_entry where owner = 'pay'")
    assert isinstance(whole, int) and kept == cases * len(STEPS)
    took = await value(conn, "select value from result where run_id = %s and map_index = -1", runs[1])
    assert isinstance(took, list)
    kills = sum(1 for each in place.iterdir() if not each.name.startswith("steps-"))
    return Outcome(kills, again, cases - whole, took)


async def stale_writes(conn: AsyncConnection, count: int) -> tuple[int, int]:
    """Writes of attempts whose runner was declared dead, or that ended, while the task runs again elsewhere. Returns how many there
    were, and how many rows they have changed."""
    ring = Keyring([new_key()])
    await put(conn, make_dag("chain", {"a": []}, task_asks=True, accepts_unknown_params=True))
    refused, number = 0, 0
    while refused < count:
        number += 1
        runner = await Rival.join(conn)
        await start(conn, "chain", key=f"run {number}")
        (claim,) = await runner.claim(1)
        of = AttemptHolder(key=key_of(claim), epoch=claim.epoch, session=runner.session)
        if number % 2:
            await mark_runner_dead(conn, session=runner.session, reason="a test", infra_retries=3)
            rival = await Rival.join(conn)
            (again,) = await rival.claim(1)
            assert again.epoch > claim.epoch
        else:
            await runner.finish(claim, OutcomeKind.SUCCESS)
        refused += await refusals(conn, of, ring)
    changed = await value(
        conn,
        "select (select count(*) from step_result) + (select count(*) from state_entry) + (select count(*) from result)"
        " + (select count(*) from stored_value) + (select count(*) from run) - %s",
        number,
    )
    assert isinstance(changed, int)
    return refused, changed


def main() -> int:
    """Kill tasks with steps at every boundary, and write from attempts that were taken away."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("--kills", type=int, default=1000)
    options.add_argument("--stale", type=int, default=500)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, own_cluster(Path(folder) / "home", fsync="on") as cluster:
        template = cluster.template()
        return asyncio.run(_both(cluster, template, Path(folder), given.kills, given.stale))


async def _both(cluster: Cluster, template: str, folder: Path, kills: int, stale: int) -> int:
    url = cluster.database_url(cluster.create(template))
    async with await connect(url, purpose=Purpose.RUNNER) as conn:
        done = await play(conn, url, folder, cases=-(-kills // len(BOUNDARIES)), timed=500)
    async with await connect(cluster.database_url(cluster.create(template)), purpose=Purpose.RUNNER) as conn:
        refused, changed = await stale_writes(conn, stale)
    middle = statistics.median(done.step_seconds) * 1000
    print(f"{done.kills} kills: {len(done.again)} finished steps ran again, {done.lost} results are missing.")
    print(f"{refused} writes of attempts that were taken away: {changed} rows changed.")
    print(f"A step takes {middle:.2f} ms in a warm process (median of {len(done.step_seconds)}).")
    return int(bool(done.again or done.lost or changed))


if __name__ == "__main__":
    sys.exit(main())
