"""The launcher: leads fleets of runners on engines. More launchers stand by.

Runs no task, and ends no runner that works: it only starts runners, and asks those to leave that are too many.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from evertick.config import Settings
from evertick.db.notify import Channel
from evertick.domain.errors import InvalidSettings
from evertick.domain.fleets import Fleet, read_fleets
from evertick.launcher.fleet_leader import FleetLeader
from evertick.observability.logging import Log
from evertick.runtime.connections import listen_forever


def load_fleets(file: Path | None) -> tuple[Fleet, ...]:
    """Raises InvalidSettings, which names the file and the problem."""
    if file is None:
        raise InvalidSettings("a launcher needs the file with its fleets: set EVERTICK_FLEETS_FILE.")
    try:
        return read_fleets(file.read_text(encoding="utf-8"))
    except InvalidSettings as error:
        raise InvalidSettings(f"EVERTICK_FLEETS_FILE={file}: {error}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"EVERTICK_FLEETS_FILE={file} cannot be read: {error}.") from None


class Launcher:
    """Launched runners keep running when it stops; the next launcher adopts them."""

    def __init__(self, settings: Settings, *, url: str, owner: str, log: Log) -> None:
        fleets = load_fleets(settings.fleets_file)
        self._leaders = [
            FleetLeader(settings, fleet, url=url, owner=owner, log=log, is_first=fleet is fleets[0]) for fleet in fleets
        ]
        self._settings, self._url, self._log = settings, url, log
        self.wake, self.stop = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        self._log.info("launcher_started", fleets=",".join(each.fleet.name for each in self._leaders))
        async with asyncio.TaskGroup() as group:
            work = [group.create_task(each.run(self.stop)) for each in self._leaders]
            helpers = [group.create_task(self._pass_on_stop())]
            if self._settings.listen_notify:
                listening = listen_forever(self._url, [Channel.TASKS], self._on_tasks, log=self._log)
                helpers.append(group.create_task(listening))
            await asyncio.wait(work)
            for each in helpers:
                each.cancel()
        self._log.info("service_stopped", reason="stopped")

    async def _pass_on_stop(self) -> None:
        await self.stop.wait()
        for each in self._leaders:
            each.wake.set()

    def _on_tasks(self, _: Channel) -> None:
        for each in self._leaders:
            each.wake.set()
