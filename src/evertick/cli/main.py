"""`evertick`: the entry point. Knows the name and the summary of every command, and loads only the one that is called.

Must never import what only some command needs: every service child starts through here.
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
from evertick.cli.server_option import SERVER_OPTION
from evertick.cli.text import one_line

_RUN, _WORK = "Run Evertick", "See and change"


class _Command(NamedTuple):
    module: str
    summary: str
    panel: str


COMMANDS = {
    "up": _Command("up", "Start everything: PostgreSQL, scheduler, runner, API, and your DAGs. Ctrl-C stops it.", _RUN),
    "scheduler": _Command("scheduler", "Run one scheduler; more of them stand by.", _RUN),
    "runner": _Command("runner", "Run one runner: it claims tasks and executes them.", _RUN),
    "agent": _Command("agent", "Run one attempt in a remote place; executors start it.", _RUN),
    "publisher": _Command("publisher", "Watch a folder and publish the DAGs in it.", _RUN),
    "deploy": _Command("deploy", "Publish the DAGs of a folder once.", _RUN),
    "health": _Command("health", "See whether everything is well; exit status 1 if something is not.", _RUN),
    "doctor": _Command("doctor", "Find what is wrong with this installation, and what to do.", _RUN),
    "db": _Command("db", "Bring the database up to date, or see how it stands.", _RUN),
    "api": _Command("api", "Serve the HTTP API: the native one, and Airflow's.", _RUN),
    "users": _Command("users", "Users of the API: list, add, set, password, link.", _RUN),
    "tokens": _Command("tokens", "Tokens for the API: list, create, revoke.", _RUN),
    "login": _Command("login", "Sign in at a server, for --server.", _RUN),
    "logout": _Command("logout", "Sign out at a server.", _RUN),
    "audit": _Command("audit", "What was done and refused: who, when, from where.", _RUN),
    "dags": _Command(
        "dags", "DAGs: list, show, validate, pause, unpause, trigger, delete, versions, diff, rollback.", _WORK
    ),
    "runs": _Command("runs", "Runs: list, show, watch, cancel, clear.", _WORK),
    "tasks": _Command("tasks", "Tasks of a run: list, show, why, logs, clear, mark.", _WORK),
    "schedules": _Command(
        "schedules",
        "Schedules: list, next, explain, simulate, put, pause, unpause, delete, reset, history, skips.",
        _WORK,
    ),
    "backfill": _Command("backfill", "Backfills: create, list, show, pause, resume, cancel.", _WORK),
    "blocked": _Command("why", "What holds back the most work now.", _WORK),
    "pools": _Command("pools", "Pools: slots that tasks share; list, show, set, delete.", _WORK),
    "events": _Command("events", "Events that tasks wait for: send, list.", _WORK),
    "assets": _Command("assets", "Data assets: list them, tell of an update from outside.", _WORK),
    "approvals": _Command("approvals", "What tasks ask people: list, approve, reject.", _WORK),
    "keys": _Command("keys", "Mutex keys and limits in use: who holds them, who waits.", _WORK),
    "variables": _Command("variables", "Variables: values that tasks declare; set, get, list, delete.", _WORK),
    "connections": _Command("connections", "Connections: addresses with passwords; set, get, list, delete.", _WORK),
    "secrets": _Command("secrets", "Secrets, stored encrypted: set, get, list, delete, rotate.", _WORK),
    "queues": _Command("queues", "Queues: what waits there, how long, and who serves them.", _WORK),
    "route": _Command("route", "Routing rules: list them, and see which one a task meets.", _WORK),
    "alerts": _Command("alerts", "Schedules that did not fire, runs that did not start or finish, in time.", _WORK),
    "notifications": _Command(
        "notifications", "Notifications: what was told to whom, what waits, what failed; list, show, retry.", _WORK
    ),
    "notify": _Command("notify", "Try whether a webhook or e-mail address works.", _WORK),
    "quarantine": _Command("quarantine", "What was set aside because it fails every time.", _WORK),
    "shards": _Command("shards", "Shards: who leads which part of the DAGs; list, set.", _WORK),
    "runners": _Command("runners", "Runners that are alive, and how busy they are.", _WORK),
}


# What they do happens on this machine: they have no use for a server's address, and must not seem to.
HERE_ONLY = {"up", "agent", "scheduler", "runner", "publisher", "api", "health", "doctor", "login", "logout", "notify"}


class _LazyGroup(TyperGroup):
    """Shows all commands by their summaries, and imports a command's module when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        module = import_module(f"evertick.cli.{COMMANDS[str(name)].module}")
        return name, get_command(module.app), rest


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
    SERVER_OPTION.set(server)


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
