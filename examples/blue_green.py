"""Blue and green: run the new implementation next to the old one, compare, and switch by a variable without a deploy.

evertick variables set pricing green
"""

from evertick import Skip, TaskContext, dag, task


@task
def rows() -> list[int]:
    return [3, 1, 2]


@task
def blue(rows: list[int]) -> list[int]:
    return sorted(rows)


@task
def green(rows: list[int]) -> list[int]:
    found = list(rows)
    found.sort()
    return found


@task
def compare(blue: list[int], green: list[int]) -> None:
    if blue != green:
        raise ValueError(f"blue returned {blue}, green {green}")


@task(variables=["pricing"], trigger_rule="all_done")
def publish(blue: list[int] | None, green: list[int] | None, context: TaskContext) -> str:
    color = context.variables["pricing"]
    chosen = {"blue": blue, "green": green}[color]
    if chosen is None:
        raise Skip(f"{color} failed")
    return f"{color}: {chosen}"


@dag(schedule="@hourly")
def pricing() -> None:
    source = rows()
    old, new = blue(source), green(source)
    compare(old, new)
    publish(old, new)
