"""`evertick users`, `tokens`, `audit`, `login` and `logout`: access to the API.

Access to the database grants every right here; a server requires the rights of its user.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, cast
from urllib.parse import urlsplit

import typer

from evertick.cli.app import Group, Single
from evertick.cli.options import Json, Limit, Yes, confirm, read_number
from evertick.cli.output import Cell, clock, document, hint, line, print_json, show, show_list, state, table
from evertick.client.connect import call, open_client, read_pages
from evertick.client.credentials import (
    NAME,
    StoredLogin,
    chosen_server,
    find_address,
    keep_login,
    read_address,
    read_logins,
)
from evertick.config import read_settings
from evertick.db.queries.accounts import AuditEntry
from evertick.domain.access import Role
from evertick.domain.durations import relative
from evertick.domain.errors import EvertickError, UserError
from evertick.engine.accounts import TOKEN_DAYS
from evertick.observability.health_endpoint import living_notes
from evertick.operations import runners, users
from evertick.operations.users import NewToken, NewUser, Token, User, UserChange
from evertick.runtime.listen_socket import API_NOTES, DEFAULT_PORT

if TYPE_CHECKING:
    from evertick.client.http import HttpClient

app = Group()
tokens_app = Group()
audit_app = Single()
login_app = Single()
logout_app = Single()
servers_app = Single()

UserName = Annotated[str, typer.Argument(metavar="NAME", help="The user's name.")]
NewRole = Annotated[Role, typer.Option("--role", help="The user's role; see docs/reference/permissions.md.")]
OtherRole = Annotated[Role | None, typer.Option("--role", help="The user's new role.")]
Tags = Annotated[
    list[str] | None, typer.Option("--tag", metavar="TAG", help="Only DAGs with this tag; repeat for several.")
]
AllDags = Annotated[bool, typer.Option("--all-dags", help="All DAGs again, whatever their tags.")]
Disabled = Annotated[
    bool | None,
    typer.Option("--disable/--enable", help="Disable the user, which ends all sessions and tokens, or enable it."),
]
NoPassword = Annotated[bool, typer.Option("--no-password", help="A user that only uses tokens, as a program does.")]
TokenUser = Annotated[str, typer.Argument(metavar="USER", help="The user of the token.")]
UserFilter = Annotated[str | None, typer.Argument(metavar="USER", help="Only tokens of this user.")]
TokenName = Annotated[str, typer.Argument(metavar="NAME", help="The purpose of the token, as lists show it.")]
MostRole = Annotated[Role | None, typer.Option("--role", help="Limit the token to this role.")]
Days = Annotated[float | None, typer.Option("--days", help="Lifetime in days: 90 by default; 0 = never expires.")]
TokenNumber = Annotated[int, typer.Argument(metavar="ID", help="Its number, as `evertick tokens list` shows it.")]
Verb = Annotated[str | None, typer.Option("--verb", help="Only this action: trigger, cancel, refuse, add_token …")]
Actor = Annotated[str | None, typer.Option("--actor", help="Only by this actor, as user:alice or cli:alice.")]
DagFilter = Annotated[str | None, typer.Option("--dag", help="Only about this DAG.")]
RunFilter = Annotated[int | None, typer.Option("--run", parser=read_number, help="Only about this run.")]
Address = Annotated[str, typer.Argument(metavar="URL", help="The server: https://evertick.example.com:8080")]
LoginUser = Annotated[str | None, typer.Option("--user", "-u", help="The user's name; asked for if left out.")]
ServerAddress = Annotated[str, typer.Argument(metavar="URL", help="The server's address, or its name.")]
ServerName = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="A short name for the server, for --server.")
]
WithToken = Annotated[
    bool, typer.Option("--token", help="Sign in with a token instead of a password: asked for, or from a pipe.")
]


@app.command("list", epilog="Example: evertick users list")
def list_users_command(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the users with their roles, their tags, and whether they have a password."""
    found, now = read_pages(users.list_users, limit)
    columns = ("USER", "STATUS", "ROLE", "TAGS", "PASSWORD", "CREATED")

    def cells(each: User) -> list[Cell]:
        status = state("failed", "disabled") if each.is_disabled else state("success", "active")
        password = "yes" if each.has_password else "no"
        return [
            each.name,
            status,
            each.role,
            ", ".join(each.tags or []) or None,
            password,
            relative(each.created_at, now),
        ]

    empty = "No users yet. `evertick up` makes the first one; or: evertick users add NAME --role admin"
    show_list("users", found, columns, cells, as_json=as_json, empty=empty)


@app.command("add", epilog="Example: evertick users add ci --role operator --no-password")
def add_command(name: UserName, role: NewRole = Role.VIEWER, tag: Tags = None, no_password: NoPassword = False) -> None:
    """Add a user. Asks for a password, or reads a line from a pipe, unless the user only uses tokens."""
    password = None if no_password else _ask_password(name)
    call(users.add_user, body=NewUser(name=name, role=role, tags=tag or None, password=password))
    show(line(f"Added user {name} ({role})."))
    if no_password:
        show(hint(f"Give it a token with: evertick tokens create {name} NAME"))


