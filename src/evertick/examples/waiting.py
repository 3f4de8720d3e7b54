"""A DAG that waits for a time, a condition, an event and an approval. It takes no slot meanwhile.

`evertick dags trigger waiting`, then `evertick events send go-now`, and `evertick approvals approve RUN ask --field copies=2`.
"""

from datetime import UTC, datetime, timedelta

from evertick import (
    Done,
    Param,
    TaskContext,
    approval,
    current_context,
    dag,
    task,
    wait_for,
    wait_for_event,
    wait_until,
)


@task.sensor(interval="1s", timeout="1h")
def even_second() -> Done | bool:
    """A condition that becomes true on its own, after a poll or two."""
    second = datetime.now(UTC).second
    return Done(second) if second % 2 == 0 else False


@task
def tell(seconds: int, event: object, decision: dict[str, object]) -> str:
    context: TaskContext = current_context()
    return f"run {context.run_id}: {seconds}, {event}, {decision['by']} wants {decision['fields']}"


@dag(params={"word": Param("now")}, tags=["example"])
def waiting() -> None:
    """Waits in every possible way, and reports the results."""
    seconds = even_second()
    event = wait_for_event("go-{params.word}", timeout="1h", name="go")
    decision = approval("Shall we?", form={"copies": Param(1, minimum=1)}, timeout="1d", name="ask")
    soon = wait_until(lambda params: datetime.now(UTC) + timedelta(seconds=0.2), name="soon")
    wait_for(0.1) >> soon >> seconds >> event >> decision >> tell(seconds, event, decision)
