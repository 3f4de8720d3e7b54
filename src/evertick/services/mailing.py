"""Sends one email by SMTP, over the configured connection. Uses only the standard library."""

from __future__ import annotations

import smtplib
import ssl
from email.message import EmailMessage
from email.utils import format_datetime, localtime

from evertick.domain.errors import DeliveryFailed, UserError
from evertick.domain.stored_values import Connection
from evertick.services.cutting import OnOpen, cut

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
