"""`evertick`: the entry point. Knows the name and the summary of every command, and loads only the called one.

Must never import anything that only some commands need: every service starts through here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command

from evertick.cli.errors import EXIT_STATUS, INTERRUPTED, foreseen
from evertick.cli.text import one_line

_RUN, _WORK = "Run Evertick", "See and change"


class _Command(NamedTuple):
    """`module` is below `evertick.cli`. In a module with several apps the name of the app follows: "module:app"."""

    module: str
    summary: str
    panel: str


COMMANDS = {
    "up": _Command(
        "commands.up", "Start everything: PostgreSQL, scheduler, runner, API, and your DAGs. Ctrl-C stops it.", _RUN
    ),
    "scheduler": _Command("commands.services:scheduler_app", "Run one scheduler; more of them stand by.", _RUN),
    "runner": _Command("commands.services:runner_app", "Run one runner: it claims tasks and executes them.", _RUN),
    "agent": _Command("commands.services:agent_app", "Run one attempt on another machine; executors start it.", _RUN),
    "publisher": _Command("commands.services:publisher_app", "Watch a folder and publish the DAGs in it.", _RUN),
    "deploy": _Command("commands.deploy", "Publish the DAGs of a folder once.", _RUN),
    "health": _Command(
        "commands.health", "Show the health of this installation; exit status 1 if a part is unhealthy.", _RUN
    ),
    "doctor": _Command("commands.doctor", "Find problems of this installation, and how to solve them.", _RUN),
    "db": _Command("commands.db", "Migrate and prune the database, or show its status.", _RUN),
    "api": _Command("commands.services:api_app", "Serve the HTTP API: the native one, and Airflow's.", _RUN),
    "users": _Command("commands.users", "Users of the API: list, add, set, password, link.", _RUN),
    "tokens": _Command("commands.users:tokens_app", "Tokens for the API: list, create, revoke.", _RUN),
    "login": _Command("commands.users:login_app", "Sign in at a server, for --server.", _RUN),
    "logout": _Command("commands.users:logout_app", "Sign out at a server.", _RUN),
    "audit": _Command(
        "commands.users:audit_app", "The audit log: actions and refusals, with actor, time and origin.", _RUN
    ),
    "dags": _Command(
        "commands.dags", "DAGs: list, show, validate, pause, unpause, trigger, delete, versions, diff, rollback.", _WORK
    ),
    "runs": _Command("commands.runs", "Runs: list, show, watch, cancel, clear.", _WORK),
    "tasks": _Command("commands.tasks", "Tasks of a run: list, show, why, logs, clear, mark.", _WORK),
    "schedules": _Command(
        "commands.schedules",
        "Schedules: list, next, explain, simulate, put, pause, unpause, delete, reset, history, skips.",
        _WORK,
    ),
    "backfill": _Command("commands.backfills", "Backfills: create, list, show, pause, resume, cancel.", _WORK),
    "blocked": _Command("commands.tasks:blocked_app", "What holds back the most work now.", _WORK),
    "pools": _Command("commands.gates:pools", "Pools: slots that tasks share; list, show, set, delete.", _WORK),
    "events": _Command("commands.waits:events_app", "Events that tasks wait for: send, list.", _WORK),
    "assets": _Command("commands.waits:assets_app", "Data assets: list, update.", _WORK),
    "approvals": _Command(
        "commands.waits:approvals_app", "Approvals that tasks wait for: list, approve, reject.", _WORK
    ),
    "keys": _Command(
        "commands.gates:keys", "Mutex keys and limits in use: their holders, and the tasks that wait.", _WORK
    ),
    "variables": _Command(
        "commands.values:variables", "Variables: values that tasks declare; set, get, list, delete.", _WORK
    ),
    "connections": _Command(
        "commands.values:connections", "Connections: addresses with passwords; set, get, list, delete.", _WORK
    ),
    "secrets": _Command("commands.values:secrets", "Secrets, stored encrypted: set, get, list, delete, rotate.", _WORK),
    "queues": _Command(
        "commands.runners:queues",
        "Queues: tasks that wait there, how long, and the runners that serve them.",
        _WORK,
    ),
    "route": _Command(
        "commands.runners:routing", "Routing rules: list them, and show which rule matches a task.", _WORK
    ),
    "alerts": _Command(
        "commands.alerts", "Schedules that did not fire, runs that did not start or finish, in time.", _WORK
    ),
    "notifications": _Command("commands.alerts:notifications_app", "Notifications: list, show, retry.", _WORK),
    "notify": _Command("commands.alerts:notify_app", "Test whether a webhook or email address works.", _WORK),
    "quarantine": _Command("commands.alerts:quarantine_app", "Runs, schedules and DAGs that fail every time.", _WORK),
    "shards": _Command(
        "commands.runners:shards", "Shards: parts of the DAGs, each with a leading scheduler; list, set.", _WORK
    ),
    "runners": _Command(
        "commands.runners:runners", "Live runners, and how busy they are; list, drain, undrain.", _WORK
    ),
}


# These commands work on this machine: they refuse a server's address.
HERE_ONLY = {"up", "agent", "scheduler", "runner", "publisher", "api", "health", "doctor", "login", "logout", "notify"}


class _LazyGroup(TyperGroup):
    """Shows all commands by their summaries, and imports a command's module when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, get_command(load_app(COMMANDS[str(name)])), rest


