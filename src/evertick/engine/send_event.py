"""send: an outside system reports an event. Tasks that wait for it continue; a task that starts waiting later finds it."""

from __future__ import annotations

import json

from psycopg import AsyncConnection

from evertick.domain.errors import UserError
from evertick.domain.params import as_json
from evertick.domain.waiting import MOST_PAYLOAD_BYTES, check_event_name
from evertick.store import events
from evertick.store.events import Sent

LONGEST_KEY = 200


async def send_event(conn: AsyncConnection, *, name: str, payload: object, actor: str, key: str | None = None) -> Sent:
    """Sending the same key under the same name again returns the first event."""
    if problem := check_event_name(name):
        raise UserError(f"{name[:100]!r} is not a valid name for an event: {problem}.")
    if key is not None and not 0 < len(key) <= LONGEST_KEY:
        raise UserError(f"The key of an event must have 1 to {LONGEST_KEY} characters.")
    try:
        plain = as_json(payload)
    except ValueError as error:
        raise UserError(f"The payload of event {name!r}: {error}.") from None
    if (size := len(json.dumps(plain))) > MOST_PAYLOAD_BYTES:
        raise UserError(
            f"The payload of event {name!r} takes {size:,} bytes; at most {MOST_PAYLOAD_BYTES:,} are allowed."
        )
    sent = await events.send(conn, name=name, key=key, payload=plain, actor=actor)
    if sent is None:
        # Pruned between the conflict on its key and the read.
        raise UserError(f"Event {name!r} with key {key!r} is being pruned. Send it again.")
    return sent
