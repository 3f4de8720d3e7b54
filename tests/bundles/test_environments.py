"""Environments are built by real uv from small packages: once, complete or not at all, and removed when nobody needs them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from evertick.bundles import environments as module
from evertick.bundles.dependencies import OWN_PYTHON, Declaration, Lock, find_declaration, make_lock
from evertick.bundles.environments import IN_USE_SECONDS, UNUSED_SECONDS, Environments, Interpreter
from evertick.bundles.loader import load_file
from evertick.config import Settings
from evertick.domain.errors import EnvironmentFailed
from evertick.publisher.deployment import load_files
from tests.bundles.package_index import from_folder, make_wheel, serving, uv_environment
from tests.executors.local.executor_rig import dead

DAG = """
import alpha
from evertick import dag, task, shell

@task
def version() -> str:
    return alpha.VERSION

@dag
def {name}():
    version()
    shell("say", "echo {{{{ ds }}}}")
"""


SEEN = """
import alpha, evertick, jinja2, regex
from importlib.util import find_spec
print(alpha.VERSION, evertick.__file__, find_spec("psycopg"), find_spec("pytest"))
"""


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    for version in ("1.0", "2.0"):
        make_wheel(tmp_path / "wheels", "alpha", version)
    return tmp_path / "wheels"


def made(tmp_path: Path, environment: dict[str, str], **settings: Any) -> Environments:
    return Environments(Settings(home=tmp_path / "home", **settings), environment)


def declaration(tmp_path: Path, *packages: str, python: str = "") -> Declaration:
    folder = tmp_path / "dags"
    folder.mkdir(exist_ok=True)
    wanted = f'# requires-python = "{python}"\n' if python else ""
    text = f"# /// script\n{wanted}# dependencies = {json.dumps(packages)}\n# ///\n"
    (folder / "x.py").write_text(text + DAG.format(name="x"))
    found = find_declaration(folder, "x.py")
    assert found is not None
    return found


async def said(interpreter: Interpreter, code: str) -> str:
    """What Python code prints in the environment as DAG files see it."""
    *command, _ = interpreter.command("")
    command[-2] = command[-2].partition("runpy.run_module")[0] + code
    process = await asyncio.create_subprocess_exec(*command, "", stdout=PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode().strip()


def temporary(environments: Environments) -> list[str]:
    return [path.name for path in environments.folder.iterdir() if path.name.startswith((".making-", ".removing-"))]


async def test_an_environment_sees_its_packages_and_of_evertick_only_what_a_task_needs(
    tmp_path: Path, wheels: Path
) -> None:
    environments = made(tmp_path, from_folder(wheels))
    # Its name is in the list for `uv run`; the index does not have it.
    prepared = await environments.prepare(declaration(tmp_path, "alpha<2", "evertick>=0.1"), None)
    assert prepared.lock is not None
    assert "alpha==1.0 \\" in prepared.lock.requirements
    assert "evertick==" not in prepared.lock.requirements
    told = (await said(prepared.interpreter, SEEN)).split()
    assert told == ["1.0", str(Path(prepared.interpreter.shim, "first", "evertick", "__init__.py")), "None", "None"]
    (info,) = environments.all()
    assert (info.packages, info.python.startswith(OWN_PYTHON)) == (("alpha 1.0",), True)
    assert temporary(environments) == []


async def test_two_files_with_different_versions_of_a_package_are_loaded_side_by_side(
    tmp_path: Path, wheels: Path
) -> None:
    folder = tmp_path / "dags"
    folder.mkdir()
    for name, version in (("old", "1.0"), ("new", "2.0")):
        text = f'# /// script\n# dependencies = ["alpha=={version}"]\n# ///\n' + DAG.format(name=name)
        (folder / f"{name}.py").write_text(text)
    settings = Settings(home=tmp_path / "home")
    old, new = await load_files(folder, ["old.py", "new.py"], settings, from_folder(wheels))
    assert (old.error, new.error) == (None, None)
    assert [dag.name for file in (old, new) for dag in file.dags] == ["old", "new"]
    assert old.lock is not None
    assert new.lock is not None
    assert old.lock.key != new.lock.key
    off = Settings(home=tmp_path / "home", environments=False)
    (without,) = await load_files(folder, ["old.py"], off, from_folder(wheels))
    assert without.error is not None
    assert "No module named 'alpha'" in without.error.message
    assert without.lock is None


async def test_many_builds_at_once_build_an_environment_once(tmp_path: Path, wheels: Path) -> None:
    several = [made(tmp_path, from_folder(wheels)) for _ in range(3)]
    lock = await several[0].resolve(declaration(tmp_path, "alpha"))
    builds: list[str] = []
    found = await asyncio.gather(*(each.ensure(lock, say=builds.append) for each in several for _ in range(2)))
    assert len(set(found)) == 1
    assert builds == [lock.key[:12]]


@pytest.mark.parametrize("damage", ["marker", "python"])
async def test_a_folder_that_is_not_a_complete_environment_is_built_again(
    tmp_path: Path, wheels: Path, damage: str
) -> None:
    environments = made(tmp_path, from_folder(wheels))
    lock = await environments.resolve(declaration(tmp_path, "alpha"))
    place = Path((await environments.ensure(lock)).environment)
    if damage == "marker":
        (place / "evertick.json").unlink()
    else:
        (place / "bin" / "python").unlink()
        (place / "bin" / "python").symlink_to(tmp_path / "gone")
    assert await said(await environments.ensure(lock), "import alpha; print(alpha.VERSION)") == "2.0"
    assert temporary(environments) == []


KILLED = """
import asyncio, json, sys
from pathlib import Path
from evertick.bundles.dependencies import read_lock
from evertick.bundles.environments import Environments
from evertick.config import Settings

