"""`evertick doctor`: find problems of this installation, with the reason and the next step."""

from __future__ import annotations

import asyncio
from typing import Annotated

import psycopg
import typer

from evertick.cli.app import Single
from evertick.cli.options import Json, noun
from evertick.cli.output import document, hint, line, print_json, show
from evertick.config import Settings, read_settings
from evertick.db.connect import Purpose, connect, with_advice
from evertick.db.connection import where
from evertick.db.migrate import status
from evertick.doctor.database import Finding, Severity, error, examine, examine_logs, examine_releases, examine_remote
from evertick.doctor.machine import examine_machine
from evertick.doctor.runner import examine_runner
from evertick.doctor.security import check_access, check_configuration
from evertick.domain.errors import EvertickError, InvalidSettings, PostgresUnavailable
from evertick.supervisor.postgres_home import own_database_url

app = Single()

Security = Annotated[bool, typer.Option("--security", help="List what is weak instead, though it works.")]


@app.command(epilog="Example: evertick doctor")
def doctor(security: Security = False, as_json: Json = False) -> None:
    """Check the database and its settings, this machine, the leader and the runners, secrets, and access to the API.

    Each finding has its reason and the next step. Changes nothing. Exit status 1 if there is an error, 0 for warnings.
    """
    found = _examine(security)
    errors = [each for each in found if each.grade is Severity.ERROR]
    if as_json:
        print_json({"is_well": not errors, "findings": [document(each) for each in found]})
    else:
        _show(found)
    if errors:
        raise typer.Exit(1)


def _examine(security: bool) -> list[Finding]:
    try:
        settings = read_settings()
    except InvalidSettings as wrong:
        return [error("settings", str(wrong), "Nothing of Evertick starts so.", "Correct it where it is set.")]
    found = [*check_configuration(settings)] if security else [*examine_machine(settings), *examine_runner(settings)]
    # A machine with a runner over HTTPS needs no database.
    if settings.runner_server is None or settings.database_url is not None:
        found += asyncio.run(_examine_database(settings, security))
    return sorted(found, key=lambda each: each.grade is not Severity.ERROR)


async def _examine_database(settings: Settings, security: bool) -> list[Finding]:
    try:
        # The database of this machine, even if a server is selected.
        url = own_database_url(settings)
        with with_advice(url):
            async with await connect(url, purpose=Purpose.READ) as conn:
                try:
                    schema = await status(conn)
                except psycopg.errors.InsufficientPrivilege as denied:
                    return [_no_rights(denied)]
                if schema.next_label:
                    return [_not_migrated(url, schema.next_label)]
                if security:
                    return [each async for each in check_access(conn, settings)]
                return await examine(
                    conn, settings, lambda its, _: examine_releases(its, schema), examine_remote, examine_logs
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
        style = "bold red" if each.grade is Severity.ERROR else "yellow"
        show(line(f"{each.grade}: {each.what}", style), line(f"  {each.why}"), hint(f"  {each.next_step}"))
    errors = sum(each.grade is Severity.ERROR for each in found)
    if not found:
        show(line("All is well."))
    else:
        show(hint(f"\n{noun(errors, 'error')}, {noun(len(found) - errors, 'warning')}."))
