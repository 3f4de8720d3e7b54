"""Spool files that serve one child after the other."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from evertick.domain.attempt import Isolation, TaskKey
from evertick.logs import format
from evertick.logs.shipper import orphaned_logs
from evertick.logs.spool import OpenSpool, SpoolFolder, SpoolIndex
from tests.executors.local.executor_rig import Rig, dag_of, log_text, rig
from tests.waiting import eventually


@pytest.fixture
def shelf(tmp_path: Path) -> SpoolIndex:
    return SpoolIndex(str(tmp_path / "p-"))


def written(spool: OpenSpool, content: bytes) -> None:
    os.write(spool.fd, content)
    os.close(spool.fd)


def test_a_file_that_was_put_back_is_appended_to_by_the_next(shelf: SpoolIndex) -> None:
    first, other = shelf.open(), shelf.open()
    written(first, b"one\n")
    assert not shelf.put_back(first.path)
    second = shelf.open()
    assert (second.path, second.start) == (first.path, 4)
    assert other.path != first.path
    written(second, b"two\n")
    assert Path(first.path).read_bytes() == b"one\ntwo\n"


def test_a_file_has_served_its_time_after_some_uses_or_when_it_is_long(shelf: SpoolIndex) -> None:
    uses = 1
    while not shelf.put_back((spool := shelf.open()).path):
        written(spool, b"x")
        uses += 1
    assert 10 < uses < 100
    long = shelf.open()
    written(long, b"x" * 100_000)
    assert shelf.put_back(long.path)
    assert len({spool.path, long.path, shelf.open().path}) == 3


def test_a_file_that_is_gone_is_not_used_again(shelf: SpoolIndex, tmp_path: Path) -> None:
    spool = shelf.open()
    assert not shelf.put_back(spool.path)
    Path(spool.path).unlink()
    assert shelf.open().path not in ("", spool.path)
    shutil.rmtree(tmp_path)
    nowhere = shelf.open()
    assert nowhere.path == "" and os.write(nowhere.fd, b"x") == 1


def test_a_file_goes_when_all_its_users_are_stored_and_no_other_will_come(tmp_path: Path) -> None:
    folder = SpoolFolder(tmp_path)
    users = [folder.file("a.log", os.open(os.devnull, os.O_RDONLY)) for _ in range(2)]
    for user in users:
        user.acquire()
    users[0].stop_keeping()
    folder.finish("a.log")
    assert folder.take_stored() == []
    users[1].stop_keeping()
    assert folder.take_stored() == ["a.log"]
    unused = folder.file("b.log", os.open(os.devnull, os.O_RDONLY))
    unused.acquire()
    unused.stop_keeping()
    assert folder.take_stored() == []
    folder.finish("b.log")
    assert folder.take_stored() == ["b.log"]


TALKING = dag_of("def talks(context):\n    print('run', context.run_id)\n    return context.run_id")


def files(it: Rig) -> list[Path]:
    return list(it.spool_dir.rglob("*.log"))


@pytest.mark.parametrize("isolation", list(Isolation))
async def test_each_attempt_has_its_own_lines_in_a_file_of_many(tmp_path: Path, isolation: Isolation) -> None:
    async with rig(tmp_path, TALKING) as it:
        made = set()
        for _ in range(30):
            orders = [it.order("talks", isolation=isolation) for _ in range(4)]
            it.start(*orders)
            for order in orders:
                assert log_text(await it.outcome(order)) == [f"OUT run {order.key.run_id}"]
            made |= {path.name for path in files(it)}
        assert len(made) < 40, "120 attempts"
    assert files(it) == [], "all of them are stored"


async def test_a_file_of_many_attempts_keeps_what_a_dead_runner_did_not_ship(tmp_path: Path) -> None:
    source = dag_of("def talks(context): print('run', context.run_id)", "def hangs():\n    signal.pause()")
    async with rig(tmp_path, source) as it:
        for _ in range(20):
            await it.run("talks")
        hanging = it.order("hangs")
        it.start(hanging)
        # Not by asking for leftovers: that removes empty files, and one may be about to be written to.
        header = format.header(*hanging.key, hanging.epoch, hanging.session)
        await eventually(lambda: any(header in path.read_bytes() for path in files(it)))
        found = {each.key: each for each in orphaned_logs(it.spool_dir, set())}
        assert len(found) > 5
        for key, left in found.items():
            told = b"".join(chunk.content for chunk in left.chunks())
            assert told.endswith(f"OUT run {key.run_id}\n".encode()) != (key == hanging.key)


async def test_the_end_of_a_silent_death_is_not_the_end_of_its_file(tmp_path: Path) -> None:
    """An attempt that dies without a word owns the file up to its end, and the next one goes on from there."""
    source = dag_of("def dies():\n    print('dying')\n    os._exit(3)", "def talks(): print('fine')")
    async with rig(tmp_path, source) as it:
        rounds = 0
        # How many files there are depends on how many children were forked ahead, and how soon the dead are known to be gone.
        while not any(b"OUT" in path.read_bytes().partition(b"dying")[2] for path in files(it)):
            assert (rounds := rounds + 1) < 50, "no file was used again"
            assert log_text(await it.run("dies")) == ["OUT dying"]
            assert log_text(await it.run("talks")) == ["OUT fine"]
        assert TaskKey(1, 0, -1) in {each.key for each in orphaned_logs(it.spool_dir, set())}
