"""`evertick doctor`: what is wrong with this installation, why that matters, and what to do."""

from __future__ import annotations

import asyncio

import psycopg
import typer

from evertick.cli.documents import document, print_json
from evertick.cli.options import Json, noun
from evertick.cli.tables import hint, line, show
from evertick.config import Settings, read_settings
from evertick.domain.errors import EvertickError, InvalidSettings, PostgresUnavailable
from evertick.services.checkup import Finding, Grade, error, examine
from evertick.services.checkup_far import examine_far
from evertick.services.checkup_here import look_here
from evertick.services.checkup_releases import examine_releases
from evertick.services.checkup_storage import examine_logs
from evertick.services.postgres_home import own_database_url
from evertick.store.address import where
from evertick.store.db import Purpose, connect, telling
from evertick.store.migrate import status

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: evertick doctor")
def doctor(as_json: Json = False) -> None:
    """Look for what is wrong: the database and its settings, this machine, who leads and runs, secrets, the API's door.

    Each finding says why it matters and what to do. Changes nothing. Exit status 1 if there is an error, 0 for warnings.
    """
    found = _look()
    errors = [each for each in found if each.grade is Grade.ERROR]
    if as_json:
        print_json({"is_well": not errors, "findings": [document(each) for each in found]})
    else:
        _show(found)
    if errors:
        raise typer.Exit(1)


def _look() -> list[Finding]:
    try:
        settings = read_settings()
    except InvalidSettings as wrong:
        return [error("settings", str(wrong), "Nothing of Evertick starts so.", "Correct it where it is set.")]
    found = [*look_here(settings), *asyncio.run(_look_at_database(settings))]
    return sorted(found, key=lambda each: each.grade is not Grade.ERROR)


async def _look_at_database(settings: Settings) -> list[Finding]:
    try:
        # Of this machine, wherever commands go otherwise.
        url = own_database_url(settings)
        with telling(url):
            async with await connect(url, purpose=Purpose.READ) as conn:
                try:
                    schema = await status(conn)
                except psycopg.errors.InsufficientPrivilege as denied:
                    return [_no_rights(denied)]
                if schema.next_label:
                    return [_not_migrated(url, schema.next_label)]
                return await examine(
                    conn, settings, lambda its, _: examine_releases(its, schema), examine_far, examine_logs
                )
    except (PostgresUnavailable, EvertickError, psycopg.Error) as wrong:
        why = "Everything waits for the database: nothing is fired, run or shown."
        advice = "Start it, or correct EVERTICK_DATABASE_URL or EVERTICK_HOME."
        return [error("database", str(wrong), why, advice)]


def _no_rights(denied: psycopg.Error) -> Finding:
    return error(
        "no_rights",
        f"The login in EVERTICK_DATABASE_URL has no rights in the database: {str(denied).splitlines()[0]}.",
        "A service with this login does nothing but wait.",
        "Give it the role of its service: evertick db roles, and docs/howto/other-machines.md",
    )


def _not_migrated(url: str, first: str) -> Finding:
    return error(
        "migrations",
        f"The database at {where(url)} lacks migration {first}.",
        "This program and that schema do not fit each other: nothing starts.",
        "Run: evertick db migrate",
    )


def _show(found: list[Finding]) -> None:
    for each in found:
        style = "bold red" if each.grade is Grade.ERROR else "yellow"
        show(line(f"{each.grade}: {each.what}", style), line(f"  {each.why}"), hint(f"  {each.next_step}"))
    errors = sum(each.grade is Grade.ERROR for each in found)
    if not found:
        show(line("All is well."))
    else:
        show(hint(f"\n{noun(errors, 'error')}, {noun(len(found) - errors, 'warning')}."))
