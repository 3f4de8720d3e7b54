"""Wait for a message from another system, without polling it, and use its payload.

evertick events send shipment-42 --payload '{"weight": 3}'
"""

from typing import Any

from evertick import Param, dag, task, wait_for_event


@task
def book(payload: dict[str, Any], shipment: int) -> str:
    return f"shipment {shipment} weighs {payload['weight']} kg"


@dag
def receive_shipment(shipment: int = Param(required=True, type=int)) -> None:
    arrived = wait_for_event("shipment-{params.shipment}", timeout="3d", lookback="1d")
    book(arrived, shipment)
