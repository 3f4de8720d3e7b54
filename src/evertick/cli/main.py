"""`evertick`: the entry point. Knows the name and the summary of every command, and loads only the called one.

Must never import anything that only some commands need: every service starts through here.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any, cast

import typer
from typer.main import get_command

from evertick.cli.app import PlainGroup, UsageProblem
from evertick.cli.errors import EXIT_STATUS, INTERRUPTED, foreseen
from evertick.domain.errors import BrokenFiles

# The module below `evertick.cli.commands`, and the summary. In a module with several apps the name of the app follows:
# "module:app".
Command = tuple[str, str]

_RUN: dict[str, Command] = {
    "up": ("up", "Start everything: PostgreSQL, scheduler, runner, API, and your DAGs. Ctrl-C stops it."),
    "init": ("init", "Create a project with an example DAG, its tests and their checks."),
    "scheduler": ("services:scheduler_app", "Run one scheduler; more of them stand by."),
    "runner": ("services:runner_app", "Run one runner: it claims tasks and executes them."),
    "launcher": ("services:launcher_app", "Start runners on an engine, as many as their queues need."),
    "agent": ("services:agent_app", "Run one attempt on another machine; executors start it."),
    "publisher": ("services:publisher_app", "Watch a folder or a git repository, and publish the DAGs in it."),
    "deploy": ("deploy", "Publish a folder of DAGs as a whole, here or on a server."),
    "deployments": (
        "deploy:deployments_app",
        "List, show, compare, roll back and delete deployments, the sources of DAGs.",
    ),
    "airflow": ("airflow", "Run DAG files of Airflow: check a folder, import values, set up an environment."),
    "envs": ("envs", "Manage the Python environments of DAG files on this machine: list, build, prune."),
    "health": ("health", "Show the health of this installation; exit status 1 if a part is unhealthy."),
    "config": ("config", "Show and check the settings: show, check."),
    "doctor": ("doctor", "Find problems of this installation, and how to solve them."),
    "prove": ("prove", "Check every guarantee on the database: fires, runs, attempts, queues, gates."),
    "guarantees": ("prove:guarantees_app", "Show what the leader has checked of the guarantees, and any violation."),
    "db": ("db", "Migrate and prune the database, make its roles, or show its status."),
    "api": ("services:api_app", "Serve the web pages and the HTTP API."),
    "mcp": ("services:mcp_app", "Serve tools for MCP clients over standard input and output."),
    "users": ("users", "Manage users of the API: list, add, set, password, link."),
    "tokens": ("users:tokens_app", "Manage tokens for the API: list, create, revoke."),
    "login": ("users:login_app", "Sign in at a server, for --server."),
    "logout": ("users:logout_app", "Sign out at a server."),
    "servers": ("users:servers_app", "Show the servers that you are signed in to, side by side."),
    "audit": ("users:audit_app", "Show the audit log: actions and refusals, with time, actor and origin."),
}
_MANAGE: dict[str, Command] = {
    "dags": ("dags", "Manage DAGs: list, show, validate, pause, unpause, trigger, delete, versions, diff, rollback."),
    "runs": ("runs", "Inspect and control runs: list, show, watch, cancel, clear."),
    "tasks": ("tasks", "Inspect and control the tasks of a run: list, show, why, logs, clear, mark."),
    "schedules": (
        "schedules",
        "Manage schedules: list, next, explain, simulate, set, pause, unpause, delete, reset, history, skips.",
    ),
    "backfills": ("backfills", "Create runs for a past date range: create, list, show, pause, unpause, cancel."),
    "blocked": ("tasks:blocked_app", "List what blocks the most tasks now."),
    "checkins": ("monitoring.checkins", "Expect reports of jobs that run elsewhere: list, set, report, delete."),
    "figures": ("monitoring.figures", "Show what runs and tasks take, how long they wait, and how often they fail."),
    "forecast": ("monitoring.forecast", "Predict when runs and tasks end, missed deadlines, and load."),
    "pools": ("gates:pools", "Manage pools, slots that tasks share: list, show, set, delete."),
    "keys": ("gates:keys", "Show mutex keys and limits in use: their holders, and the tasks that wait."),
    "events": ("waits:events_app", "Send and list events that tasks wait for."),
    "dead-letters": ("waits:dead_letters_app", "List, show and replay requests that could not become a run."),
    "webhooks": (
        "waits:webhooks_app",
        "Manage webhooks, through which other programs send signed events: set, list, delete.",
    ),
    "assets": ("waits:assets_app", "List and update data assets."),
    "approvals": ("waits:approvals_app", "List, approve and reject the approvals that tasks wait for."),
    "state": ("values:state_app", "List, get, set and delete what tasks and assets keep between runs."),
    "variables": ("values:variables", "Manage variables, values that tasks declare: set, get, list, delete."),
    "connections": ("values:connections", "Manage connections, addresses with passwords: set, get, list, delete."),
    "secrets": ("values:secrets", "Manage secrets, stored encrypted: set, get, list, delete, rotate."),
    "queues": ("runners:queues", "List queues: the tasks that wait, how long, and the runners that serve them."),
    "routing": ("runners:routing", "List routing rules, and show which rule matches a task."),
    "alerts": ("alerts", "List missed deadlines: schedules that did not fire, late runs and tasks."),
    "notifications": ("alerts:notifications_app", "List, show, retry and test notifications."),
    "quarantine": ("alerts:quarantine_app", "List runs, schedules and DAGs suspended after repeated errors."),
    "shards": (
        "runners:shards",
        "List shards, parts of the DAGs with one leading scheduler each, or set their number.",
    ),
    "launchers": (
        "runners:launchers",
        "List fleets: the runners that launchers have started, and why one does not run.",
    ),
    "runners": ("runners:runners", "List live runners and how busy they are, drain and undrain them."),
}
COMMANDS = _RUN | _MANAGE

# These commands work on this machine: they refuse a server's address.
HERE_ONLY = {
    *(
        "up",
        "init",
        "agent",
        "scheduler",
        "runner",
        "launcher",
        "publisher",
        "api",
        "envs",
        "health",
        "config",
        "doctor",
    ),
    *("prove", "login", "logout", "servers", "airflow"),
}


class _LazyGroup(PlainGroup):
    """Shows all commands by their summaries, and imports a command's module when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        command = COMMANDS[str(name)]
        # Nothing that an import makes is garbage: looking for some takes a tenth of a command's time.
        gc.disable()
        try:
            found = get_command(load_app(command))
        finally:
            gc.enable()
        found.help = found.help or command[1]
        return name, found, rest


