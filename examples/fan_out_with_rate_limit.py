"""One task per customer, at most 10 requests in any second and 4 at once, across all DAGs that use the key."""

from evertick import dag, task


@task
def customers() -> list[str]:
    return [f"customer-{number}" for number in range(20)]


@task(rate={"crm": "10/1s"}, parallel={"crm": 4}, retries=3, isolation="warm")
def sync(customer: str) -> int:
    return len(customer)


@task
def total(counts: list[int]) -> int:
    return sum(counts)


@dag(schedule="0 * * * *")
def sync_customers() -> None:
    total(sync.expand(customer=customers()))
