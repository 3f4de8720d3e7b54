"""Imports one DAG file and returns its DAGs. Runs user code: only for processes that exist for nothing else.

A DAG belongs to the file whose top-level code created it, directly or through functions of other modules; importing
another DAG file does not include that file's DAGs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from evertick.authoring.dag import Collection, collecting
from evertick.authoring.resolve import Dag
from evertick.domain.errors import InvalidDag


def load_dags(folder: Path, file: str) -> Mapping[str, Dag]:
    """The DAGs of `folder/file` by name, with `folder` first on the import path."""
    folder = folder.absolute()
    if not (folder / file).is_file():
        raise InvalidDag(f"there is no file {file} in {folder}.")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    with collecting() as collection:
        module_file = _import(folder, Path(file))
    dags: dict[str, Dag] = {}
    for dag in _own_dags(collection, module_file):
        if dag.name in dags:
            raise InvalidDag(
                f"two DAGs are named {dag.name!r}; give one a different name with @dag(name=...).",
                file=module_file,
                line=1,
            )
        dags[dag.name] = dag
    return dags


def _own_dags(collection: Collection, module_file: str) -> list[Dag]:
    built = [dag for owner, _, dag in collection.built if owner == module_file]
    called = {id(definition) for _, definition, _ in collection.built}
    uncalled = [
        definition
        for owner, definition in collection.definitions
        if owner == module_file and id(definition) not in called
    ]
    found = built + [definition.build() for definition in uncalled]
    return [each for dag in found for each in (dag, *dag.callbacks)]


def _import(folder: Path, file: Path) -> str:
    """Import by the module's own name, so that other modules of the folder see the same module; returns its file."""
    path = folder / file
    parts = file.with_suffix("").parts
    name = ".".join(parts)
    top = parts[0]
    if all(part.isidentifier() for part in parts) and top not in sys.modules and top not in sys.stdlib_module_names:
        module = importlib.import_module(name)
        if module.__file__ is not None and Path(module.__file__) == path:
            return module.__file__
    # The name is taken (`json.py`) or cannot be imported (`my-dag.py`): use any other name.
    spec = importlib.util.spec_from_file_location(f"evertick_dag_file_{name}", path)
    if spec is None or spec.loader is None:
        raise InvalidDag(f"{file} is not a Python file.", file=str(path), line=1)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return str(path)
