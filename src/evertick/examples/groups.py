"""A group of tasks that is retried as a whole: data that belongs together is fetched together, or not at all.

`evertick dags trigger groups --wait` shows it; `python groups.py` runs it in this process, without a server.
"""

from evertick import TaskContext, dag, task, task_group


@task
def open_export(context: TaskContext) -> int:
    """The shop creates a new export for each request; here the first one is cut short."""
    return context.epoch  # rises with each attempt


@task
def count_rows(export: int) -> int:
    return 7 if export == 1 else 10


@task
def count_lines(export: int) -> int:
    return 10


@task
def compare(rows: int, lines: int) -> int:
    if rows != lines:
        raise ValueError(f"the export was cut short: {rows} rows, {lines} lines")
    return rows


# Starts once the whole group has ended, and sees only its last try.
@task
def book(rows: int) -> str:
    return f"{rows} rows booked"


@dag(tags=["example"])
def groups() -> None:
    """Fetch an export in three steps; if they do not fit together, all three run again with a new one."""
    with task_group("export", retries=2):
        export = open_export()
        rows = compare(count_rows(export), count_lines(export))
    book(rows)


if __name__ == "__main__":
    print(groups.test().states)
