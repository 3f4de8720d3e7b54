"""Latency of light work: a chain, the hop between two tasks, one to a hundred to one."""

from __future__ import annotations

from collections import defaultdict

from bench.case import ISOLATIONS, Bench
from bench.figures import Figure, Goal, at_most, median
from bench.house import House
from bench.work import percentile, run

_CHAIN_GOALS = {"process": at_most(0.12), "warm": at_most(0.07)}
_HOP_GOALS = {"process": at_most(2.5), "warm": at_most(1.5)}
_FAN_GOALS = {"process": at_most(0.3), "warm": at_most(0.15)}


async def chain(bench: Bench, house: House) -> list[Figure]:
    """Forty tasks in sequence, from the start of the first body to the end of the last."""
    about = "chain of 40 fib(10) tasks, first start to last end"
    return await _walls(bench, house, "chain", about, _CHAIN_GOALS)


async def fan(bench: Bench, house: House) -> list[Figure]:
    """One task, a hundred downstream tasks, and one task after them."""
    return await _walls(bench, house, "fan", "1 → 100 → 1, first start to last end", _FAN_GOALS)


async def hop(bench: Bench, house: House) -> list[Figure]:
    """The time from the end of a body to the start of its successor's, over all hops of all rounds."""
    gaps: dict[str, list[float]] = defaultdict(list)
    run_ids = {}
    for _ in bench.rounds():
        for isolation in ISOLATIONS:
            for _ in range(bench.size.chains):
                done = await run(house, f"chain_{isolation}")
                gaps[isolation] += [gap * 1000 for gap in done.gaps]
                run_ids[isolation] = done.run_ids
    found = []
    for isolation, each in gaps.items():
        facts = await bench.facts(house, isolation, run_ids[isolation]) | {"note": f"{len(each)} hops"}
        about = "hop, end of a body to start of its successor's"
        found += [
            Figure(
                name=f"hop.{isolation}.{name}",
                about=f"{about}, {name}",
                unit="ms",
                value=percentile(each, share),
                goal=goal,
                settings=facts,
            )
            for name, share, goal in (("p50", 0.5, _HOP_GOALS[isolation]), ("p99", 0.99, None))
        ]
    return found


async def envs(bench: Bench, house: House) -> list[Figure]:
    """The hop of a DAG file with dependencies of its own, divided by that of one without. Their rounds alternate."""
    await house.publish("envs.py", [f"chain_env_{isolation}" for isolation in ISOLATIONS])
    ratios: dict[str, list[float]] = defaultdict(list)
    run_ids = {}
    for _ in bench.rounds():
        for isolation in ISOLATIONS:
            gaps: dict[str, list[float]] = defaultdict(list)
            for _ in range(bench.size.chains):
                for dag in (f"chain_{isolation}", f"chain_env_{isolation}"):
                    done = await run(house, dag)
                    gaps[dag] += done.gaps
            plain, own = (percentile(each, 0.5) for each in gaps.values())
            ratios[isolation].append(own / plain)
            run_ids[isolation] = done.run_ids
    return [
        median(
            f"envs.{isolation}",
            "hop of a DAG file with an environment of its own ÷ without",
            "ratio",
            each,
            at_most(1.1),
            await bench.facts(house, isolation, run_ids[isolation]),
        )
        for isolation, each in ratios.items()
    ]


async def _walls(bench: Bench, house: House, name: str, about: str, goals: dict[str, Goal]) -> list[Figure]:
    walls = defaultdict(list)
    run_ids = {}
    for _ in bench.rounds():
        for isolation in ISOLATIONS:
            done = await run(house, f"{name}_{isolation}")
            walls[isolation].append(done.wall)
            run_ids[isolation] = done.run_ids
    return [
        median(
            f"{name}.{isolation}",
            about,
            "s",
            samples,
            goals[isolation],
            await bench.facts(house, isolation, run_ids[isolation]),
        )
        for isolation, samples in walls.items()
    ]
