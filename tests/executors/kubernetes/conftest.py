"""A cluster of one node, and an executor that uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import pytest

from evertick.config import Settings
from evertick.domain.agent_protocol import attempt_name
from evertick.domain.attempt import TaskKey
from evertick.executors.base import RemoteExecutor, RemoteOrder
from evertick.executors.registry import kubernetes_executor
from tests.executors.kubernetes.kubelet import Kubelet, kubelet
from tests.executors.kubernetes.server import ApiServer, api_server


class MakeExecutor(Protocol):
    def __call__(self, **settings: Any) -> AbstractAsyncContextManager[RemoteExecutor]: ...


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as started:
        yield started


@pytest.fixture
async def node(server: ApiServer, tmp_path: Path) -> AsyncIterator[Kubelet]:
    async with kubelet(server.objects, tmp_path / "node") as started:
        yield started


@pytest.fixture
def make_executor(server: ApiServer, tmp_path: Path) -> MakeExecutor:
    def make(**settings: Any) -> AbstractAsyncContextManager[RemoteExecutor]:
        chosen = {
            "kubeconfig": server.write_kubeconfig(tmp_path / "kubeconfig"),
            "pod_image": "evertick:test",
            **settings,
        }
        return kubernetes_executor(Settings(**chosen))

    return make


@pytest.fixture
async def executor(make_executor: MakeExecutor) -> AsyncIterator[RemoteExecutor]:
    async with make_executor() as made:
        yield made


def order(run_id: int = 7, *, epoch: int = 1, session: int = 0xABC, **place: Any) -> RemoteOrder:
    key = TaskKey(run_id, 0, -1)
    return RemoteOrder(
        name=attempt_name(key, epoch, session),
        key=key,
        epoch=epoch,
        session=session,
        dag="nightly",
        task="extract.orders",
        queue="pods",
        bundle="b" * 64,
        token="eva_the-start-token",
        api_url="http://127.0.0.1:1",
        place={"kubernetes": place},
    )
