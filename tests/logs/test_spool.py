"""Attempts' logs on disk: reading, the cap, and what a dead runner leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from evertick.domain.attempt import TaskKey
from evertick.logs import format
from evertick.logs.capture import SpoolWriter
from evertick.logs.shipper import discard, orphaned_logs
from evertick.logs.spool import AttemptLog, LogCap, open_spool, session_folder

NOW = 1_700_000_000_000_000
SMALL = LogCap(head_bytes=100_000, tail_bytes=50_000)


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[int]:
    fd = open_spool(str(tmp_path / "x.log"))
    yield fd
    os.close(fd)


def everything(log: AttemptLog) -> bytes:
    parts = []
    while part := log.next_lines():
        parts.append(part)
    return b"".join(parts)


def numbered(first: int, last: int) -> bytes:
    return b"".join(format.framed(NOW, "OUT", f"line {number:06d}") for number in range(first, last))


def test_only_whole_lines_are_read_while_the_attempt_runs(spool: int) -> None:
    log = AttemptLog(spool, 0, LogCap())
    os.write(spool, format.framed(NOW, "OUT", "whole") + b"half a li")
    assert log.next_lines().decode() == f"{NOW} OUT whole\n"
    assert log.next_lines() == b""
    os.write(spool, b"ne\nand the last")
    assert log.next_lines().decode().endswith("RAW half a line\n")
    log.close(os.fstat(spool).st_size)
    assert log.next_lines().decode().endswith("RAW and the last\n")
    assert log.pending_bytes == 0


def test_the_middle_of_a_long_log_is_dropped_with_a_mark_and_its_disk_is_freed(spool: int) -> None:
    log = AttemptLog(spool, 0, SMALL)
    head = b""
    for batch in range(20):
        os.write(spool, numbered(batch * 1000, batch * 1000 + 1000))
        head += everything(log)
        log.trim()
    assert 90_000 < len(head) <= SMALL.head_bytes
    size = os.fstat(spool).st_size
    assert os.fstat(spool).st_blocks * 512 < SMALL.head_bytes + SMALL.tail_bytes + 3 * 4096 < size
    log.close(size)
    tail = everything(log).decode().splitlines()
    assert "bytes dropped (log cap) …" in tail[0] and " MARK … " in tail[0]
    assert tail[-1].endswith("line 019999")
    numbers = [int(line.rsplit(" ", 1)[1]) for line in tail[1:]]
    assert numbers == list(range(numbers[0], 20_000))
    assert sum(map(len, tail)) <= SMALL.tail_bytes


def test_a_log_that_just_fits_is_kept_whole(spool: int) -> None:
    os.write(spool, numbered(0, 4000))
    log = AttemptLog(spool, 0, SMALL)
    log.trim()
    log.close(os.fstat(spool).st_size)
    assert len(everything(log).splitlines()) == 4000


def test_a_line_without_an_end_is_cut_rather_than_held_back(spool: int) -> None:
    log = AttemptLog(spool, 0, LogCap())
    os.write(spool, b"x" * 200_000)
    assert len(everything(log).splitlines()) == 3
    log.close(200_000)
    assert len(everything(log).splitlines()) == 1


@pytest.mark.requirement("N19")
def test_a_full_disk_costs_lines_but_no_error_and_leaves_a_mark(spool: int) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    writer = SpoolWriter(full)
    writer.write_text("OUT", "lost")
    assert writer.trouble() == "27 bytes dropped (spool disk full)"
    os.close(full)
    writer.fd = spool
    writer.write_text("OUT", "kept")
    log = AttemptLog(spool, 0, LogCap())
    texts = [line.split(" ", 1)[1] for line in everything(log).decode().splitlines()]
    assert texts == ["MARK … 27 bytes dropped (spool disk full) …", "OUT kept"]
    assert writer.trouble() is None


def test_orphaned_logs_are_attributed_by_their_headers_and_start_where_shipping_ended(tmp_path: Path) -> None:
    folder = session_folder(tmp_path, 5)
    (folder / "idle.log").write_bytes(b"")
    (folder / "parent.err").write_bytes(b"Traceback")
    path = folder / "warm.log"
    first = format.header(1, 2, -1, 3, 5) + format.framed(NOW, "OUT", "a") + format.framed(NOW, "OUT", "b")
    path.write_bytes(first + format.header(9, 0, 4, 1, 5) + b"raw\n")
    one, two = orphaned_logs(tmp_path, live_sessions=set())
    assert (one.key, one.epoch, one.session) == (TaskKey(1, 2, -1), 3, 5)
    assert (two.key, two.epoch) == (TaskKey(9, 0, 4), 1)
    (whole,) = one.chunks()
    assert (whole.offset, whole.end) == (0, len(first))
    assert whole.content.decode() == f"{NOW} OUT a\n{NOW} OUT b\n"
    shipped_until = len(first) - len(format.framed(NOW, "OUT", "b"))
    (rest,) = one.chunks(shipped_until)
    assert (rest.offset, rest.end, rest.content.decode()) == (shipped_until, len(first), f"{NOW} OUT b\n")
    assert list(one.chunks(len(first))) == []
    assert next(two.chunks()).content.decode().endswith("RAW raw\n")
    discard(path)
    assert not folder.exists()


def test_logs_of_a_live_session_are_not_orphaned(tmp_path: Path) -> None:
    for session in (-1, 8):
        (session_folder(tmp_path, session) / "a.log").write_bytes(format.header(1, 0, -1, 1, session) + b"x\n")
    assert [leftover.session for leftover in orphaned_logs(tmp_path, live_sessions={-1})] == [8]


def test_a_leftover_with_a_hole_is_read_without_its_zeros(tmp_path: Path) -> None:
    folder = session_folder(tmp_path, 5)
    fd = open_spool(str(folder / "big.log"))
    os.write(fd, format.header(1, 0, -1, 1, 5))
    log = AttemptLog(fd, 0, LogCap())
    block = numbered(0, 10_000)
    for _ in range(60):
        os.write(fd, block)
        log.trim()
    os.close(fd)
    (leftover,) = orphaned_logs(tmp_path, set())
    content = b"".join(chunk.content for chunk in leftover.chunks())
    assert content.count(b"bytes dropped (log cap)") == 1
    assert b"\x00" not in content and b"\xef\xbf\xbd" not in content
    assert content.endswith(b"line 009999\n")


def test_the_spool_is_private(tmp_path: Path) -> None:
    folder = session_folder(tmp_path / "spool", 1)
    os.close(open_spool(str(folder / "x.log")))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "x.log").stat().st_mode & 0o777 == 0o600


def test_a_file_that_somebody_truncated_ends_the_reading(spool: int) -> None:
    os.write(spool, numbered(0, 10))
    log = AttemptLog(spool, 0, LogCap())
    log.close(100_000)
    assert len(everything(log).splitlines()) == 10
    log.next_lines()
    assert log.pending_bytes == 0


def test_an_empty_folder_of_a_killed_runner_is_removed_and_that_of_a_new_one_is_kept(tmp_path: Path) -> None:
    old, young, live = (session_folder(tmp_path, session) for session in (1, 2, 3))
    for folder in (old, live):
        os.utime(folder, (1, 1))
    assert list(orphaned_logs(tmp_path, live_sessions={3})) == []
    assert [folder.exists() for folder in (old, young, live)] == [False, True, True]
