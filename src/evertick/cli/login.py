"""`evertick login` and `logout`: a server's token, kept in a file that only you can read."""

from __future__ import annotations

import sys
from typing import Annotated
from urllib.parse import urlsplit

import typer

from evertick.cli.logins import Login, keep_login, read_address, read_logins
from evertick.cli.server import Server
from evertick.cli.tables import hint, line, show
from evertick.domain.errors import EvertickError, UserError

app = typer.Typer(add_completion=False)

Address = Annotated[str, typer.Argument(metavar="URL", help="The server: https://evertick.example.com:8080")]
User = Annotated[str | None, typer.Option("--user", "-u", help="The user's name; asked for if left out.")]
WithToken = Annotated[
    bool, typer.Option("--token", help="With a token of your own instead of a password: asked for, or from a pipe.")
]


@app.command(epilog="Example: evertick login https://evertick.example.com --user ann")
def login(url: Address, user: User = None, token: WithToken = False) -> None:
    """Sign in at a server. Later commands find the token with --server URL, or with EVERTICK_SERVER=URL set."""
    address = read_address(url)
    if token and user is not None:
        raise UserError("--token says who you are: leave out --user.")
    if urlsplit(address).scheme == "http" and urlsplit(address).hostname not in ("127.0.0.1", "localhost", "::1"):
        sys.stderr.write("Warning: without https everybody on the way can read what you send, and your token.\n")
    if token:
        secret = typer.prompt("Token", hide_input=True, err=True).strip()
    else:
        name = user or typer.prompt("User", err=True)
        password = typer.prompt(f"Password for {name}", hide_input=True, err=True)
        secret = Server(address, None).post("/auth/token", {"username": name, "password": password})["access_token"]
    session = Server(address, secret).get("/auth/session")
    path = keep_login(address, Login(user=session["user"], token=secret, is_session=not token))
    show(line(f"Signed in at {address} as {session['user']} ({session['role']}); the token is in {path}."))
    show(hint(f"Try: evertick --server {address} runs list. Or for all commands: export EVERTICK_SERVER={address}"))


logout_app = typer.Typer(add_completion=False)


@logout_app.command(epilog="Example: evertick logout https://evertick.example.com")
def logout(url: Address) -> None:
    """Sign out: end the session, and forget its token. A token of your own is only forgotten."""
    address = read_address(url)
    known = read_logins().get(address)
    if known is None:
        raise UserError(f"You are not signed in at {address}.")
    try:
        if known.is_session:
            Server(address, known.token).post("/auth/logout")
    except EvertickError as error:
        sys.stderr.write(f"The session could not be ended there: {error}\n")
    keep_login(address, None)
    show(line(f"Signed out at {address}."))
