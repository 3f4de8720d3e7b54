"""Object storage against a real server: what is put comes back, what is wrong is said, what is gone is gone."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.queries import runs
from evertick.doctor.machine import check_storage_settings
from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey
from evertick.domain.errors import InvalidSettings, ResultLost, StorageUnavailable
from evertick.runner.events import ResultStored
from evertick.runner.exchange import Uploads
from evertick.runner.housekeeping import remove_orphaned_objects
from evertick.storage import object_store
from evertick.storage.object_store import ObjectStore, open_store
from evertick.storage.results import ResultTransfers, result_files_in
from tests.engine.world import make_dag, put, start
from tests.s3_faults import Fault, faulty_way
from tests.s3_server import S3Server, s3_server
from tests.system.hosting import Said
from tests.waiting import eventually


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def store(server: S3Server) -> ObjectStore:
    made = open_store(Settings(**server.settings))
    assert made is not None
    return made


def keep(store: ObjectStore, folder: Path, name: str, content: bytes) -> str:
    file, digest = folder / "file", hashlib.sha256(content).hexdigest()
    file.write_bytes(content)
    store.put(name, file, content_hash=digest)
    return digest


def test_what_is_put_comes_back_as_it_was(store: ObjectStore, tmp_path: Path) -> None:
    content = b"large \0 result" * 300_000
    digest = keep(store, tmp_path, "results/7/x", content)
    keep(store, tmp_path, "results/7/x", content)
    assert store.has("results/7/x") and not store.has("results/7/y")
    store.get("results/7/x", tmp_path / "new" / "copy", content_hash=digest)
    assert (tmp_path / "new" / "copy").read_bytes() == content
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["copy"]


def test_what_was_changed_or_is_missing_is_lost_and_leaves_nothing(
    store: ObjectStore, server: S3Server, tmp_path: Path
) -> None:
    digest = keep(store, tmp_path, "results/8/y", b"as it was")
    (stored,) = [path for path in server.files() if path.parent.name == "8"]
    stored.write_bytes(b"as it is!")
    with pytest.raises(ResultLost, match="was changed"):
        store.get("results/8/y", tmp_path / "copy", content_hash=digest)
    with pytest.raises(ResultLost, match="there is no"):
        store.get("results/8/none", tmp_path / "copy", content_hash=digest)
    assert not (tmp_path / "copy").exists() and not list(tmp_path.glob(".*"))


def test_folders_are_listed_and_removed_with_all_that_is_in_them(store: ObjectStore, tmp_path: Path) -> None:
    for name in ("old/1/a", "old/1/b c", "old/2/a", "other/3/a"):
        keep(store, tmp_path, name, name.encode())
    assert sorted(store.folders("old/")) == ["1", "2"]
    store.remove_all("old/1/")
    store.remove_all("old/1/")
    assert list(store.folders("old/")) == ["2"]
    assert list(store.folders("other/")) == ["3"]


def test_who_has_the_wrong_key_or_asks_nobody_is_told(store: ObjectStore, tmp_path: Path) -> None:
    wrong = replace(store, signer=replace(store.signer, secret_key="guessed-wrongly"))
    with pytest.raises(StorageUnavailable, match="s3://attic/below/here refused: 403") as told:
        keep(wrong, tmp_path, "results/9/z", b"x")
    assert "guessed" not in str(told.value)
    nobody = replace(store, endpoint="http://127.0.0.1:9")
    with pytest.raises(StorageUnavailable, match="cannot be reached"):
        keep(nobody, tmp_path, "results/9/z", b"x")
    with pytest.raises(StorageUnavailable, match="NoSuchBucket"):
        list(replace(store, bucket="nowhere").folders("x/"))


@contextmanager
def broken_server() -> Iterator[str]:
    """Takes everything, and breaks off in the middle of its answer."""

    def serve(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                line, _ = listening.accept()
                with line:
                    line.recv(65536)
                    line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=[listening])
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_an_answer_that_breaks_off_and_an_address_that_is_none_are_told_alike(
    store: ObjectStore, tmp_path: Path
) -> None:
    with broken_server() as endpoint:
        for ask in (
            lambda broken: keep(broken, tmp_path, "results/9/z", b"x"),
            lambda broken: broken.get("results/9/z", tmp_path / "copy", content_hash="0" * 64),
            lambda broken: list(broken.folders("x/")),
        ):
            with pytest.raises(StorageUnavailable, match="broke off"):
                ask(replace(store, endpoint=endpoint))
    for endpoint in ("http://storage..example", f"http://{'x' * 64}.example"):
        with pytest.raises(StorageUnavailable, match="cannot be reached"):
            keep(replace(store, endpoint=endpoint), tmp_path, "results/9/z", b"x")


@pytest.mark.requirement("V10")
async def test_an_attempt_whose_result_cannot_be_stored_is_told_of(server: S3Server, tmp_path: Path) -> None:
    file = {"$evertick": "file", "sha256": "a" * 64, "bytes": 1}
    outcome = Outcome(key=TaskKey(7, 0, -1), epoch=1, kind=OutcomeKind.SUCCESS, result_json=json.dumps(file))
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / ("a" * 64)).write_bytes(b"x")
    stored: list[ResultStored] = []
    with broken_server() as endpoint:
        given = {**server.settings, "storage_endpoint": endpoint, "storage_retry_seconds": 0.1}
        settings = Settings(results_folder=tmp_path, **given)
        async with asyncio.TaskGroup() as group:
            uploads = Uploads(ResultTransfers(settings, log=Said().log), put=stored.append, group=group)
            assert uploads.upload_first([outcome]) == []
            await eventually(lambda: stored, pause_seconds=0.0)
            # At the moment at which it ends: it must not be reported once more.
            await uploads.stop()
    assert [each.outcome.kind for each in stored] == [OutcomeKind.FAILED]
    assert str(stored[0].outcome.reason).startswith(
        "the result could not be stored within 0.1 s: s3://attic/below/here broke off"
    )


async def test_an_upload_that_the_runner_does_not_wait_for_returns_its_attempt_once(
    server: S3Server, tmp_path: Path
) -> None:
    file = {"$evertick": "file", "sha256": "a" * 64, "bytes": 1}
    large = Outcome(key=TaskKey(7, 0, -1), epoch=1, kind=OutcomeKind.SUCCESS, result_json=json.dumps(file))
    small = Outcome(key=TaskKey(7, 1, -1), epoch=1, kind=OutcomeKind.SUCCESS, result_json="1")
    stored: list[ResultStored] = []
    settings = Settings(results_folder=tmp_path, **server.settings)
    async with asyncio.TaskGroup() as group:
        uploads = Uploads(ResultTransfers(settings, log=Said().log), put=stored.append, group=group)
        assert uploads.upload_first([large, small]) == [small]
        # It has not even begun.
        await uploads.stop()
        await uploads.stop()
    assert [(each.outcome.key, each.outcome.kind) for each in stored] == [(large.key, OutcomeKind.GIVEN_BACK)]
    assert stored[0].outcome.result_json is None


def test_the_doctor_looks_whether_it_answers(server: S3Server) -> None:
    assert list(check_storage_settings(Settings())) == list(check_storage_settings(Settings(**server.settings))) == []
    for wrong, told in (
        ({"storage_secret_key": "guessed-wrongly"}, "403"),
        ({"storage": "s3://nowhere"}, "NoSuchBucket"),
    ):
        (found,) = check_storage_settings(Settings(**{**server.settings, **wrong}))
        assert found.code == "storage" and told in found.what and "guessed" not in found.what


def test_parts_come_alone_and_are_lost_where_there_is_nothing(store: ObjectStore) -> None:
    store.put_bytes("logs/1/x", b"0123456789")
    assert store.get_part("logs/1/x", at=3, size=4) == b"3456"
    assert store.get_part("logs/1/x", at=8, size=99) == b"89", "it ends there"
    for name, at in (("logs/1/x", 10), ("logs/1/y", 0)):
        with pytest.raises(ResultLost):
            store.get_part(name, at=at, size=1)
    store.remove("logs/1/x")
    store.remove("logs/1/x")
    assert not store.has("logs/1/x")


def test_a_transfer_that_breaks_off_is_no_result_that_was_changed(
    store: ObjectStore, server: S3Server, tmp_path: Path
) -> None:
    digest = keep(store, tmp_path, "results/5/x", b"0123456789" * 1000)
    with faulty_way(server.settings["storage_endpoint"]) as way:
        away = replace(store, endpoint=way.endpoint)
        way.fault = Fault.CUT
        with pytest.raises(StorageUnavailable, match="broke off: 5000 bytes are missing"):
            away.get("results/5/x", tmp_path / "copy", content_hash=digest)
        with pytest.raises(StorageUnavailable, match="broke off: 2000 bytes are missing"):
            away.get_part("results/5/x", at=0, size=4000)
        way.fault = Fault.WRONG
        with pytest.raises(ResultLost, match="was changed"):
            away.get("results/5/x", tmp_path / "copy", content_hash=digest)
        way.fault = None
        away.get("results/5/x", tmp_path / "copy", content_hash=digest)


def test_a_part_that_trickles_in_is_given_up(
    store: ObjectStore, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_bytes("logs/2/x", b"0123456789")
    monkeypatch.setattr(object_store, "PART_SECONDS", -1.0)
    with pytest.raises(StorageUnavailable, match="too slow"):
        store.get_part("logs/2/x", at=0, size=5)


async def test_only_results_of_runs_that_are_gone_are_removed(
    store: ObjectStore, conn: AsyncConnection, tmp_path: Path
) -> None:
    await put(conn, make_dag("d", {"a": []}))
    run_id = await start(conn, "d")
    apart = replace(store, prefix="retention")
    for each in (run_id, run_id + 1000):
        keep(apart, tmp_path, f"results/{each}/x", b"x")
    keep(apart, tmp_path, "results/notes/x", b"x")

    async def existing(run_ids: list[int]) -> set[int]:
        return await runs.existing(conn, run_ids)

    assert await remove_orphaned_objects(apart, existing) == 1
    assert await remove_orphaned_objects(apart, existing) == 0
    assert sorted(apart.folders("results/")) == sorted([str(run_id), "notes"])


def test_files_are_found_wherever_a_value_names_them() -> None:
    one, two = (f'{{"$evertick": "file", "sha256": "{letter * 64}", "bytes": 5}}' for letter in "ab")
    found = result_files_in(f'{{"x": [1, {one}], "y": {{"z": {two}}}, "again": {one}}}')
    assert sorted(found) == ["a" * 64, "b" * 64]
    assert (
        list(result_files_in('{"a": "file"}')) == list(result_files_in('{"$evertick": "date", "value": "file"}')) == []
    )
    assert list(result_files_in('{"$evertick": "file", "sha256": "../../etc/passwd"}')) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"storage": "http://bucket"}, "EVERTICK_STORAGE='http://bucket' is not a storage URL"),
        ({"storage": "s3://B"}, "is not a storage URL"),
        ({"storage": "s3://bucket/../other"}, "is not a storage URL"),
        ({"storage_key_id": None}, "EVERTICK_STORAGE needs EVERTICK_STORAGE_KEY_ID"),
        ({"storage_secret_key": None}, "EVERTICK_STORAGE_SECRET_KEY"),
        ({"storage_endpoint": "minio:9000"}, "EVERTICK_STORAGE_ENDPOINT='minio:9000' is not a URL"),
        ({"storage_endpoint": "http://minio:65536"}, "EVERTICK_STORAGE_ENDPOINT='http://minio:65536' is not a URL"),
    ],
)
def test_settings_of_a_storage_that_cannot_be_are_refused(changes: dict[str, str | None], told: str) -> None:
    given = {"storage": "s3://attic", "storage_key_id": "k", "storage_secret_key": "s", **changes}
    with pytest.raises(InvalidSettings, match=told):
        Settings(**given)  # type: ignore[arg-type]


def test_logs_cannot_be_moved_to_no_storage() -> None:
    with pytest.raises(InvalidSettings, match="EVERTICK_LOG_ARCHIVE=on needs an object storage"):
        Settings(log_archive=True)
