"""Call an API with a token that is stored encrypted, injected only into this task, and masked in its log.

evertick secrets set shop_token
"""

import json
from urllib.request import Request, urlopen

from evertick import Param, TaskContext, dag, task


@task(secrets=["shop_token"], retries=3)
def read_orders(url: str, context: TaskContext) -> list[int]:
    request = Request(f"{url}/orders", headers={"Authorization": f"Bearer {context.secrets['shop_token']}"})
    with urlopen(request, timeout=30) as response:
        return [int(order) for order in json.load(response)]


@task
def count(orders: list[int]) -> int:
    return len(orders)


@dag(schedule="@hourly")
def read_shop(url: str = Param("https://shop.example")) -> None:
    count(read_orders(url))
