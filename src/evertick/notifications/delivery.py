"""One delivery of a notification: by webhook, by email over SMTP, or as a run of a DAG.

Decides nothing: the scheduler chooses what is sent and records the result.
"""

from __future__ import annotations

import asyncio
import smtplib
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.message import EmailMessage
from email.utils import format_datetime, localtime
from functools import partial

from evertick.config import Settings
from evertick.domain.errors import DeliveryFailed, NotFound, UserError
from evertick.domain.notifications import (
    Destination,
    DestinationKind,
    Fact,
    check_url,
    headline,
    plain_text,
    read_destination,
    slack_body,
    webhook_body,
)
from evertick.domain.stored_values import Connection, ValueKind, hidden_parts, read_connection
from evertick.engine.runs import trigger
from evertick.notifications import webhook
from evertick.notifications.webhook import OnOpen, Post, cut
from evertick.secrets.backends import Connect, SecretProvider
from evertick.secrets.masking import Masker

SUBMISSION_PORT, TLS_PORT = 587, 465


def compose(*, sender: str, recipients: list[str], subject: str, text: str, delivery: str) -> EmailMessage:
    """EmailMessage refuses line breaks in headers: a name or a reason cannot inject one."""
    message = EmailMessage()
    message["From"] = sender
    message["To"] = ", ".join(recipients)
    message["Subject"] = subject
    message["Date"] = format_datetime(localtime())
    # The same for every attempt at this delivery, so that a mail server can recognize duplicates.
    message["Message-ID"] = f"<evertick-{delivery}@{sender.rpartition('@')[2].strip('>') or 'localhost'}>"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(text)
    return message


def send(message: EmailMessage, server: Connection, on_open: OnOpen, *, seconds: float) -> str:
    """The server's reply, in short. Blocks; raises DeliveryFailed or OSError.

    `smtp://` requires STARTTLS, unless `?tls=none`; `smtps://` uses TLS from the start.
    """
    if server.type not in ("smtp", "smtps") or not server.host:
        raise UserError("the SMTP connection must look like smtp://login:PASSWORD@mail.example.com:587")
    context = ssl.create_default_context()
    try:
        mail: smtplib.SMTP
        if server.type == "smtps":
            mail = smtplib.SMTP_SSL(server.host, server.port or TLS_PORT, timeout=seconds, context=context)
        else:
            mail = smtplib.SMTP(server.host, server.port or SUBMISSION_PORT, timeout=seconds)
        with mail:
            on_open(lambda: cut(mail.sock))
            if server.type == "smtp" and server.extra.get("tls") != "none":
                mail.starttls(context=context)
            if server.login:
                mail.login(server.login, server.password)
            refused = mail.send_message(message)
    except smtplib.SMTPRecipientsRefused as error:
        raise DeliveryFailed(f"refused: {_refusals(error.recipients)}", is_final=_all_final(error.recipients)) from None
    except smtplib.SMTPResponseException as error:
        said = error.smtp_error.decode("utf-8", "replace") if isinstance(error.smtp_error, bytes) else error.smtp_error
        # A wrong password or a forbidden sender is fixed by an operator, and soon.
        raise DeliveryFailed(f"SMTP {error.smtp_code} {said}") from None
    except smtplib.SMTPException as error:
        raise DeliveryFailed(f"SMTP: {error or type(error).__name__}") from None
    return f"accepted, but not for {_refusals(refused)}" if refused else "accepted"


def _refusals(recipients: dict[str, tuple[int, bytes]]) -> str:
    return "; ".join(f"{who}: {code} {said.decode('utf-8', 'replace')}" for who, (code, said) in recipients.items())


def _all_final(recipients: dict[str, tuple[int, bytes]]) -> bool:
    return all(code >= 500 for code, _ in recipients.values())


THREADS = 16


# For the whole delivery: name resolution, connection, response.
SEND_SECONDS = 10.0


Job = Callable[[OnOpen], str]


