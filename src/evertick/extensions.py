"""Extensions: executors, notifiers, serializers and secrets backends that other distributions provide as entry points.

Found by name when they are used, and not imported before. Contracts: docs/howto/extend.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, cast

from evertick.domain.dags.params import JsonValue
from evertick.domain.errors import EvertickError, InvalidSettings

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints


class ExtensionKind(StrEnum):
    """The groups of entry points. What the entry point of each refers to is its protocol."""

    EXECUTOR = "evertick.executors"  # called with the settings; returns a RemoteExecutor (executors/base.py)
    NOTIFIER = "evertick.notifiers"  # a Notifier
    SERIALIZER = "evertick.serializers"  # a Serializer; the name of the entry point is `module.Class`
    SECRETS_BACKEND = "evertick.secrets_backends"  # called without arguments; returns a Backend (secrets/backends.py)


class Notifier(Protocol):
    """Sends one notification. Runs in a thread of the scheduler. Any exception is a failed delivery, which is retried."""

    def __call__(self, event: Mapping[str, JsonValue], *, target: str, secret: str | None, delivery: str) -> str | None:
        """`delivery` is the same for every attempt at one notification. Returns the receiver's answer, in short."""


class Serializer(Protocol):
    """Stores the values of one class, and of its subclasses, in results of tasks."""

    def encode(self, value: object) -> object:
        """What a result can hold: JSON, bytes, dates, dataclasses …"""

    def decode(self, stored: object) -> object: ...


def find_extension(kind: ExtensionKind, name: str) -> object | None:
    """None if no installed distribution has one. Raises InvalidSettings if several have, or if it cannot be imported."""
    found = {each.value: each for each in _entry_points(kind) if each.name == name}
    sources = ", ".join(sorted(each.dist.name if each.dist else each.value for each in found.values()))
    if len(found) > 1:
        raise InvalidSettings(
            f"{name!r} of {kind} is provided by several distributions: {sources}. Uninstall all but one."
        )
    for each in found.values():
        try:
            loaded: object = each.load()
        except EvertickError:
            raise
        except Exception as error:
            # Third-party code: whatever it raises, its distribution is to be corrected.
            what = f"{type(error).__name__}: {error}"
            raise InvalidSettings(f"{name!r} of {kind}, from {sources}, cannot be imported: {what}") from error
        return loaded
    return None


def find_serializer(value: object) -> tuple[str, Serializer] | None:
    """The serializer of the value's class or of the nearest ancestor, with the name of that class."""
    for kind in type(value).__mro__[:-1]:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if (found := find_extension(ExtensionKind.SERIALIZER, name)) is not None:
            return name, cast("Serializer", found)
    return None


def extension_names(kind: ExtensionKind) -> list[str]:
    return sorted({each.name for each in _entry_points(kind)})


def _entry_points(kind: ExtensionKind) -> EntryPoints:
    from importlib.metadata import entry_points

    return entry_points(group=kind)
