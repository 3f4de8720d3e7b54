"""The Kubernetes executor against an API server that keeps the documented rules: idempotent, by level, and honest about reasons."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from evertick.config import Settings
from evertick.domain.errors import ExecutorBusy, ExecutorUnavailable, InvalidSettings, SubmissionRefused
from evertick.executors.base import Phase, RemoteExecutor
from evertick.executors.registry import kubernetes_executor
from tests.executors.kubernetes.conftest import MakeExecutor, order
from tests.executors.kubernetes.objects import Failure, Json
from tests.executors.kubernetes.server import ApiServer, Fault, internal, too_many
from tests.waiting import elapse, eventually


def pods(server: ApiServer) -> list[Json]:
    return server.objects.all_of("pods", "default")


def status(server: ApiServer, name: str, **fields: Any) -> None:
    server.objects.patch("pods", "default", name, {"status": fields}, part="status")


def container(**state: Any) -> list[Json]:
    return [{"name": "task", "state": state}]


@pytest.mark.requirement("A11")
async def test_a_pod_and_its_secret_are_made_once_however_often_it_is_submitted(
    server: ApiServer, executor: RemoteExecutor
) -> None:
    for _ in range(3):
        await executor.submit(order())
    (pod,) = pods(server)
    (secret,) = server.objects.all_of("secrets", "default")
    assert pod["metadata"]["name"] == secret["metadata"]["name"] == order().name
    assert pod["metadata"]["labels"]["evertick.io/session"] == "0000000000000abc"
    assert pod["metadata"]["annotations"]["evertick.io/task"] == "extract.orders"
    (owner,) = secret["metadata"]["ownerReferences"]
    assert owner["uid"] == pod["metadata"]["uid"]
    assert base64.b64decode(secret["data"]["token"]).decode() == order().token
    task = pod["spec"]["containers"][0]
    assert pod["spec"]["restartPolicy"] == "Never"
    assert task["command"] == ["evertick", "agent"]
    assert task["terminationMessagePath"] in task["args"]


async def test_the_token_is_in_the_secret_alone(server: ApiServer, executor: RemoteExecutor) -> None:
    await executor.submit(order())
    where = [kind for _, kind, body in server.bodies if order().token in json.dumps(body)]
    assert where == ["secrets"]
    assert order().token not in json.dumps(pods(server))
    assert order().token not in repr(order())


@pytest.mark.requirement("A11")
async def test_what_was_interrupted_is_completed_by_the_next_try(
    server: ApiServer, make_executor: MakeExecutor
) -> None:
    server.faults = [Fault(verb="create", kind="pods", after=True, times=1)]
    async with make_executor(kube_timeout_seconds=1.0) as executor:
        with pytest.raises(ExecutorUnavailable, match="took too long"):
            await executor.submit(order())
    assert len(pods(server)) == 1
    async with make_executor() as executor:
        server.faults = [Fault(verb="create", kind="secrets", times=1, failure=internal())]
        with pytest.raises(ExecutorUnavailable, match="500"):
            await executor.submit(order())
        await executor.submit(order())
    assert len(pods(server)) == len(server.objects.all_of("secrets", "default")) == 1


async def test_a_secret_of_a_pod_that_is_gone_is_replaced(server: ApiServer, executor: RemoteExecutor) -> None:
    left = {"metadata": {"name": order().name}, "stringData": {"token": "old"}}
    server.objects.create("secrets", "default", left)
    await executor.submit(order())
    secret = server.objects.get("secrets", "default", order().name)
    assert base64.b64decode(secret["data"]["token"]).decode() == order().token


async def test_a_pod_of_somebody_else_is_not_taken_for_ours(server: ApiServer, executor: RemoteExecutor) -> None:
    theirs = {"metadata": {"name": order().name}, "spec": {"containers": [{"name": "a", "image": "b"}]}}
    server.objects.create("pods", "default", theirs)
    with pytest.raises(SubmissionRefused, match="is not the one of task"):
        await executor.submit(order())
    assert await executor.find(order().name) is None
    assert await executor.observe() == {}
    await executor.cancel(order().name, 1)
    assert len(pods(server)) == 1


FAULTS: list[tuple[Failure, type[Exception], str]] = [
    (too_many(7), ExecutorBusy, "too many requests"),
    (Failure(409, "Conflict", "Operation cannot be fulfilled on resourcequotas"), ExecutorBusy, "resourcequotas"),
    (Failure(403, "Forbidden", 'pods "a" is forbidden: exceeded quota: pods'), ExecutorBusy, "exceeded quota"),
    (internal(), ExecutorUnavailable, "500"),
    (Failure(503, "ServiceUnavailable", "no leader"), ExecutorUnavailable, "503"),
    (Failure(504, "Timeout", "took long"), ExecutorUnavailable, "504"),
    (Failure(401, "Unauthorized", "Unauthorized"), ExecutorUnavailable, "401"),
    (Failure(404, "NotFound", 'namespaces "x" not found'), ExecutorUnavailable, "namespaces"),
    (Failure(403, "Forbidden", 'User "a" cannot create resource "pods"'), ExecutorUnavailable, "cannot create"),
    (Failure(403, "Forbidden", "namespace x because it is being terminated"), ExecutorUnavailable, "terminated"),
    (Failure(403, "Forbidden", 'violates PodSecurity "restricted:latest"'), SubmissionRefused, "violates PodSecurity"),
    (Failure(400, "BadRequest", "json: cannot unmarshal"), SubmissionRefused, "cannot unmarshal"),
    (Failure(422, "Invalid", "spec.containers: Required value"), SubmissionRefused, "Required value"),
]


@pytest.mark.requirement("B11")
async def test_each_refusal_is_told_apart(server: ApiServer, executor: RemoteExecutor) -> None:
    for failure, kind, says in FAULTS:
        server.faults = [Fault(verb="create", kind="pods", failure=failure, times=1)]
        with pytest.raises(kind, match=says) as caught:
            await executor.submit(order())
        if failure.code == 429:
            assert isinstance(caught.value, ExecutorBusy)
            assert caught.value.retry_after_seconds == 7
    assert pods(server) == []


@pytest.mark.requirement("B11")
async def test_an_outage_is_an_outage_for_every_call(server: ApiServer, make_executor: MakeExecutor) -> None:
    async with make_executor() as executor:
        await executor.submit(order())
        for fault in (Fault(breaks=True), Fault(failure=internal()), Fault(failure=Failure(422, "Invalid", "what?"))):
            server.faults = [fault]
            for call in (executor.observe(), executor.find(order().name), executor.cancel(order().name, 1)):
                with pytest.raises(ExecutorUnavailable):
                    await call
        server.faults = [Fault(failure=too_many(3))]
        with pytest.raises(ExecutorBusy):
            await executor.observe()
        server.faults = []
        assert (await executor.observe()).keys() == {order().name}


async def test_a_token_that_has_expired_is_read_anew(
    server: ApiServer, make_executor: MakeExecutor, tmp_path: Path
) -> None:
    async with make_executor() as executor:
        await executor.submit(order(1))
        server.token = "the-next-one"
        with pytest.raises(ExecutorUnavailable, match="401"):
            await executor.submit(order(2))
        server.write_kubeconfig(tmp_path / "kubeconfig")

        async def is_taken() -> bool:
            with suppress(ExecutorUnavailable):
                await executor.submit(order(2))
                return True
            return False

        await eventually(is_taken, pause_seconds=0.1)


async def test_a_quota_holds_up_and_then_lets_in(server: ApiServer, executor: RemoteExecutor) -> None:
    server.objects.most_pods = 1
    await executor.submit(order(1))
    with pytest.raises(ExecutorBusy, match="exceeded quota"):
        await executor.submit(order(2))
    status(server, order(1).name, phase="Succeeded", containerStatuses=container(terminated={"exitCode": 0}))
    await executor.submit(order(2))


REASONS: list[tuple[Json, Phase, str | None, int | None]] = [
    ({"phase": "Pending"}, Phase.WAITING, None, None),
    (
        {"phase": "Pending", "containerStatuses": container(waiting={"reason": "ContainerCreating"})},
        Phase.WAITING,
        None,
        None,
    ),
    (
        {
            "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
            ]
        },
        Phase.WAITING,
        "Unschedulable: 0/3 nodes",
        None,
    ),
    *(
        (
            {"phase": "Pending", "containerStatuses": container(waiting={"reason": reason, "message": "m"})},
            Phase.WAITING,
            f"{reason}: m",
            None,
        )
        for reason in ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "CreateContainerConfigError")
    ),
    ({"phase": "Running", "containerStatuses": container(running={})}, Phase.RUNNING, None, None),
    ({"phase": "Unknown"}, Phase.RUNNING, "NodeLost: its node does not answer", None),
    ({"phase": "Running", "reason": "NodeLost", "message": "gone"}, Phase.RUNNING, "NodeLost: gone", None),
    (
        {
            "phase": "Running",
            "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}],
        },
        Phase.RUNNING,
        "NodeLost",
        None,
    ),
    (
        {"phase": "Succeeded", "containerStatuses": container(terminated={"exitCode": 0, "reason": "Completed"})},
        Phase.ENDED,
        None,
        0,
    ),
    (
        {"phase": "Failed", "containerStatuses": container(terminated={"exitCode": 3, "reason": "Error"})},
        Phase.ENDED,
        "exit code 3",
        3,
    ),
    (
        {"phase": "Failed", "containerStatuses": container(terminated={"exitCode": 137, "reason": "OOMKilled"})},
        Phase.ENDED,
        "OOMKilled",
        137,
    ),
    ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, Phase.ENDED, "Evicted: low on memory", None),
    ({"phase": "Failed", "reason": "DeadlineExceeded"}, Phase.ENDED, "DeadlineExceeded", None),
    (
        {
            "phase": "Failed",
            "containerStatuses": container(terminated={"exitCode": 128, "reason": "StartError", "message": "no"}),
        },
        Phase.ENDED,
        "StartError: no",
        128,
    ),
    # A container beside it goes on: the attempt itself has ended.
    (
        {"phase": "Running", "containerStatuses": container(terminated={"exitCode": 0, "reason": "Completed"})},
        Phase.ENDED,
        None,
        0,
    ),
]


@pytest.mark.requirement("B10")
async def test_each_reason_is_surfaced(server: ApiServer, executor: RemoteExecutor) -> None:
    for run_id, (said, phase, reason, exit_code) in enumerate(REASONS):
        name = order(run_id).name
        await executor.submit(order(run_id))
        status(server, name, **said)
        found = await executor.find(name)
        assert found is not None
        assert (found.phase, found.reason, found.exit_code, found.outcome) == (phase, reason, exit_code, None), said
    listed = await executor.observe()
    assert [listed[order(run_id).name].phase for run_id in range(len(REASONS))] == [each[1] for each in REASONS]


async def test_what_the_agent_left_behind_is_handed_over(server: ApiServer, executor: RemoteExecutor) -> None:
    await executor.submit(order())
    ended = {"exitCode": 137, "reason": "OOMKilled", "message": '{"kind":"success"}'}
    status(server, order().name, phase="Failed", containerStatuses=container(terminated=ended))
    found = await executor.find(order().name)
    assert found is not None
    assert found.outcome == b'{"kind":"success"}'


async def test_a_pod_that_can_never_start_is_given_up_with_its_reason(
    server: ApiServer, make_executor: MakeExecutor
) -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
    async with make_executor(pod_start_timeout_seconds=0.05) as executor:
        for run_id in (1, 2):
            await executor.submit(order(run_id))
        status(server, order(1).name, containerStatuses=container(waiting=waiting))
        assert (await executor.observe())[order(1).name].phase is Phase.WAITING

        async def given_up() -> bool:
            return (await executor.observe())[order(1).name].phase is Phase.ENDED

        await eventually(given_up)
        found = await executor.find(order(1).name)
        assert found is not None
        assert (found.phase, found.reason) == (Phase.ENDED, "ImagePullBackOff: Back-off pulling image")
        # One without a place, or whose image comes after all, is not.
        status(server, order(1).name, phase="Running", containerStatuses=container(running={}))
        listed = await executor.observe()
        assert (listed[order(1).name].phase, listed[order(2).name].phase) == (Phase.RUNNING, Phase.WAITING)


async def test_lists_are_read_page_by_page_and_begin_anew_when_they_expire(
    server: ApiServer, executor: RemoteExecutor
) -> None:
    for run_id in range(7):
        await executor.submit(order(run_id))
    names = {order(run_id).name for run_id in range(7)}
    server.most_per_page = 3
    await executor.observe()
    server.requests.clear()
    assert (await executor.observe()).keys() == names
    assert server.requests["list pods"] == 3
    expired = Failure(410, "Expired", "The provided continue parameter is too old")
    server.faults = [Fault(verb="list", times=1), Fault(verb="list", times=1, failure=expired)]
    assert (await executor.observe()).keys() == names


async def test_after_a_restart_everything_is_found_again(server: ApiServer, make_executor: MakeExecutor) -> None:
    async with make_executor() as before:
        await before.submit(order(1))
        await before.submit(order(2))
    status(server, order(2).name, phase="Running", containerStatuses=container(running={}))
    async with make_executor() as after, make_executor(executor_owner="another") as stranger:
        assert {name: found.phase for name, found in (await after.observe()).items()} == {
            order(1).name: Phase.WAITING,
            order(2).name: Phase.RUNNING,
        }
        assert await stranger.observe() == {}
        assert await stranger.find(order(1).name) is None
        await stranger.cancel(order(1).name, 1)
        await after.submit(order(2))
    assert len(pods(server)) == 2


async def test_the_watch_is_a_hint_that_goes_on_after_410_and_after_breaks(
    server: ApiServer, executor: RemoteExecutor
) -> None:
    hints = 0

    async def listen() -> None:
        nonlocal hints
        async for _ in executor.hints():
            hints += 1

    async def hears(run_id: int) -> None:
        before = hints
        await executor.submit(order(run_id))
        await eventually(lambda: hints > before)

    listening = asyncio.create_task(listen())
    try:
        await eventually(lambda: server.open_watches)
        await hears(1)
        server.objects.compact()
        server.end_watches()
        await eventually(lambda: server.requests["list pods"] >= 2 and server.open_watches)
        await hears(2)
        server.faults = [Fault(verb="watch", times=2, breaks=True), Fault(verb="list", times=1, failure=internal())]
        server.end_watches()
        await eventually(lambda: not server.faults[0].times)
        await hears(3)
        assert not listening.done()
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


@asynccontextmanager
async def listening(executor: RemoteExecutor) -> AsyncIterator[list[None]]:
    """The hints that have come, one after the other. Nothing ends them within the block."""
    hints: list[None] = []

    async def listen() -> None:
        async for hint in executor.hints():
            hints.append(hint)

    task = asyncio.create_task(listen())
    yield hints
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_server_that_ends_every_watch_at_once_is_not_asked_without_a_pause(
    server: ApiServer, executor: RemoteExecutor
) -> None:
    server.longest_watch_seconds = 0.0
    async with listening(executor):
        await eventually(lambda: server.requests["watch pods"] > 1)
        await elapse(0.5)
        assert server.requests["watch pods"] < 10


@pytest.mark.requirement("V11")
async def test_a_pod_of_a_megabyte_does_not_end_the_watch(server: ApiServer, executor: RemoteExecutor) -> None:
    async with listening(executor) as hints:
        await eventually(lambda: server.open_watches)
        await executor.submit(order(1, env={"LARGE": "x" * 1_000_000}))
        await eventually(lambda: hints)
        before = len(hints)
        await executor.submit(order(2))
        await eventually(lambda: len(hints) > before)
        assert server.requests["watch pods"] == 1


async def test_bookmarks_are_no_hints_and_move_the_watch_on(server: ApiServer, executor: RemoteExecutor) -> None:
    server.bookmark_seconds = 0.02
    async with listening(executor) as hints:
        await eventually(lambda: server.open_watches)
        # What is not watched moves the version on; only a bookmark tells of it.
        for number in range(3):
            server.objects.create("secrets", "default", {"metadata": {"name": f"s{number}"}, "stringData": {"a": "b"}})
        bookmarked = server.objects.version
        await eventually(lambda: executor._version == str(bookmarked))  # type: ignore[attr-defined]
        assert hints == []
        server.objects.oldest = bookmarked + 1
        server.end_watches()
        await eventually(lambda: server.requests["watch pods"] == 2 and server.open_watches)
        assert server.requests["list pods"] == 1, "it could go on from the bookmark"


async def test_a_canceled_pod_is_deleted_with_grace_and_what_is_not_there_is_fine(
    server: ApiServer, executor: RemoteExecutor
) -> None:
    await executor.submit(order())
    bound = pods(server)[0]
    bound["spec"]["nodeName"] = "node-1"
    server.objects.replace("pods", "default", order().name, bound)
    status(server, order().name, phase="Running", containerStatuses=container(running={}))
    await executor.cancel(order().name, 0.2)
    assert pods(server)[0]["metadata"]["deletionGracePeriodSeconds"] == 1, "0 would take it off the books at once"
    found = await executor.find(order().name)
    assert found is not None
    assert (found.phase, found.reason) == (Phase.RUNNING, "it is being deleted")
    server.objects.delete("pods", "default", order().name, {"gracePeriodSeconds": 0})
    await executor.cancel(order().name, 1)
    assert await executor.find(order().name) is None
    await eventually(lambda: server.objects.all_of("secrets", "default") == [])


@pytest.mark.parametrize(
    ("policy", "kept"), [("always", []), ("on_success", ["failed"]), ("never", ["succeeded", "failed"])]
)
async def test_ended_pods_are_cleaned_up_by_policy(
    server: ApiServer, make_executor: MakeExecutor, policy: str, kept: list[str]
) -> None:
    names = {"succeeded": order(1).name, "failed": order(2).name}
    async with make_executor(pod_cleanup=policy) as executor:
        for run_id, phase in ((1, "Succeeded"), (2, "Failed")):
            await executor.submit(order(run_id))
            status(server, order(run_id).name, phase=phase)
            await executor.cancel(order(run_id).name, 1)
        assert [pod["metadata"]["name"] for pod in pods(server)] == [names[each] for each in kept]
        # What is kept is nobody's attempt any more.
        assert await executor.observe() == {}
        assert await executor.find(names["failed"]) is None


@pytest.mark.parametrize(("policy", "kept"), [("always", []), ("on_success", [1]), ("never", [0, 1])])
async def test_what_stands_beside_a_task_neither_decides_about_its_pod_nor_goes_on_in_one_that_is_kept(
    server: ApiServer, make_executor: MakeExecutor, policy: str, kept: list[int]
) -> None:
    async with make_executor(pod_cleanup=policy) as executor:
        for code in (0, 1):
            await executor.submit(order(code))
            ended = container(terminated={"exitCode": code, "reason": "Error" if code else "Completed"})
            beside = {"name": "proxy", "state": {"running": {}}}
            status(server, order(code).name, phase="Running", containerStatuses=[*ended, beside])
            await executor.cancel(order(code).name, 1)
        left = {pod["metadata"]["name"]: pod["spec"].get("activeDeadlineSeconds") for pod in pods(server)}
        assert left == {order(code).name: 1 for code in kept}
        assert await executor.observe() == {}


async def test_a_look_does_not_wait_until_all_are_deleted_whose_time_is_up(
    server: ApiServer, make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evertick.executors.kubernetes.executor._MOST_SWEPT", 2)
    async with make_executor(pod_keep_seconds=0.01) as executor:
        for run_id in range(5):
            await executor.submit(order(run_id))
            status(server, order(run_id).name, phase="Succeeded")
            await executor.cancel(order(run_id).name, 1)

        async def are_swept() -> bool:
            before = server.requests["delete pods"]
            await executor.observe()
            assert server.requests["delete pods"] - before <= 2
            return pods(server) == []

        await eventually(are_swept)


async def test_kept_pods_go_when_their_time_is_up(server: ApiServer, make_executor: MakeExecutor) -> None:
    async with make_executor(pod_keep_seconds=0.01) as executor:
        await executor.submit(order())
        status(server, order().name, phase="Succeeded")
        await executor.cancel(order().name, 1)
        assert len(pods(server)) == 1

        async def are_swept() -> bool:
            await executor.observe()
            return pods(server) == []

        await eventually(are_swept)


async def test_a_kept_pod_that_cannot_be_deleted_hides_nothing(server: ApiServer, make_executor: MakeExecutor) -> None:
    async with make_executor(pod_keep_seconds=0.01) as executor:
        await executor.submit(order(1))
        status(server, order(1).name, phase="Succeeded")
        await executor.cancel(order(1).name, 1)
        await executor.submit(order(2))
        server.faults = [Fault(verb="delete", kind="pods", failure=internal())]

        async def was_tried() -> bool:
            assert list(await executor.observe()) == [order(2).name]
            return server.requests["delete pods"] > 0

        await eventually(was_tried)


async def test_template_and_options_make_the_pod(
    server: ApiServer, make_executor: MakeExecutor, tmp_path: Path
) -> None:
    template = tmp_path / "pod.yaml"
    template.write_text(
        """
