"""The API as a service: it holds its port from the start, and loads the rest when the first one knocks.

Until then it costs an idle installation nothing but a small process: no connection, no query, no framework in memory.
"""

from __future__ import annotations

import asyncio
import gc
from importlib import import_module

from evertick.config import Settings
from evertick.engine.open_door import refuse_open_door
from evertick.services.events import Log
from evertick.services.listening import address_of, inherited_socket, listen
from evertick.services.loop import keep_trying, run_loop
from evertick.store.db import Purpose, connect

# What a browser or a client may keep open without asking.
IDLE_SECONDS = 30
STOP_SECONDS = 5
_REST_SECONDS = 5.0
_LOADED_SECONDS = (0.0, 5.0, 25.0)


class Api:
    """`application`: the name of the module whose `make_app` makes what is served."""

    def __init__(self, settings: Settings, *, url: str, log: Log, application: str) -> None:
        self._settings, self._url, self._log, self._application = settings, url, log, application
        self.wake, self.stop = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        await keep_trying(self._refuse_open_door, stop=self.stop, name="start", log=self._log)
        # Whoever supervises us may hold the port already: then somebody has knocked there.
        inherited = inherited_socket()
        self._socket = inherited or listen(self._settings, self._log)
        self._log.info("serve" if inherited is None else "awake", url=address_of(self._socket))
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(self._serve())
            group.create_task(self._rest(over))
            await self._stopped_or(serving)
            over.set()

    async def _refuse_open_door(self) -> None:
        async with await connect(self._url, purpose=Purpose.API_READ) as conn:
            await refuse_open_door(conn, host=self._settings.api_host, has_password=False)

    async def _stopped_or(self, serving: asyncio.Task[None]) -> None:
        asked = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({asked, serving}, return_when=asyncio.FIRST_COMPLETED)
            await serving
        finally:
            asked.cancel()

    async def _rest(self, over: asyncio.Event) -> None:
        """A sign of life for the health port, without asking anything of anybody."""

        async def tick() -> float:
            return _REST_SECONDS

        await run_loop(tick, wake=over, stop=over, name="api", log=self._log)

    async def _serve(self) -> None:
        if await self._first_knock():
            # By name: importing the framework is what is put off.
            serving = import_module("evertick.api.serving")
            make_app = import_module(self._application).make_app
            sparing = asyncio.create_task(_spare_what_stays())
            await serving.serve(make_app, self._settings, self._url, self._log, self._socket, self.stop)
            sparing.cancel()
        self._socket.close()

    async def _first_knock(self) -> bool:
        """Whether somebody has connected; False if it was told to stop first."""
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
    """The framework and its routes are never garbage, and looking through them took the collector 150 ms, while everybody waited.
    Some are made when first asked for, so it is told more than once."""
    for seconds in _LOADED_SECONDS:
        await asyncio.sleep(seconds)
        gc.freeze()
