"""One delivery of a notification: by webhook, by email over SMTP, by a notifier of another package, or as a run of a DAG.

Decides nothing: the scheduler chooses what is sent and records the result.
"""

from __future__ import annotations

import asyncio
import smtplib
import ssl
from collections.abc import Callable
from email.message import EmailMessage
from email.utils import format_datetime, localtime
from functools import partial
from typing import cast

from evertick.config import Settings
from evertick.domain.access import Actor
from evertick.domain.dags.params import JsonValue
from evertick.domain.errors import DeliveryFailed, EvertickError, NotFound, UserError
from evertick.domain.monitoring.openlineage import DEFAULT_NAMESPACE, lineage_body
from evertick.domain.notifications import (
    Destination,
    DestinationKind,
    Fact,
    check_url,
    headline,
    path_of,
    plain_text,
    read_destination,
    slack_body,
    webhook_body,
)
from evertick.domain.stored_values import Connection, ValueKind, hidden_parts, read_connection
from evertick.engine.runs import trigger
from evertick.extensions import ExtensionKind, Notifier, extension_names, find_extension
from evertick.notifications import webhook
from evertick.notifications.dag_rules import fail_fast, pause_after_failures
from evertick.notifications.webhook import SEND_SECONDS, OnOpen, Post, cut
from evertick.release import release
from evertick.runtime.thread_runner import ThreadRunner
from evertick.secrets.backends import Connect, SecretProvider
from evertick.secrets.masking import Masker

# Names this program in events of OpenLineage.
_PRODUCER = "https://evertick.dev/scheduler"
SUBMISSION_PORT, TLS_PORT = 587, 465


def compose(fact: Fact, *, sender: str, recipients: list[str], delivery: str) -> EmailMessage:
    """EmailMessage refuses line breaks in headers: a name or a reason cannot inject one."""
    message = EmailMessage()
    message["From"] = sender
    message["To"] = ", ".join(recipients)
    message["Subject"] = headline(fact)
    message["Date"] = format_datetime(localtime())
    # The same for every attempt at this delivery, so that a mail server can recognize duplicates.
    message["Message-ID"] = f"<evertick-{delivery}@{sender.rpartition('@')[2].strip('>') or 'localhost'}>"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(plain_text(fact))
    return message


def send(message: EmailMessage, server: Connection, on_open: OnOpen) -> str:
    """The server's reply, in short. Blocks; raises DeliveryFailed or OSError.

    `smtp://` requires STARTTLS, unless `?tls=none`; `smtps://` uses TLS from the start.
    """
    if server.type not in ("smtp", "smtps") or not server.host:
        raise UserError("the SMTP connection must look like smtp://login:PASSWORD@mail.example.com:587")
    context = ssl.create_default_context()
    try:
        mail: smtplib.SMTP
        if server.type == "smtps":
            mail = smtplib.SMTP_SSL(server.host, server.port or TLS_PORT, timeout=SEND_SECONDS, context=context)
        else:
            mail = smtplib.SMTP(server.host, server.port or SUBMISSION_PORT, timeout=SEND_SECONDS)
        with mail:
            on_open(lambda: cut(mail.sock))
            if server.type == "smtp" and server.extra.get("tls") != "none":
                mail.starttls(context=context)
            if server.login:
                mail.login(server.login, server.password)
            refused = mail.send_message(message)
    except smtplib.SMTPRecipientsRefused as error:
        is_final = all(code >= 500 for code, _ in error.recipients.values())
        raise DeliveryFailed(f"refused: {_refusals(error.recipients)}", is_final=is_final) from None
    except smtplib.SMTPResponseException as error:
        said = error.smtp_error.decode("utf-8", "replace") if isinstance(error.smtp_error, bytes) else error.smtp_error
        # A wrong password or a forbidden sender is fixed by an operator, and soon.
        raise DeliveryFailed(f"SMTP {error.smtp_code} {said}") from None
    except smtplib.SMTPException as error:
        raise DeliveryFailed(f"SMTP: {error or type(error).__name__}") from None
    return f"accepted, but not for {_refusals(refused)}" if refused else "accepted"


def _send_by_plugin(name: str, fact: Fact, _on_open: OnOpen, *, target: str, secret: str | None, delivery: str) -> str:
    notifier = find_extension(ExtensionKind.NOTIFIER, name)
    if notifier is None:
        installed = ", ".join(extension_names(ExtensionKind.NOTIFIER)) or "none"
        raise DeliveryFailed(
            f"no package with a notifier {name!r} is installed at the scheduler; installed: {installed}"
        )
    try:
        answer = cast("Notifier", notifier)(
            {"text": headline(fact), **fact}, target=target, secret=secret, delivery=delivery
        )
    except EvertickError:
        raise
    except Exception as error:
        # Third-party code: an error in it is a failed delivery.
        raise DeliveryFailed(f"notifier {name!r}: {type(error).__name__}: {error}") from None
    return str(answer or "sent")


def _refusals(recipients: dict[str, tuple[int, bytes]]) -> str:
    return "; ".join(f"{who}: {code} {said.decode('utf-8', 'replace')}" for who, (code, said) in recipients.items())


THREADS = 16


Job = Callable[[OnOpen], str]


