"""`evertick airflow run`: one run of a DAG, with a scheduler, a runner and a PostgreSQL that exist only for it.

The same code runs the tasks as on a server, so what works here works there. Schedules do not fire.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from io import StringIO
from pathlib import Path

from psycopg import AsyncConnection

from evertick.bundles.bundle import pack
from evertick.bundles.loader import LoadedDag, LoadedFile
from evertick.client.local import LocalContext, local_caller
from evertick.config import Settings, user_environment
from evertick.db.connect import Purpose, connect
from evertick.db.migrate import migrate
from evertick.db.notify import Channel, notify
from evertick.db.queries import tasks
from evertick.db.queries.tasks import TaskRow
from evertick.domain.access import Actor
from evertick.domain.dags.gates import GateKind
from evertick.domain.dags.spec import DagSpec, structural_hash, to_json
from evertick.domain.deployments import DeploymentChange, DeploymentKind
from evertick.domain.errors import InvalidDag, NotFound
from evertick.engine.gates import set_pool
from evertick.engine.runs import trigger
from evertick.observability import logging
from evertick.operations.airflow_import import Item, import_item
from evertick.operations.caller import Caller, similar
from evertick.operations.runs import show_run
from evertick.operations.task_logs import RunLogLine, read_run_log
from evertick.publisher.deployment import LoadedFolder, deploy, load_files
from evertick.runner.runner import Runner
from evertick.scheduler.scheduler import Scheduler
from evertick.secrets.keyring import load_keyring, make_key
from evertick.supervisor.postgres import EmbeddedPostgres

_ACTOR = Actor("airflow run")
_POLL_SECONDS = 0.1
_POOL_SLOTS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """`task`: only this one, without its upstream tasks. `values` are connections, variables and pools that it has."""

    file: Path
    dag: str
    task: str | None
    params: Mapping[str, object]
    at: datetime | None
    values: Sequence[Item]


@dataclass(frozen=True, slots=True, kw_only=True)
class RanDag:
    state: str
    tasks: list[TaskRow]


async def run_dag(settings: Settings, wanted: Wanted, show: Callable[[RunLogLine], None]) -> RanDag:
    """Raises InvalidDag for a file or a DAG that cannot be loaded. `show` receives the lines of all tasks."""
    loaded = await _load(settings, wanted)
    with tempfile.TemporaryDirectory(prefix="evertick-run-") as folder:
        ours = replace(settings, home=Path(folder), database_url=None, health_port=0, tick_seconds=0.2)
        make_key(ours)
        postgres = EmbeddedPostgres(ours.home)
        url = await postgres.start()
        try:
            return await _run(replace(ours, database_url=url), url, loaded, wanted, show)
        finally:
            await postgres.stop()


async def _load(settings: Settings, wanted: Wanted) -> LoadedFile:
    """The file with this DAG alone, without schedules, and with the one task if only that is wanted."""
    folder = wanted.file.absolute().parent
    (loaded,) = await load_files(folder, [wanted.file.name], settings, user_environment())
    if loaded.error is not None:
        raise InvalidDag(str(loaded.error))
    if (refused := loaded.refused.get(wanted.dag)) is not None:
        raise InvalidDag(str(refused))
    specs = {each.name: each.spec for each in loaded.dags}
    if wanted.dag not in specs:
        advice = similar(wanted.dag, list(specs), f"Its DAGs: {', '.join(sorted(specs)) or 'none'}.")
        raise NotFound(f"There is no DAG {wanted.dag!r} in {wanted.file}. {advice}")
    others = [each for each in loaded.dags if each.name != wanted.dag]
    spec = _only(specs[wanted.dag], wanted.task)
    return replace(loaded, dags=tuple(map(_ready, [spec, *(each.spec for each in others)])), findings=())


def _only(spec: DagSpec, task: str | None) -> DagSpec:
    if task is None:
        return spec
    found = [each for each in spec.tasks if each.name == task]
    if not found:
        names = [each.name for each in spec.tasks]
        raise NotFound(
            f"DAG {spec.name!r} has no task {task!r}. {similar(task, names, f'It has: {chr(44).join(names)}.')}"
        )
    if found[0].inputs:
        raise InvalidDag(f"Task {task!r} is mapped over the result of {found[0].inputs[0]!r}: run the whole DAG.")
    return replace(spec, tasks=tuple(found), edges=())


def _ready(spec: DagSpec) -> LoadedDag:
    """Other DAGs of the file are there to be triggered."""
    made = replace(spec, schedules=(), starts_paused=False)
    return LoadedDag(name=made.name, spec=made, spec_json=to_json(made), hash=structural_hash(made))


async def _run(
    settings: Settings, url: str, loaded: LoadedFile, wanted: Wanted, show: Callable[[RunLogLine], None]
) -> RanDag:
    conn = await connect(url, purpose=Purpose.SCHEDULER)
    try:
        await migrate(conn)
        run_id = await _prepare(conn, settings, loaded, wanted)
        caller = local_caller(LocalContext(settings))
        async with _services(settings, url):
            await notify(conn, Channel.TASKS)
            state = await _follow(caller, run_id, show)
        return RanDag(state=state, tasks=await tasks.list_of_run(conn, run_id=run_id))
    finally:
        await conn.close()


async def _prepare(conn: AsyncConnection, settings: Settings, loaded: LoadedFile, wanted: Wanted) -> int:
    keyring = load_keyring(settings)
    gates = [gate for dag in loaded.dags for task in dag.spec.tasks for gate in task.gates]
    for name in sorted({gate.name for gate in gates if gate.kind is GateKind.POOL}):
        await set_pool(conn, name=name, slots=_POOL_SLOTS, actor=_ACTOR)
    for item in wanted.values:
        await import_item(conn, keyring, item, actor=_ACTOR, dry_run=False)
    folder = wanted.file.absolute().parent
    bundle = await asyncio.to_thread(pack, folder, loaded.file, loaded.closure)
    change = DeploymentChange(name="airflow-run", kind=DeploymentKind.UPLOAD, is_whole=True)
    made = LoadedFolder(files=[loaded], bundles={loaded.file: bundle})
    await deploy(conn, made, change, settings=settings, actor=_ACTOR)
    return (await trigger(conn, dag=wanted.dag, params=wanted.params, fire_at=wanted.at, actor=_ACTOR)).run_id


@asynccontextmanager
async def _services(settings: Settings, url: str) -> AsyncIterator[None]:
    """Their own messages say nothing about the DAG."""
    log = logging.configure(service="airflow-run", as_json=True, stream=StringIO())
    scheduler = Scheduler(settings, url=url, owner="airflow-run", log=log)
    runner = Runner(settings, url=url, log=log, environment=user_environment())
    async with asyncio.TaskGroup() as group:
        for service in (scheduler, runner):
            group.create_task(service.run())
        try:
            yield
        finally:
            for each in (scheduler, runner):
                each.stop.set()
                each.wake.set()


async def _follow(caller: Caller, run_id: int, show: Callable[[RunLogLine], None]) -> str:
    """Show the lines of the run until it has ended, and return its state."""
    cursor: str | None = None
    while True:
        page = await read_run_log(caller, run_id=run_id, cursor=cursor)
        for each in page.lines:
            show(each)
        if page.is_complete:
            return (await show_run(caller, run_id=run_id)).state
        cursor = page.next_cursor
        await asyncio.sleep(_POLL_SECONDS)
