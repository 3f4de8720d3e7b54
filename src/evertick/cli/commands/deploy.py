"""`evertick deploy` publishes the DAGs of a folder once, from a pipeline or a terminal.

Each file is loaded in a process of its own; its code never runs in this one.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Annotated

import typer

from evertick.cli.app import Single
from evertick.cli.options import Json, noun
from evertick.cli.output import Cell, hint, line, print_json, show, table
from evertick.client.connect import refuse_server
from evertick.client.local import LocalContext, local_caller
from evertick.config import Settings, read_settings, user_environment
from evertick.db.notify import Channel
from evertick.domain.errors import UserError
from evertick.publisher.publisher import Deployment, deploy, deployed_locks, load_folder, remove

app = Single()

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
        found = {"deployment": called, "dags": done.published, "missing": done.missing}
        return print_json({**found, "is_removed": remove_missing, "warnings": done.warnings})
    rows: list[list[Cell]] = [
        [each.dag, each.file, "new version" if each.is_new else "unchanged", each.bundle[:12]]
        for each in done.published
    ]
    show(table(("DAG", "FILE", "VERSION", "BUNDLE"), rows))
    for each in done.warnings:
        show(line(f"Warning: {each}", "yellow"))
    if done.missing and remove_missing:
        show(hint(f"Deleted {noun(len(done.missing), 'DAG')} of earlier deployments: {', '.join(done.missing)}"))
    elif done.missing:
        show(hint(f"No longer in the folder: {', '.join(done.missing)}. Delete them with --remove-missing"))


async def _deploy(folder: Path, name: str, settings: Settings, *, remove_missing: bool) -> Deployment:
    context = LocalContext(settings)
    try:
        async with context.read() as conn:
            known = await deployed_locks(conn, name)
        loaded = await load_folder(folder, settings, user_environment(), known)
        caller = local_caller(context)
        async with caller.write(Channel.SCHEDULE, Channel.TASKS) as conn:
            done = await deploy(conn, loaded, folder=folder, name=name, settings=settings, actor=caller.actor)
            if remove_missing and done.missing:
                await remove(conn, done.missing, actor=caller.actor)
    finally:
        await context.close()
    return done
