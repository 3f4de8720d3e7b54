"""`evertick tokens`: what programs prove themselves with. A token is shown once, when it is made."""

from __future__ import annotations

from typing import Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli import far_access
from evertick.cli.connection import actor, ask, change
from evertick.cli.documents import document, print_json
from evertick.cli.options import Json, Limit, Yes
from evertick.cli.prompt import confirm
from evertick.cli.tables import Cell, hint, line, show, table
from evertick.db.queries import accounts as accounts_queries
from evertick.domain.access import Role
from evertick.domain.durations import relative
from evertick.engine import accounts
from evertick.engine.accounts import Issued

app = typer.Typer(no_args_is_help=True, add_completion=False)

User = Annotated[str, typer.Argument(metavar="USER", help="Whose token it is.")]
UserFilter = Annotated[str | None, typer.Argument(metavar="[USER]", help="Only this user's.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="What it is for, as people will see it.")]
RoleOption = Annotated[Role | None, typer.Option("--role", help="At most this much, whatever its user may.")]
Tags = Annotated[
    list[str] | None, typer.Option("--tag", metavar="TAG", help="Only DAGs with this tag; give it once for each.")
]
Days = Annotated[float | None, typer.Option("--days", help="How long it lives: 90 days; 0 is for ever.")]
Number = Annotated[int, typer.Argument(metavar="ID", help="Its number, as `evertick tokens list` shows it.")]


@app.callback()
def about() -> None:
    """Tokens and sessions for the API."""


@app.command("list", epilog="Example: evertick tokens list ci")
def list_tokens(user: UserFilter = None, limit: Limit = 1000, as_json: Json = False) -> None:
    """List tokens and sessions that are valid: whose, what for, when last used and from where."""

    async def read(conn: AsyncConnection) -> list[accounts_queries.CredentialRow]:
        if user is not None:
            await accounts.find_user(conn, user)
        return await accounts_queries.list_credentials(conn, account=user, limit=limit)

    found, now = ask(read, far=lambda server: far_access.list_tokens(server, user, limit))
    if as_json:
        print_json({"tokens": [document(each, without=["revoked_at"]) for each in found]})
        return
    if not found:
        show(hint("No valid token. Make one with: evertick tokens create USER NAME"))
        return
    cells: list[list[Cell]] = []
    for each in found:
        limits = ", ".join([*([each.role] if each.role else []), *(each.tags or [])]) or None
        used = f"{relative(each.used_at, now)} from {each.used_from}" if each.used_at else None
        ends = relative(each.expires_at, now) if each.expires_at else "never"
        cells.append([each.credential_id, each.account, each.kind, each.name, limits, ends, used])
    show(table(("#ID", "USER", "KIND", "NAME", "AT MOST", "EXPIRES", "LAST USED"), cells))


@app.command("create", epilog="Example: evertick tokens create ci deploys --role operator --days 30")
def create(
    user: User, name: Name, role: RoleOption = None, tag: Tags = None, days: Days = None, as_json: Json = False
) -> None:
    """Make a token and print it: this is the only time that it is shown."""
    seconds = accounts.token_seconds(days)

    async def write(conn: AsyncConnection) -> Issued:
        row = await accounts.find_user(conn, user)
        return await accounts.issue(
            conn, row, kind="token", name=name, actor=actor(), seconds=seconds, limits=(role, tag)
        )

    wanted = {"user": user, "name": name, "role": role, "tags": tag, "days": days}
    made = change(write, far=lambda server: far_access.make_token(server, wanted))
    if as_json:
        print_json({"id": made.credential_id, "token": made.secret, "expires_at": made.expires_at})
        return
    show(line(made.secret))
    show(hint(f"Token {made.credential_id} of {user}. Send it as: Authorization: Bearer TOKEN. It is not shown again."))


@app.command("revoke", epilog="Example: evertick tokens revoke 12 --yes")
def revoke(number: Number, yes: Yes = False) -> None:
    """Revoke a token or end a session, at once."""
    confirm(f"Revoke token {number}?", yes=yes)
    change(
        lambda conn: accounts.revoke(conn, credential_id=number, actor=actor()),
        far=lambda server: far_access.revoke_token(server, number),
    )
    show(line(f"Revoked token {number}."))
