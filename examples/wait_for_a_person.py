"""Ask for an approval with a form, wait for days without a slot, and use the decision."""

from typing import Any

from evertick import Param, approval, dag, notify, task


@task
def prepare() -> int:
    return 3


@task
def publish(count: int, decision: dict[str, Any]) -> str:
    return f"{count} prices to {decision['fields']['channel']}, approved by {decision['by']}"


@dag(on_failure=notify.email("pricing@example.com"))
def publish_prices() -> None:
    count = prepare()
    decision = approval(
        "Publish the new prices?",
        form={"channel": Param("beta", choices=["beta", "stable"])},
        approvers="operator",
        timeout="2d",
    )
    count >> decision
    publish(count, decision)
