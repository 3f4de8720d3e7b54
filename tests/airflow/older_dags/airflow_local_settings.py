"""A cluster policy. Not a DAG file: it does not mention one."""


def task_policy(task):
    if task.task_id == "call":
        task.executor_config = {"evertick": {"isolation": "warm"}}
