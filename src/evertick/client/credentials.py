"""The server that a command uses, and the tokens of servers that the user signed in to.

Tokens are kept in one file, which only its owner can read.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from evertick.config import login_file, read_settings
from evertick.domain.errors import Unauthenticated, UserError

# Of a server on this machine; an address has a colon.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,30}")

# The value of --server on this command line.
SERVER_OPTION: ContextVar[str | None] = ContextVar("server_option", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLogin:
    """`is_session`: the token was made by signing in, so signing out revokes it. Any other token stays valid. `name`: what
    the server is called on this machine."""

    user: str
    token: str
    is_session: bool
    name: str | None = None


def chosen_server() -> str | None:
    """The server that commands use; None for the database."""
    found = SERVER_OPTION.get() or read_settings().server
    return find_address(found) if found else None


def find_address(text: str) -> str:
    """Of a server that was named when the user signed in, or of an address."""
    if not NAME.fullmatch(text):
        return read_address(text)
    for address, login in read_logins().items():
        if login.name == text:
            return address
    raise UserError(
        f"There is no server named {text!r}. List yours with `evertick servers`, or name one: evertick login URL --name {text}"
    )


def read_address(text: str) -> str:
    """The address in its stored form: scheme, host and path, without a slash at the end."""
    parts = urlsplit(text.strip())
    try:
        is_right = parts.hostname and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:
        is_right = False
    if not is_right or parts.scheme not in ("http", "https"):
        raise UserError(f"{text[:200]!r} is not a server address. Write it as https://evertick.example.com:8080")
    if parts.username is not None or parts.password is not None:
        raise UserError(
            "A server address must not contain a password: others can see it. Sign in with: evertick login URL"
        )
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def token_for(server: str) -> str:
    """The token for this server: from the settings, or stored by `evertick login`."""
    if given := read_settings().token:
        return given
    login = read_logins().get(server)
    if login is None:
        raise Unauthenticated(f"You are not signed in to {server}. Sign in with: evertick login {server}")
    return login.token


def read_logins() -> dict[str, StoredLogin]:
    path = login_file()
    try:
        with path.open(encoding="utf-8") as opened:
            if stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & 0o077:
                raise UserError(f"{path} contains tokens, and others can read it. Correct that with: chmod 600 {path}")
            found = json.load(opened)
        return {server: StoredLogin(**fields) for server, fields in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"{path} is damaged. Remove it and sign in again with: evertick login URL") from None


def keep_login(server: str, login: StoredLogin | None) -> Path:
    """Store a token, or remove it if `login` is None. The file is replaced atomically and is never readable by others."""
    path = login_file()
    logins = {**read_logins(), server: login}
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = json.dumps({each: asdict(kept) for each, kept in logins.items() if kept is not None}, indent=2)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".logins-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
