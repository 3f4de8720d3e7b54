"""One after the other; the number of rows comes from the run's conf."""

from airflow.sdk import dag, task


@task(multiple_outputs=False)
def extract(params: dict) -> dict:
    print(f"extracting {params.get('n', 3)} rows")
    return {"rows": params.get("n", 3)}


@task
def transform(batch: dict) -> int:
    return 2 * batch["rows"]


@task
def load(rows: int) -> str:
    print(f"loading {rows} rows")
    return f"{rows} rows"


@dag(
    schedule=None,
    description="Extract, transform, load.",
    tags=["probe", "probe_etl_tag"],
    max_active_runs=4,
    is_paused_upon_creation=False,
)
def probe_etl():
    load(transform(extract()))


probe_etl()
