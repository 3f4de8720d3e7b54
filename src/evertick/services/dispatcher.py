"""A runner that drives a remote executor: the same sequence of sessions, with another path from claimed to running."""

from __future__ import annotations

from evertick.config import Settings
from evertick.engine.extend import Request
from evertick.services.agent_tokens import AgentTokens
from evertick.services.dispatch_session import DispatchSession
from evertick.services.events import Log
from evertick.services.executors import api_url_for_agents, open_executor
from evertick.services.runner import Runner


def make_dispatcher(settings: Settings, *, url: str, log: Log) -> Runner:
    """Raises InvalidSettings for an unusable executor, address or key: at startup, not when the first task arrives."""
    api_url_for_agents(settings)
    tokens, first = AgentTokens(settings), [open_executor(settings)]

    def begin(request: Request | None) -> DispatchSession:
        executor = first.pop() if first else open_executor(settings)
        return DispatchSession(settings, url=url, log=log, executor=executor, tokens=tokens, request=request)

    return Runner(settings, url=url, log=log, begin=begin)
