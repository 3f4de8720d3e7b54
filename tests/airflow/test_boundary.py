"""Where Airflow may be imported, and that the how-to page has every finding."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

from evertick.airflow.findings import CODES
from tests.source_tree import ROOT, SOURCE

# The only modules that import Airflow, and so only in an interpreter that has it.
IN_AIRFLOW = {
    f"airflow/{name}"
    for name in (
        *(
            "assets",
            "attempt",
            "loader",
            "messages",
            "older",
            "partitions",
            "runs",
            "shortcuts",
            "side_door",
            "state_stores",
            "timetables",
            "triggers",
        ),
        "warm",
    )
}


def test_only_the_modules_that_run_in_airflows_interpreter_import_it() -> None:
    imports = re.compile(r"^\s*(?:from|import) airflow\b", re.MULTILINE)
    paths = [path for path in SOURCE.rglob("*.py") if imports.search(path.read_text(encoding="utf-8"))]
    found = {str(path.relative_to(SOURCE).with_suffix("")) for path in paths}
    assert found == IN_AIRFLOW


def test_no_process_of_evertick_loads_these_modules() -> None:
    """Every module that a service or a command starts with."""
    roots = (
        "cli.main",
        "runner.session",
        "publisher.publisher",
        "scheduler.scheduler",
        "api.app",
        "attempts.fork_server",
    )
    roots += ("bundles.loader_process", "cli.commands.airflow", "agent.agent")
    code = f"import sys\nfor name in {roots!r}: __import__('evertick.' + name)\nprint([n for n in sys.modules if 'airflow' in n])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(done.stdout))
    assert not [name for name in loaded if name.partition(".")[0] == "airflow"]
    assert not {f"evertick.{name.replace('/', '.')}" for name in IN_AIRFLOW} & loaded


def test_the_how_to_page_lists_every_finding() -> None:
    page = (ROOT / "docs" / "howto" / "airflow-files.md").read_text()
    assert set(re.findall(r"AF\d{3}", page)) == set(CODES)
