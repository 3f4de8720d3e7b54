"""One after the other; the number of rows comes from the run's conf."""

from evertick import TaskContext, dag, task


@task
def extract(context: TaskContext) -> dict[str, int]:
    print(f"extracting {context.params.get('n', 3)} rows")
    return {"rows": context.params.get("n", 3)}


@task
def transform(batch: dict[str, int]) -> int:
    return 2 * batch["rows"]


@task
def load(rows: int) -> str:
    print(f"loading {rows} rows")
    return f"{rows} rows"


@dag(description="Extract, transform, load.", tags=["probe", "probe_etl_tag"], max_active_runs=4)
def probe_etl():
    load(transform(extract()))