def load_app(command: _Command) -> typer.Typer:
    module, _, app = command.module.partition(":")
    found: typer.Typer = getattr(import_module(f"evertick.cli.{module}"), app or "app")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status. No foreseen error ends in a traceback."""
    try:
        status = get_command(_app()).main(args=arguments, prog_name="evertick", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except typer.TyperException as error:
        return _refuse_usage(error)
    except OSError as error:
        _say(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return EXIT_STATUS["error"]
    except BaseException as error:
        found = foreseen(error)
        if found is None:
            raise
        _say(one_line(str(found)))
        return EXIT_STATUS[found.code]
    return status if isinstance(status, int) else 0


def _app() -> typer.Typer:
    app = typer.Typer(
        cls=_LazyGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        epilog="Exit status: 0 done, 1 failed, 2 bad input, 3 canceled, 4 no usable database, 124 timeout, 130 Ctrl-C.",
    )
    app.callback()(_evertick)
    for name, command in COMMANDS.items():
        app.command(name, help=command.summary, rich_help_panel=command.panel)(_loaded_when_called)
    return app


def _evertick(
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(
            "--server", metavar="URL", help="Go to this server instead of the database; see `evertick login`."
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """A workflow and job scheduler that never dies and is on time.

    Start with `evertick up`, then look around with `evertick dags list` and `evertick runs list` in another terminal.
    """
    if server is not None and context.invoked_subcommand in HERE_ONLY:
        raise typer.BadParameter(
            f"`evertick {context.invoked_subcommand}` does not work through a server: leave --server out."
        )
    if server is not None:
        # Imported late: only commands with --server need it.
        import_module("evertick.client.credentials").SERVER_OPTION.set(server)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        # Imported late: it takes 20 ms, and every service child would pay.
        typer.echo(f"evertick {import_module('importlib.metadata').version('evertick')}")
        raise typer.Exit


def _loaded_when_called() -> None:
    raise AssertionError("the group puts the real command in this one's place")


def _refuse_usage(error: typer.TyperException) -> int:
    """What the parser did not understand. Without any message it was a bare group, whose help is shown already."""
    if message := error.format_message():
        _say(one_line(message))
        if context := getattr(error, "ctx", None):
            sys.stderr.write(f"Try `{context.command_path} --help`.\n")
    return EXIT_STATUS["invalid"]


def _say(message: str) -> None:
    sys.stderr.write(f"Error: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
