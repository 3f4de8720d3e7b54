"""Replaces itself with a PostgreSQL program that dies with its parent and does not run as root.

Run as a script with the standard library alone: `python -I -S postgres_launch.py PARENT SIGNAL DIRECTORY PROGRAM ...`.
A script, not a `preexec_fn`: running Python between fork and exec may deadlock in a process that has threads.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import sys
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_CLONE_NEWUSER = 0x10000000
_CAP_DAC_OVERRIDE = 1
_CAPABILITY_VERSION = 0x20080522
_NOBODY = 65534


def main(arguments: list[str]) -> None:
    """Drop root if necessary, tie this process to its parent, and become the program."""
    parent, death_signal, directory, program = int(arguments[0]), int(arguments[1]), Path(arguments[2]), arguments[3]
    if os.geteuid() == 0:
        _leave_root(directory)
    if sys.platform == "linux":
        # After the change of identity, because that clears it.
        _libc("prctl", _PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:
            sys.exit("The parent process ended before PostgreSQL could start.")
    os.execv(program, arguments[3:])


def _leave_root(directory: Path) -> None:
    """PostgreSQL refuses to run as root. Prefer a namespace that maps root to another user: it changes no file."""
    identity = _ordinary_identity()
    if _can_enter_namespace():
        _own(directory, 0, 0)
        _enter_namespace(identity)
    else:
        _own(directory, *identity)
        _become(identity)


def _ordinary_identity() -> tuple[int, int]:
    """The user to become: `initdb` requires one that the system knows by name."""
    known = {entry.pw_uid: entry.pw_gid for entry in pwd.getpwall() if entry.pw_uid != 0}
    if not known:
        sys.exit(
            "PostgreSQL does not run as root and this system has no other user: add one, or start as an ordinary user."
        )
    uid = _NOBODY if _NOBODY in known else min(known)
    return uid, known[uid]


def _can_enter_namespace() -> bool:
    """Try in a child process, because entering cannot be undone."""
    child = os.fork()
    if child == 0:
        try:
            _enter_namespace((_NOBODY, _NOBODY))
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _enter_namespace(identity: tuple[int, int]) -> None:
    _libc("unshare", _CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{identity[0]} 0 1")
    Path("/proc/self/gid_map").write_text(f"{identity[1]} 0 1")


def _become(identity: tuple[int, int]) -> None:
    """Become an ordinary user that keeps one capability: to traverse the private directories above its own."""
    uid, gid = identity
    _libc("prctl", _PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    bit = 1 << _CAP_DAC_OVERRIDE
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    effective_permitted_inheritable = (ctypes.c_uint32 * 6)(bit, bit, bit, 0, 0, 0)
    _libc("capset", header, effective_permitted_inheritable)
    _libc("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_OVERRIDE, 0, 0)


def _own(directory: Path, uid: int, gid: int) -> None:
    """Change the owner of a directory that was last used under the other identity, with all its contents."""
    if directory.stat().st_uid == uid:
        return
    for path in _tree(directory):
        os.chown(path, uid, gid, follow_symlinks=False)


def _tree(directory: Path) -> Iterator[Path]:
    for parent, names, files in os.walk(directory, topdown=False):
        yield from (Path(parent, name) for name in (*names, *files))
    # Last, so that an interrupted change is repeated.
    yield directory


def _libc(function: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


if __name__ == "__main__":
    main(sys.argv[1:])
