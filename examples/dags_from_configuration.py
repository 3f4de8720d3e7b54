"""One DAG per customer, from a table: the names are known when the file is loaded, so each has its own schedule."""

from evertick import dag, task

CUSTOMERS = {"north": "0 1 * * *", "south": "0 2 * * *", "west": "@hourly"}


@task(retries=2)
def export(customer: str) -> str:
    return f"exported {customer}"


def make(customer: str, schedule: str) -> None:
    @dag(name=f"export_{customer}", schedule=schedule, tags=["export", customer])
    def exporting() -> None:
        export(customer)

    exporting()


for customer, schedule in CUSTOMERS.items():
    make(customer, schedule)
