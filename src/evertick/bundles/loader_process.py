"""The process that loads one DAG file: imports it, and returns its DAGs and its module closure as JSON.

The closure is every file of the DAGs folder that it imports, found in the source text. Names that lead outside the
folder are third-party packages.
"""

from __future__ import annotations

import ast
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from evertick.domain.dags.spec import structural_hash, to_json
from evertick.domain.errors import InvalidDag, UserError
from evertick.domain.schedules.computed import with_instants
from evertick.processes.system import become_subreaper, die_with_parent, native_threads
from evertick.processes.thread_pools import without_pool_threads
from evertick.sdk.dag import DagFile, load_dag_file
from evertick.sdk.runtime import CompiledDag

MAX_MODULES = 5_000
_END_SECONDS = 0.1


def find_closure(folder: Path, file: str, loaded: Iterable[str] = ()) -> tuple[str, ...]:
    """The Python files, relative to the folder and sorted: `file`, its imports, and `loaded` with theirs."""
    waiting = [file, *loaded]
    found: dict[str, None] = {}
    while waiting and len(found) < MAX_MODULES:
        path = waiting.pop()
        if path in found or not (folder / path).is_file():
            continue
        found[path] = None
        for name in _imported_names(folder, path):
            waiting += _files_of(folder, name)
    return tuple(sorted(found))


def _imported_names(folder: Path, path: str) -> Iterator[tuple[str, ...]]:
    try:
        tree = ast.parse((folder / path).read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    package = PurePosixPath(path).parts[:-1]
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (tuple(alias.name.split(".")) for alias in node.names)
            case ast.ImportFrom():
                yield from _from_names(node, package)
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(name)), *_]
            ):
                if called in ("import_module", "__import__"):
                    yield tuple(name.split("."))


def _from_names(node: ast.ImportFrom, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """`from a.b import c` may name the module a.b.c, or something in a.b: both are searched."""
    if node.level > len(package) + 1:
        return
    start = package[: len(package) - node.level + 1] if node.level else ()
    module = (*start, *(node.module.split(".") if node.module else ()))
    for alias in node.names:
        yield (*module, alias.name)


def _files_of(folder: Path, name: tuple[str, ...]) -> Iterator[str]:
    """The files that importing a dotted name executes: the `__init__.py` of each package on the path, and the module."""
    for depth in range(1, len(name) + 1):
        stem = "/".join(name[:depth])
        for candidate in (f"{stem}/__init__.py", f"{stem}.py"):
            if (folder / candidate).is_file():
                yield candidate
                break


_MAX_FRAMES = 20


_MAX_MESSAGE = 4_000


def main(folder: Path, file: str, answer_fd: int, parent_pid: int, deadline: float) -> None:
    """At the deadline, by the monotonic clock of the machine, the stack is written to the standard error."""
    die_with_parent(signal.SIGKILL, parent_pid)
    become_subreaper()
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(deadline - time.monotonic(), 0.001))
    os.set_inheritable(answer_fd, False)  # processes that user code starts must not hold the answer open
    remaining = memoryview(json.dumps(load(folder.absolute(), file)).encode() + b"\n")
    while remaining:
        remaining = remaining[os.write(answer_fd, remaining) :]
    os._exit(0)  # skip user code's exit handlers and threads


def load(folder: Path, file: str) -> dict[str, object]:
    """The report about the file: its DAGs or its error, the modules it needs, and the threads it started."""
    loaded, dags = DagFile(dags={}), list[dict[str, object]]()
    problem: Mapping[str, object] | None = None
    try:
        with without_pool_threads():  # as in a fork server
            loaded = load_dag_file(folder, file)
            dags = [_described(dag) for dag in loaded.dags.values()]
    except BaseException as error:  # SystemExit too: a file must not end this process without an answer
        problem = _problem(error, folder, file)
    faulthandler.cancel_dump_traceback_later()  # its thread is none of the file's
    return {
        "dags": dags,
        "findings": [finding.to_dict() for finding in loaded.findings],
        "problem": problem,
        "closure": find_closure(folder, file, _loaded_files(folder)),
        "uses_threads": _threads(),
    }


