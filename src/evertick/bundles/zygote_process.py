"""A zygote: a process that has modules imported, and forks itself into other programs of Evertick. A fork takes 5 ms where
importing Airflow anew takes a second.

Runs no user code itself. The processes that it forks are children of its owner, not its own: the owner waits for them, and
they outlive the zygote.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def main(control_fd: int, owner_pid: int, mark_name: str, modules: list[str]) -> None:
    """The first of `modules` are imported before anything else is: `fork_server_main` has to come before `threading`. A name
    with a colon is a function to call, which returns the files whose change makes this process outdated."""
    watched: list[str] = []
    for name in modules:
        module, _, function = name.partition(":")
        found = importlib.import_module(module)
        if function:
            watched += getattr(found, function)()
    serve = importlib.import_module("evertick.bundles.zygote_forks").serve
    serve(control_fd, owner_pid, mark_name, watched)


def run(arguments: list[Any]) -> None:
    main(int(arguments[0]), int(arguments[1]), arguments[2], arguments[3:])


if __name__ == "__main__":
    run(sys.argv[1:])
