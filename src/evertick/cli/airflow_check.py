"""The report of `evertick airflow check`: what the environment has, and what becomes of each DAG of a folder."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evertick.bundles.airflow_values import NamedValues, named_values, without_environment
from evertick.bundles.loader import LoadedFile, find_duplicates
from evertick.cli.options import noun
from evertick.cli.output import heading, hint, line, show
from evertick.client.local import LocalContext
from evertick.config import Settings, user_environment
from evertick.db.queries import secrets
from evertick.db.queries.gates import list_gates
from evertick.domain.dags.findings import Severity
from evertick.domain.dags.gates import GateKind
from evertick.domain.errors import EvertickError, UserError

_STYLES = {Severity.REFUSED: "red", Severity.DIFFERS: "yellow", Severity.IGNORED: "dim"}
# Imported as a task would import them: the version of Airflow and of Python, and the providers.
_PROBE = (
    "import json, sys; from importlib.metadata import distributions;"
    " found = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in distributions()};"
    " print(json.dumps({'python': '.'.join(map(str, sys.version_info[:3])), 'packages': found}))"
)
_PROBE_SECONDS = 30.0
_SUPPORTED = ("3.0", "3.1", "3.2", "3.3")

_OLDER_NAMES = "AF601"
_MOST_VALUES = 100_000


def probe(settings: Settings) -> dict[str, Any]:
    """What the environment has. Raises UserError if it has no supported Airflow."""
    python = str(settings.airflow_python)
    try:
        done = subprocess.run(
            [python, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{python} is not a Python that works: {error}") from None
    packages = answer["packages"]
    version = packages.get("apache-airflow-core") or packages.get("apache-airflow")
    if version is None or not version.startswith("3."):
        has = f"Airflow {version}" if version else "no Airflow"
        raise UserError(
            f"{python} has {has}: Evertick runs DAG files with Airflow 3.0 to 3.3. Make an environment with"
            " `evertick airflow setup --airflow 3.3`; DAG files of Airflow 2 often run there unchanged."
        )
    providers = sum(name.startswith("apache-airflow-providers-") for name in packages)
    is_known = version.startswith(tuple(f"{each}." for each in _SUPPORTED))
    return {
        "airflow": version,
        "python": answer["python"],
        "providers": providers,
        "path": python,
        "is_tested": is_known,
    }


def report_of(folder: Path, loaded: Sequence[LoadedFile], settings: Settings) -> dict[str, Any]:
    findings = [finding for file in loaded for finding in file.findings]
    refused = {each.dag for each in findings if each.severity is Severity.REFUSED}
    differing = {each.dag for each in findings if each.severity is Severity.DIFFERS} - refused
    dags = [dag for file in loaded for dag in file.dags]
    names = {dag.name for dag in dags}
    pools = Counter(
        gate.name for dag in dags for task in dag.spec.tasks for gate in task.gates if gate.kind is GateKind.POOL
    )
    return {
        "files": len(loaded),
        "dags": len(names | refused),
        "tasks": sum(len(dag.spec.tasks) for dag in dags),
        "as_they_are": sorted(names - differing),
        "differing": sorted(differing),
        "refused": sorted(refused),
        "broken": [
            {"file": file.error.file, "line": file.error.line, "message": file.error.message}
            for file in loaded
            if file.error
        ],
        "duplicates": find_duplicates(loaded),
        "findings": [finding.to_dict() for finding in findings],
        **_missing(folder, loaded, pools, settings),
        "slow": {file.file: list(file.uses_threads) for file in loaded if file.uses_threads},
    }


def show_report(report: dict[str, Any], loaded: Sequence[LoadedFile]) -> None:
    has = report["environment"]
    show(
        line(f"Airflow {has['airflow']}, {noun(has['providers'], 'provider')}, Python {has['python']} ({has['path']}).")
    )
    if not has["is_tested"]:
        show(
            line(
                f"This release of Evertick is tested with Airflow {' to '.join((_SUPPORTED[0], _SUPPORTED[-1]))}.",
                "yellow",
            )
        )
    show(line(f"{noun(report['files'], 'file')} in {report['seconds']} s."))
    counts = f"{len(report['as_they_are'])} run as they are, {len(report['differing'])} differ, {len(report['refused'])} refused"
    show(heading(f"DAGs  {report['dags']}: {counts}. Tasks {report['tasks']}."))
    for problem in report["broken"]:
        place = f"{problem['file']}:{problem['line']}" if problem["line"] else problem["file"]
        show(line(f"broken   {place}  {problem['message']}", "red"))
    findings = [finding for file in loaded for finding in file.findings]
    for severity in Severity:
        for finding in (each for each in findings if each.severity is severity and each.code != _OLDER_NAMES):
            text = f"{severity:8} {finding.place}  {finding.task or finding.dag}  {finding.code} {finding.text}"
            show(line(text, _STYLES[severity]))
    for finding in (each for each in findings if each.code == _OLDER_NAMES):
        show(line(f"old      {finding.place}  {finding.text}", "dim"))
    for name, owners in report["duplicates"].items():
        show(line(f"broken   DAG {name} is defined in more than one file: {', '.join(owners)}.", "red"))
    for file, threads in report["slow"].items():
        show(
            line(
                f"slow     {file} starts threads when imported ({', '.join(threads)}): each task imports it anew",
                "yellow",
            )
        )
    for text in filter(None, (_named("connections", report), _named("variables", report), _named("pools", report))):
        show(line(f"missing  {text}", "yellow"))
    if report["connections"] or report["variables"] or report["pools"]:
        show(hint("Next: evertick airflow import connections.json variables.json pools.json"))


def _named(kind: str, report: Mapping[str, Any]) -> str:
    names = report[kind]
    if isinstance(names, Mapping):
        names = [f"{name} ({noun(count, 'task')})" for name, count in sorted(names.items())]
    return f"{kind}: {', '.join(names)}" if names else ""


def _missing(
    folder: Path, loaded: Sequence[LoadedFile], pools: Mapping[str, int], settings: Settings
) -> dict[str, Any]:
    """What the files name and the installation does not have; all of it, if there is no installation yet."""
    each = [named_values((folder / file.file).read_bytes()) for file in loaded]
    named = NamedValues(
        frozenset().union(*(values.connections for values in each)),
        frozenset().union(*(values.variables for values in each)),
    )
    named = without_environment(named, user_environment())
    try:
        stored = asyncio.run(_stored(settings))
    except EvertickError:
        stored = {"connection": set(), "variable": set(), "pool": set()}
    return {
        "connections": sorted(named.connections - stored["connection"]),
        "variables": sorted(named.variables - stored["variable"]),
        "pools": {name: count for name, count in pools.items() if name not in stored["pool"]},
    }


async def _stored(settings: Settings) -> dict[str, set[str]]:
    context = LocalContext(settings)
    try:
        async with context.read() as conn:
            found = {
                kind: {each.name for each in await secrets.names(conn, kind=kind, limit=_MOST_VALUES)}
                for kind in ("connection", "variable")
            }
            gates = await list_gates(conn, kinds=[GateKind.POOL])
            return found | {"pool": {each.name for each in gates}}
    finally:
        await context.close()
