"""What goes wrong in the plan itself: two leaders, specs that cannot be read, and many tasks that fail at once."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

import psycopg

from evertick.db.connect import Purpose, connect
from evertick.domain.access import Actor
from evertick.domain.errors import EvertickError
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.maintenance import promote_due_tasks, reconcile_runs
from evertick.engine.runs import trigger
from tests.chaos.dags import publish_specs
from tests.chaos.nemesis import Condition, Nemesis
from tests.chaos.record import Answer, Fault
from tests.waiting import elapse

QUARANTINE_SECONDS = 15.0

# What a schedule's spec can be after a bad migration, a bug or a hand in the database. All are valid JSON.
POISON: dict[str, str] = {
    "bad_cron": '{"kind": "cron", "expression": "61 25 * * *", "timezone": "UTC"}',
    "bad_zone": '{"kind": "cron", "expression": "* * * * *", "timezone": "Atlantis/Capital"}',
    "no_kind": '{"every_seconds": 5}',
    "not_an_object": "[1, 2, 3]",
    "negative": '{"kind": "interval", "every_seconds": -5}',
    "huge_interval": '{"kind": "interval", "every_seconds": 1e308}',
    "wrong_type": '{"kind": "interval", "every_seconds": {"a": [null]}}',
    "long_name": '{"kind": "cron", "expression": "%s", "timezone": "UTC"}' % ("* " * 100_000),
    "deep": '{"kind": "cron", "expression": ' + "[" * 100 + "]" * 100 + "}",
    "never": '{"kind": "cron", "expression": "0 0 30 2 *", "timezone": "UTC"}',
}


async def overlap(nemesis: Nemesis, seconds: float = 0.5) -> float | None:
    """Somebody takes the shard by force while the leader still believes to lead, and plans at the same time as it."""
    found = await nemesis.pick_leader()
    if found is None:
        return None
    leader, led = found
    shard = nemesis.dice.choice(sorted(led)) if len(led) > 1 else min(led)
    async with nemesis.fault(Fault.OVERLAP, leader.name, part="usurper", seconds=seconds) as struck:
        struck.is_void = True
        with suppress(psycopg.Error, EvertickError, OSError):
            async with await connect(nemesis.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
                epoch = await _usurp(conn, shard, seconds + 0.5)
                struck.is_void = False
                deadline = time.monotonic() + seconds
                while time.monotonic() < deadline:
                    await fire_schedules(conn, shard=shard, epoch=epoch, batch=50)
                    await promote_due_tasks(conn, shard=shard, epoch=epoch, limit=50)
                    await reconcile_runs(conn, shard=shard, epoch=epoch, limit=50)
                    await elapse(0.05)
    return await nemesis.recovery(struck, nemesis.works_again())


async def _usurp(conn: psycopg.AsyncConnection, shard: int, seconds: float) -> int:
    """Whoever leads is not asked. In one transaction, so that it cannot renew in between."""
    async with conn.transaction():
        forced = "update shard set lease_until = clock() - interval '1 second', successor = null where shard = %s"
        await conn.execute(forced, [shard])
        cursor = await conn.execute("select acquire_shard(%s::smallint, 'usurper', %s)", [shard, seconds])
        row = await cursor.fetchone()
    assert row is not None and row[0] is not None, "the shard could not be taken by force"
    return int(row[0])


async def poison_schedule(nemesis: Nemesis, what: str | None = None) -> float | None:
    """A schedule whose spec cannot be read falls due among the others; seconds until it is set aside with a reason."""
    what = what or nemesis.dice.choice(sorted(POISON))
    name = f"poison-{what}-{nemesis.unique()}"
    spec = replace(nemesis.cluster.ground.work.specs["pulse"], name=name, schedules=())
    with suppress(psycopg.Error, EvertickError, OSError):
        async with await connect(nemesis.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
            await publish_specs(conn, nemesis.cluster.ground.work, [spec])
            async with nemesis.fault(Fault.POISON, "all", part="schedule", what=what) as struck:
                schedule_id = await _insert_due(conn, name, POISON[what])

            async def is_set_aside() -> bool:
                error = await nemesis.cluster.watch.value(
                    "select error from schedule_state where schedule_id = %s", schedule_id
                )
                return error is not None

            return await nemesis.recovery(struck, is_set_aside, within_seconds=QUARANTINE_SECONDS + 45)
    return None


async def _insert_due(conn: psycopg.AsyncConnection, dag: str, spec: str) -> int:
    cursor = await conn.execute(
        "with made as (insert into schedule (dag_id, name, version, spec, params, misfire, window_seconds, changed_by, changed_at)"
        " select dag_id, 'poison', 1, %s::jsonb, '{}', 'all', 86400, 'chaos', clock() from dag where name = %s"
        " returning schedule_id)"
        " insert into schedule_state (schedule_id, shard, version, next_due)"
        " select schedule_id, 0, 1, clock() from made returning schedule_id",
        [spec, dag],
    )
    row = await cursor.fetchone()
    assert row is not None
    return int(row[0])


async def poison_version(nemesis: Nemesis) -> float | None:
    """The spec of a DAG's version is damaged after its run was created: the run ends as failed, and says why."""
    key = f"damaged-{nemesis.unique()}"
    # Another description is another version, which no other run has.
    spec = replace(nemesis.cluster.ground.work.specs["victim"], description=key, schedules=())
    with suppress(psycopg.Error, EvertickError, OSError):
        async with await connect(nemesis.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
            await publish_specs(conn, nemesis.cluster.ground.work, [spec])
            async with nemesis.fault(Fault.POISON, "all", part="version") as struck:
                await conn.execute(
                    "update dag_version v set spec = %s from dag d where d.version_id = v.version_id and d.name = 'victim'",
                    ['{"tasks": [], "damaged": true}'],
                )
                nemesis.cluster.clients.asked("trigger", request=key, dag="victim")
                made = await conn.execute(
                    "select run_id from trigger_run((select dag_id from dag where name = 'victim'), '{}', %s,"
                    " ('chaos', null, null))",
                    [key],
                )
                row = await made.fetchone()
                assert row is not None
                nemesis.cluster.clients.answered(key, Answer.OK)

            async def has_failed() -> bool:
                state = await nemesis.cluster.watch.value(
                    "select state::text from run_status where run_id = %s", row[0]
                )
                return bool(state == "failed")

            return await nemesis.recovery(struck, has_failed)
    return None


async def retry_storm(nemesis: Nemesis, runs: int = 1) -> float | None:
    """Many tasks fail at the same moment and want to be tried again; seconds until all of them have succeeded."""
    made: list[int] = []
    with suppress(psycopg.Error, EvertickError, OSError):
        async with await connect(nemesis.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
            async with nemesis.fault(Fault.RETRY_STORM, "all", runs=runs) as struck:
                for _ in range(runs):
                    key = f"storm-{nemesis.unique()}-{len(made)}"
                    nemesis.cluster.clients.asked("trigger", request=key, dag="storm")
                    made.append((await trigger(conn, dag="storm", params={}, actor=Actor("chaos"), key=key)).run_id)
                    nemesis.cluster.clients.answered(key, Answer.OK)
        # A run of it is 75 attempts, which a busy machine of two cores does not do in less than a second or two.
        return await nemesis.recovery(struck, _are_over(nemesis, made), within_seconds=120 + 3 * runs)
    return None


def _are_over(nemesis: Nemesis, runs: list[int]) -> Condition:
    async def is_so() -> bool:
        left = await nemesis.cluster.watch.value(
            "select count(*) from run_status where run_id = any(%s) and finished_at is null", runs
        )
        return bool(left == 0)

    return is_so
