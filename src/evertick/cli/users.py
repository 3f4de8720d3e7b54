"""`evertick users`: who may use the API. Whoever reaches the database may do this; a server lets only admins."""

from __future__ import annotations

from typing import Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli import far_access
from evertick.cli.connection import actor, ask, change
from evertick.cli.documents import document, print_json
from evertick.cli.logins import chosen_server
from evertick.cli.options import Json, Limit
from evertick.cli.tables import Cell, hint, line, show, state, table
from evertick.config import read_settings
from evertick.db.queries import accounts as accounts_queries
from evertick.domain.access import Role
from evertick.domain.durations import relative
from evertick.domain.errors import UserError
from evertick.engine import accounts
from evertick.engine.public_access import is_loopback
from evertick.runtime.listen_socket import DEFAULT_PORT

app = typer.Typer(no_args_is_help=True, add_completion=False)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The user's name.")]
RoleOption = Annotated[Role, typer.Option("--role", help="What it may do; see docs/reference/permissions.md.")]
NewRole = Annotated[Role | None, typer.Option("--role", help="What it may do from now on.")]
Tags = Annotated[
    list[str] | None, typer.Option("--tag", metavar="TAG", help="Only DAGs with this tag; give it once for each.")
]
AllTags = Annotated[bool, typer.Option("--all-dags", help="Every DAG again, whatever its tags.")]
Disabled = Annotated[
    bool | None,
    typer.Option("--disable/--enable", help="Shut it out: its sessions and tokens end. Or let it in again."),
]
NoPassword = Annotated[bool, typer.Option("--no-password", help="For a program: it comes with tokens only.")]


@app.callback()
def about() -> None:
    """Users of the API, and what they may."""


@app.command("list", epilog="Example: evertick users list")
def list_users(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the users: role, tags, and whether each has a password."""
    found, now = ask(
        lambda conn: accounts_queries.list_accounts(conn, limit=limit),
        far=lambda server: far_access.list_users(server, limit),
    )
    if as_json:
        rows = [
            {**document(each, without=["account_id", "password_hash"]), "has_password": each.password_hash is not None}
            for each in found
        ]
        print_json({"users": rows})
        return
    if not found:
        show(hint("No users yet. `evertick up` makes the first one; or: evertick users add NAME --role admin"))
        return
    cells: list[list[Cell]] = []
    for each in found:
        how = state("failed", "disabled") if each.is_disabled else state("success", "active")
        has = "yes" if each.password_hash else "no"
        cells.append(
            [each.name, how, each.role, ", ".join(each.tags or []) or None, has, relative(each.created_at, now)]
        )
    show(table(("USER", "STATUS", "ROLE", "TAGS", "PASSWORD", "CREATED"), cells))


@app.command("add", epilog="Example: evertick users add ci --role operator --no-password")
def add(name: Name, role: RoleOption = Role.VIEWER, tag: Tags = None, no_password: NoPassword = False) -> None:
    """Add a user. Asks for a password, unless it is a program that comes with tokens."""
    password = None if no_password else _ask_password(name)
    wanted = {"name": name, "role": role, "tags": tag, "password": password}
    change(
        lambda conn: accounts.add_user(conn, name=name, role=role, tags=tag, password=password, actor=actor()),
        far=lambda server: far_access.add_user(server, wanted),
    )
    show(line(f"Added user {name} ({role})."))
    if no_password:
        show(hint(f"Give it a token with: evertick tokens create {name} NAME"))


@app.command("set", epilog="Example: evertick users set ci --role viewer --tag finance")
def set_user(
    name: Name, role: NewRole = None, tag: Tags = None, all_dags: AllTags = False, disabled: Disabled = None
) -> None:
    """Change what a user may, or shut it out. What you do not say stays as it is."""
    if role is None and tag is None and not all_dags and disabled is None:
        raise UserError("Say what to change: --role, --tag, --all-dags, --disable or --enable.")
    if tag and all_dags:
        raise UserError("--tag limits it to some DAGs and --all-dags lifts that: give one of them.")

    async def write(conn: AsyncConnection) -> None:
        await accounts.change_user(
            conn, name=name, role=role, tags=tag, all_tags=all_dags, disabled=disabled, actor=actor()
        )

    wanted = {"role": role, "tags": tag, "all_dags": all_dags, "is_disabled": disabled}
    change(write, far=lambda server: far_access.change_user(server, name, wanted))
    show(line(f"Changed user {name}."))


@app.command("password", epilog="Example: evertick users password admin")
def password(name: Name) -> None:
    """Set a user's password. Asks for it; all of the user's sessions and tokens end."""
    ask(lambda conn: accounts.find_user(conn, name), far=lambda server: far_access.find_user(server, name))
    wanted = _ask_password(name)
    change(
        lambda conn: accounts.set_password(conn, name=name, password=wanted, actor=actor()),
        far=lambda server: far_access.change_user(server, name, {"password": wanted}),
    )
    show(line(f"Set the password of {name}. Its sessions and tokens have ended."))


@app.command("link", epilog="Example: evertick users link admin")
def link(name: Name) -> None:
    """Print a path to sign in with, once and within the hour; open it at the API's address."""

    async def write(conn: AsyncConnection) -> str:
        row = await accounts.find_user(conn, name)
        made = await accounts.issue(conn, row, kind="link", name="link", actor=actor(), seconds=accounts.LINK_SECONDS)
        return f"/auth/link/{made.secret}"

    path = change(write, far=lambda server: far_access.make_link(server, name))
    show(line(path))
    settings = read_settings()
    host = settings.api_host if is_loopback(settings.api_host) else "127.0.0.1"
    address = chosen_server() or f"http://{host}:{settings.api_port or DEFAULT_PORT}"
    show(hint(f"At the API's address: {address}{path}"))


def _ask_password(name: str) -> str:
    """Also from a pipe, for scripts: never from an argument, which others can see."""
    found: str = typer.prompt(f"Password for {name}", hide_input=True, confirmation_prompt=True, err=True)
    return found
