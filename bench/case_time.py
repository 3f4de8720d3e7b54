"""Punctuality: many schedules due at one instant, the lag of a fire, and the time from a trigger to the start of the body."""

from __future__ import annotations

import asyncio
import sys
import time
from datetime import datetime, timedelta

from bench.case import Bench
from bench.figures import Figure, at_most, median
from bench.house import ROOT, House, NotMeasured, service_environment
from bench.work import percentile, spans, until_over
from psycopg.types.json import Jsonb

from evertick.db.notify import Channel, notify
from evertick.db.queries import dags
from evertick.domain.access import Actor
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.fire_schedules import spec_json
from evertick.engine.runs import trigger

_FIRE_WITHIN_SECONDS = 60.0


async def schedules(bench: Bench, house: House) -> list[Figure]:
    """Schedules due at the same instant: the time until each has its run, and whether one has two."""
    lates, doubles, bodies = [], [], []
    for number in bench.rounds():
        due, ids = await _plant(bench, house, number)
        lates.append(await _seconds_until_fired(house, due))
        runs = await _runs_of(house, ids)
        doubles.append(float(len(runs) - len({schedule for _, schedule in runs})))
        missing = len(ids) - len({schedule for _, schedule in runs})
        if missing:
            raise NotMeasured(f"{missing} of {len(ids)} schedules did not fire")
        await until_over(house, "single_warm")
        run_ids = [run_id for run_id, _ in runs]
        stamped = await spans(house, run_ids)
        bodies.append(max(span.start for span in stamped) - due.timestamp())
        await _uproot(house, ids)
    facts = await bench.facts(house, "warm", run_ids)
    count = f"{bench.size.schedules:,} schedules due at one instant"
    return [
        median("schedules.fired", f"{count}: until the last run is committed", "s", lates, at_most(1.0), facts),
        median("schedules.twice", f"{count}: fired twice", "runs", doubles, at_most(0), facts),
        median("schedules.started", f"{count}: until the last body starts", "s", bodies, None, facts),
    ]


async def cron_lag(bench: Bench, house: House) -> list[Figure]:
    """From the due instant to the start of the body, on an otherwise idle system."""
    await house.publish("ticking.py", ["ticking"])
    row = await dags.find(house.conn, "ticking")
    assert row is not None

    async def has_fired() -> bool:
        cursor = await house.conn.execute("select count(*) from run where dag_id = %s", [row.dag_id])
        found = await cursor.fetchone()
        return found is not None and found[0] > bench.size.fires

    bench.say(f"waiting for {bench.size.fires} fires")
    within = 30 + bench.size.fires
    await house.until(has_fired, f"{bench.size.fires} fires", within_seconds=within, pause_seconds=0.25)
    await house.withdraw("ticking.py", ["ticking"])
    await until_over(house, "ticking")
    cursor = await house.conn.execute(
        """select r.run_id, extract(epoch from r.fire_at)::float8, (v.value->>0)::float8
             from run r join result v on v.run_id = r.run_id where r.dag_id = %s order by r.fire_at""",
        [row.dag_id],
    )
    # Skip the first fire, which loads the code: a cost of publishing, not of firing.
    rows = (await cursor.fetchall())[1:]
    lags = [(started - due) * 1000 for _, due, started in rows]
    facts = await bench.facts(house, "process", [run_id for run_id, _, _ in rows]) | {"note": f"{len(lags)} fires"}
    return [
        Figure(
            name=f"cron_lag.{name}",
            about=f"lag of a fire, due instant to start of the body, {name}",
            unit="ms",
            value=percentile(lags, share),
            goal=at_most(goal),
            settings=facts,
        )
        for name, share, goal in (("p50", 0.5, 6.0), ("p99", 0.99, 25.0))
    ]


