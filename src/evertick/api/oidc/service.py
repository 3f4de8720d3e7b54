"""Sign-ins with OpenID Connect, and the checks that keep an account's rights those that its provider gives now.

The state of a sign-in is in an encrypted cookie, and usable once. The provider's tokens are stored encrypted, and never sent
to a browser.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import jwt

from evertick.api.oidc.provider import LONGEST_TOKEN, ProviderClient, Tokens
from evertick.config import Settings
from evertick.db.queries import accounts as queries
from evertick.domain.access import Actor
from evertick.domain.encryption import Keyring
from evertick.domain.errors import (
    Conflict,
    DecryptionFailed,
    Forbidden,
    InvalidSettings,
    NotFound,
    ProviderUnavailable,
    Unauthenticated,
)
from evertick.domain.oidc import Claims, Provider, Rights, rights_of, user_of, workload_of
from evertick.engine import accounts
from evertick.engine.accounts import Authenticated, Issued, ProviderAnswer, ProviderCheck, ProviderSignIn
from evertick.secrets.keyring import load_keyring
from evertick.secrets.oidc_file import read_providers, secret_of

if TYPE_CHECKING:
    from evertick.api.context import ApiContext

FLOW_SECONDS = 600.0
WORKLOAD_SECONDS = 900.0
# A logout token is used at once; one that is replayed later must end nothing.
LOGOUT_SECONDS = 120.0
_LOGOUT_EVENT = "http://schemas.openid.net/event/backchannel-logout"
_FLOW, _TOKENS = "oidc_flow", "oidc_tokens"
_POLL_SECONDS, _POLLS = 0.2, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback:
    """What the provider sent back with the browser, and the cookie of the sign-in."""

    code: str | None
    state: str
    issuer: str | None
    error: str | None
    cookie: str


class OidcService:
    """Raises InvalidSettings for settings that cannot work."""

    def __init__(self, context: ApiContext) -> None:
        self._context, settings = context, context.settings
        providers = {} if settings.oidc_file is None else read_providers(settings.oidc_file)
        if providers and settings.public_url is None:
            raise InvalidSettings("EVERTICK_OIDC_FILE needs EVERTICK_PUBLIC_URL, to which providers send users back.")
        self._clients = {name: ProviderClient(each, secret_of(each)) for name, each in providers.items()}
        self._asking: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    @property
    def choices(self) -> list[Provider]:
        """The providers that people can sign in with, in the order of the file."""
        return [each.provider for each in self._clients.values() if each.provider.client_id is not None]

    async def close(self) -> None:
        for each in self._clients.values():
            await each.close()

    # A person signs in ------------------------------------------------------------------------------------------------

    async def begin(self, name: str, wanted: str) -> tuple[str, str]:
        """The address to send the browser to, and the cookie that it must bring back."""
        client = self._client(name)
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        challenge = urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).decode().rstrip("=")
        query = {"redirect_uri": self._redirect_uri(name), "state": state, "nonce": nonce}
        url = await client.authorization_url({**query, "code_challenge": challenge, "code_challenge_method": "S256"})
        flow = {
            "state": state,
            "nonce": nonce,
            "verifier": verifier,
            "wanted": wanted,
            "until": time.time() + FLOW_SECONDS,
        }
        sealed, key_id = self._seal(_FLOW, name, flow)
        return url, f"{key_id}.{sealed}"

    async def finish(self, name: str, given: Callback, actor: Actor) -> tuple[Issued, str]:
        """A session, and the page that was wanted. Each sign-in can be finished once, in the browser that began it."""
        client = self._client(name)
        key_id, _, sealed = given.cookie.partition(".")
        flow = self._open(_FLOW, name, sealed, key_id)
        if flow is None or not hmac.compare_digest(str(flow["state"]).encode(), given.state.encode()):
            raise Unauthenticated(
                "This sign-in was not begun in this browser, or another one replaced it. Sign in again."
            )
        if flow["until"] < time.time():
            raise Unauthenticated("The sign-in took too long. Sign in again.")
        await self._use_once(f"state {given.state}", FLOW_SECONDS, "This sign-in was already finished. Sign in again.")
        await client.check_issuer(given.issuer)
        if given.error is not None or not given.code:
            raise Unauthenticated(f"{name} refused the sign-in ({(given.error or 'no code')[:100]}).")
        tokens = await client.exchange(
            given.code, verifier=str(flow["verifier"]), redirect_uri=self._redirect_uri(name)
        )
        claims = await client.verify_id_token(tokens.id_token, nonce=str(flow["nonce"]))
        claims = {**claims, **await client.user_info(tokens, subject=claims["sub"])}
        rights, user = rights_of(client.provider, claims), user_of(client.provider, claims)
        return await self._sign_in(client.provider, claims, tokens, rights, replace(actor, name=f"user:{user}")), str(
            flow["wanted"]
        )

    async def _sign_in(
        self, provider: Provider, claims: Claims, tokens: Tokens, rights: Rights, actor: Actor
    ) -> Issued:
        user, session_id = user_of(provider, claims), claims.get("sid")
        sealed, key_id = self._seal(_TOKENS, f"{provider.name} {claims['sub']}", _stored(tokens))
        given = ProviderSignIn(
            provider=provider.name,
            subject=claims["sub"],
            session_id=session_id if isinstance(session_id, str) else None,
            name=user,
            role=rights.role,
            tags=None if rights.tags is None else list(rights.tags),
            tokens=sealed,
            key_id=key_id,
        )
        async with self._context.write() as conn, conn.transaction():
            done = await accounts.sign_in_with_provider(conn, given, actor=actor)
            if done.outcome == "taken":
                raise Conflict(
                    f"A user named {user!r} exists already with another way to sign in: ask an administrator."
                )
            if done.outcome == "disabled":
                raise Forbidden(f"The user {user!r} is disabled: ask an administrator.")
            row = await queries.find_account_by_id(conn, account_id=done.account_id or 0)
            name = f"sign-in with {provider.name}"
            return await accounts.issue(
                conn, row, kind="session", name=name, actor=actor, seconds=accounts.SESSION_SECONDS
            )

    # The provider is asked again --------------------------------------------------------------------------------------

    async def checked(self, found: Authenticated, secret: str) -> Authenticated | None:
        """The caller with the rights that its provider gives now; None if it gives none, which ended the session.

        One request of one process asks. While the provider does not answer, the rights of the last answer hold for a minute
        after it.
        """
        lock = self._asking.setdefault(found.account_id, asyncio.Lock())
        async with lock:
            await self._ask_again(found.account_id)
        for _ in range(_POLLS):
            async with self._context.read() as conn:
                now = await accounts.authenticate(conn, secret)
            age = None if now is None else now.check_age_seconds
            if now is None or age is None or age <= accounts.CHECK_VALID_SECONDS:
                return now
            if age == float("inf"):
                break
            # Another process asks.
            await asyncio.sleep(_POLL_SECONDS)
        raise Unauthenticated("Your sign-in provider could not confirm your access. Sign in again, or wait a moment.")

    async def _ask_again(self, account_id: int) -> None:
        hold = accounts.CHECK_HOLD_SECONDS
        after = accounts.CHECK_AFTER_SECONDS
        async with self._context.write() as conn:
            claim = await accounts.claim_provider_check(
                conn, account_id=account_id, after_seconds=after, hold_seconds=hold
            )
        if claim is None:
            return
        try:
            answer = await self._answer(claim)
        except ProviderUnavailable as error:
            self._context.log.error("provider_unavailable", provider=claim.provider, error=error)
            return
        actor = Actor(f"provider:{claim.provider}")
        async with self._context.write() as conn:
            await accounts.record_provider_check(
                conn, answer, account_id=account_id, asked_until=claim.asked_until, actor=actor
            )
        self._context.auth_cache.forget()

    async def _answer(self, claim: ProviderCheck) -> ProviderAnswer:
        """What the provider says now. No access if it is no longer configured, or if the tokens do not work any more."""
        client = self._clients.get(claim.provider)
        kept = self._open(_TOKENS, f"{claim.provider} {claim.subject}", claim.tokens, claim.key_id)
        if client is None or kept is None:
            return ProviderAnswer()
        try:
            tokens, claims = _tokens(kept), {}
            if tokens.refresh is not None:
                tokens = _renewed(tokens, await client.refresh(tokens.refresh))
                if tokens.id_token is not None:
                    claims = dict(await client.verify_id_token(tokens.id_token, subject=claim.subject))
            elif tokens.until < time.time():
                return ProviderAnswer()
            claims |= await client.user_info(tokens, subject=claim.subject)
            if not claims:
                return ProviderAnswer()
            rights = rights_of(client.provider, claims)
        except Unauthenticated:
            return ProviderAnswer()
        sealed, key_id = self._seal(_TOKENS, f"{claim.provider} {claim.subject}", _stored(tokens))
        tags = None if rights.tags is None else list(rights.tags)
        return ProviderAnswer(role=rights.role, tags=tags, tokens=sealed, key_id=key_id)

    async def log_out(self, name: str, token: str, actor: Actor) -> int:
        """End the sessions that a logout token of the provider names (back-channel logout). Returns how many."""
        client = self._client(name)
        claims = await client.verify(token, audience=client.provider.client_id or "", require=("jti",))
        events, subject, session_id = claims.get("events"), claims.get("sub"), claims.get("sid")
        is_logout = isinstance(events, dict) and isinstance(events.get(_LOGOUT_EVENT), dict) and "nonce" not in claims
        if not is_logout or not (isinstance(subject, str) or isinstance(session_id, str)):
            raise Unauthenticated("This is not a logout token.")
        if claims["iat"] < time.time() - LOGOUT_SECONDS:
            raise Unauthenticated("The logout token is too old.")
        await self._use_once(f"logout {name} {claims['jti']}", 2 * LOGOUT_SECONDS, "The logout token was used before.")
        async with self._context.write() as conn:
            ended = await accounts.end_provider_sessions(
                conn,
                provider=name,
                subject=subject if isinstance(subject, str) else None,
                session_id=session_id if isinstance(session_id, str) else None,
                actor=replace(actor, name=f"provider:{name}"),
            )
        self._context.auth_cache.forget()
        return ended

    # A program signs in -----------------------------------------------------------------------------------------------

    async def exchange_workload(self, token: str, actor: Actor) -> Issued:
        """A token for minutes for a program that proves with its platform's token what it is."""
        issuer = _unverified_issuer(token)
        clients = [each for each in self._clients.values() if each.provider.workloads]
        client = next((each for each in clients if each.provider.issuer == issuer), None)
        if client is None:
            raise Unauthenticated("No provider with workloads has the issuer of this token.")
        provider = client.provider
        claims = await client.verify(token, audience=provider.audience or "")
        user = workload_of(provider, claims)
        if not provider.reusable_tokens:
            seconds = max(claims["exp"] - time.time(), 0) + LOGOUT_SECONDS
            await self._use_once(f"workload {token}", seconds, "This token was exchanged before. Request a new one.")
        async with self._context.write() as conn:
            row = await accounts.find_user(conn, user)
            if row.is_disabled:
                raise Forbidden(f"The user {user!r} is disabled.")
            name = f"workload {provider.name} {claims['sub']}"[:100]
            acting = replace(actor, name=f"user:{row.name}")
            return await accounts.issue(conn, row, kind="token", name=name, actor=acting, seconds=WORKLOAD_SECONDS)

    # ------------------------------------------------------------------------------------------------------------------

    def _client(self, name: str) -> ProviderClient:
        client = self._clients.get(name)
        if client is None or client.provider.client_id is None:
            raise NotFound(f"There is no sign-in provider {name[:40]!r}.")
        return client

    def _redirect_uri(self, name: str) -> str:
        return f"{(self._context.settings.public_url or '').rstrip('/')}/login/{name}/callback"

    async def _use_once(self, what: str, seconds: float, refusal: str) -> None:
        key = hashlib.sha256(what.encode("utf-8", "replace")).digest()
        async with self._context.write() as conn:
            if await queries.use_once(conn, key=key, seconds=seconds) is None:
                raise Unauthenticated(refusal)

    def _keyring(self) -> Keyring:
        settings: Settings = self._context.settings
        try:
            return load_keyring(settings)
        except InvalidSettings as error:
            text = "The server has no encryption key, which sign-in with a provider needs: ask its administrator."
            raise self._context.misconfigured(error, text) from None

    def _seal(self, kind: str, name: str, values: Mapping[str, object]) -> tuple[str, str]:
        keyring = self._keyring()
        return keyring.seal(kind, name, json.dumps(values)), keyring.first_id

    def _open(self, kind: str, name: str, sealed: str, key_id: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._keyring().open(kind, name, sealed, key_id))
        except DecryptionFailed:
            return None
        return found


def _stored(tokens: Tokens) -> dict[str, object]:
    # With a refresh token each check gets a new access token.
    return {"refresh": tokens.refresh} if tokens.refresh else {"access": tokens.access, "until": tokens.until}


def _tokens(kept: Mapping[str, Any]) -> Tokens:
    return Tokens(
        access=kept.get("access", ""), until=kept.get("until", 0.0), refresh=kept.get("refresh"), id_token=None
    )


def _renewed(before: Tokens, after: Tokens) -> Tokens:
    """A provider that does not rotate refresh tokens returns none."""
    return after if after.refresh is not None else replace(after, refresh=before.refresh)


def _unverified_issuer(token: str) -> object:
    """Only to choose the provider that verifies the token."""
    try:
        if len(token) > LONGEST_TOKEN:
            return None
        return jwt.decode(token, options={"verify_signature": False}).get("iss")
    except (jwt.PyJWTError, RecursionError):
        return None
