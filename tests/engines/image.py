"""A container image without a registry: this machine's Python, its libraries and a shell, as one tar file. Evertick itself is
mounted from the work tree, so that one image serves every state of it."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

IMAGE = "localhost/evertick-test:1"
SOURCE = Path(__file__).parents[2] / "src"
PACKAGES = Path(sysconfig.get_path("purelib"))
COMMAND = f"#!{sys.base_prefix}/bin/python3\nfrom evertick.cli.main import main\nmain()\n"
ACCOUNTS = "root:x:0:0:root:/root:/bin/sh\nworker:x:1234:1234:worker:/home/worker:/bin/sh\n"
_LEFT_OUT = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "__pycache__",
    "lib2to3",
}
_PROGRAMS = ("sh", "sleep", "cat", "id", "true", "env", "base64", "mktemp", "mkdir", "rm", "ls")


def write_image(path: Path) -> None:
    """Some 60 MB, in a second or two."""
    base = Path(sys.base_prefix)
    python = Path(sys.executable).resolve()
    library = base / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    programs = [Path(found) for name in _PROGRAMS if (found := shutil.which(name))]
    modules = [*(library / "lib-dynload").glob("*.so"), *PACKAGES.glob("*/*.so")]
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for folder in ("tmp", "var/tmp", "home/worker", "etc", "dev", "proc", "sys", "run"):
            _put(tar, folder, None, mode=0o1777 if "tmp" in folder else 0o755)
        for library_file in sorted({needed for each in (python, *programs, *modules) for needed in _needs(each)}):
            _copy(tar, library_file, str(library_file))
        for program in programs:
            _copy(tar, program, f"/bin/{program.name}")
        _copy(tar, python, f"{base}/bin/python3")
        for file in library.rglob("*"):
            if file.is_file() and not _LEFT_OUT & set(file.relative_to(library).parts):
                _copy(tar, file, str(file))
        paths = f"{SOURCE}\n{PACKAGES}\n".encode()
        _put(tar, f"{library}/site-packages/evertick-test.pth", paths, mode=0o644)
        _put(tar, "usr/bin/evertick", COMMAND.encode(), mode=0o755)
        _put(tar, "etc/passwd", ACCOUNTS.encode(), mode=0o644)
        _put(tar, "etc/group", b"root:x:0:\nworker:x:1234:\n", mode=0o644)


def _needs(program: Path) -> Iterator[Path]:
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
    for found in re.findall(r"(/\S+\.so\S*)", listed):
        yield Path(found)


def _copy(tar: tarfile.TarFile, source: Path, name: str) -> None:
    info = tar.gettarinfo(source.resolve(), arcname=name.lstrip("/"))
    info.type, info.uid, info.gid, info.uname, info.gname = tarfile.REGTYPE, 0, 0, "", ""
    info.size = source.resolve().stat().st_size
    with source.open("rb") as file:
        tar.addfile(info, file)


def _put(tar: tarfile.TarFile, name: str, content: bytes | None, *, mode: int) -> None:
    info = tarfile.TarInfo(name.lstrip("/"))
    info.mode = mode
    if content is None:
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
        return
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))
