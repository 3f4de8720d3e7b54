"""Notifications: a task fails and a function is called. Evertick calls it, whatever happened to the task's process.

See `evertick notifications list` afterwards, and the runs of `notifications.callback.tell`.
"""

from evertick import dag, notify, task


def tell(event: dict[str, object]) -> str:
    """Runs on a runner, as the only task of a separate DAG."""
    message = f"{event['dag']}, run {event['run']}: {event.get('task', 'the run')}: {event['event']}"
    print(message)
    return message


@task(retries=1, retry_delay="100ms", on_retry=tell)
def fetch() -> int:
    raise ConnectionError("connection refused")


# In production: notify.email("ops@example.com"), notify.slack(secret="slack_url"), notify.webhook("https://…", sign_with="key").
@dag(tags=["example"], on_failure=notify.call(tell, every_time=True))
def notifications() -> None:
    """Fails on purpose, and calls `tell`."""
    fetch()
