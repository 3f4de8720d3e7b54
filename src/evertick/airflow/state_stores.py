"""Answers the messages about the state of tasks and assets, which the database keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from airflow.sdk import exceptions
from airflow.sdk.execution_time import comms

from evertick.attempts.protocol import Ask
from evertick.domain.errors import UserError
from evertick.domain.state import StateScope, check_key, check_size

_MESSAGE = re.compile(r"(Get|Set|Delete|Clear)(Task|Asset)StateStore(?:By(?:Name|Uri))?")


def state_store_answer(name: str, ask: Ask) -> Callable[[Any], Any] | None:
    """How a message with this name is answered; None if it is not about state."""
    found = _MESSAGE.fullmatch(name)
    if found is None:
        return None
    verb, owner = found.groups()

    def answer(msg: Any) -> Any:
        place: dict[str, Any] = {"scope": StateScope.RUN.value, "asset": None}
        if owner == "Asset":
            asset = ask("asset", {"name": getattr(msg, "name", None), "uri": getattr(msg, "uri", None)})
            if asset is None:
                return _missing("ASSET_NOT_FOUND", name=getattr(msg, "name", None), uri=getattr(msg, "uri", None))
            place = {"scope": StateScope.ASSET.value, "asset": asset["name"]}
        if verb == "Get":
            return _read(owner, msg.key, ask("state", {**place, "key": check_key(msg.key)}))
        ask("put_state", {**place, **_change(verb, msg)})
        return comms.OKResponse(ok=True)

    return answer


def _change(verb: str, msg: Any) -> dict[str, Any]:
    if verb == "Clear":
        return {"key": None, "value": None}
    if verb == "Delete":
        return {"key": check_key(msg.key), "value": None}
    if msg.value is None:
        raise UserError("value cannot be null")
    try:
        text = json.dumps(msg.value, allow_nan=False)
    except ValueError:
        raise UserError("value must be a finite number; NaN and Inf are not JSON representable") from None
    until = getattr(msg, "expires_at", None)
    return {
        "key": check_key(msg.key),
        "value": check_size(text, f"key {msg.key!r}"),
        "expires_at": until and until.isoformat(),
    }


def _read(owner: str, key: str, found: list[list[Any]]) -> Any:
    if not found:
        return _missing(f"{owner.upper()}_STORE_NOT_FOUND", key=key)
    kind = comms.TaskStateStoreResult if owner == "Task" else comms.AssetStateStoreResult
    return kind(value=found[0][1])


def _missing(kind: str, **detail: object) -> Any:
    return comms.ErrorResponse(error=exceptions.ErrorType[kind], detail=detail)
