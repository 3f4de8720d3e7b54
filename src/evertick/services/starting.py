"""From claims to orders: what a runner has claimed is looked up in its DAG version. Never starts anything itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psycopg

from evertick.domain.attempt import AttemptOrder, OutcomeKind, TaskKey
from evertick.domain.errors import EvertickError, PostgresUnavailable
from evertick.services.holding import Holding
from evertick.services.link import Link
from evertick.services.versions import Versions, order
from evertick.store.tasks import StepRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """`trouble`: the database could not be asked. Those claims went back, and the runner should pause."""

    orders: list[AttemptOrder]
    trouble: Exception | None


async def prepare(
    claims: Iterable[StepRow], *, holding: Holding, versions: Versions, link: Link, session: int
) -> Prepared:
    """The orders for these claims. What cannot be ordered has ended in `holding`, with the reason."""
    orders: list[AttemptOrder] = []
    trouble: Exception | None = None
    for claim in claims:
        key = TaskKey(claim.run_id, claim.idx, claim.map_index)
        try:
            version = versions.known(claim.version_id) or await versions.fetch(await link.get(), claim.version_id)
            orders.append(order(claim, version, session))
            task = version.spec.tasks[claim.idx]
            holding.describe(key, task.retry, f"{version.spec.name}.{task.name}")
        except (psycopg.Error, PostgresUnavailable, OSError) as error:
            # No fault of the task's: it goes back, and so that this does not go round and round, we pause.
            trouble = error
            holding.end_early(key, claim.epoch, OutcomeKind.GIVEN_BACK, _described(error))
        except (EvertickError, IndexError, ValueError) as error:
            holding.end_early(key, claim.epoch, OutcomeKind.FAILED, _described(error))
    return Prepared(orders=orders, trouble=trouble)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