async def submit(bench: Bench, house: House) -> list[Figure]:
    """The time from a trigger request, and from the start of the command, to the start of the body."""
    waits, run_ids = [], []
    for _ in range(bench.size.submits):
        received = time.time()
        made = await trigger(house.conn, dag="single_process", params={}, actor=Actor("bench"))
        await notify(house.conn, Channel.TASKS)
        await until_over(house, "single_process")
        (span,) = await spans(house, [made.run_id])
        waits.append((span.start - received) * 1000)
        run_ids.append(made.run_id)
    facts = await bench.facts(house, "process", run_ids) | {"note": f"{len(waits)} triggers, one at a time"}
    found = [
        Figure(
            name=f"submit.{name}",
            about=f"trigger, request received to start of the body, {name}",
            unit="ms",
            value=percentile(waits, share),
            goal=at_most(10.0) if name == "p50" else None,
            settings=facts,
        )
        for name, share in (("p50", 0.5), ("p99", 0.99))
    ]
    commands = [await _command(house) for _ in range(bench.size.commands)]
    about = "`evertick dags trigger`, start of the command to start of the body"
    return [*found, median("submit.command", about, "ms", commands, None, facts)]


async def _plant(bench: Bench, house: House, number: int) -> tuple[datetime, list[int]]:
    """Insert schedules that are all due at one instant soon, and then not for a day."""
    row = await dags.find(house.conn, "single_warm")
    assert row is not None
    cursor = await house.conn.execute("select date_trunc('second', clock())")
    now = await cursor.fetchone()
    assert now is not None
    due: datetime = now[0] + timedelta(seconds=bench.size.notice_seconds)
    spec = spec_json(parse_schedule("@every 1d", anchor_at=due))
    cursor = await house.conn.execute(
        """with made as (
               insert into schedule (dag_id, name, version, spec, params, misfire, window_seconds, origin, changed_by, changed_at)
               select %(dag)s, 'bench-' || %(round)s || '-' || n, 1, %(spec)s, '{}', 'latest', 86400, 'user', 'bench', clock()
               from generate_series(1, %(count)s) n returning schedule_id
           ), planted as (
               insert into schedule_state (schedule_id, shard, version, next_due)
               select schedule_id, 0, 1, %(due)s from made
           )
           select array_agg(schedule_id) from made""",
        {"dag": row.dag_id, "round": number, "spec": Jsonb(spec), "count": bench.size.schedules, "due": due},
    )
    ids = await cursor.fetchone()
    assert ids is not None
    await house.conn.execute("analyze schedule_state")
    await notify(house.conn, Channel.SCHEDULE)
    return due, list(ids[0])


async def _seconds_until_fired(house: House, due: datetime) -> float:
    """The time until another session sees that none is due, which is when the last commit is visible."""
    await asyncio.sleep(max(0.0, due.timestamp() - time.time()))

    async def none_is_due() -> bool:
        cursor = await house.conn.execute(
            """select 1 from schedule_state where shard = 0 and next_due <= %s and next_due is not null and not is_paused
                  and error is null limit 1""",
            [due],
        )
        return await cursor.fetchone() is None

    await house.until(none_is_due, "all schedules have fired", within_seconds=_FIRE_WITHIN_SECONDS, pause_seconds=0.005)
    return time.time() - due.timestamp()


async def _runs_of(house: House, schedule_ids: list[int]) -> list[tuple[int, int]]:
    cursor = await house.conn.execute("select run_id, schedule_id from run where schedule_id = any(%s)", [schedule_ids])
    return [(row[0], row[1]) for row in await cursor.fetchall()]


async def _uproot(house: House, schedule_ids: list[int]) -> None:
    await house.conn.execute("update schedule set deleted_at = clock() where schedule_id = any(%s)", [schedule_ids])
    await house.conn.execute("update schedule_state set next_due = null where schedule_id = any(%s)", [schedule_ids])


async def _command(house: House) -> float:
    started = time.time()
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "evertick.cli.main", "dags", "trigger", "single_process", "--json"),
        env=service_environment(EVERTICK_DATABASE_URL=house.url),
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
    )
    if await command.wait() != 0:
        raise NotMeasured(f"`evertick dags trigger` ended with exit code {command.returncode}")
    await until_over(house, "single_process")
    cursor = await house.conn.execute(
        "select max(run_id) from run where dag_id = (select dag_id from dag where name = 'single_process')"
    )
    row = await cursor.fetchone()
    assert row is not None
    (span,) = await spans(house, [row[0]])
    return (span.start - started) * 1000
