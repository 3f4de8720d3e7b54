"""Being told: a task fails, a function of ours hears of it. Evertick calls the function, whatever became of the task's process.

Look at `evertick notifications list` afterwards, and at the runs of `notifications.callback.tell`.
"""

from evertick import dag, notify, task


def tell(event: dict[str, object]) -> str:
    """Runs on a runner, as the only task of a DAG of its own."""
    message = f"{event['dag']}, run {event['run']}: {event.get('task', 'the run')}: {event['event']}"
    print(message)
    return message


@task(retries=1, retry_delay="100ms", on_retry=tell)
def fetch() -> int:
    raise ConnectionError("nobody answers")


# For a real one: notify.email("ops@example.com"), notify.slack(secret="slack_url"), notify.webhook("https://…", sign_with="key").
@dag(tags=["example"], on_failure=notify.call(tell, every_time=True))
def notifications() -> None:
    """Fails on purpose, and tells."""
    fetch()
