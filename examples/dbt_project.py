"""Run a dbt project: freshness first, then the models for the day of the run, then the tests."""

from evertick import Param, dag, shell, task_group


@dag(schedule="0 4 * * *", timezone="Europe/Berlin", max_active_runs=1, task_defaults={"timeout": "1h"})
def analytics(project: str = Param("."), target: str = Param("prod", choices=["dev", "prod"])) -> None:
    fresh = shell("freshness", "cd {{ params.project }} && dbt source freshness", retries=2, retry_delay="5m")
    with task_group("build", retries=1) as build:
        models = shell("run", "cd {{ params.project }} && dbt run --target {{ params.target }} --vars day:{{ ds }}")
        models >> shell("test", "cd {{ params.project }} && dbt test --target {{ params.target }}")
    fresh >> build
