"""Failures on purpose: a flaky source, a mirror that loses the race, a shell command, a cleanup.

`evertick dags trigger report --wait` shows a failed attempt, its retry, and the effect of each trigger rule.
"""

import asyncio

from evertick import TaskContext, dag, shell, task


@task(retries=2, retry_delay="2s")
def flaky_source(context: TaskContext) -> list[int]:
    """Fails the first time, as the network would; the second attempt succeeds."""
    if context.attempt == 1:
        raise ConnectionError("the source hung up")
    return [3, 1, 4, 1, 5, 9, 2, 6]


@task
async def mirror() -> list[int]:
    """Tasks may be async. This one is slower than it should be."""
    await asyncio.sleep(3)
    return [2, 7, 1, 8, 2, 8]


# `one_success`: start with whichever result arrives first. The other one is None then.
@task(trigger_rule="one_success", timeout="30s")
def rank(source: list[int] | None, fallback: list[int] | None) -> list[int]:
    return sorted(source or fallback or [], reverse=True)


# `one_failed` runs only if a source fails for good; here it ends as skipped, and the run still succeeds.
@task(trigger_rule="one_failed")
def alarm() -> None:
    print("A source fails: call the operator.")


@dag(tags=["example"])
def report() -> None:
    """Rank the numbers of two unreliable sources; started by hand."""
    source, fallback = flaky_source(), mirror()
    numbers = rank(source, fallback)
    # A result arrives in a shell task's environment, as text or as JSON.
    printed = shell("print_report", 'echo "ranked: $NUMBERS"; date -u', env={"NUMBERS": numbers})
    [source, fallback] >> alarm()
    # `all_done` runs in every case: use it for cleanup.
    printed >> shell("clean_up", "rm -f report.tmp", trigger_rule="all_done")
