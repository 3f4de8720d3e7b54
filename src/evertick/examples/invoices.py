"""Money and dates between tasks: results keep their types, even types that JSON lacks.

`evertick dags trigger invoices --wait` runs it; `evertick tasks show RUN bill` shows what was stored.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from evertick import dag, push, task


@dataclass(frozen=True)
class Invoice:
    number: int
    total: Decimal
    due: datetime


# Two named results in addition to the return value. A declared output that is missing fails the task.
@task(outputs=["count", "newest"])
def bill() -> list[Invoice]:
    today = datetime.now(UTC).replace(microsecond=0)
    invoices = [Invoice(n, Decimal("19.90") * n, today + timedelta(days=14 + n)) for n in range(1, 4)]
    push("count", len(invoices))
    push("newest", invoices[-1])
    return invoices


@task
def add_up(invoices: list[Invoice]) -> Decimal:
    """Sums of money are exact: a Decimal stays one."""
    return sum((invoice.total for invoice in invoices), Decimal())


@task
def remind(count: int, newest: Invoice, total: Decimal) -> str:
    days = (newest.due - datetime.now(UTC)).days
    return f"{count} invoices, {total} in all; number {newest.number} is due in {days} days"


@dag(tags=["example"])
def invoices() -> None:
    """Bill, add up, remind."""
    billed = bill()
    remind(billed["count"], billed["newest"], add_up(billed))
