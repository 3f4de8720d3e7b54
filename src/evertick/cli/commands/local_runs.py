"""`evertick dags test` and `evertick tasks test`: run a DAG or a task in this process, without a server or a database.

The file of the DAG is found in processes of their own; then its code runs in this one, so that breakpoints work.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evertick.cli import options
from evertick.cli.errors import RUN_EXIT_STATUS
from evertick.cli.options import DagName, moment
from evertick.cli.output import Cell, heading, line, show, state, table
from evertick.config import read_settings, user_environment
from evertick.domain.errors import InvalidDag, NotFound, UserError
from evertick.operations.caller import similar

if TYPE_CHECKING:
    from evertick.bundles.loader import LoadedFile
    from evertick.domain.dags.spec import DagSpec
    from evertick.sdk.local_run import LocalRun, LocalRunOptions

For = Annotated[datetime | None, moment("--for", "The time that the run is for, as its fire time.")]
TaskName = Annotated[str, typer.Argument(metavar="TASK", help="The task's name in the DAG.")]


def test_dag_command(
    dag: DagName, param: options.ParamOption = None, params: options.ParamsOption = None, at: For = None
) -> None:
    """Run a DAG of the DAGs folder in this process, without a server. Exit status 0 for success, 1 failed."""
    ran = _run(dag, param, params, at)
    show(line(f"{dag}: ").append(state(ran.state)))
    raise typer.Exit(RUN_EXIT_STATUS.get(ran.state, 1))


def test_task_command(
    dag: DagName, task: TaskName, param: options.ParamOption = None, params: options.ParamsOption = None, at: For = None
) -> None:
    """Run one task and its upstream tasks in this process, without a server. Exit status 0 for success, 1 failed."""
    ran = _run(dag, param, params, at, only=task)
    found = {found for name, found in ran.states.items() if name == task or name.startswith(f"{task}[")}
    raise typer.Exit(0 if found <= {"success", "skipped"} else 1)


def _run(
    dag: str, param: list[str] | None, params: str | None, at: datetime | None, only: str | None = None
) -> LocalRun:
    folder, loaded, spec = _find(dag)
    wanted: LocalRunOptions = {"params": options.read_object(params) | options.read_pairs(spec.params, param or [])}
    if at is not None:
        wanted["fire_at"] = at
    if only is not None:
        wanted["only"] = only
    ran = (_run_here if loaded.lock is None else _run_in_environment)(folder, loaded, dag, wanted)
    # A task that had no turn is not shown.
    rows: list[list[Cell]] = [
        [name, state(found), ran.reasons.get(name)]
        for name, found in ran.states.items()
        if found not in ("waiting", "available")
    ]
    show(heading("Tasks"), table(("TASK", "STATE", "REASON"), rows))
    return ran


def _run_here(folder: Path, loaded: LoadedFile, dag: str, wanted: LocalRunOptions) -> LocalRun:
    # Imported late, here and below: the other commands of these groups load no files.
    from evertick.sdk.dag import load_dags

    return load_dags(folder, loaded.file)[dag].test(**wanted)


def _run_in_environment(folder: Path, loaded: LoadedFile, dag: str, wanted: LocalRunOptions) -> LocalRun:
    """In a process that has this terminal, so that breakpoints work."""
    from evertick.bundles.environments import Environments
    from evertick.sdk.local_run import LocalRun

    assert loaded.lock is not None
    interpreter = asyncio.run(Environments(read_settings(), user_environment()).ensure(loaded.lock))
    reader, writer = os.pipe()
    with os.fdopen(reader, encoding="utf-8") as answer:
        place = [str(folder), loaded.file, dag, json.dumps(wanted, default=datetime.isoformat), str(writer)]
        process = subprocess.Popen(
            [*interpreter.command("evertick.bundles.local_run_process"), *place], pass_fds=[writer]
        )
        os.close(writer)
        told = answer.read()
    if process.wait() != 0 or not told:
        raise UserError(f"The process that ran {dag} exited with code {process.returncode}; see its output above.")
    ran = json.loads(told)
    if "error" in ran:
        raise UserError(ran["error"])
    return LocalRun(state=ran["state"], states=ran["states"], results={}, reasons=ran["reasons"])


def _find(dag: str) -> tuple[Path, LoadedFile, DagSpec]:
    folder = read_settings().dags_folder
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}. Name the folder of your DAG files with EVERTICK_DAGS_FOLDER.")
    known: list[str] = []
    for loaded in (_load(folder, file) for file in _likeliest_first(folder, dag)):
        specs = {each.name: each.spec for each in loaded.dags}
        known += specs
        if dag in specs:
            return folder.absolute(), loaded, specs[dag]
        if loaded.error is not None and dag in (folder / loaded.file).read_text(encoding="utf-8", errors="replace"):
            raise InvalidDag(f"{loaded.error}")
    advice = similar(dag, known, f"Its DAGs: {', '.join(sorted(known)) or 'none'}.")
    raise NotFound(f"There is no DAG {dag!r} in {folder}. {advice}")


def _load(folder: Path, file: str) -> LoadedFile:
    from evertick.publisher.deployment import load_files

    (loaded,) = asyncio.run(load_files(folder, [file], read_settings(), user_environment()))
    return loaded


def _likeliest_first(folder: Path, dag: str) -> list[str]:
    """Files that mention the name come first: each file is loaded in a process of its own."""
    from evertick.publisher.publisher import find_dag_files

    texts = {file: (folder / file).read_text(encoding="utf-8", errors="replace") for file in find_dag_files(folder)}
    return sorted(texts, key=lambda file: (dag not in texts[file], file))
