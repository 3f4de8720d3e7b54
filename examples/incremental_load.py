"""Load only the rows that are new, by a watermark that is stored with the data."""

import sqlite3
from contextlib import closing

from evertick import Param, Skip, dag, task


@task(retries=3, mutex="table:{params.target}")
def load(source: str, target: str) -> int:
    with closing(sqlite3.connect(source)) as read, closing(sqlite3.connect(target)) as write, write:
        write.execute("create table if not exists orders (id integer primary key, amount integer)")
        (watermark,) = write.execute("select coalesce(max(id), 0) from orders").fetchone()
        rows = read.execute("select id, amount from orders where id > ? order by id", [watermark]).fetchall()
        if not rows:
            raise Skip(f"nothing after {watermark}")
        # One transaction: a crash leaves the old watermark, and a second attempt repeats the same rows.
        write.executemany("insert into orders values (?, ?) on conflict do nothing", rows)
    return len(rows)


@task
def report(count: int) -> None:
    print(count, "new rows")


@dag(schedule="*/5 * * * *", overlap="skip")
def incremental_load(source: str = Param("shop.db"), target: str = Param("warehouse.db")) -> None:
    report(load(source, target))
