"""`evertick prove` and `evertick guarantees`: check the guarantees now, and show what the leader has checked."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from evertick.cli.app import Single
from evertick.cli.options import Json, Limit, moment
from evertick.cli.output import Cell, clock, console, document, heading, hint, line, print_json, show, table
from evertick.client.connect import read
from evertick.client.local import database_url, opened
from evertick.config import read_settings
from evertick.db.connect import Purpose
from evertick.domain.durations import relative
from evertick.domain.proofs import GUARANTEES, Check, Violation
from evertick.engine.proofs import positions_since, round_of
from evertick.operations.proofs import Guarantee, show_proof

app = Single()
guarantees_app = Single()

DEFAULT_SINCE = timedelta(days=7)
MOST_SHOWN = 50

Since = Annotated[
    datetime | None, moment("--since", "Check what has happened since then: a time, or an age such as 7d (default).")
]
Ended = Annotated[bool, typer.Option("--all", help="Also violations that no longer hold.")]


@app.command(epilog="Example: evertick prove --since 7d")
def prove(since: Since = None, as_json: Json = False) -> None:
    """Check every guarantee on the database of this machine: fires, triggers, runs, attempts, queues and gates.

    Changes nothing and locks nothing. Exit status 1 if a guarantee is violated.
    """
    checked, found = asyncio.run(_prove(since or datetime.now(UTC) - DEFAULT_SINCE))
    if as_json:
        rows = [{"name": check, "statement": text, "checked": checked[check]} for check, text in GUARANTEES.items()]
        print_json({"guarantees": rows, "violations": [document(each) for each in found]})
    else:
        _show(checked, found)
    if found:
        raise typer.Exit(1)


async def _prove(since: datetime) -> tuple[Counter[Check], list[Violation]]:
    checked: Counter[Check] = Counter()
    found: list[Violation] = []
    out = console()
    async with opened(database_url(read_settings()), Purpose.READ) as conn:
        with out.status("Checking …") as status:
            async for each in round_of(conn, await positions_since(conn, since)):
                checked.update(each.checked)
                found += each.found
                runs, fires = checked[Check.RUN_COUNTED_WRONG], checked[Check.FIRE_UNANSWERED]
                status.update(f"Checked {runs:,} ended runs and {fires:,} fires …")
    return checked, found


def _show(checked: Counter[Check], found: list[Violation]) -> None:
    violations = Counter(each.check for each in found)

    def cells(check: Check, text: str) -> list[Cell]:
        bad = violations[check]
        return [text, f"{checked[check]:,}", line(f"{bad:,}", "bold red" if bad else "green")]

    show(table(("GUARANTEE", "#CHECKED", "#VIOLATIONS"), [cells(*each) for each in GUARANTEES.items()]))
    if found:
        show(heading("Violations"))
        rows: list[list[Cell]] = [[each.check, each.subject, each.detail] for each in found[:MOST_SHOWN]]
        show(table(("CHECK", "SUBJECT", "VIOLATION"), rows))
        if len(found) > MOST_SHOWN:
            show(hint(f"and {len(found) - MOST_SHOWN:,} more; --json lists all of them."))
        show(hint("Please report this, with the output of `evertick prove --json`."))


@guarantees_app.command(epilog="Example: evertick guarantees --all")
def guarantees(everything: Ended = False, limit: Limit = 100, as_json: Json = False) -> None:
    """Show the guarantees that the leader checks continuously: how much was checked, when, and the violations."""
    proof, now = read(show_proof, with_ended=everything, limit=limit)
    if as_json:
        print_json(document(proof))
        return

    def cells(each: Guarantee) -> list[Cell]:
        return [
            each.statement,
            f"{each.checked:,}",
            line(f"{each.violations:,}", "bold red" if each.violations else "green"),
            relative(each.checked_at, now) if each.checked_at else "not yet",
        ]

    show(table(("GUARANTEE", "#CHECKED", "#VIOLATIONS", "LAST CHECK"), map(cells, proof.guarantees)))
    if proof.fires_proven_until:
        show(hint(f"Every fire until {clock(proof.fires_proven_until)} has been checked."))
    if proof.violations:
        show(heading("Violations"))
        rows: list[list[Cell]] = [
            [
                each.check_name,
                each.subject,
                each.detail,
                clock(each.found_at),
                clock(each.ended_at) if each.ended_at else None,
            ]
            for each in proof.violations
        ]
        show(table(("CHECK", "SUBJECT", "VIOLATION", "FOUND", "ENDED"), rows))
