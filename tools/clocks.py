"""`make clocks`: runs the tests at other dates and in other time zones. No result may depend on the current time.

python tools/clocks.py [--at "2028-02-29 23:59:30" --zone Asia/Kathmandu] [PYTEST ARGUMENTS]

The clock continues from that moment (UTC), for the tests and every process they start, including PostgreSQL. Needs
libfaketime (Debian package `faketime`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.chaos.machine import FAKETIME, lacks_false_clock, sweep_clock_memory  # noqa: E402  the lines above make it importable

# Ends of a day, a month, a leap year and a year, clock changes, and a date after all dates written in tests.
MOMENTS = (
    ("2027-12-31 23:59:30", "America/St_Johns"),
    ("2028-02-29 23:59:30", "Asia/Kathmandu"),
    ("2027-03-28 00:59:30", "Europe/Berlin"),
    ("2027-11-07 05:59:30", "America/New_York"),
    ("2033-07-15 12:00:00", "UTC"),
)
# time.sleep waits for an instant of the monotonic clock, which libfaketime misinterprets and refuses.
_SITE = """
import select, time
time.sleep = lambda seconds: select.select([], [], [], seconds) and None
"""
# Without tests that set clocks themselves or measure time.
SKIPPED = {"chaos", "deploy", "executors", "system", "ui", "__pycache__"}
FOLDERS = [path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name not in SKIPPED]
TESTS = [*(f"tests/{name}" for name in sorted(FOLDERS)), "tests/executors/local"]


def as_of(moment: datetime, zone: str, folder: str = "") -> dict[str, str]:
    """The environment of a process that sees `moment` as the current time. `folder` contains Python's sitecustomize."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "PYTHONDONTWRITE"))}
    ahead = moment.timestamp() - time.time()
    clock = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": f"{ahead:+.0f}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    return {**inherited, **clock, "TZ": zone, "LANG": "C", "PYTHONPATH": folder}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make clocks", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--at", type=datetime.fromisoformat, help="the moment, in UTC (default: several, one after the other)"
    )
    parser.add_argument("--zone", default="UTC", help="the time zone of the machine (default: %(default)s)")
    options, others = parser.parse_known_args(arguments)
    if missing := lacks_false_clock():
        print(f"This {missing}.", file=sys.stderr)
        return 2
    chosen = (
        [(options.at, options.zone)] if options.at else [(datetime.fromisoformat(at), zone) for at, zone in MOMENTS]
    )
    paths = [] if any((ROOT / each.partition("::")[0]).exists() for each in others) else TESTS
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", *paths, *others]
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(_SITE)
        for moment, zone in chosen:
            print(f"== {moment} UTC, {zone}", flush=True)
            done = subprocess.run(command, cwd=ROOT, env=as_of(moment.replace(tzinfo=UTC), zone, folder))
            failed += [f"{moment} UTC, {zone}"] if done.returncode else []
            sweep_clock_memory()
    print(f"FAILED: {'; '.join(failed)}" if failed else "All tests passed at every moment.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
