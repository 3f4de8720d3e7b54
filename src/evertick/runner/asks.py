"""Answers what running attempts ask: outputs, variables, connections and facts about runs, and changes on their behalf.

Every answer is fenced by the attempt's session and epoch. A question may arrive again after a failure of the database: a
change that is made twice has the effect of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol

import psycopg

from evertick.config import Settings
from evertick.db.connection import Opened
from evertick.db.notify import Channel
from evertick.db.queries.secrets import AttemptHolder
from evertick.domain.errors import UserError
from evertick.domain.stored_values import ValueKind
from evertick.engine import asks
from evertick.engine.runs import Particulars
from evertick.secrets.backends import SecretProvider

# Answered by `answer_ask` alone.
FACTS = frozenset(
    (
        *("run", "ended_run", "xcoms", "latest_xcoms", "runs", "previous_run", "tasks", "dag"),
        *("asset", "asset_events", "aliased", "partition", "state", "steps", "step", "commit_place"),
    )
)


class Notifies(Protocol):
    def wake(self, channel: Channel) -> None: ...


class Asks:
    """The answers of one session."""

    def __init__(self, settings: Settings, *, link: Opened, grants: SecretProvider, notifier: Notifies) -> None:
        self._settings, self._link, self._grants, self._notifier = settings, link, grants, notifier

    async def answer(self, holder: AttemptHolder, verb: str, args: Mapping[str, Any]) -> object:
        """Raises NotFound, UserError or LeaseLost for the attempt, and psycopg's errors while the database is
        unreachable."""
        try:
            if verb in FACTS:
                return await asks.ask(await self._link.get(), holder, verb, args)
            if verb == "value":
                wanted = (ValueKind(args["kind"]), str(args["name"]))
                return (await self._grants.values(self._grants.stored(self._link.get, holder), [wanted]))[wanted]
            if verb == "put_state":
                return await asks.put_state(await self._link.get(), holder, args)
            if verb == "put_step":
                conn = await self._link.get()
                return await asks.put_step(conn, holder, name=str(args["name"]), value=args["value"])
            if verb == "put_outputs":
                return await asks.put_outputs(await self._link.get(), holder, args["value"])
            if verb == "put_updates":
                return await self._put_updates(holder, args["updates"])
            if verb == "put_variable":
                return await self._put_variable(holder, args)
            if verb == "name_instance":
                return await asks.name_instance(await self._link.get(), holder, str(args["name"]))
            if verb == "trigger":
                return await self._trigger(holder, args)
        except (psycopg.DataError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"the question {verb!r} is not valid: {error}") from None
        raise UserError(
            f"{verb!r} is unknown to this runner. Do its version and that of the DAG's code belong together?"
        )

    async def _put_updates(self, holder: AttemptHolder, updates: list[dict[str, object]]) -> bool:
        return await asks.put_updates(await self._link.get(), holder, updates)

    async def _put_variable(self, holder: AttemptHolder, args: Mapping[str, Any]) -> bool:
        from evertick.secrets.keyring import load_keyring

        conn, keyring = await self._link.get(), load_keyring(self._settings)
        name, description = str(args["name"]), args.get("description")
        return await asks.put_variable(conn, keyring, holder, name=name, value=args["value"], description=description)

    async def _trigger(self, holder: AttemptHolder, args: Mapping[str, Any]) -> Mapping[str, object]:
        fire_at = args.get("fire_at")
        about = Particulars(
            key=str(args["run"]),
            fire_at=fire_at and datetime.fromisoformat(fire_at),
            note=args.get("note"),
            partition=args.get("partition"),
        )
        conn = await self._link.get()
        made = await asks.trigger(conn, holder, dag=str(args["dag"]), params=args.get("params") or {}, about=about)
        self._notifier.wake(Channel.TASKS)
        if made.defers:
            self._notifier.wake(Channel.SCHEDULE)
        return {"number": made.run_id, "is_new": made.is_new}
