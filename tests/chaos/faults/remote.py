"""What is between a runner and the tasks that it has elsewhere: the cluster's API, ours, the way to it, agents, false agents."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
from asyncio.subprocess import DEVNULL, create_subprocess_exec
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import structlog

from evertick.agent.api_client import PREFIX, AgentClient
from evertick.config import Settings
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import Conflict, LeaseLost, Unauthenticated
from evertick.runtime.http_client import HttpEndpoint, HttpRequest
from evertick.secrets.agent_tokens import AgentTokens
from tests.chaos.members import Member
from tests.chaos.nemesis import Nemesis, Struck
from tests.chaos.pods import AGENT_KEY, AGENTS, API, KUBERNETES, Pods
from tests.chaos.proxy import Mode
from tests.chaos.record import Answer, Fault
from tests.chaos.stage import Stage
from tests.executors.kubernetes.server import Fault as KubeFault
from tests.waiting import elapse, eventually

MET_SECONDS = 30.0
ANSWER_SECONDS = 10.0
# How an agent ends whose attempt is somebody else's.
_NOT_OURS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """One kind of bad weather at the cluster's API. `fault` counts down with each request that it meets."""

    kind: Fault
    part: str
    fault: KubeFault


async def cast(nemesis: Nemesis, pods: Pods, spell: Spell) -> None:
    """Until as many requests have met it as it is for."""
    async with nemesis.fault(spell.kind, KUBERNETES, part=spell.part) as struck:
        pods.server.faults.append(spell.fault)
        before = spell.fault.times
        try:
            await eventually(lambda: spell.fault.times == 0, MET_SECONDS, pause_seconds=0.02)
        except AssertionError:
            struck.is_void = spell.fault.times == before
        finally:
            pods.server.faults.remove(spell.fault)


@asynccontextmanager
async def cluster_away(nemesis: Nemesis, pods: Pods) -> AsyncIterator[Struck]:
    """Nobody answers at the cluster's API; what it runs goes on."""
    async with nemesis.fault(Fault.OUTAGE, KUBERNETES, part="executor") as struck:
        await pods.close()
        try:
            yield struck
        finally:
            await pods.open()


@asynccontextmanager
async def api_away(nemesis: Nemesis, api: Member) -> AsyncIterator[Struck]:
    """Our own API is stopped, and started again in the end."""
    async with nemesis.fault(Fault.OUTAGE, API, part="api") as struck:
        await api.stop()
        try:
            yield struck
        finally:
            api.start()


async def kill_api(nemesis: Nemesis, api: Member) -> None:
    async with nemesis.fault(Fault.KILL, API, part="api"):
        await api.kill()


async def lose_answer(nemesis: Nemesis, pods: Pods, match: str) -> bool:
    """What an agent asks next under that path is done, and it never hears so. Whether somebody asked."""
    before = len(pods.way.status()[AGENTS]["dropped"])
    async with nemesis.fault(Fault.DROP_REPLY, AGENTS, part=match.strip("/")) as struck:
        pods.way.drop_reply(AGENTS, match=match)
        try:
            await eventually(
                lambda: len(pods.way.status()[AGENTS]["dropped"]) > before, MET_SECONDS, pause_seconds=0.05
            )
        except AssertionError:
            struck.is_void = True
        finally:
            pods.way.heal(AGENTS)
    return not struck.is_void


async def cut_agents(nemesis: Nemesis, pods: Pods, seconds: float, mode: Mode, part: str) -> None:
    """All agents alike: nothing moves between them and the API, or in one direction only."""
    async with nemesis.fault(Fault.CUT, AGENTS, part=part, seconds=seconds):
        pods.way.set(AGENTS, mode)
        try:
            await elapse(seconds)
        finally:
            pods.way.reset(AGENTS)
            pods.way.heal(AGENTS)


async def kill_agent(nemesis: Nemesis, pods: Pods, name: str, *, is_out_of_memory: bool = False) -> None:
    """kill -9 of the agent, or of all that is in its pod, as the kernel does when its memory is used up."""
    part = "pod out of memory" if is_out_of_memory else "agent"
    async with nemesis.fault(Fault.OUT_OF_MEMORY if is_out_of_memory else Fault.KILL, name, part=part):
        if is_out_of_memory:
            pods.node.kill(name)
        else:
            os.kill(pods.agent_pid(name), signal.SIGKILL)


