"""A real S3 server for tests: rclone's, on a folder, with signatures checked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ports import own_port
from tests.waiting import eventually_sync

BUCKET = "attic"
KEY_ID, SECRET_KEY = "evertick", "sesame-and-more"


class S3Server:
    """Can be stopped and started again at the same address with what it holds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / BUCKET).mkdir(parents=True)
        self._port = own_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What Evertick is told."""
        return {
            "storage": f"s3://{BUCKET}/below/here",
            "storage_endpoint": f"http://127.0.0.1:{self._port}",
            "storage_key_id": KEY_ID,
            "storage_secret_key": SECRET_KEY,
        }

    def files(self) -> list[Path]:
        return sorted(path for path in (self._folder / BUCKET).rglob("*") if path.is_file())

    def start(self) -> None:
        program = Path(sys.executable).with_name("rclone")
        address = ["--addr", f"127.0.0.1:{self._port}", "--auth-key", f"{KEY_ID},{SECRET_KEY}"]
        words = [program, "serve", "s3", *address, "--config", "", self._folder]
        self._process = subprocess.Popen([str(each) for each in words], stderr=subprocess.DEVNULL)
        eventually_sync(self._answers, within_seconds=60)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(timeout=30)
            self._process = None

    def _answers(self) -> bool:
        with socket.socket() as knock:
            return knock.connect_ex(("127.0.0.1", self._port)) == 0


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    if "FAKETIME" in os.environ:
        pytest.skip("NOT RUN: under `make clocks` rclone has the true time, and refuses signatures of another")
    server = S3Server(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
