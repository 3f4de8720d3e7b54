"""Each midnight since 2024, and paused."""

from evertick import dag, task


@task
def work() -> None:
    print("working")


@dag(schedule="0 0 * * *", start_at="2024-01-01", tags=["probe"], paused=True)
def probe_daily():
    work()
