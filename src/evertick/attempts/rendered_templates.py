"""Writes the rendered templates of a task to its log, without their secrets. For people only: the task itself is
rendered separately, with the secrets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

from evertick.attempts.protocol import AttemptIO
from evertick.domain.errors import InvalidTemplate
from evertick.domain.stored_values import Connection
from evertick.logs.format import RENDERED
from evertick.secrets.masking import HIDDEN

_LONGEST = 4000


def tell_rendered(
    io: AttemptIO, names: Mapping[str, object], render: Callable[[Mapping[str, object]], Mapping[str, object]]
) -> None:
    """One line for each field, as JSON. A field that cannot be rendered without its secrets is omitted."""
    try:
        fields = render(_hidden(names))
    except InvalidTemplate:
        return
    for name, value in fields.items():
        if value is not None:
            io.say(RENDERED, f"{name} = {json.dumps(_bounded(value), ensure_ascii=False, default=str)}")


def _hidden(names: Mapping[str, object]) -> dict[str, object]:
    """The template variables, with stars for secrets: also for a secret too short to be found in a text."""
    secrets, connections = names.get("secrets"), names.get("connections")
    return {
        **names,
        "secrets": dict.fromkeys(secrets, HIDDEN) if isinstance(secrets, Mapping) else {},
        "connections": {
            name: replace(each, password=HIDDEN if each.password else "", extra=dict.fromkeys(each.extra, HIDDEN))
            for name, each in (connections.items() if isinstance(connections, Mapping) else ())
            if isinstance(each, Connection)
        },
    }


def _bounded(value: object) -> object:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return value if len(text) <= _LONGEST else text[:_LONGEST] + "…"
