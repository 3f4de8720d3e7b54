"""`evertick runners`: who runs tasks, and taking one out of service in peace."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli import far, far_fleet
from evertick.cli.connection import actor, ask, change, database_url
from evertick.cli.documents import document, print_json
from evertick.cli.errors import TIMED_OUT
from evertick.cli.options import Json, Limit, Timeout, noun, seconds_of
from evertick.cli.poll import poll
from evertick.cli.tables import Cell, hint, line, show, state, table
from evertick.config import read_settings
from evertick.db.notify import Channel
from evertick.db.queries import runners
from evertick.db.queries.runners import BusyRunner
from evertick.domain.attempt import session_text
from evertick.domain.durations import relative
from evertick.domain.errors import UserError
from evertick.engine import runners as verb

app = typer.Typer(no_args_is_help=True, add_completion=False)

Which = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUNNER]...", help="Its id, name or session, as `evertick runners list` shows them."),
]
All = Annotated[bool, typer.Option("--all", help="Every runner that is alive.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until nothing runs there any more.")]
Stop = Annotated[bool, typer.Option("--stop", help="Let it end once nothing runs there any more.")]

_MOST = 10_000


@app.callback()
def about() -> None:
    """Runners that are alive, and how busy they are."""


@app.command("list", epilog="Example: evertick runners list")
def list_runners(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the runners that are alive, with the queues and patterns that they serve and how many slots are taken."""
    found, now = ask(
        lambda conn: runners.list_busy(conn, limit=limit), far=lambda server: far_fleet.list_runners(server)[:limit]
    )
    if as_json:
        print_json({"runners": [_runner_document(each) for each in found]})
        return
    if not found:
        show(hint("No runner is alive, so nothing can run. Start one with: evertick runner (or all with: evertick up)"))
        return
    rows: list[list[Cell]] = []
    for each in found:
        name, how = each.name, state(_state_of(each))
        place: list[Cell] = [f"{each.busy}/{each.slots}", ", ".join(each.queues), each.executor]
        place += [", ".join(each.match) or None, each.host, each.pid]
        times: list[Cell] = [relative(each.started_at, now), relative(each.beat_at, now)]
        rows.append([each.runner_id, name, how, *place, *times, each.version, session_text(each.session)])
    titles = ("STATE", "#BUSY", "QUEUES", "EXECUTOR", "MATCH", "HOST", "#PID")
    show(table(("RUNNER", "NAME", *titles, "STARTED", "HEARTBEAT", "VERSION", "SESSION"), rows))


@app.command("drain", epilog="Example: evertick runners drain gpu-1 --wait")
def drain(
    runner: Which = None, every: All = False, wait: Wait = False, stop: Stop = False, timeout: Timeout = None
) -> None:
    """Take runners out of service: each takes no new work and finishes what it has.

    It stays, drained, until it is stopped or undrained; with --stop it ends. An id or name that several carry means all
    of them. With --wait the exit status is 0 when they are done, 124 for a timeout.
    """
    within_seconds = seconds_of(timeout)
    if within_seconds is not None and not wait:
        raise UserError("--timeout limits a wait: add --wait.")

    _refuse_unclear(runner, is_all=every)

    async def ask_them(conn: AsyncConnection) -> list[BusyRunner]:
        found = await _meant(conn, runner, is_all=every)
        sessions = [each.session for each in found]
        await verb.drain(conn, sessions=sessions, actor=actor(), then_leave=stop)
        return found

    found = change(
        ask_them, Channel.STOP, far=lambda server: far_fleet.drain(server, runner, is_all=every, then_leave=stop)
    )
    _tell(found, "drains, and ends when it has nothing to do" if stop else "drains")
    if wait and found and not _wait_until_idle({each.session for each in found}, within_seconds):
        show(line("They are not done yet; they go on draining."))
        raise typer.Exit(TIMED_OUT)
    if wait and found:
        show(line("Nothing runs there any more."))
    elif found:
        show(hint("Follow it with: evertick runners list. Take it back with: evertick runners undrain"))


@app.command("undrain", epilog="Example: evertick runners undrain gpu-1")
def undrain(runner: Which = None, every: All = False) -> None:
    """Let runners take work again that were drained."""
    _refuse_unclear(runner, is_all=every)

    async def ask_them(conn: AsyncConnection) -> list[BusyRunner]:
        found = await _meant(conn, runner, is_all=every)
        asked = await verb.undrain(conn, sessions=[each.session for each in found], actor=actor())
        return [each for each in found if each.session in asked]

    found = change(ask_them, Channel.STOP, far=lambda server: far_fleet.undrain(server, runner, is_all=every))
    _tell(found, "takes work again")
    if not found:
        show(line("None of them was drained."))


def _refuse_unclear(which: list[str] | None, *, is_all: bool) -> None:
    if is_all == bool(which):
        raise UserError("Name a runner, or all of them with --all. `evertick runners list` shows who is alive.")


async def _meant(conn: AsyncConnection, which: list[str] | None, *, is_all: bool) -> list[BusyRunner]:
    return await runners.list_busy(conn, limit=_MOST) if is_all else await verb.find_runners(conn, which or [])


def _tell(found: list[BusyRunner], what: str) -> None:
    for each in found:
        running = f" ({noun(each.busy, 'task')} running)" if each.busy else ""
        show(line(f"Runner {each.runner_id} (session {session_text(each.session)}) {what}{running}."))


def _wait_until_idle(sessions: set[int], within_seconds: float | None) -> bool:
    if (server := far.far_server()) is not None:
        return far.look_until_over(
            lambda: not any(each.busy for each in far_fleet.list_runners(server) if each.session in sessions),
            within_seconds=within_seconds,
        )

    async def are_idle(conn: AsyncConnection) -> bool:
        alive = await runners.list_busy(conn, limit=_MOST)
        return not any(each.busy for each in alive if each.session in sessions)

    return asyncio.run(poll(database_url(read_settings()), are_idle, within_seconds=within_seconds))


def _state_of(runner: BusyRunner) -> str:
    if runner.request is not None:
        return "draining" if runner.busy else "idle (drained)"
    return "busy" if runner.busy else "idle"


def _runner_document(runner: BusyRunner) -> dict[str, object]:
    """A session is 63 bits, more than a number in JavaScript holds."""
    return {**document(runner), "session": session_text(runner.session), "state": _state_of(runner)}
