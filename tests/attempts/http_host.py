"""A small HTTP server for tasks to talk to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        match self.path.split("?")[0].split("/")[1:]:
            case ["echo"]:
                length = int(self.headers.get("Content-Length") or 0)
                sent = json.loads(self.rfile.read(length)) if length else None
                self.answer(200, {"path": self.path, "who": self.headers.get("X-Who"), "sent": sent})
            case ["status", status]:
                later = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
                after = {"429": "12", "503": later}.get(status)
                self.answer(int(status), {"no": status}, {"Retry-After": after} if after else {})
            case ["text"]:
                self.answer(200, "grüß dich", {"Content-Type": "text/plain; charset=utf-8"})
            case ["slow"]:
                server.released.wait(20)
                self.answer(200, "late")
            case ["large"]:
                self.answer(200, "x" * (11 * 1024 * 1024))
            case ["moved"]:
                self.answer(302, "", {"Location": f"http://localhost:{server.server_port}/who"})
            case ["who"]:
                self.answer(200, {"authorization": self.headers.get("Authorization")})

    do_POST = do_GET

    def answer(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        raw = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        given = {"Content-Type": "text/plain" if isinstance(content, str) else "application/json", **(headers or {})}
        for name, value in given.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        # Whoever has waited long enough has hung up.
        with suppress(ConnectionError):
            self.end_headers()
            self.wfile.write(raw)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def served() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.released = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.released.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()
