"""One provider of OpenID Connect: its metadata and keys, the requests to it, and the verification of what it signs.

Trusts only asymmetric signatures of keys that the configured issuer publishes. Follows no redirect and uses no proxy.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import jwt

from evertick.domain.errors import InvalidSettings, ProviderUnavailable, Unauthenticated, UserError
from evertick.domain.oidc import Claims, Provider, check_url

if TYPE_CHECKING:
    import httpx2

# Never `none`, and nothing with a shared secret: a public key must not be usable as one.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_KEY_TYPES = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
LEAST_RSA_BITS = 2048
TIMEOUT_SECONDS = 5.0
# A key that the provider withdrew is not trusted for longer.
KEEP_SECONDS = 300.0
# After a token with an unknown key the keys are read again, but made-up tokens must not make us flood the provider.
REFETCH_SECONDS = 5.0
CLOCK_LEEWAY_SECONDS = 30
LONGEST_TOKEN = 32_768
_MOST_BYTES = 1024 * 1024
# Answers of a token endpoint that are about the grant. All others are about our configuration, or the provider's state.
_GRANT_ERRORS = frozenset(
    {"invalid_grant", "access_denied", "interaction_required", "login_required", "consent_required"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What the token endpoint returned. `until`: when the access token ends, in seconds since 1970."""

    access: str
    until: float
    refresh: str | None
    id_token: str | None


