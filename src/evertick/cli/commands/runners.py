"""`evertick runners`, `queues`, `shards` and `routing`: list them, drain runners, set the number of shards, try routing rules."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from evertick.cli.app import Group
from evertick.cli.errors import TIMED_OUT
from evertick.cli.options import Json, Limit, Timeout, duration, noun
from evertick.cli.output import Cell, document, hint, line, print_json, show, show_list, state, table
from evertick.client.connect import Client, call, open_client, read_pages, refuse_server
from evertick.client.local import database_url, opened
from evertick.config import read_settings
from evertick.db.connect import Purpose
from evertick.db.notify import Channel
from evertick.db.queries import dags
from evertick.db.queries.dags import PublishedRoute
from evertick.db.queries.runners import QueueRow
from evertick.db.queries.shards import MOST_COUNTED, ShardRow
from evertick.domain.durations import length, relative
from evertick.domain.errors import EvertickError, UserError
from evertick.domain.routing import Address, Routing, Tried, address_text, read_address, route, try_rules
from evertick.domain.schedules.time_zones import DAY_SECONDS
from evertick.engine.runner_tokens import TOKEN_DAYS
from evertick.engine.shards import set_shards
from evertick.operations import launchers as launchers_operations
from evertick.operations import runner_tokens as tokens_operations
from evertick.operations import runners as operations
from evertick.operations.caller import Caller
from evertick.operations.launchers import FleetStatus
from evertick.operations.paging import MOST_LISTED
from evertick.operations.runner_tokens import NewRunnerToken, RunnerToken
from evertick.operations.runners import MOST_QUEUED, DrainRunnersRequest, RunnerStatus, UndrainRequest
from evertick.publisher.routing_file import load_routing

runners = Group()
tokens = Group()
runners.add_typer(tokens, name="token", help="Create, list and revoke join tokens of runners over HTTPS.")
launchers = Group()
queues = Group()
shards = Group()
routing = Group()

Which = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUNNER", help="Its id, name or session, as `evertick runners list` shows them."),
]
All = Annotated[bool, typer.Option("--all", help="All live runners.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until their attempts have ended.")]
Stop = Annotated[bool, typer.Option("--stop", help="End each runner when its attempts have ended.")]
TokenQueues = Annotated[str, typer.Option("--queues", metavar="A,B", help="The queues that its runners may serve.")]
TokenName = Annotated[str, typer.Option("--name", metavar="NAME", help="What it is for, in lists and the audit log.")]
Expires = Annotated[float | None, duration("--expires", "How long runners can join with it, and work; by default 30d.")]
TokenNumber = Annotated[int, typer.Argument(metavar="TOKEN", help="Its number in `evertick runners token list`.")]
Count = Annotated[int, typer.Argument(metavar="COUNT", help="New number of shards, 1 to 64.")]
File = Annotated[
    Path | None, typer.Option("--file", metavar="TOML", help="File with the rules, instead of EVERTICK_ROUTING_FILE.")
]
TaskName = Annotated[str, typer.Argument(metavar="DAG::TASK", help="The task's full name, with its groups in between.")]

_RUNNER_COLUMNS = (
    *("RUNNER", "NAME", "STATE", "#BUSY", "#TRIGGERS", "QUEUES", "EXECUTOR", "TRANSPORT", "PATTERNS"),
    *("HOST", "#PID", "STARTED", "HEARTBEAT", "VERSION", "SESSION"),
)


# Runners --------------------------------------------------------------------------------------------------------------


@runners.command("list", epilog="Example: evertick runners list")
def list_runners_command(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the live runners, with their queues and patterns, the slots that are taken, and the triggers that they run."""
    found, now = read_pages(operations.list_runners, limit)

    def cells(it: RunnerStatus) -> list[Cell]:
        place: list[Cell] = [
            f"{it.busy}/{it.slots}",
            it.triggers or None,
            ", ".join(it.queues),
            it.executor,
            it.transport,
            ", ".join(it.match) or None,
        ]
        times = [relative(it.started_at, now), relative(it.beat_at, now)]
        return [it.runner_id, it.name, state(_state_of(it)), *place, it.host, it.pid, *times, it.version, it.session]

    show_list(
        "runners",
        found,
        _RUNNER_COLUMNS,
        cells,
        as_json=as_json,
        empty="No runner is alive, so nothing can run. Start one with: evertick runner (or all with: evertick up)",
        to_json=lambda each: {**document(each), "state": _state_of(each)},
    )


