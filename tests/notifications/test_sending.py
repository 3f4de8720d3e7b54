"""Webhooks and e-mail against real servers: what arrives, what is refused, and that no secret is told."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import socket
import ssl
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.domain.access import Actor
from evertick.domain.errors import DeliveryFailed
from evertick.domain.notifications import Fact
from evertick.domain.stored_values import ValueKind
from evertick.engine.secrets import put_value
from evertick.notifications import delivery as sending_module
from evertick.notifications.delivery import Sending, compose
from evertick.notifications.webhook import is_public, resolve
from evertick.secrets.keyring import load_keyring, make_key
from tests.notifications.sinks import mail_sink, web_sink
from tests.waiting import eventually

FACT: Fact = {"event": "failure", "dag": "nightly", "run": 7, "task": "load", "reason": "boom"}


@pytest.fixture
async def settings(tmp_path: Path) -> Settings:
    found = Settings(home=tmp_path, webhook_allowed_networks=("127.0.0.0/8",), smtp_from="evertick@example.com")
    make_key(found)
    return found


@pytest.fixture
async def sending(settings: Settings, conn: AsyncConnection) -> Sending:
    return _sending(settings, conn)


def _sending(settings: Settings, conn: AsyncConnection) -> Sending:
    async def connect() -> AsyncConnection:
        return conn

    return Sending(settings, connect=connect)


async def keep(conn: AsyncConnection, settings: Settings, kind: ValueKind, name: str, text: str) -> None:
    await put_value(conn, load_keyring(settings), kind=kind, name=name, value=text, actor=Actor("test"))


async def refusal(sending: Sending, sink: str) -> DeliveryFailed:
    with pytest.raises(DeliveryFailed) as caught:
        await sending.send(sink, FACT, delivery="17")
    return caught.value


async def test_a_webhook_gets_json_with_its_id_and_a_signature(
    sending: Sending, conn: AsyncConnection, settings: Settings
) -> None:
    await keep(conn, settings, ValueKind.SECRET, "key", "s3cret-key")
    with web_sink() as hook:
        assert await sending.send(f"webhook:{hook.url}/ops?x=1;sign=key", FACT, delivery="17") == "HTTP 200"
        await sending.send(f"slack:{hook.url}/slack", FACT, delivery="18")
    signed, slack = hook.told
    assert signed.json == {"text": "nightly: load failed (run 7)", **FACT, "delivery": "17"}
    assert (signed.path, signed.headers["evertick-delivery"]) == ("/ops?x=1", "17")
    signed_text = f"17.{signed.headers['evertick-timestamp']}.".encode() + signed.body
    expected = hmac.new(b"s3cret-key", signed_text, hashlib.sha256).hexdigest()
    assert signed.headers["evertick-signature"] == f"v1={expected}"
    assert slack.json == {"text": "nightly: load failed (run 7)\n```boom```"}
    assert "evertick-signature" not in slack.headers


async def test_every_message_links_to_its_run_at_the_public_address(conn: AsyncConnection, settings: Settings) -> None:
    public = _sending(replace(settings, public_url="https://jobs.example.com/evertick/"), conn)
    base = "https://jobs.example.com/evertick"
    with web_sink() as hook:
        await public.send(f"webhook:{hook.url}/", FACT, delivery="1")
        await public.send(f"webhook:{hook.url}/", {**FACT, "task": "größe[3]"}, delivery="2")
        await public.send(f"slack:{hook.url}/", {"event": "failure", "dag": "nightly", "run": 7}, delivery="3")
        await public.send(f"webhook:{hook.url}/", {"event": "deadline", "dag": "a b"}, delivery="4")
        links = [each.json.get("url") for each in hook.told]
        assert links == [
            f"{base}/runs/7/tasks/load",
            f"{base}/runs/7/tasks/gr%C3%B6%C3%9Fe?map_index=3",
            None,
            f"{base}/dags/a%20b",
        ]
        assert hook.told[2].json == {"text": f"nightly failed (run 7)\n{base}/runs/7"}
    message = compose(
        {**FACT, "url": f"{base}/runs/7"}, sender="a@example.com", recipients=["b@example.com"], delivery="5"
    )
    assert f"url: {base}/runs/7\n" in message.get_content()


async def test_an_address_in_a_secret_is_read_when_it_is_sent_and_never_told(
    sending: Sending, conn: AsyncConnection, settings: Settings
) -> None:
    assert "secret 'url' is not set" in str(await refusal(sending, "webhook:secret/url"))
    with web_sink() as hook:
        await keep(conn, settings, ValueKind.SECRET, "url", f"{hook.url}/token-abc123")
        assert await sending.send("webhook:secret/url", FACT, delivery="1") == "HTTP 200"
        hook.status["/token-abc123"], hook.answer = 400, f"no {hook.url}/token-abc123".encode()
        refused = await refusal(sending, "webhook:secret/url")
    assert (str(refused), refused.is_final) == ("HTTP 400 no ***", True)
    await keep(conn, settings, ValueKind.SECRET, "url", "not an address")
    assert (
        str(await refusal(sending, "webhook:secret/url"))
        == "UserError: *** is not a webhook URL: write one such as https://example.com/hook, in ASCII."
    )


async def test_what_a_sink_answers_decides_whether_it_is_tried_again(sending: Sending) -> None:
    with web_sink() as hook:
        hook.status = {"/busy": 429, "/broken": 503, "/gone": 404, "/moved": 302}
        busy = await refusal(sending, f"webhook:{hook.url}/busy")
        assert (busy.is_final, busy.retry_after_seconds) == (False, 77.0)
        assert not (await refusal(sending, f"webhook:{hook.url}/broken")).is_final
        assert (await refusal(sending, f"webhook:{hook.url}/gone")).is_final
        moved = await refusal(sending, f"webhook:{hook.url}/moved")
        assert moved.is_final and "redirects are not followed" in str(moved)
        assert [each.path for each in hook.told] == ["/busy", "/broken", "/gone", "/moved"]


async def test_who_is_not_there_or_no_web_server_is_told_as_such(sending: Sending) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        gone = await refusal(sending, f"webhook:http://127.0.0.1:{port}/")
    assert "refused" in str(gone) and not gone.is_final
    nowhere = await refusal(sending, "webhook:http://nowhere.invalid/")
    assert "the name nowhere.invalid cannot be resolved" in str(nowhere)
    with mail_sink() as (_, port):
        assert "the response is not HTTP" in str(await refusal(sending, f"webhook:http://127.0.0.1:{port}/"))


@pytest.mark.requirement("F7")
async def test_a_sink_that_never_answers_is_broken_off(sending: Sending, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending_module, "SEND_SECONDS", 0.3)
    with web_sink() as hook:
        hook.status["/"] = None
        hung = await refusal(sending, f"webhook:{hook.url}/")
        assert "did not answer within 0.3 s" in str(hung) and not hung.is_final
        # Its thread is free again although the sink still says nothing.
        await eventually(lambda: sending._threads._room._value == sending_module.THREADS)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fd00:ec2::254",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "2002:0a00:0001::",
        "ff02::1",
    ],
)
def test_no_address_of_a_private_place_is_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "017700000001", "127.1", "::ffff:7f00:1", "0"]
)
def test_every_spelling_of_this_machine_is_refused_unless_allowed(host: str) -> None:
    with pytest.raises(
        DeliveryFailed, match="not a public address; EVERTICK_WEBHOOK_ALLOWED_NETWORKS can allow it"
    ) as caught:
        resolve(host, 80, allowed=())
    assert caught.value.is_final
    assert resolve(host, 80, allowed=("0.0.0.0/0", "::/0"))


def test_a_name_that_also_leads_inside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that gives one public and one private address, or changes its answer: what was checked is used."""
    answers = [(2, 1, 6, "", (address, 80)) for address in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    with pytest.raises(DeliveryFailed, match=r"resolves to 10\.0\.0\.1"):
        resolve("rebind.example", 80, allowed=())


async def test_without_the_setting_no_private_address_is_reached(conn: AsyncConnection, tmp_path: Path) -> None:
    sending = _sending(Settings(home=tmp_path), conn)
    with web_sink() as hook:
        assert "not a public address" in str(await refusal(sending, f"webhook:{hook.url}/"))
        assert hook.told == []


# E-mail -----------------------------------------------------------------------------------------------------


async def test_an_email_arrives_and_no_name_adds_a_header(
    sending: Sending, conn: AsyncConnection, settings: Settings
) -> None:
    assert "connection 'smtp' is not set" in str(await refusal(sending, "email:ops@example.com"))
    with mail_sink() as (inbox, port):
        await keep(conn, settings, ValueKind.CONNECTION, "smtp", f"smtp://127.0.0.1:{port}/?tls=none")
        fact = {**FACT, "task": "load\r\nBcc: evil@example.com"}
        assert await sending.send("email:ops@example.com dev@example.com", fact, delivery="17") == "accepted"
    (message,) = inbox.messages
    assert message["To"] == "ops@example.com, dev@example.com"
    assert message["Subject"] == "nightly: load Bcc: evil@example.com failed (run 7)"
    assert (message["Bcc"], message["From"]) == (None, "evertick@example.com")
    assert message["Message-ID"] == "<evertick-17@example.com>"
    assert "boom" in str(message.get_payload())


async def test_a_password_goes_only_over_tls_to_who_proves_its_name(
    sending: Sending, conn: AsyncConnection, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = certificate(tmp_path)
    with mail_sink() as (_, port):
        await keep(conn, settings, ValueKind.CONNECTION, "smtp", f"smtp://me:hunter22@localhost:{port}/")
        assert "STARTTLS extension not supported" in str(await refusal(sending, "email:ops@example.com"))
    with mail_sink(tls=server, password="hunter22") as (inbox, port):
        await keep(conn, settings, ValueKind.CONNECTION, "smtp", f"smtp://me:hunter22@localhost:{port}/")
        assert "certificate verify failed" in str(await refusal(sending, "email:ops@example.com"))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        assert await sending.send("email:ops@example.com", FACT, delivery="17") == "accepted"
        assert len(inbox.messages) == 1
        await keep(conn, settings, ValueKind.CONNECTION, "smtp", f"smtp://me:wrong-pass@localhost:{port}/")
        refused = await refusal(sending, "email:ops@example.com")
        assert "SMTP 535" in str(refused) and "wrong-pass" not in str(refused)


def certificate(folder: Path) -> ssl.SSLContext:
    """A server's context with a certificate for localhost that nobody has vouched for."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context
