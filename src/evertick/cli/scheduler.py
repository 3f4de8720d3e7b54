"""`evertick scheduler`: one scheduler in this process."""

from __future__ import annotations

import os
import socket

import typer

from evertick.cli.serve import serve
from evertick.config import read_settings
from evertick.services.scheduler import Scheduler

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: EVERTICK_DATABASE_URL=postgresql://db/evertick evertick scheduler")
def scheduler() -> None:
    """Run one scheduler: it fires what is due and repairs what was left. More of them stand by to take over."""
    settings = read_settings()
    owner = f"{socket.gethostname()}-{os.getpid()}"
    serve("scheduler", settings, lambda url, log: Scheduler(settings, url=url, owner=owner, log=log))