class Sending:
    """`connect` returns the connection for reading secrets and starting callbacks."""

    def __init__(self, settings: Settings, *, connect: Connect) -> None:
        self._settings, self._connect = settings, connect
        self._grants: SecretProvider | None = None
        self._threads = ThreadRunner("notify", most=THREADS)

    async def send(self, sink: str, fact: Fact, *, delivery: str) -> str:
        """The destination's response. Raises DeliveryFailed, whose text contains no secret."""
        chosen, fact = read_destination(sink), {**fact, **self._link(fact), "delivery": delivery}
        if chosen.kind is DestinationKind.CALL:
            return await self._call(chosen.target, fact, delivery)
        if chosen.kind in (DestinationKind.PAUSE, DestinationKind.FAIL_FAST):
            return await self._apply(chosen, fact)
        values = await self._values(chosen)
        masker = Masker(part for (kind, _), text in values.items() for part in hidden_parts(ValueKind(kind), text))
        try:
            return masker.hide(await self._in_thread(self._job(chosen, fact, delivery, values)))
        except DeliveryFailed as error:
            hidden, after = masker.hide(str(error)), error.retry_after_seconds
            raise DeliveryFailed(hidden, is_final=error.is_final, retry_after_seconds=after) from None
        except (OSError, UserError) as error:
            raise DeliveryFailed(masker.hide(f"{type(error).__name__}: {error}")) from None

    def _link(self, fact: Fact) -> dict[str, JsonValue]:
        """The address of the task, run or DAG in the web UI, if its public address is known."""
        base = self._settings.public_url
        return {} if base is None else {"url": base.rstrip("/") + path_of(fact)}

    async def _values(self, sink: Destination) -> dict[tuple[str, str], str]:
        """The secrets that the destination names, read for this delivery only."""
        wanted: list[tuple[str, str]] = [(ValueKind.SECRET, name) for name in (sink.secret, sink.sign_with) if name]
        if sink.kind is DestinationKind.EMAIL:
            wanted = [(ValueKind.CONNECTION, self._settings.smtp_connection)]
        if not wanted:
            return {}
        self._grants = self._grants or SecretProvider(self._settings)
        try:
            return await self._grants.values(self._grants.stored(self._connect), wanted)
        except UserError as error:
            raise DeliveryFailed(str(error)) from None

    def _job(self, sink: Destination, fact: Fact, delivery: str, values: dict[tuple[str, str], str]) -> Job:
        if sink.kind is DestinationKind.EMAIL:
            server = read_connection(values[ValueKind.CONNECTION, self._settings.smtp_connection])
            sender = self._settings.smtp_from or f"evertick@{server.host}"
            message = compose(fact, sender=sender, recipients=sink.target.split(), delivery=delivery)
            return partial(send, message, server)
        if sink.kind is DestinationKind.PLUGIN:
            name, _, target = sink.target.partition(":")
            secret = values[ValueKind.SECRET, sink.secret] if sink.secret else None
            return partial(_send_by_plugin, name, fact, target=target, secret=secret, delivery=delivery)
        url = check_url(values[ValueKind.SECRET, sink.secret].strip()) if sink.secret else sink.target
        post = Post(
            url=url,
            body=self._body(sink, fact),
            delivery=delivery,
            key=values[ValueKind.SECRET, sink.sign_with] if sink.sign_with else None,
            allowed=self._settings.webhook_allowed_networks,
        )
        return partial(webhook.send, post)

    def _body(self, sink: Destination, fact: Fact) -> bytes:
        if sink.kind is DestinationKind.OPENLINEAGE:
            namespace = self._settings.public_url or DEFAULT_NAMESPACE
            return lineage_body(fact, namespace=namespace, producer=f"{_PRODUCER}/{release()}")
        return slack_body(fact) if sink.kind is DestinationKind.SLACK else webhook_body(fact)

    async def _in_thread(self, job: Job) -> str:
        """The caller continues in time, even if the job hangs in a call that cannot be aborted."""
        cuts: list[Callable[[], None]] = []
        try:
            async with asyncio.timeout(SEND_SECONDS):
                return await self._threads.do(partial(job, cuts.append))
        except TimeoutError:
            raise DeliveryFailed(f"it did not answer within {SEND_SECONDS:g} s") from None
        finally:
            # It has an effect only while the job still waits.
            for cut in cuts:
                cut()

    async def _apply(self, rule: Destination, fact: Fact) -> str:
        """What the failure does to its DAG."""
        dag, conn = str(fact["dag"]), await self._connect()
        try:
            if rule.kind is DestinationKind.PAUSE:
                return await pause_after_failures(conn, dag=dag, most=int(rule.target))
            return await fail_fast(conn, dag=dag, run_id=int(str(fact["run"])), task=str(fact["task"]))
        except UserError as error:
            raise DeliveryFailed(str(error), is_final=isinstance(error, NotFound)) from None

    async def _call(self, dag: str, event: Fact, delivery: str) -> str:
        """One run per delivery, by its key, however often this is repeated."""
        try:
            conn, params, key = await self._connect(), {"event": dict(event)}, f"notification {delivery}"
            made = await trigger(conn, dag=dag, params=params, actor=Actor("notification"), key=key)
        except UserError as error:
            # The callback is published with its DAG, a moment later.
            raise DeliveryFailed(str(error), is_final=not isinstance(error, NotFound)) from None
        return f"run {made.run_id}"
