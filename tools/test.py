"""`make test`: format, lint, types, and every test: the parallel ones, then those that need the machine to themselves.

Types are checked while pytest collects. Prints what all of them print, the total, and as its last lines the ten slowest
tests. Arguments go to pytest.
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
# Many tests wait for processes, clocks and faults: on two cores all of them took 645 to 700 s with two workers, 566 to 584 s with
# three.
WORKERS = 3
SERIAL = "pytest.mark.serial"
SLOWEST = 10
NO_TESTS = 5  # pytest's word for "nothing was selected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command of the run. `report` is where pytest writes how long each test took. What is `beside` runs while the next
    one does."""

    name: str
    command: list[str]
    report: Path | None = None
    is_beside: bool = False


def stages(folder: Path, arguments: list[str]) -> list[Stage]:
    sources = [name for name in ("src", "tests", "tools", "bench") if (ROOT / name).is_dir()]
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
    """Where such tests are. To collect all the others as well, only to leave them out, takes ten seconds."""
    return [str(path) for path in sorted(folder.rglob("test_*.py")) if SERIAL in path.read_text(encoding="utf-8")]


def _name_tests(arguments: list[str]) -> bool:
    """Whether somebody wants only the tests of some place."""
    return any((ROOT / argument.partition("::")[0]).exists() for argument in arguments)


def child_environment() -> dict[str, str]:
    """What the children see: byte code is kept, whatever the caller's shell says, and no colour where nobody looks."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if environment.get("CI") == "true":
        environment |= {"NO_COLOR": "1"}
    return environment


def run_all(todo: list[Stage]) -> list[str]:
    """One after the other, but for what is beside the next; the names of those that did not go well."""
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
    """Whether it went well. What runs beside another speaks when it is over, and all at once."""
    output = subprocess.PIPE if stage.is_beside else None
    if not stage.is_beside:
        print(f"== {stage.name}", flush=True)
    done = subprocess.run(stage.command, cwd=ROOT, env=child_environment(), stdout=output, stderr=output, text=True)
    if stage.is_beside:
        print(f"\n== {stage.name}\n{done.stdout}{done.stderr}", end="", flush=True)
    return done.returncode == 0 or (stage.report is not None and done.returncode == NO_TESTS)


def slowest(reports: list[Path], count: int = SLOWEST) -> list[tuple[float, str]]:
    """The tests that took longest, set-up and tear-down included."""
    cases = [case for report in reports if report.exists() for case in ET.parse(report).iter("testcase")]
    named = [(float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}") for case in cases]
    return sorted(named, reverse=True)[:count]


def totals(reports: list[Path]) -> str:
    """All tests together, in pytest's own words."""
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
    """Install Debian's Chromium where that can be done. Without one the tests of the pages say NOT RUN, in CI as errors."""
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
    # A shell starts what runs in the background with Ctrl-C ignored, and tests of Ctrl-C would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    find_browser()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="evertick-tests-") as folder:
        todo = stages(Path(folder), arguments)
        failed = run_all(todo)
        found = slowest([stage.report for stage in todo if stage.report])
        counts = totals([stage.report for stage in todo if stage.report])
    seconds = time.monotonic() - began
    print(f"\n{'FAILED: ' + ', '.join(failed) if failed else 'All good'}: {counts} in {seconds:.2f}s")
    if seconds > LONGEST_SECONDS:
        print(f"WARNING: that is more than {LONGEST_SECONDS} s. A slow test is a bug of its own: start with these.")
    print(f"The {len(found)} slowest tests:")
    for took, name in found:
        print(f"{took:8.2f} s  {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
