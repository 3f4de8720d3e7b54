"""What is an Engine API's own: containers that are half made, that belong to others, or that would start twice."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from evertick.config import Settings
from evertick.domain.errors import InvalidSettings, SubmissionRefused
from evertick.executors.base import Phase
from evertick.executors.docker.container import files_of, user_in
from evertick.executors.docker.executor import DockerExecutor
from tests.engines.docker_engine import ContainerEngine
from tests.engines.image import IMAGE
from tests.engines.place import go, lines, order
from tests.engines.test_contract import canceled, executor_of, seen_as
from tests.waiting import eventually

pytestmark = pytest.mark.xdist_group("docker")
_SECONDS = 60.0


def create(engine: ContainerEngine, name: str, **labels: str) -> None:
    body: dict[str, Any] = {"Image": IMAGE, "Cmd": ["sleep", "60"], "Labels": labels}
    body["HostConfig"] = {"NetworkMode": "host"}
    assert b'"Id"' in engine.client_says("POST", f"/containers/create?name={name}", json.dumps(body).encode())


@pytest.mark.requirement("A11")
async def test_two_runners_and_one_that_died_half_way_start_it_once(docker: ContainerEngine) -> None:
    one, half = order("hold", 1, "docker", user="worker"), order("at", 2, "docker")
    (docker.folder / "started").unlink(missing_ok=True)
    async with executor_of(docker) as executor, executor_of(docker) as other:
        await asyncio.gather(executor.submit(one), other.submit(one), executor.submit(one))
        await eventually(lambda: lines(docker, "started"), _SECONDS)
        go(docker, one.name)
        ended = await seen_as(executor, one.name, Phase.ENDED)
        # A user of the image by name reads the token and writes the outcome.
        assert ended.outcome.startswith(b"hold by 1234 ")
        await canceled(executor, one.name, 1.0)
        # A runner that died between creating and starting: the next try goes on from there.
        session = f"{half.session:016x}"
        create(docker, half.name, **{"io.evertick.owner": "evertick", "io.evertick.session": session})
        waiting = await executor.find(half.name)
        assert waiting is not None and waiting.phase is Phase.WAITING
        await executor.submit(half)
        assert (await executor.find(half.name)).phase is not Phase.WAITING  # type: ignore[union-attr]
        await canceled(executor, half.name, 1.0)
    assert lines(docker, "started") == [one.name]


async def test_a_container_of_somebody_else_is_not_taken_for_ours(docker: ContainerEngine) -> None:
    one = order("hold", 3, "docker")
    create(docker, one.name)
    async with executor_of(docker) as executor:
        with pytest.raises(SubmissionRefused, match="is not the one of task"):
            await executor.submit(one)
        assert await executor.find(one.name) is None and await executor.observe() == {}
        await executor.cancel(one.name, 1.0)
        assert one.name in await docker.names()
    docker.client_says("DELETE", f"/containers/{one.name}?force=1")


def test_the_users_of_an_image_have_numbers() -> None:
    accounts = b"root:x:0:0::/:/bin/sh\netl:x:100:200::/:/bin/sh\n\nbroken"
    found = {user: user_in(accounts, user) for user in ("", "root", "etl", "etl:7", "1000", "1000:5", "absent")}
    assert found == {
        "": (0, 0),
        "root": (0, 0),
        "etl": (100, 200),
        "etl:7": (100, 7),
        "1000": (1000, 1000),
        "1000:5": (1000, 5),
        "absent": None,
    }
    one = order("hold", 1, "docker")
    assert one.token.encode() in files_of(one, user=0, group=0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (Settings(docker_host="tcp://engine.example:2375"), "has no TLS"),
        (Settings(docker_host="engine"), "is not an address"),
    ],
)
def test_an_engine_that_everybody_could_use_is_refused(settings: Settings, says: str) -> None:
    with pytest.raises(InvalidSettings, match=says):
        DockerExecutor(settings)
