"""`evertick deploy DIR`: publish the DAGs of a folder once, from a pipeline or by hand."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Annotated

import typer

from evertick.cli.connection import actor, change, refuse_server
from evertick.cli.documents import document, print_json
from evertick.cli.options import Json, noun
from evertick.cli.tables import Cell, hint, line, show, table
from evertick.config import read_settings, user_environment
from evertick.db.notify import Channel
from evertick.domain.errors import UserError
from evertick.publisher.publisher import deploy, load_folder, remove

app = typer.Typer(add_completion=False)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder with the DAG files and all that they need.")]
Name = Annotated[
    str | None, typer.Option("--name", help="What the deployment is called; the folder's own name if left out.")
]
RemoveMissing = Annotated[
    bool, typer.Option("--remove-missing", help="Delete DAGs of an earlier deployment by this name that are not in it.")
]


@app.command(name="deploy", epilog="Example: evertick deploy ./dags --name shop")
def deploy_folder(
    folder: Folder, name: Name = None, remove_missing: RemoveMissing = False, as_json: Json = False
) -> None:
    """Publish the DAGs of a folder as bundles named by their content. Nothing is published if one file is broken.

    Open runs keep their version. The same code again changes nothing, so that repeating it is safe.
    """
    refuse_server()
    settings, called = read_settings(), name or folder.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", called):
        raise UserError(f"{called!r} cannot name a deployment: give --name with letters, digits, '_', '-' and '.'.")
    loaded = asyncio.run(load_folder(folder, settings, user_environment()))
    done = change(
        lambda conn: deploy(conn, loaded, folder=folder, name=called, settings=settings, actor=actor()),
        Channel.PLAN,
        Channel.READY,
    )
    if remove_missing and done.missing:
        change(lambda conn: remove(conn, done.missing, actor=actor()), Channel.PLAN)
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
