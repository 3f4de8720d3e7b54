"""Failures: which are retried, when, and which task takes over.

`evertick dags trigger failures --wait` shows it; `python failures.py` runs it in this process, without a server.
"""

from evertick import Fail, RetryAfter, TaskContext, dag, task


# The service says when to retry: that delay replaces the policy's.
@task(retries=2, retry_delay="1m")
def throttled(context: TaskContext) -> int:
    if context.attempt == 1:
        raise RetryAfter(0.2, "too many requests")
    return 200


# Retried only for temporary errors.
@task(retries=5, retry_delay="100ms", retry_on=[ConnectionError], never_on=[ConnectionRefusedError])
def unsteady(context: TaskContext) -> str:
    if context.attempt == 1:
        raise ConnectionResetError("the line was cut")
    return "connected"


# A retry would not help: it fails at once, despite its retries.
@task(retries=5)
def hopeless() -> None:
    raise Fail("there is no such customer")


# Starts as soon as one upstream task has failed. The run succeeds: the last tasks decide.
@task(trigger_rule="one_failed")
def take_over() -> None:
    print("calling an operator")


# If the run fails anyway, it is retried once, as a whole.
@dag(retries=1, tags=["example"])
def failures() -> None:
    """Three ways to fail, and one that takes over."""
    [throttled(), unsteady(), hopeless()] >> take_over()


if __name__ == "__main__":
    print(failures.test().states)