@app.command("set", epilog="Example: evertick users set ci --role viewer --tag finance")
def set_command(
    name: UserName, role: OtherRole = None, tag: Tags = None, all_dags: AllDags = False, disabled: Disabled = None
) -> None:
    """Change a user's role and tags, or disable the user. Options not given are unchanged."""
    if role is None and not tag and not all_dags and disabled is None:
        raise UserError("Nothing to change. Give --role, --tag, --all-dags, --disable or --enable.")
    if tag and all_dags:
        raise UserError("--tag limits the user to some DAGs and --all-dags removes that limit: give one of them.")
    wanted = UserChange(role=role, tags=tag or None, all_dags=all_dags, is_disabled=disabled)
    call(users.change_user, name=name, body=wanted)
    show(line(f"Changed user {name}."))


@app.command("password", epilog="Example: evertick users password admin")
def password_command(name: UserName) -> None:
    """Set a user's password. Asks for it, or reads a line from a pipe. All of the user's sessions and tokens end."""
    with open_client() as client:
        client.call(users.show_user, name=name)
        client.call(users.change_user, name=name, body=UserChange(password=_ask_password(name)))
    show(line(f"Set the password of {name}. Its sessions and tokens have ended."))


@app.command("link", epilog="Example: evertick users link admin")
def link_command(name: UserName) -> None:
    """Print a one-time sign-in link, valid for one hour. Open it at the API's address."""
    path = call(users.make_link, name=name).path
    show(line(path))
    show(hint(f"At the API's address: {chosen_server() or _own_address()}{path}"))


def _own_address() -> str:
    """Of the API of this home, which may have taken another port than the configured one."""
    settings = read_settings()
    if settings.public_url:
        return settings.public_url.rstrip("/")
    notes = living_notes(settings.home, API_NOTES)
    address = notes[-1].url if notes else f"http://{settings.api_host}:{settings.api_port or DEFAULT_PORT}"
    return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _ask_password(name: str) -> str:
    return _ask_secret(f"Password for {name}", confirm=True)


def _ask_secret(prompt: str, *, confirm: bool = False) -> str:
    """From the terminal, or one line of a pipe for scripts. Never from an argument, which others can see."""
    if sys.stdin.isatty():
        return str(typer.prompt(prompt, hide_input=True, confirmation_prompt=confirm, err=True))
    if not (found := sys.stdin.readline().rstrip("\r\n")):
        raise UserError(f"{prompt}: standard input is empty. Write it as one line into the pipe, or use a terminal.")
    return found


# Tokens ---------------------------------------------------------------------------------------------------------------


@tokens_app.command("list", epilog="Example: evertick tokens list ci")
def list_tokens_command(user: UserFilter = None, limit: Limit = 1000, as_json: Json = False) -> None:
    """List valid tokens and sessions: the user, the purpose, and the last use with its address."""
    found, now = read_pages(users.list_tokens, limit, user=user)
    columns = ("#ID", "USER", "KIND", "NAME", "LIMITED TO", "EXPIRES", "LAST USED")

    def cells(each: Token) -> list[Cell]:
        limits = ", ".join([*([each.role] if each.role else []), *(each.tags or [])]) or None
        used = f"{relative(each.used_at, now)} from {each.used_from}" if each.used_at else None
        ends = relative(each.expires_at, now) if each.expires_at else "never"
        return [each.token_id, each.user, each.kind, each.name, limits, ends, used]

    empty = "No valid token. Make one with: evertick tokens create USER NAME"
    show_list("tokens", found, columns, cells, as_json=as_json, empty=empty, to_json=_token_document)


@tokens_app.command("create", epilog="Example: evertick tokens create ci deploys --role operator --days 30")
def create_command(
    user: TokenUser, name: TokenName, role: MostRole = None, tag: Tags = None, days: Days = None, as_json: Json = False
) -> None:
    """Make a token and print it. It is shown only this once."""
    wanted = NewToken(name=name, user=user, role=role, tags=tag or None, days=TOKEN_DAYS if days is None else days)
    made = call(users.make_token, body=wanted)
    if as_json:
        return print_json(made)
    show(line(made.token))
    show(hint(f"Token {made.token_id} of {user}. Send it as: Authorization: Bearer TOKEN. It is not shown again."))


@tokens_app.command("revoke", epilog="Example: evertick tokens revoke 12 --yes")
def revoke_command(number: TokenNumber, yes: Yes = False) -> None:
    """Revoke a token or end a session, at once."""
    confirm(f"Revoke token {number}?", yes=yes)
    call(users.revoke_token, token_id=number)
    show(line(f"Revoked token {number}."))


def _token_document(found: Token) -> dict[str, object]:
    return {"account": found.user, **document(found, without=["user"])}


# The audit log --------------------------------------------------------------------------------------------------------


