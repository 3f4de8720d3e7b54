"""`evertick runner`: one runner in this process."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from evertick.cli.serve import serve
from evertick.config import LOCAL, read_settings, user_environment
from evertick.runner.runner import Runner

app = typer.Typer(add_completion=False)

Queues = Annotated[str | None, typer.Option("--queues", metavar="A,B", help="The queues that it serves.")]
Match = Annotated[
    list[str] | None,
    typer.Option("--match", metavar="PATTERN", help="Serve only tasks of these names, as ml::*; may be repeated."),
]
Slots = Annotated[int | None, typer.Option("--slots", help="How many tasks it runs at once.")]
Executor = Annotated[
    str | None,
    typer.Option(
        "--executor",
        metavar="NAME",
        help="Where tasks run: local, process, kubernetes, or your own as module:factory.",
    ),
]
Id = Annotated[str | None, typer.Option("--id", metavar="ID", help="Its readable id; host and pid if left out.")]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="A name for people; several may share it.")]


@app.command(epilog="Example: evertick runner --queues default,gpu --match 'ml::*' --slots 8 --id gpu-1")
def runner(
    queues: Queues = None,
    match: Match = None,
    slots: Slots = None,
    executor: Executor = None,
    readable_id: Id = None,
    name: Name = None,
) -> None:
    """Run one runner: it claims tasks and executes them, each in a process of its own.

    With --executor it hands them over instead: each runs beside an agent over there, and this runner looks after it.

    SIGTERM or Ctrl-C lets what runs end within the grace and gives back the rest; the second one does so at once.
    """
    served = None if queues is None else tuple(part.strip() for part in queues.split(",") if part.strip())
    patterns = None if match is None else tuple(match)
    settings = read_settings(
        runner_queues=served,
        runner_match=patterns,
        runner_slots=slots,
        executor=executor,
        runner_id=readable_id,
        runner_name=name,
    )
    if settings.executor == LOCAL:
        serve("runner", settings, lambda url, log: Runner(settings, url=url, log=log, environment=user_environment()))
    else:
        # By name: most runners run their tasks themselves.
        remote = import_module("evertick.runner.remote.session")
        serve("runner", settings, lambda url, log: remote.make_remote_runner(settings, url=url, log=log))
