"""The executor that a runner drives, by name: a built-in one, an extension, or `module:factory` of your own. Imported only
when chosen.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from evertick.config import LOCAL, Settings, user_environment
from evertick.domain.agent_protocol import read_server_url
from evertick.domain.errors import EvertickError, InvalidSettings
from evertick.executors.agent_process import AgentProcesses
from evertick.executors.base import RemoteExecutor
from evertick.extensions import ExtensionKind, extension_names, find_extension
from evertick.runtime.listen_socket import DEFAULT_PORT

_OURS = {
    "process": "evertick.executors.registry:agents_here",
    "kubernetes": "evertick.executors.registry:kubernetes_executor",
    "docker": "evertick.executors.docker.executor:DockerExecutor",
    "slurm": "evertick.executors.slurm:SlurmExecutor",
    "ray": "evertick.executors.ray:RayExecutor",
}

# Where loopback is not this machine, or may not be.
_ELSEWHERE = {"kubernetes": "pods", "docker": "containers", "slurm": "Slurm jobs", "ray": "Ray jobs"}


def agents_here(settings: Settings) -> AgentProcesses:
    """The executor `process`."""
    return AgentProcesses(settings.home.absolute() / "agents", environment=user_environment())


def open_executor(settings: Settings) -> RemoteExecutor:
    """The executor, not entered yet. Raises InvalidSettings if it cannot be used."""
    try:
        made = _factory(settings.executor)(settings)
    except EvertickError:
        raise
    except Exception as error:
        # Third-party code: an error in it is a setting to correct, not a crash.
        what = f"{type(error).__name__}: {error}"
        raise InvalidSettings(f"EVERTICK_EXECUTOR={settings.executor} cannot be used: {what}") from error
    return cast("RemoteExecutor", made)


def _factory(name: str) -> Any:
    module, _, factory = _OURS.get(name, name).partition(":")
    if factory:
        return getattr(import_module(module), factory)
    if (found := find_extension(ExtensionKind.EXECUTOR, name)) is None:
        known = ", ".join((LOCAL, *_OURS, *extension_names(ExtensionKind.EXECUTOR)))
        raise InvalidSettings(
            f"EVERTICK_EXECUTOR={name} is unknown. Use one of {known}, or your own as module:factory."
        )
    return found


def api_url_for_agents(settings: Settings) -> str:
    """The API's address for agents. Raises InvalidSettings at startup for an address that no agent could use."""
    url = settings.agent_api_url
    if url is None:
        if settings.executor in _ELSEWHERE:
            raise InvalidSettings(
                f"{_ELSEWHERE[settings.executor]} need the API's address as they reach it: set EVERTICK_AGENT_API_URL, as in"
                " https://evertick.example.com."
            )
        # Agents on this machine: an API that listens on all interfaces listens on loopback, too.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.api_host, settings.api_host)
        name = f"[{host}]" if ":" in host else host
        return f"http://{name}:{settings.api_port or DEFAULT_PORT}"
    try:
        read_server_url(url)
    except InvalidSettings as error:
        raise InvalidSettings(f"EVERTICK_AGENT_API_URL cannot be used: {error}.") from None
    return url


def kubernetes_executor(settings: Settings) -> RemoteExecutor:
    """Raises InvalidSettings for an unusable template, or if the extra is not installed."""
    try:
        loaded: Any = import_module("evertick.executors.kubernetes.executor")
    except ModuleNotFoundError as error:
        raise InvalidSettings(
            f"The Kubernetes executor needs {error.name}, which is not installed: pip install 'evertick[kubernetes]'."
        ) from None
    executor: RemoteExecutor = loaded.KubernetesExecutor(settings)
    return executor
