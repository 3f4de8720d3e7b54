"""N22 and N23: specs that cannot be read, and one row that nobody can reap, among others that are well."""

from __future__ import annotations

import secrets
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from psycopg import AsyncConnection

from evertick.bundles.loader import load_file
from evertick.db.connect import Purpose, connect
from evertick.db.queries import runners
from evertick.db.queries.runners import NewRunner
from evertick.engine.finish_and_claim import finish_and_claim
from tests.chaos.cluster import Shape
from tests.chaos.dags import publish_specs
from tests.chaos.faults import planning
from tests.chaos.record import Fault
from tests.chaos.scenario import Scenario
from tests.chaos.stage import Stage
from tests.waiting import eventually

NOBODY = "nobody"

BAD_FILES = {
    "cycle": "a, b = t.override(name='a')(), t.override(name='b')()\n    a >> b >> a",
    "bad_cron": "t()",
    "raises": "raise RuntimeError('in the planner')",
    "long_name": "t.override(name='x' * 1_000_000)()",
    "nul": "t.override(name='a\\x00b')()",
    "bad_option": "t.override(retries=-1)()",
}


async def poison_specs(stage: Stage) -> None:
    """N22: each is refused when it is published, or set aside when it falls due; nobody else is late."""
    await stage.begin_load(seconds=stage.scaled(120, 14), quick=8)
    for name, body in BAD_FILES.items():
        schedule = "schedule='61 * * * *'" if name == "bad_cron" else ""
        stage.expect(await _is_refused(stage.cluster.folder / "bad", name, body, schedule), f"{name} was accepted")
    took = [await planning.poison_schedule(stage.nemesis, what) for what in planning.POISON]
    took += [await planning.poison_version(stage.nemesis) for _ in range(int(stage.scaled(10, 1)))]
    stage.expect_within(took, planning.QUARANTINE_SECONDS, "set aside")


async def _is_refused(folder: Path, name: str, body: str, schedule: str) -> bool:
    folder.mkdir(exist_ok=True)
    text = f"from evertick import dag, task\n@task\ndef t(): ...\n@dag({schedule})\ndef bad():\n    {body}\n"
    (folder / f"{name}.py").write_text(text)
    return (await load_file(folder, f"{name}.py")).error is not None


async def poison_candidate(stage: Stage) -> None:
    """N23: a hundred dead runners, one of which cannot be buried: the others are, at once."""
    count = int(stage.scaled(100, 40))
    spec = stage.cluster.ground.work.specs["pulse"]
    spec = replace(spec, name="unserved", tasks=tuple(replace(task, queue=NOBODY) for task in spec.tasks))
    await stage.publish()
    async with await connect(stage.cluster.server.url, purpose=Purpose.SCHEDULER) as conn:
        await publish_specs(conn, stage.cluster.ground.work, [spec])
        sessions = []
        for number in range(count):
            await stage.trigger("unserved", f"unserved-{number}")
            sessions.append(await _dead_runner(stage, conn, number))
        cursor = await conn.execute("select run_id from lease where session = %s", [sessions[count // 2]])
        row = await cursor.fetchone()
        assert row is not None
        await _corrupt(conn, row[0])
    async with stage.nemesis.fault(Fault.POISON, "all", part="candidate") as struck:

        async def others_are_declared_dead() -> bool:
            gone = "select count(*) from runner where session = any(%s) and ended_at is not null"
            return bool(await stage.cluster.watch.value(gone, sessions) >= count - 1)

        await eventually(others_are_declared_dead, 40, pause_seconds=0.1)
    ((spread, joined),) = await stage.cluster.watch.must(
        "select max(ended_at) - min(ended_at), max(started_at) - min(started_at) from runner where session = any(%s)",
        sessions,
    )
    stage.note(f"{count - 1} buried within {spread}, having joined within {joined}")
    # Their silence began one after the other.
    stage.expect(spread <= joined + timedelta(seconds=2.5), f"the others were buried over {spread}, not in one tick")
    # What cannot be repaired by a program is repaired by a person; the rest happens by itself again.
    await stage.cluster.watch.must("drop trigger corrupt on task")
    await stage.nemesis.recovery(struck, stage.nemesis.works_again())
    await stage.cluster.watch.must(
        "select cancel_run(run_id, ('chaos', null, null), 'nobody serves it') from run_status join run using (run_id)"
        " join dag on dag.dag_id = run.dag_id where dag.name = 'unserved' and finished_at is null"
    )


async def _dead_runner(stage: Stage, conn: AsyncConnection, number: int) -> int:
    """A runner on a machine that nobody can look at, which died with one attempt in hand."""
    session = secrets.randbits(62) + 1
    # No process has such a number, so this one is gone for certain.
    name, pid = f"runner-dead-{number}", 100_000_000 + number
    stage.cluster.record.started(name, pid)
    runner = NewRunner(
        session=session,
        runner_id=name,
        host="elsewhere",
        boot_id="elsewhere",
        pid_namespace="elsewhere",
        pid=pid,
        pid_started=0.0,
        queues=[NOBODY],
        slots=1,
    )
    await runners.register(conn, runner)
    done = await finish_and_claim(conn, session=session, reports=[], queues=[NOBODY], free=1, infra_retries=3)
    assert len(done.claims) == 1
    stage.cluster.record.exited(name, pid, -9)
    return session


async def _corrupt(conn: AsyncConnection, run_id: int) -> None:
    """Whoever touches that run's task fails, as with a damaged page."""
    await conn.execute(
        "create function corrupt() returns trigger language plpgsql as $$ begin raise exception 'damaged row'; end $$"
    )
    await conn.execute(
        f"create trigger corrupt before update on task for each row when (old.run_id = {run_id}) execute function corrupt()"
    )


SCENARIOS = (
    Scenario(
        name="N22",
        title="specs that cannot be read",
        play=poison_specs,
        shape=lambda is_full: Shape(schedulers=1, runners=1),
        required=("J2", "J13"),
    ),
    Scenario(
        name="N23",
        title="one dead runner that cannot be buried among many that can",
        play=poison_candidate,
        shape=lambda is_full: Shape(schedulers=1, runners=1),
        required=("J8",),
        # Nobody ever ran those bodies.
        without=("J12",),
    ),
)
