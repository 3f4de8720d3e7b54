"""`evertick tasks reproduce`: run an attempt of a task again in this terminal, to find out why it failed.

The code, its environment, the inputs and the parameters are those of the attempt. Nothing is reported or stored; secrets
are asked for.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from evertick.attempts.protocol import start_frame
from evertick.bundles.bundle import unpack
from evertick.bundles.dependencies import bundle_lock
from evertick.bundles.environments import Environments, Interpreter
from evertick.cli.options import Run, Task, task_instance
from evertick.cli.output import hint, line, show
from evertick.client.local import LocalContext, database_url, local_caller, opened
from evertick.config import read_settings, user_environment
from evertick.db.connect import Purpose
from evertick.db.queries import dags, runners, tasks
from evertick.domain.attempt import AttemptOrder, Isolation, TaskKey
from evertick.domain.dags.spec import TaskSpec, from_json
from evertick.domain.errors import NotFound, UserError
from evertick.domain.stored_values import ValueKind
from evertick.operations.runs import find_run
from evertick.operations.tasks import find_task

Debug = Annotated[bool, typer.Option("--debug", help="Stop at the first line of the function, in a debugger.")]
Shell = Annotated[bool, typer.Option("--shell", help="Open a shell with the variables of the attempt instead.")]
Number = Annotated[
    int | None,
    typer.Option("--attempt", "-a", metavar="N", min=1, help="This attempt, by its number; by default the latest."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    order: AttemptOrder
    spec: TaskSpec
    archive: bytes


def reproduce_command(run: Run, task: Task, attempt: Number = None, debug: Debug = False, shell: Shell = False) -> None:
    """Run an attempt again in this terminal: the same code, environment, inputs and parameters.

    Nothing is reported or stored. The task may have effects elsewhere: it really runs. Secrets are asked for.
    """
    if debug and shell:
        raise UserError("--debug and --shell exclude each other.")
    found = asyncio.run(_find(run, task, attempt))
    settings = read_settings()
    folder = unpack(found.archive, found.order.bundle, settings.bundles_folder)
    lock = bundle_lock(folder)
    interpreter = Interpreter()
    if lock is not None:
        show(hint("Preparing the Python environment of the DAG file …"))
        interpreter = asyncio.run(Environments(settings, user_environment()).ensure(lock))
    mode = "debug" if debug else "shell" if shell else "run"
    order = _with_secrets(found)
    show(line(f"{found.order.dag}.{task} of run {run}, attempt {found.order.attempt}, code in {folder}", "bold"))
    raise typer.Exit(_start(interpreter, folder, order, settings.result_place.absolute(), mode))


def _start(interpreter: Interpreter, folder: Path, order: AttemptOrder, results: Path, mode: str) -> int:
    reader, writer = os.pipe()
    place = [str(folder), order.file, str(reader), str(results), mode]
    process = subprocess.Popen(
        [*interpreter.command("evertick.attempts.reproduce"), *place], pass_fds=[reader], env=user_environment()
    )
    os.close(reader)
    with os.fdopen(writer, "wb") as orders:
        orders.write(start_frame(1, order))
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # it is for the task, which has received it as well


async def _find(run_id: int, text: str, number: int | None) -> _Found:
    name, map_index = task_instance(text)
    caller = local_caller(LocalContext(read_settings()))
    async with opened(database_url(read_settings()), Purpose.READ) as conn:
        run = await find_run(caller, conn, run_id)
        row, key = await find_task(caller, conn, run_id, name, map_index)
        attempts = await tasks.attempts(conn, key)
        if number is not None and number > len(attempts):
            raise NotFound(f"{text} of run {run_id} has {len(attempts)} attempts.")
        chosen = attempts[(number or len(attempts)) - 1] if attempts else None
        version = await dags.version(conn, run.version_id)
        bundle = None if version is None else await dags.bundle(conn, version.bundle_hash)
        if version is None or bundle is None:
            raise NotFound(f"The code of run {run_id} is not in the database any more.")
        spec = from_json(json.dumps(version.spec))
        inputs = await runners.task_inputs(conn, key, version_id=run.version_id)
    task = spec.tasks[row.idx]
    if task.runs_nowhere:
        raise UserError(f"{text} runs no code: it is a {task.kind} task.")
    order = AttemptOrder(
        key=TaskKey(run_id, row.idx, row.map_index),
        epoch=chosen.epoch if chosen else 1,
        session=0,
        attempt=chosen.attempt if chosen else 1,
        dag=spec.name,
        task=task.name,
        version_id=run.version_id,
        bundle=version.bundle_hash,
        file=version.file,
        fire_at=(run.fire_at or run.created_at).isoformat(),
        params_json=json.dumps(run.params),
        inputs_json=inputs or "{}",
        timeout_seconds=None,
        isolation=Isolation.PROCESS,
        command=task.command,
    )
    return _Found(order=order, spec=task, archive=bundle.archive)


def _with_secrets(found: _Found) -> AttemptOrder:
    """Asks for each declared value. The values go only to the process of the task."""
    wanted = {
        ValueKind.VARIABLE: found.spec.variables,
        ValueKind.CONNECTION: found.spec.connections,
        ValueKind.SECRET: found.spec.secrets,
    }
    if not any(wanted.values()):
        return found.order
    if not sys.stdin.isatty():
        names = ", ".join(name for names in wanted.values() for name in names)
        raise UserError(f"This task needs {names}: run the command in a terminal, which asks for them.")
    given = {kind: {name: getpass.getpass(f"{kind} {name}: ") for name in names} for kind, names in wanted.items()}
    return replace(found.order, granted_json=json.dumps(given))
