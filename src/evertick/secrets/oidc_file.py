"""The file with the providers of OpenID Connect, and their client secrets, which are never in a log or the database."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tomllib import TOMLDecodeError, loads
from typing import Any

from evertick.config import value_from_environment
from evertick.domain.errors import InvalidSettings
from evertick.domain.oidc import Provider, parse_providers


def read_providers(path: Path) -> dict[str, Provider]:
    """The providers of a file. Paths in it are relative to it."""
    try:
        found: dict[str, Any] = loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSettings(f"EVERTICK_OIDC_FILE={path} cannot be read: {error.strerror}.") from None
    except (TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"{path} is not valid TOML: {error}.") from None
    if unknown := set(found) - {"oidc"}:
        raise InvalidSettings(f"{path}: unknown table {min(unknown)!r}: write [oidc.NAME].")
    made = parse_providers(found.get("oidc"), str(path))
    return {name: _with_paths(each, path.parent) for name, each in made.items()}


def _with_paths(provider: Provider, folder: Path) -> Provider:
    secret, ca = provider.client_secret_file, provider.ca_file
    return replace(
        provider,
        client_secret_file=None if secret is None else str(folder / secret),
        ca_file=None if ca is None else str(folder / ca),
    )


def secret_of(provider: Provider) -> str | None:
    """The client secret, from EVERTICK_OIDC_SECRET__NAME or its file. None: a public client, protected by PKCE alone."""
    if (given := value_from_environment("oidc_secret", provider.name)) is not None:
        return given
    if provider.client_secret_file is None:
        return None
    try:
        return Path(provider.client_secret_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise InvalidSettings(
            f"The client secret of {provider.name} cannot be read: {provider.client_secret_file}."
        ) from None
