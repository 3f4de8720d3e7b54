"""Unpacked code on a machine: what nobody uses goes, what somebody uses stays, and nobody ever finds half of it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evertick.bundles.bundle import Bundle, pack, unpack
from evertick.bundles.cache import ABANDONED_SECONDS, MAKING, REMOVING, hold, keep, remove_unused

WEEK = 7 * 86_400.0


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    folder = tmp_path / "dags"
    folder.mkdir()
    (folder / "x.py").write_text("VALUE = 1\n")
    return pack(folder, "x.py", ["x.py"])


@pytest.fixture
def unpacked(bundle: Bundle, tmp_path: Path) -> Path:
    return unpack(bundle.archive, bundle.hash, tmp_path / "cache")


def age(place: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(place, (then, then))


def clean(unpacked: Path, *in_use: str) -> list[str]:
    return remove_unused(unpacked.parent, in_use=in_use, unused_seconds=WEEK)


def test_code_that_was_unused_for_long_goes_and_is_unpacked_again(bundle: Bundle, unpacked: Path) -> None:
    assert clean(unpacked) == []
    age(unpacked, WEEK + 60)
    assert clean(unpacked) == [bundle.hash]
    assert list(unpacked.parent.iterdir()) == []
    assert (unpack(bundle.archive, bundle.hash, unpacked.parent) / "x.py").exists()


def test_looking_it_up_is_using_it(bundle: Bundle, unpacked: Path) -> None:
    age(unpacked, WEEK + 60)
    assert unpack(bundle.archive, bundle.hash, unpacked.parent) == unpacked
    assert clean(unpacked) == []
    age(unpacked, WEEK + 60)
    assert keep(unpacked)
    assert clean(unpacked) == []
    assert not keep(unpacked.with_name("0" * 64))


def test_what_the_runner_may_use_at_any_moment_stays(bundle: Bundle, unpacked: Path) -> None:
    age(unpacked, WEEK + 60)
    assert clean(unpacked, bundle.hash, "not there") == []
    assert clean(unpacked) == [], "and counts as used now"


@pytest.fixture
def holder(unpacked: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the folder, as a warm parent's keeper does."""
    code = (
        "import sys; from evertick.bundles.cache import hold;"
        " hold(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(unpacked)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_what_a_living_process_holds_stays_until_it_ends(
    bundle: Bundle, unpacked: Path, holder: subprocess.Popen[bytes]
) -> None:
    age(unpacked, WEEK + 60)
    assert clean(unpacked) == []
    holder.kill()
    holder.wait()
    assert clean(unpacked) == [bundle.hash]


def test_holding_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    hold(str(tmp_path / "gone"))


def test_what_was_left_half_made_or_half_removed_goes_after_a_day(unpacked: Path) -> None:
    folder = unpacked.parent
    for name in (f"{MAKING}old", f"{REMOVING}old", f"{MAKING}new", ".other"):
        (folder / name).mkdir()
        (folder / name / "file").touch()
    for name in (f"{MAKING}old", f"{REMOVING}old", ".other"):
        age(folder / name, ABANDONED_SECONDS + 60)
    assert sorted(clean(unpacked)) == sorted([f"{MAKING}old", f"{REMOVING}old"])
    assert sorted(place.name for place in folder.iterdir()) == sorted([unpacked.name, f"{MAKING}new", ".other"])


def test_a_link_is_never_followed(unpacked: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (unpacked.parent / ("0" * 64)).symlink_to(elsewhere)
    then = time.time() - 2 * WEEK
    os.utime(unpacked.parent / ("0" * 64), (then, then), follow_symlinks=False)
    assert clean(unpacked) == []
    assert (elsewhere / "precious").exists()


def test_nothing_to_clean_is_no_error(tmp_path: Path) -> None:
    assert remove_unused(tmp_path / "never made", in_use=["x"], unused_seconds=0) == []


def test_who_looks_it_up_while_it_is_being_removed_waits_and_finds_all_or_nothing(
    bundle: Bundle, unpacked: Path
) -> None:
    age(unpacked, WEEK + 60)
    descriptor = os.open(unpacked.parent, os.O_RDONLY)
    with ThreadPoolExecutor(1) as pool:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        looking = pool.submit(keep, unpacked)
        unpacked.rename(unpacked.with_name(REMOVING + unpacked.name))
        assert not looking.done()
        os.close(descriptor)
        assert looking.result(timeout=10) is False
    assert (unpack(bundle.archive, bundle.hash, unpacked.parent) / "x.py").exists()
