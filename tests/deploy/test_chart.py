"""The Helm chart, rendered with several sets of values: valid for Kubernetes, safe, and in words that Evertick knows."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from evertick.executors.base import RunnerOrder
from evertick.executors.kubernetes.manifest import OWNER_LABEL, pod_manifest, read_template
from evertick.launcher.launcher import load_fleets
from tests.deploy.names import strange_names, why_no_command
from tests.source_tree import ROOT

CHART = ROOT / "deploy" / "chart"
# The oldest that the chart allows, and the newest that is known here.
VERSIONS = ("1.27", kubernetes_validate.latest_version().rpartition(".")[0])

Values = dict[str, Any]
Manifest = dict[str, Any]

SETS: dict[str, Values] = {
    "as it is": {},
    "small": {
        "api": {"replicas": 1, "adminPassword": {"secret": ""}},
        "scheduler": {"replicas": 1},
        "runners": {"default": {"replicas": 1}},
        "migrations": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
    },
    "large": {
        "image": {
            "repository": "registry.example/evertick",
            "digest": f"sha256:{'a' * 64}",
            "pullSecrets": [{"name": "p"}],
        },
        "database": {
            "tlsSecret": "evertick-tls",
            "roles": True,
            "cidr": "10.1.0.0/16",
            "keys": {
                "migrate": "owner",
                "api": "api",
                "scheduler": "planner",
                "runner": "runner",
                "publisher": "folder",
            },
        },
        "secretKeys": {"secret": "evertick-keys"},
        "storage": {
            "url": "s3://attic/shop",
            "endpoint": "https://s3.example:9000",
            "secret": "evertick-storage",
            "logs": True,
            "port": 9000,
        },
        "settings": {
            "EVERTICK_RETENTION_DAYS": 30,
            "EVERTICK_LISTEN_NOTIFY": True,
            "EVERTICK_TICK_SECONDS": 0.5,
            "EVERTICK_RESULT_SPILL_BYTES": 10485760,
            "EVERTICK_STOP_GRACE_SECONDS": 7,
            "EVERTICK_LOG": "text",
        },
        "env": [{"name": "TZ", "value": "UTC"}],
        "publisher": {"enabled": True, "volume": {"persistentVolumeClaim": {"claimName": "dags"}}},
        "api": {"proxies": ["10.0.0.0/8"], "nodeSelector": {"zone": "a"}, "affinity": {"podAntiAffinity": {}}},
        "runners": {
            "default": {"resultsVolume": {"persistentVolumeClaim": {"claimName": "results"}}},
            "gpu": {
                "queues": ["gpu", "big"],
                "match": ["ml::*"],
                "slots": 2,
                "replicas": 1,
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
            },
        },
        "networkPolicy": {
            "apiFrom": [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}],
            "monitoringFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
            "runnersMayGoAnywhere": False,
            "extraEgress": [{"ports": [{"protocol": "TCP", "port": 443}]}],
        },
        "priorityClassName": "important",
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "data"},
    },
    "pods": {
        "runners": {
            "default": {},
            "pods": {
                "executor": "kubernetes",
                "queues": ["pods"],
                "podTemplate": {
                    "metadata": {"labels": {"team": "data"}},
                    "spec": {"nodeSelector": {"pool": "batch"}, "containers": [{"name": "task", "image": "etl:7"}]},
                },
            },
        },
        "kubernetes": {"namespace": "work", "agentKeys": {"secret": "evertick-agents"}},
        "networkPolicy": {
            "runnersMayGoAnywhere": False,
            "podsMayGoAnywhere": False,
            "apiFrom": [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}],
        },
    },
    "launched": {
        "launcher": {
            "enabled": True,
            "fleets": '[default]\nengine = "kubernetes"\nmax = 4\n\n[gpu]\nengine = "ray"\nmax = 2\n',
            "env": [{"name": "EVERTICK_RAY_ADDRESS", "value": "http://ray:8265"}],
        },
        "kubernetes": {"agentKeys": {"secret": "evertick-agents"}},
        "networkPolicy": {"podsMayGoAnywhere": False, "apiFrom": [{"podSelector": {}}]},
    },
}


def helm(*arguments: object, values: Values | None = None) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("helm")
    given = [*arguments, "--values", "-"] if values is not None else arguments
    words = [str(each) for each in (program, *given)]
    return subprocess.run(words, input=yaml.safe_dump(values or {}), capture_output=True, text=True, check=False)


@cache
def rendered(name: str) -> list[Manifest]:
    made = helm("template", "live", CHART, "--namespace", "ours", values=SETS[name])
    assert made.returncode == 0, made.stderr
    return [each for each in yaml.safe_load_all(made.stdout) if each]


def pods(name: str) -> list[tuple[Manifest, dict[str, Any]]]:
    """Whatever makes pods, and how each of them will be."""
    return [(each, each["spec"]["template"]) for each in rendered(name) if each["kind"] in ("Deployment", "Job")]


def containers(name: str) -> list[dict[str, Any]]:
    return [
        each for _, pod in pods(name) for each in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
    ]


def of_kind(name: str, kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in rendered(name) if each["kind"] == kind}


def test_the_chart_has_nothing_that_helm_would_warn_of() -> None:
    linted = helm("lint", "--strict", CHART)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize(("name", "version"), [("large", VERSIONS[0]), ("pods", VERSIONS[1])])
def test_every_manifest_fits_the_schemas_of_kubernetes(name: str, version: str) -> None:
    for manifest in rendered(name):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_manifest_that_does_not_fit_would_be_found() -> None:
    broken = {**of_kind("as it is", "Service")["live-evertick-api"], "spec": {"ports": [{"port": "eighty"}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", SETS)
def test_every_command_and_setting_is_one_that_evertick_knows(name: str) -> None:
    for each in containers(name):
        assert why_no_command(each["args"]) is None, each["args"]
        assert strange_names(variable["name"] for variable in each["env"]) == []


@pytest.mark.parametrize("name", SETS)
def test_no_pod_runs_as_root_writes_to_its_image_or_holds_what_it_does_not_need(name: str) -> None:
    for manifest, pod in pods(name):
        spec, place = pod["spec"], manifest["metadata"]["name"]
        assert spec["securityContext"]["runAsNonRoot"] is True, place
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, place
        assert spec["automountServiceAccountToken"] is ("serviceAccountName" in spec), place
        assert ("serviceAccountName" in spec) is place.endswith(("runner-pods", "-launcher")), place
        assert "hostPath" not in str(spec["volumes"]), place
    for each in containers(name):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert each["resources"]["requests"] and "memory" in each["resources"]["limits"]
        mounted = {mount["mountPath"] for mount in each["volumeMounts"]}
        assert {"/var/lib/evertick", "/tmp"} <= mounted


@pytest.mark.parametrize("name", SETS)
def test_secrets_come_by_reference_only(name: str) -> None:
    assert of_kind(name, "Secret") == {}
    secret = {"EVERTICK_DATABASE_URL", "EVERTICK_SECRET_KEYS", "EVERTICK_ADMIN_PASSWORD", "EVERTICK_AGENT_KEY"}
    secret |= {"EVERTICK_STORAGE_KEY_ID", "EVERTICK_STORAGE_SECRET_KEY"}
    for each in containers(name):
        for variable in each["env"]:
            assert ("secretKeyRef" in variable.get("valueFrom", {})) is (variable["name"] in secret), variable


@pytest.mark.parametrize("name", SETS)
def test_whatever_selects_pods_selects_some_and_every_service_is_looked_after(name: str) -> None:
    labels = {manifest["metadata"]["name"]: pod["metadata"]["labels"] for manifest, pod in pods(name)}

    def chosen(selector: dict[str, str]) -> list[str]:
        return [place for place, given in labels.items() if selector.items() <= given.items()]

    for manifest, _ in pods(name):
        if manifest["kind"] == "Deployment":
            assert chosen(manifest["spec"]["selector"]["matchLabels"]) == [manifest["metadata"]["name"]]
    for place, service in of_kind(name, "Service").items():
        assert chosen(service["spec"]["selector"]) == [place]
    for place, budget in of_kind(name, "PodDisruptionBudget").items():
        assert chosen(budget["spec"]["selector"]["matchLabels"]) == [place]
    several = {place for place, each in of_kind(name, "Deployment").items() if each["spec"]["replicas"] > 1}
    assert set(of_kind(name, "PodDisruptionBudget")) == (several if name != "small" else set())
    policies = of_kind(name, "NetworkPolicy")
    # Of pods that a runner or a launcher makes later.
    assert (policies.pop("live-evertick-tasks", None) is not None) is (name in ("pods", "launched"))
    assert (policies.pop("live-evertick-launched", None) is not None) is (name == "launched")
    for place, policy in policies.items():
        assert chosen(policy["spec"]["podSelector"]["matchLabels"]) == [place]
    assert set(policies) == (set(labels) if name != "small" else set())


@pytest.mark.parametrize("name", SETS)
def test_every_service_is_probed_where_it_listens_and_given_time_to_stop(name: str) -> None:
    for manifest, pod in pods(name):
        if manifest["kind"] == "Job":
            continue
        (container,) = pod["spec"]["containers"]
        env = {variable["name"]: variable.get("value") for variable in container["env"]}
        ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        assert ports["health"] == env["EVERTICK_HEALTH_PORT"] and env["EVERTICK_HEALTH_HOST"] == "0.0.0.0"
        for probe, path in (("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
            assert container[probe]["httpGet"] == {"path": path, "port": "health"}
        if container["name"] == "runner":
            grace = float(env["EVERTICK_STOP_GRACE_SECONDS"] or 0)
            assert pod["spec"]["terminationGracePeriodSeconds"] > grace
            assert pod["spec"]["shareProcessNamespace"] is True
        if container["name"] == "api":
            assert ports["http"] == env["EVERTICK_API_PORT"]
            assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
            assert pod["spec"]["terminationGracePeriodSeconds"] == 50


def test_migrations_run_before_the_services_and_roles_after_them() -> None:
    (job,) = of_kind("large", "Job").values()
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    spec = job["spec"]["template"]["spec"]
    assert [each["args"] for each in spec["initContainers"]] == [["db", "migrate"]]
    assert [each["args"] for each in spec["containers"]] == [["db", "roles", "--apply", "--keep"]]
    assert [
        each["spec"]["template"]["spec"]["containers"][0]["args"] for each in of_kind("as it is", "Job").values()
    ] == [["db", "migrate"]]


def test_each_service_has_its_own_address_of_the_database() -> None:
    keys = {
        each["name"]: variable["valueFrom"]["secretKeyRef"]["key"]
        for each in containers("large")
        for variable in each["env"]
        if variable["name"] == "EVERTICK_DATABASE_URL"
    }
    owner = {"migrate": "owner", "roles": "owner"}
    assert keys == {**owner, "api": "api", "scheduler": "planner", "runner": "runner", "publisher": "folder"}


def test_only_a_runner_that_makes_pods_has_rights_in_the_cluster_and_only_where_they_run() -> None:
    assert of_kind("large", "Role") == of_kind("large", "ServiceAccount") == {}
    (role,) = of_kind("pods", "Role").values()
    (binding,) = of_kind("pods", "RoleBinding").values()
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "work"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "live-evertick", "namespace": "ours"}]
    assert all("*" not in [*rule["verbs"], *rule["resources"]] for rule in role["rules"])
    # It reaches the cluster itself even where other runners may not leave.
    egress = {place: policy["spec"]["egress"] for place, policy in of_kind("pods", "NetworkPolicy").items()}
    assert egress["live-evertick-runner-pods"] == [{}]
    assert {} not in egress["live-evertick-runner-default"] and {} not in egress["live-evertick-api"]


def test_agents_reach_the_api_and_nobody_reaches_them() -> None:
    policies = of_kind("pods", "NetworkPolicy")
    (runner,) = [each for each in containers("pods") if each["name"] == "runner" and "pods" in each["args"]]
    owner = next(each["value"] for each in runner["env"] if each["name"] == "EVERTICK_EXECUTOR_OWNER")
    marked = {"matchLabels": {OWNER_LABEL: owner}}
    there = {"matchLabels": {"kubernetes.io/metadata.name": "work"}}
    tasks = policies["live-evertick-tasks"]
    assert (tasks["metadata"]["namespace"], tasks["spec"]["podSelector"]) == ("work", marked)
    assert tasks["spec"]["ingress"] == [] and {} not in tasks["spec"]["egress"]
    way = tasks["spec"]["egress"][1]["to"][0]
    assert way["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "ours"}}
    assert way["podSelector"]["matchLabels"] == policies["live-evertick-api"]["spec"]["podSelector"]["matchLabels"]
    # Also where only some may reach the API.
    allowed = policies["live-evertick-api"]["spec"]["ingress"][0]["from"]
    assert {"namespaceSelector": there, "podSelector": marked} in allowed and len(allowed) == 2


def test_a_launcher_gets_its_fleets_and_its_pods_reach_the_api(tmp_path: Path) -> None:
    """Its pods have the owner and the fleet as labels; the owner and the name of a fleet fit into one."""
    file = tmp_path / "fleets.toml"
    file.write_text(of_kind("launched", "ConfigMap")["live-evertick-fleets"]["data"]["fleets.toml"])
    assert [fleet.engine for fleet in load_fleets(file)] == ["kubernetes", "ray"]
    (launcher,) = [each for each in containers("launched") if each["name"] == "launcher"]
    env = {each["name"]: each.get("value") for each in launcher["env"]}
    assert env["EVERTICK_AGENT_API_URL"] == "http://live-evertick-api.ours.svc:80"
    assert len(env["EVERTICK_EXECUTOR_OWNER"]) <= 38 and env["EVERTICK_RAY_ADDRESS"]
    order = RunnerOrder(name="er-default-0", session=1, fleet="default", queue="default", token="t", api_url="http://a")
    pod = pod_manifest(order, read_template(None, image="evertick:1"), owner="ours.default", allowed=())
    policies = of_kind("launched", "NetworkPolicy")
    fleet = {"matchExpressions": [{"key": "evertick.io/fleet", "operator": "Exists"}]}
    assert pod["metadata"]["labels"]["evertick.io/fleet"] == "default"
    assert policies["live-evertick-launched"]["spec"]["podSelector"] == fleet
    assert fleet in [each["podSelector"] for each in policies["live-evertick-api"]["spec"]["ingress"][0]["from"]]
    assert policies["live-evertick-launcher"]["spec"]["egress"] == [{}]
    text = str(launcher["volumeMounts"]) + str(of_kind("launched", "Deployment")["live-evertick-launcher"])
    assert "/etc/evertick/fleets" in text and "evertick.io/fleets" in text, "a change replaces the launcher"


def test_settings_are_written_as_they_were_given_and_once() -> None:
    told = {"30", "true", "0.5", "10485760", "text"}
    for each in containers("large"):
        env = {variable["name"]: variable.get("value") for variable in each["env"]}
        assert len(env) == len(each["env"]), "of two, it would be left to chance which one holds"
        assert told <= set(env.values())
        assert env["EVERTICK_STOP_GRACE_SECONDS"] == ("60" if each["name"] == "runner" else "7")


@pytest.mark.parametrize("name", SETS)
def test_every_setting_that_the_chart_sets_is_known_as_its_own(name: str) -> None:
    parts = (CHART / "templates" / "_parts.tpl").read_text()
    own = parts.partition('define "evertick.ownSettings"')[2].partition("{{- end }}")[0]
    # Of these the one in the settings holds, or only some services have their own, or the schema refuses them.
    free = {"EVERTICK_LOG", "EVERTICK_STOP_GRACE_SECONDS", "EVERTICK_DATABASE_URL", "EVERTICK_SECRET_KEYS"}
    free |= {"EVERTICK_ADMIN_PASSWORD", "EVERTICK_AGENT_KEY", "EVERTICK_STORAGE_SECRET_KEY"}
    given = set(SETS[name].get("settings", {})) | {variable["name"] for variable in SETS[name].get("env", [])}
    given |= {variable["name"] for variable in SETS[name].get("launcher", {}).get("env", [])}
    for each in containers(name):
        for variable in each["env"]:
            if variable["name"] not in free | given:
                assert f"\n{variable['name']}: " in own, variable["name"]


def test_a_template_of_pods_reaches_its_runner_and_is_one_that_evertick_takes(tmp_path: Path) -> None:
    (held,) = of_kind("pods", "ConfigMap").values()
    file = tmp_path / "template.yaml"
    file.write_text(held["data"]["template.yaml"])
    spec = read_template(file, image="evertick:1")["spec"]
    assert (spec["nodeSelector"], spec["containers"][0]["image"]) == ({"pool": "batch"}, "etl:7")
    _, pod = next(each for each in pods("pods") if each[0]["metadata"]["name"].endswith("runner-pods"))
    (runner,) = pod["spec"]["containers"]
    named = next(each["value"] for each in runner["env"] if each["name"] == "EVERTICK_POD_TEMPLATE")
    mount = next(each for each in runner["volumeMounts"] if each["name"] == "pod-template")
    volume = next(each for each in pod["spec"]["volumes"] if each["name"] == "pod-template")
    assert named == f"{mount['mountPath']}/template.yaml"
    assert volume["configMap"]["name"] == held["metadata"]["name"]
    assert "evertick.io/pod-template" in pod["metadata"]["annotations"], "a change of it replaces the runner"
    assert of_kind("large", "ConfigMap") == {}


def test_runners_follow_the_load_with_keda_if_a_prometheus_is_named() -> None:
    """KEDA owns the number of replicas then, and counts the tasks of exactly these queues and pods."""
    burst = {
        "queues": ["default", "etl"],
        "slots": 4,
        "autoscaling": {"prometheus": "http://prometheus.m:9090", "max": 7},
    }
    text = helm("template", "live", CHART, values={"runners": {"burst": burst, "steady": {}}}).stdout
    found = [each for each in yaml.safe_load_all(text) if each]
    (scaled,) = [each for each in found if each["kind"] == "ScaledObject"]
    replicas = {
        each["metadata"]["name"]: each["spec"].get("replicas") for each in found if each["kind"] == "Deployment"
    }
    name = "live-evertick-runner-burst"
    assert replicas[name] is None and replicas["live-evertick-runner-steady"] == 2
    spec = scaled["spec"]
    assert (spec["scaleTargetRef"]["name"], spec["minReplicaCount"], spec["maxReplicaCount"]) == (name, 0, 7)
    (trigger,) = spec["triggers"]
    metadata = trigger["metadata"]
    assert metadata["threshold"] == "4"
    assert 'evertick_queue_depth{queue=~"default|etl"}' in metadata["query"]
    assert f'evertick_attempts_running{{pod=~"{name}-.*"}}' in metadata["query"]


def test_who_uses_the_storage_knows_it_and_may_go_there() -> None:
    knows = {
        each["name"]: {
            variable["name"] for variable in each["env"] if re.search("STORAGE|LOG_ARCHIVE", variable["name"])
        }
        for each in containers("large")
    }
    used = knows["runner"]
    assert "EVERTICK_STORAGE_SECRET_KEY" in used and knows["api"] == used
    assert knows["scheduler"] == used | {"EVERTICK_LOG_ARCHIVE", "EVERTICK_LOG_ARCHIVE_AFTER_SECONDS"}
    assert knows["publisher"] == knows["migrate"] == set()
    egress = {place: str(policy["spec"]["egress"]) for place, policy in of_kind("large", "NetworkPolicy").items()}
    may = {place.removeprefix("live-evertick-") for place, ways in egress.items() if "9000" in ways}
    assert may == {"api", "scheduler", "runner-default", "runner-gpu"}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"scheduler": {"replicas": 0}}, "scheduler"),
        ({"schedulers": {"replicas": 2}}, "schedulers"),
        ({"runners": {"a": {"slot": 2}}}, "slot"),
        ({"runners": {"A_b": {}}}, "A_b"),
        ({"runners": {"a": {"queues": []}}}, "queues"),
        ({"runners": {"a": {"executor": "celery"}}}, "executor"),
        ({"database": {"secret": ""}}, "secret"),
        ({"settings": {"RETENTION": 3}}, "RETENTION"),
        ({"settings": {"EVERTICK_DATABASE_URL": "postgresql://a:b@c/d"}}, "EVERTICK_DATABASE_URL"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"storage": {"url": "s3://attic"}}, "storage.url needs storage.secret"),
        ({"runners": {"a": {"executor": "kubernetes"}}}, "executor: kubernetes needs kubernetes.agentKeys.secret"),
        ({"launcher": {"enabled": True}}, "launcher.enabled needs launcher.fleets"),
        ({"storage": {"logs": True}}, "storage.logs needs storage.url"),
        ({"settings": {"EVERTICK_HEALTH_PORT": 9}}, "settings.EVERTICK_HEALTH_PORT is what the chart sets itself"),
        ({"settings": {"EVERTICK_STORAGE": "s3://attic"}}, "the chart sets itself: use storage.url"),
        ({"runners": {"a": {"podTemplate": {"spec": {"a": 1}}}}}, "runners.a.podTemplate needs executor: kubernetes"),
        ({"runners": {"a": {"podTemplate": {"kind": "Pod"}}}}, "podTemplate"),
        (
            {**SETS["pods"], "kubernetes": {"apiUrl": "https://a.example", "agentKeys": {"secret": "evertick-agents"}}},
            "kubernetes.apiUrl with networkPolicy.podsMayGoAnywhere: false needs networkPolicy.extraEgress",
        ),
    ],
)
def test_a_value_that_is_wrong_is_refused_by_its_name(values: Values, told: str) -> None:
    made = helm("template", "live", CHART, values=values)
    assert made.returncode != 0
    assert told in made.stderr


def test_every_value_is_in_the_schema_and_says_what_it_is() -> None:
    made = helm("template", "live", CHART, values={})
    assert made.returncode == 0, made.stderr
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
    assert set(values["runnerDefaults"]) == set(schema["properties"]["runnerDefaults"]["properties"])
