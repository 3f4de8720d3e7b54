"""Runs a program as root where user name-spaces are switched off: `python without_namespaces.py PROGRAM ARGUMENT...`.

The switch is turned inside a name-space of its own that maps every id to itself, so the machine does not notice.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_CLONE_NEWUSER = 0x10000000


def main(program: list[str]) -> None:
    target = os.getpid()
    entered, entered_end = os.pipe()
    mapped, mapped_end = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        os.read(entered, 1)
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{target}/{kind}").write_text("0 0 65536")
        os.write(mapped_end, b".")
        os._exit(0)
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER) != 0:
        sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")
    os.write(entered_end, b".")
    os.read(mapped, 1)
    os.waitpid(mapper, 0)
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
