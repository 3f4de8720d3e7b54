"""Builds a runner's Kubernetes executor from its settings. Its libraries are imported only here, and only when it is
chosen."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

from evertick.config import Settings
from evertick.domain.errors import InvalidSettings
from evertick.domain.pod_options import POD_OPTIONS
from evertick.execution.remote import RemoteExecutor


def kubernetes_executor(settings: Settings) -> RemoteExecutor:
    """Raises InvalidSettings for an unusable template, or if the extra is not installed."""
    loaded: Any
    try:
        cluster = import_module("evertick.execution.kubernetes.cluster")
        template = import_module("evertick.execution.kubernetes.template")
        loaded = import_module("evertick.execution.kubernetes.executor")
    except ModuleNotFoundError as error:
        raise InvalidSettings(
            f"The Kubernetes executor needs {error.name}, which is not installed: pip install 'evertick[kubernetes]'."
        ) from None
    image = settings.pod_image or f"evertick:{version('evertick')}"
    options = loaded.KubernetesOptions(
        cluster=cluster.Cluster(
            kubeconfig=settings.kubeconfig,
            context=settings.kube_context,
            namespace=settings.kube_namespace,
            timeout_seconds=settings.kube_timeout_seconds,
        ),
        template=template.read_template(settings.pod_template, image=image),
        owner=settings.pod_owner,
        allowed=settings.pod_options or POD_OPTIONS,
        cleanup=loaded.Cleanup(settings.pod_cleanup),
        keep_seconds=settings.pod_keep_seconds,
        give_up_seconds=settings.pod_give_up_seconds,
    )
    executor: RemoteExecutor = loaded.KubernetesExecutor(options)
    return executor
