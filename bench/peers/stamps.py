"""The task body that every engine runs, and the file in which it records its times. Standard library only, to run anywhere.

Does what the bodies of bench/dags do. Each line of the file is a label, the start and the end in seconds since 1970.
"""

import json
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path

CHAIN, WIDTH = 40, 100


def fib(number):
    return number if number < 2 else fib(number - 1) + fib(number - 2)


def body(label):
    """One task. The times are written after its end, in one atomic write."""
    started = time.time()
    print("fib(10) =", fib(10))
    line = f"{label} {started!r} {time.time()!r}\n".encode()
    file = os.open(os.environ["PEER_STAMPS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, line)
    os.close(file)


def stamped(label):
    """All (start, end) pairs of a label, ordered by start."""
    try:
        lines = _lines()
    except FileNotFoundError:
        return []
    return sorted((float(start), float(end)) for name, start, end in lines if name == label)


def wait_for(label, count, within_seconds):
    """Wait until a label has `count` pairs, and return them."""
    deadline = time.monotonic() + within_seconds
    while len(found := stamped(label)) < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"only {len(found)} of {count} bodies of {label} ran within {within_seconds} s")
        time.sleep(0.05)
    return found


def wall(spans):
    return max(end for _, end in spans) - spans[0][0]


def chain_figures(spans):
    """The duration of a chain, and the median time from the end of a body to the start of the next."""
    gaps = [after[0] - before[1] for before, after in pairwise(spans)]
    return {"chain_s": wall(spans), "gap_ms": 1000 * statistics.median(gaps)}


def tick(due):
    """The body of a scheduled task; `due` is its instant in seconds since 1970."""
    body(f"tick-{due!r}")


def late_figures(count, within_seconds):
    """The delays of scheduled bodies, for due times after the first one ran, when the engine is warm."""
    deadline = time.monotonic() + within_seconds
    while len(lates := _lates()) < count and time.monotonic() < deadline:
        time.sleep(0.1)
    return {"late_ms": 1000 * statistics.median(lates)} if lates else {}


def _lates():
    labels = [(label, float(start)) for label, start, _ in _lines() if label.startswith("tick-")]
    ticks = [(float(label.removeprefix("tick-")), start) for label, start in labels]
    awake = min((start for _, start in ticks), default=0.0)
    return [start - due for due, start in ticks if due > awake]


def _lines():
    return [line.split() for line in Path(os.environ["PEER_STAMPS"]).read_text().splitlines()]


def tell(**figures):
    """Print the figures as the last line of the script."""
    print("MEASURED " + json.dumps(figures), flush=True)
