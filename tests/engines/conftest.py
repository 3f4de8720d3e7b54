"""Engines that run: started once for a session, if they are installed. `make test-engines` demands them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import docker_engine, ray_cluster, slurm_cluster
from tests.engines.place import Place
from tests.engines.ray_cluster import RayCluster
from tests.engines.slurm_cluster import SlurmCluster

IS_DEMANDED = bool(os.environ.get("EVERTICK_TEST_ENGINES"))
# Each with real agents, or with waiting: minutes for all.
heavy = pytest.mark.skipif(not IS_DEMANDED, reason="make test-engines")


def needed(reason: str | None) -> None:
    if reason is not None:
        if IS_DEMANDED:
            pytest.fail(reason)
        pytest.skip(f"{reason}: make test-engines installs it")


@pytest.fixture(scope="session")
def root() -> Iterator[Path]:
    """Short: the path of a unix socket has at most 107 characters."""
    path = Path(tempfile.mkdtemp(prefix="ev-", dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def _container(program: str, root: Path) -> Iterator[docker_engine.ContainerEngine]:
    needed(docker_engine.is_installed(program))
    (root / program).mkdir()
    with docker_engine.container_engine(program, root / program) as made:
        yield made


@pytest.fixture(scope="session")
def docker(root: Path) -> Iterator[docker_engine.ContainerEngine]:
    yield from _container("docker", root)


@pytest.fixture(scope="session")
def podman(root: Path) -> Iterator[docker_engine.ContainerEngine]:
    yield from _container("podman", root)


@pytest.fixture(scope="session")
def slurm(root: Path) -> Iterator[SlurmCluster]:
    needed(slurm_cluster.what_is_missing())
    with slurm_cluster.slurm_cluster(root / "slurm") as made:
        yield made


@pytest.fixture(scope="session")
def ray(root: Path) -> Iterator[RayCluster]:
    needed(ray_cluster.what_is_missing())
    with ray_cluster.ray_cluster(root / "ray") as made:
        yield made


PLACES = [
    pytest.param("docker", marks=pytest.mark.xdist_group("docker")),
    pytest.param("podman", marks=[heavy, pytest.mark.xdist_group("podman")]),
    pytest.param("slurm", marks=[heavy, pytest.mark.xdist_group("slurm")]),
    pytest.param("ray", marks=[heavy, pytest.mark.xdist_group("ray")]),
]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    for left in ("started", "stopped"):
        (found.folder / left).unlink(missing_ok=True)
    return found
