"""`evertick scheduler`, `runner`, `launcher`, `publisher`, `api`, `agent` and `mcp`: one service in this process.

Each command imports only its own service. The agent loads neither a database driver nor a web framework.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evertick.cli.app import Single
from evertick.cli.options import duration
from evertick.config import LOCAL, Settings, read_settings, user_environment
from evertick.domain.errors import InvalidSettings

if TYPE_CHECKING:
    from evertick.observability.logging import Log
    from evertick.supervisor.service import BackgroundTask, MakeService

scheduler_app = Single()
runner_app = Single()
publisher_app = Single()
api_app = Single()
agent_app = Single()
launcher_app = Single()
mcp_app = Single()

AllowTrigger = Annotated[bool, typer.Option("--allow-trigger", help="Also offer trigger_run, which starts runs.")]

Queues = Annotated[str | None, typer.Option("--queues", metavar="A,B", help="The queues to serve.")]
TaskPatterns = Annotated[
    str | None,
    typer.Option("--task-patterns", metavar="A,B", help="Only tasks whose names match, such as 'ml::*,heavy_*'."),
]
Slots = Annotated[int | None, typer.Option("--slots", help="The number of tasks that run at once.")]
ApiHost = Annotated[
    str | None,
    typer.Option(
        "--host", help="The address on which the API listens; addresses other than localhost require a password."
    ),
]
ApiPort = Annotated[
    int | None, typer.Option("--port", min=0, max=65_535, help="The API's port; 8080, or any if that is taken.")
]
Executor = Annotated[
    str | None, typer.Option("--executor", metavar="NAME", help="local, process, kubernetes, or your module:factory.")
]
Id = Annotated[str | None, typer.Option("--id", metavar="ID", help="A readable id; host and pid by default.")]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="A display name, not unique.")]
Dags = Annotated[Path | None, typer.Option("--dags", metavar="FOLDER", help="The folder to watch.")]
Deployment = Annotated[
    str | None, typer.Option("--name", help="Name of the deployment that owns the DAGs; by default 'default'.")
]
GitUrl = Annotated[
    str | None,
    typer.Option(
        "--git", metavar="URL", help="Follow this repository instead of a folder. Without a password or token."
    ),
]
GitRef = Annotated[str | None, typer.Option("--ref", metavar="REF", help="Its branch or tag; by default main.")]
GitPath = Annotated[
    str | None, typer.Option("--path", metavar="FOLDER", help="The folder in it with the DAGs; by default dags.")
]
GitSecret = Annotated[
    str | None,
    typer.Option(
        "--git-secret", metavar="NAME", help="The stored secret with a token, user:password or private SSH key."
    ),
]
WebhookSecret = Annotated[
    str | None,
    typer.Option(
        "--webhook-secret", metavar="NAME", help="The stored secret of its push webhook; see docs/howto/deploy.md."
    ),
]
PollSeconds = Annotated[
    float | None, duration("--poll", "Interval of the check for new commits without a webhook; by default 30s.")
]
TokenFile = Annotated[Path | None, typer.Option("--token-file", metavar="FILE", help="The file with the start token.")]
Server = Annotated[
    str | None,
    typer.Option("--server", metavar="URL", help="Work over HTTPS for the Evertick there, without a database."),
]
JoinTokenFile = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="The file with the join token, for --server.")
]
CaFile = Annotated[
    Path | None, typer.Option("--ca-file", metavar="FILE", help="The certificate authorities to trust, for --server.")
]
OutcomeFile = Annotated[Path | None, typer.Option("--outcome-file", metavar="FILE", help="The file for the outcome.")]

Fleets = Annotated[
    Path | None,
    typer.Option("--fleets", metavar="TOML", help="The file with the fleets; EVERTICK_FLEETS_FILE by default."),
]
Idle = Annotated[float | None, duration("--idle", "Leave after so long without work, such as 5m; by default it stays.")]
Until = Annotated[
    float | None, duration("--until", "Take new work for so long, such as 8h, and leave with the last task.")
]

# By name: the API imports the framework and the pages with its first request.
APPLICATION = "evertick.ui.app"
# The modules that each command below imports when it is called.
_IMPORTS = {
    "scheduler": ("evertick.supervisor.service", "evertick.scheduler.scheduler", "evertick.scheduler.telemetry"),
    "runner": ("evertick.supervisor.service", "evertick.runner.runner"),
    "publisher": ("evertick.supervisor.service", "evertick.publisher.publisher"),
    "api": ("evertick.supervisor.service", "evertick.api.service"),
    "launcher": ("evertick.supervisor.service", "evertick.launcher.launcher"),
    "agent": ("evertick.agent.agent",),
}


def preload(service: str) -> None:
    """Import all that the command of this service imports: services that are forked afterwards share its memory."""
    for name in _IMPORTS[service]:
        import_module(name)


@scheduler_app.command(epilog="Example: EVERTICK_DATABASE_URL=postgresql://db/evertick evertick scheduler")
def scheduler() -> None:
    """Run one scheduler. It fires schedules and repairs inconsistencies after crashes. More schedulers stand by."""
    from evertick.processes.identity import process_name
    from evertick.scheduler.scheduler import Scheduler
    from evertick.scheduler.telemetry import QueueDepth

    settings = read_settings()
    _serve(
        "scheduler",
        settings,
        lambda url, log: Scheduler(settings, url=url, owner=process_name(), log=log),
        background=[
            lambda url, log: QueueDepth(url, log=log).run(),
            lambda url, log: _trace(settings, url, log),
            lambda url, log: _ping(settings, url, log),
        ],
    )


def _serve(
    name: str,
    settings: Settings,
    make: MakeService,
    *,
    background: Sequence[BackgroundTask] = (),
    server: str | None = None,
) -> None:
    from evertick.supervisor.service import serve

    if not serve(name, settings, make, background=background, server=server):
        raise typer.Exit(1)


async def _ping(settings: Settings, url: str, log: Log) -> None:
    """Ping a monitor, if one is set."""
    if settings.ping_url is not None:
        from evertick.scheduler.ping import Ping

        await Ping(settings, url=url, target=settings.ping_url, log=log).run()


async def _trace(settings: Settings, url: str, log: Log) -> None:
    """Send traces, if a collector is set."""
    from evertick.scheduler.telemetry import Tracing, make_spans

    make = make_spans(settings.otlp_endpoint, log) if settings.otlp_endpoint else None
    if make is not None:
        await Tracing(url, make=make, log=log).run()


@runner_app.command(epilog="Example: evertick runner --queues default,gpu --task-patterns 'ml::*' --slots 8 --id gpu-1")
def runner(
    queues: Queues = None,
    task_patterns: TaskPatterns = None,
    slots: Slots = None,
    executor: Executor = None,
    readable_id: Id = None,
    name: Name = None,
    server: Server = None,
    token_file: JoinTokenFile = None,
    ca_file: CaFile = None,
    idle: Idle = None,
    until: Until = None,
) -> None:
    """Run one runner. It claims tasks and executes each in its own process.

    With --executor it submits them to that executor: each runs next to an agent, and this runner supervises it.
    With --server it needs no database: it joins with a token of `evertick runners token create`, over HTTPS.

    SIGTERM or Ctrl-C lets running tasks end within the grace period and returns the rest; a second one returns all at
    once.
    """

    settings = read_settings(
        runner_queues=_names(queues),
        runner_task_patterns=_names(task_patterns),
        runner_slots=slots,
        executor=executor,
        runner_id=readable_id,
        runner_name=name,
        runner_server=server,
        runner_token_file=token_file,
        runner_ca_file=ca_file,
        runner_idle_seconds=idle,
        runner_until_seconds=until,
    )
    if settings.runner_server is not None:
        return _serve_over_https(settings, settings.runner_server)
    if settings.executor == LOCAL:
        from evertick.runner.runner import Runner

        _serve("runner", settings, lambda url, log: Runner(settings, url=url, log=log, environment=user_environment()))
    else:
        from evertick.runner.remote.session import make_remote_runner

        _serve("runner", settings, lambda url, log: make_remote_runner(settings, url=url, log=log))


def _serve_over_https(settings: Settings, server: str) -> None:
    from evertick.runner.http_api import join_token
    from evertick.runner.runner import Runner
    from evertick.runtime.http_client import HttpEndpoint

    if settings.executor != LOCAL:
        raise InvalidSettings("A runner with --server runs its tasks itself: leave out --executor.")
    # Before anything starts: a wrong address, token file or CA file is the user's to correct.
    HttpEndpoint(server, ca_file=settings.runner_ca_file)
    join_token(settings)
    _serve(
        "runner",
        settings,
        lambda url, log: Runner(settings, url=url, log=log, environment=user_environment()),
        server=server,
    )


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


@publisher_app.command(epilog="Example: evertick publisher --git https://git.example.com/team/flows.git --name team")
def publisher(
    dags: Dags = None,
    name: Deployment = None,
    git: GitUrl = None,
    ref: GitRef = None,
    path: GitPath = None,
    git_secret: GitSecret = None,
    webhook_secret: WebhookSecret = None,
    poll: PollSeconds = None,
) -> None:
    """Watch a folder and publish its DAGs after every change of a file, or follow a branch of a git repository.

    A commit is published as a whole, or not at all. Run one publisher for each repository, with a --name of its own.
    """
    settings = read_settings(
        dags_folder=dags,
        deployment=name,
        git_url=git,
        git_ref=ref,
        git_path=path,
        git_secret=git_secret,
        git_webhook_secret=webhook_secret,
        git_poll_seconds=poll,
    )
    visible = user_environment()
    if dags is not None and settings.git_url is not None:
        raise InvalidSettings(
            "A publisher watches a folder or follows a repository: leave out --dags, or --git and EVERTICK_GIT_URL."
        )
    if settings.git_url is not None:
        from evertick.publisher.git import GitPublisher

        return _serve(
            "publisher", settings, lambda url, log: GitPublisher(settings, url=url, environment=visible, log=log)
        )
    from evertick.publisher.publisher import Publisher

    _serve("publisher", settings, lambda url, log: Publisher(settings, url=url, environment=visible, log=log))


@api_app.command(epilog="Example: evertick api --port 8080")
def api(host: ApiHost = None, port: ApiPort = None) -> None:
    """Serve the web pages and the HTTP API: /api/v1, Airflow's /api/v2, and signing in. It loads with the first request."""
    from evertick.api.service import Api

    settings = read_settings(api_host=host, api_port=port)
    _serve("api", settings, lambda url, log: Api(settings, url=url, log=log, application=APPLICATION))


