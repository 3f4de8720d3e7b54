"""Small packages, and a package index that serves them over HTTP: environments are built without any other network."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def make_wheel(folder: Path, name: str, version: str, code: str | None = None, *, modules: int = 0) -> Path:
    """A wheel with a module and that many more, `name_0` and so on; by default their `VERSION` is its version."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    text = f"VERSION = {version!r}\n" if code is None else code
    files = {
        f"{name}.py": text,
        **{f"{name}_{number}.py": text for number in range(modules)},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, content in files.items():
            wheel.writestr(file, content)
    return path


class Index(SimpleHTTPRequestHandler):
    """The simple repository API over a folder of wheels."""

    def do_GET(self) -> None:
        parts = self.path.strip("/").split("/")
        if parts[0] != "simple":
            return super().do_GET()
        wheels = sorted(Path(self.directory).glob(f"{parts[1].replace('-', '_')}-*.whl"))
        digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels}
        links = "".join(f'<a href="/{name}#sha256={digest}">{name}</a>' for name, digest in digests.items())
        body = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        self.send_response(200 if wheels else 404)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of the index, which is down after the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Index, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def uv_environment(**changes: str) -> dict[str, str]:
    """What uv and DAG files see: this environment without its own package indexes. An index that is down is not retried
    for long."""
    # Not the search path of pyenv: its programs are scripts that fail for a version that is not selected.
    others = sorted(map(str, Path.home().glob(".pyenv/versions/*/bin")))
    path = ":".join([str(Path(sys.executable).parent), *others, "/usr/local/bin", "/usr/bin", "/bin"])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EVERTICK_", "UV_", "PIP_"))}
    return {
        **kept,
        "PATH": path,
        "UV_NO_CONFIG": "1",
        "UV_HTTP_RETRIES": "0",
        "UV_PYTHON_DOWNLOADS": "never",
        **changes,
    }


def from_folder(wheels: Path) -> dict[str, str]:
    """The same with the packages of this folder alone."""
    return uv_environment(UV_NO_INDEX="1", UV_FIND_LINKS=str(wheels))
