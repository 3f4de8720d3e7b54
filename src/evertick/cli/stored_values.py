"""`evertick variables`, `connections` and `secrets`: set, get, list, delete. A value never stands on a command line unless it is
no secret: it is read from standard input, or asked for without showing it.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli import far_values
from evertick.cli.connection import actor, ask, change
from evertick.cli.documents import print_json
from evertick.cli.logins import chosen_server
from evertick.cli.options import Json, Limit, Yes
from evertick.cli.prompt import confirm
from evertick.cli.tables import Cell, hint, line, show, table
from evertick.config import read_settings
from evertick.db.queries import secrets as store
from evertick.db.queries.secrets import ValueRow
from evertick.domain.durations import relative
from evertick.domain.errors import UserError
from evertick.domain.stored_values import ValueKind, check_name, read_connection
from evertick.engine import secrets as verb
from evertick.secrets.keyring import load_keyring
from evertick.secrets.masking import SHORTEST

Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name, as tasks declare it.")]
Description = Annotated[str | None, typer.Option("--description", help="What it is for; shown in lists.")]
Reveal = Annotated[bool, typer.Option("--reveal", help="Show what is secret in it.")]


def add_commands(app: typer.Typer, kind: ValueKind) -> None:
    """The four commands that all kinds have; what differs is what may be shown."""
    example = {ValueKind.VARIABLE: "region", ValueKind.CONNECTION: "warehouse", ValueKind.SECRET: "token"}[kind]

    @app.command("set", epilog=f"Example: evertick {kind}s set {example} < value.txt")
    def set_value(name: Name, description: Description = None) -> None:
        put(kind, name, description)

    @app.command("get", epilog=f"Example: evertick {kind}s get {example}")
    def get_value(name: Name, reveal: Reveal = False, as_json: Json = False) -> None:
        get(kind, name, reveal=reveal, as_json=as_json)

    @app.command("list", epilog=f"Example: evertick {kind}s list")
    def list_values(limit: Limit = 1000, as_json: Json = False) -> None:
        show_list(kind, limit=limit, as_json=as_json)

    @app.command("delete", epilog=f"Example: evertick {kind}s delete {example}")
    def delete_value(name: Name, yes: Yes = False) -> None:
        confirm(f"Delete {kind} {name}?", yes=yes)
        change(
            lambda conn: verb.delete_value(conn, kind=kind, name=name, actor=actor()),
            far=lambda server: far_values.delete_value(server, kind, name),
        )
        show(line(f"Deleted {kind} {name}."))

    form = "an address such as postgresql://anna:PASSWORD@host/shop" if kind is ValueKind.CONNECTION else "its value"
    set_value.__doc__ = f"Set a {kind}: {form}, from standard input, or asked for."
    get_value.__doc__ = (
        "Show a variable." if kind is ValueKind.VARIABLE else f"Show a {kind}; what is secret in it only with --reveal."
    )
    list_values.__doc__ = f"List the {kind}s by name, never their values."
    delete_value.__doc__ = f"Delete a {kind}. Tasks that declare it fail from then on."
    for command in app.registered_commands:
        command.help = command.callback.__doc__ if command.callback and command.help is None else command.help


def put(kind: ValueKind, name: str, description: str | None) -> None:
    check_name(kind, name)  # before anybody types a value for nothing
    keyring = None if chosen_server() else load_keyring(read_settings())
    value = _read_value(kind, name)

    async def write(conn: AsyncConnection) -> bool:
        assert keyring is not None
        return await verb.put_value(
            conn, keyring, kind=kind, name=name, value=value, actor=actor(), description=description
        )

    is_new = change(write, far=lambda server: far_values.put_value(server, kind, name, value, description))
    show(line(f"{'Made' if is_new else 'Changed'} {kind} {name}."))
    if kind is ValueKind.SECRET and len(value) < SHORTEST:
        show(hint(f"It has fewer than {SHORTEST} characters, and is not hidden in logs: such a text is everywhere."))
    show(hint(f'A task gets it by declaring it: @task({kind}s=["{name}"])'))


def get(kind: ValueKind, name: str, *, reveal: bool, as_json: bool) -> None:
    async def read(conn: AsyncConnection) -> tuple[ValueRow, str | None]:
        row, value = await verb.read_value(conn, load_keyring(read_settings()), kind=kind, name=name)
        if kind is ValueKind.CONNECTION:
            connection = read_connection(value)
            return row, connection.uri if reveal else connection.shown
        return row, None if kind is ValueKind.SECRET and not reveal else value

    (row, shown), now = ask(read, far=lambda server: far_values.read_value(server, kind, name, reveal=reveal))
    if as_json:
        facts = {
            "name": name,
            "description": row.description,
            "changed_by": row.changed_by,
            "changed_at": row.changed_at,
        }
        print_json({**facts, "value": shown})
        return
    if shown is not None:
        typer.echo(shown)
        return
    show(line(f"{name} is set; changed {relative(row.changed_at, now)} by {row.changed_by}."))
    show(hint(f"Show it with: evertick secrets get {name} --reveal"))


def show_list(kind: ValueKind, *, limit: int, as_json: bool) -> None:
    rows, now = ask(
        lambda conn: store.list_all(conn, kind=kind, limit=limit),
        far=lambda server: far_values.list_values(server, kind)[:limit],
    )
    if as_json:
        fields = ("name", "description", "key_id", "changed_by", "changed_at")
        print_json({f"{kind}s": [{field: getattr(row, field) for field in fields} for row in rows]})
        return
    if not rows:
        show(hint(f"There are no {kind}s. Make one with: evertick {kind}s set NAME"))
        return
    cells: list[list[Cell]] = [
        [row.name, row.description, relative(row.changed_at, now), row.changed_by, row.key_id] for row in rows
    ]
    show(table(("NAME", "DESCRIPTION", "CHANGED", "BY", "KEY"), cells))


async def count_values(conn: AsyncConnection) -> int:
    return len(await store.list_all(conn, kind=None, limit=verb.MOST_VALUES))


def _read_value(kind: ValueKind, name: str) -> str:
    if sys.stdin.isatty():
        value: str = typer.prompt(f"Value of {kind} {name}", hide_input=kind is not ValueKind.VARIABLE)
        return value
    raw = sys.stdin.buffer.read(1024 * 1024)
    try:
        # One line is a value with the newline that a pipe adds; more than one is a text of its own.
        text = raw.decode()
    except UnicodeDecodeError:
        raise UserError(f"the {kind} is not text in UTF-8: encode it, for instance as base64.") from None
    return text.removesuffix("\n").removesuffix("\r") if text.count("\n") == 1 else text
