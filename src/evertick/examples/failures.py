"""Ways to fail: what is tried again and what is not, when, and who takes over.

`evertick dags trigger failures --wait` shows it; `python failures.py` runs it right here, without a server.
"""

from evertick import Fail, RetryAfter, TaskContext, dag, task


# The service says when to come back: after that, instead of the policy's delay.
@task(retries=2, retry_delay="1m")
def throttled(context: TaskContext) -> int:
    if context.attempt == 1:
        raise RetryAfter(0.2, "too many requests")
    return 200


# Tried again for what may pass by itself, and only for that.
@task(retries=5, retry_delay="100ms", retry_on=[ConnectionError], never_on=[ConnectionRefusedError])
def unsteady(context: TaskContext) -> str:
    if context.attempt == 1:
        raise ConnectionResetError("the line was cut")
    return "connected"


# Trying again would not help: it fails at once, whatever retries it has.
@task(retries=5)
def hopeless() -> None:
    raise Fail("there is no such customer")


# Starts as soon as one task before it has failed. The run succeeds: the last tasks decide.
@task(trigger_rule="one_failed")
def take_over() -> str:
    return "somebody looks after it"


# If the run fails all the same, it begins again once, as a whole.
@dag(retries=1, tags=["example"])
def failures() -> None:
    """Three ways to fail, and one that takes over."""
    [throttled(), unsteady(), hopeless()] >> take_over()


if __name__ == "__main__":
    print(failures.test().states)
