"""What a registration logs about drain requests, and when it ends its session."""

from __future__ import annotations

from pathlib import Path

from evertick.domain.attempt import RunnerRequest
from evertick.runner.database_access import DatabaseAccess
from evertick.runner.events import EventQueue
from evertick.runner.registration import Registration, draw_runner
from evertick.runner.state import Ending
from tests.system.hosting import Said, quick

NOWHERE = "postgresql://127.0.0.1:1/nowhere"


def registered(folder: Path, said: Said) -> Registration:
    events = EventQueue[object]()
    settings = quick(NOWHERE, folder)
    me = draw_runner(settings)
    access = DatabaseAccess(settings, url=NOWHERE, me=me, log=said.log)
    return Registration(settings, access=access, me=me, log=said.log, events=events)


async def test_a_request_is_logged_once_and_ends_the_session_when_it_is_idle(tmp_path: Path) -> None:
    said = Said()
    registration = registered(tmp_path, said)

    def follow(request: RunnerRequest | None) -> None:
        if registration.state.follow(request):
            registration.on_request()

    registration.on_idle()
    for _ in range(2):
        follow(RunnerRequest.DRAIN)
        registration.on_idle()
    assert not registration.over.is_set()
    follow(None)
    registration.on_idle()
    follow(RunnerRequest.LEAVE)
    for _ in range(2):
        registration.on_idle()
    assert registration.over.is_set() and registration.ending is Ending.DRAINED
    logged = [event["event"] for event in said.all]
    assert logged == [
        "drain_requested",
        "runner_drained",
        "drain_canceled",
        "drain_requested",
        "runner_drained",
        "runner_exited",
    ]


async def test_a_declared_death_ends_the_session_once_and_outweighs_a_drain(tmp_path: Path) -> None:
    said = Said()
    registration = registered(tmp_path, said)
    registration.state.follow(RunnerRequest.LEAVE)
    registration.on_idle()
    for _ in range(2):
        registration.on_declared_dead(3)
    assert registration.over.is_set() and registration.ending is Ending.DECLARED_DEAD
    assert [event["attempts"] for event in said.events("session_declared_dead")] == [3]
