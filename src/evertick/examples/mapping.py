"""One task per region, then one report: the number of regions is known only during the run.

`evertick dags trigger mapping --wait`, then `evertick tasks list RUN` shows each instance, and
`evertick tasks clear RUN 'forecast[1]'` runs one of them again.
"""

from evertick import Skip, dag, task

HORIZONS = [7, 30]


@task
def regions() -> list[str]:
    """Returns the list that the next task expands over."""
    return ["north", "south", "west"]


# Each instance has its own retries, timeout, gates and log.
@task(retries=1, max_instances=100)
def forecast(region: str, horizon: int, unit: str) -> dict[str, object]:
    if region == "west" and horizon == 30:
        raise Skip("no history that long in the west")
    return {"region": region, "horizon": horizon, "expected": f"{len(region) * horizon} {unit}"}


# The list of all results, in the order of the instances. One that was skipped leaves no element.
@task(trigger_rule="none_failed")
def report(forecasts: list[dict[str, object]]) -> str:
    lines = [f"{each['region']} in {each['horizon']} days: {each['expected']}" for each in forecasts]
    print("\n".join(lines))
    return f"{len(lines)} forecasts"


@task
def send(text: str, to: str) -> None:
    print(f"to {to}: {text}")


@dag(tags=["example"])
def mapping() -> None:
    """One forecast for each region and horizon; started by hand."""
    # Every combination of the two lists, with `unit` the same for all.
    found = forecast.partial(unit="parcels").expand(region=regions(), horizon=HORIZONS)
    # A list of dicts names all arguments of each instance.
    send.partial(report(found)).expand_kwargs([{"to": "sales"}, {"to": "warehouse"}])