@asynccontextmanager
async def frozen_agent(nemesis: Nemesis, pods: Pods, name: str, *bodies: int) -> AsyncIterator[None]:
    """The agent stands still for the length of the block, and these bodies with it."""
    part = "agent and body" if bodies else "agent"
    pids = [pods.agent_pid(name), *bodies]
    async with nemesis.fault(Fault.FREEZE, name, part=part):
        try:
            _signal(pids, signal.SIGSTOP)
            yield
        finally:
            _signal(pids, signal.SIGCONT)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class FalseAgent:
    """Speaks for attempts that are not its own: another agent has begun them, they were replaced, or never were. None of it may be
    taken, and all of it is noted."""

    def __init__(self, stage: Stage, pods: Pods) -> None:
        self._stage, self._pods, self._address = stage, pods, HttpEndpoint(pods.api_url)
        self._tokens = AgentTokens(Settings(agent_key=(AGENT_KEY,)))

    async def start(self, name: str) -> None:
        """With the true token of a pod whose own agent has begun."""
        line = AgentClient(self._pods.api_url, self._pods.token_of(name), log=structlog.get_logger())
        try:
            await line.start()
        except (Conflict, LeaseLost, Unauthenticated):
            self._note("stale_start", name, was_taken=False)
        else:
            self._note("stale_start", name, was_taken=True)

    async def start_process(self, name: str) -> None:
        """The same as a whole agent: it must end with the status that says so, and run nothing."""
        folder = self._pods.folder / f"false-{secrets.token_hex(4)}"
        folder.mkdir()
        (folder / "token").write_text(self._pods.token_of(name))
        environment = {
            "PATH": os.environ["PATH"],
            "EVERTICK_SERVER": self._pods.api_url,
            "EVERTICK_HOME": str(folder / "home"),
            "CHAOS_TOKEN": self._stage.cluster.token,
            "CHAOS_EFFECTS": str(self._stage.cluster.effects_file),
            "CHAOS_SERVICE": "false agent",
        }
        words = ["-m", "evertick.cli.main", "agent", "--token-file", str(folder / "token")]
        process = await create_subprocess_exec(sys.executable, *words, env=environment, stdout=DEVNULL, stderr=DEVNULL)
        status = await process.wait()
        self._note("stale_start", f"{name} as a process", was_taken=status != _NOT_OURS)

    async def finish(self, key: TaskKey, epoch: int, session: int) -> None:
        await self._say("stale_finish", "/finish", {"kind": "success", "result_json": '"stale"'}, key, epoch, session)

    async def heartbeat(self, key: TaskKey, epoch: int, session: int) -> None:
        await self._say("stale_extend", "/heartbeat", {}, key, epoch, session)

    async def _say(self, op: str, path: str, body: dict[str, object], key: TaskKey, epoch: int, session: int) -> None:
        token = self._tokens.make_attempt_token(key=key, epoch=epoch, session=session)
        request = HttpRequest(method="POST", path=f"{PREFIX}{path}", token=token, content=json.dumps(body).encode())
        answer = await self._address.ask(request, seconds=ANSWER_SECONDS, most_bytes=100_000)
        is_taken = answer.status < 300 and json.loads(answer.body).get("word") != "lost"
        self._note(op, f"run {key.run_id} epoch {epoch}", was_taken=is_taken, status=answer.status)

    def _note(self, op: str, what: str, *, was_taken: bool, **detail: object) -> None:
        stage = self._stage
        request = f"false-agent-{stage.nemesis.unique()}"
        stage.cluster.clients.asked(op, request=request, what=what, **detail)
        stage.cluster.clients.answered(request, Answer.OK if was_taken else Answer.ERROR)
        (stage.stale_accepted if was_taken else stage.stale_refused)[op] += 1
        stage.expect(not was_taken, f"{op} of {what} by a false agent was accepted")