kind: Pod
metadata:
  labels: {team: data, evertick.io/owner: somebody, evertick.io/kept: "true"}
  finalizers: [example.com/never]
  namespace: elsewhere
spec:
  nodeSelector: {pool: batch}
  tolerations: [{key: batch, operator: Exists}]
  serviceAccountName: default
  activeDeadlineSeconds: 86400
  volumes: [{name: data, emptyDir: {}}]
  containers:
    - name: task
      image: etl:1
      env: [{name: REGION, value: eu}, {name: EVERTICK_SERVER, value: http://evil}]
      resources: {requests: {cpu: 500m}}
      volumeMounts: [{name: data, mountPath: /data}]
    - {name: proxy, image: proxy:1}
"""
    )
    place = {
        "image": "etl:2",
        "env": {"REGION": "us", "MODE": "full"},
        "resources": {"limits": {"memory": "2Gi"}},
        "node_selector": {"disk": "ssd"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "env_secrets": ["warehouse"],
        "labels": {"cost": "a"},
        "pod": {
            "spec": {
                "priorityClassName": "low",
                "restartPolicy": "Always",
                "containers": [{"name": "task", "args": ["x"]}],
            }
        },
    }
    async with make_executor(pod_template=template) as executor:
        await executor.submit(order(**place))
    (pod,) = pods(server)
    spec, meta = pod["spec"], pod["metadata"]
    task, proxy = spec["containers"]
    assert (meta["namespace"], meta.get("finalizers")) == ("default", None)
    assert (meta["labels"]["team"], meta["labels"]["cost"]) == ("data", "a")
    assert (meta["labels"]["evertick.io/owner"], "evertick.io/kept" in meta["labels"]) == ("evertick", False)
    assert (task["image"], proxy["image"]) == ("etl:2", "proxy:1")
    assert task["resources"] == {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}
    env = {each["name"]: each["value"] for each in task["env"]}
    assert (env["REGION"], env["MODE"], env["EVERTICK_SERVER"]) == ("us", "full", order().api_url)
    assert {mount["mountPath"] for mount in task["volumeMounts"]} >= {"/data", "/var/run/evertick/start"}
    assert spec["nodeSelector"] == {"pool": "batch", "disk": "ssd"}
    assert [each["key"] for each in spec["tolerations"]] == ["batch", "gpu"]
    assert (spec["priorityClassName"], spec["restartPolicy"], spec["activeDeadlineSeconds"]) == ("low", "Never", 86400)
    assert task["args"][0] == "--outcome-file"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert task["securityContext"]["allowPrivilegeEscalation"] is False
    assert spec["automountServiceAccountToken"] is False


async def test_a_misspelled_field_of_a_template_or_an_option_is_refused_with_its_name(
    server: ApiServer, make_executor: MakeExecutor, tmp_path: Path
) -> None:
    template = tmp_path / "pod.yaml"
    template.write_text("spec: {nodeSelecter: {pool: batch}}")
    async with make_executor(pod_template=template) as executor:
        with pytest.raises(SubmissionRefused, match=r'unknown field "spec\.nodeSelecter"'):
            await executor.submit(order())
    async with make_executor() as executor:
        with pytest.raises(SubmissionRefused, match=r'unknown field "spec\.containers\[0\]\.workDir"'):
            await executor.submit(order(pod={"spec": {"containers": [{"name": "task", "workDir": "/x"}]}}))
    assert pods(server) == []


async def test_options_that_dags_may_not_set_here_are_refused(make_executor: MakeExecutor) -> None:
    async with make_executor(pod_options=("image", "resources")) as executor:
        await executor.submit(order(1, image="etl:1"))
        with pytest.raises(SubmissionRefused, match="pod, service_account, which EVERTICK_POD_OPTIONS does not allow"):
            await executor.submit(order(2, service_account="default", pod={}))
        with pytest.raises(SubmissionRefused, match="the name of an image"):
            await executor.submit(order(3, image=""))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("spec: [", "it is not YAML"),
        ("- a", "one manifest of a Pod"),
        ("kind: Job", "one manifest of a Pod"),
        ("kind: Pod\nstatus: {}", "has no 'status'"),
        ("spec: []", "its spec must be a mapping"),
        ("metadata: {labels: {version: 7}}", "put numbers and true or false in quotes"),
        ("spec: {containers: [{image: a}]}", "each must have a name"),
        ("spec: {containers: [{name: main}]}", "none of its containers is named 'task'"),
        ("spec: {restartPolicy: Always}", "must be Never"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "pod.yaml").write_text(text)
    with pytest.raises(InvalidSettings, match=r"pod\.yaml cannot be used") as caught:
        kubernetes_executor(Settings(pod_template=tmp_path / "pod.yaml"))
    assert says in str(caught.value)


async def test_a_cluster_that_cannot_be_made_out_is_told_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="cannot be read: No such file"):
        kubernetes_executor(Settings(pod_template=tmp_path / "none.yaml"))
    with pytest.raises(InvalidSettings, match=f"the file {tmp_path / 'none'} does not exist"):
        async with kubernetes_executor(Settings(kubeconfig=tmp_path / "none")):
            pass
    for file, text in (("none", None), ("empty", ""), ("broken", "a: ["), ("other", "a: b")):
        if text is not None:
            (tmp_path / file).write_text(text)
        with pytest.raises(InvalidSettings, match="Set EVERTICK_KUBECONFIG"):
            async with kubernetes_executor(Settings(kubeconfig=tmp_path / file)):
                pass


def test_without_the_extra_the_next_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("kubernetes_asyncio", "evertick.executors.kubernetes"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio.client", None)
    with pytest.raises(InvalidSettings, match=r"pip install 'evertick\[kubernetes\]'"):
        kubernetes_executor(Settings())
