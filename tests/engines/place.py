"""What the contract of executors needs of an engine: an executor, a stand-in for the agent, and faults."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Protocol

from evertick.config import Settings
from evertick.domain.agent_protocol import attempt_name
from evertick.domain.attempt import TaskKey
from evertick.executors.base import RemoteExecutor, RemoteOrder

# Notes that it started, and lives as the word in its token says: to its end, or until it is stopped.
STAND_IN = """import os, pathlib, signal, sys, time
given = os.environ.get("EVERTICK_AGENT_TOKEN") or open(os.environ["EVERTICK_AGENT_TOKEN_FILE"]).read()
word, name = given.split("_")[1:3]
def stopped(*_):
    with open(f"{PLACE}/stopped", "a") as file:
        file.write(name + "\\n")
    sys.exit(3)
PLACE = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN if word == "stubborn" else stopped)
with open(f"{PLACE}/started", "a") as file:
    file.write(name + "\\n")
print("a line", flush=True)
while word in ("hold", "stubborn") and not (PLACE / f"go-{name}").exists():
    time.sleep(0.02)
outcome = os.environ.get("EVERTICK_AGENT_OUTCOME_FILE") or sys.argv[sys.argv.index("--outcome-file") + 1]
pathlib.Path(outcome).write_text(f"{word} by {os.getuid()} with {os.environ.get('REGION')}")
sys.exit(7)
"""
# Not numbers that a shorter test would use, so that nothing is mistaken for another's.
_SESSION = 0xE000_0000_0000_0000


def order(token: str, number: int, engine: str, *, api_url: str = "http://127.0.0.1:1", **options: Any) -> RemoteOrder:
    """The word of the token says how the stand-in lives."""
    key, session = TaskKey(number, 0, -1), _SESSION + int.from_bytes(os.urandom(6), "big")
    name = attempt_name(key, 1, session)
    return RemoteOrder(
        name=name,
        key=key,
        epoch=1,
        session=session,
        dag="nightly",
        task="extract.orders",
        queue="far",
        bundle="b" * 64,
        token=f"eva_{token}_{name}",
        api_url=api_url,
        place={engine: options},
    )


class Place(Protocol):
    """One engine that runs. `folder`: the directory that the test and the stand-ins share."""

    engine: str
    folder: Path
    # The engine shows the token to all of its users.
    shows_token: bool
    # Whether it tells when something changes.
    has_hints: bool
    # Options that it refuses, and what it says; settings with which nobody answers.
    refused: list[tuple[dict[str, Any], str]]
    unreachable: dict[str, Any] | None
    # The command of a real agent there.
    agent: str

    def settings(self, **changes: Any) -> dict[str, Any]: ...

    def executor(self, settings: Settings) -> RemoteExecutor: ...

    async def kill_attempt(self, name: str) -> None:
        """Kill the attempt's process with SIGKILL."""

    async def names(self) -> set[str]:
        """The objects at the engine, as its own client shows them."""

    async def shown(self, name: str) -> str:
        """Everything that the engine shows to all of its users about the object."""


def write_stand_in(folder: Path) -> str:
    """The command of the stand-in."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)
    (folder / "stand_in.py").write_text(STAND_IN)
    return f"{sys.base_prefix}/bin/python3 {folder}/stand_in.py {folder}"


def lines(place: Place, file: str) -> list[str]:
    path = place.folder / file
    return path.read_text().split() if path.exists() else []


def go(place: Place, name: str) -> None:
    (place.folder / f"go-{name}").touch()
