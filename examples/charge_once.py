"""Call a payment system at most once per task, although tasks run at least once: send the same key with each attempt."""

import json
from urllib.request import Request, urlopen

from evertick import Param, TaskContext, dag, task


@task(retries=5, retry_delay="30s", mutex="account:{params.account}")
def charge(account: str, cents: int, url: str, context: TaskContext) -> str:
    request = Request(
        url,
        json.dumps({"account": account, "cents": cents}).encode(),
        {"Content-Type": "application/json", "Idempotency-Key": context.idempotency_key},
    )
    with urlopen(request, timeout=30) as response:
        return str(json.load(response)["charge"])


@dag
def bill_account(
    account: str = Param(required=True),
    cents: int = Param(required=True, type=int, minimum=1),
    url: str = Param("https://pay.example/charges"),
) -> None:
    charge(account, cents, url)
