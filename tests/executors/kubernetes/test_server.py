"""The API server of our tests keeps the rules of the real one, seen through the official client and through plain HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from kubernetes_asyncio import watch
from kubernetes_asyncio.client import ApiClient, ApiException, Configuration, CoreV1Api, V1DeleteOptions

from tests.executors.kubernetes.objects import Json
from tests.executors.kubernetes.server import ApiServer, Fault, api_server, internal, too_many
from tests.waiting import eventually


def pod(name: str, **labels: str) -> Json:
    return {"metadata": {"name": name, "labels": labels}, "spec": {"containers": [{"name": "task", "image": "a:1"}]}}


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as started:
        yield started


@pytest.fixture
async def core(server: ApiServer) -> AsyncIterator[Any]:
    configuration = Configuration(host=server.url)
    configuration.api_key["BearerToken"] = f"Bearer {server.token}"
    async with ApiClient(configuration) as client:
        yield CoreV1Api(client)


async def refused(call: Any) -> ApiException:
    with pytest.raises(ApiException) as caught:
        await call
    return caught.value


async def test_each_change_has_a_new_version_and_a_name_is_taken_once(core: Any) -> None:
    made = await core.create_namespaced_pod("default", pod("a"))
    assert made.status.phase == "Pending"
    assert made.metadata.uid
    error = await refused(core.create_namespaced_pod("default", pod("a")))
    assert (error.status, "AlreadyExists" in error.body) == (409, True)
    changed = await core.patch_namespaced_pod("a", "default", {"metadata": {"labels": {"x": "y"}}})
    assert int(changed.metadata.resource_version) > int(made.metadata.resource_version)
    assert (await refused(core.read_namespaced_pod("b", "default"))).status == 404
    assert (await refused(core.create_namespaced_pod("nowhere", pod("a")))).status == 404


async def test_a_write_from_an_old_version_is_a_conflict(core: Any) -> None:
    old = await core.create_namespaced_pod("default", pod("a"))
    await core.patch_namespaced_pod("a", "default", {"metadata": {"labels": {"x": "y"}}})
    error = await refused(core.replace_namespaced_pod("a", "default", old))
    assert (error.status, "the object has been modified" in error.body) == (409, True)
    patch = {"metadata": {"resourceVersion": old.metadata.resource_version, "labels": {"x": "z"}}}
    assert (await refused(core.patch_namespaced_pod("a", "default", patch))).status == 409


async def test_the_status_is_changed_by_its_subresource_alone(core: Any) -> None:
    await core.create_namespaced_pod("default", {**pod("a"), "status": {"phase": "Succeeded"}})
    await core.patch_namespaced_pod("a", "default", {"status": {"phase": "Failed"}})
    assert (await core.read_namespaced_pod("a", "default")).status.phase == "Pending"
    patch = {"status": {"phase": "Running"}, "metadata": {"labels": {"x": "y"}}}
    await core.patch_namespaced_pod_status("a", "default", patch)
    found = await core.read_namespaced_pod("a", "default")
    assert (found.status.phase, found.metadata.labels or {}) == ("Running", {})


async def test_lists_come_in_pages_of_one_moment_and_expire(core: Any, server: ApiServer) -> None:
    for name in "abcde":
        await core.create_namespaced_pod("default", pod(name))
    first = await core.list_namespaced_pod("default", limit=2)
    await core.create_namespaced_pod("default", pod("aa"))
    await core.delete_namespaced_pod("c", "default")
    second = await core.list_namespaced_pod("default", limit=2, _continue=first.metadata._continue)
    assert [each.metadata.name for each in (*first.items, *second.items)] == ["a", "b", "c", "d"]
    assert second.metadata.resource_version == first.metadata.resource_version
    server.expire_lists()
    assert (await refused(core.list_namespaced_pod("default", _continue=second.metadata._continue))).status == 410


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("team=data", "a"),
        ("team!=data", "bc"),
        ("team", "ab"),
        ("!team", "c"),
        ("team in (data, web)", "ab"),
        ("team notin (web),kept", "c"),
        ("", "abc"),
    ],
)
async def test_selectors(core: Any, selector: str, names: str) -> None:
    for name, labels in (("a", {"team": "data"}), ("b", {"team": "web"}), ("c", {"kept": "true"})):
        await core.create_namespaced_pod("default", pod(name, **labels))
    found = await core.list_namespaced_pod("default", label_selector=selector)
    assert [each.metadata.name for each in found.items] == list(names)
    byname = await core.list_namespaced_pod("default", field_selector="metadata.name=b,status.phase=Pending")
    assert [each.metadata.name for each in byname.items] == ["b"]


async def test_a_watch_tells_each_change_and_ends_when_it_is_told(core: Any, server: ApiServer) -> None:
    await core.create_namespaced_pod("default", pod("before", team="data"))
    version = (await core.list_namespaced_pod("default")).metadata.resource_version
    seen: list[tuple[str, str]] = []

    async def listen() -> None:
        async with watch.Watch().stream(
            core.list_namespaced_pod, "default", label_selector="team=data", resource_version=version
        ) as stream:
            async for event in stream:
                seen.append((event["type"], event["object"].metadata.name))

    listening = asyncio.create_task(listen())
    await core.create_namespaced_pod("default", pod("a", team="data"))
    await core.create_namespaced_pod("default", pod("other", team="web"))
    await core.patch_namespaced_pod("a", "default", {"metadata": {"labels": {"x": "y"}}})
    await core.patch_namespaced_pod("a", "default", {"metadata": {"labels": {"team": "web"}}})
    await core.delete_namespaced_pod("before", "default")
    expected = [("ADDED", "a"), ("MODIFIED", "a"), ("DELETED", "a"), ("DELETED", "before")]
    await eventually(lambda: seen == expected)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


async def test_a_watch_from_too_long_ago_is_told_410_and_a_quiet_one_gets_bookmarks(server: ApiServer) -> None:
    server.objects.create("pods", "default", pod("a"))
    old = server.objects.version - 1
    server.objects.compact()
    server.bookmark_seconds = 0.05
    path = f"{server.url}/api/v1/namespaces/default/pods"
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {server.token}"}) as http:
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": "1"}
        async with http.get(path, params={**query, "resourceVersion": str(old)}) as answer:
            (line,) = [line async for line in answer.content]
            assert b'"ERROR"' in line
            assert b'"code": 410' in line
        async with http.get(path, params={**query, "resourceVersion": "0"}) as answer:
            lines = [line async for line in answer.content]
    assert b'"ADDED"' in lines[0]
    assert lines[1:]
    assert all(b'"BOOKMARK"' in line for line in lines[1:])


async def test_a_pod_on_a_node_is_deleted_by_its_node_and_one_without_at_once(core: Any, server: ApiServer) -> None:
    await core.create_namespaced_pod("default", pod("waiting"))
    await core.delete_namespaced_pod("waiting", "default")
    assert (await refused(core.read_namespaced_pod("waiting", "default"))).status == 404
    made = await core.create_namespaced_pod("default", {**pod("bound"), "spec": {**pod("x")["spec"], "nodeName": "n"}})
    wrong = V1DeleteOptions(preconditions={"uid": "another"})
    assert (await refused(core.delete_namespaced_pod("bound", "default", body=wrong))).status == 409
    await core.delete_namespaced_pod("bound", "default", grace_period_seconds=9)
    going = await core.read_namespaced_pod("bound", "default")
    assert (going.metadata.deletion_grace_period_seconds, going.metadata.uid) == (9, made.metadata.uid)
    await core.delete_namespaced_pod("bound", "default", grace_period_seconds=20)
    assert (await core.read_namespaced_pod("bound", "default")).metadata.deletion_grace_period_seconds == 9
    await core.delete_namespaced_pod("bound", "default", grace_period_seconds=0)
    assert (await refused(core.read_namespaced_pod("bound", "default"))).status == 404


async def test_what_belongs_to_a_pod_goes_with_it(core: Any) -> None:
    made = await core.create_namespaced_pod("default", pod("a"))
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": made.metadata.uid}
    secret = {"metadata": {"name": "a", "ownerReferences": [owner]}, "stringData": {"token": "t"}, "immutable": True}
    stored = await core.create_namespaced_secret("default", secret)
    assert stored.data == {"token": "dA=="}
    changed = {"metadata": {"name": "a"}, "data": {"token": "eA=="}}
    assert (await refused(core.replace_namespaced_secret("a", "default", changed))).status == 422
    await core.delete_namespaced_pod("a", "default")

    async def is_gone() -> bool:
        try:
            await core.read_namespaced_secret("a", "default")
        except ApiException as error:
            return bool(error.status == 404)
        return False

    await eventually(is_gone)


async def test_a_quota_bad_pods_and_missing_rights_are_refused_in_the_server_s_words(
    core: Any, server: ApiServer
) -> None:
    server.objects.most_pods = 1
    await core.create_namespaced_pod("default", pod("a"))
    error = await refused(core.create_namespaced_pod("default", pod("b")))
    assert (error.status, "exceeded quota" in error.body) == (403, True)
    server.objects.most_pods = None
    for spec in ({"containers": []}, {"containers": [{"name": "task"}]}):
        assert (await refused(core.create_namespaced_pod("default", {**pod("b"), "spec": spec}))).status == 422
    assert (await refused(core.create_namespaced_pod("default", pod("B b")))).status == 422
    assert (await refused(core.create_namespaced_pod("default", pod("b", team="no label!")))).status == 422
    account = {**pod("b"), "spec": {**pod("b")["spec"], "serviceAccountName": "nobody"}}
    assert (await refused(core.create_namespaced_pod("default", account))).status == 403
    server.forbidden.add(("create", "pods"))
    error = await refused(core.create_namespaced_pod("default", pod("b")))
    assert 'cannot create resource \\"pods\\"' in error.body
    server.token = "changed"
    assert (await refused(core.list_namespaced_pod("default"))).status == 401


async def test_faults_happen_as_often_as_they_are_told_to(core: Any, server: ApiServer) -> None:
    server.faults = [Fault(verb="create", times=1, failure=too_many(7)), Fault(verb="get", failure=internal(), times=1)]
    error = await refused(core.create_namespaced_pod("default", pod("a")))
    assert (error.status, error.headers["Retry-After"]) == (429, "7")
    await core.create_namespaced_pod("default", pod("a"))
    assert (await refused(core.read_namespaced_pod("a", "default"))).status == 500
    server.faults = [Fault(verb="create", times=1, after=True), Fault(verb="create", times=1, after=True, breaks=True)]
    with pytest.raises(TimeoutError):
        await core.create_namespaced_pod("default", pod("b"), _request_timeout=1.0)
    with pytest.raises(aiohttp.ClientError):
        await core.create_namespaced_pod("default", pod("c"))
    names = [each.metadata.name for each in (await core.list_namespaced_pod("default")).items]
    assert names == ["a", "b", "c"]
