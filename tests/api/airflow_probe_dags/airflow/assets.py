"""One DAG that updates an asset, one that runs after it, and one that waits for a second asset."""

from airflow.sdk import Asset, dag, task

orders, rates = Asset("probe_orders"), Asset("probe_rates")


@task(outlets=[orders])
def produce() -> None:
    print("produced")


@task
def consume() -> None:
    print("consumed")


@dag(schedule=None, tags=["probe"], is_paused_upon_creation=False)
def probe_producer():
    produce()


@dag(schedule=[orders], tags=["probe"], is_paused_upon_creation=False)
def probe_consumer():
    consume()


@dag(schedule=[orders, rates], tags=["probe"], is_paused_upon_creation=False)
def probe_both():
    consume()


probe_producer()
probe_consumer()
probe_both()
