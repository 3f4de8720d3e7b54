"""DBOS: a workflow of steps, a queue of workflows, a schedule with seconds. `python with_dbos.py [tuned]`."""

import os
import sys
from importlib.metadata import version

import stamps
from dbos import DBOS, DBOSConfig

SINGLES = 300
TICKS = 5
TUNED = {"polling_interval_sec": 0.05}

DBOS(config=DBOSConfig(name="peer", system_database_url=os.environ["PEER_URL"], run_admin_server=False))


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
    for each in [DBOS.enqueue_workflow("light", single, "fan") for _ in range(stamps.WIDTH)]:
        each.get_result()
    light("fan")


@DBOS.workflow()
def tick(scheduled_at, context):
    stamps.tick(scheduled_at.timestamp())


def main():
    DBOS.launch()
    DBOS.register_queue("light", **(TUNED if sys.argv[1:] == ["tuned"] else {}))
    DBOS.create_schedule(schedule_name="tick", workflow_fn=tick, schedule="*/5 * * * * *")
    DBOS.start_workflow(single, "warm-up").get_result()
    DBOS.start_workflow(chain).get_result()
    figures = stamps.chain_figures(stamps.wait_for("chain", stamps.CHAIN, 60))
    DBOS.start_workflow(fan).get_result()
    figures["fan_s"] = stamps.wall(stamps.wait_for("fan", stamps.WIDTH + 2, 90))
    for _ in range(SINGLES):
        DBOS.enqueue_workflow("light", single, "single")
    figures["runs_per_s"] = SINGLES / stamps.wall(stamps.wait_for("single", SINGLES, 90))
    stamps.tell(version=version("dbos"), **figures, **stamps.late_figures(TICKS, 75))
    DBOS.destroy()


if __name__ == "__main__":
    main()
    # Its threads would keep the process alive.
    os._exit(0)
