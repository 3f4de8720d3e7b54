"""Git repositories for tests: commits, and a server that asks for a password and repeats a wrong one in its answer."""

from __future__ import annotations

import base64
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

_WHO = {
    "GIT_AUTHOR_NAME": "Ann Author",
    "GIT_AUTHOR_EMAIL": "ann@example.com",
    "GIT_COMMITTER_NAME": "Ann Author",
    "GIT_COMMITTER_EMAIL": "ann@example.com",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
}


class Repository:
    """A bare repository, and a clone in which commits are made."""

    def __init__(self, folder: Path) -> None:
        self.bare, self.clone = folder / "origin.git", folder / "clone"
        self._git(folder, "init", "-q", "--bare", "-b", "main", str(self.bare))
        self._git(folder, "init", "-q", "-b", "main", str(self.clone))
        self._git(self.clone, "remote", "add", "origin", str(self.bare))

    @property
    def url(self) -> str:
        return f"file://{self.bare}"

    def push(self, message: str, files: dict[str, str | None]) -> str:
        """Commit these files, pushed to the branch main; None removes a file. Returns the hash."""
        for name, content in files.items():
            path = self.clone / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink()
            else:
                path.write_text(content)
        self._git(self.clone, "add", "-A")
        self._git(self.clone, "commit", "-q", "--allow-empty", "-m", message)
        self._git(self.clone, "push", "-q", "-f", "origin", "HEAD:main")
        return self._git(self.clone, "rev-parse", "HEAD").strip()

    def link(self, name: str, target: str) -> None:
        (self.clone / name).symlink_to(target)

    def tag(self, name: str) -> None:
        self._git(self.clone, "tag", "-a", "-m", "x", name)
        self._git(self.clone, "push", "-q", "origin", name)

    def _git(self, folder: Path, *arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        environment = {"PATH": os.environ["PATH"], **_WHO}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


@contextmanager
def served(repository: Repository, *, user: str, password: str) -> Iterator[str]:
    """The URL of a server that serves the repository to this user only."""
    expected = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

        def _answer(self, body: bytes) -> None:
            if self.headers.get("Authorization") != expected:
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="git"')
                told = f"No user has {self.headers.get('Authorization')}".encode()
                self.send_header("Content-Type", "text/plain")
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)
                return
            parts = urlsplit(self.path)
            environment = {
                "PATH": os.environ["PATH"],
                "GIT_PROJECT_ROOT": str(repository.bare.parent),
                "GIT_HTTP_EXPORT_ALL": "1",
                "REQUEST_METHOD": self.command,
                "PATH_INFO": parts.path,
                "QUERY_STRING": parts.query,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "safe.directory",
                "GIT_CONFIG_VALUE_0": "*",
            }
            done = subprocess.run(["git", "http-backend"], input=body, capture_output=True, env=environment, check=True)
            head, _, content = done.stdout.partition(b"\r\n\r\n")
            self.send_response(200)
            for line in head.decode().split("\r\n"):
                name, _, text = line.partition(": ")
                self.send_header(name, text)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/{repository.bare.name}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
