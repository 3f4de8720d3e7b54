"""What a running task keeps: state that survives attempts and runs, and the results of steps that do not run again.

A write is committed before it returns, behind the attempt's fence: an attempt that was replaced changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from os import urandom
from typing import Any

from evertick.domain.errors import UserError
from evertick.domain.schedules.dependencies import Source
from evertick.domain.schedules.partitions import check_key as check_partition
from evertick.domain.state import MOST_KEYS, MOST_STEPS, StateScope, check_key, check_size, check_step

Ask = Callable[[str, dict[str, Any]], Any]


def _encode(value: object, what: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"the value of {what} cannot be stored as JSON: {error}.") from None


@dataclass(slots=True)
class Durable:
    """The durable values of one attempt. `ask` sends a question about them; `encode` makes JSON of a value, and `decode` makes
    the value of what was read. `is_first`: no earlier attempt can have left steps. `commit_with` ends the attempt in a
    transaction of the task: its connection, its place, its mark and the result."""

    ask: Ask
    encode: Callable[[object, str], str] = _encode
    decode: Callable[[Any], Any] = lambda value: value
    is_first: bool = False
    commit_with: Callable[[Any, dict[str, Any], str, str], str] | None = None
    _finished: set[str] | None = None
    _used: set[str] = field(default_factory=set)
    _updates: list[dict[str, Any]] = field(default_factory=list)

    def partition_key(self) -> str | None:
        found = self.ask("partition", {})
        return None if found is None else str(found[0])

    def update(self, asset: Source | str, keys: Sequence[str], extra: Mapping[str, Any]) -> None:
        """Describe updates of an asset. They replace what the attempt has said before, so all of them are sent."""
        known = None if isinstance(asset, str) else asset.partitions
        for key in keys:
            check_partition(key) if known is None else known.date_of(key)
        described = {"asset": asset if isinstance(asset, str) else asset.name, "extra": dict(extra), "alias": None}
        self._updates += [{**described, "partition_key": key} for key in keys] if keys else [described]
        self.ask("put_updates", {"updates": self._updates})

    def step(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if iscoroutinefunction(function):
            return self._step_async(name, function, args, kwargs)
        if self._is_finished(name):
            return self._stored(name)
        return self._commit(name, function(*args, **kwargs))

    async def _step_async(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._is_finished(name):
            return self._stored(name)
        return self._commit(name, await function(*args, **kwargs))

    def commit(self, conn: Any, value: object) -> Any:
        """`commit_with` ends the attempt with the transaction; without a server there is only the transaction."""
        text = check_size(self.encode(value, "the result"), "the result")
        if self.commit_with is None:
            conn.commit()
            return self.decode(json.loads(text))
        # A step, so that all attempts have the same one, and a task that was cleared has another.
        mark = self.step("evertick commit", lambda: urandom(16).hex(), (), {})
        return self.decode(json.loads(self.commit_with(conn, self.ask("commit_place", {}), mark, text)))

    def _is_finished(self, name: str) -> bool:
        if check_step(name) in self._used:
            raise UserError(
                f"step {name!r} was used before in this attempt: give each step of a task its own name, as in"
                ' f"charge {order}".'
            )
        self._used.add(name)
        if self._finished is None:
            self._finished = set() if self.is_first else set(self.ask("steps", {}))
        return name in self._finished

    def _stored(self, name: str) -> Any:
        return self.decode(self.ask("step", {"name": name})["value"])

    def _commit(self, name: str, value: object) -> Any:
        """Returns the value as a retry would read it, so that both take the same way."""
        text = check_size(self.encode(value, f"step {name!r}"), f"step {name!r}")
        self.ask("put_step", {"name": name, "value": text})
        return self.decode(json.loads(text))


class State:
    """Values by key that survive attempts and runs. Every method is one round trip, and fails once the attempt was replaced."""

    __slots__ = ("_durable", "_where")

    def __init__(self, durable: Durable, scope: StateScope, asset: str | None = None) -> None:
        self._durable, self._where = durable, {"scope": scope.value, "asset": asset}

    def get(self, key: str, default: Any = None) -> Any:
        """The value under a key, or `default`."""
        found = self._durable.ask("state", {**self._where, "key": check_key(key)})
        return self._durable.decode(found[0][1]) if found else default

    def set(self, key: str, value: object) -> None:
        """Store a value of up to 1 MiB as JSON, with the types that results can have."""
        if value is None:
            raise UserError(f"None cannot be the state under {key!r}: delete the key instead.")
        text = check_size(self._durable.encode(value, f"key {key!r}"), f"key {key!r}")
        self._durable.ask("put_state", {**self._where, "key": check_key(key), "value": text})

    def delete(self, key: str) -> bool:
        """Whether there was such a key."""
        return bool(self._durable.ask("put_state", {**self._where, "key": check_key(key), "value": None}))

    def clear(self) -> bool:
        """Delete all keys. Whether there were any."""
        return bool(self._durable.ask("put_state", {**self._where, "key": None, "value": None}))

    def items(self) -> dict[str, Any]:
        """All values by key, up to 1,000."""
        return {
            key: self._durable.decode(value) for key, value in self._durable.ask("state", {**self._where, "key": None})
        }


class MemoryStore:
    """State and steps in memory, for `dag.test()` and for tests of a task's function. `task_state` and `asset_state` are by
    the name of their owner, and then by key. `partition` is the key of the run's partition."""

    def __init__(self) -> None:
        self.task_state: dict[str, dict[str, Any]] = {}
        self.asset_state: dict[str, dict[str, Any]] = {}
        self.asset_updates: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self.partition: str | None = None
        self._steps: dict[tuple[str, int], dict[str, Any]] = {}

    def durable(self, task: str, map_index: int = -1, *, is_first: bool = True) -> Durable:
        """Those of one attempt."""

        if is_first:  # its run or its group begins again
            self._steps.pop((task, map_index), None)

        def ask(verb: str, args: dict[str, Any]) -> Any:
            return self._answer(task, map_index, verb, args)

        return Durable(ask, is_first=is_first)

    def _answer(self, task: str, map_index: int, verb: str, args: dict[str, Any]) -> Any:
        steps = self._steps.setdefault((task, map_index), {})
        match verb:
            case "state":
                known = self._of(task, args)
                return [[key, known[key]] for key in known if args["key"] in (None, key)]
            case "put_state":
                return self._put(self._of(task, args), args["key"], args["value"])
            case "partition":
                return None if self.partition is None else [self.partition, None]
            case "put_updates":
                self.asset_updates[task, map_index] = [dict(each) for each in args["updates"]]
                return True
            case "steps":
                return list(steps)
            case "step":
                return {"value": steps[args["name"]]}
            case "put_step":
                if len(steps) >= MOST_STEPS:
                    raise UserError(f"a task has at most {MOST_STEPS:,} steps.")
                return steps.setdefault(args["name"], json.loads(args["value"])) is not None
        raise UserError(f"{verb!r} cannot be asked without a server.")

    def _of(self, task: str, args: dict[str, Any]) -> dict[str, Any]:
        owners = self.asset_state if args["scope"] == StateScope.ASSET else self.task_state
        return owners.setdefault(args["asset"] or task, {})

    def _put(self, known: dict[str, Any], key: str | None, text: str | None) -> bool:
        if text is not None and key is not None:
            if key not in known and len(known) >= MOST_KEYS:
                raise UserError(f"state has at most {MOST_KEYS:,} keys.")
            known[key] = json.loads(text)
            return True
        gone = [each for each in known if key in (None, each)]
        for each in gone:
            del known[each]
        return bool(gone)