@audit_app.command(epilog="Example: evertick audit --verb refuse --limit 20")
def audit_command(
    verb: Verb = None,
    by: Actor = None,
    dag: DagFilter = None,
    run: RunFilter = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """Show the audit log, newest first: each action with its time, actor and origin, and each refusal."""
    found, _ = read_pages(users.list_audit, limit, verb=verb, actor=by, dag=dag, run_id=run)
    columns = ("WHEN", "ACTION", "BY", "FROM", "OBJECT", "DETAIL")

    def cells(each: AuditEntry) -> list[Cell]:
        subject = each.dag or (f"run {each.run_id}" if each.run_id else None)
        return [clock(each.occurred_at), each.verb, each.actor, each.origin, subject, json.dumps(each.detail)]

    show_list("entries", found, columns, cells, as_json=as_json, empty="No entry of the audit log matches.")


# Signing in at a server -----------------------------------------------------------------------------------------------


@login_app.command(epilog="Example: evertick login https://evertick.example.com --user ann")
def login_command(url: Address, user: LoginUser = None, token: WithToken = False, called: ServerName = None) -> None:
    """Sign in at a server. Later commands use its token with --server URL, or with EVERTICK_SERVER=URL set.

    With --name that name does for the address: evertick --server NAME runs list.
    """
    address = read_address(url)
    known = read_logins()
    if called is not None:
        if not NAME.fullmatch(called):
            raise UserError(f"{called[:100]!r} is no name of a server: use up to 31 letters, digits, '_' and '-'.")
        if any(login.name == called for other, login in known.items() if other != address):
            raise UserError(f"Another server has the name {called!r}. List them with `evertick servers`.")
    elif address in known:
        called = known[address].name
    if token and user is not None:
        raise UserError("A token already belongs to a user: leave out --user.")
    if urlsplit(address).scheme == "http" and urlsplit(address).hostname not in ("127.0.0.1", "localhost", "::1"):
        sys.stderr.write("Warning: without https others on the network can read what you send, and your token.\n")
    if token:
        secret = _ask_secret("Token").strip()
    else:
        name = user or typer.prompt("User", err=True)
        password = _ask_secret(f"Password for {name}")
        with _http_client(address, None) as client:
            secret = client.request("POST", "/auth/token", {"username": name, "password": password})["access_token"]
    with _http_client(address, secret) as client:
        session = client.request("GET", "/auth/session")
    path = keep_login(address, StoredLogin(user=session["user"], token=secret, is_session=not token, name=called))
    show(line(f"Signed in at {address} as {session['user']} ({session['role']}); the token is in {path}."))
    show(
        hint(
            f"Try: evertick --server {called or address} runs list. Or for all commands: export EVERTICK_SERVER={address}"
        )
    )


@logout_app.command(epilog="Example: evertick logout https://evertick.example.com")
def logout_command(url: ServerAddress) -> None:
    """Sign out: end the session, and remove its token from this machine. A token of your own stays valid."""
    address = find_address(url)
    known = read_logins().get(address)
    if known is None:
        raise UserError(f"You are not signed in at {address}.")
    try:
        if known.is_session:
            with _http_client(address, known.token) as client:
                client.request("POST", "/auth/logout")
    except EvertickError as error:
        sys.stderr.write(f"The session could not be ended there: {error}\n")
    keep_login(address, None)
    show(line(f"Signed out at {address}."))


@servers_app.command(epilog="Example: evertick servers")
def servers_command(as_json: Json = False) -> None:
    """Show the servers that you are signed in to, side by side: whether each fires and runs, and how busy it is."""
    found = sorted(read_logins().items(), key=lambda each: (each[1].name or "", each[0]))
    with ThreadPoolExecutor(max_workers=16) as pool:
        answers = list(pool.map(lambda each: _health_of(*each), found))
    servers = [
        {"name": login.name, "server": address, "user": login.user, **answer}
        for (address, login), answer in zip(found, answers, strict=True)
    ]
    if as_json:
        return print_json({"servers": servers})
    if not servers:
        return show(line("You are not signed in anywhere. Sign in with: evertick login URL --name NAME"))
    rows: list[list[Cell]] = []
    for each in servers:
        is_well = each["status"] == "healthy"
        status: Cell = each["status"] if is_well else state("failed", str(each["status"]))
        counts: list[Cell] = [each["runners"], each["busy"], each["slots"]]
        rows.append([each["name"], each["server"], each["user"], status, *counts, each["error"]])
    show(table(("NAME", "SERVER", "USER", "STATUS", "#RUNNERS", "#BUSY", "#SLOTS", "DETAIL"), rows))


def _health_of(address: str, login: StoredLogin) -> dict[str, Any]:
    try:
        with _http_client(address, login.token) as client:
            found = client.call(runners.show_health)
    except EvertickError as error:
        return {"status": "unknown", "runners": None, "busy": None, "slots": None, "error": str(error)}
    why = None if found.scheduler == "healthy" else "no scheduler leads, so nothing fires"
    counts = {"runners": found.runners, "busy": found.busy, "slots": found.slots}
    return {"status": found.scheduler, **counts, "error": why}


def _http_client(address: str, token: str | None) -> HttpClient:
    """Loaded late: commands on the database do not need HTTP."""
    return cast("HttpClient", import_module("evertick.client.http").HttpClient(address, token))
