"""What the executor sends, and what the documents show, fits the schemas of Kubernetes itself."""

from __future__ import annotations

import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from evertick.domain.executor_options import POD_OPTIONS
from evertick.executors.kubernetes.manifest import pod_manifest, read_template, secret_manifest
from tests.executors.kubernetes.conftest import order
from tests.source_tree import ROOT

# The oldest that the chart allows, and the newest that is known here.
VERSIONS = ("1.27", kubernetes_validate.latest_version().rpartition(".")[0])
EVERYTHING = {
    "image": "registry.example.com/etl:7",
    "image_pull_policy": "IfNotPresent",
    "image_pull_secrets": ["registry"],
    "resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
    "env": {"REGION": "eu"},
    "env_secrets": ["warehouse"],
    "env_config_maps": ["settings"],
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    "volume_mounts": [{"name": "data", "mountPath": "/data"}],
    "node_selector": {"disk": "ssd"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "service_account": "etl",
    "priority_class": "low",
    "labels": {"team": "data"},
    "annotations": {"example.com/why": "because it must"},
    "pod": {"spec": {"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["db"]}]}},
}
PAGE = (ROOT / "docs" / "howto" / "kubernetes.md").read_text(encoding="utf-8")
TEMPLATE, ROLE, *_ = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_and_secrets_fit_with_every_option(version: str, tmp_path: Path) -> None:
    assert EVERYTHING.keys() == set(POD_OPTIONS)
    (tmp_path / "pod.yaml").write_text(TEMPLATE)
    for file, place in ((None, {}), (None, EVERYTHING), (tmp_path / "pod.yaml", EVERYTHING)):
        template = read_template(file, image="evertick:test")
        pod = pod_manifest(order(**place), template, owner="evertick", allowed=POD_OPTIONS)
        kubernetes_validate.validate(pod, version, strict=True)
    kubernetes_validate.validate(secret_manifest(order(), owner="evertick", pod_uid="u"), version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_role_in_the_documents_fits_and_is_the_chart_s(version: str) -> None:
    role = yaml.safe_load(ROLE)
    kubernetes_validate.validate(role, version, strict=True)
    chart = (ROOT / "deploy" / "chart" / "templates" / "accounts.yaml").read_text(encoding="utf-8")
    for rule in role["rules"]:
        assert f"resources: [{rule['resources'][0]}]\n    verbs: [{', '.join(rule['verbs'])}]" in chart
