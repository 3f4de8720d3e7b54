"""`make test`: format, lint, type checks and all tests: first the parallel ones, then the serial ones.

Types are checked while pytest collects. Prints the output of all stages, the total, and as its last lines the ten slowest
tests. Arguments are passed to pytest.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
LONGEST_SECONDS = 600
# Many tests wait for processes, clocks and faults: on two cores the whole suite took 645 to 700 s with two workers and
# 566 to 584 s with three.
WORKERS = 3
SERIAL = "pytest.mark.serial"
SLOWEST = 10
MOST_REPEATED = 3
NO_TESTS = 5  # pytest's exit code for "no tests selected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command of the run. `report` is pytest's JUnit file with durations. A stage with `beside` runs concurrently with
    the next one."""

    name: str
    command: list[str]
    report: Path | None = None
    is_beside: bool = False


def stages(folder: Path, arguments: list[str]) -> list[Stage]:
    sources = [name for name in ("src", "tests", "tools", "bench", "examples") if (ROOT / name).is_dir()]
    parallel, serial = folder / "parallel.xml", folder / "serial.xml"
    pytest = [sys.executable, "-m", "pytest", *arguments]
    together = ["-n", str(WORKERS), "--dist", "worksteal", "-m", "not serial", f"--junit-xml={parallel}"]
    alone = ["-m", "serial", f"--junit-xml={serial}", *([] if _name_tests(arguments) else serial_files())]
    return [
        Stage(name="format", command=[str(BIN / "ruff"), "format", "--check", *sources]),
        Stage(name="lint", command=[str(BIN / "ruff"), "check", *sources]),
        Stage(name="types", command=[str(BIN / "mypy")], is_beside=True),
        Stage(name="tests", command=[*pytest, *together], report=parallel),
        Stage(name="tests on their own", command=[*pytest, *alone], report=serial),
    ]


def serial_files(folder: Path = ROOT / "tests") -> list[str]:
    """The files with serial tests. Collecting all other files only to deselect them takes ten seconds."""
    return [str(path) for path in sorted(folder.rglob("test_*.py")) if SERIAL in path.read_text(encoding="utf-8")]


def _name_tests(arguments: list[str]) -> bool:
    """Whether the arguments select certain tests."""
    return any((ROOT / argument.partition("::")[0]).exists() for argument in arguments)


def child_environment() -> dict[str, str]:
    """The environment of the stages: byte code is written whatever the caller's shell sets, and no colors without a terminal."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if environment.get("CI") == "true":
        environment |= {"NO_COLOR": "1"}
    return environment


def run_all(todo: list[Stage]) -> list[str]:
    """Run the stages in order, `beside` stages concurrently. Returns the names of the failed ones."""
    failed: list[str] = []
    aside: list[threading.Thread] = []

    def one(stage: Stage) -> None:
        if not run(stage):
            failed.append(stage.name)

    for stage in todo:
        if stage.is_beside:
            aside.append(threading.Thread(target=one, args=(stage,)))
            aside[-1].start()
            continue
        one(stage)
        for thread in aside:
            thread.join()
    return failed


def run(stage: Stage) -> bool:
    """Run one stage; a concurrent one prints its output at its end. Returns whether it succeeded."""
    output = subprocess.PIPE if stage.is_beside else None
    if not stage.is_beside:
        print(f"== {stage.name}", flush=True)
    done = subprocess.run(stage.command, cwd=ROOT, env=child_environment(), stdout=output, stderr=output, text=True)
    if stage.is_beside:
        print(f"\n== {stage.name}\n{done.stdout}{done.stderr}", end="", flush=True)
    return done.returncode == 0 or (stage.report is not None and done.returncode == NO_TESTS)


def failed_tests(report: Path | None) -> list[str]:
    """The failed tests, as pytest names them."""
    if report is None or not report.exists():
        return []
    cases = ET.parse(report).iter("testcase")
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return [f"{str(case.get('classname')).replace('.', '/')}.py::{case.get('name')}" for case in bad]


def repeat(tests: list[str]) -> Stage:
    """On a busy machine a test may fail that is right: it is run once more, alone, and reported."""
    return Stage(name="failed tests, alone", command=[sys.executable, "-m", "pytest", *tests])


def slowest(reports: list[Path], count: int = SLOWEST) -> list[tuple[float, str]]:
    """The slowest tests, including setup and teardown."""
    cases = [case for report in reports if report.exists() for case in ET.parse(report).iter("testcase")]
    named = [(float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}") for case in cases]
    return sorted(named, reverse=True)[:count]


def totals(reports: list[Path]) -> str:
    """The total counts, in pytest's format."""
    suites = [suite for report in reports if report.exists() for suite in ET.parse(report).iter("testsuite")]
    count = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    words = [
        (count["failures"], "failed"),
        (passed, "passed"),
        (count["skipped"], "skipped"),
        (count["errors"], "errors"),
    ]
    return ", ".join(f"{number} {word}" for number, word in words if number or word == "passed")


def find_browser() -> None:
    """Install Debian's Chromium if possible. Without it the browser tests are reported as NOT RUN, in CI as errors."""
    names = ("chromium", "chromium-browser", "google-chrome")
    if any(shutil.which(name) for name in names) or not shutil.which("apt-get") or os.geteuid() != 0:
        return
    print("== browser", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", "chromium"]):
        if subprocess.run(["apt-get", *command], env=environment, stdout=subprocess.DEVNULL).returncode:
            print("Chromium could not be installed.", flush=True)
            return


def main(arguments: list[str]) -> int:
    # A shell starts background jobs with SIGINT ignored, and tests of Ctrl-C would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    find_browser()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="evertick-tests-") as folder:
        todo = stages(Path(folder), arguments)
        failed = run_all(todo)
        unstable = failed_tests(todo[-2].report) if failed == ["tests"] else []
        if 0 < len(unstable) <= MOST_REPEATED and run(repeat(unstable)):
            failed = []
        found = slowest([stage.report for stage in todo if stage.report])
        counts = totals([stage.report for stage in todo if stage.report])
    seconds = time.monotonic() - began
    verdict = (
        f"FAILED: {', '.join(failed)}" if failed else "Passed, some at the second try" if unstable else "All passed"
    )
    print(f"\n{verdict}: {counts} in {seconds:.2f}s")
    if unstable and not failed:
        print(
            "WARNING: failed next to others and passed alone. Each is a bug, in the test or in Evertick:",
            *unstable,
            sep="\n  ",
        )
    if seconds > LONGEST_SECONDS:
        print(f"WARNING: more than {LONGEST_SECONDS} s. Slow tests are bugs; start with these.")
    print(f"The {len(found)} slowest tests:")
    for took, name in found:
        print(f"{took:8.2f} s  {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
