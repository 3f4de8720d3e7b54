"""A provider of OpenID Connect on this machine that can be told to lie: codes with PKCE, rotating refresh tokens, userinfo,
key rotation, and any token that an attacker could send."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

CLIENT, SECRET = "evertick", "s:cret"
Forge = Callable[["FakeProvider", dict[str, Any]], "str | None"]


@cache
def rsa_key(number: int) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


class FakeProvider:
    """`forge` makes the ID token of its claims. `user` is who signs in; `groups` of None: no such claim."""

    def __init__(self) -> None:
        self.key_number, self.published = 1, [1]
        self.user: dict[str, Any] = {"sub": "u-1", "preferred_username": "ann", "groups": ["data"]}
        self.forge: Forge = FakeProvider.sign
        self.user_info: Callable[[], dict[str, Any]] = lambda: self.user
        self.codes: dict[str, dict[str, str]] = {}
        self.refresh_tokens: set[str] = set()
        self.is_down = False
        self.asked: list[str] = []
        handler = type("Handler", (_Handler,), {"provider": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.issuer = f"http://127.0.0.1:{self.server.server_port}"

    def rotate(self) -> None:
        self.key_number += 1
        self.published = [self.key_number]

    def sign(self, claims: dict[str, Any], *, number: int | None = None, **headers: Any) -> str:
        number = number or self.key_number
        return jwt.encode(claims, rsa_key(number), algorithm="RS256", headers={"kid": f"k{number}", **headers})

    def claims(self, **changed: Any) -> dict[str, Any]:
        now = int(time.time())
        made = {"iss": self.issuer, "aud": CLIENT, "iat": now, "exp": now + 300, "sub": self.user["sub"], **changed}
        return {name: value for name, value in made.items() if value is not None}

    def answer(self, method: str, path: str, given: dict[str, str], headers: dict[str, str]) -> tuple[int, Any]:
        self.asked.append(path)
        if self.is_down:
            return 503, {}
        match path:
            case "/.well-known/openid-configuration":
                ends = {"authorization_endpoint": "/authorize", "token_endpoint": "/token"}
                ends |= {"userinfo_endpoint": "/me", "jwks_uri": "/jwks"}
                return 200, {"issuer": self.issuer, **{name: self.issuer + each for name, each in ends.items()}}
            case "/jwks":
                return 200, {"keys": [_jwk(number) for number in self.published]}
            case "/authorize":
                code = secrets.token_hex(8)
                self.codes[code] = given
                back = urlencode({"code": code, "state": given["state"], "iss": self.issuer})
                return 302, f"{given['redirect_uri']}?{back}"
            case "/token":
                return self._tokens(given, headers.get("authorization", ""))
            case "/me":
                return (200, self.user_info()) if headers.get("authorization") == "Bearer good" else (401, {})
        return 404, {}

    def _tokens(self, given: dict[str, str], authorization: str) -> tuple[int, Any]:
        expected = base64.b64encode(f"{CLIENT}:s%3Acret".encode()).decode()
        if authorization != f"Basic {expected}":
            return 401, {"error": "invalid_client"}
        asked: dict[str, str] = {}
        if given["grant_type"] == "refresh_token":
            if given["refresh_token"] not in self.refresh_tokens:
                return 400, {"error": "invalid_grant"}
            self.refresh_tokens.remove(given["refresh_token"])
        else:
            asked = self.codes.pop(given["code"], {})
            digest = hashlib.sha256(given["code_verifier"].encode()).digest()
            challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
            if (asked.get("code_challenge"), asked.get("redirect_uri")) != (challenge, given["redirect_uri"]):
                return 400, {"error": "invalid_grant"}
        refresh = secrets.token_hex(8)
        self.refresh_tokens.add(refresh)
        id_token = self.forge(self, self.claims(nonce=asked.get("nonce")))
        return 200, {"access_token": "good", "expires_in": 60, "refresh_token": refresh, "id_token": id_token}


def _jwk(number: int) -> dict[str, Any]:
    return {**json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(rsa_key(number).public_key())), "kid": f"k{number}"}


class _Handler(BaseHTTPRequestHandler):
    provider: FakeProvider

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self._reply(parts.path, dict(parse_qsl(parts.query)))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        self._reply(self.path, {name: values[0] for name, values in parse_qs(body).items()})

    def _reply(self, path: str, given: dict[str, str]) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        status, found = self.provider.answer(self.command, path, given, headers)
        content = b"" if status == 302 else json.dumps(found).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", found)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def running() -> Iterator[FakeProvider]:
    provider = FakeProvider()
    Thread(target=provider.server.serve_forever, args=[0.01], daemon=True).start()
    try:
        yield provider
    finally:
        provider.server.shutdown()
        provider.server.server_close()