def _described(dag: CompiledDag) -> dict[str, object]:
    described: dict[str, object] = {"name": dag.name, "spec": to_json(dag.spec), "hash": structural_hash(dag.spec)}
    if dag.timetables:
        now = datetime.now(UTC)
        described["instants"] = {name: _computed(dag, name, now) for name in dag.timetables}
    return described


def _computed(dag: CompiledDag, name: str, now: datetime) -> object:
    """A schedule with the instants that the user's code computes."""
    (spec,) = (each.spec for each in dag.spec.schedules if each.name == name)
    try:
        found = dag.timetables[name](now)
    except UserError:
        raise
    except Exception as error:
        raise InvalidDag(
            f"DAG {dag.name!r}: timetable of schedule {name!r}: {type(error).__name__}: {error}"
        ) from error
    return json.loads(with_instants(spec, found).to_json())


def _problem(error: BaseException, folder: Path, file: str) -> Mapping[str, object]:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_within(folder, frame.filename)]
    at_file, at_line = (frames[-1].filename, frames[-1].lineno) if frames else (str(folder / file), None)
    if isinstance(error, InvalidDag) and error.file:
        at_file, at_line = error.file, error.line
    if isinstance(error, SyntaxError) and error.filename:
        at_file, at_line = error.filename, error.lineno
    return {
        "file": os.path.relpath(at_file, folder) if _is_within(folder, at_file) else at_file,
        "line": at_line,
        "message": _message(error, frames[-1].line if frames else None)[:_MAX_MESSAGE],
        "traceback": "".join(traceback.format_list(frames[-_MAX_FRAMES:])),
    }


def _message(error: BaseException, line: str | None) -> str:
    """`line` is the source of the line that failed."""
    match error:
        case InvalidDag():
            return error.message
        case UserError():
            return str(error)
        case SyntaxError():
            source = f": {error.text.strip():.200}" if error.text else ""
            return f"{type(error).__name__}: {error.msg}{source}"
        case ModuleNotFoundError(name=str(name)) if name.partition(".")[0] == "airflow":
            return _missing_airflow(name, line or "")
        case SystemExit():
            return f"it calls sys.exit({error.code!r}) when imported; guard that with `if __name__ == '__main__':`."
        case _:
            return "".join(traceback.format_exception_only(error)).strip()


def _missing_airflow(name: str, line: str) -> str:
    if "evertick.airflow.loader" in sys.modules:
        return f"there is no {name} in this Airflow: it is gone in Airflow 3, or its provider is not installed."
    from evertick.sdk.airflow_names import import_hint

    return f"Airflow is not installed, and a DAG of Evertick does not use it: {import_hint(line)}"


def _loaded_files(folder: Path) -> list[str]:
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return [
        os.path.relpath(file, folder)
        for file in files
        if isinstance(file, str) and file.endswith(".py") and _is_within(folder, file)
    ]


def _is_within(folder: Path, file: str) -> bool:
    return file.startswith(f"{folder}{os.sep}")


def _threads() -> list[str]:
    """The threads that importing left running, which make a later fork unsafe; native ones by their name. One that has ended,
    as that of faulthandler, is in the kernel's list for a moment longer."""
    deadline = time.monotonic() + _END_SECONDS
    while (found := _native_threads()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def _native_threads() -> list[str]:
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    # In the fork of a zygote, `native_id` is still that of the zygote; the kernel's number is that of the process.
    main_thread = threading.main_thread().native_id, os.getpid()
    return sorted(known.get(number) or name for number, name in native_threads().items() if number not in main_thread)


def run(arguments: list[str]) -> None:
    folder, file, answer_fd, parent_pid, deadline = arguments
    sys.dont_write_bytecode = True  # next to the folder's files
    main(Path(folder), file, int(answer_fd), int(parent_pid), float(deadline))


if __name__ == "__main__":
    run(sys.argv[1:])
