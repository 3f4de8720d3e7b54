"""Users, sessions, tokens and one-time links: who gets in, and that nobody stays in who should not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from argon2 import PasswordHasher
from fastapi import FastAPI
from psycopg import AsyncConnection

from evertick.api.auth import PLAIN_COOKIE, SECURE_COOKIE
from evertick.db.queries import accounts as accounts_queries
from evertick.domain.access import Actor, Role
from evertick.domain.errors import Conflict, InvalidSettings
from evertick.engine import accounts
from evertick.engine.public_access import refuse_open_door
from tests.api.conftest import BASE, Client, Signed
from tests.engine.world import value

PASSWORD = "correct horse"
LOGIN = {"username": "ann", "password": PASSWORD}


@pytest.fixture
async def ann(conn: AsyncConnection) -> None:
    await accounts.add_user(conn, name="ann", role=Role.OPERATOR, password=PASSWORD, actor=Actor("test"))


@pytest.fixture
async def browser(app: FastAPI, ann: None) -> Client:
    """Signed in with a cookie."""
    client = Client(app, None)
    session = await client.ok("POST", "/auth/login", json=LOGIN)
    client.csrf = session["csrf_token"]  # type: ignore[attr-defined]
    return client


async def test_a_name_and_a_password_give_a_token_as_json_and_as_a_form(
    nobody: Client, app: FastAPI, ann: None
) -> None:
    for how in ({"json": LOGIN}, {"data": LOGIN}):
        token = (await nobody.ok("POST", "/auth/token", status=201, **how))["access_token"]
        session = await Client(app, token).ok("GET", "/auth/session")
        assert (session["user"], session["role"], session["csrf_token"]) == ("ann", "operator", None)
        assert "runs.trigger" in session["permissions"] and "users.manage" not in session["permissions"]


async def test_airflows_command_line_gets_a_token_for_an_hour(
    nobody: Client, app: FastAPI, conn: AsyncConnection, ann: None
) -> None:
    token = (await nobody.ok("POST", "/auth/token/cli", status=201, json=LOGIN))["access_token"]
    assert (await Client(app, token).ok("GET", "/auth/session"))["user"] == "ann"
    lifetime = "select extract(epoch from max(expires_at - created_at))::int from credential where kind = 'session'"
    assert await value(conn, lifetime) == 3600
    await nobody.refused("POST", "/auth/token/cli", 401, json={**LOGIN, "password": "wrong horse"})


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"json": {"username": "ann", "password": "wrong horse"}}, 401),
        ({"json": {"username": "nobody", "password": PASSWORD}}, 401),
        ({"json": {"username": "ann"}}, 422),
        ({"json": {**LOGIN, "role": "admin"}}, 422),
        ({"json": [1]}, 422),
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 400),
        ({"content": b"x", "headers": {"Content-Type": "text/plain"}}, 415),
        ({"content": b"[" * 100_000, "headers": {"Content-Type": "application/json"}}, 400),
    ],
)
async def test_what_is_wrong_is_told_without_repeating_the_secret(
    nobody: Client, ann: None, options: dict[str, object], status: int
) -> None:
    answer = await nobody.refused("POST", "/auth/token", status, **options)
    assert PASSWORD not in str(answer) and "wrong horse" not in str(answer)


async def test_wrong_passwords_make_the_next_try_wait_even_the_right_one(
    nobody: Client, conn: AsyncConnection, ann: None
) -> None:
    """Many at once pass no more than one after the other."""
    wrong = {"username": "ANN", "password": "wrong horse"}
    tries = [nobody.post("/auth/token", json=wrong) for _ in range(accounts.FREE_FAILURES + 4)]
    statuses = sorted([answer.status_code for answer in await asyncio.gather(*tries)])
    assert statuses.count(401) <= accounts.FREE_FAILURES + 1 and statuses[-1] == 429
    await conn.execute("update login_attempt set failures = 20, tried_at = clock()")
    answer = await nobody.post("/auth/token", json=LOGIN)
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    await conn.execute("update login_attempt set tried_at = tried_at - interval '1 hour'")
    assert (await nobody.post("/auth/token", json=LOGIN)).status_code == 201
    assert await value(conn, "select sum(failures) from login_attempt") == 0


async def test_a_stranger_cannot_make_a_user_wait_who_signs_in_from_elsewhere(
    nobody: Client, conn: AsyncConnection, ann: None
) -> None:
    wrong = {"username": "ann", "password": "wrong horse"}
    for _ in range(accounts.FREE_FAILURES + 4):
        await nobody.post("/auth/token", json=wrong)
    assert (await nobody.post("/auth/token", json=LOGIN)).status_code == 429
    # The same as if all of these came from another network.
    await conn.execute("update login_attempt set subject = replace(subject, 'from ', 'from 2001:db8::/64 was ')")
    assert (await nobody.post("/auth/token", json=LOGIN)).status_code == 201


async def test_a_login_does_not_wash_an_address_clean_of_what_it_tried_with_others(
    nobody: Client, conn: AsyncConnection, ann: None
) -> None:
    tried = accounts.FREE_FAILURES_OF_ADDRESS - 1
    await conn.execute("insert into login_attempt values ('from 10.0.0.1', %s, clock())", [tried])
    for _ in range(3):
        assert (await nobody.post("/auth/token", json=LOGIN)).status_code == 201
    # A failure a minute is forgotten; nobody waits here for half an hour.
    assert await value(conn, "select failures from login_attempt") > tried - 30


async def test_a_stolen_session_cannot_guess_its_password(browser: Client, conn: AsyncConnection) -> None:
    csrf = {"X-CSRF-Token": browser.csrf}  # type: ignore[attr-defined]
    wrong = {"password": "another horse", "current_password": "a guess"}
    await browser.refused("PUT", "/auth/password", 401, json=wrong, headers=csrf)
    noted = "select detail from audit_log where action = 'refuse' and actor = 'user:ann'"
    assert await value(conn, noted) == {"login": "wrong name or password"}
    await conn.execute(
        "update login_attempt set failures = 20, tried_at = clock() where subject like 'user ann from %'"
    )
    right = {**wrong, "current_password": PASSWORD}
    await browser.refused("PUT", "/auth/password", 429, json=right, headers=csrf)
    await conn.execute("update login_attempt set tried_at = tried_at - interval '1 hour'")
    await browser.ok("PUT", "/auth/password", status=204, json=right, headers=csrf)


@pytest.mark.parametrize("secret", ["token", "session"])
async def test_the_own_password_needs_the_current_one(app: FastAPI, conn: AsyncConnection, secret: str) -> None:
    await accounts.add_user(conn, name="root", role=Role.ADMIN, password=PASSWORD, actor=Actor("test"))
    await accounts.add_user(conn, name="bob", role=Role.VIEWER, actor=Actor("test"))
    row = await accounts.find_user(conn, "root")
    issued = await accounts.issue(conn, row, kind="token", name="t", actor=Actor("test"), seconds=600)
    admin = Client(app, issued.secret)
    headers = {}
    if secret == "session":
        admin = Client(app, None)
        signed_in = await admin.post("/auth/login", json={"username": "root", "password": PASSWORD})
        headers = {"X-CSRF-Token": signed_in.json()["csrf_token"]}
    change = {"json": {"password": "another horse"}, "headers": headers}
    refusal = await admin.refused("PATCH", "/api/v1/users/ROOT", 403, **change)
    assert "current one" in str(refusal)
    await admin.ok("PATCH", "/api/v1/users/bob", **change)
    assert (await accounts.find_user(conn, "root")).password_hash == row.password_hash


async def test_over_tls_only_the_cookie_of_this_host_counts(app: FastAPI, browser: Client) -> None:
    session = browser.cookies[PLAIN_COOKIE]
    for name, status in ((PLAIN_COOKIE, 401), (SECURE_COOKIE, 200)):
        answer = await Client(app, None).get(
            f"https://{BASE.split('//')[1]}/auth/session", headers={"Cookie": f"{name}={session}"}
        )
        assert answer.status_code == status
        assert answer.headers["strict-transport-security"] == "max-age=31536000"
    assert "strict-transport-security" not in (await browser.get("/auth/session")).headers


async def test_a_cookie_alone_can_read_and_a_change_needs_its_csrf_token_and_our_origin(browser: Client) -> None:
    assert PLAIN_COOKIE in browser.cookies
    assert (await browser.ok("GET", "/auth/session"))["user"] == "ann"
    csrf = {"X-CSRF-Token": browser.csrf}  # type: ignore[attr-defined]
    for headers in (
        {},
        {"X-CSRF-Token": "guess"},
        {**csrf, "Origin": "http://evil.test"},
        {**csrf, "Referer": "http://evil.test/evertick.test"},
        {**csrf, "Sec-Fetch-Site": "cross-site"},
        {**csrf, "Origin": "null"},
    ):
        await browser.refused("POST", "/auth/logout", 403, headers=headers)
    await browser.ok("POST", "/auth/logout", status=204, headers={**csrf, "Origin": BASE})


async def test_a_login_form_on_another_site_is_refused(nobody: Client, ann: None) -> None:
    await nobody.refused("POST", "/auth/login", 403, json=LOGIN, headers={"Origin": "http://evil.test"})


async def test_the_cookie_is_kept_from_scripts_and_other_sites(app: FastAPI, ann: None) -> None:
    plain = (await Client(app, None).post("/auth/login", json=LOGIN)).headers["set-cookie"].lower()
    assert all(word in plain for word in ("httponly", "samesite=strict", "path=/", PLAIN_COOKIE))
    client = Client(app, None)
    secure = (await client.post("https://evertick.test/auth/login", json=LOGIN)).headers["set-cookie"]
    assert secure.startswith(f"{SECURE_COOKIE}=") and "secure" in secure.lower() and "domain" not in secure.lower()


Ends = Callable[[AsyncConnection, Client], Awaitable[object]]


async def _sign_out(conn: AsyncConnection, client: Client) -> object:
    headers = {"X-CSRF-Token": getattr(client, "csrf", "")}
    return await client.ok("POST", "/auth/logout", status=204, headers=headers)


async def _disable(conn: AsyncConnection, client: Client) -> object:
    return await accounts.change_user(conn, name="ann", disabled=True, actor=Actor("test"))


async def _new_password(conn: AsyncConnection, client: Client) -> object:
    return await accounts.set_password(conn, name="ann", password="another horse", actor=Actor("test"))


async def _own_new_password(conn: AsyncConnection, client: Client) -> object:
    wanted = {"password": "another horse", "current_password": PASSWORD}
    headers = {"X-CSRF-Token": getattr(client, "csrf", "")}
    return await client.ok("PUT", "/auth/password", status=204, json=wanted, headers=headers)


async def _expire(conn: AsyncConnection, client: Client) -> object:
    return await conn.execute("update credential set expires_at = clock() - interval '1 second'")


async def _revoke(conn: AsyncConnection, client: Client) -> object:
    for each in await accounts_queries.list_credentials(conn, account="ann"):
        await accounts.revoke(conn, credential_id=each.credential_id, actor=Actor("test"))
    return None


@pytest.mark.parametrize("end", [_sign_out, _disable, _new_password, _own_new_password, _expire, _revoke])
@pytest.mark.parametrize("means", ["cookie", "bearer"])
async def test_no_credential_outlives_its_end(
    app: FastAPI, conn: AsyncConnection, nobody: Client, browser: Client, end: Ends, means: str
) -> None:
    client = browser
    if means == "bearer":
        client = Client(app, (await nobody.ok("POST", "/auth/token", status=201, json=LOGIN))["access_token"])
    secret = browser.cookies[PLAIN_COOKIE]
    await client.ok("GET", "/auth/session")
    await end(conn, client)
    if means == "cookie":
        client.cookies.set(PLAIN_COOKIE, secret)
    await client.refused("GET", "/auth/session", 401)


async def test_a_limited_token_cannot_set_the_password_nor_can_who_does_not_know_the_old_one(
    app: FastAPI, conn: AsyncConnection, browser: Client
) -> None:
    row = await accounts.find_user(conn, "ann")
    issued = await accounts.issue(
        conn, row, kind="token", name="ci", actor=Actor("test"), seconds=60, limits=(Role.VIEWER, None)
    )
    wanted = {"password": "another horse", "current_password": PASSWORD}
    await Client(app, issued.secret).refused("PUT", "/auth/password", 401, json=wanted)
    csrf = {"X-CSRF-Token": browser.csrf}  # type: ignore[attr-defined]
    await browser.refused("PUT", "/auth/password", 401, json={"password": "another horse"}, headers=csrf)
    await browser.refused(
        "PUT", "/auth/password", 400, json={"password": "short", "current_password": PASSWORD}, headers=csrf
    )


async def test_a_limited_token_may_less_than_its_user(signed: Signed) -> None:
    client = await signed(Role.ADMIN, name="boss", limits=(Role.VIEWER, ["finance"]))
    session = await client.ok("GET", "/auth/session")
    assert (session["role"], session["tags"]) == ("viewer", ["finance"])
    await client.refused("GET", "/metrics", 403)


async def test_the_first_start_makes_an_admin_with_a_link_that_works_once(
    app: FastAPI, conn: AsyncConnection, nobody: Client
) -> None:
    secret = await accounts.first_admin(conn, actor=Actor("up"), password=None)
    assert secret is not None
    page = await nobody.get(f"/auth/link/{secret}")
    assert page.status_code == 200 and 'method="post"' in page.text, "looking does not use it up"
    taken = await asyncio.gather(*(Client(app, None).post(f"/auth/link/{secret}") for _ in range(4)))
    assert sorted(answer.status_code for answer in taken) == [303, 401, 401, 401]
    cookie = next(answer.cookies[PLAIN_COOKIE] for answer in taken if answer.status_code == 303)
    client = Client(app, None)
    client.cookies.set(PLAIN_COOKIE, cookie)
    session = await client.ok("GET", "/auth/session")
    assert (session["user"], session["role"]) == ("admin", "admin")
    await client.ok(
        "PUT",
        "/auth/password",
        status=204,
        json={"password": PASSWORD},
        headers={"X-CSRF-Token": session["csrf_token"]},
    )
    assert await accounts.first_admin(conn, actor=Actor("up"), password=None) is None
    await nobody.ok("POST", "/auth/token", status=201, json={"username": "admin", "password": PASSWORD})


async def test_automation_sets_the_first_password_and_never_overwrites_one(
    conn: AsyncConnection, quick_passwords: PasswordHasher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "_hasher", lambda: quick_passwords)
    assert await accounts.first_admin(conn, actor=Actor("up"), password=PASSWORD) is None
    before = (await accounts.find_user(conn, "admin")).password_hash
    assert await accounts.first_admin(conn, actor=Actor("up"), password="another horse") is None
    assert (await accounts.find_user(conn, "admin")).password_hash == before
    assert before is not None and before.startswith("$argon2id$v=19$m=65536,t=3,p=1$")


async def test_no_foreign_address_is_served_before_there_is_a_password(conn: AsyncConnection) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(InvalidSettings, match="no user has a password"):
            await refuse_open_door(conn, host=host, has_password=False)
    for host in ("127.0.0.1", "::1", "localhost"):
        await refuse_open_door(conn, host=host, has_password=False)
    await refuse_open_door(conn, host="0.0.0.0", has_password=True)
    await accounts.first_admin(conn, actor=Actor("up"), password=PASSWORD)
    await refuse_open_door(conn, host="0.0.0.0", has_password=False)


async def test_two_admins_cannot_take_each_others_last_one_away(conn: AsyncConnection, database: str) -> None:
    for name in ("a", "b"):
        await accounts.add_user(conn, name=name, role=Role.ADMIN, actor=Actor("test"))
    await accounts.change_user(conn, name="A", role=Role.VIEWER, actor=Actor("test"))
    with pytest.raises(Conflict, match="last admin"):
        await accounts.change_user(conn, name="b", disabled=True, actor=Actor("test"))
    with pytest.raises(Conflict, match="last admin"):
        await accounts.change_user(conn, name="b", tags=["x"], actor=Actor("test"))
    with pytest.raises(Conflict, match="already"):
        await accounts.add_user(conn, name="B", role=Role.VIEWER, actor=Actor("test"))


async def test_no_secret_is_in_the_database(conn: AsyncConnection, nobody: Client, ann: None) -> None:
    token = (await nobody.ok("POST", "/auth/token", status=201, json=LOGIN))["access_token"]
    for table in ("account", "credential", "audit_log", "login_attempt"):
        text = str(await value(conn, f"select string_agg(t::text, ' ') from {table} t"))
        assert token not in text and PASSWORD not in text