@runners.command("drain", epilog="Example: evertick runners drain gpu-1 --wait")
def drain_command(
    runner: Which = None, every: All = False, wait: Wait = False, stop: Stop = False, timeout: Timeout = None
) -> None:
    """Take runners out of service: each takes no new work and finishes its attempts.

    A drained runner stays alive until it is stopped or undrained; with --stop it ends. An id or name of
    several runners means all of them. With --wait the exit status is 0 when they have finished, and 124 after a timeout.
    """
    if timeout is not None and not wait:
        raise UserError("--timeout limits a wait: add --wait.")
    _refuse_unclear(runner, is_all=every)
    with open_client() as client:
        wanted = DrainRunnersRequest(runners=runner or (), is_all=every, then_leave=stop)
        found = client.call(operations.drain_runners, body=wanted).runners
        _show_each(found, "drains, and ends when its attempts have ended" if stop else "drains")
        if wait and found:
            _wait_until_idle(client, found, timeout)
        elif found:
            show(hint("Follow it with: evertick runners list. Undo it with: evertick runners undrain"))


@runners.command("undrain", epilog="Example: evertick runners undrain gpu-1")
def undrain_command(runner: Which = None, every: All = False) -> None:
    """Let drained runners take work again."""
    _refuse_unclear(runner, is_all=every)
    found = call(operations.undrain_runners, body=UndrainRequest(runners=runner or (), is_all=every)).runners
    _show_each(found, "takes work again")
    if not found:
        show(line("None of them was drained."))


def _refuse_unclear(which: Sequence[str] | None, *, is_all: bool) -> None:
    if is_all == bool(which):
        raise UserError("Name a runner, or all of them with --all. List live runners with `evertick runners list`.")


def _show_each(found: Sequence[RunnerStatus], what: str) -> None:
    for each in found:
        running = f" ({noun(each.busy, 'task')} running)" if each.busy else ""
        show(line(f"Runner {each.runner_id} (session {each.session}) {what}{running}."))


def _wait_until_idle(client: Client, found: Sequence[RunnerStatus], within_seconds: float | None) -> None:
    sessions = {each.session for each in found}

    def are_idle() -> bool:
        alive = client.pages(operations.list_runners, MOST_LISTED)
        return not any(each.busy for each in alive if each.session in sessions)

    if not client.poll(are_idle, within_seconds=within_seconds):
        show(line("They have not finished yet and are still draining."))
        raise typer.Exit(TIMED_OUT)
    show(line("All of their attempts have ended."))


def _state_of(runner: RunnerStatus) -> str:
    if runner.request is not None:
        return "draining" if runner.busy else "idle (drained)"
    return "busy" if runner.busy else "idle"


# Join tokens ----------------------------------------------------------------------------------------------------------


@tokens.command("create", epilog="Example: evertick runners token create --queues gpu --expires 7d > token")
def create_token_command(queues: TokenQueues, name: TokenName = "runners", expires: Expires = None) -> None:
    """Create a join token for runners over HTTPS, and print it. It is shown only once.

    Write it to a file that only the runner can read, and start: evertick runner --server URL --token-file FILE
    """
    wanted = [part.strip() for part in queues.split(",") if part.strip()]
    days = TOKEN_DAYS if expires is None else expires / DAY_SECONDS
    body = NewRunnerToken(name=name, queues=wanted, days=days)
    made = call(tokens_operations.create_runner_token, body=body)
    show(line(made.secret))
    until, served = f"{made.token.expires_at:%Y-%m-%d %H:%M} UTC", ", ".join(made.token.queues)
    # Not with the token itself, which is often redirected to a file.
    sys.stderr.write(f"Token {made.token.token_id} ({made.token.name}) for {served}, valid until {until}.\n")


