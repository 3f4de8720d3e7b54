"""`evertick deploy` publishes the DAGs of a folder once, from a pipeline or by hand. `evertick dags validate` checks DAG files.

Each file is loaded in a process of its own; its code never runs in this one. Validation needs no database.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from evertick.bundles.loader import ImportProblem, LoadedDag, LoadedFile, find_duplicates, load_file
from evertick.cli.dag_view import upstream_of
from evertick.cli.options import Json, noun
from evertick.cli.output import Cell, document, hint, line, print_json, show, table
from evertick.client.connect import refuse_server
from evertick.client.local import LocalContext, local_caller
from evertick.config import Settings, read_settings, user_environment
from evertick.db.notify import Channel
from evertick.domain.errors import UserError
from evertick.domain.schedules.spec import describe
from evertick.publisher.publisher import LOADS_AT_ONCE, Deployment, deploy, find_dag_files, load_folder, remove

app = typer.Typer(add_completion=False)

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="The folder with the DAG files and everything they import.")
]
Name = Annotated[str | None, typer.Option("--name", help="Name of the deployment; by default the folder's name.")]
RemoveMissing = Annotated[
    bool,
    typer.Option(
        "--remove-missing", help="Delete DAGs of earlier deployments with this name that are not in the folder."
    ),
]
PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="A DAG file, or a folder of them.")]


@app.command(name="deploy", epilog="Example: evertick deploy ./dags --name shop")
def deploy_folder(
    folder: Folder, name: Name = None, remove_missing: RemoveMissing = False, as_json: Json = False
) -> None:
    """Publish the DAGs of a folder as bundles named by their content. Nothing is published if one file is broken.

    Open runs keep their version. Publishing the same code again changes nothing, so it is safe to repeat.
    """
    refuse_server()
    settings, called = read_settings(), name or folder.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", called):
        raise UserError(
            f"{called!r} is not a valid name for a deployment: give --name with letters, digits, '_', '-' and '.'."
        )
    done = asyncio.run(_deploy(folder, called, settings, remove_missing=remove_missing))
    if as_json:
        print_json(
            {
                "deployment": called,
                "dags": [document(each) for each in done.published],
                "missing": list(done.missing),
                "is_removed": remove_missing,
                "warnings": list(done.warnings),
            }
        )
        return
    rows: list[list[Cell]] = [
        [each.dag, each.file, "new version" if each.is_new else "as it was", each.bundle[:12]]
        for each in done.published
    ]
    show(table(("DAG", "FILE", "VERSION", "BUNDLE"), rows))
    for each in done.warnings:
        show(line(f"Warning: {each}", "yellow"))
    if done.missing and remove_missing:
        show(hint(f"Deleted {noun(len(done.missing), 'DAG')} of before: {', '.join(done.missing)}"))
    elif done.missing:
        show(hint(f"Not in it any more, and still there: {', '.join(done.missing)}. Delete them with --remove-missing"))


async def _deploy(folder: Path, name: str, settings: Settings, *, remove_missing: bool) -> Deployment:
    loaded = await load_folder(folder, settings, user_environment())
    context = LocalContext(settings)
    try:
        caller = local_caller(context)
        async with caller.write(Channel.SCHEDULE, Channel.TASKS) as conn:
            done = await deploy(conn, loaded, folder=folder, name=name, settings=settings, actor=caller.actor)
            if remove_missing and done.missing:
                await remove(conn, done.missing, actor=caller.actor)
    finally:
        await context.close()
    return done


def validate_command(path: PathArgument, as_json: Json = False) -> None:
    """Check DAG files without publishing them: list their DAGs, or the errors with their lines."""
    folder, files = _find(path)
    loaded = asyncio.run(_load_all(folder, files, read_settings().load_timeout_seconds))
    duplicates = find_duplicates(loaded)
    problems = [problem for problem in map(_problem, loaded) if problem]
    if as_json:
        print_json(_document(loaded, duplicates))
    else:
        for file in loaded:
            _show_file(folder, file)
        for name, owners in duplicates.items():
            show(line(f"DAG {name} is defined in more than one file: {', '.join(owners)}.", "red"))
    if problems or duplicates:
        raise typer.Exit(2)


def _find(path: Path) -> tuple[Path, list[str]]:
    """The folder that imports are relative to, and the files in it."""
    if path.is_dir():
        files = find_dag_files(path)
        if not files:
            raise UserError(f"{path} holds no DAG file: no .py file in it names both `evertick` and `dag`.")
        return path, files
    if not path.is_file():
        raise UserError(f"There is no file or folder {path}.")
    if path.suffix != ".py":
        raise UserError(f"{path} is not a Python file: its name must end in .py.")
    root = read_settings().dags_folder.resolve()
    folder = root if path.resolve().is_relative_to(root) else path.resolve().parent
    return folder, [str(path.resolve().relative_to(folder))]


async def _load_all(folder: Path, files: Sequence[str], timeout_seconds: float) -> list[LoadedFile]:
    gate = asyncio.Semaphore(LOADS_AT_ONCE)

    async def load(file: str) -> LoadedFile:
        async with gate:
            return await load_file(folder, file, timeout_seconds=timeout_seconds, environment=user_environment())

    return list(await asyncio.gather(*(load(file) for file in files)))


def _problem(loaded: LoadedFile) -> ImportProblem | None:
    if loaded.error or loaded.dags:
        return loaded.error
    return ImportProblem(file=loaded.file, line=None, message="it defines no DAG. Call a function decorated with @dag.")


def _show_file(folder: Path, loaded: LoadedFile) -> None:
    if problem := _problem(loaded):
        show(line(str(replace(problem, file=os.path.relpath(folder / problem.file))), "red"))
        if problem.traceback:
            show(hint(problem.traceback.rstrip()))
        return
    for dag in loaded.dags:
        words = "; ".join(describe(each.spec) for each in dag.spec.schedules) or "by hand"
        count = noun(len(dag.spec.tasks), "task")
        show(line(f"ok {loaded.file}: {dag.name}, {count}, {words}", "green"))
        for task, upstream in upstream_of(dag.spec).items():
            show(line(f"     {task}" + (f"  after {', '.join(upstream)}" if upstream else "")))
    if loaded.uses_threads:
        names = ", ".join(loaded.uses_threads)
        show(hint(f"   runs in fresh interpreters because importing it starts threads: {names}"))


def _document(loaded: Sequence[LoadedFile], duplicates: Mapping[str, tuple[str, ...]]) -> dict[str, object]:
    files = []
    for file in loaded:
        problem = _problem(file)
        files.append(
            {
                "file": file.file,
                "error": document(problem) if problem else None,
                "uses_threads": file.uses_threads,
                "dags": [_dag_document(dag) for dag in file.dags],
            }
        )
    return {"files": files, "duplicates": duplicates}


def _dag_document(dag: LoadedDag) -> dict[str, object]:
    upstream = upstream_of(dag.spec)
    return {
        "dag": dag.name,
        "hash": dag.hash,
        "schedules": [describe(each.spec) for each in dag.spec.schedules],
        "tasks": [{"task": name, "upstream": after} for name, after in upstream.items()],
    }