class ProviderClient:
    def __init__(self, provider: Provider, secret: str | None) -> None:
        self.provider, self._secret = provider, secret
        self._metadata: tuple[Mapping[str, Any], float] | None = None
        self._keys: tuple[list[Mapping[str, Any]], float] | None = None
        self._http: httpx2.AsyncClient | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    async def authorization_url(self, query: Mapping[str, str]) -> str:
        """Where a person signs in. `query` has the state, the nonce and the challenge."""
        assert self.provider.client_id is not None
        endpoint = await self._endpoint("authorization_endpoint")
        own = {"response_type": "code", "client_id": self.provider.client_id, "scope": " ".join(self.provider.scopes)}
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode({**own, **query})}"

    async def check_issuer(self, given: str | None) -> None:
        """The `iss` of an authorization response: the response must not come from another provider (RFC 9207)."""
        is_expected = (await self.metadata()).get("authorization_response_iss_parameter_supported") is True
        if (given is None and is_expected) or (given is not None and given != self.provider.issuer):
            raise Unauthenticated("The answer came from another provider than the one that was asked. Sign in again.")

    async def exchange(self, code: str, *, verifier: str, redirect_uri: str) -> Tokens:
        grant = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect_uri}
        return await self._request_tokens({**grant, "code_verifier": verifier})

    async def refresh(self, token: str) -> Tokens:
        return await self._request_tokens({"grant_type": "refresh_token", "refresh_token": token})

    async def user_info(self, tokens: Tokens, *, subject: str) -> Claims:
        """The claims of the person now; none if the provider has no such endpoint."""
        if (await self.metadata()).get("userinfo_endpoint") is None:
            return {}
        url = await self._endpoint("userinfo_endpoint")
        status, found = await self._send("GET", url, headers={"Authorization": f"Bearer {tokens.access}"})
        if status in (400, 401, 403):
            raise Unauthenticated(f"{self.provider.name} no longer accepts your access. Sign in again.")
        if status != 200:
            raise self._unavailable(f"its userinfo endpoint answered {status}")
        # Otherwise the answer could be about another person.
        if found.get("sub") != subject:
            raise Unauthenticated(f"{self.provider.name} answered about another user. Sign in again.")
        return found

    async def verify_id_token(
        self, token: str | None, *, nonce: str | None = None, subject: str | None = None
    ) -> Claims:
        """`nonce` of the sign-in, or `subject` of the person that it must be about."""
        client = self.provider.client_id
        claims = await self.verify(token, audience=client or "")
        if nonce is not None and claims.get("nonce") != nonce:
            raise Unauthenticated("The ID token was made for another sign-in. Sign in again.")
        if subject is not None and claims["sub"] != subject:
            raise Unauthenticated("The ID token is about another user. Sign in again.")
        audiences = claims["aud"] if isinstance(claims["aud"], list) else [claims["aud"]]
        if claims.get("azp", client) != client or (len(audiences) > 1 and "azp" not in claims):
            raise Unauthenticated("The ID token was made for another program. Sign in again.")
        return claims

    async def verify(self, token: object, *, audience: str, require: tuple[str, ...] = ("sub",)) -> Claims:
        """The claims of a token that the issuer signed for this audience, and that has not expired."""
        if not isinstance(token, str) or len(token) > LONGEST_TOKEN or not audience:
            raise Unauthenticated(f"{self.provider.name} sent no token that can be verified.")
        try:
            header = jwt.get_unverified_header(token)
            algorithm, key_id = header.get("alg"), header.get("kid")
            if algorithm not in ALGORITHMS or "crit" in header:
                raise Unauthenticated(f"The token is signed with {str(algorithm)[:20]!r}, which is not accepted.")
            key = await self._key(str(algorithm), key_id)
            claims: Claims = jwt.decode(
                token,
                key.key,
                algorithms=[str(algorithm)],
                audience=audience,
                issuer=self.provider.issuer,
                leeway=CLOCK_LEEWAY_SECONDS,
                options={"require": ["exp", "iat", "iss", "aud", *require]},
            )
        except jwt.PyJWTError as error:
            why = "it has expired" if isinstance(error, jwt.ExpiredSignatureError) else "it cannot be verified"
            why = "it is for another audience" if isinstance(error, jwt.InvalidAudienceError) else why
            raise Unauthenticated(f"The token is not valid: {why}.") from None
        if any(not isinstance(claims[each], str) or not claims[each] for each in require):
            raise Unauthenticated("The token is not valid: a required claim is empty.")
        return claims

    async def metadata(self) -> Mapping[str, Any]:
        """The provider's own description, which must name the issuer that is configured."""
        if self._metadata is None or time.monotonic() - self._metadata[1] > KEEP_SECONDS:
            url = self.provider.issuer.rstrip("/") + "/.well-known/openid-configuration"
            status, found = await self._send("GET", url)
            if status != 200:
                raise self._unavailable(f"{url} answered {status}")
            if found.get("issuer") != self.provider.issuer:
                raise self._unavailable(f"{url} names the issuer {str(found.get('issuer'))[:200]!r}")
            self._metadata = (found, time.monotonic())
        return self._metadata[0]

    async def _endpoint(self, name: str) -> str:
        try:
            return check_url((await self.metadata()).get(name), name, is_plain=self.provider.is_plain)
        except UserError as error:
            raise self._unavailable(str(error)) from None

    async def _key(self, algorithm: str, key_id: object) -> jwt.PyJWK:
        for oldest_seconds in (KEEP_SECONDS, REFETCH_SECONDS):
            found = [each for each in await self._published(oldest_seconds) if _fits(each, algorithm, key_id)]
            # Without a key id, it must be clear which key it is.
            if len(found) == 1:
                key = jwt.PyJWK(dict(found[0]), algorithm)
                if getattr(key.key, "key_size", LEAST_RSA_BITS) < LEAST_RSA_BITS and found[0]["kty"] == "RSA":
                    raise Unauthenticated("The token is signed with a key that is too short.")
                return key
        raise Unauthenticated("The token is signed with a key that the provider does not publish.")

    async def _published(self, oldest_seconds: float) -> list[Mapping[str, Any]]:
        if self._keys is None or time.monotonic() - self._keys[1] > oldest_seconds:
            url = self.provider.jwks_url or await self._endpoint("jwks_uri")
            status, found = await self._send("GET", url)
            keys = found.get("keys")
            if status != 200 or not isinstance(keys, list):
                raise self._unavailable(f"{url} answered {status}, without keys")
            self._keys = ([each for each in keys if isinstance(each, dict)], time.monotonic())
        return self._keys[0]

    async def _request_tokens(self, form: Mapping[str, str]) -> Tokens:
        client, secret = self.provider.client_id or "", self._secret
        methods = (await self.metadata()).get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        sent, auth = dict(form), None
        if secret is not None and "client_secret_basic" in methods:
            # RFC 6749, 2.3.1: both are encoded as in a form.
            auth = (quote(client, safe=""), quote(secret, safe=""))
        else:
            sent |= {"client_id": client} | ({} if secret is None else {"client_secret": secret})
        url = await self._endpoint("token_endpoint")
        status, found = await self._send("POST", url, data=sent, **({} if auth is None else {"auth": auth}))
        if status in (400, 401, 403) and found.get("error") in _GRANT_ERRORS:
            raise Unauthenticated(f"{self.provider.name} refused the sign-in ({found['error']}). Sign in again.")
        access = found.get("access_token")
        if status != 200 or not isinstance(access, str):
            raise self._unavailable(f"its token endpoint answered {status} ({str(found.get('error'))[:100]})")
        lasts, refresh, id_token = found.get("expires_in"), found.get("refresh_token"), found.get("id_token")
        return Tokens(
            access=access,
            until=time.time() + (lasts if isinstance(lasts, int) else 300),
            refresh=refresh if isinstance(refresh, str) else None,
            id_token=id_token if isinstance(id_token, str) else None,
        )

    async def _send(self, method: str, url: str, **parts: Any) -> tuple[int, Mapping[str, Any]]:
        """The status and the JSON object of an answer; empty if it is none."""
        import httpx2

        if self._http is None:
            self._http = httpx2.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False, verify=self._tls())
        try:
            async with self._http.stream(method, url, follow_redirects=False, **parts) as answer:
                content = b""
                async for part in answer.aiter_bytes():
                    content += part
                    if len(content) > _MOST_BYTES:
                        raise self._unavailable("an answer is too large")
        except httpx2.HTTPError as error:
            raise self._unavailable(type(error).__name__) from None
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            found = {}
        return answer.status_code, found if isinstance(found, dict) else {}

    def _tls(self) -> ssl.SSLContext | bool:
        if self.provider.is_plain:
            return False
        try:
            return ssl.create_default_context(cafile=self.provider.ca_file)
        except OSError as error:
            raise InvalidSettings(f"ca_file of the provider {self.provider.name} cannot be used: {error}.") from None

    def _unavailable(self, why: str) -> ProviderUnavailable:
        return ProviderUnavailable(f"The sign-in provider {self.provider.name} cannot be used now: {why}.")


def _fits(key: Mapping[str, Any], algorithm: str, key_id: object) -> bool:
    is_type = key.get("kty") == _KEY_TYPES[algorithm[:2]] and key.get("alg", algorithm) == algorithm
    return is_type and key.get("use", "sig") == "sig" and (key_id is None or key.get("kid") == key_id)
