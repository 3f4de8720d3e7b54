"""Chunks of logs in one object: each can be read alone, and what is not what was packed is none."""

from __future__ import annotations

import gzip

import pytest

from evertick.domain.log_archive import Piece, pack, unpack

CONTENTS = ["1700000000000000 INFO one\n", "", "1700000000000001 OUT zwölf\n" * 5000]


def test_every_chunk_comes_back_alone_and_the_whole_is_one_gzip_file() -> None:
    body, pieces = pack(CONTENTS)
    assert [unpack(body[piece.at : piece.at + piece.size], piece) for piece in pieces] == CONTENTS
    assert gzip.decompress(body).decode() == "".join(CONTENTS)
    assert pieces[-1].at + pieces[-1].size == len(body) < sum(map(len, CONTENTS)) / 10
    assert pack(CONTENTS) == (body, pieces), "the same lines are the same bytes"


@pytest.mark.parametrize("place", [0, 5, -1])
def test_what_was_changed_cut_or_is_anothers_is_not_taken(place: int) -> None:
    body, (piece, _, other) = pack(CONTENTS)
    packed = bytearray(body[: piece.size])
    packed[place] ^= 1
    assert unpack(bytes(packed), piece) is None
    assert unpack(body[: piece.size - 1], piece) is unpack(b"", piece) is None
    assert unpack(body[other.at : other.at + other.size], piece) is None


def test_what_never_was_gzip_is_not_taken_whatever_its_digest() -> None:
    body, (piece, *_) = pack(["x"])
    (forged,) = {Piece(0, 3, each.digest) for each in pack(["x"])[1]}
    assert unpack(body[:3], forged) is None and unpack(body, piece) == "x"
