"""Opens a service's health port, and writes an endpoint file in the home for `evertick health`.

Both are optional: a port that is taken and a file that cannot be written never stop the service.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from evertick.config import Settings
from evertick.services.events import Log
from evertick.services.http_port import HttpPort, Route
from evertick.services.place import here
from evertick.services.whoami import pid_started

# Fixed numbers, for people and Prometheus; if one is taken, the next free port is used.
DEFAULT_PORTS = {"up": 8790, "scheduler": 8791, "runner": 8792, "publisher": 8793, "api": 8794}


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Where one process of this machine answers. `machine` distinguishes containers that share a home."""

    machine: str
    service: str
    pid: int
    pid_started: float
    url: str


class HealthPort:
    """Open from `start` to `stop`. `url` is None while it is closed."""

    def __init__(self, service: str, routes: dict[str, Route], *, settings: Settings, log: Log) -> None:
        self._service, self._settings = service, settings
        port = DEFAULT_PORTS[service] if settings.health_port is None else settings.health_port
        self._port = HttpPort(routes, host=settings.health_host, port=port, log=log)
        self._note: Path | None = None
        self.url: str | None = None

    def start(self) -> None:
        if self._settings.health:
            self.url = self._port.start()

    def leave_note(self) -> None:
        """Write the endpoint file once the home exists and is locked by this process."""
        if self.url is None:
            return
        folder = notes_folder(self._settings.home)
        with suppress(OSError):
            self._settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.mkdir(exist_ok=True, mode=0o700)
            pid = os.getpid()
            note = Note(machine=_machine(), service=self._service, pid=pid, pid_started=pid_started(pid), url=self.url)
            path = folder / f"{self._service}-{pid}.json"
            half = path.with_suffix(".new")
            half.write_text(json.dumps(asdict(note)), encoding="utf-8")
            half.replace(path)
            self._note = path

    def stop(self) -> None:
        if self._note is not None:
            with suppress(OSError):
                self._note.unlink()
        self._port.stop()
        self.url = None


def notes_folder(home: Path) -> Path:
    return home / "health"


def living_notes(home: Path) -> list[Note]:
    """The live processes of this home. The file of a killed process is stale, and is removed."""
    found = []
    for path in sorted(notes_folder(home).glob("*.json")):
        try:
            note = Note(**json.loads(path.read_text(encoding="utf-8")))
            if note.machine != _machine():
                continue
            is_alive = pid_started(note.pid) == note.pid_started
        except (OSError, ValueError, TypeError):
            is_alive = False
        if is_alive:
            found.append(note)
        else:
            with suppress(OSError):
                path.unlink()
    return found


def _machine() -> str:
    place = here()
    return f"{place.host} {place.boot_id} {place.pid_namespace}"
