"""The format of log lines."""

from __future__ import annotations

from evertick.domain.attempt import TaskKey
from evertick.logs import format

NOW = 1_700_000_000_000_000


def test_framed_lines_are_shipped_with_their_own_time_and_level() -> None:
    spooled = format.framed(NOW, "INFO", "one\ntwo") + format.framed(NOW + 1, "OUT", "three\n")
    shipped = format.shipped(spooled, 0)
    assert shipped.decode() == f"{NOW} INFO one\n{NOW} INFO two\n{NOW + 1} OUT three\n"


def test_raw_lines_are_stamped_when_read() -> None:
    spooled = b"from a subprocess\r\n" + format.framed(NOW, "OUT", "printed") + b"no newline"
    assert format.shipped(spooled, NOW + 5).decode().splitlines() == [
        f"{NOW + 5} RAW from a subprocess",
        f"{NOW} OUT printed",
        f"{NOW + 5} RAW no newline",
    ]


def test_nul_invalid_utf8_and_frame_bytes_never_reach_what_is_shipped() -> None:
    spooled = format.framed(NOW, "OUT", "nul \x00 lone \udcff frame \x1e") + b"\xff\x00\x1e bad\n\x1ebroken frame\n"
    shipped = format.shipped(spooled, NOW)
    assert b"\x00" not in shipped and b"\x1e" not in shipped
    assert shipped.decode().splitlines() == [
        f"{NOW} OUT nul � lone � frame �",
        f"{NOW} RAW ��� bad",
        f"{NOW} RAW �broken frame",
    ]


def test_a_forged_frame_with_bad_bytes_is_cleaned_too() -> None:
    shipped = format.shipped(b"\x1e1700000000000000 OUT \xff\n", NOW)
    assert shipped.decode() == "1700000000000000 OUT �\n"


def test_a_long_line_is_cut_into_pieces() -> None:
    shipped = format.shipped(format.framed(NOW, "OUT", "x" * 40_000), 0).decode().splitlines()
    assert [len(line) for line in shipped] == [len(f"{NOW} OUT ") + size for size in (16384, 16384, 7232)]


def test_headers_are_found_and_left_out() -> None:
    spooled = format.header(12, 3, -1, 4, -99) + format.framed(NOW, "OUT", "x") + format.header(13, 0, 5, 1, 8)
    assert format.shipped(spooled.rpartition(b"\x1f")[0], 0).decode() == f"{NOW} OUT x\n"
    found = [header for _, header in format.find_headers(spooled)]
    assert found == [format.Header(TaskKey(12, 3, -1), 4, -99), format.Header(TaskKey(13, 0, 5), 1, 8)]
