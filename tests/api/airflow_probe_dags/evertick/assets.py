"""One DAG that updates an asset, one that runs after it, and one that waits for a second asset."""

from evertick import Asset, after, dag, task

orders, rates = Asset("probe_orders"), Asset("probe_rates")


@task(outlets=[orders])
def produce() -> None:
    print("produced")


@task
def consume() -> None:
    print("consumed")


@dag(tags=["probe"])
def probe_producer():
    produce()


@dag(schedule=after(orders), tags=["probe"])
def probe_consumer():
    consume()


@dag(schedule=after(orders, rates), tags=["probe"])
def probe_both():
    consume()
