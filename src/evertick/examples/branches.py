"""Paths through a DAG: a branch that chooses, a short-circuit that stops, and a teardown that always cleans up.

`evertick dags trigger branches --param amount=5000 --wait` takes the long path; without the parameter it takes the short one.
`python branches.py` runs it in this process, without a server.
"""

from evertick import Param, TaskContext, dag, setup, task, task_group, teardown


@setup
def open_ledger() -> str:
    return "ledger-7"


@task.branch
def by_amount(context: TaskContext) -> str:
    """Returns the name of a task or a group directly after it; the others are skipped."""
    return "review" if context.params["amount"] > 1000 else "book"


@task
def book() -> str:
    return "booked at once"


@task
def ask() -> bool:
    return True


# A false result skips everything downstream.
@task.short_circuit
def is_agreed(answer: bool) -> bool:
    return answer


@task
def book_reviewed() -> str:
    return "booked after a review"


# One of the two paths is skipped: `none_failed_min_one_success` continues if the other one succeeded.
@task(trigger_rule="none_failed_min_one_success")
def report(short: str | None, long: str | None) -> str:
    return short or long or "nothing was booked"


# Runs once everything upstream has ended, if the ledger was opened. It does not affect the state of the run.
@teardown
def close_ledger(ledger: str) -> None:
    print("closing", ledger)


@dag(params={"amount": Param(100, minimum=0)}, tags=["example"])
def branches() -> None:
    """Book an amount; a large one is reviewed first."""
    ledger = open_ledger()
    way = by_amount()
    short = book()
    with task_group("review"):
        answer = ask()
        agreed = is_agreed(answer)
        long = book_reviewed()
        agreed >> long
    ledger >> way >> [short, answer]
    report(short, long) >> close_ledger(ledger)


if __name__ == "__main__":
    print(branches.test(params={"amount": 5000}).states)
