"""Check the data before anybody reads it: extract again while it is incomplete, and publish only what passes."""

from evertick import Param, dag, notify, task, task_group


@task
def extract(rows: int) -> list[dict[str, int]]:
    return [{"id": number, "amount": 10 + number} for number in range(rows)]


@task
def check(rows: list[dict[str, int]], minimum: int) -> list[dict[str, int]]:
    problems = [f"{len(rows)} rows, expected {minimum}"] if len(rows) < minimum else []
    problems += [f"row {row['id']} has no amount" for row in rows if not row.get("amount")]
    if problems:
        raise ValueError("; ".join(problems))
    return rows


@task
def publish(rows: list[dict[str, int]]) -> int:
    return len(rows)


@dag(schedule="15 * * * *", on_failure=notify.email("data@example.com"))
def checked_orders(rows: int = Param(5), minimum: int = Param(3)) -> None:
    with task_group("orders", retries=2):  # a failed check repeats the extraction, too
        good = check(extract(rows), minimum)
    publish(good)
