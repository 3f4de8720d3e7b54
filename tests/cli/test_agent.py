"""`evertick agent`: what it refuses before it has begun, and how little it needs to begin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evertick.cli.main import main
from evertick.domain.agent_protocol import parse_refusal

# Each would make the start of every attempt slower, and none is of use to one who only speaks HTTP.
HEAVY = (
    "psycopg",
    "fastapi",
    "pydantic",
    "cryptography",
    "uvicorn",
    "rich",
    "jinja2",
    "evertick.db",
    "evertick.engine",
)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EVERTICK_SERVER", "EVERTICK_AGENT_TOKEN", "EVERTICK_AGENT_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_server_or_a_token_it_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "EVERTICK_SERVER" in refused(capsys, "agent")
    monkeypatch.setenv("EVERTICK_SERVER", "http://127.0.0.1:1")
    assert "--token-file" in refused(capsys, "agent")
    assert "No such file" in refused(capsys, "agent", "--token-file", str(tmp_path / "none"))
    (tmp_path / "token").write_text("eva_secret and more")
    text = refused(capsys, "agent", "--token-file", str(tmp_path / "token"))
    assert "it must be a single word" in text and "eva_secret" not in text
    (tmp_path / "token").write_bytes(b"\xff")
    assert "the file is not text" in refused(capsys, "agent", "--token-file", str(tmp_path / "token"))


def test_what_keeps_it_from_beginning_is_left_for_whoever_started_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "termination-log"
    words = ("agent", "--outcome-file", str(left))
    monkeypatch.setenv("EVERTICK_SERVER", "http://127.0.0.1:1")
    refused(capsys, *words, "--token-file", str(tmp_path / "none"))
    assert "No such file" in (parse_refusal(left.read_bytes()) or "")
    left.write_text("")  # as it is in a pod
    monkeypatch.setenv("EVERTICK_HEARTBEAT_SECONDS", "often")
    refused(capsys, *words)
    assert "EVERTICK_HEARTBEAT_SECONDS" in (parse_refusal(left.read_bytes()) or "")
    left.write_text("an outcome")
    refused(capsys, *words)
    assert left.read_text() == "an outcome"


@pytest.mark.parametrize(
    "server",
    [
        "evertick.example.com",
        "ftp://x",
        "http://",
        "http://a:99999",
        "https://me:pw@host",
        "http://a/b c",
        "http://a/b?c",
    ],
)
def test_what_is_no_address_is_refused(
    capsys: pytest.CaptureFixture[str], server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERTICK_AGENT_TOKEN", "eva_x.y")
    monkeypatch.setenv("EVERTICK_SERVER", server)
    text = refused(capsys, "agent")
    assert "is not a server address" in text and "pw" not in text


def test_it_loads_little() -> None:
    preload = "from evertick.cli.commands.services import preload; preload('agent')"
    script = f"import evertick.cli.main, sys; {preload}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "evertick.agent.agent" in found and "h11" in found
    assert [name for name in found if name in HEAVY] == []
