"""Wait for a file without occupying a slot, and pass its path on."""

from pathlib import Path

from evertick import Done, Param, dag, task


@task.sensor(interval="1m", timeout="4h", on_timeout="skip")
def arrived(folder: str) -> Done | bool:
    found = sorted(Path(folder).glob("*.csv"))
    return Done(str(found[-1])) if found else False


@task
def load(path: str) -> int:
    return len(Path(path).read_text(encoding="utf-8").splitlines())


@dag(schedule="0 5 * * *")
def daily_file(folder: str = Param("/exports")) -> None:
    load(arrived(folder))
