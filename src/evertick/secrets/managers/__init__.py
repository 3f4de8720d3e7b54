"""Secret managers as backends: values are read when an attempt needs them, kept in memory for a short time, and never stored.

A backend is a URL in EVERTICK_SECRETS_BACKENDS, whose scheme chooses the manager, such as
`vault+https://vault.example.com:8200/secret/evertick?token_file=/run/vault/token` or `aws-ssm://eu-central-1/evertick`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from typing import Protocol
from urllib.parse import parse_qsl, urlsplit

from evertick.domain.errors import InvalidSettings

# The module of each scheme. Its `open_manager(place)` returns a Manager.
_SCHEMES = {"vault+http": "vault", "vault+https": "vault", "aws-secrets": "aws", "aws-ssm": "aws"}
# A changed value is used after this time; one that was read before is used for longer while the manager does not answer.
KEEP_SECONDS, STALE_SECONDS = 60.0, 600.0
_MOST_KEPT = 10_000


class Manager(Protocol):
    """Reads one value. Raises ManagerUnavailable only if it may succeed later."""

    def read(self, path: str) -> str | None: ...


class ManagerUnavailable(Exception):
    """The manager does not answer, or cannot for now. The message contains no value."""


class Place:
    """The parts of a backend's URL."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.scheme, self.netloc, self.path = parts.scheme, parts.netloc, parts.path.strip("/")
        self.options = dict(parse_qsl(parts.query))
        if not parts.hostname or parts.username is not None or parts.fragment:
            raise InvalidSettings(
                f"EVERTICK_SECRETS_BACKENDS: {url.partition('?')[0]!r} needs a host or region, and no password."
            )

    def refuse_unknown(self, *known: str) -> None:
        if unknown := sorted(self.options.keys() - {*known, "keep", "stale"}):
            raise InvalidSettings(
                f"EVERTICK_SECRETS_BACKENDS: unknown option {unknown[0]!r} of {self.scheme}: use {', '.join(known)}, keep, stale."
            )

    def seconds(self, name: str, default: float) -> float:
        try:
            return float(self.options.get(name, default))
        except ValueError:
            raise InvalidSettings(
                f"EVERTICK_SECRETS_BACKENDS: {name} of {self.scheme} must be a number of seconds."
            ) from None


class CachedManager:
    """A backend: a manager behind a small cache in memory."""

    def __init__(
        self, manager: Manager, *, keep_seconds: float, stale_seconds: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._manager, self._keep, self._stale, self._now = manager, keep_seconds, stale_seconds, now
        self._values: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, kind: str, name: str) -> str | None:
        # A server would resolve such segments to another value.
        if {"", ".", ".."} & set(name.split("/")):
            return None
        path = f"{kind}/{name}"
        with self._lock:
            value, read_at = self._values.get(path, (None, 0.0))
        age = self._now() - read_at
        if value is not None and age < self._keep:
            return value
        try:
            found = self._manager.read(path)
        except ManagerUnavailable:
            # A task that ran a moment ago does not fail because the manager restarts.
            if value is not None and age < self._stale:
                return value
            raise
        with self._lock:
            self._values.pop(path, None)
            if found is not None:
                self._values[path] = (found, self._now())
                if len(self._values) > _MOST_KEPT:
                    self._values.popitem(last=False)
        return found


def is_manager(name: str) -> bool:
    return name.partition("://")[0] in _SCHEMES and "://" in name


def open_manager(url: str) -> CachedManager:
    """Raises InvalidSettings for a URL that cannot work, and ImportError if the manager's library is not installed."""
    place = Place(url)
    module = import_module(f"evertick.secrets.managers.{_SCHEMES[place.scheme]}")
    keep, stale = place.seconds("keep", KEEP_SECONDS), place.seconds("stale", STALE_SECONDS)
    return CachedManager(module.open_manager(place), keep_seconds=keep, stale_seconds=stale)
