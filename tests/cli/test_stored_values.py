"""`evertick variables`, `connections`, `secrets`: set from standard input, shown with care, rotated."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.cli.conftest import Cli


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVERTICK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def type_in(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))


async def test_a_secret_is_set_listed_revealed_and_deleted(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "evertick secrets rotate" in await cli.refused("secrets", "set", "db")
    assert "Re-encrypted 0 values of 0 with key" in (await cli("secrets", "rotate")).out
    assert "There are no secrets" in (await cli("secrets", "list")).out
    type_in(monkeypatch, b"s3cret-value\n")
    made = await cli("secrets", "set", "db", "--description", "the shop's")
    assert "Created secret db." in made.out and '@task(secrets=["db"])' in made.out
    type_in(monkeypatch, b"s3cret-value2\n")
    assert "Changed secret db." in (await cli("secrets", "set", "db")).out
    shown = await cli("secrets", "get", "db")
    assert "db is set; changed" in shown.out and "s3cret" not in shown.out
    assert (await cli("secrets", "get", "db", "--reveal")).out == "s3cret-value2\n"
    assert (await cli.json("secrets", "get", "db"))["value"] is None
    (row,) = (await cli.json("secrets", "list"))["secrets"]
    assert (row["name"], row["description"]) == ("db", "the shop's")
    old_key = row["key_id"]
    assert "Re-encrypted 1 value of 1 with key" in (await cli("secrets", "rotate")).out
    (row,) = (await cli.json("secrets", "list"))["secrets"]
    assert row["key_id"] != old_key
    assert "Removed 1 old key." in (await cli("secrets", "rotate", "--same-key", "--forget")).out
    assert (await cli("secrets", "get", "db", "--reveal")).out == "s3cret-value2\n"
    assert "use --yes" in await cli.refused("secrets", "delete", "db")
    assert (await cli("secrets", "delete", "db", "--yes")).out == "Deleted secret db.\n"
    assert "There is no secret 'db'" in await cli.refused("secrets", "get", "db")


async def test_variables_and_connections_show_what_is_not_secret(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cli("secrets", "rotate")
    type_in(monkeypatch, b"line one\nline two\n")
    await cli("variables", "set", "text")
    assert (await cli("variables", "get", "text")).out == "line one\nline two\n\n"
    assert "Created variable region." in (await cli("variables", "set", "region", "eu-west")).out
    assert (await cli("variables", "get", "region")).out == "eu-west\n"
    assert "Pipe it: evertick secrets set token <" in await cli.refused("secrets", "set", "token", "s3cret")
    type_in(monkeypatch, b"postgresql://anna:pass-word@host:5432/shop?key=abcd\n")
    await cli("connections", "set", "wh")
    assert (await cli("connections", "get", "wh")).out == "postgresql://anna:***@host:5432/shop?key=***\n"
    assert "pass-word" in (await cli("connections", "get", "wh", "--reveal")).out


@pytest.mark.parametrize(
    ("arguments", "typed", "words"),
    [
        (("secrets", "set", "a b"), b"x", "is not a valid name for a secret"),
        (("secrets", "set", "a"), b"", "is empty"),
        (("secrets", "set", "a"), b"\xff\xfe", "not text in UTF-8"),
        (("secrets", "set", "a"), b"x" * 70_000, "at most 65,536 bytes"),
        (("connections", "set", "a"), b"host:5432", "a connection must be a URI"),
    ],
)
async def test_what_cannot_be_stored_is_refused(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], typed: bytes, words: str
) -> None:
    await cli("secrets", "rotate")
    type_in(monkeypatch, typed)
    assert words in await cli.refused(*arguments)
