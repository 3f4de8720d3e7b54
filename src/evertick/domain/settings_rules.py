"""Validates groups of settings beyond the type of each one. Raises `InvalidSettings`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_network

from evertick.domain.errors import InvalidSettings, UserError
from evertick.domain.pod_options import POD_OPTIONS
from evertick.domain.sinks import parse_sink

LARGEST_PORT = 65_535
POD_CLEANUPS = ("always", "on_success", "never")


def check_pods(*, options: Iterable[str], cleanup: str, owner: str) -> None:
    if unknown := [name for name in options if name not in POD_OPTIONS]:
        raise InvalidSettings(f"EVERTICK_POD_OPTIONS: {unknown[0]!r} is unknown: use {', '.join(POD_OPTIONS)}.")
    if cleanup not in POD_CLEANUPS:
        raise InvalidSettings(f"EVERTICK_POD_CLEANUP={cleanup!r} is unknown: use {', '.join(POD_CLEANUPS)}.")
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", owner):
        raise InvalidSettings(f"EVERTICK_POD_OWNER={owner!r} is not a valid label: use letters, digits, '-' and '.'.")


def check_notifications(*, sinks: Mapping[str, Iterable[str]], networks: Iterable[str], sender: str | None) -> None:
    """`sinks` by the name of the variable that contains them."""
    for name, texts in sinks.items():
        for text in texts:
            try:
                parse_sink(text)
            except UserError as error:
                raise InvalidSettings(f"{name}: {error}") from None
    for text in networks:
        try:
            ip_network(text)
        except ValueError:
            raise InvalidSettings(
                f"EVERTICK_WEBHOOK_NETWORKS: {text!r} is not a network: write one such as 10.0.0.0/8 or 127.0.0.1."
            ) from None
    if sender is not None and ("@" not in sender or not sender.isprintable()):
        raise InvalidSettings(
            f"EVERTICK_SMTP_FROM={sender!r} is not an email address: write one such as evertick@example.com."
        )


def check_storage(storage: str, *, keys: tuple[str | None, str | None], endpoint: str | None) -> None:
    is_place = re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._/-]*)?", storage)
    # Servers and proxies resolve such path segments, which would address another object.
    if not is_place or {".", ".."} & set(storage.split("/")):
        raise InvalidSettings(
            f"EVERTICK_STORAGE={storage!r} is not a storage URL: write one such as s3://bucket/prefix."
        )
    if not all(keys):
        raise InvalidSettings("EVERTICK_STORAGE needs EVERTICK_STORAGE_KEY_ID and EVERTICK_STORAGE_SECRET_KEY.")
    address = re.fullmatch(r"https?://[\w.-]+(?::(\d{1,5}))?/?", endpoint) if endpoint else None
    if endpoint and (address is None or int(address[1] or 0) > LARGEST_PORT):
        raise InvalidSettings(
            f"EVERTICK_STORAGE_ENDPOINT={endpoint!r} is not a URL: write one such as https://s3.example:9000."
        )
