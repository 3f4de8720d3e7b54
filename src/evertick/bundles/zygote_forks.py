"""The loop of a zygote: forks a process for each request, and tells the owner its number."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from evertick.processes.system import (
    MessageSocket,
    die_with_parent,
    fork_sibling,
    message_socket,
    native_threads,
    recv_fds,
    use_huge_pages,
)

REQUEST_BYTES = 64 * 1024
MOST_FDS = 4


def serve(control_fd: int, owner_pid: int, mark_name: str, watched: list[str]) -> None:
    """Until the owner closes the socket or is gone."""
    control = message_socket(control_fd)
    os.set_inheritable(control_fd, False)
    die_with_parent(signal.SIGKILL, owner_pid)
    if len(threads := native_threads()) > 1:
        control.send(json.dumps(["unforkable", sorted(threads.values())]).encode())
        return
    set_mark = _mark_setter(mark_name)
    gc.collect()
    gc.freeze()
    use_huge_pages()
    control.send(json.dumps(["ready", marks_of(watched)]).encode())
    while True:
        message, fds, _, _ = recv_fds(control, REQUEST_BYTES, MOST_FDS)
        if not message:
            return
        number, module, arguments, mark = json.loads(message)
        _fork(control, number, fds, lambda: set_mark(mark), module, arguments)  # noqa: B023  called before the next turn
        for fd in fds:
            os.close(fd)


def marks_of(paths: list[str]) -> dict[str, int]:
    """When each of these changed last; 0 for one that does not exist."""
    found = {}
    for path in paths:
        found[path] = 0
        with suppress(OSError):
            found[path] = Path(path).stat().st_mtime_ns
    return found


def _fork(
    control: MessageSocket, number: int, fds: list[int], prepare: Callable[[], None], module: str, arguments: list[str]
) -> None:
    """The last descriptor is what the new process waits for: its owner says that it knows its number."""
    try:
        pid = fork_sibling()
    except OSError as error:
        control.send(json.dumps(["refused", number, str(error)]).encode())
        return
    if pid > 0:
        control.send(json.dumps(["born", number, pid]).encode())
        return
    control.close()
    go = fds.pop()
    if os.read(go, 1):
        os.close(go)
        prepare()
        _become(fds, module, arguments)
    os._exit(0)


def _become(fds: list[int], module: str, arguments: list[str]) -> NoReturn:
    """Be the program: `fds` are its standard output and error, and the descriptor that an argument "{fd}" stands for."""
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        passed = fds[2]
        for fd in (null, *fds[:2]):
            os.close(fd)
        sys.argv = [module]
        importlib.import_module(module).run([str(passed) if each == "{fd}" else each for each in arguments])
        code = 0
    except BaseException:  # as an interpreter ends: with the traceback on its standard error
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _mark_setter(name: str) -> Callable[[str], None]:
    """Changes a variable in the environment that the kernel shows of a process, by which a killed runner's processes are
    found. Its first value must be as long as every later one."""
    if not name:
        return lambda _mark: None
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place, length = libc.getenv(name.encode()), len(os.environ[name].encode())

    def set_mark(mark: str) -> None:
        if len(encoded := mark.encode()) != length:
            raise ValueError(f"{name}={mark} is not {length} bytes long")
        ctypes.memmove(place, encoded, length)
        os.environ[name] = mark

    return set_mark
