"""Providers of OpenID Connect as they are configured, and the rights that their claims give.

Pure: reads no file and sends no request. A claim that has another type than expected grants nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from evertick.domain.access import Role, check_name, check_tags
from evertick.domain.errors import InvalidSettings, Unauthenticated, UserError, did_you_mean

Claims = Mapping[str, Any]

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_LOCAL = ("127.0.0.1", "::1", "localhost")
_TEXTS = (
    *("issuer", "client_id", "client_secret_file", "label", "user_claim", "groups_claim", "default_role"),
    *("ca_file", "jwks_url", "audience"),
)
_KEYS = (*_TEXTS, "scopes", "groups", "workloads", "reusable_tokens")
_NAMES = ", ".join(_KEYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """`tags` None: every DAG."""

    role: Role
    tags: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The user whose token a program receives, and the claims that its own token must have."""

    user: str
    claims: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Without `client_id` no person can sign in with it, only programs of `workloads`. `reusable_tokens`: a program may
    exchange the same token again, as a pod must that is given one for an hour."""

    name: str
    issuer: str
    client_id: str | None = None
    client_secret_file: str | None = None
    label: str = ""
    scopes: tuple[str, ...] = ("openid", "profile", "email")
    user_claim: str = "preferred_username"
    groups_claim: str = "groups"
    default_role: Role | None = None
    groups: Mapping[str, Rights]
    ca_file: str | None = None
    jwks_url: str | None = None
    audience: str | None = None
    reusable_tokens: bool = False
    workloads: tuple[Workload, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether it is on this machine without TLS, for tests."""
        return self.issuer.startswith("http:")


def parse_providers(table: object, where: str) -> dict[str, Provider]:
    """The tables `[oidc.NAME]` of a file. Raises InvalidSettings, which names the table and the key."""
    if not isinstance(table, dict) or not table:
        raise InvalidSettings(f"{where} has no provider: write a table such as [oidc.company].")
    found: dict[str, Provider] = {}
    for name, values in table.items():
        place = f"{where}: [oidc.{name}]"
        if not _NAME.fullmatch(name) or not isinstance(values, dict):
            raise InvalidSettings(f"{place}: a provider is a table whose name has lowercase letters, digits and '-'.")
        try:
            found[name] = _provider(name, values)
        except (UserError, ValueError) as error:
            raise InvalidSettings(f"{place}: {error}") from None
    return found


def _provider(name: str, values: Mapping[str, Any]) -> Provider:
    for key, value in values.items():
        if key not in _KEYS:
            raise UserError(f"unknown key {key!r}: {did_you_mean(key, _KEYS, f'use {_NAMES}')}")
        if key in _TEXTS and not (isinstance(value, str) and value):
            raise UserError(f"{key} must be a text.")
    issuer = values.get("issuer", "")
    check_url(issuer, "issuer", is_plain=True)
    given: dict[str, Any] = {key: values[key] for key in _TEXTS if key in values}
    if "jwks_url" in values:
        check_url(values["jwks_url"], "jwks_url", is_plain=issuer.startswith("http:"))
    if "scopes" in values:
        given["scopes"] = ("openid", *(each for each in _texts(values["scopes"], "scopes") if each != "openid"))
    if "default_role" in values:
        given["default_role"] = _role(values["default_role"])
    groups = {group: _rights(group, each) for group, each in _table(values.get("groups", {}), "groups").items()}
    workloads = values.get("workloads", [])
    given["reusable_tokens"] = values.get("reusable_tokens", False)
    if not isinstance(given["reusable_tokens"], bool):
        raise UserError("reusable_tokens must be true or false.")
    if not isinstance(workloads, list):
        raise UserError("workloads is a list of tables: write [[oidc.NAME.workloads]].")
    made = Provider(name=name, groups=groups, workloads=tuple(_workload(each) for each in workloads), **given)
    if made.workloads and not made.audience:
        raise UserError("workloads need audience, the text that their tokens must be made for.")
    if not (made.client_id or made.workloads):
        raise UserError("it needs client_id, for people, or workloads, for programs.")
    if made.client_id and not groups and made.default_role is None:
        raise UserError("no user could sign in: map groups to roles, or set default_role.")
    return made


