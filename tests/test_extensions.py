"""Extensions of a distribution that is really installed: each kind is found by name, and what is absent or broken is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick import dag, notify, task
from evertick.attempts.body import decode_inputs, encode_result
from evertick.config import Settings
from evertick.domain.errors import DeliveryFailed, InvalidDag, InvalidSettings, NotFound, ResultLost
from evertick.domain.stored_values import ValueKind
from evertick.executors.registry import open_executor
from evertick.extensions import ExtensionKind, extension_names, find_extension
from evertick.notifications.delivery import Sending
from evertick.secrets.backends import SecretProvider
from evertick.secrets.keyring import make_key
from tests.notifications.test_sending import keep

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "acme-evertick"
version = "1.2"
[project.entry-points."evertick.executors"]
acme = "acme_evertick:Executor"
acme_broken = "acme_evertick:Missing"
[project.entry-points."evertick.secrets_backends"]
acme = "acme_evertick:Vault"
acme_idle = "acme_evertick:Shape"
[project.entry-points."evertick.notifiers"]
acme = "acme_evertick:page"
[project.entry-points."evertick.serializers"]
"acme_evertick.Shape" = "acme_evertick:ShapeSerializer"
"acme_evertick.Unclear" = "acme_evertick:NoSerializer"
"""
MODULE = """
class Executor:
    def __init__(self, settings):
        self.slots = settings.runner_slots

class Vault:
    def get(self, kind, name):
        return f"{kind} {name}" if name == "known" else None

sent = []

def page(event, *, target, secret, delivery):
    if target == "down":
        raise ConnectionError(f"refused {secret}")
    sent.append((event, target, secret, delivery))
    return f"paged {target} with {secret}"

class Shape:
    def __init__(self, corners):
        self.corners = corners

class Square(Shape):
    pass

class Unclear:
    pass

class ShapeSerializer:
    @staticmethod
    def encode(value):
        return {"corners": value.corners, "seen": b"yes"}

    @staticmethod
    def decode(stored):
        assert stored["seen"] == b"yes"
        return Shape(stored["corners"])

class NoSerializer:
    @staticmethod
    def encode(value):
        raise ValueError("not today")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "acme_evertick.py").write_text(MODULE)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", target, source], check=True)
    return target


@pytest.fixture(autouse=True)
def on_the_path(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed)


@pytest.fixture
async def sending(tmp_path: Path, conn: AsyncConnection) -> Sending:
    async def connect() -> AsyncConnection:
        return conn

    settings = Settings(home=tmp_path)
    make_key(settings)
    await keep(conn, settings, ValueKind.SECRET, "pager_key", "k-123456")
    return Sending(settings, connect=connect)


def test_an_executor_is_chosen_by_its_name() -> None:
    assert open_executor(Settings(executor="acme", runner_slots=7)).slots == 7  # type: ignore[attr-defined]
    with pytest.raises(InvalidSettings, match=r"acme_broken.*from acme-evertick, cannot be imported: AttributeError"):
        open_executor(Settings(executor="acme_broken"))
    with pytest.raises(
        InvalidSettings, match=r"=akme is unknown\. Use one of local, process, kubernetes, docker, slurm, ray, acme"
    ):
        open_executor(Settings(executor="akme"))


async def test_a_secrets_backend_is_chosen_by_its_name(conn: AsyncConnection) -> None:
    async def connect() -> AsyncConnection:
        return conn

    wanted, provider = ("secret", "known"), SecretProvider(Settings(secrets_backends=("acme",)))
    found = await provider.values(provider.stored(connect), [wanted])
    assert found == {wanted: "secret known"}
    with pytest.raises(NotFound):
        await provider.values(provider.stored(connect), [("secret", "other")])
    with pytest.raises(InvalidSettings, match=r"'akme'.*installed: acme, acme_idle"):
        SecretProvider(Settings(secrets_backends=("akme",)))
    with pytest.raises(InvalidSettings, match=r"'acme_idle'"):
        SecretProvider(Settings(secrets_backends=("acme_idle",)))


async def test_a_notifier_gets_the_event_and_the_secret_and_its_failures_are_told_without_it(sending: Sending) -> None:
    rule = notify.plugin("acme", "team-a", secret="pager_key")
    assert rule.sink.text == "plugin:acme:team-a;secret=pager_key"
    assert (
        await sending.send(rule.sink.text, {"event": "failure", "dag": "x"}, delivery="d1") == "paged team-a with ***"
    )
    acme_evertick = sys.modules["acme_evertick"]
    assert acme_evertick.sent == [
        ({"text": "x failed", "event": "failure", "dag": "x", "delivery": "d1"}, "team-a", "k-123456", "d1")
    ]
    with pytest.raises(DeliveryFailed, match=r"notifier 'acme': ConnectionError: refused \*\*\*") as failed:
        await sending.send("plugin:acme:down;secret=pager_key", {}, delivery="d2")
    assert not failed.value.is_final
    with pytest.raises(DeliveryFailed, match=r"no package with a notifier 'akme' is installed.*installed: acme"):
        await sending.send("plugin:akme:x", {}, delivery="d3")
    with pytest.raises(InvalidDag, match=r"is not the name of a notifier"):
        notify.plugin("")


@task
def draw() -> list[object]:
    import acme_evertick  # type: ignore[import-not-found]

    return [acme_evertick.Square(4), {"own": {"$evertick": "serializer", "class": "acme_evertick.Shape"}}]


@task
def count(found: list[object]) -> int:
    return int(found[0].corners)  # type: ignore[attr-defined]


@dag
def shapes() -> None:
    count(draw())


def test_a_serializer_stores_values_of_its_class_and_subclasses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shapes.test(raise_errors=True).results["count"] == 4
    text = encode_result(draw.function()).text
    assert text is not None
    shape, own = decode_inputs(json.loads(text), lambda *_: "")
    assert (type(shape).__name__, shape.corners) == ("Shape", 4)
    assert own == {"own": {"$evertick": "serializer", "class": "acme_evertick.Shape"}}
    with pytest.raises(ResultLost, match=r"acme_evertick\.Shape cannot be read: KeyError"):
        decode_inputs({"$evertick": "serializer", "class": "acme_evertick.Shape", "value": {}}, lambda *_: "")
    monkeypatch.undo()
    with pytest.raises(ResultLost, match=r"acme_evertick\.Shape, whose serializer is not installed here"):
        decode_inputs(json.loads(text), lambda *_: "")


def test_a_value_without_a_working_serializer_is_refused() -> None:
    import acme_evertick

    assert "result[0] is refused by its serializer: ValueError: not today" in str(
        encode_result([acme_evertick.Unclear()]).refusal
    )
    assert "of type object" in str(encode_result(object()).refusal)


def test_two_distributions_with_the_same_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other_evertick-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other-evertick\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[evertick.executors]\nacme = other:Executor\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidSettings, match=r"several distributions: acme-evertick, other-evertick"):
        find_extension(ExtensionKind.EXECUTOR, "acme")
    assert extension_names(ExtensionKind.EXECUTOR) == ["acme", "acme_broken"]
