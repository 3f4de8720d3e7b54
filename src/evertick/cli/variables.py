"""`evertick variables`: named values for tasks."""

from __future__ import annotations

import typer

from evertick.cli.stored_values import add_commands
from evertick.domain.stored_values import ValueKind

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def about() -> None:
    """Variables: values that tasks get by declaring them, `@task(variables=["region"])`, and that change without a deploy."""


add_commands(app, ValueKind.VARIABLE)
