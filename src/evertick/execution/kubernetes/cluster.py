"""Which cluster and namespace, and the connection to it: a kubeconfig file, or the cluster that this runs in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config

from evertick.domain.errors import InvalidSettings
from evertick.execution.kubernetes.api import KubeApi

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Without a kubeconfig: the cluster around us, else the kubeconfig file that kubectl would use."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    timeout_seconds: float = 30.0


@asynccontextmanager
async def connected(cluster: Cluster) -> AsyncIterator[KubeApi]:
    """Raises InvalidSettings where no cluster can be made out. Nothing is sent yet."""
    configuration = Configuration()
    namespace = await _load(cluster, configuration)
    async with ApiClient(configuration) as client:
        yield KubeApi(client, namespace=cluster.namespace or namespace, timeout_seconds=cluster.timeout_seconds)


async def _load(cluster: Cluster, configuration: Configuration) -> str:
    """Returns the namespace that goes with it."""
    if cluster.kubeconfig is None and cluster.context is None:
        try:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            return await asyncio.to_thread(_own_namespace)
        except (ConfigException, OSError):
            pass  # not in a cluster
    file = None if cluster.kubeconfig is None else str(cluster.kubeconfig.expanduser())
    try:
        loader = await load_kube_config(
            config_file=file, context=cluster.context, client_configuration=configuration, persist_config=False
        )
        current = loader.current_context or {}
    # The client trips over files that are no kubeconfig at all.
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
