"""A connection of a command to Evertick: the same calls, whether they run here or on a server.

Loaded by every command, so it imports nothing heavy.
"""

from __future__ import annotations

import math
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from datetime import datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, Protocol, Self, TypeVar, cast

from evertick.client.credentials import chosen_server, token_for
from evertick.domain.errors import OutcomeUnknown, PostgresUnavailable, UserError

if TYPE_CHECKING:
    from evertick.operations.caller import Caller
    from evertick.operations.paging import Page

# A failover or a restart usually takes some seconds.
RETRY_SECONDS = (0.1, 0.5, 1.0, 2.0, 3.0)
# A poll of a run of ten thousand tasks costs the database some milliseconds: pause for longer than it worked.
_PAUSE_PER_POLL = 5.0

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class FollowedEvent(Protocol):
    """An event of a stream, which can be continued after its `id`. After the last event the stream is complete."""

    @property
    def id(self) -> str: ...

    @property
    def is_last(self) -> bool: ...


E = TypeVar("E", bound=FollowedEvent)


class Client(ABC):
    """Calls operations. `where` names the other side in messages."""

    where: ClassVar[str]
    items_per_page: ClassVar[int]
    pause_seconds: ClassVar[float]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    @abstractmethod
    def now(self) -> datetime:
        """The time of the database or of the server, to show how long ago something was."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _call(self, operation: Callable[..., Awaitable[Any]], params: Mapping[str, Any]) -> Any: ...

    @abstractmethod
    def _stream(self, operation: Callable[..., Awaitable[Any]], params: Mapping[str, Any]) -> Iterator[Any]: ...

    def call(
        self, operation: Callable[Concatenate[Caller, P], Awaitable[R]], /, *args: P.args, **params: P.kwargs
    ) -> R:
        """The result of an operation; its parameters are given by name. A call with an idempotency key is repeated when
        its answer is lost."""
        assert not args
        if params.get("idempotency_key") is None:
            return cast("R", self._call(operation, params))
        return cast("R", self._call_until_answered(operation, params))

    def call_until_answered(
        self, operation: Callable[Concatenate[Caller, P], Awaitable[R]], /, *args: P.args, **params: P.kwargs
    ) -> R:
        """The same for an operation that has no further effect when it is repeated."""
        assert not args
        return cast("R", self._call_until_answered(operation, params))

    def call_by_key(
        self,
        operation: Callable[Concatenate[Caller, P], Awaitable[R]],
        key: str | None,
        /,
        *args: P.args,
        **params: P.kwargs,
    ) -> R:
        """The same with an idempotency key: that of the user, or one that only this call has, so that it can be repeated."""
        assert not args
        own_key = key or f"cli-{secrets.token_hex(8)}"
        try:
            return cast("R", self._call_until_answered(operation, {**params, "idempotency_key": own_key}))
        except OutcomeUnknown as error:
            raise OutcomeUnknown(f"{error} It is safe to repeat it with: --key {own_key}") from None

    def pages(
        self,
        operation: Callable[Concatenate[Caller, P], Awaitable[Page[T]]],
        limit: int,
        /,
        *args: P.args,
        **params: P.kwargs,
    ) -> list[T]:
        """Up to `limit` items of an operation that returns pages."""
        assert not args
        found: list[T] = []
        cursor: str | None = None
        while len(found) < limit:
            size = min(limit - len(found), self.items_per_page)
            # Some lists have only one page, and take no cursor.
            place = {} if cursor is None else {"cursor": cursor}
            page = cast("Page[T]", self._call(operation, {**params, "limit": size, **place}))
            found += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
        return found[:limit]

    def stream(
        self,
        operation: Callable[Concatenate[Caller, P], Awaitable[AsyncGenerator[E, None]]],
        /,
        *args: P.args,
        **params: P.kwargs,
    ) -> Iterator[E]:
        """The events of an operation that follows something, up to the last one. A stream that breaks is continued after
        the last event that arrived, as soon as the database or the server is available again."""
        assert not args
        after: str | None = None
        failures = 0
        while True:
            try:
                for each in self._stream(operation, {**params, "after": after}):
                    after, failures = each.id, 0
                    yield each
                    if each.is_last:
                        return
            except PostgresUnavailable:
                if after is None:
                    raise
            failures += 1
            time.sleep(self._pause_after(failures))

    def poll(self, is_over: Callable[[], bool], *, within_seconds: float | None = None) -> bool:
        """Repeat `is_over` until it returns true. False: the time was up first. At least one call is completed.

        While the database or the server is unavailable, the wait continues.
        """
        deadline = math.inf if within_seconds is None else time.monotonic() + within_seconds
        failures = 0
        while True:
            began = time.monotonic()
            try:
                if is_over():
                    return True
            except PostgresUnavailable:
                failures += 1
                pause = self._pause_after(failures)
            else:
                failures = 0
                pause = max(self.pause_seconds, _PAUSE_PER_POLL * (time.monotonic() - began))
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))

    def _pause_after(self, failures: int) -> float:
        """How long to wait after so many failures in a row. The first one is reported."""
        if failures == 1:
            sys.stderr.write(f"The {self.where} does not answer. Waiting for it.\n")
        return RETRY_SECONDS[min(failures, len(RETRY_SECONDS)) - 1]

    def _call_until_answered(self, operation: Callable[..., Awaitable[Any]], params: Mapping[str, Any]) -> Any:
        lost: OutcomeUnknown | None = None
        for pause_seconds in (*RETRY_SECONDS, None):
            try:
                return self._call(operation, params)
            except PostgresUnavailable as error:
                if isinstance(error, OutcomeUnknown):
                    lost = error
                # A request that never arrived is reported as it is.
                if lost is None:
                    raise
            if pause_seconds is not None:
                sys.stderr.write(f"The answer of the {self.where} was lost. Trying again.\n")
                time.sleep(pause_seconds)
        assert lost is not None
        raise lost


def open_client() -> Client:
    """The server that was chosen, or else the database. The modules for HTTP are loaded only for a server."""
    address = chosen_server()
    if address is None:
        return cast("Client", import_module("evertick.client.local").LocalClient())
    return cast("Client", import_module("evertick.client.http").HttpClient(address, token_for(address)))


def call(operation: Callable[Concatenate[Caller, P], Awaitable[R]], /, *args: P.args, **params: P.kwargs) -> R:
    """The result of one operation, on a connection of its own."""
    with open_client() as client:
        return client.call(operation, *args, **params)


def read(
    operation: Callable[Concatenate[Caller, P], Awaitable[R]], /, *args: P.args, **params: P.kwargs
) -> tuple[R, datetime]:
    """The same, with the time of the other side."""
    with open_client() as client:
        return client.call(operation, *args, **params), client.now


def read_pages(
    operation: Callable[Concatenate[Caller, P], Awaitable[Page[T]]], limit: int, /, *args: P.args, **params: P.kwargs
) -> tuple[list[T], datetime]:
    """Up to `limit` items of one operation, with the time of the other side."""
    with open_client() as client:
        return client.pages(operation, limit, *args, **params), client.now


def refuse_server() -> None:
    """For a command that works only with the database itself, before it does anything else."""
    if (server := chosen_server()) is not None:
        raise UserError(
            f"This command does not work through a server, but {server} is selected. Run it where the database can be"
            " reached, without --server and EVERTICK_SERVER."
        )
