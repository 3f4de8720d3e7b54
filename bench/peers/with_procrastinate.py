"""Procrastinate: independent jobs, and a schedule with seconds. It has no graphs. `python with_procrastinate.py [tuned]`."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import procrastinate
import stamps

SINGLES = 600
TICKS = 5

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=os.environ["PEER_URL"]))


@app.task(name="light")
def light(label):
    stamps.body(label)


@app.periodic(cron="* * * * * */5")
@app.task(name="tick")
def tick(timestamp):
    stamps.tick(timestamp)


def measure():
    with app.open():
        light.defer(label="warm-up")
        stamps.wait_for("warm-up", 1, 60)
        light.batch_defer(*({"label": "single"} for _ in range(SINGLES)))
    spans = stamps.wait_for("single", SINGLES, 90)
    return {"runs_per_s": SINGLES / stamps.wall(spans)}


def main():
    program = [sys.executable, "-m", "procrastinate", "--app=with_procrastinate.app"]
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here)}
    subprocess.run([*program, "schema", "--apply"], check=True, cwd=here, env=environment)
    options = ["--concurrency=4"] if sys.argv[1:] == ["tuned"] else []
    worker = subprocess.Popen([*program, "worker", *options], cwd=here, env=environment)
    try:
        figures = measure()
        figures |= stamps.late_figures(TICKS, 60)
    finally:
        worker.terminate()
        worker.wait(30)
    stamps.tell(version=version("procrastinate"), **figures)


if __name__ == "__main__":
    main()
