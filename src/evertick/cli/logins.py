"""Which server a command talks to, and the tokens that people signed in with: one file of theirs, for nobody else's eyes."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from evertick.cli.server_option import SERVER_OPTION
from evertick.config import login_file, read_settings
from evertick.domain.errors import Unauthenticated, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """`is_session`: made by signing in, so that signing out ends it; otherwise somebody's own token, which stays."""

    user: str
    token: str
    is_session: bool


def chosen_server() -> str | None:
    """The server that commands go to; None for the database itself."""
    found = SERVER_OPTION.get() or read_settings().server
    return read_address(found) if found else None


def read_address(text: str) -> str:
    """An address as it is kept: without a slash at its end, and nothing but scheme, host and path."""
    parts = urlsplit(text.strip())
    try:
        port_is_right = parts.port is None or parts.port > 0
    except ValueError:
        port_is_right = False
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not port_is_right
        or parts.query
        or parts.fragment
    ):
        raise UserError(f"{text[:200]!r} is no address of a server. Write it as https://evertick.example.com:8080")
    if parts.username is not None or parts.password is not None:
        raise UserError("An address must not hold a password: others can see it. Sign in with: evertick login URL")
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def token_for(server: str) -> str:
    """What to show at the door: the setting, or what `evertick login` has kept."""
    if given := read_settings().token:
        return given
    login = read_logins().get(server)
    if login is None:
        raise Unauthenticated(f"You are not signed in at {server}. Sign in with: evertick login {server}")
    return login.token


def read_logins() -> dict[str, Login]:
    path = login_file()
    try:
        with path.open(encoding="utf-8") as opened:
            if stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & 0o077:
                raise UserError(f"{path} holds tokens and others may read it. Correct that with: chmod 600 {path}")
            found = json.load(opened)
        return {server: Login(**fields) for server, fields in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"{path} is damaged. Remove it, and sign in again with: evertick login URL") from None


def keep_login(server: str, login: Login | None) -> Path:
    """With None it is forgotten. Whole or not at all, and never readable by others, not even for a moment."""
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