@tokens.command("list", epilog="Example: evertick runners token list")
def list_tokens_command(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the join tokens that were not revoked, and how many live runners joined with each."""
    found, now = read_pages(tokens_operations.list_runner_tokens, limit)

    def cells(it: RunnerToken) -> list[Cell]:
        ends: Cell = state("failed", "expired") if it.is_expired else relative(it.expires_at, now)
        used = relative(it.used_at, now) if it.used_at else "never"
        return [it.token_id, it.name, ", ".join(it.queues), ends, it.runners, used, it.used_from, it.created_by]

    show_list(
        "tokens",
        found,
        ("#TOKEN", "NAME", "QUEUES", "EXPIRES", "#RUNNERS", "USED", "FROM", "CREATED BY"),
        cells,
        as_json=as_json,
        empty="There is no join token. Create one with: evertick runners token create --queues default",
    )


@tokens.command("revoke", epilog="Example: evertick runners token revoke 3")
def revoke_token_command(token: TokenNumber) -> None:
    """Revoke a join token. Its runners take no new work from now on, and end with their last task."""
    revoked = call(tokens_operations.revoke_runner_token, token_id=token)
    show(line(f"Token {token} is revoked; {noun(revoked.runners, 'runner')} will end."))


# Fleets of launched runners --------------------------------------------------------------------------------------------


_FLEET_COLUMNS = (
    "FLEET",
    "ENGINE",
    "QUEUES",
    "#DESIRED",
    "#STARTING",
    "#RUNNING",
    "#DRAINING",
    "#MIN",
    "#MAX",
    "LAUNCHER",
)


@launchers.command("list", epilog="Example: evertick launchers list")
def list_launchers_command(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the fleets: the runners that their queues need, those that start, run and drain, and why one does not run."""
    found, now = read_pages(launchers_operations.list_launchers, limit)

    def cells(it: FleetStatus) -> list[Cell]:
        counts: list[Cell] = [it.desired, it.starting, it.running, it.draining, it.min, it.max]
        leader: Cell = it.leader if it.is_led else state("failed", "none")
        return [it.fleet, it.engine, ", ".join(it.queues), *counts, leader]

    show_list(
        "launchers",
        found,
        _FLEET_COLUMNS,
        cells,
        as_json=as_json,
        empty="No launcher has led a fleet yet. Start one with: evertick launcher --fleets fleets.toml",
    )
    for fleet in () if as_json else found:
        if fleet.trouble:
            show(line(f"Fleet {fleet.fleet} can start no runner: {fleet.trouble}"))
        for each in fleet.runners:
            said = f": {each.reason}" if each.reason else ""
            show(line(f"{each.name} {each.state} (requested {relative(each.requested_at, now)}){said}"))


# Queues ---------------------------------------------------------------------------------------------------------------


@queues.command("list", epilog="Example: evertick queues list")
def list_queues_command(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the queues: queued tasks, how long the oldest waits, running tasks, and the live runners that serve the queue.

    A queue is listed if a task waits or runs there, a runner serves it, or a published task goes there.
    """
    found, now = read_pages(operations.list_queues, limit)
    show_list(
        "queues",
        found,
        ("QUEUE", "#QUEUED", "OLDEST", "#RUNNING", "#SLOTS", "RUNNERS"),
        lambda each: [each.queue, *_queue_cells(each, now)],
        as_json=as_json,
        empty="No queue is in use: no DAG is published and no runner is alive. Start with: evertick up",
        to_json=lambda each: {**document(each), "oldest_wait_seconds": _waited_seconds(each, now)},
    )
    unserved = [each.queue for each in found if each.depth and not each.runners]
    if unserved and not as_json:
        show(hint(f"No runner serves {', '.join(unserved)}. Start one with: evertick runner --queues {unserved[0]}"))


def _queue_cells(queue: QueueRow, now: datetime) -> list[Cell]:
    depth = f"{queue.depth:,}" + ("+" if queue.depth >= MOST_QUEUED else "")
    waited = _waited_seconds(queue, now)
    return [depth, None if waited is None else length(waited), queue.running, queue.slots, _runners_of(queue)]


def _runners_of(queue: QueueRow) -> Cell:
    if not queue.runners:
        return state("failed", "none") if queue.depth else "none"
    notes = []
    if queue.specialised:
        notes.append(f"{queue.specialised} only for some names")
    if queue.draining:
        notes.append(f"{queue.draining} draining")
    return f"{queue.runners}{' (' + ', '.join(notes) + ')' if notes else ''}"


def _waited_seconds(queue: QueueRow, now: datetime) -> float | None:
    return None if queue.oldest_at is None else max((now - queue.oldest_at).total_seconds(), 0.0)


# Shards ---------------------------------------------------------------------------------------------------------------


@shards.command("list", epilog="Example: evertick shards list")
def list_shards_command(as_json: Json = False) -> None:
    """List the shards: their leaders, since when, how many DAGs they have, and how many rows must still move."""
    found, now = read_pages(operations.list_shards, MOST_LISTED)
    if as_json:
        return print_json({"shards": found})
    rows = [_shard_cells(each, now) for each in found]
    show(table(("SHARD", "STATE", "LEADER", "SINCE", "#EPOCH", "#DAGS", "#TO MOVE"), rows))
    if unled := [str(each.shard) for each in found if not each.is_live]:
        which = f"shard{'' if len(unled) == 1 else 's'} {', '.join(unled)}"
        show(hint(f"No scheduler leads {which}, so nothing fires there. Start one with: evertick scheduler"))


# A negative number would otherwise be taken for an option, and the reason would be hidden.
@shards.command("set", epilog="Example: evertick shards set 4", context_settings={"ignore_unknown_options": True})
def set_shards_command(count: Count) -> None:
    """Set the number of shards, at any time. DAGs move while all services run; no fire is lost or late."""
    refuse_server()
    call(_set_shards, count=count)
    show(line(f"{noun(count, 'shard')} from now on."))
    show(hint("The schedulers take over their shards and move the DAGs. Follow it with: evertick shards list"))


# Not an operation: a server must not offer it.
async def _set_shards(caller: Caller, *, count: int) -> None:
    async with caller.write(Channel.LEADER, Channel.SCHEDULE) as conn:
        await set_shards(conn, shards=count, actor=caller.actor)


def _shard_cells(each: ShardRow, now: datetime) -> list[Cell]:
    leader: Cell = each.owner if each.is_live else state("failed", "none")
    since = relative(each.led_since, now) if each.led_since is not None and each.is_live else None
    moves = f"{each.misplaced:,}" + ("+" if each.misplaced >= MOST_COUNTED else "")
    return [str(each.shard), each.state, leader, since, each.epoch, each.dags, moves]


# Routing rules --------------------------------------------------------------------------------------------------------


@routing.command("list", epilog="Example: evertick routing list --file routing.toml")
def list_rules_command(file: File = None, as_json: Json = False) -> None:
    """List the rules in the order in which they are tried. The first rule that matches wins; the default comes last.

    A file that cannot be read, or with a rule that can never match, is refused with the reason.
    """
    rules, source = _rules(file)
    if as_json:
        shown = [{"match": rule.pattern.text, "queue": rule.queue} for rule in rules.rules]
        return print_json({"file": source, "rules": shown, "default": rules.default})
    rows: list[list[Cell]] = [
        [str(number), rule.pattern.text, rule.queue] for number, rule in enumerate(rules.rules, start=1)
    ]
    show(table(("RULE", "PATTERN", "QUEUE"), [*rows, ["default", None, rules.default]]))
    if source is None:
        show(hint("There are no rules, because EVERTICK_ROUTING_FILE is not set. Tasks go to the default queue."))


@routing.command("explain", epilog="Example: evertick routing explain etl::load")
def explain_command(task: TaskName, file: File = None, as_json: Json = False) -> None:
    """Show the queue that the rules give a task, the rule that matched, and why the others did not.

    If the database can be reached, the task's own `queue=` is shown, too: it takes precedence over all rules.
    """
    address = read_address(task)
    rules, source = _rules(file)
    tried, queue = try_rules(rules, address), route(rules, address)
    now = _published(address)
    # A queue in the DAG file takes precedence; it is known only for published DAGs.
    written = now.written if now is not None else None
    if as_json:
        return print_json(
            {
                "task": address_text(address),
                "file": source,
                "queue": written or queue,
                "decided_by": "task" if written else _decider(tried),
                "rules": [document(each) for each in tried],
                "default": rules.default,
                "published": document(now) if now else None,
            }
        )
    name = address_text(address)
    if written:
        show(line(f"{name} goes to queue {written}: its own queue= takes precedence over the rules."))
    else:
        show(line(f"{name} goes to queue {queue}, by {_decider(tried)}."))
    rows: list[list[Cell]] = [[str(each.number), each.match, each.queue, _verdict(each)] for each in tried]
    is_default = not any(each.is_first for each in tried)
    last: list[Cell] = ["default", None, rules.default, state("success", "taken") if is_default else "not reached"]
    show(table(("RULE", "PATTERN", "QUEUE", "VERDICT"), [*rows, last]))
    show(hint(_compare(now, written or queue)))


def _rules(file: Path | None) -> tuple[Routing, str | None]:
    chosen = file or read_settings().routing_file
    return load_routing(chosen), str(chosen) if chosen else None


def _decider(tried: list[Tried]) -> str:
    return next((f"rule {each.number}" for each in tried if each.is_first), "default")


def _verdict(tried: Tried) -> Cell:
    if tried.is_first:
        return state("success", "matches")
    return f"no: {tried.why_not}" if tried.why_not else "would match, but an earlier rule did"


def _published(address: Address) -> PublishedRoute | None:
    """The published task, or None if there is none or the database cannot be reached."""

    async def read() -> PublishedRoute | None:
        async with opened(database_url(read_settings()), Purpose.READ) as conn:
            return await dags.published_route(conn, dag=address[0], task=".".join(address[1:]))

    try:
        return asyncio.run(read())
    except EvertickError:
        return None


def _compare(now: PublishedRoute | None, queue: str) -> str:
    if now is None:
        return "The task is not published in a database that this command can reach, so its own queue= is not known."
    if now.queue == queue:
        return f"The published version uses queue {now.queue}."
    return f"The published version uses queue {now.queue}: the publisher uses other rules than these."
