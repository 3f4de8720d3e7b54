"""What Evertick does otherwise than Airflow with a DAG file, each with a code, a severity and its place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from evertick.domain.dags.findings import Finding, Severity

_R, _D, _I = Severity.REFUSED, Severity.DIFFERS, Severity.IGNORED

# By code: AF1 tasks, AF2 schedules, AF3 mapping, AF4 operators, AF5 DAGs, AF6 names of Airflow 2.
# docs/howto/airflow-files.md lists them; a test compares both.
CODES: dict[str, tuple[Severity, str]] = {
    "AF100": (_R, "the name {value!r} is not allowed here; use ASCII letters, digits, '_', '-' and '.'"),
    "AF101": (_R, "run_as_user={value!r}; start a runner as that user for a queue of its own, and set queue= instead"),
    "AF102": (_I, "executor={value!r} is ignored; queues choose where a task runs"),
    "AF103": (_D, "executor_config is ignored; choose a queue, or give the runner's pods these settings"),
    "AF104": (_I, "resources= is ignored"),
    "AF105": (
        _R,
        "executor_config['evertick'] is {value!r}; write {{'isolation': 'process'}} or {{'isolation': 'warm'}}",
    ),
    "AF110": (
        _D,
        "custom weight_rule {value} changes with each try, or needs more than the task; its first weight counts",
    ),
    "AF111": (
        _I,
        "the names in group {value!r} have no prefix (prefix_group_id=False); its tasks are shown without the group",
    ),
    "AF115": (_D, "the task's end_date {value} is ignored; only the DAG's counts"),
    "AF117": (_D, "wait_for_past_depends_before_skipping=True is ignored; the task may be skipped at once"),
    "AF120": (_D, "queue={value!r}; a runner must serve it (evertick runner --queue {value}), else the task waits"),
    "AF204": (_R, "a schedule on {value} is not supported; name the assets, and use Airflow's own mappers and windows"),
    "AF206": (
        _D,
        "catchup=True: of {value:,} runs of the past the newest 1,000 are created; use `evertick backfills create` for more",
    ),
    "AF207": (_R, "the schedule is not supported: {value}"),
    "AF301": (_R, "the names in {value!r}, a mapped task group, have no prefix; leave out prefix_group_id=False"),
    "AF303": (_R, "a mapped {value} is not supported; map a plain task"),
    "AF305": (_D, "a branch in a mapped group skips tasks of its own index; Airflow 3.2 and 3.3 run all of them"),
    "AF403": (_D, "{value}: clearing it does not clear tasks of other DAGs"),
    "AF404": (_D, "outlet {value}: its updates are not recorded; name the asset, or use an alias"),
    "AF408": (_D, "reset_dag_run=True: if the run exists, the task fails; clear that run in Evertick"),
    "AF409": (_R, "a mapped operator starts from its trigger: set start_from_trigger=False"),
    "AF502": (
        _D,
        "fail_fast=True takes about a second, and tasks after the failed one are upstream_failed, not skipped",
    ),
    "AF503": (_D, "deadline= is ignored; set a deadline alert in Evertick"),
    "AF505": (_I, "access_control is ignored; permissions are those of Evertick's users"),
    "AF508": (_D, "the schema of param {value!r} is checked when a task starts, not when the run is triggered"),
    "AF509": (_R, "the DAG has no tasks"),
    "AF601": (_I, "{value}"),
}


@dataclass(slots=True)
class Findings:
    """Collects the findings of one DAG. `lines` are where the names of its file stand."""

    file: str
    dag: str
    lines: dict[str, int]
    found: list[Finding] = field(default_factory=list)

    def add(self, code: str, value: object = None, *, task: str | None = None, line: int | None = None) -> None:
        severity, text = CODES[code]
        line = line or self._line(task) or self._line(self.dag)
        made = Finding(
            code=code,
            severity=severity,
            file=self.file,
            line=line,
            dag=self.dag,
            task=task,
            text=text.format(value=value),
        )
        if made not in self.found:
            self.found.append(made)

    @property
    def is_refused(self) -> bool:
        return any(each.severity is Severity.REFUSED for each in self.found)

    def _line(self, name: str | None) -> int | None:
        """Where the file mentions a task by its name, without its groups and the number that makes it unique."""
        if name is None:
            return None
        label = name.rpartition(".")[2]
        return self.lines.get(name) or self.lines.get(label) or self.lines.get(label.rpartition("__")[0])


def lines_of(path: Path) -> dict[str, int]:
    """The first line of each function, parameter and text in a file."""
    found: dict[str, int] = {}
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return found
    for name, line in sorted(_names(tree), key=lambda each: each[1]):
        found.setdefault(name, line)
    return found


def _names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=str(name)) | ast.AsyncFunctionDef(name=str(name)):
                yield name, node.lineno
            case ast.arg(arg=str(name)):
                yield name, node.lineno
            case ast.Constant(value=str(text)) if len(text) <= 250:
                yield text, node.lineno
