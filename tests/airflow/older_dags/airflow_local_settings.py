"""A cluster policy."""


def task_policy(task):
    if task.task_id == "call":
        task.executor_config = {"evertick": {"isolation": "warm"}}