class Sending:
    """`connect` returns the connection for reading secrets and starting callbacks."""

    def __init__(self, settings: Settings, *, connect: Connect) -> None:
        self._settings, self._connect = settings, connect
        self._grants: SecretProvider | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="notify")

    async def send(self, sink: str, fact: Fact, *, delivery: str) -> str:
        """The destination's response. Raises DeliveryFailed, whose text contains no secret."""
        chosen = read_destination(sink)
        if chosen.kind is DestinationKind.CALL:
            return await self._call(chosen.target, {**fact, "delivery": delivery}, delivery)
        values = await self._values(chosen)
        masker = Masker(part for (kind, _), text in values.items() for part in hidden_parts(ValueKind(kind), text))
        try:
            said = await self._in_thread(self._job(chosen, {**fact, "delivery": delivery}, delivery, values))
        except DeliveryFailed as error:
            raise DeliveryFailed(
                masker.hide(str(error)), is_final=error.is_final, retry_after_seconds=error.retry_after_seconds
            ) from None
        except (OSError, UserError) as error:
            raise DeliveryFailed(masker.hide(f"{type(error).__name__}: {error}")) from None
        return masker.hide(said)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _values(self, sink: Destination) -> dict[tuple[str, str], str]:
        """The secrets that the destination names, read for this delivery only."""
        wanted: list[tuple[str, str]] = [(ValueKind.SECRET, name) for name in (sink.secret, sink.sign_with) if name]
        if sink.kind is DestinationKind.EMAIL:
            wanted = [(ValueKind.CONNECTION, self._settings.smtp_connection)]
        if not wanted:
            return {}
        self._grants = self._grants or SecretProvider(self._settings)
        try:
            return await self._grants.values(self._connect, wanted)
        except UserError as error:
            raise DeliveryFailed(str(error)) from None

    def _job(self, sink: Destination, fact: Fact, delivery: str, values: dict[tuple[str, str], str]) -> Job:
        if sink.kind is DestinationKind.EMAIL:
            server = read_connection(values[ValueKind.CONNECTION, self._settings.smtp_connection])
            sender = self._settings.smtp_from or f"evertick@{server.host}"
            message = compose(
                sender=sender,
                recipients=sink.target.split(),
                subject=headline(fact),
                text=plain_text(fact),
                delivery=delivery,
            )
            return lambda on_open: send(message, server, on_open, seconds=SEND_SECONDS)
        url = check_url(values[ValueKind.SECRET, sink.secret].strip()) if sink.secret else sink.target
        post = Post(
            url=url,
            body=slack_body(fact) if sink.kind is DestinationKind.SLACK else webhook_body(fact),
            delivery=delivery,
            key=values[ValueKind.SECRET, sink.sign_with] if sink.sign_with else None,
            allowed=self._settings.webhook_allowed_networks,
            seconds=SEND_SECONDS,
        )
        return partial(webhook.send, post)

    async def _in_thread(self, job: Job) -> str:
        """The caller continues in time, even if the job hangs in a call that cannot be aborted."""
        cuts: list[Callable[[], None]] = []
        running = asyncio.get_running_loop().run_in_executor(self._threads, job, cuts.append)
        try:
            return await asyncio.wait_for(asyncio.shield(running), SEND_SECONDS)
        except TimeoutError:
            raise DeliveryFailed(f"it did not answer within {SEND_SECONDS:g} s") from None
        finally:
            if not running.done():
                for cut in cuts:
                    cut()
                running.add_done_callback(_forget)

    async def _call(self, dag: str, event: Fact, delivery: str) -> str:
        """One run per delivery, by its key, however often this is repeated."""
        try:
            made = await trigger(
                await self._connect(),
                dag=dag,
                params={"event": dict(event)},
                actor="notification",
                key=f"notification {delivery}",
            )
        except UserError as error:
            # The callback is published with its DAG, a moment later.
            raise DeliveryFailed(str(error), is_final=not isinstance(error, NotFound)) from None
        return f"run {made.run_id}"


def _forget(job: asyncio.Future[str]) -> None:
    """The caller no longer waits: retrieve the exception, so that asyncio does not log it."""
    if not job.cancelled():
        job.exception()
