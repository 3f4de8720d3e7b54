"""Each midnight since 2024, and paused."""

from datetime import datetime, timezone

from airflow.sdk import dag, task


@task
def work() -> None:
    print("working")


@dag(
    schedule="0 0 * * *",
    start_date=datetime(2024, 1, 1, tzinfo=timezone.utc),  # noqa: UP017
    catchup=False,
    tags=["probe"],
    is_paused_upon_creation=True,
)
def probe_daily():
    work()


probe_daily()
