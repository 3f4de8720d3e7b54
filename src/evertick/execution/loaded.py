"""A bundle's DAGs in one process, or the reason why their file cannot be imported."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evertick.authoring.collect import load_dags
from evertick.authoring.resolve import BoundTask, Dag, find_task
from evertick.domain.errors import InvalidDag
from evertick.execution.body import described, user_traceback


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    dags: Mapping[str, Dag] = field(default_factory=dict)
    failure: str | None = None
    traceback: str = ""

    def find(self, dag: str, task: str) -> BoundTask:
        if self.failure is not None:
            raise InvalidDag(self.failure)
        return find_task(self.dags, dag, task)

    def coroutine_tasks(self) -> list[tuple[str, str]]:
        return [(dag.name, task.name) for dag in self.dags.values() for task in dag.tasks.values() if task.is_async]


def load(folder: str, file: str) -> Loaded:
    """Import the file. Any exception, even SystemExit, becomes the failure."""
    try:
        return Loaded(dags=load_dags(Path(folder), file))
    except BaseException as error:
        return Loaded(failure=f"{file} cannot be imported: {described(error)}", traceback=user_traceback(error))


def obstacle_to_forking(spared_fd: int) -> str | None:
    """A state that the import left in this process and that a fork would break."""
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return f"its import starts threads ({', '.join(names) or 'of an extension'})"
    for entry in Path("/proc/self/fd").iterdir():
        if int(entry.name) == spared_fd:
            continue
        try:
            target = entry.readlink().name
        except OSError:
            continue
        if target.startswith("socket:"):
            return "its import opens sockets"
    return None
