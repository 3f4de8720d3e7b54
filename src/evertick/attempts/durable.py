"""State and steps of an attempt's process: questions to its runner. Never a value that has a secret in it."""

from __future__ import annotations

from typing import Any

from evertick.attempts.body import decode_inputs, encode_result
from evertick.attempts.protocol import AskRefused, AttemptIO, Start, json_encoder
from evertick.domain.attempt import RESULT_TAG
from evertick.domain.errors import LeaseLost, NotFound, UserError
from evertick.domain.state import LARGEST_VALUE_BYTES
from evertick.sdk.durable import Durable

_to_json = json_encoder(allow_nan=True)


def durable_of(start: Start, io: AttemptIO) -> Durable:
    channel = _Channel(start, io)
    return Durable(channel.ask, channel.encode, channel.decode, start.epoch == 1, channel.commit)


class _Channel:
    __slots__ = ("_io", "_start")

    def __init__(self, start: Start, io: AttemptIO) -> None:
        self._start, self._io = start, io

    def ask(self, verb: str, args: dict[str, Any]) -> Any:
        try:
            return self._io.ask(verb, args)
        except AskRefused as error:
            if error.code == LeaseLost.code:
                raise LeaseLost(str(error)) from None
            raise (NotFound if error.code == NotFound.code else UserError)(str(error)) from None

    def commit(self, conn: Any, place: dict[str, Any], mark: str, result: str) -> str:
        # Few tasks need it, and each import costs every process that runs one.
        from evertick.db.task_commit import EndingAttempt, commit

        start = self._start
        attempt = EndingAttempt(
            session=start.session,
            run_id=start.run_id,
            idx=start.idx,
            map_index=start.map_index,
            epoch=start.epoch,
            mark=mark,
        )
        return commit(conn, attempt, place, result)

    def encode(self, value: object, what: str) -> str:
        encoded = encode_result(value, LARGEST_VALUE_BYTES)
        if encoded.refusal is not None:
            raise UserError(f"the value of {what}: {encoded.refusal}")
        text = "null" if encoded.text is None else encoded.text
        if self._io.hide(text) != text:
            raise UserError(f"the value of {what} contains a secret of the task, which is never stored: leave it out.")
        return text

    def decode(self, value: Any) -> Any:
        if RESULT_TAG not in _to_json(value):
            return value
        files, run_id = self._io.files, self._start.run_id
        return decode_inputs(value, lambda digest, size: files.get(run_id, digest, size))
