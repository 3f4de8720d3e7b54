"""`make lowest`: tests with the oldest release of each direct dependency that pyproject.toml allows, extras included.

    python tools/lowest.py [PYTEST ARGUMENTS]

Left out are tests whose tools ask for newer releases (Airflow's client, generated requests, the generated client), and
tests in a browser. Needs the package index.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
VENV = ROOT / ".venv-lowest"
UV = str(Path(sys.executable).with_name("uv"))
# Each dependency has tests among these: the API with its document, the command line, pages, metrics, storage of secrets,
# the embedded PostgreSQL, the runner with its processes, traces and Kubernetes.
TESTS = (
    *("tests/domain", "tests/sdk", "tests/secrets", "tests/attempts", "tests/bundles", "tests/executors"),
    *("tests/observability", "tests/publisher", "tests/runner", "tests/scheduler", "tests/supervisor"),
    *("tests/client", "tests/cli", "tests/api", "tests/ui", "tests/test_sql.py", "tests/test_testing.py"),
)
# Tools that ask for newer releases; and browsers, which show what the other tests of pages have read.
NEED_TOOLS = ("airflow_client", "schemathesis", "openapi_python_client", "playwright")
# Type checkers judge the newest libraries.
TYPES = "tests/sdk/test_types.py"


def unusable() -> list[str]:
    """The test files that import such a tool, or a module of the tests that does."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py")}
    modules, found = set(NEED_TOOLS), set[str]()
    while more := {
        path
        for path, text in texts.items()
        if path not in found and re.search(rf"^\s*(?:import|from) (?:{'|'.join(modules)})\b", text, re.MULTILINE)
    }:
        found |= more
        modules |= {re.escape(path.removesuffix(".py").replace("/", ".")) for path in more}
    return [TYPES, *sorted(path for path in found if Path(path).name.startswith("test_"))]


def uv(*arguments: object) -> None:
    command = [UV, *map(str, arguments)]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        sys.exit(f"{' '.join(command)} failed.")


def install() -> None:
    uv("venv", "--quiet", "--clear", "--seed", "--python", os.environ.get("PYTHON") or sys.executable, VENV)
    pins = VENV / "lowest.txt"
    # The lowest of what pyproject.toml names; what those need in turn is not ours to choose.
    lowest = ("--resolution", "lowest-direct", "--python", VENV / "bin" / "python", "--all-extras", "--no-header")
    uv("pip", "compile", "--quiet", *lowest, "--output-file", pins, "pyproject.toml")
    uv("pip", "install", "--quiet", "--python", VENV, "--requirement", pins, "--group", "test", "--group", "build")
    uv("pip", "install", "--quiet", "--python", VENV, "--no-deps", "--no-build-isolation", "--editable", ".")


def main(arguments: Sequence[str]) -> int:
    # A shell starts background jobs with SIGINT ignored, and tests of Ctrl-C would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    install()
    tests = [*(arguments or TESTS), *(f"--ignore={each}" for each in unusable())]
    command = [VENV / "bin" / "python", "-m", "pytest", "-n", "2", "--dist", "worksteal", "-rfE", *tests]
    return subprocess.run([str(each) for each in command], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
