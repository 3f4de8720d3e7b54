"""More runners on one PostgreSQL: throughput must not fall, and hardly any claim may return no task."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench.case import Bench, Raw, throughput
from bench.counted import read_events
from bench.figures import Figure, at_least, at_most, median
from bench.house import Launcher, NotMeasured, as_installed
from bench.work import Done, fill_slots, run, warm_up

_DATABASE = "bench_runners"
DATABASES = (_DATABASE,)


async def runners(bench: Bench) -> list[Figure]:
    """Each round measures every number of runners once, with default slots, after all of their processes have started."""
    rates, wasted, raws = defaultdict(list), defaultdict(list), defaultdict(list)
    facts = {}
    await bench.server.make(_DATABASE)
    for number in bench.rounds():
        for count in bench.size.runners:
            bench.say(f"round {number} of {bench.size.rounds}, {count} runners")
            folder = bench.folder / f"counts-{number}-{count}"
            folder.mkdir()
            async with bench.house(_DATABASE, runners=count, launcher=counting_runners(folder)) as house:
                await fill_slots(house, "warm")
                await warm_up(house)
                raws[count].append(bench.raw_now())
                done = await run(house, "single_warm", bench.size.singles["warm"])
                facts[count] = await bench.facts(house, "warm", done.run_ids)
            rates[count].append(done.per_second)
            wasted[count].append(wasted_share(folder, done))
    return _figures(bench, rates, wasted, raws, facts)


def counting_runners(folder: Path) -> Launcher:
    """Runners that count their exchanges; everything else as installed."""

    def launch(service: str, number: int) -> Sequence[str]:
        if service != "runner":
            return as_installed(service, number)
        return (sys.executable, "-m", "bench.counted", str(folder / f"{number}.json"), service)

    return launch


def wasted_share(folder: Path, done: Done) -> float:
    """The share of empty exchanges without reports, among exchanges that requested work while there was some.

    An exchange with reports is needed anyway, so an empty claim in it costs nothing.
    """
    first, last = done.spans[0].start, done.spans[-1].start
    events = [event for path in folder.glob("*.json") for event in read_events(path)]
    steps = [event for event in events if event.free and first <= event.at <= last]
    if not steps:
        raise NotMeasured("the runners' steps were not counted: is `finish_and_claim` still the statement that claims?")
    return 100 * sum(not step.has_reports and step.rows == 0 for step in steps) / len(steps)


def _figures(
    bench: Bench,
    rates: dict[int, list[float]],
    wasted: dict[int, list[float]],
    raws: dict[int, list[Raw]],
    facts: dict[int, dict[str, object]],
) -> list[Figure]:
    tasks = f"{bench.size.singles['warm']:,} one-task runs"
    found = [
        throughput(
            f"runners.{count}", f"{tasks}, runners: {count}", rates[count], raws[count], goal=None, facts=facts[count]
        )
        for count in rates
    ]
    first, *more = rates
    # Two equal measurements differ by about 5 %, so a smaller loss cannot be detected.
    for count in more:
        ratios = [many / one for many, one in zip(rates[count], rates[first], strict=True)]
        about = f"throughput of {count} runners ÷ that of {first}"
        found.append(median(f"runners.{count}.ratio", about, "ratio", ratios, at_least(0.95), facts[count]))
    about = "steps that asked for work while there was some and got none"
    found += [
        median(f"runners.{count}.wasted", f"{about}, runners: {count}", "%", each, at_most(5), facts[count])
        for count, each in wasted.items()
    ]
    return found
