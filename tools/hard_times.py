"""`make hard`: runs the tests in random order on a busy machine, with foreign sessions on their server. All must pass.

python tools/hard_times.py [--seed N --hogs N --times N] [PYTEST ARGUMENTS]
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_HOG = "while True: sum(range(10_000))"
# Read by tests/hard_times.py.
_SEED = "EVERTICK_TEST_ORDER"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make hard", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, help="seed of the test order (default: random)")
    parser.add_argument("--hogs", type=int, default=2, help="number of busy-loop processes (default: %(default)s)")
    parser.add_argument(
        "--times", type=int, default=1, help="number of runs, each in another order (default: %(default)s)"
    )
    options, others = parser.parse_known_args(arguments)
    first = options.seed if options.seed is not None else random.randrange(10_000)
    together = ["-n", "3", "--dist", "worksteal", "-m", "not serial"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.hard_times", *together, *others]
    failed = []
    hogs = [subprocess.Popen([sys.executable, "-c", _HOG]) for _ in range(options.hogs)]
    try:
        for seed in range(first, first + options.times):
            print(f"== order {seed}, {options.hogs} busy processes", flush=True)
            done = subprocess.run(command, cwd=ROOT, env={**os.environ, _SEED: str(seed)})
            failed += [str(seed)] if done.returncode else []
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    print(f"FAILED with SEED={', '.join(failed)}" if failed else "All tests passed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
