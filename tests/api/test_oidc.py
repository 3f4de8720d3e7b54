"""Signing in with OpenID Connect: what a provider and an attacker can send, and when access ends."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fastapi import FastAPI
from psycopg import AsyncConnection

from evertick.api.auth import PLAIN_COOKIE
from evertick.config import Settings
from evertick.domain.access import Actor, Role
from evertick.domain.encryption import new_key
from evertick.domain.errors import InvalidSettings
from evertick.engine import accounts
from evertick.secrets.oidc_file import read_providers
from tests.api.conftest import BASE, Client, Signed
from tests.api.oidc_provider import CLIENT, SECRET, FakeProvider, Forge, rsa_key, running
from tests.engine.world import value

_KEY = new_key()


@pytest.fixture(scope="module")
def started() -> Iterator[FakeProvider]:
    with running() as made:
        yield made


@pytest.fixture
def provider(started: FakeProvider) -> FakeProvider:
    """The provider of this module as it began."""
    started.user = {"sub": "u-1", "preferred_username": "ann", "groups": ["data"]}
    started.forge, started.is_down = FakeProvider.sign, False
    started.user_info = lambda: started.user
    return started


@pytest.fixture
def settings(tmp_path: Path, provider: FakeProvider) -> Settings:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    people = f'issuer = "{provider.issuer}"\nclient_id = "{CLIENT}"\nclient_secret_file = "secret"\n'
    groups = '[oidc.{}.groups]\nplatform = "admin"\ndata = {{ role = "operator", tags = ["etl"] }}\nall = "viewer"\n'
    programs = f'[oidc.ci]\nissuer = "{provider.issuer}"\naudience = "https://evertick.test"\n'
    workload = '[[oidc.ci.workloads]]\nuser = "deployer"\nclaims = { repository = "acme/etl" }\n'
    tables = [f'[oidc.{name}]\nlabel = "Acme"\n{people}{groups.format(name)}' for name in ("company", "other")]
    place = tmp_path / "oidc.toml"
    place.write_text("\n".join([*tables, programs + workload]))
    return Settings(api_rate_limit=0, oidc_file=place, public_url=BASE, secret_keys=(_KEY,))


@pytest.fixture
async def browser(app: FastAPI) -> AsyncIterator[Client]:
    async with Client(app, None) as made:
        yield made


async def redirected(browser: Client, name: str = "company", wanted: str = "/runs") -> str:
    """The path of the callback, with its query: the person has signed in at the provider."""
    begun = await browser.get(f"/login/{name}", params={"next": wanted})
    assert begun.status_code == 303, begun.text
    async with httpx.AsyncClient() as outside:
        return (await outside.get(begun.headers["location"])).headers["location"].removeprefix(BASE)


async def sign_in(browser: Client) -> httpx.Response:
    return await browser.get(await redirected(browser))


def refused(answer: httpx.Response) -> str:
    """The sign-in page, which says why; no session was made."""
    assert answer.status_code in (400, 401, 403, 404, 409, 502), (answer.status_code, answer.text)
    assert PLAIN_COOKIE not in answer.cookies and "Sign in" in answer.text
    return answer.text.split('role="alert">')[1].split("<")[0]


async def age(conn: AsyncConnection, seconds: float) -> None:
    """As if the provider had been asked so long ago."""
    await conn.execute(
        "update oidc_identity set checked_at = clock() - make_interval(secs => %s), asked_until = null", [seconds]
    )


async def test_a_person_signs_in_with_the_rights_of_the_groups(browser: Client, provider: FakeProvider) -> None:
    page = await browser.get("/login")
    assert "Sign in with Acme" in page.text and "/login/ci" not in page.text
    answer = await sign_in(browser)
    # A page that moves on by itself: after a redirect from another site, a strict cookie would not be sent.
    assert answer.status_code == 200 and 'content="0;url=/runs"' in answer.text
    cookie = next(each for each in answer.headers.get_list("set-cookie") if each.startswith(PLAIN_COOKIE))
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    session = await browser.ok("GET", "/auth/session")
    assert (session["user"], session["role"], session["tags"]) == ("ann", "operator", ["etl"])


@pytest.mark.parametrize(
    ("groups", "role", "tags"),
    [
        (["data", "all"], "operator", ["etl"]),
        (["all"], "viewer", None),
        (["platform", "data", "unknown", 7], "admin", None),
    ],
)
async def test_the_highest_role_counts_with_its_own_tags(
    browser: Client, provider: FakeProvider, groups: list[object], role: str, tags: list[str] | None
) -> None:
    provider.user = {**provider.user, "groups": groups}
    await sign_in(browser)
    session = await browser.ok("GET", "/auth/session")
    assert (session["role"], session["tags"]) == (role, tags)


def _changed(**claims: Any) -> Forge:
    return lambda provider, made: provider.sign({k: v for k, v in {**made, **claims}.items() if v is not None})


def _hs256(provider: FakeProvider, claims: dict[str, Any]) -> str:
    """Signed with the public key as a shared secret; PyJWT itself refuses to make such a token."""
    from jwt.algorithms import HMACAlgorithm

    class Any_(HMACAlgorithm):
        def prepare_key(self, key: Any) -> bytes:
            return bytes(key)

    jws = jwt.PyJWS()
    jws.unregister_algorithm("HS256")
    jws.register_algorithm("HS256", Any_(HMACAlgorithm.SHA256))
    pem = rsa_key(provider.key_number).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    import json

    return jws.encode(json.dumps(claims).encode(), pem, algorithm="HS256", headers={"kid": f"k{provider.key_number}"})


def _tampered(provider: FakeProvider, claims: dict[str, Any]) -> str:
    head, _, signature = provider.sign(claims).split(".")
    return f"{head}.{provider.sign({**claims, 'sub': 'u-2'}).split('.')[1]}.{signature}"


def _own_jwk(provider: FakeProvider, claims: dict[str, Any]) -> str:
    own = jwt.algorithms.RSAAlgorithm.to_jwk(rsa_key(99).public_key(), as_dict=True)
    return provider.sign(claims, number=99, kid="k99", jwk=own)


FORGED: dict[str, Forge] = {
    "another audience": _changed(aud="other"),
    "another program's, with us among the audiences": _changed(aud=[CLIENT, "other"], azp="other"),
    "several audiences and no authorized party": _changed(aud=[CLIENT, "other"]),
    "another issuer": _changed(iss="http://127.0.0.1:1"),
    "expired": _changed(exp=int(time.time()) - 3600, iat=int(time.time()) - 7200),
    "never expires": _changed(exp=None),
    "not issued yet": _changed(iat=int(time.time()) + 36_000),
    "without the time of issue": _changed(iat=None),
    "without a nonce": _changed(nonce=None),
    "with another sign-in's nonce": _changed(nonce="other"),
    "without a subject": _changed(sub=""),
    "unsigned": lambda provider, claims: jwt.encode(claims, None, algorithm="none"),
    "signed with the public key as a secret": _hs256,
    "signed by an unknown key under a known name": lambda provider, claims: provider.sign(
        claims, number=98, kid=f"k{provider.key_number}"
    ),
    "signed by a key that is not published": lambda provider, claims: provider.sign(claims, number=98),
    "signed by a key in its own header": _own_jwk,
    "tampered with": _tampered,
    "with a critical extension": lambda provider, claims: provider.sign(claims, crit=["b64"], b64=True),
    "no token": lambda provider, claims: None,
    "no token but text": lambda provider, claims: "a.b",
    "too long": lambda provider, claims: provider.sign({**claims, "x": "x" * 40_000}),
}


@pytest.mark.parametrize("attack", FORGED)
async def test_a_forged_id_token_signs_nobody_in(browser: Client, provider: FakeProvider, attack: str) -> None:
    provider.forge = FORGED[attack]
    refused(await sign_in(browser))


async def test_another_users_info_is_not_believed(browser: Client, provider: FakeProvider) -> None:
    provider.user_info = lambda: {**provider.user, "sub": "u-2", "groups": ["platform"]}
    assert "another user" in refused(await sign_in(browser))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: path.replace("state=", "state=x"), "not begun in this browser"),
        (lambda path: path.replace("/company/", "/other/"), "not begun in this browser"),
        (lambda path: path.replace("iss=http%3A", "iss=https%3A"), "another provider"),
        (lambda path: path.split("code=")[0] + "error=access_denied&" + path.split("&", 1)[1], "access_denied"),
    ],
)
async def test_an_answer_that_does_not_belong_to_the_sign_in_is_refused(
    browser: Client, provider: FakeProvider, change: Callable[[str], str], why: str
) -> None:
    assert why in refused(await browser.get(change(await redirected(browser))))


async def test_an_answer_counts_once_and_only_in_the_browser_that_asked(
    browser: Client, app: FastAPI, provider: FakeProvider, conn: AsyncConnection
) -> None:
    path = await redirected(browser)
    assert "not begun" in refused(await Client(app, None).get(path))
    cookies = dict(browser.cookies)
    assert (await browser.get(path)).status_code == 200
    replaying = Client(app, None)
    replaying.cookies.update(cookies)
    assert "already finished" in refused(await replaying.get(path))
    # A code that was stolen fits no other sign-in: the provider compares the verifier.
    stolen = (await redirected(Client(app, None))).split("code=")[1].split("&")[0]
    own = await redirected(replaying)
    mixed = own.split("code=")[0] + f"code={stolen}&" + own.split("&", 1)[1]
    assert "invalid_grant" in refused(await replaying.get(mixed))
    assert await value(conn, "select count(*) from audit_log where action = 'refuse'") == 3


async def test_a_sign_in_cookie_cannot_be_changed_or_kept(
    browser: Client, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await redirected(browser)
    real = browser.cookies["evertick_signin"]
    browser.cookies.set("evertick_signin", real[:-8] + "AAAAAAA=", domain="evertick.test")
    refused(await browser.get(path))
    monkeypatch.setattr("evertick.api.oidc.service.FLOW_SECONDS", -1.0)
    assert "too long" in refused(await sign_in(browser))


@pytest.mark.parametrize("wanted", ["https://evil.test/", "//evil.test", "/\\evil.test", "javascript:alert(1)"])
async def test_a_sign_in_leads_to_no_other_site(browser: Client, provider: FakeProvider, wanted: str) -> None:
    answer = await browser.get(await redirected(browser, wanted=wanted))
    assert answer.status_code == 200 and 'content="0;url=/"' in answer.text and "evil" not in answer.text


async def test_a_new_key_is_read_and_an_old_one_is_forgotten(
    browser: Client, app: FastAPI, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evertick.api.oidc.provider.REFETCH_SECONDS", 0.0)
    assert (await sign_in(browser)).status_code == 200
    before = provider.key_number
    provider.rotate()
    assert (await sign_in(browser)).status_code == 200
    provider.forge = lambda provider, claims: provider.sign(claims, number=before)
    refused(await sign_in(browser))


async def test_a_local_user_is_not_taken_over(browser: Client, provider: FakeProvider, signed: Signed) -> None:
    await signed(Role.ADMIN, name="Ann")
    assert "exists already" in refused(await sign_in(browser))
    provider.user = {**provider.user, "preferred_username": "bob", "groups": []}
    assert "No group" in refused(await sign_in(browser))


async def test_a_removed_group_ends_sessions_and_tokens(
    browser: Client, app: FastAPI, provider: FakeProvider, conn: AsyncConnection
) -> None:
    await sign_in(browser)
    csrf = {"X-CSRF-Token": (await browser.ok("GET", "/auth/session"))["csrf_token"]}
    made = await browser.ok("POST", "/api/v1/tokens", status=201, json={"name": "mine"}, headers=csrf)
    program = Client(app, made["token"])
    provider.user = {**provider.user, "groups": ["platform"]}
    await age(conn, accounts.CHECK_AFTER_SECONDS + 1)
    app.state.context.auth_cache.forget()
    assert (await browser.ok("GET", "/auth/session"))["role"] == "admin"
    provider.user = {**provider.user, "groups": []}
    await age(conn, accounts.CHECK_AFTER_SECONDS + 1)
    await browser.refused("GET", "/auth/session", 401)
    await program.refused("GET", "/auth/session", 401)
    # The token works again after a sign-in that grants access.
    provider.user = {**provider.user, "groups": ["all"]}
    await sign_in(browser)
    assert (await program.ok("GET", "/auth/session"))["role"] == "viewer"


async def test_without_an_answer_access_lasts_a_minute(
    browser: Client, provider: FakeProvider, conn: AsyncConnection, admin: Client
) -> None:
    await sign_in(browser)
    provider.is_down = True
    await age(conn, accounts.CHECK_AFTER_SECONDS + 1)
    assert (await browser.get("/auth/session")).status_code == 200
    await conn.execute(
        "update oidc_identity set checked_at = clock() - interval '61 s', asked_until = null, tokens = null"
    )
    sessions = "select array_agg(credential_id) from credential where kind = 'session'"
    assert await accounts.still_valid(conn, await value(conn, sessions)) == []
    await conn.execute("update oidc_identity set checked_at = '-infinity'")
    assert (await browser.get("/auth/session")).status_code == 401
    # Break-glass: a local administrator does not depend on a provider.
    assert (await admin.get("/auth/session")).status_code == 200


async def test_one_process_asks_at_a_time(provider: FakeProvider, browser: Client, conn: AsyncConnection) -> None:
    await sign_in(browser)
    await age(conn, accounts.CHECK_AFTER_SECONDS + 1)
    claims = [
        await accounts.claim_provider_check(conn, account_id=1, after_seconds=40.0, hold_seconds=20.0) for _ in range(2)
    ]
    assert claims[0] is not None and claims[1] is None
    # The person signs in again meanwhile: the answer to the older tokens counts no more.
    await sign_in(browser)
    late = accounts.ProviderAnswer()
    assert not await accounts.record_provider_check(
        conn, late, account_id=1, asked_until=claims[0].asked_until, actor=Actor("test")
    )
    assert (await browser.ok("GET", "/auth/session"))["user"] == "ann"


def _logout(provider: FakeProvider, **changed: Any) -> dict[str, str]:
    events = {"http://schemas.openid.net/event/backchannel-logout": {}}
    return {"logout_token": provider.sign(provider.claims(**{"events": events, "jti": "j1", **changed}))}


async def test_signing_out_at_the_provider_ends_the_sessions(
    browser: Client, nobody: Client, provider: FakeProvider
) -> None:
    await sign_in(browser)
    path = "/auth/oidc/company/logout"
    for wrong in (
        *({"aud": "other"}, {"events": None}, {"events": {}}, {"nonce": "n"}, {"jti": None}, {"sub": None}),
        *({"iat": int(time.time()) - 200}, {"exp": int(time.time()) - 60}),
    ):
        await nobody.refused("POST", path, 401, data=_logout(provider, **wrong))
    assert (await browser.get("/auth/session")).status_code == 200
    assert (await nobody.post(path, data=_logout(provider))).status_code == 200
    assert (await browser.get("/auth/session")).status_code == 401
    await nobody.refused("POST", path, 401, data=_logout(provider))


async def test_a_program_exchanges_its_platforms_token_once(
    nobody: Client, app: FastAPI, provider: FakeProvider, conn: AsyncConnection, signed: Signed
) -> None:
    await signed(Role.EDITOR, ["etl"], name="deployer")

    def token(**changed: Any) -> dict[str, str]:
        made = {"aud": "https://evertick.test", "repository": "acme/etl", "sub": "repo:acme/etl", **changed}
        return {"token": provider.sign(provider.claims(**made))}

    for wrong in (
        *({"aud": CLIENT}, {"repository": "evil/etl"}, {"repository": None}, {"iss": "http://127.0.0.1:1"}),
        *({"exp": int(time.time()) - 60}, {"sub": None}, {"repository": ["acme/etl"]}),
    ):
        await nobody.refused("POST", "/auth/workload", 401, json=token(**wrong))
    for text in (jwt.encode(provider.claims(aud="https://evertick.test"), None, algorithm="none"), "x", "a.b.c"):
        await nobody.refused("POST", "/auth/workload", 401, json={"token": text})
    good = token()
    made = await nobody.ok("POST", "/auth/workload", status=201, json=good)
    session = await Client(app, made["access_token"]).ok("GET", "/auth/session")
    assert (session["user"], session["role"], session["tags"], made["expires_in"]) == (
        *("deployer", "editor", ["etl"]),
        900,
    )
    lifetime = (
        "select extract(epoch from max(expires_at - created_at))::int from credential where name like 'workload%%'"
    )
    assert await value(conn, lifetime) == 900
    await nobody.refused("POST", "/auth/workload", 401, json=good)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no provider"),
        ('[oidc.a]\nissuer = "http://sso.example.com"', "https"),
        ('[oidc.a]\nissuer = "https://x.test"', "client_id"),
        ('[oidc.a]\nissuer = "https://x.test"\nclient_id = "e"', "map groups"),
        ('[oidc.a]\nissuer = "https://x.test"\nclient_id = "e"\ndefault_role = "boss"', "boss"),
        ('[oidc.a]\nissuer = "https://x.test"\nclient = "e"', "did you mean 'client_id'"),
        ('[oidc.a]\nissuer = "https://x.test"\naudience = "e"\n[[oidc.a.workloads]]\nuser = "x"', "at least one claim"),
        ('[oidc.a]\nissuer = "https://x.test"\n[[oidc.a.workloads]]\nuser = "x"\nclaims = {a="b"}', "audience"),
        ("[other]", "unknown table"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_place(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "oidc.toml").write_text(text)
    with pytest.raises(InvalidSettings, match=why):
        read_providers(tmp_path / "oidc.toml")


@pytest.mark.filterwarnings("ignore")
async def test_a_real_provider_signs_in_and_decides_until_it_revokes(
    app: FastAPI, browser: Client, conn: AsyncConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the oidc-provider-mock package: an independent implementation of the protocol."""
    mock = pytest.importorskip("oidc_provider_mock", reason="needs the group dev")
    monkeypatch.setenv("AUTHLIB_INSECURE_TRANSPORT", "1")
    monkeypatch.setenv("EVERTICK_OIDC_SECRET__REAL", SECRET)
    with mock.run_server_in_thread() as server:
        url = f"http://localhost:{server.server_port}"
        place = tmp_path / "real.toml"
        place.write_text(
            f'[oidc.real]\nissuer = "{url}"\nclient_id = "e"\nuser_claim = "email"\n[oidc.real.groups]\ndata = "operator"'
        )
        context = app.state.context
        monkeypatch.setattr(context, "settings", replace(context.settings, oidc_file=place))
        async with httpx.AsyncClient(base_url=url) as outside:
            await outside.put("/users/u1", json={"email": "kim@acme.test", "groups": ["data"]})
            begun = await browser.get("/login/real")
            answer = await outside.post(begun.headers["location"], data={"sub": "u1"})
            assert (await browser.get(answer.headers["location"].removeprefix(BASE))).status_code == 200
            session = await browser.ok("GET", "/auth/session")
            assert (session["user"], session["role"]) == ("kim@acme.test", "operator")
            await age(conn, accounts.CHECK_AFTER_SECONDS + 1)
            assert (await browser.get("/auth/session")).status_code == 200
            await outside.put("/users/u1", json={"email": "kim@acme.test", "groups": []})
            await age(conn, accounts.CHECK_AFTER_SECONDS + 1)
            assert (await browser.get("/auth/session")).status_code == 401
