"""DBOS: a workflow of steps, a queue of workflows, a schedule with seconds. `python with_dbos.py [tuned]`."""

import os
import sys
import time
from importlib.metadata import version

import stamps
from dbos import DBOS, DBOSConfig, Queue

SINGLES = 300
TICKS = 5
IS_TUNED = sys.argv[1:] == ["tuned"]

DBOS(config=DBOSConfig(name="peer", system_database_url=os.environ["PEER_URL"], run_admin_server=False))
queue = Queue("light", **({"polling_interval_sec": 0.05, "worker_concurrency": 8} if IS_TUNED else {}))


@DBOS.step()
def light(label):
    stamps.body(label)


@DBOS.workflow()
def single(label):
    light(label)


@DBOS.workflow()
def chain():
    for _ in range(stamps.CHAIN):
        light("chain")


@DBOS.workflow()
def fan():
    light("fan")
    for each in [queue.enqueue(single, "fan") for _ in range(stamps.WIDTH)]:
        each.get_result()
    light("fan")


@DBOS.scheduled("*/5 * * * * *")
@DBOS.workflow()
def tick(scheduled_at, actual_at):
    stamps.body(f"tick-{int(scheduled_at.timestamp())}")


def main():
    DBOS.launch()
    DBOS.start_workflow(single, "warm-up").get_result()
    DBOS.start_workflow(chain).get_result()
    figures = stamps.chain_figures(stamps.wait_for("chain", stamps.CHAIN, 60))
    DBOS.start_workflow(fan).get_result()
    figures["fan_s"] = stamps.wall(stamps.wait_for("fan", stamps.WIDTH + 2, 90))
    for _ in range(SINGLES):
        queue.enqueue(single, "single")
    figures["runs_per_s"] = SINGLES / stamps.wall(stamps.wait_for("single", SINGLES, 90))
    now = int(time.time())
    due = [now - now % 5 + 5 * number for number in range(1, TICKS + 1)]
    late = [stamps.wait_for(f"tick-{instant}", 1, 60)[0][0] - instant for instant in due]
    stamps.tell(version=version("dbos"), **figures, **stamps.late_figures(late))
    DBOS.destroy()


if __name__ == "__main__":
    main()
    # Its threads would keep the process alive.
    os._exit(0)
