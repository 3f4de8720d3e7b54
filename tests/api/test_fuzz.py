"""The short form of `make fuzz`: a few requests of every operation of both documents, as an admin and as one other role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from evertick.domain.access import Role
from tests.api.fuzz import (
    AGENT_DOCUMENT,
    DOCUMENTS,
    Tally,
    Wish,
    agent_tokens_of,
    api_on,
    document_of,
    furnish,
    fuzz,
    token_of,
)
from tests.databases import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    cluster: Cluster, template: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[str, str, Path]]:
    """The database, the address of the API on it, and its home."""
    name = cluster.create(template)
    url = cluster.database_url(name)
    await furnish(url)
    home = tmp_path_factory.mktemp("fuzz")
    async with api_on(url, home) as address:
        yield url, address, home
    cluster.drop(name)


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("prefix", DOCUMENTS)
async def test_no_request_makes_it_fail(served: tuple[str, str, Path], prefix: str, role: Role) -> None:
    url, address, _ = served
    wish, tally, document = Wish(examples=2 if role is Role.ADMIN else 1), Tally(), document_of(prefix)
    if role is not Role.ADMIN:
        # The others share the paths: each request takes hundreds of times as long to invent as to answer.
        others = [each for each in Role if each is not Role.ADMIN]
        document["paths"] = dict([*document["paths"].items()][others.index(role) :: len(others)])
    await asyncio.to_thread(fuzz, document, f"{address}{prefix}", await token_of(url, role), wish, tally)
    assert tally.failures == []
    assert tally.operations > 10 and tally.statuses.total() >= tally.operations
    assert tally.statuses.keys() & {200, 204}, "something was answered, and not only refused"


async def test_no_request_of_an_agent_makes_it_fail(served: tuple[str, str, Path]) -> None:
    url, address, home = served
    for token in (await agent_tokens_of(url, home)).values():
        wish, tally = Wish(examples=2), Tally()
        await asyncio.to_thread(fuzz, document_of(AGENT_DOCUMENT), f"{address}{AGENT_DOCUMENT}", token, wish, tally)
        assert tally.failures == []
        assert tally.operations == 7 and 401 in tally.statuses