def check_url(url: object, what: str, *, is_plain: bool) -> str:
    """An address of a provider: TLS, or this machine if `is_plain`."""
    if not isinstance(url, str):
        raise UserError(f"{what} must be a URL.")
    parts = urlsplit(url)
    is_local = is_plain and parts.scheme == "http" and parts.hostname in _LOCAL
    is_right = bool(parts.hostname) and parts.username is None and not parts.fragment
    if not is_right or not (parts.scheme == "https" or is_local):
        raise UserError(f"{what} {url[:200]!r} must be an https:// URL.")
    return url


def _rights(group: str, values: object) -> Rights:
    if isinstance(values, str):
        return Rights(role=_role(values))
    table = _table(values, f"groups.{group}")
    if unknown := set(table) - {"role", "tags"}:
        raise UserError(f"groups.{group}: unknown key {min(unknown)!r}: use role and tags.")
    tags = check_tags(_texts(table["tags"], "tags")) if "tags" in table else None
    return Rights(role=_role(table.get("role")), tags=None if tags is None else tuple(tags))


def _workload(values: object) -> Workload:
    table = _table(values, "workloads")
    claims = _table(table.get("claims", {}), "claims")
    if set(table) - {"user", "claims"} or not isinstance(table.get("user"), str):
        raise UserError("workloads: each needs user and claims, and nothing else.")
    # Without a claim every program of the provider would match: on GitHub, everybody's.
    if not claims or not all(isinstance(each, str) and each for each in claims.values()):
        raise UserError("workloads: claims needs at least one claim with the text that it must have.")
    return Workload(user=check_name(table["user"]), claims=claims)


def _role(value: object) -> Role:
    if value not in {each.value for each in Role}:
        raise UserError(f"role {value!r} is unknown: use {', '.join(Role)}.")
    return Role(str(value))


def _texts(value: object, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise UserError(f"{what} must be a list of texts.")
    return value


def _table(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{what} must be a table.")
    return value


def claim_of(claims: Claims, path: str) -> object:
    """A claim by its name, or inside objects by a path such as `realm_access.roles`. None if it is not there."""
    if path in claims:
        found: object = claims[path]
        return found
    value: object = claims
    for part in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def rights_of(provider: Provider, claims: Claims) -> Rights:
    """The highest role of the person's groups, with the tags of the groups that give this role: a lower role for more DAGs
    must not widen a higher one. Raises Unauthenticated if no group gives a role."""
    given = claim_of(claims, provider.groups_claim)
    names: Collection[object] = given if isinstance(given, list) else ()
    found = [provider.groups[name] for name in names if isinstance(name, str) and name in provider.groups]
    if not found:
        if provider.default_role is None:
            raise Unauthenticated(f"No group of yours at {provider.label or provider.name} gives access to Evertick.")
        return Rights(role=provider.default_role)
    role = max((each.role for each in found), key=lambda each: each.rank)
    highest = [each.tags for each in found if each.role is role]
    if None in highest:
        return Rights(role=role)
    return Rights(role=role, tags=tuple(sorted({tag for tags in highest for tag in tags or ()})))


def user_of(provider: Provider, claims: Claims) -> str:
    """The name of the person. The identity is the pair of provider and subject; a name only shows it."""
    name = claim_of(claims, provider.user_claim)
    if not isinstance(name, str):
        raise Unauthenticated(f"{provider.name} sent no claim {provider.user_claim!r} with the name of the user.")
    if provider.user_claim == "email" and claims.get("email_verified") is False:
        raise Unauthenticated("Your email address is not verified there. Verify it, and sign in again.")
    return check_name(name)


def workload_of(provider: Provider, claims: Claims) -> str:
    """The user for a program's token: the first workload whose claims it has."""
    for each in provider.workloads:
        if all(claims.get(name) == text for name, text in each.claims.items()):
            return each.user
    raise Unauthenticated(f"No workload of {provider.name} has the claims of this token.")
