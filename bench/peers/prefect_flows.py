"""The workloads as Prefect flows: served by `serve` and `serve_tick`, measured by `measure`. Needs its server's settings."""

import subprocess
import sys
import time
from pathlib import Path

import prefect
import stamps
from prefect import flow, task
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run

SINGLES = 12
TICKS = 3


@task
def light(label):
    stamps.body(label)


@flow
def chain():
    for _ in range(stamps.CHAIN):
        light("chain")


@flow
def fan():
    light("fan")
    for future in [light.submit("fan") for _ in range(stamps.WIDTH)]:
        future.result()
    light("fan")


@flow
def single(label: str = "single"):
    light(label)


@flow
def tick():
    stamps.tick(flow_run.scheduled_start_time.timestamp())


def start(name, within_seconds=60, **options):
    """Start a run of a deployment, as soon as there is one."""
    deadline = time.monotonic() + within_seconds
    while True:
        try:
            return run_deployment(f"{name}/peer", timeout=0, **options)
        except ObjectNotFound:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def measure():
    start("single", parameters={"label": "warm-up"})
    stamps.wait_for("warm-up", 1, 90)
    start("chain")
    figures = stamps.chain_figures(stamps.wait_for("chain", stamps.CHAIN, 90))
    start("fan")
    figures["fan_s"] = stamps.wall(stamps.wait_for("fan", stamps.WIDTH + 2, 90))
    for _ in range(SINGLES):
        start("single")
    figures["runs_per_s"] = SINGLES / stamps.wall(stamps.wait_for("single", SINGLES, 120))
    ticking = subprocess.Popen([sys.executable, Path(__file__), "serve_tick"])
    figures |= stamps.late_figures(TICKS, 100)
    ticking.terminate()
    ticking.wait(60)
    return figures


if __name__ == "__main__":
    match sys.argv[1]:
        case "serve":
            prefect.serve(*(each.to_deployment(name="peer") for each in (chain, fan, single)))
        case "serve_tick":
            tick.serve(name="peer", interval=5)
        case "measure":
            stamps.tell(version=prefect.__version__, **measure())
