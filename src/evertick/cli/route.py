"""`evertick route`: the routing rules, and which of them a task meets. Works without a database."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from evertick.cli.connection import database_url, opened
from evertick.cli.documents import document, print_json
from evertick.cli.options import Json
from evertick.cli.tables import Cell, hint, line, show, state, table
from evertick.config import read_settings
from evertick.db.connect import Purpose
from evertick.db.queries import dags
from evertick.db.queries.dags import PublishedRoute
from evertick.domain.errors import EvertickError
from evertick.domain.routing import Address, Routing, Tried, address_text, read_address, route, try_rules
from evertick.publisher.routing_file import load_routing

app = typer.Typer(no_args_is_help=True, add_completion=False)

File = Annotated[
    Path | None, typer.Option("--file", metavar="TOML", help="Rules to try; EVERTICK_ROUTING_FILE if left out.")
]
Name = Annotated[str, typer.Argument(metavar="DAG::TASK", help="The task's full name; groups stand between.")]


@app.callback()
def about() -> None:
    """Routing rules: list them, and see which one a task meets."""


@app.command("list", epilog="Example: evertick route list --file routing.toml")
def list_rules(file: File = None, as_json: Json = False) -> None:
    """List the rules in the order in which they are tried; the first that matches wins, the default comes last.

    A file with a rule that can never match, or that cannot be read, is refused with the reason.
    """
    routing, source = _rules(file)
    if as_json:
        rules = [{"match": rule.pattern.text, "queue": rule.queue} for rule in routing.rules]
        print_json({"file": source, "rules": rules, "default": routing.default})
        return
    rows: list[list[Cell]] = [
        [str(number), rule.pattern.text, rule.queue] for number, rule in enumerate(routing.rules, start=1)
    ]
    show(table(("RULE", "MATCH", "QUEUE"), [*rows, ["default", None, routing.default]]))
    if source is None:
        show(hint("No rules: EVERTICK_ROUTING_FILE names no file, so that tasks go to the default queue."))


@app.command("explain", epilog="Example: evertick route explain etl::load")
def explain(task: Name, file: File = None, as_json: Json = False) -> None:
    """Say which queue the rules give a task, which rule matched, and why the others did not.

    Where a database can be asked it also says what holds now: a task's own `queue=` wins over all rules.
    """
    address = read_address(task)
    routing, source = _rules(file)
    tried, queue = try_rules(routing, address), route(routing, address)
    now = _published(address)
    # What its author wrote wins, and is known only of what is published.
    written = now.written if now is not None else None
    if as_json:
        print_json(
            {
                "task": address_text(address),
                "file": source,
                "queue": written or queue,
                "decided_by": "task" if written else _decider(tried),
                "rules": [document(each) for each in tried],
                "default": routing.default,
                "published": document(now) if now else None,
            }
        )
        return
    _show(address, routing, tried, written)
    show(hint(_compare(now, written or queue)))


def _rules(file: Path | None) -> tuple[Routing, str | None]:
    chosen = file or read_settings().routing_file
    return load_routing(chosen), str(chosen) if chosen else None


def _decider(tried: list[Tried]) -> str:
    return next((f"rule {each.number}" for each in tried if each.is_first), "default")


def _show(address: Address, routing: Routing, tried: list[Tried], written: str | None) -> None:
    name = address_text(address)
    if written:
        show(line(f"{name} goes to queue {written}: its own queue= wins over the rules."))
    else:
        queue = next((each.queue for each in tried if each.is_first), routing.default)
        show(line(f"{name} goes to queue {queue}, by {_decider(tried)}."))
    rows: list[list[Cell]] = [[str(each.number), each.match, each.queue, _verdict(each)] for each in tried]
    is_default = not any(each.is_first for each in tried)
    last: list[Cell] = ["default", None, routing.default, state("success", "taken") if is_default else "not reached"]
    show(table(("RULE", "MATCH", "QUEUE", "VERDICT"), [*rows, last]))


def _verdict(tried: Tried) -> Cell:
    if tried.is_first:
        return state("success", "matches")
    return f"no: {tried.why_not}" if tried.why_not else "would match, but an earlier rule did"


def _published(address: Address) -> PublishedRoute | None:
    """What the database says of the task, if there is one to ask. The rules can be tried without."""

    async def read() -> PublishedRoute | None:
        async with opened(database_url(read_settings()), Purpose.READ) as conn:
            return await dags.published_route(conn, dag=address[0], task=".".join(address[1:]))

    try:
        return asyncio.run(read())
    except EvertickError:
        return None


def _compare(now: PublishedRoute | None, queue: str) -> str:
    if now is None:
        return "No such task is published where this command can look, so a queue= of its own is not known."
    if now.queue == queue:
        return f"Published: it waits in queue {now.queue} now."
    return f"Published: it waits in queue {now.queue} now. The publisher has other rules than these."
