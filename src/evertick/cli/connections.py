"""`evertick connections`: addresses with passwords, for tasks."""

from __future__ import annotations

import typer

from evertick.cli.stored_values import add_commands
from evertick.domain.stored_values import ValueKind

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def about() -> None:
    """Connections: addresses with passwords, stored encrypted. A task gets one with `@task(connections=["warehouse"])`."""


add_commands(app, ValueKind.CONNECTION)
