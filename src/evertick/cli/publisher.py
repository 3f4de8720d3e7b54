"""`evertick publisher`: one publisher in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evertick.cli.serve import serve
from evertick.config import read_settings, user_environment
from evertick.publisher.publisher import Publisher

app = typer.Typer(add_completion=False)

Dags = Annotated[Path | None, typer.Option("--dags", metavar="FOLDER", help="The folder to watch.")]


@app.command(epilog="Example: evertick publisher --dags /srv/dags")
def publisher(dags: Dags = None) -> None:
    """Watch a folder: publish the DAGs in it, and again whenever a file changes."""
    settings = read_settings(dags_folder=dags)
    visible = user_environment()
    serve("publisher", settings, lambda url, log: Publisher(settings, url=url, environment=visible, log=log))
