"""Read, clean and aggregate with pandas. Frames stay in files, and tasks pass their paths."""

from evertick import Param, dag, task


@task(retries=2)
def clean(source: str, folder: str) -> str:
    import pandas as pd

    frame = pd.read_csv(source).dropna().query("amount > 0")
    frame.to_csv(path := f"{folder}/clean.csv", index=False)
    return path


@task
def aggregate(path: str) -> dict[str, int]:
    import pandas as pd

    return {str(key): int(value) for key, value in pd.read_csv(path).groupby("region")["amount"].sum().items()}


@dag(schedule="@daily")
def sales_by_region(source: str = Param("sales.csv"), folder: str = Param(".")) -> None:
    aggregate(clean(source, folder))
