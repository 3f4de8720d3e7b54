"""Train on machines with a GPU, and prepare the data elsewhere. If all GPUs are busy for too long, use the CPU.

evertick runner --queues gpu --slots 1
"""

from evertick import chain, dag, task


@task
def prepare() -> list[float]:
    return [0.1, 0.2, 0.3]


@task(queue="gpu", queue_timeout="30m", timeout="6h", priority=8, on_lost_contact="stop")
def train(rows: list[float]) -> float:
    return sum(rows)


@task(trigger_rule="one_failed", timeout="12h")
def train_on_cpu(rows: list[float]) -> float:
    return sum(rows)


@task(trigger_rule="one_success")
def publish() -> str:
    return "published"


@dag(schedule="0 1 * * SUN")
def weekly_training() -> None:
    rows = prepare()
    trained = train(rows)
    instead = train_on_cpu(rows)
    chain(trained, instead)
    chain([trained, instead], publish())
