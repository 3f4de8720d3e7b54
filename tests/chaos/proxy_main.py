"""The proxy's own process: moves bytes between clients and a server, as well or as badly as each group's mode says.

Commands come as JSON lines on standard input, one answer each on standard output; the end of the input ends the process.
Must never reorder bytes, and must never let a client's bytes reach the server twice.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.pg_stream import Exchange, Replies, Requests, is_error, is_outside_transaction, is_ready
from tests.chaos.proxy import DOWN, UP, Mode

_CHUNK = 65_536
_BACKLOG = 512
_RESET = struct.pack("ii", 1, 0)


@dataclass(slots=True, kw_only=True)
class Trap:
    """Answers that are still to be lost."""

    times: int
    match: str | None

    def takes(self, exchange: Exchange) -> bool:
        return not exchange.is_startup and self.wants(exchange.texts)

    def wants(self, texts: Iterable[str]) -> bool:
        return self.times > 0 and any(self.match is None or self.match in text for text in texts)


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """The connections of one listener, their mode, and what they met."""

    speaks: str
    listener: socket.socket
    mode: Mode = field(default_factory=Mode)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    traps: list[Trap] = field(default_factory=list)
    links: set[Link] = field(default_factory=set)
    accepted: int = 0
    refused: int = 0
    resets: int = 0
    moved: dict[str, int] = field(default_factory=lambda: {UP: 0, DOWN: 0})
    dropped: list[str] = field(default_factory=list)

    def set(self, mode: Mode) -> None:
        self.mode = mode
        self.changed.set()
        self.changed = asyncio.Event()

    async def gate(self, direction: str) -> None:
        """Until the mode lets something move this way."""
        while not self.mode.moves(direction):
            await self.changed.wait()

    async def pause(self, seconds: float) -> None:
        """So long, or until the mode changes."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.changed.wait(), seconds)

    def status(self) -> dict[str, Any]:
        return {
            "port": None if isinstance(name := self.listener.getsockname(), str) else name[1],
            "connections": len(self.links),
            "accepted": self.accepted,
            "refused": self.refused,
            "resets": self.resets,
            "up_bytes": self.moved[UP],
            "down_bytes": self.moved[DOWN],
            "dropped": self.dropped,
            "armed": sum(trap.times for trap in self.traps),
        }


class Link:
    """One connection: a socket to the client, one to the server, and a pump each way."""

    def __init__(self, group: Group, client: socket.socket) -> None:
        self._group, self._client = group, client
        self._server: socket.socket | None = None
        self._requests, self._replies = Requests(), Replies()
        self._held: list[bytes] = []
        self._asked = ""
        self._task: asyncio.Task[None] | None = None

    def run(self, connect: Callable[[], Any]) -> None:
        self._group.links.add(self)
        self._task = asyncio.create_task(self._run(connect))

    async def abort(self) -> None:
        """Both ends get a reset."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self, connect: Callable[[], Any]) -> None:
        loop = asyncio.get_running_loop()
        is_clean = False
        try:
            # A blackhole keeps the server from hearing of a new client at all.
            await self._group.gate(UP)
            self._server = await connect()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(loop, UP, self._client, self._server))
                group.create_task(self._pump(loop, DOWN, self._server, self._client))
            is_clean = True
        except* (OSError, _Broken):
            pass
        finally:
            for end in (self._client, self._server):
                if end is not None:
                    _close(end, with_reset=not is_clean)
            self._group.links.discard(self)

    async def _pump(
        self, loop: asyncio.AbstractEventLoop, direction: str, source: socket.socket, sink: socket.socket
    ) -> None:
        group = self._group
        while True:
            chunk, fault = b"", None
            try:
                chunk = await loop.sock_recv(source, self._room())
            except OSError as error:
                fault = error
            await self._travel(direction, len(chunk))
            if fault is not None:
                raise fault
            if not chunk:
                with suppress(OSError):
                    sink.shutdown(socket.SHUT_WR)
                return
            onward = await self._understood(loop, direction, chunk)
            if onward:
                await loop.sock_sendall(sink, onward)
                group.moved[direction] += len(onward)

    def _room(self) -> int:
        rate = self._group.mode.bytes_per_second
        return _CHUNK if rate is None else max(1, min(_CHUNK, int(rate / 10)))

    async def _travel(self, direction: str, size: int) -> None:
        """The way itself takes time, and may be closed at either end of it. What is on its way when the mode changes
        meets the new mode."""
        mode = self._group.mode
        await self._group.gate(direction)
        seconds = (mode.delay_ms + random.uniform(0, mode.jitter_ms)) / 1000
        if mode.bytes_per_second is not None:
            seconds += size / mode.bytes_per_second
        if seconds > 0:
            await self._group.pause(seconds)
        await self._group.gate(direction)

    async def _understood(self, loop: asyncio.AbstractEventLoop, direction: str, chunk: bytes) -> bytes:
        """What of it goes on. PostgreSQL's messages are read on the way, to know which answer belongs to what."""
        if self._group.speaks == "http":
            return self._one_request(direction, chunk)
        if self._group.speaks != "postgres":
            return chunk
        if direction == DOWN:
            return b"".join(onward for message in self._replies.feed(chunk) for onward in self._answered(message))
        onward, answer = self._requests.feed(chunk)
        if answer:
            await loop.sock_sendall(self._client, answer)
        return onward

    def _one_request(self, direction: str, chunk: bytes) -> bytes:
        """A connection has one request, whose first line is all of it that matters. Only the answer that it was done is lost."""
        if direction == UP:
            self._asked = self._asked or chunk.partition(b"\r\n")[0].decode("latin-1")
            return chunk
        trap = next((trap for trap in self._group.traps if trap.wants([self._asked])), None)
        if trap is not None and chunk.startswith(b"HTTP/1.1 2"):
            trap.times -= 1
            self._group.dropped.append(self._asked)
            raise _Broken
        return chunk

    def _answered(self, message: bytes) -> list[bytes]:
        """The messages that may go on now. The answer to a trapped exchange is held until its end is known."""
        pending = self._requests.pending
        if not pending:
            return [message]
        exchange, ends = pending[0], is_ready(message)
        trap = next((trap for trap in self._group.traps if trap.takes(exchange)), None)
        if ends:
            pending.popleft()
        if trap is None and not self._held:
            return [message]
        self._held.append(message)
        if not ends:
            return []
        held, self._held = self._held, []
        has_failed = any(is_error(each) for each in held)
        if trap is None or has_failed or not is_outside_transaction(message):
            return held
        trap.times -= 1
        self._group.dropped.append(" ".join(" ".join(exchange.texts).split())[:200])
        raise _Broken