def load_app(command: Command) -> typer.Typer:
    module, _, app = command[0].partition(":")
    return cast("typer.Typer", getattr(import_module(f"evertick.cli.commands.{module}"), app or "app"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    return run(lambda: get_command(_app()).main(args=arguments, prog_name="evertick", standalone_mode=False))


def run(command: Callable[[], object]) -> int:
    """The exit status of a command. No foreseen error ends in a traceback."""
    try:
        status = command()
    except typer.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except UsageProblem as error:
        return _refuse_usage(error)
    except OSError as error:
        _say(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return EXIT_STATUS["error"]
    except BaseException as error:
        found = foreseen(error)
        if found is None:
            raise
        # Several broken files are one error with a line for each.
        _say(str(found), has_lines=found.code == BrokenFiles.code)
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
    for panel, commands in (("Run Evertick", _RUN), ("Inspect and manage", _MANAGE)):
        for name, (_, summary) in commands.items():
            app.command(name, help=summary, rich_help_panel=panel)(_loaded_when_called)
    return app


def _evertick(
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="URL",
            help="Use this server instead of the database: its address, or its name; see `evertick login`.",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and the commit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """A workflow and job scheduler that never dies and is on time.

    Start with `evertick up`, then continue with `evertick dags list` and `evertick runs list` in another terminal.
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
        typer.echo(f"evertick {import_module('evertick.release').release()}")
        raise typer.Exit


def _loaded_when_called() -> None:
    raise AssertionError("the group puts the real command in this one's place")


def _refuse_usage(error: Any) -> int:
    """Report a parse error. Without a message it was a bare group, whose help is shown already."""
    if message := error.format_message():
        _say(message)
        if context := getattr(error, "ctx", None):
            sys.stderr.write(f"Try `{context.command_path} --help`.\n")
    return EXIT_STATUS["invalid"]


def _say(message: str, *, has_lines: bool = False) -> None:
    # Imported late: tables take 20 ms, and every service would pay.
    one_line = import_module("evertick.cli.output").one_line
    lines = [one_line(line) for line in (message.splitlines() if has_lines else [message])]
    sys.stderr.write("Error: " + "\n  ".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
