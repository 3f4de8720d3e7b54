"""`evertick audit`: what was done and what was refused."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from evertick.cli import far_access
from evertick.cli.connection import ask
from evertick.cli.documents import document, print_json
from evertick.cli.options import Json, Limit, run_number
from evertick.cli.tables import Cell, hint, show, table
from evertick.cli.times import clock
from evertick.db.queries import accounts
from evertick.db.queries.accounts import AuditFilter

app = typer.Typer(add_completion=False)

Verb = Annotated[str | None, typer.Option("--verb", help="Only this: trigger, cancel, mark, refuse, add_token …")]
Actor = Annotated[str | None, typer.Option("--actor", help="Only by this one, as user:alice or cli:alice.")]
Dag = Annotated[str | None, typer.Option("--dag", help="Only what was done to this DAG.")]
RunOption = Annotated[str | None, typer.Option("--run", help="Only what was done to this run.")]


@app.command(epilog="Example: evertick audit --verb refuse --limit 20")
def audit(
    verb: Verb = None,
    by: Actor = None,
    dag: Dag = None,
    run: RunOption = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """Show the audit log, newest first: who did what, when, from where, and what was refused."""
    wanted = AuditFilter(verb=verb, actor=by, dag=dag, run_id=None if run is None else run_number(run))
    found, _ = ask(
        lambda conn: accounts.audit(conn, wanted, limit=limit),
        far=lambda server: far_access.list_audit(server, wanted, limit),
    )
    if as_json:
        print_json({"entries": [document(each) for each in found]})
        return
    if not found:
        show(hint("Nothing is on record that fits."))
        return
    rows: list[list[Cell]] = []
    for each in found:
        what = each.dag or (f"run {each.run_id}" if each.run_id else None)
        rows.append([clock(each.occurred_at), each.verb, each.actor, each.origin, what, json.dumps(each.detail)])
    show(table(("WHEN", "WHAT", "BY", "FROM", "OF", "DETAIL"), rows))
