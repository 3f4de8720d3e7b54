"""Get an alert when a report is late, while it is late, even if no runner is left to run it."""

from evertick import dag, notify, task

ON_CALL = [notify.email("on-call@example.com"), notify.slack(secret="slack_url")]


@task(finish_within="30m", on_deadline=ON_CALL, timeout="1h")
def build_report() -> str:
    return "report.pdf"


@task
def send(file: str) -> None:
    print("sending", file)


@dag(schedule="0 6 * * *", timezone="Europe/Berlin", start_within="5m", finish_within="45m", on_deadline=ON_CALL)
def morning_report() -> None:
    send(build_report())
