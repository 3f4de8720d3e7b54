"""Refreshes the parts of the documentation that come from the code: signatures, types and defaults of options, the operations of
both HTTP APIs, the tables of the database, the recipes of the cookbook, and the list of decisions.

python tools/reference.py     rewrites the pages; descriptions and examples are written by hand and kept

A new option gets a row without a description. `tests/test_reference.py` fails until somebody writes it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from evertick.api.app import _AIRFLOW
from evertick.api.auth import GuardedRoute
from evertick.domain.dags.spec import DagSpec, TaskSpec
from evertick.domain.retry import RetryPolicy
from evertick.domain.schedules.misfire import MOST_MISSED
from evertick.operations.routes import ROUTES
from evertick.sdk import (
    builder,
    dag,
    decorators,
    groups,
    local_run,
    notify,
    operators,
    options,
    params,
    runtime,
    task,
    waits,
)

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference"
TABLE = re.compile(r"^<!-- (options|operations): ([\w.]+) -->\n\n(?:\|.*\n)*", re.MULTILINE)
SIGNATURE = re.compile(r"^```pyi\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^<!-- example: (\w+\.py) -->\n(?:\n```python\n.*?^```\n)?", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| `([^`]+)` \|.*\| ([^|]*) \|$", re.MULTILINE)
WIDTH = 100

# Options that take values of many types: their annotation says less than these words.
TYPES = {
    "schedule": "text, `timedelta`, `datetime`, list or `after(...)`",
    "schedules": "dict of schedules by name",
    "retry_on": "exceptions or their names",
    "never_on": "exceptions or their names",
    **dict.fromkeys(notify.NOTICE_OPTIONS, "destination, function or list"),
}
# Defaults that other parts of the code apply.
DEFAULTS = {
    "depends_on_past": "`False`",
    "required": "`False`",
    "nullable": "`False`",
    "raise_errors": "`False`",
    "catchup_window": "1 day",
    "catchup_limit": f"{MOST_MISSED:,}",
    "max_instances": "10,000",
}
# Where the definition of a name that users write is.
HOMES: dict[str, ModuleType] = {
    "task_group": groups,
    "chain": builder,
    "dag": dag,
    "teardown": decorators,
    "short_circuit": decorators,
    "sensor": decorators,
    **dict.fromkeys(("webhook", "slack", "email", "call", "plugin"), notify),
    **dict.fromkeys(("http", "program", "trigger_dag"), operators),
    **dict.fromkeys(("shell", "override", "partial", "expand", "expand_zip", "expand_kwargs"), task),
    **dict.fromkeys(("push", "current_context", "Skip", "Fail", "RetryAfter", "Done", "test"), runtime),
    **dict.fromkeys(("wait_until", "wait_for", "wait_for_event", "approval"), waits),
    "Param": params,
    "on_calendar": importlib.import_module("evertick.domain.schedules.calendars"),
    **dict.fromkeys(
        ("calendar", "country", "exchange", "calendar_from_ics"), importlib.import_module("evertick.sdk.calendars")
    ),
    "on_event": importlib.import_module("evertick.domain.schedules.events"),
    **dict.fromkeys(("simulate", "entered"), importlib.import_module("evertick.testing")),
    **dict.fromkeys(
        ("Asset", "after", "all_of", "any_of", "each_update", "fan_out", "finished", "rollup"),
        importlib.import_module("evertick.domain.schedules.dependencies"),
    ),
    **dict.fromkeys(
        ("hourly", "daily", "weekly", "monthly", "static"),
        importlib.import_module("evertick.domain.schedules.partition_keys"),
    ),
}


# Signatures -------------------------------------------------------------------------------------------------


@cache
def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


def signature(name: str) -> str:
    """The signature of a function, method or exception as it is written; of overloads, the last one."""
    module = runtime if name == "entered" else HOMES[name]
    kinds = (ast.FunctionDef, ast.ClassDef)
    node = [each for each in ast.walk(_tree(module)) if isinstance(each, kinds) and each.name == name][-1]
    if isinstance(node, ast.ClassDef):
        made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        if not made:
            parts = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
            return f"class {name}({', '.join(parts)})"
        return _shown(f"class {name}", made[0].args, "")
    return _shown(f"def {name}", node.args, f" -> {ast.unparse(node.returns)}" if node.returns else "")


def _shown(head: str, arguments: ast.arguments, end: str) -> str:
    for group in (arguments.posonlyargs, arguments.args):
        group[:] = [each for each in group if each.arg != "self"]
    parts, depth, start = [], 0, 0
    listed = ast.unparse(arguments) + ","
    for place, character in enumerate(listed):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            part = listed[start:place].strip()
            parts.append(part.replace("=", " = ", 1) if ":" in part else part)
            start = place + 1
    line = f"{head}({', '.join(parts)}){end}"
    return line if len(line) <= WIDTH else "\n".join([f"{head}(", *(f"    {part}," for part in parts), f"){end}"])


# Options ----------------------------------------------------------------------------------------------------


def _text(value: object) -> str:
    if value is None or value in ((), {}, ""):
        return "none"
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{value!r}`"


def _default(field: str, *owners: type) -> str:
    for owner in owners:
        for each in fields(owner):
            if each.name == field and each.default is not MISSING:
                seconds = field.endswith("_seconds") and isinstance(each.default, float)
                return f"{each.default:g} s" if seconds else _text(each.default)
    return "none"


def _of_typed_dict(kind: Any, default: Callable[[str], str]) -> Iterator[tuple[str, str, str]]:
    for name, annotation in kind.__annotations__.items():
        shown = TYPES.get(name, f"`{getattr(annotation, '__forward_arg__', annotation)}`")
        # The texts of a choice are what users write; its enum is the same again.
        shown = re.sub(r"\w+ \| Literal\[(.*)\]", lambda match: match[1].replace("'", '"').replace(", ", " | "), shown)
        yield name, shown.replace("|", "\\|"), DEFAULTS.get(name) or default(name)


def _task_default(name: str) -> str:
    if name == "name":
        return "the function's name"
    return _default(options._READERS.get(name, (name,))[0], RetryPolicy if "retr" in name else TaskSpec, TaskSpec)


def _dag_default(name: str) -> str:
    if name in ("name", "description"):
        return "the function's name" if name == "name" else "its docstring"
    return _default(dag._READERS.get(name, (name,))[0], DagSpec)


def _argument_default(function: Any) -> Callable[[str], str]:
    given = inspect.signature(function).parameters

    def find(name: str) -> str:
        return _text(given[name].default) if name in given else "none"

    return find


def _own(kind: Any, base: Any) -> Any:
    """The options that a kind adds to its base."""
    names = [name for name in kind.__annotations__ if name not in base.__annotations__]
    return type("Own", (), {"__annotations__": {name: kind.__annotations__[name] for name in names}})


def _of_context() -> Iterator[tuple[str, str, str]]:
    for each in fields(runtime.TaskContext):
        yield each.name, f"`{each.type}`".replace("|", "\\|"), ""
    for name, value in vars(runtime.TaskContext).items():
        if isinstance(value, property):
            yield name, f"`{inspect.get_annotations(value.fget)['return']}`", ""


def option_tables() -> Mapping[str, list[tuple[str, str, str]]]:
    """The names, types and defaults of each table of options."""
    base = options.TaskOptions
    tables = {
        "DagOptions": _of_typed_dict(dag.DagOptions, _dag_default),
        "TaskOptions": _of_typed_dict(base, _task_default),
        "ShortCircuitOptions": _of_typed_dict(
            _own(decorators.ShortCircuitOptions, base), _argument_default(decorators.TaskDecorator.short_circuit)
        ),
        "SensorOptions": _of_typed_dict(
            _own(decorators.SensorOptions, base), _argument_default(decorators.TaskDecorator.sensor)
        ),
        "TeardownOptions": _of_typed_dict(
            _own(decorators.TeardownOptions, base), _argument_default(decorators.teardown)
        ),
        "ParamOptions": _of_typed_dict(params.ParamOptions, lambda name: "the default's" if name == "type" else "none"),
        "LocalRunOptions": _of_typed_dict(local_run.LocalRunOptions, lambda name: "none"),
        "TaskContext": _of_context(),
    }
    return {name: list(rows) for name, rows in tables.items()}


# Operations and tables --------------------------------------------------------------------------------------


def native_rows() -> list[str]:
    rows = ["| Request | Permission | Description |", "|---|---|---|"]
    for route in ROUTES:
        about = (inspect.getdoc(route.function) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        rows.append(f"| `{route.method} {route.path}` | `{route.permission}` | {about} |")
    return rows


def airflow_rows() -> list[str]:
    rows = ["| Request | Permission |", "|---|---|"]
    for router in _AIRFLOW:
        for route in router.routes:
            if isinstance(route, GuardedRoute) and route.include_in_schema:
                rows += [
                    f"| `{method} {route.path}` | `{route.permission}` |" for method in sorted(route.methods or ())
                ]
    return rows


def database_page() -> str:
    """The tables as the migrations create them: their comments explain them."""
    parts = [
        "# Database schema",
        "",
        "All tables are in the schema `evertick`. [Architecture](../explanation/architecture.md#3-tables) explains their"
        " groups, and the [decisions](../decisions/0001-table-layout.md) the reasons. Read the tables as you like, but never"
        " write to them: use the [HTTP API](http-api.md). Their layout may change with each release.",
        "",
        "`python tools/reference.py` writes this page from `src/evertick/db/migrations`.",
    ]
    for path in sorted((ROOT / "src/evertick/db/migrations").glob("*.sql")):
        sections = re.split(r"^-- (.*?) -{20,}\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for title, body in zip(sections[1::2], sections[2::2], strict=True):
            tables = [
                each for each in re.split(r"\n\n+", body) if re.search(r"^create (table|type)", each, re.MULTILINE)
            ]
            if tables:
                parts += ["", f"## {title}", "", "```sql", "\n\n".join(each.strip() for each in tables), "```"]
    return "\n".join(parts) + "\n"


# Pages ------------------------------------------------------------------------------------------------------


def refreshed(text: str) -> str:
    """The page with its generated parts as the code has them now."""
    tables = option_tables()

    def table(match: re.Match[str]) -> str:
        kind, name = match[1], match[2]
        if kind == "operations":
            lines = native_rows() if name == "v1" else airflow_rows()
        else:
            about = dict(ROW.findall(match[0]))
            has_default = any(default for _, _, default in tables[name])
            lines = ["| Option | Type | Default | Description |", "|---|---|---|---|"]
            lines = lines if has_default else ["| Name | Type | Description |", "|---|---|---|"]
            for option, kind_of, default in tables[name]:
                cells = [f"`{option}`", kind_of, *([default] if has_default else []), about.get(option, "")]
                lines.append(f"| {' | '.join(cells)} |")
        return f"<!-- {match[1]}: {name} -->\n\n" + "\n".join(lines) + "\n"

    def signatures(match: re.Match[str]) -> str:
        names = re.findall(r"^(?:def|class) (\w+)", match[1], re.MULTILINE)
        return "```pyi\n" + "\n".join(signature(name) for name in names) + "\n```"

    def example(match: re.Match[str]) -> str:
        code = (ROOT / "examples" / match[1]).read_text(encoding="utf-8").strip()
        return f"<!-- example: {match[1]} -->\n\n```python\n{code}\n```\n"

    return EXAMPLE.sub(example, SIGNATURE.sub(signatures, TABLE.sub(table, text)))


def decisions_page() -> str:
    head, _, _ = (PAGES.parent / "decisions/index.md").read_text(encoding="utf-8").partition("\n- [")
    found = sorted((PAGES.parent / "decisions").glob("0*.md"))
    titles = [path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for path in found]
    return head + "\n" + "".join(f"- [{title}]({path.name})\n" for path, title in zip(found, titles, strict=True))


def pages() -> Iterator[tuple[Path, str]]:
    """Each generated page with the text that it should have."""
    for name in ("reference/sdk.md", "reference/http-api.md", "howto/cookbook.md"):
        yield PAGES.parent / name, refreshed((PAGES.parent / name).read_text(encoding="utf-8"))
    yield PAGES / "database.md", database_page()
    yield PAGES.parent / "decisions/index.md", decisions_page()


def main() -> None:
    for path, text in pages():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
