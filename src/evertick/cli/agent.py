"""`evertick agent`: runs one attempt beside its code, in a remote place. Started by an executor, not by people."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from evertick.agent.agent import Agent, leave_refusal, read_start_token
from evertick.config import Settings, read_settings, user_environment
from evertick.domain.errors import InvalidSettings
from evertick.observability.logging import configure
from evertick.processes.identity import process_name

app = typer.Typer(add_completion=False)

TokenFile = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="The file with its start token; see above.")
]
OutcomeFile = Annotated[
    Path | None,
    typer.Option(
        "--outcome-file", metavar="FILE", help="Where it leaves how the attempt ended, as /dev/termination-log."
    ),
]


@app.command(
    epilog="Example: EVERTICK_SERVER=https://evertick.example.com evertick agent --token-file /run/evertick/token"
)
def agent(token_file: TokenFile = None, outcome_file: OutcomeFile = None) -> None:
    """Run one attempt of a task here, and speak for it to the API at EVERTICK_SERVER. An executor starts it.

    Its start token comes from a file or from EVERTICK_AGENT_TOKEN, never as an argument: arguments are seen by everybody.
    SIGTERM lets the attempt end within the grace and gives it back; the second one does so at once.
    Exit status: 0 done, 1 failed, 3 canceled or given back, 4 the API could not be told, 5 the attempt is not ours.
    """
    place = outcome_file
    try:
        settings = read_settings(agent_token_file=token_file, agent_outcome_file=outcome_file)
        place = settings.agent_outcome_file
        if not settings.server:
            raise InvalidSettings("an agent needs the address of the API: set EVERTICK_SERVER.")
        status = asyncio.run(_run(settings, settings.server, read_start_token(settings)))
    except InvalidSettings as error:
        leave_refusal(place, str(error))
        raise
    raise typer.Exit(status)


async def _run(settings: Settings, server: str, token: str) -> int:
    log = configure(service="agent", owner=process_name(), as_json=settings.log == "json")
    made = Agent(settings, server=server, token=token, log=log, environment=user_environment())

    def stop() -> None:
        if made.stop.is_set():
            made.hurry.set()
        made.stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return await made.run()
