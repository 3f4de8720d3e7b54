"""Agents as processes of this machine: started once, found again, ended whole."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from evertick.domain.agent_protocol import attempt_name
from evertick.domain.attempt import TaskKey
from evertick.executors.agent_process import GONE, AgentDirectory, AgentProcesses
from evertick.executors.base import Observed, Phase, RemoteOrder
from tests.waiting import eventually

# Notes its pid, and ends as the word in its token says: at once, when a file appears, or never.
STAND_IN = """
import os, signal, sys, time
word = open(os.environ["EVERTICK_AGENT_TOKEN_FILE"]).read()
if "stubborn" in word:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(os.environ["PIDS"], "a") as file:
    file.write(f"{os.getpid()}\\n")
while "hold" in word or "stubborn" in word:
    time.sleep(0.01)
with open(os.environ["EVERTICK_AGENT_OUTCOME_FILE"], "w") as file:
    file.write(word)
sys.exit(7)
"""


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder, self.pids_file = folder, folder / "pids"
        self.pids_file.touch()

    def executor(self) -> AgentProcesses:
        environment = {"PATH": os.environ["PATH"], "PIDS": str(self.pids_file), "SHOWN": "yes"}
        return AgentProcesses(self.folder / "agents", environment=environment, command=[sys.executable, "-c", STAND_IN])

    def pids(self) -> list[int]:
        return [int(line) for line in self.pids_file.read_text().split()]


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    made = Place(tmp_path)
    yield made
    for pid in made.pids():
        with suppress(OSError):
            if str(tmp_path).encode() in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)


def order(token: str, number: int = 1) -> RemoteOrder:
    key = TaskKey(number, 0, -1)
    session = int.from_bytes(os.urandom(7), "big")
    return RemoteOrder(
        name=attempt_name(key, 1, session),
        key=key,
        epoch=1,
        session=session,
        dag="d",
        task="t",
        queue="default",
        bundle="b",
        token=token,
        api_url="http://127.0.0.1:1",
    )


async def ended(executor: AgentProcesses, name: str) -> Observed:
    async def look() -> Observed | None:
        seen = await executor.find(name)
        return seen if seen is not None and seen.phase is Phase.ENDED else None

    found: Observed = await eventually(look)
    return found


async def test_an_agent_runs_and_leaves_its_outcome_and_exit_status(place: Place) -> None:
    one = order("at once")
    async with place.executor() as executor:
        assert await executor.find(one.name) is None
        await executor.submit(one)
        seen = await ended(executor, one.name)
        assert (seen.outcome, seen.exit_code, seen.reason) == (b"at once", 7, None)
        assert dict(await executor.observe()) == {one.name: seen}
        await executor.cancel(one.name, 0)
        assert await executor.find(one.name) is None
        await executor.cancel(one.name, 0)


@pytest.mark.requirement("A11")
async def test_the_same_attempt_twice_is_one_process_also_for_another_runner(place: Place) -> None:
    one = order("hold")
    async with place.executor() as executor, place.executor() as other:
        await executor.submit(one)
        await other.submit(one)
        await executor.submit(one)
        await eventually(place.pids)
        seen = await other.find(one.name)
        assert seen is not None and seen.phase is Phase.RUNNING
    assert len(place.pids()) == 1


@pytest.mark.requirement("A11", "V5")
async def test_an_agent_whose_runner_died_before_it_noted_its_process_is_found_again(place: Place) -> None:
    one = order("hold")
    async with place.executor() as executor:
        await executor.submit(one)
        (pid,) = await eventually(place.pids)
        (noted,) = place.folder.rglob("pid")
        noted.unlink()
    async with place.executor() as executor:
        await executor.submit(one)
        seen = await executor.find(one.name)
        assert seen is not None and seen.phase is Phase.RUNNING
        assert noted.read_text().startswith(f"{pid} ")
        noted.unlink()
        os.kill(pid, signal.SIGKILL)
        await executor.submit(order("hold", 2))
        await eventually(lambda: len(place.pids()) == 2)
        await executor.submit(one)
        await eventually(lambda: len(place.pids()) == 3)


async def test_its_token_is_in_no_command_line_and_no_environment(place: Place) -> None:
    one = order("hold secret-token")
    async with place.executor() as executor:
        await executor.submit(one)
        (pid,) = await eventually(place.pids)
        shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert b"SHOWN=yes" in shown and b"secret-token" not in shown
        (file,) = place.folder.rglob("token")
        assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
        assert os.getsid(pid) == pid != os.getsid(0)
        assert "secret-token" not in repr(one)


@pytest.mark.requirement("A16")
async def test_agents_outlive_their_runner_and_are_found_again(place: Place) -> None:
    one = order("hold")
    async with place.executor() as executor:
        await executor.submit(one)
        (pid,) = await eventually(place.pids)
    async with place.executor() as executor:
        (token,) = place.folder.rglob("token")
        left = token.with_name("outcome")
        left.write_bytes(b"left")
        seen = await executor.find(one.name)
        assert seen is not None and (seen.phase, seen.outcome) == (Phase.RUNNING, b"left")
        left.unlink()
        hints = executor.hints()
        os.kill(pid, signal.SIGKILL)
        await anext(hints)
        seen = await ended(executor, one.name)
        assert seen.outcome is None and seen.exit_code in (None, 137)


async def test_one_that_was_killed_says_by_what(place: Place) -> None:
    one = order("hold")
    async with place.executor() as executor:
        await executor.submit(one)
        (pid,) = await eventually(place.pids)
        os.kill(pid, signal.SIGKILL)
        seen = await ended(executor, one.name)
        assert (seen.reason, seen.exit_code) == ("killed by SIGKILL", 137)


@pytest.mark.parametrize(("word", "grace"), [("hold", 30.0), ("stubborn", 0.05)])
async def test_a_canceled_agent_ends_in_peace_or_by_force(place: Place, word: str, grace: float) -> None:
    one = order(word)
    async with place.executor() as executor:
        await executor.submit(one)
        (pid,) = await eventually(place.pids)

        async def is_gone() -> bool:
            await executor.cancel(one.name, grace)
            return await executor.find(one.name) is None

        await eventually(is_gone)
        assert not Path(f"/proc/{pid}").exists()
        assert list((place.folder / "agents" / "attempts").iterdir()) == []


async def test_another_process_with_its_number_is_not_it(place: Place) -> None:
    one = order("at once")
    async with place.executor() as executor:
        await executor.submit(one)
        await ended(executor, one.name)
        (file,) = place.folder.rglob("pid")
        _, *rest = file.read_text().split()
        file.write_text(" ".join([str(os.getpid()), *rest]))
        seen = await executor.find(one.name)
        assert seen is not None and seen.phase is Phase.ENDED
        await executor.cancel(one.name, 0)


async def test_files_of_others_in_the_folder_are_nobodys_agent(place: Place) -> None:
    async with place.executor() as executor:
        (place.folder / "agents" / "attempts" / "readme").mkdir()
        assert dict(await executor.observe()) == {}


async def test_code_that_no_agent_has_used_for_long_is_cleared_away(place: Place) -> None:
    bundles = place.folder / "agents" / "home" / "bundles"
    for name, age in (("old", 8 * 86_400), ("new", 86_400)):
        (bundles / name).mkdir(parents=True)
        os.utime(bundles / name, (time.time() - age, time.time() - age))
    async with place.executor() as executor:
        await executor.observe()
    assert [path.name for path in bundles.iterdir()] == ["new"]


def test_a_folder_is_removed_in_one_step_and_not_filled_again(tmp_path: Path) -> None:
    folder = AgentDirectory(path=tmp_path / "attempts" / "et-1-0-x-1-00000000000000aa")
    with folder.locked():
        folder.keep_token("token")
    (tmp_path / f"{GONE}{folder.path.name}").mkdir()
    folder.remove()
    folder.keep_exit(0)
    assert not folder.path.exists() and list(tmp_path.glob(f"{GONE}*")) == []
