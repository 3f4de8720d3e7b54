"""A program that a zygote of the tests forks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from evertick.processes.system import MessageSocket


def run(arguments: list[str]) -> None:
    answer_fd, verb, *rest = arguments
    how = "fresh" if "FRESH" in os.environ else "forked"
    if verb == "append":
        with Path(rest[0]).open("a") as file:
            file.write(f"{how}\n")
    os.write(int(answer_fd), f"{how} {os.getpid()} {os.getppid()} {os.getpgid(0)}".encode())
    if verb == "wait":
        signal.pause()
    os._exit(int(rest[0]) if verb == "exit" else 0)


def start_thread() -> list[str]:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return []


def watched() -> list[str]:
    return [os.environ["WATCHED"]]


if os.environ.get("BEFORE_BORN") == "die":
    _send = MessageSocket.send

    def _die_before_born(self: Any, message: bytes, *given: Any) -> Any:
        if b"born" in message:
            os.kill(os.getpid(), signal.SIGKILL)
        return _send(self, message, *given)

    MessageSocket.send = _die_before_born  # type: ignore[method-assign]

if __name__ == "__main__":
    run(sys.argv[1:])
