"""The API service. It binds its port at start and loads the application on the first connection.

Until then it is only a small process: no database connection, no query, no framework in memory.
"""

from __future__ import annotations

import asyncio
import gc
from importlib import import_module

from evertick.config import Settings
from evertick.db.connect import Purpose, connect
from evertick.db.queries import runners
from evertick.engine.public_access import refuse_open_door
from evertick.observability.health_endpoint import leave_note
from evertick.observability.logging import Log
from evertick.runtime.listen_socket import API_NOTES, address_of, inherited_socket, listen
from evertick.runtime.loop import keep_trying, run_loop

# Seconds that an idle HTTP connection stays open.
IDLE_SECONDS = 30
STOP_SECONDS = 5
_REST_SECONDS = 5.0
_LOADED_SECONDS = (0.0, 5.0, 25.0)


class Api:
    """`application` is the name of the module whose `make_app` builds the application."""

    def __init__(self, settings: Settings, *, url: str, log: Log, application: str) -> None:
        self._settings, self._url, self._log, self._application = settings, url, log, application
        self.wake, self.stop = asyncio.Event(), asyncio.Event()
        self._has_agents = False

    async def run(self) -> None:
        await keep_trying(self._refuse_open_door, stop=self.stop, name="start", log=self._log)
        # If the supervisor already holds the port, it started this process because of the first connection.
        inherited = inherited_socket()
        self._socket = inherited or listen(self._settings, self._log)
        if inherited is None:
            leave_note(self._settings.home, "api", address_of(self._socket), API_NOTES)
        self._log.info("api_listening" if inherited is None else "api_started", url=address_of(self._socket))
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(self._serve())
            group.create_task(self._rest(over))
            await self._stopped_or(serving)
            over.set()

    async def _refuse_open_door(self) -> None:
        async with await connect(self._url, purpose=Purpose.API_READ) as conn:
            await refuse_open_door(conn, host=self._settings.api_host, has_password=False)
            self._has_agents = await runners.has_agents(conn)

    async def _stopped_or(self, serving: asyncio.Task[None]) -> None:
        asked = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({asked, serving}, return_when=asyncio.FIRST_COMPLETED)
            await serving
        finally:
            asked.cancel()

    async def _rest(self, over: asyncio.Event) -> None:
        """Report liveness to the health endpoint without using the database."""

        async def tick() -> float:
            return _REST_SECONDS

        await run_loop(tick, wake=over, stop=over, name="api", log=self._log)

    async def _serve(self) -> None:
        # Agents from before this process may be gone: their silence counts only while an API could hear them.
        if self._has_agents or await self._first_knock():
            # Imported by name, to load the framework only now.
            serving = import_module("evertick.api.server")
            make_app = import_module(self._application).make_app
            sparing = asyncio.create_task(_spare_what_stays())
            await serving.serve(make_app, self._settings, self._url, self._log, self._socket, self.stop)
            sparing.cancel()
        self._socket.close()

    async def _first_knock(self) -> bool:
        """Wait for the first connection. False if the service is stopped before."""
        loop, knocked = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._socket, knocked.set)
        waits = [asyncio.create_task(knocked.wait()), asyncio.create_task(self.stop.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(self._socket)
            for each in waits:
                each.cancel()
        return knocked.is_set() and not self.stop.is_set()


async def _spare_what_stays() -> None:
    """Exclude the framework and its routes from garbage collection: scanning them blocked the event loop for 150 ms.
    Repeated, because some objects are created on their first use."""
    for seconds in _LOADED_SECONDS:
        await asyncio.sleep(seconds)
        gc.freeze()