class _Broken(Exception):
    """The answer is lost, and the connection with it."""


class ProxyCore:
    """All groups, and the verbs of the handle."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._groups: dict[str, Group] = {}
        self._accepting: set[asyncio.Task[None]] = set()

    async def obey(self, verb: str, arguments: dict[str, Any]) -> Any:
        match verb:
            case "listen":
                return self._listen(**arguments)
            case "set":
                self._named(arguments["group"]).set(Mode(**arguments["mode"]))
            case "heal":
                chosen = self._groups.values() if arguments["group"] is None else [self._named(arguments["group"])]
                for group in chosen:
                    group.traps.clear()
                    group.set(Mode())
            case "reset":
                return await self._reset(self._named(arguments["group"]))
            case "drop_reply":
                group = self._named(arguments.pop("group"))
                if group.speaks == "bytes":
                    raise ValueError(f"a group that speaks {group.speaks} has no statements")
                group.traps = [trap for trap in group.traps if trap.times > 0] + [Trap(**arguments)]
            case "redirect":
                self._upstream = arguments["upstream"]
            case "status":
                return {name: group.status() for name, group in self._groups.items()}
            case _:
                raise ValueError(f"there is no verb {verb!r}")
        return None

    def _named(self, name: str) -> Group:
        if name not in self._groups:
            raise ValueError(f"there is no group {name!r}; there are: {', '.join(sorted(self._groups)) or 'none'}")
        return self._groups[name]

    def _listen(self, group: str, at: str, speaks: str) -> int | str:
        if group in self._groups:
            raise ValueError(f"group {group!r} listens already")
        listener, address = _socket_for(at)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        made = self._groups[group] = Group(speaks=speaks, listener=listener)
        self._accepting.add(asyncio.create_task(self._accept(made)))
        name = listener.getsockname()
        return name if isinstance(name, str) else int(name[1])

    async def _accept(self, group: Group) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(group.listener)
            client.setblocking(False)
            _hurry(client)
            if group.mode.accepts:
                group.accepted += 1
                Link(group, client).run(self._connect)
            else:
                group.refused += 1
                _close(client, with_reset=True)

    async def _connect(self) -> socket.socket:
        server, address = _socket_for(self._upstream)
        try:
            await asyncio.get_running_loop().sock_connect(server, address)
        except BaseException:
            server.close()
            raise
        _hurry(server)
        return server

    async def _reset(self, group: Group) -> int:
        links = list(group.links)
        await asyncio.gather(*(link.abort() for link in links))
        group.resets += len(links)
        return len(links)


def _socket_for(place: str) -> tuple[socket.socket, Any]:
    if place.startswith("unix:"):
        made, address = socket.socket(socket.AF_UNIX), place.removeprefix("unix:")
    else:
        host, _, port = place.rpartition(":")
        made, address = socket.socket(socket.AF_INET), (host, int(port))  # type: ignore[assignment]
    made.setblocking(False)
    return made, address


def _hurry(end: socket.socket) -> None:
    if end.family == socket.AF_INET:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _close(end: socket.socket, *, with_reset: bool) -> None:
    if with_reset and end.family == socket.AF_INET:
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.close()


async def _serve(upstream: str) -> None:
    loop, core = asyncio.get_running_loop(), ProxyCore(upstream)
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"ok": await core.obey(request.pop("verb"), request)}
        except (ValueError, TypeError, OSError) as error:
            answer = {"error": str(error)}
        # Small, and read at once by who asked: waiting for room would only hide a harness that hangs.
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def main() -> None:
    Path("/proc/self/comm").write_text("chaos-proxy")
    asyncio.run(_serve(sys.argv[1]))


if __name__ == "__main__":
    main()
