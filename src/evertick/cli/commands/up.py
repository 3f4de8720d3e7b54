"""`evertick up`: run all services on this machine with one command, until Ctrl-C."""

from __future__ import annotations

import asyncio
import faulthandler
import re
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from evertick.cli.app import Single
from evertick.cli.commands.services import COMMANDS, ApiHost, ApiPort, Slots, preload
from evertick.cli.options import noun
from evertick.config import Settings, environment_for, read_settings
from evertick.db.connect import with_advice
from evertick.db.connection import where
from evertick.domain.errors import InvalidSettings
from evertick.observability.logging import configure
from evertick.processes.identity import process_name
from evertick.processes.system import forget_variable
from evertick.publisher.routing_file import load_routing
from evertick.supervisor.fork_server import ServiceForkServer
from evertick.supervisor.postgres_home import PostgresDirectory, holder_of, shown
from evertick.supervisor.supervisor import Supervisor, services_of

app = Single()

_EXAMPLES = Path(__file__).parents[2] / "examples"
# Examples that need a pool, which must exist before they can be published.
_NOT_AT_ONCE = {"pools.py"}
LONGEST_END_SECONDS = 30.0

HomeOption = Annotated[Path | None, typer.Option("--home", help="The folder of the embedded database and the logs.")]
UrlOption = Annotated[
    str | None, typer.Option("--database-url", metavar="URL", help="Use this PostgreSQL instead of the embedded one.")
]
Dags = Annotated[
    Path | None, typer.Option("--dags", metavar="FOLDER", help="The folder of your DAG files; it must exist.")
]
NoExamples = Annotated[bool, typer.Option("--no-examples", help="Create ./dags without example DAGs.")]


@app.command(epilog="Example: evertick up --dags ./dags")
def up(
    home: HomeOption = None,
    database_url: UrlOption = None,
    dags: Dags = None,
    no_examples: NoExamples = False,
    slots: Slots = None,
    host: ApiHost = None,
    port: ApiPort = None,
) -> None:
    """Start everything: an embedded PostgreSQL, a scheduler, a runner, a publisher for your DAGs, and the API.

    The first start makes the user `admin` and prints a link to sign in with, once. A child that dies is started again.
    Ctrl-C stops all of it cleanly; a second Ctrl-C stops it at once.
    """
    settings = read_settings(
        home=home, database_url=database_url, dags_folder=dags, runner_slots=slots, api_host=host, api_port=port
    )
    forget_variable("EVERTICK_ADMIN_PASSWORD")  # before any process is started, so that no task can read it
    load_routing(settings.routing_file)
    log = configure(service="evertick", owner=process_name(), as_json=settings.log == "json")
    fork_server = ServiceForkServer(_services(settings))
    supervisor = Supervisor(settings, environment=environment_for(settings), fork_server=fork_server, say=_say, log=log)
    # If another one runs already, the supervisor reports it, and there is nothing to announce.
    if settings.database_url or holder_of(settings.home) is None:
        refuse_missing(settings.dags_folder)
        copied = put_examples(settings.dags_folder, are_wanted=not no_examples)
        make_first_key(settings)
        supervisor.port.start()
        if settings.log == "text":
            _say(banner(settings, copied, supervisor.port.url))
        elif supervisor.port.url:
            log.info("health_listening", url=supervisor.port.url)
    try:
        asyncio.run(_supervise(supervisor, settings))
    finally:
        supervisor.port.stop()


def _services(settings: Settings) -> Callable[[list[str]], int]:
    """Runs a service by its name. All services are imported first, so that forked ones share their memory. None of them parses
    a command line: making all commands would write to 2.5 MB of that memory in each service."""
    for name in services_of(settings):
        preload(name)
    run: Callable[[Callable[[], object]], int] = import_module("evertick.cli.main").run

    def serve(arguments: list[str]) -> int:
        (name,) = arguments
        return run(COMMANDS[name])

    return serve


def make_first_key(settings: Settings) -> None:
    """Make the key that encrypts secrets. Imported late: every service would map the library."""
    from evertick.secrets.keyring import make_key

    make_key(settings)


def refuse_missing(folder: Path) -> None:
    """Only the default folder is created: another name may be a typing error, and examples would run from there."""
    if not folder.exists() and folder != Settings().dags_folder:
        raise InvalidSettings(
            f"There is no folder {folder}. Create it with `mkdir -p {folder}`, or correct --dags (EVERTICK_DAGS_FOLDER)."
        )


def put_examples(folder: Path, *, are_wanted: bool = True) -> list[str]:
    """Make the folder and copy the example DAGs into it, unless it exists. Returns the names of the copied files."""
    if folder.exists():
        if not folder.is_dir():
            raise InvalidSettings(f"{folder} is not a folder. Name a folder for DAG files with --dags.")
        return []
    folder.mkdir(parents=True)
    examples = sorted(path for path in _EXAMPLES.glob("*.py") if are_wanted and path.name not in _NOT_AT_ONCE)
    for example in examples:
        shutil.copy(example, folder / example.name)
    return [example.name for example in examples]


def banner(settings: Settings, copied: list[str], health_url: str | None = None) -> str:
    """Where everything is, and commands to try next."""
    examples = f" (new, with {noun(len(copied), 'example')}: {', '.join(copied)})" if copied else ""
    if not any(settings.dags_folder.glob("**/*.py")):
        examples = " (empty: put a DAG file there)"
    place = where(settings.database_url) if settings.database_url else f"embedded, in {shown(settings.home)}"
    command = program(shutil.which("evertick"), sys.argv[0])
    if settings.home != Settings().home and not settings.database_url:
        command = f"EVERTICK_HOME={settings.home.absolute()} {command}"
    dag = "etl" if (settings.dags_folder / "etl.py").exists() else "DAG"
    lines = [
        f"DAGs      {shown(settings.dags_folder)}{examples}",
        f"Home      {shown(settings.home)}",
        f"Database  {place}",
        f"Health    {health_url}/monitor/health" if health_url else "Health    no port; see EVERTICK_HEALTH",
        "Try in another terminal" + (", with EVERTICK_DATABASE_URL set:" if settings.database_url else ":"),
        f"  {command} dags list",
        f"  {command} runs list",
        f"  {command} dags trigger {dag} --wait",
        f"  {command} users link admin    (another link to sign in)",
        "",
    ]
    return "\n".join(lines)


def program(found: str | None, called: str) -> str:
    """How to call this program from another terminal, in the same folder. `found`: its file on the PATH of this process,
    to which `uvx` adds a folder of its cache, which no other terminal has."""
    if found is None:
        return called if not called.endswith(".py") else f"{sys.executable} -m evertick"
    return (
        found if any(re.fullmatch(r"(archive|environments)-v\d+", part) for part in Path(found).parts) else "evertick"
    )


async def _supervise(supervisor: Supervisor, settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup the terminal may close while the work continues.
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, _stop, supervisor)
    with with_advice(settings.database_url or PostgresDirectory(settings.home).url):
        await supervisor.run()
    # All children have ended. If this process still waits for something, it prints the stack and exits.
    faulthandler.dump_traceback_later(LONGEST_END_SECONDS, exit=True)


def _stop(supervisor: Supervisor) -> None:
    """The first signal stops all children gracefully, the second one kills them."""
    if supervisor.stop.is_set():
        for child in supervisor.children:
            if child.process is not None and child.process.returncode is None:
                with suppress(ProcessLookupError):
                    child.process.kill()
    supervisor.stop.set()


def _say(line: str) -> None:
    # The reader of the output may be gone while the work continues.
    with suppress(OSError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
