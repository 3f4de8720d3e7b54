"""Celery with Redis: chain, chord, independent tasks, and a minute of beat. `python with_celery.py [tuned]`."""

import os
import subprocess
import sys
from pathlib import Path

import celery
import stamps
from celery import chain, chord, group
from celery.schedules import crontab

SINGLES = 2_000
TUNED = ["--concurrency=4", "-Ofair", "--without-gossip", "--without-mingle", "--without-heartbeat"]

app = celery.Celery("with_celery", broker=os.environ["PEER_REDIS"], backend=os.environ["PEER_REDIS"])
app.conf.beat_schedule = {"minute": {"task": "with_celery.light", "schedule": crontab(), "args": ("tick",)}}
app.conf.beat_schedule_filename = str(Path(os.environ["PEER_FOLDER"]) / "beat")


@app.task
def light(label):
    stamps.body(label)


def measure():
    light.delay("warm-up")
    stamps.wait_for("warm-up", 1, 60)
    chain(light.si("chain") for _ in range(stamps.CHAIN)).delay()
    figures = stamps.chain_figures(stamps.wait_for("chain", stamps.CHAIN, 60))
    first = light.si("fan")
    (first | chord(group(light.si("fan") for _ in range(stamps.WIDTH)), light.si("fan"))).delay()
    figures["fan_s"] = stamps.wall(stamps.wait_for("fan", stamps.WIDTH + 2, 60))
    group(light.si("single") for _ in range(SINGLES)).delay()
    figures["runs_per_s"] = SINGLES / stamps.wall(stamps.wait_for("single", SINGLES, 60))
    return figures


def main():
    celery_program = [sys.executable, "-m", "celery", "-A", "with_celery"]
    options = TUNED if sys.argv[1:] == ["tuned"] else []
    here = Path(__file__).parent
    worker = subprocess.Popen([*celery_program, "worker", *options], cwd=here)
    beat = subprocess.Popen([*celery_program, "beat"], cwd=here)
    try:
        figures = measure()
        # Its crontab has a resolution of one minute: the next minute is the sample.
        ((start, _), *_) = stamps.wait_for("tick", 1, 75)
        figures["late_ms"] = 1000 * (start % 60)
    finally:
        for process in (beat, worker):
            process.terminate()
            process.wait(30)
    stamps.tell(version=celery.__version__, **figures)


if __name__ == "__main__":
    main()
