"""Run a report as soon as both of its inputs are new, instead of at a guessed time."""

from evertick import Asset, after, all_of, dag, task


@task(outlets=[Asset("orders")])
def load_orders() -> int:
    return 3


@task(outlets=[Asset("rates")])
def load_rates() -> int:
    return 2


@task
def report() -> str:
    return "report"


@dag(schedule="@hourly")
def orders() -> None:
    load_orders()


@dag(schedule="0 6 * * *")
def rates() -> None:
    load_rates()


@dag(schedule=after(all_of(Asset("orders"), Asset("rates"))))
def report_when_ready() -> None:
    report()