told = json.loads(sys.argv[1])
environments = Environments(Settings(home=Path(told["home"])), told["environment"])

async def stop(*_):
    print("building", flush=True)
    await asyncio.sleep(3600)

if told["stops"]:
    environments._install = stop
asyncio.run(environments.ensure(read_lock(told["lock"])))
print("built", flush=True)
"""


@contextmanager
def building(
    tmp_path: Path, environment: dict[str, str], lock: Lock, *, stops: bool
) -> Iterator[subprocess.Popen[str]]:
    """A process that builds the environment; with `stops` it stops half-way."""
    told = {"home": str(tmp_path / "home"), "environment": environment, "lock": lock.text, "stops": stops}
    command = [sys.executable, "-c", KILLED, json.dumps(told)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_a_build_whose_process_is_killed_leaves_nothing_that_is_used(tmp_path: Path, wheels: Path) -> None:
    environments = made(tmp_path, from_folder(wheels))
    lock = await environments.resolve(declaration(tmp_path, "alpha"))
    with building(tmp_path, from_folder(wheels), lock, stops=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "building\n"
        (left,) = temporary(environments)
        with building(tmp_path, from_folder(wheels), lock, stops=False) as second:
            assert environments.all() == []
            first.kill()
            assert second.wait(60) == 0
    assert left not in temporary(environments)
    assert await said(await environments.ensure(lock), "import alpha; print(alpha.VERSION)") == "2.0"


async def test_a_package_index_that_is_down_fails_only_what_was_never_installed(tmp_path: Path, wheels: Path) -> None:
    make_wheel(wheels, "beta", "1.0")
    with serving(wheels) as url:
        environments = made(tmp_path, uv_environment(UV_DEFAULT_INDEX=url))
        declared = declaration(tmp_path, "alpha<2")
        lock = await environments.resolve(declared)
        beta = await environments.resolve(declaration(tmp_path, "beta"))
        place = Path((await environments.ensure(lock)).environment)
    assert f"--index-url {url}" in lock.requirements
    # The same declaration and the same environment: neither needs the index.
    assert (await environments.prepare(declared, lock)).lock == lock
    # Another environment of the same packages is built from the cache.
    shutil.rmtree(place)
    assert await said(await environments.ensure(lock), "import alpha; print(alpha.VERSION)") == "1.0"
    with pytest.raises(EnvironmentFailed, match="beta"):
        await environments.ensure(beta)
    assert len(environments.all()) == 1


async def test_a_file_whose_content_has_another_hash_is_not_installed(tmp_path: Path, wheels: Path) -> None:
    environments = made(tmp_path, from_folder(wheels))
    lock = await environments.resolve(declaration(tmp_path, "alpha"))
    make_wheel(wheels, "alpha", "2.0", code="VERSION = 'changed'\n")
    elsewhere = made(tmp_path / "elsewhere", from_folder(wheels))
    with pytest.raises(EnvironmentFailed, match="Hash mismatch for `alpha"):
        await elsewhere.ensure(lock)
    assert elsewhere.all() == []


async def test_a_failure_is_repeated_until_its_pause_is_over_and_then_tried_again(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = made(tmp_path, from_folder(wheels), environment_retry_seconds=30.0)
    declared, now = declaration(tmp_path, "alpha==3"), time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    pauses = []
    for _ in range(4):
        with pytest.raises(EnvironmentFailed, match="there is no version of alpha==3") as failed:
            await environments.resolve(declared)
        pauses.append((failed.value.retry_after_seconds, failed.value.is_lasting))
        now += failed.value.retry_after_seconds
    assert pauses == [(5.0, False), (10.0, False), (20.0, False), (40.0, True)]
    now -= 1
    make_wheel(wheels, "alpha", "3")
    with pytest.raises(EnvironmentFailed) as still:
        await environments.resolve(declared)
    assert still.value.retry_after_seconds == 1.0
    now += 1
    assert "alpha==3" in (await environments.resolve(declared)).requirements


async def test_a_build_that_takes_too_long_is_stopped_with_everything_that_it_started(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "bin" / "uv"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nsleep 3600 & echo $! >> {tmp_path}/pid\nwait\n")
    slow.chmod(0o755)
    monkeypatch.setattr(module, "_find_uv", lambda _: str(slow))
    environments = made(tmp_path, from_folder(wheels), environment_build_seconds=1.0)
    lock = make_lock(declaration(tmp_path, "alpha"), python=OWN_PYTHON, resolved="alpha==1.0\n")
    with pytest.raises(EnvironmentFailed, match=r"longer than 1 s \(EVERTICK_ENVIRONMENT_BUILD_SECONDS\)"):
        await environments.ensure(lock)
    pids = [int(pid) for pid in (tmp_path / "pid").read_text().split()]
    assert len(pids) == 2
    for pid in pids:
        await dead(pid)
    assert temporary(environments) == []


async def test_without_uv_the_error_says_how_to_get_it(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = made(tmp_path, {**from_folder(wheels), "PATH": str(tmp_path)})
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(EnvironmentFailed, match=r"pip install 'evertick\[envs\]'"):
        await environments.resolve(declaration(tmp_path, "alpha"))


async def test_a_file_can_require_another_version_of_python(tmp_path: Path, wheels: Path) -> None:
    major, minor = OWN_PYTHON.split(".")
    others = [f"3.{number}" for number in range(11, 20) if f"3.{number}" != OWN_PYTHON]
    environments = made(tmp_path, from_folder(wheels))
    for other in others:
        try:
            prepared = await environments.prepare(declaration(tmp_path, "alpha", python=f"=={other}.*"), None)
        except EnvironmentFailed:
            continue
        break
    else:
        pytest.skip(f"this machine has no Python from 3.11 on but {major}.{minor}")
    assert await said(prepared.interpreter, "print('%d.%d' % sys.version_info[:2])") == other
    text = (tmp_path / "dags" / "x.py").read_text().replace("@dag", "@dag(params={'n': Param('a', pattern='[a-z]')})")
    (tmp_path / "dags" / "x.py").write_text(text.replace("import dag", "import Param, dag"))
    loaded = await load_file(tmp_path / "dags", "x.py", prepared=prepared)
    assert loaded.error is None
    assert [dag.name for dag in loaded.dags] == ["x"]


async def test_a_version_of_python_that_is_too_old_is_refused(tmp_path: Path, wheels: Path) -> None:
    environments = made(tmp_path, from_folder(wheels))
    with pytest.raises(EnvironmentFailed, match=r"3\.11 or later|[Nn]o interpreter found"):
        await environments.resolve(declaration(tmp_path, "alpha", python="<3.11"))


def held(place: Path) -> subprocess.Popen[bytes]:
    """A process that holds the folder as a fork server does."""
    code = f"from evertick.bundles.cache import hold; hold({str(place)!r}); print(1, flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


async def test_the_least_recently_used_environments_go_first_and_those_in_use_stay(
    tmp_path: Path, wheels: Path
) -> None:
    unlimited = made(tmp_path, from_folder(wheels))
    locks = [
        make_lock(declaration(tmp_path), python=OWN_PYTHON, resolved=f"# {n}\n--no-binary x{n}\n") for n in range(4)
    ]
    places = [Path((await unlimited.ensure(lock)).environment) for lock in locks]
    now = time.time()
    for age, place in enumerate(places):
        os.utime(place, (now, now - IN_USE_SECONDS * (age + 1)))
    holder = held(places[3])
    try:
        assert unlimited.prune() == []
        # The oldest is held, the second oldest is renewed by its runner: the limit takes the next one, then the newest.
        full = made(tmp_path, from_folder(wheels), environments_max_gb=0)
        assert full.prune({places[2].name}) == [places[1].name, places[0].name]
    finally:
        holder.communicate(b"\n")
    assert {info.name for info in unlimited.all()} == {places[2].name, places[3].name}
    os.utime(places[3], (now, now - UNUSED_SECONDS - 1))
    assert unlimited.prune() == [places[3].name]
    assert unlimited.prune(unused_seconds=0) == []


async def test_hard_links_keep_environments_whole_when_the_package_cache_goes(tmp_path: Path, wheels: Path) -> None:
    environments = made(tmp_path, from_folder(wheels), environments_max_gb=0)
    lock = await environments.resolve(declaration(tmp_path, "alpha"))
    interpreter = await environments.ensure(lock)
    before = environments.size()
    assert environments.prune() == []  # it was just used
    assert environments.size() < before
    assert await said(interpreter, "import alpha; print(alpha.VERSION)") == "2.0"


@pytest.mark.parametrize("kind", ["script", "project"])
async def test_a_lock_file_of_uv_next_to_the_declaration_decides(tmp_path: Path, wheels: Path, kind: str) -> None:
    folder = tmp_path / "dags"
    declaration(tmp_path, "alpha", "evertick")
    evertick = make_wheel(wheels, "evertick", "1.0")
    if kind == "project":
        (folder / "x.py").write_text(DAG.format(name="x"))
        listed = (
            '[project]\nname = "x"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["alpha", "evertick"]\n'
        )
        (folder / "pyproject.toml").write_text(listed)
    with serving(wheels) as url:
        environment = uv_environment(UV_DEFAULT_INDEX=url)
        command = [Path(sys.executable).with_name("uv"), "lock", *(["--script", "x.py"] if kind == "script" else [])]
        cache = {"UV_CACHE_DIR": str(tmp_path / "cache")}
        await asyncio.to_thread(subprocess.run, command, cwd=folder, env={**environment, **cache}, check=True)
        make_wheel(wheels, "alpha", "3.0")
        evertick.unlink()
        found = find_declaration(folder, "x.py")
        assert found is not None
        assert found.lock is not None
        interpreter, lock = await made(tmp_path, environment).prepare(found, None)
    assert lock is not None
    assert "alpha==2.0" in lock.requirements
    assert "evertick" not in lock.requirements
    assert await said(interpreter, "import alpha; print(alpha.VERSION)") == "2.0"


async def test_a_project_file_and_a_list_of_requirements_are_resolved(tmp_path: Path, wheels: Path) -> None:
    folder = tmp_path / "dags"
    declaration(tmp_path)
    (folder / "x.py").write_text(DAG.format(name="x"))
    environments, found = made(tmp_path, from_folder(wheels)), []
    (folder / "limits.txt").write_text("alpha<2\n")
    (folder / "requirements.txt").write_text("-c limits.txt\nalpha\nevertick\n")
    project = '[project]\nname = "x"\nversion = "1"\ndependencies = ["alpha>1"]\n'
    for add in (lambda: None, lambda: (folder / "pyproject.toml").write_text(project)):
        add()
        declared = find_declaration(folder, "x.py")
        assert declared is not None
        found += re.findall(r"alpha==\S+", (await environments.resolve(declared)).requirements)
    assert found == ["alpha==1.0", "alpha==2.0"]