@launcher_app.command(epilog="Example: evertick launcher --fleets fleets.toml")
def launcher(fleets: Fleets = None) -> None:
    """Start runners on Docker, Podman, Slurm, Ray or Kubernetes, as many as their queues need, and end them by draining.

    One launcher leads each fleet; more of them stand by. Launched runners keep running when it stops.
    """
    from evertick.launcher.launcher import Launcher
    from evertick.processes.identity import process_name

    settings = read_settings(fleets_file=fleets)
    _serve("launcher", settings, lambda url, log: Launcher(settings, url=url, owner=process_name(), log=log))


@agent_app.command(
    epilog="Example: EVERTICK_SERVER=https://evertick.example.com evertick agent --token-file /run/evertick/token"
)
def agent(token_file: TokenFile = None, outcome_file: OutcomeFile = None) -> None:
    """Run one attempt of a task here, and report it to the API at EVERTICK_SERVER. An executor starts it.

    The start token comes from a file or from EVERTICK_AGENT_TOKEN, never as an argument, which others can see.
    SIGTERM lets the attempt end within the grace period and returns it; a second one returns it at once.
    Exit status: 0 done, 1 failed, 3 canceled or returned, 4 the API could not be reached, 5 the attempt was taken away.
    """
    from evertick.agent.agent import leave_refusal, read_start_token

    place = outcome_file
    try:
        settings = read_settings(agent_token_file=token_file, agent_outcome_file=outcome_file)
        place = settings.agent_outcome_file
        if not settings.server:
            raise InvalidSettings("an agent needs the address of the API: set EVERTICK_SERVER.")
        status = asyncio.run(_run_agent(settings, settings.server, read_start_token(settings)))
    except InvalidSettings as error:
        leave_refusal(place, str(error))
        raise
    raise typer.Exit(status)


async def _run_agent(settings: Settings, server: str, token: str) -> int:
    from evertick.agent.agent import Agent
    from evertick.observability.logging import configure
    from evertick.processes.identity import process_name

    log = configure(service="agent", owner=process_name(), as_json=settings.log == "json")
    made = Agent(settings, server=server, token=token, log=log, environment=user_environment())

    def stop() -> None:
        if made.stop.is_set():
            made.hurry.set()
        made.stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return await made.run()


# The services that `evertick up` runs, with their options from the settings.
COMMANDS: Mapping[str, Callable[[], None]] = {
    "scheduler": scheduler,
    "runner": runner,
    "publisher": publisher,
    "api": api,
    "launcher": launcher,
}


@mcp_app.command(epilog="Example: evertick mcp --allow-trigger")
def mcp(allow_trigger: AllowTrigger = False) -> None:
    """Serve tools for MCP clients on standard input and output, here or for a server. Reads only by default."""
    import_module("evertick.client.mcp").serve(allows_writes=allow_trigger)
