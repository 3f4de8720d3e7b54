"""The cluster, the namespace and the connection: from a kubeconfig file, or from the cluster that this runs in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config

from evertick.domain.errors import InvalidSettings
from evertick.execution.kubernetes.api import KubeApi
from evertick.execution.remote import ExecutorUnavailable

_RENEWAL_SECONDS = 1.0
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Without a kubeconfig: the surrounding cluster, else the kubeconfig file that kubectl would use."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    timeout_seconds: float = 30.0


@asynccontextmanager
async def connected(cluster: Cluster) -> AsyncIterator[KubeApi]:
    """Raises InvalidSettings if no cluster can be determined. Sends nothing yet."""
    configuration, renewal = Configuration(), _Renewal(cluster)
    namespace = await _load(cluster, configuration)
    if configuration.refresh_api_key_hook is None:
        configuration.refresh_api_key_hook = renewal.renew
    async with ApiClient(configuration) as client:
        yield KubeApi(
            client,
            namespace=cluster.namespace or namespace,
            timeout_seconds=cluster.timeout_seconds,
            on_stranger=renewal.want,
        )


class _Renewal:
    """Tokens of most clouds last for minutes: a refused token is read or requested again. Inside a cluster the client
    does so."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._is_wanted, self._renewed_at = False, time.monotonic()

    def want(self) -> None:
        self._is_wanted = True

    async def renew(self, configuration: Configuration) -> None:
        """Called before each request. A credential plugin that returns invalid tokens is not called without a pause."""
        if not self._is_wanted or time.monotonic() - self._renewed_at < _RENEWAL_SECONDS:
            return
        self._is_wanted, self._renewed_at = False, time.monotonic()
        try:
            await _load_kubeconfig(self._cluster, configuration)
        except InvalidSettings as error:
            raise ExecutorUnavailable(str(error)) from None


async def _load(cluster: Cluster, configuration: Configuration) -> str:
    """Returns the namespace that belongs to it."""
    if cluster.kubeconfig is None and cluster.context is None:
        try:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            return await asyncio.to_thread(_own_namespace)
        except (ConfigException, OSError):
            pass  # not in a cluster
    return await _load_kubeconfig(cluster, configuration)


async def _load_kubeconfig(cluster: Cluster, configuration: Configuration) -> str:
    file = None if cluster.kubeconfig is None else str(cluster.kubeconfig.expanduser())
    try:
        if file is not None and not await asyncio.to_thread(Path(file).is_file):
            raise FileNotFoundError(f"the file {file} does not exist")
        loader = await load_kube_config(
            config_file=file, context=cluster.context, client_configuration=configuration, persist_config=False
        )
        current = loader.current_context or {}
    # The client raises odd errors for files that are not a kubeconfig at all.
    except (ConfigException, OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise InvalidSettings(
            f"No Kubernetes cluster can be used: {said}. Set EVERTICK_KUBECONFIG and EVERTICK_KUBE_CONTEXT, or run the runner in"
            " the cluster with a service account."
        ) from None
    found = current["context"].get("namespace") if "context" in current else None
    return str(found or "default")


def _own_namespace() -> str:
    return _OWN_NAMESPACE.read_text(encoding="utf-8").strip()
